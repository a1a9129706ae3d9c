//! Launches of attention: what comes before it, attention of few rows, and the output gate.
//!
//! Invariant: a row's result is the same whatever rows are computed beside it, and on CUDA however long the context is.

use mlx_rs::error::{Exception, Result};
use mlx_rs::{Array, Dtype};

use super::attention_source as text;
use super::kernel::{Call, Kernel, Maker, Text};
use super::{bits, one, two, Kernels};
use crate::mlx::ops;

/// Rows up to which attention is a kernel of our own: decode and verification.
const FEW_ROWS: i32 = 16;
/// Slots up to which one launch does without spans; beyond, the library's own spreads a head over more of the device.
const ROWS_SLOTS: i32 = 4096;
/// Threads that share a head, in warps.
const WARPS: i32 = 8;
/// Slots of a span.
const SPAN: i32 = 128;
/// Threads that join spans.
const JOIN_THREADS: i32 = 256;
/// Query heads of a key-value head that a launch has registers for.
const MOST_SHARED: i32 = 8;

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

/// The kernels.
#[derive(Debug)]
pub(super) struct Attention {
    prepare: Kernel,
    gate: Kernel,
    rows: Kernel,
    in_place: Option<InPlace>,
}

/// What only CUDA has: Metal takes no kernel that writes into its inputs.
#[derive(Debug)]
struct InPlace {
    prepare: Kernel,
    spans: Kernel,
    join: Kernel,
}

/// What comes before attention.
#[derive(Debug, Clone, Copy)]
pub struct Prepare<'a> {
    /// Heads.
    pub heads: Heads,
    /// Gains of the queries' norm and of the keys', [D] float32.
    pub gains: (&'a Array, &'a Array),
    /// Epsilon of both.
    pub eps: f32,
    /// Cosines and sines, [L, rotated / 2] float32.
    pub table: (&'a Array, &'a Array),
}

impl Prepare<'_> {
    fn constants(&self) -> [(&'static str, i32); 5] {
        let Heads { query, kv, dim } = self.heads;
        [
            ("H", query),
            ("KV", kv),
            ("D", dim),
            ("HALF", self.table.0.dim(1)),
            ("EPS", bits(self.eps)),
        ]
    }

    fn grid(&self, rows: i32) -> [i32; 3] {
        [32, self.heads.query + 2 * self.heads.kv, rows]
    }
}

impl Attention {
    pub(super) fn new(maker: &Maker) -> Option<Self> {
        let kernel = |name, inputs, integers, outputs, helpers, body: String| {
            maker.kernel(Text {
                name,
                inputs,
                integers,
                outputs,
                helpers,
                body: body.into(),
            })
        };
        let prepare = |head: &str| format!("{head}{}", text::ATTENTION_PREPARE);
        let in_place = match maker {
            Maker::Metal => None,
            Maker::Cuda(_) => Some(InPlace {
                prepare: kernel(
                    "attention_prepare_in_place",
                    &[
                        "packed",
                        "q_gain",
                        "k_gain",
                        "cos_table",
                        "sin_table",
                        "keys",
                        "values",
                    ],
                    &["slots"],
                    &["q"],
                    "",
                    prepare(text::PREPARE_IN_PLACE),
                )?,
                spans: kernel(
                    "attention_spans",
                    &["q", "keys", "values"],
                    &["slots", "spans"],
                    &["part", "stats"],
                    text::SPANS_HELPERS,
                    text::ATTENTION_SPANS.to_owned(),
                )?,
                join: kernel(
                    "attention_join",
                    &["part", "stats", "packed"],
                    &["slots", "spans"],
                    &["y"],
                    "",
                    text::ATTENTION_JOIN.to_owned(),
                )?,
            }),
        };
        Some(Self {
            prepare: kernel(
                "attention_prepare",
                &["packed", "q_gain", "k_gain", "cos_table", "sin_table"],
                &[],
                &["q", "k", "v"],
                "",
                prepare(text::PREPARE_RESULTS),
            )?,
            gate: kernel(
                "attention_gate",
                &["o", "packed"],
                &[],
                &["y"],
                "",
                text::ATTENTION_GATE.to_owned(),
            )?,
            rows: kernel(
                "attention_rows",
                &["q", "keys", "values", "packed"],
                &["slots"],
                &["y"],
                "",
                text::ATTENTION_ROWS.to_owned(),
            )?,
            in_place,
        })
    }
}

impl Kernels {
    /// Norms, rotation and split of packed rows [1, L, (2 H + 2 KV) D]. Returns queries [1, H, L, D], keys and values
    /// [1, KV, L, D].
    pub fn attention_prepare(&self, how: &Prepare<'_>, packed: &Array) -> Result<(Array, Array, Array)> {
        let Heads { query: h, kv, dim: d } = how.heads;
        let (rows, dtype) = (packed.dim(1), packed.dtype());
        let mut out = self.attention.prepare.call(&Call {
            inputs: &[packed, how.gains.0, how.gains.1, how.table.0, how.table.1],
            integers: &[],
            outputs: &[
                (&[1, h, rows, d], dtype),
                (&[1, kv, rows, d], dtype),
                (&[1, kv, rows, d], dtype),
            ],
            constants: &how.constants(),
            dtype,
            grid: how.grid(rows),
            group: [32, 1, 1],
        })?;
        let v = one(&mut out)?;
        let (k, q) = two(&mut out)?;
        Ok((q, k, v))
    }

