//! What drafting did, for one request or for all.
//!
//! Invariant: a draft is tested if all before it in its round were accepted, and `accepted <= tested <= proposed`.

use std::collections::BTreeMap;

use lookahead_protocol::event::{DraftStats, PositionStats};

/// Counters.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RoundStats {
    rounds: u64,
    proposed: u64,
    tested: u64,
    accepted: u64,
    by_position: Vec<PositionStats>,
    depth: BTreeMap<u32, u64>,
    last: (usize, usize),
}

impl RoundStats {
    /// A forward without drafts.
    pub fn plain(&mut self) {
        self.rounds += 1;
        *self.depth.entry(0).or_default() += 1;
    }

    /// A round with drafts.
    pub fn round(&mut self, proposed: usize, tested: usize, accepted: usize) {
        self.rounds += 1;
        *self.depth.entry(proposed as u32).or_default() += 1;
        self.proposed += proposed as u64;
        self.tested += tested as u64;
        self.accepted += accepted as u64;
        if self.by_position.len() < tested {
            self.by_position.resize(tested, PositionStats::default());
        }
        for (position, counts) in self.by_position.iter_mut().enumerate().take(tested) {
            counts.tested += 1;
            counts.accepted += u64::from(position < accepted);
        }
        self.last = (tested, accepted);
    }

    /// Tested and accepted drafts of the latest round.
    pub fn last_round(&self) -> (usize, usize) {
        self.last
    }

    /// How many drafts at a position (from 0) were tested.
    pub fn tested_at(&self, position: usize) -> u64 {
        self.by_position.get(position).map_or(0, |counts| counts.tested)
    }

    /// Adds another's counts.
    pub fn add(&mut self, other: &Self) {
        self.rounds += other.rounds;
        self.proposed += other.proposed;
        self.tested += other.tested;
        self.accepted += other.accepted;
        if self.by_position.len() < other.by_position.len() {
            self.by_position.resize(other.by_position.len(), PositionStats::default());
        }
        for (sum, counts) in self.by_position.iter_mut().zip(&other.by_position) {
            sum.tested += counts.tested;
            sum.accepted += counts.accepted;
        }
        for (depth, rounds) in &other.depth {
            *self.depth.entry(*depth).or_default() += rounds;
        }
    }

    /// As `done` and `status` tell it.
    pub fn to_wire(&self) -> DraftStats {
        DraftStats {
            rounds: Some(self.rounds),
            proposed: self.proposed,
            tested: Some(self.tested),
            accepted: self.accepted,
            by_position: Some(self.by_position.clone()),
            depth: Some(self.depth.clone()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_hides_the_drafts_behind_it() {
        let mut stats = RoundStats::default();
        stats.plain();
        stats.round(3, 2, 1);
        stats.round(3, 3, 3);
        let wire = stats.to_wire();
        assert_eq!((wire.rounds, wire.proposed, wire.tested, wire.accepted), (Some(3), 6, Some(5), 4));
        let by: Vec<(u64, u64)> = wire.by_position.unwrap().iter().map(|p| (p.tested, p.accepted)).collect();
        assert_eq!(by, [(2, 2), (2, 1), (1, 1)]);
        assert_eq!(wire.depth.unwrap(), BTreeMap::from([(0, 1), (3, 2)]));
    }
}
