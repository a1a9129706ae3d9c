//! Events on their way to the host.
//!
//! Invariant: putting an event in never blocks, and a host that reads slowly costs bounded memory: pending `token` events
//! of one request are merged into one, a pending progress event is replaced by the next, and above `HIGH_BYTES` whoever
//! feeds the outbox from a pipe waits in [`Outbox::wait_for_room`], so that the pipe itself holds the producer back.

use std::collections::{HashMap, VecDeque};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde_json::{Map, Value};

/// An event as a JSON object.
pub type Object = Map<String, Value>;

/// Above this many pending bytes the readers of children wait.
const HIGH_BYTES: usize = 8 << 20;
/// Above this many the reader of the host waits as well.
const OVERFULL_BYTES: usize = 24 << 20;

/// The queue between the scheduler and its host.
#[derive(Debug, Default)]
pub struct Outbox {
    state: Mutex<State>,
    filled: Condvar,
    emptied: Condvar,
}

#[derive(Debug, Default)]
struct State {
    pending: VecDeque<(Object, usize)>,
    /// Sequence number of `pending[0]`.
    first: u64,
    /// Where the last mergeable event with this key waits.
    mergeable: HashMap<String, u64>,
    bytes: usize,
    closed: bool,
}

/// What [`Outbox::pop`] found.
#[derive(Debug, PartialEq)]
pub enum Popped {
    /// The next event.
    Event(Object),
    /// Nothing arrived in time.
    Empty,
    /// The outbox is closed and everything in it has been taken.
    Closed,
}

impl Outbox {
    /// Adds an event, merging it with a pending one where the protocol allows it. After [`Outbox::close`] it is dropped.
    pub fn push(&self, line: Object) {
        let mut state = self.lock();
        if state.closed {
            return;
        }
        state.push(line);
        drop(state);
        self.filled.notify_one();
    }

