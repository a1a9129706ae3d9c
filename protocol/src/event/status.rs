//! The `status` event: a snapshot of the program's state. Sections that a program doesn't have are left out: a scheduler
//! about itself has `models` and no `cache` or `draft`. All sizes are bytes, all durations nanoseconds, all counts since
//! the process's start.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{DraftInfo, DraftStats, ModelEntry, PositionStats};
use crate::names::wire_names;

/// `status`: answers `status`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// The request's id.
    pub id: String,
    /// What the program is doing.
    pub state: State,
    /// Since the process's start.
    pub uptime: u64,
    /// The requests being worked on, in the order of their arrival.
    pub running: Vec<RunningRequest>,
    /// How many requests wait for their turn.
    pub waiting: u64,
    /// How the ended requests ended.
    pub requests: RequestCounts,
    /// Memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<MemoryStatus>,
    /// The prefix cache.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cache: Option<CacheStatus>,
    /// Drafting.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub draft: Option<DraftStatus>,
    /// Scheduler: its models.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub models: Option<Vec<ModelEntry>>,
}

impl Status {
    /// A status without sections.
    pub fn new(id: impl Into<String>, state: State) -> Self {
        Self {
            id: id.into(),
            state,
            uptime: 0,
            running: Vec::new(),
            waiting: 0,
            requests: RequestCounts::default(),
            memory: None,
            cache: None,
            draft: None,
            models: None,
        }
    }
}

wire_names! {
    /// What a program is doing.
    pub enum State {
        /// Loading; requests wait.
        Loading = "loading",
        /// Nothing to do.
        Idle = "idle",
        /// Working on requests.
        Busy = "busy",
        /// Ending.
        Stopping = "stopping",
    }
}

/// A request that is being worked on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunningRequest {
    /// Its id.
    pub id: String,
    /// How far it is.
    pub phase: Phase,
    /// All its prompt tokens; 0 until it is tokenised.
    pub prompt_tokens: u64,
    /// Prompt tokens that the prefix cache spared it.
    pub cached: u64,
    /// Prompt tokens that are done, cached ones included.
    pub prefilled: u64,
    /// Tokens generated so far.
    pub generated: u64,
    /// Since its arrival.
    pub elapsed: u64,
}

wire_names! {
    /// How far a request is.
    pub enum Phase {
        /// Being rendered and tokenised, its images decoded.
        Prepare = "prepare",
        /// Its prompt is being evaluated.
        Prefill = "prefill",
        /// It generates.
        Decode = "decode",
    }
}

/// How the ended `generate` requests ended.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RequestCounts {
    /// With reason `stop` or `length`.
    pub completed: u64,
    /// With reason `cancelled`.
    pub cancelled: u64,
    /// With an error.
    pub failed: u64,
}

/// Memory of the device that the model is on.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryStatus {
    /// In use now.
    pub active: u64,
    /// The most that was ever in use.
    pub peak: u64,
    /// Held by the allocator for reuse.
    pub cache: u64,
    /// What the program allows itself.
    pub limit: u64,
    /// The weights' part of `active`.
    pub weights: u64,
}

/// The prefix cache.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CacheStatus {
    /// Trie nodes.
    pub nodes: u64,
    /// Points that a request can start from.
    pub restore_points: u64,
    /// The device's memory.
    pub device: Tier,
    /// The host's memory.
    pub host: Tier,
    /// The disk.
    pub disk: DiskTier,
    /// Requests that found a part of their prompt.
    pub hits: u64,
    /// Requests that found nothing, those that ask for no cache excluded.
    pub misses: u64,
    /// Prompt tokens that were spared.
    pub hit_tokens: u64,
    /// Nodes that were dropped to make room, in any tier.
    pub evictions: u64,
    /// Nodes that were moved to a slower tier.
    pub demotions: u64,
    /// Nodes that were fetched back from a slower tier.
    pub promotions: u64,
}

/// Bytes of one tier in memory, the path in use included.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tier {
    /// What it holds.
    pub bytes: u64,
    /// What it may hold; 0 is off.
    pub limit: u64,
}

