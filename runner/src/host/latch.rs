//! The one shutdown latch that every thread watches.
//!
//! Invariant: once tripped it stays tripped, and the first reason wins.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crossbeam_channel::{bounded, Receiver, Sender};

/// Why the process ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reason {
    /// A `shutdown` request.
    Request,
    /// The host closed our input.
    EndOfInput,
    /// The host closed our output.
    OutputClosed,
    /// A signal, by number.
    Signal(i32),
}

/// See the module's text. Clones share one latch.
#[derive(Debug, Clone)]
pub struct Latch {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    set: AtomicBool,
    reason: Mutex<Option<Reason>>,
    /// Dropped when the latch trips, which wakes every receiver.
    keep: Mutex<Option<Sender<()>>>,
    woken: Receiver<()>,
}

impl Default for Latch {
    fn default() -> Self {
        let (keep, woken) = bounded(0);
        Self {
            inner: Arc::new(Inner {
                set: AtomicBool::new(false),
                reason: Mutex::new(None),
                keep: Mutex::new(Some(keep)),
                woken,
            }),
        }
    }
}

impl Latch {
    /// Trips the latch.
    pub fn trip(&self, reason: Reason) {
        let mut held = self.inner.reason.lock().unwrap_or_else(PoisonError::into_inner);
        if held.is_none() {
            *held = Some(reason);
            self.inner.set.store(true, Ordering::Release);
            self.inner
                .keep
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .take();
        }
    }

    /// Whether the process is ending; cheap enough for every token.
    pub fn is_set(&self) -> bool {
        self.inner.set.load(Ordering::Acquire)
    }

    /// Why, once it is.
    pub fn reason(&self) -> Option<Reason> {
        *self.inner.reason.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A channel that disconnects when the latch trips, for `select!`.
    pub fn channel(&self) -> &Receiver<()> {
        &self.inner.woken
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_reason_wins_and_waiters_wake() {
        let latch = Latch::default();
        assert!(!latch.is_set());
        let waiter = {
            let latch = latch.clone();
            std::thread::spawn(move || latch.channel().recv().is_err())
        };
        latch.trip(Reason::EndOfInput);
        latch.trip(Reason::Signal(15));
        assert!(waiter.join().unwrap());
        assert_eq!(latch.reason(), Some(Reason::EndOfInput));
    }
}
