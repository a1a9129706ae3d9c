//! Every way in which a checkpoint is known to go bad, through the process: what is refused names its cause, what runs in
//! spite of it says what it does without.
#![expect(clippy::unwrap_used, reason = "helpers of tests: a panic is a test's failure")]

use std::fs;
use std::path::Path;
use std::time::Duration;

use lookahead_tests::checkpoint::{copy_model, edit_json, edit_tensors, tiny, write, Tensor, Tensors};
use lookahead_tests::process::Process;
use lookahead_tests::requests::{greedy, tokens};
use serde_json::{json, Map, Value};

/// What a runner says of a checkpoint.
enum Outcome {
    /// `error` of that code, with these words.
    Refused(&'static str, &'static [&'static str]),
    /// `ready`, the head inactive for a reason with these words.
    Undrafted(&'static [&'static str]),
    /// `ready`, the head active, with these words in the log.
    Warned(&'static [&'static str]),
}
use Outcome::{Refused, Undrafted, Warned};

struct Row {
    name: &'static str,
    model: &'static str,
    damage: fn(&Path),
    outcome: Outcome,
}

const CONFIG: &str = "config.json";
const SINGLE: &str = "model.safetensors";
const SECOND: &str = "model-00002-of-00003.safetensors";
const INDEX: &str = "model.safetensors.index.json";

fn config(dir: &Path, edit: impl FnOnce(&mut Map<String, Value>)) {
    edit_json(&dir.join(CONFIG), edit);
}

fn text_config(dir: &Path, edit: impl FnOnce(&mut Map<String, Value>)) {
    config(dir, |top| {
        if let Some(Value::Object(text)) = top.get_mut("text_config") {
            edit(text);
        }
    });
}

fn weight_map(dir: &Path, edit: impl FnOnce(&mut Map<String, Value>)) {
    edit_json(&dir.join(INDEX), |top| {
        if let Some(Value::Object(map)) = top.get_mut("weight_map") {
            edit(map);
        }
    });
}

fn tensors(dir: &Path, edit: impl FnOnce(&mut Tensors)) {
    edit_tensors(&dir.join(SINGLE), edit);
}

fn cut(dir: &Path, file: &str, keep: impl FnOnce(usize) -> usize) {
    let path = dir.join(file);
    let whole = fs::read(&path).unwrap();
    write(&path, &whole[..keep(whole.len())]);
}

/// The tensor whose name ends so.
fn ending<'a>(tensors: &'a mut Tensors, end: &str) -> &'a mut Tensor {
    let found = tensors.iter_mut().find(|(name, _)| name.ends_with(end));
    found.map_or_else(|| panic!("no tensor ends with {end}"), |(_, tensor)| tensor)
}

/// Adds to a bf16 tensor.
fn shift(tensor: &mut Tensor, by: f32) {
    assert_eq!(tensor.dtype, "BF16");
    for pair in tensor.data.chunks_exact_mut(2) {
        let value = f32::from_bits(u32::from(u16::from_le_bytes([pair[0], pair[1]])) << 16) + by;
        let rounded = (value.to_bits() + 0x8000) >> 16;
        pair.copy_from_slice(&(rounded as u16).to_le_bytes());
    }
}

/// The head's seven norms.
const HEAD_NORMS: [&str; 7] = [
    "mtp.norm.weight",
    "mtp.pre_fc_norm_embedding.weight",
    "mtp.pre_fc_norm_hidden.weight",
    "mtp.layers.0.input_layernorm.weight",
    "mtp.layers.0.post_attention_layernorm.weight",
    "mtp.layers.0.self_attn.q_norm.weight",
    "mtp.layers.0.self_attn.k_norm.weight",
];

