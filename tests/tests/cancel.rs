//! Cancellation at every stage, and what it leaves behind: nothing that a later request could notice.

use std::time::{Duration, Instant};

use lookahead_tests::golden::{golden_of, long_prompt};
use lookahead_tests::order;
use lookahead_tests::process::{answer, ids, is_final, Process};
use lookahead_tests::requests::{cancel, drafting, draftings, greedy, named, prompt, tokens};
use serde_json::{json, Value};

/// Tokens and text that a fresh process gives.
fn fresh(request: &Value) -> (Vec<u64>, String) {
    let mut runner = Process::runner(&[]);
    let answer = runner.ask(request);
    answer.done();
    (answer.tokens(), answer.text())
}

#[test]
fn cancel_at_every_emitted_index_leaves_nothing_behind() {
    // Field report 1: a cancelled stream left caches ahead of what was recorded.
    let golden = golden_of("prose");
    let request = tokens("a", &golden.ids, greedy(64));
    let expected = fresh(&request);
    assert_eq!(expected.0.len(), 64);
    let mut runner = Process::runner(&[]);
    runner.ready();
    for (index, draft) in (0..64).zip(draftings().iter().cycle()) {
        runner.send(&drafting(request.clone(), draft));
        let mut events = Vec::new();
        while ids(events.iter().filter(|e: &&Value| e["type"] == "token")).len() < index {
            events.extend(runner.until(|e| e["type"] == "token"));
        }
        runner.send(&cancel("k", "a"));
        events.extend(runner.until(|e| is_final(e, &json!("a"))));
        // The request may have ended just before the cancel; both answers must be there either way.
        if !events.iter().any(|e| e["id"] == "k") {
            events.extend(runner.until(|e| e["id"] == "k"));
        }
        order::check(&events, &["a"]);
        let cut = answer(&events, "a");
        assert!(
            expected.0.starts_with(&cut.tokens()),
            "cancelled at {index} with {draft}"
        );
        let again = runner.ask(&drafting(named(request.clone(), "b"), draft));
        assert_eq!(
            (again.tokens(), again.text()),
            expected,
            "after a cancel at {index} with {draft}"
        );
    }
}

#[test]
fn ending_at_every_index_leaves_nothing_behind() {
    // Field reports 4 and 5: a budget that ends inside an accepted block left the tail of the block in the cache.
    let golden = golden_of("code");
    let expected = fresh(&tokens("a", &golden.ids, greedy(32)));
    let mut runner = Process::runner(&[]);
    for (n, draft) in (0..32).zip(draftings().iter().cycle()) {
        let cut = runner.ask(&drafting(tokens("a", &golden.ids, greedy(n)), draft));
        assert_eq!(cut.tokens(), expected.0[..n], "{n} tokens with {draft}");
        assert_eq!(cut.done()["done_reason"], "length");
        // The next one continues where this one ended, as the next turn of a conversation does.
        let longer: Vec<u64> = golden.ids.iter().chain(&expected.0[..n]).copied().collect();
        let rest = runner.ask(&drafting(tokens("b", &longer, greedy(32 - n)), draft));
        assert_eq!(
            rest.tokens(),
            expected.0[n..],
            "{n} tokens and then on, with {draft}"
        );
    }
}

#[test]
fn cancel_during_prefill_ends_within_a_chunk_and_leaves_nothing_behind() {
    let request = tokens(
        "a",
        &long_prompt(1500),
        json!({
            "progress": true, "options": {"temperature": 0, "num_predict": 16, "ignore_eos": true},
        }),
    );
    let expected = fresh(&request);
    let mut runner = Process::runner(&["--chunk", "16"]);
    runner.ready();
    for wait in [1, 3, 9] {
        runner.send(&request);
        let mut seen = 0;
        let mut events = runner.until(|e| {
            seen += usize::from(e["type"] == "prefill");
            seen == wait
        });
        runner.send(&cancel("k", "a"));
        let from = events.len();
        events.extend(runner.until_final(&["k", "a"]));
        order::check(&events, &["a"]);
        let done = answer(&events, "a");
        assert_eq!(done.done()["done_reason"], "cancelled");
        assert_eq!(done.tokens(), Vec::<u64>::new());
        let acknowledged = events.iter().position(|e| e["id"] == "k").unwrap();
        assert_eq!(
            events[acknowledged],
            json!({"type": "cancelled", "id": "k", "target": "a", "found": true})
        );
        // The chunk that was under way may still report; then the request ends.
        let after = events[acknowledged.max(from)..]
            .iter()
            .filter(|e| e["type"] == "prefill")
            .count();
        assert!(after <= 1, "{after} chunks after the cancel was acknowledged");
    }
    let again = runner.ask(&request);
    assert_eq!((again.tokens(), again.text()), expected);
}

