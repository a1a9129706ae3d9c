//! The vision tower: patches of one picture to features that stand in for token embeddings.
//!
//! Invariant: rows come and stay in merge-block order (row-major over blocks, row-major inside of a block), so that every run of
//! merge² rows becomes one feature. Two GELUs: the tanh form in blocks, the exact one in the merger.
//! Source: Qwen3-VL's tower without deepstack; rotary embedding over (row, column) as in Qwen2-VL (2024).

use mlx_rs::error::{Exception, Result};
use mlx_rs::fast::{layer_norm, scaled_dot_product_attention};
use mlx_rs::ops::indexing::take_axis;
use mlx_rs::ops::{concatenate, erf, tanh};
use mlx_rs::{Array, Dtype};

use crate::mlx::ops;
use crate::model::linear::Linear;
use crate::model::vision_config::VisionConfig;

/// Added to the variance by every norm of the tower.
const EPS: f32 = 1e-6;
/// Base of the tower's rotary frequencies.
const THETA: f64 = 10000.0;
/// Attention scores held at once, in entries; more queries are cut into blocks.
const SCORE_BUDGET: i64 = 64 << 20;

/// A matrix with a bias.
#[derive(Debug)]
pub struct Affine {
    /// Matrix.
    pub linear: Linear,
    /// Bias, [out].
    pub bias: Array,
}

impl Affine {
    fn forward(&self, x: &Array) -> Result<Array> {
        self.linear.forward(x)?.add(&self.bias)
    }

    fn arrays(&self) -> Vec<&Array> {
        let mut out = self.linear.arrays();
        out.push(&self.bias);
        out
    }
}

/// A norm over mean and variance.
#[derive(Debug)]
pub struct LayerNorm {
    /// Gain, [Hv].
    pub weight: Array,
    /// Bias, [Hv].
    pub bias: Array,
}

impl LayerNorm {
    fn forward(&self, x: &Array) -> Result<Array> {
        layer_norm(x, Some(&self.weight), Some(&self.bias), EPS)
    }
}

/// One residual block.
#[derive(Debug)]
pub struct Block {
    /// Before attention.
    pub norm1: LayerNorm,
    /// Before the feed-forward part.
    pub norm2: LayerNorm,
    /// Queries, keys and values, [3 Hv, Hv].
    pub qkv: Affine,
    /// Output projection.
    pub proj: Affine,
    /// To the inner width.
    pub fc1: Affine,
    /// Back.
    pub fc2: Affine,
}

/// A loaded tower.
#[derive(Debug)]
pub struct VisionTower {
    /// Dimensions.
    pub config: VisionConfig,
    /// Patch embedding, [Hv, channels * frames * side²].
    pub patch: Affine,
    /// Position table, [side², Hv] float32.
    pub positions: Array,
    /// Blocks.
    pub blocks: Vec<Block>,
    /// The merger's norm, over a row.
    pub merge_norm: LayerNorm,
    /// The merger's first matrix, over merge² rows side by side.
    pub fc1: Affine,
    /// The merger's second matrix, to the text model's D.
    pub fc2: Affine,
    /// Type of activations.
    pub dtype: Dtype,
}

impl VisionTower {
    /// Features [N / merge², D] of one picture: `values` [N * patch values] with N = `grid_rows * grid_cols` patches.
    ///
    /// # Errors
    /// The grid doesn't fit the values or the merge size, or the device fails.
    pub fn forward(&self, values: &[f32], grid_rows: usize, grid_cols: usize) -> Result<Array> {
        let (merge, width) = (self.config.spatial_merge_size, self.config.patch_values());
        let rows = grid_rows * grid_cols;
        if rows == 0
            || !grid_rows.is_multiple_of(merge)
            || !grid_cols.is_multiple_of(merge)
            || values.len() != rows * width
        {
            return Err(Exception::custom(format!(
                "a grid of {grid_rows} x {grid_cols} patches doesn't fit {} values",
                values.len()
            )));
        }
        let order = merge_order(grid_rows, grid_cols, merge);
        let x = Array::from_slice(values, &[rows as i32, width as i32]);
        let x = self.patch.forward(&ops::cast(&x, self.dtype)?)?;
        let mut x = x.add(&ops::cast(
            &self.interpolated(&order, grid_rows, grid_cols)?,
            self.dtype,
        )?)?;
        let table = self.rotation(&order);
        for block in &self.blocks {
            let mixed = self.attention(block, &block.norm1.forward(&x)?, &table)?;
            x = x.add(&mixed)?;
            let inner = gelu_tanh(&block.fc1.forward(&block.norm2.forward(&x)?)?)?;
            x = x.add(&block.fc2.forward(&inner)?)?;
        }
        let merged = merge * merge;
        let wide = (self.config.hidden_size * merged) as i32;
        let x = self
            .merge_norm
            .forward(&x)?
            .reshape(&[(rows / merged) as i32, wide])?;
        self.fc2.forward(&gelu_erf(&self.fc1.forward(&x)?)?)
    }

