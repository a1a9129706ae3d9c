//! When the depth controller may leave the depth that it believes in, to measure another one.
//!
//! Invariant: what measuring deeper drafts has lost against the selected depth never exceeds a small grant, a fixed
//! share of the time spent, and one burst; so a machine on which drafting never pays loses a bounded part of a per
//! cent. Plain decoding is measured without regard to the account: it is what drafting must not lose to.
//!
//! Measuring happens in short bursts. Between two bursts lie intervals that double for as long as nothing comes
//! of them and start small again when the selection or the text changes.

use serde::{Deserialize, Serialize};

/// Initial allowance, in plain decoding steps.
const GRANT: f64 = 3.0;
/// Most that can be saved up, in plain decoding steps.
const SAVINGS: f64 = 12.0;
/// Share of the time that measuring may cost while plain decoding is selected, and while drafting is.
const INCOME: (f64, f64) = (0.002, 0.02);
/// Shortest and longest wait between two bursts, in rounds.
const INTERVAL: (u32, u32) = (16, 64);
/// Rounds in a burst that is to calibrate a cost.
pub const BURST: u32 = 4;
/// Rounds in a burst that is to test drafts whose cost is known.
pub const GLANCE: u32 = 2;

/// A short visit to a depth that isn't selected.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Burst {
    /// The depth to measure.
    pub depth: usize,
    /// Rounds left.
    pub left: u32,
    /// Tokens committed above what was believed before each round.
    pub excess: f64,
}

/// The account and the calendar of measuring.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Prober {
    /// Seconds that may still be lost; `None` until the first grant, which needs to know a plain step's cost.
    balance: Option<f64>,
    /// Whether the balance is as high as it may get.
    full: bool,
    /// Rounds between two bursts.
    interval: u32,
    /// Rounds since the last burst.
    since: u32,
    /// The burst under way.
    burst: Option<Burst>,
}

/// What was run, for the account.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Entry {
    /// Depth that was run.
    pub depth: usize,
    /// Rounds; plain steps at depth 0.
    pub rounds: u32,
    /// Seconds of all of them.
    pub seconds: f64,
    /// Seconds lost against the selected depth; negative where some were gained.
    pub lost: f64,
    /// Tokens committed above what was believed.
    pub excess: f64,
    /// Whether drafting is selected.
    pub drafting: bool,
    /// Seconds of a plain step.
    pub plain: f64,
}

impl Default for Prober {
    fn default() -> Self {
        Self {
            balance: None,
            full: false,
            interval: INTERVAL.0,
            since: 0,
            burst: None,
        }
    }
}

impl Prober {
    /// Grants the initial allowance once a plain step is known to take `plain` seconds.
    pub fn grant(&mut self, plain: f64) {
        self.balance.get_or_insert(GRANT * plain);
    }

    /// Whether the account isn't empty, as a burst needs it to go on.
    #[must_use]
    pub fn solvent(&self) -> bool {
        self.balance.is_some_and(|balance| balance > 0.0)
    }

    /// Whether the account allows a burst that is likely to lose `loss` seconds, or is full and can't do better.
    #[must_use]
    pub fn affordable(&self, loss: f64) -> bool {
        self.solvent() && (self.full || self.balance.is_some_and(|balance| balance >= loss))
    }

    /// Whether the wait since the last burst is over.
    #[must_use]
    pub fn due(&self) -> bool {
        self.since >= self.interval
    }

    /// Rounds until the next burst is due; 0 when it is.
    #[must_use]
    pub fn wait(&self) -> u32 {
        self.interval.saturating_sub(self.since)
    }

    /// The burst under way.
    #[must_use]
    pub fn burst(&self) -> Option<Burst> {
        self.burst.filter(|burst| burst.left > 0)
    }

    /// The depth of a burst that has just ended and went better than was believed.
    #[must_use]
    pub fn surprising(&self) -> Option<usize> {
        self.burst
            .filter(|burst| burst.left == 0 && burst.excess > 0.0)
            .map(|burst| burst.depth)
    }

    /// Begins a burst. A `routine` one was due by the calendar and makes the next wait longer; others have a
    /// reason of their own and leave the calendar alone.
    pub fn begin(&mut self, depth: usize, rounds: u32, routine: bool) {
        self.burst = Some(Burst {
            depth,
            left: rounds,
            excess: 0.0,
        });
        if routine {
            self.postpone();
        }
    }

    /// Nothing was worth a burst that was due: waits for twice as long.
    pub fn postpone(&mut self) {
        self.since = 0;
        self.interval = self.interval.saturating_mul(2).min(INTERVAL.1);
    }

