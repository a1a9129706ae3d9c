//! What the engine asks of a model, and the models.
//!
//! Invariant: a forward moves every cache by exactly the rows of its batch, whatever is kept on the way.

pub mod checkpoint;
pub mod config;
pub mod error;
pub mod estimate;
mod family;
pub(crate) mod fields;
mod files;
pub mod fingerprint;
mod fp8;
pub mod head;
mod header;
pub mod layout;
pub mod linear;
pub mod matrix;
mod means;
pub mod names;
pub mod plan;
pub mod quant;
pub mod qwen3_5;
mod rope_config;
pub mod vision_config;
pub mod weights;

#[cfg(test)]
pub(crate) mod test_support;

use mlx_rs::error::Result;
use mlx_rs::Array;

use crate::cache::Caches;

/// Where tokens stand for rotary embedding; slots and rotary positions part after an image.
#[derive(Debug, Clone)]
pub enum Positions {
    /// Token `i` of the batch stands at `start + i` on every axis.
    Sequential {
        /// Position of the first token.
        start: i32,
    },
    /// A position a token and axis (time, height, width), each of the batch's length.
    Axes([Vec<i32>; 3]),
}

/// Image features that take the place of embeddings.
#[derive(Debug, Clone)]
pub struct MediaSpan {
    /// Row of the batch where the features begin.
    pub row: i32,
    /// Features, [rows, D].
    pub features: Array,
}

/// When a forward's operations go to the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dispatch {
    /// All together, once something that depends on them is evaluated.
    Together,
    /// A few layers at a time while the host still describes the next ones: for a forward whose end the host waits for.
    AsBuilt,
}

/// New tokens of one forward, right-aligned. Every shape keeps the sequence axis B.
#[derive(Debug)]
pub struct Batch<'a> {
    /// Token ids, [B, L] int32.
    pub ids: &'a Array,
    /// Rotary positions of the L tokens.
    pub positions: Positions,
    /// Features that replace embeddings, ascending by row, not overlapping.
    pub media: &'a [MediaSpan],
    /// States that a drafter conditions on, [B, L, D].
    pub conditioning: Option<&'a Array>,
    /// When it begins; changes no result.
    pub dispatch: Dispatch,
}

impl<'a> Batch<'a> {
    /// Plain text that begins at `start`.
    pub fn text(ids: &'a Array, start: i32) -> Self {
        Self {
            ids,
            positions: Positions::Sequential { start },
            media: &[],
            conditioning: None,
            dispatch: Dispatch::Together,
        }
    }

    /// The same, dispatched so.
    pub fn dispatched(self, dispatch: Dispatch) -> Self {
        Self { dispatch, ..self }
    }

    /// Number of rows, L.
    pub fn rows(&self) -> i32 {
        self.ids.dim(1)
    }
}

/// A language model: tokens in, states to score out.
pub trait Model {
    /// Hidden states after the final norm, [B, L, D]: what the vocabulary projection scores and a drafter conditions on.
    fn forward(&self, batch: &Batch<'_>, caches: &mut Caches) -> Result<Array>;
    /// Logits [B, L, V] of hidden states [B, L, D].
    fn unembed(&self, hidden: &Array) -> Result<Array>;
    /// Empty state.
    fn new_caches(&self) -> Caches;
    /// The checkpoint's own drafter, where it has one.
    fn self_draft(&self) -> Option<&dyn DraftModel>;
}

/// How a drafter works; the round needs no other distinction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DraftKind {
    /// A head with key-values of its own, one token a call, chained on its own output (Qwen3.5's MTP).
    ChainedHead,
    /// A read-only assistant that looks at the target's state and proposes from one position.
    Assistant,
    /// A whole block of masked positions in one call.
    Block,
}

impl DraftKind {
    /// The protocol's name.
    pub fn name(self) -> &'static str {
        match self {
            Self::ChainedHead => "mtp",
            Self::Assistant => "assistant",
            Self::Block => "block",
        }
    }
}

/// A drafter's forward pass.
pub trait DraftModel {
    /// Empty state.
    fn new_caches(&self) -> Caches;
    /// States [B, L, D] that [`DraftModel::unembed`] scores and the next chained step conditions on.
    /// `batch.ids` are the tokens one slot ahead of `batch.conditioning`.
    fn forward(&self, batch: &Batch<'_>, target: &Caches, draft: &mut Caches) -> Result<Array>;
    /// Logits [B, L, V].
    fn unembed(&self, hidden: &Array) -> Result<Array>;
    /// What kind it is.
    fn kind(&self) -> DraftKind;
}
