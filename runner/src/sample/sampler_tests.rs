//! The whole sampler on both paths against the float64 oracle.

use lookahead_protocol::request::Verify;
use mlx_rs::Array;

use super::options::{Filter, PenaltyOptions, SamplingOptions, Shape, Window};
use super::rng::{Purpose, RowKey};
use super::sampler::{SampleError, Sampler, Vocabulary};
use super::{noise, oracle, Dist, Rows};
use crate::mlx::{Backend, Path};

/// Every path that this machine's default device can run.
pub(super) fn paths() -> Vec<Path> {
    match Backend::select(false) {
        Backend::Cpu => vec![Path::Cpu, Path::Graph],
        _ => vec![Path::Graph],
    }
}
pub(super) const PLAIN: Filter = Filter {
    top_k: 0,
    temperature: 1.0,
    top_p: 1.0,
    min_p: 0.0,
};

pub(super) fn options(shape: Shape, penalties: Option<PenaltyOptions>) -> SamplingOptions {
    SamplingOptions {
        num_predict: None,
        num_ctx: None,
        shape,
        penalties,
        seed: None,
        stop: Vec::new(),
        ignore_eos: false,
    }
}

pub(super) fn filters() -> Vec<(&'static str, Shape)> {
    [
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
    .into_iter()
    .map(|(name, filter)| (name, Shape::Filtered(filter)))
    .chain([("greedy", Shape::Greedy)])
    .collect()
}

pub(super) fn vocabulary(size: usize) -> Vocabulary {
    Vocabulary {
        logits: size,
        tokens: size,
    }
}

pub(super) fn sampler(
    options: &SamplingOptions,
    rule: Verify,
    size: usize,
    prompt: &[u32],
    path: Path,
) -> Sampler {
    Sampler::new(options, rule, 20_260, vocabulary(size), prompt, path)
}

/// Rows of logits as an array [R, V].
pub(super) fn rows<T: AsRef<[f32]>>(rows: &[T]) -> Array {
    let values: Vec<f32> = rows.iter().flat_map(|row| row.as_ref()).copied().collect();
    Array::from_slice(&values, &[rows.len() as i32, rows[0].as_ref().len() as i32])
}

/// Row `r` of a distribution over the vocabulary.
pub(super) fn probabilities(dist: &Dist, r: usize, size: usize) -> Vec<f32> {
    let mut out = vec![0.0; size];
    match dist {
        Dist::Point(ids) => out[ids.as_slice::<i32>()[r] as usize] = 1.0,
        Dist::Whole(probs) => out.copy_from_slice(&probs.as_slice::<f32>()[r * size..][..size]),
        Dist::List { ids, probs } => {
            let k = ids.dim(1) as usize;
            let ids = &ids.as_slice::<i32>()[r * k..][..k];
            for (&id, &p) in ids.iter().zip(&probs.as_slice::<f32>()[r * k..][..k]) {
                out[id as usize] += p;
            }
        }
    }
    out
}

pub(super) fn evaluate(rows: &Rows) {
    let dist = match &rows.dist {
        Dist::Point(only) | Dist::Whole(only) => vec![only],
        Dist::List { ids, probs } => vec![ids, probs],
    };
    mlx_rs::transforms::eval(dist.into_iter().chain([&rows.choice, &rows.peak])).unwrap();
}

pub(super) fn assert_close(name: &str, got: &[f32], want: &[f64]) {
    for (id, (&got, &want)) in got.iter().zip(want).enumerate() {
        assert!(
            (f64::from(got) - want).abs() < 1e-5,
            "{name}: id {id} has {got} for {want}"
        );
    }
}

#[test]
fn device_words_are_the_hosts_bit_for_bit() {
    let keys: Vec<RowKey> = (0..5)
        .map(|p| RowKey::new(u64::MAX - 3, p, Purpose::Draft))
        .collect();
    let ids: Vec<u32> = (0..3000).chain([248_319, u32::MAX - 1, u32::MAX]).collect();
    let words = noise::words(&Array::from_slice(&ids, &[1, ids.len() as i32]), &keys).unwrap();
    let words = words.as_slice::<u32>();
    for (r, key) in keys.iter().enumerate() {
        for (c, &id) in ids.iter().enumerate() {
            assert_eq!(words[r * ids.len() + c], key.word(id), "row {r}, id {id}");
        }
    }
}

#[test]
fn both_paths_compute_the_oracles_distribution_for_several_rows_at_once() {
    for size in [50, 1000, 4096] {
        let logits: Vec<Vec<f32>> = (0..3)
            .map(|r| oracle::logits(r + size as u64, size, 4.0))
            .collect();
        for (name, shape) in filters() {
            for path in paths() {
                let sampler = sampler(&options(shape, None), Verify::Coupled, size, &[], path);
                let got = sampler.next(&rows(&logits), 5, None).unwrap();
                evaluate(&got);
                for (r, row) in logits.iter().enumerate() {
                    let name = format!("{name}, {size} ids, {path:?}, row {r}");
                    let want = oracle::distribution(&oracle::wide(row), &shape);
                    assert_close(&name, &probabilities(&got.dist, r, size), &want);
                    let top = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                    assert_eq!(got.peak.as_slice::<f32>()[r], top, "{name}");
                }
            }
        }
    }
}

#[test]
fn both_paths_draw_the_same_tokens() {
    let size = 4096;
    for rule in [Verify::Coupled, Verify::Rejection] {
        for (name, shape) in filters() {
            let draw = |path| {
                let sampler = sampler(&options(shape, None), rule, size, &[], path);
                let mut tokens = Vec::new();
                for position in (0..200).step_by(8) {
                    let logits: Vec<Vec<f32>> =
                        (0..8).map(|r| oracle::logits(r + position, size, 4.0)).collect();
                    let got = sampler.next(&rows(&logits), position, None).unwrap();
                    evaluate(&got);
                    tokens.extend_from_slice(got.choice.as_slice::<i32>());
                }
                tokens
            };
            let drawn: Vec<Vec<i32>> = paths().into_iter().map(draw).collect();
            let same = drawn[0]
                .iter()
                .zip(&drawn[drawn.len() - 1])
                .filter(|(a, b)| a == b)
                .count();
            // A draw may fall between two roundings of one boundary.
            assert!(same >= 199, "{name}, {rule:?}: {same} of 200");
        }
    }
}

/// Draws `n` tokens from one row of logits, many rows at a time.
fn count_draws(sampler: &Sampler, logits: &[f32], n: usize) -> Vec<u64> {
    let batch = 2500;
    let repeated = Array::from_slice(logits, &[1, logits.len() as i32]);
    let repeated = mlx_rs::ops::broadcast_to(&repeated, &[batch as i32, logits.len() as i32]).unwrap();
    let mut counts = vec![0; logits.len()];
    for start in (0..n).step_by(batch) {
        let got = sampler.next(&repeated, start as u64, None).unwrap();
        got.choice
            .as_slice::<i32>()
            .iter()
            .for_each(|&id| counts[id as usize] += 1);
    }
    counts
}

#[test]
fn each_option_alone_and_all_together_draw_the_oracles_distribution() {
    let size = 300;
    let logits = oracle::logits(8, size, 3.0);
    let history: Vec<u32> = (0..400u32).map(|i| (i * i) % 300).collect();
    let neutral = PenaltyOptions {
        repeat: 1.0,
        presence: 0.0,
        frequency: 0.0,
        window: Window::Last(64),
    };
    let mut cases: Vec<(&str, Shape, Option<PenaltyOptions>)> = filters()
        .into_iter()
        .map(|(name, shape)| (name, shape, None))
        .collect();
    let plain = Shape::Filtered(PLAIN);
    let all = Shape::Filtered(Filter {
        top_k: 40,
        temperature: 0.8,
        top_p: 0.9,
        min_p: 0.02,
    });
    cases.extend([
        (
            "repeat",
            plain,
            Some(PenaltyOptions {
                repeat: 1.3,
                ..neutral
            }),
        ),
        (
            "repeat below 1, all",
            plain,
            Some(PenaltyOptions {
                repeat: 0.7,
                window: Window::All,
                ..neutral
            }),
        ),
        (
            "presence",
            plain,
            Some(PenaltyOptions {
                presence: 1.5,
                ..neutral
            }),
        ),
        (
            "frequency",
            plain,
            Some(PenaltyOptions {
                frequency: 0.4,
                ..neutral
            }),
        ),
        (
            "everything",
            all,
            Some(PenaltyOptions {
                repeat: 1.2,
                presence: 0.3,
                frequency: 0.2,
                window: Window::Last(100),
            }),
        ),
    ]);
    for (name, shape, penalties) in cases {
        let wide = oracle::wide(&logits);
        let penalised = penalties.map_or(wide.clone(), |p| oracle::penalise(&wide, &history, &p));
        let want = oracle::distribution(&penalised, &shape);
        for path in paths() {
            for rule in [Verify::Coupled, Verify::Rejection] {
                let sampler = sampler(&options(shape, penalties), rule, size, &history, path);
                let name = format!("{name}, {path:?}, {rule:?}");
                oracle::assert_draws(&name, &count_draws(&sampler, &logits, 50_000), &want);
            }
        }
    }
}

#[test]
fn equal_logits_go_to_the_lowest_ids_on_both_paths() {
    for size in [200, 20_000] {
        let logits = rows(&[vec![1.5; size]]);
        for path in paths() {
            let greedy = sampler(&options(Shape::Greedy, None), Verify::Coupled, size, &[], path);
            assert_eq!(greedy.next(&logits, 0, None).unwrap().read(0).unwrap(), 0);
            let shape = Shape::Filtered(Filter {
                top_k: 10,
                top_p: 0.45,
                ..PLAIN
            });
            let got = sampler(&options(shape, None), Verify::Coupled, size, &[], path)
                .next(&logits, 0, None)
                .unwrap();
            evaluate(&got);
            let kept: Vec<usize> = probabilities(&got.dist, 0, size)
                .iter()
                .enumerate()
                .filter(|p| *p.1 > 0.0)
                .map(|p| p.0)
                .collect();
            assert_eq!(kept, [0, 1, 2, 3, 4], "{size}, {path:?}");
        }
    }
}

#[test]
fn ids_beyond_the_tokenizer_and_masked_ids_are_never_drawn() {
    let mut logits = vec![0.0f32; 100];
    logits[90] = 50.0;
    logits[70] = 20.0;
    let known = Vocabulary {
        logits: 100,
        tokens: 80,
    };
    // Only multiples of three.
    let words: Vec<u32> = (0..4u32)
        .map(|w| (0..32).filter(|b| (w * 32 + b) % 3 == 0).map(|b| 1 << b).sum())
        .collect();
    for path in paths() {
        for (_, shape) in filters() {
            let sampler = Sampler::new(&options(shape, None), Verify::Coupled, 1, known, &[], path);
            let mask = sampler.mask(&[Some(&words), None]);
            let both = rows(&[&logits, &logits]);
            for position in 0..50 {
                let free = sampler.next(&rows(&[&logits]), position, None).unwrap();
                assert_eq!(free.read(0).unwrap(), 70);
                let masked = sampler.next(&both, position, Some(&mask)).unwrap();
                let ids = masked.choice.as_slice::<i32>();
                assert!(ids[0] % 3 == 0 && ids[0] < 80, "{path:?}: {}", ids[0]);
                assert_eq!(ids[1], 70);
            }
        }
    }
}

#[test]
fn a_row_without_a_choice_is_an_error_and_never_a_token() {
    let mut broken = vec![vec![1.0f32; 600]; 3];
    broken[0][599] = f32::NAN;
    broken[1] = vec![f32::NEG_INFINITY; 600];
    broken[2][5] = f32::INFINITY;
    for path in paths() {
        for (name, shape) in filters() {
            for rule in [Verify::Coupled, Verify::Rejection] {
                let sampler = sampler(&options(shape, None), rule, 600, &[], path);
                for (row, what) in broken.iter().zip(["not numbers", "all -inf", "infinite"]) {
                    match sampler.next(&rows(&[&row]), 9, None).unwrap().read(9) {
                        Err(SampleError::NanLogits {
                            position: 9,
                            what: got,
                        }) => assert_eq!(got, what, "{name}"),
                        other => panic!("{name}, {path:?}: {other:?}"),
                    }
                }
            }
        }
    }
}

#[test]
fn half_precision_logits_are_taken() {
    let logits = oracle::logits(1, 500, 4.0);
    for path in paths() {
        for (name, shape) in filters() {
            let narrow = rows(&[&logits]).as_dtype(mlx_rs::Dtype::Bfloat16).unwrap();
            let wide = narrow.as_dtype(mlx_rs::Dtype::Float32).unwrap();
            let sampler = sampler(&options(shape, None), Verify::Coupled, 500, &[], path);
            let [narrow, wide] = [narrow, wide].map(|l| sampler.next(&l, 3, None).unwrap().read(3).unwrap());
            assert_eq!(narrow, wide, "{name}");
        }
    }
}

#[test]
fn a_row_does_not_depend_on_its_neighbours() {
    let size = 512;
    let logits: Vec<Vec<f32>> = (0..6).map(|r| oracle::logits(r, size, 4.0)).collect();
    for path in paths() {
        for (name, shape) in filters() {
            let sampler = sampler(&options(shape, None), Verify::Coupled, size, &[], path);
            let together = sampler.next(&rows(&logits), 30, None).unwrap();
            let together = together.choice.as_slice::<i32>();
            for (r, row) in logits.iter().enumerate() {
                let position = 30 + r as u64;
                let alone = sampler
                    .next(&rows(&[&row]), position, None)
                    .unwrap()
                    .read(position)
                    .unwrap();
                assert_eq!(alone as i32, together[r], "{name}, {path:?}, row {r}");
            }
        }
    }
}
