//! The order of events, for requests alone and in a crowd.

use lookahead_tests::golden::{golden_of, long_prompt};
use lookahead_tests::order;
use lookahead_tests::process::{answer, Process};
use lookahead_tests::requests::{cancel, chat, greedy, prompt, simple, tokens};
use serde_json::{json, Value};

#[test]
fn hello_comes_first_then_load_then_ready() {
    let mut runner = Process::runner(&[]);
    // Sent before the model is loaded: it waits, and its events follow `ready`.
    runner.send(&prompt("early", "def f(", greedy(4)));
    let events = runner.until_final(&["early"]);
    let kinds: Vec<&str> = events.iter().filter_map(|e| e["type"].as_str()).collect();
    let place = |kind: &str| kinds.iter().position(|&k| k == kind).unwrap_or(usize::MAX);
    assert_eq!(place("hello"), 0, "{kinds:?}");
    let last_load = kinds.iter().rposition(|&k| k == "load").unwrap();
    assert!(
        last_load < place("ready") && place("ready") < place("prompt"),
        "{kinds:?}"
    );
    let hello = &events[0];
    assert_eq!(hello["protocol"], json!({"major": 1, "minor": 0}));
    assert_eq!(
        (&hello["program"], &hello["pid"]),
        (&json!("lookahead-runner"), &json!(runner.pid()))
    );
    let loads: Vec<&Value> = events.iter().filter(|e| e["type"] == "load").collect();
    for pair in loads
        .windows(2)
        .filter(|pair| pair[0]["stage"] == pair[1]["stage"])
    {
        assert!(pair[0]["done"].as_u64() <= pair[1]["done"].as_u64(), "{pair:?}");
    }
    order::check(&events, &["early"]);
}

#[test]
fn every_request_of_a_crowd_keeps_the_order_rule() {
    let mut runner = Process::runner(&["--chunk", "32"]);
    let long = long_prompt(300);
    let ids = ["a", "b", "c", "d", "e", "f", "g", "h"];
    runner.send(&tokens(
        "a",
        &long,
        json!({"progress": true, "options": {"num_predict": 20}}),
    ));
    runner.send(&chat("b", "Count from 12 to 30.", false));
    runner.send(&prompt("c", "", json!({})));
    runner.send(&prompt(
        "d",
        "And it came to pass",
        json!({"progress": true, "options": {"num_predict": 0}}),
    ));
    runner.send(&tokens(
        "e",
        &long,
        json!({"progress": true, "options": {"num_predict": 8, "num_ctx": 100}}),
    ));
    runner.send(&prompt(
        "f",
        "import os",
        json!({"options": {"num_predict": 30, "temperature": 1.5}}),
    ));
    runner.send(&prompt(
        "g",
        "x",
        json!({"draft": {"mode": "fixed", "depth": 16}, "options": {"num_predict": 40}}),
    ));
    runner.send(&cancel("k", "g"));
    runner.send(&simple("ping", "p"));
    runner.send(&tokens(
        "h",
        &long,
        json!({"options": {"num_predict": 5, "seed": 4}}),
    ));
    let mut events = runner.until_final(&ids);
    runner.send(&json!({"type": "shutdown"}));
    events.extend(runner.rest());
    order::check(&events, &ids);
    assert_eq!(answer(&events, "c").error()["code"], "empty_prompt");
    assert_eq!(answer(&events, "e").error()["code"], "context_exceeded");
    assert_eq!(answer(&events, "g").done()["done_reason"], "cancelled");
    let prefills = answer(&events, "a")
        .own()
        .filter(|e| e["type"] == "prefill")
        .count();
    assert!(
        prefills >= 9,
        "300 tokens in chunks of 32 gave {prefills} prefill events"
    );
    assert_eq!(
        answer(&events, "h")
            .own()
            .filter(|e| e["type"] == "prefill")
            .count(),
        0
    );
}

#[test]
fn requests_run_in_the_order_of_their_arrival() {
    let mut runner = Process::runner(&[]);
    runner.ready();
    let ids = ["r0", "r1", "r2", "r3", "r4", "r5"];
    for id in ids {
        runner.send(&prompt(id, "def f(", greedy(6)));
    }
    let events = runner.until_final(&ids);
    let ended: Vec<&str> = events
        .iter()
        .filter(|e| e["type"] == "done")
        .filter_map(|e| e["id"].as_str())
        .collect();
    assert_eq!(ended, ids);
    order::check(&events, &ids);
}

#[test]
fn done_has_all_counts_and_durations_that_fit_together() {
    let mut runner = Process::runner(&[]);
    let golden = golden_of("code");
    let answer = runner.ask(&tokens("a", &golden.ids, greedy(48)));
    let done = answer.done();
    let number = |name: &str| done[name].as_u64().unwrap_or_else(|| panic!("{name} in {done}"));
    assert_eq!(number("prompt_eval_count"), golden.ids.len() as u64);
    assert_eq!(number("eval_count"), 48);
    assert!(number("cached_count") < number("prompt_eval_count"));
    let parts = number("queue_duration") + number("prompt_eval_duration") + number("eval_duration");
    assert!(
        parts <= number("total_duration") && number("eval_duration") > 0,
        "{done}"
    );
    let draft = &done["draft"];
    let accepted = draft["accepted"].as_u64().unwrap();
    let rounds = draft["rounds"].as_u64().unwrap();
    // Every forward yields one token of the target's own; a budget can cut the last round short.
    assert!(accepted + rounds >= 48, "{draft}");
    let by_position: u64 = draft["by_position"]
        .as_array()
        .unwrap()
        .iter()
        .map(|p| p["tested"].as_u64().unwrap())
        .sum();
    assert_eq!(draft["tested"].as_u64(), Some(by_position));
}
