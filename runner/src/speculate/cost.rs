//! What a round costs at each draft depth, in seconds, for one range of context lengths.
//!
//! Invariant: a depth's cost is known only once it was seeded by a measurement at load or by the median of
//! [`CALIBRATION`] rounds, and every known cost is finite and positive.
//!
//! The belief is a Gaussian over the logarithms of all known costs together (a Kalman filter: R. E. Kalman, "A new
//! approach to linear filtering and prediction problems", 1960). What changes a cost while it is being measured (heat,
//! load, a growing context) mostly changes all of them, so the drift between two rounds is mostly common: a sample of
//! one depth then moves the others by as much as they have in common with it, and no further. A seed that was never
//! measured follows the machine wholly, one that was found wrong by itself leaves the others alone.
//!
//! A first sample is often wrong (a kernel is compiled, a page is touched for the first time), so it never counts
//! alone. Later samples are clamped: a stalled round can't turn the ranking of the depths over, while a run of samples
//! beyond the clamp is taken for what it is, another speed of the machine.

use super::belief::Belief;
use serde::{Deserialize, Serialize};

/// Samples whose median is a depth's first own cost.
pub const CALIBRATION: usize = 4;
/// Variances of the logarithm of a seed: its error in common with all other seeds, and its own.
const SEED: (f64, f64) = (0.04, 0.0025);
/// Variances that a round adds to every logarithm: in common, and for each depth by itself.
const DRIFT: (f64, f64) = (4e-6, 1e-6);
/// Variance beyond which time adds nothing.
const VAGUE: f64 = 0.25;
/// Bounds of the logarithm of a cost in seconds, far beyond what any clock gives.
const LOGS: (f64, f64) = (-30.0, 30.0);
/// Variance of one sample: at first, at least and at most.
const NOISE: (f64, f64, f64) = (0.0025, 1e-4, 0.04);
/// Samples that the estimate of that variance stands for.
const NOISE_MEMORY: f64 = 64.0;
/// Standard deviations that a sample may move the estimate by.
const CLAMP: f64 = 3.0;
/// Samples in a row beyond the clamp, to the same side, after which the machine has changed.
const CHANGED: i8 = 4;
/// Part of such a change that may be a depth's own.
const APART: f64 = 0.02;
/// Rounds of a stretch timed as a whole that count as so many samples.
const STRETCH: u32 = 8;

/// Where a cost comes from.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
enum Origin {
    /// It isn't known.
    #[default]
    Unknown,
    /// A measurement at load.
    Seeded,
    /// Own rounds.
    Measured,
}

/// One depth's samples.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
struct Cell {
    /// The first own samples, until there are enough of them for a median.
    first: Vec<f64>,
    /// Own samples seen in all.
    samples: u64,
    /// Where the estimate comes from.
    origin: Origin,
    /// Round at which the depth was last measured.
    seen: u64,
}

/// Seconds per round by draft depth; depth 0 is one token of pipelined plain decoding.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CostTable {
    cells: Vec<Cell>,
    /// Logarithms of seconds by depth; those of unknown costs are of no use.
    logs: Belief,
    /// Variance of the logarithm of one round's time.
    noise: f64,
    /// Samples in a row beyond the clamp; negative below it.
    beyond: i8,
    /// Round of the last sample.
    now: u64,
}

/// One line of the table, for status and logs.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct CostRow {
    /// Draft depth; the forward is one token wider.
    pub depth: usize,
    /// Estimated seconds per round.
    pub seconds: f64,
    /// Rounds that were measured; 0 for a depth that is only seeded.
    pub samples: u64,
}

impl Default for CostTable {
    fn default() -> Self {
        Self {
            cells: Vec::new(),
            logs: Belief::default(),
            noise: NOISE.0,
            beyond: 0,
            now: 0,
        }
    }
}

fn usable(seconds: f64) -> bool {
    seconds > 0.0 && (LOGS.0..=LOGS.1).contains(&seconds.ln())
}

/// The median; of an even number of samples the lower one, since what disturbs a clock makes it late.
fn median(samples: &[f64]) -> f64 {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted[(sorted.len() - 1) / 2]
}

impl CostTable {
    fn cell(&mut self, depth: usize) -> &mut Cell {
        while self.cells.len() <= depth {
            self.cells.push(Cell::default());
            self.logs.push(0.0, 0.0);
        }
        &mut self.cells[depth]
    }

