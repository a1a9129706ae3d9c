//! Live state of one sequence, layer by layer.
//!
//! Invariant: between forwards every layer of a [`Caches`] stands at the same slot, [`Caches::offset`].

mod kv;
mod recurrent;

pub use kv::{KvCache, KvSegment};
pub use recurrent::{RecurrentCache, RecurrentState, StateRows};

use mlx_rs::error::{Exception, Result};
use mlx_rs::Array;

/// One layer's state.
#[derive(Debug)]
pub enum LayerCache {
    /// Keys and values of a full-attention layer.
    Kv(KvCache),
    /// Conv tail and delta state of a gated-delta-net layer.
    Recurrent(RecurrentCache),
}

/// All layers' state, and how far the sequence has got.
#[derive(Debug)]
pub struct Caches {
    /// One entry a layer, in the model's order.
    pub layers: Vec<LayerCache>,
    offset: i32,
}

/// See [`Caches::mark`].
#[derive(Debug, Clone)]
pub struct Mark {
    offset: i32,
    states: Vec<Option<RecurrentState>>,
}

/// A whole sequence's recurrent state at one slot, a compact copy; one entry a recurrent layer.
#[derive(Debug, Clone)]
pub struct Snapshot {
    /// Slot that the state stands at: tokens `0..offset` have been seen.
    pub offset: i32,
    /// State by recurrent layer, in order.
    pub states: Vec<RecurrentState>,
}

impl Snapshot {
    /// Bytes that the copies own.
    pub fn bytes(&self) -> u64 {
        self.states.iter().map(RecurrentState::bytes).sum()
    }

    /// The arrays, for evaluation.
    pub fn arrays(&self) -> impl Iterator<Item = &Array> {
        self.states.iter().flat_map(|s| [&s.conv, &s.state])
    }
}

impl Caches {
    /// Empty state.
    pub fn new(layers: Vec<LayerCache>) -> Self {
        Self { layers, offset: 0 }
    }

    /// Slots filled.
    pub fn offset(&self) -> i32 {
        self.offset
    }

    /// Layers with keys and values.
    pub fn kv_layers(&self) -> usize {
        self.layers
            .iter()
            .filter(|layer| matches!(layer, LayerCache::Kv(_)))
            .count()
    }

    /// Called by a model at the end of a forward of `rows` tokens.
    pub fn advance(&mut self, rows: i32) {
        self.offset += rows;
    }

    /// Asks every recurrent layer to keep its state at these slots while the next forwards cross them.
    /// `offsets` ascend and lie beyond the current slot; what an earlier schedule captured is dropped.
    pub fn schedule(&mut self, offsets: &[i32]) {
        for layer in self.recurrent_mut() {
            layer.schedule(offsets);
        }
    }

    /// Takes what the schedule has captured so far, ascending.
    pub fn take_snapshots(&mut self) -> Result<Vec<Snapshot>> {
        let mut out: Vec<Snapshot> = Vec::new();
        for (index, layer) in self.recurrent_mut().enumerate() {
            for (at, (offset, state)) in layer.take_captured().into_iter().enumerate() {
                if index == 0 {
                    out.push(Snapshot {
                        offset,
                        states: Vec::new(),
                    });
                }
                match out.get_mut(at) {
                    Some(snapshot) if snapshot.offset == offset => snapshot.states.push(state),
                    _ => return Err(Exception::custom("recurrent layers captured different slots")),
                }
            }
        }
        Ok(out)
    }

    /// A compact copy of the recurrent state where the sequence stands now; `None` before the first token.
    pub fn snapshot(&self) -> Result<Option<Snapshot>> {
        let mut states = Vec::new();
        for layer in &self.layers {
            if let LayerCache::Recurrent(recurrent) = layer {
                match recurrent.copy()? {
                    Some(state) => states.push(state),
                    None => return Ok(None),
                }
            }
        }
        Ok(Some(Snapshot {
            offset: self.offset,
            states,
        }))
    }

    /// Whether the next forward keeps the state after every row, so that [`Caches::rollback`] can undo any of them.
    pub fn keep_rows(&mut self, keep: bool) {
        for layer in self.recurrent_mut() {
            layer.keep_rows(keep);
        }
    }

    /// Forgets the slots from `offset` on where every layer can be cut anywhere, as a draft head's can.
    pub fn rewind(&mut self, offset: i32) {
        for layer in &mut self.layers {
            if let LayerCache::Kv(kv) = layer {
                kv.truncate(offset);
            }
        }
        self.offset = self.offset.min(offset);
    }

