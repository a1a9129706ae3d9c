//! Chat messages, close to the JSON they came as: what the protocol gives a meaning is typed, and every other member
//! (`tool_calls`, `name`, `reasoning_content`, …) passes through to the chat template untouched and in order.

use serde::Serialize;
use serde_json::{Map, Value};

use super::fields::{Fault, Field, Result};

/// One message of a conversation. Serialises to the JSON object that a chat template works on.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Message {
    /// Who speaks: `system`, `user`, `assistant`, `tool`, or what else the template knows. Never empty.
    pub role: String,
    /// What is said. `None` (`null` or absent) only for a message that carries `tool_calls`.
    pub content: Option<Content>,
    /// Every other member of the object, as it came.
    #[serde(flatten)]
    pub extra: Map<String, Value>,
}

/// A message's content.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum Content {
    /// Plain text.
    Text(String),
    /// Text and images in order.
    Parts(Vec<Part>),
}

/// One part of a message's content.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Part {
    /// Text.
    Text {
        /// The text.
        text: String,
    },
    /// A picture.
    Image {
        /// The base64 of a PNG, JPEG, WebP or GIF file, not yet decoded or checked.
        data: String,
    },
}

impl Message {
    /// A message of plain text.
    pub fn text(role: impl Into<String>, text: impl Into<String>) -> Self {
        Self {
            role: role.into(),
            content: Some(Content::Text(text.into())),
            extra: Map::new(),
        }
    }

    /// The base64 data of the message's images, in order.
    pub fn images(&self) -> impl Iterator<Item = &str> {
        let parts: &[Part] = match &self.content {
            Some(Content::Parts(parts)) => parts,
            Some(Content::Text(_)) | None => &[],
        };
        parts.iter().filter_map(|part| match part {
            Part::Image { data } => Some(data.as_str()),
            Part::Text { .. } => None,
        })
    }

    pub(super) fn read(field: Field) -> Result<Self> {
        let (path, mut extra) = field.map()?;
        let mut take = |name: &str| {
            let value = extra.shift_remove(name)?;
            Some(Field {
                path: format!("{path}.{name}"),
                value,
            })
        };
        let missing = |name: &str| Fault::invalid(format!("field `{path}.{name}` is missing"));
        let role = take("role").ok_or_else(|| missing("role"))?.non_empty_string()?;
        let content = take("content");
        let calls_tools = extra.get("tool_calls").is_some_and(|calls| !calls.is_null());
        let content = match content {
            None if calls_tools => None,
            None => return Err(missing("content")),
            Some(field) if field.value.is_null() && calls_tools => None,
            Some(field) => Some(Content::read(field)?),
        };
        Ok(Self { role, content, extra })
    }
}

impl Content {
    fn read(field: Field) -> Result<Self> {
        match field.value {
            Value::String(text) => Ok(Self::Text(text)),
            Value::Array(_) => Ok(Self::Parts(
                field.items()?.map(Part::read).collect::<Result<_>>()?,
            )),
            _ => Err(field.refuse("a string or an array of parts")),
        }
    }
}

impl Part {
    fn read(field: Field) -> Result<Self> {
        let (path, map) = field.map()?;
        let kind = map.get("type").cloned();
        let kind = Field {
            path: format!("{path}.type"),
            value: kind.unwrap_or(Value::Null),
        };
        let whole = Field {
            path,
            value: Value::Object(map),
        };
        match kind.value.as_str() {
            Some("text") => Ok(Self::Text {
                text: whole.object(&["type", "text"])?.require("text")?.string()?,
            }),
            Some("image") => Ok(Self::Image {
                data: whole.object(&["type", "data"])?.require("data")?.string()?,
            }),
            _ => Err(kind.refuse("\"text\" or \"image\"")),
        }
    }
}
