//! Faults of one model's process, with another model streaming beside it undisturbed.

use std::time::{Duration, Instant};

use serde_json::{json, Value};

use crate::host::{eventually, example, is_alive, kill, Host, Setup};

/// Starts a healthy model and one with faults, has both work at once, and returns the faulty one's final event. The
/// healthy one's text must be what it always is.
fn beside_a_healthy_model(setup: Setup, faults: &[&str]) -> (Host, Value) {
    let mut host = setup
        .model("healthy", &["slow-token=5"])
        .model("faulty", faults)
        .start();
    host.send(json!({"type": "load", "id": "warm", "model": "healthy"}));
    host.end_of("warm");
    host.send(json!({"type": "generate", "id": "h", "model": "healthy", "prompt": "x", "options": {"num_predict": 100}}));
    host.send(json!({"type": "generate", "id": "f", "model": "faulty", "prompt": "x", "options": {"num_predict": 10}}));
    let end = host.end_of("f");
    assert_undisturbed(&mut host, "h", 100);
    assert_eq!(
        (end["id"].as_str(), end["model"].as_str()),
        (Some("f"), Some("faulty"))
    );
    (host, end)
}

/// The healthy model's answer is byte for byte what it always is.
#[track_caller]
fn assert_undisturbed(host: &mut Host, id: &str, count: u64) {
    let (text, done) = host.text_of(id);
    let expected: String = (0..count).map(|n| format!("healthy-{n} ")).collect();
    assert_eq!(text, expected);
    assert_eq!(done["eval_count"], count);
}

#[track_caller]
fn assert_crashed(end: &Value, words: &[&str]) {
    assert_eq!(
        (end["code"].as_str(), end["retryable"].as_bool()),
        (Some("runner_crashed"), Some(true)),
        "{end}"
    );
    let message = end["message"].as_str().unwrap();
    for word in words {
        assert!(message.contains(word), "{word:?} is not in {message:?}");
    }
}

#[test]
fn a_crash_while_loading_names_signal_and_log() {
    let (_, end) = beside_a_healthy_model(Setup::new(), &["load-crash"]);
    assert_crashed(&end, &["SIGABRT", "signal 6", "about to crash while loading"]);
}

#[test]
fn an_exit_while_loading_names_the_status() {
    let (_, end) = beside_a_healthy_model(Setup::new(), &["load-exit"]);
    assert_crashed(&end, &["status 77", "giving up while loading"]);
}

#[test]
fn a_failed_load_passes_its_own_code_on() {
    let (mut host, end) = beside_a_healthy_model(Setup::new(), &["load-error=architecture_unsupported"]);
    assert_eq!(
        (end["code"].as_str(), end["retryable"].as_bool()),
        (Some("architecture_unsupported"), Some(false))
    );
    let entry = host.entry("faulty").unwrap();
    assert_eq!(entry["state"], "failed");
    assert!(entry["reason"].as_str().unwrap().contains("fails on purpose"));
}

#[test]
fn a_load_without_progress_is_stalled_and_one_with_slow_progress_is_not() {
    let setup = Setup::new()
        .setting("load_timeout = 1.0")
        .setting("stop_grace = 0.5")
        .model("slow", &["slow-load=500"]);
    let (mut host, end) = beside_a_healthy_model(setup, &["load-hang"]);
    assert_eq!(
        (end["code"].as_str(), end["retryable"].as_bool()),
        (Some("runner_stalled"), Some(true))
    );
    host.send(json!({"type": "load", "id": "slow", "model": "slow"}));
    assert_eq!(host.end_of("slow")["type"], "loaded");
}

#[test]
fn a_crash_in_prefill_ends_every_request_of_the_model() {
    let (_, end) = beside_a_healthy_model(Setup::new(), &["prefill-crash"]);
    assert_crashed(&end, &["status 3 (internal fault)", "crashing in prefill"]);
    let mut host = Setup::new()
        .setting("window = 1")
        .model("faulty", &["prefill-crash"])
        .start();
    for id in ["1", "2", "3"] {
        host.send(json!({"type": "generate", "id": id, "model": "faulty", "prompt": "x"}));
    }
    for id in ["1", "2", "3"] {
        assert_crashed(
            &host.end_of(id),
            &["status 3 (internal fault)", "crashing in prefill"],
        );
    }
}

