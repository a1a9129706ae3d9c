//! Causal attention of many rows: keys and values are read once for a tile of queries.
//!
//! Invariant: a query's result depends only on the query and the slots up to its own: its operations and their order are
//! the same in whatever tile it stands. Source: online softmax (Milakov and Gimelshein 2018), in tiles as of
//! FlashAttention (Dao et al. 2022).

use super::simd::{exp, madd, multiversion, LANES};

/// Slots scored at a time.
const SLOTS: usize = 64;
/// Slots, and later queries, whose sums are kept in registers together.
const TOGETHER: usize = 4;

/// Whether heads of this width are taken: whole vectors only.
pub fn takes(dim: usize) -> bool {
    dim.is_multiple_of(LANES)
}

/// A value of each of the queries that are computed in one vector.
type Lanes = [f32; LANES];

/// Queries that share a vector, a lane each, and their sums so far.
struct Group {
    /// Queries, columns first: d entries.
    q: Vec<Lanes>,
    /// Slots that each query sees, at least one.
    limits: [usize; LANES],
    highest: Lanes,
    total: Lanes,
}

/// Scores of TOGETHER keys ([TOGETHER, d]) with the queries of a group.
#[inline(always)]
fn score<const FMA: bool>(q: &[Lanes], keys: &[f32], d: usize) -> [Lanes; TOGETHER] {
    let mut sums = [[0f32; LANES]; TOGETHER];
    let (first, rest) = keys.split_at(d);
    let (second, rest) = rest.split_at(d);
    let (third, fourth) = rest.split_at(d);
    for ((((q, a), b), c), e) in q.iter().zip(first).zip(second).zip(third).zip(fourth) {
        for lane in 0..LANES {
            sums[0][lane] = madd::<FMA>(*a, q[lane], sums[0][lane]);
            sums[1][lane] = madd::<FMA>(*b, q[lane], sums[1][lane]);
            sums[2][lane] = madd::<FMA>(*c, q[lane], sums[2][lane]);
            sums[3][lane] = madd::<FMA>(*e, q[lane], sums[3][lane]);
        }
    }
    sums
}

/// The same for one key; every sum has the same order.
#[inline(always)]
fn score_one<const FMA: bool>(q: &[Lanes], key: &[f32]) -> Lanes {
    let mut sums = [0f32; LANES];
    for (q, key) in q.iter().zip(key) {
        for lane in 0..LANES {
            sums[lane] = madd::<FMA>(*key, q[lane], sums[lane]);
        }
    }
    sums
}

/// Turns scores into weights; returns what earlier sums are to be multiplied by.
#[inline(always)]
fn weigh<const FMA: bool>(scores: &mut [Lanes], group: &mut Group) -> Lanes {
    let mut peaks = group.highest;
    for row in scores.iter() {
        for lane in 0..LANES {
            peaks[lane] = if row[lane] > peaks[lane] {
                row[lane]
            } else {
                peaks[lane]
            };
        }
    }
    let mut shrink = [0f32; LANES];
    for lane in 0..LANES {
        shrink[lane] = exp::<FMA>(group.highest[lane] - peaks[lane]);
    }
    let mut sums = [0f32; LANES];
    for row in scores.iter_mut() {
        for lane in 0..LANES {
            row[lane] = exp::<FMA>(row[lane] - peaks[lane]);
            sums[lane] += row[lane];
        }
    }
    for lane in 0..LANES {
        group.total[lane] = madd::<FMA>(group.total[lane], shrink[lane], sums[lane]);
    }
    group.highest = peaks;
    shrink
}

/// Adds weighted values ([slots, d]) to N outputs [N, d]; `weights` are the slots' rows, the first query's in lane `lane`.
#[inline(always)]
fn gather<const FMA: bool, const N: usize>(
    weights: &[Lanes],
    lane: usize,
    values: &[f32],
    d: usize,
    o: &mut [f32],
) {
    for from in (0..d).step_by(LANES) {
        let mut sums = [[0f32; LANES]; N];
        for (sums, o) in sums.iter_mut().zip(o.chunks_exact(d)) {
            sums.copy_from_slice(&o[from..from + LANES]);
        }
        for (weights, value) in weights.iter().zip(values.chunks_exact(d)) {
            let value = &value[from..from + LANES];
            let weights = &weights[lane..lane + N];
            for n in 0..N {
                for i in 0..LANES {
                    sums[n][i] = madd::<FMA>(weights[n], value[i], sums[n][i]);
                }
            }
        }
        for (sums, o) in sums.iter().zip(o.chunks_exact_mut(d)) {
            o[from..from + LANES].copy_from_slice(sums);
        }
    }
}

