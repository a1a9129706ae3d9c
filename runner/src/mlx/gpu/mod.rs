//! Fused kernels for NVIDIA and Apple GPUs.
//!
//! Invariant: each kernel equals its counterpart in plain operations up to rounding; [`check::check`] holds them against each
//! other on random input before a model trusts them.

pub mod check;
mod kernel;
mod source;

use std::cell::RefCell;
use std::rc::Rc;

use mlx_rs::error::Result;
use mlx_rs::{Array, Dtype};

use super::delta::{DeltaParams, DeltaShape};
use super::Backend;
use kernel::{Call, Kernel};

/// Threads that share a row's norm.
const NORM_THREADS: i32 = 256;

/// All kernels, compiled at first use for each shape.
#[derive(Debug)]
pub struct Kernels {
    conv: Kernel,
    delta: Kernel,
    gated_norm: Kernel,
    add_norm: Kernel,
    norm: Kernel,
    swiglu: Kernel,
    prepare: Kernel,
    gate: Kernel,
    rows: Kernel,
}

thread_local! {
    static KERNELS: RefCell<Option<Rc<Kernels>>> = const { RefCell::new(None) };
}

/// Makes the kernels for the thread that owns all of MLX; false on the CPU backend.
pub fn install(backend: Backend) -> bool {
    let kernels = Kernels::new(backend);
    let there = kernels.is_some();
    KERNELS.with(|slot| *slot.borrow_mut() = kernels);
    there
}

/// This thread's kernels.
///
/// # Errors
/// [`install`] was not called on this thread.
pub fn kernels() -> Result<Rc<Kernels>> {
    let found = KERNELS.with(|slot| slot.borrow().clone());
    found.ok_or_else(|| mlx_rs::error::Exception::custom("no GPU kernels on this thread"))
}

/// Heads of one attention call.
#[derive(Debug, Clone, Copy)]
pub struct Heads {
    /// Query heads.
    pub query: i32,
    /// Key-value heads.
    pub kv: i32,
    /// Width.
    pub dim: i32,
}

/// Results of [`Kernels::delta_net`].
#[derive(Debug)]
pub struct DeltaResults {
    /// [B, L, nv * dv].
    pub y: Array,
    /// [B, taps - 1 + L, C].
    pub mix: Array,
    /// [B, nv, dv, dk], or [B, L, nv, dv, dk] when every row's was asked for.
    pub states: Array,
}

impl Kernels {
    /// Kernels for a GPU backend; `None` for the CPU.
    pub fn new(backend: Backend) -> Option<Rc<Self>> {
        let make = |name, inputs, outputs, body| Kernel::new(backend, name, inputs, outputs, body);
        Some(Rc::new(Self {
            conv: make("conv", &["packed", "tail", "conv"], &["y", "mix"], source::CONV)?,
            delta: make(
                "delta",
                &["x", "packed", "state", "decay", "dt_bias"],
                &["o", "states"],
                source::DELTA,
            )?,
            gated_norm: make("gated_norm", &["o", "packed", "norm"], &["y"], source::GATED_NORM)?,
            add_norm: make(
                "add_norm",
                &["x", "added", "gain"],
                &["sum", "normed"],
                source::ADD_NORM,
            )?,
            norm: make("norm", &["x", "gain"], &["normed"], source::NORM)?,
            swiglu: make("swiglu", &["gate_up"], &["y"], source::SWIGLU)?,
            prepare: make(
                "attention_prepare",
                &["packed", "q_gain", "k_gain", "cos_table", "sin_table"],
                &["q", "k", "v"],
                source::ATTENTION_PREPARE,
            )?,
            gate: make("attention_gate", &["o", "packed"], &["y"], source::ATTENTION_GATE)?,
            rows: make(
                "attention_rows",
                &["q", "keys", "values", "slots", "packed"],
                &["y"],
                source::ATTENTION_ROWS,
            )?,
        }))
    }

    /// Whether the recurrence kernel takes this shape: lanes must divide a key head.
    pub fn takes(shape: DeltaShape) -> bool {
        shape.key_dim % 32 == 0
    }