    /// Sets a depth's cost from a measurement at load. Own samples start afresh; unusable values are ignored.
    pub fn seed(&mut self, depth: usize, seconds: f64) {
        if !usable(seconds) {
            return;
        }
        *self.cell(depth) = Cell {
            origin: Origin::Seeded,
            ..Cell::default()
        };
        self.logs.set_mean(depth, seconds.ln());
        let cells = &self.cells;
        let seeded = |other: usize| cells[other].origin == Origin::Seeded && cells[other].first.is_empty();
        self.logs.change(|a, b, old| match (a == depth, b == depth) {
            (true, true) => SEED.0 + SEED.1,
            (true, false) if seeded(b) => SEED.0,
            (false, true) if seeded(a) => SEED.0,
            (false, false) => old,
            _ => 0.0,
        });
    }

    /// Takes in `rounds` rounds of `seconds` each, timed together. Values that no clock can give are ignored.
    pub fn observe(&mut self, depth: usize, seconds: f64, rounds: u32, round: u64) {
        if !usable(seconds) || rounds == 0 {
            return;
        }
        self.drift(round);
        let noise = self.noise;
        let cell = self.cell(depth);
        cell.seen = round;
        cell.samples = cell.samples.saturating_add(u64::from(rounds));
        if cell.first.len() < CALIBRATION {
            cell.first.push(seconds);
            if cell.first.len() == CALIBRATION {
                let own = median(&cell.first).ln();
                let variance = 2.0 * noise / CALIBRATION as f64;
                match std::mem::replace(&mut cell.origin, Origin::Measured) {
                    Origin::Unknown => {
                        self.logs.set_mean(depth, own);
                        self.logs.change(|a, b, old| match (a == depth, b == depth) {
                            (true, true) => variance,
                            (false, false) => old,
                            _ => 0.0,
                        });
                    }
                    _ => self.correct(depth, own, variance),
                }
            }
            return;
        }
        let variance = noise / f64::from(rounds.min(STRETCH));
        let Some(known) = self.logs.mean(depth) else {
            return;
        };
        let innovation = seconds.ln() - known;
        let own = self.logs.covariance(depth, depth);
        let limit = CLAMP * (own + variance).sqrt();
        let side = if innovation.abs() > limit {
            innovation.signum() as i8
        } else {
            0
        };
        self.beyond = if side == self.beyond.signum() {
            self.beyond.saturating_add(side)
        } else {
            side
        };
        if self.beyond.abs() >= CHANGED {
            self.beyond = 0;
            let jump = innovation.powi(2);
            // What the depths cost in proportion to each other is less certain then, too.
            self.change_known(|a, b, old| old + jump * if a == b { 1.0 + APART } else { 1.0 });
            self.correct(depth, known + innovation, variance);
            return;
        }
        if rounds == 1 {
            let spread = innovation.powi(2).min(CLAMP.powi(2) * noise) - own;
            self.noise = (noise + (spread - noise) / NOISE_MEMORY).clamp(NOISE.1, NOISE.2);
        }
        self.correct(depth, known + innovation.clamp(-limit, limit), variance);
    }

    /// Moves all estimates by what a measured logarithm says about one.
    fn correct(&mut self, depth: usize, measured: f64, variance: f64) {
        let known = self.logs.mean(depth).unwrap_or(measured);
        self.logs.update(depth, measured - known, variance);
        self.logs.bound(LOGS.0, LOGS.1);
    }

    /// Changes the covariances of known depths.
    fn change_known(&mut self, of: impl Fn(usize, usize, f64) -> f64) {
        let cells = &self.cells;
        let known = |depth: usize| cells[depth].origin != Origin::Unknown;
        self.logs
            .change(|a, b, old| if known(a) && known(b) { of(a, b, old) } else { old });
    }

    /// Time passes: what isn't measured becomes less certain.
    fn drift(&mut self, round: u64) {
        let passed = round.saturating_sub(self.now) as f64;
        self.now = round.max(self.now);
        let widest = (0..self.cells.len())
            .map(|d| self.logs.covariance(d, d))
            .fold(0.0, f64::max);
        let passed = passed.min((VAGUE - widest).max(0.0) / DRIFT.0);
        self.change_known(|a, b, old| old + passed * (DRIFT.0 + if a == b { DRIFT.1 } else { 0.0 }));
    }

    /// The same estimates as seeds for a neighbouring context length.
    #[must_use]
    pub fn as_seeds(&self) -> Self {
        let mut table = Self {
            noise: self.noise,
            ..Self::default()
        };
        for depth in 0..self.cells.len() {
            if let Some(seconds) = self.known(depth) {
                table.seed(depth, seconds);
            }
        }
        table
    }

    /// Standard deviation of the logarithm of the ratio of two costs; `None` unless both are known.
    #[must_use]
    pub fn doubt(&self, a: usize, b: usize) -> Option<f64> {
        self.known(a)?;
        self.known(b)?;
        Some(self.logs.contrast(a, b).sqrt())
    }

