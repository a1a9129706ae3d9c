//! The chunkwise-parallel form of the recurrence: matrix products inside chunks, a short loop between them.
//!
//! Invariant: exponents are never positive (decays are carried as logarithms and masked before `exp`), and the inverse is
//! built by doubling merges, which stay accurate where a product of powers overflows.

use mlx_rs::error::Result;
use mlx_rs::ops::{concatenate, exp, matmul, select};
use mlx_rs::Array;

use super::graph::{pad_rows, repeat_heads, Prepared};
use crate::mlx::ops;

/// Rows a chunk; a power of two.
const CHUNK: i32 = 64;

/// Masks of one chunk size, as float32 [C, C] matrices of zeros and ones.
struct Masks {
    lower: Array,
    strictly_lower: Array,
    stages: Vec<Array>,
    identity: Array,
}

impl Masks {
    fn new(c: i32) -> Self {
        let build = |f: &dyn Fn(i32, i32) -> bool| -> Array {
            let values: Vec<f32> = (0..c * c)
                .map(|at| if f(at / c, at % c) { 1.0 } else { 0.0 })
                .collect();
            Array::from_slice(&values, &[c, c])
        };
        let mut stages = Vec::new();
        let mut s = 1;
        while s < c {
            stages.push(build(&|i, j| {
                i / (2 * s) == j / (2 * s) && (i / s) % 2 == 1 && (j / s) % 2 == 0
            }));
            s *= 2;
        }
        Self {
            lower: build(&|i, j| i >= j),
            strictly_lower: build(&|i, j| i > j),
            stages,
            identity: build(&|i, j| i == j),
        }
    }
}

/// `(I + A)^-1` for strictly lower `A` [..., C, C]: each stage joins exact inverses of the diagonal blocks.
fn unit_lower_inverse(a: &Array, masks: &Masks) -> Result<Array> {
    let mut x = masks.identity.clone();
    for stage in &masks.stages {
        let merged = matmul(&matmul(&x, &a.multiply(stage)?)?, &x)?;
        x = x.subtract(&merged)?;
    }
    Ok(x)
}

/// Runs rows [B, L, ...] from `state` [B, nv, dv, dk]; returns outputs [B, L, nv, dv] and the state after the last row.
pub(super) fn chunks(p: &Prepared, state: &Array) -> Result<(Array, Array)> {
    let (batch, rows) = (p.v.dim(0), p.v.dim(1));
    let shape = p.shape;
    let (nv, dk, dv) = (shape.value_heads, shape.key_dim, shape.value_dim);
    let count = (rows + CHUNK - 1) / CHUNK;
    let padded = count * CHUNK;
    let masks = Masks::new(CHUNK);
    // [B, L, H, X] → [B, N, H, C, X]
    let split = |x: &Array, heads: i32, dim: i32| -> Result<Array> {
        pad_rows(x, padded)?
            .reshape(&[batch, count, CHUNK, heads, dim])?
            .transpose_axes(&[0, 1, 3, 2, 4])
    };
    let q_heads = split(&p.q, shape.key_heads, dk)?;
    let k_heads = split(&p.k, shape.key_heads, dk)?;
    let k_t = k_heads.transpose_axes(&[0, 1, 2, 4, 3])?;
    // Products of keys and queries need one computation a key head.
    let kk = repeat_heads(shape, &matmul(&k_heads, &k_t)?)?;
    let qk = repeat_heads(shape, &matmul(&q_heads, &k_t)?)?;
    let q = repeat_heads(shape, &q_heads)?;
    let k = repeat_heads(shape, &k_heads)?;
    let v = split(&p.v, nv, dv)?;
    let column = |x: &Array| -> Result<Array> { split(&x.expand_dims(-1)?, nv, 1) };
    let beta = column(&p.beta)?;
    let g = column(&p.g)?.cumsum(3, None, None)?;
    let g_row = g.transpose_axes(&[0, 1, 2, 4, 3])?;
    let zero = Array::from_f32(0.0);
    let lower = masks.lower.gt(&zero)?;
    let exponent = select(&lower, &g.subtract(&g_row)?, &zero)?;
    let gamma = exp(&exponent)?.multiply(&masks.lower)?;
    let a = kk
        .multiply(&gamma)?
        .multiply(&masks.strictly_lower)?
        .multiply(&beta)?;
    let x = unit_lower_inverse(&a, &masks)?;
    let grown = exp(&g)?;
    let u = matmul(&x, &v.multiply(&beta)?)?;
    let w = matmul(&x, &k.multiply(&beta.multiply(&grown)?)?)?;
    let p_mat = qk.multiply(&gamma)?;
    // O = P U + (exp(G) q - P W) S and R = U - W S: one stacked product with the state a chunk.
    let pu = matmul(&p_mat, &u)?;
    let qe = q.multiply(&grown)?.subtract(&matmul(&p_mat, &w)?)?;
    let stacked = concatenate(&[&qe, &w], 3)?;
    let g_last = ops::slice_axis(&g, 3, CHUNK - 1, CHUNK)?;
    let k_tail = k.multiply(&exp(&g_last.subtract(&g)?)?)?;
    let kept = exp(&g_last)?;
    let mut state = state.clone();
    let mut outputs = Vec::new();
    for n in 0..count {
        let at = |x: &Array| -> Result<Array> {
            let dims = x.shape().to_vec();
            ops::slice_axis(x, 1, n, n + 1)?.reshape(&[dims[0], dims[2], dims[3], dims[4]])
        };
        let through = matmul(&at(&stacked)?, &state.transpose_axes(&[0, 1, 3, 2])?)?;
        let o = at(&pu)?.add(&ops::slice_axis(&through, 2, 0, CHUNK)?)?;
        let r = at(&u)?.subtract(&ops::slice_axis(&through, 2, CHUNK, 2 * CHUNK)?)?;
        let added = matmul(&r.transpose_axes(&[0, 1, 3, 2])?, &at(&k_tail)?)?;
        state = state.multiply(&at(&kept)?)?.add(&added)?;
        outputs.push(o);
    }
    // [B, nv, N * C, dv] → [B, L, nv, dv]
    let o = concatenate(&outputs, 2)?.transpose_axes(&[0, 2, 1, 3])?;
    Ok((ops::slice_axis(&o, 1, 0, rows)?, state))
}
