//! What a plan may contain, what is kept across requests, and what survives saving.

use super::depth::*;
use super::health::Health;
use proptest::prelude::*;

fn context(policy: Policy, remaining: usize) -> Context {
    Context {
        mode: Mode::Greedy,
        policy,
        length: 10,
        remaining,
    }
}

const AUTO: Policy = Policy::Auto { max_depth: DEEPEST };

fn controller(max_depth: usize) -> DepthController {
    DepthController::new(DepthLimits { max_depth }, DepthModel::default())
}

/// A controller that knows its costs: drafting is nearly free.
fn keen(max_depth: usize) -> DepthController {
    let mut controller = controller(max_depth);
    for width in 1..=max_depth + 1 {
        controller.seed_cost(width, 0.01 + 0.0001 * width as f64);
    }
    controller
}

#[test]
fn off_decodes_plainly_to_the_end_of_the_budget() {
    assert_eq!(keen(8).plan(&context(Policy::Off, 77)), Plan::Plain { steps: 77 });
}

#[test]
fn a_fixed_depth_bows_to_the_widest_forward_and_to_the_budget_only() {
    let mut controller = controller(8);
    let plans = [(3, 100), (12, 100), (3, 3), (3, 1), (0, 9)]
        .map(|(depth, remaining)| controller.plan(&context(Policy::Fixed(depth), remaining)));
    assert_eq!(
        plans,
        [
            Plan::Draft { depth: 3 },
            Plan::Draft { depth: 8 },
            Plan::Draft { depth: 2 },
            Plan::Plain { steps: 1 },
            Plan::Plain { steps: 9 }
        ]
    );
}

#[test]
fn without_a_cost_of_plain_decoding_nothing_is_drafted() {
    let mut controller = controller(8);
    for _ in 0..3 {
        assert_eq!(controller.plan(&context(AUTO, 100)), Plan::Plain { steps: 1 });
        controller.record_plain(&context(AUTO, 100), 1, Some(0.01));
    }
    assert_eq!(controller.plan(&context(AUTO, 100)), Plan::Plain { steps: 1 });
    controller.record_plain(&context(AUTO, 100), 1, Some(0.01));
    assert!(matches!(
        controller.plan(&context(AUTO, 100)),
        Plan::Draft { depth: 1 }
    ));
}

#[test]
fn costs_measured_at_load_let_the_first_round_draft_deep() {
    assert!(matches!(keen(8).plan(&context(AUTO, 100)), Plan::Draft { depth } if depth >= 3));
    assert!(matches!(
        keen(8).plan(&context(Policy::Auto { max_depth: 2 }, 100)),
        Plan::Draft { depth: 2 }
    ));
    assert!(matches!(
        keen(8).plan(&context(AUTO, 2)),
        Plan::Draft { depth: 1 }
    ));
    assert_eq!(keen(8).plan(&context(AUTO, 1)), Plan::Plain { steps: 1 });
}

#[test]
fn greedy_and_sampled_requests_are_judged_apart() {
    let mut controller = keen(8);
    let sample = RoundSample {
        depth: 4,
        tested: 1,
        accepted: 0,
        seconds: Some(0.01),
    };
    for _ in 0..40 {
        controller.record_round(&context(AUTO, 100), &sample);
    }
    assert!(
        controller.rates(Mode::Greedy)[0] < 0.1,
        "{:?}",
        controller.rates(Mode::Greedy)
    );
    assert!(controller.rates(Mode::Sampled).is_empty());
    let sampled = Context {
        mode: Mode::Sampled,
        ..context(AUTO, 100)
    };
    assert!(matches!(controller.plan(&sampled), Plan::Draft { .. }));
}

#[test]
fn a_longer_context_starts_from_the_costs_of_the_shorter_one() {
    let mut controller = keen(8);
    let long = Context {
        length: 5_000,
        ..context(AUTO, 100)
    };
    assert!(matches!(controller.plan(&long), Plan::Draft { .. }));
    for _ in 0..50 {
        controller.record_plain(&long, 1, Some(0.03));
    }
    let plain = |length: usize| controller.costs(Mode::Greedy, length)[0].seconds;
    assert!((plain(5_000) - 0.03).abs() < 0.003);
    assert!((plain(10) - 0.0101).abs() < 0.001);
}

#[test]
fn a_misloaded_head_is_reported_once_and_parked() {
    let mut controller = keen(4);
    let sample = RoundSample {
        depth: 1,
        tested: 1,
        accepted: 0,
        seconds: Some(0.01),
    };
    for _ in 0..64 {
        assert_eq!(controller.take_health(), None);
        controller.record_round(&context(Policy::Fixed(1), 100), &sample);
    }
    assert_eq!(
        controller.take_health(),
        Some(Health::MisloadedHead {
            tested: 64,
            accepted: 0
        })
    );
    assert_eq!(controller.take_health(), None);
    assert_eq!(controller.plan(&context(AUTO, 100)), Plan::Plain { steps: 100 });
    // Who asks for a fixed depth gets it.
    assert_eq!(
        controller.plan(&context(Policy::Fixed(1), 100)),
        Plan::Draft { depth: 1 }
    );
}