#[test]
fn a_crash_at_a_token_comes_after_the_tokens_before_it() {
    let (mut host, end) = beside_a_healthy_model(Setup::new(), &["token-exit=4"]);
    assert_crashed(&end, &["internal fault at token 4"]);
    host.send(json!({"type": "generate", "id": "again", "model": "faulty", "prompt": "x", "options": {"num_predict": 10}}));
    let (text, _) = host.text_of("again");
    assert_eq!(text, "faulty-0 faulty-1 faulty-2 faulty-3 ");
}

#[test]
fn sigkill_and_sigsegv_are_told_in_words() {
    // SceneWorks #374, omlx #2003: "exited unexpectedly" with no cause.
    let (_, end) = beside_a_healthy_model(Setup::new(), &["token-kill=2"]);
    assert_crashed(
        &end,
        &["SIGKILL (signal 9, killed from outside, often for want of memory)"],
    );
    let (_, end) = beside_a_healthy_model(Setup::new(), &["token-segv=2"]);
    assert_crashed(&end, &["SIGSEGV (signal 11, invalid memory access)"]);
}

#[test]
fn a_silent_hang_is_noticed_and_the_process_replaced() {
    let setup = || {
        Setup::new()
            .setting("stall_timeout = 1.0")
            .setting("stop_grace = 0.3")
    };
    let (_, end) = beside_a_healthy_model(setup(), &["hang=3"]);
    assert_eq!(end["code"], "runner_stalled", "{end}");
    let marker = tempfile::tempdir().unwrap();
    let once = format!(
        "args = [\"--fault\", \"hang=3\", \"--fault-once\", {:?}]",
        marker.path().join("once")
    );
    let mut host = setup().model_with("hung", &[], &once).start();
    host.send(json!({"type": "generate", "id": "f", "model": "hung", "prompt": "x", "options": {"num_predict": 10}}));
    host.wait(|event| event["type"] == "token");
    let pid = host.pid_of("hung");
    let end = host.end_of("f");
    assert_eq!(
        (end["code"].as_str(), end["retryable"].as_bool()),
        (Some("runner_stalled"), Some(true)),
        "{end}"
    );
    host.send(json!({"type": "generate", "id": "g", "model": "hung", "prompt": "x"}));
    assert_eq!(host.end_of("g")["type"], "done");
    assert_ne!(host.pid_of("hung"), pid);
    assert!(!is_alive(pid));
}

#[test]
fn garbage_on_stdout_is_logged_and_the_answer_goes_on() {
    let (host, end) = beside_a_healthy_model(Setup::new(), &["garbage=3"]);
    assert_eq!(
        (end["type"].as_str(), end["eval_count"].as_u64()),
        (Some("done"), Some(10))
    );
    let log = host.log.lock().unwrap().clone();
    assert!(log.contains("a library that prints"), "{log}");
}

#[test]
fn endless_garbage_ends_the_process() {
    let setup = Setup::new().setting("stop_grace = 0.3");
    let (_, end) = beside_a_healthy_model(setup, &["garbage-flood=3", "slow-token=200"]);
    assert_crashed(&end, &["no protocol lines"]);
}

#[test]
fn half_a_line_before_death_reaches_nobody() {
    let (_, end) = beside_a_healthy_model(Setup::new(), &["half-line=3"]);
    assert_crashed(&end, &["SIGKILL"]);
    let mut host = Setup::new().model("faulty", &["half-line=3"]).start();
    host.send(json!({"type": "generate", "id": "f", "model": "faulty", "prompt": "x"}));
    let (text, end) = host.text_of("f");
    assert_eq!(text, "faulty-0 faulty-1 faulty-2 ");
    assert_crashed(&end, &["SIGKILL"]);
}

#[test]
fn a_flood_on_stderr_is_harmless() {
    let started = Instant::now();
    let (host, end) = beside_a_healthy_model(Setup::new(), &["flood=100"]);
    assert_eq!(
        (end["type"].as_str(), end["eval_count"].as_u64()),
        (Some("done"), Some(10))
    );
    let log = host.log.lock().unwrap().len();
    println!(
        "100 MB on stderr in {:?}, of which {log} bytes were passed on",
        started.elapsed()
    );
    assert!(log < 1 << 20, "{log} bytes were passed on");
}

