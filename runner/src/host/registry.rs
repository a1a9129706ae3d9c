//! Which request ids are busy, and which of them the host wants to end.
//!
//! Invariant: an id is busy from the moment its request is accepted until just before its final event is queued, so a host
//! that has read the final event can use the id again. A request either starts or is cancelled while it waits, never both:
//! whoever comes first decides, and in the second case nobody else sends its final event.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

const WAITING: u8 = 0;
const STARTED: u8 = 1;
const CANCELLED: u8 = 2;

/// Asks a request to end; checked between chunks and tokens.
#[derive(Debug, Clone, Default)]
pub struct CancelFlag(Arc<AtomicU8>);

impl CancelFlag {
    /// Whether the request shall end.
    pub fn is_set(&self) -> bool {
        self.0.load(Ordering::Acquire) == CANCELLED
    }

    /// Asks for the end; true if the request had not started, which it then never does.
    pub fn set(&self) -> bool {
        self.0.swap(CANCELLED, Ordering::AcqRel) == WAITING
    }

    /// Starts the request; false if it was cancelled before, when its final event has been sent already.
    pub fn start(&self) -> bool {
        self.0
            .compare_exchange(WAITING, STARTED, Ordering::AcqRel, Ordering::Acquire)
            .is_ok()
    }

    fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

#[derive(Debug)]
struct Entry {
    flag: CancelFlag,
    generates: bool,
    arrived: Instant,
}

/// What a cancellation met.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Found {
    /// No request of that id that could be cancelled.
    Nothing,
    /// A request that had not started and came in at this time. Its id is free; whoever cancelled it sends its final event.
    Waiting(Instant),
    /// A request that has started, and ends by itself.
    Started,
}

/// The busy ids.
#[derive(Debug, Default)]
pub struct Registry {
    entries: Mutex<HashMap<String, Entry>>,
}

impl Registry {
    fn lock(&self) -> MutexGuard<'_, HashMap<String, Entry>> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes an id; `None` if it is busy. `generates` says whether the request can be cancelled.
    pub fn begin(&self, id: &str, generates: bool) -> Option<CancelFlag> {
        let mut entries = self.lock();
        if entries.contains_key(id) {
            return None;
        }
        let flag = CancelFlag::default();
        entries.insert(
            id.to_owned(),
            Entry {
                flag: flag.clone(),
                generates,
                arrived: Instant::now(),
            },
        );
        Some(flag)
    }

    /// Frees an id; false if it wasn't busy (its final event has been sent already).
    pub fn end(&self, id: &str) -> bool {
        self.lock().remove(id).is_some()
    }

    /// Frees an id if it still belongs to the request with this flag; false if it doesn't.
    pub fn end_own(&self, id: &str, flag: &CancelFlag) -> bool {
        let mut entries = self.lock();
        let own = entries.get(id).is_some_and(|entry| entry.flag.is(flag));
        if own {
            entries.remove(id);
        }
        own
    }

    /// Whether an id is busy.
    pub fn is_busy(&self, id: &str) -> bool {
        self.lock().contains_key(id)
    }

    /// Whether no id is busy.
    pub fn is_empty(&self) -> bool {
        self.lock().is_empty()
    }

    /// Asks a request to end.
    pub fn cancel(&self, id: &str) -> Found {
        let mut entries = self.lock();
        match entries.get(id) {
            Some(entry) if entry.generates => {
                let arrived = entry.arrived;
                if entry.flag.set() {
                    entries.remove(id);
                    Found::Waiting(arrived)
                } else {
                    Found::Started
                }
            }
            _ => Found::Nothing,
        }
    }

    /// Requests that generate or wait to.
    pub fn generating(&self) -> usize {
        self.lock().values().filter(|entry| entry.generates).count()
    }

    /// Ids of all requests that generate or wait to, sorted.
    pub fn outstanding(&self) -> Vec<String> {
        let mut ids: Vec<String> = self
            .lock()
            .iter()
            .filter(|(_, entry)| entry.generates)
            .map(|(id, _)| id.clone())
            .collect();
        ids.sort();
        ids
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_is_busy_until_it_ends() {
        let registry = Registry::default();
        let flag = registry.begin("a", true).unwrap();
        assert!(flag.start());
        assert!(registry.begin("a", true).is_none());
        assert_eq!(registry.cancel("a"), Found::Started);
        assert_eq!(registry.cancel("a"), Found::Started);
        assert!(flag.is_set());
        assert!(registry.end("a"));
        assert!(!registry.end("a"));
        assert_eq!(registry.cancel("a"), Found::Nothing);
        assert!(registry.begin("a", false).is_some());
        assert_eq!(
            registry.cancel("a"),
            Found::Nothing,
            "a request that doesn't generate can't be cancelled"
        );
    }

    #[test]
    fn a_request_cancelled_while_it_waits_never_starts_and_leaves_its_id_to_the_next() {
        let registry = Registry::default();
        let first = registry.begin("a", true).unwrap();
        assert!(matches!(registry.cancel("a"), Found::Waiting(_)));
        assert!(registry.is_empty());
        let second = registry.begin("a", true).unwrap();
        assert!(!first.start());
        assert!(
            !registry.end_own("a", &first),
            "the id belongs to the second request"
        );
        assert!(second.start());
        assert!(registry.end_own("a", &second));
    }
}
