//! How deep to draft: the depth that commits the most tokens per second on this machine and this text.
//!
//! Invariant: a plan never exceeds the deepest allowed draft nor the budget less one token, and without a known
//! cost of plain decoding there is no drafting of the controller's own accord.
//!
//! The score of depth `n` is `(1 + Σ_{k≤n} Π_{i≤k} a_i) / cost(n)` with the live acceptance `a_i` of each
//! position and the live cost of each depth. Depth 0 is pipelined plain decoding: a plan then says for how many
//! steps the plain decoder may run by itself. A depth is selected only over known costs; [`Prober`] decides when
//! others are measured. Where costs were measured at load, any depth may be selected at once, since one deep
//! round tests all positions; where they weren't, depths are explored one after the other.

use super::acceptance::Acceptance;
use super::cost::{CostRow, CostTable};
use super::health::{Health, HealthWatch};
use super::probe::{Entry, Prober, BURST, GLANCE};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Deepest draft that any configuration can ask for.
pub const DEEPEST: usize = 16;
/// Advantage with which a challenger replaces the selected depth at once.
const MARGIN: f64 = 0.03;
/// Smaller advantages add up over the rounds; sums with which a challenger replaces plain decoding never, a
/// depth in favour of another one, and a depth in favour of plain decoding.
const LASTING: (f64, f64) = (0.4, 0.15);
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
const AHEAD: usize = 2;
/// Plain steps of one plan while no burst is due or affordable.
const PATIENCE: u32 = 32;
/// Samples that a stretch of plain steps timed as a whole counts for at most.
const STRETCH: u32 = 8;
/// Plain steps that a round of unknown cost is charged at most.
const MOST: f64 = 32.0;
/// First context length of the second bucket; each further bucket is twice as long.
const BUCKET: usize = 1024;
/// Layout of the saved state.
const VERSION: u32 = 1;

/// How a request samples; costs and acceptance are kept apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Mode {
    /// Temperature 0.
    Greedy,
    /// Any other temperature.
    Sampled,
}

/// Who decides on the depth.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Policy {
    /// No drafting.
    Off,
    /// Always this depth, as far as limits and budget allow.
    Fixed(usize),
    /// The controller, up to this depth.
    Auto {
        /// Deepest draft that the request allows.
        max_depth: usize,
    },
}

/// What bounds every plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DepthLimits {
    /// Deepest draft: the widest fast forward less one, at most [`DEEPEST`].
    pub max_depth: usize,
}

/// Where a sequence stands when a plan is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Context {
    /// How the request samples.
    pub mode: Mode,
    /// Who decides on the depth.
    pub policy: Policy,
    /// Tokens in the caches.
    pub length: usize,
    /// Tokens that may still be generated.
    pub remaining: usize,
}

/// What to do next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Plan {
    /// Decode plainly for this many steps (at least 1), pipelined, before asking again.
    Plain {
        /// Steps.
        steps: u32,
    },
    /// One round with this many drafts (at least 1).
    Draft {
        /// Drafts.
        depth: usize,
    },
}

/// What one round with drafts showed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RoundSample {
    /// Drafts proposed.
    pub depth: usize,
    /// Drafts judged: those whose whole prefix was accepted, up to a terminator.
    pub tested: usize,
    /// Drafts accepted.
    pub accepted: usize,
    /// Wall time from this round's start to the next one's, in seconds; `None` where it isn't representative.
    pub seconds: Option<f64>,
}

/// What is known for one way of sampling.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
struct State {
    acceptance: Acceptance,
    /// Costs by context-length bucket.
    costs: BTreeMap<u8, CostTable>,
    selected: usize,
    /// Sum of the small advantages of challengers.
    lead: f64,
    prober: Prober,
    rounds: u64,
}

/// All that was learnt about drafting with a model; kept across requests and savable with its disk cache.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DepthModel {
    version: u32,
    greedy: State,
    sampled: State,
}

/// A saved depth model that can't be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DepthModelError {
    /// Written by another version.
    #[error("depth model has version {0}, expected {VERSION}")]
    Version(u32),
    /// A value is out of its range.
    #[error("depth model for {0:?} requests holds values out of range")]
    Damaged(Mode),
}

