//! Requests of every type, routed, passed on and answered.

use std::time::{Duration, Instant};

use serde_json::json;

use crate::host::Setup;

#[test]
fn two_models_stream_at_once_and_each_event_names_its_model() {
    let mut host = Setup::new()
        .model("alpha", &["slow-token=2"])
        .model("beta", &["slow-token=2"])
        .start();
    for n in 0..6 {
        let model = if n % 2 == 0 { "alpha" } else { "beta" };
        host.send(json!({"type": "generate", "id": format!("{n}"), "model": model, "prompt": "x", "options": {"num_predict": 4}}));
    }
    for n in 0..6 {
        let model = if n % 2 == 0 { "alpha" } else { "beta" };
        let events = host.all_of(&format!("{n}"));
        assert!(events.iter().all(|event| event["model"] == model), "{events:?}");
        let types: Vec<_> = events
            .iter()
            .map(|event| event["type"].as_str().unwrap())
            .collect();
        assert_eq!((types[0], types[types.len() - 1]), ("prompt", "done"));
        let text: String = events.iter().filter_map(|event| event["text"].as_str()).collect();
        assert_eq!(text, format!("{model}-0 {model}-1 {model}-2 {model}-3 "));
    }
    let (status, rest) = host.finish();
    assert_eq!(status.code(), Some(0));
    assert!(rest.iter().all(|event| event["type"] == "load"), "{rest:?}");
}

#[test]
fn every_request_type_is_answered() {
    let mut host = Setup::new().model("alpha", &[]).start();
    host.send(json!({"type": "tokenize", "id": "1", "model": "alpha", "text": "AB"}));
    assert_eq!(host.end_of("1")["tokens"], json!([65, 66]));
    host.send(json!({"type": "detokenize", "id": "2", "model": "alpha", "tokens": [65]}));
    assert_eq!(host.end_of("2")["type"], "detokenized");
    host.send(json!({"type": "render", "id": "3", "model": "alpha", "messages": [{"role": "user", "content": "x"}]}));
    assert_eq!(host.end_of("3")["type"], "rendered");
    host.send(json!({"type": "ping", "id": "4"}));
    assert_eq!(host.end_of("4")["type"], "pong");
    host.send(json!({"type": "status", "id": "5"}));
    let status = host.end_of("5");
    assert_eq!(
        (status["state"].as_str(), status["models"][0]["model"].as_str()),
        (Some("idle"), Some("alpha"))
    );
    host.send(json!({"type": "status", "id": "6", "model": "alpha"}));
    assert_eq!(host.end_of("6")["waiting"], 0);
    host.send(json!({"type": "cache", "id": "7", "action": "clear"}));
    assert_eq!(host.end_of("7")["type"], "cache");
    host.send(json!({"type": "cancel", "id": "8", "target": "nobody"}));
    assert_eq!(host.end_of("8")["found"], false);
    host.send(json!({"type": "load", "id": "9", "model": "alpha"}));
    let loaded = host.end_of("9");
    assert_eq!(
        (loaded["type"].as_str(), loaded["model"].as_str()),
        (Some("loaded"), Some("alpha"))
    );
    assert_eq!(loaded["info"]["architecture"], "fake");
    host.send(json!({"type": "unload", "id": "10", "model": "alpha"}));
    assert_eq!(host.end_of("10")["type"], "unloaded");
    assert_eq!(host.entry("alpha"), None);
    host.send(json!({"type": "status", "id": "11", "model": "alpha"}));
    assert_eq!(host.end_of("11")["code"], "no_model");
    host.send(json!({"type": "shutdown"}));
    assert_eq!(host.exit_status(crate::host::PATIENCE).code(), Some(0));
}

