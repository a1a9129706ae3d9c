//! Which drafts stand, and what follows them: the two exact rules, decided in the graph for every possible outcome.
//!
//! Invariant: a [`Verdict`] needs one evaluation, whatever the outcome. The tokens it yields are distributed as plain decoding's
//! (Leviathan, Kalman, Matias: "Fast Inference from Transformers via Speculative Decoding", 2023, for rejection; the coupled rule
//! draws target and draft with common noise and outputs the target's choice, so it yields plain decoding's very tokens). Greedy is
//! the coupled rule on point masses.
//!
//! Rejection's exactness rests on draws at a position being unused until a token there is committed: who chooses how deep to draft
//! may look at committed and tested tokens and at the drafter's probabilities, never at drafts behind a refused one.

use mlx_rs::error::{Exception, Result};
use mlx_rs::ops::{concatenate, select};
use mlx_rs::transforms::eval;
use mlx_rs::Array;

use super::dist::{Dist, Draws, Rows};
use super::sampler::{fault, Draft, SampleError};
use super::{fused, graph};
use crate::mlx::{ops, Path};

/// A tested round, not yet read.
#[derive(Debug)]
pub struct Verdict {
    /// Position of the first draft.
    position: u64,
    /// The drafts, int32, k in all.
    drafts: Vec<Array>,
    rows: Rows,
    choice: Readable,
    peak: Readable,
    rejection: Option<Rejection>,
}

/// What only the rejection rule has.
#[derive(Debug)]
struct Rejection {
    /// 1 where a draft stands, int32 [k].
    accepted: Array,
    /// The same for the host.
    accepted_read: Readable,
    /// The token in place of a draft that doesn't, int32 [k].
    instead: Array,
    /// The same for the host.
    instead_read: Readable,
    /// The drafts' peaks.
    peaks: Vec<Array>,
}

/// A few numbers that the host will look at.
///
/// On a GPU, MLX keeps arrays of at most eight bytes where the host sees them. A longer one is moved when the host asks for
/// it, which takes as long as a layer of the model; so it is cut into pieces on the device.
#[derive(Debug)]
struct Readable(Vec<Array>);

impl Readable {
    /// `array` has one dimension and elements of four bytes.
    fn new(array: &Array, path: Path) -> Result<Self> {
        const PIECE: i32 = 2;
        let len = array.dim(0);
        if path == Path::Cpu || len <= PIECE {
            return Ok(Self(vec![array.clone()]));
        }
        let piece = |from: i32| ops::compact(&ops::slice_axis(array, 0, from, len.min(from + PIECE))?);
        let pieces = (0..len).step_by(PIECE as usize).map(piece);
        Ok(Self(pieces.collect::<Result<_>>()?))
    }

    fn values<T: mlx_rs::ArrayElement + Copy>(&self) -> Result<Vec<T>> {
        let mut out = Vec::new();
        for piece in &self.0 {
            out.extend(values::<T>(piece)?);
        }
        Ok(out)
    }
}

/// What a round yielded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outcome {
    /// All drafts.
    pub drafts: Vec<u32>,
    /// How many of them stand, from the first on.
    pub accepted: usize,
    /// The token after those.
    pub next: u32,
}

impl Outcome {
    /// The drafts that stand, then the token after them.
    pub fn tokens(&self) -> impl Iterator<Item = u32> + '_ {
        self.drafts[..self.accepted]
            .iter()
            .copied()
            .chain(std::iter::once(self.next))
    }
}

pub(super) fn coupled(rows: Rows, drafts: Vec<Array>, position: u64, path: Path) -> Result<Verdict> {
    Ok(Verdict {
        position,
        drafts,
        choice: Readable::new(&rows.choice, path)?,
        peak: Readable::new(&rows.peak, path)?,
        rows,
        rejection: None,
    })
}

pub(super) fn rejection(
    rows: Rows,
    drafts: &[Draft],
    position: u64,
    tests: &Draws,
    replacements: &Draws,
    path: Path,
) -> Result<Verdict> {
    let q: Vec<&Dist> = drafts.iter().map(|draft| &draft.rows.dist).collect();
    let ids: Vec<&Array> = drafts.iter().map(Draft::ids).collect();
    let (accepted, instead) = match path {
        Path::Cpu => fused::reject(&rows.dist, &q, &ids, tests, replacements)?,
        _ => graph::reject(&rows.dist, &q, &ids, tests, replacements)?,
    };
    let peaks = drafts.iter().map(|draft| draft.rows.peak.clone()).collect();
    Ok(Verdict {
        position,
        drafts: ids.into_iter().cloned().collect(),
        choice: Readable::new(&rows.choice, path)?,
        peak: Readable::new(&rows.peak, path)?,
        rows,
        rejection: Some(Rejection {
            accepted_read: Readable::new(&accepted, path)?,
            accepted,
            instead_read: Readable::new(&instead, path)?,
            instead,
            peaks,
        }),
    })
}

/// The values of an int32 or float32 array that has been evaluated.
pub(super) fn values<T: mlx_rs::ArrayElement + Copy>(array: &Array) -> Result<Vec<T>> {
    array
        .try_as_slice::<T>()
        .map(<[T]>::to_vec)
        .map_err(|error| Exception::custom(error.to_string()))
}

