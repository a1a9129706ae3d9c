//! What a round costs at each draft depth, in seconds, for one range of context lengths.
//!
//! Invariant: a depth's cost is known only once it was seeded by a measurement at load or by the median of
//! [`CALIBRATION`] rounds, and every known cost is finite and positive.
//!
//! A first sample is often wrong (a kernel is compiled, a page is touched for the first time), so it never
//! counts alone. Later samples move the estimate by an exponentially weighted average whose step is clamped:
//! a stalled round can't turn the ranking of the depths over. Part of each move is shared with all other
//! depths, because what changes a cost while it is being measured (heat, load, a growing context) changes all
//! of them, and depths that aren't in use have nobody to measure them.

use serde::{Deserialize, Serialize};

/// Samples whose median is a depth's first own cost.
pub const CALIBRATION: usize = 4;
/// Samples that an average stands for at most, and at least when it is old.
const MEMORY: (f64, f64) = (2.0, 32.0);
/// Share of its weight that an average keeps over a round that didn't measure it.
const AGEING: f64 = 0.998;
/// Largest relative innovation that a sample may carry.
const CLAMP: f64 = 0.25;
/// Share of a move that is taken for a change of the whole machine.
const COMMON: f64 = 0.5;
/// Bounds of the correction that a first own measurement passes on to depths that are only seeded.
const RESCALE: (f64, f64) = (0.5, 2.0);

/// One depth's samples and estimate.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
struct Cell {
    /// The first own samples, until there are enough of them for a median.
    first: Vec<f64>,
    /// Own samples seen in all.
    samples: u64,
    /// The estimate in seconds, seeded or measured.
    seconds: Option<f64>,
    /// Samples that the estimate stands for.
    weight: f64,
    /// Round at which the depth was last measured.
    seen: u64,
}

/// Seconds per round by draft depth; depth 0 is one token of pipelined plain decoding.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct CostTable {
    cells: Vec<Cell>,
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

fn usable(seconds: f64) -> bool {
    seconds.is_finite() && seconds > 0.0
}

/// The median; of an even number of samples the lower one, since what disturbs a clock makes it late.
fn median(samples: &[f64]) -> f64 {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted[(sorted.len() - 1) / 2]
}

impl CostTable {
    fn cell(&mut self, depth: usize) -> &mut Cell {
        if self.cells.len() <= depth {
            self.cells.resize(depth + 1, Cell::default());
        }
        &mut self.cells[depth]
    }

    /// Sets a depth's cost from a measurement at load. Own samples start afresh; unusable values are ignored.
    pub fn seed(&mut self, depth: usize, seconds: f64) {
        if usable(seconds) {
            *self.cell(depth) = Cell {
                seconds: Some(seconds),
                ..Cell::default()
            };
        }
    }

    /// Takes in one measured round. Values that aren't finite and positive are ignored.
    pub fn observe(&mut self, depth: usize, seconds: f64, round: u64) {
        if !usable(seconds) {
            return;
        }
        let cell = self.cell(depth);
        let age = i32::try_from(round.saturating_sub(cell.seen)).unwrap_or(i32::MAX);
        cell.seen = round;
        cell.samples = cell.samples.saturating_add(1);
        if cell.first.len() < CALIBRATION {
            cell.first.push(seconds);
            if cell.first.len() == CALIBRATION {
                let own = median(&cell.first);
                cell.weight = CALIBRATION as f64;
                let seeded = cell.seconds.replace(own);
                if let Some(seeded) = seeded {
                    self.rescale(depth, own / seeded);
                }
            }
            return;
        }
        let Some(known) = cell.seconds else { return };
        cell.weight = ((cell.weight * AGEING.powi(age)).max(MEMORY.0) + 1.0).min(MEMORY.1);
        let step = (seconds / known - 1.0).clamp(-CLAMP, CLAMP) / cell.weight;
        cell.seconds = Some(known * (1.0 + step));
        for (other, cell) in self.cells.iter_mut().enumerate() {
            if other != depth {
                cell.seconds = cell.seconds.map(|seconds| seconds * (1.0 + COMMON * step));
            }
        }
    }

    /// Passes the error of one seed on to the depths that have only seeds.
    fn rescale(&mut self, measured: usize, ratio: f64) {
        let ratio = ratio.clamp(RESCALE.0, RESCALE.1);
        for (depth, cell) in self.cells.iter_mut().enumerate() {
            if depth != measured && cell.first.len() < CALIBRATION {
                cell.seconds = cell.seconds.map(|seconds| seconds * ratio);
            }
        }
    }

    /// The same estimates as seeds for a neighbouring context length.
    #[must_use]
    pub fn as_seeds(&self) -> Self {
        let cells = self
            .cells
            .iter()
            .map(|cell| Cell {
                seconds: cell.seconds,
                ..Cell::default()
            })
            .collect();
        Self { cells }
    }

    /// Seconds per round, where the depth was measured often enough or seeded.
    #[must_use]
    pub fn known(&self, depth: usize) -> Option<f64> {
        self.cells.get(depth).and_then(|cell| cell.seconds)
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
                seconds: cell.seconds?,
                samples: cell.samples,
            })
        };
        self.cells.iter().enumerate().filter_map(row).collect()
    }

    /// Whether a table read back from a file keeps the invariant for depths up to `deepest`.
    #[must_use]
    pub fn is_sound(&self, deepest: usize) -> bool {
        self.cells.len() <= deepest + 1
            && self.cells.iter().all(|cell| {
                (0.0..=MEMORY.1).contains(&cell.weight)
                    && cell.first.len() <= CALIBRATION
                    && cell.first.iter().all(|&s| usable(s))
                    && cell.seconds.is_none_or(usable)
            })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn measured(depth: usize, samples: &[f64]) -> CostTable {
        let mut table = CostTable::default();
        for (round, &seconds) in samples.iter().enumerate() {
            table.observe(depth, seconds, round as u64);
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
        table.observe(0, 1_000.0, 5);
        let after = table.known(0).unwrap();
        assert!(
            after > 1.0 && after < 1.0 + 1.01 * CLAMP / (CALIBRATION + 1) as f64,
            "{after}"
        );
    }

    #[test]
    fn a_slower_machine_moves_depths_that_are_not_in_use_as_well() {
        let mut table = measured(0, &[1.0; 4]);
        table.seed(2, 2.0);
        for round in 0..150 {
            table.observe(0, 1.5, round);
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
            table.observe(0, 1.2, round);
        }
        assert_eq!(table.known(0), Some(1.0));
        table.observe(0, 1.2, 3);
        assert_eq!(table.known(0), Some(1.2));
        // The seed of a depth that wasn't measured is corrected by the same error.
        assert!((table.known(3).unwrap() - 2.4).abs() < 1e-12);
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
        assert_eq!((table.hoped(6), table.likely(6)), (Some(6.0), Some(8.0)));
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
        table.cells[0].seconds = Some(f64::NAN);
        assert!(!table.is_sound(0));
        assert!(!measured(9, &[1.0; 4]).is_sound(8));
    }
}
