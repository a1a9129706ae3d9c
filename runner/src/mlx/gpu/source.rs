//! Kernel text: one body for both GPUs, behind a short prelude for each.
//!
//! Invariant: bodies use only the prelude's names for what differs (`GRID_X`, `LANE`, `warp_sum`, `T` casts), so what runs on
//! CUDA is the text that Metal compiles. Warps (SIMD groups) have 32 lanes; every sum over a warp is complete in all lanes.

/// Names for CUDA. Needs no header, so that it compiles fast and where the toolkit isn't installed.
pub const CUDA_PRELUDE: &str = r#"
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
#define SHUFFLE_XOR(x, lanes) __shfl_xor_sync(0xffffffffu, x, lanes)
#define VEC4(from) (*reinterpret_cast<const float4*>(from))
struct bf16 {
  unsigned short bits;
  bf16() = default;
  __device__ __forceinline__ explicit bf16(float x) { asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x)); }
  __device__ __forceinline__ operator float() const { return __uint_as_float(unsigned(bits) << 16); }
};
struct f16 {
  unsigned short bits;
  f16() = default;
  __device__ __forceinline__ explicit f16(float x) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x)); }
  __device__ __forceinline__ operator float() const {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
  }
};
__device__ __forceinline__ float warp_sum(float x) {
  for (int step = 16; step > 0; step >>= 1) { x += __shfl_xor_sync(0xffffffffu, x, step); }
  return x;
}
"#;

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
#define SHUFFLE_XOR(x, lanes) simd_shuffle_xor(x, lanes)
#define VEC4(from) (*reinterpret_cast<const device float4*>(from))
#define warp_sum simd_sum
";

