//! The scheduler's answers about models. The model that `loaded` and `unloaded` are about is in the `model` that every
//! event of a scheduler carries ([`super::Tagged::model`]).

use serde::{Deserialize, Serialize};

use super::{DraftInfo, MemoryInfo, ModelInfo};
use crate::names::wire_names;

/// `loaded`: answers `load`, at once for a model that is loaded already.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Loaded {
    /// The request's id.
    pub id: String,
    /// What was loaded, as the runner's `ready` says; left out where its backend doesn't say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub info: Option<ModelInfo>,
    /// Whether and with what it drafts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub draft: Option<DraftInfo>,
    /// Its memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<MemoryInfo>,
    /// Nanoseconds that loading took; 0 for a model that was loaded already.
    #[serde(default)]
    pub load_duration: u64,
}

/// `unloaded`: answers `unload` once the model's process has ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Unloaded {
    /// The request's id.
    pub id: String,
    /// Whether the model was loaded or loading.
    #[serde(default)]
    pub found: bool,
}

/// `models`: answers `list`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Models {
    /// The request's id.
    pub id: String,
    /// Every model that has or had a process, and not the configured ones that never had.
    pub models: Vec<ModelEntry>,
}

/// One model of a scheduler.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelEntry {
    /// The model as hosts name it.
    pub model: String,
    /// What its process is doing.
    pub state: ModelState,
    /// Its process's id; null where it has none.
    pub pid: Option<u32>,
    /// Bytes that it counts for in the memory budget: an estimate until its process says, 0 without a process.
    pub memory: u64,
    /// Its requests that have not ended, waiting ones included.
    pub requests: u64,
    /// When it had nothing left to do, in milliseconds since 1970; null while it loads or has requests.
    pub idle_since: Option<u64>,
    /// Whether and with what it drafts; null until its process says.
    pub draft: Option<DraftInfo>,
    /// Why it failed; null in other states.
    #[serde(default)]
    pub reason: Option<String>,
}

wire_names! {
    /// What the process of a model is doing.
    pub enum ModelState {
        /// Loading.
        Loading = "loading",
        /// Taking requests.
        Ready = "ready",
        /// Ending.
        Unloading = "unloading",
        /// It could not be loaded, or crashed; the next request tries again.
        Failed = "failed",
    }
}