    /// The whole mixer in three launches; `packed` [B, L, C + nv * dv + 2 nv] holds mix | z | b | a.
    pub fn delta_net(
        &self,
        params: &DeltaParams,
        packed: &Array,
        tail: &Array,
        state: &Array,
        every_row: bool,
    ) -> Result<DeltaResults> {
        let s = params.shape;
        let (batch, rows) = (packed.dim(0), packed.dim(1));
        let (c, columns) = (s.channels(), packed.dim(2));
        let old = s.taps - 1;
        let dtype = packed.dtype();
        let mut out = self.conv.call(&Call {
            inputs: &[packed, tail, &params.conv],
            outputs: &[
                (&[batch, rows, c], Dtype::Float32),
                (&[batch, old + rows, c], dtype),
            ],
            ints: &[("C", c), ("P", columns), ("TAPS", s.taps)],
            dtype,
            grid: [c, rows + old, batch],
            group: [128, 1, 1],
        })?;
        let (mix, x) = two(&mut out)?;
        let (nv, dv, dk) = (s.value_heads, s.value_dim, s.key_dim);
        let every = [batch, rows, nv, dv, dk];
        let last = [batch, nv, dv, dk];
        let states_shape: &[i32] = if every_row { &every } else { &last };
        let mut out = self.delta.call(&Call {
            inputs: &[&x, packed, state, &params.decay, &params.dt_bias],
            outputs: &[
                (&[batch, rows, nv, dv], Dtype::Float32),
                (states_shape, Dtype::Float32),
            ],
            ints: &[
                ("C", c),
                ("P", columns),
                ("NK", s.key_heads),
                ("NV", nv),
                ("DK", dk),
                ("DV", dv),
                ("EVERY", i32::from(every_row)),
            ],
            dtype,
            grid: [32, dv, batch * nv],
            group: [32, if dv % 4 == 0 { 4 } else { 1 }, 1],
        })?;
        let (states, o) = two(&mut out)?;
        let mut out = self.gated_norm.call(&Call {
            inputs: &[&o, packed, &params.norm],
            outputs: &[(&[batch, rows, nv * dv], dtype)],
            ints: &[
                ("C", c),
                ("P", columns),
                ("NV", nv),
                ("DV", dv),
                ("EPS", bits(params.eps)),
            ],
            dtype,
            grid: [32, nv, batch * rows],
            group: [32, 1, 1],
        })?;
        Ok(DeltaResults {
            y: one(&mut out)?,
            mix,
            states,
        })
    }

    /// `x + added` and its norm, in the type of `x`.
    pub fn add_norm(&self, x: &Array, added: &Array, gain: &Array, eps: f32) -> Result<(Array, Array)> {
        let shape = x.shape();
        let width = gain.dim(0);
        let rows = (x.size() as i32) / width;
        let mut out = self.add_norm.call(&Call {
            inputs: &[x, added, gain],
            outputs: &[(shape, x.dtype()), (shape, x.dtype())],
            ints: &[("D", width), ("THREADS", NORM_THREADS), ("EPS", bits(eps))],
            dtype: x.dtype(),
            grid: [NORM_THREADS, rows, 1],
            group: [NORM_THREADS, 1, 1],
        })?;
        let (normed, sum) = two(&mut out)?;
        Ok((sum, normed))
    }

    /// The norm of `x`, in its type.
    pub fn norm(&self, x: &Array, gain: &Array, eps: f32) -> Result<Array> {
        let width = gain.dim(0);
        let rows = (x.size() as i32) / width;
        let mut out = self.norm.call(&Call {
            inputs: &[x, gain],
            outputs: &[(x.shape(), x.dtype())],
            ints: &[("D", width), ("THREADS", NORM_THREADS), ("EPS", bits(eps))],
            dtype: x.dtype(),
            grid: [NORM_THREADS, rows, 1],
            group: [NORM_THREADS, 1, 1],
        })?;
        one(&mut out)
    }

    /// `silu(gate) * up` of packed rows [..., 2 I] → [..., I].
    pub fn swiglu(&self, gate_up: &Array) -> Result<Array> {
        let mut shape = gate_up.shape().to_vec();
        let width = gate_up.dim(-1) / 2;
        if let Some(last) = shape.last_mut() {
            *last = width;
        }
        let rows = (gate_up.size() as i32) / (2 * width);
        let mut out = self.swiglu.call(&Call {
            inputs: &[gate_up],
            outputs: &[(&shape, gate_up.dtype())],
            ints: &[("I", width)],
            dtype: gate_up.dtype(),
            grid: [width, rows, 1],
            group: [256, 1, 1],
        })?;
        one(&mut out)
    }