/// The whole mixer of up to `ROWS` rows. One threadgroup of WARPS warps a sequence and value head: convolution and
/// normalisation in shared memory, the recurrence with eight lanes a state row, the gated norm at the end.
/// packed [B, L, P], tail [B, TAPS - 1, C], conv [C, TAPS], state [B, NV, DV, DK], decay and dt_bias [NV], norm [DV] →
/// y [B, L, NV * DV], mix [B, TAPS - 1 + L, C], states [B, NV, DV, DK] or, with EVERY, [B, L, NV, DV, DK].
pub const DELTA_ROWS: &str = r"
  SHARED float x[ROWS * (2 * DK + DV)];
  SHARED float o[ROWS * DV];
  SHARED float beta[ROWS];
  SHARED float keep[ROWS];
  const int width = 2 * DK + DV;
  int h = GRID_Y;
  int b = GRID_Z;
  int thread = GRID_X;
  int lane = LANE;
  int warp = WARP;
  int part = lane & 7;
  int share = NV / NK;
  int g = h / share;
  int rows = packed_shape[1];
  int old = TAPS - 1;
  long all = long(b) * rows;
  float s[PASSES * (DK / 8)];
  for (int p = 0; p < PASSES; p++) {
    int row = (p * WARPS + warp) * 4 + (lane >> 3);
    long at = ((long(b) * NV + h) * DV + (row < DV ? row : 0)) * DK;
    for (int i = 0; i < DK / 8; i++) { s[p * (DK / 8) + i] = state[at + part + 8 * i]; }
  }
  for (int i = thread; i < width * (rows + old); i += WARPS * 32) {
    int local = i % width;
    int r = i / width;
    int c = local < DK ? g * DK + local
        : local < 2 * DK ? NK * DK + g * DK + local - DK : 2 * NK * DK + h * DV + local - 2 * DK;
    if (local >= 2 * DK || h % share == 0) {
      mix[(long(b) * (rows + old) + r) * C + c] =
          r < old ? tail[(long(b) * old + r) * C + c] : packed[(all + r - old) * P + c];
    }
    if (r < rows) {
      float sum = 0.0f;
      for (int j = 0; j < TAPS; j++) {
        int at = r + j;
        float value = at < old ? float(tail[(long(b) * old + at) * C + c]) : float(packed[(all + at - old) * P + c]);
        sum += value * conv[c * TAPS + j];
      }
      x[r * width + local] = sum / (1.0f + EXP(-sum));
    }
  }
  if (thread < rows) {
    long at = (all + thread) * P + C + NV * DV;
    beta[thread] = 1.0f / (1.0f + EXP(-float(packed[at + h])));
    float a = float(packed[at + NV + h]) + dt_bias[h];
    float soft = (a > 0.0f ? a : 0.0f) + LOG1P(EXP(a > 0.0f ? -a : a));
    keep[thread] = EXP(decay[h] * soft);
  }
  BARRIER;
  for (int i = warp; i < 2 * rows; i += WARPS) {
    int from = (i >> 1) * width + (i & 1) * DK;
    float sum = 0.0f;
    for (int j = lane; j < DK; j += 32) { sum += x[from + j] * x[from + j]; }
    float scale = RSQRT(warp_sum(sum) + 1e-6f);
    if ((i & 1) == 0) { scale *= RSQRT(float(DK)); }
    for (int j = lane; j < DK; j += 32) { x[from + j] *= scale; }
  }
  BARRIER;
  for (int t = 0; t < rows; t++) {
    float q[DK / 8];
    float k[DK / 8];
    for (int i = 0; i < DK / 8; i++) {
      q[i] = x[t * width + part + 8 * i];
      k[i] = x[t * width + DK + part + 8 * i];
    }
    for (int p = 0; p < PASSES; p++) {
      int row = (p * WARPS + warp) * 4 + (lane >> 3);
      int inside = row < DV ? row : 0;
      float predicted = 0.0f;
      for (int i = 0; i < DK / 8; i++) {
        s[p * (DK / 8) + i] *= keep[t];
        predicted += s[p * (DK / 8) + i] * k[i];
      }
      for (int lanes = 1; lanes < 8; lanes *= 2) { predicted += SHUFFLE_XOR(predicted, lanes); }
      float d = beta[t] * (x[t * width + 2 * DK + inside] - predicted);
      float out = 0.0f;
      for (int i = 0; i < DK / 8; i++) {
        s[p * (DK / 8) + i] += k[i] * d;
        out += s[p * (DK / 8) + i] * q[i];
      }
      for (int lanes = 1; lanes < 8; lanes *= 2) { out += SHUFFLE_XOR(out, lanes); }
      if (row < DV) {
        if (part == 0) { o[t * DV + row] = out; }
        if (EVERY) {
          long to = (((all + t) * NV + h) * DV + row) * DK;
          for (int i = 0; i < DK / 8; i++) { states[to + part + 8 * i] = s[p * (DK / 8) + i]; }
        }
      }
    }
  }
  if (!EVERY) {
    for (int p = 0; p < PASSES; p++) {
      int row = (p * WARPS + warp) * 4 + (lane >> 3);
      if (row < DV) {
        long to = ((long(b) * NV + h) * DV + row) * DK;
        for (int i = 0; i < DK / 8; i++) { states[to + part + 8 * i] = s[p * (DK / 8) + i]; }
      }
    }
  }
  BARRIER;
  for (int t = warp; t < rows; t += WARPS) {
    float sum = 0.0f;
    for (int i = lane; i < DV; i += 32) { sum += o[t * DV + i] * o[t * DV + i]; }
    float scale = RSQRT(warp_sum(sum) / float(DV) + FLOAT_BITS(EPS));
    for (int i = lane; i < DV; i += 32) {
      float z = float(packed[(all + t) * P + C + h * DV + i]);
      y[((all + t) * NV + h) * DV + i] = T(o[t * DV + i] * scale * norm[i] * (z / (1.0f + EXP(-z))));
    }
  }
";

