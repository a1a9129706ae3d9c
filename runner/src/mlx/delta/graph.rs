//! Convolution, normalisation, gates and the step recurrence as graph operations.
//!
//! Invariant: everything between the cast of the inputs and the final cast is float32.

use mlx_rs::error::Result;
use mlx_rs::fast::rms_norm;
use mlx_rs::ops::{concatenate, exp, logaddexp, sigmoid, stack};
use mlx_rs::Array;

use super::{DeltaInput, DeltaParams, DeltaShape, F32};
use crate::mlx::ops;

/// Per-token inputs of the recurrence, queries and keys still by key head.
pub(super) struct Prepared {
    pub(super) shape: DeltaShape,
    /// Normalised and scaled queries, [B, L, nk, dk].
    pub(super) q: Array,
    /// Normalised keys, [B, L, nk, dk].
    pub(super) k: Array,
    /// Values, [B, L, nv, dv].
    pub(super) v: Array,
    /// Log decay, at most 0, [B, L, nv].
    pub(super) g: Array,
    /// Write strength, [B, L, nv].
    pub(super) beta: Array,
}

impl Prepared {
    /// Rows `from..to`.
    pub(super) fn rows(&self, from: i32, to: i32) -> Result<Self> {
        let cut = |a: &Array| ops::slice_axis(a, 1, from, to);
        Ok(Self {
            shape: self.shape,
            q: cut(&self.q)?,
            k: cut(&self.k)?,
            v: cut(&self.v)?,
            g: cut(&self.g)?,
            beta: cut(&self.beta)?,
        })
    }
}

/// Convolution with SiLU, head split, l2 norms and gates. `mix` is [B, taps - 1 + L, C].
pub(super) fn prepare(params: &DeltaParams, mix: &Array, input: &DeltaInput<'_>) -> Result<Prepared> {
    let shape = params.shape;
    let (batch, rows) = (input.mix.dim(0), input.mix.dim(1));
    let mix = ops::cast(mix, F32)?;
    let mut y: Option<Array> = None;
    for tap in 0..shape.taps {
        let weight = ops::slice_axis(&params.conv, 1, tap, tap + 1)?.reshape(&[shape.channels()])?;
        let term = ops::slice_axis(&mix, 1, tap, tap + rows)?.multiply(&weight)?;
        y = Some(match y {
            Some(sum) => sum.add(&term)?,
            None => term,
        });
    }
    let y = match y {
        Some(y) => y.multiply(&sigmoid(&y)?)?,
        None => return Err(mlx_rs::error::Exception::custom("convolution without taps")),
    };
    let keys = shape.key_columns();
    let heads = |from: i32, heads: i32, dim: i32| -> Result<Array> {
        ops::slice_axis(&y, 2, from, from + heads * dim)?.reshape(&[batch, rows, heads, dim])
    };
    // x / sqrt(sum x^2 + 1e-6) is the root-mean-square norm with epsilon 1e-6 / dk, times dk^-1/2.
    let dk = shape.key_dim as f32;
    let eps = 1e-6 / dk;
    let q = rms_norm(heads(0, shape.key_heads, shape.key_dim)?, None, eps)?
        .multiply(Array::from_f32(1.0 / dk))?;
    let k = rms_norm(heads(keys, shape.key_heads, shape.key_dim)?, None, eps)?
        .multiply(Array::from_f32(dk.powf(-0.5)))?;
    let v = heads(2 * keys, shape.value_heads, shape.value_dim)?;
    let a = ops::cast(input.a, F32)?.add(&params.dt_bias)?;
    let g = logaddexp(&a, Array::from_f32(0.0))?.multiply(&params.decay)?;
    let beta = sigmoid(&ops::cast(input.b, F32)?)?;
    Ok(Prepared {
        shape,
        q,
        k,
        v,
        g,
        beta,
    })
}

/// Gives every value head its key head: [B, L, nk, dk] → [B, L, nv, dk].
pub(super) fn repeat_heads(shape: DeltaShape, x: &Array) -> Result<Array> {
    let times = shape.value_heads / shape.key_heads;
    if times == 1 {
        return Ok(x.clone());
    }
    mlx_rs::ops::repeat_axis::<f32>(x.clone(), times, 2)
}

/// The recurrence token by token. Returns outputs [B, L, nv, dv] and the state after each token.
pub(super) fn steps(p: &Prepared, state: &Array) -> Result<(Array, Vec<Array>)> {
    let (batch, rows) = (p.v.dim(0), p.v.dim(1));
    let s = p.shape;
    let q = repeat_heads(s, &p.q)?;
    let k = repeat_heads(s, &p.k)?;
    let decay = exp(&p.g)?;
    let mut state = state.clone();
    let mut outputs = Vec::new();
    let mut states = Vec::new();
    for t in 0..rows {
        let at = |x: &Array, dims: &[i32]| ops::slice_axis(x, 1, t, t + 1)?.reshape(dims);
        let key = at(&k, &[batch, s.value_heads, 1, s.key_dim])?;
        let query = at(&q, &[batch, s.value_heads, 1, s.key_dim])?;
        let value = at(&p.v, &[batch, s.value_heads, s.value_dim, 1])?;
        let beta = at(&p.beta, &[batch, s.value_heads, 1, 1])?;
        state = state.multiply(&at(&decay, &[batch, s.value_heads, 1, 1])?)?;
        let predicted = state.multiply(&key)?.sum_axis(-1, true)?;
        let delta = value.subtract(&predicted)?.multiply(&beta)?;
        state = state.add(&delta.multiply(&key)?)?;
        outputs.push(state.multiply(&query)?.sum_axis(-1, false)?);
        states.push(state.clone());
    }
    let o = stack(&outputs, 1)?;
    Ok((o, states))
}

/// `RMS(o) * gain * silu(z)`, float32, [B, L, nv * dv].
pub(super) fn gated_norm(params: &DeltaParams, o: &Array, z: &Array) -> Result<Array> {
    let (batch, rows) = (o.dim(0), o.dim(1));
    let columns = params.shape.value_columns();
    let normed = rms_norm(o, Some(&params.norm), params.eps)?.reshape(&[batch, rows, columns])?;
    let z = ops::cast(z, F32)?;
    normed.multiply(&z.multiply(&sigmoid(&z)?)?)
}

/// Pads axis 1 with zeros to `rows`: zero queries, keys, values, strengths and log decays leave the state as it is.
pub(super) fn pad_rows(x: &Array, rows: i32) -> Result<Array> {
    let have = x.dim(1);
    if have == rows {
        return Ok(x.clone());
    }
    let mut dims = x.shape().to_vec();
    dims[1] = rows - have;
    concatenate(&[x, &mlx_rs::ops::zeros_dtype(&dims, x.dtype())?], 1)
}
