//! What `status` answers from: a snapshot that the engine renews and any thread may read.
//!
//! Invariant: reading never waits for the engine; figures are at most one chunk or round old.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use lookahead_protocol::event::{
    CacheStatus, DraftStatus, MemoryStatus, Phase, RequestCounts, RunningRequest, State, Status,
};

/// The running request, as the board keeps it.
#[derive(Debug, Clone)]
pub struct Running {
    /// Its id.
    pub id: String,
    /// How far it is.
    pub phase: Phase,
    /// All its prompt tokens.
    pub prompt_tokens: u64,
    /// Those that the prefix cache spared.
    pub cached: u64,
    /// Those that are done, cached ones included.
    pub prefilled: u64,
    /// Tokens generated.
    pub generated: u64,
    /// When it arrived.
    pub arrived: Instant,
}

/// Everything on the board.
#[derive(Debug, Default)]
pub struct Figures {
    /// Whether the model is loaded.
    pub loaded: bool,
    /// The request being worked on.
    pub running: Option<Running>,
    /// How requests have ended.
    pub requests: RequestCounts,
    /// Memory.
    pub memory: MemoryStatus,
    /// Prefix cache.
    pub cache: Option<CacheStatus>,
    /// Drafting.
    pub draft: Option<DraftStatus>,
}

/// See the module's text.
#[derive(Debug)]
pub struct Board {
    start: Instant,
    figures: Mutex<Figures>,
}

impl Default for Board {
    fn default() -> Self {
        Self {
            start: Instant::now(),
            figures: Mutex::default(),
        }
    }
}

impl Board {
    /// Changes the figures.
    pub fn update(&self, change: impl FnOnce(&mut Figures)) {
        change(&mut self.lock());
    }

    fn lock(&self) -> MutexGuard<'_, Figures> {
        self.figures.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The answer to a `status` request; `generating` counts the running request too.
    pub fn status(&self, id: &str, generating: usize, stopping: bool) -> Status {
        let figures = self.lock();
        let state = match (stopping, figures.loaded, generating) {
            (true, ..) => State::Stopping,
            (_, false, _) => State::Loading,
            (_, _, 0) => State::Idle,
            _ => State::Busy,
        };
        let mut status = Status::new(id, state);
        status.uptime = nanos(self.start);
        status.running = figures
            .running
            .iter()
            .map(|r| RunningRequest {
                id: r.id.clone(),
                phase: r.phase.clone(),
                prompt_tokens: r.prompt_tokens,
                cached: r.cached,
                prefilled: r.prefilled,
                generated: r.generated,
                elapsed: nanos(r.arrived),
            })
            .collect();
        status.waiting = (generating - status.running.len().min(generating)) as u64;
        status.requests = figures.requests;
        status.memory = Some(figures.memory);
        status.cache = figures.cache.clone();
        status.draft = figures.draft.clone();
        status
    }

    /// Bytes and nodes that a `cache clear` gives back, as last seen.
    pub fn cache(&self) -> Option<CacheStatus> {
        self.lock().cache.clone()
    }
}

/// Nanoseconds since `start`.
pub fn nanos(start: Instant) -> u64 {
    u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX)
}
