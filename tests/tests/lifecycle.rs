//! How the process ends: orderly, soon, and never against the host's will.

use std::time::{Duration, Instant};

use lookahead_tests::golden::long_prompt;
use lookahead_tests::order;
use lookahead_tests::process::{answer, model, runner_command, Process};
use lookahead_tests::requests::{greedy, prompt, simple, tokens};
use serde_json::json;

/// How soon an orderly end must come; a chunk or a round takes far less.
const SOON: Duration = Duration::from_secs(10);

#[test]
fn end_of_input_ends_an_idle_runner() {
    let mut runner = Process::runner(&[]);
    runner.ready();
    runner.close();
    assert_eq!(runner.wait(SOON).code(), Some(0));
    assert!(runner.rest().is_empty());
}

#[test]
fn end_of_input_while_loading_ends_the_runner() {
    let mut runner = Process::runner(&[]);
    runner.close();
    assert_eq!(runner.wait(SOON).code(), Some(0));
}

#[test]
fn end_of_input_during_a_prefill_ends_the_runner_within_a_chunk() {
    // Field report 51: an orphan that goes on computing, and keeps its memory.
    let mut runner = Process::runner(&["--chunk", "8"]);
    runner.ready();
    let total = 30_000;
    runner.send(&tokens("a", &long_prompt(total), json!({"progress": true})));
    let mut events = runner.until(|e| e["type"] == "prefill");
    let start = Instant::now();
    runner.close();
    assert_eq!(runner.wait(SOON).code(), Some(0));
    println!(
        "exit {:?} after the end of input, during a prefill",
        start.elapsed()
    );
    events.extend(runner.rest());
    order::check(&events, &["a"]);
    assert_eq!(answer(&events, "a").done()["done_reason"], "cancelled");
    let done = events.iter().rev().find(|e| e["type"] == "prefill").unwrap()["done"]
        .as_u64()
        .unwrap();
    assert!(
        done < total as u64 / 2,
        "{done} of {total} tokens were evaluated for nobody"
    );
}

#[test]
fn end_of_input_during_decode_and_with_requests_waiting_cancels_them() {
    let mut runner = Process::runner(&[]);
    runner.ready();
    runner.send(&prompt("a", "And it came to pass", greedy(20_000)));
    runner.until(|e| e["type"] == "token");
    runner.send(&prompt("b", "def f(", greedy(4)));
    runner.send(&prompt("c", "def f(", greedy(4)));
    runner.close();
    let events = runner.rest();
    for id in ["a", "b", "c"] {
        assert_eq!(answer(&events, id).done()["done_reason"], "cancelled");
    }
    assert_eq!(runner.wait(SOON).code(), Some(0));
}

#[test]
fn requests_read_before_the_end_of_input_are_answered() {
    let mut runner = Process::runner(&[]);
    runner.ready();
    runner.send(&simple("ping", "p"));
    for n in 0..20 {
        runner.send(&json!({"type": "tokenize", "id": format!("t{n}"), "text": "word ".repeat(2000)}));
    }
    runner.send(&json!({"type": "render", "id": "r", "messages": [{"role": "user", "content": "Hi"}]}));
    runner.close();
    let events = runner.rest();
    let answered = |kind: &str| events.iter().filter(|e| e["type"] == kind).count();
    assert_eq!(
        (answered("pong"), answered("tokenized"), answered("rendered")),
        (1, 20, 1)
    );
    assert_eq!(runner.wait(SOON).code(), Some(0));
}

#[test]
fn a_signal_ends_the_runner_in_good_order() {
    for signal in ["TERM", "INT"] {
        let mut runner = Process::runner(&[]);
        runner.ready();
        runner.send(&prompt("a", "And it came to pass", greedy(20_000)));
        runner.until(|e| e["type"] == "token");
        runner.signal(signal);
        let events = runner.rest();
        assert_eq!(
            answer(&events, "a").done()["done_reason"],
            "cancelled",
            "{signal}"
        );
        assert_eq!(runner.wait(SOON).code(), Some(0), "{signal}");
    }
}

