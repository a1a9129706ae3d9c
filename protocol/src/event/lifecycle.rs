//! Events about the program and its load: `hello` before anything else, `load` while loading, `ready` once.

use serde::{Deserialize, Serialize};

use crate::names::wire_names;

/// `hello`: the first line, sent before loading.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// The version of the protocol that the program speaks.
    pub protocol: ProtocolVersion,
    /// `lookahead-runner` or `lookahead`.
    pub program: String,
    /// The program's own version.
    pub version: String,
    /// The program's process id.
    pub pid: u32,
    /// What the program computes on; a scheduler, which computes nothing, leaves it out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backend: Option<Backend>,
}

/// A version of the wire protocol. A minor version only adds; a removal or a change of meaning is a new major.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProtocolVersion {
    /// Incompatible generation.
    pub major: u32,
    /// Compatible additions to it.
    pub minor: u32,
}

impl ProtocolVersion {
    /// The version that this crate writes and reads.
    pub const CURRENT: Self = Self { major: 1, minor: 0 };

    /// Whether a program of `self` can read what a program of `other` writes.
    pub fn understands(self, other: Self) -> bool {
        self.major == other.major
    }
}

impl std::fmt::Display for ProtocolVersion {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

wire_names! {
    /// What a runner computes on.
    pub enum Backend {
        /// The processor.
        Cpu = "cpu",
        /// An Apple GPU.
        Metal = "metal",
        /// An NVIDIA GPU.
        Cuda = "cuda",
    }
}

/// `load`: sent at most ten times a second.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LoadProgress {
    /// Bytes of the stage that are done.
    pub done: u64,
    /// Bytes of the stage.
    pub total: u64,
    /// What is being done.
    pub stage: LoadStage,
}

wire_names! {
    /// A stage of loading.
    pub enum LoadStage {
        /// Reading the weights.
        Weights = "weights",
        /// First passes through the model.
        Warmup = "warmup",
    }
}

/// `ready`: the model is loaded and requests are being worked on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ready {
    /// What was loaded.
    pub model: ModelInfo,
    /// Whether and with what it drafts.
    pub draft: DraftInfo,
    /// Memory.
    pub memory: MemoryInfo,
    /// Nanoseconds from the process's start of loading to this event.
    pub load_duration: u64,
}

/// A loaded model.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelInfo {
    /// Where it was loaded from.
    pub path: String,
    /// Its architecture's name in the checkpoint.
    pub architecture: String,
    /// Number of parameters, the draft head's included.
    pub parameters: u64,
    /// How its weights are quantised, such as `4bit`; null where they are not.
    pub quantization: Option<String>,
    /// Most tokens of prompt and answer together.
    pub context_length: u64,
    /// Number of logits.
    pub vocab_size: u64,
    /// Whether it takes images.
    pub vision: bool,
    /// The ids that end a request, ascending.
    pub eos: Vec<u32>,
}

/// Whether and with what a model drafts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DraftInfo {
    /// Whether it drafts.
    pub active: bool,
    /// The drafter's kind, such as `mtp`; null where there is none.
    pub kind: Option<String>,
    /// Why it doesn't draft; null where it does.
    pub reason: Option<String>,
    /// The deepest it may draft.
    pub max_depth: u32,
}

/// Memory once the model is loaded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryInfo {
    /// Bytes of the weights as they lie in memory.
    pub weights: u64,
    /// Bytes that the program allows itself altogether.
    pub limit: u64,
}
