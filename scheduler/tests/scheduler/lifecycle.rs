//! Loading, unloading, memory, and the end of the scheduler itself.

use std::fs;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde_json::{json, Value};

use crate::host::{eventually, is_alive, Setup, PATIENCE};

fn generate(id: &str, model: &str) -> Value {
    json!({"type": "generate", "id": id, "model": model, "prompt": "x", "options": {"num_predict": 4}})
}

#[test]
fn an_idle_model_is_unloaded_after_its_time_and_loaded_again_when_asked() {
    let mut host = Setup::new().model("alpha", &[]).start();
    let mut request = generate("1", "alpha");
    request["keep_alive"] = json!(0.3);
    host.send(request);
    host.end_of("1");
    let pid = host.pid_of("alpha");
    eventually(PATIENCE, "the model is unloaded", || !is_alive(pid));
    host.send(generate("2", "alpha"));
    assert_eq!(host.end_of("2")["type"], "done");
    assert_ne!(host.pid_of("alpha"), pid);
}

#[test]
fn idle_since_is_a_time_of_day_and_null_while_there_is_work() {
    let mut host = Setup::new().model("alpha", &["slow-token=5"]).start();
    let now = || {
        let time = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
        time.as_millis() as u64
    };
    let before = now();
    host.send(json!({"type": "load", "id": "l", "model": "alpha"}));
    host.end_of("l");
    let idle = |host: &mut crate::host::Host| host.entry("alpha").unwrap()["idle_since"].as_u64();
    let loaded = idle(&mut host).unwrap();
    assert!((before..=now()).contains(&loaded), "{before} {loaded}");
    host.send(json!({"type": "generate", "id": "1", "model": "alpha", "prompt": "x", "options": {"num_predict": 50}}));
    host.wait(|event| event["type"] == "token");
    assert_eq!(idle(&mut host), None);
    host.end_of("1");
    let ended = idle(&mut host).unwrap();
    assert!(ended > loaded && ended <= now(), "{loaded} {ended}");
}

#[test]
fn keep_alive_0_unloads_at_once_and_minus_1_never() {
    let mut host = Setup::new()
        .argument("--keep-alive=0")
        .model("alpha", &[])
        .model("beta", &[])
        .start();
    host.send(generate("1", "alpha"));
    let mut request = generate("2", "beta");
    request["keep_alive"] = json!(-1);
    host.send(request);
    host.end_of("1");
    host.end_of("2");
    let deadline = Instant::now() + PATIENCE;
    while host.entry("alpha").is_some() {
        assert!(Instant::now() < deadline);
        std::thread::sleep(Duration::from_millis(10));
    }
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(host.entry("beta").unwrap()["state"], "ready");
}

#[test]
fn models_of_the_command_line_are_loaded_at_once_and_a_lone_one_is_the_default() {
    let mut host = Setup::new().model("alpha", &[]).argument("alpha").start();
    host.wait(|event| event["type"] == "load" && event["done"] == 100);
    host.send(json!({"type": "generate", "id": "1", "prompt": "x"}));
    assert_eq!(host.end_of("1")["model"], "alpha");
}

#[test]
fn the_least_recently_used_model_makes_room() {
    let setup = Setup::new()
        .setting("memory_budget = \"2GiB\"")
        .setting("quantum = 0.1");
    let mut host = setup
        .model_with("a", &["memory=1000000000"], "memory = \"900MiB\"")
        .model_with("b", &["memory=1000000000"], "memory = \"900MiB\"")
        .model_with("c", &["memory=1000000000"], "memory = \"900MiB\"")
        .start();
    for (id, model) in [("1", "a"), ("2", "b"), ("3", "a")] {
        host.send(generate(id, model));
        host.end_of(id);
    }
    host.send(generate("4", "c"));
    host.end_of("4");
    assert!(host.entry("a").is_some() && host.entry("b").is_none() && host.entry("c").is_some());
}

#[test]
fn a_models_own_figure_replaces_a_low_estimate() {
    let mut host = Setup::new()
        .setting("memory_budget = \"2GiB\"")
        .model_with("a", &["memory=1200000000"], "memory = 1000")
        .model_with("b", &["memory=1200000000"], "memory = 1000")
        .start();
    host.send(generate("1", "a"));
    host.end_of("1");
    host.send(generate("2", "b"));
    host.end_of("2");
    let deadline = Instant::now() + PATIENCE;
    while host.entry("a").is_some() {
        assert!(Instant::now() < deadline, "both models stayed");
        std::thread::sleep(Duration::from_millis(10));
    }
    assert_eq!(host.entry("b").unwrap()["memory"], 1_200_000_000);
}

#[test]
fn a_model_larger_than_the_budget_is_refused_with_the_figures() {
    let setup = Setup::new().setting("memory_budget = \"1GiB\"");
    let mut host = setup
        .model_with("huge", &[], "memory = \"40GiB\"")
        .model("small", &[])
        .start();
    host.send(generate("1", "huge"));
    let error = host.end_of("1");
    assert_eq!(error["code"], "out_of_memory");
    let message = error["message"].as_str().unwrap();
    assert!(
        message.contains("40.0 GiB") && message.contains("1.0 GiB"),
        "{message}"
    );
    host.send(generate("2", "small"));
    assert_eq!(host.end_of("2")["type"], "done");
}

