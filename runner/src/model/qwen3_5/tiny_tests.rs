//! Every layout, quantisation and spelling against the goldens of its tiny checkpoint: trunk, head's prefill, chained steps.

use mlx_rs::ops::indexing::{argmax_axis, take_axis};
use mlx_rs::Array;
use serde_json::Value;

use super::golden_tests::{build_as, build_with, fixtures, ids, ints};
use super::Qwen35;
use crate::mlx::{ops, Path};
use crate::model::checkpoint::Checkpoint;
use crate::model::plan::{plan, PlanOptions};
use crate::model::quant::Fp8Form;
use crate::model::weights::{memory_bytes, Precision};
use crate::model::{Batch, Model};

/// What every logit and state may differ by.
const TOLERANCE: f32 = 1e-3;

pub(super) struct Golden {
    what: String,
    tensors: std::collections::HashMap<String, Array>,
    pub(super) info: Value,
}

impl Golden {
    pub(super) fn read(name: &str, what: String) -> Self {
        let file = |kind: &str| fixtures().join(format!("golden/{name}.{kind}"));
        let tensors = Array::load_safetensors(file("safetensors")).unwrap();
        let info = serde_json::from_str(&std::fs::read_to_string(file("json")).unwrap()).unwrap();
        Self { what, tensors, info }
    }

    pub(super) fn get(&self, name: &str) -> &Array {
        &self.tensors[name]
    }

    pub(super) fn worst(&self, got: &Array, name: &str) -> f32 {
        let want = self.get(name);
        assert_eq!(got.size(), want.size(), "{}: {name}", self.what);
        let (got, want) = (
            got.to_vec_cast::<f32>().unwrap(),
            want.to_vec_cast::<f32>().unwrap(),
        );
        got.iter()
            .zip(&want)
            .map(|(a, b)| (a - b).abs())
            .fold(0f32, |a, b| if b.is_nan() { b } else { a.max(b) })
    }

    pub(super) fn check(&self, got: &Array, name: &str) {
        let worst = self.worst(got, name);
        assert!(worst < TOLERANCE, "{}: {name} differs by {worst}", self.what);
    }
}

/// Logits of the head chained on itself from `carried`, [4, V]; `at` is the rotary position of the next slot.
pub(super) fn chain(
    model: &Qwen35,
    carried: Array,
    at: i32,
    draft: &mut crate::cache::Caches,
) -> (Array, Array) {
    let (head, caches) = (model.self_draft().unwrap(), model.new_caches());
    let (mut carried, mut states, mut logits) = (carried, Vec::new(), Vec::new());
    for step in 0..4 {
        let scored = head.unembed(&carried).unwrap();
        let token = argmax_axis(&scored, -1, None).unwrap().item_cast::<i32>();
        states.push(carried.clone());
        logits.push(scored);
        if step < 3 {
            let token = ids(&[token]);
            let batch = Batch {
                conditioning: Some(&carried),
                ..Batch::text(&token, at + step)
            };
            carried = head.forward(&batch, &caches, draft).unwrap();
        }
    }
    let all = |parts: &[Array]| mlx_rs::ops::concatenate(parts, 1).unwrap();
    (all(&states), all(&logits))
}

/// Compares all that a golden has of text: `check` gets what the model computes and the golden's name of it.
fn check_model(name: &str, model: &Qwen35, golden: &Golden, check: &mut dyn FnMut(&Array, &str)) {
    for info in golden.info["prompts"].as_array().unwrap() {
        let prompt = info["name"].as_str().unwrap();
        let named = |part: &str| format!("{prompt}.{part}");
        let list = ints(&info["ids"]);
        let rows = golden.get(&named("rows"));
        let mut caches = model.new_caches();
        let hidden = model.forward(&Batch::text(&ids(&list), 0), &mut caches).unwrap();
        let pick = |a: &Array| take_axis(a, rows, 1).unwrap();
        check(&pick(&hidden), &named("hidden"));
        check(&pick(&model.unembed(&hidden).unwrap()), &named("logits"));
        let head = model.self_draft().unwrap_or_else(|| panic!("{name} has a head"));
        let first = info["mtp"]["first_token"].as_i64().unwrap() as i32;
        let ahead = ids(&[&list[1..], &[first]].concat());
        let mut draft = head.new_caches();
        let batch = Batch {
            conditioning: Some(&hidden),
            ..Batch::text(&ahead, 0)
        };
        let out = head.forward(&batch, &caches, &mut draft).unwrap();
        check(&pick(&out), &named("mtp.prefill_hidden"));
        let n = list.len() as i32;
        let (states, logits) = chain(model, ops::slice_axis(&out, 1, n - 1, n).unwrap(), n, &mut draft);
        check(&states, &named("mtp.hidden"));
        check(&logits, &named("mtp.logits"));
    }
}

fn check_tiny(name: &str, precision: Precision) {
    let paths: &[Path] = match precision {
        Precision::Widen => &[Path::Cpu, Path::Graph],
        Precision::Half | Precision::Stored | Precision::Native => &[Path::Cpu],
    };
    for path in paths {
        let golden = Golden::read(name, format!("{name} {precision:?} {path:?}"));
        let model = build_as(&format!("tiny/{name}"), precision, *path).model;
        check_model(name, &model, &golden, &mut |got, part| golden.check(got, part));
    }
}

