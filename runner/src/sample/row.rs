//! One row of logits to a distribution and a draw from it, on the host's cores, in float32 over what is kept.
//!
//! Invariant: the order of candidates is falling logit, equal logits by rising id, exactly; what top-k, top-p and min-p keep
//! follows from that order alone. A row whose largest logit isn't finite, or that holds a NaN, yields no probabilities at all.
//!
//! This is the whole sampler in plain loops: the CPU backend runs it as one operation (`fused`), and the graph for
//! GPUs (`graph`) computes the same in tensor operations.

use std::cmp::Ordering;

use super::options::Filter;
use super::rng::{RowKey, UNIT};

/// A token with its logit, and its probability later on.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Candidate {
    /// Logit, then weight.
    pub value: f32,
    /// Token id.
    pub id: u32,
}

fn order(a: &Candidate, b: &Candidate) -> Ordering {
    // Values are never NaN here, and zeros of either sign are equal.
    b.value
        .partial_cmp(&a.value)
        .unwrap_or(Ordering::Equal)
        .then(a.id.cmp(&b.id))
}

/// The largest value, or NaN where the row holds one.
pub fn peak(row: &[f32]) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; 16];
    let mut broken = [false; 16];
    let chunks = row.chunks_exact(16);
    let rest = chunks.remainder();
    for chunk in chunks {
        for lane in 0..16 {
            lanes[lane] = if chunk[lane] > lanes[lane] {
                chunk[lane]
            } else {
                lanes[lane]
            };
            broken[lane] |= chunk[lane].is_nan();
        }
    }
    if broken.contains(&true) || rest.iter().any(|v| v.is_nan()) {
        return f32::NAN;
    }
    lanes
        .iter()
        .chain(rest)
        .copied()
        .fold(f32::NEG_INFINITY, f32::max)
}

/// The id of the first value equal to `peak`; 0 where none is.
pub fn first_of(row: &[f32], peak: f32) -> u32 {
    row.iter().position(|&v| v == peak).unwrap_or(0) as u32
}

/// The `k` best candidates of a row without NaN, in order; fewer where fewer are above -inf.
pub fn best(row: &[f32], k: usize, out: &mut Vec<Candidate>) {
    out.clear();
    let capacity = 2 * k + 16;
    out.reserve(capacity);
    // Later ids lose a tie, so once k are held only a larger value can enter.
    let mut threshold = f32::NEG_INFINITY;
    for (block, values) in row.chunks(32).enumerate() {
        if !values.iter().fold(false, |any, &v| any | (v > threshold)) {
            continue;
        }
        for (lane, &value) in values.iter().enumerate() {
            if value > threshold {
                out.push(Candidate {
                    value,
                    id: (block * 32 + lane) as u32,
                });
            }
        }
        if out.len() + 32 > capacity.max(64) && out.len() > k {
            out.select_nth_unstable_by(k - 1, order);
            out.truncate(k);
            threshold = out[k - 1].value;
        }
    }
    if out.len() > k {
        out.select_nth_unstable_by(k - 1, order);
        out.truncate(k);
    }
    out.sort_unstable_by(order);
}

/// How many of the sorted candidates top-p keeps, at least one; `total` is the mass of all.
fn nucleus(sorted: &[Candidate], total: f64, top_p: f32) -> usize {
    let limit = f64::from(top_p) * total;
    let mut before = 0.0;
    sorted
        .iter()
        .position(|c| {
            let out = before >= limit;
            before += f64::from(c.value);
            out
        })
        .unwrap_or(sorted.len())
        .max(1)
}

/// Turns the best candidates' logits into probabilities and drops what top-p and min-p drop.
///
/// `candidates` come sorted from [`best`] and are not empty; the first one's logit is finite.
pub fn filter_sparse(candidates: &mut Vec<Candidate>, filter: &Filter) {
    let total = weigh(candidates, filter.temperature);
    if filter.top_p < 1.0 {
        let kept = nucleus(candidates, total, filter.top_p);
        candidates.truncate(kept);
    }
    truncate_and_normalise(candidates, filter.min_p);
}

/// Logits to weights relative to the first, which gets 1; returns their sum.
fn weigh(candidates: &mut [Candidate], temperature: f32) -> f64 {
    let top = candidates[0].value;
    let inverse = 1.0 / temperature;
    let mut total = 0.0;
    for candidate in candidates {
        candidate.value = ((candidate.value - top) * inverse).exp();
        total += f64::from(candidate.value);
    }
    total
}

