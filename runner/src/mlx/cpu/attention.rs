//! Norm, rotation and causal attention with output gate for few or many rows.
//!
//! Invariant: a row's result depends only on the row and the slots up to its own, never on the other rows of the call.

use super::attention_tiles as tiles;
use super::elementwise::{norm_row, rotate};
use super::simd::{dot, exp, for_each, madd, multiversion, sigmoid, sum_lanes, Shared, LANES};

/// Heads of one attention layer.
#[derive(Debug, Clone, Copy)]
pub struct Heads {
    /// Query heads.
    pub query: usize,
    /// Key-value heads.
    pub kv: usize,
    /// Width of a head.
    pub dim: usize,
}

impl Heads {
    /// Columns of a packed row: queries with gates (by head), keys, values.
    pub fn packed(&self) -> usize {
        (2 * self.query + 2 * self.kv) * self.dim
    }
}

/// Gains of the query and key norms, [dim] each, and their epsilon.
#[derive(Debug, Clone, Copy)]
pub struct Norms<'a> {
    /// Query gain.
    pub q: &'a [f32],
    /// Key gain.
    pub k: &'a [f32],
    /// Epsilon.
    pub eps: f32,
}

#[inline(always)]
fn head_body<const FMA: bool>(x: &[f32], gain: &[f32], eps: f32, cos: &[f32], sin: &[f32], y: &mut [f32]) {
    norm_row::<FMA>(x, gain, eps, y);
    rotate::<FMA>(y, cos, sin);
}

multiversion! {
    fn norm_and_rotate(x: &[f32], gain: &[f32], eps: f32, cos: &[f32], sin: &[f32], y: &mut [f32]) = head_body;
}

/// Where new keys and values go: buffers [KV, capacity, D] of which `before` slots are filled.
#[derive(Debug)]
pub struct Append<'a> {
    /// Slots filled so far.
    pub before: usize,
    /// Keys.
    pub keys: &'a mut [f32],
    /// Values.
    pub values: &'a mut [f32],
}

/// Splits packed rows [L, packed] into normed, rotated queries [L, H, D] and appends keys and values.
/// `table` holds cosines and sines, [L, rotated / 2] each.
pub fn prepare(
    heads: Heads,
    packed: &[f32],
    norms: Norms<'_>,
    table: (&[f32], &[f32]),
    queries: &mut [f32],
    append: Append<'_>,
) {
    let (h, kv, d) = (heads.query, heads.kv, heads.dim);
    let rows = packed.len() / heads.packed();
    let half = table.0.len() / rows.max(1);
    let capacity = append.keys.len() / (kv * d);
    for (t, row) in packed.chunks_exact(heads.packed()).enumerate() {
        let (c, s) = (&table.0[t * half..][..half], &table.1[t * half..][..half]);
        for i in 0..h {
            let q = &mut queries[(t * h + i) * d..][..d];
            norm_and_rotate(&row[i * 2 * d..][..d], norms.q, norms.eps, c, s, q);
        }
        for j in 0..kv {
            let at = (j * capacity + append.before + t) * d;
            let k = &row[(2 * h + j) * d..][..d];
            norm_and_rotate(k, norms.k, norms.eps, c, s, &mut append.keys[at..][..d]);
            append.values[at..][..d].copy_from_slice(&row[(2 * h + kv + j) * d..][..d]);
        }
    }
}

/// Slots scored at a time: the running maximum is renewed once a block.
const BLOCK: usize = 64;

/// Slots whose sums are kept in registers together.
const TOGETHER: usize = 4;

