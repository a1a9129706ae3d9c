//! Configs of every family, what they may leave out, and what they may not say.

use proptest::prelude::*;
use serde_json::json;

use super::*;
use crate::model::test_support::{fixtures, tiny};

fn object(value: Value) -> Map<String, Value> {
    match value {
        Value::Object(map) => map,
        other => panic!("not an object: {other}"),
    }
}

/// A text config in the shape of the releases.
fn text() -> Value {
    json!({
        "model_type": "qwen3_5_text", "hidden_size": 64, "num_hidden_layers": 8, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 320, "intermediate_size": 128,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
        "rope_parameters": {"rope_theta": 10000000, "partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1]},
        "eos_token_id": 248044, "tie_word_embeddings": true
    })
}

fn outer(text: Value) -> Value {
    json!({"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": text, "image_token_id": 7})
}

/// Parses the config after `edit` changed its text part.
fn edited(edit: impl FnOnce(&mut Map<String, Value>)) -> Result<ModelConfig> {
    let mut top = object(outer(text()));
    edit(top["text_config"].as_object_mut().unwrap());
    ModelConfig::parse(top)
}

#[test]
fn nested_and_flat_configs_say_the_same() {
    let nested = ModelConfig::parse(object(outer(text()))).unwrap();
    let flat = ModelConfig::parse(object(text())).unwrap();
    assert_eq!(flat.architecture, "qwen3_5_text");
    assert_eq!(nested.media.image, Some(7));
    let same = |a: &ModelConfig, b: &ModelConfig| {
        (
            a.layers == b.layers && a.rope == b.rope && a.delta == b.delta && a.eos_ids == b.eos_ids,
            a.hidden_size == b.hidden_size,
        )
    };
    assert_eq!(same(&nested, &flat), (true, true));
    assert_eq!(
        nested.rope,
        RopeConfig {
            theta: 1e7,
            dims: 8,
            mrope_section: Some([2, 1, 1])
        }
    );
    assert_eq!(
        nested.tie,
        TieClaims {
            outer: None,
            inner: Some(true)
        }
    );
    assert_eq!(
        flat.tie,
        TieClaims {
            outer: Some(true),
            inner: None
        }
    );
    assert_eq!(nested.eos_ids, [248044]);
}

#[test]
fn every_committed_config_parses() {
    for entry in std::fs::read_dir(tiny("")).unwrap() {
        let dir = entry.unwrap().path();
        ModelConfig::read(&dir).unwrap_or_else(|e| panic!("{}: {e}", dir.display()));
    }
    let trained = ModelConfig::read(&fixtures("models/tiny-qwen3.5-mtp")).unwrap();
    assert_eq!(
        (
            trained.layers.len(),
            trained.count(LayerKind::Full),
            trained.context_length
        ),
        (8, 2, 32768)
    );
}

#[test]
fn an_unknown_architecture_is_named_with_what_is_supported() {
    for (config, found) in [
        (
            json!({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}),
            "LlamaForCausalLM",
        ),
        // Same family, but a head that classifies: there is no vocabulary to generate from.
        (
            json!({"architectures": ["Qwen3_5ForSequenceClassification"], "model_type": "qwen3_5"}),
            "Qwen3_5ForSequenceClassification",
        ),
        (json!({"model_type": "qwen3_5_mtp"}), "qwen3_5_mtp"),
    ] {
        let error = ModelConfig::parse(object(config)).unwrap_err();
        assert_eq!(error.kind().code(), "architecture_unsupported");
        let message = error.to_string();
        assert!(
            message.contains(found) && message.contains("Qwen3NextForCausalLM"),
            "{message}"
        );
    }
}

#[test]
fn layer_types_win_over_the_interval() {
    use LayerKind::{Full, Linear};
    let by_default = edited(|_| {}).unwrap();
    assert_eq!(
        by_default.layers,
        [Linear, Linear, Linear, Full, Linear, Linear, Linear, Full]
    );
    let by_interval = edited(|t| drop(t.insert("full_attention_interval".into(), json!(2)))).unwrap();
    assert_eq!(
        by_interval.layers,
        [Linear, Full, Linear, Full, Linear, Full, Linear, Full]
    );
    let listed = edited(|t| {
        t.insert("num_hidden_layers".into(), json!(2));
        t.insert(
            "layer_types".into(),
            json!(["full_attention", "linear_attention"]),
        );
    });
    assert_eq!(listed.unwrap().layers, [Full, Linear]);
}

#[test]
fn theta_is_looked_for_in_three_places_and_never_guessed() {
    let moved = |name: &'static str| {
        edited(move |t| {
            let rope = t.remove("rope_parameters").unwrap();
            if name == "top" {
                t.insert("rope_theta".into(), json!(5e6));
                t.insert("partial_rotary_factor".into(), json!(0.5));
            } else if !name.is_empty() {
                t.insert(name.into(), rope);
            }
        })
    };
    assert_eq!(moved("rope_scaling").unwrap().rope.theta, 1e7);
    assert_eq!(
        moved("top").unwrap().rope,
        RopeConfig {
            theta: 5e6,
            dims: 16,
            mrope_section: None
        }
    );
    let error = moved("").unwrap_err().to_string();
    assert!(
        error.starts_with("config.json: text_config.rope_theta is missing (looked in"),
        "{error}"
    );
}

