//! The first rounds of a model, run at load: kernels are compiled, pages touched, and each width's cost is measured.
//!
//! Invariant: they run on a sequence of their own, of which nothing is left, and exactly as requests run theirs, so that
//! what is timed is what a round costs, its drafts included. A device that can't run the model fails here, not in a request.

use std::sync::Arc;
use std::time::{Duration, Instant};

use lookahead_protocol::event::{LoadProgress, LoadStage};
use lookahead_protocol::request::{DraftOptions, Verify};
use lookahead_protocol::{ErrorCode, Event};
use mlx_rs::transforms::eval;

use super::decode::{ids_array, Decoding};
use super::drafter::Drafter;
use super::emit::Emitter;
use super::job::{Job, Refusal};
use super::stats::RoundStats;
use super::text::TextStack;
use super::DraftFlag;
use crate::host::latch::Latch;
use crate::host::outbox::Outbox;
use crate::host::registry::CancelFlag;
use crate::mlx::{memory, Path};
use crate::model::qwen3_5::Qwen35;
use crate::model::{Batch, DraftModel, Model as _};
use crate::sample::{Sampler, SamplingOptions, Shape, Vocabulary};
use crate::speculate::depth::DepthController;
use crate::text::StopSet;

/// Widths of the target's forward that are measured; costs between them are estimated, those beyond explored.
const WIDTHS: [usize; 6] = [1, 2, 3, 4, 6, 8];
/// One more on a GPU, whose kernels of more than eight rows are others, and compiling them takes seconds.
const WIDE: usize = 12;
/// Tokens before the first round.
const PROMPT: u32 = 24;
/// Timed rounds of a width, whose median counts.
const TIMED: usize = 3;
/// Timed steps of plain decoding, which are timed as one stretch.
const STEPS: u32 = 6;

/// Time after which no further width is begun on the host's cores: a machine so busy or slow measures its costs better
/// while it serves. A GPU's widths are all begun: each compiles kernels that a request would wait for.
const LIMIT: Duration = Duration::from_secs(3);

/// Widths to run: with automatic drafting a ladder, else those that requests will use.
fn widths(draft: DraftFlag, drafts: bool, path: Path) -> Vec<usize> {
    let widest = draft.max_depth() + 1;
    let gpu = path == Path::Gpu;
    match draft {
        DraftFlag::Auto if drafts => WIDTHS
            .into_iter()
            .chain(gpu.then_some(WIDE))
            .filter(|&width| width <= widest)
            .collect(),
        // The last round of a request is as narrow as what is left of it.
        DraftFlag::Fixed(_) if drafts && gpu && widest > 2 => vec![1, 2, widest],
        DraftFlag::Fixed(_) if drafts => vec![1, widest],
        _ => vec![1],
    }
}

/// Greedy decoding without end.
fn endless() -> SamplingOptions {
    SamplingOptions {
        num_predict: None,
        num_ctx: None,
        shape: Shape::Greedy,
        penalties: None,
        seed: None,
        stop: Vec::new(),
        ignore_eos: true,
    }
}

fn job(tokens: Vec<u32>) -> Result<Job, Refusal> {
    let stops = StopSet::new(&[]).map_err(|error| Refusal::new(ErrorCode::Internal, error.to_string()))?;
    Ok(Job {
        id: "warm-up".to_owned(),
        arrived: Instant::now(),
        cancel: CancelFlag::default(),
        tokens,
        pictures: Vec::new(),
        options: endless(),
        seed: 0,
        stops: Arc::new(stops),
        budget: usize::MAX,
        draft: DraftOptions::default(),
        verify: Verify::Rejection,
        constraint: None,
        logprobs: None,
        cache: false,
        progress: false,
    })
}

/// A sequence of its own after `prompt`, decoded greedily without end; nothing of it is stored.
///
/// # Errors
/// The device fails.
pub(super) fn sequence<'m>(
    model: &'m Qwen35,
    head: Option<&'m dyn DraftModel>,
    text: &TextStack,
    path: Path,
    prompt: Vec<u32>,
) -> Result<Decoding<'m>, Refusal> {
    let job = job(prompt)?;
    let vocabulary = Vocabulary {
        logits: model.vocabulary_size() as usize,
        tokens: text.tokenizer.len(),
    };
    let mut decoding = Decoding {
        model,
        caches: model.new_caches(),
        drafter: head.map(|head| Drafter::new(head).looking_ahead(path == Path::Gpu)),
        sampler: Sampler::new(&job.options, job.verify, job.seed, vocabulary, &job.tokens, path),
        emitter: Emitter::new(&job, text),
        constraint: None,
        consumed: job.tokens.clone(),
        current: 0,
        delta: 0,
        stats: RoundStats::default(),
    };
    let ids = ids_array(&job.tokens);
    let hidden = model.forward(&Batch::text(&ids, 0), &mut decoding.caches)?;
    eval(decoding.caches.arrays().into_iter().chain([&hidden]))?;
    if let Some(drafter) = &mut decoding.drafter {
        drafter.observe(&ids, &hidden, &decoding.caches)?;
    }
    Ok(decoding)
}

