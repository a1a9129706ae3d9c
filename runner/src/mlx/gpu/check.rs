//! Holds the fused kernels against plain operations on small random input.
//!
//! Invariant: a model takes the fused path only on a device where every kernel has passed.

use mlx_rs::error::{Exception, Result};
use mlx_rs::ops::sigmoid;
use mlx_rs::{Array, Dtype};

use super::{kernels, Heads};
use crate::mlx::delta::{gpu_net, graph_net, DeltaInput, DeltaParams, DeltaShape, Keep};
use crate::mlx::ops;

/// Numbers in (-1, 1) that need no generator: the fractional parts of multiples of an irrational number.
fn noise(shape: &[i32], seed: u32) -> Array {
    let count: i32 = shape.iter().product();
    let values: Vec<f32> = (0..count as u32)
        .map(|i| {
            let x = f64::from(i + 1) * 0.754_877_666_246_693 + f64::from(seed) * 0.569_840_290_998_053;
            ((x - x.floor()) * 2.0 - 1.0) as f32
        })
        .collect();
    Array::from_slice(&values, shape)
}

fn apart(a: &Array, b: &Array) -> Result<f32> {
    let difference = ops::cast(a, Dtype::Float32)?.subtract(&ops::cast(b, Dtype::Float32)?)?;
    Ok(difference.abs()?.max(None)?.item_cast::<f32>())
}

/// The largest difference of each kernel from its counterpart, by name; float32 throughout.
pub fn differences(rows: i32, batch: i32, shape: DeltaShape) -> Result<Vec<(&'static str, f32)>> {
    let params = DeltaParams {
        shape,
        conv: noise(&[shape.channels(), shape.taps], 1),
        decay: noise(&[shape.value_heads], 2).abs()?.negative()?,
        dt_bias: noise(&[shape.value_heads], 3),
        norm: noise(&[shape.value_dim], 4).add(Array::from_f32(1.5))?,
        eps: 1e-6,
    };
    let columns = shape.channels() + shape.value_columns() + 2 * shape.value_heads;
    let packed = noise(&[batch, rows, columns], 5);
    let tail = noise(&[batch, shape.taps - 1, shape.channels()], 6);
    let state = noise(&[batch, shape.value_heads, shape.value_dim, shape.key_dim], 7);
    let (c, v, h) = (shape.channels(), shape.value_columns(), shape.value_heads);
    let part = |from: i32, width: i32| ops::slice_axis(&packed, 2, from, from + width);
    let (mix, z, b, a) = (part(0, c)?, part(c, v)?, part(c + v, h)?, part(c + v + h, h)?);
    let input = DeltaInput {
        mix: &mix,
        z: &z,
        b: &b,
        a: &a,
        tail: &tail,
        state: &state,
    };
    let mut out = Vec::new();
    for (name, last, keep) in [
        ("delta", true, Keep::Last),
        ("delta, every row", false, Keep::Rows),
    ] {
        let wanted = graph_net(&params, &input, keep)?;
        let got = gpu_net(&params, &packed, &tail, &state, keep)?;
        let states = if last {
            apart(&got.last, &wanted.last)?
        } else {
            match (&got.rows, &wanted.rows) {
                (Some(a), Some(b)) => apart(a, b)?,
                _ => return Err(Exception::custom("states of every row are missing")),
            }
        };
        out.push((
            name,
            apart(&got.y, &wanted.y)?
                .max(apart(&got.mix, &wanted.mix)?)
                .max(states),
        ));
    }
    let kernels = kernels()?;
    let x = noise(&[rows, 96], 8);
    let added = noise(&[rows, 96], 9);
    let gain = noise(&[96], 10);
    let sum = x.add(&added)?;
    let wanted = mlx_rs::fast::rms_norm(&sum, Some(&gain), 1e-6)?;
    let (got_sum, got) = kernels.add_norm(&x, &added, &gain, 1e-6)?;
    out.push(("add_norm", apart(&got_sum, &sum)?.max(apart(&got, &wanted)?)));
    out.push(("norm", apart(&kernels.norm(&sum, &gain, 1e-6)?, &wanted)?));
    let gate = ops::slice_axis(&x, 1, 0, 48)?;
    let wanted = gate
        .multiply(&sigmoid(&gate)?)?
        .multiply(&ops::slice_axis(&x, 1, 48, 96)?)?;
    out.push(("swiglu", apart(&kernels.swiglu(&x)?, &wanted)?));
    out.push(("attention", attention(rows)?));
    Ok(out)
}

