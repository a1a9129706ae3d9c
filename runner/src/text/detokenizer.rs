//! Bytes to text as they come.
//!
//! Invariant: the pieces of text handed out, put together, equal [`String::from_utf8_lossy`] of all bytes put together,
//! however those were grouped. An incomplete character at the end is held until it's complete, known to be garbage, or
//! the end is declared.

use std::str;

/// The longest incomplete prefix of a UTF-8 character.
const HELD_MAX: usize = 3;

/// An incremental, lossy UTF-8 decoder.
#[derive(Debug, Clone, Default)]
pub struct Utf8Decoder {
    held: [u8; HELD_MAX],
    held_len: usize,
}

impl Utf8Decoder {
    /// Decodes more bytes, appending what is now certain to `out`.
    ///
    /// Returns how far into the appended text the first of `bytes` starts: 0, or the length of U+FFFD where the bytes
    /// held before turned out to be garbage that this byte doesn't belong to.
    pub fn push(&mut self, bytes: &[u8], out: &mut String) -> usize {
        let mut rest = bytes;
        let first = self.continue_held(&mut rest, out);
        while self.held_len > 0 && !rest.is_empty() {
            self.continue_held(&mut rest, out);
        }
        if self.held_len == 0 {
            self.decode(rest, out);
        }
        first
    }

    /// Feeds one byte to the held character; takes it from `rest` unless it can't belong to the character, which is
    /// then replaced. Returns the length of the replacement that precedes the byte.
    fn continue_held(&mut self, rest: &mut &[u8], out: &mut String) -> usize {
        if self.held_len == 0 || rest.is_empty() {
            return 0;
        }
        let mut joined = [0; HELD_MAX + 1];
        joined[..self.held_len].copy_from_slice(&self.held[..self.held_len]);
        joined[self.held_len] = rest[0];
        let joined = &joined[..=self.held_len];
        match str::from_utf8(joined) {
            Ok(text) => out.push_str(text),
            Err(error) if error.error_len().is_some() => {
                out.push(char::REPLACEMENT_CHARACTER);
                self.held_len = 0;
                return char::REPLACEMENT_CHARACTER.len_utf8();
            }
            Err(_) => {
                self.held[self.held_len] = rest[0];
                self.held_len += 1;
                *rest = &rest[1..];
                return 0;
            }
        }
        self.held_len = 0;
        *rest = &rest[1..];
        0
    }

    fn decode(&mut self, bytes: &[u8], out: &mut String) {
        let mut chunks = bytes.utf8_chunks().peekable();
        while let Some(chunk) = chunks.next() {
            out.push_str(chunk.valid());
            let invalid = chunk.invalid();
            let last = chunks.peek().is_none();
            if last && is_incomplete(invalid) {
                self.held[..invalid.len()].copy_from_slice(invalid);
                self.held_len = invalid.len();
            } else if !invalid.is_empty() {
                out.push(char::REPLACEMENT_CHARACTER);
            }
        }
    }

    /// Declares the end: what is still held becomes one U+FFFD.
    pub fn finish(&mut self, out: &mut String) {
        if self.held_len > 0 {
            out.push(char::REPLACEMENT_CHARACTER);
            self.held_len = 0;
        }
    }

    /// Whether everything pushed so far has been decoded.
    #[must_use]
    pub fn is_settled(&self) -> bool {
        self.held_len == 0
    }
}

/// Whether more bytes could make a character of these.
fn is_incomplete(bytes: &[u8]) -> bool {
    !bytes.is_empty() && str::from_utf8(bytes).is_err_and(|error| error.error_len().is_none())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn decode_in_groups(groups: &[Vec<u8>]) -> (String, Vec<usize>) {
        let mut decoder = Utf8Decoder::default();
        let mut out = String::new();
        let mut starts = Vec::new();
        for group in groups {
            let before = out.len();
            starts.push(before + decoder.push(group, &mut out));
        }
        decoder.finish(&mut out);
        (out, starts)
    }

    #[test]
    fn a_split_emoji_comes_out_whole_and_only_when_complete() {
        let mut decoder = Utf8Decoder::default();
        let mut out = String::new();
        for byte in &"🦀".as_bytes()[..3] {
            decoder.push(&[*byte], &mut out);
            assert_eq!(out, "");
        }
        decoder.push(&"🦀".as_bytes()[3..], &mut out);
        assert_eq!(out, "🦀");
        assert!(decoder.is_settled());
    }

    #[test]
    fn an_incomplete_tail_is_flushed_as_one_replacement_character() {
        let (text, _) = decode_in_groups(&[b"a\xF0\x9F".to_vec(), b"\xA6".to_vec()]);
        assert_eq!(text, "a\u{FFFD}");
    }

    #[test]
    fn garbage_is_replaced_at_once_and_the_next_byte_starts_behind_it() {
        let (text, starts) = decode_in_groups(&[b"\xE4\xBD".to_vec(), b"x".to_vec(), b"\xFF".to_vec()]);
        assert_eq!(text, "\u{FFFD}x\u{FFFD}");
        assert_eq!(starts, [0, 3, 4]);
        let (_, starts) = decode_in_groups(&[b"\xE4".to_vec(), b"\xBDx".to_vec()]);
        assert_eq!(
            starts,
            [0, 0],
            "the second group begins inside the broken character"
        );
    }

    /// Bytes that often form, break and cut characters.
    fn tricky_bytes() -> impl Strategy<Value = Vec<u8>> {
        let piece = prop_oneof![
            "[a-z ]{0,3}".prop_map(String::into_bytes),
            "\\PC{0,3}".prop_map(String::into_bytes),
            proptest::collection::vec(any::<u8>(), 0..4),
            proptest::sample::select(vec![
                b"\xF0\x9F".to_vec(),
                b"\xE4".to_vec(),
                b"\xED\xA0\x80".to_vec(),
                b"\xC0\x80".to_vec()
            ]),
        ];
        proptest::collection::vec(piece, 0..12).prop_map(|pieces| pieces.concat())
    }

    proptest! {
        #[test]
        fn any_grouping_equals_lossy_decoding_of_the_whole(
            bytes in tricky_bytes(), cuts in proptest::collection::vec(any::<proptest::sample::Index>(), 0..16)
        ) {
            let mut at: Vec<usize> = cuts.iter().map(|cut| cut.index(bytes.len() + 1)).collect();
            at.extend([0, bytes.len()]);
            at.sort_unstable();
            let groups: Vec<Vec<u8>> = at.windows(2).map(|ends| bytes[ends[0]..ends[1]].to_vec()).collect();
            let (text, _) = decode_in_groups(&groups);
            prop_assert_eq!(text, String::from_utf8_lossy(&bytes).into_owned());
        }
    }
}
