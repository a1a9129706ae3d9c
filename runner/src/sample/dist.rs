//! Distributions of several rows, as lazy arrays.
//!
//! Invariant: probabilities of a row sum to 1 (to float32's precision) over what its filters kept and are 0 elsewhere; a row whose
//! `peak` isn't finite has no distribution, and nothing drawn from it may be used.
//!
//! Token ids are int32 on the device, as the embedding takes them.

use mlx_rs::error::Result;
use mlx_rs::Array;

use super::options::{PenaltyOptions, Shape};
use super::rng::{uniform, Purpose, RowKey};
use super::{fused, graph};
use crate::mlx::{gpu, ops, Path};

/// Lists longer than this become whole-vocabulary rows: comparing two lists costs the square of their length.
pub(super) const LONGEST_LIST: u32 = 256;

/// Where probability is, for each of R rows.
#[derive(Debug, Clone)]
pub enum Dist {
    /// All of it on one id: ids [R].
    Point(Array),
    /// On K candidates: ids and probabilities [R, K]. Unused places have probability 0 and repeat an id.
    List {
        /// Candidates.
        ids: Array,
        /// Their probabilities.
        probs: Array,
    },
    /// Anywhere: [R, V], a column for each id.
    Whole(Array),
}

/// R rows' distributions with a draw from each.
#[derive(Debug, Clone)]
pub struct Rows {
    /// What the draws came from.
    pub dist: Dist,
    /// The draws [R], int32.
    pub choice: Array,
    /// Each row's largest logit [R], float32, after masks and penalties: NaN where the row holds one, -inf where nothing is left.
    pub peak: Array,
}

impl Rows {
    /// Row `r` alone.
    pub fn row(&self, r: i32) -> Result<Self> {
        // Compact: what the host will read must not lie in a longer array.
        let cut = |a: &Array| ops::compact(&ops::slice_axis(a, 0, r, r + 1)?);
        let choice = cut(&self.choice)?;
        let dist = match &self.dist {
            Dist::Point(_) => Dist::Point(choice.clone()),
            Dist::List { ids, probs } => Dist::List {
                ids: cut(ids)?,
                probs: cut(probs)?,
            },
            Dist::Whole(probs) => Dist::Whole(cut(probs)?),
        };
        Ok(Self {
            dist,
            choice,
            peak: cut(&self.peak)?,
        })
    }
}

/// The randomness of one draw a row.
///
/// Drawing is by an exponential race keyed by token id where `race` says so and for whole-vocabulary rows, whose float32 sums are
/// too coarse to invert; otherwise by the inverse of the cumulative distribution, which needs one number a row.
#[derive(Debug, Clone, Copy)]
pub(super) struct Draws {
    pub(super) seed: u64,
    /// Position of the token that row 0 draws; the others follow.
    pub(super) position: u64,
    pub(super) purpose: Purpose,
    pub(super) race: bool,
}

impl Draws {
    pub(super) fn keys(&self, rows: usize) -> Vec<RowKey> {
        let positions = self.position..self.position + rows as u64;
        positions
            .map(|position| RowKey::new(self.seed, position, self.purpose))
            .collect()
    }

    pub(super) fn shares(&self, rows: usize) -> Vec<f32> {
        let positions = self.position..self.position + rows as u64;
        positions
            .map(|position| uniform(self.seed, position, self.purpose))
            .collect()
    }
}

/// What the penalties of R rows see: `counts`, plus the first drafts of `ahead`, less what those push out.
#[derive(Debug, Clone)]
pub(super) struct RowHistory {
    pub(super) options: PenaltyOptions,
    /// Occurrences of every id inside the window [V], float32.
    pub(super) counts: Array,
    /// Drafts after the window, int32 arrays of one dimension, in order.
    pub(super) drafts: Vec<Array>,
    /// For each row, how many drafts it sees.
    pub(super) ahead: Vec<usize>,
    /// The window's oldest tokens; the drafts push them out in this order.
    pub(super) oldest: Vec<u32>,
    /// Tokens that the window can still take before it pushes any out.
    pub(super) room: usize,
}

impl RowHistory {
    /// What row `r` changes in the counts: the drafts of a range come in, and so many of the oldest go.
    pub(super) fn change(&self, r: usize) -> (std::ops::Range<usize>, &[u32]) {
        let ahead = self.ahead[r];
        let out = ahead.saturating_sub(self.room);
        let oldest = out.min(self.oldest.len());
        (out - oldest..ahead, &self.oldest[..oldest])
    }
}

/// All that decides R rows of distributions.
#[derive(Debug)]
pub(super) struct Plan<'a> {
    /// [R, V].
    pub(super) logits: &'a Array,
    /// Added to the logits: 0, or -inf for what is forbidden. [V] or [R, V], float32.
    pub(super) ceiling: Option<&'a Array>,
    /// The ceiling forbids exactly the ids from here on, if it is no request's mask.
    pub(super) known: Option<usize>,
    pub(super) history: Option<RowHistory>,
    pub(super) shape: Shape,
    pub(super) draws: Draws,
}

impl Plan<'_> {
    pub(super) fn rows(&self, path: Path) -> Result<Rows> {
        match (path, self.known) {
            (Path::Cpu, _) => fused::rows(self),
            (Path::Gpu, Some(known)) if self.shape == Shape::Greedy && self.history.is_none() => {
                let (choice, peak) = gpu::kernels()?.peak(self.logits, known as i32)?;
                Ok(Rows {
                    dist: Dist::Point(choice.clone()),
                    choice,
                    peak,
                })
            }
            _ => graph::rows(self),
        }
    }
}
