//! Lines in, lines out: whatever a host sends is answered, and the process goes on.

use lookahead_tests::order;
use lookahead_tests::process::{answer, Process};
use lookahead_tests::requests::{greedy, prompt, simple};
use serde_json::{json, Value};

/// Sends a line and returns the error that answers it.
fn fault(runner: &mut Process, line: &[u8]) -> Value {
    runner.send_bytes(line);
    runner.send_bytes(b"\n");
    let event = runner.until(|_| true).pop().unwrap_or_default();
    assert_eq!(
        event["type"],
        "error",
        "{} was answered with {event}",
        String::from_utf8_lossy(line)
    );
    event
}

fn alive(runner: &mut Process) {
    assert_eq!(runner.ask(&simple("ping", "alive")).last()["type"], "pong");
}

#[test]
fn bad_lines_are_answered_by_code_and_field_and_the_process_goes_on() {
    let mut runner = Process::runner(&[]);
    runner.ready();
    let cases: [(&[u8], Value, &str, &str); 22] = [
        (b"\xff\xfe\x00garbage", Value::Null, "invalid_json", "UTF-8"),
        (b"{\"type\":\"ping\",\"id\":\"\xc3\x28\"}", Value::Null, "invalid_json", "UTF-8"),
        (b"{\"type\":\"ping\",", Value::Null, "invalid_json", "JSON"),
        (b"hello there", Value::Null, "invalid_json", "JSON"),
        (b"[1,2]", Value::Null, "invalid_request", "object"),
        (b"{}", Value::Null, "invalid_request", "type"),
        (br#"{"type":7,"id":"a"}"#, json!("a"), "invalid_request", "type"),
        (br#"{"type":"generated","id":"a"}"#, json!("a"), "unknown_type", "generated"),
        (br#"{"type":"ping"}"#, Value::Null, "invalid_request", "id"),
        (br#"{"type":"ping","id":""}"#, Value::Null, "invalid_request", "id"),
        (br#"{"type":"ping","id":"a","extra":1}"#, json!("a"), "unknown_field", "extra"),
        (br#"{"type":"generate","id":"a"}"#, json!("a"), "invalid_request", "prompt"),
        (br#"{"type":"generate","id":"a","prompt":"x","tokens":[1]}"#, json!("a"), "invalid_request", "prompt"),
        (br#"{"type":"generate","id":"a","prompt":7}"#, json!("a"), "invalid_request", "prompt"),
        (
            br#"{"type":"generate","id":"a","prompt":"x","options":{"tempratur":1}}"#,
            json!("a"),
            "unknown_field",
            "options.tempratur",
        ),
        (
            br#"{"type":"generate","id":"a","prompt":"x","options":{"temperature":-1}}"#,
            json!("a"),
            "invalid_request",
            "options.temperature",
        ),
        (
            br#"{"type":"generate","id":"a","prompt":"x","options":{"stop":["a",""]}}"#,
            json!("a"),
            "invalid_request",
            "options.stop[1]",
        ),
        (
            br#"{"type":"generate","id":"a","prompt":"x","draft":{"mode":"fixed","depth":17}}"#,
            json!("a"),
            "invalid_request",
            "draft.depth",
        ),
        (
            br#"{"type":"generate","id":"a","messages":[{"role":"user","content":[{"type":"image","data":1}]}]}"#,
            json!("a"),
            "invalid_request",
            "messages[0].content[0].data",
        ),
        (br#"{"type":"generate","id":"a","prompt":"x","top_logprobs":21}"#, json!("a"), "invalid_request", "top_logprobs"),
        (br#"{"type":"generate","id":"a","tokens":[1,4096]}"#, json!("a"), "invalid_request", "4096"),
        (br#"{"type":"cache","id":"a","action":"polish"}"#, json!("a"), "invalid_request", "action"),
    ];
    for (line, id, code, part) in cases {
        let error = fault(&mut runner, line);
        assert_eq!(
            (&error["id"], error["code"].as_str()),
            (&id, Some(code)),
            "{error}"
        );
        assert!(
            error["message"].as_str().unwrap().contains(part),
            "{error} doesn't name {part}"
        );
        assert_eq!(error["retryable"], false);
        alive(&mut runner);
    }
}

#[test]
fn blank_lines_and_carriage_returns_are_no_requests_and_no_faults() {
    let mut runner = Process::runner(&[]);
    runner.ready();
    runner.send_bytes(
        b"\n\r\n  \n\n{\"type\":\"ping\",\"id\":\"a\"}\r\n\r\n{\"type\":\"ping\",\"id\":\"b\"}\n",
    );
    let events = runner.until_final(&["a", "b"]);
    assert_eq!(
        events,
        [
            json!({"type": "pong", "id": "a"}),
            json!({"type": "pong", "id": "b"})
        ]
    );
}

#[test]
fn a_last_line_without_a_line_end_counts() {
    let mut runner = Process::runner(&[]);
    runner.ready();
    runner.send_bytes(b"{\"type\":\"ping\",\"id\":\"a\"}");
    runner.close();
    assert_eq!(runner.rest(), [json!({"type": "pong", "id": "a"})]);
}

#[test]
fn requests_in_pieces_and_in_one_write_are_read_alike() {
    let mut runner = Process::runner(&[]);
    runner.ready();
    for byte in "{\"type\":\"tokenize\",\"id\":\"日\",\"text\":\"語\"}\n".bytes() {
        runner.send_bytes(&[byte]);
    }
    assert_eq!(runner.until_final(&["日"]).len(), 1);
    let many: String = (0..500)
        .map(|n| format!("{}\n", simple("ping", &n.to_string())))
        .collect();
    runner.send_bytes(many.as_bytes());
    let events = runner.until_final(&["499"]);
    let ids: Vec<String> = events
        .iter()
        .filter_map(|e| e["id"].as_str().map(str::to_owned))
        .collect();
    assert_eq!(ids, (0..500).map(|n| n.to_string()).collect::<Vec<_>>());
}

#[test]
fn a_line_of_ten_megabytes_is_served() {
    // Field report 50: a scanner with a fixed token limit.
    let mut runner = Process::runner(&[]);
    runner.ready();
    let content = "Repeat after me. ".repeat(10_000_000 / 17);
    let rendered = runner.ask(&json!({
        "type": "render", "id": "a", "messages": [{"role": "user", "content": content}],
    }));
    let prompt = rendered.last()["prompt"].as_str().map_or(0, str::len);
    assert!(prompt > content.len(), "{prompt} bytes");
    alive(&mut runner);
}

#[test]
fn an_over_long_line_is_discarded_without_being_kept_and_the_next_one_is_read() {
    let mut runner = Process::runner(&["--max-line-bytes", "1000"]);
    runner.ready();
    let before = runner.resident();
    // The limit is inclusive: 1000 bytes are a line, 1001 are not.
    let exact = |length: usize| {
        let head = r#"{"type":"tokenize","id":"t","text":""#;
        format!("{head}{}\"}}", "x".repeat(length - head.len() - 2))
    };
    runner.send_bytes(format!("{}\n", exact(1000)).as_bytes());
    assert_eq!(runner.until(|_| true)[0]["type"], "tokenized");
    let error = fault(&mut runner, exact(1001).as_bytes());
    assert_eq!(
        (&error["code"], &error["id"]),
        (&json!("line_too_long"), &Value::Null)
    );
    assert!(error["message"].as_str().unwrap().contains("1000"), "{error}");
    for _ in 0..100 {
        runner.send_bytes(&vec![b'y'; 1 << 20]);
    }
    let error = fault(&mut runner, b"");
    assert_eq!(error["code"], "line_too_long");
    if let (Some(before), Some(after)) = (before, runner.resident()) {
        assert!(
            after < before + (32 << 20),
            "100 MiB of a discarded line took {} bytes",
            after - before
        );
    }
    alive(&mut runner);
}

#[test]
fn a_busy_id_is_refused_and_the_running_request_is_not_disturbed() {
    let mut runner = Process::runner(&[]);
    let expected = runner.ask(&prompt("a", "And it came to pass", greedy(300)));
    runner.send(&prompt("a", "And it came to pass", greedy(300)));
    let mut events = runner.until(|e| e["type"] == "token");
    let intruders = [
        prompt("a", "def f(", json!({})),
        simple("ping", "a"),
        simple("status", "a"),
        json!({"type": "cancel", "id": "a", "target": "a"}),
        json!({"type": "tokenize", "id": "a", "text": "x"}),
        json!({"type": "ping", "id": "a", "bogus": 1}),
    ];
    for intruder in &intruders {
        runner.send(intruder);
    }
    events.extend(runner.until_final(&["a"]));
    let refused: Vec<&Value> = events.iter().filter(|e| e["duplicate"] == true).collect();
    assert_eq!(refused.len(), intruders.len());
    assert!(
        refused.iter().take(5).all(|e| e["code"] == "duplicate_id"),
        "{refused:?}"
    );
    order::check(&events, &["a"]);
    assert_eq!(answer(&events, "a").tokens(), expected.tokens());
    // The id is free again after `done`.
    assert_eq!(runner.ask(&simple("ping", "a")).last()["type"], "pong");
}

#[test]
fn stdout_carries_protocol_lines_only() {
    let mut runner = Process::runner(&[]);
    runner.ask(&prompt("a", "def f(", greedy(4))).done();
    runner.send_bytes(b"garbage\n");
    runner.close();
    let events = runner.rest();
    assert!(
        events.iter().all(|e| e.is_object() && e["type"].is_string()),
        "{events:?}"
    );
    assert!(!runner.log().is_empty(), "the log goes to stderr");
}
