//! How deep to draft: the depth that commits the most tokens per second on this machine and this text.
//!
//! Invariant: a plan never exceeds the deepest allowed draft nor the budget less one token, and without a known
//! cost of plain decoding there is no drafting of the controller's own accord.
//!
//! The score of depth `n` is `(1 + Σ_{k≤n} Π_{i≤k} a_i) / cost(n)` with the live acceptance `a_i` of each
//! position and the live cost of each depth. Depth 0 is pipelined plain decoding: a plan then says for how many
//! steps the plain decoder may run by itself. A depth is selected only over known costs; [`Prober`](super::probe::Prober)
//! decides when others are measured. Where costs were measured at load, any depth may be selected at once, since one deep
//! round tests all positions; where they weren't, depths are explored one after the other.

use super::cost::{CostRow, CostTable};
use super::health::{Health, HealthWatch};
use super::memory::bucket;
use super::probe::Entry;
use serde::{Deserialize, Serialize};

pub use super::memory::{DepthModel, DepthModelError};

/// Deepest draft that any configuration can ask for.
pub const DEEPEST: usize = 16;
/// Plain steps of one plan while no burst is due or affordable.
const PATIENCE: u32 = 32;
/// Plain steps that a round of unknown cost is charged at most.
const MOST: f64 = 32.0;

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
            costs.observe(depth, measured, rounds, state.rounds);
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
}
