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
use crate::model::{Batch, Model as _};
use crate::sample::{Sampler, SamplingOptions, Shape, Vocabulary};
use crate::speculate::depth::DepthController;
use crate::text::StopSet;

/// Widths of the target's forward that are measured; costs between them are estimated, those beyond explored.
const WIDTHS: [usize; 6] = [1, 2, 3, 4, 6, 8];
/// Tokens before the first round.
const PROMPT: u32 = 24;
/// Timed rounds of a width, whose median counts.
const TIMED: usize = 3;
/// Timed steps of plain decoding, which are timed as one stretch.
const STEPS: u32 = 6;

/// Time after which no further width is begun: a machine so busy or slow measures its costs better while it serves.
const LIMIT: Duration = Duration::from_secs(3);

/// Widths to run: with automatic drafting a ladder, else those that requests will use.
fn widths(draft: DraftFlag, drafts: bool) -> Vec<usize> {
    match draft {
        DraftFlag::Auto if drafts => WIDTHS
            .into_iter()
            .filter(|&width| width <= draft.max_depth() + 1)
            .collect(),
        DraftFlag::Fixed(_) if drafts => vec![1, draft.max_depth() + 1],
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

/// Runs each width once untimed and, where the depth is chosen by cost, [`TIMED`] times against the clock.
///
/// Ends early, leaving costs unknown, when the latch trips or [`LIMIT`] is over.
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
    let job = job(prompt)?;
    let vocabulary = Vocabulary {
        logits: model.vocabulary_size() as usize,
        tokens: text.tokenizer.len(),
    };
    let mut decoding = Decoding {
        model,
        caches: model.new_caches(),
        drafter: model.self_draft().map(Drafter::new),
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
    // What the rounds say is for nobody.
    let nobody = Outbox::default();
    let widths = widths(draft, decoding.drafter.is_some());
    let total = widths.len() as u64;
    let timed = draft == DraftFlag::Auto && total > 1;
    let start = Instant::now();
    for (done, &width) in widths.iter().enumerate() {
        outbox.push(Event::Load(LoadProgress {
            done: done as u64,
            total,
            stage: LoadStage::Warmup,
        }));
        if latch.is_set() || start.elapsed() > LIMIT {
            break;
        }
        run(&mut decoding, width, 1, &nobody)?;
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
    memory::clear_cache();
    Ok(())
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
        assert_eq!(widths(DraftFlag::Auto, true), WIDTHS);
        assert_eq!(widths(DraftFlag::Auto, false), [1]);
        assert_eq!(widths(DraftFlag::Off, true), [1]);
        assert_eq!(widths(DraftFlag::Fixed(4), true), [1, 5]);
    }
}