#[test]
fn what_is_wrong_with_a_line_is_said_and_the_scheduler_goes_on() {
    let mut host = Setup::new()
        .model("alpha", &[])
        .argument("--max-line-bytes=2000")
        .start();
    let refused = |code: &str| {
        let code = code.to_owned();
        move |event: &serde_json::Value| event["code"] == code.as_str()
    };
    use std::io::Write;
    host.stdin
        .as_mut()
        .unwrap()
        .write_all(b"\xff\xfe\n\n{\"type\":\n[]\n")
        .unwrap();
    host.wait(refused("invalid_json"));
    host.wait(refused("invalid_json"));
    host.wait(refused("invalid_request"));
    host.send(json!({"type": "generate", "id": "a", "model": "alpha", "prompt": "x".repeat(3000)}));
    host.wait(refused("line_too_long"));
    host.send(json!({"type": "dance", "id": "b"}));
    assert_eq!(host.end_of("b")["code"], "unknown_type");
    host.send(json!({"type": "generate", "id": "c", "model": "alpha", "prompt": "x", "colour": "red"}));
    let error = host.end_of("c");
    assert_eq!(error["code"], "unknown_field");
    assert!(error["message"].as_str().unwrap().contains("colour"));
    host.send(json!({"type": "generate", "id": "d", "model": "gamma", "prompt": "x"}));
    assert_eq!(host.end_of("d")["code"], "no_model");
    host.send(json!({"type": "generate", "id": "e", "prompt": "x"}));
    assert_eq!(host.end_of("e")["code"], "no_model");
    host.send(json!({"type": "generate", "id": "f", "model": "/no/such/folder", "prompt": "x"}));
    assert_eq!(host.end_of("f")["code"], "model_not_found");
    host.send(json!({"type": "generate", "id": "g", "model": "alpha", "prompt": "x"}));
    assert_eq!(host.end_of("g")["type"], "done");
}

#[test]
fn a_busy_id_is_refused_without_disturbing_its_request() {
    let mut host = Setup::new().model("alpha", &["slow-token=5"]).start();
    let request = json!({"type": "generate", "id": "a", "model": "alpha", "prompt": "x", "options": {"num_predict": 20}});
    host.send(request.clone());
    host.send(request);
    let refusal = host.wait(|event| event["code"] == "duplicate_id");
    assert_eq!(
        (refusal["id"].as_str(), refusal["duplicate"].as_bool()),
        (Some("a"), Some(true))
    );
    assert_eq!(host.end_of("a")["eval_count"], 20);
}

#[test]
fn control_requests_are_answered_within_100_ms_while_models_work_load_and_hang() {
    let mut host = Setup::new()
        .model("busy", &["slow-token=1"])
        .model("loading", &["slow-load=2000"])
        .model("hung", &["hang=2"])
        .start();
    for (n, model) in ["busy", "loading", "hung"].iter().enumerate() {
        host.send(json!({"type": "generate", "id": format!("g{n}"), "model": model, "prompt": "x", "options": {"num_predict": 5000}}));
    }
    host.wait(|event| event["id"] == "g2" && event["type"] == "token");
    let mut slowest = Duration::ZERO;
    for n in 0..50 {
        for (kind, extra) in [("ping", ""), ("status", ""), ("list", ""), ("cancel", "nobody")] {
            let id = format!("{kind}{n}");
            let mut request = json!({"type": kind, "id": id});
            if kind == "cancel" {
                request["target"] = json!(extra);
            }
            let sent = Instant::now();
            host.send(request);
            host.end_of(&id);
            slowest = slowest.max(sent.elapsed());
        }
    }
    println!("slowest of 200 control requests: {slowest:?}");
    assert!(slowest < Duration::from_millis(100), "{slowest:?}");
}

