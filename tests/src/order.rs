//! The order rule: for one id `prompt`, `prefill`*, `token`*, then exactly one of `done` and `error`, and nothing after it.
//!
//! Invariant: the rule is written down here anew, not taken from the programs under test.

use std::collections::HashMap;

use serde_json::Value;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Stage {
    Sent,
    Prompt,
    Prefill,
    Token,
    Ended,
}

/// Checks the events of `generate` requests with these ids, each used once.
///
/// # Panics
/// An event is out of order, a request has no final event, or a count contradicts the events.
pub fn check(events: &[Value], ids: &[&str]) {
    let mut stages: HashMap<&str, Stage> = ids.iter().map(|&id| (id, Stage::Sent)).collect();
    for event in events {
        let Some(stage) = event["id"].as_str().and_then(|id| stages.get_mut(id)) else {
            continue;
        };
        if event["duplicate"] == true {
            continue;
        }
        let next = match event["type"].as_str() {
            Some("prompt") => Stage::Prompt,
            Some("prefill") => Stage::Prefill,
            Some("token") => Stage::Token,
            Some("done" | "error") => Stage::Ended,
            _ => panic!("no event of a generate request: {event}"),
        };
        let repeats = matches!(next, Stage::Prefill | Stage::Token) && *stage >= Stage::Prompt;
        let fits = if repeats { *stage <= next } else { *stage < next };
        assert!(fits, "after {stage:?} came {event}");
        *stage = next;
    }
    for (id, stage) in stages {
        assert_eq!(stage, Stage::Ended, "{id} has no final event");
    }
    for id in ids {
        counts(events, id);
    }
}

/// `eval_count` counts the ids delivered, prefill progress never runs backwards, and every text is whole characters, which
/// the JSON parser has checked by then.
fn counts(events: &[Value], id: &str) {
    let own: Vec<&Value> = events
        .iter()
        .filter(|e| e["id"] == *id && e["duplicate"] != true)
        .collect();
    let delivered: usize = own
        .iter()
        .filter(|e| e["type"] == "token")
        .filter_map(|e| e["tokens"].as_array().map(Vec::len))
        .sum();
    let mut done = 0;
    for prefill in own.iter().filter(|e| e["type"] == "prefill") {
        let now = prefill["done"].as_u64().unwrap_or_default();
        assert!(
            now > done && now <= prefill["total"].as_u64().unwrap_or_default(),
            "{prefill} after {done}"
        );
        done = now;
    }
    let Some(last) = own.last().filter(|e| e["type"] == "done") else {
        return;
    };
    assert_eq!(last["eval_count"], delivered, "{last}");
    let draft = &last["draft"];
    let number = |value: &Value| value.as_u64().unwrap_or(u64::MAX);
    let (proposed, tested, accepted) = (
        number(&draft["proposed"]),
        number(&draft["tested"]),
        number(&draft["accepted"]),
    );
    assert!(
        accepted <= tested && tested <= proposed && proposed < u64::MAX,
        "{draft}"
    );
    let rounds: u64 = draft["depth"]
        .as_object()
        .into_iter()
        .flatten()
        .map(|(_, n)| number(n))
        .sum();
    assert_eq!(number(&draft["rounds"]), rounds, "{draft}");
}
