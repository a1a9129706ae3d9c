//! What the scheduler says about itself and its requests.
//!
//! Invariant: every event that concerns a model carries the model's name as the host wrote it.

use std::time::{Instant, SystemTime, UNIX_EPOCH};

use lookahead_protocol::event::{
    Done, DoneReason, DraftStats, Failure, Hello, ModelEntry, ModelState, ProtocolVersion, RunningRequest,
    State, Status,
};
use lookahead_protocol::{ErrorCode, Event, Tagged};
use serde_json::Value;

use super::model::{Model, Stage};
use super::{Kind, Supervisor};

impl Supervisor {
    /// Queues an event for the host.
    pub(super) fn emit(&self, event: Event, model: Option<&str>) {
        let tagged = Tagged {
            event,
            model: model.map(str::to_owned),
        };
        match serde_json::to_value(&tagged) {
            Ok(Value::Object(object)) => self.outbox.push(object),
            other => tracing::error!(?other, "an event is no JSON object"),
        }
    }

    pub(super) fn say_hello(&self) {
        self.emit(
            Event::Hello(Hello {
                protocol: ProtocolVersion::CURRENT,
                program: "lookahead".to_owned(),
                version: env!("CARGO_PKG_VERSION").to_owned(),
                pid: std::process::id(),
                backend: None,
            }),
            None,
        );
    }

    /// Answers a request that was not accepted.
    pub(super) fn fail_new(&self, id: Option<String>, model: Option<&str>, code: ErrorCode, message: String) {
        self.emit(Event::Error(Failure::new(id, code, message)), model);
    }

    /// Ends an accepted request with an error.
    pub(super) fn end_failed(&mut self, id: &str, code: &ErrorCode, message: &str, retryable: bool) {
        let Some(active) = self.requests.remove(id) else {
            return;
        };
        if active.kind == Kind::Generate {
            self.counts.failed += 1;
        }
        let mut failure = Failure::new(Some(id.to_owned()), code.clone(), message);
        failure.retryable = retryable;
        // Only the scheduler's own answer to a second use of an id carries the mark.
        failure.duplicate = false;
        self.emit(Event::Error(failure), Some(&active.name));
    }

    pub(super) fn status(&self, id: String) -> Status {
        let running = self
            .models
            .values()
            .flat_map(|model| &model.running)
            .filter_map(|id| self.running_request(id));
        let busy = self.models.values().any(|model| model.pending() > 0);
        let state = if self.quitting {
            State::Stopping
        } else if busy {
            State::Busy
        } else {
            State::Idle
        };
        let mut status = Status::new(id, state);
        status.uptime = self.started.elapsed().as_nanos() as u64;
        status.running = running.collect();
        status.waiting = self.models.values().map(|model| model.queue.len() as u64).sum();
        status.requests = self.counts;
        status.models = Some(self.model_entries());
        status
    }

    fn running_request(&self, id: &str) -> Option<RunningRequest> {
        let active = self.requests.get(id)?;
        Some(RunningRequest {
            id: id.to_owned(),
            phase: active.phase.clone(),
            prompt_tokens: active.prompt_tokens,
            cached: active.cached,
            prefilled: active.prefilled,
            generated: active.generated,
            elapsed: active.arrived.elapsed().as_nanos() as u64,
        })
    }

    pub(super) fn model_entries(&self) -> Vec<ModelEntry> {
        let now = Instant::now();
        self.models
            .values()
            .filter_map(|model| entry(model, now))
            .collect()
    }
}

fn entry(model: &Model, now: Instant) -> Option<ModelEntry> {
    let state = match &model.child {
        Some(child) => match child.stage {
            Stage::Loading { .. } => ModelState::Loading,
            Stage::Ready(_) => ModelState::Ready,
            Stage::Stopping(_) => ModelState::Unloading,
        },
        // A request waits for memory or for the end of a delay after crashes: it will be loaded.
        None if model.oldest_demand().is_some() => ModelState::Loading,
        None if model.failure.is_some() => ModelState::Failed,
        None => return None,
    };
    Some(ModelEntry {
        model: model.name.clone(),
        pid: model.child.as_ref().map(|child| child.process.pid()),
        memory: model.child.as_ref().and(model.bytes()).unwrap_or(0),
        requests: model.pending() as u64,
        idle_since: model.idle_since().and_then(|at| since_1970(at, now)),
        draft: model.ready().map(|ready| ready.draft.clone()),
        reason: (state == ModelState::Failed)
            .then(|| model.failure.clone())
            .flatten(),
        state,
    })
}

/// A moment as milliseconds since 1970.
fn since_1970(at: Instant, now: Instant) -> Option<u64> {
    let then = SystemTime::now().checked_sub(now.saturating_duration_since(at))?;
    let time = then.duration_since(UNIX_EPOCH).ok()?;
    u64::try_from(time.as_millis()).ok()
}

/// A `done` for a request that no process has worked on.
pub(crate) fn empty_done(id: &str, reason: DoneReason, waited: u64) -> Done {
    Done {
        id: id.to_owned(),
        done_reason: reason,
        stop: None,
        total_duration: waited,
        queue_duration: waited,
        prompt_eval_count: 0,
        cached_count: 0,
        prompt_eval_duration: 0,
        eval_count: 0,
        eval_duration: 0,
        draft: DraftStats::none(),
    }
}
