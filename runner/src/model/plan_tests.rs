//! What is settled before the first weight is read: trunk, storage, tying, tower. The head's part is beside its own module.

use std::collections::BTreeMap;

use safetensors::Dtype;
use serde_json::{json, Value};

use super::*;
use crate::model::test_support::{fixtures, plan_edited, tiny, Edited};

fn plan_of(name: &str) -> Plan {
    let checkpoint = Checkpoint::open(&tiny(name)).unwrap();
    plan(&checkpoint, PlanOptions::default()).unwrap_or_else(|e| panic!("{name}: {e}"))
}

/// Storage kinds and how many modules have each.
fn kinds(plan: &Plan) -> BTreeMap<String, usize> {
    let mut out = BTreeMap::new();
    for module in &plan.modules {
        *out.entry(module.quant.to_string()).or_default() += 1;
    }
    out
}

#[test]
fn every_fixture_has_an_active_head_in_the_convention_it_was_written_in() {
    let mut seen = String::new();
    for entry in std::fs::read_dir(tiny("")).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        let plan = plan_of(&name);
        let raw_trunk = plan.convention == Convention::Raw;
        let raw_head = plan.head.convention() == Some(Convention::Raw);
        let hf = ["dense", "fp8", "moe-fused", "moe-each", "moe-fp8", "vision"];
        let converted = !hf.iter().any(|p| name.starts_with(p)) && name != "next" || name == "vision-mlx";
        assert_eq!(raw_trunk, !converted, "{name}");
        assert!(plan.head.is_active(), "{name}: {:?}", plan.head);
        let sidecar = ["mlx-raw-sidecar", "moe-switch-head-each"].contains(&name.as_str());
        assert_eq!(raw_head, !converted || sidecar, "{name}");
        assert_eq!(
            matches!(plan.vision, VisionStatus::Active(_)),
            name.starts_with("vision"),
            "{name}"
        );
        assert!(plan.warnings.is_empty(), "{name}: {:?}", plan.warnings);
        seen.push_str(&name);
    }
    assert!(seen.contains("next-affine-4-64"));
}

#[test]
fn the_trained_model_is_raw_tied_and_has_a_head() {
    let checkpoint = Checkpoint::open(&fixtures("models/tiny-qwen3.5-mtp")).unwrap();
    let plan = plan(&checkpoint, PlanOptions::default()).unwrap();
    assert_eq!(
        (plan.convention, plan.tied, plan.parameters),
        (Convention::Raw, true, 8_890_528)
    );
    assert_eq!(
        plan.head,
        HeadStatus::Active {
            convention: Convention::Raw,
            warnings: Vec::new()
        }
    );
}

#[test]
fn mixed_overrides_in_either_path_style_reach_their_modules() {
    let plan = plan_of("affine-mixed");
    let of = |path: &str| plan.modules.iter().find(|m| m.path == path).unwrap().quant;
    assert_eq!(of("embed_tokens"), ModuleQuant::Affine { bits: 6, group: 32 });
    assert_eq!(of("lm_head"), ModuleQuant::Affine { bits: 5, group: 64 });
    assert_eq!(
        of("layers.0.linear_attn.out_proj"),
        ModuleQuant::Affine { bits: 2, group: 128 }
    );
    assert_eq!(of("layers.0.linear_attn.in_proj_a"), ModuleQuant::Dense);
    assert_eq!(of("layers.1.self_attn.q_proj"), ModuleQuant::Mxfp8);
    assert_eq!(of("mtp.fc"), ModuleQuant::Affine { bits: 8, group: 64 });
    assert_eq!(of("mtp.layers.0.self_attn.o_proj"), ModuleQuant::Dense);
    assert_eq!(
        of("layers.0.mlp.up_proj"),
        ModuleQuant::Affine { bits: 4, group: 64 }
    );
}

#[test]
fn a_mixture_has_routers_of_another_mode_than_its_experts() {
    let plan = plan_of("moe-mxfp4");
    let of = |path: &str| plan.modules.iter().find(|m| m.path == path).unwrap().quant;
    assert_eq!(
        of("layers.0.mlp.gate"),
        ModuleQuant::Affine { bits: 8, group: 64 }
    );
    assert_eq!(of("layers.0.mlp.switch_mlp.up_proj"), ModuleQuant::Mxfp4);
    let global = plan_of("moe-nvfp4-global");
    assert!(
        kinds(&global).contains_key("nvfp4 with global scale"),
        "{:?}",
        kinds(&global)
    );
    assert!(kinds(&plan_of("moe-fp8")).contains_key("fp8 128x128 blocks"));
    // An expert's down projection has fewer inputs than a group, so it stays as it is.
    let affine = plan_of("moe-affine-4-64");
    let down = affine
        .modules
        .iter()
        .find(|m| m.path == "layers.0.mlp.switch_mlp.down_proj")
        .unwrap();
    assert_eq!(down.quant, ModuleQuant::Dense);
}

