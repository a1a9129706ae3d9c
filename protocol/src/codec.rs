//! Lines over any reader or writer. A reader never holds more of a line than its limit, whatever arrives, and never ends
//! on one that it can't use: such a line is an item like any other. A writer hands over whole lines only.

use std::io::{self, BufRead, BufReader, Read, Write};

use serde::Serialize;

/// What is read from the other side at a time, and what a reader's buffer shrinks to after a long line.
const BUFFER_BYTES: usize = 64 * 1024;

/// A line as it came in, without its `\n` or `\r\n`. Blank lines never come up.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Line {
    /// Text; not necessarily JSON.
    Text(String),
    /// Bytes that are not UTF-8.
    NotUtf8(Vec<u8>),
    /// A line that was longer than the limit and was discarded.
    TooLong {
        /// Its length in bytes, without the line end.
        length: u64,
    },
}

/// Reads lines up to a limit.
///
/// The limit holds for the bytes before the `\n`, a `\r` among them. Lines of ASCII white space count as blank and are
/// skipped. What stands after the last `\n` is a line too; [`LineReader::ended_inside_line`] tells that it had no end.
/// After an I/O error, [`io::ErrorKind::WouldBlock`] say, reading can go on where it was.
#[derive(Debug)]
pub struct LineReader<R> {
    input: BufReader<R>,
    limit: usize,
    /// The line so far, or what there was of it when it grew too long: nothing.
    line: Vec<u8>,
    /// Bytes of the line so far, the discarded ones included.
    length: u64,
    ended_inside_line: bool,
}

impl<R: Read> LineReader<R> {
    /// Reads from `input`, discarding lines of more than `limit` bytes.
    pub fn new(input: R, limit: usize) -> Self {
        Self {
            input: BufReader::with_capacity(BUFFER_BYTES, input),
            limit,
            line: Vec::new(),
            length: 0,
            ended_inside_line: false,
        }
    }

    /// The next line that isn't blank, or `None` at the end of the input.
    ///
    /// # Errors
    ///
    /// What the input reports, interruptions excepted.
    pub fn next_line(&mut self) -> io::Result<Option<Line>> {
        loop {
            let chunk = match self.input.fill_buf() {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                other => other?,
            };
            if chunk.is_empty() {
                self.ended_inside_line |= self.length > 0;
                return Ok(self.finish_line());
            }
            let end = chunk.iter().position(|&byte| byte == b'\n');
            let part = &chunk[..end.unwrap_or(chunk.len())];
            self.length += part.len() as u64;
            if self.length <= self.limit as u64 {
                self.line.extend_from_slice(part);
            } else {
                self.line = Vec::new();
            }
            let consumed = part.len() + usize::from(end.is_some());
            self.input.consume(consumed);
            if end.is_some() {
                if let Some(line) = self.finish_line() {
                    return Ok(Some(line));
                }
            }
        }
    }

    /// Whether the input has ended and its last line, even a blank one, had no `\n`.
    pub fn ended_inside_line(&self) -> bool {
        self.ended_inside_line
    }

    /// Takes the line that has been collected; `None` for a blank one.
    fn finish_line(&mut self) -> Option<Line> {
        let length = std::mem::take(&mut self.length);
        if length > self.limit as u64 {
            return Some(Line::TooLong { length });
        }
        let mut line = std::mem::take(&mut self.line);
        if line.last() == Some(&b'\r') {
            line.pop();
        }
        if line.trim_ascii().is_empty() {
            return None;
        }
        Some(String::from_utf8(line).map_or_else(|error| Line::NotUtf8(error.into_bytes()), Line::Text))
    }
}

impl<R: Read> Iterator for LineReader<R> {
    type Item = io::Result<Line>;

    fn next(&mut self) -> Option<Self::Item> {
        self.next_line().transpose()
    }
}

/// Why a line could not be written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WriteError {
    /// Nobody reads any more: the other side closed its end.
    #[error("the reader has closed its end")]
    Closed,
    /// Any other failure of the output.
    #[error("can't write a line: {0}")]
    Io(#[source] io::Error),
    /// The value can't be JSON. No message of this crate causes it.
    #[error("can't serialise a message: {0}")]
    Serialize(#[source] serde_json::Error),
}

impl From<io::Error> for WriteError {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset | io::ErrorKind::WriteZero => {
                Self::Closed
            }
            _ => Self::Io(error),
        }
    }
}

/// Writes values as lines, each with one call and flushed.
#[derive(Debug)]
pub struct LineWriter<W> {
    output: W,
    buffer: Vec<u8>,
}

impl<W: Write> LineWriter<W> {
    /// Writes to `output`, which needs no buffer of its own.
    pub fn new(output: W) -> Self {
        Self {
            output,
            buffer: Vec::new(),
        }
    }

    /// Writes one value as one line.
    ///
    /// # Errors
    ///
    /// The other side is gone, the output fails, or the value can't be JSON. In the last case nothing was written.
    pub fn write<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<(), WriteError> {
        self.buffer.clear();
        serde_json::to_writer(&mut self.buffer, value).map_err(WriteError::Serialize)?;
        self.buffer.push(b'\n');
        let written = self
            .output
            .write_all(&self.buffer)
            .and_then(|()| self.output.flush());
        self.buffer.clear();
        self.buffer.shrink_to(BUFFER_BYTES);
        Ok(written?)
    }

    /// The output.
    pub fn get_ref(&self) -> &W {
        &self.output
    }

    /// The output, to be used otherwise.
    pub fn into_inner(self) -> W {
        self.output
    }
}

#[cfg(test)]
#[path = "codec_tests.rs"]
mod tests;
