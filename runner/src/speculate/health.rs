//! Tells a head that was loaded wrongly from one that merely predicts poorly.
//!
//! Invariant: a finding is made at most once, and only after [`ENOUGH`] judged drafts. An intact head on the
//! hardest text still has a good part of its first drafts accepted; one whose norms were shifted twice, whose
//! quantisation was misread or whose inputs are swapped has practically none.

use serde::{Deserialize, Serialize};

/// Drafts at position 1 that must have been judged.
pub const ENOUGH: u64 = 64;
/// Acceptance at position 1 below which a head is taken for mis-loaded.
const FLOOR: f64 = 0.02;
/// Judged drafts, all rejected, after which the matter is looked into.
const SUSPICIOUS: u64 = 12;

/// A finding about the drafting head.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Health {
    /// Practically no first draft is accepted.
    MisloadedHead {
        /// Drafts judged at position 1.
        tested: u64,
        /// Drafts accepted there.
        accepted: u64,
    },
}

impl std::fmt::Display for Health {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self::MisloadedHead { tested, accepted } = self;
        write!(
            f,
            "drafting head accepted {accepted} of {tested} first drafts, so it is probably loaded wrongly: \
             check its norms (stored as w or as 1 + w), its quantisation, the order of fc's two inputs and that \
             it is fed hidden states after the final norm; drafting is parked"
        )
    }
}

/// Counts first drafts until they suffice for a verdict.
#[derive(Debug, Clone, Default)]
pub struct HealthWatch {
    tested: u64,
    accepted: u64,
    decided: bool,
    finding: Option<Health>,
    misloaded: bool,
}

impl HealthWatch {
    /// Takes in a round of which `tested` drafts were judged and `accepted` accepted.
    pub fn observe(&mut self, tested: usize, accepted: usize) {
        if tested == 0 || self.decided {
            return;
        }
        self.tested += 1;
        self.accepted += u64::from(accepted > 0);
        if self.tested == ENOUGH {
            self.decided = true;
            self.misloaded = (self.accepted as f64) < FLOOR * self.tested as f64;
            if self.misloaded {
                self.finding = Some(Health::MisloadedHead {
                    tested: self.tested,
                    accepted: self.accepted,
                });
            }
        }
    }

    /// Whether the head was found to be loaded wrongly.
    #[must_use]
    pub fn misloaded(&self) -> bool {
        self.misloaded
    }

    /// Whether there is reason to gather the missing evidence soon.
    #[must_use]
    pub fn suspect(&self) -> bool {
        !self.decided && self.accepted == 0 && self.tested >= SUSPICIOUS
    }

    /// Hands out the finding, once.
    pub fn take(&mut self) -> Option<Health> {
        self.finding.take()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_misloaded_head_is_reported_once_after_64_judged_drafts() {
        let mut watch = HealthWatch::default();
        for round in 0..ENOUGH {
            assert_eq!(watch.take(), None);
            watch.observe(0, 0);
            watch.observe(1, usize::from(round == 7));
        }
        assert!(watch.misloaded());
        let finding = watch.take().unwrap();
        assert_eq!(
            finding,
            Health::MisloadedHead {
                tested: 64,
                accepted: 1
            }
        );
        assert!(finding.to_string().contains("1 of 64"));
        watch.observe(1, 0);
        assert_eq!(watch.take(), None);
    }

    #[test]
    fn a_poor_head_is_not_called_misloaded() {
        let mut watch = HealthWatch::default();
        for round in 0..1_000 {
            watch.observe(1, usize::from(round % 20 == 0));
        }
        assert!(!watch.misloaded() && watch.take().is_none() && !watch.suspect());
    }
}
