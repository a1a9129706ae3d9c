//! SwiGLU, dense and as a mixture of experts.
//!
//! Invariant: routing weights are a float32 softmax over the chosen experts only (renormalised) where the checkpoint asks
//! for it; the shared expert always runs.

use mlx_rs::error::Result;
use mlx_rs::ops::indexing::{take_along_axis, take_axis};
use mlx_rs::ops::{argpartition_axis, argsort, sigmoid, softmax_axis};
use mlx_rs::Array;

use crate::mlx::{cpu, gpu, ops, Path};
use crate::model::linear::{Linear, Packed};
use crate::model::qwen3_5::experts::Experts;
use crate::model::qwen3_5::norm::{RmsNorm, Stream};

/// A layer's feed-forward part.
#[derive(Debug)]
pub enum Mlp {
    /// One SwiGLU.
    Dense(SwiGlu),
    /// Routed experts and a shared one.
    Moe(Box<Moe>),
}

impl Mlp {
    /// Reads the stream's norm and adds to the stream.
    pub fn forward(&self, stream: &mut Stream, norm: &RmsNorm) -> Result<()> {
        match self {
            Self::Dense(mlp) => {
                let inner = match stream.gated(norm, &mlp.gate_up)? {
                    Some(inner) => inner,
                    None => mlp.inner(&stream.norm(norm)?)?,
                };
                stream.add_product(&inner, &mlp.down)
            }
            Self::Moe(moe) => {
                let y = moe.forward(&stream.norm(norm)?)?;
                stream.add(y);
                Ok(())
            }
        }
    }

    /// Arrays held.
    pub fn arrays(&self) -> Vec<&Array> {
        match self {
            Self::Dense(mlp) => mlp.arrays(),
            Self::Moe(moe) => {
                let mut out = moe.router.arrays();
                out.extend(moe.experts.arrays());
                out.extend(moe.shared.arrays());
                out.extend(moe.shared_gate.arrays());
                out
            }
        }
    }
}

/// `down(silu(gate(x)) * up(x))`.
#[derive(Debug)]
pub struct SwiGlu {
    /// Gate and up projections, [2 I, D].
    pub gate_up: Packed,
    /// Down projection, [D, I].
    pub down: Linear,
    /// How it is computed.
    pub path: Path,
}

impl SwiGlu {
    /// x [..., D] → [..., D].
    pub fn forward(&self, x: &Array) -> Result<Array> {
        self.down.forward(&self.inner(x)?)
    }

    /// `silu(gate(x)) * up(x)`; x [..., D] → [..., I].
    fn inner(&self, x: &Array) -> Result<Array> {
        match self.path {
            Path::Cpu => cpu::op::swiglu(&self.gate_up.joined(x)?),
            Path::Gpu => gpu::kernels()?.swiglu(&self.gate_up.joined(x)?),
            Path::Graph => {
                let parts = self.gate_up.forward(x)?;
                swiglu(&parts[0], &parts[1])
            }
        }
    }

    fn arrays(&self) -> Vec<&Array> {
        let mut out = self.gate_up.arrays();
        out.extend(self.down.arrays());
        out
    }
}

/// `silu(gate) * up`.
pub(super) fn swiglu(gate: &Array, up: &Array) -> Result<Array> {
    gate.multiply(&sigmoid(gate)?)?.multiply(up)
}

/// Routed experts with a shared one.
#[derive(Debug)]
pub struct Moe {
    /// Scores, [E, D].
    pub router: Linear,
    /// The experts.
    pub experts: Experts,
    /// The expert that every token passes.
    pub shared: SwiGlu,
    /// Its gate, [1, D].
    pub shared_gate: Linear,
    /// Experts a token.
    pub top_k: i32,
    /// Whether the weights of the chosen experts are made to sum to one.
    pub renormalise: bool,
}

/// Token-expert pairs from which sorting by expert pays.
const SORT_FROM: i32 = 64;

impl Moe {
    fn forward(&self, x: &Array) -> Result<Array> {
        let (batch, rows, width) = (x.dim(0), x.dim(1), x.dim(2));
        let tokens = batch * rows;
        let flat = x.reshape(&[tokens, width])?;
        let scores = ops::cast(&self.router.forward(&flat)?, mlx_rs::Dtype::Float32)?;
        let experts = scores.dim(1);
        let p = softmax_axis(&scores, -1, true)?;
        let order = argpartition_axis(&p.negative()?, self.top_k - 1, -1)?;
        let chosen = ops::slice_axis(&order, 1, 0, self.top_k.min(experts))?;
        let mut weights = take_along_axis(&p, &chosen, -1)?;
        if self.renormalise {
            weights = weights.divide(&weights.sum_axis(-1, true)?)?;
        }
        let weights = ops::cast(&weights, x.dtype())?;
        let picked = chosen.dim(1);
        let routed = if tokens * picked >= SORT_FROM {
            // Rows of one expert side by side, so that each expert's matrix is read once.
            let ids = chosen.reshape(&[-1])?;
            let order = argsort(&ids)?;
            let back = argsort(&order)?;
            let k = Array::from_int(picked).as_dtype(order.dtype())?;
            let xs = take_axis(&flat, &order.floor_divide(&k)?, 0)?.reshape(&[tokens * picked, 1, width])?;
            let y = self.experts.forward(&xs, &take_axis(&ids, &order, 0)?, true)?;
            take_axis(&y.reshape(&[tokens * picked, width])?, &back, 0)?
        } else {
            let xs = flat.reshape(&[tokens, 1, 1, width])?;
            self.experts.forward(&xs, &chosen, false)?
        }
        .reshape(&[tokens, picked, width])?;
        let routed = routed.multiply(&weights.expand_dims(-1)?)?.sum_axis(1, false)?;
        let gate = sigmoid(&self.shared_gate.forward(&flat)?)?;
        let shared = self.shared.forward(&flat)?.multiply(&gate)?;
        routed.add(&shared)?.reshape(&[batch, rows, width])
    }
}
