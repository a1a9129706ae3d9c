//! Samples of every event.

use std::collections::BTreeMap;

use lookahead_protocol::event::*;
use lookahead_protocol::request::CacheAction;
use lookahead_protocol::{ErrorCode, Event, Tagged};

use super::id;

fn draft_info() -> DraftInfo {
    DraftInfo {
        active: true,
        kind: Some(id("mtp")),
        reason: None,
        max_depth: 16,
    }
}

fn model_info() -> ModelInfo {
    ModelInfo {
        path: id("models/qwen"),
        architecture: id("Qwen3_5ForConditionalGeneration"),
        parameters: 4_000_000_000,
        quantization: Some(id("4bit")),
        context_length: 262_144,
        vocab_size: 248_320,
        vision: true,
        eos: vec![248_044, 248_046],
    }
}

fn memory_info() -> MemoryInfo {
    MemoryInfo {
        weights: 2_500_000_000,
        limit: 17_179_869_184,
    }
}

fn draft_stats() -> DraftStats {
    DraftStats {
        rounds: Some(10),
        proposed: 24,
        tested: Some(20),
        accepted: 15,
        by_position: Some(vec![
            PositionStats {
                tested: 8,
                accepted: 8,
            },
            PositionStats {
                tested: 8,
                accepted: 5,
            },
            PositionStats {
                tested: 4,
                accepted: 2,
            },
        ]),
        depth: Some(BTreeMap::from([(0, 2), (3, 7), (10, 1)])),
    }
}

fn done(draft: DraftStats) -> Done {
    Done {
        id: id("g1"),
        done_reason: DoneReason::Length,
        stop: None,
        total_duration: 1_000_000_000,
        queue_duration: 1_000,
        prompt_eval_count: 20,
        cached_count: 16,
        prompt_eval_duration: 200_000_000,
        eval_count: 25,
        eval_duration: 799_999_000,
        draft,
    }
}

fn full_status() -> Status {
    let mut draft = DraftStatus::new(draft_info(), &draft_stats());
    draft.selected = Some(3);
    draft.warning = Some(id("the draft head is right in 1 of 64 drafts"));
    let sampling = SamplingKind::Greedy;
    draft.acceptance = vec![AcceptanceEstimate {
        sampling,
        position: 1,
        rate: 0.75,
        samples: 8,
    }];
    draft.cost = vec![RoundCost {
        context: 4096,
        width: 4,
        duration: 9_000_000,
        samples: 7,
    }];
    let running = RunningRequest {
        id: id("g1"),
        phase: Phase::Decode,
        prompt_tokens: 20,
        cached: 16,
        prefilled: 20,
        generated: 5,
        elapsed: 7,
    };
    Status {
        uptime: 1,
        running: vec![running],
        waiting: 2,
        requests: RequestCounts {
            completed: 1,
            cancelled: 2,
            failed: 3,
        },
        memory: Some(MemoryStatus {
            active: 5,
            peak: 6,
            cache: 7,
            limit: 8,
            weights: 4,
        }),
        cache: Some(CacheStatus {
            nodes: 1,
            restore_points: 2,
            device: Tier { bytes: 3, limit: 4 },
            host: Tier { bytes: 5, limit: 6 },
            disk: DiskTier {
                bytes: 7,
                limit: 8,
                files: 9,
                loads: 10,
                load_duration: 11,
                stores: 12,
                store_duration: 13,
                rejected: 14,
            },
            hits: 15,
            misses: 16,
            hit_tokens: 17,
            evictions: 18,
            demotions: 19,
            promotions: 20,
        }),
        draft: Some(draft),
        ..Status::new("s1", State::Busy)
    }
}

fn model_entry() -> ModelEntry {
    ModelEntry {
        model: id("qwen"),
        state: ModelState::Ready,
        pid: Some(4711),
        memory: 2_600_000_000,
        requests: 0,
        idle_since: Some(1_767_225_600_000),
        draft: Some(draft_info()),
        reason: None,
    }
}

fn token(logprobs: Option<Vec<TokenLogprob>>) -> Event {
    Event::Token(Token {
        id: id("g1"),
        text: id(" w\u{fffd}"),
        tokens: vec![1, 2],
        logprobs,
    })
}

