//! Norm, rotation and causal attention with output gate for few or many rows.
//!
//! Invariant: a row's result depends only on the row and the slots up to its own, never on the other rows of the call.

use super::attention_tiles as tiles;
use super::elementwise::{norm_row, rotate};
use super::simd::{dot, exp, for_each, madd, multiversion, sigmoid, Shared, LANES};

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

/// One query over `slots` keys and values (online softmax, Milakov and Gimelshein 2018).
#[inline(always)]
fn attend_body<const FMA: bool>(
    q: &[f32],
    keys: &[f32],
    values: &[f32],
    slots: usize,
    scale: f32,
    o: &mut [f32],
) {
    let d = q.len();
    o.fill(0.0);
    let mut highest = f32::NEG_INFINITY;
    let mut total = 0f32;
    let mut scores = [0f32; BLOCK];
    let mut from = 0;
    while from < slots {
        let n = BLOCK.min(slots - from);
        let mut block_highest = f32::NEG_INFINITY;
        for (i, score) in scores[..n].iter_mut().enumerate() {
            *score = dot::<FMA>(q, &keys[(from + i) * d..][..d]) * scale;
            block_highest = block_highest.max(*score);
        }
        if block_highest > highest {
            let shrink = exp::<FMA>(highest - block_highest);
            total *= shrink;
            for x in o.iter_mut() {
                *x *= shrink;
            }
            highest = block_highest;
        }
        for (i, score) in scores[..n].iter().enumerate() {
            let weight = exp::<FMA>(score - highest);
            total += weight;
            let v = &values[(from + i) * d..][..d];
            for (o, v) in o.chunks_mut(LANES).zip(v.chunks(LANES)) {
                for (o, v) in o.iter_mut().zip(v) {
                    *o = madd::<FMA>(weight, *v, *o);
                }
            }
        }
        from += n;
    }
    let inverse = 1.0 / total;
    for x in o.iter_mut() {
        *x *= inverse;
    }
}

multiversion! {
    fn attend(q: &[f32], keys: &[f32], values: &[f32], slots: usize, scale: f32, o: &mut [f32]) = attend_body;
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

/// Rows up to which each is computed by itself: decode and verification, where a row must not depend on the others in the
/// least.
const FEW_ROWS: usize = 16;

/// Most rows whose queries share a pass over keys and values.
const TILE_ROWS: usize = 48;

/// [`run`] for many rows: one tile takes some rows of all heads that share keys and values.
fn run_tiles(
    heads: Heads,
    packed: &[f32],
    queries: &[f32],
    (keys, values): (&[f32], &[f32]),
    before: usize,
    out: &Shared,
) {
    let (h, kv, d) = (heads.query, heads.kv, heads.dim);
    let rows = queries.len() / (h * d);
    let capacity = keys.len() / (kv * d);
    let scale = (d as f32).powf(-0.5);
    let group = h / kv;
    let blocks = rows.div_ceil(TILE_ROWS);
    let share = rows.div_ceil(blocks);
    for_each(blocks * kv, rows * h * (before + rows) * d * 2, |index| {
        // The longest tiles first, so that no thread is left with one at the end.
        let (block, j) = (blocks - 1 - index / kv, index % kv);
        let tile = (block * share).min(rows)..rows.min((block + 1) * share);
        let places: Vec<(usize, usize)> = tile
            .flat_map(|t| (j * group..(j + 1) * group).map(move |i| (t, i)))
            .collect();
        let q: Vec<f32> = places
            .iter()
            .flat_map(|(t, i)| queries[(t * h + i) * d..][..d].iter().map(|x| x * scale))
            .collect();
        let limits: Vec<usize> = places.iter().map(|(t, _)| before + t + 1).collect();
        let mut o = vec![0f32; q.len()];
        let at = j * capacity * d;
        tiles::attend(
            &q,
            &limits,
            &keys[at..][..capacity * d],
            &values[at..][..capacity * d],
            &mut o,
        );
        for ((t, i), o) in places.iter().zip(o.chunks_exact(d)) {
            // SAFETY: each head of each row is written by one call only.
            let y = unsafe { out.slice((t * h + i) * d, d) };
            y.copy_from_slice(o);
            apply_gate(&packed[t * heads.packed() + i * 2 * d + d..][..d], y);
        }
    });
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
    let scale = (d as f32).powf(-0.5);
    let out = Shared::new(y);
    if rows > FEW_ROWS && tiles::takes(d) {
        run_tiles(heads, packed, queries, (keys, values), before, &out);
        return;
    }
    for_each(rows * h, rows * h * (before + rows) * d * 2, |index| {
        let (t, i) = (index / h, index % h);
        let at = (i / (h / kv)) * capacity * d;
        // SAFETY: each head of each row is written by one call only.
        let o = unsafe { out.slice(index * d, d) };
        attend(
            &queries[index * d..][..d],
            &keys[at..][..capacity * d],
            &values[at..][..capacity * d],
            before + t + 1,
            scale,
            o,
        );
        apply_gate(&packed[t * heads.packed() + i * 2 * d + d..][..d], o);
    });
}
