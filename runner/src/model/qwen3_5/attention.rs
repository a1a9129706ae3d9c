//! Full attention with output gate, query and key norms and partial rotary embedding.
//!
//! Invariant: keys enter the cache after norm and rotation, values as projected; the gate is neither normed nor rotated.

use mlx_rs::error::{Exception, Result};
use mlx_rs::fast::{scaled_dot_product_attention, ScaledDotProductAttentionMask};
use mlx_rs::ops::{concatenate, sigmoid};
use mlx_rs::transforms::async_eval;
use mlx_rs::Array;

use super::norm::{RmsNorm, Stream};
use super::rope::{Rope, Rotation};
use crate::cache::KvCache;
use crate::mlx::cpu::{self, attention::Heads, op::AttentionCall};
use crate::mlx::{gpu, ops, Path};
use crate::model::linear::{Linear, Packed};

/// One attention mixer.
#[derive(Debug)]
pub struct Attention {
    /// Query heads.
    pub heads: i32,
    /// Key-value heads.
    pub kv_heads: i32,
    /// Width of a head.
    pub head_dim: i32,
    /// Queries with gates (interleaved by head), keys, values.
    pub qkv: Packed,
    /// Output projection.
    pub out: Linear,
    /// Norm of each query.
    pub q_norm: RmsNorm,
    /// Norm of each key.
    pub k_norm: RmsNorm,
    /// Rotary embedding.
    pub rope: Rope,
}

impl Attention {
    /// Reads the stream's norm and adds to the stream; appends its L rows to `cache`.
    pub fn forward(
        &self,
        stream: &mut Stream,
        norm: &RmsNorm,
        rotation: &Rotation,
        cache: &mut KvCache,
    ) -> Result<()> {
        let y = match (self.rope.path, rotation, stream.rows()) {
            (Path::Cpu, Rotation::Table(cos, sin), (1, rows)) => {
                self.mix_cpu(&stream.project(norm, &self.qkv)?, rows, (cos, sin), cache)?
            }
            (Path::Gpu, Rotation::Table(cos, sin), (1, rows)) => {
                self.mix_gpu(&stream.project(norm, &self.qkv)?, rows, (cos, sin), cache)?
            }
            _ => self.mix(&stream.norm(norm)?, rotation, cache)?,
        };
        stream.add_product(&y, &self.out)
    }

    /// What the output projection reads: x [B, L, D] → [B, L, H * d].
    fn mix(&self, x: &Array, rotation: &Rotation, cache: &mut KvCache) -> Result<Array> {
        let (batch, rows) = (x.dim(0), x.dim(1));
        let (h, kv, d) = (self.heads, self.kv_heads, self.head_dim);
        let parts = self.qkv.forward(x)?;
        let qg = parts[0].reshape(&[batch, rows, h, 2 * d])?;
        let heads_first = |a: &Array| a.transpose_axes(&[0, 2, 1, 3]);
        let q = self.q_norm.forward(&ops::slice_axis(&qg, 3, 0, d)?)?;
        let gate = ops::slice_axis(&qg, 3, d, 2 * d)?.reshape(&[batch, rows, h * d])?;
        let k = self.k_norm.forward(&parts[1].reshape(&[batch, rows, kv, d])?)?;
        let v = heads_first(&parts[2].reshape(&[batch, rows, kv, d])?)?;
        let q = self.rope.apply(&heads_first(&q)?, rotation)?;
        let k = self.rope.apply(&heads_first(&k)?, rotation)?;
        let (keys, values) = cache.append(&k, &v)?;
        let scale = (d as f32).powf(-0.5);
        let o = attend(&q, &keys, &values, scale)?;
        let o = heads_first(&o)?.reshape(&[batch, rows, h * d])?;
        o.multiply(&sigmoid(&gate)?)
    }

