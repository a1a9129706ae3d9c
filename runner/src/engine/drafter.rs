//! The drafter of one sequence: a chained head with key-values of its own.
//!
//! Invariant: slot S of the head's cache pairs the trunk's state at S with the token at S + 1. Slots `0..written` are in the
//! cache, the pairs after them wait in `pending`, and the state whose token isn't known yet is the frontier; together they
//! cover every token that the trunk has consumed, drafting or not.
//! Source: DeepSeek-V3 technical report (2024), multi-token prediction.

use std::rc::Rc;

use mlx_rs::error::{Exception, Result};
use mlx_rs::ops::concatenate;
use mlx_rs::transforms::{async_eval, eval};
use mlx_rs::Array;

use super::decode::waiting;
use super::media::Placed;
use crate::cache::{Caches, KvSegment};
use crate::mlx::ops;
use crate::model::{Batch, Dispatch, DraftKind, DraftModel};
use crate::sample::{Draft, Sampler};

/// Pairs that may wait before they are written in one batch.
const FLUSH_AT: i32 = 256;

/// See the module's text.
pub struct Drafter<'m> {
    head: &'m dyn DraftModel,
    caches: Caches,
    pending: Vec<(Array, Array)>,
    waiting: i32,
    frontier: Option<Array>,
    /// Tokens that the trunk has consumed.
    consumed: i32,
    /// The prompt's pictures.
    media: Rc<Placed>,
    /// A first draft that was begun before anybody asked for it.
    begun: Option<Begun>,
    /// First drafts after each outcome of a round that the host hasn't read.
    ahead: Option<Begun>,
    /// Whether to draft so.
    looks_ahead: bool,
}

/// The first step of a chain, or of several that begin one position after the other.
#[derive(Debug)]
struct Begun {
    /// Of the first.
    position: u64,
    /// What the next step is conditioned on, [1, n, D].
    carried: Array,
    /// n rows.
    draft: Draft,
}

impl std::fmt::Debug for Drafter<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Drafter")
            .field("written", &self.caches.offset())
            .field("waiting", &self.waiting)
            .field("consumed", &self.consumed)
            .finish_non_exhaustive()
    }
}

impl<'m> Drafter<'m> {
    /// A drafter at the start of a sequence.
    pub fn new(head: &'m dyn DraftModel) -> Self {
        Self {
            head,
            caches: head.new_caches(),
            pending: Vec::new(),
            waiting: 0,
            frontier: None,
            consumed: 0,
            media: Rc::default(),
            begun: None,
            ahead: None,
            looks_ahead: false,
        }
    }

    /// The same where the device computes beside the host: the chain after a round begins on it before the host has read
    /// the round, for each outcome that the round may have, which costs a GPU no more than one.
    pub fn looking_ahead(self, looks_ahead: bool) -> Self {
        Self { looks_ahead, ..self }
    }

    /// The same for a prompt with pictures.
    pub fn with_media(self, media: &Rc<Placed>) -> Self {
        Self {
            media: Rc::clone(media),
            ..self
        }
    }

    /// Restores the state after `consumed` tokens: the head's key-values of slots `0..consumed - 1`, and the frontier.
    pub fn restore(&mut self, consumed: i32, segments: Vec<KvSegment>, frontier: Array) -> Result<()> {
        let mut caches = self.head.new_caches();
        caches.restore(consumed - 1, vec![segments], None)?;
        self.resume(consumed, caches, frontier);
        Ok(())
    }

    /// The same from caches of a sequence that has gone at least as far.
    pub fn resume(&mut self, consumed: i32, mut caches: Caches, frontier: Array) {
        caches.rewind(consumed - 1);
        self.caches = caches;
        self.begun = None;
        self.pending.clear();
        self.waiting = 0;
        self.consumed = consumed;
        self.frontier = Some(frontier);
    }

