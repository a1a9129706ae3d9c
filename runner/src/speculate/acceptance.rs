//! How likely each draft position is to be accepted, given that all positions before it were.
//!
//! Invariant: a rate is in 0..=1 and its weight, the number of tests that it stands for, is bounded, so that
//! old text never outvotes the text at hand. A position nobody has tested takes after the one before it.
//!
//! Two time scales: a slow average, precise enough not to dither between neighbouring depths, and a short
//! window of the last outcomes that replaces the average once the two are too far apart to be chance.

use serde::{Deserialize, Serialize};

/// Believed acceptance at position 1 before anything was tested, and the weight of that belief. Published
/// rates of intact heads lie between 0.5 and 0.95.
const PRIOR: (f64, f64) = (0.7, 4.0);
/// Rate of an untested position relative to the one before it; published conditional rates are nearly flat.
const DECAY: f64 = 0.98;
/// Tests that a position's average stands for at most.
const MEMORY: f64 = 100.0;
/// Weight that age leaves at least.
const FLOOR: f64 = 2.5;
/// Weight that is left of an average when a new request begins.
const CARRIED: f64 = 24.0;
/// Share of its weight that a position keeps over a round that didn't test it.
const AGEING: f64 = 0.997;
/// Outcomes in the short window and the deviation, in standard errors, that makes it win.
const WINDOW: u32 = 24;
const SURPRISE: f64 = 3.2;
/// Weight of an average that a window has replaced.
const FRESH: f64 = 8.0;
/// Tests after which a position counts as known.
const TRUSTED: u64 = 4;
/// Standard errors added to a rate when it is asked what a position might reach.
const HOPE: f64 = 1.0;

/// What is known of one draft position.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Position {
    rate: f64,
    weight: f64,
    tests: u64,
    accepted: u64,
    /// The last outcomes, newest in bit 0.
    recent: u32,
}

/// Conditional acceptance by position.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Acceptance {
    positions: Vec<Position>,
    /// Rounds that drafted at least so deep: `offered[i]` counts depths of i + 1 and more.
    offered: Vec<u64>,
}

impl Position {
    fn observe(&mut self, accepted: bool) -> bool {
        self.tests = self.tests.saturating_add(1);
        self.accepted = self.accepted.saturating_add(u64::from(accepted));
        self.weight = (self.weight + 1.0).min(MEMORY);
        self.rate += (f64::from(u8::from(accepted)) - self.rate) / self.weight;
        self.recent = (self.recent << 1) | u32::from(accepted);
        self.surprised()
    }

    /// Replaces the average by the window where they differ by more than chance explains.
    fn surprised(&mut self) -> bool {
        if self.tests < u64::from(WINDOW) || self.weight < f64::from(WINDOW) {
            return false;
        }
        let hits = (self.recent & ((1 << WINDOW) - 1)).count_ones();
        let (hits, window) = (f64::from(hits), f64::from(WINDOW));
        let rate = self.rate.clamp(0.03, 0.97);
        let deviation = (hits / window - rate) / (rate * (1.0 - rate) / window).sqrt();
        if deviation.abs() < SURPRISE {
            return false;
        }
        self.rate = hits / window;
        self.weight = FRESH;
        true
    }

    fn sink(&mut self, weight: f64) {
        self.weight = self.weight.min(weight.max(FLOOR));
    }
}

impl Acceptance {
    /// Takes in one round: `depth` drafts, of which the first `tested` were judged and the first `accepted`
    /// accepted. Positions behind a rejection, or behind a terminator, are neither success nor failure.
    ///
    /// Says whether the text has changed its character, so that what was concluded from it is due for review.
    pub fn observe(&mut self, depth: usize, tested: usize, accepted: usize) -> bool {
        let tested = tested.min(depth);
        if self.offered.len() < depth {
            self.offered.resize(depth, 0);
        }
        for offered in &mut self.offered[..depth] {
            *offered = offered.saturating_add(1);
        }
        let mut changed = false;
        for position in 1..=tested {
            if self.positions.len() < position {
                let (rate, weight) = (self.rate(position), PRIOR.1);
                self.positions.push(Position {
                    rate,
                    weight,
                    tests: 0,
                    accepted: 0,
                    recent: 0,
                });
            }
            changed |= self.positions[position - 1].observe(position <= accepted);
        }
        for position in self.positions.iter_mut().skip(tested) {
            if changed {
                position.sink(FRESH);
            } else {
                position.sink(position.weight * AGEING);
            }
        }
        changed
    }