#[test]
fn a_head_is_counted_under_either_key() {
    let n = |key: &'static str| {
        edited(move |t| drop(t.insert(key.into(), json!(1))))
            .unwrap()
            .mtp_layers
    };
    assert_eq!(
        (
            n("mtp_num_hidden_layers"),
            n("num_nextn_predict_layers"),
            n("unrelated")
        ),
        (1, 1, 0)
    );
}

#[test]
fn fields_out_of_range_are_named_with_their_value() {
    for (field, value, part) in [
        (
            "hidden_size",
            json!(0),
            "hidden_size is 0; expected an integer from 1",
        ),
        ("hidden_size", json!("64"), "hidden_size is \"64\""),
        ("hidden_size", json!(-1), "hidden_size is -1"),
        ("hidden_size", json!(1e300), "hidden_size is 1e+300"),
        ("hidden_size", json!(null), "hidden_size is missing"),
        (
            "num_hidden_layers",
            json!(1_000_000_000),
            "num_hidden_layers is 1000000000",
        ),
        (
            "num_key_value_heads",
            json!(3),
            "num_attention_heads is 4; expected a multiple of num_key_value_heads, which is 3",
        ),
        (
            "linear_num_value_heads",
            json!(3),
            "linear_num_value_heads is 3; expected a multiple of linear_num_key_heads",
        ),
        (
            "linear_key_head_dim",
            json!(null),
            "linear_key_head_dim is missing",
        ),
        ("rms_norm_eps", json!(0), "rms_norm_eps is 0"),
        ("vocab_size", json!([1]), "vocab_size is [1]"),
        (
            "layer_types",
            json!(["full_attention"]),
            "layer_types is \"1 entries\"; expected 8 entries",
        ),
        (
            "layer_types",
            json!(vec!["sliding_attention"; 8]),
            "layer_types is \"sliding_attention\", which is not supported",
        ),
        ("intermediate_size", json!(null), "intermediate_size is missing"),
        (
            "eos_token_id",
            json!([1, "x"]),
            "eos_token_id is [1,\"x\"]; expected a token id",
        ),
        (
            "attention_bias",
            json!(true),
            "attention_bias is true, which is not supported (only false)",
        ),
        (
            "attn_output_gate",
            json!(false),
            "attn_output_gate is false, which is not supported",
        ),
        ("hidden_act", json!("gelu"), "hidden_act is \"gelu\""),
        (
            "output_gate_type",
            json!("sigmoid"),
            "output_gate_type is \"sigmoid\"",
        ),
        (
            "rope_parameters",
            json!({"rope_theta": 1e7, "rope_type": "yarn"}),
            "rope_parameters.rope_type is \"yarn\"",
        ),
        (
            "rope_parameters",
            json!({"rope_theta": 0}),
            "rope_parameters.rope_theta is 0",
        ),
        (
            "rope_parameters",
            json!({"rope_theta": 1e7, "mrope_section": [2, 1, 2]}),
            "three counts that sum to 4",
        ),
        (
            "rope_parameters",
            json!({"rope_theta": 1e7, "mrope_section": [u64::MAX, 1, 1]}),
            "three counts that sum to 4",
        ),
        (
            "rope_parameters",
            json!({"rope_theta": 1e7, "mrope_section": [4]}),
            "three counts",
        ),
        (
            "rope_parameters",
            json!({"rope_theta": 1e7, "partial_rotary_factor": 0.1}),
            "even number of dimensions, not 3",
        ),
        (
            "rope_parameters",
            json!([]),
            "rope_parameters is []; expected an object",
        ),
    ] {
        let error = edited(|t| drop(t.insert(field.into(), value.clone())))
            .unwrap_err()
            .to_string();
        assert!(error.contains(part), "{field} = {value}: {error}");
    }
}

