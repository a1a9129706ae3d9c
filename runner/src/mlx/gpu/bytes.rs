//! A vocabulary projection rounded to bytes, for scoring drafts: it reads half of what bfloat16 does.
//!
//! Invariant: only drafts are scored with it. What stands is decided by the projection as stored, so rounding may cost
//! acceptance, never exactness. Codes are signed and symmetric, with a scale a row: `value = (byte - 128) * scale`.

use mlx_rs::error::Result;
use mlx_rs::ops::{maximum, zeros_dtype};
use mlx_rs::transforms::eval;
use mlx_rs::{Array, Dtype};

use super::products::{Around, Products, Stored};
use super::with_products;
use crate::mlx::ops;

/// Rows rounded at a time, whose float32 values are held meanwhile.
const BLOCK: i32 = 8192;
/// A code's largest magnitude.
const LARGEST: f32 = 127.0;

/// See the module's text.
#[derive(Debug, Clone)]
pub struct ByteRows {
    /// [out, in / 4] uint32, each byte a code plus 128.
    weight: Array,
    /// [out] float32.
    scales: Array,
}

impl ByteRows {
    /// Rounds `rows` [out, in], a block at a time; `in` is a multiple of four.
    pub fn encode(rows: &Array) -> Result<Self> {
        let (outputs, words) = (rows.dim(0), rows.dim(1) / 4);
        let mut weight = zeros_dtype(&[outputs, words], Dtype::Uint32)?;
        let mut scales = zeros_dtype(&[outputs], Dtype::Float32)?;
        let mut from = 0;
        while from < outputs {
            let to = (from + BLOCK).min(outputs);
            let values = ops::cast(&ops::slice_axis(rows, 0, from, to)?, Dtype::Float32)?;
            let top = mlx_rs::ops::max_axis(&values.abs()?, 1, true)?;
            let scale = maximum(&top, Array::from_f32(f32::MIN_POSITIVE * LARGEST))?
                .divide(Array::from_f32(LARGEST))?;
            let codes = values
                .divide(&scale)?
                .round(0)?
                .add(Array::from_f32(LARGEST + 1.0))?;
            let codes = ops::view(&ops::cast(&codes, Dtype::Uint8)?, Dtype::Uint32)?;
            // Evaluated block by block, with nobody else holding the target, both are written in place.
            weight = ops::slice_update(&weight, &codes, &[from, 0], &[to, words])?;
            scales = ops::slice_update(&scales, &scale.reshape(&[to - from])?, &[from], &[to])?;
            eval([&weight, &scales])?;
            from = to;
        }
        Ok(Self { weight, scales })
    }

    /// `x @ W^T` of few rows, x [B, L, in] → [B, L, out]; `None` where there is no kernel for it.
    pub fn forward(&self, x: &Array) -> Result<Option<Array>> {
        let stored = self.stored();
        if !Products::takes(x, stored) {
            return Ok(None);
        }
        with_products(|products| products.product(x, stored, Around::Nothing))
    }

    /// As the kernels take it.
    pub fn stored(&self) -> Stored<'_> {
        Stored::Bytes {
            weight: &self.weight,
            scales: &self.scales,
        }
    }

    /// The values, [out, in] float32.
    pub fn decode(&self) -> Result<Array> {
        let codes = ops::cast(&ops::view(&self.weight, Dtype::Uint8)?, Dtype::Float32)?;
        codes
            .subtract(Array::from_f32(LARGEST + 1.0))?
            .multiply(self.scales.reshape(&[-1, 1])?)
    }

    /// Arrays held.
    pub fn arrays(&self) -> Vec<&Array> {
        vec![&self.weight, &self.scales]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rows of many sizes, one of zeros, in more than one block.
    fn rows(outputs: i32, inputs: i32) -> Array {
        let values: Vec<f32> = (0..outputs * inputs)
            .map(|i| {
                let (row, column) = (i / inputs, i % inputs);
                ((column * 37 + row * 11) % 101 - 50) as f32
                    * 10f32.powi(row % 9 - 6)
                    * (row % 7).min(1) as f32
            })
            .collect();
        Array::from_slice(&values, &[outputs, inputs])
    }

    #[test]
    fn every_value_is_within_half_a_step_of_its_row() {
        let values = rows(BLOCK + 300, 8);
        let bytes = ByteRows::encode(&values).unwrap();
        let decoded = bytes.decode().unwrap();
        let (values, decoded) = (values.as_slice::<f32>(), decoded.as_slice::<f32>());
        for (row, (wanted, got)) in values.chunks(8).zip(decoded.chunks(8)).enumerate() {
            let top = wanted.iter().fold(0.0f32, |top, v| top.max(v.abs()));
            for (wanted, got) in wanted.iter().zip(got) {
                assert!(
                    (wanted - got).abs() <= top / LARGEST * 0.5001,
                    "row {row}: {wanted} {got}"
                );
            }
        }
    }

    #[test]
    fn it_takes_a_byte_a_value_and_four_a_row() {
        let bytes = ByteRows::encode(&rows(20, 128)).unwrap();
        let held: usize = bytes.arrays().iter().map(|array| array.nbytes()).sum();
        assert_eq!(held, 20 * (128 + 4));
    }
}