/// The tier on disk.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskTier {
    /// What it holds.
    pub bytes: u64,
    /// What it may hold; 0 is off.
    pub limit: u64,
    /// Files.
    pub files: u64,
    /// How often a file was read.
    pub loads: u64,
    /// What reading took altogether.
    pub load_duration: u64,
    /// How often a file was written.
    pub stores: u64,
    /// What writing took altogether.
    pub store_duration: u64,
    /// Files that were ignored because they are damaged or of another model.
    pub rejected: u64,
}

/// Drafting, all requests together.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DraftStatus {
    /// Whether the model drafts.
    pub active: bool,
    /// The drafter's kind, such as `mtp`; null where there is none.
    pub kind: Option<String>,
    /// Why it doesn't draft; null where it does.
    pub reason: Option<String>,
    /// The deepest it may draft.
    pub max_depth: u32,
    /// The depth that the controller holds for best now; null where none was chosen yet.
    pub selected: Option<u32>,
    /// Something that a person should look at, such as a head that is hardly ever right.
    pub warning: Option<String>,
    /// As in [`DraftStats::rounds`].
    pub rounds: u64,
    /// As in [`DraftStats::proposed`].
    pub proposed: u64,
    /// As in [`DraftStats::tested`].
    pub tested: u64,
    /// As in [`DraftStats::accepted`].
    pub accepted: u64,
    /// The rates that follow from these.
    pub rates: DraftRates,
    /// As in [`DraftStats::by_position`].
    pub by_position: Vec<PositionStats>,
    /// As in [`DraftStats::depth`].
    pub depth: BTreeMap<u32, u64>,
    /// The controller's live estimates of acceptance.
    pub acceptance: Vec<AcceptanceEstimate>,
    /// The controller's live estimates of what a round costs.
    pub cost: Vec<RoundCost>,
}

impl DraftStatus {
    /// The status of a model that drafts as `info` says, with the figures of all its requests so far.
    pub fn new(info: DraftInfo, stats: &DraftStats) -> Self {
        Self {
            active: info.active,
            kind: info.kind,
            reason: info.reason,
            max_depth: info.max_depth,
            selected: None,
            warning: None,
            rounds: stats.rounds.unwrap_or_default(),
            proposed: stats.proposed,
            tested: stats.tested.unwrap_or_default(),
            accepted: stats.accepted,
            rates: DraftRates::from(stats),
            by_position: stats.by_position.clone().unwrap_or_default(),
            depth: stats.depth.clone().unwrap_or_default(),
            acceptance: Vec::new(),
            cost: Vec::new(),
        }
    }
}

/// The three figures that are all called acceptance rate elsewhere, by name. Null where there is nothing to divide by.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct DraftRates {
    /// As in [`DraftStats::accepted_per_proposed`].
    pub accepted_per_proposed: Option<f64>,
    /// As in [`DraftStats::accepted_per_tested`].
    pub accepted_per_tested: Option<f64>,
    /// As in [`DraftStats::tokens_per_round`].
    pub tokens_per_round: Option<f64>,
}

impl From<&DraftStats> for DraftRates {
    fn from(stats: &DraftStats) -> Self {
        Self {
            accepted_per_proposed: stats.accepted_per_proposed(),
            accepted_per_tested: stats.accepted_per_tested(),
            tokens_per_round: stats.tokens_per_round(),
        }
    }
}

/// What the controller expects of one position.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct AcceptanceEstimate {
    /// The kind of requests that it holds for.
    pub sampling: SamplingKind,
    /// Position in the draft, from 1.
    pub position: u32,
    /// Probability that a token here is accepted if all before it were.
    pub rate: f64,
    /// How many outcomes it rests on.
    pub samples: u64,
}

wire_names! {
    /// The kinds of requests that the controller keeps apart.
    pub enum SamplingKind {
        /// Temperature 0.
        Greedy = "greedy",
        /// Any other temperature.
        Sampled = "sampled",
    }
}

/// What a round costs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RoundCost {
    /// Longest context, in tokens, of the bucket that it holds for.
    pub context: u64,
    /// Tokens in the target forward: the depth plus one.
    pub width: u32,
    /// The whole round.
    pub duration: u64,
    /// How many rounds it rests on.
    pub samples: u64,
}
