//! A model that can't be loaded: one `error` event with id null that names the cause, and exit status 1.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use lookahead_tests::process::{executable, model, Process};
use serde_json::{json, Value};
use tempfile::TempDir;

/// A copy of the trained model to damage.
fn copy() -> TempDir {
    let copy = tempfile::tempdir().unwrap_or_else(|error| panic!("{error}"));
    let entries = fs::read_dir(model()).unwrap_or_else(|error| panic!("{error}"));
    for path in entries.flatten().map(|entry| entry.path()) {
        let to = copy.path().join(path.file_name().unwrap_or_default());
        fs::copy(&path, &to).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    }
    copy
}

/// Starts a runner on `dir` and returns what it says of it; `code` and every part must be there.
fn fails(dir: &Path, code: &str, parts: &[&str]) -> String {
    let mut runner = Process::runner_of(dir, &[]);
    let events = runner.rest();
    assert_eq!(events[0]["type"], "hello");
    let error = events.last().cloned().unwrap_or_default();
    assert_eq!(
        (&error["type"], &error["id"]),
        (&json!("error"), &Value::Null),
        "{error}"
    );
    assert_eq!(error["code"], code, "{error}");
    assert_eq!(error["retryable"], false);
    let message = error["message"].as_str().unwrap_or_default().to_owned();
    for part in parts {
        assert!(message.contains(part), "{message:?} doesn't name {part:?}");
    }
    assert_eq!(runner.wait(Duration::from_secs(20)).code(), Some(1), "{message}");
    assert!(
        runner.log().contains(&message),
        "the log has the cause too: {}",
        runner.log()
    );
    message
}

#[test]
fn each_kind_of_damage_has_its_own_message() {
    const SHARD: &str = "model-00002-of-00002.safetensors";
    let mut messages = Vec::new();

    let dir = tempfile::tempdir().unwrap();
    messages.push(fails(&dir.path().join("gone"), "model_not_found", &["gone"]));
    messages.push(fails(dir.path(), "model_invalid", &["config.json", "empty"]));
    messages.push(fails(
        &model().join("config.json"),
        "model_invalid",
        &["config.json", "directory"],
    ));

    let dir = copy();
    let path = dir.path().join(SHARD);
    let whole = fs::read(&path).unwrap();
    fs::write(&path, &whole[..whole.len() - 100_000]).unwrap();
    messages.push(fails(dir.path(), "model_invalid", &[SHARD, "truncated"]));
    let mut flipped = whole.clone();
    flipped[8] ^= 0x40;
    fs::write(&path, &flipped).unwrap();
    messages.push(fails(dir.path(), "model_invalid", &[SHARD, "header"]));
    let mut flipped = whole.clone();
    flipped[6] ^= 0x80;
    fs::write(&path, &flipped).unwrap();
    messages.push(fails(dir.path(), "model_invalid", &[SHARD, "header claims"]));
    fs::write(&path, b"").unwrap();
    messages.push(fails(dir.path(), "model_invalid", &[SHARD]));
    fs::remove_file(&path).unwrap();
    messages.push(fails(dir.path(), "model_invalid", &[SHARD, "missing"]));

    let dir = copy();
    fs::write(dir.path().join("config.json"), "{").unwrap();
    messages.push(fails(dir.path(), "model_invalid", &["config.json", "JSON"]));
    fs::remove_file(dir.path().join("config.json")).unwrap();
    messages.push(fails(dir.path(), "model_invalid", &["config.json"]));

    let dir = copy();
    fs::remove_file(dir.path().join("tokenizer.json")).unwrap();
    messages.push(fails(dir.path(), "model_invalid", &["tokenizer.json"]));

    let dir = copy();
    let path = dir.path().join("config.json");
    let config = fs::read_to_string(&path).unwrap();
    fs::write(
        &path,
        config.replace("Qwen3_5ForConditionalGeneration", "LlamaForCausalLM"),
    )
    .unwrap();
    messages.push(fails(
        dir.path(),
        "architecture_unsupported",
        &["LlamaForCausalLM", "Qwen3_5ForCausalLM"],
    ));

    let total = messages.len();
    messages.sort();
    messages.dedup();
    assert_eq!(
        messages.len(),
        total,
        "two kinds of damage read alike: {messages:#?}"
    );
}

