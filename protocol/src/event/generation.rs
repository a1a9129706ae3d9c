//! Events of one `generate` request. In order: `prompt`, `prefill`*, `token`*, then exactly one of `done` and `error`.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize, Serializer};

use crate::names::wire_names;
use crate::ErrorCode;

/// `prompt`: a request is tokenised and matched against the prefix cache.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Prompt {
    /// The request's id.
    pub id: String,
    /// All prompt tokens.
    pub tokens: u64,
    /// Those of them that the prefix cache spares the request.
    pub cached: u64,
}

/// `prefill`: sent with `progress`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Prefill {
    /// The request's id.
    pub id: String,
    /// Prompt tokens that are done, cached ones included.
    pub done: u64,
    /// All prompt tokens.
    pub total: u64,
}

/// `token`: generated text.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Token {
    /// The request's id.
    pub id: String,
    /// Text, always whole characters and never part of a stop string. May be empty.
    pub text: String,
    /// The ids that the text comes from.
    pub tokens: Vec<u32>,
    /// One for each of `tokens`, where the request asked for them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub logprobs: Option<Vec<TokenLogprob>>,
}

impl Token {
    /// Appends a later event of the same request: the pair and the merged event mean the same. If only one of the two
    /// has `logprobs`, which no request produces, the merged event has none rather than some that don't line up.
    pub fn merge(&mut self, later: Token) {
        self.text.push_str(&later.text);
        self.tokens.extend(later.tokens);
        self.logprobs = match (self.logprobs.take(), later.logprobs) {
            (Some(mut logprobs), Some(more)) => {
                logprobs.extend(more);
                Some(logprobs)
            }
            _ => None,
        };
    }
}

/// The log-probability of a chosen token.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TokenLogprob {
    /// The token's text by itself, U+FFFD where its bytes are no whole character.
    pub token: String,
    /// The token's bytes.
    pub bytes: Vec<u8>,
    /// Natural logarithm of its probability in the softmax over the whole vocabulary, before penalties, temperature and
    /// truncation. Written as -9999 where it is minus infinity, which JSON doesn't have.
    #[serde(serialize_with = "write_logprob")]
    pub logprob: f32,
    /// The most probable tokens at this position, best first.
    pub top: Vec<TopLogprob>,
}

/// One of the most probable tokens at a position.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TopLogprob {
    /// As in [`TokenLogprob::token`].
    pub token: String,
    /// As in [`TokenLogprob::bytes`].
    pub bytes: Vec<u8>,
    /// As in [`TokenLogprob::logprob`].
    #[serde(serialize_with = "write_logprob")]
    pub logprob: f32,
}

fn write_logprob<S: Serializer>(logprob: &f32, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_f32(if logprob.is_finite() { *logprob } else { -9999.0 })
}

/// `done`: a request's last event. Durations in nanoseconds; names as in Ollama's API.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Done {
    /// The request's id.
    pub id: String,
    /// Why it ended.
    pub done_reason: DoneReason,
    /// The stop string that ended it.
    pub stop: Option<String>,
    /// From the request's arrival to this event.
    pub total_duration: u64,
    /// From the request's arrival to the start of its prefill.
    pub queue_duration: u64,
    /// All prompt tokens, cached ones included.
    pub prompt_eval_count: u64,
    /// Prompt tokens that the prefix cache spared the request.
    pub cached_count: u64,
    /// The whole prefill.
    pub prompt_eval_duration: u64,
    /// Ids delivered in the request's `token` events.
    pub eval_count: u64,
    /// From the end of the prefill to the end of generation.
    pub eval_duration: u64,
    /// What drafting did.
    pub draft: DraftStats,
}

wire_names! {
    /// Why a request ended.
    pub enum DoneReason {
        /// The model ended it, or a stop string did.
        Stop = "stop",
        /// `num_predict` or the context's end.
        Length = "length",
        /// A `cancel`, a shutdown, or the end of the host.
        Cancelled = "cancelled",
    }
}

/// What drafting did for a request. A backend that can't know a figure leaves it out rather than invent one; our own
/// runner always sends all of them.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DraftStats {
    /// Target forwards in decode, those without a draft (depth 0) included.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rounds: Option<u64>,
    /// All drafted tokens.
    pub proposed: u64,
    /// Drafted tokens whose whole prefix had been accepted: those whose own fate was decided.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tested: Option<u64>,
    /// Drafted tokens that were accepted.
    pub accepted: u64,
    /// The same by position in the draft, the first position first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub by_position: Option<Vec<PositionStats>>,
    /// How many rounds drafted how many tokens.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub depth: Option<BTreeMap<u32, u64>>,
}

/// What happened at one position of the drafts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PositionStats {
    /// Tokens drafted here whose whole prefix had been accepted.
    pub tested: u64,
    /// Those of them that were accepted.
    pub accepted: u64,
}

impl DraftStats {
    /// Every figure known and zero: what a runner starts a request with.
    pub fn none() -> Self {
        Self {
            rounds: Some(0),
            proposed: 0,
            tested: Some(0),
            accepted: 0,
            by_position: Some(Vec::new()),
            depth: Some(BTreeMap::new()),
        }
    }

    /// The share of all drafted tokens that was accepted: what drafting yields for its work, and what llama.cpp calls
    /// draft acceptance. `None` where nothing was drafted.
    pub fn accepted_per_proposed(&self) -> Option<f64> {
        ratio(self.accepted, self.proposed)
    }

    /// The share of decided tokens that was accepted: how well the drafter predicts the target, free of what was drafted
    /// behind a refusal. `None` where nothing was tested or the figure isn't known.
    pub fn accepted_per_tested(&self) -> Option<f64> {
        ratio(self.accepted, self.tested?)
    }

    /// Tokens that a target forward yields on average: 1 without drafting, and what the literature calls mean accepted
    /// length. `None` where there was no round or the figure isn't known.
    pub fn tokens_per_round(&self) -> Option<f64> {
        let rounds = self.rounds?;
        ratio(self.accepted + rounds, rounds)
    }
}

fn ratio(part: u64, whole: u64) -> Option<f64> {
    (whole > 0).then(|| part as f64 / whole as f64)
}

/// `error`: a request, a line or the load has failed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// The request's id, or null where none could be read and for a load.
    pub id: Option<String>,
    /// What kind of failure.
    pub code: ErrorCode,
    /// The same for people.
    pub message: String,
    /// Whether the same request may succeed later without a change to it.
    pub retryable: bool,
    /// True on the error that answers a busy id: the request that has the id goes on. Not written where false.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub duplicate: bool,
}

impl Failure {
    /// A failure with the retryability of its code; code `duplicate_id` sets `duplicate`.
    pub fn new(id: Option<String>, code: ErrorCode, message: impl Into<String>) -> Self {
        let retryable = code.retryable();
        let duplicate = code == ErrorCode::DuplicateId;
        Self {
            id,
            code,
            message: message.into(),
            retryable,
            duplicate,
        }
    }

    /// The answer to a request whose id is busy.
    pub fn duplicate_id(id: impl Into<String>) -> Self {
        let id = id.into();
        let message = format!("id \"{id}\" belongs to a request that has not ended");
        Self::new(Some(id), ErrorCode::DuplicateId, message)
    }
}
