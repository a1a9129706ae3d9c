//! The sampler as tensor operations, for any MLX device.
//!
//! Invariant: nothing is read on the host, and the order of candidates is falling logit, equal logits by rising id, exactly:
//! every sort is stable and sorts values whose columns are in rising order of id.

use mlx_rs::error::{Exception, Result};
use mlx_rs::ops::indexing::{argmax_axis, put_along_axis, scatter_add_single, take_along_axis};
use mlx_rs::ops::{
    argsort_axis, broadcast_to, concatenate, cumsum, expand_dims, logsumexp_axis, max_axis, maximum, minimum,
    pad, softmax_axis, sort_axis, sum_axis, zeros_dtype,
};
use mlx_rs::{Array, Dtype};

use super::dist::{Dist, Draws, Plan, RowHistory, Rows, LONGEST_LIST};
use super::logprobs::pick_rows;
use super::noise;
use super::options::{Filter, PenaltyOptions, Shape};
use crate::mlx::ops::{cast, slice_axis};

/// See [`Plan`].
pub(super) fn rows(plan: &Plan<'_>) -> Result<Rows> {
    let mut logits = plan.logits.clone();
    if let Some(history) = &plan.history {
        logits = penalised(&cast(&logits, Dtype::Float32)?, history)?;
    }
    if let Some(ceiling) = plan.ceiling {
        logits = logits.add(ceiling)?;
    }
    let width = logits.dim(1);
    match plan.shape {
        Shape::Greedy => {
            let choice = cast(&argmax_axis(&logits, -1, false)?, Dtype::Int32)?;
            let peak = cast(&max_axis(&logits, -1, false)?, Dtype::Float32)?;
            Ok(Rows {
                dist: Dist::Point(choice.clone()),
                choice,
                peak,
            })
        }
        Shape::Filtered(filter) if filter.top_k == 0 && filter.top_p >= 1.0 => {
            untruncated(&logits, &filter, &plan.draws)
        }
        Shape::Filtered(filter) => {
            let k = if filter.top_k == 0 {
                width
            } else {
                width.min(filter.top_k.min(i32::MAX as u32) as i32)
            };
            truncated(&logits, k, &filter, &plan.draws)
        }
    }
}

/// [1, V] ids of the columns, uint32.
fn columns(width: i32) -> Result<Array> {
    Array::arange::<u32, u32>(0, width as u32, 1)?.reshape(&[1, width])
}

fn softmax(logits: &Array, temperature: f32) -> Result<Array> {
    let logits = cast(logits, Dtype::Float32)?;
    let scaled = if temperature == 1.0 {
        logits
    } else {
        logits.multiply(Array::from_f32(1.0 / temperature))?
    };
    softmax_axis(scaled, -1, true)
}

fn normalised(weights: &Array) -> Result<Array> {
    weights.divide(sum_axis(weights, -1, true)?)
}

/// Neither top-k nor top-p: no order is needed.
fn untruncated(logits: &Array, filter: &Filter, draws: &Draws) -> Result<Rows> {
    let peak = max_axis(logits, -1, true)?;
    // Taking the peak away first keeps the coldest temperatures from overflowing.
    let probs = softmax(
        &cast(logits, Dtype::Float32)?.subtract(&peak)?,
        filter.temperature,
    )?;
    let probs = if filter.min_p > 0.0 {
        let least = max_axis(&probs, -1, true)?.multiply(Array::from_f32(filter.min_p))?;
        normalised(&probs.multiply(probs.ge(&least)?)?)?
    } else {
        probs
    };
    let width = logits.dim(1);
    let column = draw(&probs, &columns(width)?, draws, true)?;
    Ok(Rows {
        choice: cast(&column, Dtype::Int32)?.reshape(&[-1])?,
        dist: Dist::Whole(probs),
        peak: cast(&peak, Dtype::Float32)?.reshape(&[-1])?,
    })
}