/// A block of keys and values, [slots, d] each, whose first slot is `from`, for one group; o [queries, d].
#[inline(always)]
fn block<const FMA: bool>(
    group: &mut Group,
    from: usize,
    (keys, values): (&[f32], &[f32]),
    scores: &mut [Lanes; SLOTS],
    o: &mut [f32],
) {
    let d = group.q.len();
    let slots = keys.len() / d;
    let seen = group.limits.map(|limit| limit.saturating_sub(from).min(slots));
    let most = seen.iter().copied().max().unwrap_or(0);
    let common = seen.iter().copied().min().unwrap_or(0);
    if most == 0 {
        return;
    }
    let scores = &mut scores[..most];
    let whole = most / TOGETHER * TOGETHER;
    for (scores, keys) in scores
        .chunks_exact_mut(TOGETHER)
        .zip(keys.chunks_exact(TOGETHER * d))
    {
        scores.copy_from_slice(&score::<FMA>(&group.q, keys, d));
    }
    for (scores, key) in scores.iter_mut().zip(keys.chunks_exact(d)).skip(whole) {
        *scores = score_one::<FMA>(&group.q, key);
    }
    for (slot, scores) in scores.iter_mut().enumerate().skip(common) {
        for (score, seen) in scores.iter_mut().zip(seen) {
            if slot >= seen {
                *score = f32::NEG_INFINITY;
            }
        }
    }
    let shrink = weigh::<FMA>(scores, group);
    for (o, shrink) in o.chunks_exact_mut(d).zip(shrink) {
        if shrink != 1.0 {
            o.iter_mut().for_each(|x| *x *= shrink);
        }
    }
    for (index, o) in o.chunks_mut(TOGETHER * d).enumerate() {
        let lane = index * TOGETHER;
        let queries = o.len() / d;
        // Slots beyond a query are never multiplied, not even by nothing: they may hold anything.
        let seen = &seen[lane..lane + queries];
        let common = if queries == TOGETHER {
            let common = seen.iter().copied().min().unwrap_or(0);
            gather::<FMA, TOGETHER>(&scores[..common], lane, values, d, o);
            common
        } else {
            0
        };
        for (n, o) in o.chunks_exact_mut(d).enumerate() {
            if seen[n] > common {
                let weights = &scores[common..seen[n]];
                gather::<FMA, 1>(weights, lane + n, &values[common * d..], d, o);
            }
        }
    }
}

#[inline(always)]
fn tile_body<const FMA: bool>(groups: &mut [Group], keys: &[f32], values: &[f32], o: &mut [f32]) {
    let d = groups.first().map_or(1, |group| group.q.len());
    let end = groups.iter().flat_map(|group| group.limits).max().unwrap_or(0);
    let mut scores = [[0f32; LANES]; SLOTS];
    o.fill(0.0);
    for from in (0..end).step_by(SLOTS) {
        let to = end.min(from + SLOTS);
        let slots = (&keys[from * d..to * d], &values[from * d..to * d]);
        for (group, o) in groups.iter_mut().zip(o.chunks_mut(LANES * d)) {
            block::<FMA>(group, from, slots, &mut scores, o);
        }
    }
    for (group, o) in groups.iter().zip(o.chunks_mut(LANES * d)) {
        for (o, total) in o.chunks_exact_mut(d).zip(group.total) {
            let inverse = 1.0 / total;
            o.iter_mut().for_each(|x| *x *= inverse);
        }
    }
}

multiversion! {
    fn tile_attend(groups: &mut [Group], keys: &[f32], values: &[f32], o: &mut [f32]) = tile_body;
}

/// Attention of a tile of queries, scaled already, [queries, d]; query i sees the first `limits[i]` slots of keys and values
/// [capacity, d], at least one. Results go to `o`, [queries, d].
pub fn attend(q: &[f32], limits: &[usize], keys: &[f32], values: &[f32], o: &mut [f32]) {
    let d = q.len() / limits.len().max(1);
    let mut groups: Vec<Group> = q
        .chunks(LANES * d)
        .zip(limits.chunks(LANES))
        .map(|(q, seen)| {
            let mut columns = vec![[0f32; LANES]; d];
            // A lane that is nobody's sees one slot, so that it computes with numbers.
            let mut limits = [1; LANES];
            for (lane, (q, seen)) in q.chunks_exact(d).zip(seen).enumerate() {
                columns
                    .iter_mut()
                    .zip(q)
                    .for_each(|(column, x)| column[lane] = *x);
                limits[lane] = *seen;
            }
            Group {
                q: columns,
                limits,
                highest: [f32::NEG_INFINITY; LANES],
                total: [0.0; LANES],
            }
        })
        .collect();
    tile_attend(&mut groups, keys, values, o);
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
