//! The exact bytes of every id.
//!
//! Invariant: for each id the tokenizer has, the table holds the bytes that the id stands for in a text, without any
//! UTF-8 repair, so that concatenating the bytes of ids is all that detokenising takes.

use std::collections::HashMap;

const PRESENT: u8 = 1;
const SPECIAL: u8 = 2;
const ADDED: u8 = 4;

/// How the vocabulary spells bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Spelling {
    /// Each byte is one character of GPT-2's printable alphabet.
    ByteLevel,
    /// Text as it is, with `▁` for a space and `<0xNN>` for bytes outside the vocabulary.
    ByteFallback,
}

/// One id's entry while the table is being built.
pub(super) struct Piece<'a> {
    pub(super) id: u32,
    pub(super) spelling: &'a str,
    pub(super) added: bool,
    pub(super) special: bool,
}

/// Bytes and flags of all ids, in one buffer.
#[derive(Debug, Clone, Default)]
pub(super) struct Pieces {
    bytes: Vec<u8>,
    /// End of each id's bytes; id `i` owns `ends[i-1]..ends[i]`.
    ends: Vec<u32>,
    flags: Vec<u8>,
}

impl Pieces {
    /// Builds the table from pieces in any order; later pieces of the same id win, ids never named stay absent.
    pub(super) fn build<'a>(spelling: Spelling, pieces: impl IntoIterator<Item = Piece<'a>>) -> Self {
        let alphabet = byte_alphabet();
        let mut rows: Vec<Option<(Vec<u8>, u8)>> = Vec::new();
        for piece in pieces {
            let index = piece.id as usize;
            if rows.len() <= index {
                rows.resize(index + 1, None);
            }
            let bytes = if piece.added {
                piece.spelling.as_bytes().to_vec()
            } else {
                match spelling {
                    Spelling::ByteLevel => byte_level(piece.spelling, &alphabet),
                    Spelling::ByteFallback => byte_fallback(piece.spelling),
                }
            };
            let mut flags = PRESENT;
            flags |= if piece.special { SPECIAL } else { 0 };
            flags |= if piece.added { ADDED } else { 0 };
            rows[index] = Some((bytes, flags));
        }
        let mut table = Self::default();
        for row in rows {
            let (bytes, flags) = row.unwrap_or_default();
            table.bytes.extend_from_slice(&bytes);
            table
                .ends
                .push(u32::try_from(table.bytes.len()).unwrap_or(u32::MAX));
            table.flags.push(flags);
        }
        table
    }

    /// One more than the highest id.
    pub(super) fn len(&self) -> usize {
        self.ends.len()
    }

    /// The id's bytes; none where the tokenizer has no such id.
    pub(super) fn get(&self, id: u32) -> Option<&[u8]> {
        let index = id as usize;
        if self.flags.get(index)? & PRESENT == 0 {
            return None;
        }
        let start = index.checked_sub(1).map_or(0, |before| self.ends[before]);
        self.bytes.get(start as usize..self.ends[index] as usize)
    }

    pub(super) fn is_special(&self, id: u32) -> bool {
        self.has(id, SPECIAL)
    }

    pub(super) fn is_added(&self, id: u32) -> bool {
        self.has(id, ADDED)
    }

    fn has(&self, id: u32, flag: u8) -> bool {
        self.flags.get(id as usize).is_some_and(|flags| flags & flag != 0)
    }
}

/// GPT-2's alphabet, reversed: printable bytes stand for themselves, the others for U+0100 onwards in byte order.
fn byte_alphabet() -> HashMap<char, u8> {
    let mut next = 0x100_u32;
    (0..=255_u8)
        .filter_map(|byte| {
            let printable = matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
            let letter = if printable {
                char::from(byte)
            } else {
                next += 1;
                char::from_u32(next - 1)?
            };
            Some((letter, byte))
        })
        .collect()
}

/// A piece with a character outside the alphabet was added without the byte map, so it stands for itself.
fn byte_level(spelling: &str, alphabet: &HashMap<char, u8>) -> Vec<u8> {
    let mapped: Option<Vec<u8>> = spelling
        .chars()
        .map(|letter| alphabet.get(&letter).copied())
        .collect();
    mapped.unwrap_or_else(|| spelling.as_bytes().to_vec())
}

fn byte_fallback(spelling: &str) -> Vec<u8> {
    spelling
        .strip_prefix("<0x")
        .and_then(|rest| rest.strip_suffix('>'))
        .filter(|hex| hex.len() == 2)
        .and_then(|hex| u8::from_str_radix(hex, 16).ok())
        .map_or_else(
            || spelling.replace('\u{2581}', " ").into_bytes(),
            |byte| vec![byte],
        )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn piece(id: u32, spelling: &str, added: bool, special: bool) -> Piece<'_> {
        Piece {
            id,
            spelling,
            added,
            special,
        }
    }

    #[test]
    fn the_alphabet_covers_every_byte_once() {
        let mut bytes: Vec<u8> = byte_alphabet().into_values().collect();
        bytes.sort_unstable();
        assert_eq!(bytes, (0..=255).collect::<Vec<u8>>());
        assert_eq!(byte_alphabet()[&'Ġ'], b' ');
        assert_eq!(byte_alphabet()[&'Ċ'], b'\n');
    }

    #[test]
    fn byte_level_pieces_give_raw_bytes_and_added_ones_their_literal_text() {
        let table = Pieces::build(
            Spelling::ByteLevel,
            [
                piece(0, "Ġä½", false, false),
                piece(3, "<a b>", true, false),
                piece(2, "<|x|>", true, true),
            ],
        );
        assert_eq!(table.len(), 4);
        assert_eq!(table.get(0), Some(&b" \xE4\xBD"[..]));
        assert_eq!(table.get(1), None, "a hole stays a hole");
        assert_eq!(table.get(3), Some(&b"<a b>"[..]));
        assert_eq!(table.get(4), None);
        assert!(table.is_special(2) && !table.is_special(3) && table.is_added(3) && !table.is_added(0));
    }

    #[test]
    fn byte_fallback_pieces_are_single_bytes() {
        let table = Pieces::build(
            Spelling::ByteFallback,
            [
                piece(0, "<0xE4>", false, false),
                piece(1, "▁it", false, false),
                piece(2, "<0xZZ>", false, false),
            ],
        );
        assert_eq!(table.get(0), Some(&b"\xE4"[..]));
        assert_eq!(table.get(1), Some(&b" it"[..]));
        assert_eq!(table.get(2), Some(&b"<0xZZ>"[..]));
    }
}
