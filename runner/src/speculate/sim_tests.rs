//! The depth controller on simulated machines and texts: synthetic cost and acceptance curves, noise, stalls and
//! drift. Throughput is reckoned in expectation, so that only the controller's choices count, not luck.

use super::depth::*;

/// SplitMix64, so that a seed names a run.
struct Rng(u64);

impl Rng {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn uniform(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// About normal: the sum of twelve uniform draws less their mean.
    fn normal(&mut self) -> f64 {
        (0..12).map(|_| self.uniform()).sum::<f64>() - 6.0
    }
}

/// A machine and a text.
struct World<'a> {
    /// Seconds per round by depth.
    cost: &'a dyn Fn(usize) -> f64,
    /// Acceptance by round and position.
    accept: &'a dyn Fn(u64, usize) -> f64,
    /// Standard deviation of a round's time, relative.
    noise: f64,
    /// Rounds whose time is ten times as long.
    stalls: &'a [u64],
    /// Factor on the first round at each depth.
    first: f64,
}

impl World<'_> {
    fn expected(&self, round: u64, depth: usize) -> f64 {
        let mut survive = 1.0;
        1.0 + (1..=depth)
            .map(|p| {
                survive *= (self.accept)(round, p);
                survive
            })
            .sum::<f64>()
    }

    fn rate(&self, round: u64, depth: usize) -> f64 {
        self.expected(round, depth) / (self.cost)(depth)
    }

    fn oracle(&self, round: u64, deepest: usize) -> usize {
        let better = |&a: &usize, &b: &usize| {
            self.rate(round, a)
                .total_cmp(&self.rate(round, b))
                .then(b.cmp(&a))
        };
        (0..=deepest).max_by(better).unwrap()
    }
}

struct Run {
    depths: Vec<usize>,
    tokens: f64,
    plain_tokens: f64,
    best_tokens: f64,
}

impl Run {
    /// Share of rounds from `warm` on whose depth was within one of the optimum, or within two hundredths of its
    /// throughput: on a plateau no statistics can tell the depths apart, and nothing hangs on it.
    fn near(&self, world: &World<'_>, deepest: usize, warm: usize) -> f64 {
        let near = |&(round, &depth): &(usize, &usize)| {
            let round = round as u64;
            let best = world.oracle(round, deepest);
            best.abs_diff(depth) <= 1 || world.rate(round, depth) >= 0.98 * world.rate(round, best)
        };
        let rounds = self.depths.iter().enumerate().skip(warm);
        rounds.clone().filter(near).count() as f64 / rounds.count() as f64
    }

    fn loss_against_best(&self) -> f64 {
        1.0 - self.tokens / self.best_tokens
    }

    fn loss_against_plain(&self) -> f64 {
        1.0 - self.tokens / self.plain_tokens
    }
}

const DEEP: usize = 10;

fn context(length: usize, remaining: usize) -> Context {
    Context {
        mode: Mode::Greedy,
        policy: Policy::Auto { max_depth: DEEPEST },
        length,
        remaining,
    }
}

fn controller() -> DepthController {
    DepthController::new(DepthLimits { max_depth: DEEP }, DepthModel::default())
}