    /// Ages all positions by `rounds` rounds without drafts.
    pub fn idle(&mut self, rounds: u32) {
        let keep = AGEING.powi(i32::try_from(rounds).unwrap_or(i32::MAX));
        for position in &mut self.positions {
            position.sink(position.weight * keep);
        }
    }

    /// A new request is new text: what is known weighs less from here on.
    pub fn new_text(&mut self) {
        for position in &mut self.positions {
            position.sink(CARRIED);
        }
    }

    /// Probability that draft `position` (from 1) is accepted once all before it were.
    #[must_use]
    pub fn rate(&self, position: usize) -> f64 {
        self.extrapolate(position, |known| known.rate, PRIOR.0, DECAY)
    }

    /// The rate that a position might turn out to have; an untested one may be as good as the one before it.
    #[must_use]
    pub fn hoped(&self, position: usize) -> f64 {
        self.extrapolate(
            position,
            |known| hoped(known.rate, known.weight),
            hoped(PRIOR.0, PRIOR.1),
            1.0,
        )
    }

    fn extrapolate(&self, position: usize, of: impl Fn(&Position) -> f64, prior: f64, decay: f64) -> f64 {
        if let Some(known) = position
            .checked_sub(1)
            .and_then(|index| self.positions.get(index))
        {
            return of(known);
        }
        let (from, rate) = match self.positions.last() {
            Some(last) => (self.positions.len(), of(last)),
            None => (1, prior),
        };
        rate * decay.powi(i32::try_from(position.saturating_sub(from)).unwrap_or(i32::MAX))
    }

    /// Tokens that a round of `depth` drafts is expected to commit: 1 + Σ over k of Π over i ≤ k of the rates.
    #[must_use]
    pub fn expected(&self, depth: usize) -> f64 {
        expected(depth, |position| self.rate(position))
    }

    /// The same for the rates that the positions might turn out to have.
    #[must_use]
    pub fn expected_hoped(&self, depth: usize) -> f64 {
        expected(depth, |position| self.hoped(position))
    }

    /// Whether a depth was tried often enough to judge it: its last position was tested, or the depth offered
    /// so often that a test of it is evidently rare.
    #[must_use]
    pub fn explored(&self, depth: usize) -> bool {
        let tests = depth
            .checked_sub(1)
            .and_then(|i| self.positions.get(i))
            .map_or(0, |p| p.tests);
        let offered = depth
            .checked_sub(1)
            .and_then(|i| self.offered.get(i))
            .copied()
            .unwrap_or(0);
        depth == 0 || tests >= TRUSTED || offered >= 2 * TRUSTED
    }

    /// Tests and acceptances at a position (from 1) since the state was created.
    #[must_use]
    pub fn counts(&self, position: usize) -> (u64, u64) {
        position
            .checked_sub(1)
            .and_then(|index| self.positions.get(index))
            .map_or((0, 0), |position| (position.tests, position.accepted))
    }

    /// Positions that were tested at least once.
    #[must_use]
    pub fn positions(&self) -> usize {
        self.positions.len()
    }

    /// Whether a state read back from a file keeps the invariant for depths up to `deepest`.
    #[must_use]
    pub fn is_sound(&self, deepest: usize) -> bool {
        self.positions.len() <= deepest
            && self.offered.len() <= deepest
            && self.positions.iter().all(|p| {
                (0.0..=1.0).contains(&p.rate)
                    && p.weight.is_finite()
                    && (1.0..=MEMORY).contains(&p.weight)
                    && p.accepted <= p.tests
            })
    }
}