    /// Seconds per round, where the depth was measured often enough or seeded.
    #[must_use]
    pub fn known(&self, depth: usize) -> Option<f64> {
        let cell = self.cells.get(depth)?;
        (cell.origin != Origin::Unknown).then(|| self.logs.mean(depth).map(f64::exp))?
    }

    /// Own samples of a depth.
    #[must_use]
    pub fn samples(&self, depth: usize) -> u64 {
        self.cells.get(depth).map_or(0, |cell| cell.samples)
    }

    /// Round at which a depth was last measured; 0 if never.
    #[must_use]
    pub fn seen(&self, depth: usize) -> u64 {
        self.cells.get(depth).map_or(0, |cell| cell.seen)
    }

    fn below(&self, depth: usize) -> Option<(usize, f64)> {
        (0..depth.min(self.cells.len()))
            .rev()
            .find_map(|d| Some((d, self.known(d)?)))
    }

    fn above(&self, depth: usize) -> Option<(usize, f64)> {
        (depth + 1..self.cells.len()).find_map(|d| Some((d, self.known(d)?)))
    }

    /// What a depth may be hoped to cost: its known cost, a line between known neighbours, or beyond the deepest
    /// known one the rise of the drafting depths before it without their dearest step, since a jump at one width is
    /// seldom followed by another. `None` while nothing is known.
    #[must_use]
    pub fn hoped(&self, depth: usize) -> Option<f64> {
        self.estimate(depth, |total, largest, steps| {
            if steps > 1 {
                (total - largest) / (steps - 1) as f64
            } else {
                0.0
            }
        })
    }

    /// What a depth is likely to cost: like [`hoped`](Self::hoped), but with all steps counted.
    #[must_use]
    pub fn likely(&self, depth: usize) -> Option<f64> {
        self.estimate(
            depth,
            |total, _, steps| if steps > 0 { total / steps as f64 } else { 0.0 },
        )
    }

    fn estimate(&self, depth: usize, slope: impl Fn(f64, f64, usize) -> f64) -> Option<f64> {
        if let Some(known) = self.known(depth) {
            return Some(known);
        }
        match (self.below(depth), self.above(depth)) {
            (Some((low, a)), Some((high, b))) => {
                Some(a + (b - a) * (depth - low) as f64 / (high - low) as f64)
            }
            (None, Some((_, seconds))) => Some(seconds),
            (Some((last, seconds)), None) => {
                // The step from plain decoding to drafting says nothing about the steps from draft to draft.
                let drafting: Vec<f64> = (1..=last).filter_map(|d| self.known(d)).collect();
                let steps = drafting.windows(2).map(|pair| pair[1] - pair[0]);
                let largest = steps.clone().fold(0.0, f64::max);
                let rise = slope(steps.clone().sum(), largest, steps.count()).max(0.0);
                Some(seconds + rise * (depth - last) as f64)
            }
            (None, None) => None,
        }
    }

    /// All known costs, shallowest first.
    #[must_use]
    pub fn rows(&self) -> Vec<CostRow> {
        let row = |(depth, cell): (usize, &Cell)| {
            Some(CostRow {
                depth,
                seconds: self.known(depth)?,
                samples: cell.samples,
            })
        };
        self.cells.iter().enumerate().filter_map(row).collect()
    }

