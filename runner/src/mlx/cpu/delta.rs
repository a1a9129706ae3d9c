//! The gated delta net's mixer as one pass over the tokens.
//!
//! Invariant: state rows [dk] are updated in token order with one fixed sequence of operations, so the state after row r is
//! bit for bit the same whether the call had one row or many.

use super::simd::{dot, for_each, madd, multiversion, sigmoid, silu, softplus, sum_lanes, Shared, LANES};
use crate::mlx::delta::DeltaShape;

/// Sizes of one call.
#[derive(Debug, Clone, Copy)]
pub struct Sizes {
    /// Heads and widths.
    pub shape: DeltaShape,
    /// Sequences.
    pub batch: usize,
    /// Rows of each.
    pub rows: usize,
    /// Epsilon of the gated norm.
    pub eps: f32,
    /// Whether the state after every row is written, instead of the last only.
    pub every_row: bool,
}

/// Inputs, row-major, shapes as in [`crate::mlx::delta::DeltaInput`] and [`crate::mlx::delta::DeltaParams`]. `packed` holds
/// the columns mix | z | b | a of every row.
#[derive(Debug, Clone, Copy)]
pub struct Inputs<'a> {
    /// Projections, [B, L, C + nv * dv + 2 nv].
    pub packed: &'a [f32],
    /// Rows before, [B, taps - 1, C].
    pub tail: &'a [f32],
    /// State before, [B, nv, dv, dk].
    pub state: &'a [f32],
    /// Conv taps, [C, taps].
    pub conv: &'a [f32],
    /// `-exp(A_log)`, [nv].
    pub decay: &'a [f32],
    /// Bias of the decay input, [nv].
    pub dt_bias: &'a [f32],
    /// Gain of the gated norm, [dv].
    pub norm: &'a [f32],
}

/// Outputs.
#[derive(Debug)]
pub struct Outputs<'a> {
    /// [B, L, nv * dv].
    pub y: &'a mut [f32],
    /// [B, taps - 1 + L, C].
    pub mix: &'a mut [f32],
    /// [B, nv, dv, dk], or [B, L, nv, dv, dk] with `every_row`.
    pub states: &'a mut [f32],
}

#[inline(always)]
fn convolve_body<const FMA: bool>(rows: &[f32], taps: &[f32], channels: usize, out: &mut [f32]) {
    // `taps` is [taps][C] here, so that the inner loop runs over channels.
    out.fill(0.0);
    for (row, weights) in rows.chunks_exact(channels).zip(taps.chunks_exact(channels)) {
        for ((o, x), w) in out.iter_mut().zip(row).zip(weights) {
            *o = madd::<FMA>(*x, *w, *o);
        }
    }
    for o in out.iter_mut() {
        *o = silu::<FMA>(*o);
    }
}

multiversion! {
    fn convolve(rows: &[f32], taps: &[f32], channels: usize, out: &mut [f32]) = convolve_body;
}

#[inline(always)]
fn normalise_body<const FMA: bool>(heads: &mut [f32], dim: usize, scale: f32) {
    for head in heads.chunks_exact_mut(dim) {
        let factor = scale / (dot::<FMA>(head, head) + 1e-6).sqrt();
        for x in head {
            *x *= factor;
        }
    }
}

multiversion! {
    fn normalise(heads: &mut [f32], dim: usize, scale: f32) = normalise_body;
}

/// One token of one head: `S <- decay S; d = beta (v - S k); S <- S + d k^T; o = S q`.
#[inline(always)]
fn token_body<const FMA: bool>(
    state: &mut [f32],
    q: &[f32],
    k: &[f32],
    v: &[f32],
    decay: f32,
    beta: f32,
    o: &mut [f32],
) {
    let dk = k.len();
    for ((row, v), o) in state.chunks_exact_mut(dk).zip(v).zip(o) {
        let mut acc = [0f32; LANES];
        let mut tail = 0f32;
        let main = dk - dk % LANES;
        for (s, k) in row[..main]
            .chunks_exact_mut(LANES)
            .zip(k[..main].chunks_exact(LANES))
        {
            for i in 0..LANES {
                s[i] *= decay;
                acc[i] = madd::<FMA>(s[i], k[i], acc[i]);
            }
        }
        for (s, k) in row[main..].iter_mut().zip(&k[main..]) {
            *s *= decay;
            tail = madd::<FMA>(*s, *k, tail);
        }
        let d = beta * (v - (sum_lanes(acc) + tail));
        let mut acc = [0f32; LANES];
        let mut tail = 0f32;
        for ((s, k), q) in row[..main]
            .chunks_exact_mut(LANES)
            .zip(k[..main].chunks_exact(LANES))
            .zip(q[..main].chunks_exact(LANES))
        {
            for i in 0..LANES {
                s[i] = madd::<FMA>(k[i], d, s[i]);
                acc[i] = madd::<FMA>(s[i], q[i], acc[i]);
            }
        }
        for ((s, k), q) in row[main..].iter_mut().zip(&k[main..]).zip(&q[main..]) {
            *s = madd::<FMA>(*k, d, *s);
            tail = madd::<FMA>(*s, *q, tail);
        }
        *o = sum_lanes(acc) + tail;
    }
}

