//! Drafting at a known acceptance, for `--measure`: the head runs as it does in requests, but its choices are replaced.
//!
//! Invariant: rounds, verification and rollback are those of requests; only which token the head's logits favour is made
//! up: the target's own next token with a given probability, another one otherwise. Random weights have a head that knows
//! nothing, and this shows what a trained one would be worth.

use std::cell::Cell;
use std::time::Instant;

use mlx_rs::error::Result as MlxResult;
use mlx_rs::ops::indexing::put_along_axis;
use mlx_rs::transforms::eval;
use mlx_rs::{Array, Dtype};
use serde::Serialize;

use super::job::Refusal;
use super::text::TextStack;
use super::warmup::sequence;
use crate::cache::Caches;
use crate::host::outbox::Outbox;
use crate::mlx::{ops, Path};
use crate::model::qwen3_5::Qwen35;
use crate::model::{Batch, DraftKind, DraftModel, Model as _};
use crate::sample::rng;

/// How often the simulated head is right.
const ACCEPTANCE: f64 = 0.75;
/// Depths tried.
const DEPTHS: [usize; 5] = [1, 2, 3, 4, 5];
/// Tokens timed, and tokens before that.
const TOKENS: u32 = 400;
const WARM: u32 = 24;
/// Tokens beyond the known ones that drafts may be asked for.
const BEYOND: usize = 64;

/// Drafting at one depth.
#[derive(Debug, Serialize)]
pub struct Simulated {
    /// Drafts a round.
    pub depth: usize,
    /// Probability that a draft is the target's own token.
    pub right: f64,
    /// Drafts accepted of those proposed.
    pub accepted: f64,
    /// Tokens a second with drafts, over those of plain decoding of the same sequence.
    pub speedup: f64,
}

/// A head that is right with probability [`ACCEPTANCE`] about a sequence known in advance.
struct Oracle<'m> {
    head: &'m dyn DraftModel,
    /// What it favours at each place of the sequence and somewhat beyond, [1, n, 1] int32.
    favoured: Array,
    /// A logit above all others for each, [1, n, 1].
    certain: Array,
    /// Slots of the head's cache after its last forward.
    slots: Cell<usize>,
}

impl<'m> Oracle<'m> {
    fn new(head: &'m dyn DraftModel, sequence: &[u32], dtype: Dtype) -> MlxResult<Self> {
        let favoured: Vec<i32> = (0..sequence.len() + BEYOND)
            .map(|place| {
                let truth = sequence.get(place).copied().unwrap_or(0);
                let right = rng::uniform(7, place as u64, rng::Purpose::Accept) < ACCEPTANCE as f32;
                if right {
                    truth as i32
                } else {
                    (truth ^ 1) as i32
                }
            })
            .collect();
        let shape = [1, favoured.len() as i32, 1];
        let certain = ops::cast(&Array::from_slice(&vec![1e6f32; favoured.len()], &shape), dtype)?;
        let favoured = Array::from_slice(&favoured, &shape);
        // Computed with once, so that they lie on the device.
        eval([&favoured.add(&favoured)?, &certain])?;
        Ok(Self {
            head,
            favoured,
            certain,
            slots: Cell::new(0),
        })
    }
}

impl DraftModel for Oracle<'_> {
    fn new_caches(&self) -> Caches {
        self.head.new_caches()
    }

    fn forward(&self, batch: &Batch<'_>, target: &Caches, draft: &mut Caches) -> MlxResult<Array> {
        let out = self.head.forward(batch, target, draft)?;
        self.slots.set(draft.offset() as usize);
        Ok(out)
    }

    fn unembed(&self, hidden: &Array) -> MlxResult<Array> {
        let logits = self.head.unembed(hidden)?;
        // Slot S predicts token S + 2, and the last slot is `slots - 1`.
        let (rows, last) = (hidden.dim(1), self.slots.get() as i32 + 1);
        let of = |a: &Array| ops::slice_axis(a, 1, last + 1 - rows, last + 1);
        // Its other logits are the head's own, so that the projection is computed.
        put_along_axis(&logits, of(&self.favoured)?, of(&self.certain)?, 2)
    }

    fn kind(&self) -> DraftKind {
        self.head.kind()
    }
}

/// Times rounds of each depth against plain decoding.
///
/// # Errors
/// The device fails.
pub fn simulate(model: &Qwen35, text: &TextStack, path: Path) -> Result<Vec<Simulated>, Refusal> {
    let Some(head) = model.self_draft() else {
        return Ok(Vec::new());
    };
    let nobody = Outbox::default();
    let known = text.tokenizer.len() as u32;
    let prompt: Vec<u32> = (0..64).map(|i| i * 131 % known.max(1)).collect();
    let mut plain = sequence(model, None, text, path, prompt.clone())?;
    plain.plain(WARM, &nobody, || false)?;
    let start = Instant::now();
    plain.plain(TOKENS, &nobody, || false)?;
    let plain_rate = f64::from(TOKENS) / start.elapsed().as_secs_f64();
    // Far enough for the drafts beyond the last timed token.
    plain.plain(64, &nobody, || false)?;
    let mut truth = plain.consumed.clone();
    truth.push(plain.current);
    drop(plain);
    let oracle = Oracle::new(head, &truth, model.activations())?;
    let mut out = Vec::new();
    for depth in DEPTHS {
        let mut decoding = sequence(model, Some(&oracle), text, path, prompt.clone())?;
        let until = |count: u32| prompt.len() + count as usize;
        while decoding.consumed.len() < until(WARM) {
            decoding.round(depth, &nobody)?;
        }
        let (from, start) = (decoding.consumed.len(), Instant::now());
        let before = decoding.stats.clone();
        while decoding.consumed.len() < until(WARM + TOKENS) {
            decoding.round(depth, &nobody)?;
        }
        let rate = (decoding.consumed.len() - from) as f64 / start.elapsed().as_secs_f64();
        let (proposed, accepted) = (
            decoding.stats.proposed() - before.proposed(),
            decoding.stats.accepted() - before.accepted(),
        );
        out.push(Simulated {
            depth,
            right: ACCEPTANCE,
            accepted: accepted as f64 / proposed.max(1) as f64,
            speedup: rate / plain_rate,
        });
    }
    Ok(out)
}