const TABLE: &[Row] = &[
    Row {
        name: "a missing shard",
        model: "dense-tied",
        damage: |dir| fs::remove_file(dir.join(SECOND)).unwrap(),
        outcome: Refused(
            "model_invalid",
            &[SECOND, "is missing", "tensors of the index are in it"],
        ),
    },
    Row {
        name: "an index that names an absent tensor",
        model: "dense-tied",
        damage: |dir| {
            weight_map(dir, |map| {
                map.insert("model.language_model.layers.9.foo.weight".into(), json!(SECOND));
            });
        },
        outcome: Refused(
            "model_invalid",
            &[INDEX, "layers.9.foo.weight", SECOND, "don't hold"],
        ),
    },
    Row {
        name: "a stray shard",
        model: "dense-tied",
        damage: |dir| {
            fs::copy(dir.join(SECOND), dir.join("model-00002-of-00002.safetensors")).unwrap();
        },
        outcome: Warned(&["model-00002-of-00002.safetensors", "another file holds"]),
    },
    Row {
        name: "a truncated shard",
        model: "dense-tied",
        damage: |dir| cut(dir, SECOND, |len| len - 1000),
        outcome: Refused("model_invalid", &[SECOND, "truncated"]),
    },
    Row {
        name: "a shard cut inside of its header",
        model: "dense-tied",
        damage: |dir| cut(dir, SECOND, |_| 100),
        outcome: Refused("model_invalid", &[SECOND, "header claims", "only 92 follow"]),
    },
    Row {
        name: "a header length that lies",
        model: "dense-tied",
        damage: |dir| {
            let path = dir.join(SECOND);
            let mut bytes = fs::read(&path).unwrap();
            bytes[..8].copy_from_slice(&(1u64 << 62).to_le_bytes());
            write(&path, &bytes);
        },
        outcome: Refused(
            "model_invalid",
            &[SECOND, "header claims 4611686018427387904 bytes"],
        ),
    },
    Row {
        name: "a header length that is too small",
        model: "dense-tied",
        damage: |dir| {
            let path = dir.join(SECOND);
            let mut bytes = fs::read(&path).unwrap();
            let length = u64::from_le_bytes(bytes[..8].try_into().unwrap());
            bytes[..8].copy_from_slice(&(length - 10).to_le_bytes());
            write(&path, &bytes);
        },
        outcome: Refused("model_invalid", &[SECOND, "header is not valid"]),
    },
    Row {
        name: "a wrong dtype",
        model: "dense",
        damage: |dir| {
            tensors(dir, |all| {
                ending(all, "layers.3.input_layernorm.weight").dtype = "I16".to_owned();
            });
        },
        outcome: Refused(
            "model_invalid",
            &[
                "layers.3.input_layernorm.weight",
                SINGLE,
                "has dtype I16",
                "expected bf16",
            ],
        ),
    },
    Row {
        name: "a wrong shape",
        model: "dense",
        damage: |dir| {
            tensors(dir, |all| {
                ending(all, "layers.3.self_attn.k_proj.weight").shape = vec![32, 128]
            });
        },
        outcome: Refused(
            "model_invalid",
            &["layers.3.self_attn.k_proj.weight", "[32, 128]", "[64, 64]"],
        ),
    },
    Row {
        name: "a shape of overflowing size",
        model: "dense",
        damage: |dir| {
            tensors(dir, |all| {
                ending(all, "layers.3.self_attn.k_proj.weight").shape = vec![u64::MAX, u64::MAX]
            });
        },
        outcome: Refused("model_invalid", &[SINGLE, "k_proj", "too many bytes"]),
    },
    Row {
        name: "missing scales",
        model: "affine-4-64",
        damage: |dir| {
            tensors(dir, |all| {
                all.retain(|name, _| !name.ends_with("layers.1.mlp.up_proj.scales"))
            })
        },
        outcome: Refused(
            "model_invalid",
            &[
                "layers.1.mlp.up_proj",
                "U32",
                "layers.1.mlp.up_proj.scales is missing",
            ],
        ),
    },
    Row {
        name: "FP8 without its factors",
        model: "fp8",
        damage: |dir| {
            weight_map(dir, |map| {
                map.retain(|name, _| !name.ends_with("layers.1.mlp.up_proj.weight_scale_inv"))
            });
            for file in [
                "model.safetensors-00001-of-00002.safetensors",
                "model.safetensors-00002-of-00002.safetensors",
            ] {
                edit_tensors(&dir.join(file), |all| {
                    all.retain(|name, _| !name.ends_with("layers.1.mlp.up_proj.weight_scale_inv"));
                });
            }
        },
        outcome: Refused(
            "model_invalid",
            &["layers.1.mlp.up_proj", "F8_E4M3", "weight_scale_inv is missing"],
        ),
    },
    Row {
        name: "bits that config and tensors disagree about",
        model: "affine-4-64",
        damage: |dir| {
            config(dir, |top| {
                for key in ["quantization", "quantization_config"] {
                    if let Some(Value::Object(table)) = top.get_mut(key) {
                        table.insert("bits".into(), json!(8));
                    }
                }
            });
        },
        outcome: Refused(
            "model_invalid",
            &["affine 8-bit group 64", "affine 4-bit group 64"],
        ),
    },
    Row {
        name: "a missing theta",
        model: "dense",
        damage: |dir| {
            text_config(dir, |text| {
                if let Some(Value::Object(rope)) = text.get_mut("rope_parameters") {
                    rope.remove("rope_theta");
                }
            });
        },
        outcome: Refused("model_invalid", &["rope_theta is missing", "can't be guessed"]),
    },
    Row {
        name: "contradictory tie flags",
        model: "dense",
        damage: |dir| {
            config(dir, |top| {
                top.insert("tie_word_embeddings".into(), json!(true));
            });
        },
        outcome: Warned(&[
            "tie_word_embeddings is true at the top",
            "false in text_config",
            "lm_head scores",
        ]),
    },
    Row {
        name: "no tokenizer",
        model: "dense",
        damage: |dir| fs::remove_file(dir.join("tokenizer.json")).unwrap(),
        outcome: Refused("model_invalid", &["tokenizer.json"]),
    },
    Row {
        name: "a tokenizer of another kind",
        model: "dense",
        damage: |dir| {
            let unigram = json!({"model": {"type": "Unigram", "unk_id": 0, "vocab": [["a", 0.0]]}});
            write(&dir.join("tokenizer.json"), unigram.to_string().as_bytes());
        },
        outcome: Refused("model_invalid", &["tokenizer", "Unigram"]),
    },
    Row {
        name: "a config that is no JSON",
        model: "dense",
        damage: |dir| write(&dir.join(CONFIG), b"{\"architectures\": ["),
        outcome: Refused("model_invalid", &[CONFIG, "is not valid JSON"]),
    },
    Row {
        name: "an architecture that isn't known",
        model: "dense",
        damage: |dir| {
            config(dir, |top| {
                top.insert(
                    "architectures".into(),
                    json!(["Qwen3_5ForSequenceClassification"]),
                );
            });
        },
        outcome: Refused(
            "architecture_unsupported",
            &["Qwen3_5ForSequenceClassification", "Qwen3_5ForCausalLM"],
        ),
    },
    Row {
        name: "a claimed head that isn't there",
        model: "dense",
        damage: |dir| tensors(dir, |all| all.retain(|name, _| !name.starts_with("mtp."))),
        outcome: Undrafted(&["claims an MTP head", "no tensor"]),
    },
    Row {
        name: "half a head",
        model: "dense",
        damage: |dir| {
            tensors(dir, |all| {
                all.retain(|name, _| name != "mtp.norm.weight" && name != "mtp.layers.0.mlp.up_proj.weight")
            });
        },
        outcome: Undrafted(&[
            "incomplete",
            "2 tensors are missing",
            "mtp.norm.weight",
            "mtp.layers.0.mlp.up_proj",
        ]),
    },
    Row {
        name: "a head whose norms are shifted twice",
        model: "mlx-head",
        damage: |dir| {
            tensors(dir, |all| {
                HEAD_NORMS.iter().for_each(|name| shift(ending(all, name), 1.0))
            });
        },
        outcome: Undrafted(&["can't tell how the MTP head's norms are stored"]),
    },
];

