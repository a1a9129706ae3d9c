//! What the scheduler knows about one model and its process.
//!
//! Invariant: a request of a model is in exactly one place, `queue` or `running`, until its final event; a model has at most
//! one process, and requests are only handed to a process that is ready.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use lookahead_protocol::event::{Backend, Ready};
use lookahead_protocol::request::KeepAlive;
use lookahead_protocol::{ErrorCode, Request};

use crate::catalog::Spec;
use crate::placement::Resident;
use crate::process::ChildProcess;

/// A request that waits in the scheduler.
#[derive(Debug)]
pub(super) struct Queued {
    pub(super) id: String,
    pub(super) request: Request,
    /// Place in the order of arrival over all models.
    pub(super) ticket: u64,
    /// Length of the line it came in.
    pub(super) bytes: usize,
}

/// One model.
#[derive(Debug)]
pub(super) struct Model {
    pub(super) spec: Spec,
    /// As hosts name it.
    pub(super) name: String,
    pub(super) child: Option<Child>,
    pub(super) queue: VecDeque<Queued>,
    /// Ids that the process has.
    pub(super) running: Vec<String>,
    /// Ids of `load` requests that wait for `ready`, with their tickets.
    pub(super) loads: Vec<(String, u64)>,
    /// The ticket of a load that no request waits for.
    pub(super) preload: Option<u64>,
    /// Ids of `unload` requests that wait for the process's end.
    pub(super) unloads: Vec<String>,
    pub(super) keep_alive: KeepAlive,
    /// When the last request ended; `None` where there never was one.
    pub(super) last_used: Option<Instant>,
    pub(super) estimate: Estimate,
    /// The process's own figure, of the last time it was loaded.
    pub(super) measured: Option<u64>,
    pub(super) crashes: Crashes,
    /// Why it isn't loaded, after a failure.
    pub(super) failure: Option<String>,
    /// Where another model needs this one's memory: only requests with an earlier ticket are still handed out.
    pub(super) drain_before: Option<u64>,
}

/// How much memory a model is thought to need.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Estimate {
    Unknown,
    Asked,
    Known(u64),
}

/// Crashes in a row, and when the next start is allowed.
#[derive(Debug, Default)]
pub(super) struct Crashes {
    count: u32,
    pub(super) retry_at: Option<Instant>,
}

impl Crashes {
    const FIRST_DELAY: Duration = Duration::from_millis(500);
    const LONGEST_DELAY: Duration = Duration::from_secs(30);

    /// Counts a crash. The first one in a row is followed by no delay, each further one by twice the last.
    pub(super) fn count(&mut self, now: Instant) {
        self.count += 1;
        let delay = match self.count.checked_sub(2) {
            None => Duration::ZERO,
            Some(doublings) => Self::FIRST_DELAY
                .saturating_mul(1 << doublings.min(16))
                .min(Self::LONGEST_DELAY),
        };
        self.retry_at = Some(now + delay);
    }

    /// Something went well.
    pub(super) fn forget(&mut self) {
        *self = Self::default();
    }
}

/// A model's process.
#[derive(Debug)]
pub(super) struct Child {
    /// Tells this process's reports from those of an earlier one.
    pub(super) number: u64,
    pub(super) process: ChildProcess,
    pub(super) stage: Stage,
    /// When it was started, or became ready.
    pub(super) since: Instant,
    /// When it was last heard of.
    pub(super) heard: Instant,
    /// When it was asked for a sign of life that it hasn't given yet.
    pub(super) pinged: Option<Instant>,
    /// Bytes of output that were no protocol lines.
    pub(super) noise: usize,
    pub(super) backend: Option<Backend>,
    /// The load's own error.
    pub(super) load_error: Option<(ErrorCode, String, bool)>,
}

/// How far a process is.
#[derive(Debug)]
pub(super) enum Stage {
    Loading {
        /// The last progress.
        at: Option<(String, u64)>,
    },
    Ready(Box<Ready>),
    Stopping(Stop),
}

/// A stop under way: each step is waited for before the next, ruder one.
#[derive(Debug)]
pub(super) struct Stop {
    pub(super) why: Why,
    pub(super) step: Step,
    pub(super) next: Instant,
}

/// The steps of a stop.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Step {
    Shutdown,
    Eof,
    Term,
    Kill,
}

