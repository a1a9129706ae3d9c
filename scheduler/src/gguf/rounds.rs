//! What drafting did for one request, told from the figures that llama-server sends with every token.
//!
//! llama-server has only two sums: how many tokens were drafted and how many of them were accepted. With `timings_per_token`
//! both come with each token, and a round shows as one step of them, so that rounds, depths and positions follow.
//!
//! Invariant: nothing is guessed. Ids that come without an event of their own (parts of a character) may hide where one round
//! ended and the next began; from there on only the two sums are told.

use std::collections::BTreeMap;

use lookahead_protocol::event::{DraftStats, PositionStats};

/// Counts rounds while a stream is read.
#[derive(Debug)]
pub(super) struct Rounds {
    /// Ids that the server may generate.
    budget: u64,
    /// Ids that it has counted so far.
    predicted: u64,
    /// Ids up to the end of the last round that is known. The first id comes from the prefill.
    round_end: u64,
    proposed: u64,
    accepted: u64,
    /// The longest draft seen, which is how long all are that the budget doesn't cut.
    longest: u64,
    tested: u64,
    positions: Vec<PositionStats>,
    depth: BTreeMap<u32, u64>,
    known: bool,
}

impl Rounds {
    pub(super) fn new(budget: u64) -> Self {
        Self {
            budget,
            predicted: 0,
            round_end: 1,
            proposed: 0,
            accepted: 0,
            longest: 0,
            tested: 0,
            positions: Vec::new(),
            depth: BTreeMap::new(),
            known: true,
        }
    }

    /// Takes the figures of one event: ids generated, drafted and accepted, all since the request's start.
    pub(super) fn see(&mut self, predicted: u64, proposed: u64, accepted: u64) {
        let drafted = proposed.saturating_sub(self.proposed);
        let agreed = accepted.saturating_sub(self.accepted);
        let is_hidden = predicted > self.predicted + 1 && predicted > self.round_end + 1;
        (self.proposed, self.accepted) = (self.proposed.max(proposed), self.accepted.max(accepted));
        if drafted > 0 {
            // A draft as long as the longest, where the budget cuts none short, can't be two.
            let is_one = !is_hidden
                || (drafted == self.longest
                    && self.budget.saturating_sub(predicted) > self.longest.saturating_add(2));
            // A round yields at least one id that the last one didn't.
            if is_one && agreed <= drafted && predicted > self.round_end {
                self.count_round(drafted, agreed);
                self.round_end += agreed + 1;
            } else {
                self.known = false;
            }
            self.known &= predicted <= self.round_end;
        } else {
            self.known &= agreed == 0;
            let plain = predicted.saturating_sub(self.round_end);
            if plain > 0 {
                *self.depth.entry(0).or_default() += plain;
                self.round_end = predicted;
            }
        }
        self.predicted = self.predicted.max(predicted);
    }

    fn count_round(&mut self, drafted: u64, agreed: u64) {
        self.longest = self.longest.max(drafted);
        let tested = drafted.min(agreed + 1);
        self.tested += tested;
        *self
            .depth
            .entry(u32::try_from(drafted).unwrap_or(u32::MAX))
            .or_default() += 1;
        // Bounded by the server's largest depth: a draft is never longer than one batch.
        let tested = usize::try_from(tested).unwrap_or(usize::MAX).min(1024);
        if self.positions.len() < tested {
            self.positions.resize(tested, PositionStats::default());
        }
        for (position, counts) in self.positions.iter_mut().take(tested).enumerate() {
            counts.tested += 1;
            counts.accepted += u64::from((position as u64) < agreed);
        }
    }