#[test]
fn without_scales_packed_codes_are_refused() {
    let mut e = Edited::of("affine-4-64");
    e.take(|k| k.ends_with("layers.1.mlp.up_proj.scales"));
    let error = plan_edited(&e).unwrap_err().to_string();
    assert_eq!(
        error,
        "module layers.1.mlp.up_proj is stored as U32 but layers.1.mlp.up_proj.scales is missing: it can't be decoded"
    );
    let mut e = Edited::of("fp8");
    e.take(|k| k.ends_with("layers.1.mlp.up_proj.weight_scale_inv"));
    let error = plan_edited(&e).unwrap_err().to_string();
    assert!(
        error.contains("F8_E4M3 but layers.1.mlp.up_proj.weight_scale_inv is missing"),
        "{error}"
    );
    let mut e = Edited::of("affine-4-64");
    e.take(|k| k.ends_with("layers.1.mlp.up_proj.biases"));
    assert!(plan_edited(&e)
        .unwrap_err()
        .to_string()
        .contains("layers.1.mlp.up_proj.biases is missing"));
}

#[test]
fn bits_that_config_and_tensors_disagree_about_are_refused_with_both() {
    let mut e = Edited::of("affine-4-64");
    for key in ["quantization", "quantization_config"] {
        e.config[key]["bits"] = json!(8);
    }
    let error = plan_edited(&e).unwrap_err().to_string();
    assert_eq!(
        error,
        "module embed_tokens: config.json says affine 8-bit group 64 for all modules, but its tensors are affine 4-bit group 64"
    );
    let mut e = Edited::of("moe-mxfp4");
    for key in ["quantization", "quantization_config"] {
        let table = e.config[key].as_object_mut().unwrap();
        table.retain(|k, _| !k.ends_with("layers.0.mlp.gate"));
    }
    let error = plan_edited(&e).unwrap_err().to_string();
    assert!(
        error.contains("layers.0.mlp.gate") && error.contains("mxfp4"),
        "{error}"
    );
    let mut e = Edited::of("affine-4-64");
    e.config["quantization"]["language_model.model.layers.0.mlp.up_proj"] = json!(false);
    let error = plan_edited(&e).unwrap_err().to_string();
    assert!(error.contains("not quantised, for this module"), "{error}");
}

#[test]
fn parameters_come_from_shapes_where_the_config_is_silent() {
    let mut e = Edited::of("mxfp8");
    e.config.retain(|k, _| !k.starts_with("quantization"));
    let plan = plan_edited(&e).unwrap();
    assert_eq!(kinds(&plan).keys().collect::<Vec<_>>(), ["mxfp8"]);
}

#[test]
fn a_wrong_shape_names_tensor_wanted_and_found() {
    let mut e = Edited::of("dense");
    let t = e.tensor("layers.3.self_attn.k_proj.weight");
    t.shape = vec![32, 128];
    let error = plan_edited(&e).unwrap_err().to_string();
    assert_eq!(
        error,
        "tensor model.language_model.layers.3.self_attn.k_proj.weight (model.safetensors) has shape [32, 128]; the config asks \
         for [64, 64]"
    );
}

#[test]
fn a_wrong_dtype_names_tensor_and_dtype() {
    let mut e = Edited::of("dense");
    let t = e.tensor("layers.3.input_layernorm.weight");
    (t.dtype, t.shape) = (Dtype::U8, vec![128]);
    assert!(plan_edited(&e)
        .unwrap_err()
        .to_string()
        .contains("has shape [128]"));
    let t = e.tensor("layers.3.input_layernorm.weight");
    (t.dtype, t.shape) = (Dtype::I16, vec![64]);
    assert!(plan_edited(&e)
        .unwrap_err()
        .to_string()
        .contains("has dtype I16; expected bf16, f16 or f32"));
}

#[test]
fn missing_trunk_tensors_are_named_all_at_once() {
    let mut e = Edited::of("dense-tied");
    e.take(|k| k.ends_with("layers.0.linear_attn.A_log") || k.ends_with("layers.1.mlp.up_proj.weight"));
    let error = plan_edited(&e).unwrap_err().to_string();
    assert_eq!(
        error,
        "2 needed tensors are missing: layers.0.linear_attn.A_log, layers.1.mlp.up_proj.weight"
    );
}