#[test]
fn cancel_works_while_queued_while_loading_and_while_generating() {
    let mut host = Setup::new()
        .setting("window = 1")
        .model("alpha", &["slow-token=5"])
        .model("loading", &["slow-load=3000"])
        .start();
    let generate = |id: &str, model: &str| json!({"type": "generate", "id": id, "model": model, "prompt": "x", "options": {"num_predict": 5000}});
    host.send(generate("running", "alpha"));
    host.wait(|event| event["id"] == "running" && event["type"] == "token");
    host.send(generate("queued", "alpha"));
    host.send(generate("loading", "loading"));
    host.wait(|event| event["type"] == "load" && event["model"] == "loading");
    for target in ["queued", "loading", "running"] {
        host.send(json!({"type": "cancel", "id": format!("c-{target}"), "target": target}));
        let answer = host.end_of(&format!("c-{target}"));
        assert_eq!(
            (answer["found"].as_bool(), answer["target"].as_str()),
            (Some(true), Some(target))
        );
        let done = host
            .wait_for(Duration::from_secs(10), |event| {
                event["id"] == target && event["type"] == "done"
            })
            .unwrap();
        assert_eq!(done["done_reason"], "cancelled", "{target}");
    }
    // The model's process is fit for more.
    host.send(json!({"type": "generate", "id": "after", "model": "alpha", "prompt": "x", "options": {"num_predict": 2}}));
    assert_eq!(host.end_of("after")["eval_count"], 2);
}

#[test]
fn the_queue_has_a_limit_and_waiting_counts_as_queue_time() {
    let mut host = Setup::new()
        .setting("queue_limit = 3")
        .setting("window = 1")
        .model("alpha", &["slow-token=20"])
        .start();
    for n in 0..5 {
        host.send(json!({"type": "generate", "id": format!("{n}"), "model": "alpha", "prompt": "x", "options": {"num_predict": 10}}));
    }
    for n in [3, 4] {
        let error = host.end_of(&format!("{n}"));
        assert_eq!(
            (error["code"].as_str(), error["retryable"].as_bool()),
            (Some("queue_full"), Some(true))
        );
    }
    let waits: Vec<u64> = (0..3)
        .map(|n| host.end_of(&format!("{n}"))["queue_duration"].as_u64().unwrap())
        .collect();
    assert!(
        waits[1] > 150_000_000 && waits[2] > waits[1] + 150_000_000,
        "{waits:?}"
    );
}

#[test]
fn a_host_that_does_not_read_gets_everything_later_and_memory_stays_small() {
    let mut host = Setup::new().model("alpha", &["big-token=20000"]).start();
    host.send(json!({"type": "generate", "id": "a", "model": "alpha", "prompt": "x", "options": {"num_predict": 1}}));
    host.end_of("a");
    // A second scheduler whose stdout nobody reads for a while.
    let config = host.config();
    let mut deaf = std::process::Command::new(crate::host::lookahead())
        .args(["serve", "--config"])
        .arg(config)
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::null())
        .spawn()
        .unwrap();
    use std::io::{Read, Write};
    let request = json!({"type": "generate", "id": "b", "model": "alpha", "prompt": "x", "options": {"num_predict": 5000}});
    writeln!(deaf.stdin.as_mut().unwrap(), "{request}").unwrap();
    std::thread::sleep(Duration::from_secs(2));
    let memory = resident_bytes(deaf.id());
    println!(
        "resident memory of the scheduler before a reader of 100 MB: {} MiB",
        memory >> 20
    );
    assert!(memory < 64 << 20, "{memory}");
    let mut stdout = deaf.stdout.take().unwrap();
    let mut text = String::new();
    let reader = std::thread::spawn(move || {
        let mut buffer = vec![0; 1 << 16];
        while !text.ends_with('\n') || !text.contains("\"type\":\"done\"") {
            let count = stdout.read(&mut buffer).unwrap();
            assert!(count > 0, "ended early");
            text.push_str(std::str::from_utf8(&buffer[..count]).unwrap());
        }
        text
    });
    let text = reader.join().unwrap();
    let bytes: usize = text
        .lines()
        .map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap())
        .filter_map(|event| Some(event["text"].as_str()?.len()))
        .sum();
    assert_eq!(bytes, 5000 * 20_000);
    drop(deaf.stdin.take());
    assert!(deaf.wait().unwrap().success());
}

/// Resident memory of a process.
pub(crate) fn resident_bytes(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmRSS:"))
        .unwrap();
    line.trim()
        .strip_suffix("kB")
        .unwrap()
        .trim()
        .parse::<u64>()
        .unwrap()
        * 1024
}
