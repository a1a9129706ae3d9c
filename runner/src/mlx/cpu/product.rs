//! Products with bfloat16 matrices in float32 arithmetic.
//!
//! Invariant: the result is that of the same matrix widened to float32, to the bit for up to sixteen rows: a bfloat16 number is
//! the upper half of a float32, so widening it on the way loses nothing and reads half the memory.

use mlx_rs::error::{Exception, Result};
use mlx_rs::{Array, Dtype};

use super::kernel::{cpu_op, Output};

/// Whether this build has the products: they come with the BLAS that is built in.
pub const AVAILABLE: bool = mlx_sys::HAS_BF16_PRODUCT;

/// `x @ w^T`; x [..., K] float32, w [N, K] bfloat16 → [..., N] float32.
///
/// # Errors
/// Other types or shapes, or a build without these products.
pub fn bf16_product(x: &Array, w: &Array) -> Result<Array> {
    let (n, k) = match w.shape() {
        &[n, k] if AVAILABLE && w.dtype() == Dtype::Bfloat16 && x.dtype() == Dtype::Float32 => (n, k),
        _ => return Err(Exception::custom("no product of these types")),
    };
    let mut shape = x.shape().to_vec();
    match shape.last_mut() {
        Some(last) if *last == k && k > 0 => *last = n,
        _ => return Err(Exception::custom("a row of another width than the matrix")),
    }
    let sizes = (x.size() / k as usize, n as usize, k as usize);
    let [y] = cpu_op(
        c"bf16_product",
        &[x, w],
        [Output::Floats(shape)],
        move |ins, mut outs| {
            let done = mlx_sys::bf16_product(sizes, ins.floats(0), ins.halves(1), outs.floats());
            assert!(done, "sizes beyond the library's integers");
        },
    )?;
    Ok(y)
}

#[cfg(test)]
mod tests {
    use mlx_rs::ops::matmul;
    use mlx_rs::random;

    use super::*;
    use crate::mlx::Backend;

    #[test]
    fn a_bfloat16_matrix_gives_what_it_gives_widened() {
        Backend::select(true);
        if !AVAILABLE {
            return;
        }
        for (rows, n, k) in [
            (1, 37, 64),
            (3, 200, 100),
            (16, 50, 33),
            (17, 50, 33),
            (40, 700, 96),
            (130, 5, 7),
        ] {
            let x = random::normal::<f32>(&[1, rows, k], None, None, None).unwrap();
            let w = random::normal::<f32>(&[n, k], None, None, None).unwrap();
            let w = w.as_dtype(Dtype::Bfloat16).unwrap();
            let wide = w.as_dtype(Dtype::Float32).unwrap();
            let wanted = matmul(&x, wide.transpose_axes(&[1, 0]).unwrap()).unwrap();
            let got = bf16_product(&x, &w).unwrap();
            let off = got.subtract(&wanted).unwrap().abs().unwrap().max(None).unwrap();
            let limit = if rows <= 16 { 0.0 } else { 1e-4 };
            assert!(off.item_cast::<f32>() <= limit, "{rows} rows, {n} x {k}: {off:?}");
        }
    }

    #[test]
    fn other_types_and_widths_are_refused() {
        Backend::select(true);
        let x = random::normal::<f32>(&[2, 8], None, None, None).unwrap();
        let w = random::normal::<f32>(&[3, 8], None, None, None).unwrap();
        assert!(bf16_product(&x, &w).is_err());
        let w = w.as_dtype(Dtype::Bfloat16).unwrap();
        assert!(bf16_product(&random::normal::<f32>(&[2, 7], None, None, None).unwrap(), &w).is_err());
        assert!(bf16_product(&x.as_dtype(Dtype::Bfloat16).unwrap(), &w).is_err());
        assert_eq!(bf16_product(&x, &w).is_ok(), AVAILABLE);
    }
}
