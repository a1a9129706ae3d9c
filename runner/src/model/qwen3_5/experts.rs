//! A stack of expert matrices, applied to rows that each name their expert.
//!
//! Invariant: result row i belongs to input row i and expert id i; how the stack is stored changes only rounding.

use mlx_rs::error::Result;
use mlx_rs::ops::gather_mm;
use mlx_rs::Array;

use super::mlp::swiglu;
use crate::mlx::ops::{self, QuantMode};

/// One projection of all experts, [E, out, in].
#[derive(Debug)]
pub enum ExpertStack {
    /// Plain values as the transposed view [E, in, out].
    Dense {
        /// Transposed values.
        transposed: Array,
    },
    /// Packed codes.
    Quantized {
        /// Codes, [E, out, in * bits / 32] uint32.
        weight: Array,
        /// Scales, [E, out, in / group].
        scales: Array,
        /// Biases of the affine mode.
        biases: Option<Array>,
        /// Extra factor an expert, [E], of imported nvfp4 files.
        global_scale: Option<Array>,
        /// Storage mode.
        mode: QuantMode,
    },
}

impl ExpertStack {
    /// A dense stack from [E, out, in].
    pub fn dense(weight: &Array) -> Result<Self> {
        Ok(Self::Dense { transposed: weight.transpose_axes(&[0, 2, 1])? })
    }

    fn forward(&self, x: &Array, ids: &Array, sorted: bool) -> Result<Array> {
        match self {
            Self::Dense { transposed } => gather_mm(x, transposed, None, ids, sorted),
            Self::Quantized { weight, scales, biases, global_scale, mode } => {
                let y = ops::gather_qmm(x, weight, scales, biases.as_ref(), ids, *mode, sorted)?;
                match global_scale {
                    Some(scale) => {
                        let factor = mlx_rs::ops::indexing::take_axis(scale, ids, 0)?;
                        let factor = factor.expand_dims(-1)?.expand_dims(-1)?;
                        ops::cast(&y.multiply(&factor)?, x.dtype())
                    }
                    None => Ok(y),
                }
            }
        }
    }

    fn arrays(&self) -> Vec<&Array> {
        match self {
            Self::Dense { transposed } => vec![transposed],
            Self::Quantized { weight, scales, biases, global_scale, .. } => {
                let mut out = vec![weight, scales];
                out.extend(biases.iter());
                out.extend(global_scale.iter());
                out
            }
        }
    }
}

/// All experts of a layer.
#[derive(Debug)]
pub struct Experts {
    /// Gate projection.
    pub gate: ExpertStack,
    /// Up projection.
    pub up: ExpertStack,
    /// Down projection.
    pub down: ExpertStack,
}

impl Experts {
    /// `down(silu(gate x) * up x)` of the named experts. Sorted: x [N, 1, D], ids [N]; else x [T, 1, 1, D], ids [T, K].
    pub fn forward(&self, x: &Array, ids: &Array, sorted: bool) -> Result<Array> {
        let gate = self.gate.forward(x, ids, sorted)?;
        let up = self.up.forward(x, ids, sorted)?;
        self.down.forward(&swiglu(&gate, &up)?, ids, sorted)
    }

    /// Arrays held.
    pub fn arrays(&self) -> Vec<&Array> {
        [&self.gate, &self.up, &self.down].into_iter().flat_map(ExpertStack::arrays).collect()
    }
}
