//! Holds the fused kernels against plain operations on small random input.
//!
//! Invariant: a model takes the fused path only on a device where every kernel has passed.

use mlx_rs::error::{Exception, Result};
use mlx_rs::ops::sigmoid;
use mlx_rs::transforms::eval;
use mlx_rs::{Array, Dtype};

use super::bytes::ByteRows;
use super::products::{Around, Gain, Stored};
use super::{kernels, with_products, Heads, Prepare};
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
    scalar(&difference.abs()?.max(None)?)
}

fn scalar(a: &Array) -> Result<f32> {
    a.try_item_cast::<f32>()
        .map_err(|error| Exception::custom(ops::last_error().unwrap_or_else(|| error.to_string())))
}

/// Results are rounded to bfloat16, and so are normalised rows: relative to the largest result.
const ROUNDING: f32 = 0.02;

/// How far one kernel is from its counterpart in plain operations.
#[derive(Debug, Clone, Copy)]
pub struct Difference {
    /// The kernel.
    pub name: &'static str,
    /// Largest difference of an element.
    pub by: f32,
    /// What rounding explains; zero where results must be the same to the bit.
    pub limit: f32,
}

impl Difference {
    /// Float32 kernels: far above rounding at these sizes, far below any mistake.
    fn exact(name: &'static str, by: f32) -> Self {
        Self {
            name,
            by,
            limit: 1e-3,
        }
    }

    /// Whether rounding explains it.
    pub fn is_fine(&self) -> bool {
        self.by <= self.limit
    }
}

/// What a model runs the kernels with: each set of constants is a compilation, so a check at load uses the model's own.
#[derive(Debug, Clone, Copy)]
pub struct Constants {
    /// Delta-net heads.
    pub delta: DeltaShape,
    /// Attention heads.
    pub heads: Heads,
    /// Half of the rotated columns of an attention head.
    pub half: i32,
    /// Epsilon of the norms.
    pub eps: f32,
    /// Inputs that share a scale, where weights are 4-bit codes.
    pub group: Option<i32>,
}

/// The difference of each kernel from its counterpart.
pub fn differences(rows: i32, batch: i32, c: &Constants) -> Result<Vec<Difference>> {
    let mut out = delta(rows, batch, c.delta, c.eps)?;
    let kernels = kernels()?;
    let x = noise(&[rows, 96], 8);
    let added = noise(&[rows, 96], 9);
    let gain = noise(&[96], 10);
    let sum = x.add(&added)?;
    let wanted = mlx_rs::fast::rms_norm(&sum, Some(&gain), c.eps)?;
    let (got_sum, got) = kernels.add_norm(&x, &added, &gain, c.eps)?;
    out.push(Difference::exact(
        "add_norm",
        apart(&got_sum, &sum)?.max(apart(&got, &wanted)?),
    ));
    let got = kernels.norm(&sum, &gain, c.eps)?;
    out.push(Difference::exact("norm", apart(&got, &wanted)?));
    let gate = ops::slice_axis(&x, 1, 0, 48)?;
    let wanted = gate
        .multiply(&sigmoid(&gate)?)?
        .multiply(&ops::slice_axis(&x, 1, 48, 96)?)?;
    out.push(Difference::exact("swiglu", apart(&kernels.swiglu(&x)?, &wanted)?));
    out.push(peak(rows)?);
    out.push(draft_input(rows, c)?);
    if rows <= super::products::ROWS {
        out.push(Difference::exact("attention", attention(rows, c)?));
        out.extend(products(rows, c)?);
    }
    Ok(out)
}

/// Of rows with many equal logits, and of such with a NaN.
fn peak(rows: i32) -> Result<Difference> {
    let (width, known) = (1500, 1300);
    let logits = noise(&[rows, width], 31)
        .multiply(Array::from_f32(8.0))?
        .round(0)?;
    let (choice, top) = kernels()?.peak(&logits, known)?;
    let held = ops::slice_axis(&logits, 1, 0, known)?;
    let wanted = mlx_rs::ops::indexing::argmax_axis(&held, -1, false)?;
    let off = apart(&choice, &wanted)?.max(apart(&top, &mlx_rs::ops::max_axis(&held, -1, false)?)?);
    let broken = logits
        .multiply(Array::from_f32(f32::INFINITY))?
        .multiply(Array::from_f32(0.0))?;
    let (_, top) = kernels()?.peak(&broken, known)?;
    let numbers = scalar(&top.eq(&top)?.as_dtype(Dtype::Float32)?.max(None)?)?;
    Ok(Difference {
        name: "peak",
        by: off.max(numbers),
        limit: 0.0,
    })
}

