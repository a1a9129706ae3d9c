//! Many requests over several models with little memory, random cancels and kills.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use serde_json::json;

use crate::host::{example, is_final, kill, Host, Setup};
use crate::requests::resident_bytes;

fn descriptors(pid: u32) -> usize {
    std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count()
}

fn children(pid: u32) -> usize {
    let text = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
    let mut count = text.split_whitespace().count();
    for task in std::fs::read_dir(format!("/proc/{pid}/task")).unwrap().flatten() {
        if task.file_name().to_string_lossy() != pid.to_string() {
            let text = std::fs::read_to_string(task.path().join("children")).unwrap_or_default();
            count += text.split_whitespace().count();
        }
    }
    count
}

#[test]
fn a_thousand_requests_with_cancels_and_kills_each_end_exactly_once() {
    let setup = Setup::new()
        .setting("memory_budget = \"2GiB\"")
        .setting("quantum = 0.2")
        .setting("queue_limit = 2000");
    crate::gguf::write_model(&setup.path().join("c.gguf"), &["slow-token=1"]);
    let host = setup
        .setting(&format!(
            "llama_server = {:?}",
            example("fake-llama-server").to_str().unwrap()
        ))
        .model_with("a", &["slow-token=1"], "memory = \"900MiB\"")
        .model_with("b", &["slow-token=1"], "memory = \"900MiB\"")
        .setting("[models.c]\npath = \"c.gguf\"\nmemory = \"900MiB\"")
        .start();
    soak(host);
}

/// The same with real programs: `LOOKAHEAD_TEST_RUNNER`, two models in `LOOKAHEAD_TEST_MODELS` (separated by a colon), and
/// the two variables of the GGUF tests.
#[test]
fn a_thousand_requests_to_real_programs_each_end_exactly_once() {
    let variables = [
        "LOOKAHEAD_TEST_RUNNER",
        "LOOKAHEAD_TEST_MODELS",
        "LOOKAHEAD_TEST_LLAMA_SERVER",
        "LOOKAHEAD_TEST_GGUF",
    ];
    let values: Vec<String> = variables
        .iter()
        .filter_map(|name| std::env::var(name).ok())
        .collect();
    let [runner, models, server, gguf] = values.as_slice() else {
        println!("skipped: set {}", variables.join(", "));
        return;
    };
    let (a, b) = models.split_once(':').unwrap();
    let host = Setup::new()
        .argument("--runner")
        .argument(runner)
        .setting("memory_budget = \"2GiB\"")
        .setting("queue_limit = 2000")
        .setting(&format!("llama_server = {server:?}"))
        .setting(&format!("[models.a]\npath = {a:?}\nmemory = \"900MiB\""))
        .setting(&format!("[models.b]\npath = {b:?}\nmemory = \"900MiB\""))
        .setting(&format!("[models.c]\npath = {gguf:?}\nmemory = \"900MiB\"\nargs = [\"--threads\", \"1\", \"--context\", \"4096\"]"))
        .start();
    soak(host);
}

fn soak(mut host: Host) {
    let pid = host.child.id();
    let mut random = 0x9e37_79b9_7f4a_7c15_u64;
    let mut next = move |below: u64| {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        random % below
    };
    let started = Instant::now();
    let mut ends: HashMap<String, usize> = HashMap::new();
    let mut sent = 0_usize;
    let mut kills = 0;
    let (mut descriptors_then, mut memory_then) = (0, 0);
    while ends.len() < 1000 {
        while sent < 1000 && sent - ends.len() < 60 {
            let model = ["a", "b", "c"][next(3) as usize];
            let id = format!("r{sent}");
            host.send(
                json!({"type": "generate", "id": id, "model": model, "prompt": "x",
                "options": {"num_predict": next(8)}}),
            );
            if next(4) == 0 {
                let target = format!("r{}", sent.saturating_sub(next(20) as usize));
                host.send(json!({"type": "cancel", "id": format!("c{sent}"), "target": target}));
            }
            sent += 1;
        }
        if kills < 2 && ends.len() > 300 * (kills + 1) {
            let victim = ["a", "b", "c"]
                .iter()
                .find_map(|model| host.entry(model)?["pid"].as_i64());
            if let Some(victim) = victim {
                kill(victim as i32, libc::SIGKILL);
                kills += 1;
            }
        }
        if ends.len() > 200 && descriptors_then == 0 {
            (descriptors_then, memory_then) = (descriptors(pid), resident_bytes(pid));
        }
        let event = host.wait(|event| event["id"].as_str().is_some_and(|id| id.starts_with('r')));
        if is_final(&event) {
            *ends.entry(event["id"].as_str().unwrap().to_owned()).or_default() += 1;
        }
    }
    let (descriptors_now, memory_now) = (descriptors(pid), resident_bytes(pid));
    println!(
        "1000 requests, {kills} kills in {:?}; descriptors {descriptors_then} then {descriptors_now}, resident memory {} then \
         {} KiB, children {}",
        started.elapsed(),
        memory_then >> 10,
        memory_now >> 10,
        children(pid),
    );
    assert_eq!(kills, 2);
    assert!(memory_now < 50 << 20, "{memory_now}");
    assert!(
        memory_now < memory_then + (8 << 20),
        "{memory_then} grew to {memory_now}"
    );
    assert!(
        descriptors_now <= descriptors_then + 16,
        "{descriptors_then} grew to {descriptors_now}"
    );
    assert!(children(pid) <= 3);
    std::thread::sleep(Duration::from_millis(100));
    let (status, rest) = host.finish();
    assert_eq!(status.code(), Some(0));
    for event in rest
        .iter()
        .filter(|event| event["id"].as_str().is_some_and(|id| id.starts_with('r')))
    {
        if is_final(event) {
            *ends.entry(event["id"].as_str().unwrap().to_owned()).or_default() += 1;
        }
    }
    assert!(ends.values().all(|&count| count == 1));
}
