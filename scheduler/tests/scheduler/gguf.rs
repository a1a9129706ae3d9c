//! GGUF files through a fake llama-server that has the real one's traps and misbehaves on demand.

use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::{json, Value};

use crate::host::{eventually, example, is_alive, kill, Host, Setup};
use crate::synthetic::{gguf, Key};

const TENSORS: [&str; 2] = ["blk.0.attn_norm.weight", "blk.8.nextn.eh_proj.weight"];

fn model_file(tensors: &[&str]) -> Vec<u8> {
    gguf(
        3,
        &[
            ("general.architecture", Key::Text("qwen35")),
            ("general.file_type", Key::U32(7)),
            ("qwen35.block_count", Key::U32(9)),
            ("qwen35.nextn_predict_layers", Key::U32(1)),
            ("qwen35.context_length", Key::U32(1000)),
            ("tokenizer.ggml.pre", Key::Text("qwen35")),
            ("tokenizer.ggml.eos_token_id", Key::U32(1)),
        ],
        tensors,
    )
}

/// Writes a model for the fake server, with its faults.
pub(crate) fn write_model(path: &Path, faults: &[&str]) {
    std::fs::write(path, model_file(&TENSORS)).unwrap();
    std::fs::write(format!("{}.faults", path.display()), faults.join("\n")).unwrap();
}

/// A scheduler with a GGUF model `g` served by the fake server.
fn fake(faults: &[&str], arguments: &[&str]) -> Host {
    fake_with(Setup::new(), faults, arguments, &model_file(&TENSORS))
}

fn fake_with(setup: Setup, faults: &[&str], arguments: &[&str], file: &[u8]) -> Host {
    let path = setup.path().join("g.gguf");
    std::fs::write(&path, file).unwrap();
    std::fs::write(setup.path().join("g.gguf.faults"), faults.join("\n")).unwrap();
    let server = example("fake-llama-server");
    setup
        .setting(&format!("llama_server = {:?}", server.to_str().unwrap()))
        .setting(&format!("[models.g]\npath = \"g.gguf\"\nargs = {arguments:?}"))
        .start()
}

fn generate(id: &str, fields: Value) -> Value {
    let mut request = json!({"type": "generate", "id": id, "model": "g", "prompt": "hello"});
    request
        .as_object_mut()
        .unwrap()
        .extend(fields.as_object().unwrap().clone());
    request
}

pub(crate) fn ids(events: &[Value]) -> usize {
    events
        .iter()
        .filter_map(|event| event["tokens"].as_array())
        .map(Vec::len)
        .sum()
}

#[test]
fn an_answer_has_all_ids_and_not_the_one_that_ends_it() {
    let mut host = fake(&[], &[]);
    host.send(generate("1", json!({"options": {"num_predict": -1}})));
    let events = host.all_of("1");
    let types: Vec<_> = events
        .iter()
        .map(|event| event["type"].as_str().unwrap())
        .collect();
    assert_eq!((types[0], types[types.len() - 1]), ("prompt", "done"));
    assert_eq!(
        (events[0]["tokens"].as_u64(), events[0]["cached"].as_u64()),
        (Some(5), Some(1))
    );
    let text: String = events.iter().filter_map(|event| event["text"].as_str()).collect();
    assert_eq!(text, "abc\u{1f984}abc\u{1f984}");
    let done = events.last().unwrap();
    assert_eq!(
        (done["done_reason"].as_str(), done["eval_count"].as_u64()),
        (Some("stop"), Some(14))
    );
    assert_eq!(ids(&events), 14);
    // A character of several ids hides where a round ended, so that only the two sums are known.
    assert_eq!(done["draft"], json!({"proposed": 18, "accepted": 10}));
    let entry = host.entry("g").unwrap();
    assert_eq!(
        (entry["state"].as_str(), entry["draft"]["active"].as_bool()),
        (Some("ready"), Some(true))
    );
}