    /// The position table at a grid's places, corners aligned, [N, Hv] float32.
    fn interpolated(&self, order: &[(usize, usize)], grid_rows: usize, grid_cols: usize) -> Result<Array> {
        let corners = bilinear(order, grid_rows, grid_cols, self.config.table_side());
        let n = order.len() as i32;
        let mut sum: Option<Array> = None;
        for (index, weight) in &corners {
            let rows = take_axis(&self.positions, Array::from_slice(index, &[n]), 0)?;
            let part = rows.multiply(Array::from_slice(weight, &[n, 1]))?;
            sum = Some(match sum {
                Some(sum) => sum.add(&part)?,
                None => part,
            });
        }
        sum.ok_or_else(|| Exception::custom("interpolation without corners"))
    }

    /// Cosines and sines, [N, 1, hd / 2] float32: the first half of the angles turn with the row, the others with the column.
    fn rotation(&self, order: &[(usize, usize)]) -> (Array, Array) {
        let half = self.config.hidden_size / self.config.heads / 2;
        let quarter = half / 2;
        let (mut cos, mut sin) = (Vec::new(), Vec::new());
        for &(row, col) in order {
            for place in [row, col] {
                for i in 0..quarter {
                    let angle = place as f64 * THETA.powf(-2.0 * i as f64 / half as f64);
                    cos.push(angle.cos() as f32);
                    sin.push(angle.sin() as f32);
                }
            }
        }
        let shape = [order.len() as i32, 1, half as i32];
        (Array::from_slice(&cos, &shape), Array::from_slice(&sin, &shape))
    }

    fn attention(&self, block: &Block, x: &Array, table: &(Array, Array)) -> Result<Array> {
        let (rows, width) = (x.dim(0), x.dim(1));
        let heads = self.config.heads as i32;
        let dim = width / heads;
        let packed = block.qkv.forward(x)?.reshape(&[rows, 3, heads, dim])?;
        let part = |i: i32| ops::slice_axis(&packed, 1, i, i + 1)?.reshape(&[rows, heads, dim]);
        let heads_first = |a: &Array| a.transpose_axes(&[1, 0, 2])?.expand_dims(0);
        let q = heads_first(&rotate(&part(0)?, table)?)?;
        let k = heads_first(&rotate(&part(1)?, table)?)?;
        let v = heads_first(&part(2)?)?;
        let scale = (dim as f32).powf(-0.5);
        let fits = (SCORE_BUDGET / (i64::from(heads) * i64::from(rows))).max(16);
        let block_rows = fits.min(i64::from(rows)) as i32;
        let (mut outputs, mut from) = (Vec::new(), 0);
        while from < rows {
            let to = (from + block_rows).min(rows);
            let q = ops::slice_axis(&q, 2, from, to)?;
            outputs.push(scaled_dot_product_attention(&q, &k, &v, scale, None, None)?);
            from = to;
        }
        let o = concatenate(&outputs, 2)?
            .transpose_axes(&[0, 2, 1, 3])?
            .reshape(&[rows, width])?;
        block.proj.forward(&o)
    }

    /// Arrays held.
    pub fn arrays(&self) -> Vec<&Array> {
        let mut out = vec![&self.positions, &self.merge_norm.weight, &self.merge_norm.bias];
        for affine in [&self.patch, &self.fc1, &self.fc2] {
            out.extend(affine.arrays());
        }
        for block in &self.blocks {
            for affine in [&block.qkv, &block.proj, &block.fc1, &block.fc2] {
                out.extend(affine.arrays());
            }
            for norm in [&block.norm1, &block.norm2] {
                out.extend([&norm.weight, &norm.bias]);
            }
        }
        out
    }
}