impl Default for DepthModel {
    fn default() -> Self {
        Self {
            version: VERSION,
            greedy: State::default(),
            sampled: State::default(),
        }
    }
}

impl DepthModel {
    /// Checks a state read back from a file, so that none can lead to a panic or an unbounded plan.
    pub fn checked(self) -> Result<Self, DepthModelError> {
        if self.version != VERSION {
            return Err(DepthModelError::Version(self.version));
        }
        for (mode, state) in [(Mode::Greedy, &self.greedy), (Mode::Sampled, &self.sampled)] {
            let sound = state.acceptance.is_sound(DEEPEST)
                && state.costs.values().all(|table| table.is_sound(DEEPEST))
                && state.selected <= DEEPEST
                && state.lead.is_finite()
                && state.prober.is_sound(DEEPEST);
            if !sound {
                return Err(DepthModelError::Damaged(mode));
            }
        }
        Ok(self)
    }

    fn state(&self, mode: Mode) -> &State {
        match mode {
            Mode::Greedy => &self.greedy,
            Mode::Sampled => &self.sampled,
        }
    }

    fn state_mut(&mut self, mode: Mode) -> &mut State {
        match mode {
            Mode::Greedy => &mut self.greedy,
            Mode::Sampled => &mut self.sampled,
        }
    }

    /// Makes sure that there is a cost table for a context length, taking the nearest one's costs as seeds.
    fn prepare(&mut self, mode: Mode, bucket: u8) {
        if self.state(mode).costs.contains_key(&bucket) {
            return;
        }
        let other = match mode {
            Mode::Greedy => Mode::Sampled,
            Mode::Sampled => Mode::Greedy,
        };
        let seeds = [mode, other]
            .into_iter()
            .find_map(|mode| self.state(mode).nearest(bucket));
        self.state_mut(mode)
            .costs
            .insert(bucket, seeds.unwrap_or_default());
    }
}

/// The bucket of a context length: 0 below 1,024 tokens, then one per doubling.
fn bucket(length: usize) -> u8 {
    let doublings = usize::BITS - (length / BUCKET).leading_zeros();
    u8::try_from(doublings).unwrap_or(u8::MAX)
}

impl State {
    fn nearest(&self, bucket: u8) -> Option<CostTable> {
        let (_, table) = self
            .costs
            .iter()
            .min_by_key(|(&known, _)| known.abs_diff(bucket))?;
        Some(table.as_seeds())
    }

    fn score(&self, costs: &CostTable, depth: usize) -> Option<f64> {
        Some(self.acceptance.expected(depth) / costs.known(depth)?)
    }

    /// The best known depth up to `deepest`; the shallowest of equals.
    fn best(&self, costs: &CostTable, deepest: usize) -> (usize, f64) {
        let scores = (0..=deepest).filter_map(|depth| Some((depth, self.score(costs, depth)?)));
        scores.fold((0, 0.0), |best, next| if next.1 > best.1 { next } else { best })
    }

