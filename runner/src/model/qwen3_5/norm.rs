//! Root-mean-square norms whose gain is kept in float32, and the residual stream they read.
//!
//! Invariant: the gain is the effective one (`1 + w` where the file stores zero-centred gains), formed and multiplied in
//! float32: rounding it to bfloat16 moves logits by up to 0.1 and flips near ties.

use mlx_rs::error::Result;
use mlx_rs::fast::rms_norm;
use mlx_rs::transforms::async_eval;
use mlx_rs::{Array, Dtype};

use crate::mlx::gpu::products::Gain;
use crate::mlx::{cpu, gpu, ops, Path};
use crate::model::linear::{Linear, Packed};

/// A norm over the last axis.
#[derive(Debug, Clone)]
pub struct RmsNorm {
    /// Effective gain, float32.
    pub gain: Array,
    /// Added to the mean square.
    pub eps: f32,
    /// How it is computed.
    pub path: Path,
}

impl RmsNorm {
    /// What a kernel that computes it along with something else is given.
    pub fn as_gain(&self) -> Gain<'_> {
        Gain {
            gain: &self.gain,
            eps: self.eps,
        }
    }

    /// Normalises in float32 and returns the input's type.
    pub fn forward(&self, x: &Array) -> Result<Array> {
        match self.path {
            Path::Cpu => cpu::op::rms_norm(x, &self.gain, self.eps),
            Path::Gpu => gpu::kernels()?.norm(x, &self.gain, self.eps),
            Path::Graph => ops::cast(&rms_norm(x, Some(&self.gain), self.eps)?, x.dtype()),
        }
    }

    /// The sum of the stream's parts, and its norm.
    fn of_sum(&self, x: &Array, added: &Array) -> Result<(Array, Array)> {
        match self.path {
            Path::Cpu => cpu::op::add_norm(x, added, &self.gain, self.eps),
            Path::Gpu => gpu::kernels()?.add_norm(x, added, &self.gain, self.eps),
            Path::Graph => {
                let sum = x.add(added)?;
                let normed = self.forward(&sum)?;
                Ok((sum, normed))
            }
        }
    }
}

/// The residual stream: what a block has added is summed when the next norm reads it, in one pass, or by the block's own
/// last product where that can.
#[derive(Debug)]
pub struct Stream {
    x: Array,
    added: Option<Array>,
}

impl Stream {
    /// A stream that begins with the embeddings.
    pub fn new(x: Array) -> Self {
        Self { x, added: None }
    }

    /// Rows of the stream by sequence, [B, L].
    pub fn rows(&self) -> (i32, i32) {
        (self.x.dim(0), self.x.dim(1))
    }

    /// Its type.
    pub fn dtype(&self) -> Dtype {
        self.x.dtype()
    }

    /// Sends what has been described so far to the device.
    pub fn dispatch(&self) -> Result<()> {
        async_eval(std::iter::once(&self.x).chain(&self.added))
    }

    /// Adds a block's output.
    pub fn add(&mut self, block: Array) {
        debug_assert!(
            self.added.is_none(),
            "every block reads the stream before it adds to it"
        );
        self.added = Some(block);
    }

    /// Adds a product, a block's last step.
    pub fn add_product(&mut self, y: &Array, matrix: &Linear) -> Result<()> {
        debug_assert!(
            self.added.is_none(),
            "every block reads the stream before it adds to it"
        );
        match matrix.forward_added(y, &self.x)? {
            Some(sum) => self.x = sum,
            None => self.added = Some(matrix.forward(y)?),
        }
        Ok(())
    }

    /// The norm of the stream as it stands.
    pub fn norm(&mut self, norm: &RmsNorm) -> Result<Array> {
        match self.added.take() {
            Some(added) => {
                let (x, normed) = norm.of_sum(&self.x, &added)?;
                self.x = x;
                Ok(normed)
            }
            None => norm.forward(&self.x),
        }
    }

    /// The stream's norm times packed matrices, side by side: [B, L, sum of outputs].
    pub fn project(&mut self, norm: &RmsNorm, matrices: &Packed) -> Result<Array> {
        match self.few(norm, matrices, false)? {
            Some(y) => Ok(y),
            None => matrices.joined(&self.norm(norm)?),
        }
    }

    /// `silu(gate) * up` of the stream's norm, where that is one launch with its product.
    pub fn gated(&mut self, norm: &RmsNorm, gate_up: &Packed) -> Result<Option<Array>> {
        self.few(norm, gate_up, true)
    }

    fn few(&mut self, norm: &RmsNorm, matrices: &Packed, gated: bool) -> Result<Option<Array>> {
        // What is still to be added is summed by the norm's own pass.
        if self.added.is_some() {
            return Ok(None);
        }
        matrices.few_normed(&self.x, norm.as_gain(), gated)
    }
}
