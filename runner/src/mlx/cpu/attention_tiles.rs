//! Causal attention of many rows: keys and values are read once for a tile of queries.
//!
//! Invariant: a query's result depends only on the query and the slots up to its own: its operations and their order are
//! the same in whatever tile it stands. Source: online softmax (Milakov and Gimelshein 2018), in tiles as of
//! FlashAttention (Dao et al. 2022).

use super::simd::{exp, madd, multiversion, sum_lanes, LANES};

/// Slots scored at a time.
const SLOTS: usize = 64;
/// Queries whose sums are kept in registers together.
const TOGETHER: usize = 4;

/// Whether heads of this width are taken: whole vectors only.
pub fn takes(dim: usize) -> bool {
    dim.is_multiple_of(LANES)
}

/// Scratch of one tile.
struct Tile {
    /// A block of keys, columns first: [d, SLOTS].
    keys: Vec<f32>,
    /// Scores, then weights: [queries, SLOTS].
    scores: Vec<f32>,
    highest: Vec<f32>,
    total: Vec<f32>,
    /// Slots of the block that each query sees.
    seen: Vec<usize>,
}

#[inline(always)]
fn transpose(keys: &[f32], d: usize, out: &mut [f32]) {
    for (slot, key) in keys.chunks_exact(d).enumerate() {
        for (column, value) in key.iter().enumerate() {
            out[column * SLOTS + slot] = *value;
        }
    }
}

/// Scores of N queries against a block: q [N, d], keys [d, SLOTS] → [N, SLOTS].
#[inline(always)]
fn score<const FMA: bool, const N: usize>(q: &[f32], d: usize, keys: &[f32], scores: &mut [f32]) {
    for from in (0..SLOTS).step_by(LANES) {
        let mut sums = [[0f32; LANES]; N];
        for column in 0..d {
            let key = &keys[column * SLOTS + from..][..LANES];
            for (n, sums) in sums.iter_mut().enumerate() {
                let value = q[n * d + column];
                for lane in 0..LANES {
                    sums[lane] = madd::<FMA>(value, key[lane], sums[lane]);
                }
            }
        }
        for (n, sums) in sums.iter().enumerate() {
            scores[n * SLOTS + from..][..LANES].copy_from_slice(sums);
        }
    }
}

/// Turns scores into weights and rescales what was summed before.
#[inline(always)]
fn weigh<const FMA: bool>(scores: &mut [f32], highest: &mut f32, total: &mut f32, o: &mut [f32]) {
    let mut peaks = [f32::NEG_INFINITY; LANES];
    let chunks = scores.chunks_exact(LANES);
    let rest = chunks.remainder();
    for chunk in chunks {
        for (peak, x) in peaks.iter_mut().zip(chunk) {
            *peak = peak.max(*x);
        }
    }
    let peak = peaks.iter().chain(rest).fold(*highest, |a, b| a.max(*b));
    if peak > *highest {
        let shrink = exp::<FMA>(*highest - peak);
        *total *= shrink;
        for x in o.iter_mut() {
            *x *= shrink;
        }
        *highest = peak;
    }
    for x in scores.iter_mut() {
        *x = exp::<FMA>(*x - peak);
    }
    let mut sums = [0f32; LANES];
    for chunk in scores.chunks(LANES) {
        for (sum, x) in sums.iter_mut().zip(chunk) {
            *sum += *x;
        }
    }
    *total += sum_lanes(sums);
}

/// Adds the first `slots` weighted values of a block to N outputs: weights [N, SLOTS], o [N, d].
#[inline(always)]
fn gather<const FMA: bool, const N: usize>(
    weights: &[f32],
    values: &[f32],
    slots: (usize, usize),
    d: usize,
    o: &mut [f32],
) {
    for from in (0..d).step_by(LANES) {
        let mut sums = [[0f32; LANES]; N];
        for (n, sums) in sums.iter_mut().enumerate() {
            sums.copy_from_slice(&o[n * d + from..][..LANES]);
        }
        for slot in slots.0..slots.1 {
            let value = &values[slot * d + from..][..LANES];
            for (n, sums) in sums.iter_mut().enumerate() {
                let weight = weights[n * SLOTS + slot];
                for lane in 0..LANES {
                    sums[lane] = madd::<FMA>(weight, value[lane], sums[lane]);
                }
            }
        }
        for (n, sums) in sums.iter().enumerate() {
            o[n * d + from..][..LANES].copy_from_slice(sums);
        }
    }
}

