//! A request's sampler: the one place that turns logits into tokens, for plain decoding, drafting and verification alike.
//!
//! Invariant: everything it returns is lazy; a step, a drafted token or a whole verification costs its caller one evaluation, and
//! [`Verdict::read`] and [`Rows::read`] are the only functions here that make one. A token is drawn from the target's distribution exactly, whichever
//! rule tests the drafts.

use lookahead_protocol::request::Verify;
use mlx_rs::error::{Exception, Result};
use mlx_rs::Array;
use thiserror::Error;

use super::accept::{self, Verdict};
use super::dist::{Draws, Plan, Rows};
use super::logprobs::Logprobs;
use super::options::{SamplingOptions, Shape};
use super::penalty::History;
use super::rng::Purpose;
use crate::mlx::Path;

/// Why a row yielded no token.
#[derive(Debug, Error)]
pub enum SampleError {
    /// The target's logits hold a NaN, or nothing that may be chosen.
    #[error("the model's logits for position {position} are {what}")]
    NanLogits {
        /// Position of the token that was to be drawn.
        position: u64,
        /// The fault in words.
        what: &'static str,
    },
    /// The drafter's do; its drafts can't be tested, and the target is not to blame.
    #[error("the drafter's logits for position {position} are {what}")]
    NanDraft {
        /// Position of the drafted token.
        position: u64,
        /// The fault in words.
        what: &'static str,
    },
    /// MLX failed.
    #[error(transparent)]
    Mlx(#[from] Exception),
}

/// Says what is wrong with a row's peak, if anything is.
pub(super) fn fault(peak: f32) -> Option<&'static str> {
    match peak {
        p if p.is_finite() => None,
        p if p.is_nan() => Some("not numbers"),
        p if p > 0.0 => Some("infinite"),
        _ => Some("all -inf"),
    }
}

/// What a sampler needs to know of the model and the machine.
#[derive(Debug, Clone, Copy)]
pub struct Vocabulary {
    /// Width of the logits.
    pub logits: usize,
    /// Ids that the tokenizer knows; the rest is never chosen.
    pub tokens: usize,
}

/// Drafted tokens with what they were drawn from; one or several rows.
#[derive(Debug, Clone)]
pub struct Draft {
    /// The distributions, the drafted ids (`choice`, int32 [n]) and their peaks.
    pub rows: Rows,
}

impl Draft {
    /// The drafted ids, int32 [n].
    pub fn ids(&self) -> &Array {
        &self.rows.choice
    }

    /// Row `r` alone.
    pub fn row(&self, r: i32) -> Result<Self> {
        Ok(Self {
            rows: self.rows.row(r)?,
        })
    }
}

/// Draws a request's tokens.
#[derive(Debug)]
pub struct Sampler {
    shape: Shape,
    rule: Verify,
    seed: u64,
    vocabulary: Vocabulary,
    /// Forbids ids that the tokenizer doesn't know; none where it knows all.
    ceiling: Option<Array>,
    history: Option<History>,
    path: Path,
}

impl Sampler {
    /// `seed` keys every draw; `prompt` counts for the penalties.
    pub fn new(
        options: &SamplingOptions,
        rule: Verify,
        seed: u64,
        vocabulary: Vocabulary,
        prompt: &[u32],
        path: Path,
    ) -> Self {
        let Vocabulary { logits, tokens } = vocabulary;
        let ceiling = (tokens < logits).then(|| {
            let limits: Vec<f32> = (0..logits)
                .map(|id| if id < tokens { 0.0 } else { f32::NEG_INFINITY })
                .collect();
            Array::from_slice(&limits, &[logits as i32])
        });
        let history = options
            .penalties
            .map(|penalties| History::new(penalties, logits, prompt, path));
        Self {
            shape: options.shape,
            rule,
            seed,
            vocabulary,
            ceiling,
            history,
            path,
        }
    }

    /// Whether tokens are the largest logits, so that acceptance is comparable to other greedy requests only.
    pub fn is_greedy(&self) -> bool {
        self.shape == Shape::Greedy
    }

    /// Whether the sampler counts tokens.
    pub fn has_penalties(&self) -> bool {
        self.history.is_some()
    }

    /// A mask for `rows` of logits: one bitmask a row, bit `id % 32` of word `id / 32` set where an id is allowed, `None` where
    /// all are. Missing words forbid. [R, V] float32.
    pub fn mask(&self, rows: &[Option<&[u32]>]) -> Array {
        let Vocabulary { logits, tokens } = self.vocabulary;
        let mut limits = vec![f32::NEG_INFINITY; rows.len() * logits];
        for (row, words) in limits.chunks_exact_mut(logits).zip(rows) {
            let known = &mut row[..tokens.min(logits)];
            match words {
                None => known.fill(0.0),
                Some(words) => {
                    for (limits, word) in known.chunks_mut(32).zip(*words) {
                        for (bit, limit) in limits.iter_mut().enumerate() {
                            *limit = if word >> bit & 1 == 1 {
                                0.0
                            } else {
                                f32::NEG_INFINITY
                            };
                        }
                    }
                }
            }
        }
        Array::from_slice(&limits, &[rows.len() as i32, logits as i32])
    }

