//! The head's status: present, whole, of a known kind, and in which convention.

use half::bf16;
use safetensors::Dtype;
use serde_json::json;

use super::*;
use crate::model::plan::{plan, PlanOptions};
use crate::model::test_support::{plan_edited, tiny, Edited};

#[test]
fn the_heads_own_table_describes_the_head_alone() {
    let mut e = Edited::of("affine-mixed");
    e.config.insert(
        "mtplx_mtp_quantization".to_owned(),
        json!({"bits": 8, "group_size": 64}),
    );
    let error = plan_edited(&e);
    // The head's other modules are 4 bit; its table now says 8, so the head is refused, not the model.
    let reason = error.unwrap().head.reason().unwrap();
    assert!(reason.contains("affine 8-bit group 64 for the head"), "{reason}");
}

#[test]
fn a_claimed_head_that_is_not_there_leaves_the_model_running() {
    let mut e = Edited::of("mlx-head");
    e.take(|k| k.contains("mtp."));
    let plan = plan_edited(&e).unwrap();
    assert_eq!(plan.head, HeadStatus::NoTensors { claimed: true });
    assert!(plan.head.reason().unwrap().contains("claims an MTP head"));
    e.text().insert("mtp_num_hidden_layers".to_owned(), json!(0));
    assert_eq!(
        plan_edited(&e).unwrap().head,
        HeadStatus::NoTensors { claimed: false }
    );
}

#[test]
fn a_head_counts_even_where_the_config_denies_it() {
    let mut e = Edited::of("dense");
    e.text().insert("mtp_num_hidden_layers".to_owned(), json!(0));
    assert!(plan_edited(&e).unwrap().head.is_active());
}

#[test]
fn half_a_head_is_inactive_and_names_what_is_missing() {
    let mut e = Edited::of("dense");
    e.take(|k| k == "mtp.norm.weight" || k == "mtp.layers.0.mlp.up_proj.weight");
    let plan = plan_edited(&e).unwrap();
    let missing = vec![
        "mtp.norm.weight".to_owned(),
        "mtp.layers.0.mlp.up_proj".to_owned(),
    ];
    assert_eq!(plan.head, HeadStatus::Incomplete { missing });
    let mut e = Edited::of("dense");
    e.take(|k| k == "mtp.fc.weight");
    assert!(matches!(
        plan_edited(&e).unwrap().head,
        HeadStatus::Incomplete { .. }
    ));
}

#[test]
fn a_head_of_an_unknown_kind_is_inactive_with_the_reason() {
    let mut e = Edited::of("dense");
    let norm = e.tensor("mtp.layers.0.input_layernorm.weight").clone();
    e.holding("mtp.fc.weight")
        .insert("mtp.layers.1.input_layernorm.weight".to_owned(), norm);
    let reason = plan_edited(&e).unwrap().head.reason().unwrap();
    assert_eq!(
        reason,
        "unsupported MTP head: it has 2 layers; only one is supported"
    );
    let mut e = Edited::of("dense");
    e.tensor("mtp.fc.weight").shape = vec![128, 64];
    assert!(plan_edited(&e)
        .unwrap()
        .head
        .reason()
        .unwrap()
        .contains("has shape [128, 64]"));
    let mut e = Edited::of("dense");
    e.text()
        .insert("mtp_use_dedicated_embeddings".to_owned(), json!(true));
    assert!(plan_edited(&e)
        .unwrap()
        .head
        .reason()
        .unwrap()
        .contains("embedding of its own"));
}

/// Adds to a bf16 tensor.
fn shift(e: &mut Edited, end: &str, by: f32) {
    let t = e.tensor(end);
    assert_eq!(t.dtype, Dtype::BF16);
    for pair in t.data.chunks_exact_mut(2) {
        let x = bf16::from_le_bytes([pair[0], pair[1]]).to_f32() + by;
        pair.copy_from_slice(&bf16::from_f32(x).to_le_bytes());
    }
}

fn shift_head(e: &mut Edited, by: f32) {
    for name in [
        "input_layernorm",
        "post_attention_layernorm",
        "self_attn.q_norm",
        "self_attn.k_norm",
    ] {
        shift(e, &format!("mtp.layers.0.{name}.weight"), by);
    }
    for name in ["pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"] {
        shift(e, &format!("mtp.{name}.weight"), by);
    }
}

#[test]
fn the_heads_convention_follows_its_values_not_its_names() {
    // A raw head kept under a converter's names: shifted too seldom by whoever goes by names.
    let mut e = Edited::of("mlx-head");
    shift_head(&mut e, -1.0);
    let plan = plan_edited(&e).unwrap();
    assert_eq!(plan.head.convention(), Some(Convention::Raw));
    assert!(plan.warnings[0].contains("norms are raw"), "{:?}", plan.warnings);
    // A converted head in a raw trunk's file.
    let mut e = Edited::of("dense");
    shift_head(&mut e, 1.0);
    assert_eq!(
        plan_edited(&e).unwrap().head.convention(),
        Some(Convention::Converted)
    );
}

#[test]
fn doubly_shifted_or_undecided_head_norms_switch_the_head_off() {
    let mut e = Edited::of("mlx-head");
    shift_head(&mut e, 1.0);
    let status = plan_edited(&e).unwrap().head;
    assert!(matches!(status, HeadStatus::AmbiguousNorms { .. }), "{status:?}");
    let mut e = Edited::of("mlx-head");
    shift_head(&mut e, -0.5);
    let status = plan_edited(&e).unwrap().head;
    assert!(matches!(status, HeadStatus::AmbiguousNorms { .. }), "{status:?}");
}

#[test]
fn a_flag_switches_the_head_off() {
    let checkpoint = Checkpoint::open(&tiny("dense")).unwrap();
    let off = PlanOptions {
        no_draft: true,
        ..PlanOptions::default()
    };
    let plan = plan(&checkpoint, off).unwrap();
    assert_eq!(plan.head, HeadStatus::Disabled);
    assert!(plan.modules.iter().all(|m| !m.path.starts_with("mtp.")));
}

#[test]
fn a_sidecar_is_found_under_every_name_and_prefix() {
    let places = [
        "mtp.safetensors",
        "model-mtp.safetensors",
        "mtp/model.safetensors",
        "other.safetensors",
    ];
    let prefixes = ["mtp.", "model.mtp.", "language_model.mtp.", ""];
    for place in places {
        for prefix in prefixes {
            let mut e = Edited::of("dense-tied");
            let head = e.take(|k| k.starts_with("mtp."));
            let renamed = |k: &str| format!("{prefix}{}", k.strip_prefix("mtp.").unwrap());
            e.files.insert(
                place.to_owned(),
                head.into_iter().map(|(k, t)| (renamed(&k), t)).collect(),
            );
            let plan = plan_edited(&e).unwrap();
            assert_eq!(
                plan.head.convention(),
                Some(Convention::Raw),
                "{place} {prefix:?}: {:?}",
                plan.head
            );
        }
    }
}

#[test]
fn a_file_that_the_config_names_is_read() {
    let mut e = Edited::of("mlx-head");
    let head = e.take(|k| k.contains("mtp."));
    e.files.insert("heads/draft.safetensors".to_owned(), head);
    assert!(!plan_edited(&e).unwrap().head.is_active());
    e.config.insert(
        "mtp_weights".to_owned(),
        json!({"file": "heads/draft.safetensors"}),
    );
    assert!(plan_edited(&e).unwrap().head.is_active());
}