#[test]
fn budgets_and_stop_strings_end_it_as_the_protocol_says() {
    let mut host = fake(&[], &[]);
    for (id, options, reason, count, text) in [
        ("zero", json!({"num_predict": 0}), "length", 0, ""),
        ("two", json!({"num_predict": 2}), "length", 2, "ab"),
        ("cut", json!({"num_predict": 5}), "length", 3, "abc\u{fffd}"),
        ("stop", json!({"stop": ["c"]}), "stop", 2, "ab"),
        // A stop string of two ids, neither of which is delivered, and text that the server keeps back for one that never comes.
        ("pair", json!({"stop": ["bc"]}), "stop", 1, "a"),
        (
            "vain",
            json!({"stop": ["bx"]}),
            "stop",
            14,
            "abc\u{1f984}abc\u{1f984}",
        ),
        (
            "kept",
            json!({"stop": ["bx"], "num_predict": 2}),
            "length",
            2,
            "ab",
        ),
        (
            "unicorn",
            json!({"stop": ["c\u{1f984}x"], "num_predict": 8}),
            "length",
            8,
            "abc\u{1f984}a",
        ),
    ] {
        host.send(generate(id, json!({ "options": options })));
        let (got, done) = host.text_of(id);
        assert_eq!(
            (
                got.as_str(),
                done["done_reason"].as_str(),
                done["eval_count"].as_u64()
            ),
            (text, Some(reason), Some(count)),
            "{id}"
        );
    }
    host.send(generate("again", json!({"options": {"stop": ["c"]}})));
    assert_eq!(host.end_of("again")["stop"], "c");
}

#[test]
fn draft_figures_are_those_of_each_request() {
    let mut host = fake(&[], &[]);
    for (id, options, draft) in [
        (
            "round",
            json!({"stop": ["c"]}),
            json!({"rounds": 1, "proposed": 3, "tested": 3, "accepted": 2, "depth": {"3": 1},
                "by_position": [{"tested": 1, "accepted": 1}, {"tested": 1, "accepted": 1}, {"tested": 1, "accepted": 0}]}),
        ),
        (
            "short",
            json!({"num_predict": 3}),
            json!({"rounds": 1, "proposed": 1, "tested": 1, "accepted": 1, "depth": {"1": 1}, "by_position": [{"tested": 1, "accepted": 1}]}),
        ),
        (
            "plain",
            json!({"num_predict": 2}),
            json!({"rounds": 1, "proposed": 0, "tested": 0, "accepted": 0, "depth": {"0": 1}, "by_position": []}),
        ),
    ] {
        host.send(generate(id, json!({ "options": options })));
        assert_eq!(host.end_of(id)["draft"], draft, "{id}");
    }
}

