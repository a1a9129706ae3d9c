//! Builds the vision tower from either layout.
//!
//! Invariant: patch weights are flattened in the order of a patch row, [channel][frame][y][x], whichever way they are stored.

use mlx_rs::transforms::eval;
use mlx_rs::Dtype;

use super::load::Builder;
use super::vision::{Affine, Block, LayerNorm, VisionTower};
use crate::model::linear::Linear;
use crate::model::matrix::Matrix;
use crate::model::vision_config::VisionConfig;
use crate::model::weights::Result;

impl Builder<'_, '_> {
    /// The tower of that shape.
    pub(super) fn tower(&self, config: &VisionConfig) -> Result<VisionTower> {
        let positions = self.weights.matrix("visual.pos_embed")?.decode(Dtype::Float32)?;
        eval([&positions])?;
        let blocks = (0..config.depth).map(|b| self.block(&format!("visual.blocks.{b}")));
        Ok(VisionTower {
            config: *config,
            patch: self.patch(config)?,
            positions,
            blocks: blocks.collect::<Result<_>>()?,
            merge_norm: self.layer_norm("visual.merger.norm")?,
            fc1: self.affine("visual.merger.linear_fc1")?,
            fc2: self.affine("visual.merger.linear_fc2")?,
            dtype: self.weights.activations(),
        })
    }

    fn patch(&self, config: &VisionConfig) -> Result<Affine> {
        let path = "visual.patch_embed.proj";
        let stored = self.weights.plain(&format!("{path}.weight"))?;
        let channels_last = stored.dim(1) != config.in_channels as i32;
        let ordered = if channels_last {
            stored.transpose_axes(&[0, 4, 1, 2, 3])?
        } else {
            stored
        };
        let flat = ordered.reshape(&[config.hidden_size as i32, config.patch_values() as i32])?;
        eval([&flat])?;
        Ok(Affine {
            linear: Linear::new(Matrix::Dense(flat))?,
            bias: self.weights.plain(&format!("{path}.bias"))?,
        })
    }

    fn block(&self, path: &str) -> Result<Block> {
        Ok(Block {
            norm1: self.layer_norm(&format!("{path}.norm1"))?,
            norm2: self.layer_norm(&format!("{path}.norm2"))?,
            qkv: self.affine(&format!("{path}.attn.qkv"))?,
            proj: self.affine(&format!("{path}.attn.proj"))?,
            fc1: self.affine(&format!("{path}.mlp.linear_fc1"))?,
            fc2: self.affine(&format!("{path}.mlp.linear_fc2"))?,
        })
    }

    fn affine(&self, path: &str) -> Result<Affine> {
        Ok(Affine {
            linear: self.weights.linear(path)?,
            bias: self.weights.plain(&format!("{path}.bias"))?,
        })
    }

    fn layer_norm(&self, path: &str) -> Result<LayerNorm> {
        Ok(LayerNorm {
            weight: self.weights.plain(&format!("{path}.weight"))?,
            bias: self.weights.plain(&format!("{path}.bias"))?,
        })
    }
}