fn attention(rows: i32) -> Result<f32> {
    let kernels = kernels()?;
    let heads = Heads {
        query: 4,
        kv: 2,
        dim: 64,
    };
    let packed = noise(&[1, rows, (2 * 4 + 2 * 2) * 64], 11);
    let (q_gain, k_gain) = (noise(&[64], 12), noise(&[64], 13));
    let half = 8;
    let angles: Vec<f32> = (0..rows * half)
        .map(|i| (i / half + 3) as f32 * 100f32.powf(-((i % half) as f32) / half as f32))
        .collect();
    let angles = Array::from_slice(&angles, &[rows, half]);
    let (cos, sin) = (angles.cos()?, angles.sin()?);
    let (q, k, v) = kernels.attention_prepare(heads, &packed, (&q_gain, &k_gain), 1e-6, (&cos, &sin))?;
    let split = |from: i32, heads: i32, step: i32, gain: Option<&Array>| -> Result<Array> {
        let x = ops::slice_axis(&packed, 2, from, from + heads * step)?.reshape(&[1, rows, heads, step])?;
        let x = ops::slice_axis(&x, 3, 0, 64)?;
        let x = match gain {
            Some(gain) => mlx_rs::fast::rms_norm(&x, Some(gain), 1e-6)?,
            None => x,
        };
        let x = x.transpose_axes(&[0, 2, 1, 3])?;
        if gain.is_none() {
            return Ok(x);
        }
        let (a, b) = (
            ops::slice_axis(&x, 3, 0, half)?,
            ops::slice_axis(&x, 3, half, 2 * half)?,
        );
        let first = a.multiply(&cos)?.subtract(&b.multiply(&sin)?)?;
        let second = b.multiply(&cos)?.add(&a.multiply(&sin)?)?;
        mlx_rs::ops::concatenate(&[first, second, ops::slice_axis(&x, 3, 2 * half, 64)?], 3)
    };
    let mut worst = apart(&q, &split(0, 4, 128, Some(&q_gain))?)?;
    worst = worst.max(apart(&k, &split(8 * 64, 2, 64, Some(&k_gain))?)?);
    worst = worst.max(apart(&v, &split(10 * 64, 2, 64, None)?)?);
    let gate = ops::slice_axis(&packed, 2, 0, 8 * 64)?.reshape(&[1, rows, 4, 128])?;
    let gate = ops::slice_axis(&gate, 3, 64, 128)?;
    let (keys, values) = (noise(&[1, 2, 40, 64], 14), noise(&[1, 2, 40, 64], 15));
    let before = 20;
    let got = kernels.attention_rows(heads, &q, &keys, &values, before, &packed)?;
    let held = |a: &Array| ops::slice_axis(a, 2, 0, before + rows);
    let causal = mlx_rs::fast::ScaledDotProductAttentionMask::Causal;
    let o = mlx_rs::fast::scaled_dot_product_attention(
        &q,
        held(&keys)?,
        held(&values)?,
        0.125,
        Some(causal),
        None,
    )?;
    let wanted = o
        .transpose_axes(&[0, 2, 1, 3])?
        .multiply(&sigmoid(&gate)?)?
        .reshape(&[1, rows, 256])?;
    worst = worst.max(apart(&got, &wanted)?);
    let wanted = q
        .transpose_axes(&[0, 2, 1, 3])?
        .multiply(&sigmoid(&gate)?)?
        .reshape(&[1, rows, 256])?;
    Ok(worst.max(apart(&kernels.attention_gate(heads, &q, &packed)?, &wanted)?))
}

/// Whether all kernels agree with plain operations on this device; the reason if not.
pub fn check() -> std::result::Result<(), String> {
    /// Far above float32 rounding at these sizes, far below any mistake.
    const TOLERANCE: f32 = 1e-3;
    let shape = DeltaShape {
        key_heads: 2,
        value_heads: 4,
        key_dim: 64,
        value_dim: 32,
        taps: 4,
    };
    for rows in [1, 5] {
        let found = differences(rows, 2, shape).map_err(|error| ops::explain(&error))?;
        if let Some((name, by)) = found.iter().find(|(_, by)| by.is_nan() || *by > TOLERANCE) {
            return Err(format!(
                "kernel {name} differs from plain operations by {by} at {rows} rows"
            ));
        }
    }
    Ok(())
}
