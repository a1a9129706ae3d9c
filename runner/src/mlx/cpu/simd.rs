//! Arithmetic that compilers turn into vector instructions.
//!
//! Invariant: sums run over a fixed number of lanes in a fixed order, whatever the instruction set, so results are the
//! same on every machine up to fused multiply-adds.

/// Lanes of every reduction: one AVX-512 register, two AVX2 ones.
pub const LANES: usize = 16;

/// The instruction set in use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Level {
    /// Whatever the target guarantees.
    Baseline,
    /// 256-bit vectors with fused multiply-add.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// 512-bit vectors.
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

/// The best level of this machine.
pub fn level() -> Level {
    #[cfg(target_arch = "x86_64")]
    {
        // The macro caches its answer.
        if std::arch::is_x86_feature_detected!("avx512f") && std::arch::is_x86_feature_detected!("avx512vl") {
            return Level::Avx512;
        }
        if std::arch::is_x86_feature_detected!("avx2") && std::arch::is_x86_feature_detected!("fma") {
            return Level::Avx2;
        }
    }
    Level::Baseline
}

/// Compiles `$body` for each instruction set and calls the best one.
///
/// `$body` must be an `#[inline(always)]` function with a leading `const FMA: bool` parameter.
macro_rules! multiversion {
    ($(#[$meta:meta])* $vis:vis fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? = $body:ident;) => {
        $(#[$meta])*
        $vis fn $name($($arg: $ty),*) $(-> $ret)? {
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx2,fma")]
                unsafe fn avx2($($arg: $ty),*) $(-> $ret)? {
                    $body::<true>($($arg),*)
                }
                #[target_feature(enable = "avx512f,avx512vl,avx2,fma")]
                unsafe fn avx512($($arg: $ty),*) $(-> $ret)? {
                    $body::<true>($($arg),*)
                }
                match $crate::mlx::cpu::simd::level() {
                    // SAFETY: `level` has checked that this machine has the instructions.
                    $crate::mlx::cpu::simd::Level::Avx512 => return unsafe { avx512($($arg),*) },
                    // SAFETY: as above.
                    $crate::mlx::cpu::simd::Level::Avx2 => return unsafe { avx2($($arg),*) },
                    $crate::mlx::cpu::simd::Level::Baseline => {}
                }
            }
            $body::<{ cfg!(target_arch = "aarch64") }>($($arg),*)
        }
    };
}
pub(crate) use multiversion;

/// `a * b + c`, fused where the instruction set has it (elsewhere a call would be slow).
#[inline(always)]
pub fn madd<const FMA: bool>(a: f32, b: f32, c: f32) -> f32 {
    if FMA {
        a.mul_add(b, c)
    } else {
        a * b + c
    }
}

/// Sum of the lanes, pairwise.
#[inline(always)]
pub fn sum_lanes(mut lanes: [f32; LANES]) -> f32 {
    let mut width = LANES / 2;
    while width > 0 {
        for i in 0..width {
            lanes[i] += lanes[i + width];
        }
        width /= 2;
    }
    lanes[0]
}

/// Dot product.
#[inline(always)]
pub fn dot<const FMA: bool>(a: &[f32], b: &[f32]) -> f32 {
    let mut acc = [0f32; LANES];
    let (ac, bc) = (a.chunks_exact(LANES), b.chunks_exact(LANES));
    let tail: f32 = ac
        .remainder()
        .iter()
        .zip(bc.remainder())
        .map(|(x, y)| x * y)
        .sum();
    for (x, y) in ac.zip(bc) {
        for i in 0..LANES {
            acc[i] = madd::<FMA>(x[i], y[i], acc[i]);
        }
    }
    sum_lanes(acc) + tail
}

/// `e^x` to two units in the last place; 0 below -87.3, the largest finite value above 88.7.
#[inline(always)]
pub fn exp<const FMA: bool>(x: f32) -> f32 {
    // Range reduction to |r| <= ln(2) / 2 by the add-and-subtract rounding trick, then a degree-6 polynomial (Cephes).
    const ROUND: f32 = 12_582_912.0;
    let clamped = x.clamp(-87.336_54, 88.722_83);
    let shifted = madd::<FMA>(clamped, std::f32::consts::LOG2_E, ROUND);
    let n = shifted - ROUND;
    let r = madd::<FMA>(n, -0.693_359_4, clamped);
    let r = madd::<FMA>(n, 2.121_944_4e-4, r);
    let mut p = 1.987_569_1e-4;
    for c in [1.398_2e-3, 8.333_452e-3, 4.166_579_6e-2, 0.166_666_66, 0.5] {
        p = madd::<FMA>(p, r, c);
    }
    let p = madd::<FMA>(p, r * r, r) + 1.0;
    // The rounding trick leaves the integer in the low bits; a cast would be a scalar instruction with its own checks.
    // Two factors keep the exponent in range at both ends. After a NaN all this is noise that is thrown away.
    let n = shifted.to_bits().wrapping_sub(ROUND.to_bits()) as i32;
    let half = n >> 1;
    let scale = |e: i32| f32::from_bits((e.wrapping_add(127) as u32) << 23);
    let y = p * scale(half) * scale(n.wrapping_sub(half));
    if x < -87.336_54 {
        0.0
    } else if x.is_nan() {
        x
    } else {
        y
    }
}

/// `1 / (1 + e^-x)`.
#[inline(always)]
pub fn sigmoid<const FMA: bool>(x: f32) -> f32 {
    1.0 / (1.0 + exp::<FMA>(-x))
}

/// `x * sigmoid(x)`.
#[inline(always)]
pub fn silu<const FMA: bool>(x: f32) -> f32 {
    x * sigmoid::<FMA>(x)
}

/// `ln(1 + e^x)` without overflow.
#[inline(always)]
pub fn softplus(x: f32) -> f32 {
    x.max(0.0) + (-x.abs()).exp().ln_1p()
}

/// A raw pointer that several threads write through, each to places of its own.
#[derive(Debug, Clone, Copy)]
pub struct Shared(*mut f32);

// SAFETY: users write disjoint ranges only, see `Shared::slice`.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

impl Shared {
    /// Wraps a buffer that outlives all uses.
    pub fn new(buffer: &mut [f32]) -> Self {
        Self(buffer.as_mut_ptr())
    }

    /// `len` values from `at`.
    ///
    /// # Safety
    /// The range lies inside the wrapped buffer and no other live slice overlaps it.
    #[expect(clippy::mut_from_ref, reason = "disjointness is the caller's promise")]
    pub unsafe fn slice(&self, at: usize, len: usize) -> &mut [f32] {
        // SAFETY: promised by the caller.
        unsafe { std::slice::from_raw_parts_mut(self.0.add(at), len) }
    }
}

/// Runs `work(0..count)` on the process's thread pool when `operations` is worth it, else here.
pub fn for_each(count: usize, operations: usize, work: impl Fn(usize) + Sync + Send) {
    use rayon::prelude::*;
    /// Waking the pool costs about as much as this many operations.
    const WORTH: usize = 1 << 19;
    if operations < WORTH || count < 2 {
        (0..count).for_each(work);
    } else {
        (0..count).into_par_iter().for_each(work);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_within_three_units_in_the_last_place() {
        let mut worst = 0f64;
        for i in -87_000..88_700 {
            let x = i as f32 / 1000.0 + 0.000_37;
            let exact = f64::from(x).exp();
            let error = ((f64::from(exp::<false>(x)) - exact) / exact).abs();
            worst = worst.max(error);
        }
        assert!(
            worst < 3.0 * f64::from(f32::EPSILON),
            "worst relative error {worst}"
        );
        assert_eq!(exp::<false>(-1e4), 0.0);
        assert!(exp::<false>(1e4).is_finite());
        assert!(exp::<false>(f32::NAN).is_nan());
    }

    #[test]
    fn softplus_and_sigmoid_hold_at_the_ends() {
        assert_eq!(softplus(200.0), 200.0);
        assert!(softplus(-200.0) >= 0.0);
        assert!(sigmoid::<false>(-200.0) < 1e-37);
        assert_eq!(sigmoid::<false>(200.0), 1.0);
    }

    #[test]
    fn dot_handles_lengths_off_the_lane_grid() {
        for len in [0, 1, 15, 16, 17, 33, 128] {
            let a: Vec<f32> = (0..len).map(|i| i as f32 * 0.5 - 3.0).collect();
            let b: Vec<f32> = (0..len).map(|i| 1.0 - i as f32 * 0.25).collect();
            let exact: f64 = a.iter().zip(&b).map(|(x, y)| f64::from(*x) * f64::from(*y)).sum();
            assert!(
                (f64::from(dot::<false>(&a, &b)) - exact).abs() < 1e-3,
                "length {len}"
            );
        }
    }
}
