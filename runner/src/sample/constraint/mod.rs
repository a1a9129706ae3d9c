//! Constrained output: which ids may come next.
//!
//! Invariants:
//! - What a constraint lets through is always a prefix of something its format accepts, and an end token only gets
//!   through where the text so far is accepted whole. So a result that ended parses, and one cut short is a prefix.
//! - Looking ahead along drafts leaves the constraint where it was.
//! - Ids that the tokenizer doesn't have, up to the width of the logits, are never let through.
//! - A format that can't be compiled, or grows beyond the limits, is an error in bounded time and memory.
//!
//! Grammars are llguidance's; nothing here touches a device.

mod error;
mod factory;
mod format;
mod schema;

use std::fmt;
use std::sync::Arc;

use llguidance::Matcher;

pub use error::ConstraintError;
pub use factory::ConstraintFactory;
pub use format::Format;

use factory::Vocabulary;

/// Line feeds that may stand between a closed think block and JSON, as models were trained to write them.
const GAP: usize = 2;

/// Where in the output a constraint begins.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Start {
    /// With the first generated id.
    AtOnce,
    /// Behind the first occurrence of a closing tag; until then anything but an end token goes. The tag has to end where
    /// an id ends.
    After(String),
}

/// How far the output has come.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Phase {
    /// Before the closing tag; holds the end of the text, shorter than the tag.
    Before {
        tag: String,
        tail: Vec<u8>,
    },
    /// Behind the tag, with so many line feeds still allowed.
    Gap(usize),
    Grammar,
    /// An end token was committed.
    Ended,
}

/// One request's constraint, at some place in its output. It may be sent between threads.
pub struct Constraint {
    vocabulary: Arc<Vocabulary>,
    matcher: Matcher,
    phase: Phase,
    gap: usize,
    mask: Vec<u32>,
}

impl fmt::Debug for Constraint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Constraint")
            .field("phase", &self.phase)
            .finish_non_exhaustive()
    }
}

/// Masks for the rows of a target forward over the current id and its drafts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MaskRows {
    /// One row after the other, `words_per_row` words each: row 0 for the place right now, row `i` for after `i` drafts.
    /// One more row than drafts; rows behind an illegal draft repeat the last legal one's, and are never to be used.
    pub words: Vec<u32>,
    /// Words of one row: the width of the logits in bits, rounded up.
    pub words_per_row: usize,
    /// How many of the drafts the constraint lets through, from the first on.
    pub legal: usize,
}

impl MaskRows {
    /// One row's mask: bit `id % 32` of word `id / 32` says whether the id may come.
    #[must_use]
    pub fn row(&self, index: usize) -> &[u32] {
        &self.words[index * self.words_per_row..][..self.words_per_row]
    }
}

impl Constraint {
    /// Compiles a format. The first call on a factory builds the vocabulary's tables as well.
    ///
    /// # Errors
    /// [`ConstraintError::BadFormat`] where the format is wrong or asks for what isn't supported,
    /// [`ConstraintError::TooComplex`] where it exceeds the limits.
    pub fn new(factory: &ConstraintFactory, format: &Format, start: Start) -> Result<Self, ConstraintError> {
        let vocabulary = factory.vocabulary()?;
        let mut matcher = format.compile(&vocabulary)?;
        // A grammar that nothing satisfies shows only when it's asked for its first ids.
        matcher
            .compute_mask()
            .map_err(|error| error::of_step(&error.to_string()))?;
        let gap = if format.is_json() { GAP } else { 0 };
        let phase = match start {
            Start::After(tag) if !tag.is_empty() => Phase::Before {
                tag,
                tail: Vec::new(),
            },
            _ => Phase::Grammar,
        };
        Ok(Self {
            vocabulary,
            matcher,
            phase,
            gap,
            mask: Vec::new(),
        })
    }

    /// Which ids may come next: bit `id % 32` of word `id / 32`, as many words as the logits have bits, rounded up.
    /// At least one bit is set. Once the output is complete, only end tokens are.
    ///
    /// # Errors
    /// [`ConstraintError::DeadEnd`] where no id at all can continue, [`ConstraintError::TooComplex`] where the step
    /// exceeds the limits. The constraint is of no use after an error.
    pub fn mask(&mut self) -> Result<&[u32], ConstraintError> {
        let mut mask = std::mem::take(&mut self.mask);
        mask.clear();
        self.append_mask(&mut mask)?;
        self.mask = mask;
        Ok(&self.mask)
    }

    /// Takes the id that was chosen.
    ///
    /// # Errors
    /// [`ConstraintError::Illegal`] where the mask doesn't allow the id; the errors of [`Constraint::mask`] besides.
    pub fn commit(&mut self, id: u32) -> Result<(), ConstraintError> {
        match self.step(id)? {
            Step::Illegal => Err(ConstraintError::Illegal { id }),
            Step::Consumed | Step::Passed => Ok(()),
        }
    }

    /// How many of the drafts, from the first on, the constraint lets through here.
    ///
    /// # Errors
    /// Those of [`Constraint::mask`].
    pub fn accepts_prefix(&mut self, drafts: &[u32]) -> Result<usize, ConstraintError> {
        self.look_ahead(drafts, |_| Ok(()))
    }

    /// The masks of the rows that a target forward over the current id and `drafts` yields.
    ///
    /// # Errors
    /// Those of [`Constraint::mask`].
    pub fn masks_along(&mut self, drafts: &[u32]) -> Result<MaskRows, ConstraintError> {
        let words_per_row = self.vocabulary.words();
        let mut words = Vec::with_capacity(words_per_row * (drafts.len() + 1));
        self.append_mask(&mut words)?;
        let legal = self.look_ahead(drafts, |constraint| constraint.append_mask(&mut words))?;
        while words.len() < words_per_row * (drafts.len() + 1) {
            let last = words.len() - words_per_row;
            words.extend_from_within(last..);
        }
        Ok(MaskRows {
            words,
            words_per_row,
            legal,
        })
    }

