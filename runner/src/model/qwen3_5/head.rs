//! The multi-token-prediction head: one attention layer that predicts the token after next.
//!
//! Invariant: its slot S pairs the trunk's state at S (after the final norm) with the token at S + 1, rotated by the trunk's
//! position of slot S; its output after `norm` is at once scored and carried to the next chained step.
//! Source: DeepSeek-V3 technical report (2024), section on multi-token prediction; Qwen3.5's wiring.

use std::rc::Rc;

use mlx_rs::error::{Exception, Result};
use mlx_rs::ops::concatenate;
use mlx_rs::Array;

use super::norm::{RmsNorm, Stream};
use super::rope::Rope;
use super::{Layer, Vocabulary};
use crate::cache::Caches;
use crate::mlx::gpu::bytes::ByteRows;
use crate::mlx::{gpu, Path};
use crate::model::linear::Linear;
use crate::model::{Batch, DraftKind, DraftModel};

/// The head; embedding and vocabulary projection are the trunk's.
#[derive(Debug)]
pub struct MtpHead {
    pub(super) vocabulary: Rc<Vocabulary>,
    /// Joins [embedding, hidden] columns to D.
    pub(super) join: Linear,
    pub(super) embedding_norm: RmsNorm,
    pub(super) hidden_norm: RmsNorm,
    pub(super) layer: Layer,
    pub(super) norm: RmsNorm,
    pub(super) rope: Rope,
    /// Scores drafts in place of the trunk's projection, where that pays.
    pub(super) scores: Option<ByteRows>,
}

impl DraftModel for MtpHead {
    fn new_caches(&self) -> Caches {
        Caches::new(vec![self.layer.new_cache()])
    }

    fn forward(&self, batch: &Batch<'_>, _target: &Caches, draft: &mut Caches) -> Result<Array> {
        let hidden = batch
            .conditioning
            .ok_or_else(|| Exception::custom("the head needs the trunk's states"))?;
        let x = self.join.forward(&self.input(batch, hidden)?)?;
        let offset = draft.offset();
        let rotation = self.rope.rotation(&batch.positions, batch.rows())?;
        let cache = draft
            .layers
            .first_mut()
            .ok_or_else(|| Exception::custom("draft cache without a layer"))?;
        let mut stream = Stream::new(x);
        self.layer.forward(&mut stream, &rotation, offset, cache)?;
        draft.advance(batch.rows());
        stream.norm(&self.norm)
    }

    fn unembed(&self, hidden: &Array) -> Result<Array> {
        match &self.scores {
            Some(scores) => match scores.forward(hidden)? {
                Some(logits) => Ok(logits),
                None => self.vocabulary.unembed(hidden),
            },
            None => self.vocabulary.unembed(hidden),
        }
    }

    fn kind(&self) -> DraftKind {
        DraftKind::ChainedHead
    }
}

impl MtpHead {
    /// The norms of the tokens' embeddings and of the states, side by side: [B, L, 2 D].
    fn input(&self, batch: &Batch<'_>, hidden: &Array) -> Result<Array> {
        let table = self.vocabulary.embed.stored().filter(|_| batch.media.is_empty());
        if let (Path::Gpu, Some(table)) = (self.rope.path, table) {
            let norms = (self.embedding_norm.as_gain(), self.hidden_norm.as_gain());
            return gpu::kernels()?.draft_input(batch.ids, table, hidden, norms);
        }
        let embedded = self
            .embedding_norm
            .forward(&self.vocabulary.embed(batch.ids, batch.media)?)?;
        let conditioned = self.hidden_norm.forward(hidden)?;
        concatenate(&[embedded, conditioned], 2)
    }

    /// Weights of its own; what it shares with the trunk is left out.
    pub(super) fn arrays(&self) -> Vec<&Array> {
        let mut out = self.layer.arrays();
        out.extend(self.join.arrays());
        out.extend([&self.embedding_norm.gain, &self.hidden_norm.gain, &self.norm.gain]);
        out.extend(self.scores.iter().flat_map(ByteRows::arrays));
        out
    }
}
