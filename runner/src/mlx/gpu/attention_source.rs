//! Kernel text of attention: what comes before it, attention of few rows, and the output gate.
//!
//! Invariant: bodies use only the prelude's names for what differs between GPUs (`source`).

/// Norms and rotation before attention. One warp a token and head (queries, then keys, then values).
/// packed [1, L, (2 H + 2 KV) D], gains [D] float32, tables [L, HALF] float32 → q [1, H, L, D], and keys and values as one of
/// the two texts below says.
pub const ATTENTION_PREPARE: &str = r"
  int lane = LANE;
  int head = GRID_Y;
  int t = GRID_Z;
  int rows = packed_shape[1];
  long base = long(t) * (2 * H + 2 * KV) * D;
  if (head >= H + KV) {
    int j = head - H - KV;
    for (int i = lane; i < D; i += 32) {
      VALUE_AT(j, i) = packed[base + (2 * H + KV + j) * D + i];
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
      KEY_AT(head - H, i) = T(value);
    }
  }
";

/// Keys and values as results, k and v [1, KV, L, D].
pub const PREPARE_RESULTS: &str = r"
#define KEY_AT(head, i) k[(long(head) * rows + t) * D + i]
#define VALUE_AT(head, i) v[(long(head) * rows + t) * D + i]
";

/// Keys and values in the next slots of buffers [1, KV, capacity, D], which are inputs: CUDA only.
pub const PREPARE_IN_PLACE: &str = r"
#define KEY_AT(head, i) const_cast<T*>(keys)[(long(head) * keys_shape[2] + slots[0] + t) * D + i]
#define VALUE_AT(head, i) const_cast<T*>(values)[(long(head) * keys_shape[2] + slots[0] + t) * D + i]
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

/// Loads of neighbouring columns, sixteen bytes at a time where that divides.
pub const SPANS_HELPERS: &str = r"
template <typename T, int N> struct alignas(16) Pack { T item[N]; };
template <int N, typename T> __device__ __forceinline__ void load_columns(const T* from, float (&to)[N]) {
  constexpr int WHOLE = 16 / sizeof(T);
  if constexpr (N % WHOLE == 0) {
    for (int p = 0; p < N / WHOLE; p++) {
      const Pack<T, WHOLE> pack = reinterpret_cast<const Pack<T, WHOLE>*>(from)[p];
      for (int i = 0; i < WHOLE; i++) { to[p * WHOLE + i] = float(pack.item[i]); }
    }
  } else {
    for (int i = 0; i < N; i++) { to[i] = float(from[i]); }
  }
}
";

/// Attention of a few rows over one span of SPAN slots, online softmax. One block of WARPS warps a row, key-value head and span,
/// for all Q query heads that share the key-value head; each warp takes every WARPS-th slot. CUDA only.
///
/// Spans begin at multiples of SPAN whatever the rows are, so that a row's sums don't depend on the rows beside it.
/// q [1, H, L, D], keys and values [1, KV, capacity, D], slots [1] (filled before the call), spans [1] →
/// part [L, H, spans, D] float32, relative to the span's highest score, and stats [L, H, spans, 2], that score and the weights'
/// sum; nothing for spans behind a row's end.
pub const ATTENTION_SPANS: &str = r"
  constexpr int COLUMNS = D / 32;
  SHARED float highest_of[WARPS * Q];
  SHARED float total_of[WARPS * Q];
  SHARED float out[WARPS * D];
  const int lane = LANE;
  const int warp = WARP;
  const int group = GRID_Y % KV;
  const int t = GRID_Y / KV;
  const int span = GRID_Z;
  const int rows = q_shape[2];
  const int filled = slots[0] + t + 1;
  const int from = span * SPAN;
  if (from >= filled) { return; }
  const int end = from + SPAN < filled ? from + SPAN : filled;
  const long at = long(group) * keys_shape[2] * D + lane * COLUMNS;
  float query[Q][COLUMNS];
  float acc[Q][COLUMNS];
  float highest[Q];
  float total[Q];
  for (int j = 0; j < Q; j++) {
    load_columns<COLUMNS>(q + (long(group * Q + j) * rows + t) * D + lane * COLUMNS, query[j]);
    for (int i = 0; i < COLUMNS; i++) {
      query[j][i] *= RSQRT(float(D));
      acc[j][i] = 0.0f;
    }
    highest[j] = -1e30f;
    total[j] = 0.0f;
  }
