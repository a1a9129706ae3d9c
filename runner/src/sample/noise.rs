//! The counter generator of [`super::rng`] on the device, and draws made of it.
//!
//! Invariant: the words equal the host's bit for bit on every backend: wrapping 32-bit multiplication, addition, shift and
//! exclusive or only.

use mlx_rs::error::Result;
use mlx_rs::ops::indexing::{argmax_axis, argmin_axis};
use mlx_rs::ops::{cumsum, logical_and};
use mlx_rs::{Array, Dtype};

use super::rng::{RowKey, MIX_A, MIX_B, UNIT};
use crate::mlx::ops::{array_op, cast, slice_axis};

fn xor_shifted(x: &Array, bits: u32) -> Result<Array> {
    let bits = word(bits);
    let shifted = array_op("right_shift", |res, s| {
        // SAFETY: plain two-input call.
        unsafe { mlx_sys::mlx_right_shift(res, x.as_ptr(), bits.as_ptr(), s) }
    })?;
    array_op("bitwise_xor", |res, s| {
        // SAFETY: plain two-input call.
        unsafe { mlx_sys::mlx_bitwise_xor(res, x.as_ptr(), shifted.as_ptr(), s) }
    })
}

fn word(value: u32) -> Array {
    Array::from_slice(&[value], &[])
}

/// The words of ids [R, K] or [1, K] (uint32) under one key a row: uint32 [R, K].
pub(super) fn words(ids: &Array, keys: &[RowKey]) -> Result<Array> {
    let column = |part: fn(&RowKey) -> u32| {
        let values: Vec<u32> = keys.iter().map(part).collect();
        Array::from_slice(&values, &[values.len() as i32, 1])
    };
    let x = ids.multiply(column(|k| k.gamma))?.add(column(|k| k.base))?;
    let x = xor_shifted(&x, 16)?.multiply(word(MIX_A))?;
    let x = xor_shifted(&x, 15)?.multiply(word(MIX_B))?;
    xor_shifted(&x, 15)
}

/// Column [R] of the winner of each row's exponential race; weights [R, K] need no common scale.
///
/// Argmin of weight / -exponential: one division instead of a logarithm, and weight 0 never wins.
pub(super) fn race(weights: &Array, ids: &Array, keys: &[RowKey]) -> Result<Array> {
    let unit = cast(&words(ids, keys)?, Dtype::Float32)?.add(Array::from_f32(0.5))?;
    let slowness = unit.multiply(Array::from_f32(-UNIT))?.log1p()?;
    argmin_axis(weights.divide(&slowness)?, -1, true)
}

/// Column [R, 1] at which each row's running sum of weights [R, K] passes its share of the total.
pub(super) fn inverse(weights: &Array, shares: &[f32]) -> Result<Array> {
    let sums = cumsum(weights, -1, false, true)?;
    let width = weights.dim(1);
    let shares = Array::from_slice(shares, &[shares.len() as i32, 1]);
    let target = slice_axis(&sums, 1, width - 1, width)?.multiply(shares)?;
    // A parallel scan may rise by a rounding error where the weight is 0, so the weight is asked as well.
    let hit = logical_and(sums.gt(&target)?, weights.gt(Array::from_f32(0.0))?)?;
    argmax_axis(hit, -1, true)
}
