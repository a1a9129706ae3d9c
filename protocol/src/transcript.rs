//! Transcripts: what a program read and wrote, line by line, in the order seen. Whatever came in can be sent again byte
//! for byte, except that an object is written with its own spacing and a line too long to be kept is told by its length.

use std::io::{self, Read, Write};

use base64::Engine;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::codec::{Line, LineReader, LineWriter, WriteError};

/// What `format.name` says in every transcript.
pub const TRANSCRIPT_NAME: &str = "lookahead-transcript";
/// The major version that this crate writes, and the only one that it reads.
pub const TRANSCRIPT_MAJOR: u32 = 1;
/// The minor version that this crate writes.
pub const TRANSCRIPT_MINOR: u32 = 0;

/// A transcript's first line.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Header {
    /// The format and its version.
    pub format: TranscriptFormat,
    /// The program that was recorded: `lookahead-runner` or `lookahead`.
    pub program: String,
    /// The program's own version.
    pub version: String,
    /// The model as the program was given it; null for a scheduler.
    pub model: Option<String>,
    /// What identifies the model's contents; null for a scheduler.
    pub fingerprint: Option<String>,
}

/// The name and version of a transcript's format.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TranscriptFormat {
    /// [`TRANSCRIPT_NAME`].
    pub name: String,
    /// Incompatible generation.
    pub major: u32,
    /// Compatible additions to it.
    pub minor: u32,
}

impl Header {
    /// A header of the current version.
    pub fn new(program: impl Into<String>, version: impl Into<String>) -> Self {
        let format = TranscriptFormat {
            name: TRANSCRIPT_NAME.to_owned(),
            major: TRANSCRIPT_MAJOR,
            minor: TRANSCRIPT_MINOR,
        };
        Self {
            format,
            program: program.into(),
            version: version.into(),
            model: None,
            fingerprint: None,
        }
    }

    /// The same with the model that the program serves.
    #[must_use]
    pub fn with_model(mut self, model: impl Into<String>, fingerprint: impl Into<String>) -> Self {
        self.model = Some(model.into());
        self.fingerprint = Some(fingerprint.into());
        self
    }
}

/// Which way a line went, seen from the recorded program.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Direction {
    /// It was read.
    In,
    /// It was written.
    Out,
}

/// One line of a transcript.
#[derive(Debug, Clone, PartialEq)]
pub struct Entry {
    /// Milliseconds since the program's start.
    pub t: u64,
    /// Which way the line went.
    pub dir: Direction,
    /// The line.
    pub line: Recorded,
}

/// A line as a transcript keeps it.
#[derive(Debug, Clone, PartialEq)]
pub enum Recorded {
    /// A JSON object.
    Object(Map<String, Value>),
    /// Text that is no JSON object.
    Text(String),
    /// Bytes that are not UTF-8: `line` has them with U+FFFD in the place of what isn't, `base64` as they were.
    Bytes(Vec<u8>),
    /// A line that was discarded for its length: `line` is empty, `too_long` its length in bytes.
    TooLong(u64),
}

impl From<Line> for Recorded {
    fn from(line: Line) -> Self {
        match line {
            Line::Text(text) => match serde_json::from_str(&text) {
                Ok(Value::Object(map)) => Self::Object(map),
                _ => Self::Text(text),
            },
            Line::NotUtf8(bytes) => Self::Bytes(bytes),
            Line::TooLong { length } => Self::TooLong(length),
        }
    }
}

impl Recorded {
    /// Writes what to send in the line's place, without a line end. For a discarded line that is as many `x`.
    ///
    /// # Errors
    ///
    /// What the output reports.
    pub fn write_to(&self, output: &mut impl Write) -> io::Result<()> {
        match self {
            Self::Object(map) => Ok(serde_json::to_writer(output, map)?),
            Self::Text(text) => output.write_all(text.as_bytes()),
            Self::Bytes(bytes) => output.write_all(bytes),
            Self::TooLong(length) => io::copy(&mut io::repeat(b'x').take(*length), output).map(|_| ()),
        }
    }
}

/// An entry as it stands in the file.
#[derive(Serialize, Deserialize)]
struct Written {
    t: serde_json::Number,
    dir: Direction,
    line: Value,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    base64: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    too_long: Option<u64>,
}

impl Written {
    fn from_entry(entry: Entry) -> Self {
        let (line, base64, too_long) = match entry.line {
            Recorded::Object(map) => (Value::Object(map), None, None),
            Recorded::Text(text) => (Value::String(text), None, None),
            Recorded::Bytes(bytes) => {
                let base64 = base64::engine::general_purpose::STANDARD.encode(&bytes);
                (Value::from(String::from_utf8_lossy(&bytes)), Some(base64), None)
            }
            Recorded::TooLong(length) => (Value::from(""), None, Some(length)),
        };
        Self {
            t: entry.t.into(),
            dir: entry.dir,
            line,
            base64,
            too_long,
        }
    }

