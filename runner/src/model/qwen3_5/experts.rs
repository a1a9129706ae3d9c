//! A stack of expert matrices, applied to rows that each name their expert.
//!
//! Invariant: result row i belongs to input row i and expert id i; how the stack is stored changes only rounding.

use mlx_rs::error::Result;
use mlx_rs::ops::indexing::take_axis;
use mlx_rs::ops::{concatenate, gather_mm, matmul};
use mlx_rs::{Array, Dtype};

use super::mlp::swiglu;
use crate::mlx::{cpu, ops, Path};
use crate::model::matrix::{Codes, Matrix};

/// One projection of all experts, [E, out, in].
#[derive(Debug)]
pub enum ExpertStack {
    /// Plain values as the transposed view [E, in, out].
    Dense {
        /// Transposed values.
        transposed: Array,
    },
    /// Half-precision values on the host's cores, whose gathering product takes float32 only: the matrices that are chosen
    /// are widened, a few rows at a time. Transposed view [E, in, out].
    Narrow {
        /// Transposed values.
        transposed: Array,
    },
    /// Packed codes.
    Quantized(Codes),
}

/// Rows whose matrices [`ExpertStack::Narrow`] widens at once.
const NARROW_ROWS: i32 = 8;

impl ExpertStack {
    /// The products with a stack [E, out, in], computed by `path`.
    pub fn new(matrix: Matrix, path: Path) -> Result<Self> {
        Ok(match matrix {
            Matrix::Quantized(codes) => Self::Quantized(codes),
            Matrix::Dense(values) => {
                let transposed = values.transpose_axes(&[0, 2, 1])?;
                match path == Path::Cpu && values.dtype() != Dtype::Float32 {
                    true => Self::Narrow { transposed },
                    false => Self::Dense { transposed },
                }
            }
        })
    }

    fn forward(&self, x: &Array, ids: &Array, sorted: bool) -> Result<Array> {
        match self {
            Self::Dense { transposed } => gather_mm(x, transposed, None, ids, sorted),
            Self::Narrow { transposed } => narrow(x, transposed, ids),
            Self::Quantized(codes) => {
                let Codes {
                    weight,
                    scales,
                    biases,
                    global_scale,
                    mode,
                } = codes;
                let y = ops::gather_qmm(x, weight, scales, biases.as_ref(), ids, *mode, sorted)?;
                match global_scale {
                    Some(scale) if scale.size() == 1 => ops::cast(&y.multiply(scale)?, x.dtype()),
                    Some(scale) => {
                        let factor = take_axis(scale, ids, 0)?.expand_dims(-1)?.expand_dims(-1)?;
                        ops::cast(&y.multiply(&factor)?, x.dtype())
                    }
                    None => ops::cast(&y, x.dtype()),
                }
            }
        }
    }

    fn arrays(&self) -> Vec<&Array> {
        match self {
            Self::Dense { transposed } | Self::Narrow { transposed } => vec![transposed],
            Self::Quantized(codes) => codes.arrays(),
        }
    }
}

/// x [T, K or 1, 1, in] or [N, 1, in] with ids [T, K] or [N] → [T, K, 1, out] or [N, 1, out].
fn narrow(x: &Array, stack: &Array, ids: &Array) -> Result<Array> {
    let mut shape = ids.shape().to_vec();
    let width = x.dim(-1);
    let lead = [&shape[..], &[1, width]].concat();
    let rows = mlx_rs::ops::broadcast_to(x, &lead)?.reshape(&[-1, 1, width])?;
    let ids = ids.reshape(&[-1])?;
    let (total, mut from) = (rows.dim(0), 0);
    let mut parts = Vec::new();
    while from < total {
        let to = (from + NARROW_ROWS).min(total);
        let chosen = take_axis(stack, &ops::slice_axis(&ids, 0, from, to)?, 0)?;
        let chosen = ops::cast(&chosen, x.dtype())?;
        parts.push(matmul(&ops::slice_axis(&rows, 0, from, to)?, &chosen)?);
        from = to;
    }
    shape.extend([1, stack.dim(2)]);
    concatenate(&parts, 0)?.reshape(&shape)
}

/// Gate and up projections of all experts.
#[derive(Debug)]
pub enum GateUp {
    /// In one stack [E, 2 I, D], gate rows first.
    Joined(ExpertStack),
    /// Stored too differently to be joined.
    Apart {
        /// Gate projection, [E, I, D].
        gate: ExpertStack,
        /// Up projection, [E, I, D].
        up: ExpertStack,
    },
}

/// All experts of a layer.
#[derive(Debug)]
pub struct Experts {
    /// Gate and up projections.
    pub gate_up: GateUp,
    /// Down projection, [E, D, I].
    pub down: ExpertStack,
    /// How it is computed.
    pub path: Path,
}

impl Experts {
    /// `down(silu(gate x) * up x)` of the named experts. Sorted: x [N, 1, D], ids [N]; else x [T, 1, 1, D], ids [T, K].
    pub fn forward(&self, x: &Array, ids: &Array, sorted: bool) -> Result<Array> {
        let inner = match &self.gate_up {
            GateUp::Joined(stack) => {
                let both = stack.forward(x, ids, sorted)?;
                match self.path {
                    Path::Cpu => cpu::op::swiglu(&both)?,
                    Path::Gpu | Path::Graph => {
                        let (width, half) = (both.dim(-1), both.dim(-1) / 2);
                        let gate = ops::slice_axis(&both, -1, 0, half)?;
                        swiglu(&gate, &ops::slice_axis(&both, -1, half, width)?)?
                    }
                }
            }
            GateUp::Apart { gate, up } => {
                swiglu(&gate.forward(x, ids, sorted)?, &up.forward(x, ids, sorted)?)?
            }
        };
        self.down.forward(&inner, ids, sorted)
    }

    /// Arrays held.
    pub fn arrays(&self) -> Vec<&Array> {
        let mut out = match &self.gate_up {
            GateUp::Joined(stack) => stack.arrays(),
            GateUp::Apart { gate, up } => [gate.arrays(), up.arrays()].concat(),
        };
        out.extend(self.down.arrays());
        out
    }
}
