//! `--record FILE`: every line that the host wrote and read, in the order seen.
//!
//! Invariant: recording never changes what the scheduler does; a failure to write ends the recording with a warning.

use std::fs::File;
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use lookahead_protocol::transcript::{Direction, Entry, Header, Recorded, TranscriptWriter};
use lookahead_protocol::{Line, WriteError};

use crate::outbox::Object;

/// Writes a transcript.
#[derive(Debug)]
pub struct Recorder {
    writer: Mutex<Option<TranscriptWriter<File>>>,
    started: Instant,
}

impl Recorder {
    /// Creates the file and writes its header.
    pub fn create(path: &Path) -> Result<Self, WriteError> {
        let file = File::create(path).map_err(WriteError::Io)?;
        let header = Header::new("lookahead", env!("CARGO_PKG_VERSION"));
        // Each line is written at once, so that a crash cuts off at most the last one.
        let writer = TranscriptWriter::new(file, &header)?;
        Ok(Self {
            writer: Mutex::new(Some(writer)),
            started: Instant::now(),
        })
    }

    /// A line that was read.
    pub fn input(&self, line: &Line) {
        self.write(Direction::In, Recorded::from(line.clone()));
    }

    /// An event that is about to be written: whatever the host does because of it comes after it.
    pub fn output(&self, event: &Object) {
        self.write(Direction::Out, Recorded::Object(event.clone()));
    }

    fn write(&self, dir: Direction, line: Recorded) {
        let mut writer = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
        // Under the lock, so that times rise.
        let t = self.started.elapsed().as_millis() as u64;
        if let Some(open) = writer.as_mut() {
            if let Err(error) = open.write(Entry { t, dir, line }) {
                tracing::warn!("the transcript ends here: {error}");
                *writer = None;
            }
        }
    }
}
