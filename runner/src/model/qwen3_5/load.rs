//! Builds a trunk, and its head where there is one, from a checkpoint.
//!
//! Invariant: norm gains are shifted exactly once, decided by how the files lay out their tensors and never by which other
//! tensors they hold.

use std::rc::Rc;

use mlx_rs::ops::{exp, negative};
use mlx_rs::transforms::eval;
use mlx_rs::Array;

use super::attention::Attention;
use super::delta::{self, DeltaLayer};
use super::mlp::{Mlp, SwiGlu};
use super::norm::RmsNorm;
use super::rope::{Rope, Window};
use super::{Layer, Mixer, MtpHead, Qwen35, Vocabulary};
use crate::mlx::delta::DeltaParams;
use crate::mlx::gpu::bytes::ByteRows;
use crate::mlx::Path;
use crate::model::config::{LayerKind, ModelConfig};
use crate::model::layout::{self, Projections};
use crate::model::linear::Packed;
use crate::model::matrix::Matrix;
use crate::model::plan::VisionStatus;
use crate::model::weights::{Result, Weights};

/// What scores a head's drafts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scores {
    /// The trunk's projection.
    Stored,
    /// A copy of it in bytes, where it is dense.
    Bytes,
}

/// A built model.
#[derive(Debug)]
pub struct Loaded {
    /// Trunk and head.
    pub model: Qwen35,
    /// Bytes of all arrays as they lie in memory.
    pub bytes: u64,
}

/// Reads the trunk, and the head and the tower where the plan has them; `path` says how they are computed.
///
/// # Errors
/// The device fails, or loading was interrupted.
pub fn load(weights: &Weights<'_>, path: Path, scores: Scores) -> Result<Loaded> {
    let (config, plan) = (weights.checkpoint().config(), weights.plan());
    let builder = Builder {
        weights,
        config,
        path,
        window: Window::default(),
    };
    let embed = weights.linear("embed_tokens")?;
    let lm_head = match plan.tied {
        true => None,
        false => Some(weights.linear("lm_head")?),
    };
    let vocabulary = Rc::new(Vocabulary {
        embed,
        lm_head,
        dtype: weights.activations(),
    });
    let shift = plan.convention.shift();
    let mut layers = Vec::with_capacity(config.layers.len());
    for (index, (kind, sparse)) in config.layers.iter().zip(&config.sparse).enumerate() {
        layers.push(builder.layer(&format!("layers.{index}"), *kind, *sparse, shift)?);
    }
    let norm = builder.norm("norm", shift)?;
    let rope = builder.rope();
    let head = plan
        .head
        .convention()
        .map(|own| builder.head(&vocabulary, own.shift(), scores))
        .transpose()?;
    let tower = match &plan.vision {
        VisionStatus::Active(vision) => Some(builder.tower(vision)?),
        VisionStatus::Absent { .. } => None,
    };
    let model = Qwen35 {
        vocabulary,
        layers,
        norm,
        rope,
        head,
        tower,
    };
    let arrays = model.arrays();
    eval(arrays.iter().copied())?;
    let bytes = arrays.iter().map(|a| a.nbytes() as u64).sum();
    drop(arrays);
    Ok(Loaded { model, bytes })
}

/// What every part is built from.
pub(super) struct Builder<'a, 'w> {
    pub(super) weights: &'a Weights<'w>,
    pub(super) config: &'a ModelConfig,
    pub(super) path: Path,
    /// Shared by trunk and head, which are at the same positions.
    window: Window,
}

impl Builder<'_, '_> {
    fn norm(&self, path: &str, shift: f32) -> Result<RmsNorm> {
        Ok(RmsNorm {
            gain: self.weights.gain(&format!("{path}.weight"), shift)?,
            eps: self.config.rms_norm_eps as f32,
            path: self.path,
        })
    }

    fn rope(&self) -> Rope {
        let rope = &self.config.rope;
        let half = (rope.dims / 2) as i32;
        Rope {
            dims: rope.dims as i32,
            theta: rope.theta as f32,
            sections: rope.mrope_section.map_or([half, 0, 0], |s| s.map(|n| n as i32)),
            path: self.path,
            window: self.window.clone(),
        }
    }

    fn packed(&self, paths: &[String]) -> Result<Packed> {
        let parts = paths
            .iter()
            .map(|path| self.weights.matrix(path))
            .collect::<Result<Vec<_>>>()?;
        Ok(Packed::new(parts)?)
    }

    fn layer(&self, path: &str, kind: LayerKind, sparse: bool, shift: f32) -> Result<Layer> {
        let mixer = match kind {
            LayerKind::Full => Mixer::Full(self.attention(&format!("{path}.self_attn"), shift)?),
            LayerKind::Linear => Mixer::Delta(self.delta(&format!("{path}.linear_attn"))?),
        };
        Ok(Layer {
            input_norm: self.norm(&format!("{path}.input_layernorm"), shift)?,
            mixer,
            post_norm: self.norm(&format!("{path}.post_attention_layernorm"), shift)?,
            mlp: self.mlp(&format!("{path}.mlp"), sparse)?,
        })
    }

