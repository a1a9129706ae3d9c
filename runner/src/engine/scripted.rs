//! A target and a drafter that follow a script, over arrays of three columns.
//!
//! Invariant: neither looks at a value, so a token that nobody has read yet stays unread. A state is (token, slot, who),
//! `who` being 0 for the target and 1 for the head; a layer's keys and values are what it was fed, so that a cache
//! tells which tokens it holds and where their states came from.

use std::cell::{Cell, RefCell};

use mlx_rs::error::Result;
use mlx_rs::ops::concatenate;
use mlx_rs::ops::indexing::take_axis;
use mlx_rs::{Array, Dtype};

use crate::cache::{Caches, KvCache, LayerCache, RecurrentCache, RecurrentState, StateRows};
use crate::mlx::ops;
use crate::model::{Batch, DraftKind, DraftModel, Model, Positions};

/// Logits of a row.
pub(super) const VOCABULARY: usize = 4096;

/// One forward pass as it was asked for.
#[derive(Debug, Clone)]
pub(super) struct Call {
    /// Slot of the first row.
    pub start: i32,
    /// Token ids.
    pub ids: Array,
    /// What the head was conditioned on.
    pub states: Option<Array>,
    /// Whether the ids had been computed by then.
    pub known: bool,
}

impl Call {
    /// First slot and rows.
    pub fn extent(&self) -> (i32, i32) {
        (self.start, self.ids.dim(1))
    }
}

fn is_available(array: &Array) -> bool {
    let mut known = false;
    // SAFETY: the handle is valid for the length of the call, which only reads its status.
    unsafe { mlx_sys::_mlx_array_is_available(&mut known, array.as_ptr()) };
    known
}

fn call(batch: &Batch<'_>) -> Call {
    let Positions::Sequential { start } = batch.positions else {
        panic!("text only")
    };
    let states = batch.conditioning.cloned();
    Call {
        start,
        ids: batch.ids.clone(),
        states,
        known: is_available(batch.ids),
    }
}

/// States [1, L, 3] of tokens [1, L] from `start` on.
fn states(ids: &Array, start: i32, who: f32) -> Array {
    let rows = ids.dim(1);
    let slots: Vec<f32> = (start..start + rows).map(|slot| slot as f32).collect();
    let column = |values: &[f32]| Array::from_slice(values, &[1, rows, 1]);
    let tokens = ops::cast(ids, Dtype::Float32)
        .unwrap()
        .reshape(&[1, rows, 1])
        .unwrap();
    concatenate(&[tokens, column(&slots), column(&vec![who; rows as usize])], 2).unwrap()
}

/// Logits [1, L, V] that are largest at `table[index]`, indices [1, L].
fn one_hot(table: &[u32], index: &Array) -> Result<Array> {
    let table: Vec<i32> = table.iter().map(|&id| id as i32).collect();
    let rows = index.dim(1);
    let index = ops::cast(index, Dtype::Int32)?.reshape(&[rows])?;
    let ids =
        take_axis(Array::from_slice(&table, &[table.len() as i32]), index, 0)?.reshape(&[1, rows, 1])?;
    let all: Vec<i32> = (0..VOCABULARY as i32).collect();
    let hot = ids.eq(Array::from_slice(&all, &[1, 1, VOCABULARY as i32]))?;
    ops::cast(&hot, Dtype::Float32)?.multiply(Array::from_f32(20.0))
}

fn column(hidden: &Array, at: i32) -> Result<Array> {
    ops::slice_axis(hidden, 2, at, at + 1)?.reshape(&[1, hidden.dim(1)])
}

/// The head: what it predicts depends on the slot alone.
#[derive(Debug, Default)]
pub(super) struct Head {
    /// Prediction from slot S, which is for the token at S + 2.
    pub guesses: RefCell<Vec<u32>>,
    /// Whether its logits are no numbers.
    pub broken: Cell<bool>,
    pub calls: RefCell<Vec<Call>>,
}

impl DraftModel for Head {
    fn new_caches(&self) -> Caches {
        Caches::new(vec![LayerCache::Kv(KvCache::default())])
    }

    fn forward(&self, batch: &Batch<'_>, _target: &Caches, draft: &mut Caches) -> Result<Array> {
        let call = call(batch);
        let rows = batch.rows();
        assert_eq!(
            call.start,
            draft.offset(),
            "the head's batch begins where its cache ends"
        );
        let out = states(batch.ids, call.start, 1.0);
        let fed = batch.conditioning.expect("the head is conditioned on states");
        assert_eq!(fed.shape(), [1, rows, 3]);
        let wide = |a: &Array| a.reshape(&[1, 1, rows, 3]).unwrap();
        if let LayerCache::Kv(kv) = &mut draft.layers[0] {
            kv.append(&wide(&out), &wide(fed))?;
        }
        draft.advance(rows);
        self.calls.borrow_mut().push(call);
        Ok(out)
    }

