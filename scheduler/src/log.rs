//! Everything the scheduler says on stderr.
//!
//! Invariant: no caller ever waits for stderr. Lines go to one thread through a bounded queue; where a host doesn't read
//! stderr the queue fills, further lines are counted and dropped, and the count is written once there is room again.

use std::io::{self, Write};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::OnceLock;
use std::time::Duration;

use crossbeam_channel::{bounded, Receiver, Sender};

/// Lines that may wait for stderr.
const QUEUE_LINES: usize = 4096;

struct Log {
    lines: Sender<Entry>,
    dropped: AtomicU64,
}

enum Entry {
    Line(Vec<u8>),
    Flush(Sender<()>),
}

static LOG: OnceLock<Log> = OnceLock::new();

fn log() -> &'static Log {
    LOG.get_or_init(|| {
        let (sender, receiver) = bounded(QUEUE_LINES);
        // A process that can't start this thread still runs; its lines then fill the queue and are dropped.
        let _ = std::thread::Builder::new()
            .name("stderr".to_owned())
            .spawn(move || drain(&receiver));
        Log {
            lines: sender,
            dropped: AtomicU64::new(0),
        }
    })
}

fn drain(lines: &Receiver<Entry>) {
    for entry in lines {
        match entry {
            Entry::Line(bytes) => {
                // A closed stderr is no reason to end: the protocol goes over stdout.
                let _ = io::stderr().write_all(&bytes);
            }
            Entry::Flush(done) => {
                let _ = done.send(());
            }
        }
        let dropped = log().dropped.swap(0, Ordering::Relaxed);
        if dropped > 0 {
            let _ = writeln!(
                io::stderr(),
                "[lookahead] {dropped} log lines dropped, stderr was not read in time"
            );
        }
    }
}

/// Queues one line; `text` has no line end.
pub fn line(text: &str) {
    let mut bytes = Vec::with_capacity(text.len() + 1);
    bytes.extend_from_slice(text.as_bytes());
    bytes.push(b'\n');
    push(bytes);
}

fn push(bytes: Vec<u8>) {
    if log().lines.try_send(Entry::Line(bytes)).is_err() {
        log().dropped.fetch_add(1, Ordering::Relaxed);
    }
}

/// Waits, for at most `limit`, until the lines queued so far are written. For the moments before the process ends.
pub fn flush(limit: Duration) {
    let (sender, receiver) = bounded(1);
    if log().lines.send_timeout(Entry::Flush(sender), limit).is_ok() {
        let _ = receiver.recv_timeout(limit);
    }
}

/// Where `tracing` writes: one call, one queued line.
#[derive(Debug, Clone, Copy, Default)]
pub struct LogWriter;

impl Write for LogWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        push(bytes.to_vec());
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Sends `tracing` events to the log; `LOOKAHEAD_LOG` sets the filter, `default` applies where it is unset.
pub fn init(default: &str) {
    let filter = tracing_subscriber::EnvFilter::try_from_env("LOOKAHEAD_LOG")
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new(default));
    // A second call, as in tests, finds the subscriber set and changes nothing.
    let _ = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(|| LogWriter)
        .with_ansi(false)
        .with_target(false)
        .try_init();
}
