//! `--record FILE`: every line read and written, in the order seen.
//!
//! Invariant: recording never changes what the program does; a failure to write ends the recording with a warning.

use std::fs::File;
use std::io::BufWriter;
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use lookahead_protocol::transcript::{Direction, Entry, Header, Recorded, TranscriptWriter};
use lookahead_protocol::{Event, Line, WriteError};
use serde_json::Value;

/// Writes a transcript.
#[derive(Debug)]
pub struct Recorder {
    writer: Mutex<Option<TranscriptWriter<BufWriter<File>>>>,
    start: Instant,
}

impl Recorder {
    /// Creates the file and writes its header.
    ///
    /// # Errors
    /// The file can't be created or written.
    pub fn create(path: &Path, header: &Header) -> Result<Self, WriteError> {
        let file = File::create(path).map_err(WriteError::Io)?;
        let writer = TranscriptWriter::new(BufWriter::new(file), header)?;
        Ok(Self {
            writer: Mutex::new(Some(writer)),
            start: Instant::now(),
        })
    }

    /// A line that was read.
    pub fn input(&self, line: &Line) {
        self.write(Direction::In, Recorded::from(line.clone()));
    }

    /// An event that is being written.
    pub fn output(&self, event: &Event) {
        if let Ok(Value::Object(object)) = serde_json::to_value(event) {
            self.write(Direction::Out, Recorded::Object(object));
        }
    }

    fn write(&self, dir: Direction, line: Recorded) {
        let t = u64::try_from(self.start.elapsed().as_millis()).unwrap_or(u64::MAX);
        let mut writer = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(open) = writer.as_mut() {
            if let Err(error) = open.write(Entry { t, dir, line }) {
                tracing::warn!("the transcript ends here: {error}");
                *writer = None;
            }
        }
    }
}
