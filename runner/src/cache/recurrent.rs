//! Conv tail and delta state of one gated-delta-net layer.
//!
//! Invariant: the state can't be truncated, so going back is possible only to a slot whose state was kept: any row of the
//! last forward when its rows were kept, or a scheduled slot.

use mlx_rs::error::{Exception, Result};
use mlx_rs::Array;

use crate::mlx::ops;

/// State of one layer at one slot.
#[derive(Debug, Clone)]
pub struct RecurrentState {
    /// The last three rows before the convolution, [B, 3, C], in the activations' type.
    pub conv: Array,
    /// Delta state, [B, nv, dv, dk] float32.
    pub state: Array,
}

impl RecurrentState {
    /// Bytes of both arrays.
    pub fn bytes(&self) -> u64 {
        (self.conv.nbytes() + self.state.nbytes()) as u64
    }

    /// Copies that own their bytes.
    pub fn compact(&self) -> Result<Self> {
        Ok(Self {
            conv: ops::compact(&self.conv)?,
            state: ops::compact(&self.state)?,
        })
    }
}

/// States after every row of one forward.
#[derive(Debug)]
pub struct StateRows {
    /// Old tail followed by the forward's own rows, [B, 3 + L, C].
    pub mix: Array,
    /// Delta state after each row, [B, L, nv, dv, dk].
    pub states: Array,
}

impl StateRows {
    /// The state after `row + 1` rows.
    fn at(&self, row: i32) -> Result<RecurrentState> {
        let shape = self.states.shape();
        let state = ops::slice_axis(&self.states, 1, row, row + 1)?
            .reshape(&[shape[0], shape[2], shape[3], shape[4]])?;
        Ok(RecurrentState {
            conv: ops::slice_axis(&self.mix, 1, row + 1, row + 4)?,
            state,
        })
    }
}

/// Live state of one layer, and what has been kept on the way.
#[derive(Debug, Default)]
pub struct RecurrentCache {
    live: Option<RecurrentState>,
    rows: Option<StateRows>,
    keep_rows: bool,
    schedule: Vec<i32>,
    captured: Vec<(i32, RecurrentState)>,
}

impl RecurrentCache {
    /// The state that the next forward starts from; `None` before the first token.
    pub fn live(&self) -> Option<&RecurrentState> {
        self.live.as_ref()
    }

    /// Whether the next forward must hand over its rows.
    pub fn wants_rows(&self) -> bool {
        self.keep_rows
    }

    /// Scheduled slots in `(from, to]`, ascending: where a forward over `from..to` must be segmented.
    pub fn cuts(&self, from: i32, to: i32) -> Vec<i32> {
        self.schedule
            .iter()
            .copied()
            .filter(|&at| at > from && at <= to)
            .collect()
    }

    /// Sets the state after a forward.
    pub fn set(&mut self, state: RecurrentState, rows: Option<StateRows>) {
        self.live = Some(state);
        self.rows = rows;
    }

    /// Keeps `state` as the one at the scheduled slot `offset`.
    pub fn capture(&mut self, offset: i32, state: &RecurrentState) -> Result<()> {
        self.captured.push((offset, state.compact()?));
        Ok(())
    }

    pub(super) fn schedule(&mut self, offsets: &[i32]) {
        self.schedule = offsets.to_vec();
        self.captured.clear();
    }

    pub(super) fn take_captured(&mut self) -> Vec<(i32, RecurrentState)> {
        std::mem::take(&mut self.captured)
    }

    pub(super) fn keep_rows(&mut self, keep: bool) {
        self.keep_rows = keep;
        if !keep {
            self.rows = None;
        }
    }

    pub(super) fn rollback(&mut self, undone: i32) -> Result<()> {
        let rows = self.rows.take();
        if undone == 0 {
            return Ok(());
        }
        let rows = rows.ok_or_else(|| Exception::custom("rollback without kept rows"))?;
        let row = rows.states.dim(1) - undone - 1;
        if row < 0 {
            return Err(Exception::custom("rollback beyond the last forward"));
        }
        self.live = Some(rows.at(row)?);
        Ok(())
    }

    pub(super) fn copy(&self) -> Result<Option<RecurrentState>> {
        self.live.as_ref().map(RecurrentState::compact).transpose()
    }

    pub(super) fn load(&mut self, state: Option<&RecurrentState>) {
        self.live = state.cloned();
        self.rows = None;
        self.captured.clear();
        self.schedule.clear();
    }

    pub(super) fn arrays(&self) -> impl Iterator<Item = &Array> {
        let kept = self.captured.iter().map(|(_, s)| s);
        self.live.iter().chain(kept).flat_map(|s| [&s.conv, &s.state])
    }

    pub(super) fn bytes(&self) -> u64 {
        let rows = self
            .rows
            .as_ref()
            .map_or(0, |r| r.mix.nbytes() + r.states.nbytes()) as u64;
        let kept = self.captured.iter().map(|(_, s)| s.bytes()).sum::<u64>();
        self.live.as_ref().map_or(0, RecurrentState::bytes) + rows + kept
    }
}