#[test]
fn what_goes_bad_is_named_and_what_still_runs_says_so() {
    for row in TABLE {
        let dir = tempfile::tempdir().unwrap();
        copy_model(&tiny(row.model), dir.path());
        (row.damage)(dir.path());
        let mut runner = Process::runner_of(dir.path(), &[]);
        let last = runner.ready();
        let named = |text: &str, words: &[&str]| {
            for word in words {
                assert!(text.contains(word), "{}: {text:?} doesn't say {word:?}", row.name);
            }
        };
        if let Refused(code, words) = row.outcome {
            assert_eq!(
                (&last["type"], &last["id"]),
                (&json!("error"), &Value::Null),
                "{}: {last}",
                row.name
            );
            assert_eq!(last["code"], code, "{}: {last}", row.name);
            named(last["message"].as_str().unwrap(), words);
            assert_eq!(
                runner.wait(Duration::from_secs(20)).code(),
                Some(1),
                "{}",
                row.name
            );
            continue;
        }
        assert_eq!(last["type"], "ready", "{}: {last}", row.name);
        let answer = runner.ask(&tokens("a", &[43, 78, 78, 74], greedy(4)));
        assert_eq!(answer.tokens().len(), 4, "{}", row.name);
        runner.close();
        assert_eq!(
            runner.wait(Duration::from_secs(20)).code(),
            Some(0),
            "{}",
            row.name
        );
        match row.outcome {
            Undrafted(words) => {
                assert_eq!(last["draft"]["active"], false, "{}: {last}", row.name);
                named(last["draft"]["reason"].as_str().unwrap(), words);
                named(&runner.log(), words);
            }
            Warned(words) => {
                assert_eq!(last["draft"]["active"], true, "{}: {last}", row.name);
                named(&runner.log(), words);
            }
            Refused(..) => {}
        }
    }
}
