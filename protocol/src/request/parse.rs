//! From a line to a request or to the one error that answers it. The `id` is read before everything else, so that an
//! error finds its way back to the request whatever else is wrong with the line.

use serde_json::{Map, Value};

use super::fields::{excerpt, Fault, Field, Fields, Result};
use super::generate::{read_messages, read_tools};
use super::{
    CacheAction, CacheRequest, Cancel, Detokenize, Generate, Ping, Render, Request, StatusRequest, Tokenize,
    MAX_ID_BYTES,
};
use crate::{ErrorCode, Line, RequestError};

impl Request {
    /// Reads one line, without its line end, as a runner does.
    ///
    /// # Errors
    ///
    /// `invalid_json`, `invalid_request`, `unknown_type` or `unknown_field`, with the `id` where one could be read.
    pub fn parse(line: impl AsRef<[u8]>) -> std::result::Result<Self, RequestError> {
        let envelope = Envelope::read(line.as_ref())?;
        let id = envelope.id.clone();
        envelope.request(&[]).map_err(|fault| fault.with_id(id))
    }

    /// Reads a line as it comes from a [`crate::LineReader`] with this limit.
    ///
    /// # Errors
    ///
    /// As [`Request::parse`], and `line_too_long`.
    pub fn from_line(line: &Line, limit: usize) -> std::result::Result<Self, RequestError> {
        Self::parse(readable(line, limit)?)
    }
}

/// The bytes of a line that was kept.
pub(super) fn readable(line: &Line, limit: usize) -> std::result::Result<&[u8], RequestError> {
    match line {
        Line::Text(text) => Ok(text.as_bytes()),
        Line::NotUtf8(bytes) => Ok(bytes),
        Line::TooLong { length } => Err(RequestError::line_too_long(*length, limit)),
    }
}

impl Fault {
    pub(super) fn with_id(self, id: Option<String>) -> RequestError {
        RequestError {
            id,
            code: self.code,
            message: self.message,
        }
    }
}

/// A line's object with the two members that decide how to read the rest.
pub(super) struct Envelope {
    pub(super) id: Option<String>,
    id_fault: Option<Fault>,
    pub(super) kind: String,
    map: Map<String, Value>,
}

impl Envelope {
    pub(super) fn read(line: &[u8]) -> std::result::Result<Self, RequestError> {
        let text = std::str::from_utf8(line).map_err(|_| RequestError::not_utf8(line))?;
        let value: Value = serde_json::from_str(text).map_err(|error| {
            Fault {
                code: ErrorCode::InvalidJson,
                message: format!("line is not JSON: {error}"),
            }
            .with_id(None)
        })?;
        let map = match value {
            Value::Object(map) => map,
            _ => return Err(Fault::invalid("line is JSON but not an object".to_owned()).with_id(None)),
        };
        let (id, id_fault) = match read_id(&map) {
            Ok(id) => (id, None),
            Err(fault) => (None, Some(fault)),
        };
        let kind = match map.get("type") {
            Some(Value::String(kind)) => kind.clone(),
            Some(other) => {
                let field = Field {
                    path: "type".to_owned(),
                    value: other.clone(),
                };
                return Err(field.refuse("a string").with_id(id));
            }
            None => return Err(Fault::invalid("field `type` is missing".to_owned()).with_id(id)),
        };
        Ok(Self {
            id,
            id_fault,
            kind,
            map,
        })
    }

    /// The members, refusing those outside `known`.
    pub(super) fn fields(self, known: &[&[&str]]) -> Result<(String, Fields)> {
        match (self.id_fault, self.id) {
            (Some(fault), _) => Err(fault),
            (None, None) => Err(Fault::invalid("field `id` is missing".to_owned())),
            (None, Some(id)) => Ok((id, Fields::new(String::new(), self.map, &known.concat())?)),
        }
    }

    /// The request that every program knows; `also` are members that the scheduler accepts and reads for itself.
    pub(super) fn request(self, also: &[&str]) -> Result<Request> {
        let simple = |names: &'static [&'static str]| [&["type", "id"], names, also];
        match self.kind.as_str() {
            "generate" => {
                let (id, mut fields) = self.fields(&[&Generate::FIELDS, also])?;
                Ok(Request::Generate(Box::new(Generate::read(id, &mut fields)?)))
            }
            "cancel" => {
                let (id, mut fields) = self.fields(&simple(&["target"]))?;
                Ok(Request::Cancel(Cancel {
                    id,
                    target: fields.require("target")?.string()?,
                }))
            }
            "tokenize" => {
                let (id, mut fields) = self.fields(&simple(&["text"]))?;
                Ok(Request::Tokenize(Tokenize {
                    id,
                    text: fields.require("text")?.string()?,
                }))
            }
            "detokenize" => {
                let (id, mut fields) = self.fields(&simple(&["tokens"]))?;
                Ok(Request::Detokenize(Detokenize {
                    id,
                    tokens: fields.require("tokens")?.token_ids()?,
                }))
            }
            "render" => {
                let (id, mut fields) = self.fields(&simple(&["messages", "tools", "think"]))?;
                Ok(Request::Render(Render {
                    id,
                    messages: read_messages(fields.require("messages")?)?,
                    tools: fields.take("tools").map(read_tools).transpose()?,
                    think: fields.take("think").map(Field::boolean).transpose()?,
                }))
            }
            "status" => {
                let (id, mut fields) = self.fields(&simple(&[]))?;
                let model = fields.take("model").map(Field::non_empty_string).transpose()?;
                Ok(Request::Status(StatusRequest { id, model }))
            }
            "cache" => {
                let (id, mut fields) = self.fields(&simple(&["action"]))?;
                let model = fields.take("model").map(Field::non_empty_string).transpose()?;
                let action = fields.require("action")?;
                match action.value.as_str() {
                    Some("clear") => Ok(Request::Cache(CacheRequest {
                        id,
                        action: CacheAction::Clear,
                        model,
                    })),
                    _ => Err(action.refuse("\"clear\"")),
                }
            }
            "ping" => {
                let (id, _) = self.fields(&simple(&[]))?;
                Ok(Request::Ping(Ping { id }))
            }
            "shutdown" => {
                // A host that numbers all its requests must not be left with a process that refuses to go.
                self.id_fault.map_or(Ok(()), Err)?;
                Fields::new(String::new(), self.map, &["type", "id"])?;
                Ok(Request::Shutdown)
            }
            other => Err(unknown_type(other)),
        }
    }

    /// A member that is read for its own sake before the rest, leaving it where it is.
    pub(super) fn peek(&self, name: &str) -> Option<Field> {
        let value = self.map.get(name)?.clone();
        Some(Field {
            path: name.to_owned(),
            value,
        })
    }
}

pub(super) fn unknown_type(kind: &str) -> Fault {
    Fault {
        code: ErrorCode::UnknownType,
        message: format!("unknown request type \"{}\"", excerpt(kind)),
    }
}

fn read_id(map: &Map<String, Value>) -> Result<Option<String>> {
    match map.get("id") {
        None => Ok(None),
        Some(Value::String(id)) if (1..=MAX_ID_BYTES).contains(&id.len()) => Ok(Some(id.clone())),
        Some(Value::String(id)) if id.len() > MAX_ID_BYTES => Err(Fault::invalid(format!(
            "field `id` must be a string of 1 to {MAX_ID_BYTES} bytes, got one of {}",
            id.len()
        ))),
        Some(other) => {
            let field = Field {
                path: "id".to_owned(),
                value: other.clone(),
            };
            Err(field.refuse(&format!("a string of 1 to {MAX_ID_BYTES} bytes")))
        }
    }
}