/// (row, column) of every patch in merge-block order.
fn merge_order(rows: usize, cols: usize, merge: usize) -> Vec<(usize, usize)> {
    let mut out = Vec::with_capacity(rows * cols);
    for top in (0..rows).step_by(merge) {
        for left in (0..cols).step_by(merge) {
            for y in 0..merge {
                out.extend((0..merge).map(|x| (top + y, left + x)));
            }
        }
    }
    out
}

/// For each of the four corners: table rows and weights of every patch.
fn bilinear(order: &[(usize, usize)], rows: usize, cols: usize, side: usize) -> [(Vec<i32>, Vec<f32>); 4] {
    let place = |i: usize, n: usize| i as f64 * (side - 1) as f64 / n.saturating_sub(1).max(1) as f64;
    [(0, 0), (0, 1), (1, 0), (1, 1)].map(|(down, right): (usize, usize)| {
        let corner = |at: f64, step: usize| {
            let low = at.floor();
            let share = if step == 1 { at - low } else { 1.0 - (at - low) };
            ((low as usize + step).min(side - 1), share)
        };
        order
            .iter()
            .map(|&(row, col)| {
                let (y, fy) = corner(place(row, rows), down);
                let (x, fx) = corner(place(col, cols), right);
                ((y * side + x) as i32, (fy * fx) as f32)
            })
            .unzip()
    })
}

/// Half-split rotation over the whole head; x [N, heads, hd].
fn rotate(x: &Array, (cos, sin): &(Array, Array)) -> Result<Array> {
    let half = x.dim(2) / 2;
    let wide = ops::cast(x, Dtype::Float32)?;
    let a = ops::slice_axis(&wide, 2, 0, half)?;
    let b = ops::slice_axis(&wide, 2, half, 2 * half)?;
    let first = a.multiply(cos)?.subtract(&b.multiply(sin)?)?;
    let second = b.multiply(cos)?.add(&a.multiply(sin)?)?;
    ops::cast(&concatenate(&[first, second], 2)?, x.dtype())
}

/// A constant of `x`'s type, so that it promotes nothing.
fn constant(x: &Array, value: f32) -> Result<Array> {
    ops::cast(&Array::from_f32(value), x.dtype())
}

/// `x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x³)))`.
fn gelu_tanh(x: &Array) -> Result<Array> {
    let cubic = x.multiply(x)?.multiply(x)?.multiply(&constant(x, 0.044_715)?)?;
    let root = (2.0 / std::f32::consts::PI).sqrt();
    let inner = tanh(&x.add(&cubic)?.multiply(&constant(x, root)?)?)?;
    x.multiply(&constant(x, 0.5)?)?
        .multiply(&inner.add(&constant(x, 1.0)?)?)
}

/// `x / 2 * (1 + erf(x / sqrt(2)))`.
fn gelu_erf(x: &Array) -> Result<Array> {
    let inner = erf(&x.multiply(&constant(x, std::f32::consts::FRAC_1_SQRT_2)?)?)?;
    x.multiply(&constant(x, 0.5)?)?
        .multiply(&inner.add(&constant(x, 1.0)?)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patches_of_a_merged_block_follow_each_other() {
        let order = merge_order(4, 4, 2);
        assert_eq!(order[..6], [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (0, 3)]);
        assert_eq!(order[8], (2, 0));
        assert_eq!(order.len(), 16);
    }

    #[test]
    fn corners_of_a_grid_take_the_corners_of_the_table() {
        let order = merge_order(2, 4, 2);
        let corners = bilinear(&order, 2, 4, 48);
        let total: f32 = corners.iter().map(|(_, w)| w[7]).sum();
        assert!((total - 1.0).abs() < 1e-6);
        // The last patch is the bottom right one: all of its weight lies on the last table row.
        let heavy = corners.iter().filter(|(_, w)| w[7] > 0.0);
        assert!(heavy.clone().all(|(index, _)| index[7] == 48 * 48 - 1));
        assert_eq!(heavy.count(), 1);
    }
}