    /// Whether the output may end here: the text so far is accepted whole.
    ///
    /// # Errors
    /// Those of [`Constraint::mask`].
    pub fn may_end(&mut self) -> Result<bool, ConstraintError> {
        match self.phase {
            Phase::Before { .. } => Ok(false),
            Phase::Ended => Ok(true),
            Phase::Gap(_) | Phase::Grammar if self.matcher.is_stopped() => {
                Ok(self.matcher.stop_reason().is_ok())
            }
            Phase::Gap(_) | Phase::Grammar => self
                .matcher
                .is_accepting()
                .map_err(|error| error::of_step(&error.to_string())),
        }
    }

    /// Whether the output is complete: it's accepted and nothing but an end token can follow, so generation can stop
    /// without one.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        match self.phase {
            Phase::Ended => true,
            Phase::Grammar => self.matcher.is_stopped() && self.matcher.stop_reason().is_ok(),
            Phase::Before { .. } | Phase::Gap(_) => false,
        }
    }

    /// Whether the constraint has begun: false until the closing tag it waits for.
    #[must_use]
    pub fn has_begun(&self) -> bool {
        !matches!(self.phase, Phase::Before { .. })
    }

    /// Steps along drafts, calling `visit` after each legal one, then steps back.
    fn look_ahead(
        &mut self,
        drafts: &[u32],
        mut visit: impl FnMut(&mut Self) -> Result<(), ConstraintError>,
    ) -> Result<usize, ConstraintError> {
        let phase = self.phase.clone();
        let mut consumed = 0;
        let mut legal = 0;
        for &draft in drafts {
            match self.step(draft)? {
                Step::Illegal => break,
                Step::Passed => {}
                Step::Consumed => consumed += 1,
            }
            legal += 1;
            visit(self)?;
        }
        self.matcher
            .rollback(consumed)
            .map_err(|error| error::of_step(&error.to_string()))?;
        self.phase = phase;
        Ok(legal)
    }

    fn step(&mut self, id: u32) -> Result<Step, ConstraintError> {
        let is_end = self.vocabulary.is_end(id);
        let Some(bytes) = self.vocabulary.bytes(id) else {
            return Ok(Step::Illegal);
        };
        match &mut self.phase {
            Phase::Before { .. } | Phase::Ended if is_end => return Ok(Step::Illegal),
            Phase::Ended => return Ok(Step::Illegal),
            Phase::Before { tag, tail } => {
                tail.extend_from_slice(bytes);
                if tail.ends_with(tag.as_bytes()) {
                    self.phase = if self.gap > 0 {
                        Phase::Gap(self.gap)
                    } else {
                        Phase::Grammar
                    };
                } else {
                    let keep = tag.len() - 1;
                    tail.drain(..tail.len().saturating_sub(keep));
                }
                return Ok(Step::Passed);
            }
            Phase::Gap(left) if is_line_feeds(bytes, *left) => {
                *left -= bytes.len();
                return Ok(Step::Passed);
            }
            Phase::Gap(_) | Phase::Grammar => {}
        }
        if is_end {
            // Kept from the matcher, which doesn't count every end token it takes and so couldn't step back.
            if !self.may_end()? {
                return Ok(Step::Illegal);
            }
            self.phase = Phase::Ended;
            return Ok(Step::Passed);
        }
        if self.matcher.is_stopped() && self.matcher.stop_reason().is_ok() {
            return Ok(Step::Illegal);
        }
        match self.matcher.try_consume_tokens(&[id]) {
            Ok(0) => Ok(Step::Illegal),
            Ok(_) => {
                self.phase = Phase::Grammar;
                Ok(Step::Consumed)
            }
            Err(error) => Err(error::of_step(&error.to_string())),
        }
    }

    fn append_mask(&mut self, out: &mut Vec<u32>) -> Result<(), ConstraintError> {
        let start = out.len();
        match &self.phase {
            Phase::Before { .. } => out.extend_from_slice(self.vocabulary.anything()),
            Phase::Ended => out.extend_from_slice(self.vocabulary.ends()),
            Phase::Gap(_) | Phase::Grammar if self.is_complete() => {
                out.extend_from_slice(self.vocabulary.ends())
            }
            Phase::Gap(_) | Phase::Grammar => {
                let mask = self
                    .matcher
                    .compute_mask()
                    .map_err(|error| error::of_step(&error.to_string()))?;
                out.extend(mask.as_slice().iter().take(self.vocabulary.words()));
                out.resize(start + self.vocabulary.words(), 0);
            }
        }
        if let Phase::Gap(left) = self.phase {
            for id in self.vocabulary.line_feeds(left) {
                out[start + id as usize / 32] |= 1 << (id % 32);
            }
        }
        Ok(())
    }
}

/// What an id did to the constraint.
enum Step {
    /// Nothing: it isn't allowed here.
    Illegal,
    /// It was taken without the grammar's doing.
    Passed,
    /// The grammar took it.
    Consumed,
}

fn is_line_feeds(bytes: &[u8], most: usize) -> bool {
    !bytes.is_empty() && bytes.len() <= most && bytes.iter().all(|byte| *byte == b'\n')
}

#[cfg(test)]
mod tests;
#[cfg(test)]
mod walk_tests;