#[test]
fn tensors_decide_about_tying_whatever_the_config_says() {
    // Untied files, contradictory flags: the flag of neither level is believed.
    let mut e = Edited::of("dense");
    e.config.insert("tie_word_embeddings".to_owned(), json!(true));
    let plan = plan_edited(&e).unwrap();
    assert!(!plan.tied);
    assert_eq!(plan.warnings.len(), 2, "{:?}", plan.warnings);
    // Tied files that are said to be untied.
    let mut e = Edited::of("dense-tied");
    e.config.insert("tie_word_embeddings".to_owned(), json!(false));
    e.text().insert("tie_word_embeddings".to_owned(), json!(false));
    let plan = plan_edited(&e).unwrap();
    assert!(
        plan.tied && plan.warnings[0].contains("there is no lm_head"),
        "{:?}",
        plan.warnings
    );
    // A copy of the embedding under the other name adds nothing.
    let mut e = Edited::of("dense-tied");
    let embed = e.tensor("embed_tokens.weight").clone();
    e.holding("embed_tokens.weight")
        .insert("lm_head.weight".to_owned(), embed);
    assert!(plan_edited(&e).unwrap().tied);
}

#[test]
fn a_trunk_that_mixes_conventions_is_refused() {
    let mut e = Edited::of("dense");
    e.tensor("layers.1.linear_attn.conv1d.weight").shape = vec![256, 4, 1];
    let error = plan_edited(&e).unwrap_err().to_string();
    assert!(
        error.contains("layers.0.linear_attn.conv1d.weight is raw"),
        "{error}"
    );
}

#[test]
fn a_tower_that_cannot_be_used_leaves_a_text_model() {
    let mut e = Edited::of("vision");
    e.take(|k| k.contains("visual."));
    let plan = plan_edited(&e).unwrap();
    assert!(
        matches!(&plan.vision, VisionStatus::Absent { reason: Some(r) } if r.contains("no vision tower"))
    );
    let mut e = Edited::of("vision");
    e.take(|k| k.ends_with("visual.merger.norm.bias"));
    let plan = plan_edited(&e).unwrap();
    assert!(
        matches!(&plan.vision, VisionStatus::Absent { reason: Some(r) } if r.contains("visual.merger.norm.bias"))
    );
    let mut e = Edited::of("vision");
    e.config.remove("vision_config");
    assert!(matches!(
        plan_edited(&e).unwrap().vision,
        VisionStatus::Absent { reason: Some(_) }
    ));
    assert!(matches!(
        plan_of("dense").vision,
        VisionStatus::Absent { reason: None }
    ));
}

#[test]
fn other_quantisation_methods_are_refused_by_name() {
    let mut e = Edited::of("dense");
    e.config.insert(
        "quantization_config".to_owned(),
        json!({"quant_method": "gptq", "bits": 4}),
    );
    let error = plan_edited(&e).unwrap_err();
    assert_eq!(error.kind().code(), "architecture_unsupported");
    assert!(error.to_string().contains("quant_method is \"gptq\""), "{error}");
}

#[test]
fn parameters_are_counted_by_logical_shape() {
    // The same model, quantised or not, has the same number of parameters.
    assert_eq!(plan_of("affine-4-64").parameters, plan_of("mxfp4").parameters);
    let plan = plan_of("dense");
    let (d, v) = (64, 320);
    let full = 256 * d + 2 * 64 * d + d * 128 + 2 * 32;
    let linear = 256 * d + 128 * d + 2 * 4 * d + 256 * 4 + 2 * 4 + 32 + d * 128;
    let rest = 3 * 64 * d + 2 * d;
    let head = full + rest + d * 2 * d + 3 * d;
    assert_eq!(
        plan.parameters,
        (2 * v * d + d + 3 * (linear + rest) + full + rest + head) as u64
    );
}

#[test]
fn tables_that_make_no_sense_are_refused_with_their_path() {
    for (table, wanted) in [
        (json!({"bits": "four"}), "quantization.bits is \"four\""),
        (
            json!({"bits": 4, "model.layers.0.mlp.up_proj": {"bits": -1}}),
            "up_proj.bits is -1",
        ),
        (json!([4]), "quantization is [4]"),
        (
            json!({"quant_method": "fp8", "weight_block_size": [0, 128]}),
            "weight_block_size is [0,128]",
        ),
        (json!({"quant_method": "fp8", "fmt": "e5m2"}), "fmt is \"e5m2\""),
    ] {
        let top = json!({ "quantization": table });
        let Value::Object(map) = top else { unreachable!() };
        let error = QuantTable::parse(&map).unwrap_err().to_string();
        assert!(error.contains(wanted), "{error}");
    }
}
