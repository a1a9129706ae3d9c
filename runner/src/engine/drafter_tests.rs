//! The drafter against the goldens of the tiny checkpoints: what it drafts after a prompt taken in chunks has the logits of the
//! reference's head, so its positions, key-values and carried states are the reference's too.

use std::cell::RefCell;

use lookahead_protocol::request::Verify;
use mlx_rs::ops::indexing::argmax_axis;
use serde_json::Value;

use super::*;
use crate::engine::decode::ids_array;
use crate::mlx::{Backend, Path};
use crate::model::checkpoint::Checkpoint;
use crate::model::plan::{plan, PlanOptions};
use crate::model::qwen3_5::{load, Qwen35, Scores};
use crate::model::test_support::{fixtures, tiny};
use crate::model::weights::{Precision, Weights};
use crate::model::{DraftKind, Model as _};
use crate::sample::{SamplingOptions, Shape, Vocabulary};

/// Draft steps of a golden.
const STEPS: usize = 4;

/// A head that keeps what it scored.
struct Watched<'m> {
    head: &'m dyn DraftModel,
    logits: RefCell<Vec<Array>>,
}

impl DraftModel for Watched<'_> {
    fn new_caches(&self) -> Caches {
        self.head.new_caches()
    }

    fn forward(&self, batch: &Batch<'_>, target: &Caches, draft: &mut Caches) -> Result<Array> {
        self.head.forward(batch, target, draft)
    }

    fn unembed(&self, hidden: &Array) -> Result<Array> {
        let logits = self.head.unembed(hidden)?;
        self.logits.borrow_mut().push(logits.clone());
        Ok(logits)
    }

    fn kind(&self) -> DraftKind {
        self.head.kind()
    }
}

fn build(name: &str, path: Path) -> Qwen35 {
    Backend::select(true);
    let checkpoint = Checkpoint::open(&tiny(name)).unwrap();
    let plan = plan(&checkpoint, PlanOptions::default()).unwrap();
    let mut progress = |_| true;
    let weights = Weights::new(&checkpoint, &plan, Precision::Widen, &mut progress).unwrap();
    load(&weights, path, Scores::Stored).unwrap().model
}

fn ids(value: &Value) -> Vec<u32> {
    let list = value.as_array().unwrap();
    list.iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

/// Feeds `tokens` to trunk and drafter in chunks; returns the last state.
fn feed(
    model: &Qwen35,
    drafter: &mut Drafter<'_>,
    caches: &mut Caches,
    tokens: &[u32],
    chunk: usize,
) -> Array {
    let mut last = None;
    for part in tokens.chunks(chunk) {
        let ids = ids_array(part);
        let hidden = model
            .forward(&Batch::text(&ids, caches.offset()), caches)
            .unwrap();
        drafter.observe(&ids, &hidden, caches).unwrap();
        last = Some(hidden);
    }
    last.unwrap()
}

fn draft(
    watched: &Watched<'_>,
    drafter: &mut Drafter<'_>,
    model: &Qwen35,
    caches: &Caches,
    current: u32,
) -> (Vec<u32>, Array) {
    let size = model.vocabulary_size() as usize;
    let vocabulary = Vocabulary {
        logits: size,
        tokens: size,
    };
    let options = SamplingOptions {
        num_predict: None,
        num_ctx: None,
        shape: Shape::Greedy,
        penalties: None,
        seed: None,
        stop: Vec::new(),
        ignore_eos: true,
    };
    let sampler = Sampler::new(&options, Verify::Coupled, 1, vocabulary, &[], Path::Cpu);
    watched.logits.borrow_mut().clear();
    let position = caches.offset() as u64 + 1;
    let drafts = drafter
        .draft(&ids_array(&[current]), STEPS, position, &sampler, caches)
        .unwrap();
    let ids = drafts
        .iter()
        .map(|draft| draft.ids().item_cast::<i32>() as u32)
        .collect();
    (ids, concatenate(&watched.logits.borrow(), 1).unwrap())
}

fn worst(a: &Array, b: &Array) -> f32 {
    assert_eq!(a.size(), b.size());
    let (a, b) = (a.to_vec_cast::<f32>().unwrap(), b.to_vec_cast::<f32>().unwrap());
    a.iter()
        .zip(&b)
        .map(|(a, b)| (a - b).abs())
        .fold(0f32, |a, b| if b.is_nan() { b } else { a.max(b) })
}

fn each(check: impl Fn(&str, &Qwen35, &Value, &Array)) {
    for name in ["dense", "mlx-raw-sidecar", "moe-switch-head-each", "next"] {
        let file = |kind: &str| fixtures("golden").join(format!("{name}.{kind}"));
        let tensors = Array::load_safetensors(file("safetensors")).unwrap();
        let golden: Value = serde_json::from_slice(&std::fs::read(file("json")).unwrap()).unwrap();
        for path in [Path::Cpu, Path::Graph] {
            let model = build(name, path);
            for prompt in golden["prompts"].as_array().unwrap() {
                let logits = &tensors[&format!("{}.mtp.logits", prompt["name"].as_str().unwrap())];
                check(
                    &format!("{name} {path:?} {}", prompt["name"]),
                    &model,
                    prompt,
                    logits,
                );
            }
        }
    }
}

#[test]
fn drafts_after_a_prompt_in_chunks_have_the_golden_logits() {
    each(|what, model, prompt, golden| {
        let tokens = ids(&prompt["ids"]);
        let first = prompt["mtp"]["first_token"].as_u64().unwrap() as u32;
        for chunk in [1, 5, tokens.len()] {
            let watched = Watched {
                head: model.self_draft().unwrap(),
                logits: RefCell::default(),
            };
            let (mut drafter, mut caches) = (Drafter::new(&watched), model.new_caches());
            let last = feed(model, &mut drafter, &mut caches, &tokens, chunk);
            let rows = last.dim(1);
            let scored = model
                .unembed(&ops::slice_axis(&last, 1, rows - 1, rows).unwrap())
                .unwrap();
            assert_eq!(
                argmax_axis(scored, -1, None).unwrap().item_cast::<i32>() as u32,
                first
            );
            // Twice: what one round drafts may leave no trace in the next.
            for _ in 0..2 {
                let (drafts, logits) = draft(&watched, &mut drafter, model, &caches, first);
                let off = worst(&logits, golden);
                assert!(
                    off < 1e-3,
                    "{what} in chunks of {chunk}: draft logits differ by {off}"
                );
                assert_eq!(drafts, ids(&prompt["mtp"]["drafts"]), "{what}");
                // The pair of the last slot is written now; taken back, the same round runs again.
                drafter.unsettle();
            }
        }
    });
}
