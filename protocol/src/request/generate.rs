//! The `generate` request: exactly one kind of input, with only the members that belong to that kind.

use serde::{Serialize, Serializer};
use serde_json::{Map, Value};

use super::fields::{Fault, Field, Fields, Result};
use super::{DraftOptions, Message, Options, Verify};
use crate::ErrorCode;

/// A request for tokens.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Generate {
    /// The request's id.
    pub id: String,
    /// What to continue.
    #[serde(flatten)]
    pub input: Input,
    /// Sampling options.
    #[serde(skip_serializing_if = "Options::is_unset")]
    pub options: Options,
    /// Drafting options.
    #[serde(skip_serializing_if = "DraftOptions::is_unset")]
    pub draft: DraftOptions,
    /// Constraint on the output.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub format: Option<Format>,
    /// Log-probabilities with every token, where asked for.
    #[serde(flatten, serialize_with = "write_logprobs")]
    pub logprobs: Option<LogprobsRequest>,
    /// Read and write the prefix cache. Default true.
    #[serde(skip_serializing_if = "is_true")]
    pub cache: bool,
    /// Send `prefill` events. Default false.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub progress: bool,
}

/// What a request continues. None of the three kinds is checked for being empty here: whether a prompt has a token is
/// known after the tokenizer, which answers `empty_prompt`.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(untagged)]
pub enum Input {
    /// Raw text.
    Prompt {
        /// The text; the tokenizer's own BOS rule applies, and special tokens written in it are parsed as such.
        prompt: String,
        /// Base64 picture files, one per image placeholder in the text, in order; not yet decoded or checked.
        #[serde(skip_serializing_if = "Vec::is_empty")]
        images: Vec<String>,
    },
    /// A conversation, for the checkpoint's chat template.
    Messages {
        /// The conversation.
        messages: Vec<Message>,
        /// Tool definitions, handed to the template as they are.
        #[serde(skip_serializing_if = "Option::is_none")]
        tools: Option<Vec<Value>>,
        /// The template's `enable_thinking`; unset leaves the choice to the template.
        #[serde(skip_serializing_if = "Option::is_none")]
        think: Option<bool>,
    },
    /// Token ids, used as they are.
    Tokens {
        /// The ids. Whether the model has them is for the model to say.
        tokens: Vec<u32>,
    },
}

/// A constraint on the output. Whether it compiles is not checked here.
#[derive(Debug, Clone, PartialEq)]
pub enum Format {
    /// Any JSON value: `"json"`.
    Json,
    /// JSON that satisfies this JSON Schema: an object without `grammar` and `regex` members.
    Schema(Map<String, Value>),
    /// A Lark grammar: `{"grammar": "…"}`.
    Grammar(String),
    /// A regular expression: `{"regex": "…"}`.
    Regex(String),
}

/// How many log-probabilities a request wants.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LogprobsRequest {
    /// The most probable tokens to list beside each chosen one, 0 to 20.
    pub top: u8,
}

impl Generate {
    pub(super) const FIELDS: [&'static str; 15] = [
        "type",
        "id",
        "prompt",
        "messages",
        "tokens",
        "images",
        "tools",
        "think",
        "options",
        "draft",
        "format",
        "logprobs",
        "top_logprobs",
        "cache",
        "progress",
    ];

    /// A request with every option at its default.
    pub fn new(id: impl Into<String>, input: Input) -> Self {
        Self {
            id: id.into(),
            input,
            options: Options::default(),
            draft: DraftOptions::default(),
            format: None,
            logprobs: None,
            cache: true,
            progress: false,
        }
    }

    /// The acceptance rule: the one asked for, else coupled where a seed is given and rejection otherwise.
    pub fn verify(&self) -> Verify {
        let unnamed = if self.options.seed.is_some() {
            Verify::Coupled
        } else {
            Verify::Rejection
        };
        self.draft.verify.unwrap_or(unnamed)
    }

    pub(super) fn read(id: String, fields: &mut Fields) -> Result<Self> {
        Ok(Self {
            id,
            input: Input::read(fields)?,
            options: fields
                .take("options")
                .map(Options::read)
                .transpose()?
                .unwrap_or_default(),
            draft: fields
                .take("draft")
                .map(DraftOptions::read)
                .transpose()?
                .unwrap_or_default(),
            format: fields.take("format").map(Format::read).transpose()?.flatten(),
            logprobs: LogprobsRequest::read(fields)?,
            cache: fields.take("cache").map_or(Ok(true), Field::boolean)?,
            progress: fields.take("progress").map_or(Ok(false), Field::boolean)?,
        })
    }
}

impl Input {
    /// Plain text without images.
    pub fn prompt(text: impl Into<String>) -> Self {
        Self::Prompt {
            prompt: text.into(),
            images: Vec::new(),
        }
    }

