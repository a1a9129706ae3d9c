//! Logprobs against the float64 oracle, beside plain steps and verifications.

use lookahead_protocol::request::Verify;

use super::options::{Filter, PenaltyOptions, Shape, Window};
use super::sampler::{Sampler, Vocabulary};
use super::sampler_tests::{options, paths, rows, sampler, PLAIN};
use super::{oracle, TokenScores};

fn assert_scores(name: &str, got: &TokenScores, token: u32, logits: &[f32], known: usize, top: usize) {
    let want = oracle::log_softmax(&oracle::wide(logits));
    assert_eq!(got.chosen.token, token, "{name}");
    assert!(
        (f64::from(got.chosen.logprob) - want[token as usize]).abs() < 1e-4,
        "{name}: {got:?}"
    );
    let mut ids: Vec<usize> = (0..known).collect();
    ids.sort_by(|&a, &b| logits[b].partial_cmp(&logits[a]).unwrap().then(a.cmp(&b)));
    assert_eq!(got.top.len(), top, "{name}");
    for (scored, id) in got.top.iter().zip(ids) {
        assert_eq!(scored.token as usize, id, "{name}");
        assert!(
            (f64::from(scored.logprob) - want[id]).abs() < 1e-4,
            "{name}: {scored:?}"
        );
    }
}

#[test]
fn raw_logprobs_ignore_penalties_temperature_truncation_and_masks() {
    let size = 4096;
    let logits = oracle::logits(4, size, 4.0);
    let penalties = PenaltyOptions {
        repeat: 2.0,
        presence: 1.0,
        frequency: 1.0,
        window: Window::All,
    };
    let shape = Shape::Filtered(Filter {
        top_k: 40,
        temperature: 0.3,
        top_p: 0.9,
        min_p: 0.1,
    });
    for path in paths() {
        for top in [0, 1, 5, 20] {
            let sampler = sampler(
                &options(shape, Some(penalties)),
                Verify::Coupled,
                size,
                &[1, 2, 3],
                path,
            );
            let array = rows(&[&logits]);
            let step = sampler.next(&array, 8, None).unwrap();
            let scores = sampler.logprobs(&array, &step.picks(), top).unwrap();
            let token = step.read(8).unwrap();
            let got = scores.read([token]).unwrap();
            assert_scores(
                &format!("{path:?}, top {top}"),
                &got[0],
                token,
                &logits,
                size,
                top,
            );
        }
    }
}

#[test]
fn every_token_of_a_round_has_its_own_rows_logprob() {
    let size = 200;
    let known = 150;
    let logits: Vec<Vec<f32>> = (0..4).map(|r| oracle::logits(r, size, 2.0)).collect();
    for path in paths() {
        for rule in [Verify::Coupled, Verify::Rejection] {
            for seed in 0..40 {
                let vocabulary = Vocabulary {
                    logits: size,
                    tokens: known,
                };
                let sampler = Sampler::new(
                    &options(Shape::Filtered(PLAIN), None),
                    rule,
                    seed,
                    vocabulary,
                    &[],
                    path,
                );
                let drafts: Vec<_> = (0..3)
                    .map(|i| {
                        sampler
                            .draft(&rows(&logits[i..=i]), 5 + i as u64, &[], None)
                            .unwrap()
                    })
                    .collect();
                let array = rows(&logits);
                let verdict = sampler.verify(&array, 5, &drafts, None).unwrap();
                let scores = sampler.logprobs(&array, &verdict.picks(), 3).unwrap();
                let outcome = verdict.read().unwrap();
                let got = scores.read(outcome.tokens()).unwrap();
                assert_eq!(got.len(), outcome.accepted + 1);
                for ((got, token), logits) in got.iter().zip(outcome.tokens()).zip(&logits) {
                    assert_scores(
                        &format!("{path:?}, {rule:?}, seed {seed}"),
                        got,
                        token,
                        logits,
                        known,
                        3,
                    );
                }
            }
        }
    }
}

#[test]
fn equally_likely_tokens_rank_by_lowest_id() {
    for path in paths() {
        for size in [30, 20_000] {
            let array = rows(&[vec![0.5; size]]);
            let sampler = sampler(&options(Shape::Greedy, None), Verify::Coupled, size, &[], path);
            let step = sampler.next(&array, 0, None).unwrap();
            let got = sampler
                .logprobs(&array, &step.picks(), 20)
                .unwrap()
                .read([0])
                .unwrap();
            assert_eq!(
                got[0].top.iter().map(|s| s.token).collect::<Vec<_>>(),
                (0..20).collect::<Vec<_>>()
            );
        }
    }
}

#[test]
fn a_token_that_no_row_yields_is_an_error() {
    let array = rows(&[oracle::logits(1, 50, 1.0)]);
    let sampler = sampler(
        &options(Shape::Greedy, None),
        Verify::Coupled,
        50,
        &[],
        paths()[0],
    );
    let step = sampler.next(&array, 0, None).unwrap();
    let token = step.read(0).unwrap();
    let scores = sampler.logprobs(&array, &step.picks(), 0).unwrap();
    assert!(scores.read([(token + 1) % 50]).is_err());
}
