//! Prefill: a prompt through the model in chunks, and what it leaves in the prefix cache.
//!
//! Invariant: ended, cancelled or failed, the sequence stands at the last chunk that was evaluated whole, and that is where a
//! request with the same prompt goes on.

use lookahead_protocol::event::Prefill;
use lookahead_protocol::Event;
use mlx_rs::transforms::eval;
use mlx_rs::Array;

use super::decode::{ids_array, Decoding};
use super::drafter::Drafter;
use super::generate::Attempt;
use super::job::{Job, Refusal};
use super::media::Placed;
use super::prefix::{Live, Path, State};
use super::Engine;
use crate::mlx::{memory, ops};
use crate::model::{Batch, Dispatch};
use crate::prefix::plan::{Capture, PointKind, Role, Turn};
use crate::text::Specials;

impl Engine {
    /// Evaluates all prompt tokens but the last, which the first decode step consumes; false if cancelled on the way. `states`
    /// gets those at the captured offsets. Ended or failed, the sequence stands at the last chunk that was evaluated whole.
    pub(super) fn prefill(
        &mut self,
        job: &Job,
        decoding: &mut Decoding<'_>,
        attempt: &mut Attempt,
        (placed, captures): (&Placed, &[Capture]),
        states: &mut Vec<State>,
    ) -> Result<bool, Refusal> {
        let total = job.tokens.len();
        let end = total - 1;
        let mut at = decoding.consumed.len();
        decoding.current = job.tokens[at];
        while at < end {
            if self.cancelled(job) {
                break;
            }
            let to = end.min(at + self.settings.chunk);
            let ids = ids_array(&job.tokens[at..to]);
            let before = decoding.caches.mark();
            let hidden = match chunk(decoding, &ids, placed) {
                Ok(hidden) => hidden,
                Err(error) => {
                    decoding.caches.reset(before);
                    return Err(error.into());
                }
            };
            if let Some(drafter) = &mut decoding.drafter {
                if let Err(error) = drafter.observe(&ids, &hidden, &decoding.caches) {
                    decoding.drafter = None;
                    return Err(error.into());
                }
            }
            decoding.consumed.extend(&job.tokens[at..to]);
            decoding.current = job.tokens[to];
            for snapshot in decoding.caches.take_snapshots()? {
                let offset = snapshot.offset as usize;
                let frontier = match &decoding.drafter {
                    Some(_) => {
                        let row = (offset - at) as i32;
                        Some(ops::compact(&ops::slice_axis(&hidden, 1, row - 1, row)?)?)
                    }
                    None => None,
                };
                eval(&frontier)?;
                let kind = captures.iter().find(|c| c.offset == offset);
                states.push(State {
                    kind: kind.map_or(PointKind::Rest, |c| c.kind),
                    snapshot,
                    frontier,
                });
            }
            drop(hidden);
            if to - at >= 256 {
                memory::clear_cache();
            }
            at = to;
            let waiting: u64 = states.iter().map(|state| state.snapshot.bytes()).sum();
            self.prefix.set_running(decoding.bytes() + waiting);
            self.stay_within_memory(attempt.path.as_mut())?;
            self.report_prefill(job, attempt, at, total);
        }
        Ok(at == end && !self.cancelled(job))
    }

    /// Keeps what prefill has captured; where it didn't get to its end, also the point that it got to.
    pub(super) fn keep_states(
        &mut self,
        job: &Job,
        decoding: &mut Decoding<'_>,
        path: &mut Path,
        mut states: Vec<State>,
    ) -> Result<(), Refusal> {
        if lost_its_head(decoding) {
            return Ok(());
        }
        decoding.caches.schedule(&[]);
        let reached = decoding.consumed.len();
        let cut_short = reached + 1 < job.tokens.len();
        let is_captured = |last: &State| last.snapshot.offset as usize >= reached;
        if cut_short && reached > path.cached() && !states.last().is_some_and(is_captured) {
            let frontier = decoding.drafter.as_ref().and_then(Drafter::frontier).cloned();
            states.extend(decoding.caches.snapshot()?.map(|snapshot| State {
                kind: PointKind::Rest,
                snapshot,
                frontier,
            }));
        }
        if states.is_empty() {
            return Ok(());
        }
        if let Some(drafter) = &mut decoding.drafter {
            drafter.settle(decoding.current, &decoding.caches)?;
        }
        let live = Live {
            trunk: &decoding.caches,
            head: decoding.drafter.as_ref().map(Drafter::caches),
        };
        self.prefix.keep(path, states, &live);
        if let Some(drafter) = &mut decoding.drafter {
            drafter.unsettle();
        }
        Ok(())
    }