    /// A conversation without tools.
    pub fn messages(messages: Vec<Message>) -> Self {
        Self::Messages {
            messages,
            tools: None,
            think: None,
        }
    }

    fn read(fields: &mut Fields) -> Result<Self> {
        let images = fields.take("images").map(|field| (field.path.clone(), field));
        let tools = fields.take("tools");
        let think = fields.take("think");
        let only_with = |field: &str, kind: &str| {
            Err(Fault::invalid(format!(
                "field `{field}` is only allowed together with `{kind}`"
            )))
        };
        match (
            fields.take("prompt"),
            fields.take("messages"),
            fields.take("tokens"),
        ) {
            (Some(_), None, None) | (None, None, Some(_)) if tools.is_some() => {
                only_with("tools", "messages")
            }
            (Some(_), None, None) | (None, None, Some(_)) if think.is_some() => {
                only_with("think", "messages")
            }
            (None, Some(_), None) | (None, None, Some(_)) if images.is_some() => {
                only_with("images", "prompt")
            }
            (Some(prompt), None, None) => Ok(Self::Prompt {
                prompt: prompt.string()?,
                images: images
                    .map(|(_, field)| field.strings())
                    .transpose()?
                    .unwrap_or_default(),
            }),
            (None, Some(messages), None) => Ok(Self::Messages {
                messages: read_messages(messages)?,
                tools: tools.map(read_tools).transpose()?,
                think: think.map(Field::boolean).transpose()?,
            }),
            (None, None, Some(tokens)) => Ok(Self::Tokens {
                tokens: tokens.token_ids()?,
            }),
            (None, None, None) => Err(Fault::invalid(
                "one of the fields `prompt`, `messages`, `tokens` is required".to_owned(),
            )),
            (prompt, messages, tokens) => {
                let given = [("prompt", prompt), ("messages", messages), ("tokens", tokens)];
                let given: Vec<_> = given
                    .iter()
                    .filter(|(_, f)| f.is_some())
                    .map(|(name, _)| format!("`{name}`"))
                    .collect();
                Err(Fault::invalid(format!(
                    "only one of the fields `prompt`, `messages`, `tokens` is allowed, got {}",
                    given.join(" and ")
                )))
            }
        }
    }
}

pub(super) fn read_messages(field: Field) -> Result<Vec<Message>> {
    field.items()?.map(Message::read).collect()
}

pub(super) fn read_tools(field: Field) -> Result<Vec<Value>> {
    Ok(field.array()?.1)
}

impl Format {
    fn read(field: Field) -> Result<Option<Self>> {
        match &field.value {
            Value::Null => Ok(None),
            Value::String(name) if name == "json" => Ok(Some(Self::Json)),
            Value::Object(map) if map.contains_key("grammar") => Ok(Some(Self::Grammar(
                field.object(&["grammar"])?.require("grammar")?.string()?,
            ))),
            Value::Object(map) if map.contains_key("regex") => Ok(Some(Self::Regex(
                field.object(&["regex"])?.require("regex")?.string()?,
            ))),
            Value::Object(_) => Ok(Some(Self::Schema(field.map()?.1))),
            _ => {
                Err(field.refuse("null, \"json\", a JSON Schema object, {\"grammar\": …} or {\"regex\": …}"))
            }
        }
    }
}

impl LogprobsRequest {
    fn read(fields: &mut Fields) -> Result<Option<Self>> {
        let asked = fields.take("logprobs").map(Field::boolean).transpose()?;
        let top = fields.take("top_logprobs");
        let top = top
            .map(|f| f.unsigned("an integer from 0 to 20", |n| n <= 20))
            .transpose()?
            .unwrap_or(0);
        match asked {
            Some(false) if top > 0 => Err(Fault {
                code: ErrorCode::InvalidRequest,
                message: format!("field `top_logprobs` is {top} but `logprobs` is false"),
            }),
            Some(true) => Ok(Some(Self { top })),
            None if top > 0 => Ok(Some(Self { top })),
            Some(false) | None => Ok(None),
        }
    }
}

impl Serialize for Format {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        match self {
            Self::Json => serializer.serialize_str("json"),
            Self::Schema(schema) => schema.serialize(serializer),
            Self::Grammar(grammar) => serializer.collect_map([("grammar", grammar)]),
            Self::Regex(regex) => serializer.collect_map([("regex", regex)]),
        }
    }
}

fn write_logprobs<S: Serializer>(
    logprobs: &Option<LogprobsRequest>,
    serializer: S,
) -> std::result::Result<S::Ok, S::Error> {
    use serde::ser::SerializeMap;
    let mut map = serializer.serialize_map(None)?;
    if let Some(logprobs) = logprobs {
        map.serialize_entry("logprobs", &true)?;
        map.serialize_entry("top_logprobs", &logprobs.top)?;
    }
    map.end()
}

fn is_true(value: &bool) -> bool {
    *value
}