#[test]
fn a_second_signal_ends_the_runner_at_once_with_128_and_its_number() {
    for (signal, code) in [("TERM", 143), ("INT", 130)] {
        // Nobody reads: the orderly end waits for its last events to be taken, which is where the second signal finds it.
        let mut runner = Process::start_unread(runner_command(&model(), &[]));
        for n in 0..3000 {
            runner.send(&simple("ping", &format!("{n:0>100}")));
        }
        std::thread::sleep(Duration::from_millis(700));
        runner.signal("TERM");
        std::thread::sleep(Duration::from_millis(200));
        runner.signal(signal);
        assert_eq!(runner.wait(SOON).code(), Some(code), "{signal}");
    }
}

#[test]
fn a_host_that_no_longer_reads_does_not_hold_up_the_end() {
    let mut runner = Process::start_unread(runner_command(&model(), &[]));
    for n in 0..3000 {
        runner.send(&simple("ping", &format!("{n:0>100}")));
    }
    std::thread::sleep(Duration::from_millis(700));
    runner.close();
    assert_eq!(runner.wait(SOON).code(), Some(0));
}

#[test]
fn a_closed_stdout_ends_the_runner() {
    let mut runner = Process::start_unread(runner_command(&model(), &[]));
    runner.send(&prompt("a", "And it came to pass", greedy(20_000)));
    runner.close_output();
    // Stdin stays open: only the broken pipe tells that the host is gone.
    assert_eq!(runner.wait(SOON).code(), Some(0));
}

#[test]
fn a_client_that_does_not_read_for_ten_seconds_gets_everything_in_the_end() {
    let requests = [
        prompt("a", "And it came to pass in those days, that", greedy(1000)),
        prompt("b", "class Stack:\n    def __init__(self):\n", greedy(1000)),
        prompt("c", "Write the 7 times table.", greedy(1000)),
    ];
    let mut reader = Process::runner(&[]);
    let expected: Vec<_> = requests.iter().map(|request| reader.ask(request)).collect();
    reader.close();

    let mut runner = Process::start_unread(runner_command(&model(), &[]));
    for request in &requests {
        runner.send(request);
    }
    std::thread::sleep(Duration::from_secs(1));
    let early = runner.resident();
    std::thread::sleep(Duration::from_secs(9));
    let late = runner.resident();
    runner.read_events();
    let events = runner.until_final(&["a", "b", "c"]);
    order::check(&events, &["a", "b", "c"]);
    let mut merged = 0;
    for (id, expected) in ["a", "b", "c"].iter().zip(&expected) {
        let answer = answer(&events, id);
        assert_eq!(
            (answer.text(), answer.tokens()),
            (expected.text(), expected.tokens()),
            "{id}"
        );
        merged += answer.tokens().len() - answer.token_events().count();
    }
    assert!(merged > 500, "only {merged} ids were merged into earlier events");
    if let (Some(early), Some(late)) = (early, late) {
        println!(
            "resident after 1 s {} MiB, after 10 s unread {} MiB",
            early >> 20,
            late >> 20
        );
        assert!(
            late < early + (64 << 20),
            "memory grew from {early} to {late} while nobody read"
        );
    }
}

#[test]
fn a_full_queue_refuses_further_requests_as_retryable() {
    let mut runner = Process::runner(&["--max-queue", "2"]);
    runner.ready();
    runner.send(&prompt("a", "And it came to pass", greedy(20_000)));
    runner.until(|e| e["type"] == "token");
    for id in ["b", "c", "d"] {
        runner.send(&prompt(id, "def f(", greedy(4)));
    }
    let events = runner.until_final(&["d"]);
    let refused = answer(&events, "d");
    assert_eq!(
        (&refused.error()["code"], &refused.error()["retryable"]),
        (&json!("queue_full"), &json!(true))
    );
    runner.send(&json!({"type": "cancel", "id": "k", "target": "a"}));
    let events = runner.until_final(&["a", "b", "c"]);
    for id in ["b", "c"] {
        assert_eq!(
            answer(&events, id).done()["done_reason"],
            "length",
            "{id} was accepted before"
        );
    }
    runner.ask(&prompt("d", "def f(", greedy(4))).done();
}