impl Verdict {
    /// Every array that [`Verdict::read`] looks at, to be evaluated together with others that the caller needs.
    pub fn arrays(&self) -> impl Iterator<Item = &Array> {
        let rejection = self
            .rejection
            .iter()
            .flat_map(|r| r.accepted_read.0.iter().chain(&r.instead_read.0).chain(&r.peaks));
        self.drafts
            .iter()
            .chain(&self.choice.0)
            .chain(&self.peak.0)
            .chain(rejection)
    }

    /// The target's k + 1 rows.
    pub fn rows(&self) -> &Rows {
        &self.rows
    }

    /// The token that follows each row if the drafts before it stand, int32 [k + 1], for work on the device that doesn't wait for
    /// the outcome.
    pub fn successors(&self) -> Result<Array> {
        let Some(rejection) = &self.rejection else {
            return Ok(self.rows.choice.clone());
        };
        let drafts = concatenate(&self.drafts, 0)?;
        let k = drafts.dim(0);
        let stands = rejection.accepted.ne(Array::from_int(0))?;
        let tested = select(&stands, &drafts, &rejection.instead)?;
        concatenate(&[tested, ops::slice_axis(&self.rows.choice, 0, k, k + 1)?], 0)
    }

    /// The ids that each row may yield, with the row of the first: drafts, the target's own choices, replacements.
    ///
    /// For lazy lookups beside the verdict, such as logprobs.
    pub fn picks(&self) -> Vec<(usize, &Array)> {
        let mut row = 0;
        let mut picks = Vec::new();
        for ids in &self.drafts {
            picks.push((row, ids));
            row += ids.size();
        }
        picks.push((0, &self.rows.choice));
        picks.extend(self.rejection.iter().map(|r| (0, &r.instead)));
        picks
    }

    /// Every draft, every choice of the target's, and what the rejection rule has: which drafts stand, and replacements.
    #[cfg(test)]
    #[expect(clippy::type_complexity, reason = "four lists of one length, for one test")]
    pub(super) fn values(&self) -> Result<(Vec<i32>, Vec<i32>, Option<(Vec<i32>, Vec<i32>)>)> {
        eval(self.arrays())?;
        let drafts: Result<Vec<Vec<i32>>> = self.drafts.iter().map(values::<i32>).collect();
        let rejection = match &self.rejection {
            Some(r) => Some((r.accepted_read.values()?, r.instead_read.values()?)),
            None => None,
        };
        Ok((drafts?.concat(), self.choice.values()?, rejection))
    }

    /// Waits for the round and says what it yielded. A fault in a row behind the last token that stands doesn't matter.
    pub fn read(&self) -> std::result::Result<Outcome, SampleError> {
        eval(self.arrays())?;
        let mut drafts = Vec::new();
        for ids in &self.drafts {
            drafts.extend(values::<i32>(ids)?.into_iter().map(|id| id as u32));
        }
        let choice = self.choice.values::<i32>()?;
        let peaks = self.peak.values::<f32>()?;
        let k = drafts.len();
        let (accepted, next) = match &self.rejection {
            None => {
                let accepted = drafts
                    .iter()
                    .zip(&choice)
                    .take_while(|(&draft, &own)| draft == own as u32)
                    .count();
                (accepted, choice[accepted])
            }
            Some(rejection) => {
                let accepted = rejection
                    .accepted_read
                    .values::<i32>()?
                    .iter()
                    .take_while(|&&a| a != 0)
                    .count();
                let instead = rejection.instead_read.values::<i32>()?;
                (
                    accepted,
                    if accepted < k {
                        instead[accepted]
                    } else {
                        choice[k]
                    },
                )
            }
        };
        self.check(&peaks, accepted)?;
        Ok(Outcome {
            drafts,
            accepted,
            next: next as u32,
        })
    }

    fn check(&self, peaks: &[f32], accepted: usize) -> std::result::Result<(), SampleError> {
        let mut draft_peaks = Vec::new();
        for peak in self.rejection.iter().flat_map(|r| &r.peaks) {
            draft_peaks.extend(values::<f32>(peak)?);
        }
        for (row, &peak) in peaks.iter().enumerate().take(accepted + 1) {
            let position = self.position + row as u64;
            if let Some(what) = fault(peak) {
                return Err(SampleError::NanLogits { position, what });
            }
            if let Some(what) = draft_peaks.get(row).copied().and_then(fault) {
                return Err(SampleError::NanDraft { position, what });
            }
        }
        Ok(())
    }
}

impl Rows {
    /// The ids that the rows yield, for [`super::Sampler::logprobs`].
    pub fn picks(&self) -> [(usize, &Array); 1] {
        [(0, &self.choice)]
    }

    /// Waits for a single row's token; `position` is its index in the sequence.
    pub fn read(&self, position: u64) -> std::result::Result<u32, SampleError> {
        eval([&self.choice, &self.peak])?;
        if let Some(what) = fault(values::<f32>(&self.peak)?[0]) {
            return Err(SampleError::NanLogits { position, what });
        }
        Ok(values::<i32>(&self.choice)?[0] as u32)
    }
}
