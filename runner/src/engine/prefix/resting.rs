//! The latest sequence's key-values, still in the buffers in which they grew, so that the next turn copies nothing.
//!
//! Invariant: what a slot holds depends on the keys up to it alone, so any sequence with the same beginning may go on in these
//! buffers from any slot that it has in common. At most one sequence rests; it counts as live, and the cache's own copies of
//! the same slots stay where they are, so that giving it up costs time and never a prefix.

use mlx_rs::error::Result;
use mlx_rs::transforms::eval;

use crate::cache::Caches;
use crate::prefix::key::Key;

/// See the module's text.
#[derive(Debug)]
pub struct Resting {
    keys: Vec<Key>,
    /// The trunk's caches, without recurrent state.
    pub trunk: Caches,
    /// The head's, where there is one.
    pub head: Option<Caches>,
}

impl Resting {
    /// From the caches of a sequence that has ended after consuming the tokens of `keys`.
    pub fn new(keys: &[Key], mut trunk: Caches, head: Option<Caches>) -> Result<Self> {
        trunk.drop_recurrent();
        // A step that was undone may still be under way in them.
        eval(
            trunk
                .arrays()
                .into_iter()
                .chain(head.iter().flat_map(Caches::arrays)),
        )?;
        let keys = keys[..keys.len().min(trunk.offset() as usize)].to_vec();
        Ok(Self { keys, trunk, head })
    }

    /// Bytes held, spare room included.
    pub fn bytes(&self) -> u64 {
        self.trunk.bytes() + self.head.as_ref().map_or(0, Caches::bytes)
    }

    /// Whether a sequence that begins with `keys` may go on here. Buffers much longer than that are better given up: the
    /// request would occupy them for nothing.
    pub fn serves(&self, keys: &[Key]) -> bool {
        // The head's slot of the last position is written anew by whoever goes on.
        let head_reaches = |head: &Caches| head.offset() as usize + 1 >= keys.len();
        self.keys.starts_with(keys)
            && self.head.as_ref().is_none_or(head_reaches)
            && keys.len() * 2 >= self.keys.len()
    }
}