fn truncated(logits: &Array, k: i32, filter: &Filter, draws: &Draws) -> Result<Rows> {
    let (ids, values, peak) = best(logits, k)?;
    let top = slice_axis(&values, 1, 0, 1)?;
    let probs = softmax(&values.subtract(&top)?, filter.temperature)?;
    let mut keep = None;
    if filter.top_p < 1.0 {
        keep = Some(cumsum(&probs, -1, false, false)?.lt(Array::from_f32(filter.top_p))?);
    }
    if filter.min_p > 0.0 {
        let least = slice_axis(&probs, 1, 0, 1)?.multiply(Array::from_f32(filter.min_p))?;
        let likely = probs.ge(&least)?;
        keep = Some(match keep {
            Some(keep) => keep.logical_and(&likely)?,
            None => likely,
        });
    }
    let (weights, probs) = match keep {
        None => (probs.clone(), probs),
        Some(keep) => {
            let weights = probs.multiply(&keep)?;
            (weights.clone(), normalised(&weights)?)
        }
    };
    let list = k as u32 <= LONGEST_LIST;
    let column = draw(&weights, &ids, draws, !list)?;
    let choice = cast(&take_along_axis(&ids, &column, -1)?, Dtype::Int32)?.reshape(&[-1])?;
    let dist = if list {
        Dist::List {
            ids: cast(&ids, Dtype::Int32)?,
            probs,
        }
    } else {
        let none = zeros_dtype(logits.shape(), Dtype::Float32)?;
        Dist::Whole(put_along_axis(none, &ids, &probs, -1)?)
    };
    Ok(Rows { dist, choice, peak })
}

/// Column [R, 1] of a draw from weights [R, K]; `ids` [R, K] or [1, K].
fn draw(weights: &Array, ids: &Array, draws: &Draws, whole: bool) -> Result<Array> {
    let rows = weights.dim(0) as usize;
    if draws.race || whole {
        noise::race(weights, ids, &draws.keys(rows))
    } else {
        noise::inverse(weights, &draws.shares(rows))
    }
}

/// Length of the blocks that [`best`] looks at first; none where sorting everything is as good.
fn block_length(width: i32, k: i32) -> Option<i32> {
    // Sorts run over width / b maxima and then over k * b candidates; their sum is least at the square root.
    let ideal = (f64::from(width) / f64::from(k)).sqrt();
    let b = 1 << (ideal.log2().round().clamp(0.0, 12.0) as i32);
    (b > 1 && width / b + k * b <= width / 2).then_some(b)
}

/// The k largest logits of each row in order: ids (uint32) and values [R, k], and the row's peak [R].
///
/// The k best tokens lie in the k blocks with the largest maxima, equal maxima by rising block: were one of them in another
/// block, k blocks would each hold a better token. So two short sorts replace one over the vocabulary.
fn best(logits: &Array, k: i32) -> Result<(Array, Array, Array)> {
    let (rows, width) = (logits.dim(0), logits.dim(1));
    let Some(b) = block_length(width, k) else {
        let peak = cast(&max_axis(logits, -1, false)?, Dtype::Float32)?;
        let ids = slice_axis(&argsort_axis(logits.negative()?, -1)?, 1, 0, k)?;
        let values = cast(&take_along_axis(logits, &ids, -1)?, Dtype::Float32)?;
        return Ok((ids, values, peak));
    };
    let missing = (b - width % b) % b;
    let padded;
    let logits = if missing == 0 {
        logits
    } else {
        let none = cast(&Array::from_f32(f32::NEG_INFINITY), logits.dtype())?;
        padded = pad(logits, &[(0, 0), (0, missing)], none, None)?;
        &padded
    };
    let blocks = logits.reshape(&[rows, -1, b])?;
    let maxima = max_axis(&blocks, -1, false)?;
    let peak = cast(&max_axis(&maxima, -1, false)?, Dtype::Float32)?;
    let chosen = slice_axis(&argsort_axis(maxima.negative()?, -1)?, 1, 0, k)?;
    let chosen = expand_dims(sort_axis(&chosen, -1)?, 2)?;
    let values = take_along_axis(&blocks, &chosen, 1)?.reshape(&[rows, -1])?;
    let lanes = Array::arange::<u32, u32>(0, b as u32, 1)?;
    let ids = chosen
        .multiply(Array::from_slice(&[b as u32], &[]))?
        .add(lanes)?
        .reshape(&[rows, -1])?;
    let order = slice_axis(&argsort_axis(values.negative()?, -1)?, 1, 0, k)?;
    let values = cast(&take_along_axis(&values, &order, -1)?, Dtype::Float32)?;
    Ok((take_along_axis(&ids, &order, -1)?, values, peak))
}

