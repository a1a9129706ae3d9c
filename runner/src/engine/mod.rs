//! The engine: one thread that owns all of MLX and runs requests one after another.
//!
//! Invariant: nothing outside of this thread touches an array; other threads see snapshots and events only.

mod decode;
mod drafter;
mod emit;
mod generate;
pub mod job;
mod load;
pub mod measure;
mod media;
mod prefill;
mod prefix;
pub mod prepare;
#[cfg(test)]
mod scripted;
mod simulated;
mod stats;
pub mod text;
#[cfg(test)]
mod vision_tests;
mod warmup;

use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;
use std::time::Instant;

use crossbeam_channel::{after, never, select, Receiver};
use lookahead_protocol::event::{
    AcceptanceEstimate, DoneReason, DraftInfo, DraftStatus, Failure, MemoryStatus, RoundCost, SamplingKind,
};
use lookahead_protocol::Event;

use crate::host::board::nanos;
use crate::host::registry::Held;
use crate::host::Host;
use crate::mlx::{memory, Backend, Path};
use crate::model::quant::Fp8Form;
use crate::model::qwen3_5::Qwen35;
use crate::prefix::budget::Budgets;
use crate::speculate::depth::{DepthController, DepthLimits, DepthModel, Mode};
use job::{Job, Refusal};
use prefix::Prefixes;
use stats::RoundStats;
use text::{Awaited, TextStack};

pub use generate::cancelled_before_start;

/// The deepest draft that any request gets.
pub const DEEPEST: usize = 16;

/// How long an ending process may take to write prefixes that wait for the disk.
const LAST_WRITES: Duration = Duration::from_millis(500);

/// How often the figures are renewed while prefixes are written.
const RENEW: Duration = Duration::from_millis(50);

/// `--draft`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DraftFlag {
    /// Never; the head isn't even loaded.
    Off,
    /// As deep as pays.
    Auto,
    /// Always so deep.
    Fixed(usize),
}

impl DraftFlag {
    /// Whether drafting is switched off.
    pub fn is_off(self) -> bool {
        self == Self::Off
    }

    /// The deepest draft that it allows.
    pub fn max_depth(self) -> usize {
        match self {
            Self::Off => 0,
            Self::Auto => DEEPEST,
            Self::Fixed(depth) => depth.min(DEEPEST),
        }
    }
}

impl std::str::FromStr for DraftFlag {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "off" => Ok(Self::Off),
            "auto" => Ok(Self::Auto),
            number => match number.parse() {
                Ok(0) => Ok(Self::Off),
                Ok(depth) if depth <= DEEPEST => Ok(Self::Fixed(depth)),
                _ => Err(format!(
                    "expected off, auto or a depth from 1 to {DEEPEST}, got {number:?}"
                )),
            },
        }
    }
}

/// What the command line sets.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Model directory.
    pub model: PathBuf,
    /// Tokens a prefill chunk.
    pub chunk: usize,
    /// Drafting.
    pub draft: DraftFlag,
    /// Bytes that weights and caches may take.
    pub memory_limit: u64,
    /// Budgets of the prefix cache's tiers.
    pub cache: Budgets,
    /// Where the disk tier lives, where it is on.
    pub cache_dir: Option<PathBuf>,
    /// Whether to keep off the GPU.
    pub force_cpu: bool,
    /// Most pixels of a picture after resizing.
    pub image_pixels: usize,
    /// How FP8 blocks are held.
    pub fp8: Fp8Form,
}

/// How the engine's thread ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    /// In good order.
    Orderly,
    /// The model could not be loaded.
    LoadFailed,
}

/// A running engine.
#[derive(Debug)]
pub struct Engine {
    model: Rc<Qwen35>,
    text: Arc<TextStack>,
    path: Path,
    settings: Settings,
    host: Host,
    depth: DepthController,
    draft: DraftInfo,
    totals: RoundStats,
    weights: u64,
    prefix: Prefixes,
    /// Whether prefixes were on their way to the disk at the last look.
    writing: bool,
    /// Sampling kind and context length of the latest request, which `status` tells the costs of.
    last_context: (Mode, usize),
    warning: Option<String>,
}

/// What other threads ask of the engine.
#[derive(Debug)]
pub enum Command {
    /// Run a request, unless it was cancelled meanwhile.
    Run(Held<Box<Job>>),
    /// Forget the prefix cache.
    ClearCache,
}

