//! Why a checkpoint can't be loaded.
//!
//! Invariant: every message names the file, tensor or field at fault and the values involved, so that it can be acted upon
//! without a debugger; nothing in a checkpoint is reported by a panic.

use std::io;
use std::path::PathBuf;

/// Result of everything that reads a checkpoint.
pub type Result<T> = std::result::Result<T, LoadError>;

/// The stable kinds that hosts see.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LoadErrorKind {
    /// No such model: `model_not_found`.
    NotFound,
    /// There, but broken or contradictory: `model_invalid`.
    Invalid,
    /// Sound, but of a kind this build doesn't know: `architecture_unsupported`.
    Unsupported,
}

impl LoadErrorKind {
    /// The wire protocol's error code.
    pub fn code(self) -> &'static str {
        match self {
            Self::NotFound => "model_not_found",
            Self::Invalid => "model_invalid",
            Self::Unsupported => "architecture_unsupported",
        }
    }
}

/// What is wrong with one safetensors file, whatever file it is.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HeaderFault {
    /// Too short to hold the header's length.
    #[error("file has {0} bytes; a safetensors file starts with 8 bytes of header length")]
    TooShort(u64),
    /// The length of the header is beyond the file's end.
    #[error("header claims {claimed} bytes but only {available} follow: the file is truncated or its header length is damaged")]
    LengthBeyondFile {
        /// Header length in the file.
        claimed: u64,
        /// Bytes after the length field.
        available: u64,
    },
    /// No real file has a header this long.
    #[error("header claims {0} bytes, more than the limit of {limit}", limit = super::header::MAX_HEADER_BYTES)]
    LengthAbsurd(u64),
    /// The header isn't UTF-8.
    #[error("header is not UTF-8 (first bad byte at {0})")]
    NotUtf8(usize),
    /// The header isn't the JSON object it should be.
    #[error("header is not valid: {0}")]
    NotJson(String),
    /// The same tensor twice.
    #[error("tensor {0:?} is listed twice")]
    DuplicateTensor(String),
    /// A storage type that this build can't read.
    #[error("tensor {tensor:?} has unknown dtype {dtype:?}")]
    UnknownDtype {
        /// Tensor.
        tensor: String,
        /// Its type, as written.
        dtype: String,
    },
    /// Begin after end.
    #[error("tensor {tensor:?} ends at {end}, before its begin at {begin}")]
    OffsetsReversed {
        /// Tensor.
        tensor: String,
        /// First byte.
        begin: u64,
        /// One past the last byte.
        end: u64,
    },
    /// The tensor's bytes are not all in the file.
    #[error("tensor {tensor:?} ends at byte {end} of the data but the file holds {available}: the file is truncated")]
    OffsetsBeyondFile {
        /// Tensor.
        tensor: String,
        /// One past the last byte.
        end: u64,
        /// Bytes of data in the file.
        available: u64,
    },
    /// dtype × shape differs from the number of bytes.
    #[error("tensor {tensor:?} of dtype {dtype} and shape {shape:?} needs {wanted} bytes but its offsets span {found}")]
    SizeMismatch {
        /// Tensor.
        tensor: String,
        /// Storage type.
        dtype: String,
        /// Shape.
        shape: Vec<u64>,
        /// Bytes for that type and shape; "too many" where the product overflows.
        wanted: String,
        /// Bytes between its offsets.
        found: u64,
    },
    /// Two tensors share bytes.
    #[error("tensors {first:?} and {second:?} overlap")]
    Overlap {
        /// The tensor that begins first.
        first: String,
        /// The tensor that begins inside it.
        second: String,
    },
    /// Bytes that no tensor names.
    #[error("{bytes} bytes {before} belong to no tensor: the file or its header is damaged")]
    Hole {
        /// How many.
        bytes: u64,
        /// Where.
        before: String,
    },
}

