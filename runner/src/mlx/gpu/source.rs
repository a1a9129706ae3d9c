//! Kernel text: one body for both GPUs, behind a short prelude for each.
//!
//! Invariant: bodies use only the prelude's names for what differs (`GRID_X`, `LANE`, `warp_sum`, `T` casts), so what runs on
//! CUDA is the text that Metal compiles. Warps (SIMD groups) have 32 lanes; every sum over a warp is complete in all lanes.

/// Names for CUDA.
pub const CUDA_PRELUDE: &str = r"
#define GRID_X (blockIdx.x * blockDim.x + threadIdx.x)
#define GRID_Y (blockIdx.y * blockDim.y + threadIdx.y)
#define GRID_Z (blockIdx.z * blockDim.z + threadIdx.z)
#define LANE (threadIdx.x & 31)
#define WARP ((threadIdx.x + blockDim.x * threadIdx.y) >> 5)
#define SHARED __shared__
#define BARRIER __syncthreads()
#define EXP __expf
#define LOG1P log1pf
#define RSQRT rsqrtf
#define FLOAT_BITS __int_as_float
__device__ __forceinline__ float warp_sum(float x) {
  for (int step = 16; step > 0; step >>= 1) { x += __shfl_xor_sync(0xffffffffu, x, step); }
  return x;
}
";

/// Names for Metal.
pub const METAL_PRELUDE: &str = r"
#define GRID_X (thread_position_in_grid.x)
#define GRID_Y (thread_position_in_grid.y)
#define GRID_Z (thread_position_in_grid.z)
#define LANE (thread_index_in_simdgroup)
#define WARP (simdgroup_index_in_threadgroup)
#define SHARED threadgroup
#define BARRIER threadgroup_barrier(mem_flags::mem_threadgroup)
#define EXP metal::exp
#define LOG1P(x) metal::log(1.0f + (x))
#define RSQRT metal::rsqrt
#define FLOAT_BITS(x) as_type<float>(x)
#define warp_sum simd_sum
";

/// Convolution with SiLU over packed rows, and the joined rows for rollback. One thread a channel and row.
/// packed [B, L, P], tail [B, TAPS - 1, C], conv [C, TAPS] → y [B, L, C] float32, mix [B, TAPS - 1 + L, C].
pub const CONV: &str = r"
  int c = GRID_X;
  int r = GRID_Y;
  int b = GRID_Z;
  int rows = packed_shape[1];
  if (c >= C || r >= rows + TAPS - 1) { return; }
  int old = TAPS - 1;
  float window[TAPS];
  for (int j = 0; j < TAPS; j++) {
    int at = r - old + j;
    float x = 0.0f;
    if (at >= 0 && at < rows + old) {
      x = at < old ? float(tail[(b * old + at) * C + c]) : float(packed[(long(b) * rows + at - old) * P + c]);
    }
    window[j] = x;
  }
  T kept = r < old ? tail[(b * old + r) * C + c] : packed[(long(b) * rows + r - old) * P + c];
  mix[(long(b) * (rows + old) + r) * C + c] = kept;
  if (r >= old) {
    float sum = 0.0f;
    for (int j = 0; j < TAPS; j++) { sum += window[j] * conv[c * TAPS + j]; }
    y[(long(b) * rows + r - old) * C + c] = sum / (1.0f + EXP(-sum));
  }
";

