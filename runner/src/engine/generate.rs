//! The life of one request: prefill, decode loop, final event.
//!
//! Invariant: the decode loop is the only place that emits and that enforces budgets, terminators and cancellation; a
//! request ends with exactly one of `done` and `error`.

use std::rc::Rc;
use std::time::Instant;

use lookahead_protocol::event::{Done, DoneReason, Phase, Prompt};
use lookahead_protocol::request::{DraftMode, DraftOptions};
use lookahead_protocol::{ErrorCode, Event};

use super::decode::Decoding;
use super::drafter::Drafter;
use super::emit::{Emitter, Finish};
use super::job::{Job, Refusal};
use super::media::{Picture, Placed};
use super::prefix::Path;
use super::stats::{RoundStats, Tested};
use super::{Engine, Settings};
use crate::cache::Caches;
use crate::host::board::{nanos, Running};
use crate::mlx::memory;
use crate::model::Model as _;
use crate::prefix::plan::Capture;
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

/// What outlives one attempt at a request, so that another can follow it unseen.
#[derive(Default)]
pub(super) struct Attempt {
    pub(super) path: Option<Path>,
    /// Caches of the trunk and the head, once they have come to rest in good order.
    caches: Option<(Caches, Option<Caches>)>,
    constraint: Option<Constraint>,
    /// Whether the host has had its `prompt` event.
    announced: bool,
    /// Prompt tokens that the host was last told of.
    pub(super) reported: usize,
    /// Whether a token was drawn, after which there is no starting again.
    drawn: bool,
}

impl Engine {
    /// Runs a request to its end and sends its final event.
    pub(super) fn run(&mut self, mut job: Job) {
        let mut attempt = Attempt {
            constraint: job.constraint.take(),
            ..Attempt::default()
        };
        let job = &job;
        let mut result = self.attempt(job, &mut attempt);
        let memory = |refusal: &Refusal| refusal.code == ErrorCode::OutOfMemory;
        if result.as_ref().err().is_some_and(memory) && !attempt.drawn {
            memory::give_back();
            if self.prefix.make_room(u64::MAX) {
                memory::give_back();
                tracing::warn!(
                    id = job.id,
                    "memory ran out; trying again without the prefix cache's share"
                );
                result = self.attempt(job, &mut attempt);
            }
        }
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
        memory::give_back();
        self.settle_board(&event, failed);
        if self.host.registry.end(&job.id) {
            self.host.outbox.push(event);
        }
    }