#[test]
fn a_misloaded_head_is_found_within_a_few_thousand_tokens_of_automatic_drafting() {
    let mut controller = controller(8);
    let mut tokens = 0;
    let finding = loop {
        let context = context(AUTO, 10_000);
        match controller.plan(&context) {
            Plan::Plain { steps } => {
                controller.record_plain(&context, steps, Some(0.01 * f64::from(steps)));
                tokens += steps;
            }
            Plan::Draft { depth } => {
                let sample = RoundSample {
                    depth,
                    tested: 1,
                    accepted: 0,
                    seconds: Some(0.012),
                };
                controller.record_round(&context, &sample);
                tokens += 1;
            }
        }
        if let Some(finding) = controller.take_health() {
            break finding;
        }
        assert!(tokens < 10_000, "no finding");
    };
    assert_eq!(
        finding,
        Health::MisloadedHead {
            tested: 64,
            accepted: 0
        }
    );
    assert!(tokens < 6_000, "{tokens}");
}

#[test]
fn what_was_learnt_survives_saving_and_damage_is_refused() {
    let mut controller = keen(8);
    let sample = RoundSample {
        depth: 3,
        tested: 3,
        accepted: 2,
        seconds: Some(0.011),
    };
    controller.plan(&context(AUTO, 100));
    controller.record_round(&context(AUTO, 100), &sample);
    let json = serde_json::to_string(controller.model()).unwrap();
    let model: DepthModel = serde_json::from_str(&json).unwrap();
    assert!(model.clone().checked().is_ok());
    let mut again = DepthController::new(DepthLimits { max_depth: 8 }, model);
    assert_eq!(
        again.plan(&context(AUTO, 100)),
        controller.plan(&context(AUTO, 100))
    );

    let damaged = json.replacen("\"filled\":", "\"filled\":7", 1);
    let model: DepthModel = serde_json::from_str(&damaged).unwrap();
    assert_eq!(model.checked(), Err(DepthModelError::Damaged(Mode::Greedy)));
    let newer = json.replacen("\"version\":2", "\"version\":3", 1);
    let model: DepthModel = serde_json::from_str(&newer).unwrap();
    assert_eq!(
        model.checked().unwrap_err().to_string(),
        "depth model has version 3, expected 2"
    );
}

fn seconds() -> impl Strategy<Value = Option<f64>> {
    prop_oneof![
        8 => (1e-6..10.0_f64).prop_map(Some),
        1 => Just(None),
        1 => prop::sample::select(vec![f64::NAN, f64::INFINITY, -1.0, 0.0, 1e300, f64::MIN_POSITIVE]).prop_map(Some),
    ]
}

proptest! {
    #[test]
    fn no_history_leads_to_a_panic_or_beyond_a_limit(
        max_depth in 0..20_usize,
        seeds in prop::collection::vec((0..20_usize, 1e-4..1.0_f64), 0..10),
        rounds in prop::collection::vec(
            (any::<bool>(), 0..20_usize, 0..70_000_usize, 0..40_usize, 0..20_usize, 0..20_usize, seconds()), 1..300),
    ) {
        let mut controller = controller(max_depth);
        for (width, seconds) in seeds {
            controller.seed_cost(width, seconds);
        }
        for (greedy, policy, length, remaining, tested, accepted, seconds) in rounds {
            let mode = if greedy { Mode::Greedy } else { Mode::Sampled };
            let policy = match policy {
                0 => Policy::Off,
                1..=3 => Policy::Fixed(policy * 6),
                _ => Policy::Auto { max_depth: policy },
            };
            let context = Context { mode, policy, length, remaining };
            if tested == 7 {
                controller.begin_request(mode);
            }
            match controller.plan(&context) {
                Plan::Plain { steps } => {
                    prop_assert!(steps >= 1 && (steps as usize) <= remaining.max(1));
                    controller.record_plain(&context, steps, seconds);
                }
                Plan::Draft { depth } => {
                    prop_assert!(depth >= 1 && depth <= max_depth.min(DEEPEST));
                    prop_assert!(depth < remaining);
                    if let Policy::Auto { max_depth } = policy {
                        prop_assert!(depth <= max_depth);
                    }
                    controller.record_round(&context, &RoundSample { depth, tested, accepted, seconds });
                }
            }
        }
        let json = serde_json::to_string(controller.model()).unwrap();
        let model: DepthModel = serde_json::from_str(&json).unwrap();
        prop_assert!(model.checked().is_ok());
    }
}