#[test]
fn a_process_that_ignores_everything_is_killed_in_the_end() {
    let mut host = Setup::new()
        .setting("stop_grace = 0.2")
        .model("healthy", &["slow-token=5"])
        .model("stubborn", &["ignore-term", "slow-token=5"])
        .start();
    host.send(json!({"type": "generate", "id": "h", "model": "healthy", "prompt": "x", "options": {"num_predict": 200}}));
    host.send(json!({"type": "generate", "id": "f", "model": "stubborn", "prompt": "x", "options": {"num_predict": 100000}}));
    let first = host.wait(|event| event["id"] == "f" && event["type"] == "token");
    let pid = host.pid_of("stubborn");
    host.send(json!({"type": "unload", "id": "u", "model": "stubborn"}));
    assert_eq!(host.end_of("u")["found"], true);
    assert!(!is_alive(pid));
    // It never said what became of its request; the count is of what was passed on.
    let events = host.all_of("f");
    let tokens = events
        .iter()
        .chain([&first])
        .filter(|event| event["type"] == "token");
    let passed_on: usize = tokens
        .map(|event| event["tokens"].as_array().unwrap().len())
        .sum();
    let done = events.last().unwrap();
    assert_eq!(
        (done["done_reason"].as_str(), done["prompt_eval_count"].as_u64()),
        (Some("cancelled"), Some(5))
    );
    assert_eq!(done["eval_count"].as_u64().unwrap() as usize, passed_on);
    assert_undisturbed(&mut host, "h", 200);
}

#[test]
fn a_missing_executable_is_named() {
    // The model beside it is served by another program.
    let setup = Setup::new();
    crate::gguf::write_model(&setup.path().join("c.gguf"), &["slow-token=5"]);
    let mut host = setup
        .setting(&format!(
            "llama_server = {:?}",
            example("fake-llama-server").to_str().unwrap()
        ))
        .setting("[models.c]\npath = \"c.gguf\"")
        .model("alpha", &[])
        .argument("--runner=/no/such/runner")
        .start();
    host.send(json!({"type": "generate", "id": "h", "model": "c", "prompt": "x", "options": {"num_predict": 350, "ignore_eos": true}}));
    host.wait(|event| event["id"] == "h" && event["type"] == "prompt");
    host.send(json!({"type": "generate", "id": "f", "model": "alpha", "prompt": "x"}));
    assert_crashed(
        &host.end_of("f"),
        &["could not be started", "/no/such/runner", "No such file"],
    );
    assert_eq!(host.text_of("h").0, "abc\u{1f984}".repeat(50));
}

#[test]
fn repeated_crashes_delay_the_next_start() {
    let mut host = Setup::new().model("faulty", &["load-crash"]).start();
    let mut times = Vec::new();
    for n in 0..4 {
        let started = Instant::now();
        host.send(json!({"type": "generate", "id": format!("{n}"), "model": "faulty", "prompt": "x"}));
        assert_crashed(&host.end_of(&format!("{n}")), &["SIGABRT"]);
        times.push(started.elapsed());
    }
    println!("time to each crash: {times:?}");
    assert!(
        times[2] >= Duration::from_millis(400) && times[3] >= Duration::from_millis(900),
        "{times:?}"
    );
}

#[test]
fn a_kill_from_outside_is_followed_by_a_fresh_process() {
    let mut host = Setup::new().model("alpha", &["slow-token=5"]).start();
    host.send(json!({"type": "generate", "id": "1", "model": "alpha", "prompt": "x", "options": {"num_predict": 1000}}));
    host.wait(|event| event["type"] == "token");
    let pid = host.pid_of("alpha");
    kill(pid, libc::SIGKILL);
    assert_crashed(&host.end_of("1"), &["SIGKILL"]);
    host.send(json!({"type": "generate", "id": "2", "model": "alpha", "prompt": "x"}));
    assert_eq!(host.end_of("2")["type"], "done");
    eventually(Duration::from_secs(2), "the killed process is gone", || {
        !is_alive(pid)
    });
}