    /// Whether a table read back from a file keeps the invariant for depths up to `deepest`.
    #[must_use]
    pub fn is_sound(&self, deepest: usize) -> bool {
        let sound = |cell: &Cell| cell.first.len() <= CALIBRATION && cell.first.iter().all(|&s| usable(s));
        self.cells.len() <= deepest + 1
            && self.logs.len() == self.cells.len()
            && self.logs.is_sound(deepest + 1)
            && (NOISE.1..=NOISE.2).contains(&self.noise)
            && (-CHANGED..=CHANGED).contains(&self.beyond)
            && self.cells.iter().all(sound)
            && (0..self.cells.len())
                .filter_map(|depth| self.known(depth))
                .all(usable)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn measured(depth: usize, samples: &[f64]) -> CostTable {
        let mut table = CostTable::default();
        for (round, &seconds) in samples.iter().enumerate() {
            table.observe(depth, seconds, 1, round as u64);
        }
        table
    }

    #[test]
    fn a_cost_counts_only_from_the_fourth_sample_on_and_is_their_median() {
        assert_eq!(measured(1, &[9.0, 1.0, 1.0]).known(1), None);
        // An inflated first sample (a kernel was compiled) leaves no trace.
        assert_eq!(measured(1, &[9.0, 1.0, 1.2, 1.1]).known(1), Some(1.1));
    }

    #[test]
    fn one_stalled_round_moves_a_cost_by_a_few_per_cent() {
        let mut table = measured(0, &[1.0; 4]);
        table.observe(0, 1_000.0, 1, 5);
        let after = table.known(0).unwrap();
        assert!(after > 1.0 && after < 1.1, "{after}");
    }

    #[test]
    fn a_slower_machine_moves_depths_that_are_not_in_use_as_well() {
        let mut table = measured(0, &[1.0; 4]);
        table.seed(2, 2.0);
        for round in 0..150 {
            table.observe(0, 1.5, 1, round);
        }
        assert!((table.known(0).unwrap() - 1.5).abs() < 0.02);
        assert!(table.known(2).unwrap() > 2.3);
    }

    #[test]
    fn a_seed_counts_at_once_and_yields_to_the_median_of_own_samples() {
        let mut table = CostTable::default();
        table.seed(0, 1.0);
        table.seed(3, 2.0);
        assert_eq!(table.known(0), Some(1.0));
        for round in 0..3 {
            table.observe(0, 1.2, 1, round);
        }
        assert_eq!(table.known(0), Some(1.0));
        table.observe(0, 1.2, 1, 3);
        assert!((table.known(0).unwrap() - 1.2).abs() < 0.01);
        // What the seed was off by in common with the others is corrected in a depth that wasn't measured, in good part.
        let other = table.known(3).unwrap();
        assert!(other > 2.3 && other < 2.4, "{other}");
    }

    #[test]
    fn a_seed_that_was_wrong_by_itself_leaves_measured_depths_alone() {
        let mut table = CostTable::default();
        for depth in 0..4 {
            table.seed(depth, 1.0 + depth as f64);
        }
        let mut round = 0;
        for depth in [0, 1] {
            for _ in 0..40 {
                round += 1;
                table.observe(depth, 1.0 + depth as f64, 1, round);
            }
        }
        for _ in 0..12 {
            round += 1;
            table.observe(3, 6.0, 1, round);
        }
        assert!(
            (table.known(3).unwrap() - 6.0).abs() < 0.3,
            "{:?}",
            table.known(3)
        );
        // A seed that nobody measured may be wrong in the same way, so that it follows a part of the way.
        for (depth, cost, off) in [(0, 1.0, 0.06), (1, 2.0, 0.06), (2, 3.0, 0.2)] {
            let known = table.known(depth).unwrap();
            assert!((known / cost - 1.0).abs() < off, "{depth}: {known}");
        }
    }

    #[test]
    fn a_sudden_change_of_the_whole_machine_is_followed_within_twenty_rounds() {
        let mut table = CostTable::default();
        for depth in 0..4 {
            table.seed(depth, 1.0 + depth as f64);
        }
        for round in 0..100 {
            table.observe(2, 3.0, 1, round);
        }
        for round in 100..120 {
            table.observe(2, 6.0, 1, round);
        }
        for (depth, cost) in [(0, 2.0), (2, 6.0), (3, 8.0)] {
            let known = table.known(depth).unwrap();
            assert!((known / cost - 1.0).abs() < 0.1, "{depth}: {known}");
        }
    }

    #[test]
    fn unknown_depths_take_after_their_neighbours() {
        let mut table = CostTable::default();
        assert_eq!((table.hoped(1), table.likely(1)), (None, None));
        table.seed(0, 1.0);
        table.seed(2, 2.0);
        assert_eq!(table.hoped(1), Some(1.5));
        // A dear first draft doesn't make the next ones dear.
        assert_eq!((table.hoped(4), table.likely(4)), (Some(2.0), Some(2.0)));
        table.seed(3, 2.5);
        assert_eq!((table.hoped(5), table.likely(5)), (Some(2.5), Some(3.5)));
        // A jump at one width is not hoped to go on.
        table.seed(4, 5.0);
        let beyond = [table.hoped(6), table.likely(6)].map(|seconds| (seconds.unwrap() * 1e9).round() / 1e9);
        assert_eq!(beyond, [6.0, 8.0]);
    }

    #[test]
    fn values_no_clock_can_give_are_ignored() {
        let table = measured(0, &[f64::NAN, -1.0, 0.0, f64::INFINITY, 1.0, 1.0, 1.0, 1.0]);
        assert_eq!(table.known(0), Some(1.0));
        assert_eq!(table.samples(0), 4);
        assert!(table.is_sound(16));
    }

    #[test]
    fn a_damaged_table_is_recognised() {
        let mut table = measured(0, &[1.0; 4]);
        assert!(table.is_sound(0));
        table.logs.set_mean(0, f64::NAN);
        assert!(!table.is_sound(0));
        assert!(!measured(9, &[1.0; 4]).is_sound(8));
    }
}
