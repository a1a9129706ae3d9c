//! Bicubic resampling with antialiasing, to the bit as Pillow does it.
//!
//! Invariant: coefficients are fixed-point with 22 fraction bits, the width changes before the height, and both passes round to
//! bytes: the tower was trained on such pixels. (Pillow 13 picks the cheaper order, which differs by one level here and there.)
//! Source: Pillow's `Resample.c`, 8 bits a channel, `BICUBIC` (a = -0.5).

use super::Rgb;

const PRECISION: u32 = 22;
const SUPPORT: f64 = 2.0;
const CHANNELS: usize = 3;

/// Where an output sample reads, and with which weights.
struct Window {
    first: usize,
    weights: Vec<i32>,
}

/// Resizes to `width` x `height`, both above zero.
pub fn bicubic(image: &Rgb, width: usize, height: usize) -> Rgb {
    let columns = windows(image.width, width);
    let rows = windows(image.height, height);
    let mut wide = vec![0u8; width * image.height * CHANNELS];
    for (from, to) in image
        .pixels
        .chunks_exact(image.width * CHANNELS)
        .zip(wide.chunks_exact_mut(width * CHANNELS))
    {
        for (window, out) in columns.iter().zip(to.chunks_exact_mut(CHANNELS)) {
            let samples = &from[window.first * CHANNELS..];
            let mut sums = [1i32 << (PRECISION - 1); CHANNELS];
            for (pixel, weight) in samples.chunks_exact(CHANNELS).zip(&window.weights) {
                for (sum, value) in sums.iter_mut().zip(pixel) {
                    *sum += i32::from(*value) * weight;
                }
            }
            for (out, sum) in out.iter_mut().zip(sums) {
                *out = byte(sum);
            }
        }
    }
    let stride = width * CHANNELS;
    let mut pixels = vec![0u8; stride * height];
    let mut sums = vec![0i32; stride];
    for (window, out) in rows.iter().zip(pixels.chunks_exact_mut(stride)) {
        sums.fill(1 << (PRECISION - 1));
        for (row, weight) in wide[window.first * stride..]
            .chunks_exact(stride)
            .zip(&window.weights)
        {
            for (sum, value) in sums.iter_mut().zip(row) {
                *sum += i32::from(*value) * weight;
            }
        }
        for (out, sum) in out.iter_mut().zip(&sums) {
            *out = byte(*sum);
        }
    }
    Rgb {
        width,
        height,
        pixels,
    }
}

fn byte(sum: i32) -> u8 {
    (sum >> PRECISION).clamp(0, 255) as u8
}

/// One window an output sample. Weights sum to one, so sums of bytes stay far below an overflow.
fn windows(input: usize, output: usize) -> Vec<Window> {
    let scale = input as f64 / output as f64;
    let stretch = scale.max(1.0);
    let support = SUPPORT * stretch;
    (0..output)
        .map(|at| {
            let center = (at as f64 + 0.5) * scale;
            // Casts saturate: a negative edge becomes the first sample.
            let first = (center - support + 0.5) as usize;
            let end = ((center + support + 0.5) as usize).min(input);
            let mut weights: Vec<f64> = (first..end)
                .map(|i| cubic((i as f64 - center + 0.5) / stretch))
                .collect();
            let sum: f64 = weights.iter().sum();
            if sum != 0.0 {
                weights.iter_mut().for_each(|w| *w /= sum);
            }
            let fixed = |w: f64| (w * f64::from(1 << PRECISION) + if w < 0.0 { -0.5 } else { 0.5 }) as i32;
            Window {
                first,
                weights: weights.into_iter().map(fixed).collect(),
            }
        })
        .collect()
}

fn cubic(x: f64) -> f64 {
    const A: f64 = -0.5;
    let x = x.abs();
    if x < 1.0 {
        ((A + 2.0) * x - (A + 3.0)) * x * x + 1.0
    } else if x < 2.0 {
        (((x - 5.0) * x + 8.0) * x - 4.0) * A
    } else {
        0.0
    }
}
