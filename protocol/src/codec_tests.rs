//! Lines of any length, encoding and ending, and what is left of a broken one.

use std::collections::VecDeque;
use std::io::{self, ErrorKind, Read, Write};

use super::{Line, LineReader, LineWriter, WriteError};

fn text(line: &str) -> Line {
    Line::Text(line.to_owned())
}

fn lines(input: &[u8], limit: usize) -> Vec<Line> {
    LineReader::new(input, limit)
        .map(|line| line.expect("a slice doesn't fail"))
        .collect()
}

/// Yields what it is given piece by piece, errors among it.
struct Pieces(VecDeque<io::Result<Vec<u8>>>);

impl Pieces {
    fn new(pieces: impl IntoIterator<Item = io::Result<&'static str>>) -> Self {
        Self(
            pieces
                .into_iter()
                .map(|piece| piece.map(|text| text.as_bytes().to_vec()))
                .collect(),
        )
    }
}

impl Read for Pieces {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self.0.pop_front() {
            None => Ok(0),
            Some(piece) => {
                let piece = piece?;
                buffer[..piece.len()].copy_from_slice(&piece);
                Ok(piece.len())
            }
        }
    }
}

#[test]
fn lines_end_with_lf_or_crlf_and_the_last_one_with_nothing() {
    assert_eq!(lines(b"a\nb\r\nc", 10), [text("a"), text("b"), text("c")]);
}

#[test]
fn blank_lines_are_skipped() {
    assert_eq!(lines(b"\n\r\n \t \na\n\n  ", 10), [text("a")]);
}

#[test]
fn white_space_inside_a_line_is_kept() {
    assert_eq!(lines(b" a \r\r\n", 10), [text(" a \r")]);
}

#[test]
fn a_line_of_exactly_the_limit_is_kept_and_one_more_byte_is_too_long() {
    assert_eq!(
        lines(b"12345\n123456\n1", 5),
        [text("12345"), Line::TooLong { length: 6 }, text("1")]
    );
}

#[test]
fn a_line_too_long_at_the_end_of_the_input_is_reported() {
    assert_eq!(lines(b"123456", 5), [Line::TooLong { length: 6 }]);
}

#[test]
fn invalid_utf8_is_a_line_and_not_an_error() {
    assert_eq!(
        lines(b"a\n\xff\xfe\nb\n", 10),
        [text("a"), Line::NotUtf8(vec![0xff, 0xfe]), text("b")]
    );
}

#[test]
fn a_character_split_between_reads_is_whole() {
    let input = Pieces(VecDeque::from([Ok(vec![0xc3]), Ok(vec![0xa4, b'\n'])]));
    assert_eq!(LineReader::new(input, 10).next_line().unwrap(), Some(text("ä")));
}

#[test]
fn interruptions_are_retried_and_other_errors_lose_nothing() {
    let input = Pieces::new([
        Ok("ab"),
        Err(ErrorKind::Interrupted.into()),
        Ok("cd"),
        Err(ErrorKind::WouldBlock.into()),
        Ok("ef\ng"),
    ]);
    let mut reader = LineReader::new(input, 10);
    assert_eq!(reader.next_line().unwrap_err().kind(), ErrorKind::WouldBlock);
    assert_eq!(reader.next_line().unwrap(), Some(text("abcdef")));
    assert_eq!(reader.next_line().unwrap(), Some(text("g")));
    assert_eq!(reader.next_line().unwrap(), None);
}

#[test]
fn a_missing_final_line_end_can_be_told() {
    for (input, inside) in [("a\n", false), ("a", true), ("a\n ", true), ("", false)] {
        let mut reader = LineReader::new(input.as_bytes(), 10);
        while reader.next_line().unwrap().is_some() {}
        assert_eq!(reader.ended_inside_line(), inside, "{input:?}");
    }
}

#[test]
fn a_line_over_the_limit_is_not_buffered() {
    const GIB: u64 = 1 << 30;
    let mut reader = LineReader::new(io::repeat(b'x').take(GIB).chain(&b"\nnext\n"[..]), 1 << 20);
    let first = reader.next_line().unwrap();
    assert_eq!(first, Some(Line::TooLong { length: GIB }));
    assert_eq!(reader.line.capacity(), 0);
    assert_eq!(reader.next_line().unwrap(), Some(text("next")));
}

/// Counts calls and fails as told.
#[derive(Default)]
struct Output {
    written: Vec<u8>,
    calls: usize,
    flushes: usize,
    fail: Option<ErrorKind>,
}

impl Write for Output {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.calls += 1;
        if let Some(kind) = self.fail {
            return Err(kind.into());
        }
        self.written.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.flushes += 1;
        Ok(())
    }
}

#[test]
fn each_value_is_one_flushed_write_of_one_line() {
    let mut writer = LineWriter::new(Output::default());
    writer
        .write(&serde_json::json!({"text": "a\nb\u{2028}"}))
        .unwrap();
    writer.write(&serde_json::json!({})).unwrap();
    let output = writer.into_inner();
    assert_eq!(
        String::from_utf8(output.written).unwrap(),
        "{\"text\":\"a\\nb\u{2028}\"}\n{}\n"
    );
    assert_eq!((output.calls, output.flushes), (2, 2));
}

#[test]
fn a_reader_that_is_gone_is_told_from_other_failures() {
    let fail = |kind| {
        LineWriter::new(Output {
            fail: Some(kind),
            ..Output::default()
        })
        .write(&1)
    };
    assert!(matches!(fail(ErrorKind::BrokenPipe), Err(WriteError::Closed)));
    assert!(matches!(fail(ErrorKind::StorageFull), Err(WriteError::Io(_))));
}

#[test]
fn a_value_that_cannot_be_json_writes_nothing() {
    let mut writer = LineWriter::new(Output::default());
    let bad = std::collections::BTreeMap::from([((1, 2), 3)]);
    assert!(matches!(writer.write(&bad), Err(WriteError::Serialize(_))));
    assert!(writer.get_ref().written.is_empty());
}

#[test]
fn a_long_line_does_not_leave_a_long_buffer() {
    let mut writer = LineWriter::new(io::sink());
    writer.write(&"x".repeat(1 << 20)).unwrap();
    assert!(writer.buffer.capacity() <= super::BUFFER_BYTES);
}
