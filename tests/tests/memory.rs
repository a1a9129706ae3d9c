//! Memory over the life of a process (field reports 27 and 28).

use lookahead_tests::golden::{golden_of, long_prompt};
use lookahead_tests::process::Process;
use lookahead_tests::requests::{drafting, draftings, prompt, simple, tokens};
use serde_json::{json, Value};

fn memory(runner: &mut Process) -> Value {
    runner.ask(&simple("status", "s")).last()["memory"].clone()
}

#[test]
fn active_memory_is_flat_over_200_requests() {
    let mut runner = Process::runner(&["--cache-device", "0"]);
    runner.ready();
    let drafts = draftings();
    let mut after_20 = 0;
    for n in 0..200 {
        let sampling = if n % 3 == 0 { json!(1.0) } else { json!(0) };
        let more = json!({"options": {"temperature": sampling, "num_predict": 6, "ignore_eos": true}});
        let request = match n % 4 {
            0 => tokens("a", &golden_of("code").ids, more),
            1 => tokens("a", &long_prompt(100 + n), more),
            2 => prompt("a", &format!("Count from {n} to {}.", n + 10), more),
            _ => prompt("a", &"word ".repeat(n), more),
        };
        runner.ask(&drafting(request, &drafts[n % drafts.len()])).done();
        if n == 19 {
            after_20 = memory(&mut runner)["active"].as_u64().unwrap();
        }
    }
    let end = memory(&mut runner);
    let after_200 = end["active"].as_u64().unwrap();
    println!(
        "active memory after 20 requests {after_20}, after 200 {after_200}; peak {}",
        end["peak"]
    );
    assert!(
        after_200 <= after_20 + (256 << 10),
        "active memory grew from {after_20} to {after_200}"
    );
    assert!(after_200 < end["weights"].as_u64().unwrap() + (4 << 20), "{end}");
}

#[test]
fn a_long_generation_holds_its_context_and_no_graphs() {
    // Field report 28: memory grows with the speculation rounds.
    let mut runner = Process::runner(&["--cache-device", "0"]);
    runner.ready();
    for draft in [json!({"mode": "off"}), json!({"mode": "fixed", "depth": 2})] {
        let more = json!({"options": {"temperature": 0, "num_predict": 600, "ignore_eos": true}});
        runner
            .ask(&drafting(tokens("a", &golden_of("code").ids, more), &draft))
            .done();
    }
    let end = memory(&mut runner);
    let peak = end["peak"].as_u64().unwrap() - end["weights"].as_u64().unwrap();
    println!(
        "peak above the weights over two generations of 600 tokens: {} KiB",
        peak >> 10
    );
    // Two layers and a head of 2 heads by 64 by 4 bytes, keys and values: 3 KiB a token, with room for growth and one round.
    assert!(peak < 64 << 20, "{peak} bytes above the weights");
}
