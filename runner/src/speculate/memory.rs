//! What the depth controller remembers: across requests, and with the model's disk cache across restarts.
//!
//! Invariant: a state that passes [`DepthModel::checked`] can lead neither to a panic nor to an unbounded plan,
//! whatever the file held that it came from.

use super::depth::{Mode, DEEPEST};
use super::selection::State;
use serde::{Deserialize, Serialize};

/// First context length of the second bucket; each further bucket is twice as long.
const BUCKET: usize = 1024;
/// Layout of the saved state.
const VERSION: u32 = 2;

/// All that was learnt about drafting with a model; kept across requests and savable with its disk cache.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DepthModel {
    version: u32,
    greedy: State,
    sampled: State,
}

/// A saved depth model that can't be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DepthModelError {
    /// Written by another version.
    #[error("depth model has version {0}, expected {VERSION}")]
    Version(u32),
    /// A value is out of its range.
    #[error("depth model for {0:?} requests holds values out of range")]
    Damaged(Mode),
}

impl Default for DepthModel {
    fn default() -> Self {
        Self {
            version: VERSION,
            greedy: State::default(),
            sampled: State::default(),
        }
    }
}

impl DepthModel {
    /// Checks a state read back from a file, so that none can lead to a panic or an unbounded plan.
    pub fn checked(self) -> Result<Self, DepthModelError> {
        if self.version != VERSION {
            return Err(DepthModelError::Version(self.version));
        }
        for (mode, state) in [(Mode::Greedy, &self.greedy), (Mode::Sampled, &self.sampled)] {
            if !state.is_sound(DEEPEST) {
                return Err(DepthModelError::Damaged(mode));
            }
        }
        Ok(self)
    }

    /// What is known for one way of sampling.
    #[must_use]
    pub fn state(&self, mode: Mode) -> &State {
        match mode {
            Mode::Greedy => &self.greedy,
            Mode::Sampled => &self.sampled,
        }
    }

    /// The same, to learn.
    pub fn state_mut(&mut self, mode: Mode) -> &mut State {
        match mode {
            Mode::Greedy => &mut self.greedy,
            Mode::Sampled => &mut self.sampled,
        }
    }

    /// Makes sure that there is a cost table for a context length, taking the nearest one's costs as seeds.
    pub fn prepare(&mut self, mode: Mode, bucket: u8) {
        if self.state(mode).costs.contains_key(&bucket) {
            return;
        }
        let other = match mode {
            Mode::Greedy => Mode::Sampled,
            Mode::Sampled => Mode::Greedy,
        };
        let seeds = [mode, other]
            .into_iter()
            .find_map(|mode| self.state(mode).nearest(bucket));
        self.state_mut(mode)
            .costs
            .insert(bucket, seeds.unwrap_or_default());
    }
}

/// The bucket of a context length: 0 below 1,024 tokens, then one per doubling.
#[must_use]
pub fn bucket(length: usize) -> u8 {
    let doublings = usize::BITS - (length / BUCKET).leading_zeros();
    u8::try_from(doublings).unwrap_or(u8::MAX)
}
