//! The CPU backend's sampler: rows of logits to distributions and draws in one node, acceptance in a second.
//!
//! Invariant: a row's result depends on that row, its key and its history alone, never on how many rows are computed with it.

use mlx_rs::error::Result;
use mlx_rs::{Array, Dtype};

use super::dist::{Dist, Draws, Plan, RowHistory, Rows, LONGEST_LIST};
use super::logprobs::pick_rows;
use super::options::{Filter, PenaltyOptions, Shape};
use super::rng::RowKey;
use super::row::{self, Candidate};
use crate::mlx::cpu::kernel::{cpu_op, Inputs, Output, Outputs};
use crate::mlx::ops::cast;

/// Where a kernel finds what changes its logits.
struct Adjust {
    ceiling: Option<usize>,
    counts: Option<usize>,
    history: Option<RowHistoryView>,
}

/// The part of [`RowHistory`] that a kernel needs, drafts by input index.
struct RowHistoryView {
    options: PenaltyOptions,
    drafts: std::ops::Range<usize>,
    /// For each row: drafts that come in, tokens that go.
    changes: Vec<(std::ops::Range<usize>, Vec<u32>)>,
}

fn view(history: &RowHistory, rows: usize, first_draft: usize) -> RowHistoryView {
    let changes = (0..rows)
        .map(|r| history.change(r))
        .map(|(come, go)| (come, go.to_vec()))
        .collect();
    RowHistoryView {
        options: history.options,
        drafts: first_draft..first_draft + history.drafts.len(),
        changes,
    }
}

fn penalised(logit: f32, count: f32, options: &PenaltyOptions) -> f32 {
    let scaled = if logit < 0.0 {
        logit * options.repeat
    } else {
        logit / options.repeat
    };
    let changed = scaled - (options.presence + count * options.frequency);
    if count > 0.0 {
        changed
    } else {
        logit
    }
}

impl Adjust {
    /// Row `r` as the filters see it; `scratch` holds it where it differs from the model's.
    fn row<'a>(&self, inputs: &'a Inputs, r: usize, width: usize, scratch: &'a mut Vec<f32>) -> &'a [f32] {
        let logits = &inputs.floats(0)[r * width..][..width];
        if self.ceiling.is_none() && self.counts.is_none() {
            return logits;
        }
        scratch.clear();
        match (self.counts, &self.history) {
            (Some(counts), Some(history)) => {
                let counts = inputs.floats(counts);
                scratch.extend(
                    logits
                        .iter()
                        .zip(counts)
                        .map(|(&l, &n)| penalised(l, n, &history.options)),
                );
                patch(scratch, logits, counts, inputs, history, r);
            }
            _ => scratch.extend_from_slice(logits),
        }
        if let Some(ceiling) = self.ceiling {
            let ceiling = inputs.floats(ceiling);
            let ceiling = if ceiling.len() == width {
                ceiling
            } else {
                &ceiling[r * width..][..width]
            };
            scratch
                .iter_mut()
                .zip(ceiling)
                .for_each(|(logit, limit)| *logit += limit);
        }
        scratch
    }
}

/// Redoes the few ids whose count differs between this row and the window.
fn patch(
    row: &mut [f32],
    logits: &[f32],
    counts: &[f32],
    inputs: &Inputs,
    history: &RowHistoryView,
    r: usize,
) {
    let (come, go) = &history.changes[r];
    let drafts = history
        .drafts
        .clone()
        .flat_map(|index| inputs.ints(index))
        .map(|&id| id as usize);
    let come = drafts.skip(come.start).take(come.len()).map(|id| (id, 1.0f32));
    let go = go.iter().map(|&id| (id as usize, -1.0f32));
    let changes: Vec<(usize, f32)> = come.chain(go).filter(|&(id, _)| id < row.len()).collect();
    for &(id, _) in &changes {
        let change: f32 = changes.iter().filter(|c| c.0 == id).map(|c| c.1).sum();
        row[id] = penalised(logits[id], counts[id] + change, &history.options);
    }
}