/// Counts [R, V] (or [1, V] where rows see the same) of each row's history.
fn counts(history: &RowHistory, rows: i32) -> Result<Array> {
    let width = history.counts.dim(0);
    let (mut from, mut from_base) = (Vec::new(), Vec::new());
    let mut gone = Vec::new();
    for r in 0..rows {
        let (come, go) = history.change(r as usize);
        from_base.extend(come.clone().map(|_| r * width));
        from.extend(come.map(|draft| draft as i32));
        gone.extend(
            go.iter()
                .filter(|&&id| id < width as u32)
                .map(|&id| id as i32 + r * width),
        );
    }
    if from.is_empty() && gone.is_empty() {
        return history.counts.reshape(&[1, width]);
    }
    let mut places = Vec::new();
    let mut changes = vec![1.0f32; from.len()];
    if !from.is_empty() {
        let drafts = joined(&history.drafts)?;
        let drafts = drafts.take_axis(Array::from_slice(&from, &[from.len() as i32]), 0)?;
        places.push(drafts.add(Array::from_slice(&from_base, &[from_base.len() as i32]))?);
    }
    if !gone.is_empty() {
        changes.extend(vec![-1.0f32; gone.len()]);
        places.push(Array::from_slice(&gone, &[gone.len() as i32]));
    }
    let start = broadcast_to(&history.counts, &[rows, width])?.reshape(&[-1])?;
    let changes = Array::from_slice(&changes, &[changes.len() as i32, 1]);
    scatter_add_single(start, joined(&places)?, changes, 0)?.reshape(&[rows, width])
}

fn joined(parts: &[Array]) -> Result<Array> {
    match parts {
        [only] => Ok(only.clone()),
        parts => concatenate(parts, 0),
    }
}

/// Logits [R, V] (float32) after penalties; see [`PenaltyOptions`].
fn penalised(logits: &Array, history: &RowHistory) -> Result<Array> {
    let PenaltyOptions {
        repeat,
        presence,
        frequency,
        ..
    } = history.options;
    let counts = counts(history, logits.dim(0))?;
    let mut out = logits.clone();
    let present = minimum(&counts, Array::from_f32(1.0))?;
    if repeat != 1.0 {
        // Whichever of product and quotient is the penalty lies on the same side for either sign of the logit.
        let by = present
            .multiply(Array::from_f32(repeat - 1.0))?
            .add(Array::from_f32(1.0))?;
        let (product, quotient) = (out.multiply(&by)?, out.divide(&by)?);
        out = if repeat > 1.0 {
            minimum(product, quotient)?
        } else {
            maximum(product, quotient)?
        };
    }
    if presence != 0.0 {
        out = out.subtract(present.multiply(Array::from_f32(presence))?)?;
    }
    if frequency != 0.0 {
        out = out.subtract(counts.multiply(Array::from_f32(frequency))?)?;
    }
    Ok(out)
}

/// See [`super::fused::count`].
pub(super) fn count(counts: &Array, come: Option<&Array>, go: &[&Array]) -> Result<Array> {
    let mut changes = vec![1.0f32; come.map_or(0, Array::size)];
    changes.extend(vec![-1.0f32; go.iter().map(|a| a.size()).sum()]);
    let ids: Vec<Array> = come.into_iter().chain(go.iter().copied()).cloned().collect();
    let changes = Array::from_slice(&changes, &[changes.len() as i32, 1]);
    scatter_add_single(counts, joined(&ids)?, changes, 0)
}

/// Probabilities [k] of ids [k] in k rows.
pub(super) fn probability_of(dist: &Dist, ids: &Array) -> Result<Array> {
    let column = expand_dims(ids, 1)?;
    match dist {
        Dist::Point(own) => cast(&own.eq(ids)?, Dtype::Float32),
        Dist::Whole(probs) => take_along_axis(probs, &column, -1)?.reshape(&[-1]),
        Dist::List { ids, probs } => sum_axis(ids.eq(&column)?.multiply(probs)?, -1, false),
    }
}

