//! Requests to the scheduler: a runner's requests with a route beside those that a model answers, and the three that
//! manage models. Stripping the route gives exactly the request that the runner gets.

use std::time::Duration;

use serde::{Serialize, Serializer};

use super::fields::{Field, Result};
use super::parse::{readable, unknown_type, Envelope};
use super::{CacheRequest, Cancel, Ping, Request, StatusRequest};
use crate::{Line, RequestError};

/// How long an idle model stays loaded where nobody said: 300 seconds.
pub const DEFAULT_KEEP_ALIVE: KeepAlive = KeepAlive::For(Duration::from_secs(300));

/// A request to the scheduler. Serialises to the line that [`SchedulerRequest::parse`] reads.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum SchedulerRequest {
    /// End another request, in whatever state it is.
    Cancel(Cancel),
    /// Ask for the state of the scheduler, or of one model's runner.
    Status(StatusRequest),
    /// Act on the prefix cache of one model, or of all loaded ones.
    Cache(CacheRequest),
    /// Ask for a sign of life.
    Ping(Ping),
    /// Load a model; answered with `loaded` once it is ready.
    Load(LoadModel),
    /// Unload a model; answered with `unloaded`.
    Unload(UnloadModel),
    /// Ask for every model that the scheduler knows; answered with `models`.
    List(ListModels),
    /// Cancel what runs, end every runner and exit with status 0.
    Shutdown,
    /// `generate`, `tokenize`, `detokenize` or `render`: for the runner of one model.
    #[serde(untagged)]
    Forward(Forward),
}

/// A request with the model that it is for.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Forward {
    /// What the runner is sent: always `generate`, `tokenize`, `detokenize` or `render`.
    #[serde(flatten)]
    pub request: Request,
    /// Where it goes.
    #[serde(flatten)]
    pub route: Route,
}

/// Where a request goes and what happens to the model after it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Route {
    /// A directory, a GGUF file or a configured name. Whether a request may leave it out is the scheduler's decision,
    /// which answers `no_model`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    /// How long the model stays loaded after its last request; unset leaves what was said before, at first
    /// [`DEFAULT_KEEP_ALIVE`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub keep_alive: Option<KeepAlive>,
}

/// How long an idle model stays loaded: on the wire a number of seconds, whole or not, or -1 for ever.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeepAlive {
    /// Until it is unloaded or its memory is needed.
    Forever,
    /// This long after its last request; zero unloads at once.
    For(Duration),
}

/// `load`: answered with `loaded` or `error`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct LoadModel {
    /// The request's id.
    pub id: String,
    /// A directory, a GGUF file or a configured name.
    pub model: String,
    /// As in [`Route::keep_alive`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub keep_alive: Option<KeepAlive>,
}

/// `unload`: answered with `unloaded` or `error`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct UnloadModel {
    /// The request's id.
    pub id: String,
    /// A directory, a GGUF file or a configured name.
    pub model: String,
}

/// `list`: answered with `models`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ListModels {
    /// The request's id.
    pub id: String,
}

impl SchedulerRequest {
    /// Reads one line, without its line end, as the scheduler does.
    ///
    /// # Errors
    ///
    /// `invalid_json`, `invalid_request`, `unknown_type` or `unknown_field`, with the `id` where one could be read.
    pub fn parse(line: impl AsRef<[u8]>) -> std::result::Result<Self, RequestError> {
        let envelope = Envelope::read(line.as_ref())?;
        let id = envelope.id.clone();
        Self::from_envelope(envelope).map_err(|fault| fault.with_id(id))
    }

    /// Reads a line as it comes from a [`crate::LineReader`] with this limit.
    ///
    /// # Errors
    ///
    /// As [`SchedulerRequest::parse`], and `line_too_long`.
    pub fn from_line(line: &Line, limit: usize) -> std::result::Result<Self, RequestError> {
        Self::parse(readable(line, limit)?)
    }

    fn from_envelope(envelope: Envelope) -> Result<Self> {
        match envelope.kind.as_str() {
            "load" => {
                let (id, mut fields) = envelope.fields(&[&["type", "id", "model", "keep_alive"]])?;
                let model = fields.require("model")?.non_empty_string()?;
                let keep_alive = fields.take("keep_alive").map(KeepAlive::read).transpose()?;
                Ok(Self::Load(LoadModel {
                    id,
                    model,
                    keep_alive,
                }))
            }
            "unload" => {
                let (id, mut fields) = envelope.fields(&[&["type", "id", "model"]])?;
                Ok(Self::Unload(UnloadModel {
                    id,
                    model: fields.require("model")?.non_empty_string()?,
                }))
            }
            "list" => {
                let (id, _) = envelope.fields(&[&["type", "id"]])?;
                Ok(Self::List(ListModels { id }))
            }
            "generate" | "tokenize" | "detokenize" | "render" => {
                let (model, keep_alive) = (envelope.peek("model"), envelope.peek("keep_alive"));
                let request = envelope.request(&["model", "keep_alive"])?;
                let model = model.map(Field::non_empty_string).transpose()?;
                let keep_alive = keep_alive.map(KeepAlive::read).transpose()?;
                Ok(Self::Forward(Forward {
                    request,
                    route: Route { model, keep_alive },
                }))
            }
            "status" | "cache" => Self::from_control(envelope.request(&["model"])?),
            _ => Self::from_control(envelope.request(&[])?),
        }
    }

    fn from_control(request: Request) -> Result<Self> {
        match request {
            Request::Cancel(request) => Ok(Self::Cancel(request)),
            Request::Status(request) => Ok(Self::Status(request)),
            Request::Cache(request) => Ok(Self::Cache(request)),
            Request::Ping(request) => Ok(Self::Ping(request)),
            Request::Shutdown => Ok(Self::Shutdown),
            Request::Generate(_) | Request::Tokenize(_) | Request::Detokenize(_) | Request::Render(_) => {
                Err(unknown_type(request.kind()))
            }
        }
    }

    /// The request's `id`; `shutdown` has none.
    pub fn id(&self) -> Option<&str> {
        match self {
            Self::Forward(forward) => forward.request.id(),
            Self::Cancel(request) => Some(&request.id),
            Self::Status(request) => Some(&request.id),
            Self::Cache(request) => Some(&request.id),
            Self::Ping(request) => Some(&request.id),
            Self::Load(request) => Some(&request.id),
            Self::Unload(request) => Some(&request.id),
            Self::List(request) => Some(&request.id),
            Self::Shutdown => None,
        }
    }
}

impl KeepAlive {
    fn read(field: Field) -> Result<Self> {
        const EXPECTED: &str = "a number of seconds, or -1 for ever";
        match field.value.as_f64() {
            Some(-1.0) => Ok(Self::Forever),
            Some(seconds) => Duration::try_from_secs_f64(seconds)
                .map(Self::For)
                .map_err(|_| field.refuse(EXPECTED)),
            None => Err(field.refuse(EXPECTED)),
        }
    }
}

impl Serialize for KeepAlive {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        match self {
            Self::Forever => serializer.serialize_i64(-1),
            Self::For(time) if time.subsec_nanos() == 0 => serializer.serialize_u64(time.as_secs()),
            Self::For(time) => serializer.serialize_f64(time.as_secs_f64()),
        }
    }
}