fn drive(controller: &mut DepthController, world: &World<'_>, rounds: u64, seed: u64) -> Run {
    let mut rng = Rng(seed.wrapping_mul(0x1234_5678_9abc_def1));
    let mut run = Run {
        depths: Vec::new(),
        tokens: 0.0,
        plain_tokens: 0.0,
        best_tokens: 0.0,
    };
    let mut seen = [false; 32];
    let context = context(100, usize::MAX);
    let mut round = 0;
    while round < rounds {
        let plan = controller.plan(&context);
        let (depth, steps) = match plan {
            Plan::Plain { steps } => (0, u64::from(steps)),
            Plan::Draft { depth } => (depth, 1),
        };
        for _ in 0..steps.min(rounds - round) {
            let usual = (world.cost)(depth);
            let mut seconds = usual * (1.0 + world.noise * rng.normal()).max(0.2);
            if !std::mem::replace(&mut seen[depth], true) {
                seconds *= world.first;
            }
            if world.stalls.contains(&round) {
                seconds *= 10.0;
            }
            let accepted = (1..=depth)
                .take_while(|&p| rng.uniform() < (world.accept)(round, p))
                .count();
            if depth == 0 {
                controller.record_plain(&context, 1, Some(seconds));
            } else {
                let tested = (accepted + 1).min(depth);
                let sample = RoundSample {
                    depth,
                    tested,
                    accepted,
                    seconds: Some(seconds),
                };
                controller.record_round(&context, &sample);
            }
            run.depths.push(depth);
            run.tokens += world.expected(round, depth);
            run.plain_tokens += usual / (world.cost)(0);
            let best = world.oracle(round, DEEP);
            run.best_tokens += usual * world.expected(round, best) / (world.cost)(best);
            round += 1;
        }
    }
    run
}

fn fading(_: u64, position: usize) -> f64 {
    match position {
        1..=5 => [0.90, 0.82, 0.72, 0.60, 0.48][position - 1],
        deeper => (0.48 * 0.86_f64.powi(deeper as i32 - 5)).max(0.2),
    }
}

const SEEDS: u64 = 20;
const ROUNDS: u64 = 2_000;

/// Means over many seeds, and the worst run.
#[derive(Debug)]
struct Summary {
    near: f64,
    against_best: f64,
    worst_against_best: f64,
    against_plain: f64,
    worst_against_plain: f64,
}

impl World<'_> {
    fn summary(&self, controller: impl Fn() -> DepthController, warm: usize) -> Summary {
        let runs: Vec<Run> = (0..SEEDS)
            .map(|seed| drive(&mut controller(), self, ROUNDS, seed))
            .collect();
        let mean = |of: &dyn Fn(&Run) -> f64| runs.iter().map(of).sum::<f64>() / runs.len() as f64;
        Summary {
            near: mean(&|run| run.near(self, DEEP, warm)),
            against_best: mean(&Run::loss_against_best),
            worst_against_best: runs.iter().map(Run::loss_against_best).fold(f64::MIN, f64::max),
            against_plain: mean(&Run::loss_against_plain),
            worst_against_plain: runs.iter().map(Run::loss_against_plain).fold(f64::MIN, f64::max),
        }
    }
}

/// Seconds per round by depth.
type Cost<'a> = &'a dyn Fn(usize) -> f64;
/// Acceptance by round and position.
type Accept<'a> = &'a dyn Fn(u64, usize) -> f64;

fn world<'a>(cost: Cost<'a>, accept: Accept<'a>) -> World<'a> {
    World {
        cost,
        accept,
        noise: 0.05,
        stalls: &[],
        first: 3.0,
    }
}

fn seeded(cost: &dyn Fn(usize) -> f64) -> DepthController {
    let mut controller = controller();
    for width in 1..=DEEP + 1 {
        // What is measured at load is lower by what emission costs.
        controller.seed_cost(width, 0.9 * cost(width - 1));
    }
    controller
}

fn flat(depth: usize) -> f64 {
    0.2126 + 0.0026 * depth as f64
}

fn steep(depth: usize) -> f64 {
    0.049 + 0.019 * depth as f64
}

fn rising(depth: usize) -> f64 {
    0.0076 + 0.001 * depth as f64
}

fn stepped(depth: usize) -> f64 {
    if depth < 4 {
        0.010 + 0.0003 * depth as f64
    } else {
        0.018 + 0.0003 * depth as f64
    }
}

/// What llama.cpp's drafting costs on a small CPU model: three plain steps for three drafts.
fn laptop(depth: usize) -> f64 {
    0.0013 * (1.0 + 0.7 * depth as f64)
}

fn linear(_: u64, position: usize) -> f64 {
    (0.95 - 0.1 * position as f64).max(0.3)
}

