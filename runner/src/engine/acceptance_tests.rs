//! Acceptance on the trained model, round by round, against what the two rules' theory says of the very rows at hand.

use std::cell::RefCell;

use lookahead_protocol::request::Verify;
use mlx_rs::error::Result as MlxResult;

use super::support::{job, text, Ending, PROMPT};
use super::*;
use crate::engine::job::Job;
use crate::mlx::{Backend, Path};
use crate::model::checkpoint::Checkpoint;
use crate::model::plan::{plan, PlanOptions};
use crate::model::qwen3_5::{load, Qwen35, Scores};
use crate::model::weights::{Precision, Weights};
use crate::model::{DraftKind, DraftModel};
use crate::sample::oracle::{distribution, wide};
use crate::sample::{Filter, SamplingOptions, Shape, Vocabulary};
use crate::text::test_support::fixture_dir;
use crate::text::Bos;

/// The trained model, its logits overheard.
#[derive(Debug)]
struct Overheard<'m> {
    model: &'m Qwen35,
    head: OverheardHead<'m>,
    rows: RefCell<Vec<Array>>,
}

/// Its head.
struct OverheardHead<'m> {
    head: &'m dyn DraftModel,
    rows: RefCell<Vec<Array>>,
}

impl std::fmt::Debug for OverheardHead<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("OverheardHead").finish_non_exhaustive()
    }
}

impl Model for Overheard<'_> {
    fn forward(&self, batch: &Batch<'_>, caches: &mut Caches) -> MlxResult<Array> {
        self.model.forward(batch, caches)
    }

    fn unembed(&self, hidden: &Array) -> MlxResult<Array> {
        let logits = self.model.unembed(hidden)?;
        self.rows.borrow_mut().push(logits.clone());
        Ok(logits)
    }

    fn new_caches(&self) -> Caches {
        self.model.new_caches()
    }

    fn self_draft(&self) -> Option<&dyn DraftModel> {
        Some(&self.head)
    }
}

impl DraftModel for OverheardHead<'_> {
    fn new_caches(&self) -> Caches {
        self.head.new_caches()
    }

    fn forward(&self, batch: &Batch<'_>, target: &Caches, draft: &mut Caches) -> MlxResult<Array> {
        self.head.forward(batch, target, draft)
    }

    fn unembed(&self, hidden: &Array) -> MlxResult<Array> {
        let logits = self.head.unembed(hidden)?;
        self.rows.borrow_mut().push(logits.clone());
        Ok(logits)
    }

    fn kind(&self) -> DraftKind {
        self.head.kind()
    }
}

/// Float64 distributions of all rows that were overheard, one after the other.
fn distributions(heard: &RefCell<Vec<Array>>, shape: &Shape) -> Vec<Vec<f64>> {
    let mut rows = Vec::new();
    for logits in heard.take() {
        let width = logits.dim(2) as usize;
        let values = logits.to_vec_cast::<f32>().unwrap();
        rows.extend(
            values
                .chunks_exact(width)
                .map(|row| distribution(&wide(row), shape)),
        );
    }
    rows
}

/// The chance that a draft from `q` is accepted under `p`.
fn chance(verify: Verify, p: &[f64], q: &[f64]) -> f64 {
    let both = p.iter().zip(q).filter(|(&p, &q)| p > 0.0 && q > 0.0);
    match verify {
        Verify::Rejection => both.map(|(&p, &q)| p.min(q)).sum(),
        // Both take the first arrival of the same exponential clocks, run at their own rates: the chance that clock i is
        // first in both is one over the sum of all rates relative to its own, the larger of the two each.
        Verify::Coupled => both
            .map(|(&pi, &qi)| {
                1.0 / p
                    .iter()
                    .zip(q)
                    .map(|(&pj, &qj)| (pj / pi).max(qj / qi))
                    .sum::<f64>()
            })
            .sum(),
    }
}

fn trained() -> Qwen35 {
    Backend::select(true);
    let checkpoint = Checkpoint::open(&fixture_dir()).unwrap();
    let plan = plan(&checkpoint, PlanOptions::default()).unwrap();
    let mut progress = |_| true;
    let weights = Weights::new(&checkpoint, &plan, Precision::Widen, &mut progress).unwrap();
    load(&weights, Path::Cpu, Scores::Stored).unwrap().model
}

const NUCLEUS: Shape = Shape::Filtered(Filter {
    top_k: 50,
    temperature: 1.0,
    top_p: 0.95,
    min_p: 0.0,
});

/// A sequence of `model`, which has a head, after a prompt in prose.
fn sequence<'m>(
    model: &'m dyn ModelDebug,
    shape: Shape,
    verify: Verify,
    width: usize,
    looks_ahead: bool,
) -> Decoding<'m> {
    let tokens = text()
        .tokenizer
        .encode("And it came to pass in those days, that he said", Bos::Never)
        .unwrap();
    let plain = job(&tokens, Ending::Never);
    let job = Job {
        options: SamplingOptions {
            shape,
            ignore_eos: true,
            ..plain.options.clone()
        },
        verify,
        seed: 11,
        ..plain
    };
    let vocabulary = Vocabulary {
        logits: width,
        tokens: text().tokenizer.len(),
    };
    let mut decoding = Decoding {
        model,
        caches: model.new_caches(),
        drafter: model
            .self_draft()
            .map(|head| Drafter::new(head).looking_ahead(looks_ahead)),
        sampler: Sampler::new(&job.options, verify, job.seed, vocabulary, &job.tokens, Path::Cpu),
        emitter: Emitter::new(&job, text()),
        constraint: None,
        consumed: job.tokens[..PROMPT - 1].to_vec(),
        current: job.tokens[PROMPT - 1],
        delta: 0,
        stats: RoundStats::default(),
    };
    let ids = ids_array(&decoding.consumed);
    let hidden = model
        .forward(&Batch::text(&ids, 0), &mut decoding.caches)
        .unwrap();
    if let Some(drafter) = &mut decoding.drafter {
        drafter.observe(&ids, &hidden, &decoding.caches).unwrap();
    }
    decoding
}