    fn unembed(&self, hidden: &Array) -> Result<Array> {
        let logits = one_hot(&self.guesses.borrow(), &column(hidden, 1)?)?;
        if self.broken.get() {
            return logits.multiply(Array::from_f32(f32::NAN));
        }
        Ok(logits)
    }

    fn kind(&self) -> DraftKind {
        DraftKind::ChainedHead
    }
}

/// The target: the next token is a function of the last one.
#[derive(Debug)]
pub(super) struct Target {
    /// The token after each.
    pub next: Vec<u32>,
    pub head: Option<Head>,
    pub calls: RefCell<Vec<Call>>,
}

impl Model for Target {
    fn forward(&self, batch: &Batch<'_>, caches: &mut Caches) -> Result<Array> {
        let call = call(batch);
        let rows = batch.rows();
        assert_eq!(
            call.start,
            caches.offset(),
            "the batch begins where the caches end"
        );
        let out = states(batch.ids, call.start, 0.0);
        for layer in &mut caches.layers {
            match layer {
                LayerCache::Kv(kv) => {
                    let wide = out.reshape(&[1, 1, rows, 3])?;
                    kv.append(&wide, &wide)?;
                }
                LayerCache::Recurrent(recurrent) => recur(recurrent, &out)?,
            }
        }
        caches.advance(rows);
        self.calls.borrow_mut().push(call);
        Ok(out)
    }

    fn unembed(&self, hidden: &Array) -> Result<Array> {
        one_hot(&self.next, &column(hidden, 0)?)
    }

    fn new_caches(&self) -> Caches {
        Caches::new(vec![
            LayerCache::Kv(KvCache::default()),
            LayerCache::Recurrent(RecurrentCache::default()),
        ])
    }

    fn self_draft(&self) -> Option<&dyn DraftModel> {
        self.head.as_ref().map(|head| head as &dyn DraftModel)
    }
}

/// The state is the sum of all tokens so far; the tail holds the last three.
fn recur(recurrent: &mut RecurrentCache, out: &Array) -> Result<()> {
    let rows = out.dim(1);
    let tokens = ops::slice_axis(out, 2, 0, 1)?;
    let zero = || Array::from_slice(&[0f32; 3], &[1, 3, 1]);
    let (tail, sum) = match recurrent.live() {
        Some(live) => (live.conv.clone(), live.state.reshape(&[1, 1, 1])?),
        None => (zero(), Array::from_slice(&[0f32], &[1, 1, 1])),
    };
    let mix = concatenate(&[tail, tokens.clone()], 1)?;
    let sums = tokens
        .cumsum(1, false, true)?
        .add(sum)?
        .reshape(&[1, rows, 1, 1, 1])?;
    let last = RecurrentState {
        conv: ops::slice_axis(&mix, 1, rows, rows + 3)?,
        state: ops::slice_axis(&sums, 1, rows - 1, rows)?.reshape(&[1, 1, 1, 1])?,
    };
    let kept = recurrent.wants_rows().then_some(StateRows { mix, states: sums });
    recurrent.set(last, kept);
    Ok(())
}

/// Keys and values of slots `0..offset` of the first layer, three columns a slot.
pub(super) fn held(caches: &Caches) -> Vec<([f32; 3], [f32; 3])> {
    if caches.offset() == 0 {
        return Vec::new();
    }
    let segment = caches.kv_segments(0, caches.offset()).unwrap().remove(0);
    let rows = |a: &Array| -> Vec<[f32; 3]> {
        let flat = a.to_vec_cast::<f32>().unwrap();
        flat.chunks_exact(3).map(|row| [row[0], row[1], row[2]]).collect()
    };
    rows(&segment.keys)
        .into_iter()
        .zip(rows(&segment.values))
        .collect()
}

/// Sum of tokens and last three tokens in the recurrent layer.
pub(super) fn recurrent(caches: &Caches) -> (f32, Vec<f32>) {
    let snapshot = caches.snapshot().unwrap().unwrap();
    let state = &snapshot.states[0];
    (
        state.state.reshape(&[]).unwrap().item_cast::<f32>(),
        state.conv.to_vec_cast::<f32>().unwrap(),
    )
}
