//! Whatever bytes arrive, nothing panics; whatever is valid, survives the way out and back.
#![expect(clippy::expect_used, reason = "a failure is the test's")]

mod common;

use std::io::Read;
use std::time::Duration;

use lookahead_protocol::request::*;
use lookahead_protocol::transcript::{Entry, Header, TranscriptReader, TranscriptWriter};
use lookahead_protocol::{Event, Line, LineReader, RawEvent, Request, SchedulerRequest, Tagged};
use proptest::collection::{btree_map, vec};
use proptest::option;
use proptest::prelude::*;
use serde_json::{Map, Value};

fn read_everything(line: &[u8]) {
    let _ = Request::parse(line);
    let _ = SchedulerRequest::parse(line);
    let _ = Event::parse(line);
    let _ = Tagged::parse(line);
    let _ = RawEvent::parse(line);
    if let Ok(reader) = TranscriptReader::new(line) {
        reader.for_each(drop);
    }
}

fn written<T: serde::Serialize>(samples: Vec<(&'static str, T)>) -> Vec<String> {
    samples
        .iter()
        .map(|(_, sample)| serde_json::to_string(sample).expect("a message is JSON"))
        .collect()
}

/// JSON without fractions, whose reading back may differ in the last bit.
fn json() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        ".{0,6}".prop_map(Value::from),
    ];
    leaf.prop_recursive(3, 16, 4, |inner| {
        prop_oneof![
            vec(inner.clone(), 0..4).prop_map(Value::from),
            btree_map(".{0,4}", inner, 0..4).prop_map(|map| Value::Object(map.into_iter().collect())),
        ]
    })
}

/// JSON that is nearly a message: the members and values that readers look for, in any place.
fn near_message() -> impl Strategy<Value = Value> {
    let word = prop::sample::select(vec![
        "type",
        "id",
        "generate",
        "prompt",
        "messages",
        "role",
        "content",
        "tool_calls",
        "text",
        "image",
        "data",
        "tokens",
        "options",
        "temperature",
        "seed",
        "stop",
        "draft",
        "mode",
        "fixed",
        "depth",
        "format",
        "json",
        "regex",
        "logprobs",
        "top_logprobs",
        "model",
        "keep_alive",
        "load",
        "done",
        "error",
        "code",
        "status",
        "format",
        "name",
        "lookahead-transcript",
        "major",
        "minor",
        "t",
        "dir",
        "in",
        "line",
        "base64",
        "too_long",
    ]);
    let leaf = prop_oneof![
        word.clone().prop_map(Value::from),
        json(),
        any::<f64>().prop_map(Value::from),
        (-2i64..20).prop_map(Value::from)
    ];
    leaf.prop_recursive(4, 32, 6, move |inner| {
        prop_oneof![
            vec(inner.clone(), 0..4).prop_map(Value::from),
            btree_map(word.clone(), inner, 0..6).prop_map(|map| {
                Value::Object(
                    map.into_iter()
                        .map(|(key, value)| (key.to_owned(), value))
                        .collect(),
                )
            }),
        ]
    })
}

fn id() -> impl Strategy<Value = String> {
    ".{1,32}".prop_filter("at most 128 bytes", |id| id.len() <= MAX_ID_BYTES)
}

fn object() -> impl Strategy<Value = Map<String, Value>> {
    btree_map("[a-z_]{1,6}", json(), 0..4).prop_map(|map| map.into_iter().collect())
}

fn message() -> impl Strategy<Value = Message> {
    let part = prop_oneof![
        ".*".prop_map(|text| Part::Text { text }),
        "[A-Za-z0-9+/]*".prop_map(|data| Part::Image { data })
    ];
    let content = prop_oneof![
        ".*".prop_map(Content::Text),
        vec(part, 0..4).prop_map(Content::Parts)
    ];
    let named = ["role", "content", "tool_calls"];
    (".{1,8}", content, object()).prop_map(move |(role, content, mut extra)| {
        named.iter().for_each(|name| drop(extra.remove(*name)));
        Message {
            role,
            content: Some(content),
            extra,
        }
    })
}

fn tools() -> impl Strategy<Value = Option<Vec<Value>>> {
    option::of(vec(json(), 0..3))
}

fn input() -> impl Strategy<Value = Input> {
    prop_oneof![
        (".*", vec("[a-z]*", 0..3)).prop_map(|(prompt, images)| Input::Prompt { prompt, images }),
        (vec(message(), 0..4), tools(), any::<Option<bool>>()).prop_map(|(messages, tools, think)| {
            Input::Messages {
                messages,
                tools,
                think,
            }
        }),
        vec(any::<u32>(), 0..20).prop_map(|tokens| Input::Tokens { tokens }),
    ]
}

