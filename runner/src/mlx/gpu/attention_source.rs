//! Kernel text of attention: what comes before it, attention of few rows, and the output gate.
//!
//! Invariant: bodies use only the prelude's names for what differs between GPUs (`source`).

/// Norms and rotation before attention. One warp a token and head (queries, then keys, then values).
/// packed [1, L, (2 H + 2 KV) D], gains [D] float32, tables [L, HALF] float32 → q [1, H, L, D], k and v [1, KV, L, D].
pub const ATTENTION_PREPARE: &str = r"
  int lane = LANE;
  int head = GRID_Y;
  int t = GRID_Z;
  int rows = packed_shape[1];
  long base = long(t) * (2 * H + 2 * KV) * D;
  if (head >= H + KV) {
    int j = head - H - KV;
    for (int i = lane; i < D; i += 32) {
      v[(long(j) * rows + t) * D + i] = packed[base + (2 * H + KV + j) * D + i];
    }
    return;
  }
  bool query = head < H;
  long from = base + (query ? head * 2 * D : (2 * H + head - H) * D);
  float sum = 0.0f;
  for (int i = lane; i < D; i += 32) {
    float value = float(packed[from + i]);
    sum += value * value;
  }
  float scale = RSQRT(warp_sum(sum) / float(D) + FLOAT_BITS(EPS));
  for (int i = lane; i < D; i += 32) {
    float gain = query ? q_gain[i] : k_gain[i];
    float value = float(packed[from + i]) * scale * gain;
    if (i < 2 * HALF) {
      int j = i < HALF ? i : i - HALF;
      int partner = i < HALF ? i + HALF : i - HALF;
      float other = float(packed[from + partner]) * scale * (query ? q_gain[partner] : k_gain[partner]);
      float c = cos_table[t * HALF + j];
      float s = sin_table[t * HALF + j];
      value = i < HALF ? value * c - other * s : value * c + other * s;
    }
    if (query) {
      q[(long(head) * rows + t) * D + i] = T(value);
    } else {
      k[(long(head - H) * rows + t) * D + i] = T(value);
    }
  }
";

/// Attention of a few rows with its output gate, online softmax. One threadgroup of WARPS warps a row and query head; each
/// warp takes every WARPS-th slot, each lane D / 32 columns.
/// q [1, H, L, D], keys and values [1, KV, capacity, D], slots [1] (filled before the call), packed → y [1, L, H * D].
pub const ATTENTION_ROWS: &str = r"
  SHARED float shared_sum[WARPS];
  SHARED float shared_max[WARPS];
  SHARED float shared_out[WARPS * D];
  int lane = LANE;
  int warp = WARP;
  int head = GRID_Y;
  int t = GRID_Z;
  int rows = packed_shape[1];
  int capacity = keys_shape[2];
  int end = slots[0] + t + 1;
  long at = long(head / (H / KV)) * capacity * D;
  float query[D / 32];
  float acc[D / 32];
  for (int i = 0; i < D / 32; i++) {
    query[i] = float(q[(long(head) * rows + t) * D + lane + 32 * i]) * RSQRT(float(D));
    acc[i] = 0.0f;
  }
  float highest = -1e30f;
  float total = 0.0f;
  for (int slot = warp; slot < end; slot += WARPS) {
    long from = at + long(slot) * D + lane;
    float score = 0.0f;
    for (int i = 0; i < D / 32; i++) { score += query[i] * float(keys[from + 32 * i]); }
    score = warp_sum(score);
    float top = score > highest ? score : highest;
    float shrink = EXP(highest - top);
    float weight = EXP(score - top);
    total = total * shrink + weight;
    for (int i = 0; i < D / 32; i++) { acc[i] = acc[i] * shrink + weight * float(values[from + 32 * i]); }
    highest = top;
  }
  if (lane == 0) {
    shared_max[warp] = highest;
    shared_sum[warp] = total;
  }
  for (int i = 0; i < D / 32; i++) { shared_out[warp * D + lane + 32 * i] = acc[i]; }
  BARRIER;
  float top = -1e30f;
  for (int w = 0; w < WARPS; w++) { top = shared_max[w] > top ? shared_max[w] : top; }
  float whole = 0.0f;
  for (int w = 0; w < WARPS; w++) { whole += shared_sum[w] * EXP(shared_max[w] - top); }
  for (int i = warp * 32 + lane; i < D; i += WARPS * 32) {
    float value = 0.0f;
    for (int w = 0; w < WARPS; w++) { value += shared_out[w * D + i] * EXP(shared_max[w] - top); }
    float gate = float(packed[long(t) * (2 * H + 2 * KV) * D + head * 2 * D + D + i]);
    y[(long(t) * H + head) * D + i] = T(value / whole / (1.0f + EXP(-gate)));
  }
";

/// Output gate after attention. o [1, H, L, D], packed (for the gates) → y [1, L, H * D].
pub const ATTENTION_GATE: &str = r"
  int i = GRID_X;
  int head = GRID_Y;
  int t = GRID_Z;
  int rows = packed_shape[1];
  if (i >= D) { return; }
  float gate = float(packed[long(t) * (2 * H + 2 * KV) * D + head * 2 * D + D + i]);
  float value = float(o[(long(head) * rows + t) * D + i]);
  y[(long(t) * H + head) * D + i] = T(value / (1.0f + EXP(-gate)));
";
