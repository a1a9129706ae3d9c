//! Drafts tested against targets: both rules yield the target's distribution, and the coupled one plain decoding's tokens.

use lookahead_protocol::request::Verify;
use mlx_rs::ops::broadcast_to;
use mlx_rs::Array;

use super::options::{Filter, PenaltyOptions, Shape, Window};
use super::sampler::{Draft, SampleError, Sampler};
use super::sampler_tests::{filters, options, paths, rows, sampler, vocabulary, PLAIN};
use super::{oracle, Outcome};

/// Logits that depend on the last token alone, in two versions that differ: a target and its drafter.
struct Toy {
    target: Vec<Vec<f32>>,
    drafter: Vec<Vec<f32>>,
}

impl Toy {
    fn new(size: usize) -> Self {
        let target: Vec<Vec<f32>> = (0..size as u64).map(|t| oracle::logits(t, size, 2.5)).collect();
        let noise: Vec<Vec<f32>> = (0..size as u64)
            .map(|t| oracle::logits(1000 + t, size, 1.2))
            .collect();
        let drafter = target
            .iter()
            .zip(&noise)
            .map(|(t, n)| t.iter().zip(n).map(|(t, n)| t + n).collect())
            .collect();
        Self { target, drafter }
    }

    /// One round from `current`, at depth k; reads each draft to find the next one's logits.
    fn round(&self, sampler: &Sampler, current: u32, position: u64, k: usize) -> Outcome {
        let mut drafts: Vec<Draft> = Vec::new();
        let mut last = current;
        let mut target = vec![self.target[current as usize].clone()];
        for i in 0..k {
            let logits = rows(&[self.drafter[last as usize].clone()]);
            let draft = sampler
                .draft(&logits, position + i as u64, &drafts, None)
                .unwrap();
            last = draft.rows.read(position + i as u64).unwrap();
            target.push(self.target[last as usize].clone());
            drafts.push(draft);
        }
        sampler
            .verify(&rows(&target), position, &drafts, None)
            .unwrap()
            .read()
            .unwrap()
    }

    /// `n` tokens after `start` at depth k (0: plain decoding).
    fn generate(&self, sampler: &mut Sampler, start: u32, n: usize, k: usize) -> Vec<u32> {
        let mut tokens = vec![start];
        while tokens.len() <= n {
            let position = tokens.len() as u64;
            let current = tokens[tokens.len() - 1];
            let new: Vec<u32> = if k == 0 {
                let logits = rows(&[self.target[current as usize].clone()]);
                vec![sampler
                    .next(&logits, position, None)
                    .unwrap()
                    .read(position)
                    .unwrap()]
            } else {
                self.round(sampler, current, position, k).tokens().collect()
            };
            sampler.commit(&new).unwrap();
            tokens.extend(new);
        }
        tokens.truncate(n + 1);
        tokens
    }
}

const PENALTIES: PenaltyOptions = PenaltyOptions {
    repeat: 1.2,
    presence: 0.4,
    frequency: 0.1,
    window: Window::Last(5),
};

#[test]
fn coupled_and_greedy_tokens_are_plain_decodings_at_any_depth() {
    let toy = Toy::new(60);
    for path in paths() {
        for (name, shape) in filters() {
            for penalties in [None, Some(PENALTIES)] {
                let options = options(shape, penalties);
                let mut plain = sampler(&options, Verify::Coupled, 60, &[3], path);
                let want = toy.generate(&mut plain, 3, 40, 0);
                for depth in [1, 2, 3, 5] {
                    let mut drafting = sampler(&options, Verify::Coupled, 60, &[3], path);
                    assert_eq!(
                        toy.generate(&mut drafting, 3, 40, depth),
                        want,
                        "{name}, {path:?}, depth {depth}"
                    );
                }
            }
        }
    }
}

/// First tokens of many tests of one draft each, side by side in one block, and how many drafts stood.
fn tests(toy: &Toy, sampler: &Sampler, n: usize) -> (Vec<u64>, u64) {
    let size = toy.target.len();
    let batch = 1000;
    let repeat = |row: &[f32], times: usize| {
        broadcast_to(
            Array::from_slice(row, &[1, size as i32]),
            &[times as i32, size as i32],
        )
        .unwrap()
    };
    let (drafter, target) = (repeat(&toy.drafter[0], batch), repeat(&toy.target[0], batch + 1));
    let (mut tokens, mut stood) = (vec![0; size], 0);
    for start in (0..n).step_by(batch) {
        let draft = sampler.draft(&drafter, start as u64, &[], None).unwrap();
        let verdict = sampler.verify(&target, start as u64, &[draft], None).unwrap();
        let (drafts, choice, rejection) = verdict.values().unwrap();
        for row in 0..batch {
            let (stands, instead) = match &rejection {
                Some((accepted, instead)) => (accepted[row] == 1, instead[row]),
                None => (drafts[row] == choice[row], choice[row]),
            };
            stood += u64::from(stands);
            tokens[if stands { drafts[row] } else { instead } as usize] += 1;
        }
    }
    (tokens, stood)
}

