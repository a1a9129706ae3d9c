//! What drafting did, for one request or for all.
//!
//! Invariant: a draft is tested if all before it in its round were accepted, and `accepted <= tested <= proposed`.

use std::collections::BTreeMap;

use lookahead_protocol::event::{DraftStats, PositionStats};

/// What became of one round's drafts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Tested {
    /// Drafts in the target's forward: those proposed that a grammar let pass; 0 for a plain step.
    pub drafts: usize,
    /// Those of them whose whole prefix was accepted.
    pub tested: usize,
    /// Those accepted.
    pub accepted: usize,
}

/// Counters.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RoundStats {
    rounds: u64,
    proposed: u64,
    tested: u64,
    accepted: u64,
    by_position: Vec<PositionStats>,
    depth: BTreeMap<u32, u64>,
    last: Tested,
}

impl RoundStats {
    /// A forward without drafts.
    pub fn plain(&mut self) {
        self.rounds += 1;
        *self.depth.entry(0).or_default() += 1;
        self.last = Tested::default();
    }

    /// A round with drafts: how many were proposed, and what became of them.
    pub fn round(&mut self, proposed: usize, round: Tested) {
        let Tested {
            drafts,
            tested,
            accepted,
        } = round;
        self.rounds += 1;
        *self.depth.entry(drafts as u32).or_default() += 1;
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
        self.last = round;
    }

    /// The latest round.
    pub fn last_round(&self) -> Tested {
        self.last
    }

    /// Drafts proposed.
    pub fn proposed(&self) -> u64 {
        self.proposed
    }

    /// Drafts accepted.
    pub fn accepted(&self) -> u64 {
        self.accepted
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
            self.by_position
                .resize(other.by_position.len(), PositionStats::default());
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
    fn drafts_that_a_grammar_cuts_are_proposed_but_the_depth_is_what_was_verified() {
        let mut stats = RoundStats::default();
        stats.round(
            4,
            Tested {
                drafts: 1,
                tested: 1,
                accepted: 1,
            },
        );
        assert_eq!(stats.last_round().drafts, 1);
        stats.plain();
        assert_eq!(stats.last_round(), Tested::default());
        let wire = stats.to_wire();
        assert_eq!((wire.proposed, wire.tested, wire.accepted), (4, Some(1), 1));
        assert_eq!(wire.depth.unwrap(), BTreeMap::from([(0, 1), (1, 1)]));
    }

    #[test]
    fn a_refusal_hides_the_drafts_behind_it() {
        let mut stats = RoundStats::default();
        stats.plain();
        stats.round(
            3,
            Tested {
                drafts: 3,
                tested: 2,
                accepted: 1,
            },
        );
        stats.round(
            3,
            Tested {
                drafts: 3,
                tested: 3,
                accepted: 3,
            },
        );
        let wire = stats.to_wire();
        assert_eq!(
            (wire.rounds, wire.proposed, wire.tested, wire.accepted),
            (Some(3), 6, Some(5), 4)
        );
        let by: Vec<(u64, u64)> = wire
            .by_position
            .unwrap()
            .iter()
            .map(|p| (p.tested, p.accepted))
            .collect();
        assert_eq!(by, [(2, 2), (2, 1), (1, 1)]);
        assert_eq!(wire.depth.unwrap(), BTreeMap::from([(0, 1), (3, 2)]));
    }
}
