//! Events on their way to stdout.
//!
//! Invariant: the order of one request's events is kept; `token` events of one request that wait behind a slow reader are
//! merged into one, progress events are replaced by the latest, so nobody who sends an event ever waits and memory is
//! bounded by what the requests themselves may produce.

use std::collections::VecDeque;
use std::io::Write;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use lookahead_protocol::{Event, LineWriter, WriteError};

use super::latch::{Latch, Reason};
use super::record::Recorder;

/// Waiting events from which the reader of requests pauses: a host that asks without ever reading answers gets no more.
const PAUSE_AT: usize = 4096;

#[derive(Debug, Default)]
struct Queue {
    events: VecDeque<Event>,
    writing: bool,
    closed: bool,
    broken: bool,
}

/// Where events are put; clones share one queue.
#[derive(Debug, Clone, Default)]
pub struct Outbox {
    shared: Arc<(Mutex<Queue>, Condvar)>,
}

impl Outbox {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.shared.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Queues an event; never waits.
    pub fn push(&self, event: Event) {
        let mut queue = self.lock();
        if !queue.broken {
            enqueue(&mut queue.events, event);
            self.shared.1.notify_all();
        }
    }

    /// Waits while so many events are pending that reading further requests would let memory grow.
    pub fn wait_for_room(&self, latch: &Latch) {
        let mut queue = self.lock();
        while queue.events.len() >= PAUSE_AT && !queue.broken && !latch.is_set() {
            queue = self.wait(queue, Duration::from_millis(100));
        }
    }

    /// Waits until everything is written, at most `limit`; then no more is written.
    pub fn close(&self, limit: Duration) {
        let end = Instant::now() + limit;
        let mut queue = self.lock();
        queue.closed = true;
        self.shared.1.notify_all();
        while (!queue.events.is_empty() || queue.writing) && !queue.broken {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            queue = self.wait(queue, left);
        }
    }

    fn wait<'a>(&self, queue: MutexGuard<'a, Queue>, limit: Duration) -> MutexGuard<'a, Queue> {
        self.shared
            .1
            .wait_timeout(queue, limit)
            .unwrap_or_else(PoisonError::into_inner)
            .0
    }

    /// Writes until closed or the host has gone; a closed output trips the latch.
    pub fn run(&self, output: impl Write, latch: &Latch, recorder: Option<&Recorder>) {
        let mut writer = LineWriter::new(output);
        loop {
            let mut queue = self.lock();
            let event = loop {
                if let Some(event) = queue.events.pop_front() {
                    queue.writing = true;
                    break event;
                }
                if queue.closed {
                    return;
                }
                queue = self.shared.1.wait(queue).unwrap_or_else(PoisonError::into_inner);
            };
            drop(queue);
            self.shared.1.notify_all();
            if let Some(recorder) = recorder {
                recorder.output(&event);
            }
            let result = writer.write(&event);
            let mut queue = self.lock();
            queue.writing = false;
            if let Err(error) = result {
                if !matches!(error, WriteError::Closed) {
                    tracing::error!("writing an event failed: {error}");
                }
                queue.broken = true;
                queue.events.clear();
                self.shared.1.notify_all();
                latch.trip(Reason::OutputClosed);
                return;
            }
            self.shared.1.notify_all();
        }
    }
}

fn enqueue(events: &mut VecDeque<Event>, event: Event) {
    match event {
        Event::Token(token) => {
            // Only the latest event of the request may take it in: what lies between must stay between.
            let last = events.iter_mut().rev().find(|e| e.id() == Some(&token.id));
            match last {
                Some(Event::Token(waiting)) => waiting.merge(token),
                _ => events.push_back(Event::Token(token)),
            }
        }
        Event::Prefill(prefill) => {
            let last = events.iter_mut().rev().find(|e| e.id() == Some(&prefill.id));
            match last {
                Some(Event::Prefill(waiting)) => *waiting = prefill,
                _ => events.push_back(Event::Prefill(prefill)),
            }
        }
        Event::Load(load) => match events.back_mut() {
            Some(Event::Load(waiting)) => *waiting = load,
            _ => events.push_back(Event::Load(load)),
        },
        other => events.push_back(other),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lookahead_protocol::event::{Pong, Prefill, Token};

    fn token(id: &str, text: &str, ids: &[u32]) -> Event {
        Event::Token(Token {
            id: id.into(),
            text: text.into(),
            tokens: ids.to_vec(),
            logprobs: None,
        })
    }

    #[test]
    fn waiting_tokens_of_one_request_merge_and_other_requests_keep_theirs() {
        let mut events = VecDeque::new();
        enqueue(&mut events, token("a", "x", &[1]));
        enqueue(&mut events, token("b", "y", &[2]));
        enqueue(&mut events, token("a", "z", &[3, 4]));
        assert_eq!(events.len(), 2);
        assert_eq!(events[0], token("a", "xz", &[1, 3, 4]));
    }

    #[test]
    fn tokens_do_not_overtake_other_events_of_their_request() {
        let mut events = VecDeque::new();
        enqueue(&mut events, token("a", "x", &[1]));
        enqueue(&mut events, Event::Pong(Pong { id: "a".into() }));
        enqueue(&mut events, token("a", "y", &[2]));
        assert_eq!(events.len(), 3);
    }

    #[test]
    fn progress_is_replaced_by_the_latest() {
        let prefill = |done| {
            Event::Prefill(Prefill {
                id: "a".into(),
                done,
                total: 9,
            })
        };
        let mut events = VecDeque::new();
        enqueue(&mut events, prefill(1));
        enqueue(&mut events, prefill(5));
        assert_eq!(events.len(), 1);
        assert_eq!(events[0], prefill(5));
    }

    #[test]
    fn a_closed_output_ends_the_writer_and_trips_the_latch() {
        struct Closed;
        impl Write for Closed {
            fn write(&mut self, _: &[u8]) -> std::io::Result<usize> {
                Err(std::io::ErrorKind::BrokenPipe.into())
            }
            fn flush(&mut self) -> std::io::Result<()> {
                Ok(())
            }
        }
        let (outbox, latch) = (Outbox::default(), Latch::default());
        outbox.push(Event::Pong(Pong { id: "a".into() }));
        outbox.run(Closed, &latch, None);
        assert_eq!(latch.reason(), Some(Reason::OutputClosed));
        outbox.close(Duration::from_secs(5));
    }
}
