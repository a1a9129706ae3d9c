//! Structured output through the process, on the trained model: random schemas are kept to, whatever is sampled and drafted.
//! The ordinary test is a sample of the ignored one.
#![expect(clippy::unwrap_used, reason = "a figure that is missing fails the test")]

use lookahead_tests::process::Process;
use lookahead_tests::requests::{drafting, prompt};
use serde_json::{json, Map, Value};

/// SplitMix64: a schema is a function of its number alone.
struct Choice(u64);

impl Choice {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        (mixed ^ (mixed >> 31)) % n
    }

    fn leaf(&mut self) -> Value {
        let low = self.below(40) as i64 - 20;
        match self.below(10) {
            0 => json!({"type": "string", "maxLength": 4 + self.below(12)}),
            1 => json!({"type": "string", "minLength": 2, "maxLength": 6}),
            2 => json!({"type": "string", "format": "date"}),
            3 => json!({"type": "string", "pattern": "^[a-c]{2,4}(-[0-9]{1,3})?$"}),
            4 => json!({"type": "integer", "minimum": low, "maximum": low + self.below(60) as i64}),
            5 => json!({"type": "number", "exclusiveMinimum": low, "maximum": low + 9}),
            6 => json!({"type": "boolean"}),
            7 => json!({"type": ["null", "boolean"]}),
            8 => json!({"enum": ["é\"\\\n", 1, null, {"a": [1.5]}]}),
            _ => json!({"const": "fixed"}),
        }
    }

    fn schema(&mut self, depth: u64) -> Value {
        if depth == 0 {
            return self.leaf();
        }
        match self.below(5) {
            0 => {
                let min = self.below(3);
                json!({"type": "array", "items": self.schema(depth - 1), "minItems": min, "maxItems": min + self.below(3)})
            }
            1 => {
                json!({"type": "array", "prefixItems": [self.schema(depth - 1), self.leaf()], "items": false, "minItems": 1})
            }
            2 => json!({"anyOf": [self.schema(depth - 1), self.leaf()]}),
            _ => {
                let names = ["name", "age", "é \"", "tags", "to"];
                let mut properties = Map::new();
                let mut required = Vec::new();
                for name in names.iter().take(1 + self.below(4) as usize) {
                    properties.insert((*name).to_owned(), self.schema(depth - 1));
                    if self.below(2) == 0 {
                        required.push(json!(name));
                    }
                }
                json!({"type": "object", "properties": properties, "required": required, "additionalProperties": false})
            }
        }
    }
}

/// Answers to `count` requests with random schemas, up to `n` tokens each: all that ended validate, all that the budget cut
/// short are the beginning of a JSON text.
fn answers_keep_to_random_schemas(count: u64, n: usize) {
    let mut runner = Process::runner(&[]);
    let mut ended = 0;
    for number in 0..count {
        let schema = Choice(number).schema(1 + number % 3);
        let mut request = prompt(
            &format!("s{number}"),
            "The answer as data: ",
            json!({"format": schema, "options": {"temperature": 1.0, "top_k": 0, "seed": number, "num_predict": n}}),
        );
        // Half of them may not stand alone: other options shape the same rows.
        match number % 4 {
            1 => request["options"]["repeat_penalty"] = json!(1.1),
            3 => request["options"]["top_p"] = json!(0.9),
            _ => {}
        }
        let draft = [
            json!({"mode": "auto"}),
            json!({"mode": "fixed", "depth": 3}),
            json!({"mode": "off"}),
        ];
        let answer = runner.ask(&drafting(request, &draft[number as usize % 3]));
        let text = answer.text();
        let case = format!("{number}: {schema} gave {text:?}");
        let parsed = serde_json::from_str::<Value>(&text);
        match answer.done()["done_reason"].as_str().unwrap() {
            "stop" => {
                ended += 1;
                let value = parsed.unwrap_or_else(|error| panic!("{case}: {error}"));
                let validator = jsonschema::validator_for(&schema).unwrap();
                assert!(validator.is_valid(&value), "{case}");
            }
            "length" => {
                // A whole value may still go on, as the digits of a number do.
                let prefix = parsed.as_ref().map_or_else(serde_json::Error::is_eof, |_| true);
                assert!(prefix, "{case}: {parsed:?}");
                assert!(
                    answer.done()["eval_count"].as_u64().unwrap() >= n as u64,
                    "{case}"
                );
            }
            other => panic!("{case}: {other}"),
        }
    }
    println!("{ended} of {count} answers ended within {n} tokens");
    assert!(ended * 10 >= count * 9, "{ended} of {count}");
}

#[test]
fn answers_validate_against_random_schemas() {
    answers_keep_to_random_schemas(30, 160);
}

#[test]
#[ignore = "a minute: 200 requests"]
fn answers_validate_against_random_schemas_many_times() {
    answers_keep_to_random_schemas(200, 256);
}
