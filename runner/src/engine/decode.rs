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
use crate::model::{Batch, Dispatch, Model};
use crate::sample::constraint::Constraint;
use crate::sample::{Draft, Logprobs, Rows, SampleError, Sampler, TokenScores, Verdict};
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

/// A forward over one token that is under way.
struct Forward {
    ids: Array,
    hidden: Array,
    logits: Array,
    /// The caches before it.
    before: Mark,
    /// Position of the token that comes of it.
    position: u64,
}

/// One dispatched step of plain decoding.
struct Step {
    forward: Forward,
    rows: Rows,
    /// Log-probabilities, where wanted.
    scores: Option<Logprobs>,
}

/// What goes on while a token is read.
enum Ahead {
    Nothing,
    /// The next step, which needs no look at the token.
    Step(Step),
    /// The next forward; a constraint has to see the token before the next one is chosen.
    Forward(Forward),
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

    fn forward(&mut self, ids: Array) -> Result<Forward, Refusal> {
        let before = self.caches.mark();
        let slot = self.caches.offset();
        let hidden = self
            .model
            .forward(&Batch::text(&ids, slot + self.delta), &mut self.caches)?;
        let logits = self.model.unembed(&hidden)?;
        let logits = logits.reshape(&[1, logits.dim(2)])?;
        if self.constraint.is_some() {
            // The device computes while the grammar says what may come.
            async_eval([&logits, &hidden])?;
        }
        Ok(Forward {
            ids,
            hidden,
            logits,
            before,
            position: slot as u64 + 1,
        })
    }

    fn choose(&mut self, forward: Forward) -> Result<Step, Refusal> {
        let Forward {
            logits,
            hidden,
            position,
            ..
        } = &forward;
        let mask = match &mut self.constraint {
            Some(constraint) => Some(self.sampler.mask(&[Some(constraint.mask()?)])),
            None => None,
        };
        let rows = self.sampler.next(logits, *position, mask.as_ref())?;
        let scores = match self.emitter.logprobs() {
            Some(top) => Some(self.sampler.logprobs(logits, &rows.picks(), top)?),
            None => None,
        };
        let beside = scores.iter().flat_map(Logprobs::arrays);
        async_eval([&rows.choice, &rows.peak, hidden].into_iter().chain(beside))?;
        Ok(Step {
            forward,
            rows,
            scores,
        })
    }

    fn dispatch(&mut self, ids: Array) -> Result<Step, Refusal> {
        let forward = self.forward(ids)?;
        self.choose(forward)
    }

