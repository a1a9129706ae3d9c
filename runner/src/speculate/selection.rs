//! Which depth to believe in, and which one to measure next, for one way of sampling.
//!
//! Invariant: a depth is selected only over known costs, and replaced only by one that is clearly better for a
//! moment or slightly better for long, so that noise doesn't make it flap.
//!
//! Measuring looks at what a depth might turn out to be: hoped acceptance over hoped cost. What has no chance even
//! then is left alone; the rest is visited as far as the account of [`Prober`] allows.

use super::acceptance::Acceptance;
use super::cost::CostTable;
use super::probe::{Prober, BURST, GLANCE};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Advantage with which a challenger replaces the selected depth at once.
const MARGIN: f64 = 0.03;
/// Smaller advantages add up over the rounds; sums with which a challenger replaces plain decoding never, a
/// depth in favour of another one, and a depth in favour of plain decoding.
const LASTING: (f64, f64) = (0.2, 0.15);
/// Part of an advantage that doesn't count.
const DRAIN: f64 = 0.002;
/// Rounds after which a cost near the selected one is measured again.
const STALE: u64 = 512;
/// Relative distance of a score from the selected one from which on a cost may age fully.
const DISTANT: f64 = 0.25;
/// Least share of that age at which plain decoding, and other depths, are measured again in a close contest.
const PATIENT: (f64, f64) = (0.06, 0.2);
/// Relative distance of a score within which a neighbour is measured at length.
const CLOSE: f64 = 0.05;
/// Most that a stale cost is hoped to have fallen when nothing else speaks for measuring it.
const RELIEF: f64 = 0.75;
/// Depths beyond the first unknown one that exploring may aim at.
const AHEAD: usize = 4;

/// What is known for one way of sampling.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct State {
    /// Acceptance by position.
    pub acceptance: Acceptance,
    /// Costs by context-length bucket.
    pub costs: BTreeMap<u8, CostTable>,
    /// The depth believed to be best.
    pub selected: usize,
    /// Sum of the small advantages of challengers.
    lead: f64,
    /// When others are measured.
    pub prober: Prober,
    /// Rounds seen, plain steps included.
    pub rounds: u64,
}

impl State {
    /// The costs of the nearest known context length, as seeds.
    pub fn nearest(&self, bucket: u8) -> Option<CostTable> {
        let (_, table) = self
            .costs
            .iter()
            .min_by_key(|(&known, _)| known.abs_diff(bucket))?;
        Some(table.as_seeds())
    }

    /// Tokens per second that a depth of known cost is believed to commit.
    pub fn score(&self, costs: &CostTable, depth: usize) -> Option<f64> {
        Some(self.acceptance.expected(depth) / costs.known(depth)?)
    }

    /// The best known depth up to `deepest`; the shallowest of equals.
    pub fn best(&self, costs: &CostTable, deepest: usize) -> (usize, f64) {
        let scores = (0..=deepest).filter_map(|depth| Some((depth, self.score(costs, depth)?)));
        scores.fold((0, 0.0), |best, next| if next.1 > best.1 { next } else { best })
    }

    /// Settles on a depth: the best one, unless the incumbent is nearly as good.
    pub fn select(&mut self, costs: &CostTable, deepest: usize) -> usize {
        let (best, top) = self.best(costs, deepest);
        let incumbent = Some(self.selected).filter(|&depth| depth <= deepest);
        let advantage = incumbent
            .and_then(|d| self.score(costs, d))
            .map_or(f64::INFINITY, |own| top / own - 1.0);
        // While parked nothing is learnt about acceptance, so time is no evidence for drafting.
        self.lead = if self.selected > 0 {
            (self.lead + advantage.min(MARGIN) - DRAIN).max(0.0)
        } else {
            0.0
        };
        let patience = if best == 0 { LASTING.1 } else { LASTING.0 };
        if best != self.selected && (advantage > MARGIN || self.lead > patience) {
            self.selected = best;
            self.lead = 0.0;
            self.prober.hurry();
        }
        self.selected
    }

    /// The depth most worth measuring, and whether it might beat the selected depth by more than the margin.
    fn candidate(&self, costs: &CostTable, deepest: usize) -> Option<(usize, bool)> {
        let bar = self.score(costs, self.selected)? * (1.0 + MARGIN);
        let hoped = |depth: usize| {
            let doubt = costs.doubt(depth, self.selected).unwrap_or(0.0);
            let seconds = costs.hoped(depth)? * (-doubt).exp();
            let possible = (depth + 1) as f64 / seconds > bar;
            let sure = costs.known(depth).map_or(0, |_| self.selected);
            let tokens = self.acceptance.expected_hoped_beyond(depth, sure);
            possible.then_some((depth, tokens / seconds))
        };
        // Depths beyond the first unknown one are guesses; a few of them are looked at, because a cost that jumps at
        // one width may be flat behind it.
        let unknown = (1..=deepest).find(|&depth| costs.known(depth).is_none());
        let reach = unknown.map_or(deepest, |depth| deepest.min(depth + AHEAD));
        let others = (1..=reach).filter(|&depth| depth != self.selected);
        let (best, score) = others
            .filter_map(hoped)
            .max_by(|a, b| a.1.total_cmp(&b.1).then(b.0.cmp(&a.0)))?;
        Some((unknown.map_or(best, |depth| depth.min(best)), score > bar))
    }