/// Why loading, or looking at, a checkpoint failed.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// Nothing at that path.
    #[error("no model at {}: no such directory", .0.display())]
    NotFound(PathBuf),
    /// A file where a directory was expected.
    #[error("{} is not a directory; a model is a directory with config.json and safetensors files", .0.display())]
    NotADirectory(PathBuf),
    /// No config.json.
    #[error("{} has no config.json ({})", .dir.display(), if *.empty { "it is empty" } else { "not a model directory?" })]
    NoConfig {
        /// The directory.
        dir: PathBuf,
        /// Whether it holds no file at all.
        empty: bool,
    },
    /// No safetensors file.
    #[error("{} has no safetensors file", .0.display())]
    NoWeights(PathBuf),
    /// The operating system refused.
    #[error("can't read {}: {source}", .path.display())]
    Io {
        /// File.
        path: PathBuf,
        /// Cause.
        source: io::Error,
    },
    /// A JSON file that isn't.
    #[error("{file} is not valid JSON: {message}")]
    Json {
        /// File, relative to the model.
        file: String,
        /// Parser's message.
        message: String,
    },
    /// A JSON file far larger than any real one.
    #[error("{file} has {bytes} bytes, more than the limit of {limit}")]
    JsonTooLarge {
        /// File.
        file: String,
        /// Its size.
        bytes: u64,
        /// The limit.
        limit: u64,
    },
    /// A required config field is absent.
    #[error("{file}: {field} is missing{hint}")]
    MissingField {
        /// File.
        file: String,
        /// Field's path.
        field: String,
        /// Where it was looked for, or empty.
        hint: &'static str,
    },
    /// A config field has a value that can't be right.
    #[error("{file}: {field} is {value}; expected {expected}")]
    BadField {
        /// File.
        file: String,
        /// Field's path.
        field: String,
        /// What it holds, shortened.
        value: String,
        /// What it should be.
        expected: String,
    },
    /// An architecture that isn't registered.
    #[error("architecture {found:?} is not supported; supported: {}", supported.join(", "))]
    ArchitectureUnsupported {
        /// What the config says.
        found: String,
        /// What is registered.
        supported: Vec<&'static str>,
    },
    /// A known architecture with a feature that this build lacks.
    #[error("{file}: {field} is {value}, which is not supported ({supported})")]
    FeatureUnsupported {
        /// File.
        file: String,
        /// Field's path.
        field: String,
        /// Its value.
        value: String,
        /// What is supported.
        supported: String,
    },
    /// A shard that the index, or the numbering of its siblings, names isn't there.
    #[error("shard {file} is missing{}", match .tensors { Some(n) => format!(" ({n} tensors of the index are in it, {example} for one)"), None => String::new() })]
    MissingShard {
        /// The file.
        file: String,
        /// How many tensors the index places in it; unknown without an index.
        tensors: Option<usize>,
        /// One of them.
        example: String,
    },
    /// The index names a tensor that no file holds.
    #[error("{index} places {count} tensors in files that don't hold them, {tensor} in {file} for one")]
    IndexedTensorAbsent {
        /// Index file.
        index: String,
        /// The first such tensor.
        tensor: String,
        /// The file it should be in.
        file: String,
        /// How many there are.
        count: usize,
    },
    /// A path in the index that leaves the model's directory.
    #[error("{index} names the file {file:?}, which is not inside of the model directory")]
    UnsafePath {
        /// Index file.
        index: String,
        /// The path.
        file: String,
    },
    /// A damaged safetensors file.
    #[error("{file}: {fault}")]
    Header {
        /// File, relative to the model.
        file: String,
        /// What is wrong.
        fault: Box<HeaderFault>,
    },
    /// Tensors that the architecture needs are absent.
    #[error("{} needed tensors are missing: {}", .names.len(), shorten(.names))]
    MissingTensors {
        /// Canonical names.
        names: Vec<String>,
    },
    /// A tensor of another shape than the config implies.
    #[error("tensor {tensor} ({file}) has shape {found:?}; the config asks for {wanted}")]
    WrongShape {
        /// Its name in the file.
        tensor: String,
        /// File.
        file: String,
        /// Shape in the file.
        found: Vec<usize>,
        /// Shape, or shapes, that fit.
        wanted: String,
    },
    /// A tensor of a type that makes no sense where it is.
    #[error("tensor {tensor} ({file}) has dtype {found}; expected {wanted}")]
    WrongDtype {
        /// Its name in the file.
        tensor: String,
        /// File.
        file: String,
        /// Type in the file.
        found: String,
        /// Types that fit.
        wanted: &'static str,
    },
    /// The config and the tensors disagree about a module's quantisation.
    #[error("module {module}: config.json says {config}, but its tensors are {tensors}")]
    QuantMismatch {
        /// Canonical module path.
        module: String,
        /// What the config says.
        config: String,
        /// What the tensors show.
        tensors: String,
    },
    /// Packed codes without what is needed to decode them.
    #[error("module {module} is stored as {stored} but {missing} is missing: it can't be decoded")]
    MissingScales {
        /// Canonical module path.
        module: String,
        /// How its weight is stored.
        stored: String,
        /// The absent tensor.
        missing: String,
    },
    /// Nothing tells whether the trunk's norms are raw or converted.
    #[error("can't tell whether the norms are zero-centred: {0}")]
    UnknownConvention(String),
}

impl LoadError {
    /// The kind that hosts see.
    pub fn kind(&self) -> LoadErrorKind {
        match self {
            Self::NotFound(_) => LoadErrorKind::NotFound,
            Self::ArchitectureUnsupported { .. } | Self::FeatureUnsupported { .. } => {
                LoadErrorKind::Unsupported
            }
            _ => LoadErrorKind::Invalid,
        }
    }
}

/// At most four names, and how many more there are.
pub(crate) fn shorten(names: &[String]) -> String {
    const SHOWN: usize = 4;
    let head = names.iter().take(SHOWN).cloned().collect::<Vec<_>>().join(", ");
    match names.len().saturating_sub(SHOWN) {
        0 => head,
        more => format!("{head} and {more} more"),
    }
}