#[test]
fn cancel_during_decode_stops_within_a_round() {
    // Field report 3: the client is gone and generation goes on to its budget.
    let mut runner = Process::runner(&[]);
    runner.ready();
    for draft in draftings() {
        runner.send(&drafting(
            prompt("a", "And it came to pass", greedy(20_000)),
            &draft,
        ));
        let mut events = runner.until(|e| e["type"] == "token");
        let start = Instant::now();
        runner.send(&cancel("k", "a"));
        events.extend(runner.until_final(&["k", "a"]));
        let took = start.elapsed();
        order::check(&events, &["a"]);
        assert_eq!(answer(&events, "a").done()["done_reason"], "cancelled");
        assert!(took < Duration::from_secs(5), "{draft}: {took:?}");
    }
}

#[test]
fn endless_repetition_can_be_cancelled() {
    // Field report 40: a model that repeats itself for ever is the host's to stop.
    let mut runner = Process::runner(&[]);
    let repeated = "the the the the the the the the ".repeat(8);
    runner.send(&prompt(
        "a",
        &repeated,
        json!({"options": {"temperature": 0, "ignore_eos": true}}),
    ));
    runner.until(|e| e["type"] == "token");
    runner.send(&cancel("k", "a"));
    let events = runner.until_final(&["a", "k"]);
    assert_eq!(answer(&events, "a").done()["done_reason"], "cancelled");
}

#[test]
fn a_queued_request_that_is_cancelled_ends_at_once_and_others_go_on() {
    let mut runner = Process::runner(&[]);
    runner.ready();
    let expected = fresh(&prompt("c", "def f(", greedy(8)));
    runner.send(&prompt("a", "And it came to pass", greedy(20_000)));
    runner.until(|e| e["type"] == "token");
    runner.send(&prompt("b", "def f(", greedy(8)));
    runner.send(&prompt("c", "def f(", greedy(8)));
    runner.send(&cancel("k", "b"));
    let mut events = runner.until_final(&["k", "b"]);
    assert!(
        !events.iter().any(|e| is_final(e, &json!("a"))),
        "the running request ended with the queued one"
    );
    let cancelled = answer(&events, "b");
    assert_eq!(cancelled.done()["done_reason"], "cancelled");
    assert_eq!(
        cancelled.own().count(),
        1,
        "a request that never ran has a `done` only"
    );
    // Its id is free again, and what is sent under it is another request.
    runner.send(&prompt("b", "def f(", greedy(8)));
    runner.send(&cancel("l", "a"));
    events = runner.until_final(&["a", "b", "c", "l"]);
    for id in ["b", "c"] {
        let answer = answer(&events, id);
        assert_eq!(answer.done()["done_reason"], "length");
        assert_eq!((answer.tokens(), answer.text()), expected);
    }
    order::check(&events, &["b", "c"]);
}

#[test]
fn cancel_of_an_unknown_or_ended_request_finds_nothing() {
    let mut runner = Process::runner(&[]);
    let nothing = json!({"type": "cancelled", "id": "k", "target": "a", "found": false});
    assert_eq!(*runner.ask(&cancel("k", "a")).last(), nothing);
    runner.ask(&prompt("a", "def f(", greedy(2))).done();
    assert_eq!(*runner.ask(&cancel("k", "a")).last(), nothing);
}

#[test]
fn cancel_twice_gives_one_final_event() {
    let mut runner = Process::runner(&[]);
    runner.send(&prompt("a", "And it came to pass", greedy(20_000)));
    runner.until(|e| e["type"] == "token");
    runner.send(&cancel("k", "a"));
    runner.send(&cancel("l", "a"));
    runner.until_final(&["a", "l"]);
    runner.send(&json!({"type": "shutdown"}));
    assert!(
        runner.rest().iter().all(|e| e["id"] != "a"),
        "an event after the final one"
    );
}
