//! Whether two sessions are the same, and where not.
//!
//! Invariant: what depends on the machine's speed or on chance between threads doesn't count: durations, process ids, memory,
//! grouping of events, order between requests, reports of progress, draft statistics, and how far a cancelled request got.
//! Everything else does, token by token.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value};

use super::progress::is_final;
use crate::outbox::Object;

/// Largest difference of log-probabilities that comes from the order of additions.
const LOGPROB_TOLERANCE: f64 = 0.02;

/// Differences of two sessions in words, none where they are the same.
pub(super) fn compare(recorded: &[Object], replayed: &[Object], cancelled: &BTreeSet<String>) -> Vec<String> {
    let (old, new) = (requests(recorded), requests(replayed));
    // What a cancelled request leaves in the prefix cache depends on how far it got.
    let cache_counts = cancelled.is_empty() && !old.values().chain(new.values()).any(Request::was_cancelled);
    let mut differences = Vec::new();
    let empty = Request::default();
    let keys: BTreeSet<&Option<String>> = old.keys().chain(new.keys()).collect();
    for key in keys {
        let whose = key
            .as_ref()
            .map_or("events without an id".to_owned(), |id| format!("request {id:?}"));
        let (old, new) = (old.get(key).unwrap_or(&empty), new.get(key).unwrap_or(&empty));
        let loose = old.was_cancelled()
            || new.was_cancelled()
            || key.as_ref().is_some_and(|id| cancelled.contains(id));
        differences.extend(
            old.differences(new, loose, cache_counts)
                .into_iter()
                .map(|it| format!("{whose}: {it}")),
        );
    }
    differences
}

/// What was seen of one id.
#[derive(Debug, Default)]
struct Request {
    text: String,
    ids: Vec<u64>,
    logprobs: Vec<Value>,
    /// Events other than tokens and progress.
    events: Vec<Object>,
}

fn requests(events: &[Object]) -> BTreeMap<Option<String>, Request> {
    let mut requests: BTreeMap<Option<String>, Request> = BTreeMap::new();
    for event in events {
        let id = event.get("id").and_then(Value::as_str).map(str::to_owned);
        let request = requests.entry(id).or_default();
        match event.get("type").and_then(Value::as_str) {
            Some("load" | "prefill") => {}
            Some("token") => {
                request
                    .text
                    .push_str(event.get("text").and_then(Value::as_str).unwrap_or_default());
                let list = |field: &str| {
                    event
                        .get(field)
                        .and_then(Value::as_array)
                        .cloned()
                        .unwrap_or_default()
                };
                request
                    .ids
                    .extend(list("tokens").iter().filter_map(Value::as_u64));
                request.logprobs.extend(list("logprobs"));
            }
            _ => request.events.push(event.clone()),
        }
    }
    // An id may be used again once it is free; all its uses are compared in their order.
    requests
}

impl Request {
    fn was_cancelled(&self) -> bool {
        self.events
            .iter()
            .any(|event| event.get("done_reason").and_then(Value::as_str) == Some("cancelled"))
    }

    fn differences(&self, other: &Request, loose: bool, cache_counts: bool) -> Vec<String> {
        let mut differences = Vec::new();
        if loose {
            let (short, long) = if self.text.len() <= other.text.len() {
                (self, other)
            } else {
                (other, self)
            };
            if !long.text.starts_with(&short.text) || !long.ids.starts_with(&short.ids) {
                differences.push(format!(
                    "text parted before it was cancelled: {}",
                    parting(&self.text, &other.text)
                ));
            }
        } else if self.text != other.text {
            differences.push(format!("text parted: {}", parting(&self.text, &other.text)));
        } else if self.ids != other.ids {
            let at = self
                .ids
                .iter()
                .zip(&other.ids)
                .take_while(|(one, two)| one == two)
                .count();
            differences.push(format!(
                "same text, other ids from position {at}: {:?} then, {:?} now",
                self.ids.get(at),
                other.ids.get(at)
            ));
        } else if let Some(at) = logprobs_part(&self.logprobs, &other.logprobs) {
            differences.push(format!(
                "logprobs parted at position {at}: {} then, {} now",
                shown(self.logprobs.get(at)),
                shown(other.logprobs.get(at))
            ));
        }
        let (old, new) = (
            self.normal(loose, cache_counts),
            other.normal(loose, cache_counts),
        );
        let longest = old.len().max(new.len());
        let first = (0..longest).find(|&at| old.get(at) != new.get(at));
        if let Some(at) = first {
            differences.push(format!(
                "event {}: {} then, {} now",
                at + 1,
                shown(old.get(at)),
                shown(new.get(at))
            ));
        }
        differences
    }

    fn normal(&self, loose: bool, cache_counts: bool) -> Vec<Value> {
        self.events
            .iter()
            .filter_map(|event| normal(event, loose, cache_counts))
            .collect()
    }
}

