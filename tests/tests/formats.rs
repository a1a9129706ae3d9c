//! `format`: the output matches what was asked for, drafting or not, and a format that can't be compiled is refused.

use lookahead_tests::order;
use lookahead_tests::process::Process;
use lookahead_tests::requests::{chat, drafting, draftings, prompt};
use serde_json::{json, Value};

/// A greedy or seeded request with a constraint.
fn constrained(format: &Value, temperature: f64) -> Value {
    prompt(
        "a",
        "The answer as data: ",
        json!({"format": format, "options": {"temperature": temperature, "seed": 9, "num_predict": 120}}),
    )
}

#[test]
fn a_regular_expression_shapes_the_whole_output_at_any_depth() {
    let mut runner = Process::runner(&[]);
    for temperature in [0.0, 1.0] {
        let mut first = None;
        for draft in draftings() {
            let request = drafting(
                constrained(&json!({"regex": "[0-9]{4}-[0-9]{2}-[0-9]{2}"}), temperature),
                &draft,
            );
            let answer = runner.ask(&request);
            order::check(&answer.events, &["a"]);
            assert_eq!(answer.done()["done_reason"], "stop", "{draft}");
            let text = answer.text();
            let shape: String = text
                .chars()
                .map(|c| if c.is_ascii_digit() { '0' } else { c })
                .collect();
            assert_eq!(shape, "0000-00-00", "{text:?} with {draft}");
            assert_eq!(*first.get_or_insert(text.clone()), text, "{draft}");
        }
    }
}

#[test]
fn a_schema_gives_json_that_satisfies_it() {
    let mut runner = Process::runner(&[]);
    // Unconstrained, the model lists all three words.
    let schema =
        json!({"type": "array", "items": {"enum": ["apple", "stone"]}, "minItems": 2, "maxItems": 2});
    for draft in draftings() {
        let mut request = drafting(
            chat("a", "Give the words as a JSON list: apple river stone", false),
            &draft,
        );
        request["format"] = schema.clone();
        let answer = runner.ask(&request);
        order::check(&answer.events, &["a"]);
        assert_eq!(answer.done()["done_reason"], "stop", "{draft}: {}", answer.text());
        let value: Value = serde_json::from_str(&answer.text()).unwrap();
        assert_eq!(value[0], "apple", "{draft}: {value}");
        assert_eq!(value.as_array().map(Vec::len), Some(2), "{draft}: {value}");
    }
}

#[test]
fn json_in_the_answer_begins_after_the_thought() {
    // The prompt of the thinking form ends inside a thought, which a constraint must leave alone.
    let mut runner = Process::runner(&[]);
    let mut request = chat("a", "What is 17 + 25?", true);
    request["format"] = json!({"regex": "[0-9]+"});
    let answer = runner.ask(&request);
    let text = answer.text();
    let (thought, rest) = text.split_once("</think>").unwrap_or_else(|| panic!("{text:?}"));
    assert_eq!(thought, "Add 17 and 25.\n");
    assert!(
        !rest.trim().is_empty() && rest.trim().chars().all(|c| c.is_ascii_digit()),
        "{text:?}"
    );
}

#[test]
fn a_grammar_is_followed() {
    let mut runner = Process::runner(&[]);
    let format = json!({"grammar": "start: (\"yes\" | \"no\") \".\""});
    let answer = runner.ask(&constrained(&format, 0.0));
    assert!(
        matches!(answer.text().as_str(), "yes." | "no."),
        "{}",
        answer.text()
    );
    assert_eq!(answer.done()["done_reason"], "stop");
}

#[test]
fn a_format_that_cannot_be_compiled_is_refused_and_the_next_request_runs() {
    let mut runner = Process::runner(&[]);
    for format in [
        json!({"regex": "(unclosed"}),
        json!({"grammar": "start: nothing_here"}),
        json!({"type": "no such type"}),
    ] {
        let answer = runner.ask(&constrained(&format, 0.0));
        assert_eq!(
            answer.error()["code"],
            "bad_format",
            "{format}: {}",
            answer.last()
        );
    }
    runner
        .ask(&prompt("a", "def f(", json!({"options": {"num_predict": 4}})))
        .done();
}