fn hoped(rate: f64, weight: f64) -> f64 {
    let spread = rate.clamp(0.05, 0.95);
    (rate + HOPE * (spread * (1.0 - spread) / weight).sqrt()).min(1.0)
}

fn expected(depth: usize, rate: impl Fn(usize) -> f64) -> f64 {
    let survive = (1..=depth).scan(1.0, |all, position| {
        *all *= rate(position);
        Some(*all)
    });
    1.0 + survive.sum::<f64>()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rejection_judges_its_position_and_none_behind_it() {
        // Draft 4, accept 2: positions 1 and 2 succeed, 3 fails, 4 stays untouched.
        let mut acceptance = Acceptance::default();
        acceptance.observe(4, 3, 2);
        assert_eq!(acceptance.counts(1), (1, 1));
        assert_eq!(acceptance.counts(2), (1, 1));
        assert_eq!(acceptance.counts(3), (1, 0));
        assert_eq!(acceptance.counts(4), (0, 0));
    }

    #[test]
    fn an_eos_cut_is_not_a_rejection() {
        // Draft 4, accepted through an EOS at position 3: three successes, position 4 unjudged.
        let mut acceptance = Acceptance::default();
        acceptance.observe(4, 3, 3);
        assert_eq!(
            (1..=4).map(|p| acceptance.counts(p)).collect::<Vec<_>>(),
            [(1, 1), (1, 1), (1, 1), (0, 0)]
        );
        // No draft, no lesson.
        let before = acceptance.clone();
        acceptance.observe(0, 0, 0);
        assert_eq!(acceptance.counts(1), before.counts(1));
        assert_eq!(acceptance.rate(1), before.rate(1));
    }

    #[test]
    fn untested_positions_take_after_the_deepest_tested_one() {
        let mut acceptance = Acceptance::default();
        assert_eq!(acceptance.rate(1), 0.7);
        assert!((acceptance.rate(3) - 0.7 * DECAY * DECAY).abs() < 1e-12);
        for _ in 0..100 {
            acceptance.observe(1, 1, 1);
        }
        assert!(acceptance.rate(1) > 0.98);
        assert!((acceptance.rate(2) - acceptance.rate(1) * DECAY).abs() < 1e-12);
    }

    #[test]
    fn expected_tokens_are_one_and_the_sum_of_the_chances_to_survive() {
        assert_eq!(expected(0, |_| 0.5), 1.0);
        let rates = [0.9, 0.8, 0.5];
        let expected = expected(3, |p| rates[p - 1]);
        assert!((expected - (1.0 + 0.9 + 0.72 + 0.36)).abs() < 1e-12);
    }

    #[test]
    fn a_change_of_text_is_noticed_within_thirty_tests() {
        let mut acceptance = Acceptance::default();
        for round in 0..400 {
            acceptance.observe(1, 1, usize::from(round % 10 != 0));
        }
        assert!((acceptance.rate(1) - 0.9).abs() < 0.02);
        let mut noticed = false;
        for round in 0..30 {
            noticed |= acceptance.observe(1, 1, usize::from(round % 5 == 0));
        }
        assert!(noticed);
        assert!(acceptance.rate(1) < 0.45, "{}", acceptance.rate(1));
    }

    #[test]
    fn age_widens_hope_but_leaves_the_rate_alone() {
        let mut acceptance = Acceptance::default();
        for round in 0..200 {
            acceptance.observe(1, 1, usize::from(round % 4 == 0));
        }
        let (rate, hoped) = (acceptance.rate(1), acceptance.hoped(1));
        acceptance.idle(2_000);
        assert_eq!(acceptance.rate(1), rate);
        assert!(acceptance.hoped(1) > hoped + 0.05);
        acceptance.idle(u32::MAX);
        assert!(acceptance.is_sound(1));
    }

    #[test]
    fn a_damaged_state_is_recognised() {
        let mut acceptance = Acceptance::default();
        acceptance.observe(2, 2, 2);
        assert!(acceptance.is_sound(2) && !acceptance.is_sound(1));
        acceptance.positions[0].rate = f64::NAN;
        assert!(!acceptance.is_sound(2));
    }
}
