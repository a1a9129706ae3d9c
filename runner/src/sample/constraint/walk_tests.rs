//! Random schemas, each driven by random allowed ids until it's complete: what ended validates.

use proptest::prelude::*;
use serde_json::{json, Value};

use super::tests::{allows, constraint};
use super::*;
use crate::text::test_support::tiny;
use crate::text::Specials;

const IM_END: u32 = 4085;
const STEPS: usize = 300;

/// SplitMix64: a walk is a function of its seed alone.
struct Walk(u64);

impl Walk {
    fn next(&mut self, below: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        usize::try_from((mixed ^ (mixed >> 31)) % below as u64).unwrap()
    }

    /// An allowed id; more often than not one that brings the end nearer, as a trained model would.
    fn choose(&mut self, mask: &[u32]) -> u32 {
        let allowed: Vec<u32> = (0..4096).filter(|id| allows(mask, *id)).collect();
        assert!(!allowed.is_empty());
        if allows(mask, IM_END) && self.next(2) == 0 {
            return IM_END;
        }
        let closing: Vec<u32> = allowed
            .iter()
            .copied()
            .filter(|id| {
                matches!(
                    tiny().token_bytes(*id),
                    Some(b"\"" | b"}" | b"]" | b"," | b":" | b"0" | b"7" | b"-")
                )
            })
            .collect();
        let from = if !closing.is_empty() && self.next(4) > 0 {
            &closing
        } else {
            &allowed
        };
        from[self.next(from.len())]
    }
}

/// Walks until the output is complete or the steps are used up. Returns the text, and whether it's complete.
fn walk(format: &Format, seed: u64) -> (String, bool) {
    let mut walk = Walk(seed);
    let mut constraint = constraint(format);
    let mut ids = Vec::new();
    for _ in 0..STEPS {
        if constraint.is_complete() {
            break;
        }
        let id = walk.choose(constraint.mask().unwrap());
        assert_eq!(
            constraint.accepts_prefix(&[id]).unwrap(),
            1,
            "mask and look-ahead agree"
        );
        constraint.commit(id).unwrap();
        ids.push(id);
    }
    let text = tiny().decode(&ids, Specials::Hidden).unwrap();
    // What was written is accepted again by a fresh constraint, looking ahead: it's a prefix of something acceptable.
    let mut fresh = super::tests::constraint(format);
    assert_eq!(fresh.accepts_prefix(&ids).unwrap(), ids.len(), "{text:?}");
    (text, constraint.is_complete())
}

fn leaf() -> impl Strategy<Value = Value> {
    prop_oneof![
        (0_u32..3, 0_u32..9)
            .prop_map(|(min, more)| json!({"type": "string", "minLength": min, "maxLength": min + more})),
        Just(json!({"type": "string", "format": "date"})),
        Just(json!({"type": "string", "format": "no-such-format"})),
        Just(json!({"type": "string", "pattern": "^[a-c]{2,4}(-[0-9]+)?$"})),
        (-50_i32..50, 0_i32..60)
            .prop_map(|(min, more)| json!({"type": "integer", "minimum": min, "maximum": min + more})),
        (1_u32..9).prop_map(|of| json!({"type": "integer", "multipleOf": of})),
        (-5_i32..5).prop_map(|min| json!({"type": "number", "exclusiveMinimum": min})),
        Just(json!({"type": "boolean"})),
        Just(json!({"type": ["null", "boolean"]})),
        Just(json!({"enum": ["é\"\\\n", 1, null, {"a": [1.5]}]})),
        Just(json!({"const": "</think> fixed"})),
    ]
}

fn schemas() -> impl Strategy<Value = Value> {
    leaf().prop_recursive(3, 12, 4, |inner| {
        prop_oneof![
            (inner.clone(), 0_u32..3, 0_u32..3).prop_map(|(items, min, more)| {
                json!({"type": "array", "items": items, "minItems": min, "maxItems": min + more})
            }),
            (inner.clone(), inner.clone()).prop_map(
                |(a, b)| json!({"type": "array", "prefixItems": [a, b], "items": false, "minItems": 1})
            ),
            proptest::collection::vec(inner.clone(), 1..3).prop_map(|options| json!({"anyOf": options})),
            (
                proptest::collection::btree_map("[a-zé \"]{1,4}", inner, 0..4),
                any::<u8>(),
                any::<bool>()
            )
                .prop_map(|(properties, needed, open)| {
                    let required: Vec<&String> = properties
                        .keys()
                        .enumerate()
                        .filter(|(at, _)| needed >> at & 1 == 1)
                        .map(|(_, key)| key)
                        .collect();
                    let additional = if open {
                        json!({"type": "integer"})
                    } else {
                        json!(false)
                    };
                    json!({"type": "object", "properties": properties, "required": required,
                        "additionalProperties": additional})
                }),
        ]
    })
}

#[test]
fn every_result_that_ended_validates_against_its_schema() {
    use proptest::strategy::ValueTree;
    use proptest::test_runner::TestRunner;

    let mut runner = TestRunner::deterministic();
    let mut complete = 0;
    for seed in 0..200 {
        let schema = schemas().new_tree(&mut runner).unwrap().current();
        let (text, ended) = walk(&Format::Schema(schema.clone()), seed);
        if !ended {
            continue;
        }
        complete += 1;
        match serde_json::from_str::<Value>(&text) {
            Ok(value) => assert!(jsonschema::is_valid(&schema, &value), "{text} for {schema}"),
            // JSON bounds no number, so a random walk can write 1e999, which is JSON but no value of this reader.
            Err(error) => assert!(
                error.to_string().contains("out of range"),
                "{error}: {text:?} for {schema}"
            ),
        }
    }
    assert!(complete > 160, "only {complete} walks ended");
}

#[test]
fn recursive_schemas_and_free_json_end_in_valid_documents() {
    let tree = json!({"$ref": "#/$defs/node", "$defs": {"node": {"type": "object", "required": ["v"],
        "properties": {"v": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
        "additionalProperties": false}}});
    let mut complete = 0;
    for seed in 0..30 {
        let (text, ended) = walk(&Format::Schema(tree.clone()), seed);
        if ended {
            complete += 1;
            assert!(
                jsonschema::is_valid(&tree, &serde_json::from_str(&text).unwrap()),
                "{text}"
            );
        }
        let (text, ended) = walk(&Format::Json, seed);
        if ended {
            complete += 1;
            // JSON bounds no number, so a random walk can write 1e999, which is JSON but no value of this reader.
            let parsed = serde_json::from_str::<Value>(&text);
            let too_large = parsed
                .as_ref()
                .is_err_and(|error| error.to_string().contains("out of range"));
            assert!(too_large || parsed.is_ok_and(|value| value.is_object()), "{text}");
        }
    }
    assert!(complete > 30, "only {complete} walks ended");
}

#[test]
fn free_walks_through_a_regex_and_a_grammar_end_in_their_language() {
    let grammar = Format::Lark("start: sum\nsum: NUM (\"+\" NUM)*\nNUM: /[0-9]{1,3}/".to_owned());
    let regex = Format::Regex("[0-9]{1,3}(\\+[0-9]{1,3})*".to_owned());
    for seed in 0..20 {
        for format in [&grammar, &regex] {
            let (text, ended) = walk(format, seed);
            let parts = text.split('+');
            if ended {
                assert!(parts.clone().all(|part| matches!(part.len(), 1..=3)), "{text}");
            }
            assert!(
                text.bytes().all(|byte| byte == b'+' || byte.is_ascii_digit()),
                "{text}"
            );
        }
    }
}
