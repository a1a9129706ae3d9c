//! How likely each draft position is to be accepted, given that all positions before it were.
//!
//! Invariant: a rate is in 0..=1, and what is known never becomes so certain, nor so vague, that the text at hand
//! couldn't outvote it soon.
//!
//! The belief is a Gaussian over the log-odds of all positions together. Neighbouring positions have much in common,
//! so a test of one is a part of a test of the others, and a position that nobody has tested takes after those before
//! it. Time makes everything less certain. Where the last outcomes of a position are too far from its rate to be
//! chance, the text has changed its character: the belief is given up in favour of those outcomes.

use super::belief::Belief;
use super::depth::DEEPEST;
use serde::{Deserialize, Serialize};

/// Believed acceptance at position 1 before anything was tested. Published rates of intact heads lie between 0.5 and
/// 0.95.
const PRIOR: f64 = 0.7;
/// Rate of an untested position relative to the one before it; published conditional rates are nearly flat.
const DECAY: f64 = 0.98;
/// Variances of log-odds before anything was tested: of the first position, and of a step to the next one.
const SPREAD: (f64, f64) = (1.0, 0.03);
/// The same, added by a round.
const DRIFT: (f64, f64) = (0.0001, 0.0001);
/// The same, added by a step of plain decoding.
const IDLE: (f64, f64) = (0.0003, 0.0001);
/// The same, added by a new request.
const NEW_TEXT: (f64, f64) = (0.15, 0.01);
/// The same, added by a change of the text's character.
const CHANGE: (f64, f64) = (1.0, 0.05);
/// Variance of the first position's log-odds beyond which time adds nothing.
const VAGUE: f64 = 1.0;
/// Log-odds at most.
const ODDS: f64 = 5.0;
/// Outcomes in the short window and the deviation, in standard errors, that makes it win.
const WINDOW: u32 = 24;
const SURPRISE: f64 = 3.6;
/// The part of the window that then counts.
const RECENT: u32 = WINDOW / 2;
/// Tests after which a position counts as known.
const TRUSTED: u64 = 4;
/// Standard deviations added to a rate when it is asked what a position might reach.
const HOPE: f64 = 0.8;

/// What was seen at one draft position.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
struct Position {
    tests: u64,
    accepted: u64,
    /// The last outcomes, newest in bit 0, as many as `filled` says.
    recent: u32,
    filled: u32,
}

/// Conditional acceptance by position.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Acceptance {
    positions: Vec<Position>,
    /// Log-odds by position, the first one's at 0.
    odds: Belief,
    /// What [`expected`](Self::expected) says by depth; follows from `odds`.
    tokens: Vec<f64>,
    /// Rounds that drafted at least so deep: `offered[i]` counts depths of i + 1 and more.
    offered: Vec<u64>,
}

fn log_odds(rate: f64) -> f64 {
    (rate / (1.0 - rate)).ln()
}

fn rate_of(odds: f64) -> f64 {
    1.0 / (1.0 + (-odds).exp())
}

/// Covariance of a walk over the positions: what they have in common is where the walk began and the steps that both
/// have behind them.
fn walk((first, step): (f64, f64)) -> impl Fn(usize, usize) -> f64 {
    move |a, b| first + step * a.min(b) as f64
}

impl Default for Acceptance {
    fn default() -> Self {
        let mut odds = Belief::default();
        for position in 0..DEEPEST {
            odds.push(log_odds(PRIOR * DECAY.powi(position as i32)), 0.0);
        }
        let spread = walk(SPREAD);
        odds.change(|a, b, _| spread(a, b));
        let mut new = Self {
            positions: Vec::new(),
            odds,
            tokens: Vec::new(),
            offered: Vec::new(),
        };
        new.reckon();
        new
    }
}

impl Position {
    /// The share of the last outcomes that were accepted, where `rate` doesn't explain what the window shows. Its newer half
    /// counts: some of the older one will be from before the change.
    fn surprise(&self, rate: f64) -> Option<f64> {
        if self.filled < WINDOW {
            return None;
        }
        let hits = (self.recent & ((1 << WINDOW) - 1)).count_ones();
        let share = f64::from(hits) / f64::from(WINDOW);
        // On this scale a share's standard error is the same at any rate; plainly, five misses where one is usual would
        // look like more of a surprise than they are.
        let angle = |share: f64| 2.0 * share.sqrt().asin();
        let deviation = (angle(share) - angle(rate)) * f64::from(WINDOW).sqrt();
        let newer = (self.recent & ((1 << RECENT) - 1)).count_ones();
        (deviation.abs() >= SURPRISE).then_some(f64::from(newer) / f64::from(RECENT))
    }
}

impl Acceptance {
    /// Takes in one round: `depth` drafts, of which the first `tested` were judged and the first `accepted`
    /// accepted. Positions behind a rejection, or behind a terminator, are neither success nor failure.
    ///
    /// Says whether the text has changed its character, so that what was concluded from it is due for review.
    pub fn observe(&mut self, depth: usize, tested: usize, accepted: usize) -> bool {
        let depth = depth.min(DEEPEST);
        let tested = tested.min(depth);
        if self.offered.len() < depth {
            self.offered.resize(depth, 0);
        }
        for offered in &mut self.offered[..depth] {
            *offered = offered.saturating_add(1);
        }
        if self.positions.len() < tested {
            self.positions.resize(tested, Position::default());
        }
        self.loosen(DRIFT, 1.0);
        let mut changed = false;
        for index in 0..tested {
            changed |= self.test(index, index < accepted);
        }
        self.odds.bound(-ODDS, ODDS);
        self.reckon();
        changed
    }