#[test]
fn experts_are_required_where_the_family_has_them() {
    let mut top = object(outer(text()));
    top["architectures"] = json!(["Qwen3_5MoeForConditionalGeneration"]);
    let error = ModelConfig::parse(top.clone()).unwrap_err().to_string();
    assert!(error.contains("num_experts is missing"), "{error}");
    let moe = json!({"num_experts": 8, "num_experts_per_tok": 9, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32});
    top["text_config"].as_object_mut().unwrap().extend(object(moe));
    let error = ModelConfig::parse(top.clone()).unwrap_err().to_string();
    assert!(
        error.contains("num_experts_per_tok is 9; expected an integer from 1 to 8"),
        "{error}"
    );
    top["text_config"]["num_experts_per_tok"] = json!(2);
    top["text_config"]
        .as_object_mut()
        .unwrap()
        .remove("intermediate_size");
    let config = ModelConfig::parse(top).unwrap();
    assert!(config.sparse.iter().all(|s| *s) && config.moe.unwrap().renormalise);
}

#[test]
fn qwen3_next_may_keep_some_layers_dense() {
    let mut map = object(text());
    map.insert("model_type".into(), json!("qwen3_next"));
    map.extend(object(json!({
        "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
        "decoder_sparse_step": 2, "mlp_only_layers": [3], "norm_topk_prob": false
    })));
    let config = ModelConfig::parse(map).unwrap();
    assert_eq!(
        config.sparse,
        [false, true, false, false, false, true, false, true]
    );
    assert!(!config.moe.unwrap().renormalise);
}

#[test]
fn vision_dimensions_are_checked() {
    let tower = json!({"depth": 2, "hidden_size": 16, "intermediate_size": 48, "num_heads": 2, "num_position_embeddings": 64});
    let with = |field: &str, value: Value| {
        let mut top = object(outer(text()));
        top.insert("vision_config".into(), tower.clone());
        top["vision_config"]
            .as_object_mut()
            .unwrap()
            .insert(field.into(), value);
        ModelConfig::parse(top)
    };
    let parsed = with("out_hidden_size", json!(64)).unwrap().vision.unwrap();
    assert_eq!(
        (parsed.table_side(), parsed.patch_values(), parsed.pixel_factor()),
        (8, 1536, 32)
    );
    for (field, value, part) in [
        (
            "deepstack_visual_indexes",
            json!([1]),
            "deepstack_visual_indexes is [1], which is not supported",
        ),
        (
            "out_hidden_size",
            json!(65),
            "out_hidden_size is 65; expected the text model's hidden_size, 64",
        ),
        (
            "num_position_embeddings",
            json!(65),
            "num_position_embeddings is 65; expected a square number",
        ),
        (
            "hidden_size",
            json!(20),
            "hidden_size is 20; expected a multiple of four times num_heads",
        ),
        ("in_channels", json!(1), "in_channels is 1"),
        ("hidden_act", json!("relu"), "hidden_act is \"relu\""),
    ] {
        let error = with(field, value).unwrap_err().to_string();
        assert!(error.contains(part), "{error}");
    }
}

/// Any JSON, biased towards the words and numbers that configs have.
fn any_json() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        (0u64..40).prop_map(Value::from),
        "[a-z_]{0,12}".prop_map(Value::from),
        Just(json!("full_attention")),
        Just(json!("default")),
    ];
    let key = prop_oneof![
        Just("rope_theta".to_owned()),
        Just("bits".to_owned()),
        "[a-z_]{1,12}"
    ];
    leaf.prop_recursive(3, 24, 6, move |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..6).prop_map(Value::from),
            prop::collection::vec((key.clone(), inner), 0..6)
                .prop_map(|items| Value::Object(items.into_iter().collect())),
        ]
    })
}

proptest! {
    #[test]
    fn no_value_of_any_field_panics(edits in prop::collection::vec((0usize..64, any_json()), 1..5), nested in any::<bool>()) {
        let mut text = object(text());
        text.extend(object(json!({"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 8})));
        let mut top = if nested { object(outer(Value::Object(text))) } else { text };
        top.insert("vision_config".into(), json!({"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 8}));
        for (at, value) in edits {
            let map = if nested && at % 2 == 0 {
                top.get_mut("text_config").and_then(Value::as_object_mut)
            } else if at % 7 == 0 {
                top.get_mut("vision_config").and_then(Value::as_object_mut)
            } else {
                Some(&mut top)
            };
            let Some(map) = map else { continue };
            let Some(key) = map.keys().nth(at % map.len().max(1)).cloned() else { continue };
            map.insert(key, value);
        }
        if let Ok(config) = ModelConfig::parse(top) {
            // What passes the checks can be multiplied without overflow.
            prop_assert!(config.delta.channels() > 0 && config.layers.len() == config.sparse.len());
            let _ = crate::model::quant::QuantTable::parse(&config.raw);
        }
    }

    #[test]
    fn no_bytes_panic_as_a_config(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join(CONFIG_FILE), &bytes).unwrap();
        prop_assert!(ModelConfig::read(dir.path()).is_err());
    }
}