/// Scores of one query against a block of keys [n, d].
#[inline(always)]
fn score_block<const FMA: bool>(q: &[f32], keys: &[f32], scale: f32, scores: &mut [f32]) {
    let d = q.len();
    let whole = if d.is_multiple_of(LANES) {
        scores.len() / TOGETHER * TOGETHER
    } else {
        0
    };
    let (several, rest) = scores.split_at_mut(whole);
    let fours = several.chunks_exact_mut(TOGETHER);
    for (scores, keys) in fours.zip(keys.chunks_exact(TOGETHER * d)) {
        let mut sums = [[0f32; LANES]; TOGETHER];
        let (a, rest) = keys.split_at(d);
        let (b, rest) = rest.split_at(d);
        let (c, e) = rest.split_at(d);
        let keys = a.chunks_exact(LANES).zip(b.chunks_exact(LANES));
        let keys = keys.zip(c.chunks_exact(LANES).zip(e.chunks_exact(LANES)));
        for (q, ((a, b), (c, e))) in q.chunks_exact(LANES).zip(keys) {
            for lane in 0..LANES {
                sums[0][lane] = madd::<FMA>(q[lane], a[lane], sums[0][lane]);
                sums[1][lane] = madd::<FMA>(q[lane], b[lane], sums[1][lane]);
                sums[2][lane] = madd::<FMA>(q[lane], c[lane], sums[2][lane]);
                sums[3][lane] = madd::<FMA>(q[lane], e[lane], sums[3][lane]);
            }
        }
        scores[0] = sum_lanes(sums[0]) * scale;
        scores[1] = sum_lanes(sums[1]) * scale;
        scores[2] = sum_lanes(sums[2]) * scale;
        scores[3] = sum_lanes(sums[3]) * scale;
    }
    for (score, key) in rest.iter_mut().zip(keys[whole * d..].chunks_exact(d)) {
        *score = dot::<FMA>(q, key) * scale;
    }
}

/// Adds a block's weighted values [n, d] to an output.
#[inline(always)]
fn gather_block<const FMA: bool>(weights: &[f32], values: &[f32], o: &mut [f32]) {
    let d = o.len();
    let whole = d / LANES * LANES;
    let (lanes, rest) = o.split_at_mut(whole);
    for (at, o) in lanes.chunks_exact_mut(LANES).enumerate() {
        // Several chains of sums, since each waits for its last addition.
        let mut sums = [[0f32; LANES]; TOGETHER];
        let fours = weights
            .chunks_exact(TOGETHER)
            .zip(values.chunks_exact(TOGETHER * d));
        for (weights, values) in fours {
            let (a, b) = (&values[at * LANES..][..LANES], &values[d + at * LANES..][..LANES]);
            let (c, e) = (
                &values[2 * d + at * LANES..][..LANES],
                &values[3 * d + at * LANES..][..LANES],
            );
            for lane in 0..LANES {
                sums[0][lane] = madd::<FMA>(weights[0], a[lane], sums[0][lane]);
                sums[1][lane] = madd::<FMA>(weights[1], b[lane], sums[1][lane]);
                sums[2][lane] = madd::<FMA>(weights[2], c[lane], sums[2][lane]);
                sums[3][lane] = madd::<FMA>(weights[3], e[lane], sums[3][lane]);
            }
        }
        let left = weights.len() / TOGETHER * TOGETHER;
        for (weight, value) in weights[left..].iter().zip(values[left * d..].chunks_exact(d)) {
            let value = &value[at * LANES..][..LANES];
            for lane in 0..LANES {
                sums[0][lane] = madd::<FMA>(*weight, value[lane], sums[0][lane]);
            }
        }
        for lane in 0..LANES {
            o[lane] += (sums[0][lane] + sums[1][lane]) + (sums[2][lane] + sums[3][lane]);
        }
    }
    for (weight, value) in weights.iter().zip(values.chunks_exact(d)) {
        for (o, v) in rest.iter_mut().zip(&value[whole..]) {
            *o = madd::<FMA>(*weight, *v, *o);
        }
    }
}

/// Queries [n, d] that share keys and values, each over its first `limits[i]` slots (online softmax, Milakov and Gimelshein
/// 2018). A block of slots meets every query while it is in the nearest cache; a query's own operations and their order
/// don't depend on the others.
#[inline(always)]
fn attend_body<const FMA: bool>(
    q: &[f32],
    limits: &[usize],
    keys: &[f32],
    values: &[f32],
    scale: f32,
    o: &mut [f32],
) {
    let d = q.len() / limits.len().max(1);
    let end = limits.iter().copied().max().unwrap_or(0);
    o.fill(0.0);
    let mut sums = vec![(f32::NEG_INFINITY, 0f32); limits.len()];
    let mut scores = [0f32; BLOCK];
    for from in (0..end).step_by(BLOCK) {
        let queries = q.chunks_exact(d).zip(limits);
        for (((q, limit), o), (highest, total)) in queries.zip(o.chunks_exact_mut(d)).zip(&mut sums) {
            let n = BLOCK.min(limit.saturating_sub(from));
            if n == 0 {
                continue;
            }
            let (keys, values) = (&keys[from * d..][..n * d], &values[from * d..][..n * d]);
            let scores = &mut scores[..n];
            score_block::<FMA>(q, keys, scale, scores);
            let peak = scores.iter().fold(f32::NEG_INFINITY, |a, b| a.max(*b));
            if peak > *highest {
                let shrink = exp::<FMA>(*highest - peak);
                *total *= shrink;
                for x in o.iter_mut() {
                    *x *= shrink;
                }
                *highest = peak;
            }
            let mut parts = [0f32; LANES];
            for scores in scores.chunks_mut(LANES) {
                for (score, part) in scores.iter_mut().zip(&mut parts) {
                    *score = exp::<FMA>(*score - *highest);
                    *part += *score;
                }
            }
            *total += sum_lanes(parts);
            gather_block::<FMA>(scores, values, o);
        }
    }
    for (o, (_, total)) in o.chunks_exact_mut(d).zip(sums) {
        let inverse = 1.0 / total;
        for x in o {
            *x *= inverse;
        }
    }
}