/// See [`super::fused::reject`].
pub(super) fn reject(
    p: &Dist,
    q: &[&Dist],
    drafts: &[&Array],
    tests: &Draws,
    replacements: &Draws,
) -> Result<(Array, Array)> {
    let drafts = joined(&drafts.iter().map(|&d| d.clone()).collect::<Vec<_>>())?;
    let k = drafts.dim(0);
    let p = head(p, k)?;
    let q = stacked(q)?;
    let tests = Array::from_slice(&tests.shares(k as usize), &[k]);
    let accepted = tests
        .multiply(probability_of(&q, &drafts)?)?
        .lt(probability_of(&p, &drafts)?)?;
    let accepted = cast(&accepted, Dtype::Int32)?;
    let nothing = Array::from_f32(0.0);
    let instead = match (&p, &q) {
        (Dist::Whole(p), Dist::Whole(q)) => {
            let rest = maximum(p.subtract(q)?, nothing)?;
            cast(
                &draw(&rest, &columns(p.dim(1))?, replacements, true)?,
                Dtype::Int32,
            )?
        }
        (
            Dist::List { ids, probs },
            Dist::List {
                ids: q_ids,
                probs: q_probs,
            },
        ) => {
            let same = expand_dims(ids, 2)?.eq(expand_dims(q_ids, 1)?)?;
            let taken = sum_axis(same.multiply(expand_dims(q_probs, 1)?)?, -1, false)?;
            let rest = maximum(probs.subtract(taken)?, nothing)?;
            take_along_axis(ids, draw(&rest, ids, replacements, false)?, -1)?
        }
        _ => return Err(Exception::custom("draft and target were filtered differently")),
    };
    Ok((accepted, instead.reshape(&[-1])?))
}

/// The first k rows.
fn head(dist: &Dist, k: i32) -> Result<Dist> {
    Ok(match dist {
        Dist::Point(ids) => Dist::Point(slice_axis(ids, 0, 0, k)?),
        Dist::Whole(probs) => Dist::Whole(slice_axis(probs, 0, 0, k)?),
        Dist::List { ids, probs } => Dist::List {
            ids: slice_axis(ids, 0, 0, k)?,
            probs: slice_axis(probs, 0, 0, k)?,
        },
    })
}

fn stacked(dists: &[&Dist]) -> Result<Dist> {
    let (mut first, mut second) = (Vec::new(), Vec::new());
    for dist in dists {
        match dist {
            Dist::Point(only) | Dist::Whole(only) => first.push(only.clone()),
            Dist::List { ids, probs } => {
                first.push(ids.clone());
                second.push(probs.clone());
            }
        }
    }
    match dists.first() {
        Some(Dist::List { .. }) => Ok(Dist::List {
            ids: joined(&first)?,
            probs: joined(&second)?,
        }),
        Some(Dist::Point(_)) => Ok(Dist::Point(joined(&first)?)),
        Some(Dist::Whole(_)) => Ok(Dist::Whole(joined(&first)?)),
        None => Err(Exception::custom("no drafts to test")),
    }
}

/// See [`super::fused::logprobs`].
pub(super) fn logprobs(
    logits: &Array,
    ceiling: Option<&Array>,
    picks: &[(usize, &Array)],
    top: usize,
) -> Result<(Array, Option<(Array, Array)>)> {
    let logits = cast(logits, Dtype::Float32)?;
    let width = logits.dim(1);
    let norms = logsumexp_axis(&logits, -1, true)?;
    let rows = pick_rows(picks);
    let n = [rows.len() as i32];
    let starts: Vec<i32> = rows.iter().map(|row| row * width).collect();
    let ids = joined(&picks.iter().map(|&(_, ids)| ids.clone()).collect::<Vec<_>>())?;
    let places = ids.add(Array::from_slice(&starts, &n))?;
    let picked = logits.reshape(&[-1])?.take_axis(places, 0)?;
    let picked = picked.subtract(norms.reshape(&[-1])?.take_axis(Array::from_slice(&rows, &n), 0)?)?;
    if top == 0 {
        return Ok((picked, None));
    }
    let limited = match ceiling {
        Some(ceiling) => logits.add(ceiling)?,
        None => logits,
    };
    let (ids, values, _) = best(&limited, top as i32)?;
    Ok((picked, Some((cast(&ids, Dtype::Int32)?, values.subtract(norms)?))))
}
