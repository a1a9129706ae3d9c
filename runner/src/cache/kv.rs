//! Keys and values of one attention layer.
//!
//! Invariant: slots `0..offset` are valid, what lies beyond is spare room; keys are stored after norm and rotation.

use mlx_rs::error::Result;
use mlx_rs::ops::{concatenate, zeros_dtype};
use mlx_rs::transforms::async_eval;
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
    /// Whether slots are written behind MLX's back, so that nothing else may share the buffers.
    by_effect: bool,
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

    /// The same for a `write` that changes the buffers' memory itself, while steps that read other slots of it may still be
    /// under way: MLX would copy all of it then.
    ///
    /// MLX doesn't know that the memory is written, so it puts operations of one dispatch that only read the buffers beside the
    /// writer instead of behind it. Whoever reads them together with a result of the writer is behind it; anything else, and
    /// the next append, must come in a later dispatch.
    pub fn append_by_effect(
        &mut self,
        rows: i32,
        shape: [i32; 3],
        dtype: Dtype,
        write: impl FnOnce(&Array, &Array) -> Result<(Array, Array)>,
    ) -> Result<(Array, Array)> {
        self.by_effect = true;
        if self
            .buffers
            .as_ref()
            .is_some_and(|(k, _)| k.dim(2) < self.offset + rows)
        {
            // They will be copied.
            self.dispatch()?;
        }
        self.append_in_place(rows, shape, dtype, write)
    }

    /// Sends what writes the buffers to the device.
    fn dispatch(&self) -> Result<()> {
        async_eval(self.arrays())
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
        if self.by_effect {
            self.dispatch()?;
        }
        let cut = |buffer: &Array| {
            let slots = ops::slice_axis(buffer, 2, from, to)?;
            match self.by_effect {
                // Compacting shares the memory of a part that is nearly the whole.
                true => slots.multiply(ops::cast(&Array::from_f32(1.0), slots.dtype())?),
                false => ops::compact(&slots),
            }
        };
        match &self.buffers {
            Some((k, v)) => Ok(KvSegment {
                keys: cut(k)?,
                values: cut(v)?,
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

#[cfg(test)]
mod tests {
    use mlx_rs::transforms::eval;

    use super::*;
    use crate::mlx::Backend;

    /// Appends `rows` slots as a kernel does that writes into the buffers: they are handed back as they are.
    fn fill(cache: &mut KvCache, rows: i32) {
        let same = |k: &Array, v: &Array| {
            let writer = k.add(v)?;
            ops::written((k, v), &writer)
        };
        let shape = [1, 1, 8];
        cache.append_by_effect(rows, shape, Dtype::Float32, same).unwrap();
        eval(cache.arrays()).unwrap();
    }

    #[test]
    fn a_segment_never_shares_memory_that_will_be_written_again() {
        Backend::select(true);
        let mut cache = KvCache::default();
        fill(&mut cache, STEP);
        let (keys, values) = cache.buffers().unwrap();
        let held = [keys, values].map(|buffer| buffer.as_slice::<f32>().as_ptr_range());
        for (from, to) in [(0, keys.dim(2)), (0, keys.dim(2) - 1), (1, keys.dim(2)), (3, 4)] {
            let segment = cache.segment(from, to).unwrap();
            eval([&segment.keys, &segment.values]).unwrap();
            for part in [&segment.keys, &segment.values] {
                assert_eq!(part.shape(), [1, 1, to - from, 8]);
                let start = part.as_slice::<f32>().as_ptr();
                assert!(!held.iter().any(|range| range.contains(&start)), "{from}..{to}");
            }
        }
    }

    #[test]
    fn buffers_written_by_effect_stay_where_they_are_until_they_grow() {
        Backend::select(true);
        let mut cache = KvCache::default();
        fill(&mut cache, 10);
        let at = |cache: &KvCache| cache.buffers().unwrap().0.as_slice::<f32>().as_ptr();
        let (first, room) = (at(&cache), cache.buffers().unwrap().0.dim(2));
        // Held by an earlier step that is still under way, as on a GPU.
        let step = cache.buffers().unwrap().0.clone();
        fill(&mut cache, 1);
        assert_eq!(at(&cache), first);
        cache.truncate(4);
        fill(&mut cache, room - 4);
        assert_eq!(at(&cache), first);
        fill(&mut cache, 1);
        assert_ne!(at(&cache), first);
        assert_eq!(cache.offset(), room + 1);
        drop(step);
    }
}