    /// Handles of the state as it stands, without copying: what [`Caches::reset`] returns to.
    pub fn mark(&self) -> Mark {
        let states = self.layers.iter().map(|layer| match layer {
            LayerCache::Recurrent(recurrent) => recurrent.live().cloned(),
            LayerCache::Kv(_) => None,
        });
        Mark {
            offset: self.offset,
            states: states.collect(),
        }
    }

    /// Returns to an earlier state of the same sequence.
    pub fn reset(&mut self, mark: Mark) {
        for (layer, state) in self.layers.iter_mut().zip(mark.states) {
            match layer {
                LayerCache::Kv(kv) => kv.truncate(mark.offset),
                LayerCache::Recurrent(recurrent) => recurrent.load(state.as_ref()),
            }
        }
        self.offset = mark.offset;
    }

    /// Drops all but the key-values: what a later sequence with the same beginning can [`Caches::resume`].
    pub fn drop_recurrent(&mut self) {
        for layer in self.recurrent_mut() {
            layer.load(None);
        }
    }

    /// Goes back to the slot of `snapshot`, a state of the same sequence, with the key-values that are there already.
    pub fn resume(&mut self, snapshot: &Snapshot) {
        let mut states = snapshot.states.iter();
        for layer in &mut self.layers {
            match layer {
                LayerCache::Kv(kv) => kv.truncate(snapshot.offset),
                LayerCache::Recurrent(recurrent) => recurrent.load(states.next()),
            }
        }
        self.offset = snapshot.offset;
    }

    /// Returns to `offset`, a slot inside the last forward (which kept its rows), and forgets the rows.
    /// Keeping all rows restores nothing.
    pub fn rollback(&mut self, offset: i32) -> Result<()> {
        let undone = self.offset - offset;
        for layer in &mut self.layers {
            match layer {
                LayerCache::Kv(kv) => kv.truncate(offset),
                LayerCache::Recurrent(recurrent) => recurrent.rollback(undone)?,
            }
        }
        self.offset = offset;
        Ok(())
    }

    /// Loads a sequence of `offset` tokens: KV by layer in `kv`, recurrent state from `snapshot`.
    pub fn restore(
        &mut self,
        offset: i32,
        kv: Vec<Vec<KvSegment>>,
        snapshot: Option<&Snapshot>,
    ) -> Result<()> {
        let mut kv = kv.into_iter();
        let mut states = snapshot.map(|s| s.states.iter());
        for layer in &mut self.layers {
            match layer {
                LayerCache::Kv(cache) => {
                    let segments = kv
                        .next()
                        .ok_or_else(|| Exception::custom("fewer key-value layers than the model has"))?;
                    cache.load(&segments, offset)?;
                }
                LayerCache::Recurrent(cache) => cache.load(states.as_mut().and_then(Iterator::next)),
            }
        }
        self.offset = offset;
        Ok(())
    }

    /// Compact copies of slots `from..to` of every key-value layer, in order.
    pub fn kv_segments(&self, from: i32, to: i32) -> Result<Vec<KvSegment>> {
        self.layers
            .iter()
            .filter_map(|layer| match layer {
                LayerCache::Kv(kv) => Some(kv.segment(from, to)),
                LayerCache::Recurrent(_) => None,
            })
            .collect()
    }

    /// Arrays to evaluate so that the state is computed and no graph is kept.
    pub fn arrays(&self) -> Vec<&Array> {
        let mut out = Vec::new();
        for layer in &self.layers {
            match layer {
                LayerCache::Kv(kv) => out.extend(kv.arrays()),
                LayerCache::Recurrent(recurrent) => out.extend(recurrent.arrays()),
            }
        }
        out
    }

    /// Bytes held, spare room included.
    pub fn bytes(&self) -> u64 {
        self.layers
            .iter()
            .map(|layer| match layer {
                LayerCache::Kv(kv) => kv.bytes(),
                LayerCache::Recurrent(recurrent) => recurrent.bytes(),
            })
            .sum()
    }

    fn recurrent_mut(&mut self) -> impl Iterator<Item = &mut RecurrentCache> {
        self.layers.iter_mut().filter_map(|layer| match layer {
            LayerCache::Recurrent(recurrent) => Some(recurrent),
            LayerCache::Kv(_) => None,
        })
    }
}