fn options() -> impl Strategy<Value = Options> {
    let finite = || any::<f32>().prop_filter("finite", |number| number.is_finite());
    (
        (
            option::of(-1i64..),
            option::of(1u64..),
            option::of(0f32..1e6),
            any::<Option<u32>>(),
        ),
        (
            option::of(1e-6f32..=1.0),
            option::of(0f32..=1.0),
            option::of(1e-6f32..100.0),
            option::of(-1i64..),
        ),
        (option::of(finite()), option::of(finite()), any::<Option<u64>>()),
        (vec(".{1,5}", 0..=MAX_STOPS), any::<Option<bool>>()),
    )
        .prop_map(|(first, second, third, fourth)| Options {
            num_predict: first.0,
            num_ctx: first.1,
            temperature: first.2,
            top_k: first.3,
            top_p: second.0,
            min_p: second.1,
            repeat_penalty: second.2,
            repeat_last_n: second.3,
            presence_penalty: third.0,
            frequency_penalty: third.1,
            seed: third.2,
            stop: fourth.0,
            ignore_eos: fourth.1,
        })
}

fn draft() -> impl Strategy<Value = DraftOptions> {
    let mode = prop_oneof![
        Just(DraftMode::Auto),
        Just(DraftMode::Off),
        (1..=MAX_DRAFT_DEPTH).prop_map(|depth| DraftMode::Fixed { depth })
    ];
    let verify = prop_oneof![Just(Verify::Rejection), Just(Verify::Coupled)];
    (mode, option::of(0..=MAX_DRAFT_DEPTH), option::of(verify)).prop_map(|(mode, max_depth, verify)| {
        DraftOptions {
            mode,
            max_depth,
            verify,
        }
    })
}

fn format() -> impl Strategy<Value = Format> {
    prop_oneof![
        Just(Format::Json),
        ".*".prop_map(Format::Grammar),
        ".*".prop_map(Format::Regex),
        object().prop_map(|mut schema| {
            ["grammar", "regex"]
                .iter()
                .for_each(|name| drop(schema.remove(*name)));
            Format::Schema(schema)
        }),
    ]
}

fn generate() -> impl Strategy<Value = Request> {
    let logprobs = (0u8..=20).prop_map(|top| LogprobsRequest { top });
    (
        (id(), input(), options(), draft()),
        (
            option::of(format()),
            option::of(logprobs),
            any::<bool>(),
            any::<bool>(),
        ),
    )
        .prop_map(
            |((id, input, options, draft), (format, logprobs, cache, progress))| {
                Request::Generate(Box::new(Generate {
                    id,
                    input,
                    options,
                    draft,
                    format,
                    logprobs,
                    cache,
                    progress,
                }))
            },
        )
}

fn request() -> impl Strategy<Value = Request> {
    prop_oneof![
        4 => generate(),
        1 => (id(), ".*").prop_map(|(id, target)| Request::Cancel(Cancel { id, target })),
        1 => (id(), ".*").prop_map(|(id, text)| Request::Tokenize(Tokenize { id, text })),
        1 => (id(), vec(any::<u32>(), 0..9)).prop_map(|(id, tokens)| Request::Detokenize(Detokenize { id, tokens })),
        1 => (id(), vec(message(), 0..4), tools(), any::<Option<bool>>())
            .prop_map(|(id, messages, tools, think)| Request::Render(Render { id, messages, tools, think })),
        1 => id().prop_map(|id| Request::Status(StatusRequest { id, model: None })),
        1 => id().prop_map(|id| Request::Cache(CacheRequest { id, action: CacheAction::Clear, model: None })),
        1 => id().prop_map(|id| Request::Ping(Ping { id })),
        1 => Just(Request::Shutdown),
    ]
}

/// Yields its bytes in pieces of the given sizes, again and again.
struct Pieces<'a> {
    bytes: &'a [u8],
    sizes: std::iter::Cycle<std::slice::Iter<'a, usize>>,
}

impl Read for Pieces<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let size = self
            .sizes
            .next()
            .copied()
            .unwrap_or(1)
            .min(self.bytes.len())
            .min(buffer.len());
        let (piece, rest) = self.bytes.split_at(size);
        buffer[..size].copy_from_slice(piece);
        self.bytes = rest;
        Ok(size)
    }
}