    fn draws(&self, position: u64, purpose: Purpose) -> Draws {
        // Under the coupled rule both sides of a comparison draw with the same noise.
        let coupled = self.rule == Verify::Coupled;
        let purpose = if coupled { Purpose::Token } else { purpose };
        Draws {
            seed: self.seed,
            position,
            purpose,
            race: coupled,
        }
    }

    fn rows(
        &self,
        logits: &Array,
        draws: Draws,
        (drafts, ahead): (&[Array], Vec<usize>),
        mask: Option<&Array>,
    ) -> Result<Rows> {
        let history = match &self.history {
            Some(history) => Some(history.rows(drafts, ahead)?),
            None => None,
        };
        let ceiling = mask.or(self.ceiling.as_ref());
        Plan {
            logits,
            ceiling,
            known: mask.is_none().then_some(self.vocabulary.tokens),
            history,
            shape: self.shape,
            draws,
        }
        .rows(self.path)
    }

    /// The next token from logits [1, V]; `position` is its index in the sequence. `mask` as [`Sampler::mask`] makes it.
    ///
    /// More rows draw tokens for the positions that follow, all of them behind the same history.
    pub fn next(&self, logits: &Array, position: u64, mask: Option<&Array>) -> Result<Rows> {
        let ahead = vec![0; logits.dim(0) as usize];
        self.rows(logits, self.draws(position, Purpose::Token), (&[], ahead), mask)
    }

    /// Draws drafted tokens from the drafter's logits [n, V].
    ///
    /// `position` is that of the first. `before` are the drafts between the last committed token and it; a block drafter's rows
    /// all see just those, as its tokens are drawn at once.
    pub fn draft(
        &self,
        logits: &Array,
        position: u64,
        before: &[Draft],
        mask: Option<&Array>,
    ) -> Result<Draft> {
        let draws = self.draws(position, Purpose::Draft);
        let ids: Vec<Array> = before.iter().map(|draft| draft.ids().clone()).collect();
        let seen: usize = ids.iter().map(|ids| ids.size()).sum();
        let ahead = vec![seen; logits.dim(0) as usize];
        Ok(Draft {
            rows: self.rows(logits, draws, (&ids, ahead), mask)?,
        })
    }

    /// Tests k drafts against the target's logits [k + 1, V], row r for the token after the r-th draft; `position` is that of
    /// the first draft.
    pub fn verify(
        &self,
        logits: &Array,
        position: u64,
        drafts: &[Draft],
        mask: Option<&Array>,
    ) -> Result<Verdict> {
        let ids: Vec<Array> = drafts.iter().map(|draft| draft.ids().clone()).collect();
        let k: usize = ids.iter().map(|ids| ids.size()).sum();
        if logits.dim(0) as usize != k + 1 {
            return Err(Exception::custom(format!(
                "{k} drafts need {} rows of logits, got {}",
                k + 1,
                logits.dim(0)
            )));
        }
        let rows = self.rows(
            logits,
            self.draws(position, Purpose::Token),
            (&ids, (0..=k).collect()),
            mask,
        )?;
        if k == 0 || self.is_greedy() || self.rule == Verify::Coupled {
            return accept::coupled(rows, ids, position, self.path);
        }
        let tests = self.draws(position, Purpose::Accept);
        let replacements = self.draws(position, Purpose::Residual);
        accept::rejection(rows, drafts, position, &tests, &replacements, self.path)
    }

    /// Logprobs beside rows of raw logits [R, V]: of `picks`, as [`Verdict::picks`] or [`Rows::picks`] give them, and of the `top`
    /// likeliest tokens of each row.
    pub fn logprobs(&self, logits: &Array, picks: &[(usize, &Array)], top: usize) -> Result<Logprobs> {
        Logprobs::new(logits, self.ceiling.as_ref(), picks, top, self.path)
    }

    /// Counts committed tokens for the penalties, in order.
    pub fn commit(&mut self, tokens: &[u32]) -> Result<()> {
        match &mut self.history {
            Some(history) => history.commit(tokens),
            None => Ok(()),
        }
    }

    /// Counts a token that is still in the graph (int32 [1]), so that the next step can be dispatched before it is read.
    pub fn commit_pending(&mut self, token: &Array) -> Result<()> {
        match &mut self.history {
            Some(history) => history.commit_pending(token),
            None => Ok(()),
        }
    }

    /// Tells the id of the oldest token given to [`Sampler::commit_pending`] that wasn't told yet.
    pub fn confirm(&mut self, token: u32) {
        if let Some(history) = &mut self.history {
            history.confirm(token);
        }
    }
}
