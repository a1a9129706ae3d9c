//! Products with bfloat16 matrices in float32 arithmetic, where the BLAS is built in.

use std::ffi::c_int;

/// Whether [`bf16_product`] computes.
pub const HAS_BF16_PRODUCT: bool = cfg!(openblas);

#[cfg(openblas)]
extern "C" {
    fn lookahead_bf16_product(m: c_int, n: c_int, k: c_int, x: *const f32, w: *const u16, y: *mut f32);
}

/// `y` [m, n] = `x` [m, k] times the transposed `w` [n, k] of bfloat16 numbers, all row-major; false, and nothing done, where
/// [`HAS_BF16_PRODUCT`] is. A row of up to sixteen is what the widened matrix gives, to the bit.
///
/// # Panics
/// A slice has another length than the sizes say.
pub fn bf16_product((m, n, k): (usize, usize, usize), x: &[f32], w: &[u16], y: &mut [f32]) -> bool {
    assert_eq!((x.len(), w.len(), y.len()), (m * k, n * k, m * n));
    #[cfg(openblas)]
    if let (Ok(rows), Ok(columns), Ok(depth)) = (c_int::try_from(m), c_int::try_from(n), c_int::try_from(k)) {
        // SAFETY: the slices have the lengths that the sizes say, checked above; the function keeps no pointer.
        unsafe {
            lookahead_bf16_product(rows, columns, depth, x.as_ptr(), w.as_ptr(), y.as_mut_ptr());
        }
        return true;
    }
    false
}
