//! Norms and SwiGLU, row by row.
//!
//! Invariant: rows are independent.

use super::simd::{dot, madd, multiversion, silu};

#[inline(always)]
fn rms_row<const FMA: bool>(x: &[f32], gain: &[f32], eps: f32, y: &mut [f32]) {
    let scale = 1.0 / (dot::<FMA>(x, x) / x.len() as f32 + eps).sqrt();
    for ((y, x), g) in y.iter_mut().zip(x).zip(gain) {
        *y = x * scale * g;
    }
}

#[inline(always)]
fn rms_norm_body<const FMA: bool>(x: &[f32], gain: &[f32], eps: f32, y: &mut [f32]) {
    let width = gain.len();
    for (x, y) in x.chunks_exact(width).zip(y.chunks_exact_mut(width)) {
        rms_row::<FMA>(x, gain, eps, y);
    }
}

multiversion! {
    /// `x / sqrt(mean(x^2) + eps) * gain` for each row of `gain.len()` columns.
    pub fn rms_norm(x: &[f32], gain: &[f32], eps: f32, y: &mut [f32]) = rms_norm_body;
}

#[inline(always)]
fn add_norm_body<const FMA: bool>(
    x: &[f32],
    added: &[f32],
    gain: &[f32],
    eps: f32,
    sum: &mut [f32],
    normed: &mut [f32],
) {
    for ((s, a), b) in sum.iter_mut().zip(x).zip(added) {
        *s = a + b;
    }
    rms_norm_body::<FMA>(sum, gain, eps, normed);
}

multiversion! {
    /// `sum = x + added`, and its norm.
    pub fn add_norm(x: &[f32], added: &[f32], gain: &[f32], eps: f32, sum: &mut [f32], normed: &mut [f32]) = add_norm_body;
}

#[inline(always)]
fn swiglu_body<const FMA: bool>(gate_up: &[f32], width: usize, y: &mut [f32]) {
    for (row, y) in gate_up.chunks_exact(2 * width).zip(y.chunks_exact_mut(width)) {
        let (gate, up) = row.split_at(width);
        for ((y, g), u) in y.iter_mut().zip(gate).zip(up) {
            *y = silu::<FMA>(*g) * u;
        }
    }
}

multiversion! {
    /// `silu(gate) * up` where each row of `gate_up` holds `width` gates, then `width` ups.
    pub fn swiglu(gate_up: &[f32], width: usize, y: &mut [f32]) = swiglu_body;
}

/// Rotates the first `cos.len() * 2` values of a head: pairs (j, j + half).
#[inline(always)]
pub(super) fn rotate<const FMA: bool>(head: &mut [f32], cos: &[f32], sin: &[f32]) {
    let half = cos.len();
    let (a, rest) = head.split_at_mut(half);
    for (((a, b), c), s) in a.iter_mut().zip(&mut rest[..half]).zip(cos).zip(sin) {
        let (x, y) = (*a, *b);
        *a = madd::<FMA>(x, *c, -(y * s));
        *b = madd::<FMA>(y, *c, x * s);
    }
}

#[inline(always)]
pub(super) fn norm_row<const FMA: bool>(x: &[f32], gain: &[f32], eps: f32, y: &mut [f32]) {
    rms_row::<FMA>(x, gain, eps, y);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn norm_and_swiglu_follow_their_formulas() {
        let x: Vec<f32> = (0..48).map(|i| (i as f32 * 0.37).sin() * 3.0).collect();
        let gain: Vec<f32> = (0..24).map(|i| 1.0 + i as f32 * 0.01).collect();
        let mut y = vec![0.0; 48];
        rms_norm(&x, &gain, 1e-6, &mut y);
        for row in 0..2 {
            let r = &x[row * 24..][..24];
            let ms: f64 = r.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>() / 24.0;
            for c in 0..24 {
                let want = f64::from(r[c]) / (ms + 1e-6).sqrt() * f64::from(gain[c]);
                assert!((f64::from(y[row * 24 + c]) - want).abs() < 1e-5);
            }
        }
        let mut z = vec![0.0; 24];
        swiglu(&x, 12, &mut z);
        for (i, z) in z.iter().enumerate() {
            let at = i / 12 * 24 + i % 12;
            let (g, u) = (f64::from(x[at]), f64::from(x[at + 12]));
            assert!((f64::from(*z) - g / (1.0 + (-g).exp()) * u).abs() < 1e-5);
        }
    }
}
