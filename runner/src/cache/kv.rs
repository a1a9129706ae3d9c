//! Keys and values of one attention layer.
//!
//! Invariant: slots `0..offset` are valid, what lies beyond is spare room; keys are stored after norm and rotation.

use mlx_rs::error::Result;
use mlx_rs::ops::{concatenate, zeros_dtype};
use mlx_rs::{Array, Dtype};

use crate::mlx::ops;

/// Room is added in steps of at least this many slots.
const STEP: i32 = 256;

/// A compact piece of a layer's keys and values, both [B, H, len, D].
#[derive(Debug, Clone)]
pub struct KvSegment {
    /// Keys.
    pub keys: Array,
    /// Values.
    pub values: Array,
}

impl KvSegment {
    /// Slots covered.
    pub fn len(&self) -> i32 {
        self.keys.dim(2)
    }

    /// Whether no slot is covered.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes of both arrays.
    pub fn bytes(&self) -> u64 {
        (self.keys.nbytes() + self.values.nbytes()) as u64
    }
}

/// Live keys and values, [B, H, capacity, D].
#[derive(Debug, Default)]
pub struct KvCache {
    buffers: Option<(Array, Array)>,
    offset: i32,
}

impl KvCache {
    /// Appends `keys` and `values` [B, H, L, D]; returns views of all valid slots [B, H, offset + L, D].
    pub fn append(&mut self, keys: &Array, values: &Array) -> Result<(Array, Array)> {
        let shape = keys.shape();
        let rows = shape[2];
        let start = [0, 0, self.offset, 0];
        let end = self.offset + rows;
        let stop = [shape[0], shape[1], end, shape[3]];
        let (k, v) = self.append_in_place(rows, [shape[0], shape[1], shape[3]], keys.dtype(), |k, v| {
            Ok((
                ops::slice_update(k, keys, &start, &stop)?,
                ops::slice_update(v, values, &start, &stop)?,
            ))
        })?;
        Ok((ops::slice_axis(&k, 2, 0, end)?, ops::slice_axis(&v, 2, 0, end)?))
    }

    /// Lets `write` put `rows` more slots into the buffers [B, H, capacity, D] and return the buffers after that.
    /// `shape` is [B, H, D].
    pub fn append_in_place(
        &mut self,
        rows: i32,
        shape: [i32; 3],
        dtype: Dtype,
        write: impl FnOnce(&Array, &Array) -> Result<(Array, Array)>,
    ) -> Result<(Array, Array)> {
        let end = self.offset + rows;
        let (k, v) = match self.buffers.take() {
            Some((k, v)) if k.dim(2) >= end => (k, v),
            held => grow(held, shape, dtype, self.offset, end)?,
        };
        let (k, v) = write(&k, &v)?;
        self.buffers = Some((k.clone(), v.clone()));
        self.offset = end;
        Ok((k, v))
    }

    /// Slots filled.
    pub fn offset(&self) -> i32 {
        self.offset
    }

    /// The whole buffers, spare room included.
    pub fn buffers(&self) -> Option<(&Array, &Array)> {
        self.buffers.as_ref().map(|(k, v)| (k, v))
    }

    /// Forgets the slots from `offset` on; they are overwritten later.
    pub fn truncate(&mut self, offset: i32) {
        self.offset = self.offset.min(offset);
    }

    /// Compact copies of slots `from..to`.
    pub fn segment(&self, from: i32, to: i32) -> Result<KvSegment> {
        match &self.buffers {
            Some((k, v)) => Ok(KvSegment {
                keys: ops::compact(&ops::slice_axis(k, 2, from, to)?)?,
                values: ops::compact(&ops::slice_axis(v, 2, from, to)?)?,
            }),
            None => Err(mlx_rs::error::Exception::custom(
                "segment of an empty key-value cache",
            )),
        }
    }

    /// Replaces the content by `segments` in order, cut to `offset` slots.
    pub fn load(&mut self, segments: &[KvSegment], offset: i32) -> Result<()> {
        self.offset = offset;
        if offset == 0 || segments.is_empty() {
            self.buffers = None;
            self.offset = 0;
            return Ok(());
        }
        let join = |parts: Vec<&Array>| -> Result<Array> {
            let shape = parts[0].shape();
            let room = round_up(offset + STEP) - parts.iter().map(|p| p.dim(2)).sum::<i32>();
            let spare = zeros_dtype(&[shape[0], shape[1], room.max(0), shape[3]], parts[0].dtype())?;
            let mut parts = parts;
            parts.push(&spare);
            concatenate(&parts, 2)
        };
        let keys = join(segments.iter().map(|s| &s.keys).collect())?;
        let values = join(segments.iter().map(|s| &s.values).collect())?;
        self.buffers = Some((keys, values));
        Ok(())
    }

    /// Arrays to evaluate.
    pub fn arrays(&self) -> impl Iterator<Item = &Array> {
        self.buffers.iter().flat_map(|(k, v)| [k, v])
    }

    /// Bytes held, spare room included.
    pub fn bytes(&self) -> u64 {
        self.arrays().map(|a| a.nbytes() as u64).sum()
    }
}

fn round_up(slots: i32) -> i32 {
    (slots + STEP - 1) / STEP * STEP
}

fn grow(
    held: Option<(Array, Array)>,
    [batch, heads, width]: [i32; 3],
    dtype: Dtype,
    used: i32,
    end: i32,
) -> Result<(Array, Array)> {
    // A quarter more, so that copying costs a constant share of what was written.
    let capacity = round_up(end.max(used + used / 4 + STEP));
    let widen = |old: Option<Array>| -> Result<Array> {
        match old {
            Some(old) if used > 0 => {
                let spare = zeros_dtype(&[batch, heads, capacity - used, width], dtype)?;
                concatenate(&[&ops::slice_axis(&old, 2, 0, used)?, &spare], 2)
            }
            _ => zeros_dtype(&[batch, heads, capacity, width], dtype),
        }
    };
    let (old_k, old_v) = held.unzip();
    Ok((widen(old_k)?, widen(old_v)?))
}