    fn attention(&self, path: &str, shift: f32) -> Result<Attention> {
        let names = ["q_proj", "k_proj", "v_proj"].map(|part| format!("{path}.{part}"));
        Ok(Attention {
            heads: self.config.heads as i32,
            kv_heads: self.config.kv_heads as i32,
            head_dim: self.config.head_dim as i32,
            qkv: self.packed(&names)?,
            out: self.weights.linear(&format!("{path}.o_proj"))?,
            q_norm: self.norm(&format!("{path}.q_norm"), shift)?,
            k_norm: self.norm(&format!("{path}.k_norm"), shift)?,
            rope: self.rope(),
        })
    }

    fn delta(&self, path: &str) -> Result<DeltaLayer> {
        let shape = delta::shape(&self.config.delta);
        // Both layouts ([C, 1, taps] and [C, taps, 1]) hold the taps of a channel side by side.
        let conv = self
            .weights
            .f32(&format!("{path}.conv1d.weight"))?
            .reshape(&[shape.channels(), shape.taps])?;
        let decay = negative(exp(self.weights.f32(&format!("{path}.A_log"))?)?)?;
        Ok(DeltaLayer {
            input: self.delta_input(path)?,
            out: self.weights.linear(&format!("{path}.out_proj"))?,
            params: DeltaParams {
                shape,
                conv,
                decay,
                dt_bias: self.weights.f32(&format!("{path}.dt_bias"))?,
                norm: self.weights.f32(&format!("{path}.norm.weight"))?,
                eps: self.config.rms_norm_eps as f32,
            },
            path: self.path,
        })
    }

    /// The delta net's projections: mix, z, b, a.
    fn delta_input(&self, path: &str) -> Result<Packed> {
        let named = |part: &str| format!("{path}.{part}");
        if layout::projections(self.weights.checkpoint(), path) == Projections::Split {
            return self.packed(&["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"].map(named));
        }
        let delta = &self.config.delta;
        let (channels, values) = (delta.channels() as i32, delta.value_width() as i32);
        let heads = delta.value_heads as i32;
        let qkvz = self.reordered(&named("in_proj_qkvz"), &layout::qkvz_rows(delta))?;
        let ba = self.reordered(&named("in_proj_ba"), &layout::ba_rows(delta))?;
        Ok(Packed::new(vec![
            qkvz.rows(0, channels)?,
            qkvz.rows(channels, channels + values)?,
            ba.rows(0, heads)?,
            ba.rows(heads, 2 * heads)?,
        ])?)
    }

    /// The matrix whose row i is row `rows[i]` of the stored one.
    fn reordered(&self, path: &str, rows: &[usize]) -> Result<Matrix> {
        let rows: Vec<i32> = rows.iter().map(|&row| row as i32).collect();
        let picked = self
            .weights
            .matrix(path)?
            .pick(&Array::from_slice(&rows, &[rows.len() as i32]))?;
        eval(picked.arrays())?;
        Ok(picked)
    }

    fn mlp(&self, path: &str, sparse: bool) -> Result<Mlp> {
        match &self.config.moe {
            Some(moe) if sparse => Ok(Mlp::Moe(Box::new(self.moe(path, moe)?))),
            _ => Ok(Mlp::Dense(self.swiglu(path)?)),
        }
    }

    pub(super) fn swiglu(&self, path: &str) -> Result<SwiGlu> {
        Ok(SwiGlu {
            gate_up: self.packed(&[format!("{path}.gate_proj"), format!("{path}.up_proj")])?,
            down: self.weights.linear(&format!("{path}.down_proj"))?,
            path: self.path,
        })
    }

    fn head(&self, vocabulary: &Rc<Vocabulary>, shift: f32, scores: Scores) -> Result<MtpHead> {
        let rows = vocabulary
            .projection()
            .dense()
            .filter(|_| scores == Scores::Bytes);
        Ok(MtpHead {
            scores: rows.map(ByteRows::encode).transpose()?,
            vocabulary: Rc::clone(vocabulary),
            join: self.weights.linear("mtp.fc")?,
            embedding_norm: self.norm("mtp.pre_fc_norm_embedding", shift)?,
            hidden_norm: self.norm("mtp.pre_fc_norm_hidden", shift)?,
            layer: self.layer("mtp.layers.0", LayerKind::Full, self.config.moe.is_some(), shift)?,
            norm: self.norm("mtp.norm", shift)?,
            rope: self.rope(),
        })
    }
}