/// See [`Plan`].
pub(super) fn rows(plan: &Plan<'_>) -> Result<Rows> {
    let logits = cast(plan.logits, Dtype::Float32)?;
    let (rows, width) = (logits.dim(0), logits.dim(1));
    let mut inputs = vec![&logits];
    let mut add = |array| {
        inputs.push(array);
        inputs.len() - 1
    };
    let ceiling = plan.ceiling.map(&mut add);
    let counts = plan.history.as_ref().map(|history| add(&history.counts));
    let history = plan.history.as_ref().map(|history| {
        let first = inputs.len();
        inputs.extend(&history.drafts);
        view(history, rows as usize, first)
    });
    let adjust = Adjust {
        ceiling,
        counts,
        history,
    };
    match plan.shape {
        Shape::Greedy => greedy(&inputs, adjust, rows, width),
        Shape::Filtered(filter) if filter.top_k > 0 && filter.top_k.min(width as u32) <= LONGEST_LIST => {
            list(&inputs, adjust, rows, width, filter, plan.draws)
        }
        Shape::Filtered(filter) => whole(&inputs, adjust, rows, width, filter, plan.draws),
    }
}

fn greedy(inputs: &[&Array], adjust: Adjust, rows: i32, width: i32) -> Result<Rows> {
    let outputs = [Output::Ints(vec![rows]), Output::Floats(vec![rows])];
    let [choice, peak] = cpu_op(c"sample_greedy", inputs, outputs, move |inputs, mut outputs| {
        let (choice, peaks) = (outputs.ints(), outputs.floats());
        let mut scratch = Vec::new();
        for r in 0..rows as usize {
            let row = adjust.row(inputs, r, width as usize, &mut scratch);
            peaks[r] = row::peak(row);
            choice[r] = row::first_of(row, peaks[r]) as i32;
        }
    })?;
    Ok(Rows {
        dist: Dist::Point(choice.clone()),
        choice,
        peak,
    })
}

/// The randomness of one row's draw.
enum Key {
    Race(RowKey),
    Inverse(f32),
}

fn keys(draws: &Draws, rows: usize, whole: bool) -> Vec<Key> {
    if draws.race || whole {
        draws.keys(rows).into_iter().map(Key::Race).collect()
    } else {
        draws.shares(rows).into_iter().map(Key::Inverse).collect()
    }
}

fn draw(key: &Key, weights: impl Iterator<Item = Candidate> + Clone) -> i32 {
    let id = match *key {
        Key::Race(key) => row::race(weights, key),
        Key::Inverse(share) => row::inverse(weights, share),
    };
    // Without any weight the row's peak says that it can't be used.
    id.unwrap_or(0) as i32
}

fn list(
    inputs: &[&Array],
    adjust: Adjust,
    rows: i32,
    width: i32,
    filter: Filter,
    draws: Draws,
) -> Result<Rows> {
    let k = (filter.top_k as i32).min(width);
    let outputs = [
        Output::Ints(vec![rows, k]),
        Output::Floats(vec![rows, k]),
        Output::Ints(vec![rows]),
        Output::Floats(vec![rows]),
    ];
    let k = k as usize;
    let keys = keys(&draws, rows as usize, false);
    let [ids, probs, choice, peak] = cpu_op(c"sample_list", inputs, outputs, move |inputs, mut outputs| {
        let (ids, probs) = (outputs.ints(), outputs.floats());
        let (choice, peaks) = (outputs.ints(), outputs.floats());
        let (mut scratch, mut kept) = (Vec::new(), Vec::new());
        ids.fill(0);
        probs.fill(0.0);
        for r in 0..rows as usize {
            let row = adjust.row(inputs, r, width as usize, &mut scratch);
            peaks[r] = row::peak(row);
            kept.clear();
            if peaks[r].is_finite() {
                row::best(row, k, &mut kept);
                row::filter_sparse(&mut kept, &filter);
            }
            for (at, candidate) in kept.iter().enumerate() {
                ids[r * k + at] = candidate.id as i32;
                probs[r * k + at] = candidate.value;
            }
            choice[r] = draw(&keys[r], kept.iter().copied());
        }
    })?;
    Ok(Rows {
        dist: Dist::List { ids, probs },
        choice,
        peak,
    })
}

