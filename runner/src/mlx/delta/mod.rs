//! The gated delta net's mixer between its projections: causal conv, normalisation, recurrence, gated norm.
//!
//! Invariant: every path (graph step, graph chunks, fused kernel) computes the same function; they differ only in rounding.
//! Source: Yang et al., "Gated Delta Networks" (2024), with the chunkwise form of "Parallelizing Linear Transformers with
//! the Delta Rule over Sequence Length" (2024).

mod chunk;
mod graph;

use mlx_rs::error::Result;
use mlx_rs::ops::concatenate;
use mlx_rs::{Array, Dtype};

use super::{cpu, gpu, ops};

/// Heads and widths of one layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeltaShape {
    /// Key heads.
    pub key_heads: i32,
    /// Value heads, a multiple of the key heads; value head h reads key head h / (value heads / key heads).
    pub value_heads: i32,
    /// Width of a key head.
    pub key_dim: i32,
    /// Width of a value head.
    pub value_dim: i32,
    /// Taps of the causal convolution.
    pub taps: i32,
}

impl DeltaShape {
    /// Columns of all queries (and of all keys).
    pub fn key_columns(&self) -> i32 {
        self.key_heads * self.key_dim
    }

    /// Columns of all values.
    pub fn value_columns(&self) -> i32 {
        self.value_heads * self.value_dim
    }

    /// Channels of the convolution: queries, keys, values.
    pub fn channels(&self) -> i32 {
        2 * self.key_columns() + self.value_columns()
    }
}

/// One layer's small parameters, all float32.
#[derive(Debug, Clone)]
pub struct DeltaParams {
    /// Heads and widths.
    pub shape: DeltaShape,
    /// Convolution taps, [C, taps]; the last one weighs the current row.
    pub conv: Array,
    /// `-exp(A_log)`, [nv].
    pub decay: Array,
    /// `dt_bias`, [nv].
    pub dt_bias: Array,
    /// Plain gain of the gated norm, [dv].
    pub norm: Array,
    /// Epsilon of the gated norm.
    pub eps: f32,
}

/// What the projections hand over, and the state to start from.
#[derive(Debug)]
pub struct DeltaInput<'a> {
    /// Rows before the convolution, [B, L, C].
    pub mix: &'a Array,
    /// Gate, [B, L, nv * dv].
    pub z: &'a Array,
    /// Write strength before its sigmoid, [B, L, nv].
    pub b: &'a Array,
    /// Decay input, [B, L, nv].
    pub a: &'a Array,
    /// Last `taps - 1` rows of `mix` before this input, [B, taps - 1, C].
    pub tail: &'a Array,
    /// State, [B, nv, dv, dk] float32.
    pub state: &'a Array,
}

/// Which states a call keeps besides the last.
#[derive(Debug, Clone, Copy)]
pub enum Keep<'a> {
    /// Only the last one.
    Last,
    /// The one after every row: [B, L, nv, dv, dk].
    Rows,
    /// Those after so many rows; ascending, each in `1..=L`.
    Cuts(&'a [i32]),
}

/// Result of one call.
#[derive(Debug)]
pub struct DeltaOutput {
    /// Gated and normalised output, [B, L, nv * dv], in the type of `mix`.
    pub y: Array,
    /// Old tail followed by the new rows, [B, taps - 1 + L, C].
    pub mix: Array,
    /// State after the last row.
    pub last: Array,
    /// States asked for by [`Keep::Rows`].
    pub rows: Option<Array>,
    /// States asked for by [`Keep::Cuts`], in order.
    pub cuts: Vec<Array>,
}

/// Inputs up to this many rows take the recurrence, longer ones the chunkwise form.
pub const STEP_ROWS: i32 = 16;

/// One call of a fused mixer: packed rows, tail and state in; gated output, joined rows and states out.
struct Fused {
    y: Array,
    mix: Array,
    states: Array,
}

/// The mixer as fused kernels on the host's cores; `packed` [B, L, C + nv * dv + 2 nv] holds mix | z | b | a, float32.
pub fn cpu_net(
    params: &DeltaParams,
    packed: &Array,
    tail: &Array,
    state: &Array,
    keep: Keep<'_>,
) -> Result<DeltaOutput> {
    fused_net(
        params,
        packed,
        tail,
        state,
        keep,
        |packed, tail, state, every_row| {
            let r = cpu::op::delta_net(params, packed, tail, state, every_row)?;
            Ok(Fused {
                y: r.y,
                mix: r.mix,
                states: r.states,
            })
        },
    )
}

