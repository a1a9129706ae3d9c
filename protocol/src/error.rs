//! Error codes: stable names that a host can act on. A code never changes its meaning or its retryability within a
//! major version; the message beside it is for people and may change.

use crate::names::wire_names;
use crate::Event;

wire_names! {
    /// Why a request, a line or a load failed; the `code` of an `error` event.
    pub enum ErrorCode {
        /// The line is not UTF-8 or not JSON.
        InvalidJson = "invalid_json",
        /// The line is JSON, but not a request: not an object, no or a bad `id`, a field missing, of the wrong type, out
        /// of range, or in contradiction to another one. The message names the field's path.
        InvalidRequest = "invalid_request",
        /// `type` names no request of this program.
        UnknownType = "unknown_type",
        /// A field that this request doesn't have. The message names its path.
        UnknownField = "unknown_field",
        /// The line was longer than the limit and was discarded.
        LineTooLong = "line_too_long",
        /// The `id` belongs to a request that has not ended. The event carries `"duplicate": true` and the running request
        /// goes on.
        DuplicateId = "duplicate_id",
        /// The prompt has no token at all.
        EmptyPrompt = "empty_prompt",
        /// The prompt doesn't fit the context length.
        ContextExceeded = "context_exceeded",
        /// Something that this model or build can't do, named in the message.
        Unsupported = "unsupported",
        /// An image that can't be decoded, is too large, or has no placeholder in the prompt.
        BadImage = "bad_image",
        /// A `format` that can't be compiled: a bad schema, grammar or regular expression.
        BadFormat = "bad_format",
        /// The model produced logits that are not numbers; nothing was sampled from them.
        NanLogits = "nan_logits",
        /// The device's memory didn't suffice, also after the prefix cache had made room. Retryable.
        OutOfMemory = "out_of_memory",
        /// The queue has reached its limit. Retryable.
        QueueFull = "queue_full",
        /// A fault of the program itself.
        Internal = "internal",
        /// Loading: there is no model at the path.
        ModelNotFound = "model_not_found",
        /// Loading: the model's files are damaged, incomplete or contradict one another.
        ModelInvalid = "model_invalid",
        /// Loading: the model's architecture is none that this build knows.
        ArchitectureUnsupported = "architecture_unsupported",
        /// Scheduler: the runner ended while the request was with it. Retryable; the message has the signal or status in
        /// words and the end of the runner's log.
        RunnerCrashed = "runner_crashed",
        /// Scheduler: the runner gave no sign of life for its deadline and was restarted. Retryable.
        RunnerStalled = "runner_stalled",
        /// Scheduler: the request names no model, or one that can't be resolved.
        NoModel = "no_model",
    }
}

impl ErrorCode {
    /// Whether the same request may succeed later without a change to it. False for a code that this version doesn't know.
    pub fn retryable(&self) -> bool {
        matches!(
            self,
            Self::OutOfMemory | Self::QueueFull | Self::RunnerCrashed | Self::RunnerStalled
        )
    }
}

/// A line that is no valid request: what the `error` event that answers it says.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{code}: {message}")]
pub struct RequestError {
    /// The request's `id` where a valid one could be read, whatever else is wrong with the line.
    pub id: Option<String>,
    /// What is wrong.
    pub code: ErrorCode,
    /// The same in words, naming the field by its path.
    pub message: String,
}

impl RequestError {
    /// The answer to a line that was discarded because it is longer than `limit` bytes.
    pub fn line_too_long(length: u64, limit: usize) -> Self {
        Self {
            id: None,
            code: ErrorCode::LineTooLong,
            message: format!("line of {length} bytes is longer than the limit of {limit}"),
        }
    }

    /// The answer to a line that isn't UTF-8.
    pub fn not_utf8(bytes: &[u8]) -> Self {
        let valid = std::str::from_utf8(bytes)
            .err()
            .map_or(bytes.len(), |error| error.valid_up_to());
        Self {
            id: None,
            code: ErrorCode::InvalidJson,
            message: format!("line is not UTF-8: invalid byte at offset {valid}"),
        }
    }
}

impl From<RequestError> for Event {
    fn from(error: RequestError) -> Self {
        Event::Error(crate::event::Failure::new(error.id, error.code, error.message))
    }
}