#[test]
fn both_rules_yield_the_targets_distribution_and_the_acceptance_they_should() {
    let size = 40;
    let toy = Toy::new(size);
    for (name, shape) in filters().into_iter().filter(|(_, shape)| *shape != Shape::Greedy) {
        for path in paths() {
            for rule in [Verify::Rejection, Verify::Coupled] {
                let n = 50_000;
                let p = oracle::distribution(&oracle::wide(&toy.target[0]), &shape);
                let q = oracle::distribution(&oracle::wide(&toy.drafter[0]), &shape);
                let (tokens, stood) = tests(&toy, &sampler(&options(shape, None), rule, size, &[], path), n);
                let name = format!("{name}, {path:?}, {rule:?}");
                oracle::assert_draws(&name, &tokens, &p);
                let rate = stood as f64 / n as f64;
                let best: f64 = p.iter().zip(&q).map(|(p, q)| p.min(*q)).sum();
                let expected = if rule == Verify::Rejection {
                    best
                } else {
                    coupled_agreement(&p, &q)
                };
                let error = 5.0 * (expected * (1.0 - expected) / n as f64).sqrt() + 1e-4;
                assert!(
                    (rate - expected).abs() < error,
                    "{name}: accepts {rate:.4}, not {expected:.4} ± {error:.4}"
                );
            }
        }
    }
}

#[test]
fn whole_rounds_have_the_joint_distribution_of_plain_decoding() {
    // Three tokens over a small alphabet, penalties included, so that every row's own history matters.
    let size = 6;
    let toy = Toy::new(size);
    let shape = Shape::Filtered(Filter {
        top_k: 4,
        temperature: 0.9,
        top_p: 0.95,
        min_p: 0.0,
    });
    let options = options(shape, Some(PENALTIES));
    let next = |seen: &[u32]| {
        let logits = oracle::wide(&toy.target[seen[seen.len() - 1] as usize]);
        oracle::distribution(&oracle::penalise(&logits, seen, &PENALTIES), &shape)
    };
    let mut want = vec![0.0; size * size * size];
    for a in 0..size {
        for b in 0..size {
            for c in 0..size {
                let (x, y) = (a as u32, b as u32);
                want[(a * size + b) * size + c] = next(&[0])[a] * next(&[0, x])[b] * next(&[0, x, y])[c];
            }
        }
    }
    for rule in [Verify::Rejection, Verify::Coupled] {
        let mut counts = vec![0u64; want.len()];
        for seed in 0..8000 {
            let mut sampler = Sampler::new(&options, rule, seed, vocabulary(size), &[0], paths()[0]);
            let tokens = toy.generate(&mut sampler, 0, 3, 2);
            counts[tokens[1..]
                .iter()
                .fold(0, |index, &token| index * size + token as usize)] += 1;
        }
        oracle::assert_draws(&format!("joint, {rule:?}"), &counts, &want);
    }
}

/// How often two exponential races with common noise agree: over i, 1 / (sum over j of max(p_j / p_i, q_j / q_i)).
fn coupled_agreement(p: &[f64], q: &[f64]) -> f64 {
    let both = (0..p.len()).filter(|&i| p[i] > 0.0 && q[i] > 0.0);
    both.map(|i| 1.0 / (0..p.len()).map(|j| (p[j] / p[i]).max(q[j] / q[i])).sum::<f64>())
        .sum()
}

#[test]
fn replacements_follow_the_residual_of_the_worked_example() {
    // Target {2: .7, 5: .3}, draft {2: .2, 4: .8}: the residual is {2: .625, 5: .375}.
    let log = |pairs: &[(usize, f32)]| {
        let mut row = vec![f32::NEG_INFINITY; 8];
        pairs.iter().for_each(|&(id, p)| row[id] = p.ln());
        row
    };
    let target = log(&[(2, 0.7), (5, 0.3)]);
    let drafter = log(&[(2, 0.2), (4, 0.8)]);
    for path in paths() {
        for shape in [
            Shape::Filtered(PLAIN),
            Shape::Filtered(Filter { top_k: 4, ..PLAIN }),
        ] {
            let mut refused = vec![0u64; 8];
            for seed in 0..4000 {
                let sampler = Sampler::new(
                    &options(shape, None),
                    Verify::Rejection,
                    seed,
                    vocabulary(8),
                    &[],
                    path,
                );
                let draft = sampler.draft(&rows(&[&drafter]), 1, &[], None).unwrap();
                let verdict = sampler
                    .verify(&rows(&[&target, &target]), 1, &[draft], None)
                    .unwrap();
                let outcome = verdict.read().unwrap();
                assert_eq!(
                    outcome.accepted == 1,
                    outcome.drafts[0] == 2,
                    "2 always stands and 4 never does"
                );
                if outcome.accepted == 0 {
                    refused[outcome.next as usize] += 1;
                }
            }
            let want = [0.0, 0.0, 0.625, 0.0, 0.0, 0.375, 0.0, 0.0];
            oracle::assert_draws(&format!("residual, {path:?}"), &refused, &want);
        }
    }
}

