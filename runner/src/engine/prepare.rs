//! Requests to jobs: rendering, tokenising, resolving options. Runs beside the engine.
//!
//! Invariant: everything that can be refused without the weights is refused here, naming the field.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Instant;

use lookahead_protocol::request::{self as wire, Content, Generate, Input, Message, Part, Render, Verify};
use lookahead_protocol::ErrorCode;
use serde_json::Value;

use super::job::{Job, Refusal};
use super::media::{self, Picture};
use super::text::TextStack;
use crate::host::registry::CancelFlag;
use crate::sample::constraint::{Constraint, Format, Start};
use crate::sample::SamplingOptions;
use crate::text::{Bos, RenderOptions, StopSet, TemplateError, THINK_CLOSE};

/// A request as it came in.
#[derive(Debug)]
pub struct Incoming {
    /// The request.
    pub request: Box<Generate>,
    /// When it arrived.
    pub arrived: Instant,
    /// Asks it to end.
    pub cancel: CancelFlag,
}

/// Makes a request ready.
///
/// # Errors
/// The request can't be served; the code says why.
pub fn prepare(text: &TextStack, incoming: Incoming) -> Result<Job, Refusal> {
    let Incoming {
        request,
        arrived,
        cancel,
    } = incoming;
    let request = *request;
    let options = SamplingOptions::resolve(&request.options, &text.defaults)
        .map_err(|error| Refusal::new(ErrorCode::InvalidRequest, error.to_string()))?;
    let stops = StopSet::new(&options.stop)
        .map_err(|error| Refusal::new(ErrorCode::InvalidRequest, error.to_string()))?;
    let (tokens, pictures, think_open) = tokens(text, request.input)?;
    if tokens.is_empty() {
        return Err(Refusal::new(ErrorCode::EmptyPrompt, "the prompt has no token"));
    }
    let limit = options.num_ctx.unwrap_or(usize::MAX).min(text.context_length);
    if tokens.len() >= limit {
        return Err(Refusal::new(
            ErrorCode::ContextExceeded,
            format!(
                "the prompt has {} tokens, the context length is {limit}",
                tokens.len()
            ),
        ));
    }
    let budget = options
        .num_predict
        .unwrap_or(usize::MAX)
        .min(limit - tokens.len());
    let seeded = options.seed.is_some();
    let constraint = request
        .format
        .as_ref()
        .map(|format| constraint(text, format, think_open))
        .transpose()?;
    // Drafts that the grammar forbids are dropped unseen. The coupled rule yields the target's own choices whatever was
    // drafted, while the residual of the rejection rule would have to know what was dropped.
    let verify = match (&constraint, request.draft.verify) {
        (Some(_), _) => Verify::Coupled,
        (None, Some(rule)) => rule,
        (None, None) if seeded => Verify::Coupled,
        (None, None) => Verify::Rejection,
    };
    Ok(Job {
        id: request.id,
        arrived,
        cancel,
        tokens,
        pictures,
        seed: options.seed.unwrap_or_else(random_seed),
        stops: Arc::new(stops),
        budget,
        options,
        draft: request.draft,
        verify,
        constraint,
        logprobs: request.logprobs.map(|wanted| usize::from(wanted.top)),
        cache: request.cache,
        progress: request.progress,
    })
}

fn constraint(text: &TextStack, format: &wire::Format, think_open: bool) -> Result<Constraint, Refusal> {
    let format = match format {
        wire::Format::Json => Format::Json,
        wire::Format::Schema(schema) => Format::Schema(Value::Object(schema.clone())),
        wire::Format::Grammar(grammar) => Format::Lark(grammar.clone()),
        wire::Format::Regex(regex) => Format::Regex(regex.clone()),
    };
    let start = if think_open {
        Start::After(THINK_CLOSE.to_owned())
    } else {
        Start::AtOnce
    };
    Ok(Constraint::new(&text.constraints, &format, start)?)
}

