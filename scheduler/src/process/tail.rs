//! The last bytes that a child wrote to stderr.
//!
//! Invariant: at most `TAIL_BYTES` are kept, whatever the child writes, and what is shown is whole lines of valid text.

use std::collections::VecDeque;

/// How much of a child's stderr is kept for crash messages.
pub(super) const TAIL_BYTES: usize = 4096;

/// A bounded tail of a byte stream.
#[derive(Debug, Default)]
pub struct Tail {
    bytes: VecDeque<u8>,
    cut: bool,
}

impl Tail {
    /// Appends bytes, forgetting the oldest beyond the limit.
    pub fn push(&mut self, chunk: &[u8]) {
        let keep = &chunk[chunk.len().saturating_sub(TAIL_BYTES)..];
        self.cut |= keep.len() < chunk.len();
        let excess = (self.bytes.len() + keep.len()).saturating_sub(TAIL_BYTES);
        if excess > 0 {
            self.bytes.drain(..excess);
            self.cut = true;
        }
        self.bytes.extend(keep);
    }

    /// The tail as text, without a leading partial line and without control characters other than line ends and tabs.
    pub fn text(&self) -> String {
        let bytes: Vec<u8> = self.bytes.iter().copied().collect();
        let mut start = 0;
        if self.cut {
            start = bytes.iter().position(|&b| b == b'\n').map_or(0, |at| at + 1);
        }
        let start = if start == bytes.len() { 0 } else { start };
        let text: String = String::from_utf8_lossy(&bytes[start..])
            .chars()
            .filter(|c| !c.is_control() || matches!(c, '\n' | '\t'))
            .collect();
        text.trim().to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_end_is_kept_and_it_starts_at_a_line() {
        let mut tail = Tail::default();
        for n in 0..10_000 {
            tail.push(format!("line {n}\n").as_bytes());
        }
        let text = tail.text();
        assert!(text.len() <= TAIL_BYTES);
        assert!(text.starts_with("line ") && text.ends_with("line 9999"), "{text}");
    }

    #[test]
    fn one_endless_line_is_still_shown() {
        let mut tail = Tail::default();
        tail.push(&vec![b'x'; 3 * TAIL_BYTES]);
        assert_eq!(tail.text().len(), TAIL_BYTES);
    }

    #[test]
    fn bytes_that_are_not_text_do_not_reach_the_message() {
        let mut tail = Tail::default();
        tail.push(b"\x1b[31mred\x1b[0m \xff\n");
        assert_eq!(tail.text(), "[31mred[0m \u{fffd}");
    }
}
