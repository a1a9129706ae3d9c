//! Requests, host to program. A value of these types is within every limit that the wire format itself sets: parsing is
//! the only place that checks them, and what only a model can judge (context length, image data, schemas) is left to it.

mod fields;
mod generate;
mod message;
mod options;
mod parse;
mod scheduler;

pub use generate::{Format, Generate, Input, LogprobsRequest};
pub use message::{Content, Message, Part};
pub use options::{DraftMode, DraftOptions, Options, Verify, MAX_DRAFT_DEPTH, MAX_STOPS};
pub use scheduler::{
    Forward, KeepAlive, ListModels, LoadModel, Route, SchedulerRequest, UnloadModel, DEFAULT_KEEP_ALIVE,
};

use serde::Serialize;
use serde_json::Value;

/// The longest `id` that a host may choose, in bytes.
pub const MAX_ID_BYTES: usize = 128;

/// The default limit of an input line, in bytes (256 MiB).
pub const DEFAULT_MAX_LINE_BYTES: usize = 268_435_456;

/// A request to a runner. Serialises to the line that [`Request::parse`] reads.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Request {
    /// Generate tokens.
    Generate(Box<Generate>),
    /// End another request.
    Cancel(Cancel),
    /// Text to token ids.
    Tokenize(Tokenize),
    /// Token ids to text.
    Detokenize(Detokenize),
    /// Messages to the prompt that the chat template makes of them.
    Render(Render),
    /// Ask for the program's state.
    Status(StatusRequest),
    /// Act on the prefix cache.
    Cache(CacheRequest),
    /// Ask for a sign of life.
    Ping(Ping),
    /// Cancel what runs and exit with status 0. An `id` sent with it is accepted and has no effect.
    Shutdown,
}

impl Request {
    /// The request's `id`; `shutdown` has none.
    pub fn id(&self) -> Option<&str> {
        match self {
            Self::Generate(request) => Some(&request.id),
            Self::Cancel(request) => Some(&request.id),
            Self::Tokenize(request) => Some(&request.id),
            Self::Detokenize(request) => Some(&request.id),
            Self::Render(request) => Some(&request.id),
            Self::Status(request) => Some(&request.id),
            Self::Cache(request) => Some(&request.id),
            Self::Ping(request) => Some(&request.id),
            Self::Shutdown => None,
        }
    }

    /// The request's `type`.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Generate(_) => "generate",
            Self::Cancel(_) => "cancel",
            Self::Tokenize(_) => "tokenize",
            Self::Detokenize(_) => "detokenize",
            Self::Render(_) => "render",
            Self::Status(_) => "status",
            Self::Cache(_) => "cache",
            Self::Ping(_) => "ping",
            Self::Shutdown => "shutdown",
        }
    }
}

/// `cancel`: answered with `cancelled` at once; the target ends with `done`, reason `cancelled`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Cancel {
    /// This request's own id.
    pub id: String,
    /// The id of the request to end.
    pub target: String,
}

/// `tokenize`: answered with `tokenized`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Tokenize {
    /// The request's id.
    pub id: String,
    /// Text; special tokens written in it are parsed as such. May be empty.
    pub text: String,
}

/// `detokenize`: answered with `detokenized`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Detokenize {
    /// The request's id.
    pub id: String,
    /// Token ids. May be empty.
    pub tokens: Vec<u32>,
}

/// `render`: answered with `rendered`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Render {
    /// The request's id.
    pub id: String,
    /// The conversation.
    pub messages: Vec<Message>,
    /// Tool definitions, handed to the template as they are.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tools: Option<Vec<Value>>,
    /// The template's `enable_thinking`; unset leaves the choice to the template.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub think: Option<bool>,
}

/// `status`: answered with `status`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct StatusRequest {
    /// The request's id.
    pub id: String,
    /// Scheduler only: the model whose runner is asked; unset asks the scheduler about itself. A runner refuses the field.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
}

/// `cache`: answered with `cache`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct CacheRequest {
    /// The request's id.
    pub id: String,
    /// What to do.
    pub action: CacheAction,
    /// Scheduler only: the model whose cache is meant; unset means every loaded one. A runner refuses the field.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
}

/// What a `cache` request does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CacheAction {
    /// Forget everything in every tier, disk included. What a running request needs stays until it ends.
    Clear,
}

/// `ping`: answered with `pong`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Ping {
    /// The request's id.
    pub id: String,
}
