//! How far a session has come, request by request.
//!
//! Invariant: what is counted doesn't depend on how tokens were grouped into events, so that "after this event" means the same
//! moment in a recording and in its replay.

use std::collections::BTreeMap;

use serde_json::Value;

use crate::outbox::Object;

/// What has been seen of one id, or of the events without one.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Seen {
    /// Bytes of text.
    text: usize,
    /// Ids delivered.
    ids: usize,
    /// Events by kind, those aside that report mere progress.
    kinds: BTreeMap<String, usize>,
    /// Its final event is among them.
    ended: bool,
}

/// What has been seen of a session.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Progress {
    by_id: BTreeMap<Option<String>, Seen>,
}

impl Progress {
    /// Counts an event.
    pub(super) fn count(&mut self, event: &Object) {
        let kind = event.get("type").and_then(Value::as_str).unwrap_or_default();
        let id = event.get("id").and_then(Value::as_str).map(str::to_owned);
        let seen = self.by_id.entry(id).or_default();
        match kind {
            "load" | "prefill" => {}
            "token" => {
                seen.text += event.get("text").and_then(Value::as_str).map_or(0, str::len);
                seen.ids += event.get("tokens").and_then(Value::as_array).map_or(0, Vec::len);
            }
            kind => {
                seen.ended |= is_final(event);
                *seen.kinds.entry(kind.to_owned()).or_default() += 1;
            }
        }
    }

    /// What is still missing to be as far as `goal`, in words. A request that has ended can't come further and lacks nothing.
    pub(super) fn lacks(&self, goal: &Progress) -> Option<String> {
        let nothing = Seen::default();
        goal.by_id.iter().find_map(|(id, wanted)| {
            let seen = self.by_id.get(id).unwrap_or(&nothing);
            if seen.ended || seen.reaches(wanted) {
                return None;
            }
            let whose = id
                .as_ref()
                .map_or("the program itself".to_owned(), |id| format!("request {id:?}"));
            let kinds: Vec<&str> = wanted.kinds.keys().map(String::as_str).collect();
            Some(format!(
                "{whose}: {} bytes of text and the events {}",
                wanted.text,
                kinds.join(", ")
            ))
        })
    }
}

impl Seen {
    fn reaches(&self, wanted: &Seen) -> bool {
        let enough =
            |(kind, count): (&String, &usize)| self.kinds.get(kind).is_some_and(|seen| seen >= count);
        self.text >= wanted.text && self.ids >= wanted.ids && wanted.kinds.iter().all(enough)
    }
}

/// Whether a request's id is free again after this event.
pub(super) fn is_final(event: &Object) -> bool {
    match event.get("type").and_then(Value::as_str) {
        Some("hello" | "load" | "ready" | "prompt" | "prefill" | "token") | None => false,
        Some("error") => {
            event.get("id").is_some_and(Value::is_string)
                && event.get("duplicate").and_then(Value::as_bool) != Some(true)
        }
        Some(_) => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn progress(events: &[Value]) -> Progress {
        let mut progress = Progress::default();
        for event in events {
            progress.count(event.as_object().unwrap());
        }
        progress
    }

    fn token(id: &str, text: &str, ids: &[u32]) -> Value {
        json!({"type": "token", "id": id, "text": text, "tokens": ids})
    }

    #[test]
    fn grouping_of_tokens_and_reports_of_progress_make_no_difference() {
        let one = progress(&[
            token("a", "ab", &[1, 2]),
            json!({"type": "prefill", "id": "a", "done": 1, "total": 2}),
        ]);
        let two = progress(&[token("a", "a", &[1]), token("a", "b", &[2])]);
        assert_eq!(one, two);
    }

    #[test]
    fn a_session_that_is_behind_says_what_it_lacks() {
        let goal = progress(&[
            token("a", "ab", &[1, 2]),
            json!({"type": "error", "id": null, "code": "invalid_json"}),
        ]);
        assert!(progress(&[]).lacks(&goal).unwrap().contains("the program itself"));
        let behind = progress(&[token("a", "a", &[1]), json!({"type": "error", "id": null})]);
        assert!(behind.lacks(&goal).unwrap().contains("\"a\""));
        assert_eq!(goal.lacks(&goal), None);
        let ended = progress(&[
            json!({"type": "done", "id": "a"}),
            json!({"type": "error", "id": null}),
        ]);
        assert_eq!(ended.lacks(&goal), None);
    }
}
