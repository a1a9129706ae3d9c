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
pub struct CancelFlag(Arc<Shared>);

#[derive(Default)]
struct Shared {
    state: AtomicU8,
    /// What the request waits with.
    content: Mutex<Option<Arc<dyn Release>>>,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared")
            .field("state", &self.state)
            .finish_non_exhaustive()
    }
}

/// What can be let go of from outside.
trait Release: Send + Sync {
    fn release(&self);
}

impl<T: Send> Release for Mutex<Option<T>> {
    fn release(&self) {
        drop(locked(self).take());
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What a request waits with in a queue; gone once it is cancelled, so that queues keep no prompts and pictures of nobody.
#[derive(Debug)]
pub struct Held<T>(Arc<Mutex<Option<T>>>);

impl<T> Held<T> {
    /// The content; none if the request was cancelled.
    pub fn take(&self) -> Option<T> {
        locked(&self.0).take()
    }
}

impl CancelFlag {
    /// Whether the request shall end.
    pub fn is_set(&self) -> bool {
        self.0.state.load(Ordering::Acquire) == CANCELLED
    }

    /// Asks for the end; true if the request had not started, which it then never does.
    pub fn set(&self) -> bool {
        let waited = self.0.state.swap(CANCELLED, Ordering::AcqRel) == WAITING;
        self.release();
        waited
    }

    fn release(&self) {
        // Taken out first: the content may hold this very flag.
        let content = locked(&self.0.content).take();
        if let Some(content) = content {
            content.release();
        }
    }

    /// Holds what the request waits with until it is taken or the request is cancelled.
    pub fn hold<T: Send + 'static>(&self, content: T) -> Held<T> {
        let held = Arc::new(Mutex::new(Some(content)));
        *locked(&self.0.content) = Some(Arc::clone(&held) as Arc<dyn Release>);
        if self.is_set() {
            self.release();
        }
        Held(held)
    }

    /// Starts the request; false if it was cancelled before, when its final event has been sent already.
    pub fn start(&self) -> bool {
        self.0
            .state
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
        locked(&self.entries)
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
    fn what_a_cancelled_request_waits_with_is_freed_at_once() {
        let registry = Registry::default();
        let prompt = Arc::new("a long prompt");
        let flag = registry.begin("a", true).unwrap();
        // As a job does, the content holds its request's flag.
        let queued = flag.hold((flag.clone(), Arc::clone(&prompt)));
        assert_eq!(Arc::strong_count(&prompt), 2);
        assert!(matches!(registry.cancel("a"), Found::Waiting(_)));
        assert_eq!(Arc::strong_count(&prompt), 1);
        assert!(queued.take().is_none());
        // A request that is cancelled while it goes from one queue to the next keeps nothing either.
        let late = flag.hold(Arc::clone(&prompt));
        assert_eq!(Arc::strong_count(&prompt), 1);
        assert!(late.take().is_none());

        let other = registry.begin("b", true).unwrap();
        let held = other.hold(Arc::clone(&prompt));
        assert_eq!(held.take().as_deref(), Some(&"a long prompt"));
        assert!(held.take().is_none());
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