/// What comes before the recurrence of many rows. One warp a row and head: heads of queries, of keys, of values.
/// packed [B, L, P], tail [B, TAPS - 1, C], conv [C, TAPS], decay and dt_bias [NV] → x [B, L, C] float32 (convolved; queries
/// and keys normalised, queries scaled), gates [B, L, NV, 2] float32 (what the state keeps, what it learns).
pub const DELTA_PREPARE: &str = r"
  int head = GRID_Y;
  int lane = LANE;
  int rows = packed_shape[1];
  int b = int(GRID_Z) / rows;
  int r = int(GRID_Z) % rows;
  int old = TAPS - 1;
  int value_head = head - 2 * NK;
  int size = value_head < 0 ? DK : DV;
  int from = value_head < 0 ? head * DK : 2 * NK * DK + value_head * DV;
  long all = long(b) * rows;
  float kept[WIDEST / 32];
  float square = 0.0f;
  for (int i = 0; i < WIDEST / 32; i++) {
    int c = from + lane + 32 * i;
    float sum = 0.0f;
    if (lane + 32 * i < size) {
      for (int j = 0; j < TAPS; j++) {
        int at = r + j;
        float value = at < old ? float(tail[(long(b) * old + at) * C + c]) : float(packed[(all + at - old) * P + c]);
        sum += value * conv[c * TAPS + j];
      }
      sum = sum / (1.0f + EXP(-sum));
    }
    kept[i] = sum;
    square += sum * sum;
  }
  float scale = 1.0f;
  if (value_head < 0) {
    scale = RSQRT(warp_sum(square) + 1e-6f);
    if (head < NK) { scale *= RSQRT(float(DK)); }
  } else if (lane == 0) {
    long at = (all + r) * P + C + NV * DV;
    float a = float(packed[at + NV + value_head]) + dt_bias[value_head];
    float soft = (a > 0.0f ? a : 0.0f) + LOG1P(EXP(a > 0.0f ? -a : a));
    long to = ((all + r) * NV + value_head) * 2;
    gates[to] = EXP(decay[value_head] * soft);
    gates[to + 1] = 1.0f / (1.0f + EXP(-float(packed[at + value_head])));
  }
  for (int i = 0; i < WIDEST / 32; i++) {
    if (lane + 32 * i < size) { x[(all + r) * C + from + lane + 32 * i] = kept[i] * scale; }
  }
";