/// The recurrence. One warp a sequence, value head and value row; each lane holds DK / 32 values of the state.
/// x [B, L, C] (convolved), packed (for b and a), state [B, NV, DV, DK] → o [B, L, NV, DV], states [B, NV, DV, DK] or, with
/// EVERY, [B, L, NV, DV, DK].
pub const DELTA: &str = r"
  int row = GRID_Y;
  int bh = GRID_Z;
  int b = bh / NV;
  int h = bh % NV;
  int g = h / (NV / NK);
  int rows = packed_shape[1];
  int lane = LANE;
  float s[DK / 32];
  long at = ((long(b) * NV + h) * DV + row) * DK;
  for (int i = 0; i < DK / 32; i++) { s[i] = state[at + lane + 32 * i]; }
  float rate = decay[h];
  float bias = dt_bias[h];
  for (int t = 0; t < rows; t++) {
    long xt = (long(b) * rows + t) * C;
    long pt = (long(b) * rows + t) * P + C + NV * DV;
    float q[DK / 32];
    float k[DK / 32];
    float qq = 0.0f;
    float kk = 0.0f;
    for (int i = 0; i < DK / 32; i++) {
      q[i] = x[xt + g * DK + lane + 32 * i];
      k[i] = x[xt + NK * DK + g * DK + lane + 32 * i];
      qq += q[i] * q[i];
      kk += k[i] * k[i];
    }
    float qs = RSQRT(warp_sum(qq) + 1e-6f) * RSQRT(float(DK));
    float ks = RSQRT(warp_sum(kk) + 1e-6f);
    float v = x[xt + 2 * NK * DK + h * DV + row];
    float beta = 1.0f / (1.0f + EXP(-float(packed[pt + h])));
    float a = float(packed[pt + NV + h]) + bias;
    float soft = (a > 0.0f ? a : 0.0f) + LOG1P(EXP(a > 0.0f ? -a : a));
    float keep = EXP(rate * soft);
    float predicted = 0.0f;
    for (int i = 0; i < DK / 32; i++) {
      k[i] *= ks;
      s[i] *= keep;
      predicted += s[i] * k[i];
    }
    float d = beta * (v - warp_sum(predicted));
    float out = 0.0f;
    for (int i = 0; i < DK / 32; i++) {
      s[i] += k[i] * d;
      out += s[i] * q[i];
    }
    out = warp_sum(out) * qs;
    if (lane == 0) { o[((long(b) * rows + t) * NV + h) * DV + row] = out; }
    if (EVERY) {
      long to = (((long(b) * rows + t) * NV + h) * DV + row) * DK;
      for (int i = 0; i < DK / 32; i++) { states[to + lane + 32 * i] = s[i]; }
    }
  }
  if (!EVERY) {
    for (int i = 0; i < DK / 32; i++) { states[at + lane + 32 * i] = s[i]; }
  }
";

/// Gated norm. One warp a token and value head. o [B, L, NV, DV], packed (for z), norm [DV] → y [B, L, NV * DV].
pub const GATED_NORM: &str = r"
  int lane = LANE;
  int h = GRID_Y;
  long token = GRID_Z;
  long from = (token * NV + h) * DV;
  float sum = 0.0f;
  for (int i = lane; i < DV; i += 32) { sum += o[from + i] * o[from + i]; }
  float scale = RSQRT(warp_sum(sum) / float(DV) + FLOAT_BITS(EPS));
  for (int i = lane; i < DV; i += 32) {
    float z = float(packed[token * P + C + h * DV + i]);
    y[from + i] = T(o[from + i] * scale * norm[i] * (z / (1.0f + EXP(-z))));
  }
";

/// Sum and norm of a row. One threadgroup of THREADS a row. x, added [R, D], gain [D] float32 → sum, normed [R, D].
pub const ADD_NORM: &str = r"
  SHARED float partial[32];
  long row = GRID_Y;
  int thread = GRID_X;
  float square = 0.0f;
  for (int i = thread; i < D; i += THREADS) {
    float v = float(x[row * D + i]) + float(added[row * D + i]);
    T kept = T(v);
    sum[row * D + i] = kept;
    square += float(kept) * float(kept);
  }
  square = warp_sum(square);
  if (LANE == 0) { partial[WARP] = square; }
  BARRIER;
  float total = warp_sum(int(LANE) < THREADS / 32 ? partial[LANE] : 0.0f);
  float scale = RSQRT(total / float(D) + FLOAT_BITS(EPS));
  for (int i = thread; i < D; i += THREADS) {
    normed[row * D + i] = T(float(sum[row * D + i]) * scale * gain[i]);
  }
";

/// The same without a sum: x [R, D] → normed [R, D].
pub const NORM: &str = r"
  SHARED float partial[32];
  long row = GRID_Y;
  int thread = GRID_X;
  float square = 0.0f;
  for (int i = thread; i < D; i += THREADS) {
    float v = float(x[row * D + i]);
    square += v * v;
  }
  square = warp_sum(square);
  if (LANE == 0) { partial[WARP] = square; }
  BARRIER;
  float total = warp_sum(int(LANE) < THREADS / 32 ? partial[LANE] : 0.0f);
  float scale = RSQRT(total / float(D) + FLOAT_BITS(EPS));
  for (int i = thread; i < D; i += THREADS) {
    normed[row * D + i] = T(float(x[row * D + i]) * scale * gain[i]);
  }
";

/// SwiGLU of packed rows. gate_up [R, 2 I] → y [R, I].
pub const SWIGLU: &str = r"
  int i = GRID_X;
  long row = GRID_Y;
  if (i >= I) { return; }
  float gate = float(gate_up[row * 2 * I + i]);
  float up = float(gate_up[row * 2 * I + I + i]);
  y[row * I + i] = T(gate / (1.0f + EXP(-gate)) * up);
";

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
