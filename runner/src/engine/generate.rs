//! The life of one request: prefill, decode loop, final event.
//!
//! Invariant: the decode loop is the only place that emits and that enforces budgets, terminators and cancellation; a
//! request ends with exactly one of `done` and `error`.

use std::time::Instant;

use lookahead_protocol::event::{Done, DoneReason, Phase, Prefill, Prompt};
use lookahead_protocol::request::{DraftMode, DraftOptions};
use lookahead_protocol::{ErrorCode, Event};
use mlx_rs::transforms::eval;

use super::decode::{ids_array, Decoding};
use super::drafter::Drafter;
use super::emit::{Emitter, Finish};
use super::job::{Job, Refusal};
use super::stats::RoundStats;
use super::{Engine, Settings};
use crate::host::board::{nanos, Running};
use crate::mlx::memory;
use crate::model::{Batch, Model as _};
use crate::sample::constraint::Constraint;
use crate::sample::{Sampler, Vocabulary};
use crate::speculate::depth::{Context, Mode, Plan, Policy, RoundSample};

/// What a finished request leaves to tell.
struct Outcome {
    finish: Finish,
    prefill: u64,
    decode: u64,
    cached: usize,
    delivered: usize,
    stats: RoundStats,
    queued: u64,
}

impl Engine {
    /// Runs a request to its end and sends its final event.
    pub(super) fn run(&mut self, mut job: Job) {
        let constraint = job.constraint.take();
        let job = &job;
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| self.generate(job, constraint)));
        let result = result.unwrap_or_else(|panic| {
            let text = panic
                .downcast_ref::<&str>()
                .map(|s| (*s).to_owned())
                .or_else(|| panic.downcast_ref::<String>().cloned())
                .unwrap_or_default();
            Err(Refusal::new(ErrorCode::Internal, format!("the engine panicked: {text}")))
        });
        let failed = result.is_err();
        let event = match result {
            Ok(outcome) => {
                self.totals.add(&outcome.stats);
                Event::Done(Box::new(done(job, outcome)))
            }
            Err(refusal) => {
                tracing::error!(id = job.id, "{refusal}");
                Event::Error(refusal.failure(&job.id))
            }
        };
        memory::clear_cache();
        self.settle_board(&event, failed);
        if self.host.registry.end(&job.id) {
            self.host.outbox.push(event);
        }
    }

    fn cancelled(&self, job: &Job) -> bool {
        job.cancel.is_set() || self.host.latch.is_set()
    }

    fn generate(&mut self, job: &Job, constraint: Option<Constraint>) -> Result<Outcome, Refusal> {
        if job.logprobs.is_some() {
            return Err(Refusal::new(ErrorCode::Unsupported, "`logprobs` is not supported by this build"));
        }
        let queued = nanos(job.arrived);
        let model = std::rc::Rc::clone(&self.model);
        let cached = 0;
        self.host.outbox.push(Event::Prompt(Prompt {
            id: job.id.clone(),
            tokens: job.tokens.len() as u64,
            cached: cached as u64,
        }));
        self.host.board.update(|figures| {
            figures.running = Some(Running {
                id: job.id.clone(),
                phase: Phase::Prefill,
                prompt_tokens: job.tokens.len() as u64,
                cached: cached as u64,
                prefilled: cached as u64,
                generated: 0,
                arrived: job.arrived,
            });
        });
        let policy = policy(&job.draft, &self.settings);
        let head = model.self_draft().filter(|_| policy != Policy::Off);
        let vocabulary = Vocabulary {
            logits: model.vocabulary_size() as usize,
            tokens: self.text.tokenizer.len(),
        };
        let mut decoding = Decoding {
            model: &*model,
            caches: model.new_caches(),
            drafter: head.map(Drafter::new),
            sampler: Sampler::new(&job.options, job.verify, job.seed, vocabulary, &job.tokens, self.path),
            emitter: Emitter::new(job, &self.text),
            constraint,
            consumed: Vec::new(),
            current: 0,
            stats: RoundStats::default(),
        };
        let start = Instant::now();
        let through = self.prefill(job, &mut decoding)?;
        let prefill = nanos(start);
        let start = Instant::now();
        let finish = match (through, job.budget) {
            (false, _) => Finish::Cancelled,
            (true, 0) => Finish::Length,
            (true, _) => {
                self.host.board.update(|figures| {
                    if let Some(running) = &mut figures.running {
                        running.phase = Phase::Decode;
                    }
                });
                self.decode(job, &mut decoding, policy)?
            }
        };
        let finish = match (decoding.emitter.finish(&self.host.outbox), finish) {
            (Some(stop), Finish::Length) => Finish::Stop(Some(stop)),
            (_, finish) => finish,
        };
        Ok(Outcome {
            finish,
            prefill,
            decode: nanos(start),
            cached,
            delivered: decoding.emitter.delivered(),
            stats: decoding.stats,
            queued,
        })
    }

    /// Evaluates all prompt tokens but the last, which the first decode step consumes. False if cancelled on the way.
    fn prefill(&self, job: &Job, decoding: &mut Decoding<'_>) -> Result<bool, Refusal> {
        let total = job.tokens.len();
        let end = total - 1;
        let mut at = decoding.consumed.len();
        while at < end {
            if self.cancelled(job) {
                return Ok(false);
            }
            let to = end.min(at + self.settings.chunk);
            let ids = ids_array(&job.tokens[at..to]);
            let slot = decoding.caches.offset();
            let hidden = decoding.model.forward(&Batch::text(&ids, slot), &mut decoding.caches)?;
            let mut arrays = decoding.caches.arrays();
            if decoding.drafter.is_some() {
                arrays.push(&hidden);
            }
            eval(arrays)?;
            if let Some(drafter) = &mut decoding.drafter {
                drafter.observe(&ids, &hidden, &decoding.caches)?;
            }
            drop(hidden);
            decoding.consumed.extend(&job.tokens[at..to]);
            at = to;
            if to - slot as usize >= 256 {
                memory::clear_cache();
            }
            self.report_prefill(job, at, total);
        }
        decoding.current = job.tokens[end];
        Ok(!self.cancelled(job))
    }

    fn report_prefill(&self, job: &Job, done: usize, total: usize) {
        self.host.board.update(|figures| {
            if let Some(running) = &mut figures.running {
                running.prefilled = done as u64;
            }
        });
        if job.progress {
            self.host.outbox.push(Event::Prefill(Prefill {
                id: job.id.clone(),
                done: done as u64,
                total: total as u64,
            }));
        }
    }

    fn decode(&mut self, job: &Job, decoding: &mut Decoding<'_>, policy: Policy) -> Result<Finish, Refusal> {
        let mode = if decoding.sampler.is_greedy() { Mode::Greedy } else { Mode::Sampled };
        self.depth.begin_request(mode);
        loop {
            if self.cancelled(job) {
                return Ok(Finish::Cancelled);
            }
            let context = Context {
                mode,
                policy,
                length: decoding.consumed.len(),
                remaining: decoding.emitter.remaining(),
            };
            let plan = self.depth.plan(&context);
            let start = Instant::now();
            let before = decoding.emitter.taken();
            let finish = match plan {
                Plan::Plain { steps } => {
                    let finish =
                        decoding.plain(steps, &self.host.outbox, || self.cancelled(job))?;
                    let taken = (decoding.emitter.taken() - before) as u32;
                    self.depth.record_plain(&context, taken, Some(start.elapsed().as_secs_f64()));
                    finish
                }
                Plan::Draft { depth } => {
                    let finish = decoding.round(depth, &self.host.outbox)?;
                    let (tested, accepted) = decoding.stats.last_round();
                    let seconds = finish.is_none().then(|| start.elapsed().as_secs_f64());
                    self.depth.record_round(&context, &RoundSample { depth, tested, accepted, seconds });
                    finish
                }
            };
            self.host.board.update(|figures| {
                if let Some(running) = &mut figures.running {
                    running.generated = decoding.emitter.taken() as u64;
                }
            });
            if let Some(finish) = finish {
                return Ok(finish);
            }
        }
    }
}

