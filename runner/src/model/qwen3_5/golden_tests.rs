//! The trained model's forward passes against goldens made by a float64 reference in another language.

use std::path::PathBuf;

use mlx_rs::ops::indexing::argmax_axis;
use mlx_rs::Array;
use serde_json::Value;

use super::{load, Loaded, Qwen35, Scores};
use crate::mlx::{ops, Backend, Path};
use crate::model::checkpoint::Checkpoint;
use crate::model::plan::{plan, PlanOptions};
use crate::model::weights::{Precision, Weights};
use crate::model::{Batch, Model};

pub(super) fn fixtures() -> PathBuf {
    PathBuf::from(
        option_env!("LOOKAHEAD_FIXTURES").unwrap_or(concat!(env!("CARGO_MANIFEST_DIR"), "/../fixtures")),
    )
}

pub(super) fn build_as(name: &str, precision: Precision, path: Path) -> Loaded {
    build_with(name, precision, path, PlanOptions::default())
}

pub(super) fn build_with(name: &str, precision: Precision, path: Path, options: PlanOptions) -> Loaded {
    Backend::select(true);
    let checkpoint = Checkpoint::open(&fixtures().join(name)).unwrap();
    let plan = plan(&checkpoint, options).unwrap();
    let mut progress = |_| true;
    load(
        &Weights::new(&checkpoint, &plan, precision, &mut progress).unwrap(),
        path,
        Scores::Stored,
    )
    .unwrap()
}

fn build(name: &str, path: Path) -> Qwen35 {
    build_as(name, Precision::Widen, path).model
}

pub(super) fn ids(values: &[i32]) -> Array {
    Array::from_slice(values, &[1, values.len() as i32])
}

/// Logits of all positions, the prompt fed in chunks.
fn logits(model: &Qwen35, prompt: &[i32], chunk: usize) -> Vec<Vec<f32>> {
    let mut caches = model.new_caches();
    let mut out = Vec::new();
    for part in prompt.chunks(chunk) {
        let ids = ids(part);
        let hidden = model
            .forward(&Batch::text(&ids, caches.offset()), &mut caches)
            .unwrap();
        let logits = model.unembed(&hidden).unwrap();
        let width = logits.dim(2) as usize;
        let flat = logits.to_vec_cast::<f32>().unwrap();
        out.extend(flat.chunks(width).map(<[f32]>::to_vec));
    }
    out
}

fn greedy(model: &Qwen35, prompt: &[i32], count: usize) -> Vec<i32> {
    let mut caches = model.new_caches();
    let mut next = prompt.to_vec();
    let mut out = Vec::new();
    for _ in 0..count {
        let hidden = model
            .forward(&Batch::text(&ids(&next), caches.offset()), &mut caches)
            .unwrap();
        let rows = hidden.dim(1);
        let last = ops::slice_axis(&hidden, 1, rows - 1, rows).unwrap();
        let best = argmax_axis(model.unembed(&last).unwrap(), -1, None).unwrap();
        let id = best.item_cast::<i32>();
        out.push(id);
        next = vec![id];
    }
    out
}

fn trained() -> Value {
    let text = std::fs::read_to_string(fixtures().join("models/tiny-qwen3.5-mtp.golden.json")).unwrap();
    serde_json::from_str(&text).unwrap()
}

pub(super) fn ints(value: &Value) -> Vec<i32> {
    value
        .as_array()
        .unwrap()
        .iter()
        .map(|v| v.as_i64().unwrap() as i32)
        .collect()
}

fn prompts(golden: &Value) -> Vec<&Value> {
    let prompts = golden["prompts"].as_array().map(|a| a.iter().collect::<Vec<_>>());
    prompts.unwrap_or_else(|| {
        golden
            .as_object()
            .unwrap()
            .values()
            .filter(|v| v.get("greedy").is_some())
            .collect()
    })
}

#[test]
fn trained_model_gives_the_golden_logits_and_greedy_tokens_on_every_path() {
    let golden = trained();
    for path in [Path::Cpu, Path::Graph] {
        let model = build("models/tiny-qwen3.5-mtp", path);
        let all = prompts(&golden);
        assert!(all.len() >= 10);
        for prompt in all {
            let ids = ints(&prompt["ids"]);
            let last = logits(&model, &ids, 2048).pop().unwrap();
            for pair in prompt["top5_last"].as_array().unwrap() {
                let (id, want) = (pair[0].as_u64().unwrap() as usize, pair[1].as_f64().unwrap());
                let got = f64::from(last[id]);
                assert!(
                    (got - want).abs() < 1e-3,
                    "{path:?}: logit {id} is {got}, golden {want}"
                );
            }
            assert_eq!(
                greedy(&model, &ids, 48),
                ints(&prompt["greedy"]),
                "{path:?}: {}",
                prompt["text"]
            );
        }
    }
}

