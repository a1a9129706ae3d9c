//! The requests, as the protocol's text declares them.

use serde::Deserialize;
use serde_json::{Map, Value};

use super::Clear;

#[derive(Deserialize)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
pub(super) enum Request {
    Generate {
        id: String,
        prompt: Option<String>,
        messages: Option<Vec<Map<String, Value>>>,
        tokens: Option<Vec<u32>>,
        images: Option<Vec<String>>,
        tools: Option<Vec<Value>>,
        think: Option<bool>,
        options: Option<Options>,
        draft: Option<Draft>,
        format: Option<Format>,
        logprobs: Option<bool>,
        top_logprobs: Option<u8>,
        cache: Option<bool>,
        progress: Option<bool>,
        model: Option<String>,
        keep_alive: Option<f64>,
    },
    Cancel {
        id: String,
        target: String,
    },
    Tokenize {
        id: String,
        text: String,
        model: Option<String>,
        keep_alive: Option<f64>,
    },
    Detokenize {
        id: String,
        tokens: Vec<u32>,
        model: Option<String>,
        keep_alive: Option<f64>,
    },
    Render {
        id: String,
        messages: Vec<Map<String, Value>>,
        tools: Option<Vec<Value>>,
        think: Option<bool>,
        model: Option<String>,
        keep_alive: Option<f64>,
    },
    Status {
        id: String,
        model: Option<String>,
    },
    Cache {
        id: String,
        action: Clear,
        model: Option<String>,
    },
    Ping {
        id: String,
    },
    Shutdown {},
    Load {
        id: String,
        model: String,
        keep_alive: Option<f64>,
    },
    Unload {
        id: String,
        model: String,
    },
    List {
        id: String,
    },
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Options {
    num_predict: Option<i64>,
    num_ctx: Option<u64>,
    temperature: Option<f64>,
    top_k: Option<u64>,
    top_p: Option<f64>,
    min_p: Option<f64>,
    repeat_penalty: Option<f64>,
    repeat_last_n: Option<i64>,
    presence_penalty: Option<f64>,
    frequency_penalty: Option<f64>,
    seed: Option<serde_json::Number>,
    stop: Option<Vec<String>>,
    ignore_eos: Option<bool>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Draft {
    mode: Mode,
    depth: Option<u8>,
    max_depth: Option<u8>,
    verify: Option<VerifyRule>,
}

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Mode {
    Auto,
    Off,
    Fixed,
}

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum VerifyRule {
    Rejection,
    Coupled,
}

#[derive(Deserialize)]
#[serde(untagged)]
pub(super) enum Format {
    Json(String),
    Object(Map<String, Value>),
}