/// The body of the `engine` thread.
pub fn serve(
    settings: Settings,
    backend: Backend,
    host: Host,
    text: &Awaited<TextStack>,
    commands: &Receiver<Command>,
) -> Ending {
    let mut loaded = match load::load_model(&settings, backend, &host.outbox, &host.latch, text) {
        Ok(Some(loaded)) => loaded,
        Ok(None) => {
            text.give_up();
            end_outstanding(&host);
            return Ending::Orderly;
        }
        Err(refusal) => return load_failed(&host, text, refusal),
    };
    let limits = DepthLimits {
        max_depth: settings.draft.max_depth(),
    };
    let mut depth = DepthController::new(limits, DepthModel::default());
    let start = Instant::now();
    let told = (&host.outbox, &host.latch);
    if let Err(refusal) = warmup::warm_up(
        &loaded.model,
        &loaded.text,
        loaded.path,
        settings.draft,
        &mut depth,
        told,
    ) {
        return load_failed(&host, text, refusal);
    }
    loaded.ready.load_duration += nanos(start);
    let mut engine = Engine {
        model: Rc::new(loaded.model),
        text: loaded.text,
        path: loaded.path,
        host,
        depth,
        draft: loaded.ready.draft.clone(),
        totals: RoundStats::default(),
        weights: loaded.ready.memory.weights,
        prefix: loaded.prefix,
        writing: false,
        last_context: (Mode::Greedy, 0),
        warning: None,
        settings,
    };
    engine.refresh_board();
    engine.host.board.update(|figures| figures.loaded = true);
    engine.host.outbox.push(Event::Ready(Box::new(loaded.ready)));
    let latch = engine.host.latch.clone();
    loop {
        // The disk is written beside the engine, so `status` lags behind unless somebody looks.
        let renew = if engine.writing { after(RENEW) } else { never() };
        select! {
            recv(commands) -> command => match command {
                Ok(Command::Run(held)) => {
                    // A request cancelled while it waited has had its final event.
                    let Some(job) = held.take() else { continue };
                    if latch.is_set() {
                        let done = cancelled_before_start(&job.id, Some(job.arrived));
                        engine.host.finish(&job.id, Event::Done(Box::new(done)));
                        continue;
                    }
                    if !job.cancel.start() {
                        continue;
                    }
                    engine.run(*job);
                    if commands.is_empty() {
                        engine.prefix.persist();
                        engine.refresh_board();
                    }
                }
                Ok(Command::ClearCache) => {
                    engine.prefix.clear();
                    memory::give_back();
                    engine.refresh_board();
                }
                Err(_) => break,
            },
            recv(renew) -> _ => engine.refresh_board(),
            recv(latch.channel()) -> _ => break,
        }
    }
    end_outstanding(&engine.host);
    engine.prefix.flush(LAST_WRITES);
    Ending::Orderly
}

fn load_failed(host: &Host, text: &Awaited<TextStack>, refusal: Refusal) -> Ending {
    tracing::error!("loading failed: {refusal}");
    let failure = Failure::new(None, refusal.code.clone(), refusal.message.clone());
    host.fail_load(refusal);
    host.outbox.push(Event::Error(failure));
    text.give_up();
    end_outstanding(host);
    Ending::LoadFailed
}

/// Ends every request that waits: as cancelled, or with the error of a load that failed.
fn end_outstanding(host: &Host) {
    for id in host.registry.outstanding() {
        host.finish(&id, host.unserved(&id, None));
    }
}

impl Engine {
    fn refresh_board(&mut self) {
        self.writing = self.prefix.is_writing();
        let usage = memory::usage();
        let stats = self.totals.to_wire();
        let mut draft = DraftStatus::new(self.draft.clone(), &stats);
        draft.warning.clone_from(&self.warning);
        if self.draft.active {
            let (mode, length) = self.last_context;
            draft.selected = Some(self.depth.selected(mode) as u32);
            draft.cost = self.costs(mode, length);
            draft.acceptance = [Mode::Greedy, Mode::Sampled]
                .into_iter()
                .flat_map(|mode| self.rates(mode))
                .collect();
        }
        let cache = self.prefix.status();
        self.host.board.update(|figures| {
            figures.memory = MemoryStatus {
                active: usage.active,
                peak: usage.peak,
                cache: usage.cached,
                limit: self.settings.memory_limit,
                weights: self.weights,
            };
            figures.draft = Some(draft);
            figures.cache = Some(cache);
        });
    }

    fn costs(&self, mode: Mode, length: usize) -> Vec<RoundCost> {
        let rows = self.depth.costs(mode, length);
        rows.iter()
            .map(|row| RoundCost {
                context: length as u64,
                width: row.depth as u32 + 1,
                duration: (row.seconds * 1e9) as u64,
                samples: row.samples,
            })
            .collect()
    }

    fn rates(&self, mode: Mode) -> Vec<AcceptanceEstimate> {
        let sampling = match mode {
            Mode::Greedy => SamplingKind::Greedy,
            Mode::Sampled => SamplingKind::Sampled,
        };
        let tested = |position: usize| self.totals.tested_at(position);
        self.depth
            .rates(mode)
            .iter()
            .enumerate()
            .map(|(index, &rate)| AcceptanceEstimate {
                sampling: sampling.clone(),
                position: index as u32 + 1,
                rate,
                samples: tested(index),
            })
            .collect()
    }

    fn settle_board(&mut self, event: &Event, failed: bool) {
        self.refresh_board();
        self.host.board.update(|figures| {
            figures.running = None;
            match event {
                _ if failed => figures.requests.failed += 1,
                Event::Done(done) if done.done_reason == DoneReason::Cancelled => {
                    figures.requests.cancelled += 1
                }
                _ => figures.requests.completed += 1,
            }
        });
    }
}
