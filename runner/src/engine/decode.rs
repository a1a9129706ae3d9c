//! The two decoders of one sequence: plain and pipelined, and speculative rounds.
//!
//! Invariant: after every call that succeeds the caches hold exactly the tokens in `consumed`, `current` is the token that
//! the trunk consumes next, or the one that ended the generation, and the drafter has been told of every consumed token.
//! After one that fails they are of no use and go with the sequence.

use mlx_rs::ops::concatenate;
use mlx_rs::transforms::{async_eval, eval};
use mlx_rs::Array;

use super::drafter::Drafter;
use super::emit::{Emitter, Finish};
use super::job::Refusal;
use super::stats::{RoundStats, Tested};
use crate::cache::{Caches, Mark};
use crate::host::outbox::Outbox;
use crate::mlx::ops;
use crate::model::{Batch, Model};
use crate::sample::constraint::Constraint;
use crate::sample::{Draft, Logprobs, Rows, SampleError, Sampler, TokenScores};
use crate::speculate::round::{settle, Judged};

/// A sequence that generates.
#[derive(Debug)]
pub struct Decoding<'m> {
    /// The trunk.
    pub model: &'m dyn ModelDebug,
    /// Its state.
    pub caches: Caches,
    /// The drafter, where the request may draft.
    pub drafter: Option<Drafter<'m>>,
    /// Draws tokens.
    pub sampler: Sampler,
    /// Text and terminators.
    pub emitter: Emitter,
    /// What the output has to satisfy.
    pub constraint: Option<Constraint>,
    /// Tokens in the caches.
    pub consumed: Vec<u32>,
    /// The next token to consume.
    pub current: u32,
    /// What rotary positions are off by from slots, after pictures.
    pub delta: i32,
    /// What drafting did.
    pub stats: RoundStats,
}

/// A model that can be printed, which a derive asks for.
pub trait ModelDebug: Model + std::fmt::Debug {}
impl<T: Model + std::fmt::Debug> ModelDebug for T {}

#[cfg(test)]
thread_local! {
    /// Times that the host has waited for the device while decoding.
    pub(super) static WAITS: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
}

/// Goes with every call that makes the host wait for the device, so that tests can count them.
pub(super) fn waiting() {
    #[cfg(test)]
    WAITS.with(|waits| waits.set(waits.get() + 1));
}

/// One dispatched step of plain decoding.
struct Step {
    ids: Array,
    hidden: Array,
    rows: Rows,
    /// The caches before this step.
    before: Mark,
    /// Position of the token that it draws.
    position: u64,
    /// Log-probabilities, where wanted.
    scores: Option<Logprobs>,
}

/// Token ids as the batch wants them, [1, n].
pub fn ids_array(ids: &[u32]) -> Array {
    let ids: Vec<i32> = ids.iter().map(|&id| id as i32).collect();
    Array::from_slice(&ids, &[1, ids.len() as i32])
}

