//! The checkpoint's chat template.
//!
//! Invariant: a prompt is byte for byte what the publisher's tooling (transformers' `apply_chat_template`) renders from
//! the same messages: same template source, same whitespace rules, Python's string methods, slices and JSON. Whatever a
//! checkpoint or a host gets wrong is a [`TemplateError`], never a panic.

use std::fmt;
use std::path::Path;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Serde, Value as JinjaValue, ValueKind};
use minijinja::{Environment, Error, ErrorKind, State};
use serde_json::{json, Value};

use super::clock::local_time;
use super::messages::for_template;
use super::python_json::{dumps, python_float, Style};
use super::template_source::TemplateSource;
use super::tokenizer::{token_text, Tokenizer};
use super::turns::TurnMarkers;

/// The tag that closes a think block; a constraint on a thinking model's answer begins behind it.
pub const THINK_CLOSE: &str = "</think>";
const TOOL_USE: &str = "tool_use";
const DEFAULT: &str = "default";
const THINK_OPEN: &str = "<think>";
const TOKEN_VARIABLES: [&str; 4] = ["bos_token", "eos_token", "pad_token", "unk_token"];

/// Why messages can't be rendered. Only [`TemplateError::NoTemplate`] is a matter of what the model supports; the others
/// are about the messages or the template's text.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TemplateError {
    /// The checkpoint has no chat template; raw prompts still work.
    #[error("the model has no chat template, send a prompt instead of messages")]
    NoTemplate,
    /// A file that should hold the template can't be used.
    #[error("chat template: {file} is invalid: {reason}")]
    Source {
        /// The file's name.
        file: String,
        /// What is wrong with it.
        reason: String,
    },
    /// The template's text isn't valid Jinja.
    #[error("chat template: syntax error in line {line}: {reason}")]
    Syntax {
        /// Line in the template, from 1; 0 where unknown.
        line: usize,
        /// What the parser expected.
        reason: String,
    },
    /// The template refused the messages itself.
    #[error("chat template: {message} (line {line})")]
    Raised {
        /// Line in the template, from 1; 0 where unknown.
        line: usize,
        /// The template's own message.
        message: String,
    },
    /// An operation in the template failed on the messages.
    #[error("chat template: error in line {line}: {reason}")]
    Render {
        /// Line in the template, from 1; 0 where unknown.
        line: usize,
        /// What failed.
        reason: String,
    },
}

/// What a render depends on besides the messages.
#[derive(Debug, Clone, Copy)]
pub struct RenderOptions<'a> {
    /// Tool definitions, handed to the template as they are.
    pub tools: Option<&'a [Value]>,
    /// The template's `enable_thinking`; unset leaves the variable undefined, so that the template's default holds.
    pub think: Option<bool>,
    /// Whether to end with the header of the assistant's turn.
    pub add_generation_prompt: bool,
}

impl Default for RenderOptions<'_> {
    fn default() -> Self {
        Self {
            tools: None,
            think: None,
            add_generation_prompt: true,
        }
    }
}

/// A chat template, compiled, or the reason why there is none.
pub struct ChatTemplate {
    environment: Result<Environment<'static>, TemplateError>,
    tokens: Vec<(&'static str, String)>,
    markers: TurnMarkers,
    turn_start: Option<String>,
}

impl fmt::Debug for ChatTemplate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ChatTemplate")
            .field("error", &self.error())
            .field("tokens", &self.tokens)
            .field("markers", &self.markers)
            .finish_non_exhaustive()
    }
}

/// Marks errors that the template raised itself.
#[derive(Debug)]
struct Raised;

impl fmt::Display for Raised {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("raised by the template")
    }
}

impl std::error::Error for Raised {}

impl ChatTemplate {
    /// Loads a model directory's template: `chat_template.jinja`, else `chat_template.json`, else `chat_template` in
    /// `tokenizer_config.json`. Never fails: what's wrong is reported by [`ChatTemplate::error`] and every render.
    #[must_use]
    pub fn load(dir: &Path, tokenizer: &Tokenizer) -> Self {
        Self::new(TemplateSource::find(dir, tokenizer.config()), tokenizer)
    }

    /// A template from its text.
    #[must_use]
    pub fn from_source(source: &str, tokenizer: &Tokenizer) -> Self {
        Self::new(Ok(TemplateSource::single(source)), tokenizer)
    }

    fn new(source: Result<TemplateSource, TemplateError>, tokenizer: &Tokenizer) -> Self {
        let tokens = TOKEN_VARIABLES
            .iter()
            .filter_map(|name| Some((*name, token_text(tokenizer.config(), name)?)))
            .collect();
        let mut template = Self {
            environment: source.and_then(|source| compile(&source)),
            tokens,
            markers: TurnMarkers::default(),
            turn_start: None,
        };
        let probe = |messages: &[Value]| template.render(messages, &RenderOptions::default()).ok();
        template.markers = TurnMarkers::probe(probe, tokenizer);
        template.turn_start = template
            .markers
            .start()
            .and_then(|id| tokenizer.token_bytes(id))
            .map(|bytes| String::from_utf8_lossy(bytes).into_owned());
        template
    }

    /// Why nothing can be rendered, if so.
    #[must_use]
    pub fn error(&self) -> Option<&TemplateError> {
        self.environment.as_ref().err()
    }

