//! The largest logit of each row and its id, in two short launches: the library's own reduction gives a row of a whole
//! vocabulary to one group of threads, which takes as long as a layer.
//!
//! Invariant: of equal logits the lowest id wins, and a row that holds a NaN has a NaN for its peak, however the row is cut.

use mlx_rs::error::Result;
use mlx_rs::{Array, Dtype};

use super::kernel::{Call, Kernel, Maker, Text};
use super::two;

/// Groups that share a row.
const PARTS: i32 = 64;
/// Threads of a group.
const THREADS: i32 = 256;

/// `keep` holds the better of two candidates; a NaN beats every number.
const MERGE: &str = r"
#define BETTER(x, i, best, at) (best == best && (x != x || x > best || (x == best && i < at)))
";

/// One group a part of a row: every PARTS-th stretch of THREADS ids below `known`.
/// logits [R, V] → values [R, PARTS] float32, ids [R, PARTS] int32.
const PART: &str = r"
  SHARED float best_of[THREADS / 32];
  SHARED int at_of[THREADS / 32];
  int first = GRID_X;
  long row = GRID_Y;
  long from = row * logits_shape[1];
  int end = known[0];
  float best = FLOAT_BITS(-8388608);
  int at = 2147483647;
  for (int i = first; i < end; i += THREADS * PARTS) {
    float x = float(logits[from + i]);
    if (BETTER(x, i, best, at)) { best = x; at = i; }
  }
  for (int lanes = 16; lanes > 0; lanes /= 2) {
    float x = SHUFFLE_XOR(best, lanes);
    int i = SHUFFLE_XOR(at, lanes);
    if (BETTER(x, i, best, at)) { best = x; at = i; }
  }
  int lane = LANE;
  int warp = WARP;
  if (lane == 0) { best_of[warp] = best; at_of[warp] = at; }
  BARRIER;
  if (warp == 0 && lane == 0) {
    for (int w = 1; w < THREADS / 32; w++) {
      float x = best_of[w];
      int i = at_of[w];
      if (BETTER(x, i, best, at)) { best = x; at = i; }
    }
    values[row * PARTS + first / THREADS] = best;
    ids[row * PARTS + first / THREADS] = at;
  }
";

/// One warp a row. values [R, PARTS], ids [R, PARTS] → choice [R] int32, peak [R] float32.
const WHOLE: &str = r"
  int lane = LANE;
  long row = GRID_Y;
  float best = values[row * PARTS + lane];
  int at = ids[row * PARTS + lane];
  for (int part = lane + 32; part < PARTS; part += 32) {
    float x = values[row * PARTS + part];
    int i = ids[row * PARTS + part];
    if (BETTER(x, i, best, at)) { best = x; at = i; }
  }
  for (int lanes = 16; lanes > 0; lanes /= 2) {
    float x = SHUFFLE_XOR(best, lanes);
    int i = SHUFFLE_XOR(at, lanes);
    if (BETTER(x, i, best, at)) { best = x; at = i; }
  }
  if (lane == 0) {
    choice[row] = at == 2147483647 ? 0 : at;
    peak[row] = best;
  }
";

/// See the module's text.
#[derive(Debug)]
pub(super) struct Peak {
    part: Kernel,
    whole: Kernel,
}

impl Peak {
    pub(super) fn new(maker: &Maker) -> Option<Self> {
        let part = maker.kernel(Text {
            name: "peak_part",
            inputs: &["logits"],
            integers: &["known"],
            outputs: &["values", "ids"],
            helpers: MERGE,
            body: PART.into(),
        })?;
        let whole = maker.kernel(Text {
            name: "peak",
            inputs: &["values", "ids"],
            integers: &[],
            outputs: &["choice", "peak"],
            helpers: MERGE,
            body: WHOLE.into(),
        })?;
        Some(Self { part, whole })
    }

    /// Ids [R] int32 and values [R] float32 of the largest logits among the first `known` ids of [R, V].
    pub(super) fn of(&self, logits: &Array, known: i32) -> Result<(Array, Array)> {
        let rows = logits.dim(0);
        let parts = [rows, PARTS];
        let mut out = self.part.call(&Call {
            inputs: &[logits],
            integers: &[known.min(logits.dim(1))],
            outputs: &[(&parts, Dtype::Float32), (&parts, Dtype::Int32)],
            constants: &[("PARTS", PARTS), ("THREADS", THREADS)],
            dtype: logits.dtype(),
            grid: [PARTS * THREADS, rows, 1],
            group: [THREADS, 1, 1],
        })?;
        let (ids, values) = two(&mut out)?;
        let mut out = self.whole.call(&Call {
            inputs: &[&values, &ids],
            integers: &[],
            outputs: &[(&[rows], Dtype::Int32), (&[rows], Dtype::Float32)],
            constants: &[("PARTS", PARTS)],
            dtype: logits.dtype(),
            grid: [32, rows, 1],
            group: [32, 1, 1],
        })?;
        let (peak, choice) = two(&mut out)?;
        Ok((choice, peak))
    }
}