#[test]
fn where_drafting_pays_the_depth_stays_near_the_optimum() {
    let costs: [(&str, Cost<'_>); 4] = [
        ("flat", &flat),
        ("steep", &steep),
        ("rising", &rising),
        ("stepped", &stepped),
    ];
    let texts: [(&str, Accept<'_>); 4] = [
        ("fading", &fading),
        ("linear", &linear),
        ("even .95", &|_, _| 0.95),
        ("even .7", &|_, _| 0.7),
    ];
    for (machine, cost) in costs {
        for (text, accept) in texts {
            for (start, controller) in [
                ("cold", &controller as &dyn Fn() -> DepthController),
                ("seeded", &|| seeded(cost)),
            ] {
                let summary = world(cost, accept).summary(controller, 100);
                assert!(summary.near > 0.95, "{machine}, {text}, {start}: {summary:?}");
                assert!(
                    summary.against_best < 0.015 && summary.worst_against_best < 0.03,
                    "{machine}, {text}, {start}: {summary:?}"
                );
            }
        }
    }
}

#[test]
fn where_drafting_never_pays_less_than_a_hundredth_is_lost_in_2000_rounds() {
    let thrice = |depth: usize| 0.001 * (1.0 + 2.0 * depth as f64);
    let twice = |depth: usize| 0.016 + 0.015 * depth as f64;
    let costs: [(&str, Cost<'_>); 4] = [
        ("thrice", &thrice),
        ("twice", &twice),
        ("laptop", &laptop),
        ("steep", &steep),
    ];
    for (machine, cost) in costs {
        for rate in [0.0, 0.05, 0.15, 0.3, 0.5] {
            let accept = move |_: u64, _: usize| rate;
            let world = world(cost, &accept);
            if world.oracle(0, DEEP) != 0 {
                continue;
            }
            for (start, controller) in [
                ("cold", &controller as &dyn Fn() -> DepthController),
                ("seeded", &|| seeded(cost)),
            ] {
                let summary = world.summary(controller, 100);
                assert!(
                    summary.against_plain < 0.01,
                    "{machine}, {rate}, {start}: {summary:?}"
                );
                // A single run may be unlucky for long only where drafting loses so little that luck can hide it.
                let close = world.rate(0, 1) > 0.85 * world.rate(0, 0);
                let worst = if close { 0.025 } else { 0.0105 };
                assert!(
                    summary.worst_against_plain < worst,
                    "{machine}, {rate}, {start}: {summary:?}"
                );
            }
        }
    }
}

#[test]
fn the_right_depth_is_reached_within_thirty_rounds_of_a_models_first_request() {
    let world = world(&rising, &fading);
    let share = |controller: &dyn Fn() -> DepthController| {
        let runs = (0..SEEDS).map(|seed| drive(&mut controller(), &world, 60, seed).near(&world, DEEP, 30));
        runs.sum::<f64>() / SEEDS as f64
    };
    let (cold, seeded) = (share(&controller), share(&|| seeded(&rising)));
    assert!(cold > 0.8, "{cold}");
    assert!(seeded > 0.85, "{seeded}");
}

#[test]
fn a_noisy_first_sample_of_plain_decoding_leaves_no_trace() {
    // The anchor's fault: an inflated first sample of depth 0 never healed and drafting went on at a loss.
    let cost = |depth: usize| 0.016 + 0.015 * depth as f64;
    let accept = |_: u64, _: usize| 0.6;
    let world = World {
        first: 30.0,
        ..world(&cost, &accept)
    };
    let summary = world.summary(controller, 100);
    assert!(summary.against_plain < 0.01, "{summary:?}");
}

#[test]
fn stalled_rounds_do_not_change_the_depth() {
    let stalls = [150, 151, 300, 500, 501, 502, 900];
    let calm = world(&rising, &fading).summary(controller, 100);
    let stalled = World {
        stalls: &stalls,
        ..world(&rising, &fading)
    }
    .summary(controller, 100);
    assert!(stalled.near > 0.95, "{stalled:?}");
    assert!(
        stalled.against_best < calm.against_best + 0.005,
        "{calm:?} {stalled:?}"
    );
}

#[test]
fn drift_of_acceptance_is_followed_both_ways() {
    let falls = |round: u64, _: usize| if round < 1_000 { 0.9 } else { 0.3 };
    let rises = |round: u64, _: usize| if round < 1_000 { 0.3 } else { 0.9 };
    for (text, accept) in [("falls", &falls as &dyn Fn(u64, usize) -> f64), ("rises", &rises)] {
        for cost in [&flat as &dyn Fn(usize) -> f64, &rising, &steep] {
            let summary = world(cost, accept).summary(controller, 100);
            assert!(summary.against_best < 0.05, "{text}: {summary:?}");
        }
    }
    // Once drafting has become hopeless, plain decoding is back within a hundred rounds.
    let dies = |round: u64, _: usize| if round < 1_000 { 0.9 } else { 0.0 };
    for seed in 0..SEEDS {
        let run = drive(&mut controller(), &world(&steep, &dies), 1_300, seed);
        let drafting = run.depths[1_100..].iter().filter(|&&depth| depth > 0).count();
        assert!(drafting < 20, "seed {seed}: {:?}", &run.depths[1_000..]);
    }
}

#[test]
fn a_machine_that_slows_down_as_a_whole_keeps_its_depth() {
    let mut controller = controller();
    let calm = world(&rising, &fading);
    drive(&mut controller, &calm, 600, 1);
    let slow = |depth: usize| 2.0 * rising(depth);
    let run = drive(
        &mut controller,
        &World {
            first: 1.0,
            ..world(&slow, &fading)
        },
        600,
        2,
    );
    assert!(run.loss_against_best() < 0.03, "{}", run.loss_against_best());
    assert!(run.near(&calm, DEEP, 0) > 0.9);
}

/// A machine on which everything takes `factor(round)` as long as on the day it was measured at load.
fn changing(factor: &dyn Fn(u64) -> f64, accept: Accept<'_>, cost: Cost<'_>, seed: u64) -> f64 {
    let mut controller = seeded(cost);
    let mut losses = 0.0;
    let mut rounds = 0.0;
    let mut from = 0;
    while from < ROUNDS {
        let now = factor(from);
        let to = (from + 1..ROUNDS)
            .find(|&round| factor(round) != now)
            .unwrap_or(ROUNDS);
        let slow = |depth: usize| now * cost(depth);
        let world = World {
            first: 1.0,
            ..world(&slow, accept)
        };
        let run = drive(&mut controller, &world, to - from, seed);
        losses += run.loss_against_best() * (to - from) as f64;
        rounds += (to - from) as f64;
        from = to;
    }
    losses / rounds
}

#[test]
fn seeds_follow_a_machine_that_slows_after_they_were_measured() {
    // The field report: a depth measured while the machine was slow passed its error on to the seeds of all others, which
    // looked too dear from then on, so that nobody ever measured them.
    let slower = |_: u64| 1.7;
    let for_a_while = |round: u64| if round < 60 { 2.0 } else { 1.0 };
    let later = |round: u64| if (20..400).contains(&round) { 2.0 } else { 1.0 };
    let faster = |_: u64| 0.6;
    let texts: [(&str, Accept<'_>); 2] = [("fading", &fading), ("even .95", &|_, _| 0.95)];
    let costs: [(&str, Cost<'_>); 3] = [("flat", &flat), ("steep", &steep), ("rising", &rising)];
    let speeds: [(&str, &dyn Fn(u64) -> f64); 4] = [
        ("slower", &slower),
        ("for a while", &for_a_while),
        ("later", &later),
        ("faster", &faster),
    ];
    for (text, accept) in texts {
        for (machine, cost) in costs {
            for (speed, factor) in speeds {
                let losses: Vec<f64> = (0..6).map(|seed| changing(factor, accept, cost, seed)).collect();
                let worst = losses.iter().copied().fold(f64::MIN, f64::max);
                assert!(worst < 0.03, "{machine}, {text}, {speed}: {losses:?}");
            }
        }
    }
}