    /// One attempt, which leaves nothing in use behind.
    fn attempt(&mut self, job: &Job, attempt: &mut Attempt) -> Result<Outcome, Refusal> {
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| self.generate(job, attempt)));
        let result = result.unwrap_or_else(|panic| {
            let text = panic
                .downcast_ref::<&str>()
                .map(|s| (*s).to_owned())
                .or_else(|| panic.downcast_ref::<String>().cloned())
                .unwrap_or_default();
            self.prefix.reset();
            Err(Refusal::new(
                ErrorCode::Internal,
                format!("the engine panicked: {text}"),
            ))
        });
        let is_nan = |refusal: &Refusal| refusal.code == ErrorCode::NanLogits;
        if let Some(path) = attempt
            .path
            .as_ref()
            .filter(|_| result.as_ref().is_err_and(is_nan))
        {
            self.prefix.distrust(path);
        }
        self.prefix.end(attempt.path.take(), attempt.caches.take());
        result
    }

    pub(super) fn cancelled(&self, job: &Job) -> bool {
        job.cancel.is_set() || self.host.latch.is_set()
    }

    fn generate(&mut self, job: &Job, attempt: &mut Attempt) -> Result<Outcome, Refusal> {
        let queued = nanos(job.arrived);
        let model = std::rc::Rc::clone(&self.model);
        let mut caches = model.new_caches();
        let mut restored = None;
        if job.cache && self.prefix.is_on() {
            let media: Vec<_> = job.pictures.iter().map(Picture::key).collect();
            let (path, found) = self.prefix.begin(&job.tokens, &media, caches.kv_layers());
            attempt.path = Some(path);
            restored = found;
        }
        let cached = attempt.path.as_ref().map_or(0, Path::cached);
        if !std::mem::replace(&mut attempt.announced, true) {
            self.host.outbox.push(Event::Prompt(Prompt {
                id: job.id.clone(),
                tokens: job.tokens.len() as u64,
                cached: cached as u64,
            }));
        }
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
        // A stored prefix has the head's key-values in it, so the head follows along also where the request doesn't draft.
        let head = model
            .self_draft()
            .filter(|_| policy != Policy::Off || attempt.path.is_some());
        let placed = Rc::new(Placed::new(
            model.tower(),
            &job.pictures,
            job.tokens.len(),
            cached,
        )?);
        let mut drafter = head.map(|head| {
            Drafter::new(head)
                .with_media(&placed)
                .looking_ahead(self.path == crate::mlx::Path::Gpu)
        });
        if let Some(restored) = restored {
            restored.load(&mut caches, drafter.as_mut())?;
        }
        let mut captures = Vec::new();
        if let Some(path) = &attempt.path {
            captures = path.captures(&self.turns(&job.tokens));
            caches.schedule(&captures.iter().map(|c| c.offset as i32).collect::<Vec<_>>());
        }
        let vocabulary = Vocabulary {
            logits: model.vocabulary_size() as usize,
            tokens: self.text.tokenizer.len(),
        };
        let mut decoding = Decoding {
            model: &*model,
            caches,
            drafter,
            sampler: Sampler::new(
                &job.options,
                job.verify,
                job.seed,
                vocabulary,
                &job.tokens,
                self.path,
            ),
            emitter: Emitter::new(job, &self.text),
            constraint: attempt.constraint.take(),
            consumed: job.tokens[..cached].to_vec(),
            current: 0,
            delta: placed.delta(),
            stats: RoundStats::default(),
        };
        let result = self.advance(job, &mut decoding, attempt, (&placed, &captures), policy);
        attempt.constraint = decoding.constraint.take();
        attempt.drawn = decoding.emitter.taken() > 0;
        let (finish, prefill, decoded) = result?;
        attempt.caches = Some((decoding.caches, decoding.drafter.map(Drafter::into_caches)));
        let finish = match (decoding.emitter.finish(&self.host.outbox), finish) {
            (Some(stop), Finish::Length) => Finish::Stop(Some(stop)),
            (_, finish) => finish,
        };
        Ok(Outcome {
            finish,
            prefill,
            decode: decoded,
            cached,
            delivered: decoding.emitter.delivered(),
            stats: decoding.stats,
            queued,
        })
    }

    /// Prefill and decoding, with what they leave in the prefix cache; also their nanoseconds.
    fn advance(
        &mut self,
        job: &Job,
        decoding: &mut Decoding<'_>,
        attempt: &mut Attempt,
        (placed, captures): (&Placed, &[Capture]),
        policy: Policy,
    ) -> Result<(Finish, u64, u64), Refusal> {
        let start = Instant::now();
        let mut states = Vec::new();
        let prefilled = self.prefill(job, decoding, attempt, (placed, captures), &mut states);
        let prefill = nanos(start);
        if let Some(path) = &mut attempt.path {
            let kept = self.keep_states(job, decoding, path, states);
            match &prefilled {
                Ok(_) => kept?,
                // What had been computed by then is as good as that of a cancelled request; the error tells why it ended.
                Err(_) => kept.unwrap_or_else(|error| tracing::warn!("prefix cache: nothing kept: {error}")),
            }
        }
        let through = prefilled?;
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
                self.decode(job, decoding, &mut attempt.path, policy)?
            }
        };
        let decoded = nanos(start);
        if let Some(path) = &mut attempt.path {
            if decoding.stats != RoundStats::default() {
                let mut tail = decoding.consumed[job.tokens.len()..].to_vec();
                tail.push(decoding.current);
                path.extend(&tail);
                self.keep_rest(decoding, path)?;
            }
        }
        Ok((finish, prefill, decoded))
    }

    /// Once more is allocated than the limit allows, gives back what other requests left, then what this one's path holds
    /// beside its live caches.
    pub(super) fn stay_within_memory(&mut self, path: Option<&mut Path>) -> Result<(), Refusal> {
        let limit = self.settings.memory_limit;
        let excess = || memory::usage().active.saturating_sub(limit);
        if excess() == 0 {
            return Ok(());
        }
        self.prefix.make_room(excess());
        memory::give_back();
        if let Some(path) = path.filter(|_| excess() > 0) {
            self.prefix.loosen(path);
            self.prefix.make_room(excess());
            memory::give_back();
        }
        match excess() {
            0 => Ok(()),
            excess => {
                let used = limit + excess;
                let message = format!("{used} bytes are in use, more than the memory limit of {limit} bytes");
                Err(Refusal::new(ErrorCode::OutOfMemory, message))
            }
        }
    }

    fn decode(
        &mut self,
        job: &Job,
        decoding: &mut Decoding<'_>,
        path: &mut Option<Path>,
        policy: Policy,
    ) -> Result<Finish, Refusal> {
        let mode = if decoding.sampler.is_greedy() {
            Mode::Greedy
        } else {
            Mode::Sampled
        };
        self.depth.begin_request(mode);
        loop {
            if self.cancelled(job) {
                return Ok(Finish::Cancelled);
            }
            self.last_context = (mode, decoding.consumed.len());
            let context = Context {
                mode,
                policy: if decoding.drafter.is_some() {
                    policy
                } else {
                    Policy::Off
                },
                length: decoding.consumed.len(),
                remaining: decoding.emitter.remaining(),
            };
            let plan = self.depth.plan(&context);
            let start = Instant::now();
            let before = decoding.emitter.taken();
            let finish = match plan {
                Plan::Plain { steps } => {
                    let finish = decoding.plain(steps, &self.host.outbox, || self.cancelled(job))?;
                    let taken = (decoding.emitter.taken() - before) as u32;
                    self.depth
                        .record_plain(&context, taken, Some(start.elapsed().as_secs_f64()));
                    finish
                }
                Plan::Draft { depth } => {
                    let finish = decoding.round(depth, &self.host.outbox)?;
                    let Tested {
                        drafts,
                        tested,
                        accepted,
                    } = decoding.stats.last_round();
                    // A round with fewer drafts than planned costs what neither depth does.
                    let usual = finish.is_none() && drafts == depth;
                    let seconds = usual.then(|| start.elapsed().as_secs_f64());
                    match drafts {
                        0 => self.depth.record_plain(&context, 1, None),
                        depth => self.depth.record_round(
                            &context,
                            &RoundSample {
                                depth,
                                tested,
                                accepted,
                                seconds,
                            },
                        ),
                    }
                    finish
                }
            };
            self.host.board.update(|figures| {
                if let Some(running) = &mut figures.running {
                    running.generated = decoding.emitter.taken() as u64;
                }
            });
            self.prefix.set_running(decoding.bytes());
            self.stay_within_memory(path.as_mut())?;
            if let Some(health) = self.depth.take_health() {
                let warning = health.to_string();
                tracing::warn!("{warning}");
                self.warning = Some(warning);
            }
            if let Some(finish) = finish {
                return Ok(finish);
            }
        }
    }
}

/// Who decides on the depth for a request.
fn policy(request: &DraftOptions, settings: &Settings) -> Policy {
    let most = settings
        .draft
        .max_depth()
        .min(request.max_depth.map_or(usize::MAX, usize::from));
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
