//! Requests to jobs: rendering, tokenising, resolving options. Runs beside the engine.
//!
//! Invariant: everything that can be refused without the weights is refused here, naming the field.

use std::sync::Arc;
use std::time::Instant;

use lookahead_protocol::request::{self as wire, Generate, Input, Message, Render, Verify};
use lookahead_protocol::ErrorCode;
use serde_json::Value;

use super::job::{Job, Refusal};
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
    let Incoming { request, arrived, cancel } = incoming;
    let request = *request;
    let options = SamplingOptions::resolve(&request.options, &text.defaults)
        .map_err(|error| Refusal::new(ErrorCode::InvalidRequest, error.to_string()))?;
    let stops = StopSet::new(&options.stop)
        .map_err(|error| Refusal::new(ErrorCode::InvalidRequest, error.to_string()))?;
    let (tokens, think_open) = tokens(text, request.input)?;
    if tokens.is_empty() {
        return Err(Refusal::new(ErrorCode::EmptyPrompt, "the prompt has no token"));
    }
    let limit = options.num_ctx.unwrap_or(usize::MAX).min(text.context_length);
    if tokens.len() >= limit {
        return Err(Refusal::new(
            ErrorCode::ContextExceeded,
            format!("the prompt has {} tokens, the context length is {limit}", tokens.len()),
        ));
    }
    let budget = options.num_predict.unwrap_or(usize::MAX).min(limit - tokens.len());
    let seeded = options.seed.is_some();
    let constraint = request.format.as_ref().map(|format| constraint(text, format, think_open)).transpose()?;
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
    let start = if think_open { Start::After(THINK_CLOSE.to_owned()) } else { Start::AtOnce };
    Ok(Constraint::new(&text.constraints, &format, start)?)
}

/// Unpredictable, and different in every process: the standard library keys its hasher from the system.
fn random_seed() -> u64 {
    use std::hash::{BuildHasher, Hasher};
    let mut hasher = std::collections::hash_map::RandomState::new().build_hasher();
    hasher.write_u128(Instant::now().elapsed().as_nanos());
    hasher.finish()
}

fn tokens(text: &TextStack, input: Input) -> Result<(Vec<u32>, bool), Refusal> {
    let encode = |prompt: &str, bos: Bos| {
        text.tokenizer
            .encode(prompt, bos)
            .map_err(|error| Refusal::new(ErrorCode::InvalidRequest, error.to_string()))
    };
    match input {
        Input::Prompt { prompt, images } => {
            if !images.is_empty() {
                return Err(no_images());
            }
            let open = text.template.think_open(&prompt);
            Ok((encode(&prompt, Bos::ByRule)?, open))
        }
        Input::Messages { messages, tools, think } => {
            let prompt = render(text, &messages, tools.as_deref(), think)?;
            if messages.iter().any(|m| m.images().next().is_some()) {
                return Err(no_images());
            }
            let open = text.template.think_open(&prompt);
            Ok((encode(&prompt, Bos::Never)?, open))
        }
        Input::Tokens { tokens } => {
            let known = text.vocab_size.min(text.tokenizer.len());
            if let Some(id) = tokens.iter().find(|&&id| id as usize >= known) {
                let message = format!("`tokens`: id {id} is out of range, the model has {known} ids");
                return Err(Refusal::new(ErrorCode::InvalidRequest, message));
            }
            Ok((tokens, false))
        }
    }
}

fn no_images() -> Refusal {
    Refusal::new(ErrorCode::Unsupported, "this model takes no images")
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
        .map(serde_json::to_value)
        .collect::<Result<_, _>>()
        .map_err(|error| Refusal::new(ErrorCode::InvalidRequest, error.to_string()))?;
    let options = RenderOptions { tools, think, add_generation_prompt: true };
    text.template.render(&values, &options).map_err(|error| {
        let code = match error {
            TemplateError::NoTemplate => ErrorCode::Unsupported,
            _ => ErrorCode::InvalidRequest,
        };
        Refusal::new(code, error.to_string())
    })
}

/// Answers a `render` request.
///
/// # Errors
/// As [`render`].
pub fn rendered(text: &TextStack, request: &Render) -> Result<String, Refusal> {
    render(text, &request.messages, request.tools.as_deref(), request.think)
}