/// Name and sample of every event of a runner.
pub(crate) fn events() -> Vec<(&'static str, Event)> {
    let protocol = ProtocolVersion::CURRENT;
    let program = id("lookahead-runner");
    let bytes = vec![32, 119];
    let top = vec![TopLogprob {
        token: id(" w"),
        bytes: bytes.clone(),
        logprob: f32::NEG_INFINITY,
    }];
    let logprob = TokenLogprob {
        token: id(" w"),
        bytes,
        logprob: -0.1,
        top,
    };
    let failure = |id, code: ErrorCode| Event::Error(Failure::new(id, code, "in words"));
    let cache = CacheReply {
        id: id("k1"),
        action: CacheAction::Clear,
        nodes: 12,
        bytes: 34,
    };
    vec![
        (
            "hello",
            Event::Hello(Hello {
                protocol,
                program,
                version: id("0.1.0"),
                pid: 4711,
                backend: Some(Backend::Cuda),
            }),
        ),
        (
            "load_progress",
            Event::Load(LoadProgress {
                done: 1,
                total: 2,
                stage: LoadStage::Warmup,
            }),
        ),
        (
            "ready",
            Event::Ready(Box::new(Ready {
                model: model_info(),
                draft: draft_info(),
                memory: memory_info(),
                load_duration: 1_500_000_000,
            })),
        ),
        (
            "ready_without_draft",
            Event::Ready(Box::new(Ready {
                model: ModelInfo {
                    quantization: None,
                    vision: false,
                    ..model_info()
                },
                draft: DraftInfo {
                    active: false,
                    kind: None,
                    reason: Some(id("the checkpoint has no draft head")),
                    max_depth: 0,
                },
                memory: memory_info(),
                load_duration: 1,
            })),
        ),
        (
            "prompt",
            Event::Prompt(Prompt {
                id: id("g1"),
                tokens: 20,
                cached: 16,
            }),
        ),
        (
            "prefill",
            Event::Prefill(Prefill {
                id: id("g1"),
                done: 18,
                total: 20,
            }),
        ),
        ("token", token(None)),
        (
            "token_logprobs",
            token(Some(vec![
                logprob.clone(),
                TokenLogprob {
                    top: Vec::new(),
                    ..logprob
                },
            ])),
        ),
        ("done", Event::Done(Box::new(done(draft_stats())))),
        (
            "done_stop",
            Event::Done(Box::new(Done {
                done_reason: DoneReason::Stop,
                stop: Some(id("END")),
                ..done(DraftStats::none())
            })),
        ),
        (
            "done_of_llama_server",
            Event::Done(Box::new(Done {
                done_reason: DoneReason::Cancelled,
                ..done(DraftStats {
                    proposed: 8,
                    accepted: 7,
                    ..DraftStats::default()
                })
            })),
        ),
        ("error", failure(Some(id("g1")), ErrorCode::OutOfMemory)),
        ("error_without_id", failure(None, ErrorCode::InvalidJson)),
        ("error_duplicate", Event::Error(Failure::duplicate_id("g1"))),
        (
            "tokenized",
            Event::Tokenized(Tokenized {
                id: id("t1"),
                tokens: vec![3],
            }),
        ),
        (
            "detokenized",
            Event::Detokenized(Detokenized {
                id: id("t2"),
                text: id("ä"),
            }),
        ),
        (
            "rendered",
            Event::Rendered(Rendered {
                id: id("r1"),
                prompt: id("<|im_start|>user\n"),
            }),
        ),
        (
            "cancelled",
            Event::Cancelled(Cancelled {
                id: id("c1"),
                target: id("g1"),
                found: true,
            }),
        ),
        ("pong", Event::Pong(Pong { id: id("p1") })),
        (
            "status_minimal",
            Event::Status(Box::new(Status::new("s1", State::Loading))),
        ),
        ("status_full", Event::Status(Box::new(full_status()))),
        ("cache_reply", Event::Cache(cache)),
    ]
}

/// Name and sample of every event that only a scheduler sends.
pub(crate) fn scheduler_events() -> Vec<(&'static str, Tagged)> {
    let tag = |event| Tagged {
        event,
        model: Some(id("qwen")),
    };
    let failed = ModelEntry {
        state: ModelState::Failed,
        pid: None,
        idle_since: None,
        draft: None,
        reason: Some(id("model_not_found: no config.json")),
        ..model_entry()
    };
    let hello = Hello {
        protocol: ProtocolVersion::CURRENT,
        program: id("lookahead"),
        version: id("0.1.0"),
        pid: 1,
        backend: None,
    };
    vec![
        ("scheduler_hello", Event::Hello(hello).into()),
        ("scheduler_token", tag(token(None))),
        (
            "scheduler_load",
            tag(Event::Load(LoadProgress {
                done: 0,
                total: 9,
                stage: LoadStage::Weights,
            })),
        ),
        (
            "scheduler_error",
            tag(Event::Error(Failure::new(
                Some(id("g1")),
                ErrorCode::RunnerCrashed,
                "killed by SIGKILL",
            ))),
        ),
        (
            "loaded",
            tag(Event::Loaded(Box::new(Loaded {
                id: id("l1"),
                info: Some(model_info()),
                draft: Some(draft_info()),
                memory: Some(memory_info()),
                load_duration: 5,
            }))),
        ),
        (
            "unloaded",
            tag(Event::Unloaded(Unloaded {
                id: id("u1"),
                found: true,
            })),
        ),
        (
            "models",
            Event::Models(Models {
                id: id("m1"),
                models: vec![model_entry(), failed],
            })
            .into(),
        ),
        (
            "status_of_scheduler",
            Event::Status(Box::new(Status {
                models: Some(vec![model_entry()]),
                ..Status::new("s1", State::Idle)
            }))
            .into(),
        ),
    ]
}
