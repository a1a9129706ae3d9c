//! Launches of the gated delta net's kernels.
//!
//! Invariant: up to [`FEW`] rows take one launch, which can write the state after every row; more rows take three, whose
//! recurrence holds the state in registers from the first token to the last.

use mlx_rs::error::Result;
use mlx_rs::ops::concatenate;
use mlx_rs::{Array, Dtype};

use super::kernel::Call;
use super::{bits, one, two, Kernels};
use crate::mlx::delta::{DeltaParams, DeltaShape};
use crate::mlx::ops;

/// Rows that a verification may have.
pub const FEW: i32 = 16;

/// Warps that share a head's state in the kernel of few rows; each holds four of its rows at a time.
const ROW_WARPS: i32 = 16;

/// Warps that share a head's queries and keys in the kernel of many rows.
const LONG_WARPS: i32 = 8;

/// Floats of shared memory that a kernel may take.
const SHARED: i32 = 11 << 10;

/// Tokens that the kernel of many rows reads at once.
fn tile(key_dim: i32) -> i32 {
    if key_dim <= 128 {
        16
    } else {
        8
    }
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
    /// Whether the kernels take this shape: a warp must divide a key head, and a head's rows must fit shared memory.
    pub fn takes(shape: DeltaShape) -> bool {
        let few = FEW * 2 * (shape.key_dim + shape.value_dim + 1);
        let many = 2 * tile(shape.key_dim) * (2 * shape.key_dim + 4 * LONG_WARPS + 2);
        shape.key_dim % 32 == 0 && few <= SHARED && many <= SHARED
    }

    /// The whole mixer; `packed` [B, L, C + nv * dv + 2 nv] holds mix | z | b | a.
    pub fn delta_net(
        &self,
        params: &DeltaParams,
        packed: &Array,
        tail: &Array,
        state: &Array,
        every_row: bool,
    ) -> Result<DeltaResults> {
        if packed.dim(1) <= FEW {
            self.delta_few(params, packed, tail, state, every_row)
        } else if every_row {
            Err(mlx_rs::error::Exception::custom(
                "states of every row are kept for few rows only",
            ))
        } else {
            self.delta_many(params, packed, tail, state)
        }
    }

    fn delta_few(
        &self,
        params: &DeltaParams,
        packed: &Array,
        tail: &Array,
        state: &Array,
        every_row: bool,
    ) -> Result<DeltaResults> {
        let s = params.shape;
        let (batch, rows) = (packed.dim(0), packed.dim(1));
        let dtype = packed.dtype();
        let every = [batch, rows, s.value_heads, s.value_dim, s.key_dim];
        let last = [batch, s.value_heads, s.value_dim, s.key_dim];
        let states: &[i32] = if every_row { &every } else { &last };
        let mut ints = sizes(s, packed);
        ints.extend([
            // Few values, since each is a compilation; room for more rows costs nothing but shared memory.
            ("ROWS", if rows == 1 { 1 } else { FEW }),
            ("PASSES", (s.value_dim + 4 * ROW_WARPS - 1) / (4 * ROW_WARPS)),
            ("WARPS", ROW_WARPS),
            ("EVERY", i32::from(every_row)),
            ("EPS", bits(params.eps)),
        ]);
        let mut out = self.delta_rows.call(&Call {
            inputs: &[
                packed,
                tail,
                &params.conv,
                state,
                &params.decay,
                &params.dt_bias,
                &params.norm,
            ],
            integers: &[],
            outputs: &[
                (&[batch, rows, s.value_columns()], dtype),
                (&[batch, s.taps - 1 + rows, s.channels()], dtype),
                (states, Dtype::Float32),
            ],
            constants: &ints,
            dtype,
            grid: [32 * ROW_WARPS, s.value_heads, batch],
            group: [32 * ROW_WARPS, 1, 1],
        })?;
        let states = one(&mut out)?;
        let (mix, y) = two(&mut out)?;
        Ok(DeltaResults { y, mix, states })
    }

    fn delta_many(
        &self,
        params: &DeltaParams,
        packed: &Array,
        tail: &Array,
        state: &Array,
    ) -> Result<DeltaResults> {
        let s = params.shape;
        let (batch, rows) = (packed.dim(0), packed.dim(1));
        let (c, nv, dv) = (s.channels(), s.value_heads, s.value_dim);
        let dtype = packed.dtype();
        let mut ints = sizes(s, packed);
        ints.push(("WIDEST", (s.key_dim.max(dv) + 31) / 32 * 32));
        let mut out = self.delta_prepare.call(&Call {
            inputs: &[packed, tail, &params.conv, &params.decay, &params.dt_bias],
            integers: &[],
            outputs: &[
                (&[batch, rows, c], Dtype::Float32),
                (&[batch, rows, nv, 2], Dtype::Float32),
            ],
            constants: &ints,
            dtype,
            grid: [32, 2 * s.key_heads + nv, batch * rows],
            group: [32, divisor(2 * s.key_heads + nv), 1],
        })?;
        let (gates, x) = two(&mut out)?;
        let mut ints = sizes(s, packed);
        ints.extend([("TILE", tile(s.key_dim)), ("WARPS", LONG_WARPS)]);
        // Whole groups: their warps wait for each other.
        let groups = (dv + 4 * LONG_WARPS - 1) / (4 * LONG_WARPS);
        let mut out = self.delta_long.call(&Call {
            inputs: &[&x, &gates, state],
            integers: &[],
            outputs: &[
                (&[batch, rows, nv, dv], Dtype::Float32),
                (state.shape(), Dtype::Float32),
            ],
            constants: &ints,
            dtype,
            grid: [32, groups * LONG_WARPS, batch * nv],
            group: [32, LONG_WARPS, 1],
        })?;
        let (states, o) = two(&mut out)?;
        let mut out = self.gated_norm.call(&Call {
            inputs: &[&o, packed, &params.norm],
            integers: &[],
            outputs: &[(&[batch, rows, nv * dv], dtype)],
            constants: &[
                ("C", c),
                ("P", packed.dim(2)),
                ("NV", nv),
                ("DV", dv),
                ("EPS", bits(params.eps)),
            ],
            dtype,
            grid: [32, nv, batch * rows],
            group: [32, divisor(nv), 1],
        })?;
        Ok(DeltaResults {
            y: one(&mut out)?,
            mix: concatenate(&[tail, &ops::slice_axis(packed, 2, 0, c)?], 1)?,
            states,
        })
    }
}

/// Warps of a group along an axis of `n` warps.
fn divisor(n: i32) -> i32 {
    if n % 4 == 0 {
        4
    } else {
        1
    }
}

fn sizes(s: DeltaShape, packed: &Array) -> Vec<(&'static str, i32)> {
    vec![
        ("C", s.channels()),
        ("P", packed.dim(2)),
        ("NK", s.key_heads),
        ("NV", s.value_heads),
        ("DK", s.key_dim),
        ("DV", s.value_dim),
        ("TAPS", s.taps),
    ]
}