/// The same as fused kernels on the GPU, in the type of `packed`.
pub fn gpu_net(
    params: &DeltaParams,
    packed: &Array,
    tail: &Array,
    state: &Array,
    keep: Keep<'_>,
) -> Result<DeltaOutput> {
    let kernels = gpu::kernels()?;
    fused_net(
        params,
        packed,
        tail,
        state,
        keep,
        |packed, tail, state, every_row| {
            let r = kernels.delta_net(params, packed, tail, state, every_row)?;
            Ok(Fused {
                y: r.y,
                mix: r.mix,
                states: r.states,
            })
        },
    )
}

/// A cut splits the call in two.
fn fused_net(
    params: &DeltaParams,
    packed: &Array,
    tail: &Array,
    state: &Array,
    keep: Keep<'_>,
    run: impl Fn(&Array, &Array, &Array, bool) -> Result<Fused>,
) -> Result<DeltaOutput> {
    let rows = packed.dim(1);
    let cuts = match keep {
        Keep::Rows => {
            let r = run(packed, tail, state, true)?;
            let last = ops::slice_axis(&r.states, 1, rows - 1, rows)?.reshape(state.shape())?;
            return Ok(DeltaOutput {
                y: r.y,
                mix: r.mix,
                last,
                rows: Some(r.states),
                cuts: Vec::new(),
            });
        }
        Keep::Last => &[],
        Keep::Cuts(cuts) => cuts,
    };
    let (mut tail, mut state) = (tail.clone(), state.clone());
    let (mut ys, mut mixes, mut kept) = (Vec::new(), Vec::new(), Vec::new());
    let mut from = 0;
    for to in cuts.iter().copied().filter(|&c| c < rows).chain([rows]) {
        let part = ops::slice_axis(packed, 1, from, to)?;
        let r = run(&part, &tail, &state, false)?;
        let old = params.shape.taps - 1;
        tail = ops::slice_axis(&r.mix, 1, to - from, to - from + old)?;
        // The next part's rows follow this part's, whose own tail is already there.
        let fresh = if from == 0 { 0 } else { old };
        mixes.push(ops::slice_axis(&r.mix, 1, fresh, old + to - from)?);
        ys.push(r.y);
        state = r.states;
        if cuts.contains(&to) {
            kept.push(state.clone());
        }
        from = to;
    }
    let join = |mut parts: Vec<Array>| {
        if parts.len() == 1 {
            Ok(parts.remove(0))
        } else {
            concatenate(&parts, 1)
        }
    };
    Ok(DeltaOutput {
        y: join(ys)?,
        mix: join(mixes)?,
        last: state,
        rows: None,
        cuts: kept,
    })
}

/// The mixer as plain graph operations: the reference that kernels are held against, and the fallback.
pub fn graph_net(params: &DeltaParams, input: &DeltaInput<'_>, keep: Keep<'_>) -> Result<DeltaOutput> {
    let mix = concatenate(&[input.tail, input.mix], 1)?;
    let prepared = graph::prepare(params, &mix, input)?;
    let rows = input.mix.dim(1);
    let mut state = input.state.clone();
    let mut outputs = Vec::new();
    let mut kept_rows = None;
    let mut kept_cuts = Vec::new();
    let cuts: &[i32] = if let Keep::Cuts(cuts) = keep { cuts } else { &[] };
    let mut from = 0;
    for to in cuts.iter().copied().filter(|&c| c < rows).chain([rows]) {
        let part = prepared.rows(from, to)?;
        if matches!(keep, Keep::Rows) || to - from <= STEP_ROWS {
            let (o, states) = graph::steps(&part, &state)?;
            state = states.last().cloned().unwrap_or(state);
            outputs.push(o);
            if matches!(keep, Keep::Rows) {
                kept_rows = Some(mlx_rs::ops::stack(&states, 1)?);
            }
        } else {
            let (o, next) = chunk::chunks(&part, &state)?;
            state = next;
            outputs.push(o);
        }
        if cuts.contains(&to) {
            kept_cuts.push(state.clone());
        }
        from = to;
    }
    let o = if outputs.len() == 1 {
        outputs.remove(0)
    } else {
        concatenate(&outputs, 1)?
    };
    let y = graph::gated_norm(params, &o, input.z)?;
    Ok(DeltaOutput {
        y: ops::cast(&y, input.mix.dtype())?,
        mix,
        last: state,
        rows: kept_rows,
        cuts: kept_cuts,
    })
}

pub(crate) const F32: Dtype = Dtype::Float32;