#[test]
fn a_block_of_drafts_is_tested_like_drafts_one_by_one() {
    let toy = Toy::new(40);
    let shape = Shape::Filtered(Filter { top_k: 20, ..PLAIN });
    for path in paths() {
        for rule in [Verify::Rejection, Verify::Coupled] {
            for seed in 0..50 {
                let sampler = Sampler::new(&options(shape, None), rule, seed, vocabulary(40), &[], path);
                let drafter = &toy.drafter[..3];
                let target = rows(&toy.target[..4]);
                let block = sampler.draft(&rows(drafter), 7, &[], None).unwrap();
                let single: Vec<Draft> = (0..3)
                    .map(|i| {
                        sampler
                            .draft(&rows(&drafter[i..=i]), 7 + i as u64, &[], None)
                            .unwrap()
                    })
                    .collect();
                let whole = sampler
                    .verify(&target, 7, &[block], None)
                    .unwrap()
                    .read()
                    .unwrap();
                let parts = sampler.verify(&target, 7, &single, None).unwrap().read().unwrap();
                assert_eq!(whole, parts, "{path:?}, {rule:?}, seed {seed}");
            }
        }
    }
}

#[test]
fn broken_rows_count_only_as_far_as_drafts_stand() {
    let good: Vec<f32> = (0..30).map(|i| if i == 4 { 9.0 } else { 0.0 }).collect();
    let bad = vec![f32::NAN; 30];
    let other: Vec<f32> = (0..30).map(|i| if i == 5 { 90.0 } else { 0.0 }).collect();
    for path in paths() {
        for shape in [
            Shape::Greedy,
            Shape::Filtered(Filter {
                top_k: 5,
                temperature: 0.05,
                ..PLAIN
            }),
        ] {
            for rule in [Verify::Coupled, Verify::Rejection] {
                let sampler = sampler(&options(shape, None), rule, 30, &[], path);
                let verify = |draft: &[f32], target: [&[f32]; 2]| {
                    let draft = sampler.draft(&rows(&[draft]), 3, &[], None).unwrap();
                    let target = rows(&target);
                    sampler.verify(&target, 3, &[draft], None).unwrap().read()
                };
                // The draft is refused, so the row behind it doesn't matter.
                assert_eq!(
                    verify(&other, [&good, &bad])
                        .unwrap()
                        .tokens()
                        .collect::<Vec<_>>(),
                    [4]
                );
                assert!(matches!(
                    verify(&good, [&good, &bad]),
                    Err(SampleError::NanLogits {
                        position: 4,
                        what: "not numbers"
                    })
                ));
                assert!(matches!(
                    verify(&good, [&bad, &good]),
                    Err(SampleError::NanLogits { position: 3, .. })
                ));
                // A broken drafter is told from a broken target; compared by token alone, it does no harm.
                let broken = verify(&bad, [&good, &good]);
                if rule == Verify::Rejection && shape != Shape::Greedy {
                    assert!(
                        matches!(broken, Err(SampleError::NanDraft { position: 3, .. })),
                        "{broken:?}"
                    );
                } else {
                    assert_eq!(broken.unwrap().tokens().next(), Some(4));
                }
            }
        }
    }
}

#[test]
fn a_verification_without_drafts_is_a_plain_step() {
    let logits = rows(&[oracle::logits(1, 90, 3.0)]);
    for path in paths() {
        for (_, shape) in filters() {
            for rule in [Verify::Coupled, Verify::Rejection] {
                let sampler = sampler(&options(shape, None), rule, 90, &[], path);
                let plain = sampler.next(&logits, 12, None).unwrap().read(12).unwrap();
                let outcome = sampler.verify(&logits, 12, &[], None).unwrap().read().unwrap();
                assert_eq!(
                    outcome,
                    Outcome {
                        drafts: vec![],
                        accepted: 0,
                        next: plain
                    }
                );
            }
        }
    }
    let sampler = sampler(
        &options(Shape::Greedy, None),
        Verify::Coupled,
        90,
        &[],
        paths()[0],
    );
    let two = Array::zeros::<f32>(&[2, 90]).unwrap();
    assert!(sampler.verify(&two, 0, &[], None).is_err());
}
