//! FP8 checkpoints: E4M3 values with a factor for each block of the matrix.
//!
//! Invariant: the result is `value * factor` in float32, rows and columns of a partly filled last block included. The stored
//! name `scale_inv` notwithstanding, the factor multiplies.

use mlx_rs::error::Result;
use mlx_rs::ops::indexing::take_axis;
use mlx_rs::{Array, Dtype};

use crate::mlx::ops;

/// Decodes `bytes` [..., out, in] (E4M3 as uint8) with `factors` [..., ceil(out / rows), ceil(in / cols)]; float32.
pub fn decode(bytes: &Array, factors: &Array, [rows, cols]: [i32; 2]) -> Result<Array> {
    let values = bytes.from_fp8(Dtype::Float32)?;
    let factors = ops::cast(factors, Dtype::Float32)?;
    let (out, input) = (bytes.dim(-2), bytes.dim(-1));
    if out % rows == 0 && input % cols == 0 {
        let shape = bytes.shape().to_vec();
        let lead = &shape[..shape.len() - 2];
        let blocks = [lead, &[out / rows, rows, input / cols, cols]].concat();
        let spread = [lead, &[out / rows, 1, input / cols, 1]].concat();
        return values
            .reshape(&blocks)?
            .multiply(&factors.reshape(&spread)?)?
            .reshape(&shape);
    }
    let index = |n: i32, block: i32| Array::from_slice(&(0..n).map(|i| i / block).collect::<Vec<_>>(), &[n]);
    let factors = take_axis(&factors, index(out, rows), -2)?;
    values.multiply(&take_axis(&factors, index(input, cols), -1)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mlx::Backend;

    #[test]
    fn a_last_block_that_is_partly_filled_takes_its_own_factor() {
        Backend::select(true);
        // 0x38 is one in E4M3, 0xc0 minus two.
        let bytes = Array::from_slice(&[0x38u8, 0x38, 0xc0, 0x38, 0x38, 0x38], &[2, 3]);
        let factors = Array::from_slice(&[3f32, 5.0], &[1, 2]);
        let got = decode(&bytes, &factors, [2, 2])
            .unwrap()
            .to_vec_cast::<f32>()
            .unwrap();
        assert_eq!(got, [3.0, 3.0, -10.0, 3.0, 3.0, 5.0]);
    }

    #[test]
    fn whole_blocks_decode_as_partly_filled_ones_do() {
        Backend::select(true);
        let values: Vec<u8> = (0..32).map(|i| i * 7 % 0x78).collect();
        let bytes = Array::from_slice(&values, &[4, 8]);
        let factors = Array::from_slice(&[1f32, 2.0, 3.0, 4.0], &[2, 2]);
        let whole = decode(&bytes, &factors, [2, 4])
            .unwrap()
            .to_vec_cast::<f32>()
            .unwrap();
        let ragged = [0u8; 4];
        let padded: Vec<u8> = values
            .chunks(8)
            .flat_map(|row| [row, &ragged[..1]].concat())
            .collect();
        let factors = Array::from_slice(&[1f32, 2.0, 9.0, 3.0, 4.0, 9.0], &[2, 3]);
        let other = decode(&Array::from_slice(&padded, &[4, 9]), &factors, [2, 4]).unwrap();
        let other = other.to_vec_cast::<f32>().unwrap();
        let other: Vec<f32> = other.chunks(9).flat_map(|row| row[..8].to_vec()).collect();
        assert_eq!(whole, other);
    }
}