/// An event without what doesn't count; `None` for one that doesn't count at all.
fn normal(event: &Object, loose: bool, cache_counts: bool) -> Option<Value> {
    let kind = event.get("type").and_then(Value::as_str).unwrap_or_default();
    let keep = |fields: &[&str]| {
        let mut kept = Map::new();
        for field in fields.iter().copied().chain(["type", "id", "model"]) {
            if let Some(value) = event.get(field) {
                kept.insert(field.to_owned(), value.clone());
            }
        }
        Some(Value::Object(kept))
    };
    match kind {
        // How a cancelled request ended, and whether it got as far as its prompt, depends on who was quicker.
        "prompt" | "done" if loose => None,
        "prompt" if cache_counts => keep(&["tokens", "cached"]),
        "prompt" => keep(&["tokens"]),
        "done" if cache_counts => keep(&[
            "done_reason",
            "stop",
            "prompt_eval_count",
            "cached_count",
            "eval_count",
        ]),
        "done" => keep(&["done_reason", "stop", "prompt_eval_count", "eval_count"]),
        "hello" => keep(&["protocol", "program"]),
        "ready" => {
            let mut ready = event.clone();
            ready.shift_remove("memory");
            ready.shift_remove("load_duration");
            if let Some(Value::Object(model)) = ready.get_mut("model") {
                model.shift_remove("path");
            }
            Some(Value::Object(ready))
        }
        // A crash's message has the end of a log with times in it.
        "error"
            if matches!(
                event.get("code").and_then(Value::as_str),
                Some("runner_crashed" | "runner_stalled")
            ) =>
        {
            keep(&["code", "retryable"])
        }
        "error" => keep(&["code", "message", "retryable", "duplicate"]),
        "cancelled" => keep(&["target"]),
        "status" | "models" | "cache" | "loaded" | "unloaded" => keep(&[]),
        _ => Some(Value::Object(event.clone())),
    }
}

fn logprobs_part(old: &[Value], new: &[Value]) -> Option<usize> {
    let same = |old: &Value, new: &Value| {
        let logprob = |entry: &Value| entry.get("logprob").and_then(Value::as_f64).unwrap_or(f64::NAN);
        old.get("bytes") == new.get("bytes") && (logprob(old) - logprob(new)).abs() <= LOGPROB_TOLERANCE
    };
    let longest = old.len().max(new.len());
    (0..longest).find(|&at| {
        !old.get(at)
            .zip(new.get(at))
            .is_some_and(|(old, new)| same(old, new))
    })
}

fn shown(value: Option<&Value>) -> String {
    value.map_or("nothing".to_owned(), ToString::to_string)
}

/// Where two texts part, with a little of what is around it.
fn parting(old: &str, new: &str) -> String {
    let same = old
        .char_indices()
        .zip(new.chars())
        .find(|((_, one), two)| one != two);
    let at = same.map_or(old.len().min(new.len()), |((at, _), _)| at);
    let start = old[..at]
        .char_indices()
        .rev()
        .nth(20)
        .map_or(0, |(start, _)| start);
    let rest = |text: &str| {
        text.get(at..)
            .unwrap_or_default()
            .chars()
            .take(30)
            .collect::<String>()
    };
    format!(
        "after {:?}: {:?} then, {:?} now",
        &old[start..at],
        rest(old),
        rest(new)
    )
}

/// Ids of requests that never ended.
pub(super) fn unfinished(inputs: &[Object], events: &[Object]) -> BTreeSet<String> {
    let asked = inputs
        .iter()
        .filter_map(|input| input.get("id").and_then(Value::as_str));
    let ended: BTreeSet<&str> = events
        .iter()
        .filter(|event| is_final(event))
        .filter_map(|event| event.get("id")?.as_str())
        .collect();
    asked
        .filter(|id| !ended.contains(id))
        .map(str::to_owned)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn session(texts: &[&str], done: Value) -> Vec<Object> {
        let mut events = vec![
            json!({"type": "hello", "pid": texts.len(), "program": "p"}),
            json!({"type": "prompt", "id": "a", "tokens": 5, "cached": 0}),
        ];
        for text in texts {
            let ids: Vec<u32> = text.bytes().map(u32::from).collect();
            events.push(json!({"type": "token", "id": "a", "text": text, "tokens": ids}));
        }
        events.push(done);
        events
            .into_iter()
            .map(|event| event.as_object().unwrap().clone())
            .collect()
    }

    fn done(reason: &str, count: u64) -> Value {
        json!({"type": "done", "id": "a", "done_reason": reason, "stop": null, "eval_count": count, "eval_duration": count * 17,
            "draft": {"rounds": count}})
    }

    #[test]
    fn grouping_durations_and_process_ids_do_not_count() {
        let (one, two) = (
            session(&["ab", "c"], done("stop", 3)),
            session(&["a", "b", "c"], done("stop", 3)),
        );
        assert_eq!(compare(&one, &two, &BTreeSet::new()), Vec::<String>::new());
    }

    #[test]
    fn a_changed_token_is_shown_with_its_surroundings() {
        let (one, two) = (
            session(&["hello world"], done("stop", 11)),
            session(&["hello wurld"], done("stop", 11)),
        );
        let differences = compare(&one, &two, &BTreeSet::new());
        assert_eq!(differences.len(), 1);
        assert!(
            differences[0]
                .contains("request \"a\": text parted: after \"hello w\": \"orld\" then, \"urld\" now"),
            "{differences:?}"
        );
    }

    #[test]
    fn a_cancelled_request_may_get_further_but_not_elsewhere() {
        let then = session(&["abc"], done("cancelled", 3));
        assert!(compare(
            &then,
            &session(&["abcdef"], done("cancelled", 6)),
            &BTreeSet::new()
        )
        .is_empty());
        assert!(compare(&then, &session(&["a"], done("cancelled", 1)), &BTreeSet::new()).is_empty());
        assert!(!compare(&then, &session(&["abd"], done("cancelled", 3)), &BTreeSet::new()).is_empty());
    }

    #[test]
    fn another_ending_is_a_difference() {
        let differences = compare(
            &session(&["a"], done("stop", 1)),
            &session(&["a"], done("length", 1)),
            &BTreeSet::new(),
        );
        assert!(
            differences[0].contains("\"stop\"") && differences[0].contains("\"length\""),
            "{differences:?}"
        );
    }

    #[test]
    fn a_missing_request_is_a_difference() {
        assert!(!compare(&session(&["a"], done("stop", 1)), &[], &BTreeSet::new()).is_empty());
    }
}