    /// Norms, rotation and split of packed rows [1, L, (2 H + 2 KV) D]; `table` holds cosines and sines, [L, rotated / 2] float32.
    /// Returns queries [1, H, L, D], keys and values [1, KV, L, D].
    pub fn attention_prepare(
        &self,
        heads: Heads,
        packed: &Array,
        gains: (&Array, &Array),
        eps: f32,
        table: (&Array, &Array),
    ) -> Result<(Array, Array, Array)> {
        let Heads { query: h, kv, dim: d } = heads;
        let rows = packed.dim(1);
        let dtype = packed.dtype();
        let mut out = self.prepare.call(&Call {
            inputs: &[packed, gains.0, gains.1, table.0, table.1],
            outputs: &[
                (&[1, h, rows, d], dtype),
                (&[1, kv, rows, d], dtype),
                (&[1, kv, rows, d], dtype),
            ],
            ints: &[
                ("H", h),
                ("KV", kv),
                ("D", d),
                ("HALF", table.0.dim(1)),
                ("EPS", bits(eps)),
            ],
            dtype,
            grid: [32, h + 2 * kv, rows],
            group: [32, 1, 1],
        })?;
        let v = one(&mut out)?;
        let (k, q) = two(&mut out)?;
        Ok((q, k, v))
    }

    /// `o * sigmoid(gate)` with heads joined: o [1, H, L, D] → [1, L, H * D].
    pub fn attention_gate(&self, heads: Heads, o: &Array, packed: &Array) -> Result<Array> {
        let Heads { query: h, kv, dim: d } = heads;
        let rows = packed.dim(1);
        let mut out = self.gate.call(&Call {
            inputs: &[o, packed],
            outputs: &[(&[1, rows, h * d], packed.dtype())],
            ints: &[("H", h), ("KV", kv), ("D", d)],
            dtype: packed.dtype(),
            grid: [d, h, rows],
            group: [d.min(256), 1, 1],
        })?;
        one(&mut out)
    }
}

/// Attention of a few rows is one kernel up to this many slots; beyond, MLX's own spreads a head over more of the device.
pub const ROWS_SLOTS: i32 = 4096;

/// Threads that share a head in [`Kernels::attention_rows`], in warps.
const ROW_WARPS: i32 = 8;

impl Kernels {
    /// Causal attention of L rows with output gate, over buffers [1, KV, capacity, D] of which `before` + L slots are filled.
    /// Queries [1, H, L, D] → [1, L, H * D].
    pub fn attention_rows(
        &self,
        heads: Heads,
        q: &Array,
        keys: &Array,
        values: &Array,
        before: i32,
        packed: &Array,
    ) -> Result<Array> {
        let Heads { query: h, kv, dim: d } = heads;
        let rows = packed.dim(1);
        // Three integers: arrays of at most eight bytes lie in host memory, which a kernel reads slowly.
        let slots = Array::from_slice(&[before, 0, 0], &[3]);
        let mut out = self.rows.call(&Call {
            inputs: &[q, keys, values, &slots, packed],
            outputs: &[(&[1, rows, h * d], packed.dtype())],
            ints: &[("H", h), ("KV", kv), ("D", d), ("WARPS", ROW_WARPS)],
            dtype: packed.dtype(),
            grid: [32 * ROW_WARPS, h, rows],
            group: [32 * ROW_WARPS, 1, 1],
        })?;
        one(&mut out)
    }
}

/// A float as an integer constant of a kernel: MLX's constants are integers, and an array of one value would be read from
/// host memory.
fn bits(value: f32) -> i32 {
    value.to_bits() as i32
}

fn one(out: &mut Vec<Array>) -> Result<Array> {
    out.pop()
        .ok_or_else(|| mlx_rs::error::Exception::custom("kernel without a result"))
}

/// The last result and the one before it.
fn two(out: &mut Vec<Array>) -> Result<(Array, Array)> {
    Ok((one(out)?, one(out)?))
}
