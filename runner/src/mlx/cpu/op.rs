//! The kernels of this folder as nodes of MLX's lazy graph.
//!
//! Invariant: every input is float32; another type is an error when the node is made, not a wrong result.

use std::ffi::CStr;

use mlx_rs::error::{Exception, Result};
use mlx_rs::{Array, Dtype};

use super::kernel::{cpu_op, Inputs, Output, Outputs};
use super::{attention, delta, elementwise};
use crate::mlx::delta::{DeltaParams, DeltaShape};

/// A new buffer.
fn fresh(shape: &[i32]) -> Output {
    Output::Floats(shape.to_vec())
}

/// Adds a kernel that takes float32 only.
fn float_op<const N: usize>(
    name: &'static CStr,
    inputs: &[&Array],
    outputs: [Output; N],
    run: impl Fn(&Inputs, Outputs) + Send + Sync + 'static,
) -> Result<[Array; N]> {
    match inputs.iter().find(|a| a.dtype() != Dtype::Float32) {
        Some(other) => Err(Exception::custom(format!(
            "{} takes float32, got {:?}",
            name.to_string_lossy(),
            other.dtype()
        ))),
        None => cpu_op(name, inputs, outputs, run),
    }
}

/// See [`elementwise::rms_norm`]; x [..., D].
pub fn rms_norm(x: &Array, gain: &Array, eps: f32) -> Result<Array> {
    let [normed] = float_op(
        c"rms_norm",
        &[x, gain],
        [fresh(x.shape())],
        move |ins, mut outs| {
            elementwise::rms_norm(ins.floats(0), ins.floats(1), eps, outs.floats());
        },
    )?;
    Ok(normed)
}

/// See [`elementwise::add_norm`]: the sum and its norm.
pub fn add_norm(x: &Array, added: &Array, gain: &Array, eps: f32) -> Result<(Array, Array)> {
    let shape = x.shape();
    let [sum, normed] = float_op(
        c"add_norm",
        &[x, added, gain],
        [fresh(shape), fresh(shape)],
        move |ins, mut outs| {
            let (sum, normed) = (outs.floats(), outs.floats());
            elementwise::add_norm(ins.floats(0), ins.floats(1), ins.floats(2), eps, sum, normed);
        },
    )?;
    Ok((sum, normed))
}

/// See [`elementwise::swiglu`]; gate_up [..., 2 I] → [..., I].
pub fn swiglu(gate_up: &Array) -> Result<Array> {
    let mut shape = gate_up.shape().to_vec();
    let width = match shape.last_mut() {
        Some(last) => {
            *last /= 2;
            *last as usize
        }
        None => return Err(Exception::custom("swiglu of a scalar")),
    };
    let [out] = float_op(c"swiglu", &[gate_up], [fresh(&shape)], move |ins, mut outs| {
        elementwise::swiglu(ins.floats(0), width, outs.floats());
    })?;
    Ok(out)
}

/// Results of [`delta_net`].
#[derive(Debug)]
pub struct DeltaResults {
    /// [B, L, nv * dv].
    pub y: Array,
    /// [B, taps - 1 + L, C].
    pub mix: Array,
    /// [B, nv, dv, dk], or [B, L, nv, dv, dk] when every row's was asked for.
    pub states: Array,
}

/// The whole mixer as one node; `packed` [B, L, C + nv * dv + 2 nv] holds mix | z | b | a.
pub fn delta_net(
    params: &DeltaParams,
    packed: &Array,
    tail: &Array,
    state: &Array,
    every_row: bool,
) -> Result<DeltaResults> {
    let shape: DeltaShape = params.shape;
    let (batch, rows) = (packed.dim(0), packed.dim(1));
    let sizes = delta::Sizes {
        shape,
        batch: batch as usize,
        rows: rows as usize,
        eps: params.eps,
        every_row,
    };
    let y_shape = [batch, rows, shape.value_columns()];
    let mix_shape = [batch, shape.taps - 1 + rows, shape.channels()];
    let (nv, dv, dk) = (shape.value_heads, shape.value_dim, shape.key_dim);
    let every = [batch, rows, nv, dv, dk];
    let last = [batch, nv, dv, dk];
    let states_shape: &[i32] = if every_row { &every } else { &last };
    let inputs = [
        packed,
        tail,
        state,
        &params.conv,
        &params.decay,
        &params.dt_bias,
        &params.norm,
    ];
    let [y, mix, states] = float_op(
        c"delta_net",
        &inputs,
        [fresh(&y_shape), fresh(&mix_shape), fresh(states_shape)],
        move |ins, mut outs| {
            let input = delta::Inputs {
                packed: ins.floats(0),
                tail: ins.floats(1),
                state: ins.floats(2),
                conv: ins.floats(3),
                decay: ins.floats(4),
                dt_bias: ins.floats(5),
                norm: ins.floats(6),
            };
            let mut output = delta::Outputs {
                y: outs.floats(),
                mix: outs.floats(),
                states: outs.floats(),
            };
            delta::run(&sizes, &input, &mut output);
        },
    )?;
    Ok(DeltaResults { y, mix, states })
}

/// What one attention call needs besides arrays.
#[derive(Debug, Clone, Copy)]
pub struct AttentionCall {
    /// Heads.
    pub heads: attention::Heads,
    /// Epsilon of the query and key norms.
    pub eps: f32,
    /// Slots filled before the call.
    pub before: usize,
}

/// Norms, rotates and appends: packed [1, L, ...], `cos` and `sin` [L, rotated / 2], buffers [1, KV, capacity, D] with room
/// for the new slots. Returns queries [L, H, D] and the buffers.
pub fn attention_prepare(
    call: AttentionCall,
    packed: &Array,
    gains: (&Array, &Array),
    (cos, sin): (&Array, &Array),
    keys: &Array,
    values: &Array,
) -> Result<(Array, Array, Array)> {
    let AttentionCall { heads, eps, before } = call;
    let rows = packed.dim(1);
    let q_shape = [rows, heads.query as i32, heads.dim as i32];
    let updated = |input: usize, buffer: &Array| Output::Updated {
        input,
        shape: buffer.shape().to_vec(),
    };
    let [queries, keys, values] = float_op(
        c"attention_prepare",
        &[packed, gains.0, gains.1, cos, sin, keys, values],
        [fresh(&q_shape), updated(5, keys), updated(6, values)],
        move |ins, mut outs| {
            let norms = attention::Norms {
                q: ins.floats(1),
                k: ins.floats(2),
                eps,
            };
            let queries = outs.floats();
            let target = attention::Append {
                before,
                keys: outs.floats(),
                values: outs.floats(),
            };
            attention::prepare(
                heads,
                ins.floats(0),
                norms,
                (ins.floats(3), ins.floats(4)),
                queries,
                target,
            );
        },
    )?;
    Ok((queries, keys, values))
}

/// Attention with output gate over the buffers of [`attention_prepare`]; returns [1, L, H * D].
pub fn attention(
    call: AttentionCall,
    packed: &Array,
    queries: &Array,
    keys: &Array,
    values: &Array,
) -> Result<Array> {
    let AttentionCall { heads, before, .. } = call;
    let shape = [1, packed.dim(1), (heads.query * heads.dim) as i32];
    let [out] = float_op(
        c"attention",
        &[packed, queries, keys, values],
        [fresh(&shape)],
        move |ins, mut outs| {
            attention::run(
                heads,
                ins.floats(0),
                ins.floats(1),
                ins.floats(2),
                ins.floats(3),
                before,
                outs.floats(),
            );
        },
    )?;
    Ok(out)
}
