//! Answers to the requests that need no generation: one event each, carrying the request's id.

use serde::{Deserialize, Serialize};

use crate::request::CacheAction;

/// `tokenized`: answers `tokenize`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tokenized {
    /// The request's id.
    pub id: String,
    /// The text's ids, as a prompt of that text would have them.
    pub tokens: Vec<u32>,
}

/// `detokenized`: answers `detokenize`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Detokenized {
    /// The request's id.
    pub id: String,
    /// The ids' text; an incomplete character is U+FFFD.
    pub text: String,
}

/// `rendered`: answers `render`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rendered {
    /// The request's id.
    pub id: String,
    /// The prompt, the generation prompt at its end included.
    pub prompt: String,
}

/// `cancelled`: answers `cancel` at once, before the target's `done`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cancelled {
    /// The request's own id.
    pub id: String,
    /// The id of the request to end.
    pub target: String,
    /// Whether a request of that id was there to be ended.
    pub found: bool,
}

/// `pong`: answers `ping`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pong {
    /// The request's id.
    pub id: String,
}

/// `cache`: answers `cache`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CacheReply {
    /// The request's id.
    pub id: String,
    /// What was done.
    pub action: CacheAction,
    /// Trie nodes that were dropped.
    #[serde(default)]
    pub nodes: u64,
    /// Bytes that were freed, all tiers together.
    #[serde(default)]
    pub bytes: u64,
}