    /// Keeps where a request has come to rest.
    pub(super) fn keep_rest(&mut self, decoding: &mut Decoding<'_>, path: &mut Path) -> Result<(), Refusal> {
        if lost_its_head(decoding) {
            return Ok(());
        }
        let Some(snapshot) = decoding.caches.snapshot()? else {
            return Ok(());
        };
        if let Some(drafter) = &mut decoding.drafter {
            drafter.settle(decoding.current, &decoding.caches)?;
        }
        let frontier = match decoding.drafter.as_ref().and_then(Drafter::frontier) {
            Some(frontier) => Some(ops::compact(frontier)?),
            None => None,
        };
        let live = Live {
            trunk: &decoding.caches,
            head: decoding.drafter.as_ref().map(Drafter::caches),
        };
        self.prefix.keep(
            path,
            vec![State {
                kind: PointKind::Rest,
                snapshot,
                frontier,
            }],
            &live,
        );
        Ok(())
    }

    /// The turns of a rendered conversation, found by the template's own turn tokens.
    pub(super) fn turns(&self, tokens: &[u32]) -> Vec<Turn> {
        let Some(opening) = self.text.template.turn_markers().start() else {
            return Vec::new();
        };
        let role = |at: usize| {
            let head = &tokens[(at + 1).min(tokens.len())..tokens.len().min(at + 5)];
            let text = self
                .text
                .tokenizer
                .decode(head, Specials::Shown)
                .unwrap_or_default();
            match text.split_whitespace().next() {
                Some("system") => Role::System,
                Some("user") => Role::User,
                Some("assistant") => Role::Assistant,
                _ => Role::Other,
            }
        };
        tokens
            .iter()
            .enumerate()
            .filter(|(_, &id)| id == opening)
            .map(|(start, _)| Turn {
                start,
                role: role(start),
            })
            .collect()
    }

    fn report_prefill(&self, job: &Job, attempt: &mut Attempt, done: usize, total: usize) {
        self.host.board.update(|figures| {
            if let Some(running) = &mut figures.running {
                running.prefilled = done as u64;
            }
        });
        if job.progress && done > attempt.reported {
            attempt.reported = done;
            self.host.outbox.push(Event::Prefill(Prefill {
                id: job.id.clone(),
                done: done as u64,
                total: total as u64,
            }));
        }
    }
}

/// One forward over `ids` behind what the caches hold, evaluated.
fn chunk(decoding: &mut Decoding<'_>, ids: &Array, placed: &Placed) -> mlx_rs::error::Result<Array> {
    let (slot, rows) = (decoding.caches.offset(), ids.dim(1));
    let batch = Batch {
        ids,
        positions: placed.positions(slot, rows),
        media: &placed.media(slot, rows)?,
        conditioning: None,
        dispatch: Dispatch::Together,
    };
    let hidden = decoding.model.forward(&batch, &mut decoding.caches)?;
    let mut arrays = decoding.caches.arrays();
    if decoding.drafter.is_some() {
        arrays.push(&hidden);
    }
    eval(arrays)?;
    Ok(hidden)
}

/// Whether drafting broke down on the way: a prefix without the head's part would be of no use.
fn lost_its_head(decoding: &Decoding<'_>) -> bool {
    decoding.drafter.is_none() && decoding.model.self_draft().is_some()
}