impl Step {
    pub(super) fn next(self) -> Option<Step> {
        match self {
            Step::Shutdown => Some(Step::Eof),
            Step::Eof => Some(Step::Term),
            Step::Term => Some(Step::Kill),
            Step::Kill => None,
        }
    }
}

/// Why a process is stopped, which decides how its requests end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Why {
    /// Nothing to do, or its memory is needed: requests that wait are served later.
    Idle,
    /// A host asked for it, or the scheduler ends: requests end as cancelled.
    Asked,
    /// It misbehaves: requests end with this error.
    Fault(ErrorCode, String),
}

impl Model {
    pub(super) fn new(spec: Spec, name: String, keep_alive: KeepAlive) -> Self {
        let estimate = spec.memory.map_or(Estimate::Unknown, Estimate::Known);
        Self {
            spec,
            name,
            child: None,
            queue: VecDeque::new(),
            running: Vec::new(),
            loads: Vec::new(),
            preload: None,
            unloads: Vec::new(),
            keep_alive,
            last_used: None,
            estimate,
            measured: None,
            crashes: Crashes::default(),
            failure: None,
            drain_before: None,
        }
    }

    /// The oldest ticket of what waits for this model to be loaded or to have time.
    pub(super) fn oldest_demand(&self) -> Option<u64> {
        let queued = self.queue.front().map(|queued| queued.ticket);
        let load = self.loads.iter().map(|&(_, ticket)| ticket).min();
        queued.into_iter().chain(load).chain(self.preload).min()
    }

    /// The number of requests that have not ended.
    pub(super) fn pending(&self) -> usize {
        self.queue.len() + self.running.len() + self.loads.len()
    }

    pub(super) fn is_ready(&self) -> bool {
        matches!(
            &self.child,
            Some(Child {
                stage: Stage::Ready(_),
                ..
            })
        )
    }

    /// Bytes that the model needs: the larger of the estimate and the process's own figure.
    pub(super) fn bytes(&self) -> Option<u64> {
        match (self.estimate, self.measured) {
            (Estimate::Known(estimate), measured) => Some(estimate.max(measured.unwrap_or(0))),
            (_, measured) => measured,
        }
    }

    /// The memory that it holds, seen by a model whose oldest request has `ticket`.
    pub(super) fn resident(&self, ticket: u64, now: Instant, quantum: Duration) -> Option<Resident> {
        let child = self.child.as_ref()?;
        let loading = matches!(child.stage, Stage::Loading { .. });
        let had_its_turn = now.saturating_duration_since(child.since) >= quantum;
        let only_later = self
            .oldest_demand()
            .is_none_or(|oldest| had_its_turn && oldest > ticket);
        Some(Resident {
            key: self.spec.key.clone(),
            bytes: self.bytes().unwrap_or(0),
            idle: !loading && self.running.is_empty() && only_later,
            leaving: matches!(child.stage, Stage::Stopping(_)),
            forever: self.keep_alive == KeepAlive::Forever,
            last_used: self.last_used.unwrap_or(child.since),
            since: if loading { now } else { child.since },
        })
    }

    /// Since when a loaded model has had nothing to do; `None` while it has.
    pub(super) fn idle_since(&self) -> Option<Instant> {
        let child = self.child.as_ref()?;
        if self.pending() > 0 || !self.is_ready() {
            return None;
        }
        Some(self.last_used.map_or(child.since, |used| used.max(child.since)))
    }

    /// When an idle model is to be unloaded.
    pub(super) fn idle_deadline(&self) -> Option<Instant> {
        match self.keep_alive {
            KeepAlive::Forever => None,
            KeepAlive::For(time) => self.idle_since()?.checked_add(time),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repeated_crashes_delay_the_next_start_up_to_a_limit() {
        let now = Instant::now();
        let mut crashes = Crashes::default();
        let mut delays = Vec::new();
        for _ in 0..9 {
            crashes.count(now);
            delays.push(crashes.retry_at.unwrap().duration_since(now).as_millis());
        }
        assert_eq!(delays, [0, 500, 1000, 2000, 4000, 8000, 16000, 30000, 30000]);
        crashes.forget();
        assert_eq!(crashes.retry_at, None);
    }

    #[test]
    fn a_stop_gets_ruder_step_by_step_and_ends_with_a_kill() {
        let steps: Vec<Step> = std::iter::successors(Some(Step::Shutdown), |step| step.next()).collect();
        assert_eq!(steps, [Step::Shutdown, Step::Eof, Step::Term, Step::Kill]);
    }
}
