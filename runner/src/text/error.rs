//! Errors of loading and using a tokenizer: each names the file or the value at fault.

use std::path::PathBuf;

/// Why a tokenizer can't be loaded or a text not be tokenised.
#[derive(Debug, thiserror::Error)]
pub enum TextError {
    /// The model directory has no `tokenizer.json`.
    #[error("no tokenizer: {} is missing", path.display())]
    Missing {
        /// The file looked for.
        path: PathBuf,
    },
    /// A file is there but can't be read.
    #[error("can't read {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// A file isn't valid JSON, or is JSON that doesn't describe a tokenizer.
    #[error("{} is invalid: {reason}", path.display())]
    Invalid {
        /// The file.
        path: PathBuf,
        /// What the parser stumbled on, with its place where known.
        reason: String,
    },
    /// The tokenizer is of a kind other than BPE.
    #[error("{} holds a tokenizer of kind {kind:?}, only \"BPE\" is supported", path.display())]
    UnsupportedKind {
        /// The file.
        path: PathBuf,
        /// The kind it names.
        kind: String,
    },
    /// The tokenizer refused a text.
    #[error("can't tokenise the text: {reason}")]
    Encode {
        /// The tokenizer's reason.
        reason: String,
    },
    /// An id that the tokenizer doesn't have.
    #[error("token id {id} is out of range, the tokenizer has {len} ids")]
    UnknownId {
        /// The id asked for.
        id: u32,
        /// One more than the highest id.
        len: usize,
    },
}