    /// The same with fused kernels before and after MLX's attention.
    fn mix_gpu(
        &self,
        packed: &Array,
        rows: i32,
        table: (&Array, &Array),
        cache: &mut KvCache,
    ) -> Result<Array> {
        let kernels = gpu::kernels()?;
        let heads = gpu::Heads {
            query: self.heads,
            kv: self.kv_heads,
            dim: self.head_dim,
        };
        let how = gpu::Prepare {
            heads,
            gains: (&self.q_norm.gain, &self.k_norm.gain),
            eps: self.q_norm.eps,
            table,
        };
        let before = cache.offset();
        let (q, keys, values) = if kernels.writes_in_place() {
            let mut queries = None;
            let shape = [1, heads.kv, heads.dim];
            let (keys, values) = cache.append_by_effect(rows, shape, packed.dtype(), |k, v| {
                let (q, buffers) = kernels.attention_prepare_in_place(&how, packed, (k, v), before)?;
                queries = Some(q);
                Ok(buffers)
            })?;
            let queries = queries.ok_or_else(|| Exception::custom("attention without queries"))?;
            (queries, keys, values)
        } else {
            let (q, k, v) = kernels.attention_prepare(&how, packed)?;
            cache.append(&k, &v)?;
            let buffers = cache.buffers();
            let (keys, values) = buffers.ok_or_else(|| Exception::custom("appended to no buffer"))?;
            (q, keys.clone(), values.clone())
        };
        if kernels.takes_rows(heads, rows, before) {
            return kernels.attention_rows(heads, &q, (&keys, &values), before, packed);
        }
        if kernels.writes_in_place() {
            // The library copies parts of the buffers, which mustn't come before they are written.
            async_eval([&q])?;
        }
        let filled = |buffer: &Array| ops::slice_axis(buffer, 2, 0, before + rows);
        let scale = (self.head_dim as f32).powf(-0.5);
        let o = attend(&q, &filled(&keys)?, &filled(&values)?, scale)?;
        kernels.attention_gate(heads, &o, packed)
    }

    /// The same in two fused nodes around the projections.
    fn mix_cpu(
        &self,
        packed: &Array,
        rows: i32,
        table: (&Array, &Array),
        cache: &mut KvCache,
    ) -> Result<Array> {
        let heads = Heads {
            query: self.heads as usize,
            kv: self.kv_heads as usize,
            dim: self.head_dim as usize,
        };
        let call = AttentionCall {
            heads,
            eps: self.q_norm.eps,
            before: cache.offset() as usize,
        };
        let gains = (&self.q_norm.gain, &self.k_norm.gain);
        let mut queries = None;
        let shape = [1, self.kv_heads, self.head_dim];
        let (keys, values) = cache.append_in_place(rows, shape, packed.dtype(), |k, v| {
            let (q, k, v) = cpu::op::attention_prepare(call, packed, gains, table, k, v)?;
            queries = Some(q);
            Ok((k, v))
        })?;
        let queries = queries.ok_or_else(|| Exception::custom("attention without queries"))?;
        cpu::op::attention(call, packed, &queries, &keys, &values)
    }

    /// Arrays held.
    pub fn arrays(&self) -> Vec<&Array> {
        let mut out = self.qkv.arrays();
        out.extend(self.out.arrays());
        out.extend([&self.q_norm.gain, &self.k_norm.gain]);
        out
    }
}

/// Scores held at once by MLX's fallback attention, in entries; longer queries are cut into blocks.
const SCORE_BUDGET: i64 = 64 << 20;

/// Causal attention of the last L positions over all S; q [B, H, L, D], keys and values [B, KV, S, D].
fn attend(q: &Array, keys: &Array, values: &Array, scale: f32) -> Result<Array> {
    let (heads, rows, total) = (q.dim(1), q.dim(2), keys.dim(2));
    let one = |q: &Array, k: &Array, v: &Array| {
        if q.dim(2) == 1 {
            scaled_dot_product_attention(q, k, v, scale, None, None)
        } else {
            scaled_dot_product_attention(q, k, v, scale, Some(ScaledDotProductAttentionMask::Causal), None)
        }
    };
    let fits = SCORE_BUDGET / (i64::from(heads) * i64::from(total)).max(1);
    if i64::from(rows) <= fits.max(16) {
        return one(q, keys, values);
    }
    let block = fits.max(16) as i32;
    let before = total - rows;
    let mut outputs = Vec::new();
    let mut from = 0;
    while from < rows {
        let to = (from + block).min(rows);
        let k = ops::slice_axis(keys, 2, 0, before + to)?;
        let v = ops::slice_axis(values, 2, 0, before + to)?;
        outputs.push(one(&ops::slice_axis(q, 2, from, to)?, &k, &v)?);
        from = to;
    }
    concatenate(&outputs, 2)
}