    /// Reports that the trunk has consumed `ids` [1, L], with its states after the final norm, [1, L, D].
    pub fn observe(&mut self, ids: &Array, hidden: &Array, target: &Caches) -> Result<()> {
        let rows = ids.dim(1);
        self.begun = None;
        let last = ops::slice_axis(hidden, 1, rows - 1, rows)?;
        // The pair of slot `consumed - 1` is there already if the last round drafted from it.
        let known = self.caches.offset() + self.waiting;
        let first = match &self.frontier {
            Some(frontier) if known < self.consumed => Some(frontier.clone()),
            _ => None,
        };
        let states = match (first, rows) {
            (Some(frontier), 1) => Some((ids.clone(), frontier)),
            (Some(frontier), _) => {
                let before = ops::slice_axis(hidden, 1, 0, rows - 1)?;
                Some((ids.clone(), concatenate(&[frontier, before], 1)?))
            }
            (None, 1) => None,
            (None, _) => Some((
                ops::slice_axis(ids, 1, 1, rows)?,
                ops::slice_axis(hidden, 1, 0, rows - 1)?,
            )),
        };
        if let Some((tokens, states)) = states {
            self.waiting += tokens.dim(1);
            self.pending.push((tokens, states));
        }
        self.frontier = Some(if rows > 1 { ops::compact(&last)? } else { last });
        self.consumed += rows;
        if self.waiting >= FLUSH_AT {
            self.flush(target)?;
        }
        Ok(())
    }

    fn take_pending(&mut self, extra: Option<(Array, Array)>) -> Result<Option<(Array, Array)>> {
        let parts: Vec<(Array, Array)> = self.pending.drain(..).chain(extra).collect();
        self.waiting = 0;
        match &parts[..] {
            [] => Ok(None),
            [one] => Ok(Some(one.clone())),
            several => {
                let tokens: Vec<&Array> = several.iter().map(|p| &p.0).collect();
                let states: Vec<&Array> = several.iter().map(|p| &p.1).collect();
                Ok(Some((concatenate(&tokens, 1)?, concatenate(&states, 1)?)))
            }
        }
    }

    fn run(&mut self, tokens: &Array, states: &Array, target: &Caches) -> Result<Array> {
        let (slot, rows) = (self.caches.offset(), tokens.dim(1));
        let batch = Batch {
            ids: tokens,
            positions: self.media.positions(slot, rows),
            // A pair's token stands one slot ahead of its state.
            media: &self.media.media(slot + 1, rows)?,
            conditioning: Some(states),
            dispatch: Dispatch::Together,
        };
        self.head.forward(&batch, target, &mut self.caches)
    }

    /// Writes all waiting pairs.
    pub fn flush(&mut self, target: &Caches) -> Result<()> {
        if let Some((tokens, states)) = self.take_pending(None)? {
            self.run(&tokens, &states, target)?;
            waiting();
            eval(self.caches.arrays())?;
        }
        Ok(())
    }

    /// Levels the head's cache with the trunk's: every pair is written, the one of the last consumed token and `current`
    /// included, so that both can be stored slot by slot. [`Drafter::unsettle`] comes before the next draft.
    pub fn settle(&mut self, current: u32, target: &Caches) -> Result<()> {
        let extra = match &self.frontier {
            Some(frontier) if self.caches.offset() + self.waiting < self.consumed => {
                Some((Array::from_slice(&[current as i32], &[1, 1]), frontier.clone()))
            }
            _ => None,
        };
        if let Some((tokens, states)) = self.take_pending(extra)? {
            self.run(&tokens, &states, target)?;
            waiting();
            eval(self.caches.arrays())?;
        }
        Ok(())
    }

    /// Forgets the pair of the last consumed token again: its output is where the next draft begins.
    pub fn unsettle(&mut self) {
        self.begun = None;
        self.caches.rewind(self.consumed - 1);
    }

    /// Begins the chain after `current` ([1, 1]), whose first draft has `position`, before it is known whether anybody will
    /// ask for it, so that the device has work while the host settles a round. [`Drafter::observe`] drops it again.
    pub fn begin(
        &mut self,
        current: &Array,
        position: u64,
        sampler: &Sampler,
        target: &Caches,
    ) -> Result<()> {
        self.begun = self.first(current, position, sampler, target)?;
        Ok(())
    }

    /// Begins the chains after every outcome of a round: `successors` [1, k + 1] follow the states `hidden` [1, k + 1, D] of its rows
    /// if it gets so far, and `position` is that of the first draft if no draft stands. Whether it did; then [`Drafter::follow`]
    /// comes next.
    pub fn look_ahead(
        &mut self,
        successors: &Array,
        hidden: &Array,
        position: u64,
        sampler: &Sampler,
        target: &Caches,
    ) -> Result<bool> {
        // Penalties make what is drafted depend on the outcome.
        let level = self.caches.offset() == self.consumed && self.waiting == 0;
        if !self.looks_ahead || !level || !self.is_independent() || sampler.has_penalties() {
            return Ok(false);
        }
        let carried = self.run(successors, hidden, target)?;
        let draft = self.score(&carried, position, sampler, &[])?;
        self.ahead = Some(Begun {
            position,
            carried,
            draft,
        });
        Ok(true)
    }