fn whole(
    inputs: &[&Array],
    adjust: Adjust,
    rows: i32,
    width: i32,
    filter: Filter,
    draws: Draws,
) -> Result<Rows> {
    let outputs = [
        Output::Floats(vec![rows, width]),
        Output::Ints(vec![rows]),
        Output::Floats(vec![rows]),
    ];
    let keys = keys(&draws, rows as usize, true);
    let [probs, choice, peak] = cpu_op(c"sample_whole", inputs, outputs, move |inputs, mut outputs| {
        let width = width as usize;
        let (probs, choice, peaks) = (outputs.floats(), outputs.ints(), outputs.floats());
        let (mut scratch, mut kept) = (Vec::new(), Vec::new());
        for (r, probs) in probs.chunks_exact_mut(width).enumerate() {
            let row = adjust.row(inputs, r, width, &mut scratch);
            peaks[r] = row::peak(row);
            if peaks[r].is_finite() {
                row::filter_dense(row, peaks[r], &filter, probs, &mut kept);
            } else {
                probs.fill(0.0);
            }
            choice[r] = draw(&keys[r], columns(probs));
        }
    })?;
    Ok(Rows {
        dist: Dist::Whole(probs),
        choice,
        peak,
    })
}

fn columns(probs: &[f32]) -> impl Iterator<Item = Candidate> + Clone + '_ {
    probs.iter().zip(0..).map(|(&value, id)| Candidate { value, id })
}

/// The rejection rule over k tested drafts; see [`super::accept`].
///
/// `p` has at least k rows, `q` and `drafts` k rows together. Returns acceptance [k] (1 or 0) and replacements [k].
pub(super) fn reject(
    p: &Dist,
    q: &[&Dist],
    drafts: &[&Array],
    tests: &Draws,
    replacements: &Draws,
) -> Result<(Array, Array)> {
    let k = drafts.iter().map(|d| d.size()).sum::<usize>();
    let tests = tests.shares(k);
    let mut inputs = Vec::new();
    let mut add = |dist: &'_ Dist| match dist {
        Dist::List { ids, probs } => inputs.extend([ids.clone(), probs.clone()]),
        Dist::Point(only) | Dist::Whole(only) => inputs.push(only.clone()),
    };
    add(p);
    let stride = inputs_per(p);
    q.iter().for_each(|q| add(q));
    inputs.extend(drafts.iter().map(|&d| d.clone()));
    let groups: Vec<usize> = drafts.iter().map(|d| d.size()).collect();
    let lists = stride == 2;
    let replacements = keys(replacements, k, !lists);
    let width = match p {
        Dist::List { probs, .. } | Dist::Whole(probs) => probs.dim(1) as usize,
        Dist::Point(_) => 1,
    };
    let inputs: Vec<&Array> = inputs.iter().collect();
    let outputs = [Output::Ints(vec![k as i32]), Output::Ints(vec![k as i32])];
    let [accepted, instead] = cpu_op(c"accept_reject", &inputs, outputs, move |inputs, mut outputs| {
        let (accepted, instead) = (outputs.ints(), outputs.ints());
        let mut row = 0;
        for (group, &size) in groups.iter().enumerate() {
            let drafts = inputs.ints(stride * (1 + groups.len()) + group);
            for (at, &draft) in drafts.iter().enumerate().take(size) {
                let p = Side::new(inputs, 0, lists, width, row);
                let q = Side::new(inputs, stride * (1 + group), lists, width, at);
                let draft = draft as u32;
                accepted[row] = i32::from(tests[row] * q.of(draft) < p.of(draft));
                instead[row] = residual(&p, &q, &replacements[row]);
                row += 1;
            }
        }
    })?;
    Ok((accepted, instead))
}

pub(super) fn inputs_per(dist: &Dist) -> usize {
    match dist {
        Dist::List { .. } => 2,
        Dist::Point(_) | Dist::Whole(_) => 1,
    }
}

/// One row of a distribution inside a kernel.
struct Side<'a> {
    ids: Option<&'a [i32]>,
    probs: &'a [f32],
}

impl<'a> Side<'a> {
    fn new(inputs: &'a Inputs, first: usize, lists: bool, width: usize, row: usize) -> Self {
        if lists {
            Self {
                ids: Some(&inputs.ints(first)[row * width..][..width]),
                probs: &inputs.floats(first + 1)[row * width..][..width],
            }
        } else {
            Self {
                ids: None,
                probs: &inputs.floats(first)[row * width..][..width],
            }
        }
    }

    fn of(&self, id: u32) -> f32 {
        match self.ids {
            None => self.probs.get(id as usize).copied().unwrap_or(0.0),
            // Unused places repeat an id with probability 0.
            Some(ids) => ids
                .iter()
                .zip(self.probs)
                .filter(|(&other, _)| other as u32 == id)
                .map(|(_, p)| p)
                .sum(),
        }
    }
}

