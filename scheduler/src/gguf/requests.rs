//! The requests of one GGUF process that have not ended.
//!
//! Invariant: a request's final event is sent exactly once and under the lock that frees its id, so that nothing follows it and
//! no later request of the same id is taken for it.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use lookahead_protocol::event::{Cancelled, DoneReason, RequestCounts};
use lookahead_protocol::request::{Cancel, Generate};
use lookahead_protocol::Event;
use serde_json::Value;

use super::http::Hangup;
use crate::outbox::Outbox;
use crate::supervise::empty_done;

/// A request that has not ended.
#[derive(Debug)]
pub(super) struct Busy {
    /// Tells it from an earlier request of the same id.
    pub(super) serial: u64,
    pub(super) cancelled: bool,
    pub(super) generate: bool,
    pub(super) hangup: Option<Hangup>,
    pub(super) arrived: Instant,
}

/// What the threads of the process share.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) outbox: Arc<Outbox>,
    pub(super) busy: Mutex<HashMap<String, Busy>>,
    pub(super) stopping: AtomicBool,
    pub(super) ready: AtomicBool,
    pub(super) last_serial: AtomicU64,
    pub(super) started: Instant,
    pub(super) counts: Mutex<RequestCounts>,
}

/// A `generate` request on its way to the server.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) request: Box<Generate>,
    pub(super) serial: u64,
    pub(super) arrived: Instant,
}

impl Shared {
    pub(super) fn busy(&self) -> MutexGuard<'_, HashMap<String, Busy>> {
        self.busy.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn emit(&self, event: Event) {
        match serde_json::to_value(&event) {
            Ok(Value::Object(object)) => self.outbox.push(object),
            other => tracing::error!(?other, "an event is no JSON object"),
        }
    }

    /// Passes on an event of a request, unless that has ended meanwhile.
    pub(super) fn emit_for(&self, id: &str, serial: u64, event: Event) {
        let busy = self.busy();
        if busy.get(id).is_some_and(|busy| busy.serial == serial) {
            self.emit(event);
        }
    }

    /// Ends a request, unless it has ended already.
    pub(super) fn end(&self, id: &str, serial: u64, event: Event) {
        let mut busy = self.busy();
        if busy.get(id).is_some_and(|busy| busy.serial == serial) {
            if busy.remove(id).is_some_and(|ended| ended.generate) {
                self.count(&event);
            }
            // Under the lock, so that nothing can use the id again before its final event is out.
            self.emit(event);
        }
    }

    /// Counts the end of a generation.
    fn count(&self, event: &Event) {
        let mut counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        match event {
            Event::Done(done) if done.done_reason == DoneReason::Cancelled => counts.cancelled += 1,
            Event::Done(_) => counts.completed += 1,
            _ => counts.failed += 1,
        }
    }

    /// How generations ended so far.
    pub(super) fn counts(&self) -> RequestCounts {
        *self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the request has not ended.
    pub(super) fn has(&self, id: &str, serial: u64) -> bool {
        self.busy().get(id).is_some_and(|busy| busy.serial == serial)
    }

    /// Whether the request is to end, or has ended, as cancelled.
    pub(super) fn is_cancelled(&self, id: &str, serial: u64) -> bool {
        let cancelled = |busy: &Busy| busy.cancelled || busy.serial != serial;
        self.stopping.load(Ordering::SeqCst) || self.busy().get(id).is_none_or(cancelled)
    }

    /// Keeps the means to end a request's connection, and uses it at once where the request is cancelled already.
    pub(super) fn connected(&self, id: &str, serial: u64, hangup: Hangup) {
        let stopping = self.stopping.load(Ordering::SeqCst);
        match self.busy().get_mut(id).filter(|busy| busy.serial == serial) {
            Some(busy) => {
                if busy.cancelled || stopping {
                    hangup.hang_up();
                }
                busy.hangup = Some(hangup);
            }
            None => hangup.hang_up(),
        }
    }

    /// Cancels a request: one that the server works on ends when its connection does, any other one at once.
    pub(super) fn cancel(&self, cancel: Cancel) {
        let Cancel { id, target } = cancel;
        let mut busy = self.busy();
        let found = busy.get_mut(&target).filter(|busy| busy.generate);
        let waited = found
            .as_ref()
            .map_or(0, |busy| busy.arrived.elapsed().as_nanos() as u64);
        let (is_found, is_waiting) = (
            found.is_some(),
            found.as_ref().is_some_and(|busy| busy.hangup.is_none()),
        );
        if let Some(busy) = found {
            busy.cancelled = true;
            if let Some(hangup) = &busy.hangup {
                hangup.hang_up();
            }
        }
        self.emit(Event::Cancelled(Cancelled {
            id,
            target: target.clone(),
            found: is_found,
        }));
        if is_waiting {
            busy.remove(&target);
            let done = Event::Done(Box::new(empty_done(&target, DoneReason::Cancelled, waited)));
            self.count(&done);
            self.emit(done);
        }
    }

    pub(super) fn stop(&self) {
        self.stopping.store(true, Ordering::SeqCst);
        for busy in self.busy().values() {
            if let Some(hangup) = &busy.hangup {
                hangup.hang_up();
            }
        }
    }

    /// Ends as cancelled whatever is still open.
    pub(super) fn cancel_all(&self) {
        for (id, request) in self.busy().drain() {
            let waited = request.arrived.elapsed().as_nanos() as u64;
            self.emit(Event::Done(Box::new(empty_done(
                &id,
                DoneReason::Cancelled,
                waited,
            ))));
        }
    }
}