    /// Gives up the burst under way.
    pub fn stop(&mut self) {
        self.burst = None;
    }

    /// The selection or the text has changed: what was learnt about the alternatives is due for review.
    pub fn hurry(&mut self) {
        self.interval = INTERVAL.0;
    }

    /// Shortens waits to the least, for a finding that should become certain soon.
    pub fn insist(&mut self) {
        self.interval = self.interval.min(2 * INTERVAL.0);
    }

    /// Books what was run.
    pub fn book(&mut self, entry: &Entry) {
        self.since = self.since.saturating_add(entry.rounds);
        let measuring = self
            .burst
            .as_mut()
            .filter(|burst| burst.left > 0 && burst.depth == entry.depth);
        let lost = if measuring.is_some() { entry.lost } else { 0.0 };
        if let Some(burst) = measuring {
            burst.left = burst.left.saturating_sub(entry.rounds);
            burst.excess += entry.excess;
        }
        let Some(balance) = self.balance.as_mut() else {
            return;
        };
        let share = if entry.drafting { INCOME.1 } else { INCOME.0 };
        let limit = SAVINGS * entry.plain;
        *balance = (*balance + share * entry.seconds - lost).min(limit);
        self.full = *balance >= limit;
    }

    /// Whether a state read back from a file keeps the invariant for depths up to `deepest`.
    #[must_use]
    pub fn is_sound(&self, deepest: usize) -> bool {
        (INTERVAL.0..=INTERVAL.1).contains(&self.interval)
            && self.balance.is_none_or(f64::is_finite)
            && self
                .burst
                .is_none_or(|burst| burst.depth <= deepest && burst.excess.is_finite())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(depth: usize, rounds: u32, seconds: f64, lost: f64) -> Entry {
        Entry {
            depth,
            rounds,
            seconds,
            lost,
            excess: -lost,
            drafting: false,
            plain: 1.0,
        }
    }

    #[test]
    fn intervals_double_up_to_a_cap_and_start_anew_after_a_change() {
        let mut prober = Prober::default();
        let mut waits = Vec::new();
        for _ in 0..7 {
            waits.push(prober.wait());
            prober.book(&entry(0, prober.wait(), 1.0, 0.0));
            assert!(prober.due());
            prober.begin(1, BURST, true);
        }
        assert_eq!(waits, [16, 32, 64, 64, 64, 64, 64]);
        prober.hurry();
        assert_eq!(prober.wait(), 16);
    }

    #[test]
    fn losses_close_the_account_until_a_share_of_the_time_has_paid_for_them() {
        let mut prober = Prober::default();
        assert!(!prober.affordable(0.0));
        prober.grant(1.0);
        assert!(prober.affordable(GRANT) && !prober.affordable(GRANT + 1.0));
        prober.begin(1, BURST, false);
        prober.book(&entry(1, 1, 4.0, 4.0));
        assert!(!prober.solvent());
        prober.grant(1.0);
        assert!(!prober.solvent(), "a grant is given once");
        let mut steps = 0;
        while !prober.solvent() {
            prober.book(&entry(0, 1, 1.0, 0.0));
            steps += 1;
        }
        assert!((450..=550).contains(&steps), "{steps}");
    }

    #[test]
    fn savings_are_bounded() {
        let mut prober = Prober::default();
        prober.grant(1.0);
        prober.book(&entry(0, 1_000_000, 1e6, 0.0));
        assert_eq!(prober.balance, Some(SAVINGS));
        assert!(
            prober.affordable(100.0 * SAVINGS),
            "what can never be saved up is paid on credit"
        );
    }

    #[test]
    fn a_burst_ends_after_its_rounds() {
        let mut prober = Prober::default();
        prober.begin(2, 2, false);
        prober.book(&entry(0, 1, 1.0, 0.0));
        assert_eq!(prober.burst().map(|burst| burst.left), Some(2));
        prober.book(&entry(2, 1, 1.0, 0.0));
        prober.book(&entry(2, 1, 1.0, 0.0));
        assert_eq!(prober.burst(), None);
        assert_eq!(prober.surprising(), None);
    }

    #[test]
    fn a_burst_that_went_better_than_believed_is_reported() {
        let mut prober = Prober::default();
        prober.begin(2, 1, true);
        assert_eq!(prober.surprising(), None);
        prober.book(&entry(2, 1, 1.0, -0.5));
        assert_eq!(prober.surprising(), Some(2));
        prober.stop();
        assert_eq!(prober.surprising(), None);
    }
}
