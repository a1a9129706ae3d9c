//! Partial rotary embedding, plain and with three interleaved position axes.
//!
//! Invariant: both forms agree where all axes are equal; columns from `dims` on pass through.
//! Source: Su et al., "RoFormer" (2021); interleaved M-RoPE as in Qwen3-VL.

use mlx_rs::error::Result;
use mlx_rs::ops::concatenate;
use mlx_rs::Array;

use crate::mlx::{ops, Path};
use crate::model::Positions;

/// Rotation of the first `dims` columns of every head.
#[derive(Debug, Clone)]
pub struct Rope {
    /// Rotated columns, even.
    pub dims: i32,
    /// Base of the frequencies.
    pub theta: f32,
    /// Frequencies of each axis (time, height, width); sums to `dims / 2`.
    pub sections: [i32; 3],
    /// How it is computed: the fused kernels always take tables.
    pub path: Path,
}

/// Rotation of one batch, ready for every layer.
#[derive(Debug)]
pub enum Rotation {
    /// Consecutive positions from here.
    From(i32),
    /// Cosines and sines, [L, dims / 2] float32.
    Table(Array, Array),
}

impl Rope {
    /// Prepares the rotation of a batch.
    pub fn rotation(&self, positions: &Positions, rows: i32) -> Rotation {
        let position = |row: i32, axis: usize| match positions {
            Positions::Sequential { start } => start + row,
            Positions::Axes(axes) => axes[axis][row as usize],
        };
        if let (Positions::Sequential { start }, Path::Graph) = (positions, self.path) {
            return Rotation::From(*start);
        }
        let half = self.dims / 2;
        let frequencies: Vec<(usize, f64)> = (0..half)
            .map(|j| {
                let axis = match j % 3 {
                    1 if j < 3 * self.sections[1] => 1,
                    2 if j < 3 * self.sections[2] => 2,
                    _ => 0,
                };
                (
                    axis,
                    f64::from(self.theta).powf(-2.0 * f64::from(j) / f64::from(self.dims)),
                )
            })
            .collect();
        let mut cos = Vec::with_capacity((rows * half) as usize);
        let mut sin = Vec::with_capacity((rows * half) as usize);
        for row in 0..rows {
            for (axis, frequency) in &frequencies {
                let angle = f64::from(position(row, *axis)) * frequency;
                cos.push(angle.cos() as f32);
                sin.push(angle.sin() as f32);
            }
        }
        Rotation::Table(
            Array::from_slice(&cos, &[rows, half]),
            Array::from_slice(&sin, &[rows, half]),
        )
    }

    /// Rotates `x` [B, H, L, D].
    pub fn apply(&self, x: &Array, rotation: &Rotation) -> Result<Array> {
        let (cos, sin) = match rotation {
            Rotation::From(start) => {
                return mlx_rs::fast::rope(x, self.dims, false, self.theta, 1.0, *start, None);
            }
            Rotation::Table(cos, sin) => (cos, sin),
        };
        let half = self.dims / 2;
        let wide = ops::cast(x, mlx_rs::Dtype::Float32)?;
        let a = ops::slice_axis(&wide, 3, 0, half)?;
        let b = ops::slice_axis(&wide, 3, half, self.dims)?;
        let first = a.multiply(cos)?.subtract(&b.multiply(sin)?)?;
        let second = b.multiply(cos)?.add(&a.multiply(sin)?)?;
        let mut parts = vec![first, second];
        if x.dim(3) > self.dims {
            parts.push(ops::slice_axis(&wide, 3, self.dims, x.dim(3))?);
        }
        ops::cast(&concatenate(&parts, 3)?, x.dtype())
    }
}