multiversion! {
    fn attend(q: &[f32], limits: &[usize], keys: &[f32], values: &[f32], scale: f32, o: &mut [f32]) = attend_body;
}

#[inline(always)]
fn gate_body<const FMA: bool>(gate: &[f32], o: &mut [f32]) {
    for (o, g) in o.iter_mut().zip(gate) {
        *o *= sigmoid::<FMA>(*g);
    }
}

multiversion! {
    fn apply_gate(gate: &[f32], o: &mut [f32]) = gate_body;
}

/// Rows up to which queries are computed one by one: decode and verification, where lanes of other queries would be idle.
const FEW_ROWS: usize = 16;

/// Most rows whose queries share a vector's lanes, or a pass over keys and values.
const TILE_ROWS: usize = 48;

/// Attention of some rows of all heads that share keys and values.
struct Share {
    rows: std::ops::Range<usize>,
    kv_head: usize,
}

/// Cuts the work: by key-value head, then by rows where there are many, or where threads would be idle.
fn shares(heads: Heads, rows: usize) -> Vec<Share> {
    let idle = rayon::current_num_threads().div_ceil(heads.kv).min(rows);
    let blocks = rows.div_ceil(TILE_ROWS).max(idle);
    let size = rows.div_ceil(blocks);
    // The longest first, so that no thread is left with one at the end.
    let starts = (0..rows).step_by(size).rev();
    starts
        .flat_map(|from| {
            (0..heads.kv).map(move |kv_head| Share {
                rows: from..rows.min(from + size),
                kv_head,
            })
        })
        .collect()
}

/// Attention of L rows whose last slot is `before + row`; keys and values [KV, capacity, D], queries [L, H, D], gates taken
/// from the packed rows; y [L, H * D].
pub fn run(
    heads: Heads,
    packed: &[f32],
    queries: &[f32],
    keys: &[f32],
    values: &[f32],
    before: usize,
    y: &mut [f32],
) {
    let (h, kv, d) = (heads.query, heads.kv, heads.dim);
    let rows = queries.len() / (h * d);
    let capacity = keys.len() / (kv * d);
    let group = h / kv;
    let scale = (d as f32).powf(-0.5);
    let out = Shared::new(y);
    let in_tiles = rows > FEW_ROWS && tiles::takes(d);
    let shares = shares(heads, rows);
    for_each(shares.len(), rows * h * (before + rows) * d * 2, |index| {
        let share = &shares[index];
        let j = share.kv_head;
        let places: Vec<(usize, usize)> = share
            .rows
            .clone()
            .flat_map(|t| (j * group..(j + 1) * group).map(move |i| (t, i)))
            .collect();
        let factor = if in_tiles { scale } else { 1.0 };
        let q: Vec<f32> = places
            .iter()
            .flat_map(|(t, i)| queries[(t * h + i) * d..][..d].iter().map(|x| x * factor))
            .collect();
        let limits: Vec<usize> = places.iter().map(|(t, _)| before + t + 1).collect();
        let mut o = vec![0f32; q.len()];
        let (keys, values) = (
            &keys[j * capacity * d..][..capacity * d],
            &values[j * capacity * d..][..capacity * d],
        );
        if in_tiles {
            tiles::attend(&q, &limits, keys, values, &mut o);
        } else {
            attend(&q, &limits, keys, values, scale, &mut o);
        }
        for ((t, i), o) in places.iter().zip(o.chunks_exact(d)) {
            // SAFETY: each head of each row is written by one call only.
            let y = unsafe { out.slice((t * h + i) * d, d) };
            y.copy_from_slice(o);
            apply_gate(&packed[t * heads.packed() + i * 2 * d + d..][..d], y);
        }
    });
}