/// Unpredictable, and different in every process: the standard library keys its hasher from the system.
fn random_seed() -> u64 {
    use std::hash::{BuildHasher, Hasher};
    let mut hasher = std::collections::hash_map::RandomState::new().build_hasher();
    hasher.write_u128(Instant::now().elapsed().as_nanos());
    hasher.finish()
}

fn tokens(text: &TextStack, input: Input) -> Result<(Vec<u32>, Vec<Picture>, bool), Refusal> {
    let encode = |prompt: &str, bos: Bos| {
        text.tokenizer
            .encode(prompt, bos)
            .map_err(|error| Refusal::new(ErrorCode::InvalidRequest, error.to_string()))
    };
    match input {
        Input::Prompt { prompt, images } => {
            let open = text.template.think_open(&prompt);
            let images: Vec<&str> = images.iter().map(String::as_str).collect();
            let (tokens, pictures) =
                media::place(text.pictures.as_ref(), encode(&prompt, Bos::ByRule)?, &images)?;
            Ok((tokens, pictures, open))
        }
        Input::Messages {
            messages,
            tools,
            think,
        } => {
            let images: Vec<&str> = messages.iter().flat_map(Message::images).collect();
            if !images.is_empty() && text.pictures.is_none() {
                // Said before the template runs: one that knows no pictures fails with less to the point.
                return Err(media::no_images());
            }
            let prompt = render(text, &messages, tools.as_deref(), think)?;
            let open = text.template.think_open(&prompt);
            let (tokens, pictures) =
                media::place(text.pictures.as_ref(), encode(&prompt, Bos::Never)?, &images)?;
            Ok((tokens, pictures, open))
        }
        Input::Tokens { tokens } => {
            let known = text.vocab_size.min(text.tokenizer.len());
            if let Some(id) = tokens.iter().find(|&&id| id as usize >= known) {
                let message = format!("`tokens`: id {id} is out of range, the model has {known} ids");
                return Err(Refusal::new(ErrorCode::InvalidRequest, message));
            }
            Ok((tokens, Vec::new(), false))
        }
    }
}

/// Renders a conversation with the checkpoint's template.
///
/// # Errors
/// There is no template, or it refuses the messages.
pub fn render(
    text: &TextStack,
    messages: &[Message],
    tools: Option<&[Value]>,
    think: Option<bool>,
) -> Result<String, Refusal> {
    let values: Vec<Value> = messages
        .iter()
        .map(|message| serde_json::to_value(plain(message)))
        .collect::<Result<_, _>>()
        .map_err(|error| Refusal::new(ErrorCode::InvalidRequest, error.to_string()))?;
    let options = RenderOptions {
        tools,
        think,
        add_generation_prompt: true,
    };
    text.template.render(&values, &options).map_err(|error| {
        let code = match error {
            TemplateError::NoTemplate => ErrorCode::Unsupported,
            _ => ErrorCode::InvalidRequest,
        };
        Refusal::new(code, error.to_string())
    })
}

/// The message with content of text parts only as one string, which every template takes; those that take parts put their
/// texts together just so.
fn plain(message: &Message) -> Cow<'_, Message> {
    let Some(Content::Parts(parts)) = &message.content else {
        return Cow::Borrowed(message);
    };
    let texts: Option<String> = parts
        .iter()
        .map(|part| match part {
            Part::Text { text } => Some(text.as_str()),
            Part::Image { .. } => None,
        })
        .collect();
    match texts {
        Some(text) => Cow::Owned(Message {
            content: Some(Content::Text(text)),
            ..message.clone()
        }),
        None => Cow::Borrowed(message),
    }
}

/// Answers a `render` request.
///
/// # Errors
/// As [`render`].
pub fn rendered(text: &TextStack, request: &Render) -> Result<String, Refusal> {
    render(text, &request.messages, request.tools.as_deref(), request.think)
}
