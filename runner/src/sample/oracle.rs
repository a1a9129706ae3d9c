//! The sampler once more in float64, written from its definition alone and sharing no code with it: sort everything, then filter.

use super::options::{Filter, PenaltyOptions, Shape, Window};

/// Applies penalties for a history of prompt and generated tokens.
pub(crate) fn penalise(logits: &[f64], history: &[u32], options: &PenaltyOptions) -> Vec<f64> {
    let window = match options.window {
        Window::All => history,
        Window::Last(n) => &history[history.len().saturating_sub(n)..],
    };
    let mut out = logits.to_vec();
    for (id, logit) in out.iter_mut().enumerate() {
        let count = window.iter().filter(|&&t| t as usize == id).count() as f64;
        if count > 0.0 {
            let repeat = f64::from(options.repeat);
            *logit = if *logit < 0.0 {
                *logit * repeat
            } else {
                *logit / repeat
            };
            *logit -= f64::from(options.presence) + count * f64::from(options.frequency);
        }
    }
    out
}

/// The probability of every id.
pub(crate) fn distribution(logits: &[f64], shape: &Shape) -> Vec<f64> {
    let mut ids: Vec<usize> = (0..logits.len()).collect();
    ids.sort_by(|&a, &b| logits[b].partial_cmp(&logits[a]).unwrap().then(a.cmp(&b)));
    let mut probs = vec![0.0; logits.len()];
    let &Shape::Filtered(Filter {
        top_k,
        temperature,
        top_p,
        min_p,
    }) = shape
    else {
        probs[ids[0]] = 1.0;
        return probs;
    };
    if top_k > 0 {
        ids.truncate(top_k as usize);
    }
    let weights: Vec<f64> = ids
        .iter()
        .map(|&id| ((logits[id] - logits[ids[0]]) / f64::from(temperature)).exp())
        .collect();
    let total: f64 = weights.iter().sum();
    let mut before = 0.0;
    let mut kept = Vec::new();
    for (&id, &weight) in ids.iter().zip(&weights) {
        let p = weight / total;
        if (top_p >= 1.0 || before < f64::from(top_p)) && weight >= f64::from(min_p) * weights[0] {
            kept.push((id, weight));
        }
        before += p;
    }
    let total: f64 = kept.iter().map(|k| k.1).sum();
    for (id, weight) in kept {
        probs[id] = weight / total;
    }
    probs
}

/// The natural logarithm of the full softmax.
pub(crate) fn log_softmax(logits: &[f64]) -> Vec<f64> {
    let top = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let norm = top + logits.iter().map(|l| (l - top).exp()).sum::<f64>().ln();
    logits.iter().map(|l| l - norm).collect()
}

/// Fails unless `counts` look like draws from `probs`.
///
/// Cells expected fewer than 5 times are pooled; an id of probability 0 must not occur. The bound is 5 standard deviations above
/// chi-square's mean plus a constant for few degrees of freedom: chance exceeds it less than once in 100,000 tests.
pub(crate) fn assert_draws(name: &str, counts: &[u64], probs: &[f64]) {
    let draws = counts.iter().sum::<u64>() as f64;
    let (mut chi, mut cells) = (0.0, 0.0);
    let (mut pooled_count, mut pooled_expected) = (0.0, 0.0);
    for (id, (&count, &p)) in counts.iter().zip(probs).enumerate() {
        assert!(
            p > 0.0 || count == 0,
            "{name}: id {id} of probability 0 was drawn {count} times"
        );
        let expected = p * draws;
        if expected < 5.0 {
            pooled_count += count as f64;
            pooled_expected += expected;
        } else {
            chi += (count as f64 - expected).powi(2) / expected;
            cells += 1.0;
        }
    }
    if pooled_expected >= 1.0 {
        chi += (pooled_count - pooled_expected).powi(2) / pooled_expected;
        cells += 1.0;
    }
    let freedom: f64 = cells - 1.0;
    let bound = freedom + 5.0 * (2.0 * freedom).sqrt() + 15.0;
    assert!(
        chi <= bound,
        "{name}: chi-square {chi:.1} over {bound:.1} at {freedom} degrees of freedom"
    );
}

/// Logits of a plausible row: few high, a long tail, no equal ones. Reproducible, and unlike the sampler's own randomness.
pub(crate) fn logits(seed: u64, len: usize, spread: f64) -> Vec<f32> {
    let mut state = seed
        .wrapping_mul(6364136223846793005)
        .wrapping_add(1442695040888963407);
    let mut next = || {
        state = state
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        (state >> 33) as f64 / f64::from(1u32 << 31)
    };
    (0..len)
        .map(|_| ((0..6).map(|_| next()).sum::<f64>() - 3.0) as f32 * spread as f32)
        .collect()
}

/// The same numbers in float64.
pub(crate) fn wide(values: &[f32]) -> Vec<f64> {
    values.iter().map(|&v| f64::from(v)).collect()
}
