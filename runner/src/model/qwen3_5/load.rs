//! Builds a trunk, and its head where there is one, from a checkpoint.
//!
//! Invariant: norm gains are shifted exactly once, decided by how the files lay out their tensors and never by which other
//! tensors they hold.

use std::rc::Rc;

use mlx_rs::ops::{exp, negative};
use mlx_rs::Dtype;

use super::attention::Attention;
use super::delta::DeltaLayer;
use super::mlp::{Mlp, SwiGlu};
use super::norm::RmsNorm;
use super::rope::Rope;
use super::{Layer, Mixer, MtpHead, Qwen35, Vocabulary};
use crate::mlx::delta::{DeltaParams, DeltaShape};
use crate::mlx::Path;
use crate::model::config::{LayerKind, ModelConfig};
use crate::model::linear::{Linear, Packed};
use crate::model::weights::{Precision, Result, Weights};

/// A built model.
#[derive(Debug)]
pub struct Loaded {
    /// Trunk and head.
    pub model: Qwen35,
    /// Bytes of all arrays as they lie in memory.
    pub bytes: u64,
}

/// How to build it.
#[derive(Debug, Clone, Copy)]
pub struct Build {
    /// Type of the weights in memory.
    pub precision: Precision,
    /// How the parts are computed.
    pub path: Path,
    /// Added to the stored gains of the trunk's zero-centred norms.
    pub trunk_shift: f32,
    /// The same for the head; `None` builds no head.
    pub head_shift: Option<f32>,
}

/// Reads everything that `build` asks for.
///
/// # Errors
/// A tensor is absent or of a type that can't be used, or the device fails.
pub fn load(weights: &Weights<'_>, build: Build) -> Result<Loaded> {
    let config = weights.checkpoint().config();
    let builder = Builder { weights, config, build };
    let embed = weights.linear("embed_tokens")?;
    let lm_head = match weights.checkpoint().has("lm_head.weight") {
        true => Some(weights.linear("lm_head")?),
        false => None,
    };
    let dtype = match build.precision {
        Precision::Widen => Dtype::Float32,
        Precision::Native => weights.activation_dtype()?,
    };
    let vocabulary = Rc::new(Vocabulary { embed, lm_head, dtype });
    let mut layers = Vec::with_capacity(config.layers.len());
    for (index, kind) in config.layers.iter().enumerate() {
        layers.push(builder.layer(&format!("layers.{index}"), *kind, build.trunk_shift)?);
    }
    let norm = builder.norm("norm", build.trunk_shift)?;
    let rope = builder.rope();
    let head = build.head_shift.map(|shift| builder.head(&vocabulary, shift)).transpose()?;
    let model = Qwen35 { vocabulary, layers, norm, rope, head };
    let arrays = model.arrays();
    mlx_rs::transforms::eval(arrays.iter().copied())?;
    let bytes = arrays.iter().map(|a| a.nbytes() as u64).sum();
    drop(arrays);
    Ok(Loaded { model, bytes })
}

struct Builder<'a, 'w> {
    weights: &'a Weights<'w>,
    config: &'a ModelConfig,
    build: Build,
}

impl Builder<'_, '_> {
    fn norm(&self, path: &str, shift: f32) -> Result<RmsNorm> {
        Ok(RmsNorm {
            gain: self.weights.gain(&format!("{path}.weight"), shift)?,
            eps: self.config.rms_norm_eps as f32,
            path: self.build.path,
        })
    }

    fn rope(&self) -> Rope {
        let rope = &self.config.rope;
        let half = (rope.dims / 2) as i32;
        Rope {
            dims: rope.dims as i32,
            theta: rope.theta as f32,
            sections: rope.mrope_section.map_or([half, 0, 0], |s| s.map(|n| n as i32)),
            path: self.build.path,
        }
    }

    fn packed(&self, paths: &[String]) -> Result<Packed> {
        let parts = paths.iter().map(|path| self.weights.linear(path)).collect::<Result<Vec<Linear>>>()?;
        Ok(Packed::new(parts)?)
    }

    fn layer(&self, path: &str, kind: LayerKind, shift: f32) -> Result<Layer> {
        let mixer = match kind {
            LayerKind::Full => Mixer::Full(self.attention(&format!("{path}.self_attn"), shift)?),
            LayerKind::Linear => Mixer::Delta(self.delta(&format!("{path}.linear_attn"))?),
        };
        Ok(Layer {
            input_norm: self.norm(&format!("{path}.input_layernorm"), shift)?,
            mixer,
            post_norm: self.norm(&format!("{path}.post_attention_layernorm"), shift)?,
            mlp: self.mlp(&format!("{path}.mlp"))?,
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
        let delta = &self.config.delta;
        let shape = DeltaShape {
            key_heads: delta.key_heads as i32,
            value_heads: delta.value_heads as i32,
            key_dim: delta.key_dim as i32,
            value_dim: delta.value_dim as i32,
            taps: delta.conv_kernel as i32,
        };
        // Both layouts ([C, 1, taps] and [C, taps, 1]) hold the taps of a channel side by side.
        let conv = self.weights.f32(&format!("{path}.conv1d.weight"))?.reshape(&[shape.channels(), shape.taps])?;
        let decay = negative(exp(self.weights.f32(&format!("{path}.A_log"))?)?)?;
        let names = ["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"].map(|part| format!("{path}.{part}"));
        Ok(DeltaLayer {
            input: self.packed(&names)?,
            out: self.weights.linear(&format!("{path}.out_proj"))?,
            params: DeltaParams {
                shape,
                conv,
                decay,
                dt_bias: self.weights.f32(&format!("{path}.dt_bias"))?,
                norm: self.weights.f32(&format!("{path}.norm.weight"))?,
                eps: self.config.rms_norm_eps as f32,
            },
            path: self.build.path,
        })
    }

    fn mlp(&self, path: &str) -> Result<Mlp> {
        Ok(Mlp::Dense(self.swiglu(path)?))
    }

    fn swiglu(&self, path: &str) -> Result<SwiGlu> {
        Ok(SwiGlu {
            gate_up: self.packed(&[format!("{path}.gate_proj"), format!("{path}.up_proj")])?,
            down: self.weights.linear(&format!("{path}.down_proj"))?,
            path: self.build.path,
        })
    }

    fn head(&self, vocabulary: &Rc<Vocabulary>, shift: f32) -> Result<MtpHead> {
        Ok(MtpHead {
            vocabulary: Rc::clone(vocabulary),
            join: self.weights.linear("mtp.fc")?,
            embedding_norm: self.norm("mtp.pre_fc_norm_embedding", shift)?,
            hidden_norm: self.norm("mtp.pre_fc_norm_hidden", shift)?,
            layer: self.layer("mtp.layers.0", LayerKind::Full, shift)?,
            norm: self.norm("mtp.norm", shift)?,
            rope: self.rope(),
        })
    }
}
