//! Runs cases one after another and watches over each: its time, its memory, its panics.
//!
//! Invariant: a case that breaks a rule is kept in a file whose path the failure names, with the seed that makes it again.

use std::alloc::{GlobalAlloc, Layout, System};
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::random::Random;

/// How long one case may take; generous, since machines under test are slow and shared.
pub const CASE_LIMIT: Duration = Duration::from_secs(30);

/// Counts what the process holds.
struct Counting;

static HELD: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

fn grow(bytes: usize) {
    PEAK.fetch_max(HELD.fetch_add(bytes, Relaxed) + bytes, Relaxed);
}

// SAFETY: every call goes to the system's allocator unchanged; only figures are kept beside it.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        grow(layout.size());
        // SAFETY: the caller's promise is the system allocator's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        grow(layout.size());
        // SAFETY: as above.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        HELD.fetch_sub(layout.size(), Relaxed);
        // SAFETY: as above.
        unsafe { System.dealloc(at, layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // Both blocks may be alive while one is copied to the other.
        grow(size);
        HELD.fetch_sub(layout.size(), Relaxed);
        // SAFETY: as above.
        unsafe { System.realloc(at, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Targets take turns: the figures are the process's.
static TURN: Mutex<()> = Mutex::new(());

/// Cases of each target unless a time is given; always the same ones, so that ordinary tests end alike everywhere.
const CASES: u64 = 200;

fn number(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    match text.parse() {
        Ok(number) => Some(number),
        Err(_) => panic!("{name}={text} is no number"),
    }
}

fn keep(target: &str, case: &[u8]) -> PathBuf {
    let path = std::env::temp_dir().join(format!("lookahead-fuzz-{target}-{}", std::process::id()));
    let _ = std::fs::write(&path, case);
    path
}

/// What a case does.
pub type Case<'a> = Box<dyn FnOnce() + 'a>;

/// Makes and runs cases of `target` until its time is up; each may hold `memory` bytes at once.
///
/// # Panics
/// A case panicked, or held too much. One that takes too long aborts the process.
pub fn run<'a>(target: &str, memory: usize, mut make: impl FnMut(&mut Random) -> (Vec<u8>, Case<'a>)) {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let seed = number("LOOKAHEAD_FUZZ_SEED").unwrap_or(1);
    let end = number("LOOKAHEAD_FUZZ_SECONDS").map(|seconds| Instant::now() + Duration::from_secs(seconds));
    let current = Arc::new(Mutex::new(Vec::new()));
    let (done, over) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
    let watch = {
        let (target, current, done, over) = (
            target.to_owned(),
            Arc::clone(&current),
            Arc::clone(&done),
            Arc::clone(&over),
        );
        std::thread::spawn(move || watch(&target, seed, &current, &done, &over))
    };
    let mut most = 0;
    loop {
        let number = done.load(Relaxed);
        if end.map_or(number >= CASES, |end| Instant::now() >= end) {
            break;
        }
        // Each case has a seed of its own, so that a late one can be made without those before it.
        let (bytes, case) = make(&mut Random::new(
            seed ^ number.wrapping_mul(0x2545_f491_4f6c_dd1d),
        ));
        *current.lock().unwrap_or_else(PoisonError::into_inner) = bytes;
        let before = HELD.load(Relaxed);
        PEAK.store(before, Relaxed);
        let result = catch_unwind(AssertUnwindSafe(case));
        let held = PEAK.load(Relaxed).saturating_sub(before);
        most = most.max(held);
        if result.is_err() || held > memory {
            over.store(true, Relaxed);
            let path = keep(target, &current.lock().unwrap_or_else(PoisonError::into_inner));
            let fault = if result.is_err() {
                "panicked".to_owned()
            } else {
                format!("held {held} bytes")
            };
            panic!(
                "{target}: case {number} of seed {seed} {fault}; kept in {}",
                path.display()
            );
        }
        done.store(number + 1, Relaxed);
    }
    over.store(true, Relaxed);
    let _ = watch.join();
    println!(
        "{target}: {} cases, at most {most} bytes held",
        done.load(Relaxed)
    );
}

/// Aborts the process when a case takes too long: nothing can end a thread that hangs.
fn watch(target: &str, seed: u64, current: &Mutex<Vec<u8>>, done: &AtomicU64, over: &AtomicBool) {
    let (mut number, mut since) = (0, Instant::now());
    while !over.load(Relaxed) {
        std::thread::sleep(Duration::from_millis(50));
        let now = done.load(Relaxed);
        if now != number {
            (number, since) = (now, Instant::now());
        } else if since.elapsed() > CASE_LIMIT {
            let path = keep(target, &current.lock().unwrap_or_else(PoisonError::into_inner));
            eprintln!(
                "{target}: case {number} of seed {seed} takes too long; kept in {}",
                path.display()
            );
            std::process::abort();
        }
    }
}