/// Products of few rows, of each storage, with everything that may be around them.
fn products(rows: i32, c: &Constants) -> Result<Vec<Difference>> {
    let (outputs, inputs) = (144, 256);
    let dense = narrow(&noise(&[outputs, inputs], 23))?;
    let mut out = product(rows, c.eps, "product", Stored::Dense(&dense), &dense)?;
    out.extend(bytes(rows, &dense)?);
    if let Some(group) = c.group {
        let (mode, [weight, scales, biases]) = codes(&dense, group)?;
        let decoded = ops::dequantize(&weight, &scales, Some(&biases), mode, Dtype::Bfloat16)?;
        let stored = Stored::Codes {
            weight: &weight,
            scales: &scales,
            biases: &biases,
            group,
        };
        out.extend(product(rows, c.eps, "product of codes", stored, &decoded)?);
    }
    Ok(out)
}

/// The product that scores drafts.
fn bytes(rows: i32, dense: &Array) -> Result<Option<Difference>> {
    let bytes = ByteRows::encode(dense)?;
    let x = narrow(&noise(&[1, rows, dense.dim(1)], 24))?;
    let Some(got) = bytes.forward(&x)? else {
        return Ok(None);
    };
    let wanted = mlx_rs::ops::matmul(&wide(&x)?, &bytes.decode()?.transpose_axes(&[1, 0])?)?;
    Ok(Some(Difference {
        name: "product of bytes",
        by: apart(&got, &wanted)? / scalar(&wanted.abs()?.max(None)?)?.max(1e-6),
        limit: ROUNDING,
    }))
}

/// What the head's first product reads, of plain embeddings and of codes.
fn draft_input(rows: i32, c: &Constants) -> Result<Difference> {
    let width = 256;
    let table = noise(&[40, width], 25);
    let hidden = noise(&[1, rows, width], 26);
    let ids: Vec<i32> = (0..rows).map(|row| row * 7 % 40).collect();
    let ids = Array::from_slice(&ids, &[1, rows]);
    let (token_gain, state_gain) = (noise(&[width], 27), noise(&[width], 28));
    let norms = (
        Gain {
            gain: &token_gain,
            eps: c.eps,
        },
        Gain {
            gain: &state_gain,
            eps: c.eps,
        },
    );
    let of = |read: Stored<'_>, values: &Array| -> Result<f32> {
        let taken = mlx_rs::ops::indexing::take_axis(values, &ids, 0)?;
        let token = mlx_rs::fast::rms_norm(&taken, Some(&token_gain), c.eps)?;
        let state = mlx_rs::fast::rms_norm(&hidden, Some(&state_gain), c.eps)?;
        let wanted = mlx_rs::ops::concatenate(&[token, state], 2)?;
        apart(&kernels()?.draft_input(&ids, read, &hidden, norms)?, &wanted)
    };
    let mut worst = of(Stored::Dense(&table), &table)?;
    if let Some(group) = c.group {
        let (mode, [weight, scales, biases]) = codes(&table, group)?;
        let decoded = ops::dequantize(&weight, &scales, Some(&biases), mode, Dtype::Float32)?;
        let read = Stored::Codes {
            weight: &weight,
            scales: &scales,
            biases: &biases,
            group,
        };
        worst = worst.max(of(read, &decoded)?);
    }
    Ok(Difference::exact("draft input", worst))
}

/// Affine 4-bit codes of a matrix: words, scales, biases.
fn codes(values: &Array, group: i32) -> Result<(ops::QuantMode, [Array; 3])> {
    let mode = ops::QuantMode {
        group_size: group,
        bits: 4,
        mode: c"affine",
    };
    let codes = <[Array; 3]>::try_from(ops::quantize(values, mode)?);
    let codes = codes.map_err(|_| Exception::custom("affine codes without biases"))?;
    Ok((mode, codes))
}

fn narrow(a: &Array) -> Result<Array> {
    ops::cast(a, Dtype::Bfloat16)
}

fn wide(a: &Array) -> Result<Array> {
    ops::cast(a, Dtype::Float32)
}