    /// A neighbour of the selected depth whose cost nobody has measured for long.
    fn stale(&self, costs: &CostTable, deepest: usize) -> Option<usize> {
        let selected = self.selected;
        let near = [0, selected.saturating_sub(1), (selected + 1).min(deepest)];
        let bar = self.score(costs, selected)?;
        // The closer the contest, the less it costs to measure, and the more it matters.
        let stale = |&depth: &usize| {
            let gap = self.score(costs, depth).map_or(1.0, |score| 1.0 - score / bar);
            let least = if depth == 0 { PATIENT.0 } else { PATIENT.1 };
            let patience = STALE as f64 * (gap / DISTANT).clamp(least, 1.0);
            self.rounds.saturating_sub(costs.seen(depth)) as f64 >= patience
        };
        let old = near.into_iter().filter(|&depth| depth != selected).filter(stale);
        let depth = old.min_by_key(|&depth| costs.seen(depth))?;
        let hoped = self.acceptance.expected_hoped(depth) / (RELIEF * costs.hoped(depth)?);
        (hoped > bar).then_some(depth)
    }

    /// Seconds that a round at `depth` is likely to lose against the selected depth.
    fn loss(&self, costs: &CostTable, depth: usize) -> f64 {
        let (Some(rate), Some(seconds)) = (self.score(costs, self.selected), costs.likely(depth)) else {
            return 0.0;
        };
        (seconds - self.acceptance.expected(depth) / rate).max(0.0)
    }

    /// Begins a burst if the account allows it.
    fn visit(&mut self, costs: &CostTable, depth: usize, routine: bool) -> Option<usize> {
        let score = |depth| self.score(costs, depth);
        let close = score(depth)
            .zip(score(self.selected))
            .is_some_and(|(a, b)| a > (1.0 - CLOSE) * b);
        let rounds = match costs.known(depth) {
            Some(_) if depth > 0 && !close => GLANCE,
            Some(_) if depth > 0 && self.selected > 0 => 2 * BURST,
            _ => BURST,
        };
        // Plain decoding is what drafting must not lose to: measuring it doesn't wait for money.
        if depth > 0
            && !self
                .prober
                .affordable(f64::from(rounds) * self.loss(costs, depth))
        {
            return None;
        }
        self.prober.begin(depth, rounds, routine);
        Some(depth)
    }

    /// The depth to measure now instead of running at the selected one.
    pub fn probe(&mut self, costs: &CostTable, deepest: usize, suspect: bool) -> Option<usize> {
        if let Some(burst) = self.prober.burst() {
            let wanted = burst.depth <= deepest && burst.depth != self.selected;
            if wanted && (burst.depth == 0 || self.prober.solvent()) {
                return Some(burst.depth);
            }
        }
        let surprising = self.prober.surprising();
        self.prober.stop();
        let candidate = self.candidate(costs, deepest);
        if let Some((depth, true)) = candidate {
            let new = costs.known(depth).is_none() || !self.acceptance.explored(depth);
            if new || surprising.is_some() {
                if let Some(depth) = self.visit(costs, depth, false) {
                    return Some(depth);
                }
            }
        }
        if let Some(depth) = self
            .stale(costs, deepest)
            .and_then(|depth| self.visit(costs, depth, false))
        {
            return Some(depth);
        }
        if !self.prober.due() {
            return None;
        }
        let suspected = (suspect && self.selected == 0).then_some(1);
        // Plain decoding teaches nothing about acceptance, so that only what can't pay at all is left alone.
        let worthwhile = candidate.filter(|&(_, promising)| promising || self.selected == 0);
        match self
            .stale(costs, deepest)
            .or(worthwhile.map(|(depth, _)| depth))
            .or(suspected)
        {
            Some(depth) => self.visit(costs, depth, true),
            None => {
                self.prober.postpone();
                None
            }
        }
    }

    /// Whether a state read back from a file keeps the invariant for depths up to `deepest`.
    #[must_use]
    pub fn is_sound(&self, deepest: usize) -> bool {
        self.acceptance.is_sound(deepest)
            && self.costs.values().all(|table| table.is_sound(deepest))
            && self.selected <= deepest
            && self.lead.is_finite()
            && self.prober.is_sound(deepest)
    }
}
