//! `--record`: what was read and written, in order, readable by the protocol crate.

use lookahead_protocol::transcript::{Direction, Recorded, TranscriptReader};
use lookahead_tests::process::Process;
use lookahead_tests::requests::{greedy, prompt, simple};
use serde_json::{json, Value};

#[test]
fn a_transcript_has_every_line_in_order() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("session.jsonl");
    let mut runner = Process::runner(&["--record", path.to_str().unwrap()]);
    let mut written = runner.until(|e| e["type"] == "ready");
    let requests = [
        prompt("a", "def f(", greedy(12)),
        simple("ping", "p"),
        json!({"type": "nonsense", "id": "n"}),
    ];
    for request in &requests {
        written.extend(runner.ask(request).events);
    }
    runner.send_bytes(b"not json\n");
    runner.send_bytes(b"\xff\xfe\n");
    written.extend(runner.until(|e| e["message"].as_str().is_some_and(|m| m.contains("UTF-8"))));
    runner.send(&json!({"type": "shutdown"}));
    written.extend(runner.rest());

    let file = std::fs::File::open(&path).unwrap();
    let mut reader = TranscriptReader::new(file).unwrap();
    assert_eq!(reader.header().program, "lookahead-runner");
    assert!(reader
        .header()
        .model
        .as_deref()
        .is_some_and(|m| m.ends_with("tiny-qwen3.5-mtp")));
    assert!(
        reader
            .header()
            .fingerprint
            .as_deref()
            .is_some_and(|f| !f.is_empty()),
        "a replay needs the fingerprint"
    );
    let (mut inputs, mut outputs, mut last) = (Vec::new(), Vec::new(), 0);
    for entry in reader.by_ref() {
        let entry = entry.unwrap();
        assert!(entry.t >= last, "time runs backwards");
        last = entry.t;
        match entry.dir {
            Direction::In => inputs.push(entry.line),
            Direction::Out => outputs.push(entry.line),
        }
    }
    let object = |value: &Value| Recorded::Object(value.as_object().cloned().unwrap_or_default());
    let mut sent: Vec<Recorded> = requests.iter().map(object).collect();
    sent.extend([
        Recorded::Text("not json".into()),
        Recorded::Bytes(vec![0xff, 0xfe]),
        object(&json!({"type": "shutdown"})),
    ]);
    assert_eq!(inputs, sent);
    assert_eq!(outputs, written.iter().map(object).collect::<Vec<_>>());
}
