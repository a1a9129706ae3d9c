//! Inspections of sound and broken models.

use serde_json::{json, Value};

use super::*;
use crate::model::test_support::{fixtures, tiny, Edited};

const HERE: Circumstances = Circumstances {
    backend: Backend::Cpu,
    memory_limit: 8 << 30,
    chunk: 512,
    no_draft: false,
    fp8: Fp8Form::Bf16,
};

fn json_of(dir: &Path, circumstances: Circumstances) -> Value {
    serde_json::to_value(inspect(dir, circumstances)).unwrap()
}

#[test]
fn the_trained_model_is_described_whole() {
    let dir = fixtures("models/tiny-qwen3.5-mtp");
    let mut found = inspect(&dir, HERE);
    found.model = "tiny-qwen3.5-mtp".to_owned();
    insta::assert_snapshot!(found.to_string());
}

#[test]
fn every_fixture_runs_with_an_active_head() {
    for entry in std::fs::read_dir(tiny("")).unwrap() {
        let dir = entry.unwrap().path();
        let found = inspect(&dir, HERE);
        assert!(found.verdict.runs, "{found}");
        let contents = found.contents.unwrap();
        assert!(contents.draft.active && contents.memory.total > contents.memory.weights);
    }
}

#[test]
fn mixed_storage_is_a_table_with_most_parameters_first() {
    let found = json_of(&tiny("affine-mixed"), HERE);
    let rows = found["quantization"].as_array().unwrap();
    let kinds: Vec<&str> = rows.iter().filter_map(|r| r["storage"].as_str()).collect();
    for wanted in ["affine 4-bit group 64", "affine 2-bit group 128", "mxfp8", "bf16"] {
        assert!(kinds.contains(&wanted), "{kinds:?}");
    }
    let parameters: Vec<u64> = rows.iter().filter_map(|r| r["parameters"].as_u64()).collect();
    assert!(parameters.is_sorted_by(|a, b| a >= b));
    assert!(found["memory"]["total"].as_u64().unwrap() > 0);
}

#[test]
fn what_cannot_run_says_why_and_still_tells_what_is_known() {
    let mut e = Edited::of("dense");
    e.take(|k| k.ends_with("layers.0.linear_attn.A_log"));
    let dir = e.save();
    let found = json_of(dir.path(), HERE);
    assert_eq!(found["verdict"]["runs"], json!(false));
    assert_eq!(
        found["verdict"]["reasons"][0],
        "1 needed tensors are missing: layers.0.linear_attn.A_log"
    );
    assert_eq!(found["architecture"], "Qwen3_5ForConditionalGeneration");
    assert_eq!(found["layers"]["full_attention"], 1);
    let gone = json_of(&dir.path().join("gone"), HERE);
    assert!(
        gone["verdict"]["reasons"][0]
            .as_str()
            .unwrap()
            .contains("no such directory"),
        "{gone}"
    );
}

#[test]
fn a_missing_or_foreign_tokenizer_is_a_reason() {
    let dir = Edited::of("dense").save();
    let tokenizer = dir.path().join("tokenizer.json");
    std::fs::write(&tokenizer, r#"{"model": {"type": "Unheard"}}"#).unwrap();
    let foreign = inspect(dir.path(), HERE);
    assert!(
        !foreign.verdict.runs && foreign.verdict.reasons[0].contains("tokenizer"),
        "{foreign}"
    );
    std::fs::remove_file(&tokenizer).unwrap();
    let missing = inspect(dir.path(), HERE);
    assert!(
        !missing.verdict.runs && missing.verdict.reasons[0].contains("tokenizer.json"),
        "{missing}"
    );
}

#[test]
fn weights_beyond_the_limit_are_refused_with_both_sizes() {
    let found = inspect(
        &tiny("dense"),
        Circumstances {
            memory_limit: 1000,
            ..HERE
        },
    );
    let reason = &found.verdict.reasons[0];
    assert!(
        !found.verdict.runs && reason.contains("more than the memory limit of 1000 bytes"),
        "{reason}"
    );
}

#[test]
fn an_inactive_head_is_explained() {
    let mut e = Edited::of("dense");
    e.take(|k| k.starts_with("mtp."));
    let dir = e.save();
    let found = json_of(dir.path(), HERE);
    assert_eq!(
        (&found["draft"]["present"], &found["draft"]["active"]),
        (&json!(false), &json!(false))
    );
    assert!(found["draft"]["reason"]
        .as_str()
        .unwrap()
        .contains("claims an MTP head"));
    let off = json_of(
        &tiny("dense"),
        Circumstances {
            no_draft: true,
            ..HERE
        },
    );
    assert_eq!(
        (&off["draft"]["present"], &off["draft"]["reason"]),
        (&json!(true), &json!("switched off"))
    );
}

#[test]
fn the_estimate_knows_how_fp8_blocks_would_be_held() {
    // On a GPU, where nothing is widened.
    let weights = |fp8| {
        let on_gpu = Circumstances {
            backend: Backend::Metal,
            fp8,
            ..HERE
        };
        inspect(&tiny("fp8"), on_gpu).contents.unwrap().memory.weights
    };
    let (bf16, mxfp8) = (weights(Fp8Form::Bf16), weights(Fp8Form::Mxfp8));
    let checkpoint = Checkpoint::open(&tiny("fp8")).unwrap();
    let blocks: u64 = plan(&checkpoint, PlanOptions::default())
        .unwrap()
        .modules
        .iter()
        .filter(|module| matches!(module.quant, ModuleQuant::Fp8Block { .. }))
        .map(|module| module.shape.iter().map(|n| *n as u64).product::<u64>())
        .sum();
    assert!(blocks > 100_000);
    assert_eq!(bf16 - mxfp8, blocks - blocks / 32);
}