    /// The figures as far as they are known.
    pub(super) fn stats(&self) -> DraftStats {
        if !self.known {
            return DraftStats {
                proposed: self.proposed,
                accepted: self.accepted,
                ..DraftStats::default()
            };
        }
        DraftStats {
            rounds: Some(self.depth.values().sum()),
            proposed: self.proposed,
            tested: Some(self.tested),
            accepted: self.accepted,
            by_position: Some(self.positions.clone()),
            depth: Some(self.depth.clone()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The figures that a server sends for rounds of (drafted, accepted), one event an id, those of `silent` ids left out.
    fn told(plan: &[(u64, u64)], silent: &[u64], budget: u64) -> Rounds {
        let mut rounds = Rounds::new(budget);
        let (mut predicted, mut proposed, mut accepted) = (1, 0, 0);
        rounds.see(1, 0, 0);
        for &(drafted, agreed) in plan {
            proposed += drafted;
            accepted += agreed;
            for _ in 0..=agreed {
                predicted += 1;
                if !silent.contains(&predicted) {
                    rounds.see(predicted, proposed, accepted);
                }
            }
        }
        // The last event repeats the sums.
        rounds.see(predicted, proposed, accepted);
        rounds
    }

    fn counted(plan: &[(u64, u64)]) -> DraftStats {
        let mut rounds = Rounds::new(0);
        let mut plain = 0;
        for &(drafted, agreed) in plan {
            match drafted {
                0 => plain += 1,
                _ => rounds.count_round(drafted, agreed),
            }
            rounds.proposed += drafted;
            rounds.accepted += agreed;
        }
        if plain > 0 {
            rounds.depth.insert(0, plain);
        }
        rounds.stats()
    }

    #[test]
    fn rounds_depths_and_positions_follow_from_the_sums() {
        let stats = told(&[(3, 3), (3, 0), (3, 2), (1, 1), (0, 0)], &[], 100).stats();
        assert_eq!((stats.rounds, stats.proposed, stats.accepted), (Some(5), 10, 6));
        assert_eq!(stats.tested, Some(3 + 1 + 3 + 1));
        let positions = stats.by_position.unwrap();
        let pairs: Vec<_> = positions.iter().map(|it| (it.tested, it.accepted)).collect();
        assert_eq!(pairs, [(4, 3), (2, 2), (2, 1)]);
        assert_eq!(stats.depth.unwrap(), BTreeMap::from([(0, 1), (1, 1), (3, 3)]));
    }

    #[test]
    fn without_drafts_every_id_but_the_first_is_a_round() {
        let stats = told(&[(0, 0); 4], &[], 100).stats();
        assert_eq!(
            (stats.rounds, stats.depth),
            (Some(4), Some(BTreeMap::from([(0, 4)])))
        );
    }

    #[test]
    fn a_character_over_two_rounds_leaves_only_the_sums() {
        let plan = [(3, 0), (3, 1), (3, 0), (3, 1)];
        // Ids 3 and 4 make up the second round, id 5 the third.
        let stats = told(&plan, &[3, 4], 100).stats();
        assert_eq!((stats.proposed, stats.accepted), (12, 2));
        assert_eq!(
            (stats.rounds, stats.tested, stats.by_position, stats.depth),
            (None, None, None, None)
        );
        // Inside one round nothing is lost, as long as no draft is cut by the budget.
        assert_eq!(told(&plan, &[3], 100).stats(), counted(&plan));
        assert_eq!(told(&plan, &[3], 7).stats().rounds, None);
    }

    #[test]
    fn a_server_that_tells_the_sums_only_at_the_end_leaves_only_the_sums() {
        let mut rounds = Rounds::new(100);
        (1..=9).for_each(|predicted| rounds.see(predicted, 0, 0));
        rounds.see(9, 12, 5);
        let stats = rounds.stats();
        assert_eq!((stats.rounds, stats.proposed, stats.accepted), (None, 12, 5));
    }

    proptest! {
        #[test]
        fn whatever_is_told_is_what_happened(
            plan in proptest::collection::vec((0_u64..5, 0_u64..5), 0..30),
            silent in proptest::collection::vec(2_u64..60, 0..4),
            spare in 0_u64..20,
        ) {
            let plan: Vec<(u64, u64)> = plan.into_iter().map(|(drafted, agreed)| (drafted, agreed.min(drafted))).collect();
            prop_assert_eq!(told(&plan, &[], 1000).stats(), counted(&plan));
            // With full drafts, as a server drafts them, silent ids may cost figures but never falsify them.
            let full: Vec<(u64, u64)> = plan.iter().map(|&(_, agreed)| (4, agreed)).collect();
            let length = 1 + full.iter().map(|&(_, agreed)| agreed + 1).sum::<u64>();
            let stats = told(&full, &silent, length + spare).stats();
            let truth = counted(&full);
            prop_assert!(stats == truth || (stats.rounds.is_none() && stats.accepted == truth.accepted), "{stats:?} {truth:?}");
        }
    }
}
