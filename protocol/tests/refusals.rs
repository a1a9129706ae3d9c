//! What is refused, with which code, and that the message names the place. One line per rule of the wire format.

use lookahead_protocol::{ErrorCode, Line, Request, RequestError, SchedulerRequest};

/// Code and the words that the message must have.
type Refusal = (&'static str, &'static str);

fn refused(line: &str) -> RequestError {
    match Request::parse(line) {
        Ok(request) => panic!("{line} was accepted as {request:?}"),
        Err(error) => error,
    }
}

fn check(line: &str, (code, words): Refusal) {
    let error = refused(line);
    assert_eq!(error.code.as_str(), code, "{line}: {}", error.message);
    assert!(
        error.message.contains(words),
        "{line}: {words:?} is not in {:?}",
        error.message
    );
}

/// A `generate` with a prompt and these members besides.
fn generate(members: &str) -> String {
    format!(r#"{{"type":"generate","id":"g","prompt":"x",{members}}}"#)
}

const INVALID: &str = "invalid_request";
const UNKNOWN: &str = "unknown_field";

#[test]
fn lines_that_are_no_request_object() {
    for (line, refusal) in [
        ("", ("invalid_json", "EOF")),
        ("nonsense", ("invalid_json", "line is not JSON")),
        (r#"{"type":"ping","id":"p"} {}"#, ("invalid_json", "trailing")),
        (r#"{"type":"ping","id":"p""#, ("invalid_json", "EOF")),
        (
            r#"{"type":"ping","id":"\ud800"}"#,
            ("invalid_json", "line is not JSON"),
        ),
        (
            r#"{"type":"ping","id":"p","x":1e999}"#,
            ("invalid_json", "number out of range"),
        ),
        ("[1,2]", (INVALID, "not an object")),
        ("\"ping\"", (INVALID, "not an object")),
        ("null", (INVALID, "not an object")),
        ("{}", (INVALID, "`type` is missing")),
        (
            r#"{"type":7,"id":"p"}"#,
            (INVALID, "`type` must be a string, got 7"),
        ),
        (r#"{"type":"pong","id":"p"}"#, ("unknown_type", "\"pong\"")),
        (
            r#"{"type":"load","id":"p","model":"m"}"#,
            ("unknown_type", "\"load\""),
        ),
    ] {
        check(line, refusal);
    }
    assert_eq!(
        Request::parse(b"{\"type\":\"\xff\"}").unwrap_err().code,
        ErrorCode::InvalidJson
    );
    let deep = format!(
        r#"{{"type":"render","id":"r","messages":{}{}}}"#,
        "[".repeat(500),
        "]".repeat(500)
    );
    check(&deep, ("invalid_json", "recursion limit"));
}

#[test]
fn the_id_is_a_string_of_1_to_128_bytes() {
    let ping = |id: &str| format!(r#"{{"type":"ping","id":{id}}}"#);
    for id in [
        "7",
        "null",
        "\"\"",
        "[]",
        &format!("\"{}\"", "x".repeat(129)),
        &format!("\"{}\"", "ä".repeat(65)),
    ] {
        let error = refused(&ping(id));
        assert_eq!((error.id, error.code), (None, ErrorCode::InvalidRequest));
        assert!(
            error.message.contains("`id` must be a string of 1 to 128 bytes"),
            "{}",
            error.message
        );
    }
    check(r#"{"type":"ping"}"#, (INVALID, "`id` is missing"));
    assert!(Request::parse(ping(&format!("\"{}\"", "ä".repeat(64)))).is_ok());
}

#[test]
fn the_id_is_echoed_whatever_else_is_wrong() {
    for line in [
        r#"{"id":"a","type":"generate"}"#,
        r#"{"id":"a","type":"generate","prompt":1}"#,
        r#"{"id":"a","type":"generate","prompt":"x","y":1}"#,
        r#"{"id":"a","type":"no such"}"#,
        r#"{"id":"a","type":null}"#,
        r#"{"id":"a"}"#,
        r#"{"id":"a","type":"shutdown","now":true}"#,
    ] {
        assert_eq!(refused(line).id.as_deref(), Some("a"), "{line}");
    }
}

#[test]
fn unknown_fields_are_named_by_their_path_before_other_faults() {
    for (line, refusal) in [
        (generate(r#""tempratur":1"#), (UNKNOWN, "unknown field `tempratur`")),
        (generate(r#""options":{"tempratur":1,"top_k":-1}"#), (UNKNOWN, "`options.tempratur`")),
        (generate(r#""draft":{"deep":1}"#), (UNKNOWN, "`draft.deep`")),
        (generate(r#""format":{"regex":"a","flags":"i"}"#), (UNKNOWN, "`format.flags`")),
        (generate(r#""format":{"grammar":"a","type":"object"}"#), (UNKNOWN, "`format.type`")),
        (generate(r#""model":"m""#), (UNKNOWN, "`model`")),
        (generate(r#""keep_alive":1"#), (UNKNOWN, "`keep_alive`")),
        (r#"{"type":"generate","id":"g","prompts":"x"}"#.to_owned(), (UNKNOWN, "expected one of `type`, `id`, `prompt`")),
        (r#"{"type":"status","id":"s","model":"m"}"#.to_owned(), (UNKNOWN, "`model`")),
        (r#"{"type":"ping","id":"p","text":""}"#.to_owned(), (UNKNOWN, "`text`")),
        (r#"{"type":"shutdown","now":true}"#.to_owned(), (UNKNOWN, "`now`")),
        (
            r#"{"type":"render","id":"r","messages":[{"role":"user","content":[{"type":"text","text":"","x":1}]}]}"#
                .to_owned(),
            (UNKNOWN, "`messages[0].content[0].x`"),
        ),
    ] {
        check(&line, refusal);
    }
}

#[test]
fn generate_takes_exactly_one_input_and_what_belongs_to_it() {
    let line = |members: &str| format!(r#"{{"type":"generate","id":"g"{members}}}"#);
    for (members, words) in [
        ("", "one of the fields `prompt`, `messages`, `tokens` is required"),
        (r#","prompt":"x","tokens":[1]"#, "got `prompt` and `tokens`"),
        (
            r#","prompt":"x","messages":[],"tokens":[1]"#,
            "got `prompt` and `messages` and `tokens`",
        ),
        (r#","prompt":null"#, "`prompt` must be a string, got null"),
        (
            r#","prompt":"x","tools":[]"#,
            "`tools` is only allowed together with `messages`",
        ),
        (
            r#","tokens":[1],"think":true"#,
            "`think` is only allowed together with `messages`",
        ),
        (
            r#","messages":[],"images":[]"#,
            "`images` is only allowed together with `prompt`",
        ),
        (
            r#","tokens":[1],"images":[]"#,
            "`images` is only allowed together with `prompt`",
        ),
        (
            r#","prompt":"x","images":"aGk=""#,
            "`images` must be an array, got the string",
        ),
        (
            r#","prompt":"x","images":["a",2]"#,
            "`images[1]` must be a string, got 2",
        ),
        (r#","messages":[],"tools":{}"#, "`tools` must be an array"),
        (r#","messages":[],"think":"yes""#, "`think` must be a boolean"),
        (r#","tokens":[1,-1]"#, "`tokens[1]` must be a token id"),
        (r#","tokens":[4294967296]"#, "`tokens[0]`"),
        (r#","tokens":[1.0]"#, "`tokens[0]`"),
        (r#","tokens":"1""#, "`tokens` must be an array"),
    ] {
        check(&line(members), (INVALID, words));
    }
}

#[test]
fn messages_have_a_role_and_a_content_of_known_shape() {
    for (message, words) in [
        ("7", "`messages[0]` must be an object, got 7"),
        (r#"{"content":"x"}"#, "`messages[0].role` is missing"),
        (
            r#"{"role":1,"content":"x"}"#,
            "`messages[0].role` must be a non-empty string",
        ),
        (r#"{"role":"","content":"x"}"#, "`messages[0].role`"),
        (r#"{"role":"user"}"#, "`messages[0].content` is missing"),
        (
            r#"{"role":"user","content":null}"#,
            "`messages[0].content` must be a string or an array of parts, got null",
        ),
        (
            r#"{"role":"user","content":null,"tool_calls":null}"#,
            "`messages[0].content`",
        ),
        (r#"{"role":"user","content":{}}"#, "`messages[0].content`"),
        (
            r#"{"role":"user","content":["x"]}"#,
            "`messages[0].content[0]` must be an object",
        ),
        (
            r#"{"role":"user","content":[{"text":"x"}]}"#,
            "`messages[0].content[0].type` must be \"text\" or \"image\"",
        ),
        (
            r#"{"role":"user","content":[{"type":"audio"}]}"#,
            "`messages[0].content[0].type`",
        ),
        (
            r#"{"role":"user","content":[{"type":"text"}]}"#,
            "`messages[0].content[0].text` is missing",
        ),
        (
            r#"{"role":"user","content":[{"type":"image","data":1}]}"#,
            "`messages[0].content[0].data`",
        ),
    ] {
        check(
            &format!(r#"{{"type":"render","id":"r","messages":[{message}]}}"#),
            (INVALID, words),
        );
    }
}

#[test]
fn options_outside_their_range_are_refused_and_their_bounds_accepted() {
    for (name, bad, good) in [
        ("num_predict", "-2 1.5 true null", "-1 0 9223372036854775807"),
        ("num_ctx", "0 -1 1.0", "1 262144"),
        ("temperature", "-0.1 \"hot\" 1e39 null [1]", "0 2 1e-50 100"),
        ("top_k", "-1 0.5 4294967296", "0 4294967295"),
        ("top_p", "0 -1 1.01 1e-50", "1 0.0001"),
        ("min_p", "-0.01 1.01", "0 1"),
        ("repeat_penalty", "0 -1 1e39", "0.5 1"),
        ("repeat_last_n", "-2 0.5", "-1 0 64"),
        ("presence_penalty", "1e39 \"1\"", "-2 2 100"),
        ("frequency_penalty", "-1e39 {}", "-2 2 100"),
        (
            "seed",
            "1.5 \"7\" 18446744073709551616 -9223372036854775809",
            "-1 0 18446744073709551615",
        ),
        ("stop", "\"END\" [\"\"] [7] [[]]", "[] [\"END\"]"),
        ("ignore_eos", "1 \"no\"", "true false"),
    ] {
        for value in bad.split(' ') {
            let place = format!("field `options.{name}");
            let error = refused(&generate(&format!(r#""options":{{"{name}":{value}}}"#)));
            assert_eq!(error.code, ErrorCode::InvalidRequest, "{name} {value}");
            assert!(
                error.message.starts_with(&place),
                "{name} {value}: {}",
                error.message
            );
        }
        for value in good.split(' ') {
            let line = generate(&format!(r#""options":{{"{name}":{value}}}"#));
            assert!(
                Request::parse(&line).is_ok(),
                "{line}: {:?}",
                Request::parse(&line)
            );
        }
    }
}

#[test]
fn at_most_16_stop_strings() {
    let stops = |count| generate(&format!(r#""options":{{"stop":{:?}}}"#, vec!["x"; count]));
    assert!(Request::parse(stops(16)).is_ok());
    check(
        &stops(17),
        (INVALID, "`options.stop` must be at most 16 strings, got 17"),
    );
}

#[test]
fn a_draft_depth_belongs_to_mode_fixed() {
    for (draft, words) in [
        (r#"{"mode":"fixed"}"#, "`draft.depth` is missing"),
        (
            r#"{"mode":"fixed","depth":0}"#,
            "`draft.depth` must be an integer from 1 to 16, got 0",
        ),
        (r#"{"mode":"fixed","depth":17}"#, "`draft.depth`"),
        (
            r#"{"mode":"auto","depth":3}"#,
            "`draft.depth` belongs to mode \"fixed\"",
        ),
        (
            r#"{"mode":"off","depth":3}"#,
            "`draft.depth` belongs to mode \"fixed\"",
        ),
        (r#"{"depth":3}"#, "`draft.depth` belongs to mode \"fixed\""),
        (
            r#"{"mode":"fast","depth":3}"#,
            "`draft.mode` must be \"auto\", \"off\" or \"fixed\", got the string \"fast\"",
        ),
        (r#"{"mode":1}"#, "`draft.mode`"),
        (
            r#"{"max_depth":17}"#,
            "`draft.max_depth` must be an integer from 0 to 16",
        ),
        (r#"{"max_depth":-1}"#, "`draft.max_depth`"),
        (
            r#"{"verify":"greedy"}"#,
            "`draft.verify` must be \"rejection\" or \"coupled\"",
        ),
        ("[]", "`draft` must be an object"),
    ] {
        check(&generate(&format!(r#""draft":{draft}"#)), (INVALID, words));
    }
    for draft in [
        r#"{}"#,
        r#"{"mode":"fixed","depth":16,"max_depth":0}"#,
        r#"{"mode":"off","max_depth":16}"#,
    ] {
        assert!(
            Request::parse(generate(&format!(r#""draft":{draft}"#))).is_ok(),
            "{draft}"
        );
    }
}

#[test]
fn other_members_of_generate_have_their_type() {
    for (members, words) in [
        (
            r#""format":"yaml""#,
            "`format` must be null, \"json\", a JSON Schema object",
        ),
        (r#""format":true"#, "`format` must be"),
        (r#""format":{"regex":1}"#, "`format.regex` must be a string"),
        (
            r#""format":{"grammar":null}"#,
            "`format.grammar` must be a string",
        ),
        (r#""logprobs":1"#, "`logprobs` must be a boolean"),
        (
            r#""top_logprobs":21"#,
            "`top_logprobs` must be an integer from 0 to 20, got 21",
        ),
        (r#""top_logprobs":-1"#, "`top_logprobs`"),
        (
            r#""logprobs":false,"top_logprobs":1"#,
            "`top_logprobs` is 1 but `logprobs` is false",
        ),
        (r#""cache":"no""#, "`cache` must be a boolean"),
        (r#""progress":null"#, "`progress` must be a boolean, got null"),
        (r#""options":[]"#, "`options` must be an object, got an array"),
    ] {
        check(&generate(members), (INVALID, words));
    }
}

#[test]
fn the_other_requests_have_their_fields() {
    for (line, words) in [
        (r#"{"type":"cancel","id":"a"}"#, "`target` is missing"),
        (
            r#"{"type":"cancel","id":"a","target":1}"#,
            "`target` must be a string",
        ),
        (r#"{"type":"tokenize","id":"a"}"#, "`text` is missing"),
        (r#"{"type":"detokenize","id":"a","tokens":["1"]}"#, "`tokens[0]`"),
        (r#"{"type":"render","id":"a"}"#, "`messages` is missing"),
        (
            r#"{"type":"render","id":"a","messages":"hi"}"#,
            "`messages` must be an array",
        ),
        (r#"{"type":"cache","id":"a"}"#, "`action` is missing"),
        (
            r#"{"type":"cache","id":"a","action":"shrink"}"#,
            "`action` must be \"clear\", got the string \"shrink\"",
        ),
        (r#"{"type":"shutdown","id":7}"#, "`id` must be"),
    ] {
        check(line, (INVALID, words));
    }
    assert_eq!(
        Request::parse(r#"{"type":"shutdown","id":"s"}"#),
        Ok(Request::Shutdown)
    );
}

#[test]
fn the_scheduler_checks_the_route() {
    let generate = |members: &str| format!(r#"{{"type":"generate","id":"g","prompt":"x",{members}}}"#);
    for (line, code, words) in [
        (
            generate(r#""model":"""#),
            INVALID,
            "`model` must be a non-empty string, got an empty string",
        ),
        (generate(r#""model":1"#), INVALID, "`model`"),
        (
            generate(r#""keep_alive":-2"#),
            INVALID,
            "`keep_alive` must be a number of seconds, or -1 for ever, got -2",
        ),
        (generate(r#""keep_alive":"5m""#), INVALID, "`keep_alive`"),
        (generate(r#""keep_alive":1e300"#), INVALID, "`keep_alive`"),
        (generate(r#""keepalive":1"#), UNKNOWN, "`keepalive`"),
        (
            r#"{"type":"load","id":"l"}"#.to_owned(),
            INVALID,
            "`model` is missing",
        ),
        (
            r#"{"type":"unload","id":"l","model":"m","keep_alive":1}"#.to_owned(),
            UNKNOWN,
            "`keep_alive`",
        ),
        (
            r#"{"type":"ping","id":"l","model":"m"}"#.to_owned(),
            UNKNOWN,
            "`model`",
        ),
        (
            r#"{"type":"list","id":"l","model":"m"}"#.to_owned(),
            UNKNOWN,
            "`model`",
        ),
        (r#"{"type":"list"}"#.to_owned(), INVALID, "`id` is missing"),
        (
            r#"{"type":"reload","id":"l"}"#.to_owned(),
            "unknown_type",
            "\"reload\"",
        ),
    ] {
        let error = SchedulerRequest::parse(&line).unwrap_err();
        assert_eq!(error.code.as_str(), code, "{line}: {}", error.message);
        assert!(
            error.message.contains(words),
            "{line}: {words:?} is not in {:?}",
            error.message
        );
    }
}

#[test]
fn a_message_does_not_grow_with_what_was_sent() {
    let long = "x".repeat(1 << 20);
    for line in [
        format!(r#"{{"type":"{long}","id":"a"}}"#),
        format!(r#"{{"type":"ping","id":"{long}"}}"#),
        format!(r#"{{"type":"ping","id":"a","{long}":1}}"#),
        generate(&format!(r#""cache":"{long}""#)),
    ] {
        assert!(refused(&line).message.len() < 400);
    }
}

#[test]
fn a_line_that_was_discarded_or_is_not_utf8_has_its_answer() {
    let error = Request::from_line(&Line::TooLong { length: 12 }, 10).unwrap_err();
    assert_eq!(
        error.to_string(),
        "line_too_long: line of 12 bytes is longer than the limit of 10"
    );
    let error = SchedulerRequest::from_line(&Line::NotUtf8(b"ab\xff".to_vec()), 10).unwrap_err();
    assert_eq!(
        error.to_string(),
        "invalid_json: line is not UTF-8: invalid byte at offset 2"
    );
    let line = Line::Text(r#"{"type":"shutdown"}"#.to_owned());
    assert_eq!(Request::from_line(&line, 10), Ok(Request::Shutdown));
}
