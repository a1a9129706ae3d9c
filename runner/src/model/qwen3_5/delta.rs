//! The gated-delta-net layer: projections around [`crate::mlx::delta`], and its cache.
//!
//! Invariant: after a forward of L rows the cache holds the state after row L, plus exactly what it was asked to keep.

use mlx_rs::error::Result;
use mlx_rs::ops::zeros_dtype;
use mlx_rs::{Array, Dtype};

use super::norm::{RmsNorm, Stream};
use crate::cache::{RecurrentCache, RecurrentState, StateRows};
use crate::mlx::delta::{cpu_net, gpu_net, graph_net, DeltaInput, DeltaParams, DeltaShape, Keep};
use crate::mlx::{ops, Path};
use crate::model::config::DeltaConfig;
use crate::model::linear::{Linear, Packed};

/// Rows from which a conv tail is copied out instead of pinning the forward's whole input.
const COMPACT_FROM: i32 = 32;

/// Heads and widths as the config has them.
pub fn shape(delta: &DeltaConfig) -> DeltaShape {
    DeltaShape {
        key_heads: delta.key_heads as i32,
        value_heads: delta.value_heads as i32,
        key_dim: delta.key_dim as i32,
        value_dim: delta.value_dim as i32,
        taps: delta.conv_kernel as i32,
    }
}

/// One gated-delta-net mixer.
#[derive(Debug)]
pub struct DeltaLayer {
    /// Mixed queries, keys and values; gate z; strengths b; decays a.
    pub input: Packed,
    /// Output projection, [D, nv * dv].
    pub out: Linear,
    /// Conv taps, decays and norm.
    pub params: DeltaParams,
    /// How it is computed.
    pub path: Path,
}

impl DeltaLayer {
    /// Reads the stream's norm and adds to the stream, from slot `offset` on.
    pub fn forward(
        &self,
        stream: &mut Stream,
        norm: &RmsNorm,
        offset: i32,
        cache: &mut RecurrentCache,
    ) -> Result<()> {
        let (batch, rows) = stream.rows();
        let shape = self.params.shape;
        let start = match cache.live() {
            Some(state) => state.clone(),
            None => RecurrentState {
                conv: zeros_dtype(&[batch, shape.taps - 1, shape.channels()], stream.dtype())?,
                state: zeros_dtype(
                    &[batch, shape.value_heads, shape.value_dim, shape.key_dim],
                    Dtype::Float32,
                )?,
            },
        };
        let cuts = cache.cuts(offset, offset + rows);
        let relative: Vec<i32> = cuts.iter().map(|at| at - offset).collect();
        let keep = match (cache.wants_rows(), relative.is_empty()) {
            (true, _) => Keep::Rows,
            (false, true) => Keep::Last,
            (false, false) => Keep::Cuts(&relative),
        };
        let output = match self.path {
            Path::Cpu => cpu_net(
                &self.params,
                &stream.project(norm, &self.input)?,
                &start.conv,
                &start.state,
                keep,
            )?,
            Path::Gpu => gpu_net(
                &self.params,
                &stream.project(norm, &self.input)?,
                &start.conv,
                &start.state,
                keep,
            )?,
            Path::Graph => {
                let parts = self.input.forward(&stream.norm(norm)?)?;
                let input = DeltaInput {
                    mix: &parts[0],
                    z: &parts[1],
                    b: &parts[2],
                    a: &parts[3],
                    tail: &start.conv,
                    state: &start.state,
                };
                graph_net(&self.params, &input, keep)?
            }
        };
        let tail_rows = shape.taps - 1;
        let tail_after = |row: i32| ops::slice_axis(&output.mix, 1, row, row + tail_rows);
        for ((slot, row), state) in cuts.iter().zip(&relative).zip(&output.cuts) {
            cache.capture(
                *slot,
                &RecurrentState {
                    conv: tail_after(*row)?,
                    state: state.clone(),
                },
            )?;
        }
        let mut conv = tail_after(rows)?;
        if rows >= COMPACT_FROM {
            conv = ops::compact(&conv)?;
        }
        let kept = output.rows.map(|states| StateRows {
            mix: output.mix.clone(),
            states,
        });
        cache.set(
            RecurrentState {
                conv,
                state: output.last,
            },
            kept,
        );
        stream.add_product(&output.y, &self.out)
    }

    /// Arrays held.
    pub fn arrays(&self) -> Vec<&Array> {
        let mut out = self.input.arrays();
        out.extend(self.out.arrays());
        out.extend([
            &self.params.conv,
            &self.params.decay,
            &self.params.dt_bias,
            &self.params.norm,
        ]);
        out
    }
}