    /// Settles on a depth: the best one, unless the incumbent is nearly as good.
    fn select(&mut self, costs: &CostTable, deepest: usize) -> usize {
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
            let seconds = costs.hoped(depth)?;
            let possible = (depth + 1) as f64 / seconds > bar;
            possible.then(|| (depth, self.acceptance.expected_hoped(depth) / seconds))
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
    fn probe(&mut self, costs: &CostTable, deepest: usize, suspect: bool) -> Option<usize> {
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
}

/// Plans rounds and learns from them.
#[derive(Debug, Clone)]
pub struct DepthController {
    max_depth: usize,
    model: DepthModel,
    health: HealthWatch,
}

impl DepthController {
    /// A controller that starts from what `model` knows.
    #[must_use]
    pub fn new(limits: DepthLimits, model: DepthModel) -> Self {
        Self {
            max_depth: limits.max_depth.min(DEEPEST),
            model,
            health: HealthWatch::default(),
        }
    }

    /// What was learnt, for saving.
    #[must_use]
    pub fn model(&self) -> &DepthModel {
        &self.model
    }

    /// Deepest draft that a plan can contain.
    #[must_use]
    pub fn max_depth(&self) -> usize {
        self.max_depth
    }

    /// Takes a cost measured at load: `seconds` for a whole round whose target forward is `width` tokens wide,
    /// its `width - 1` draft steps included. Replaces what was known for short contexts.
    pub fn seed_cost(&mut self, width: usize, seconds: f64) {
        let Some(depth) = width.checked_sub(1).filter(|&depth| depth <= self.max_depth) else {
            return;
        };
        for mode in [Mode::Greedy, Mode::Sampled] {
            self.model
                .state_mut(mode)
                .costs
                .entry(0)
                .or_default()
                .seed(depth, seconds);
        }
    }

    /// Notes that a request begins: its text need not resemble the last one's.
    pub fn begin_request(&mut self, mode: Mode) {
        let state = self.model.state_mut(mode);
        state.acceptance.new_text();
        state.prober.hurry();
        state.prober.stop();
    }

    /// Says what to do next.
    pub fn plan(&mut self, context: &Context) -> Plan {
        let room = context.remaining.saturating_sub(1);
        let to_the_end = u32::try_from(context.remaining).unwrap_or(u32::MAX).max(1);
        let (depth, steps) = match context.policy {
            Policy::Off => (0, to_the_end),
            Policy::Fixed(depth) => (depth.min(self.max_depth).min(room), to_the_end),
            Policy::Auto { max_depth } => {
                let deepest = max_depth.min(self.max_depth);
                if deepest == 0 || room == 0 || self.health.misloaded() {
                    (0, to_the_end)
                } else {
                    self.auto(context, deepest, room)
                }
            }
        };
        match depth {
            0 => Plan::Plain {
                steps: steps.clamp(1, to_the_end),
            },
            depth => Plan::Draft { depth },
        }
    }

    fn auto(&mut self, context: &Context, deepest: usize, room: usize) -> (usize, u32) {
        let bucket = bucket(context.length);
        self.model.prepare(context.mode, bucket);
        let suspect = self.health.suspect();
        let state = self.model.state_mut(context.mode);
        let Some(costs) = state.costs.remove(&bucket) else {
            return (0, 1);
        };
        let plan = match costs.known(0) {
            None => (0, 1),
            Some(plain) => {
                state.prober.grant(plain);
                if suspect {
                    state.prober.insist();
                }
                let selected = state.select(&costs, deepest);
                let probed = state.probe(&costs, deepest, suspect);
                let depth = match probed.unwrap_or(selected) {
                    // The last tokens of a budget: the best of what still fits.
                    depth if depth > room => state.best(&costs, room).0,
                    depth => depth,
                };
                let steps = match (probed, state.prober.burst()) {
                    (Some(0), Some(burst)) => burst.left,
                    _ => state.prober.wait().clamp(1, PATIENCE),
                };
                (depth, steps)
            }
        };
        state.costs.insert(bucket, costs);
        plan
    }

    /// Learns from a round with drafts.
    pub fn record_round(&mut self, context: &Context, sample: &RoundSample) {
        let depth = sample.depth.min(self.max_depth);
        let tested = sample.tested.min(depth);
        let accepted = sample.accepted.min(tested);
        self.health.observe(tested, accepted);
        let state = self.model.state_mut(context.mode);
        let believed = state.acceptance.expected(depth);
        if state.acceptance.observe(depth, tested, accepted) {
            state.prober.hurry();
        }
        let excess = (accepted + 1) as f64 - believed;
        self.learn(context, depth, 1, sample.seconds, excess);
    }

    /// Learns from `steps` steps of plain decoding, which took `seconds` together; `None` where that time isn't
    /// representative, as for the step that fills the pipeline.
    pub fn record_plain(&mut self, context: &Context, steps: u32, seconds: Option<f64>) {
        if steps == 0 {
            return;
        }
        self.model.state_mut(context.mode).acceptance.idle(steps);
        self.learn(context, 0, steps, seconds, 0.0);
    }

    fn learn(&mut self, context: &Context, depth: usize, rounds: u32, seconds: Option<f64>, excess: f64) {
        let bucket = bucket(context.length);
        self.model.prepare(context.mode, bucket);
        let state = self.model.state_mut(context.mode);
        state.rounds = state.rounds.saturating_add(u64::from(rounds));
        let measured = seconds
            .map(|s| s / f64::from(rounds))
            .filter(|s| s.is_finite() && *s > 0.0);
        let costs = state.costs.entry(bucket).or_default();
        if let Some(measured) = measured {
            // A long stretch moves a known cost as several samples would, but calibrates as one.
            let weight = if costs.known(depth).is_some() {
                rounds.min(STRETCH)
            } else {
                1
            };
            for _ in 0..weight {
                costs.observe(depth, measured, state.rounds);
            }
        }
        let (Some(plain), Some(selected)) = (costs.known(0), costs.known(state.selected)) else {
            return;
        };
        // What a round is charged doesn't hang on its luck: neither on a stall nor on the drafts that it happened
        // to have accepted.
        let known = costs.known(depth);
        let expected = costs.likely(depth).unwrap_or(plain);
        let usual = match (known, measured) {
            (Some(known), _) => known,
            // A first round may have compiled a kernel.
            (None, Some(measured)) if costs.samples(depth) > 1 => measured.min(MOST * plain),
            _ => expected,
        };
        let earned = state.acceptance.expected(depth) * selected / state.acceptance.expected(state.selected);
        let rounds_run = f64::from(rounds);
        state.prober.book(&Entry {
            depth,
            rounds,
            seconds: usual * rounds_run,
            lost: (usual - earned) * rounds_run,
            excess,
            drafting: state.selected > 0,
            plain,
        });
    }

    /// A finding about the head, reported once.
    pub fn take_health(&mut self) -> Option<Health> {
        self.health.take()
    }

    /// The depth that is believed to be best for a way of sampling.
    #[must_use]
    pub fn selected(&self, mode: Mode) -> usize {
        self.model.state(mode).selected
    }

    /// Known costs at a context length, shallowest first.
    #[must_use]
    pub fn costs(&self, mode: Mode, length: usize) -> Vec<CostRow> {
        let state = self.model.state(mode);
        state
            .costs
            .get(&bucket(length))
            .map(CostTable::rows)
            .unwrap_or_default()
    }

    /// Believed acceptance of the positions that were tested, the first position first.
    #[must_use]
    pub fn rates(&self, mode: Mode) -> Vec<f64> {
        let acceptance = &self.model.state(mode).acceptance;
        (1..=acceptance.positions())
            .map(|position| acceptance.rate(position))
            .collect()
    }

    /// Tokens per second that the selected depth is believed to commit at a context length.
    #[must_use]
    pub fn rate(&self, mode: Mode, length: usize) -> Option<f64> {
        let state = self.model.state(mode);
        state.score(state.costs.get(&bucket(length))?, state.selected)
    }

    /// Whether another draft inside a round is worth its cost: `survive` is the probability that all drafts so
    /// far and the next one are accepted, as the head's own confidence puts it, `drafted` how many there are.
    ///
    /// One more draft adds `survive` expected tokens and the cost between two depths; it pays where that is more
    /// tokens per second than the round as a whole brings. Without known costs the plan stands.
    #[must_use]
    pub fn worth_next(&self, context: &Context, survive: f64, drafted: usize) -> bool {
        let state = self.model.state(context.mode);
        let Some(costs) = state.costs.get(&bucket(context.length)) else {
            return true;
        };
        let Some(rate) = state.score(costs, state.selected) else {
            return true;
        };
        worth_next(survive, drafted, costs, rate)
    }
}

/// The rule behind [`DepthController::worth_next`]: `survive` tokens for the cost between `drafted` and one draft
/// more, compared with `rate` tokens per second.
#[must_use]
pub fn worth_next(survive: f64, drafted: usize, costs: &CostTable, rate: f64) -> bool {
    match (costs.likely(drafted), costs.likely(drafted + 1)) {
        (Some(now), Some(next)) => survive > rate * (next - now).max(0.0),
        _ => true,
    }
}