macro_rules! tiny {
    ($($test:ident: $precision:ident of $($name:literal),+;)+) => {
        $(#[test]
        fn $test() {
            for name in [$($name),+] {
                check_tiny(name, Precision::$precision);
            }
        })+
    };
}

tiny! {
    dense_checkpoints_meet_their_goldens: Widen of "dense", "dense-tied", "dense-flat";
    converted_layouts_shift_each_norm_once: Widen of "mlx-head", "mlx-raw-sidecar";
    affine_codes_widen_to_their_goldens: Widen of "affine-3-64", "affine-4-64", "affine-8-32";
    overrides_and_a_dense_head_beside_codes_widen: Widen of "affine-mixed", "affine-dense-head";
    microscaled_codes_widen_to_their_goldens: Widen of "mxfp4", "mxfp8", "nvfp4";
    fp8_blocks_multiply_by_their_factors: Widen of "fp8";
    experts_of_every_spelling_meet_their_goldens: Widen of
        "moe-fused", "moe-fused-head-each", "moe-each-head-fused", "moe-switch", "moe-switch-head-each";
    quantised_experts_widen_to_their_goldens: Widen of
        "moe-affine-4-64", "moe-mxfp4", "moe-nvfp4-global", "moe-fp8";
    interleaved_projections_are_split_by_key_head: Widen of "next", "next-affine-4-64";
    a_model_with_a_tower_answers_text: Widen of "vision", "vision-mlx";
    bfloat16_matrices_are_multiplied_in_float32: Half of
        "dense", "dense-tied", "dense-flat", "mlx-head", "affine-mixed", "affine-dense-head", "moe-fused", "moe-each-head-fused",
        "next", "vision";
    affine_codes_are_multiplied_as_stored: Stored of "affine-3-64", "affine-4-64", "affine-8-32";
    microscaled_codes_are_multiplied_as_stored: Stored of "mxfp4", "mxfp8", "nvfp4";
    quantised_experts_are_gathered_as_stored: Stored of "moe-affine-4-64", "moe-mxfp4", "moe-nvfp4-global";
    half_precision_experts_are_widened_as_they_are_chosen: Stored of "moe-fused", "moe-switch-head-each";
    interleaved_projections_are_split_in_codes: Stored of "next-affine-4-64";
}

#[test]
fn the_size_named_before_loading_is_the_size_after() {
    for name in [
        "dense-tied",
        "affine-mixed",
        "fp8",
        "moe-nvfp4-global",
        "moe-fused-head-each",
        "next-affine-4-64",
        "vision",
    ] {
        let checkpoint = Checkpoint::open(&fixtures().join("tiny").join(name)).unwrap();
        let plan = plan(&checkpoint, PlanOptions::default()).unwrap();
        for precision in [Precision::Widen, Precision::Half, Precision::Stored] {
            let named = memory_bytes(&checkpoint, &plan, precision) as f64;
            let held = build_as(&format!("tiny/{name}"), precision, Path::Cpu).bytes as f64;
            assert!(
                (named / held - 1.0).abs() < 0.05,
                "{name} {precision:?}: {named} named, {held} held"
            );
        }
    }
}

/// What logits and states may be off by where the three mantissa bits of every value are rounded once more, on the scale of
/// its 32 neighbours instead of its block's: a share of the largest logit.
const REQUANTISED: f32 = 0.02;

#[test]
fn fp8_blocks_rounded_to_mxfp8_stay_near_their_goldens_in_half_the_memory() {
    let options = PlanOptions {
        fp8: Fp8Form::Mxfp8,
        ..PlanOptions::default()
    };
    for name in ["fp8", "moe-fp8"] {
        let dir = format!("tiny/{name}");
        let checkpoint = Checkpoint::open(&fixtures().join(&dir)).unwrap();
        let plan = plan(&checkpoint, options).unwrap();
        for precision in [Precision::Widen, Precision::Stored] {
            let golden = Golden::read(name, format!("{name} {precision:?}"));
            let loaded = build_with(&dir, precision, Path::Cpu, options);
            let (mut off, mut logits) = (0f32, 0f32);
            check_model(name, &loaded.model, &golden, &mut |got, part| {
                off = off.max(golden.worst(got, part));
                if part.ends_with("logits") {
                    logits = logits.max(got.abs().unwrap().max(None).unwrap().item_cast::<f32>());
                }
            });
            println!("{name} {precision:?}: off by at most {off}, logits up to {logits}");
            assert!(
                off < REQUANTISED * logits,
                "{name} {precision:?} differs by {off} of {logits}"
            );
            // And it has really been rounded.
            assert!(off > TOLERANCE, "{name} {precision:?} differs by {off} only");
            let named = memory_bytes(&checkpoint, &plan, precision) as f64;
            let held = loaded.bytes as f64;
            assert!(
                (named / held - 1.0).abs() < 0.05,
                "{name} {precision:?}: {named} named, {held} held"
            );
            if precision == Precision::Stored {
                let plain = build_as(&dir, precision, Path::Cpu).bytes;
                println!("{name}: {held} bytes, {plain} in bf16");
                assert!(held < plain as f64, "{name}: {held} bytes, {plain} in bf16");
            }
        }
    }
}