#[test]
fn chat_tokens_and_the_small_requests_work() {
    let mut host = fake(&[], &[]);
    host.send(json!({"type": "tokenize", "id": "t", "model": "g", "text": "e\u{301}"}));
    // Composed first: the server's tokenizer is not given decomposed text.
    assert_eq!(host.end_of("t")["tokens"], json!([0xc3, 0xa9]));
    host.send(json!({"type": "detokenize", "id": "d", "model": "g", "tokens": [104, 105]}));
    assert_eq!(host.end_of("d")["text"], "hi");
    host.send(json!({"type": "render", "id": "r", "model": "g", "messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]}));
    assert_eq!(host.end_of("r")["prompt"], "<user>x<think>");
    host.send(json!({"type": "generate", "id": "m", "model": "g", "think": false, "messages": [{"role": "user", "content": "x"}]}));
    let events = host.all_of("m");
    assert_eq!(events[0]["tokens"], 7);
    host.send(json!({"type": "generate", "id": "i", "model": "g", "tokens": [1, 2, 3]}));
    assert_eq!(host.all_of("i")[0]["tokens"], 3);
}

#[test]
fn what_cannot_be_done_is_refused_and_the_rest_goes_on() {
    let mut host = fake(&[], &[]);
    for (fields, code) in [
        (json!({"logprobs": true}), "unsupported"),
        (json!({"draft": {"mode": "off"}}), "unsupported"),
        (json!({"format": {"regex": "a+"}}), "unsupported"),
        (json!({"format": {"type": "nonsense"}}), "bad_format"),
        (json!({"prompt": ""}), "empty_prompt"),
        (json!({"prompt": "x".repeat(1000)}), "context_exceeded"),
        (json!({"options": {"num_ctx": 3}}), "context_exceeded"),
    ] {
        host.send(generate("x", fields.clone()));
        assert_eq!(host.end_of("x")["code"], code, "{fields}");
    }
    host.send(generate("y", json!({"options": {"repeat_last_n": -1}})));
    assert_eq!(host.end_of("y")["type"], "done");
    host.send(json!({"type": "cache", "id": "c", "model": "g", "action": "clear"}));
    assert_eq!(host.end_of("c")["code"], "unsupported");
}

#[test]
fn without_drafting_there_are_logprobs_and_no_draft_figures() {
    let mut host = fake(&[], &["--draft", "off"]);
    host.send(generate(
        "1",
        json!({"logprobs": true, "options": {"num_predict": 2}}),
    ));
    let events = host.all_of("1");
    assert_eq!(events[1]["logprobs"][0]["logprob"], -0.5);
    assert_eq!(
        events.last().unwrap()["draft"],
        json!({"rounds": 1, "proposed": 0, "tested": 0, "accepted": 0, "depth": {"0": 1}, "by_position": []})
    );
}

#[test]
fn cancel_works_while_loading_queued_and_generating() {
    let mut host = fake(&["slow-load=500", "slow-token=5", "endless"], &[]);
    let endless = json!({"options": {"num_predict": 500}});
    host.send(generate("loading", endless.clone()));
    host.send(json!({"type": "cancel", "id": "c0", "target": "loading"}));
    assert_eq!(host.end_of("loading")["done_reason"], "cancelled");
    host.send(generate("running", endless.clone()));
    host.wait(|event| event["id"] == "running" && event["type"] == "token");
    host.send(generate("queued", endless));
    for target in ["queued", "running"] {
        host.send(json!({"type": "cancel", "id": format!("c-{target}"), "target": target}));
        assert_eq!(host.end_of(&format!("c-{target}"))["found"], true);
        let sent = Instant::now();
        let done = host.end_of(target);
        assert_eq!(done["done_reason"], "cancelled", "{target}");
        if target == "running" {
            assert!(
                sent.elapsed() < Duration::from_millis(500),
                "{:?}",
                sent.elapsed()
            );
        }
    }
    host.send(generate("after", json!({"options": {"num_predict": 2}})));
    assert_eq!(host.end_of("after")["eval_count"], 2);
    // The one that was cancelled while loading never reached the model's process.
    host.send(json!({"type": "status", "id": "s", "model": "g"}));
    assert_eq!(
        host.end_of("s")["requests"],
        json!({"completed": 1, "cancelled": 2, "failed": 0})
    );
}

#[test]
fn failed_loads_are_told_by_their_cause() {
    for (faults, code, word) in [
        (
            "load-exit",
            "architecture_unsupported",
            "unknown model architecture: 'foo'",
        ),
        ("load-segv", "runner_crashed", "SIGSEGV"),
        ("wrong-model", "internal", "/other.gguf"),
    ] {
        let mut host = fake(&[faults], &[]);
        host.send(generate("1", json!({})));
        let error = host.end_of("1");
        assert_eq!(error["code"], code, "{error}");
        assert!(error["message"].as_str().unwrap().contains(word), "{error}");
    }
    let mut host = fake_with(Setup::new(), &[], &[], b"hello, I am no model");
    host.send(generate("1", json!({})));
    let error = host.end_of("1");
    assert_eq!(error["code"], "model_invalid");
    assert!(error["message"].as_str().unwrap().contains("hell"), "{error}");
    // Such a file makes llama-server crash; it is never started.
    let mut host = fake_with(Setup::new(), &[], &[], &model_file(&TENSORS[1..]));
    host.send(generate("1", json!({})));
    assert!(host.end_of("1")["message"]
        .as_str()
        .unwrap()
        .contains("--draft-model"));
}

#[test]
fn a_taken_port_is_tried_again() {
    let mut host = fake(&["port-taken"], &[]);
    host.send(generate("1", json!({})));
    assert_eq!(host.end_of("1")["type"], "done");
}

#[test]
fn a_stalled_load_is_ended() {
    let setup = Setup::new()
        .setting("load_timeout = 1.0")
        .setting("stop_grace = 0.5");
    let mut host = fake_with(setup, &["load-stall"], &[], &model_file(&TENSORS));
    host.send(generate("1", json!({})));
    assert_eq!(host.end_of("1")["code"], "runner_stalled");
}

#[test]
fn a_dead_server_ends_its_requests_and_is_started_again() {
    let mut host = fake(&["token-kill=3"], &[]);
    for _ in 0..2 {
        host.send(generate("1", json!({})));
        let events = host.all_of("1");
        let error = events.last().unwrap();
        assert_eq!(
            (error["code"].as_str(), error["retryable"].as_bool()),
            (Some("runner_crashed"), Some(true)),
            "{error}"
        );
        assert!(error["message"].as_str().unwrap().contains("SIGKILL"), "{error}");
        let text: String = events.iter().filter_map(|event| event["text"].as_str()).collect();
        assert_eq!(text, "abc");
    }
}

#[test]
fn a_stream_that_is_cut_is_no_answer() {
    let mut host = fake(&["cut=2"], &[]);
    host.send(generate("1", json!({})));
    let error = host.end_of("1");
    assert_eq!(
        (error["type"].as_str(), error["code"].as_str()),
        (Some("error"), Some("internal"))
    );
}

#[test]
fn the_servers_own_environment_variables_do_not_act() {
    let setup = Setup::new();
    std::fs::write(setup.path().join("h.gguf"), model_file(&TENSORS)).unwrap();
    let server = example("fake-llama-server");
    let mut host = setup
        .setting(&format!("llama_server = {:?}", server.to_str().unwrap()))
        .setting("[models.g]\npath = \"h.gguf\"\nenv = { LLAMA_ARG_CTX_SIZE = \"7\" }")
        .start();
    host.send(generate("1", json!({})));
    assert_eq!(host.end_of("1")["type"], "done");
}

/// The children of a process.
pub(crate) fn servers_under(pid: i32) -> Vec<i32> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc").unwrap().flatten() {
        let Ok(child) = entry.file_name().to_string_lossy().parse::<i32>() else {
            continue;
        };
        let stat = std::fs::read_to_string(format!("/proc/{child}/stat")).unwrap_or_default();
        let parent = stat
            .rsplit(')')
            .next()
            .and_then(|rest| rest.split_whitespace().nth(1)?.parse::<i32>().ok());
        if parent == Some(pid) {
            found.push(child);
        }
    }
    found
}

#[test]
fn no_server_outlives_its_scheduler() {
    for way in ["kill the scheduler", "kill the bridge", "end stdin"] {
        let mut host = fake(&["slow-token=5", "endless"], &[]);
        host.send(generate("1", json!({"options": {"num_predict": 500}})));
        host.wait(|event| event["type"] == "token");
        let bridge = host.pid_of("g");
        let servers = servers_under(bridge);
        assert_eq!(servers.len(), 1);
        match way {
            "kill the scheduler" => host.signal(libc::SIGKILL),
            "kill the bridge" => kill(bridge, libc::SIGKILL),
            _ => drop(host.stdin.take()),
        }
        eventually(Duration::from_secs(2), way, || {
            !is_alive(bridge) && !is_alive(servers[0])
        });
    }
}