multiversion! {
    fn token(state: &mut [f32], q: &[f32], k: &[f32], v: &[f32], decay: f32, beta: f32, o: &mut [f32]) = token_body;
}

#[inline(always)]
fn gate_body<const FMA: bool>(o: &mut [f32], z: &[f32], norm: &[f32], eps: f32) {
    let scale = 1.0 / (dot::<FMA>(o, o) / o.len() as f32 + eps).sqrt();
    for ((o, z), n) in o.iter_mut().zip(z).zip(norm) {
        *o = *o * scale * n * silu::<FMA>(*z);
    }
}

multiversion! {
    fn gate(o: &mut [f32], z: &[f32], norm: &[f32], eps: f32) = gate_body;
}

/// Runs the whole mixer.
pub fn run(sizes: &Sizes, input: &Inputs<'_>, out: &mut Outputs<'_>) {
    let shape = sizes.shape;
    let (nk, nv) = (shape.key_heads as usize, shape.value_heads as usize);
    let (dk, dv) = (shape.key_dim as usize, shape.value_dim as usize);
    let taps = shape.taps as usize;
    let (rows, channels) = (sizes.rows, shape.channels() as usize);
    let (key_columns, value_columns) = (nk * dk, nv * dv);
    let packed_columns = channels + value_columns + 2 * nv;
    let mix_rows = taps - 1 + rows;
    let tap_major: Vec<f32> = (0..taps)
        .flat_map(|t| (0..channels).map(move |c| (t, c)))
        .map(|(t, c)| input.conv[c * taps + t])
        .collect();
    let mut convolved = vec![0f32; rows * channels];
    let state_size = nv * dv * dk;
    for b in 0..sizes.batch {
        let packed = &input.packed[b * rows * packed_columns..][..rows * packed_columns];
        let mix = &mut out.mix[b * mix_rows * channels..][..mix_rows * channels];
        let (old, new) = mix.split_at_mut((taps - 1) * channels);
        old.copy_from_slice(&input.tail[b * (taps - 1) * channels..][..(taps - 1) * channels]);
        for (to, from) in new
            .chunks_exact_mut(channels)
            .zip(packed.chunks_exact(packed_columns))
        {
            to.copy_from_slice(&from[..channels]);
        }
        let mix: &[f32] = mix;
        let shared = Shared::new(&mut convolved);
        for_each(rows, rows * channels * 24, |t| {
            // SAFETY: each row is written by one call only.
            let row = unsafe { shared.slice(t * channels, channels) };
            convolve(&mix[t * channels..][..taps * channels], &tap_major, channels, row);
            let scale = (dk as f32).powf(-0.5);
            normalise(&mut row[..key_columns], dk, scale);
            normalise(&mut row[key_columns..2 * key_columns], dk, 1.0);
        });
        let state_in = &input.state[b * state_size..][..state_size];
        let per_row = if sizes.every_row { state_size } else { 0 };
        let states = Shared::new(out.states);
        let states_at = b * if sizes.every_row {
            rows * state_size
        } else {
            state_size
        };
        let y = Shared::new(&mut out.y[b * rows * value_columns..][..rows * value_columns]);
        let convolved: &[f32] = &convolved;
        for_each(nv, rows * state_size * 4, |head| {
            let group = head / (nv / nk);
            let head_state = dv * dk;
            for t in 0..rows {
                let at = states_at + t * per_row + head * head_state;
                // SAFETY: head ranges are disjoint, and within a head the rows are visited in order by this call alone.
                let state = unsafe { states.slice(at, head_state) };
                if t == 0 {
                    state.copy_from_slice(&state_in[head * head_state..][..head_state]);
                } else if sizes.every_row {
                    // SAFETY: the previous row's range does not overlap this row's.
                    state.copy_from_slice(unsafe { states.slice(at - per_row, head_state) });
                }
                let row = &convolved[t * channels..][..channels];
                let q = &row[group * dk..][..dk];
                let k = &row[key_columns + group * dk..][..dk];
                let v = &row[2 * key_columns + head * dv..][..dv];
                let columns = &packed[t * packed_columns + channels..][..value_columns + 2 * nv];
                let z = &columns[head * dv..][..dv];
                let beta = sigmoid::<false>(columns[value_columns + head]);
                let a = columns[value_columns + nv + head];
                let decay = (input.decay[head] * softplus(a + input.dt_bias[head])).exp();
                // SAFETY: each head of each row is written by one call only.
                let o = unsafe { y.slice(t * value_columns + head * dv, dv) };
                token(state, q, k, v, decay, beta, o);
                gate(o, z, input.norm, sizes.eps);
            }
        });
    }
}
