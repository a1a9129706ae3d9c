//! The wire format declared a second time, independently of the crate's types and from the protocol's text alone: what
//! the crate writes has every member declared here, no other, and of this type.
#![expect(dead_code, reason = "the members are there to be read")]
#![expect(
    clippy::large_enum_variant,
    reason = "a declaration mirrors the JSON and is read one at a time"
)]
#![expect(clippy::unwrap_used, reason = "a failure is the test's")]

#[path = "../common/mod.rs"]
mod common;
mod events;
mod requests;

use std::collections::BTreeSet;

use serde::Deserialize;
use serde_json::Value;

use events::Event;
use requests::Request;

/// A member that must be there and may be null.
#[derive(Deserialize)]
#[serde(untagged)]
enum Nullable<T> {
    Value(T),
    Null(()),
}

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum Clear {
    Clear,
}

fn kinds(lines: &[String]) -> BTreeSet<String> {
    let kind = |line: &String| {
        serde_json::from_str::<Value>(line).unwrap()["type"]
            .as_str()
            .unwrap()
            .to_owned()
    };
    lines.iter().map(kind).collect()
}

fn lines<T: serde::Serialize>(samples: Vec<(&'static str, T)>) -> impl Iterator<Item = String> {
    samples
        .into_iter()
        .map(|(_, sample)| serde_json::to_string(&sample).unwrap())
}

#[test]
fn requests_have_exactly_the_declared_members() {
    let lines: Vec<_> = lines(common::requests())
        .chain(lines(common::scheduler_requests()))
        .collect();
    for line in &lines {
        serde_json::from_str::<Request>(line).unwrap_or_else(|error| panic!("{line}: {error}"));
    }
    let expected = "cache cancel detokenize generate list load ping render shutdown status tokenize unload";
    assert_eq!(kinds(&lines).into_iter().collect::<Vec<_>>().join(" "), expected);
}

#[test]
fn events_have_exactly_the_declared_members() {
    let lines: Vec<_> = lines(common::events())
        .chain(lines(common::scheduler_events()))
        .collect();
    for line in &lines {
        serde_json::from_str::<Event>(line).unwrap_or_else(|error| panic!("{line}: {error}"));
    }
    let expected =
        "cache cancelled detokenized done error hello load loaded models pong prefill prompt ready \
        rendered status token tokenized unloaded";
    assert_eq!(kinds(&lines).into_iter().collect::<Vec<_>>().join(" "), expected);
}

#[test]
fn the_error_codes_are_those_of_the_protocol_and_so_is_what_may_be_retried() {
    use lookahead_protocol::ErrorCode;
    let codes =
        "invalid_json invalid_request unknown_type unknown_field line_too_long duplicate_id empty_prompt \
        context_exceeded unsupported bad_image bad_format nan_logits out_of_memory queue_full internal \
        model_not_found model_invalid architecture_unsupported runner_crashed runner_stalled no_model";
    let retryable = ["out_of_memory", "queue_full", "runner_crashed", "runner_stalled"];
    assert_eq!(
        ErrorCode::KNOWN
            .iter()
            .map(ErrorCode::as_str)
            .collect::<Vec<_>>()
            .join(" "),
        codes
    );
    for code in ErrorCode::KNOWN {
        assert_eq!(code.retryable(), retryable.contains(&code.as_str()), "{code}");
        assert_eq!(ErrorCode::from(code.as_str()), *code);
    }
}
