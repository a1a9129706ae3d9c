//! One row of logits to a distribution, against the float64 oracle and on rows that no softmax survives.

use proptest::prelude::*;

use super::super::options::{Filter, Shape};
use super::super::oracle;
use super::super::rng::{uniform, Purpose, RowKey};
use super::*;

const PLAIN: Filter = Filter {
    top_k: 0,
    temperature: 1.0,
    top_p: 1.0,
    min_p: 0.0,
};

fn filters() -> Vec<(&'static str, Filter)> {
    vec![
        ("none", PLAIN),
        (
            "temperature",
            Filter {
                temperature: 0.5,
                ..PLAIN
            },
        ),
        ("top-k", Filter { top_k: 7, ..PLAIN }),
        ("top-p", Filter { top_p: 0.83, ..PLAIN }),
        ("min-p", Filter { min_p: 0.05, ..PLAIN }),
        (
            "all",
            Filter {
                top_k: 40,
                temperature: 0.8,
                top_p: 0.9,
                min_p: 0.02,
            },
        ),
        (
            "hot and wide",
            Filter {
                top_k: 300,
                temperature: 2.5,
                top_p: 0.97,
                min_p: 0.001,
            },
        ),
    ]
}

/// The distribution by way of the short list where top-k makes one, else by the dense way.
fn probabilities(row: &[f32], filter: &Filter) -> Vec<f32> {
    let mut probs = vec![0.0; row.len()];
    let mut scratch = Vec::new();
    if filter.top_k > 0 {
        best(row, filter.top_k as usize, &mut scratch);
        filter_sparse(&mut scratch, filter);
        scratch.iter().for_each(|c| probs[c.id as usize] = c.value);
    } else {
        filter_dense(row, peak(row), filter, &mut probs, &mut scratch);
    }
    probs
}

#[test]
fn every_filter_alone_and_all_together_give_the_oracles_probabilities() {
    for len in [5, 33, 500, 4096] {
        let row = oracle::logits(len as u64, len, 4.0);
        for (name, filter) in filters() {
            let want = oracle::distribution(&oracle::wide(&row), &Shape::Filtered(filter));
            let got = probabilities(&row, &filter);
            for id in 0..len {
                assert!(
                    (f64::from(got[id]) - want[id]).abs() < 1e-5,
                    "{name}, {len} ids: id {id} has {} for {}",
                    got[id],
                    want[id]
                );
            }
        }
    }
}

#[test]
fn wide_top_k_is_the_same_dense_or_as_a_list() {
    let row = oracle::logits(5, 2000, 4.0);
    let filter = Filter {
        top_k: 900,
        temperature: 1.2,
        top_p: 0.95,
        min_p: 0.0,
    };
    let mut probs = vec![0.0; 2000];
    filter_dense(&row, peak(&row), &filter, &mut probs, &mut Vec::new());
    assert_eq!(probs, probabilities(&row, &filter));
}

#[test]
fn both_ways_of_drawing_follow_the_oracles_distribution() {
    let row = oracle::logits(3, 200, 3.0);
    for (name, filter) in filters() {
        let want = oracle::distribution(&oracle::wide(&row), &Shape::Filtered(filter));
        let weights: Vec<Candidate> = probabilities(&row, &filter)
            .iter()
            .zip(0..)
            .map(|(&value, id)| Candidate { value, id })
            .collect();
        let mut raced = vec![0; row.len()];
        let mut inverted = vec![0; row.len()];
        for position in 0..50_000 {
            let key = RowKey::new(77, position, Purpose::Token);
            raced[race(weights.iter().copied(), key).unwrap() as usize] += 1;
            let u = uniform(77, position, Purpose::Token);
            inverted[inverse(weights.iter().copied(), u).unwrap() as usize] += 1;
        }
        oracle::assert_draws(&format!("race, {name}"), &raced, &want);
        oracle::assert_draws(&format!("inverse, {name}"), &inverted, &want);
    }
}

#[test]
fn the_race_does_not_depend_on_order_or_scale() {
    let weights: Vec<Candidate> = (0..50u32)
        .map(|id| Candidate {
            value: 1.0 / (1.0 + id as f32),
            id,
        })
        .collect();
    for position in 0..2000 {
        let key = RowKey::new(1, position, Purpose::Token);
        let forward = race(weights.iter().copied(), key);
        let scaled = weights.iter().rev().map(|c| Candidate {
            value: c.value * 0.25,
            ..*c
        });
        assert_eq!(forward, race(scaled, key));
    }
}

#[test]
fn worked_example_top_k_comes_before_top_p() {
    // Probabilities .6 .2 .2: top-k 2 leaves .75 and .25, and top-p 0.7 only the first, ties to the lowest id.
    let row: Vec<f32> = [0.6f32, 0.2, 0.2].iter().map(|p| p.ln()).collect();
    let got = probabilities(
        &row,
        &Filter {
            top_k: 2,
            temperature: 1.0,
            top_p: 0.7,
            min_p: 0.0,
        },
    );
    assert_eq!(got, [1.0, 0.0, 0.0]);
    let got = probabilities(
        &row,
        &Filter {
            top_k: 2,
            temperature: 1.0,
            top_p: 0.8,
            min_p: 0.0,
        },
    );
    assert!(
        (got[0] - 0.75).abs() < 1e-6 && (got[1] - 0.25).abs() < 1e-6 && got[2] == 0.0,
        "{got:?}"
    );
}

#[test]
fn equal_logits_are_kept_by_lowest_id() {
    let row = vec![1.0f32; 300];
    let mut kept = Vec::new();
    best(&row, 40, &mut kept);
    assert_eq!(
        kept.iter().map(|c| c.id).collect::<Vec<_>>(),
        (0..40).collect::<Vec<_>>()
    );
    assert_eq!(first_of(&row, peak(&row)), 0);
}

#[test]
fn a_nan_anywhere_shows_in_the_peak() {
    for len in [1, 15, 16, 17, 100] {
        for at in 0..len {
            let mut row = vec![1.0f32; len];
            row[at] = f32::NAN;
            assert!(peak(&row).is_nan(), "NaN at {at} of {len}");
        }
    }
    assert_eq!(peak(&[f32::NEG_INFINITY; 20]), f32::NEG_INFINITY);
    assert_eq!(peak(&[f32::INFINITY, 0.0]), f32::INFINITY);
}

#[test]
fn coldest_temperature_stays_finite() {
    let row = [1000.0f32, 999.0, -1000.0];
    let got = probabilities(
        &row,
        &Filter {
            top_k: 3,
            temperature: 1e-6,
            top_p: 1.0,
            min_p: 0.0,
        },
    );
    assert_eq!(got, [1.0, 0.0, 0.0]);
}

proptest! {
    #[test]
    fn best_is_a_full_sort_cut_short(
        values in prop::collection::vec(prop_oneof![(-4i8..4).prop_map(f32::from), Just(f32::NEG_INFINITY), Just(-0.0)], 1..400),
        k in 1usize..60,
    ) {
        let mut want: Vec<Candidate> =
            values.iter().zip(0..).map(|(&value, id)| Candidate { value, id }).collect();
        want.retain(|c| c.value > f32::NEG_INFINITY);
        want.sort_by(|a, b| b.value.partial_cmp(&a.value).unwrap().then(a.id.cmp(&b.id)));
        want.truncate(k);
        let mut got = Vec::new();
        best(&values, k, &mut got);
        prop_assert_eq!(got, want);
    }
}