    /// Takes the next event, waiting for at most `limit` (for ever if `None`).
    pub fn pop(&self, limit: Option<Duration>) -> Popped {
        let deadline = limit.map(|limit| Instant::now() + limit);
        let mut state = self.lock();
        loop {
            if let Some(line) = state.take() {
                drop(state);
                self.emptied.notify_all();
                return Popped::Event(line);
            }
            if state.closed {
                return Popped::Closed;
            }
            state = match deadline {
                None => self.filled.wait(state).unwrap_or_else(PoisonError::into_inner),
                Some(deadline) => {
                    let left = deadline.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        return Popped::Empty;
                    }
                    self.filled
                        .wait_timeout(state, left)
                        .unwrap_or_else(PoisonError::into_inner)
                        .0
                }
            };
        }
    }

    /// Ends the queue: pending events can still be taken, new ones are dropped, and nobody waits for room any more.
    pub fn close(&self) {
        self.lock().closed = true;
        self.filled.notify_all();
        self.emptied.notify_all();
    }

    /// True once closed.
    pub fn is_closed(&self) -> bool {
        self.lock().closed
    }

    /// True while the host is so far behind that feeders wait.
    pub fn is_full(&self) -> bool {
        let state = self.lock();
        state.bytes > HIGH_BYTES && !state.closed
    }

    /// Blocks while the outbox is full. For whoever reads what children write.
    pub fn wait_for_room(&self) {
        self.wait_below(HIGH_BYTES);
    }

    /// Blocks while the outbox is overfull. For whoever reads the host's requests, each of which may be answered at once: a
    /// host that only sends is held back as well, but much later than the children, since it may be about to read.
    pub fn wait_for_more_room(&self) {
        self.wait_below(OVERFULL_BYTES);
    }

    fn wait_below(&self, limit: usize) {
        let mut state = self.lock();
        while state.bytes > limit && !state.closed {
            state = self.emptied.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn push(&mut self, line: Object) {
        let key = merge_key(&line);
        let weight = weigh(&line);
        if let Some(pending) = key.as_ref().and_then(|key| self.mergeable.get(key)) {
            // An entry that is still in the map is still pending: `take` removes it from both.
            if let Some((into, into_weight)) = self.pending.get_mut((pending - self.first) as usize) {
                let before = *into_weight;
                merge(into, line);
                *into_weight = if is_token(into) { before + weight } else { weight };
                self.bytes = self.bytes - before + *into_weight;
                return;
            }
        }
        match key {
            Some(key) => {
                self.mergeable.insert(key, self.first + self.pending.len() as u64);
            }
            None => {
                if let Some(id) = line.get("id").and_then(Value::as_str) {
                    // Whatever comes later with this id must not be moved before this event.
                    self.mergeable.remove(&format!("token {id}"));
                    self.mergeable.remove(&format!("prefill {id}"));
                }
            }
        }
        self.bytes += weight;
        self.pending.push_back((line, weight));
    }

    fn take(&mut self) -> Option<Object> {
        let (line, weight) = self.pending.pop_front()?;
        if let Some(key) = merge_key(&line) {
            if self.mergeable.get(&key) == Some(&self.first) {
                self.mergeable.remove(&key);
            }
        }
        self.first += 1;
        self.bytes -= weight;
        Some(line)
    }
}

fn is_token(line: &Object) -> bool {
    line.get("type").and_then(Value::as_str) == Some("token")
}

/// Events with the same key may become one; `None` for events that stand alone.
fn merge_key(line: &Object) -> Option<String> {
    let text = |field: &str| line.get(field).and_then(Value::as_str);
    match text("type")? {
        "token" => Some(format!("token {}", text("id")?)),
        "prefill" => Some(format!("prefill {}", text("id")?)),
        "load" => Some(format!(
            "load {} {}",
            text("model").unwrap_or_default(),
            text("stage").unwrap_or_default()
        )),
        _ => None,
    }
}

/// Merges `from` into the pending `into`: token events are joined, progress events replaced.
fn merge(into: &mut Object, from: Object) {
    if !is_token(into) {
        *into = from;
        return;
    }
    for (field, value) in from {
        match (into.get_mut(&field), value) {
            (Some(Value::String(text)), Value::String(more)) if field == "text" => text.push_str(&more),
            (Some(Value::Array(items)), Value::Array(more)) => items.extend(more),
            (Some(_), _) => {}
            (None, value) => {
                into.insert(field, value);
            }
        }
    }
}

/// A rough count of the bytes that a line holds in memory.
fn weigh(line: &Object) -> usize {
    64 + line
        .iter()
        .map(|(field, value)| field.len() + 32 + weigh_value(value))
        .sum::<usize>()
}

fn weigh_value(value: &Value) -> usize {
    match value {
        Value::Null | Value::Bool(_) | Value::Number(_) => 32,
        Value::String(text) => 32 + text.len(),
        Value::Array(items) => 32 + items.iter().map(weigh_value).sum::<usize>(),
        Value::Object(map) => weigh(map),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn line(value: Value) -> Object {
        value.as_object().unwrap().clone()
    }

    fn token(id: &str, text: &str, ids: &[u32]) -> Object {
        line(json!({"type": "token", "id": id, "text": text, "tokens": ids}))
    }

    fn drain(outbox: &Outbox) -> Vec<Value> {
        let mut lines = Vec::new();
        while let Popped::Event(line) = outbox.pop(Some(Duration::ZERO)) {
            lines.push(Value::Object(line));
        }
        lines
    }

    #[test]
    fn pending_tokens_of_one_request_become_one_event() {
        let outbox = Outbox::default();
        outbox.push(token("a", "He", &[1]));
        outbox.push(token("b", "x", &[9]));
        outbox.push(token("a", "llo", &[2, 3]));
        outbox.push(line(json!({"type": "done", "id": "a"})));
        assert_eq!(
            drain(&outbox),
            [
                json!({"type": "token", "id": "a", "text": "Hello", "tokens": [1, 2, 3]}),
                json!({"type": "token", "id": "b", "text": "x", "tokens": [9]}),
                json!({"type": "done", "id": "a"}),
            ]
        );
    }

    #[test]
    fn a_token_never_moves_before_another_event_of_its_request() {
        let outbox = Outbox::default();
        outbox.push(token("a", "1", &[1]));
        outbox.push(line(json!({"type": "done", "id": "a"})));
        outbox.push(line(json!({"type": "prompt", "id": "a"})));
        outbox.push(token("a", "2", &[2]));
        let types: Vec<_> = drain(&outbox)
            .iter()
            .map(|line| line["type"].as_str().unwrap().to_owned())
            .collect();
        assert_eq!(types, ["token", "done", "prompt", "token"]);
    }

    #[test]
    fn a_taken_event_is_not_merged_into() {
        let outbox = Outbox::default();
        outbox.push(token("a", "1", &[1]));
        assert_eq!(drain(&outbox).len(), 1);
        outbox.push(token("a", "2", &[2]));
        assert_eq!(
            drain(&outbox),
            [json!({"type": "token", "id": "a", "text": "2", "tokens": [2]})]
        );
    }

    #[test]
    fn progress_is_replaced() {
        let outbox = Outbox::default();
        for done in 0..100 {
            outbox.push(line(
                json!({"type": "prefill", "id": "a", "done": done, "total": 100}),
            ));
            outbox.push(line(
                json!({"type": "load", "model": "m", "stage": "weights", "done": done, "total": 100}),
            ));
        }
        let lines = drain(&outbox);
        assert_eq!(lines.len(), 2);
        assert_eq!(lines[0]["done"], 99);
    }

    #[test]
    fn feeders_wait_for_a_host_that_does_not_read() {
        let outbox = Outbox::default();
        outbox.push(token("a", &"x".repeat(HIGH_BYTES + 1), &[1]));
        assert!(outbox.is_full());
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| outbox.wait_for_room());
            std::thread::sleep(Duration::from_millis(50));
            assert!(!waiting.is_finished());
            assert_eq!(drain(&outbox).len(), 1);
            waiting.join().unwrap();
        });
        assert!(!outbox.is_full());
        assert_eq!(outbox.lock().bytes, 0);
    }

    #[test]
    fn closing_lets_the_rest_be_read() {
        let outbox = Outbox::default();
        outbox.push(token("a", "1", &[1]));
        outbox.close();
        outbox.push(token("a", "2", &[2]));
        assert!(matches!(outbox.pop(None), Popped::Event(_)));
        assert_eq!(outbox.pop(None), Popped::Closed);
    }
}
