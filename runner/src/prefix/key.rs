//! The alphabet of the prefix cache: one key per cached position, such that equal key prefixes imply equal cached state.
//!
//! A position's key holds everything that the state written there depends on. Without a draft KV that is the position's own
//! symbol. With one it is the pair (symbol at i, symbol at i + 1), because the draft cache's slot i is made from the next
//! token (Qwen3.5's MTP head): k matching pairs vouch for k + 1 tokens, so a match never ends on a draft entry whose second
//! token is unverified. An image's placeholder tokens are the same for every picture, hence their symbols come from the
//! picture's content and the position inside it instead.

use std::ops::Range;

use xxhash_rust::xxh3::{xxh3_64, Xxh3};

/// Marks a symbol as part of a picture; token ids are 32 bits wide and never reach it.
const MEDIA_BIT: u64 = 1 << 63;

/// What identifies the cached state of one position, given that all keys before it are equal.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Key {
    /// Symbol of the position itself.
    pub this: u64,
    /// Symbol of the position after it, 0 without look-ahead.
    pub next: u64,
}

impl Key {
    /// Bytes of the encoded form.
    pub const BYTES: usize = 16;

    /// Little-endian bytes, the form that is hashed and stored.
    pub fn to_le_bytes(self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[..8].copy_from_slice(&self.this.to_le_bytes());
        bytes[8..].copy_from_slice(&self.next.to_le_bytes());
        bytes
    }
}

/// Whether a draft KV is cached beside the target's, which decides what a key is made of.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LookAhead {
    /// No draft KV: n tokens have n keys.
    None,
    /// A draft KV whose slot i also depends on token i + 1: n tokens have n - 1 keys.
    NextToken,
}

/// A picture's run of placeholder positions inside a prompt.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct MediaSpan {
    /// Positions of the placeholders.
    pub positions: Range<usize>,
    /// Content hash, see [`media_hash`].
    pub hash: u128,
}

/// Content hash of a picture: its encoded bytes and the dimensions it is processed at, since the latter change the embeddings.
pub fn media_hash(bytes: &[u8], dimensions: &[u64]) -> u128 {
    let mut hash = Xxh3::new();
    hash.update(&(bytes.len() as u64).to_le_bytes());
    hash.update(bytes);
    for dimension in dimensions {
        hash.update(&dimension.to_le_bytes());
    }
    hash.digest128()
}

fn media_symbol(hash: u128, offset: usize) -> u64 {
    let mut bytes = [0; 24];
    bytes[..16].copy_from_slice(&hash.to_le_bytes());
    bytes[16..].copy_from_slice(&(offset as u64).to_le_bytes());
    xxh3_64(&bytes) | MEDIA_BIT
}

/// The keys of one growing token stream.
#[derive(Clone, Debug)]
pub struct KeyStream {
    look_ahead: LookAhead,
    symbols: Vec<u64>,
    keys: Vec<Key>,
}

impl KeyStream {
    /// Keys of a prompt; `media` may come in any order, parts of a span beyond the prompt's end are ignored.
    pub fn new(look_ahead: LookAhead, tokens: &[u32], media: &[MediaSpan]) -> Self {
        let mut symbols: Vec<u64> = tokens.iter().map(|&token| u64::from(token)).collect();
        for span in media {
            for position in span
                .positions
                .clone()
                .take_while(|&position| position < tokens.len())
            {
                symbols[position] = media_symbol(span.hash, position - span.positions.start);
            }
        }
        let mut stream = Self {
            look_ahead,
            keys: Vec::with_capacity(symbols.len()),
            symbols,
        };
        stream.complete();
        stream
    }

    /// Append generated tokens.
    pub fn extend(&mut self, tokens: &[u32]) {
        self.symbols.extend(tokens.iter().map(|&token| u64::from(token)));
        self.complete();
    }

    /// All keys that the tokens so far define.
    pub fn keys(&self) -> &[Key] {
        &self.keys
    }

    /// Tokens in the stream.
    pub fn tokens(&self) -> usize {
        self.symbols.len()
    }

    /// The longest prefix that a request for these tokens may restore: one token is always left to evaluate.
    pub fn limit(&self) -> usize {
        self.symbols.len().saturating_sub(1)
    }

    fn complete(&mut self) {
        let done = self.keys.len();
        match self.look_ahead {
            LookAhead::None => self
                .keys
                .extend(self.symbols[done..].iter().map(|&this| Key { this, next: 0 })),
            LookAhead::NextToken => self.keys.extend(self.symbols[done..].windows(2).map(|pair| Key {
                this: pair[0],
                next: pair[1],
            })),
        }
    }
}

/// Identifies a whole prefix by its keys, however it is cut into edges.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct PathHash(pub u128);