    /// Whether [`Kernels::attention_prepare_in_place`] is there.
    pub fn writes_in_place(&self) -> bool {
        self.attention.in_place.is_some()
    }

    /// The same with keys and values written into slots `before..before + L` of the memory of `buffers` [1, KV, capacity, D].
    /// Returns queries and the buffers after that.
    pub fn attention_prepare_in_place(
        &self,
        how: &Prepare<'_>,
        packed: &Array,
        (keys, values): (&Array, &Array),
        before: i32,
    ) -> Result<(Array, (Array, Array))> {
        let Heads { query: h, dim: d, .. } = how.heads;
        let (rows, dtype) = (packed.dim(1), packed.dtype());
        let kernel = &self.in_place()?.prepare;
        if keys.dim(2) < before + rows || values.shape() != keys.shape() || keys.dtype() != dtype {
            return Err(Exception::custom("buffers without room for the new slots"));
        }
        let mut out = kernel.call(&Call {
            inputs: &[
                packed,
                how.gains.0,
                how.gains.1,
                how.table.0,
                how.table.1,
                keys,
                values,
            ],
            integers: &[before],
            outputs: &[(&[1, h, rows, d], dtype)],
            constants: &how.constants(),
            dtype,
            grid: how.grid(rows),
            group: [32, 1, 1],
        })?;
        let q = one(&mut out)?;
        let buffers = ops::written((keys, values), &q)?;
        Ok((q, buffers))
    }

    fn in_place(&self) -> Result<&InPlace> {
        let there = self.attention.in_place.as_ref();
        there.ok_or_else(|| Exception::custom("no kernel of this backend writes in place"))
    }

    /// Whether [`Kernels::attention_rows`] takes `rows` behind `before` slots.
    pub fn takes_rows(&self, heads: Heads, rows: i32, before: i32) -> bool {
        let shared = heads.query / heads.kv.max(1);
        let long = self.writes_in_place() && shared <= MOST_SHARED;
        rows <= FEW_ROWS && heads.dim % 32 == 0 && (long || before + rows <= ROWS_SLOTS)
    }

    /// Causal attention of L rows with output gate, over buffers [1, KV, capacity, D] of which `before` + L slots are filled.
    /// Queries [1, H, L, D] → [1, L, H * D].
    pub fn attention_rows(
        &self,
        heads: Heads,
        q: &Array,
        (keys, values): (&Array, &Array),
        before: i32,
        packed: &Array,
    ) -> Result<Array> {
        let Heads { query: h, kv, dim: d } = heads;
        let (rows, dtype) = (packed.dim(1), packed.dtype());
        match &self.attention.in_place {
            Some(kernels) if h / kv.max(1) <= MOST_SHARED => {
                return kernels.attention(heads, q, (keys, values), before, packed);
            }
            _ => {}
        }
        let mut out = self.attention.rows.call(&Call {
            inputs: &[q, keys, values, packed],
            integers: &[before],
            outputs: &[(&[1, rows, h * d], dtype)],
            constants: &[("H", h), ("KV", kv), ("D", d), ("WARPS", WARPS)],
            dtype,
            grid: [32 * WARPS, h, rows],
            group: [32 * WARPS, 1, 1],
        })?;
        one(&mut out)
    }

    /// `o * sigmoid(gate)` with heads joined: o [1, H, L, D] → [1, L, H * D].
    pub fn attention_gate(&self, heads: Heads, o: &Array, packed: &Array) -> Result<Array> {
        let Heads { query: h, kv, dim: d } = heads;
        let rows = packed.dim(1);
        let mut out = self.attention.gate.call(&Call {
            inputs: &[o, packed],
            integers: &[],
            outputs: &[(&[1, rows, h * d], packed.dtype())],
            constants: &[("H", h), ("KV", kv), ("D", d)],
            dtype: packed.dtype(),
            grid: [d, h, rows],
            group: [d.min(256), 1, 1],
        })?;
        one(&mut out)
    }
}

impl InPlace {
    /// Attention span by span, then the spans joined.
    fn attention(
        &self,
        heads: Heads,
        q: &Array,
        (keys, values): (&Array, &Array),
        before: i32,
        packed: &Array,
    ) -> Result<Array> {
        let Heads { query: h, kv, dim: d } = heads;
        let rows = packed.dim(1);
        let spans = (before + rows + SPAN - 1) / SPAN;
        let mut out = self.spans.call(&Call {
            inputs: &[q, keys, values],
            integers: &[before, spans],
            outputs: &[
                (&[rows, h, spans, d], Dtype::Float32),
                (&[rows, h, spans, 2], Dtype::Float32),
            ],
            constants: &[
                ("H", h),
                ("KV", kv),
                ("D", d),
                ("Q", h / kv),
                ("WARPS", WARPS),
                ("SPAN", SPAN),
            ],
            dtype: q.dtype(),
            grid: [32 * WARPS, kv * rows, spans],
            group: [32 * WARPS, 1, 1],
        })?;
        let (stats, part) = two(&mut out)?;
        let mut out = self.join.call(&Call {
            inputs: &[&part, &stats, packed],
            integers: &[before, spans],
            outputs: &[(&[1, rows, h * d], packed.dtype())],
            constants: &[
                ("H", h),
                ("KV", kv),
                ("D", d),
                ("THREADS", JOIN_THREADS),
                ("SPAN", SPAN),
            ],
            dtype: packed.dtype(),
            grid: [JOIN_THREADS, h, rows],
            group: [JOIN_THREADS, 1, 1],
        })?;
        one(&mut out)
    }
}