    /// Decodes up to `steps` tokens, at least one, each forward dispatched before the token before it is read.
    ///
    /// The forward under way when the generation ends is undone: its token belongs to nobody.
    pub fn plain(
        &mut self,
        steps: u32,
        outbox: &Outbox,
        cancelled: impl Fn() -> bool,
    ) -> Result<Option<Finish>, Refusal> {
        let mut step = self.dispatch(ids_array(&[self.current]))?;
        for left in (0..steps.max(1)).rev() {
            // The last step of the budget needs no successor.
            let ahead = if left == 0 || self.emitter.remaining() <= 1 {
                Ahead::Nothing
            } else {
                let ids = step.rows.choice.reshape(&[1, 1])?;
                if self.constraint.is_some() {
                    Ahead::Forward(self.forward(ids)?)
                } else {
                    self.sampler.commit_pending(&step.rows.choice)?;
                    Ahead::Step(self.dispatch(ids)?)
                }
            };
            waiting();
            let token = step.rows.read(step.forward.position)?;
            match ahead {
                Ahead::Step(_) => self.sampler.confirm(token),
                _ => self.sampler.commit(&[token])?,
            }
            self.consumed.push(self.current);
            if let Some(drafter) = &mut self.drafter {
                drafter.observe(&step.forward.ids, &step.forward.hidden, &self.caches)?;
            }
            self.current = token;
            self.stats.plain();
            let scores = match &step.scores {
                Some(scores) => scores.read([token])?,
                None => Vec::new(),
            };
            let finish = self.take(token, scores.first())?;
            self.emitter.send(outbox);
            let finish = finish.or_else(|| cancelled().then_some(Finish::Cancelled));
            if finish.is_some() {
                match ahead {
                    Ahead::Nothing => {}
                    Ahead::Step(Step { forward, .. }) | Ahead::Forward(forward) => {
                        self.caches.reset(forward.before);
                    }
                }
                return Ok(finish);
            }
            step = match ahead {
                Ahead::Nothing => return Ok(None),
                Ahead::Step(step) => step,
                Ahead::Forward(forward) => self.choose(forward)?,
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

    /// Cuts drafts where the constraint forbids one, and says which are left, where it had to know. Costs constrained
    /// requests one more read.
    fn legal(&mut self, mut drafts: Vec<Draft>) -> Result<(Vec<Draft>, Vec<u32>), Refusal> {
        let Some(constraint) = &mut self.constraint else {
            return Ok((drafts, Vec::new()));
        };
        waiting();
        eval(drafts.iter().map(Draft::ids))?;
        let mut ids: Vec<u32> = drafts
            .iter()
            .map(|draft| draft.ids().item_cast::<i32>() as u32)
            .collect();
        let legal = constraint.accepts_prefix(&ids)?;
        drafts.truncate(legal);
        ids.truncate(legal);
        Ok((drafts, ids))
    }

    /// The masks of the rows of a forward over the current token and `drafts`, made while the device computes `logits`.
    fn masks(&mut self, drafts: &[u32], logits: &Array) -> Result<Option<Array>, Refusal> {
        let Some(constraint) = &mut self.constraint else {
            return Ok(None);
        };
        async_eval([logits])?;
        let rows = constraint.masks_along(drafts)?;
        let words: Vec<Option<&[u32]>> = (0..=drafts.len()).map(|row| Some(rows.row(row))).collect();
        Ok(Some(self.sampler.mask(&words)))
    }

    /// Lets the drafter begin on the device what follows each outcome of a round, behind what the host is about to wait for.
    fn look_ahead(
        &mut self,
        verdict: &Verdict,
        scores: Option<&Logprobs>,
        hidden: &Array,
        position: u64,
    ) -> Result<bool, Refusal> {
        let Some(drafter) = self.drafter.as_mut().filter(|drafter| drafter.looks_ahead()) else {
            return Ok(false);
        };
        async_eval(
            verdict
                .arrays()
                .chain(scores.into_iter().flat_map(Logprobs::arrays)),
        )?;
        let successors = verdict.successors()?.reshape(&[1, -1])?;
        Ok(drafter.look_ahead(&successors, hidden, position, &self.sampler, &self.caches)?)
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
        let (drafts, legal) = self.legal(drafts)?;
        let mut parts = vec![current];
        for draft in &drafts {
            parts.push(draft.ids().reshape(&[1, -1])?);
        }
        let ids = concatenate(&parts, 1)?;
        let before = self.caches.mark();
        self.caches.keep_rows(true);
        let batch = Batch::text(&ids, slot + self.delta).dispatched(Dispatch::AsBuilt);
        let hidden = self.model.forward(&batch, &mut self.caches)?;
        let logits = self.model.unembed(&hidden)?;
        let rows = logits.dim(1);
        let logits = logits.reshape(&[rows, logits.dim(2)])?;
        let masks = self.masks(&legal, &logits)?;
        let verdict = self.sampler.verify(&logits, position, &drafts, masks.as_ref())?;
        let scores = match self.emitter.logprobs() {
            Some(top) => Some(self.sampler.logprobs(&logits, &verdict.picks(), top)?),
            None => None,
        };
        let ahead = self.look_ahead(&verdict, scores.as_ref(), &hidden, position + 1)?;
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
        let next = settled.current().filter(|_| settled.finish.is_none());
        self.consumed.extend(&settled.committed);
        self.sampler.commit(&settled.recorded)?;
        // A head that needs nothing of the trunk's caches is given its next work before the host undoes them.
        let early = self.drafter.as_ref().is_some_and(Drafter::is_independent);
        if !early {
            self.caches.rollback(slot + kept)?;
        }
        if let Some(drafter) = &mut self.drafter {
            if ahead {
                drafter.follow(kept, &hidden, next.is_some())?;
            } else {
                let ids = ops::slice_axis(&ids, 1, 0, kept)?;
                drafter.observe(&ids, &ops::slice_axis(&hidden, 1, 0, kept)?, &self.caches)?;
                if let Some(next) = next.filter(|_| early) {
                    let position = (slot + kept) as u64 + 1;
                    drafter.begin(&ids_array(&[next]), position, &self.sampler, &self.caches)?;
                }
            }
        }
        if early {
            self.caches.rollback(slot + kept)?;
        }
        self.caches.keep_rows(false);
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
#[path = "acceptance_tests.rs"]
mod acceptance_tests;
#[cfg(test)]
#[path = "plain_tests.rs"]
mod plain_tests;
#[cfg(test)]
#[path = "decode_support.rs"]
mod support;
#[cfg(test)]
#[path = "decode_tests.rs"]
mod tests;
