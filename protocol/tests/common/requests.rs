//! Samples of every request.

use std::time::Duration;

use lookahead_protocol::request::*;
use lookahead_protocol::{Request, SchedulerRequest};
use serde_json::{json, Value};

use super::id;

fn map(value: Value) -> serde_json::Map<String, Value> {
    match value {
        Value::Object(map) => map,
        other => panic!("{other} is no object"),
    }
}

fn generate(request: Generate) -> Request {
    Request::Generate(Box::new(request))
}

fn conversation() -> Vec<Message> {
    let call = json!([{"type": "function", "function": {"name": "time", "arguments": {}}}]);
    vec![
        Message::text("system", "Be brief."),
        Message {
            role: id("user"),
            content: Some(Content::Parts(vec![
                Part::Text {
                    text: id("What is on it?"),
                },
                Part::Image {
                    data: id("iVBORw0KGgo="),
                },
            ])),
            extra: serde_json::Map::new(),
        },
        Message {
            role: id("assistant"),
            content: None,
            extra: map(json!({"tool_calls": call, "reasoning_content": "hm"})),
        },
        Message {
            role: id("tool"),
            content: Some(Content::Text(id("12:00"))),
            extra: map(json!({"name": "time", "tool_call_id": "1"})),
        },
    ]
}

fn all_options() -> Options {
    Options {
        num_predict: Some(-1),
        num_ctx: Some(4096),
        temperature: Some(0.7),
        top_k: Some(0),
        top_p: Some(0.95),
        min_p: Some(0.05),
        repeat_penalty: Some(1.1),
        repeat_last_n: Some(-1),
        presence_penalty: Some(-0.5),
        frequency_penalty: Some(0.5),
        seed: Some(u64::MAX),
        stop: vec![id("\n\n"), id("END")],
        ignore_eos: Some(true),
    }
}

/// Name and sample of every request to a runner.
pub(crate) fn requests() -> Vec<(&'static str, Request)> {
    let tools = Some(vec![json!({"type": "function", "function": {"name": "time"}})]);
    let schema = map(json!({"type": "object", "properties": {"b": {}, "a": {}}}));
    vec![
        (
            "generate_minimal",
            generate(Generate::new("g1", Input::prompt("Hello"))),
        ),
        (
            "generate_prompt",
            generate(Generate {
                options: all_options(),
                draft: DraftOptions {
                    mode: DraftMode::Fixed { depth: 16 },
                    max_depth: Some(0),
                    verify: Some(Verify::Rejection),
                },
                format: Some(Format::Json),
                logprobs: Some(LogprobsRequest { top: 20 }),
                cache: false,
                progress: true,
                ..Generate::new(
                    "g2",
                    Input::Prompt {
                        prompt: id("<|image_pad|>"),
                        images: vec![id("aGk=")],
                    },
                )
            }),
        ),
        (
            "generate_messages",
            generate(Generate {
                draft: DraftOptions {
                    mode: DraftMode::Off,
                    max_depth: None,
                    verify: Some(Verify::Coupled),
                },
                format: Some(Format::Schema(schema)),
                logprobs: Some(LogprobsRequest { top: 0 }),
                ..Generate::new(
                    "g3",
                    Input::Messages {
                        messages: conversation(),
                        tools: tools.clone(),
                        think: Some(true),
                    },
                )
            }),
        ),
        (
            "generate_tokens",
            generate(Generate {
                draft: DraftOptions {
                    mode: DraftMode::Auto,
                    max_depth: Some(4),
                    verify: None,
                },
                format: Some(Format::Grammar(id("start: \"a\"+"))),
                ..Generate::new(
                    "g4",
                    Input::Tokens {
                        tokens: vec![0, u32::MAX],
                    },
                )
            }),
        ),
        (
            "generate_regex",
            generate(Generate {
                format: Some(Format::Regex(id("[0-9]+"))),
                ..Generate::new("g5", Input::prompt(""))
            }),
        ),
        (
            "cancel",
            Request::Cancel(Cancel {
                id: id("c1"),
                target: id("g1"),
            }),
        ),
        (
            "tokenize",
            Request::Tokenize(Tokenize {
                id: id("t1"),
                text: id("äöü"),
            }),
        ),
        (
            "detokenize",
            Request::Detokenize(Detokenize {
                id: id("t2"),
                tokens: vec![1, 2],
            }),
        ),
        (
            "render",
            Request::Render(Render {
                id: id("r1"),
                messages: conversation(),
                tools,
                think: Some(false),
            }),
        ),
        (
            "render_minimal",
            Request::Render(Render {
                id: id("r2"),
                messages: Vec::new(),
                tools: None,
                think: None,
            }),
        ),
        (
            "status",
            Request::Status(StatusRequest {
                id: id("s1"),
                model: None,
            }),
        ),
        (
            "cache",
            Request::Cache(CacheRequest {
                id: id("k1"),
                action: CacheAction::Clear,
                model: None,
            }),
        ),
        ("ping", Request::Ping(Ping { id: id("p1") })),
        ("shutdown", Request::Shutdown),
    ]
}

/// Name and sample of every request to the scheduler that a runner doesn't know.
pub(crate) fn scheduler_requests() -> Vec<(&'static str, SchedulerRequest)> {
    let model = Some(id("qwen"));
    let forward = |request, keep_alive| {
        SchedulerRequest::Forward(Forward {
            request,
            route: Route {
                model: model.clone(),
                keep_alive,
            },
        })
    };
    let half = KeepAlive::For(Duration::from_millis(500));
    vec![
        (
            "scheduler_generate",
            forward(
                generate(Generate::new("g1", Input::prompt("Hello"))),
                Some(KeepAlive::Forever),
            ),
        ),
        (
            "scheduler_tokenize",
            forward(
                Request::Tokenize(Tokenize {
                    id: id("t1"),
                    text: id("a"),
                }),
                Some(half),
            ),
        ),
        (
            "scheduler_detokenize",
            forward(
                Request::Detokenize(Detokenize {
                    id: id("t2"),
                    tokens: vec![],
                }),
                Some(KeepAlive::For(Duration::ZERO)),
            ),
        ),
        (
            "scheduler_render",
            forward(
                Request::Render(Render {
                    id: id("r1"),
                    messages: vec![Message::text("user", "Hi")],
                    tools: None,
                    think: None,
                }),
                None,
            ),
        ),
        (
            "scheduler_status",
            SchedulerRequest::Status(StatusRequest {
                id: id("s1"),
                model: model.clone(),
            }),
        ),
        (
            "scheduler_cache",
            SchedulerRequest::Cache(CacheRequest {
                id: id("k1"),
                action: CacheAction::Clear,
                model: model.clone(),
            }),
        ),
        (
            "load",
            SchedulerRequest::Load(LoadModel {
                id: id("l1"),
                model: id("qwen"),
                keep_alive: Some(DEFAULT_KEEP_ALIVE),
            }),
        ),
        (
            "unload",
            SchedulerRequest::Unload(UnloadModel {
                id: id("u1"),
                model: id("qwen"),
            }),
        ),
        ("list", SchedulerRequest::List(ListModels { id: id("m1") })),
    ]
}