    /// Renders messages (objects with `role`, `content` and whatever else the template reads).
    ///
    /// `content` may be a string or an array of parts; image parts reach the template as `{"type":"image"}` without
    /// their data. Arguments of tool calls that are JSON in a string are handed on parsed, since templates iterate them.
    ///
    /// # Errors
    /// Every [`TemplateError`]; those of loading come back on each call.
    pub fn render(&self, messages: &[Value], options: &RenderOptions<'_>) -> Result<String, TemplateError> {
        let environment = self.environment.as_ref().map_err(Clone::clone)?;
        let mut variables = json!({
            "messages": messages.iter().map(for_template).collect::<Vec<_>>(),
            "tools": options.tools,
            "documents": null,
            "add_generation_prompt": options.add_generation_prompt,
        });
        for (name, text) in &self.tokens {
            variables[*name] = json!(text);
        }
        if let Some(think) = options.think {
            variables["enable_thinking"] = json!(think);
        }
        let tool_use = options
            .tools
            .and_then(|_| environment.get_template(TOOL_USE).ok());
        let rendered = match tool_use {
            Some(template) => template.render(JinjaValue::from(Serde(&variables))),
            None => environment
                .get_template(DEFAULT)
                .and_then(|template| template.render(JinjaValue::from(Serde(&variables)))),
        };
        rendered.map_err(|error| classify(&error))
    }

    /// Whether a prompt ends inside a think block, so that the output starts there and has its closing tag only.
    ///
    /// Only the last turn counts: a tag that a user wrote earlier opens nothing.
    #[must_use]
    pub fn think_open(&self, prompt: &str) -> bool {
        let last_turn = self
            .turn_start
            .as_deref()
            .and_then(|start| prompt.rfind(start))
            .map_or(0, |at| at);
        let tail = &prompt[last_turn..];
        match (tail.rfind(THINK_OPEN), tail.rfind(THINK_CLOSE)) {
            (Some(opened), Some(closed)) => opened > closed,
            (opened, _) => opened.is_some(),
        }
    }

    /// The tokens that the template puts around turns.
    #[must_use]
    pub fn turn_markers(&self) -> &TurnMarkers {
        &self.markers
    }
}

fn compile(source: &TemplateSource) -> Result<Environment<'static>, TemplateError> {
    let mut environment = Environment::new();
    let syntax = SyntaxConfig::builder()
        .trim_blocks(true)
        .lstrip_blocks(true)
        .build();
    let unusable = |error: &Error| TemplateError::Syntax {
        line: error.line().unwrap_or(0),
        reason: reason(error),
    };
    environment.set_syntax(syntax.map_err(|error| unusable(&error))?);
    environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    environment.set_formatter(|out, state, value| match float_repr(value) {
        Some(text) => out.write_str(&text).map_err(Error::from),
        None => minijinja::escape_formatter(out, state, value),
    });
    environment.add_filter(
        "string",
        |state: &State<'_, '_>, value: &JinjaValue| match float_repr(value) {
            Some(text) => Ok(JinjaValue::from(text)),
            None => minijinja::filters::string(state, value),
        },
    );
    environment.add_filter("tojson", tojson);
    environment.add_function("raise_exception", raise_exception);
    environment.add_function("strftime_now", |format: &str| local_time(format));
    for (name, text) in source.templates() {
        environment
            .add_template_owned(name.to_owned(), text.to_owned())
            .map_err(|error| unusable(&error))?;
    }
    Ok(environment)
}

fn raise_exception(message: String) -> Result<JinjaValue, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, message).with_source(Raised))
}

/// A float as Python prints it; none for any other value, which Jinja prints as Python does already.
fn float_repr(value: &JinjaValue) -> Option<String> {
    let is_float = value.kind() == ValueKind::Number && !value.is_integer();
    is_float
        .then(|| f64::try_from(value.clone()).ok())
        .flatten()
        .map(python_float)
}

/// `tojson` with the arguments that transformers gives it.
fn tojson(value: &JinjaValue, arguments: Kwargs) -> Result<JinjaValue, Error> {
    if value.is_undefined() {
        return Err(Error::new(
            ErrorKind::InvalidOperation,
            "tojson of an undefined value",
        ));
    }
    let mut style = Style::new(arguments.get::<Option<usize>>("indent")?);
    style.ensure_ascii = arguments.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false);
    style.sort_keys = arguments.get::<Option<bool>>("sort_keys")?.unwrap_or(false);
    if let Some(separators) = arguments.get::<Option<Vec<String>>>("separators")? {
        if let [item, key] = separators.as_slice() {
            style.item_separator.clone_from(item);
            style.key_separator.clone_from(key);
        }
    }
    arguments.assert_all_used()?;
    let value = serde_json::to_value(value)
        .map_err(|error| Error::new(ErrorKind::InvalidOperation, format!("tojson: {error}")))?;
    Ok(JinjaValue::from_safe_string(dumps(&value, &style)))
}

/// The innermost cause is the one that says what went wrong; the line is the outermost, in the template itself.
fn classify(error: &Error) -> TemplateError {
    let line = error.line().unwrap_or(0);
    let mut cause: &(dyn std::error::Error + 'static) = error;
    let mut innermost = error;
    while let Some(next) = cause.source() {
        if next.is::<Raised>() {
            return TemplateError::Raised {
                line,
                message: reason(innermost),
            };
        }
        if let Some(next) = next.downcast_ref() {
            innermost = next;
        }
        cause = next;
    }
    TemplateError::Render {
        line,
        reason: reason(innermost),
    }
}

fn reason(error: &Error) -> String {
    match error.detail() {
        Some(detail) => detail.to_owned(),
        None => error.kind().to_string(),
    }
}

#[cfg(test)]
#[path = "template_tests.rs"]
mod tests;