/// Runs each width once untimed and, where the depth is chosen by cost, [`TIMED`] times against the clock.
///
/// Ends early, leaving costs unknown, when the latch trips or, on the host's cores, when [`LIMIT`] is over.
///
/// # Errors
/// The device fails.
pub(super) fn warm_up(
    model: &Qwen35,
    text: &TextStack,
    path: Path,
    draft: DraftFlag,
    controller: &mut DepthController,
    (outbox, latch): (&Outbox, &Latch),
) -> Result<(), Refusal> {
    let known = text.tokenizer.len() as u32;
    let prompt: Vec<u32> = (0..PROMPT).map(|id| id % known.max(1)).collect();
    let mut decoding = sequence(model, model.self_draft(), text, path, prompt)?;
    // What the rounds say is for nobody.
    let nobody = Outbox::default();
    let widths = widths(draft, decoding.drafter.is_some(), path);
    let total = widths.len() as u64;
    let timed = draft == DraftFlag::Auto && total > 1;
    let start = Instant::now();
    for (done, &width) in widths.iter().enumerate() {
        outbox.push(Event::Load(LoadProgress {
            done: done as u64,
            total,
            stage: LoadStage::Warmup,
        }));
        if latch.is_set() || (path == Path::Cpu && start.elapsed() > LIMIT) {
            break;
        }
        for _ in 0..untimed(path) {
            run(&mut decoding, width, 1, &nobody)?;
        }
        if timed {
            let seconds = measure(&mut decoding, width, &nobody)?;
            controller.seed_cost(width, seconds);
        }
    }
    outbox.push(Event::Load(LoadProgress {
        done: total,
        total,
        stage: LoadStage::Warmup,
    }));
    drop(decoding);
    memory::give_back();
    Ok(())
}

/// Rounds before the timed ones: a GPU compiles kernels in the first and the library builds its launch graphs in the next.
fn untimed(path: Path) -> usize {
    match path {
        Path::Cpu => 1,
        Path::Graph | Path::Gpu => 3,
    }
}

/// One round, or some steps where there are no drafts in it.
fn run(decoding: &mut Decoding<'_>, width: usize, steps: u32, nobody: &Outbox) -> Result<(), Refusal> {
    match width {
        1 => decoding.plain(steps, nobody, || false)?,
        width => decoding.round(width - 1, nobody)?,
    };
    Ok(())
}

/// Seconds of a round.
fn measure(decoding: &mut Decoding<'_>, width: usize, nobody: &Outbox) -> Result<f64, Refusal> {
    if width == 1 {
        let start = Instant::now();
        run(decoding, 1, STEPS, nobody)?;
        return Ok(start.elapsed().as_secs_f64() / f64::from(STEPS));
    }
    let mut seconds = Vec::with_capacity(TIMED);
    for _ in 0..TIMED {
        let start = Instant::now();
        run(decoding, width, 1, nobody)?;
        seconds.push(start.elapsed().as_secs_f64());
    }
    seconds.sort_by(f64::total_cmp);
    Ok(seconds[TIMED / 2])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_automatic_drafting_needs_a_ladder_of_widths() {
        let cpu = |draft, drafts| widths(draft, drafts, Path::Cpu);
        assert_eq!(cpu(DraftFlag::Auto, true), WIDTHS);
        assert_eq!(cpu(DraftFlag::Auto, false), [1]);
        assert_eq!(cpu(DraftFlag::Off, true), [1]);
        assert_eq!(cpu(DraftFlag::Fixed(4), true), [1, 5]);
    }

    #[test]
    fn a_gpu_compiles_at_load_what_narrow_and_wide_rounds_need() {
        let gpu = |draft, drafts| widths(draft, drafts, Path::Gpu);
        assert_eq!(gpu(DraftFlag::Auto, true), [1, 2, 3, 4, 6, 8, 12]);
        assert_eq!(gpu(DraftFlag::Fixed(10), true), [1, 2, 11]);
        assert_eq!(gpu(DraftFlag::Fixed(1), true), [1, 2]);
        assert_eq!(gpu(DraftFlag::Off, true), [1]);
    }
}
