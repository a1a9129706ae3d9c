//! What options cost, each measured in turns with the same request without it, in one process. All are ignored, being
//! measurements for a release build on a quiet machine:
//! `cargo test --release -p lookahead-tests --test throughput -- --ignored --nocapture --test-threads 1`,
//! after `cargo build --release --bin lookahead-runner`.
#![expect(clippy::unwrap_used, reason = "a figure that is missing fails the test")]

use lookahead_tests::process::Process;
use lookahead_tests::requests::{drafting, named, prompt, tokens};
use serde_json::{json, Value};

/// Runs that count, after two that warm up.
const RUNS: usize = 7;
/// Tokens of each.
const TOKENS: u64 = 128;

/// Tokens per second of generation.
fn rate(runner: &mut Process, request: &Value) -> f64 {
    let answer = runner.ask(request);
    let done = answer.done();
    assert_eq!(done["eval_count"], TOKENS, "{done}");
    TOKENS as f64 * 1e9 / done["eval_duration"].as_f64().unwrap()
}

/// The median ratio of the rates of two requests run in turns, with its two rates.
fn ratio(runner: &mut Process, without: &Value, with: &Value) -> (f64, f64, f64) {
    let mut pairs = Vec::new();
    for run in 0..RUNS + 2 {
        let without = rate(runner, &named(without.clone(), &format!("a{run}")));
        let with = rate(runner, &named(with.clone(), &format!("b{run}")));
        if run >= 2 {
            pairs.push((with / without, with, without));
        }
    }
    pairs.sort_by(|a, b| a.0.total_cmp(&b.0));
    pairs[RUNS / 2]
}

/// What a test prints and asserts: options that cost more than `least` allows.
fn compare(cases: Vec<(String, Value, Value)>, least: f64) {
    let mut runner = Process::runner(&[]);
    runner.ready();
    let mut failed = Vec::new();
    for (name, without, with) in cases {
        let (ratio, with, without) = ratio(&mut runner, &without, &with);
        println!("{name}: {with:.0} tokens/s with, {without:.0} without, ratio {ratio:.3} (median of pairs)");
        if ratio < least {
            failed.push(format!("{name}: {ratio:.3}"));
        }
    }
    assert!(failed.is_empty(), "{failed:?}");
}

/// Requests at two temperatures without and with a schema that takes any number of tokens.
fn people(draft: &Value) -> Vec<(f64, Value, Value)> {
    let item = json!({"type": "object", "properties": {"name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120}, "tags": {"type": "array", "items": {"enum": ["a", "b"]}}},
        "required": ["name", "age", "tags"], "additionalProperties": false});
    let schema = json!({"type": "array", "items": item, "minItems": 200});
    let at = |temperature: f64| {
        let options =
            json!({"temperature": temperature, "seed": 5, "num_predict": TOKENS, "ignore_eos": true});
        let more = json!({"cache": false, "options": options});
        let without = drafting(prompt("", "People as a JSON list of objects: ", more), draft);
        let mut with = without.clone();
        with["format"] = schema.clone();
        (temperature, without, with)
    };
    vec![at(0.0), at(1.0)]
}

#[test]
#[ignore = "a measurement, for a release build on a quiet machine"]
fn a_schema_costs_at_most_a_fifth_of_the_throughput() {
    let cases = people(&json!({"mode": "off"}));
    let named = |(temperature, without, with)| (format!("schema, temperature {temperature}"), without, with);
    compare(cases.into_iter().map(named).collect(), 0.8);
}

/// A schema leads to another text, whose drafts are accepted at a rate of its own: drafting is held to plain decoding of
/// the same text.
#[test]
#[ignore = "a measurement, for a release build on a quiet machine"]
fn drafting_under_a_schema_is_no_slower_than_plain_decoding_under_it() {
    let plain = people(&json!({"mode": "off"}));
    let drafted = people(&json!({"mode": "auto"}));
    let cases = plain
        .into_iter()
        .zip(drafted)
        .map(|((temperature, _, plain), (_, _, drafted))| {
            (
                format!("drafting under a schema, temperature {temperature}"),
                plain,
                drafted,
            )
        });
    compare(cases.collect(), 0.95);
}

#[test]
#[ignore = "a measurement, for a release build on a quiet machine"]
fn penalties_over_4096_tokens_cost_at_most_three_per_cent_of_a_step() {
    let history: Vec<u64> = (0..4096).map(|at| 100 + at * 37 % 3000).collect();
    let options = json!({"temperature": 0.8, "seed": 5, "num_predict": TOKENS, "ignore_eos": true});
    let without = tokens("", &history, json!({"options": options}));
    let without = drafting(without, &json!({"mode": "off"}));
    let mut with = without.clone();
    with["options"]["repeat_penalty"] = json!(1.1);
    with["options"]["repeat_last_n"] = json!(-1);
    with["options"]["presence_penalty"] = json!(0.1);
    with["options"]["frequency_penalty"] = json!(0.1);
    compare(
        vec![("penalties over 4096 tokens".to_owned(), without, with)],
        0.97,
    );
}
