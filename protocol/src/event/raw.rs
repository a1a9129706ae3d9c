//! Events between line and type: an event passed on through here keeps every member it had, those from a newer minor
//! version included.

use serde::de::DeserializeOwned;
use serde::Serialize;
use serde_json::{Map, Value};

use super::{Event, Tagged};

/// Why a line is no event.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EventError {
    /// The line is not UTF-8 or not JSON.
    #[error("line is not JSON: {0}")]
    NotJson(#[source] serde_json::Error),
    /// The line is JSON, but no object.
    #[error("line is JSON but not an object")]
    NotAnObject,
    /// The object has no `type`, or one that is no string.
    #[error("event has no `type`")]
    NoType,
    /// A known event lacks a member or has one of another type.
    #[error("bad {kind} event: {source}")]
    Malformed {
        /// The event's `type`.
        kind: String,
        /// What is wrong with it.
        source: serde_json::Error,
    },
}

/// An event as a JSON object that has a `type`.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(transparent)]
pub struct RawEvent {
    members: Map<String, Value>,
}

impl RawEvent {
    /// Reads one line, without its line end.
    ///
    /// # Errors
    ///
    /// The line is no JSON object with a `type`.
    pub fn parse(line: impl AsRef<[u8]>) -> Result<Self, EventError> {
        let value = serde_json::from_slice(line.as_ref()).map_err(EventError::NotJson)?;
        Self::from_value(value)
    }

    /// The same from a value that was read already.
    ///
    /// # Errors
    ///
    /// The value is no object with a `type`.
    pub fn from_value(value: Value) -> Result<Self, EventError> {
        match value {
            Value::Object(members) if members.get("type").is_some_and(Value::is_string) => {
                Ok(Self { members })
            }
            Value::Object(_) => Err(EventError::NoType),
            _ => Err(EventError::NotAnObject),
        }
    }

    /// The event's `type`.
    pub fn kind(&self) -> &str {
        self.string("type").unwrap_or_default()
    }

    /// The id of the request that the event belongs to.
    pub fn id(&self) -> Option<&str> {
        self.string("id")
    }

    /// The model that a scheduler put to the event. The `model` of a `ready` event is the model's description and not this.
    pub fn model(&self) -> Option<&str> {
        self.string("model")
    }

    /// Puts the model to the event, as a scheduler does. Leaves a `ready` event as it is, whose `model` is taken.
    pub fn set_model(&mut self, model: &str) {
        if self.kind() != "ready" {
            self.members.insert("model".to_owned(), Value::from(model));
        }
    }

    fn string(&self, name: &str) -> Option<&str> {
        self.members.get(name).and_then(Value::as_str)
    }

    /// The event's members, `type` included.
    pub fn members(&self) -> &Map<String, Value> {
        &self.members
    }

    /// The typed event; one of an unknown type becomes [`Event::Unknown`].
    ///
    /// # Errors
    ///
    /// A known type lacks a member or has one of another type.
    pub fn decode(mut self) -> Result<Tagged, EventError> {
        let kind = self.kind().to_owned();
        let read: fn(Value) -> Result<Event, serde_json::Error> = match kind.as_str() {
            "hello" => |value| read(value).map(Event::Hello),
            "load" => |value| read(value).map(Event::Load),
            "ready" => |value| read(value).map(Event::Ready),
            "prompt" => |value| read(value).map(Event::Prompt),
            "prefill" => |value| read(value).map(Event::Prefill),
            "token" => |value| read(value).map(Event::Token),
            "done" => |value| read(value).map(Event::Done),
            "error" => |value| read(value).map(Event::Error),
            "tokenized" => |value| read(value).map(Event::Tokenized),
            "detokenized" => |value| read(value).map(Event::Detokenized),
            "rendered" => |value| read(value).map(Event::Rendered),
            "cancelled" => |value| read(value).map(Event::Cancelled),
            "pong" => |value| read(value).map(Event::Pong),
            "status" => |value| read(value).map(Event::Status),
            "cache" => |value| read(value).map(Event::Cache),
            "loaded" => |value| read(value).map(Event::Loaded),
            "unloaded" => |value| read(value).map(Event::Unloaded),
            "models" => |value| read(value).map(Event::Models),
            _ => {
                let model = self.model().map(str::to_owned);
                if model.is_some() {
                    self.members.shift_remove("model");
                }
                return Ok(Tagged {
                    event: Event::Unknown(self),
                    model,
                });
            }
        };
        let model = self.model().map(str::to_owned);
        let event =
            read(Value::Object(self.members)).map_err(|source| EventError::Malformed { kind, source })?;
        Ok(Tagged { event, model })
    }
}

fn read<T: DeserializeOwned>(value: Value) -> Result<T, serde_json::Error> {
    serde_json::from_value(value)
}