fn truncate_and_normalise(candidates: &mut Vec<Candidate>, min_p: f32) {
    if min_p > 0.0 {
        let kept = candidates
            .iter()
            .position(|c| c.value < min_p)
            .unwrap_or(candidates.len())
            .max(1);
        candidates.truncate(kept);
    }
    let total: f64 = candidates.iter().map(|c| f64::from(c.value)).sum();
    let scale = 1.0 / total;
    for candidate in candidates {
        candidate.value = (f64::from(candidate.value) * scale) as f32;
    }
}

/// The distribution over the whole vocabulary, for top-k off or too wide to be worth a list: `probs` has the row's length.
///
/// The row's largest value `top` is finite.
pub fn filter_dense(row: &[f32], top: f32, filter: &Filter, probs: &mut [f32], scratch: &mut Vec<Candidate>) {
    let k = if filter.top_k == 0 {
        row.len()
    } else {
        row.len().min(filter.top_k as usize)
    };
    if k == row.len() && filter.top_p >= 1.0 {
        let inverse = 1.0 / filter.temperature;
        let mut total = 0.0;
        for (prob, &logit) in probs.iter_mut().zip(row) {
            let weight = ((logit - top) * inverse).exp();
            *prob = if weight < filter.min_p { 0.0 } else { weight };
            total += f64::from(*prob);
        }
        let scale = (1.0 / total) as f32;
        probs.iter_mut().for_each(|prob| *prob *= scale);
        return;
    }
    if k == row.len() {
        nucleus_of_all(row, top, filter, scratch);
    } else {
        best(row, k, scratch);
        filter_sparse(scratch, filter);
    }
    probs.fill(0.0);
    for candidate in scratch.iter() {
        probs[candidate.id as usize] = candidate.value;
    }
}

/// Top-p over a whole vocabulary without sorting it all: ever longer heads until one holds the mass.
fn nucleus_of_all(row: &[f32], top: f32, filter: &Filter, kept: &mut Vec<Candidate>) {
    let inverse = 1.0 / filter.temperature;
    let total: f64 = row
        .iter()
        .map(|&logit| f64::from(((logit - top) * inverse).exp()))
        .sum();
    let mut k = 128;
    loop {
        best(row, k.min(row.len()), kept);
        let whole = kept.len() < k;
        weigh(kept, filter.temperature);
        let n = nucleus(kept, total, filter.top_p);
        if n < kept.len() || whole {
            kept.truncate(n);
            break;
        }
        k *= 8;
    }
    truncate_and_normalise(kept, filter.min_p);
}

/// The logarithm of the sum of exponentials.
pub fn log_sum_exp(row: &[f32]) -> f64 {
    let top = peak(row);
    if !top.is_finite() {
        return f64::from(top);
    }
    let sum: f64 = row.iter().map(|&logit| f64::from((logit - top).exp())).sum();
    f64::from(top) + sum.ln()
}

/// The token that wins the exponential race: smallest exponential/probability, a draw from the distribution.
///
/// Keyed by token id, so the winner depends neither on the order nor on the number of candidates. Weights need no common scale.
pub fn race(weights: impl Iterator<Item = Candidate>, key: RowKey) -> Option<u32> {
    let mut winner = None;
    let mut speed = 0.0;
    for Candidate { value, id } in weights {
        if value <= 0.0 {
            continue;
        }
        let weight = f64::from(value);
        let unit = (f64::from(key.word(id)) + 0.5) * f64::from(UNIT);
        // The exponential is never below `unit`, so most candidates are out without a logarithm.
        if weight <= speed * unit {
            continue;
        }
        let candidate = weight / key.exponential(id);
        if candidate > speed {
            speed = candidate;
            winner = Some(id);
        }
    }
    winner
}

/// The token at which the running sum of weights passes `u` times their total; `u` in [0, 1).
pub fn inverse(weights: impl Iterator<Item = Candidate> + Clone, u: f32) -> Option<u32> {
    let total: f64 = weights.clone().map(|c| f64::from(c.value)).sum();
    let target = f64::from(u) * total;
    let mut sum = 0.0;
    let mut last = None;
    for Candidate { value, id } in weights {
        if value <= 0.0 {
            continue;
        }
        sum += f64::from(value);
        last = Some(id);
        if sum > target {
            break;
        }
    }
    last
}

#[cfg(test)]
#[path = "row_tests.rs"]
mod tests;