#[inline(always)]
fn tile_body<const FMA: bool>(
    q: &[f32],
    limits: &[usize],
    keys: &[f32],
    values: &[f32],
    tile: &mut Tile,
    o: &mut [f32],
) {
    let count = limits.len();
    let d = q.len() / count;
    let end = limits.iter().copied().max().unwrap_or(0);
    o.fill(0.0);
    for from in (0..end).step_by(SLOTS) {
        let slots = SLOTS.min(end - from);
        transpose(&keys[from * d..(from + slots) * d], d, &mut tile.keys);
        for (seen, limit) in tile.seen.iter_mut().zip(limits) {
            *seen = limit.saturating_sub(from).min(SLOTS);
        }
        let values = &values[from * d..(from + slots) * d];
        let mut first = 0;
        while first < count {
            let together = if count - first >= TOGETHER { TOGETHER } else { 1 };
            let seen = &tile.seen[first..first + together];
            let common = seen.iter().copied().min().unwrap_or(0);
            if seen.iter().all(|&seen| seen == 0) {
                first += together;
                continue;
            }
            let (q, o) = (&q[first * d..], &mut o[first * d..(first + together) * d]);
            let scores = &mut tile.scores[first * SLOTS..(first + together) * SLOTS];
            match together {
                TOGETHER => score::<FMA, TOGETHER>(q, d, &tile.keys, scores),
                _ => score::<FMA, 1>(q, d, &tile.keys, scores),
            }
            for n in 0..together {
                weigh::<FMA>(
                    &mut scores[n * SLOTS..][..seen[n]],
                    &mut tile.highest[first + n],
                    &mut tile.total[first + n],
                    &mut o[n * d..][..d],
                );
            }
            match together {
                TOGETHER => gather::<FMA, TOGETHER>(scores, values, (0, common), d, o),
                _ => gather::<FMA, 1>(scores, values, (0, common), d, o),
            }
            // Slots that only the later queries see.
            for n in 0..together {
                let (weights, o) = (&scores[n * SLOTS..][..SLOTS], &mut o[n * d..][..d]);
                gather::<FMA, 1>(weights, values, (common, seen[n]), d, o);
            }
            first += together;
        }
    }
    for (o, total) in o.chunks_exact_mut(d).zip(&tile.total) {
        let inverse = 1.0 / total;
        for x in o {
            *x *= inverse;
        }
    }
}

multiversion! {
    fn tile_attend(
        q: &[f32],
        limits: &[usize],
        keys: &[f32],
        values: &[f32],
        tile: &mut Tile,
        o: &mut [f32],
    ) = tile_body;
}

/// Attention of a tile of queries, scaled already, [queries, d]; query i sees the first `limits[i]` slots of keys and values
/// [capacity, d], at least one. Results go to `o`, [queries, d].
pub fn attend(q: &[f32], limits: &[usize], keys: &[f32], values: &[f32], o: &mut [f32]) {
    let count = limits.len();
    let d = q.len() / count.max(1);
    let mut tile = Tile {
        keys: vec![0.0; d * SLOTS],
        scores: vec![0.0; count * SLOTS],
        highest: vec![f32::NEG_INFINITY; count],
        total: vec![0.0; count],
        seen: vec![0; count],
    };
    tile_attend(q, limits, keys, values, &mut tile, o);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn noise(len: usize, seed: u32) -> Vec<f32> {
        (0..len as u32)
            .map(|i| ((i.wrapping_mul(2_654_435_761).wrapping_add(seed) >> 8) % 2000) as f32 / 1000.0 - 1.0)
            .collect()
    }

    fn exact(q: &[f32], limit: usize, keys: &[f32], values: &[f32]) -> Vec<f64> {
        let d = q.len();
        let scores: Vec<f64> = (0..limit)
            .map(|s| (0..d).map(|c| f64::from(q[c]) * f64::from(keys[s * d + c])).sum())
            .collect();
        let peak = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let weights: Vec<f64> = scores.iter().map(|s| (s - peak).exp()).collect();
        let total: f64 = weights.iter().sum();
        (0..d)
            .map(|c| {
                let sum: f64 = (0..limit)
                    .map(|s| weights[s] * f64::from(values[s * d + c]))
                    .sum();
                sum / total
            })
            .collect()
    }

    #[test]
    fn a_tile_equals_softmax_in_float64_whatever_each_query_sees() {
        for (d, limits) in [
            (16, vec![1, 2, 3, 4, 5]),
            (64, (40..101).collect::<Vec<_>>()),
            (32, vec![64, 65, 128, 129, 130, 200, 3]),
        ] {
            let capacity = 201;
            let (q, keys) = (noise(limits.len() * d, 1), noise(capacity * d, 2));
            let values = noise(capacity * d, 3);
            let mut o = vec![f32::NAN; q.len()];
            attend(&q, &limits, &keys, &values, &mut o);
            for (i, limit) in limits.iter().enumerate() {
                let wanted = exact(&q[i * d..][..d], *limit, &keys, &values);
                for (got, wanted) in o[i * d..][..d].iter().zip(wanted) {
                    assert!(
                        (f64::from(*got) - wanted).abs() < 1e-5,
                        "query {i}: {got} for {wanted}"
                    );
                }
            }
        }
    }

    #[test]
    fn a_query_has_the_same_result_to_the_bit_in_any_tile() {
        let (d, limits) = (64, (130..151).collect::<Vec<_>>());
        let (q, keys) = (noise(limits.len() * d, 4), noise(200 * d, 5));
        let values = noise(200 * d, 6);
        let mut together = vec![0.0; q.len()];
        attend(&q, &limits, &keys, &values, &mut together);
        for (i, limit) in limits.iter().enumerate() {
            let mut alone = vec![0.0; d];
            attend(&q[i * d..][..d], &[*limit], &keys, &values, &mut alone);
            assert_eq!(together[i * d..][..d], alone[..], "query {i}");
        }
    }

    #[test]
    fn what_lies_beyond_a_query_cannot_reach_it() {
        let d = 16;
        let (q, mut keys) = (noise(4 * d, 7), noise(80 * d, 8));
        let mut values = noise(80 * d, 9);
        let mut before = vec![0.0; q.len()];
        attend(&q, &[70, 71, 72, 73], &keys, &values, &mut before);
        keys[72 * d..].fill(f32::NAN);
        values[72 * d..].fill(f32::NAN);
        let mut after = vec![0.0; q.len()];
        attend(&q, &[70, 71, 72, 73], &keys, &values, &mut after);
        assert_eq!(before[..3 * d], after[..3 * d]);
        assert!(after[3 * d..].iter().all(|x| x.is_nan()));
    }
}
