//! What is accepted means what the protocol says, and events from a newer program are read.

use std::time::Duration;

use lookahead_protocol::event::{DraftStats, EventError, RawEvent, Token, TokenLogprob};
use lookahead_protocol::request::{Content, Format, Generate, Input, KeepAlive, LogprobsRequest, Verify};
use lookahead_protocol::{ErrorCode, Event, Request, SchedulerRequest, Tagged};

fn generate(members: &str) -> Generate {
    let line = format!(r#"{{"type":"generate","id":"g",{members}}}"#);
    match Request::parse(&line) {
        Ok(Request::Generate(request)) => *request,
        other => panic!("{line}: {other:?}"),
    }
}

#[test]
fn unset_members_have_the_documented_defaults() {
    let request = generate(r#""prompt":"""#);
    assert_eq!(request, Generate::new("g", Input::prompt("")));
    assert!(request.cache && !request.progress && request.logprobs.is_none() && request.format.is_none());
}

#[test]
fn verify_is_coupled_with_a_seed_and_rejection_without_unless_it_is_named() {
    for (members, verify) in [
        (r#""prompt":"x""#, Verify::Rejection),
        (r#""prompt":"x","options":{"seed":0}"#, Verify::Coupled),
        (
            r#""prompt":"x","options":{"seed":0},"draft":{"verify":"rejection"}"#,
            Verify::Rejection,
        ),
        (r#""prompt":"x","draft":{"verify":"coupled"}"#, Verify::Coupled),
    ] {
        assert_eq!(generate(members).verify(), verify, "{members}");
    }
}

#[test]
fn a_negative_seed_stands_for_its_bits() {
    assert_eq!(
        generate(r#""prompt":"x","options":{"seed":-1}"#).options.seed,
        Some(u64::MAX)
    );
}

#[test]
fn top_logprobs_alone_asks_for_logprobs() {
    let top = |members: &str| generate(&format!(r#""prompt":"x",{members}"#)).logprobs;
    assert_eq!(top(r#""top_logprobs":3"#), Some(LogprobsRequest { top: 3 }));
    assert_eq!(top(r#""logprobs":true"#), Some(LogprobsRequest { top: 0 }));
    assert_eq!(top(r#""logprobs":false,"top_logprobs":0"#), None);
    assert_eq!(top(r#""top_logprobs":0"#), None);
}

#[test]
fn every_shape_of_format_is_told_apart() {
    let format = |value: &str| generate(&format!(r#""prompt":"x","format":{value}"#)).format;
    assert_eq!(format("null"), None);
    assert_eq!(format("\"json\""), Some(Format::Json));
    assert_eq!(format(r#"{"regex":"a"}"#), Some(Format::Regex("a".to_owned())));
    assert_eq!(
        format(r#"{"grammar":"a"}"#),
        Some(Format::Grammar("a".to_owned()))
    );
    assert_eq!(format("{}"), Some(Format::Schema(serde_json::Map::new())));
}

#[test]
fn a_message_keeps_the_members_that_its_template_knows_in_their_order() {
    let line = r#"{"type":"render","id":"r","messages":[{"z":1,"role":"assistant","a":{"y":2,"b":3},"tool_calls":[{}],"k":null}]}"#;
    let Ok(Request::Render(render)) = Request::parse(line) else {
        panic!("{line}")
    };
    assert_eq!(render.messages[0].content, None);
    assert_eq!(
        serde_json::to_string(&render.messages[0]).unwrap(),
        r#"{"role":"assistant","content":null,"z":1,"a":{"y":2,"b":3},"tool_calls":[{}],"k":null}"#
    );
}

#[test]
fn images_of_a_message_are_found_in_order() {
    let line = r#"{"type":"render","id":"r","messages":[{"role":"user","content":[{"type":"image","data":"a"},{"type":"text","text":"t"},{"type":"image","data":"b"}]},{"role":"user","content":"c"}]}"#;
    let Ok(Request::Render(render)) = Request::parse(line) else {
        panic!("{line}")
    };
    let images: Vec<_> = render
        .messages
        .iter()
        .flat_map(|message| message.images())
        .collect();
    assert_eq!(images, ["a", "b"]);
    assert!(matches!(render.messages[1].content, Some(Content::Text(_))));
}

#[test]
fn keep_alive_is_seconds_or_for_ever() {
    let keep_alive = |value: &str| {
        let line = format!(r#"{{"type":"load","id":"l","model":"m","keep_alive":{value}}}"#);
        match SchedulerRequest::parse(&line) {
            Ok(SchedulerRequest::Load(load)) => load.keep_alive,
            other => panic!("{line}: {other:?}"),
        }
    };
    assert_eq!(keep_alive("-1"), Some(KeepAlive::Forever));
    assert_eq!(keep_alive("-1.0"), Some(KeepAlive::Forever));
    assert_eq!(keep_alive("0"), Some(KeepAlive::For(Duration::ZERO)));
    assert_eq!(
        keep_alive("1.5"),
        Some(KeepAlive::For(Duration::from_millis(1500)))
    );
}

#[test]
fn what_the_scheduler_forwards_is_a_request_that_a_runner_reads() {
    let line = r#"{"type":"generate","model":"m","id":"g","prompt":"x","keep_alive":5,"progress":true}"#;
    let Ok(SchedulerRequest::Forward(forward)) = SchedulerRequest::parse(line) else {
        panic!("{line}")
    };
    assert_eq!(forward.route.model.as_deref(), Some("m"));
    let forwarded = serde_json::to_string(&forward.request).unwrap();
    assert_eq!(Request::parse(&forwarded), Ok(forward.request), "{forwarded}");
}

#[test]
fn events_of_a_newer_program_are_read() {
    let event = Event::parse(r#"{"type":"pong","id":"p","load":0.5}"#).unwrap();
    assert_eq!((event.kind(), event.id()), ("pong", Some("p")));

    let line = r#"{"type":"mood","id":"p","swing":[1]}"#;
    let event = Event::parse(line).unwrap();
    assert!(matches!(event, Event::Unknown(_)) && !event.is_final());
    assert_eq!((event.kind(), event.id()), ("mood", Some("p")));
    assert_eq!(serde_json::to_string(&event).unwrap(), line);

    let line = r#"{"type":"error","id":null,"code":"too_hot","message":"m","retryable":true}"#;
    let event = Event::parse(line).unwrap();
    let Event::Error(failure) = &event else {
        panic!("{event:?}")
    };
    assert_eq!(failure.code, ErrorCode::Other("too_hot".to_owned()));
    assert!(failure.retryable && !failure.code.retryable());
    assert_eq!(serde_json::to_string(&event).unwrap(), line);
}

#[test]
fn a_line_that_is_no_event_says_why() {
    let error = |line: &str| Event::parse(line).unwrap_err();
    assert!(matches!(error("half a li"), EventError::NotJson(_)));
    assert!(matches!(error("[]"), EventError::NotAnObject));
    assert!(matches!(error(r#"{"id":"a"}"#), EventError::NoType));
    let malformed = error(r#"{"type":"prompt","id":"a","tokens":1}"#).to_string();
    assert_eq!(malformed, "bad prompt event: missing field `cached`");
}

#[test]
fn an_event_passed_on_keeps_what_is_unknown_and_gets_its_model() {
    let mut raw = RawEvent::parse(r#"{"type":"pong","id":"p","new":{"b":1,"a":2}}"#).unwrap();
    raw.set_model("qwen");
    let line = serde_json::to_string(&raw).unwrap();
    assert_eq!(
        line,
        r#"{"type":"pong","id":"p","new":{"b":1,"a":2},"model":"qwen"}"#
    );
    assert_eq!(Tagged::parse(&line).unwrap().model.as_deref(), Some("qwen"));
}

#[test]
fn the_model_of_ready_is_its_description_and_never_overwritten() {
    let line = r#"{"type":"ready","model":{"path":"p","architecture":"a","parameters":1,"quantization":null,"context_length":2,"vocab_size":3,"vision":false,"eos":[]},"draft":{"active":false,"kind":null,"reason":"r","max_depth":0},"memory":{"weights":4,"limit":5},"load_duration":6}"#;
    let mut raw = RawEvent::parse(line).unwrap();
    raw.set_model("qwen");
    assert_eq!(serde_json::to_string(&raw).unwrap(), line);
    let mut tagged = raw.decode().unwrap();
    assert_eq!(tagged.model, None);
    tagged.model = Some("qwen".to_owned());
    assert_eq!(serde_json::to_string(&tagged).unwrap(), line);
}

#[test]
fn an_error_ends_its_request_unless_the_id_was_a_duplicate() {
    let is_final = |line: &str| Event::parse(line).unwrap().is_final();
    let error = |id: &str, more: &str| {
        is_final(&format!(
            r#"{{"type":"error","id":{id},"code":"x","message":"m","retryable":false{more}}}"#
        ))
    };
    assert!(error("\"a\"", ""));
    assert!(!error("\"a\"", r#","duplicate":true"#));
    assert!(!error("null", ""));
}

#[test]
fn a_request_error_becomes_the_event_that_answers_it() {
    let error = Request::parse(r#"{"type":"ping","id":"p","x":1}"#).unwrap_err();
    let event = serde_json::to_value(Event::from(error)).unwrap();
    assert_eq!(
        (event["type"].as_str(), event["id"].as_str()),
        (Some("error"), Some("p"))
    );
    assert_eq!(
        (event["code"].as_str(), event["retryable"].as_bool()),
        (Some("unknown_field"), Some(false))
    );
}

#[test]
fn merged_token_events_say_what_the_single_ones_said() {
    let logprob = |token: &str| TokenLogprob {
        token: token.to_owned(),
        bytes: token.as_bytes().to_vec(),
        logprob: -1.0,
        top: Vec::new(),
    };
    let token = |text: &str, id, logprobs| Token {
        id: "g".to_owned(),
        text: text.to_owned(),
        tokens: vec![id],
        logprobs,
    };
    let mut first = token("a", 1, Some(vec![logprob("a")]));
    first.merge(token("b", 2, Some(vec![logprob("b")])));
    let expected = Token {
        tokens: vec![1, 2],
        ..token("ab", 0, Some(vec![logprob("a"), logprob("b")]))
    };
    assert_eq!(first, expected);
    first.merge(token("c", 3, None));
    assert_eq!(first.logprobs, None);
}

#[test]
fn the_three_rates_have_their_own_meaning() {
    // Two rounds drafting three tokens each, one of them refused at its second position, and one round without a draft.
    let stats = DraftStats {
        rounds: Some(3),
        proposed: 6,
        tested: Some(5),
        accepted: 4,
        ..DraftStats::none()
    };
    assert_eq!(stats.accepted_per_proposed(), Some(4.0 / 6.0));
    assert_eq!(stats.accepted_per_tested(), Some(4.0 / 5.0));
    assert_eq!(stats.tokens_per_round(), Some(7.0 / 3.0));
    let none = DraftStats::none();
    assert_eq!(
        (
            none.accepted_per_proposed(),
            none.accepted_per_tested(),
            none.tokens_per_round()
        ),
        (None, None, None)
    );
    let unknown = DraftStats {
        proposed: 8,
        accepted: 7,
        ..DraftStats::default()
    };
    assert_eq!(
        (unknown.accepted_per_tested(), unknown.tokens_per_round()),
        (None, None)
    );
}