/// What a reader must yield, said in one expression over the whole input.
fn expected_lines(bytes: &[u8], limit: usize) -> Vec<Line> {
    bytes
        .split(|&byte| byte == b'\n')
        .filter_map(|line| {
            let kept = line.strip_suffix(b"\r").unwrap_or(line);
            match std::str::from_utf8(kept) {
                _ if line.len() > limit => Some(Line::TooLong {
                    length: line.len() as u64,
                }),
                _ if kept.trim_ascii().is_empty() => None,
                Ok(text) => Some(Line::Text(text.to_owned())),
                Err(_) => Some(Line::NotUtf8(kept.to_vec())),
            }
        })
        .collect()
}

proptest! {
    #[test]
    fn any_bytes_are_read_without_a_panic(bytes in vec(any::<u8>(), 0..200)) {
        read_everything(&bytes);
    }

    #[test]
    fn anything_like_a_message_is_read_without_a_panic(value in near_message()) {
        read_everything(value.to_string().as_bytes());
    }

    #[test]
    fn a_damaged_message_is_read_without_a_panic(
        index in any::<prop::sample::Index>(),
        place in any::<prop::sample::Index>(),
        byte in any::<u8>(),
    ) {
        let mut lines = written(common::requests());
        lines.extend(written(common::scheduler_requests()));
        lines.extend(written(common::events()));
        lines.extend(written(common::scheduler_events()));
        let mut line = lines.swap_remove(index.index(lines.len())).into_bytes();
        let place = place.index(line.len());
        read_everything(&line[..place]);
        line[place] = byte;
        read_everything(&line);
    }

    #[test]
    fn a_valid_request_reads_back_as_it_was(request in request()) {
        let line = serde_json::to_string(&request).expect("a request is JSON");
        prop_assert_eq!(Request::parse(&line), Ok(request), "{}", line);
    }

    #[test]
    fn a_routed_request_reads_back_as_it_was(
        request in generate(),
        model in option::of(".{1,8}"),
        milliseconds in any::<Option<u32>>(),
    ) {
        let keep_alive = milliseconds.map(|ms| KeepAlive::For(Duration::from_millis(ms.into())));
        let request = SchedulerRequest::Forward(Forward { request, route: Route { model, keep_alive } });
        let line = serde_json::to_string(&request).expect("a request is JSON");
        prop_assert_eq!(SchedulerRequest::parse(&line), Ok(request), "{}", line);
    }

    #[test]
    fn an_unknown_member_is_refused_wherever_it_stands(request in request(), name in "[A-Z]{1,5}", value in json()) {
        let mut object = serde_json::to_value(&request).expect("a request is JSON");
        object[name.as_str()] = value;
        let error = Request::parse(object.to_string()).expect_err("the member is unknown");
        prop_assert_eq!(error.code.as_str(), "unknown_field");
        let named = error.message.contains(&format!("`{name}`"));
        prop_assert!(named, "{}", error.message);
        prop_assert_eq!(error.id.as_deref(), request.id());
    }

    #[test]
    fn lines_are_the_same_in_whatever_pieces_they_arrive(
        bytes in vec(prop_oneof![Just(b'\n'), Just(b'\r'), Just(b' '), Just(b'a'), Just(0xc3), Just(0xa4)], 0..60),
        sizes in vec(1usize..8, 1..5),
        limit in 0usize..12,
    ) {
        let pieces = Pieces { bytes: &bytes, sizes: sizes.iter().cycle() };
        let lines: Vec<_> = LineReader::new(pieces, limit).map(|line| line.expect("no error")).collect();
        prop_assert_eq!(lines, expected_lines(&bytes, limit));
    }

    #[test]
    fn what_is_recorded_is_sent_again_as_it_came(bytes in vec(any::<u8>(), 1..60)) {
        let header = Header::new("lookahead", "0");
        let mut writer = TranscriptWriter::new(Vec::new(), &header).expect("a vector doesn't fail");
        let lines: Vec<_> = LineReader::new(&bytes[..], 20).map(|line| line.expect("no error")).collect();
        for (t, line) in lines.iter().enumerate() {
            let dir = lookahead_protocol::transcript::Direction::In;
            writer.write(Entry { t: t as u64, dir, line: line.clone().into() }).expect("a vector doesn't fail");
        }
        let text = writer.into_inner();
        let mut sent = Vec::new();
        for entry in TranscriptReader::new(&text[..]).expect("it was just written") {
            entry.expect("it was just written").line.write_to(&mut sent).expect("a vector doesn't fail");
            sent.push(b'\n');
        }
        let again: Vec<_> = LineReader::new(&sent[..], 20).map(|line| line.expect("no error")).collect();
        prop_assert_eq!(again, lines);
    }
}
