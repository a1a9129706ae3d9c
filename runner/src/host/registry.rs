//! Which request ids are busy, and which of them the host wants to end.
//!
//! Invariant: an id is busy from the moment its request is accepted until just before its final event is queued, so a host
//! that has read the final event can use the id again.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Asks a request to end; checked between chunks and tokens.
#[derive(Debug, Clone, Default)]
pub struct CancelFlag(Arc<AtomicBool>);

impl CancelFlag {
    /// Whether the request shall end.
    pub fn is_set(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }

    /// Asks for the end.
    pub fn set(&self) {
        self.0.store(true, Ordering::Release);
    }
}

#[derive(Debug)]
struct Entry {
    flag: CancelFlag,
    generates: bool,
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
        entries.insert(id.to_owned(), Entry { flag: flag.clone(), generates });
        Some(flag)
    }

    /// Frees an id; false if it wasn't busy (its final event has been sent already).
    pub fn end(&self, id: &str) -> bool {
        self.lock().remove(id).is_some()
    }

    /// Whether an id is busy.
    pub fn is_busy(&self, id: &str) -> bool {
        self.lock().contains_key(id)
    }

    /// Asks a request to end; false if there is none of that id that could.
    pub fn cancel(&self, id: &str) -> bool {
        let entries = self.lock();
        let found = entries.get(id).filter(|entry| entry.generates);
        if let Some(entry) = found {
            entry.flag.set();
        }
        found.is_some()
    }

    /// Requests that generate or wait to.
    pub fn generating(&self) -> usize {
        self.lock().values().filter(|entry| entry.generates).count()
    }

    /// Ids of all requests that generate or wait to, sorted.
    pub fn outstanding(&self) -> Vec<String> {
        let mut ids: Vec<String> =
            self.lock().iter().filter(|(_, entry)| entry.generates).map(|(id, _)| id.clone()).collect();
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
        assert!(registry.begin("a", true).is_none());
        assert!(registry.cancel("a"));
        assert!(flag.is_set());
        assert!(registry.end("a"));
        assert!(!registry.end("a"));
        assert!(!registry.cancel("a"));
        assert!(registry.begin("a", false).is_some());
        assert!(!registry.cancel("a"), "a request that doesn't generate can't be cancelled");
    }
}