#pragma unroll 2
  for (int slot = from + warp; slot < end; slot += WARPS) {
    float key[COLUMNS];
    float value[COLUMNS];
    load_columns<COLUMNS>(keys + at + long(slot) * D, key);
    load_columns<COLUMNS>(values + at + long(slot) * D, value);
    for (int j = 0; j < Q; j++) {
      float score = 0.0f;
      for (int i = 0; i < COLUMNS; i++) { score += query[j][i] * key[i]; }
      score = warp_sum(score);
      const float top = score > highest[j] ? score : highest[j];
      const float shrink = EXP(highest[j] - top);
      const float weight = EXP(score - top);
      total[j] = total[j] * shrink + weight;
      for (int i = 0; i < COLUMNS; i++) { acc[j][i] = acc[j][i] * shrink + weight * value[i]; }
      highest[j] = top;
    }
  }
  if (lane == 0) {
    for (int j = 0; j < Q; j++) {
      highest_of[warp * Q + j] = highest[j];
      total_of[warp * Q + j] = total[j];
    }
  }
  BARRIER;
  for (int j = 0; j < Q; j++) {
    float top = -1e30f;
    for (int w = 0; w < WARPS; w++) { top = highest_of[w * Q + j] > top ? highest_of[w * Q + j] : top; }
    for (int i = 0; i < COLUMNS; i++) { out[warp * D + lane * COLUMNS + i] = acc[j][i] * EXP(highest[j] - top); }
    BARRIER;
    const long place = (long(t) * H + group * Q + j) * spans[0] + span;
    for (int i = threadIdx.x; i < D; i += WARPS * 32) {
      float sum = 0.0f;
      for (int w = 0; w < WARPS; w++) { sum += out[w * D + i]; }
      part[place * D + i] = sum;
    }
    if (threadIdx.x == 0) {
      float sum = 0.0f;
      for (int w = 0; w < WARPS; w++) { sum += total_of[w * Q + j] * EXP(highest_of[w * Q + j] - top); }
      stats[place * 2] = top;
      stats[place * 2 + 1] = sum;
    }
    BARRIER;
  }
";

/// Joins the spans of each row and query head, and applies the output gate. One block of THREADS threads each. CUDA only.
/// part and stats as [`ATTENTION_SPANS`] leaves them, packed (for the gates), slots [1], spans [1] → y [1, L, H * D].
pub const ATTENTION_JOIN: &str = r"
  SHARED float weights[THREADS];
  SHARED float highest_of[THREADS / 32];
  const int thread = threadIdx.x;
  const int head = GRID_Y;
  const int t = GRID_Z;
  const int used = (slots[0] + t + SPAN) / SPAN;
  const long first = (long(t) * H + head) * spans[0];
  float highest = -1e30f;
  for (int s = thread; s < used; s += THREADS) {
    const float x = stats[(first + s) * 2];
    highest = x > highest ? x : highest;
  }
  for (int lanes = 16; lanes > 0; lanes /= 2) {
    const float x = SHUFFLE_XOR(highest, lanes);
    highest = x > highest ? x : highest;
  }
  if (LANE == 0) { highest_of[WARP] = highest; }
  BARRIER;
  for (int w = 0; w < THREADS / 32; w++) { highest = highest_of[w] > highest ? highest_of[w] : highest; }
  float whole = 0.0f;
  constexpr int COLUMNS = (D + THREADS - 1) / THREADS;
  float value[COLUMNS];
  for (int c = 0; c < COLUMNS; c++) { value[c] = 0.0f; }
  for (int base = 0; base < used; base += THREADS) {
    BARRIER;
    const int s = base + thread;
    weights[thread] = s < used ? EXP(stats[(first + s) * 2] - highest) : 0.0f;
    BARRIER;
    const int here = used - base < THREADS ? used - base : THREADS;
    for (int i = 0; i < here; i++) {
      whole += weights[i] * stats[(first + base + i) * 2 + 1];
      for (int c = 0; c < COLUMNS; c++) {
        const int column = c * THREADS + thread;
        if (column < D) { value[c] += weights[i] * part[(first + base + i) * D + column]; }
      }
    }
  }
  for (int c = 0; c < COLUMNS; c++) {
    const int column = c * THREADS + thread;
    if (column >= D) { continue; }
    const float gate = float(packed[long(t) * (2 * H + 2 * KV) * D + head * 2 * D + D + column]);
    y[(long(t) * H + head) * D + column] = T(value[c] / whole / (1.0f + EXP(-gate)));
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