impl Decoding<'_> {
    /// Bytes of its caches.
    pub fn bytes(&self) -> u64 {
        self.caches.bytes() + self.drafter.as_ref().map_or(0, Drafter::bytes)
    }

    fn dispatch(&mut self, ids: Array) -> Result<Step, Refusal> {
        let before = self.caches.mark();
        let slot = self.caches.offset();
        let hidden = self
            .model
            .forward(&Batch::text(&ids, slot + self.delta), &mut self.caches)?;
        let logits = self.model.unembed(&hidden)?;
        let position = slot as u64 + 1;
        let logits = logits.reshape(&[1, logits.dim(2)])?;
        let mask = match &mut self.constraint {
            Some(constraint) => {
                // The device computes while the grammar says what may come.
                async_eval([&logits])?;
                Some(self.sampler.mask(&[Some(constraint.mask()?)]))
            }
            None => None,
        };
        let rows = self.sampler.next(&logits, position, mask.as_ref())?;
        let scores = match self.emitter.logprobs() {
            Some(top) => Some(self.sampler.logprobs(&logits, &rows.picks(), top)?),
            None => None,
        };
        let beside = scores.iter().flat_map(Logprobs::arrays);
        async_eval([&rows.choice, &rows.peak, &hidden].into_iter().chain(beside))?;
        Ok(Step {
            ids,
            hidden,
            rows,
            before,
            position,
            scores,
        })
    }

    /// Decodes up to `steps` tokens, at least one, each step dispatched before the one before it is read.
    ///
    /// The step under way when the generation ends is undone: its token belongs to nobody.
    pub fn plain(
        &mut self,
        steps: u32,
        outbox: &Outbox,
        cancelled: impl Fn() -> bool,
    ) -> Result<Option<Finish>, Refusal> {
        let mut ahead = self.dispatch(ids_array(&[self.current]))?;
        for left in (0..steps.max(1)).rev() {
            // The last step of the budget needs no successor, and a constraint has to see each token before the next.
            let more = left > 0 && self.emitter.remaining() > 1 && self.constraint.is_none();
            let next = if more {
                self.sampler.commit_pending(&ahead.rows.choice)?;
                let ids = ahead.rows.choice.reshape(&[1, 1])?;
                Some(self.dispatch(ids)?)
            } else {
                None
            };
            waiting();
            let token = ahead.rows.read(ahead.position)?;
            match next {
                Some(_) => self.sampler.confirm(token),
                None => self.sampler.commit(&[token])?,
            }
            self.consumed.push(self.current);
            if let Some(drafter) = &mut self.drafter {
                drafter.observe(&ahead.ids, &ahead.hidden, &self.caches)?;
            }
            self.current = token;
            self.stats.plain();
            let scores = match &ahead.scores {
                Some(scores) => scores.read([token])?,
                None => Vec::new(),
            };
            let finish = self.take(token, scores.first())?;
            self.emitter.send(outbox);
            let finish = finish.or_else(|| cancelled().then_some(Finish::Cancelled));
            if finish.is_some() {
                if let Some(next) = next {
                    self.caches.reset(next.before);
                }
                return Ok(finish);
            }
            ahead = match next {
                Some(next) => next,
                None if left > 0 && self.constraint.is_some() => self.dispatch(ids_array(&[token]))?,
                None => return Ok(None),
            };
        }
        Ok(None)
    }

    /// Judges a generated token, the constraint's view included.
    fn take(&mut self, token: u32, scores: Option<&TokenScores>) -> Result<Option<Finish>, Refusal> {
        let finish = self.emitter.take(token, scores);
        if let (None | Some(Finish::Length), Some(constraint)) = (&finish, &mut self.constraint) {
            constraint.commit(token)?;
            if constraint.is_complete() {
                return Ok(Some(Finish::Stop(None)));
            }
        }
        Ok(finish)
    }

    /// Cuts drafts where the constraint forbids one, and makes the rows' masks. Costs constrained requests one more read.
    fn legal(&mut self, mut drafts: Vec<Draft>) -> Result<(Vec<Draft>, Option<Array>), Refusal> {
        let Some(constraint) = &mut self.constraint else {
            return Ok((drafts, None));
        };
        waiting();
        eval(drafts.iter().map(Draft::ids))?;
        let ids: Vec<u32> = drafts
            .iter()
            .map(|draft| draft.ids().item_cast::<i32>() as u32)
            .collect();
        let rows = constraint.masks_along(&ids)?;
        drafts.truncate(rows.legal);
        let words: Vec<Option<&[u32]>> = (0..=rows.legal).map(|row| Some(rows.row(row))).collect();
        Ok((drafts, Some(self.sampler.mask(&words))))
    }

    /// One round: drafts, one forward over the current token and the drafts, one read, rollback to what stands. A plain step
    /// where nothing can be drafted.
    pub fn round(&mut self, depth: usize, outbox: &Outbox) -> Result<Option<Finish>, Refusal> {
        let slot = self.caches.offset();
        let position = slot as u64 + 1;
        let current = ids_array(&[self.current]);
        let drafts = match &mut self.drafter {
            Some(drafter) => drafter.draft(&current, depth, position, &self.sampler, &self.caches)?,
            None => Vec::new(),
        };
        if drafts.is_empty() {
            return self.plain(1, outbox, || false);
        }
        let proposed = drafts.len();
        let (drafts, masks) = self.legal(drafts)?;
        let mut parts = vec![current];
        for draft in &drafts {
            parts.push(draft.ids().reshape(&[1, -1])?);
        }
        let ids = concatenate(&parts, 1)?;
        let before = self.caches.mark();
        self.caches.keep_rows(true);
        let hidden = self
            .model
            .forward(&Batch::text(&ids, slot + self.delta), &mut self.caches)?;
        let logits = self.model.unembed(&hidden)?;
        let rows = logits.dim(1);
        let logits = logits.reshape(&[rows, logits.dim(2)])?;
        let verdict = self.sampler.verify(&logits, position, &drafts, masks.as_ref())?;
        let scores = match self.emitter.logprobs() {
            Some(top) => Some(self.sampler.logprobs(&logits, &verdict.picks(), top)?),
            None => None,
        };
        waiting();
        eval(verdict.arrays().chain(scores.iter().flat_map(Logprobs::arrays)))?;
        let outcome = match verdict.read() {
            Ok(outcome) => outcome,
            Err(error @ SampleError::NanDraft { .. }) => {
                // The target is sound; the request goes on without drafts.
                tracing::warn!("drafting ends for this request: {error}");
                self.drafter = None;
                self.caches.keep_rows(false);
                self.caches.reset(before);
                return self.plain(1, outbox, || false);
            }
            Err(error) => return Err(error.into()),
        };
        let judged = Judged {
            current: self.current,
            drafts: &outcome.drafts,
            accepted: outcome.accepted,
            next: outcome.next,
        };
        let scores = match scores {
            Some(scores) => scores.read(outcome.tokens())?,
            None => Vec::new(),
        };
        let mut scores = scores.iter();
        let settled = settle(&judged, |token| self.take(token, scores.next()).transpose());
        let kept = settled.kept() as i32;
        self.caches.rollback(slot + kept)?;
        self.caches.keep_rows(false);
        self.consumed.extend(&settled.committed);
        self.sampler.commit(&settled.recorded)?;
        if let Some(drafter) = &mut self.drafter {
            let ids = ops::slice_axis(&ids, 1, 0, kept)?;
            drafter.observe(&ids, &ops::slice_axis(&hidden, 1, 0, kept)?, &self.caches)?;
        }
        self.current = settled.current().unwrap_or(self.current);
        self.stats.round(
            proposed,
            Tested {
                drafts: drafts.len(),
                tested: settled.tested,
                accepted: settled.accepted,
            },
        );
        self.emitter.send(outbox);
        settled.finish.transpose()
    }
}

#[cfg(test)]
#[path = "decode_tests.rs"]
mod tests;
