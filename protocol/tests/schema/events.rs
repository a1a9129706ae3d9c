//! The events, as the protocol's text declares them.

use std::collections::BTreeMap;

use serde::Deserialize;

use super::{Clear, Nullable};

#[derive(Deserialize)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
pub(super) enum Event {
    Hello {
        protocol: Version,
        program: String,
        version: String,
        pid: u32,
        backend: Option<String>,
    },
    Load {
        done: u64,
        total: u64,
        stage: String,
        model: Option<String>,
    },
    Ready {
        model: Model,
        draft: DraftInfo,
        memory: Memory,
        load_duration: u64,
    },
    Prompt {
        id: String,
        tokens: u64,
        cached: u64,
    },
    Prefill {
        id: String,
        done: u64,
        total: u64,
    },
    Token {
        id: String,
        text: String,
        tokens: Vec<u32>,
        logprobs: Option<Vec<Logprob>>,
        model: Option<String>,
    },
    Done {
        id: String,
        done_reason: Reason,
        stop: Nullable<String>,
        total_duration: u64,
        queue_duration: u64,
        prompt_eval_count: u64,
        cached_count: u64,
        prompt_eval_duration: u64,
        eval_count: u64,
        eval_duration: u64,
        draft: Stats,
    },
    Error {
        id: Nullable<String>,
        code: String,
        message: String,
        retryable: bool,
        duplicate: Option<bool>,
        model: Option<String>,
    },
    Tokenized {
        id: String,
        tokens: Vec<u32>,
    },
    Detokenized {
        id: String,
        text: String,
    },
    Rendered {
        id: String,
        prompt: String,
    },
    Cancelled {
        id: String,
        target: String,
        found: bool,
    },
    Pong {
        id: String,
    },
    Status {
        id: String,
        state: String,
        uptime: u64,
        running: Vec<Running>,
        waiting: u64,
        requests: Counts,
        memory: Option<MemoryNow>,
        cache: Option<Cache>,
        draft: Option<DraftNow>,
        models: Option<Vec<ModelEntry>>,
    },
    Cache {
        id: String,
        action: Clear,
        nodes: u64,
        bytes: u64,
    },
    Loaded {
        id: String,
        info: Option<Model>,
        draft: Option<DraftInfo>,
        memory: Option<Memory>,
        load_duration: u64,
        model: String,
    },
    Unloaded {
        id: String,
        found: bool,
        model: String,
    },
    Models {
        id: String,
        models: Vec<ModelEntry>,
    },
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Version {
    major: u32,
    minor: u32,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Model {
    path: String,
    architecture: String,
    parameters: u64,
    quantization: Nullable<String>,
    context_length: u64,
    vocab_size: u64,
    vision: bool,
    eos: Vec<u32>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct DraftInfo {
    active: bool,
    kind: Nullable<String>,
    reason: Nullable<String>,
    max_depth: u32,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Memory {
    weights: u64,
    limit: u64,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Logprob {
    token: String,
    bytes: Vec<u8>,
    logprob: f64,
    top: Vec<Top>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Top {
    token: String,
    bytes: Vec<u8>,
    logprob: f64,
}

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Reason {
    Stop,
    Length,
    Cancelled,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Stats {
    rounds: Option<u64>,
    proposed: u64,
    tested: Option<u64>,
    accepted: u64,
    by_position: Option<Vec<Position>>,
    depth: Option<BTreeMap<String, u64>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Position {
    tested: u64,
    accepted: u64,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Running {
    id: String,
    phase: String,
    prompt_tokens: u64,
    cached: u64,
    prefilled: u64,
    generated: u64,
    elapsed: u64,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Counts {
    completed: u64,
    cancelled: u64,
    failed: u64,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct MemoryNow {
    active: u64,
    peak: u64,
    cache: u64,
    limit: u64,
    weights: u64,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Cache {
    nodes: u64,
    restore_points: u64,
    device: Tier,
    host: Tier,
    disk: Disk,
    hits: u64,
    misses: u64,
    hit_tokens: u64,
    evictions: u64,
    demotions: u64,
    promotions: u64,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Tier {
    bytes: u64,
    limit: u64,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Disk {
    bytes: u64,
    limit: u64,
    files: u64,
    loads: u64,
    load_duration: u64,
    stores: u64,
    store_duration: u64,
    rejected: u64,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct DraftNow {
    active: bool,
    kind: Nullable<String>,
    reason: Nullable<String>,
    max_depth: u32,
    selected: Nullable<u32>,
    warning: Nullable<String>,
    rounds: u64,
    proposed: u64,
    tested: u64,
    accepted: u64,
    rates: Rates,
    by_position: Vec<Position>,
    depth: BTreeMap<String, u64>,
    acceptance: Vec<Estimate>,
    cost: Vec<Cost>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Rates {
    accepted_per_proposed: Nullable<f64>,
    accepted_per_tested: Nullable<f64>,
    tokens_per_round: Nullable<f64>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Estimate {
    sampling: String,
    position: u32,
    rate: f64,
    samples: u64,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Cost {
    context: u64,
    width: u32,
    duration: u64,
    samples: u64,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ModelEntry {
    model: String,
    state: String,
    pid: Nullable<u32>,
    memory: u64,
    requests: u64,
    idle_since: Nullable<u64>,
    draft: Nullable<DraftInfo>,
    reason: Nullable<String>,
}