/// Hashes a key path from its start; the digest can be read at any offset without restarting.
#[derive(Clone, Default)]
pub struct PathHasher {
    hash: Xxh3,
    offset: usize,
}

impl std::fmt::Debug for PathHasher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PathHasher")
            .field("offset", &self.offset)
            .finish_non_exhaustive()
    }
}

impl PathHasher {
    /// A hasher at offset 0.
    pub fn new() -> Self {
        Self::default()
    }

    /// Feed `keys` from the current offset up to `offset` and return the digest of `keys[..offset]`. `offset` must be
    /// neither before the current one nor beyond the keys; such a call feeds what there is.
    pub fn advance(&mut self, keys: &[Key], offset: usize) -> PathHash {
        for key in keys.iter().take(offset).skip(self.offset) {
            self.hash.update(&key.to_le_bytes());
        }
        self.offset = self.offset.max(offset.min(keys.len()));
        PathHash(self.hash.digest128())
    }
}

/// Digest of a whole key path.
pub fn path_hash(keys: &[Key]) -> PathHash {
    PathHasher::new().advance(keys, keys.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair(this: u64, next: u64) -> Key {
        Key { this, next }
    }

    #[test]
    fn pairs_vouch_for_the_token_after_the_last_key() {
        let stream = KeyStream::new(LookAhead::NextToken, &[5, 6, 7], &[]);
        assert_eq!(stream.keys(), [pair(5, 6), pair(6, 7)]);
        assert_eq!((stream.tokens(), stream.limit()), (3, 2));
        let plain = KeyStream::new(LookAhead::None, &[5, 6, 7], &[]);
        assert_eq!(plain.keys(), [pair(5, 0), pair(6, 0), pair(7, 0)]);
        assert_eq!(plain.limit(), 2);
    }

    #[test]
    fn extending_equals_building_at_once() {
        for look_ahead in [LookAhead::None, LookAhead::NextToken] {
            let whole = KeyStream::new(look_ahead, &[1, 2, 3, 4, 5], &[]);
            let mut grown = KeyStream::new(look_ahead, &[], &[]);
            assert_eq!((grown.keys().len(), grown.limit()), (0, 0));
            for part in [&[1][..], &[], &[2, 3], &[4, 5]] {
                grown.extend(part);
            }
            assert_eq!(grown.keys(), whole.keys());
        }
    }

    #[test]
    fn different_pictures_never_share_a_key_and_diverge_one_earlier_under_pairs() {
        let tokens = [1, 9, 9, 9, 2];
        let span = |byte: u8| MediaSpan {
            positions: 1..4,
            hash: media_hash(&[byte; 10], &[256, 256]),
        };
        let shared =
            |a: &KeyStream, b: &KeyStream| a.keys().iter().zip(b.keys()).take_while(|(a, b)| a == b).count();
        let plain = |byte| KeyStream::new(LookAhead::None, &tokens, &[span(byte)]);
        assert_eq!(shared(&plain(1), &plain(2)), 1);
        assert_eq!(shared(&plain(1), &plain(1)), 5);
        let pairs = |byte| KeyStream::new(LookAhead::NextToken, &tokens, &[span(byte)]);
        assert_eq!(shared(&pairs(1), &pairs(2)), 0);
        // No placeholder of one picture equals any of the other, nor the bare placeholder token.
        for a in &plain(1).keys()[1..4] {
            assert!(plain(2).keys()[1..4].iter().all(|b| a != b) && a.this != 9);
        }
        // Inside one picture every position differs, so that a shifted span can't match.
        assert_ne!(plain(1).keys()[1], plain(1).keys()[2]);
    }

    #[test]
    fn the_same_bytes_at_another_size_are_another_picture() {
        assert_ne!(media_hash(b"png", &[256, 256]), media_hash(b"png", &[256, 512]));
        assert_ne!(media_hash(b"png", &[]), media_hash(b"png\0\0\0\0\0\0\0\0", &[]));
    }

    #[test]
    fn a_span_beyond_the_prompt_is_ignored() {
        let span = MediaSpan {
            positions: 2..9,
            hash: 7,
        };
        let stream = KeyStream::new(LookAhead::None, &[1, 2, 3], &[span]);
        assert_eq!(stream.keys().len(), 3);
        assert_ne!(stream.keys()[2].this, 3);
    }

    #[test]
    fn path_hash_does_not_depend_on_the_cuts() {
        let stream = KeyStream::new(LookAhead::NextToken, &(0..3000).collect::<Vec<_>>(), &[]);
        let mut hasher = PathHasher::new();
        for cut in [0, 1, 100, 2048, 2999] {
            assert_eq!(
                hasher.advance(stream.keys(), cut),
                path_hash(&stream.keys()[..cut])
            );
        }
    }
}