fn product(
    rows: i32,
    eps: f32,
    name: &'static str,
    stored: Stored<'_>,
    values: &Array,
) -> Result<Vec<Difference>> {
    let (outputs, inputs) = (values.dim(0), values.dim(1));
    let x = narrow(&noise(&[1, rows, inputs], 20))?;
    let added = narrow(&noise(&[1, rows, outputs], 21))?;
    let gain = noise(&[inputs], 22).add(Array::from_f32(1.5))?;
    let norm = Gain { gain: &gain, eps };
    let transposed = wide(values)?.transpose_axes(&[1, 0])?;
    let plain = mlx_rs::ops::matmul(&wide(&x)?, &transposed)?;
    let normed = mlx_rs::ops::matmul(
        &mlx_rs::fast::rms_norm(&wide(&x)?, Some(&gain), eps)?,
        &transposed,
    )?;
    let gate = ops::slice_axis(&normed, 2, 0, outputs / 2)?;
    let gated =
        gate.multiply(&sigmoid(&gate)?)?
            .multiply(&ops::slice_axis(&normed, 2, outputs / 2, outputs)?)?;
    let sum = plain.add(&wide(&added)?)?;
    let mut out = Vec::new();
    for (around, wanted) in [
        (Around::Nothing, &plain),
        (Around::Added(&added), &sum),
        (Around::Normed(norm), &normed),
        (Around::Gated(norm), &gated),
    ] {
        let Some(got) = with_products(|p| p.product(&x, stored, around))? else {
            return Ok(Vec::new());
        };
        let largest = scalar(&wanted.abs()?.max(None)?)?;
        out.push(Difference {
            name,
            by: apart(&got, wanted)? / largest.max(1e-6),
            limit: ROUNDING,
        });
    }
    // A verified row must be the row that plain decoding computes.
    let alone = ops::compact(&ops::slice_axis(&x, 1, rows - 1, rows)?)?;
    let of = |x: &Array| with_products(|p| p.product(x, stored, Around::Normed(norm)));
    if let (Some(alone), Some(all)) = (of(&alone)?, of(&x)?) {
        out.push(Difference {
            name: "a row alone and among others",
            by: apart(&alone, &ops::slice_axis(&all, 1, rows - 1, rows)?)?,
            limit: 0.0,
        });
    }
    Ok(out)
}

fn delta(rows: i32, batch: i32, shape: DeltaShape, eps: f32) -> Result<Vec<Difference>> {
    let params = DeltaParams {
        shape,
        conv: noise(&[shape.channels(), shape.taps], 1),
        decay: noise(&[shape.value_heads], 2).abs()?.negative()?,
        dt_bias: noise(&[shape.value_heads], 3),
        norm: noise(&[shape.value_dim], 4).add(Array::from_f32(1.5))?,
        eps,
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
        if !last && rows > super::delta::FEW {
            continue;
        }
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
        out.push(Difference::exact(
            name,
            apart(&got.y, &wanted.y)?
                .max(apart(&got.mix, &wanted.mix)?)
                .max(states),
        ));
    }
    Ok(out)
}

