//! Logprobs of generated tokens and of the likeliest ones beside them.
//!
//! Invariant: they come from the model's own logits, the softmax over the whole vocabulary before masks, penalties, temperature
//! and truncation; ranking is by probability, equal ones by rising id, over the ids that the tokenizer knows. Lazy like the rest:
//! they are read with the tokens, in one evaluation, and nothing is computed for requests that don't ask.

use mlx_rs::error::{Exception, Result};
use mlx_rs::transforms::eval;
use mlx_rs::Array;

use super::accept::values;
use super::{fused, graph};
use crate::mlx::Path;

/// A token with its logprob.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Scored {
    /// Token id.
    pub token: u32,
    /// Natural logarithm of its probability.
    pub logprob: f32,
}

/// A generated token and its rivals.
#[derive(Debug, Clone, PartialEq)]
pub struct TokenScores {
    /// The token generated.
    pub chosen: Scored,
    /// The likeliest tokens at its position, best first.
    pub top: Vec<Scored>,
}

/// Logprobs of R rows, not yet read.
#[derive(Debug)]
pub struct Logprobs {
    /// Ids that the rows may yield, with the row of each array's first.
    picks: Vec<(usize, Array)>,
    /// Their logprobs, one after another, float32.
    picked: Array,
    /// Ids and logprobs of the likeliest, [R, n].
    top: Option<(Array, Array)>,
}

/// Row of each id in `picks`, in order.
pub(super) fn pick_rows(picks: &[(usize, &Array)]) -> Vec<i32> {
    picks
        .iter()
        .flat_map(|(first, ids)| (0..ids.size()).map(move |at| (first + at) as i32))
        .collect()
}

impl Logprobs {
    /// For raw logits [R, V]; `ceiling` ([V]) forbids ids in the ranking only.
    pub(super) fn new(
        logits: &Array,
        ceiling: Option<&Array>,
        picks: &[(usize, &Array)],
        top: usize,
        path: Path,
    ) -> Result<Self> {
        let top = top.min(logits.dim(1) as usize);
        let (picked, top) = match path {
            Path::Cpu => fused::logprobs(logits, ceiling, picks, top)?,
            _ => graph::logprobs(logits, ceiling, picks, top)?,
        };
        let picks = picks.iter().map(|&(row, ids)| (row, ids.clone())).collect();
        Ok(Self { picks, picked, top })
    }

    /// Every array that [`Logprobs::read`] looks at, to be evaluated with the tokens.
    pub fn arrays(&self) -> impl Iterator<Item = &Array> {
        let top = self.top.iter().flat_map(|(ids, logprobs)| [ids, logprobs]);
        self.picks
            .iter()
            .map(|(_, ids)| ids)
            .chain(std::iter::once(&self.picked))
            .chain(top)
    }

    /// Scores of the tokens that the first rows yielded.
    pub fn read(&self, tokens: impl IntoIterator<Item = u32>) -> Result<Vec<TokenScores>> {
        eval(self.arrays())?;
        let picked = values::<f32>(&self.picked)?;
        let mut known = Vec::with_capacity(picked.len());
        for (first, ids) in &self.picks {
            known.extend(
                values::<i32>(ids)?
                    .into_iter()
                    .enumerate()
                    .map(|(at, id)| (first + at, id as u32)),
            );
        }
        let top = match &self.top {
            None => (0, Vec::new(), Vec::new()),
            Some((ids, logprobs)) => (ids.dim(1) as usize, values::<i32>(ids)?, values::<f32>(logprobs)?),
        };
        let score = |(row, token): (usize, u32)| {
            let at = known.iter().position(|&pick| pick == (row, token));
            let logprob = at.map(|at| picked[at]).ok_or_else(|| {
                Exception::custom(format!("token {token} is none that row {row} could have yielded"))
            })?;
            let (n, ids, logprobs) = &top;
            let ranked = (row * n..(row + 1) * n).map(|at| Scored {
                token: ids[at] as u32,
                logprob: logprobs[at],
            });
            Ok(TokenScores {
                chosen: Scored { token, logprob },
                top: ranked.collect(),
            })
        };
        tokens.into_iter().enumerate().map(score).collect()
    }
}