#[test]
fn a_flipped_bit_anywhere_in_the_header_never_crashes_the_runner() {
    let dir = copy();
    let path = dir.path().join("model-00001-of-00002.safetensors");
    let whole = fs::read(&path).unwrap();
    let header = u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
    for n in 0..24 {
        let mut flipped = whole.clone();
        let at = n * (header + 7) / 23;
        flipped[at] ^= 1 << (n % 8);
        fs::write(&path, &flipped).unwrap();
        let mut runner = Process::runner_of(dir.path(), &[]);
        runner.close();
        // Some flips leave a header that still means the same, white space for one; then EOF ends the load in good order.
        let status = runner.wait(Duration::from_secs(30));
        assert!(
            matches!(status.code(), Some(0 | 1)),
            "bit {} of byte {at}: {status}",
            n % 8
        );
        let events = runner.rest();
        if status.code() == Some(1) {
            assert_eq!(events.last().unwrap()["type"], "error");
        }
    }
}

#[test]
fn a_model_larger_than_the_memory_limit_is_refused_with_both_figures() {
    let mut runner = Process::runner(&["--memory-limit", "1MiB"]);
    let error = runner.ready();
    assert_eq!(
        (&error["type"], &error["code"]),
        (&json!("error"), &json!("out_of_memory")),
        "{error}"
    );
    assert!(error["message"].as_str().unwrap().contains("1048576"), "{error}");
    assert_eq!(runner.wait(Duration::from_secs(20)).code(), Some(1));
}

#[test]
fn a_bad_command_line_exits_with_2_before_anything_is_written() {
    let cases: [&[&str]; 10] = [
        &[],
        &["--model"],
        &["--nonsense"],
        &["--model", "x", "--draft", "17"],
        &["--model", "x", "--chunk", "0"],
        &["--model", "x", "--max-line-bytes", "abc"],
        &["--model", "x", "--max-queue", "0"],
        &["--model", "x", "--memory-limit", "lots"],
        &["--model", "x", "--fp8", "int4"],
        &["--model", "x", "surplus"],
    ];
    for args in cases {
        let output = Command::new(executable("lookahead-runner"))
            .args(args)
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(2), "{args:?}");
        assert!(output.stdout.is_empty(), "{args:?}");
        assert!(!output.stderr.is_empty(), "{args:?} is not explained");
    }
}

#[test]
fn requests_that_wait_for_a_model_get_the_error_of_its_load() {
    let dir = copy();
    // A pipe in place of the configuration holds the load up until everything has been read.
    let config = dir.path().join("config.json");
    fs::remove_file(&config).unwrap();
    assert!(Command::new("mkfifo").arg(&config).status().unwrap().success());
    let mut runner = Process::runner_of(dir.path(), &[]);
    for request in [
        json!({"type": "generate", "id": "a", "prompt": "one"}),
        json!({"type": "generate", "id": "b", "messages": [{"role": "user", "content": "two"}]}),
        json!({"type": "generate", "id": "c", "prompt": "three"}),
        json!({"type": "tokenize", "id": "t", "text": "four"}),
        json!({"type": "cancel", "id": "k", "target": "c"}),
    ] {
        runner.send(&request);
    }
    runner.ask(&json!({"type": "ping", "id": "p"}));
    fs::write(&config, "{").unwrap();
    let events = runner.rest();
    assert_eq!(runner.wait(Duration::from_secs(20)).code(), Some(1));
    let load = events.iter().find(|event| event["id"].is_null());
    let load = load.unwrap_or_else(|| panic!("no error of the load in {events:?}"));
    assert_eq!(
        (&load["type"], &load["code"]),
        (&json!("error"), &json!("model_invalid"))
    );
    let mut ended: Vec<&str> = Vec::new();
    for event in events.iter().filter(|event| !event["id"].is_null()) {
        assert_eq!(event["type"], "error", "{event}");
        assert_eq!(
            (&event["code"], &event["message"]),
            (&load["code"], &load["message"])
        );
        ended.extend(event["id"].as_str());
    }
    ended.sort_unstable();
    assert_eq!(
        ended,
        ["a", "b", "t"],
        "the cancelled request had its final event before"
    );
}