/// A draw from what p has above q; the likeliest token where rounding leaves nothing.
fn residual(p: &Side<'_>, q: &Side<'_>, key: &Key) -> i32 {
    let above = |(id, &value): (u32, &f32)| Candidate {
        value: value - q.of(id),
        id,
    };
    let weights: Vec<Candidate> = match p.ids {
        None => (0..).zip(p.probs).filter(|(_, &p)| p > 0.0).map(above).collect(),
        Some(ids) => ids
            .iter()
            .map(|&id| id as u32)
            .zip(p.probs)
            .filter(|(_, &p)| p > 0.0)
            .map(above)
            .collect(),
    };
    let rest = weights.iter().copied().filter(|c| c.value > 0.0);
    if rest.clone().next().is_some() {
        draw(key, rest)
    } else {
        weights.first().map_or(0, |c| c.id as i32)
    }
}

/// Counts tokens in and out of the window: `counts` [V], `come` and `go` int32 arrays of ids inside the vocabulary.
pub(super) fn count(counts: &Array, come: Option<&Array>, go: &[&Array]) -> Result<Array> {
    let inputs: Vec<&Array> = std::iter::once(counts)
        .chain(come)
        .chain(go.iter().copied())
        .collect();
    let (first_go, total) = (1 + usize::from(come.is_some()), inputs.len());
    let outputs = [Output::Updated {
        input: 0,
        shape: counts.shape().to_vec(),
    }];
    let [counts] = cpu_op(
        c"count_tokens",
        &inputs,
        outputs,
        move |inputs: &Inputs, mut outputs: Outputs| {
            let counts = outputs.floats();
            for index in 1..total {
                let change = if index < first_go { 1.0 } else { -1.0 };
                for &id in inputs.ints(index) {
                    if let Some(count) = counts.get_mut(id as usize) {
                        *count += change;
                    }
                }
            }
        },
    )?;
    Ok(counts)
}

/// See [`super::logprobs::Logprobs`]: logprobs of the picks, and ids and logprobs of the `top` best of each row.
pub(super) fn logprobs(
    logits: &Array,
    ceiling: Option<&Array>,
    picks: &[(usize, &Array)],
    top: usize,
) -> Result<(Array, Option<(Array, Array)>)> {
    let logits = cast(logits, Dtype::Float32)?;
    let (rows, width) = (logits.dim(0), logits.dim(1));
    let places = pick_rows(picks);
    // An operation needs outputs that aren't empty.
    let n = top.max(1);
    let mut inputs = vec![&logits];
    inputs.extend(picks.iter().map(|(_, ids)| *ids));
    let adjust = Adjust {
        ceiling: ceiling.map(|_| inputs.len()),
        counts: None,
        history: None,
    };
    inputs.extend(ceiling);
    let outputs = [
        Output::Floats(vec![places.len() as i32]),
        Output::Ints(vec![rows, n as i32]),
        Output::Floats(vec![rows, n as i32]),
    ];
    let arrays = picks.len();
    let [picked, ids, best] = cpu_op(c"logprobs", &inputs, outputs, move |inputs, mut outputs| {
        let (picked, ids, best) = (outputs.floats(), outputs.ints(), outputs.floats());
        let width = width as usize;
        let norms: Vec<f64> = inputs
            .floats(0)
            .chunks_exact(width)
            .map(row::log_sum_exp)
            .collect();
        let logprob = |row: usize, id: usize| {
            let logit = inputs.floats(0)[row * width..][..width].get(id);
            logit.map_or(f32::NEG_INFINITY, |&logit| (f64::from(logit) - norms[row]) as f32)
        };
        let tokens = (1..=arrays).flat_map(|index| inputs.ints(index));
        for ((picked, &row), &id) in picked.iter_mut().zip(&places).zip(tokens) {
            *picked = logprob(row as usize, id as usize);
        }
        ids.fill(0);
        best.fill(f32::NEG_INFINITY);
        if top == 0 {
            return;
        }
        let (mut scratch, mut kept) = (Vec::new(), Vec::new());
        for r in 0..rows as usize {
            let row = adjust.row(inputs, r, width, &mut scratch);
            if row::peak(row).is_finite() {
                row::best(row, top, &mut kept);
                for (at, candidate) in kept.iter().enumerate() {
                    ids[r * n + at] = candidate.id as i32;
                    best[r * n + at] = logprob(r, candidate.id as usize);
                }
            }
        }
    })?;
    Ok((picked, (top > 0).then_some((ids, best))))
}