    /// Reports that `rows` of the round looked ahead of stand, the last of them with state `hidden[rows - 1]`; `goes_on`: the
    /// token after them is their successor, and not where the generation ends.
    pub fn follow(&mut self, rows: i32, hidden: &Array, goes_on: bool) -> Result<()> {
        let ahead = self
            .ahead
            .take()
            .ok_or_else(|| Exception::custom("the drafter follows a round that it did not look ahead of"))?;
        let last = |states: &Array| ops::slice_axis(states, 1, rows - 1, rows);
        self.consumed += rows;
        self.frontier = Some(ops::compact(&last(hidden)?)?);
        self.begun = None;
        if goes_on {
            self.begun = Some(Begun {
                position: ahead.position + rows as u64 - 1,
                carried: last(&ahead.carried)?,
                draft: ahead.draft.row(rows - 1)?,
            });
        }
        self.caches.rewind(self.consumed - i32::from(!goes_on));
        Ok(())
    }

    /// The first step of the chain; `None` where there is no state to start from.
    fn first(
        &mut self,
        current: &Array,
        position: u64,
        sampler: &Sampler,
        target: &Caches,
    ) -> Result<Option<Begun>> {
        let Some(frontier) = self.frontier.clone() else {
            return Ok(None);
        };
        let extra =
            (self.caches.offset() + self.waiting < self.consumed).then(|| (current.clone(), frontier));
        let (tokens, states) = self
            .take_pending(extra)?
            .ok_or_else(|| Exception::custom("the drafter has no pair for the current token"))?;
        let out = self.run(&tokens, &states, target)?;
        let rows = out.dim(1);
        let carried = ops::slice_axis(&out, 1, rows - 1, rows)?;
        let draft = self.score(&carried, position, sampler, &[])?;
        Ok(Some(Begun {
            position,
            carried,
            draft,
        }))
    }

    /// Draws a token from each state [1, n, D] of the head, for positions in a row. The device drafts while the host
    /// describes the next step; on the host's cores too this is worth a quarter of a round.
    fn score(&self, carried: &Array, position: u64, sampler: &Sampler, before: &[Draft]) -> Result<Draft> {
        let logits = self.head.unembed(carried)?;
        let (rows, width) = (logits.dim(1), logits.dim(2));
        let draft = sampler.draft(&logits.reshape(&[rows, width])?, position, before, None)?;
        async_eval([draft.ids()])?;
        Ok(draft)
    }

    /// Draws `depth` tokens after `current` ([1, 1]), the token that the trunk consumes next; `position` is that of the first
    /// draft. Each draft is on its way to the device before the next is described; nothing is waited for.
    pub fn draft(
        &mut self,
        current: &Array,
        depth: usize,
        position: u64,
        sampler: &Sampler,
        target: &Caches,
    ) -> Result<Vec<Draft>> {
        let first = match self.begun.take().filter(|begun| begun.position == position) {
            Some(begun) => Some(begun),
            None => self.first(current, position, sampler, target)?,
        };
        let Some(Begun {
            mut carried, draft, ..
        }) = first
        else {
            return Ok(Vec::new());
        };
        let settled = self.caches.offset();
        let mut drafts = vec![draft];
        for step in 1..depth {
            let token = drafts[step - 1].ids().reshape(&[1, 1])?;
            carried = self.run(&token, &carried, target)?;
            drafts.push(self.score(&carried, position + step as u64, sampler, &drafts)?);
        }
        // Chained slots hold the head's own states; accepted ones are rewritten from the trunk's with the next first call.
        self.caches.rewind(settled);
        Ok(drafts)
    }

    /// Whether it begins chains before a round is read.
    pub fn looks_ahead(&self) -> bool {
        self.looks_ahead
    }

    /// Whether the chain needs nothing of the trunk but the states that it was told of.
    pub fn is_independent(&self) -> bool {
        self.head.kind() == DraftKind::ChainedHead
    }

    /// Bytes held.
    pub fn bytes(&self) -> u64 {
        self.caches.bytes()
    }

    /// The head's caches, for a later sequence.
    pub fn into_caches(self) -> Caches {
        self.caches
    }

    /// The head's caches, level with the trunk but for the frontier once flushed.
    pub fn caches(&self) -> &Caches {
        &self.caches
    }

    /// The trunk's state at the last consumed token, [1, 1, D].
    pub fn frontier(&self) -> Option<&Array> {
        self.frontier.as_ref()
    }
}

#[cfg(test)]
#[path = "drafter_tests.rs"]
mod tests;