#[test]
fn the_runners_estimate_decides_before_anything_is_loaded() {
    let setup = Setup::new()
        .setting("memory_budget = \"1GiB\"")
        .model("alpha", &[]);
    fs::write(setup.path().join("alpha/estimate"), "5000000000").unwrap();
    let mut host = setup.start();
    host.send(generate("1", "alpha"));
    assert_eq!(host.end_of("1")["code"], "out_of_memory");
}

#[test]
fn two_models_that_do_not_fit_together_take_turns() {
    let setup = Setup::new()
        .setting("memory_budget = \"1GiB\"")
        .setting("quantum = 0.1");
    let mut host = setup
        .model_with("a", &["slow-token=2"], "memory = \"900MiB\"")
        .model_with("b", &["slow-token=2"], "memory = \"900MiB\"")
        .start();
    for n in 0..40 {
        host.send(generate(&format!("{n}"), if n % 2 == 0 { "a" } else { "b" }));
    }
    for n in 0..40 {
        assert_eq!(host.end_of(&format!("{n}"))["type"], "done");
    }
    let log = host.log.lock().unwrap().clone();
    let starts = log.matches("started process").count();
    println!("40 alternating requests took {starts} starts");
    assert!(starts < 40, "every request swapped the models");
}

#[test]
fn a_configured_name_and_its_path_are_one_process() {
    let setup = Setup::new().model("alpha", &[]);
    let path = setup.path().join("alpha").to_str().unwrap().to_owned();
    let mut host = setup.start();
    host.send(generate("1", "alpha"));
    host.end_of("1");
    host.send(generate("2", &path));
    assert_eq!(host.end_of("2")["model"], path.as_str());
    host.send(json!({"type": "list", "id": "l"}));
    assert_eq!(host.end_of("l")["models"].as_array().unwrap().len(), 1);
}

#[test]
fn the_end_of_stdin_cancels_what_runs_and_leaves_nothing_behind() {
    let mut host = Setup::new()
        .setting("window = 1")
        .model("alpha", &["slow-token=5"])
        .start();
    for id in ["1", "2"] {
        host.send(json!({"type": "generate", "id": id, "model": "alpha", "prompt": "x", "options": {"num_predict": 100000}}));
    }
    host.wait(|event| event["type"] == "token");
    let pid = host.pid_of("alpha");
    let (status, rest) = host.finish();
    assert_eq!(status.code(), Some(0));
    assert!(!is_alive(pid));
    let ends: Vec<_> = rest.iter().filter(|it| it["type"] == "done").collect();
    assert_eq!(ends.len(), 2);
    assert!(ends.iter().all(|it| it["done_reason"] == "cancelled"), "{ends:?}");
}

#[test]
fn sigterm_ends_in_order_and_a_second_one_at_once() {
    let mut host = Setup::new().model("alpha", &["slow-token=5"]).start();
    host.send(generate("1", "alpha"));
    host.end_of("1");
    let pid = host.pid_of("alpha");
    host.signal(libc::SIGTERM);
    assert_eq!(host.exit_status(PATIENCE).code(), Some(0));
    assert!(!is_alive(pid));

    let mut host = Setup::new().model("stubborn", &["ignore-term"]).start();
    host.send(generate("1", "stubborn"));
    host.end_of("1");
    let pid = host.pid_of("stubborn");
    host.signal(libc::SIGTERM);
    std::thread::sleep(Duration::from_millis(300));
    let second = Instant::now();
    host.signal(libc::SIGTERM);
    assert_eq!(host.exit_status(PATIENCE).code(), Some(128 + libc::SIGTERM));
    assert!(second.elapsed() < Duration::from_secs(2));
    eventually(Duration::from_secs(2), "the runner is gone", || !is_alive(pid));
}

#[test]
fn sigkill_of_the_scheduler_leaves_no_runner_behind() {
    // ollama #5642, #7927: an orphan keeps tens of gigabytes.
    let mut host = Setup::new()
        .model("alpha", &["slow-token=5"])
        .model("hung", &["hang=1"])
        .model("stubborn", &["ignore-term"])
        .start();
    for model in ["alpha", "hung", "stubborn"] {
        host.send(json!({"type": "generate", "id": model, "model": model, "prompt": "x", "options": {"num_predict": 100000}}));
        host.wait(|event| event["id"] == model && event["type"] == "token");
    }
    let pids = ["alpha", "hung", "stubborn"].map(|model| host.pid_of(model));
    host.signal(libc::SIGKILL);
    let killed = Instant::now();
    eventually(Duration::from_secs(2), "all runners are gone", || {
        pids.iter().all(|&pid| !is_alive(pid))
    });
    println!(
        "all runners gone {:?} after the scheduler was killed",
        killed.elapsed()
    );
}