    fn test(&mut self, index: usize, accepted: bool) -> bool {
        let rate = self.rate(index + 1).clamp(0.02, 0.98);
        let position = &mut self.positions[index];
        position.tests = position.tests.saturating_add(1);
        position.accepted = position.accepted.saturating_add(u64::from(accepted));
        position.recent = (position.recent << 1) | u32::from(accepted);
        position.filled = (position.filled + 1).min(WINDOW);
        let surprise = position.surprise(rate);
        if surprise.is_some() {
            position.filled = 0;
        }
        // A test says as much about the log-odds as their logistic curve is steep.
        let (outcome, tests) = match surprise {
            None => (f64::from(u8::from(accepted)), 1.0),
            Some(share) => (share, f64::from(RECENT)),
        };
        if surprise.is_some() {
            self.loosen(CHANGE, 1.0);
            let share = outcome.clamp(0.04, 0.96);
            let off = log_odds(share) - log_odds(rate);
            self.odds
                .update(index, off, 1.0 / (tests * share * (1.0 - share)));
        } else {
            let steep = rate * (1.0 - rate);
            self.odds.update(index, (outcome - rate) / steep, 1.0 / steep);
        }
        surprise.is_some()
    }

    /// Brings `tokens` in line with `odds`.
    fn reckon(&mut self) {
        let mut survive = 1.0;
        let mut tokens = 1.0;
        self.tokens.clear();
        self.tokens.push(tokens);
        for position in 1..=DEEPEST {
            survive *= self.rate(position);
            tokens += survive;
            self.tokens.push(tokens);
        }
    }

    fn loosen(&mut self, by: (f64, f64), times: f64) {
        let room = ((VAGUE - self.odds.covariance(0, 0)) / by.0).clamp(0.0, times);
        let by = walk(by);
        self.odds.change(|a, b, old| old + room * by(a, b));
    }

    /// Ages all positions by `rounds` rounds without drafts.
    pub fn idle(&mut self, rounds: u32) {
        self.loosen(IDLE, f64::from(rounds));
    }

    /// A new request is new text: what is known weighs less from here on.
    pub fn new_text(&mut self) {
        self.loosen(NEW_TEXT, 1.0);
    }

    /// Probability that draft `position` (from 1) is accepted once all before it were.
    #[must_use]
    pub fn rate(&self, position: usize) -> f64 {
        rate_of(self.odds_at(position))
    }

    fn odds_at(&self, position: usize) -> f64 {
        let index = position.saturating_sub(1).min(DEEPEST - 1);
        self.odds.mean(index).unwrap_or(0.0)
    }

    /// The rate that a position might turn out to have.
    #[must_use]
    pub fn hoped(&self, position: usize) -> f64 {
        let index = position.saturating_sub(1).min(DEEPEST - 1);
        rate_of(self.odds_at(position) + HOPE * self.odds.covariance(index, index).sqrt())
    }

    /// Tokens that a round of `depth` drafts is expected to commit: 1 + Σ over k of Π over i ≤ k of the rates.
    #[must_use]
    pub fn expected(&self, depth: usize) -> f64 {
        self.tokens.get(depth.min(DEEPEST)).copied().unwrap_or(1.0)
    }

    /// The same for the rates that the positions might turn out to have.
    #[must_use]
    pub fn expected_hoped(&self, depth: usize) -> f64 {
        expected(depth, |position| self.hoped(position))
    }

    /// The same where the first `sure` positions are as good as believed, and only what sets the others apart from them
    /// may turn out better.
    #[must_use]
    pub fn expected_hoped_beyond(&self, depth: usize, sure: usize) -> f64 {
        let Some(last) = sure.checked_sub(1) else {
            return self.expected_hoped(depth);
        };
        if depth <= sure {
            return self.expected(depth);
        }
        let mut survive = self.expected(sure) - self.expected(last);
        let mut tokens = self.expected(sure);
        for position in sure + 1..=depth.min(DEEPEST) {
            let apart = self.odds.contrast(last, position - 1);
            survive *= rate_of(self.odds_at(position) + HOPE * apart.sqrt());
            tokens += survive;
        }
        tokens
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
            && self.odds.len() == DEEPEST
            && self.odds.is_sound(DEEPEST)
            && self.tokens.len() == DEEPEST + 1
            && self
                .tokens
                .iter()
                .all(|tokens| (1.0..=DEEPEST as f64 + 1.0).contains(tokens))
            && self
                .positions
                .iter()
                .all(|p| p.accepted <= p.tests && p.filled <= WINDOW)
    }
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
        assert!((acceptance.rate(1) - 0.7).abs() < 1e-12);
        assert!((acceptance.rate(3) - 0.7 * DECAY * DECAY).abs() < 1e-12);
        for _ in 0..100 {
            acceptance.observe(1, 1, 1);
        }
        assert!(acceptance.rate(1) > 0.95, "{}", acceptance.rate(1));
        // Never tested, so not quite as sure, but far from the 0.69 of the beginning.
        let second = acceptance.rate(2);
        assert!(second > 0.9 && second < acceptance.rate(1), "{second}");
        assert!(acceptance.rate(1) - acceptance.rate(8) < 0.15);
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
        assert!(
            acceptance.hoped(1) > hoped + 0.02,
            "{} {hoped}",
            acceptance.hoped(1)
        );
        acceptance.idle(u32::MAX);
        assert!(acceptance.is_sound(1));
    }

    #[test]
    fn a_damaged_state_is_recognised() {
        let mut acceptance = Acceptance::default();
        acceptance.observe(2, 2, 2);
        assert!(acceptance.is_sound(2) && !acceptance.is_sound(1));
        acceptance.odds.set_mean(0, f64::NAN);
        assert!(!acceptance.is_sound(2));
    }
}