fn attention(rows: i32, c: &Constants) -> Result<f32> {
    let kernels = kernels()?;
    let (heads, half, eps) = (c.heads, c.half, c.eps);
    let Heads { query: h, kv, dim: d } = heads;
    let packed = noise(&[1, rows, (2 * h + 2 * kv) * d], 11);
    let (q_gain, k_gain) = (noise(&[d], 12), noise(&[d], 13));
    let angles: Vec<f32> = (0..rows * half)
        .map(|i| (i / half + 3) as f32 * 100f32.powf(-((i % half) as f32) / half as f32))
        .collect();
    let angles = Array::from_slice(&angles, &[rows, half]);
    let (cos, sin) = (angles.cos()?, angles.sin()?);
    let how = Prepare {
        heads,
        gains: (&q_gain, &k_gain),
        eps,
        table: (&cos, &sin),
    };
    let (q, k, v) = kernels.attention_prepare(&how, &packed)?;
    let split = |from: i32, heads: i32, step: i32, gain: Option<&Array>| -> Result<Array> {
        let x = ops::slice_axis(&packed, 2, from, from + heads * step)?.reshape(&[1, rows, heads, step])?;
        let x = ops::slice_axis(&x, 3, 0, d)?;
        let x = match gain {
            Some(gain) => mlx_rs::fast::rms_norm(&x, Some(gain), eps)?,
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
        mlx_rs::ops::concatenate(&[first, second, ops::slice_axis(&x, 3, 2 * half, d)?], 3)
    };
    let mut worst = apart(&q, &split(0, h, 2 * d, Some(&q_gain))?)?;
    worst = worst.max(apart(&k, &split(2 * h * d, kv, d, Some(&k_gain))?)?);
    worst = worst.max(apart(&v, &split((2 * h + kv) * d, kv, d, None)?)?);
    let gate = ops::slice_axis(&packed, 2, 0, 2 * h * d)?.reshape(&[1, rows, h, 2 * d])?;
    let gate = ops::slice_axis(&gate, 3, d, 2 * d)?;
    let joined = |o: &Array| {
        o.transpose_axes(&[0, 2, 1, 3])?
            .multiply(&sigmoid(&gate)?)?
            .reshape(&[1, rows, h * d])
    };
    worst = worst.max(apart(&kernels.attention_gate(heads, &q, &packed)?, &joined(&q)?)?);
    // Within one span, and over several of which the last is cut off.
    for before in [20, 300] {
        let capacity = before + rows + 20;
        let buffer = |seed| noise(&[1, kv, capacity, d], seed);
        let (keys, values) = (buffer(14), buffer(15));
        let got = kernels.attention_rows(heads, &q, (&keys, &values), before, &packed)?;
        let held = |a: &Array| ops::slice_axis(a, 2, 0, before + rows);
        let causal = mlx_rs::fast::ScaledDotProductAttentionMask::Causal;
        let scale = (d as f32).powf(-0.5);
        let o = mlx_rs::fast::scaled_dot_product_attention(
            &q,
            held(&keys)?,
            held(&values)?,
            scale,
            Some(causal),
            None,
        )?;
        worst = worst.max(apart(&got, &joined(&o)?)?);
        if kernels.writes_in_place() {
            let (_, after) =
                kernels.attention_prepare_in_place(&how, &packed, (&buffer(14), &buffer(15)), before)?;
            worst = worst.max(written(&after.0, &keys, &k, before)?);
            worst = worst.max(written(&after.1, &values, &v, before)?);
        }
        // A verified row must be the row that plain decoding computes.
        let last = |a: &Array, axis| ops::compact(&ops::slice_axis(a, axis, rows - 1, rows)?);
        let alone = kernels.attention_rows(
            heads,
            &last(&q, 2)?,
            (&keys, &values),
            before + rows - 1,
            &last(&packed, 1)?,
        )?;
        if apart(&alone, &ops::slice_axis(&got, 1, rows - 1, rows)?)? != 0.0 {
            return Ok(f32::INFINITY);
        }
    }
    Ok(worst)
}

/// How far a buffer is from `old` with `new` in the slots behind `before`.
fn written(after: &Array, old: &Array, new: &Array, before: i32) -> Result<f32> {
    // Readers of the buffer alone belong into a later dispatch than its writer.
    eval([after])?;
    let end = before + new.dim(2);
    let rest = ops::slice_axis(old, 2, end, old.dim(2))?;
    let parts = [ops::slice_axis(old, 2, 0, before)?, new.clone(), rest];
    apart(after, &mlx_rs::ops::concatenate(&parts, 2)?)
}

/// Constants of a thorough check, with the batches: heads in odd numbers, heads of one size and of two.
const SHAPES: [(Constants, i32); 3] = [
    (constants([3, 3], [32, 48], [3, 1, 64], 8, 64), 3),
    (constants([1, 5], [128, 128], [6, 2, 128], 32, 32), 1),
    (constants([16, 32], [128, 128], [16, 4, 256], 32, 128), 1),
];

const fn constants(
    delta_heads: [i32; 2],
    dims: [i32; 2],
    heads: [i32; 3],
    half: i32,
    group: i32,
) -> Constants {
    Constants {
        delta: DeltaShape {
            key_heads: delta_heads[0],
            value_heads: delta_heads[1],
            key_dim: dims[0],
            value_dim: dims[1],
            taps: 4,
        },
        heads: Heads {
            query: heads[0],
            kv: heads[1],
            dim: heads[2],
        },
        half,
        eps: 1e-6,
        group: Some(group),
    }
}

/// Every kernel at rows 1 to 16 and beyond, in several shapes; calls `report` with each result.
///
/// # Errors
/// A kernel can't be compiled or run, or there are none on this thread.
pub fn thorough(mut report: impl FnMut(i32, i32, &Constants, Difference)) -> Result<()> {
    for (constants, batch) in SHAPES {
        for rows in (1..=16).chain([17, 70, 200]) {
            for difference in differences(rows, batch, &constants)? {
                report(rows, batch, &constants, difference);
            }
            tracing::info!("checked {rows} rows, batch {batch}, {constants:?}");
        }
    }
    Ok(())
}

/// Whether all kernels agree with plain operations on this device, compiled as a model will run them; the reason if not.
/// `alive` is called now and then.
pub fn check(constants: &Constants, alive: impl Fn()) -> std::result::Result<(), String> {
    for rows in [1, 5, 20] {
        alive();
        let found = differences(rows, 1, constants).map_err(|error| ops::explain(&error))?;
        if let Some(wrong) = found.iter().find(|d| !d.is_fine()) {
            return Err(format!(
                "kernel {} differs from plain operations by {} at {rows} rows",
                wrong.name, wrong.by
            ));
        }
    }
    Ok(())
}