/// Who decides on the depth for a request.
fn policy(request: &DraftOptions, settings: &Settings) -> Policy {
    let most = settings.draft.max_depth().min(request.max_depth.map_or(usize::MAX, usize::from));
    match (request.mode, settings.draft) {
        _ if most == 0 => Policy::Off,
        (DraftMode::Off, _) => Policy::Off,
        (DraftMode::Fixed { depth }, _) => Policy::Fixed(usize::from(depth).min(most)),
        (DraftMode::Auto, super::DraftFlag::Fixed(depth)) => Policy::Fixed(depth.min(most)),
        (DraftMode::Auto, _) => Policy::Auto { max_depth: most },
    }
}

fn done(job: &Job, outcome: Outcome) -> Done {
    let (done_reason, stop) = match outcome.finish {
        Finish::Stop(stop) => (DoneReason::Stop, stop),
        Finish::Length => (DoneReason::Length, None),
        Finish::Cancelled => (DoneReason::Cancelled, None),
    };
    let draft = outcome.stats.to_wire();
    let seconds = outcome.decode as f64 / 1e9;
    tracing::info!(
        id = job.id,
        prompt = job.tokens.len(),
        cached = outcome.cached,
        generated = outcome.delivered,
        tokens_per_second = format!("{:.1}", outcome.delivered as f64 / seconds.max(1e-9)),
        accepted_per_proposed = draft.accepted_per_proposed(),
        accepted_per_tested = draft.accepted_per_tested(),
        tokens_per_round = draft.tokens_per_round(),
        depth = ?draft.depth,
        "request done"
    );
    Done {
        id: job.id.clone(),
        done_reason,
        stop,
        total_duration: nanos(job.arrived),
        queue_duration: outcome.queued,
        prompt_eval_count: job.tokens.len() as u64,
        cached_count: outcome.cached as u64,
        prompt_eval_duration: outcome.prefill,
        eval_count: outcome.delivered as u64,
        eval_duration: outcome.decode,
        draft,
    }
}

/// The final event of a request that never reached the engine.
pub fn cancelled_before_start(id: &str, arrived: Option<Instant>) -> Done {
    let waited = arrived.map_or(0, nanos);
    Done {
        id: id.to_owned(),
        done_reason: DoneReason::Cancelled,
        stop: None,
        total_duration: waited,
        queue_duration: waited,
        prompt_eval_count: 0,
        cached_count: 0,
        prompt_eval_duration: 0,
        eval_count: 0,
        eval_duration: 0,
        draft: RoundStats::default().to_wire(),
    }
}