/// What so many rounds accepted, what they should have, and the standard deviation of that.
fn rounds(verify: Verify, count: usize, looks_ahead: bool) -> (f64, f64, f64, usize) {
    let model = trained();
    let model = Overheard {
        model: &model,
        head: OverheardHead {
            head: model.self_draft().unwrap(),
            rows: RefCell::default(),
        },
        rows: RefCell::default(),
    };
    let width = model.model.vocabulary_size() as usize;
    let mut decoding = sequence(&model, NUCLEUS, verify, width, looks_ahead);
    model.rows.take();
    let outbox = Outbox::default();
    let (mut accepted, mut expected, mut variance, mut tested) = (0.0, 0.0, 0.0, 0);
    // Each round but the first finds its first draft begun by the one before.
    let mut begun = None;
    for _ in 0..count {
        decoding.round(3, &outbox).unwrap();
        let round = decoding.stats.last_round();
        let targets = distributions(&model.rows, &NUCLEUS);
        let mut drafts: Vec<_> = begun.into_iter().collect();
        drafts.extend(distributions(&model.head.rows, &NUCLEUS));
        // Looking ahead, one for each outcome, of which the round's own is kept.
        let outcomes = drafts.split_off(3);
        begun = outcomes
            .into_iter()
            .nth(if looks_ahead { round.accepted } else { 0 });
        assert_eq!((targets.len(), drafts.len()), (4, 3));
        for place in 0..round.tested {
            let chance = chance(verify, &targets[place], &drafts[place]);
            assert!((-1e-9..1.0 + 1e-9).contains(&chance), "{chance}");
            accepted += f64::from(u8::from(place < round.accepted));
            expected += chance;
            variance += chance * (1.0 - chance);
            tested += 1;
        }
    }
    (accepted, expected, variance.max(0.0).sqrt(), tested)
}

/// What a round drafts doesn't depend on when its chain began: the same tokens, and the same drafts stand.
#[test]
fn looking_ahead_drafts_what_waiting_for_the_round_would() {
    let model = trained();
    let width = model.vocabulary_size() as usize;
    let outbox = Outbox::default();
    for (shape, verify) in [
        (Shape::Greedy, Verify::Rejection),
        (NUCLEUS, Verify::Coupled),
        (NUCLEUS, Verify::Rejection),
    ] {
        let run = |looks_ahead: bool| {
            let mut decoding = sequence(&model, shape, verify, width, looks_ahead);
            let mut rounds = Vec::new();
            // Depths and plain steps in turn: what was begun may be too little, or for nobody.
            for depth in [3, 3, 1, 5, 0, 2, 2, 0, 0, 4].into_iter().cycle().take(50) {
                match depth {
                    0 => decoding.plain(2, &outbox, || false).unwrap(),
                    depth => decoding.round(depth, &outbox).unwrap(),
                };
                rounds.push(decoding.stats.last_round());
            }
            let current = decoding.current;
            let drafter = decoding.drafter.as_mut().unwrap();
            drafter.settle(current, &decoding.caches).unwrap();
            let held = drafter
                .caches()
                .kv_segments(0, drafter.caches().offset())
                .unwrap();
            let keys = held[0].keys.to_vec_cast::<f32>().unwrap();
            (decoding.consumed.clone(), current, rounds, keys)
        };
        let (ahead, after) = (run(true), run(false));
        assert_eq!(ahead.0, after.0, "{shape:?} {verify:?}");
        assert_eq!((ahead.1, &ahead.2), (after.1, &after.2), "{shape:?} {verify:?}");
        let apart = ahead.3.iter().zip(&after.3).map(|(a, b)| (a - b).abs());
        assert!(apart.fold(0.0, f32::max) < 1e-4, "the head's keys");
        assert!(ahead.2.iter().any(|round| round.accepted > 1), "drafts stand");
    }
}

fn acceptance_is_what_the_rows_say(count: usize) {
    let rules = [Verify::Rejection, Verify::Coupled];
    for (verify, ahead) in rules.into_iter().flat_map(|rule| [(rule, false), (rule, true)]) {
        let (accepted, expected, spread, tested) = rounds(verify, count, ahead);
        let deviation = (accepted - expected) / spread;
        println!(
            "{verify:?}: {accepted} of {tested} drafts accepted, {expected:.1} expected, {deviation:+.2} deviations"
        );
        // Enough chances that were neither 0 nor 1 for a wrong rule to show.
        assert!(spread > (count as f64 / 8.0).sqrt(), "{spread}");
        assert!(
            deviation.abs() < 4.0,
            "{verify:?}: {accepted} of {tested}, expected {expected} ± {spread}"
        );
    }
}

#[test]
fn drafts_are_accepted_as_often_as_target_and_draft_distributions_overlap() {
    acceptance_is_what_the_rows_say(80);
}

#[test]
#[ignore = "a minute: 4,000 rounds"]
fn drafts_are_accepted_as_often_as_target_and_draft_distributions_overlap_in_many_rounds() {
    acceptance_is_what_the_rows_say(2_000);
}
