//! Qwen3.5: gated delta net with full attention every few layers, dense or mixture of experts, and its MTP head.
//!
//! Invariant: hidden states handed out are those after the final norm, the same array that the vocabulary projection
//! scores and that the head conditions on.

pub mod attention;
pub mod delta;
pub mod experts;
pub mod head;
mod load;
mod load_moe;
mod load_vision;
pub mod mlp;
pub mod mrope;
pub mod norm;
pub mod rope;
pub mod vision;

use std::rc::Rc;

use mlx_rs::error::{Exception, Result};
use mlx_rs::ops::concatenate;
use mlx_rs::{Array, Dtype};

use super::linear::Linear;
use super::{Batch, Dispatch, DraftModel, MediaSpan, Model};
use crate::cache::{Caches, KvCache, LayerCache, RecurrentCache};
use crate::mlx::ops;

pub use head::MtpHead;
pub use load::{load, Loaded, Scores};

/// Layers dispatched at a time where a forward is dispatched as it is built.
const PIECE: usize = 4;

/// Token embedding and vocabulary projection, shared by trunk and head.
#[derive(Debug)]
pub struct Vocabulary {
    embed: Linear,
    /// `None`: tied to the embedding.
    lm_head: Option<Linear>,
    dtype: Dtype,
}

impl Vocabulary {
    /// ids [B, L] → [B, L, D], with `media` features in place of embeddings.
    fn embed(&self, ids: &Array, media: &[MediaSpan]) -> Result<Array> {
        let x = self.embed.embed(ids, self.dtype)?;
        if media.is_empty() {
            return Ok(x);
        }
        let (rows, width) = (x.dim(1), x.dim(2));
        let mut parts = Vec::new();
        let mut from = 0;
        for span in media {
            let len = span.features.dim(0);
            if span.row < from || span.row + len > rows {
                return Err(Exception::custom("image features outside of the batch"));
            }
            if span.row > from {
                parts.push(ops::slice_axis(&x, 1, from, span.row)?);
            }
            parts.push(ops::cast(&span.features, self.dtype)?.reshape(&[1, len, width])?);
            from = span.row + len;
        }
        if from < rows {
            parts.push(ops::slice_axis(&x, 1, from, rows)?);
        }
        concatenate(&parts, 1)
    }

    fn projection(&self) -> &Linear {
        self.lm_head.as_ref().unwrap_or(&self.embed)
    }

    fn unembed(&self, hidden: &Array) -> Result<Array> {
        self.projection().forward(hidden)
    }
}

/// What mixes tokens in a layer.
#[derive(Debug)]
pub enum Mixer {
    /// Full attention.
    Full(attention::Attention),
    /// Gated delta net.
    Delta(delta::DeltaLayer),
}

/// One residual block.
#[derive(Debug)]
pub struct Layer {
    input_norm: norm::RmsNorm,
    mixer: Mixer,
    post_norm: norm::RmsNorm,
    mlp: mlp::Mlp,
}

impl Layer {
    fn forward(
        &self,
        stream: &mut norm::Stream,
        rotation: &rope::Rotation,
        offset: i32,
        cache: &mut LayerCache,
    ) -> Result<()> {
        let norm = &self.input_norm;
        match (&self.mixer, cache) {
            (Mixer::Full(attention), LayerCache::Kv(kv)) => attention.forward(stream, norm, rotation, kv)?,
            (Mixer::Delta(delta), LayerCache::Recurrent(state)) => {
                delta.forward(stream, norm, offset, state)?
            }
            _ => return Err(Exception::custom("cache of another kind than its layer")),
        }
        self.mlp.forward(stream, &self.post_norm)
    }

    fn new_cache(&self) -> LayerCache {
        match self.mixer {
            Mixer::Full(_) => LayerCache::Kv(KvCache::default()),
            Mixer::Delta(_) => LayerCache::Recurrent(RecurrentCache::default()),
        }
    }

    fn arrays(&self) -> Vec<&Array> {
        let mut out = match &self.mixer {
            Mixer::Full(attention) => attention.arrays(),
            Mixer::Delta(delta) => delta.arrays(),
        };
        out.extend(self.mlp.arrays());
        out.extend([&self.input_norm.gain, &self.post_norm.gain]);
        out
    }
}

/// A loaded trunk, with its head where the checkpoint has one.
#[derive(Debug)]
pub struct Qwen35 {
    vocabulary: Rc<Vocabulary>,
    layers: Vec<Layer>,
    norm: norm::RmsNorm,
    rope: rope::Rope,
    head: Option<MtpHead>,
    tower: Option<vision::VisionTower>,
}

impl Model for Qwen35 {
    fn forward(&self, batch: &Batch<'_>, caches: &mut Caches) -> Result<Array> {
        let rotation = self.rope.rotation(&batch.positions, batch.rows())?;
        let offset = caches.offset();
        let mut stream = norm::Stream::new(self.vocabulary.embed(batch.ids, batch.media)?);
        for (index, (layer, cache)) in self.layers.iter().zip(&mut caches.layers).enumerate() {
            if batch.dispatch == Dispatch::AsBuilt && index > 0 && index % PIECE == 0 {
                stream.dispatch()?;
            }
            layer.forward(&mut stream, &rotation, offset, cache)?;
        }
        caches.advance(batch.rows());
        stream.norm(&self.norm)
    }

    fn unembed(&self, hidden: &Array) -> Result<Array> {
        self.vocabulary.unembed(hidden)
    }

    fn new_caches(&self) -> Caches {
        Caches::new(self.layers.iter().map(Layer::new_cache).collect())
    }

    fn self_draft(&self) -> Option<&dyn DraftModel> {
        self.head.as_ref().map(|head| head as &dyn DraftModel)
    }
}

impl Qwen35 {
    /// Every weight, for evaluation and for counting bytes; packed matrices count once.
    pub fn arrays(&self) -> Vec<&Array> {
        let mut out = self.vocabulary.embed.arrays();
        out.extend(self.vocabulary.lm_head.iter().flat_map(Linear::arrays));
        out.extend(self.layers.iter().flat_map(Layer::arrays));
        out.push(&self.norm.gain);
        if let Some(head) = &self.head {
            out.extend(head.arrays());
        }
        if let Some(tower) = &self.tower {
            out.extend(tower.arrays());
        }
        out
    }

    /// The vision tower, where the checkpoint has one.
    pub fn tower(&self) -> Option<&vision::VisionTower> {
        self.tower.as_ref()
    }

    /// The type of states and logits.
    pub fn activations(&self) -> Dtype {
        self.vocabulary.dtype
    }

    /// Logits a token.
    pub fn vocabulary_size(&self) -> i32 {
        self.vocabulary.projection().outputs()
    }
}

#[cfg(test)]
mod golden_tests;
#[cfg(test)]
mod tiny_tests;
#[cfg(test)]
mod vision_tests;
