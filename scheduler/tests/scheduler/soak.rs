//! Many requests over several models with little memory, random cancels and kills.

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde_json::json;

use crate::host::{eventually, example, is_final, kill, lookahead, marked, Host, Setup};
use crate::requests::resident_bytes;

fn descriptors(pid: u32) -> usize {
    std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count()
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

/// The same with real programs: the runner beside the scheduler (or `LOOKAHEAD_TEST_RUNNER`), two checkpoints in
/// `LOOKAHEAD_TEST_MODELS` (separated by a colon), and the two variables of the GGUF tests; `scripts/test-gguf` sets them.
#[test]
fn a_thousand_requests_to_real_programs_each_end_exactly_once() {
    let beside = lookahead().with_file_name("lookahead-runner");
    let runner = std::env::var_os("LOOKAHEAD_TEST_RUNNER").map_or(beside, PathBuf::from);
    let variables = [
        "LOOKAHEAD_TEST_MODELS",
        "LOOKAHEAD_TEST_LLAMA_SERVER",
        "LOOKAHEAD_TEST_GGUF",
    ];
    let values: Vec<String> = variables
        .iter()
        .filter_map(|name| std::env::var(name).ok())
        .collect();
    let [models, server, gguf] = values.as_slice() else {
        println!("skipped: set {}", variables.join(", "));
        return;
    };
    let (a, b) = models.split_once(':').unwrap();
    let host = Setup::new()
        .argument("--runner")
        .argument(runner.to_str().unwrap())
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
    let mark = host.mark();
    let mut random = 0x9e37_79b9_7f4a_7c15_u64;
    let mut next = move |below: u64| {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        random % below
    };
    let started = Instant::now();
    let mut ends: HashMap<String, usize> = HashMap::new();
    let mut kinds: BTreeMap<String, usize> = BTreeMap::new();
    let (mut sent, mut kills, mut most_processes) = (0_usize, 0, 0);
    // Descriptors and resident KiB after every 200 requests.
    let mut samples: Vec<(usize, u64)> = Vec::new();
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
        if ends.len() / 200 > samples.len() {
            samples.push((descriptors(pid), resident_bytes(pid) >> 10));
            most_processes = most_processes.max(marked(&mark).len());
        }
        let event = host.wait(|event| event["id"].as_str().is_some_and(|id| id.starts_with('r')));
        if is_final(&event) {
            *ends.entry(event["id"].as_str().unwrap().to_owned()).or_default() += 1;
            let kind = event["done_reason"].as_str().or(event["code"].as_str()).unwrap();
            *kinds.entry(kind.to_owned()).or_default() += 1;
        }
    }
    samples.push((descriptors(pid), resident_bytes(pid) >> 10));
    let took = started.elapsed();
    let (status, rest) = host.finish();
    eventually(Duration::from_secs(2), "nothing is left behind", || {
        marked(&mark).is_empty()
    });
    println!(
        "1000 requests and {kills} kills in {took:?}: {kinds:?}; (descriptors, resident KiB) after each 200: {samples:?}; at most \
         {most_processes} processes at once, none at the end"
    );
    assert_eq!(kills, 2);
    let (first, last) = (samples[0], samples[samples.len() - 1]);
    assert!(samples.iter().all(|&(_, kib)| kib < 50 << 10), "{samples:?}");
    assert!(last.1 < first.1 + (8 << 10), "memory grew: {samples:?}");
    assert!(last.0 <= first.0 + 16, "descriptors leak: {samples:?}");
    assert_eq!(status.code(), Some(0));
    for event in rest.iter().filter(|event| is_final(event)) {
        let id = event["id"].as_str().unwrap_or_default();
        if id.starts_with('r') {
            *ends.entry(id.to_owned()).or_default() += 1;
        }
    }
    assert_eq!((ends.len(), ends.values().max()), (1000, Some(&1)));
    // A killed process fails what it had; everything else ends well or as cancelled.
    let unexpected = |kind: &str| !matches!(kind, "stop" | "length" | "cancelled" | "runner_crashed");
    assert!(!kinds.keys().any(|kind| unexpected(kind)), "{kinds:?}");
}