/// The recurrence of many rows. Eight lanes a state row, four rows a warp; the warps of a threadgroup share a head's queries
/// and keys, which are read a tile of tokens ahead.
/// x [B, L, C] and gates [B, L, NV, 2] as [`DELTA_PREPARE`] leaves them, state [B, NV, DV, DK] → o [B, L, NV, DV] float32,
/// last [B, NV, DV, DK].
pub const DELTA_LONG: &str = r"
  SHARED float4 shared_qk[2 * TILE * (DK / 2)];
  SHARED float shared_v[2 * TILE * WARPS * 4];
  SHARED float shared_gates[2 * TILE * 2];
  int lane = LANE;
  int warp = WARP;
  int thread = warp * 32 + lane;
  int part = lane & 7;
  int row = int(GRID_Y) * 4 + (lane >> 3);
  int inside = row < DV ? row : 0;
  int first_row = (int(GRID_Y) - warp) * 4;
  int b = int(GRID_Z) / NV;
  int h = int(GRID_Z) % NV;
  int g = h / (NV / NK);
  int rows = x_shape[1];
  long all = long(b) * rows;
  long at = ((long(b) * NV + h) * DV + inside) * DK + part * 4;
  float4 s[DK / 32];
  for (int i = 0; i < DK / 32; i++) { s[i] = VEC4(state + at + 32 * i); }
  const int own = (TILE * (DK / 2) + WARPS * 32 - 1) / (WARPS * 32);
  const int own_v = (TILE * WARPS * 4 + WARPS * 32 - 1) / (WARPS * 32);
  float4 next_qk[own];
  float next_v[own_v];
  float next_gate = 0.0f;
  for (int from = -TILE; from < rows; from += TILE) {
    int ahead = from + TILE;
    if (ahead < rows) {
      for (int i = 0; i < own; i++) {
        int j = thread + i * WARPS * 32;
        int t = ahead + j / (DK / 2);
        int c = (j % (DK / 2)) * 4;
        long token = all + (t < rows ? t : rows - 1);
        next_qk[i] = VEC4(x + token * C + (c < DK ? g * DK + c : NK * DK + g * DK + c - DK));
      }
      for (int i = 0; i < own_v; i++) {
        int j = thread + i * WARPS * 32;
        int t = ahead + j / (WARPS * 4);
        int r = first_row + j % (WARPS * 4);
        long token = all + (t < rows ? t : rows - 1);
        next_v[i] = x[token * C + 2 * NK * DK + h * DV + (r < DV ? r : 0)];
      }
      if (thread < TILE * 2) {
        int t = ahead + thread / 2;
        next_gate = gates[((all + (t < rows ? t : rows - 1)) * NV + h) * 2 + thread % 2];
      }
    }
    int here = ((from / TILE) & 1) * TILE;
    int count = from < 0 ? 0 : (rows - from < TILE ? rows - from : TILE);
#pragma unroll 4
    for (int j = 0; j < count; j++) {
      int base = (here + j) * (DK / 2) + part;
      float keep = shared_gates[(here + j) * 2];
      float4 sum;
      sum.x = 0.0f;
      sum.y = 0.0f;
      sum.z = 0.0f;
      sum.w = 0.0f;
      for (int i = 0; i < DK / 32; i++) {
        float4 k = shared_qk[base + DK / 4 + 8 * i];
        sum.x += s[i].x * k.x;
        sum.y += s[i].y * k.y;
        sum.z += s[i].z * k.z;
        sum.w += s[i].w * k.w;
      }
      float predicted = (sum.x + sum.y) + (sum.z + sum.w);
      for (int lanes = 1; lanes < 8; lanes *= 2) { predicted += SHUFFLE_XOR(predicted, lanes); }
      float v = shared_v[(here + j) * (WARPS * 4) + warp * 4 + (lane >> 3)];
      float d = shared_gates[(here + j) * 2 + 1] * (v - keep * predicted);
      sum.x = 0.0f;
      sum.y = 0.0f;
      sum.z = 0.0f;
      sum.w = 0.0f;
      for (int i = 0; i < DK / 32; i++) {
        float4 k = shared_qk[base + DK / 4 + 8 * i];
        float4 q = shared_qk[base + 8 * i];
        s[i].x = keep * s[i].x + k.x * d;
        s[i].y = keep * s[i].y + k.y * d;
        s[i].z = keep * s[i].z + k.z * d;
        s[i].w = keep * s[i].w + k.w * d;
        sum.x += s[i].x * q.x;
        sum.y += s[i].y * q.y;
        sum.z += s[i].z * q.z;
        sum.w += s[i].w * q.w;
      }
      float out = (sum.x + sum.y) + (sum.z + sum.w);
      for (int lanes = 1; lanes < 8; lanes *= 2) { out += SHUFFLE_XOR(out, lanes); }
      if (part == 0 && row < DV) { o[((all + from + j) * NV + h) * DV + row] = out; }
    }
    int there = TILE - here;
    if (ahead < rows) {
      for (int i = 0; i < own; i++) {
        int j = thread + i * WARPS * 32;
        if (j < TILE * (DK / 2)) { shared_qk[there * (DK / 2) + j] = next_qk[i]; }
      }
      for (int i = 0; i < own_v; i++) {
        int j = thread + i * WARPS * 32;
        if (j < TILE * WARPS * 4) { shared_v[there * (WARPS * 4) + j] = next_v[i]; }
      }
      if (thread < TILE * 2) { shared_gates[there * 2 + thread] = next_gate; }
    }
    BARRIER;
  }
  if (row < DV) {
    for (int i = 0; i < DK / 32; i++) {
      last[at + 32 * i] = s[i].x;
      last[at + 32 * i + 1] = s[i].y;
      last[at + 32 * i + 2] = s[i].z;
      last[at + 32 * i + 3] = s[i].w;
    }
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
  int width = gain_shape[0];
  long row = GRID_Y;
  int thread = GRID_X;
  float square = 0.0f;
  for (int i = thread; i < width; i += THREADS) {
    float v = float(x[row * width + i]) + float(added[row * width + i]);
    T kept = T(v);
    sum[row * width + i] = kept;
    square += float(kept) * float(kept);
  }
  square = warp_sum(square);
  if (LANE == 0) { partial[WARP] = square; }
  BARRIER;
  float total = warp_sum(int(LANE) < THREADS / 32 ? partial[LANE] : 0.0f);
  float scale = RSQRT(total / float(width) + FLOAT_BITS(EPS));
  for (int i = thread; i < width; i += THREADS) {
    normed[row * width + i] = T(float(sum[row * width + i]) * scale * gain[i]);
  }
";

/// The same without a sum: x [R, D] → normed [R, D].
pub const NORM: &str = r"
  SHARED float partial[32];
  int width = gain_shape[0];
  long row = GRID_Y;
  int thread = GRID_X;
  float square = 0.0f;
  for (int i = thread; i < width; i += THREADS) {
    float v = float(x[row * width + i]);
    square += v * v;
  }
  square = warp_sum(square);
  if (LANE == 0) { partial[WARP] = square; }
  BARRIER;
  float total = warp_sum(int(LANE) < THREADS / 32 ? partial[LANE] : 0.0f);
  float scale = RSQRT(total / float(width) + FLOAT_BITS(EPS));
  for (int i = thread; i < width; i += THREADS) {
    normed[row * width + i] = T(float(x[row * width + i]) * scale * gain[i]);
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
