//! A request made ready for the engine, and the ways in which one fails.
//!
//! Invariant: a [`Job`] has at least one prompt token, fits the context, and has only options in their ranges.

use std::sync::Arc;
use std::time::Instant;

use lookahead_protocol::request::{DraftOptions, Verify};
use lookahead_protocol::{event::Failure, ErrorCode};

use super::media::Picture;
use crate::host::registry::CancelFlag;
use crate::sample::constraint::{Constraint, ConstraintError};
use crate::sample::SamplingOptions;
use crate::text::StopSet;

/// A prepared `generate` request.
#[derive(Debug)]
pub struct Job {
    /// The request's id.
    pub id: String,
    /// When it arrived.
    pub arrived: Instant,
    /// Asks it to end.
    pub cancel: CancelFlag,
    /// Prompt tokens, at least one.
    pub tokens: Vec<u32>,
    /// Pictures in them, ascending.
    pub pictures: Vec<Picture>,
    /// Sampling.
    pub options: SamplingOptions,
    /// Key of every draw.
    pub seed: u64,
    /// Compiled stop strings.
    pub stops: Arc<StopSet>,
    /// Most tokens to generate; the context's end and `num_predict` together.
    pub budget: usize,
    /// Drafting options.
    pub draft: DraftOptions,
    /// How drafts are tested.
    pub verify: Verify,
    /// Constraint on the output.
    pub constraint: Option<Constraint>,
    /// Alternatives to list with each log-probability; `None` where none are wanted.
    pub logprobs: Option<usize>,
    /// Whether the prefix cache is read and written.
    pub cache: bool,
    /// Whether `prefill` events are wanted.
    pub progress: bool,
}

/// Why a request ends with `error`.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{message}")]
pub struct Refusal {
    /// Stable code.
    pub code: ErrorCode,
    /// The same in words.
    pub message: String,
}

impl Refusal {
    /// A refusal with its code.
    pub fn new(code: ErrorCode, message: impl Into<String>) -> Self {
        Self {
            code,
            message: message.into(),
        }
    }

    /// The event that tells the host.
    pub fn failure(&self, id: &str) -> Failure {
        Failure::new(Some(id.to_owned()), self.code.clone(), self.message.clone())
    }
}

impl From<mlx_rs::error::Exception> for Refusal {
    fn from(error: mlx_rs::error::Exception) -> Self {
        let message = crate::mlx::ops::explain(&error);
        let lower = message.to_ascii_lowercase();
        let memory = [
            "unable to allocate",
            "out of memory",
            "failed to allocate",
            "insufficient memory",
        ];
        if memory.iter().any(|words| lower.contains(words)) {
            Self::new(
                ErrorCode::OutOfMemory,
                format!("the device's memory doesn't suffice: {message}"),
            )
        } else {
            Self::new(ErrorCode::Internal, format!("the device failed: {message}"))
        }
    }
}

impl From<ConstraintError> for Refusal {
    fn from(error: ConstraintError) -> Self {
        let code = if error.is_bad_format() {
            ErrorCode::BadFormat
        } else {
            ErrorCode::Internal
        };
        Self::new(code, error.to_string())
    }
}

impl From<crate::sample::SampleError> for Refusal {
    fn from(error: crate::sample::SampleError) -> Self {
        use crate::sample::SampleError;
        match error {
            SampleError::Mlx(error) => error.into(),
            other => Self::new(ErrorCode::NanLogits, other.to_string()),
        }
    }
}