#[test]
fn every_chunk_size_agrees_with_one_shot() {
    let golden = trained();
    for path in [Path::Cpu, Path::Graph] {
        let model = build("models/tiny-qwen3.5-mtp", path);
        let longest = prompts(&golden)
            .into_iter()
            .map(|p| ints(&p["ids"]))
            .max_by_key(Vec::len)
            .unwrap();
        let ids = &longest[..150.min(longest.len())];
        let whole = logits(&model, ids, 2048);
        for chunk in [1, 7, 64] {
            let parts = logits(&model, ids, chunk);
            let worst = whole
                .iter()
                .flatten()
                .zip(parts.iter().flatten())
                .map(|(a, b)| (a - b).abs())
                .fold(0f32, f32::max);
            assert!(worst < 1e-4, "{path:?}: chunk {chunk} differs by {worst}");
        }
    }
}

#[test]
fn rolling_back_kept_rows_equals_never_having_run_them() {
    for path in [Path::Cpu, Path::Graph] {
        let model = build("models/tiny-qwen3.5-mtp", path);
        let prompt = ints(&prompts(&trained())[0]["ids"]);
        let mut caches = model.new_caches();
        let first = ids(&prompt);
        model.forward(&Batch::text(&first, 0), &mut caches).unwrap();
        let start = caches.offset();
        for keep in 1..=4 {
            caches.keep_rows(true);
            let drafts = ids(&[prompt[0], prompt[1], prompt[2], prompt[3]]);
            model.forward(&Batch::text(&drafts, start), &mut caches).unwrap();
            caches.rollback(start + keep).unwrap();
            let mut straight = model.new_caches();
            let mut all = prompt.clone();
            all.extend(&prompt[..keep as usize]);
            for id in all {
                let one = ids(&[id]);
                model
                    .forward(&Batch::text(&one, straight.offset()), &mut straight)
                    .unwrap();
            }
            let next = ids(&[prompt[5]]);
            let a = model
                .forward(&Batch::text(&next, start + keep), &mut caches)
                .unwrap();
            let b = model
                .forward(&Batch::text(&next, start + keep), &mut straight)
                .unwrap();
            let (a, b) = (a.to_vec_cast::<f32>().unwrap(), b.to_vec_cast::<f32>().unwrap());
            let worst = a.iter().zip(&b).map(|(x, y)| (x - y).abs()).fold(0f32, f32::max);
            assert!(worst < 1e-4, "{path:?}: keeping {keep} rows differs by {worst}");
            // Back to where the rows began.
            caches = model.new_caches();
            model.forward(&Batch::text(&first, 0), &mut caches).unwrap();
        }
    }
}

#[test]
fn scheduled_slots_capture_the_state_that_a_prefix_of_that_length_has() {
    for path in [Path::Cpu, Path::Graph] {
        let model = build("models/tiny-qwen3.5-mtp", path);
        let prompt: Vec<i32> = (0..100).map(|i| 100 + i * 7 % 3000).collect();
        let mut caches = model.new_caches();
        caches.schedule(&[5, 64, 99]);
        let whole = ids(&prompt);
        model.forward(&Batch::text(&whole, 0), &mut caches).unwrap();
        let snapshots = caches.take_snapshots().unwrap();
        assert_eq!(
            snapshots.iter().map(|s| s.offset).collect::<Vec<_>>(),
            [5, 64, 99]
        );
        for snapshot in snapshots {
            let mut straight = model.new_caches();
            let part = ids(&prompt[..snapshot.offset as usize]);
            model.forward(&Batch::text(&part, 0), &mut straight).unwrap();
            let other = straight.snapshot().unwrap().unwrap();
            for (a, b) in snapshot.states.iter().zip(&other.states) {
                for (a, b) in [(&a.conv, &b.conv), (&a.state, &b.state)] {
                    let (a, b) = (a.to_vec_cast::<f32>().unwrap(), b.to_vec_cast::<f32>().unwrap());
                    let worst = a.iter().zip(&b).map(|(x, y)| (x - y).abs()).fold(0f32, f32::max);
                    assert!(
                        worst < 1e-4,
                        "{path:?}: slot {} differs by {worst}",
                        snapshot.offset
                    );
                }
            }
        }
    }
}