    fn into_entry(self) -> Result<Entry, String> {
        let line = match (self.line, self.base64, self.too_long) {
            (Value::Object(map), None, None) => Recorded::Object(map),
            (Value::String(text), None, None) => Recorded::Text(text),
            (Value::String(_), Some(base64), None) => base64::engine::general_purpose::STANDARD
                .decode(base64)
                .map(Recorded::Bytes)
                .map_err(|error| format!("`base64`: {error}"))?,
            (Value::String(_), None, Some(length)) => Recorded::TooLong(length),
            _ => return Err("`line` must be an object or a string".to_owned()),
        };
        let t = self
            .t
            .as_u64()
            .or_else(|| self.t.as_f64().filter(|t| *t >= 0.0).map(|t| t as u64));
        let t = t.ok_or_else(|| format!("`t` must be a time of at least 0, got {}", self.t))?;
        Ok(Entry {
            t,
            dir: self.dir,
            line,
        })
    }
}

/// Why a file is no transcript that this version can read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TranscriptError {
    /// The file has no header of a transcript.
    #[error("not a transcript: {0}")]
    NotATranscript(String),
    /// The file was written in another major version.
    #[error("transcript has version {found}, this program reads {supported} only")]
    OtherMajor {
        /// The file's version.
        found: u32,
        /// The version that this program reads.
        supported: u32,
    },
    /// The last line has no end: the recorded program was killed while it wrote.
    #[error("transcript is incomplete: line {line} has no end")]
    Incomplete {
        /// The line, from 1.
        line: u64,
    },
    /// A line inside the file is no entry.
    #[error("line {line} of the transcript is no entry: {reason}")]
    Malformed {
        /// The line, from 1, blank ones not counted.
        line: u64,
        /// What is wrong with it.
        reason: String,
    },
    /// The file can't be read.
    #[error("can't read the transcript: {0}")]
    Io(#[from] io::Error),
}

/// Reads a transcript. Iterating yields its entries; the first error is the last item.
#[derive(Debug)]
pub struct TranscriptReader<R> {
    lines: LineReader<R>,
    header: Header,
    line: u64,
    failed: bool,
}

impl<R: Read> TranscriptReader<R> {
    /// Reads the header.
    ///
    /// # Errors
    ///
    /// The file is no transcript, or one of another major version.
    pub fn new(input: R) -> Result<Self, TranscriptError> {
        #[derive(Deserialize)]
        struct Probe {
            format: TranscriptFormat,
        }

        let no = |reason: String| TranscriptError::NotATranscript(reason);
        let mut lines = LineReader::new(input, usize::MAX);
        let text = match lines.next_line()? {
            Some(Line::Text(text)) => text,
            Some(_) => return Err(no("first line is not UTF-8".to_owned())),
            None => return Err(no("file is empty".to_owned())),
        };
        // The version decides how to read the rest of the header, so it is read by itself first.
        let probe: Probe = serde_json::from_str(&text).map_err(|error| no(format!("first line: {error}")))?;
        if probe.format.name != TRANSCRIPT_NAME {
            return Err(no(format!("format is named \"{}\"", probe.format.name)));
        }
        if probe.format.major != TRANSCRIPT_MAJOR {
            return Err(TranscriptError::OtherMajor {
                found: probe.format.major,
                supported: TRANSCRIPT_MAJOR,
            });
        }
        let header = serde_json::from_str(&text).map_err(|error| no(format!("header: {error}")))?;
        if lines.ended_inside_line() {
            return Err(TranscriptError::Incomplete { line: 1 });
        }
        Ok(Self {
            lines,
            header,
            line: 1,
            failed: false,
        })
    }

    /// The header.
    pub fn header(&self) -> &Header {
        &self.header
    }

    fn next_entry(&mut self) -> Result<Option<Entry>, TranscriptError> {
        let line = self.lines.next_line()?;
        self.line += 1;
        if self.lines.ended_inside_line() {
            return Err(TranscriptError::Incomplete { line: self.line });
        }
        let malformed = |reason| TranscriptError::Malformed {
            line: self.line,
            reason,
        };
        let text = match line {
            None => return Ok(None),
            Some(Line::Text(text)) => text,
            Some(Line::NotUtf8(_) | Line::TooLong { .. }) => return Err(malformed("not UTF-8".to_owned())),
        };
        let written: Written = serde_json::from_str(&text).map_err(|error| malformed(error.to_string()))?;
        written.into_entry().map(Some).map_err(malformed)
    }
}

impl<R: Read> Iterator for TranscriptReader<R> {
    type Item = Result<Entry, TranscriptError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.failed {
            return None;
        }
        let entry = self.next_entry().transpose();
        self.failed = !matches!(entry, Some(Ok(_)));
        entry
    }
}

/// Writes a transcript, each line at once.
#[derive(Debug)]
pub struct TranscriptWriter<W> {
    lines: LineWriter<W>,
}

impl<W: Write> TranscriptWriter<W> {
    /// Writes the header.
    ///
    /// # Errors
    ///
    /// The output fails.
    pub fn new(output: W, header: &Header) -> Result<Self, WriteError> {
        let mut lines = LineWriter::new(output);
        lines.write(header)?;
        Ok(Self { lines })
    }

    /// Writes one entry.
    ///
    /// # Errors
    ///
    /// The output fails.
    pub fn write(&mut self, entry: Entry) -> Result<(), WriteError> {
        self.lines.write(&Written::from_entry(entry))
    }

    /// The output.
    pub fn into_inner(self) -> W {
        self.lines.into_inner()
    }
}

#[cfg(test)]
#[path = "transcript_tests.rs"]
mod tests;
