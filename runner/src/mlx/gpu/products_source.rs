//! Kernel text of the products of a few rows: a weight matrix read once, on tensor cores, with what surrounds it.
//!
//! Invariant: a row's result does not depend on how many rows are computed with it: every element is one chain of the same
//! tensor-core steps over the same order of inputs, and parts are added in the order of their warps. Text for CUDA only; on
//! Metal the library's own products serve.
//!
//! A warp takes eight outputs a tile; its lane (g, t) holds a stretch of row g of the weights that lies in one piece in
//! memory. The order of the inputs inside a step is the same for weights and rows, so any order gives the sum.

/// Names that the bodies use beside the common prelude.
pub const PRELUDE: &str = r#"
__device__ __forceinline__ void tensor_step(
    float (&c)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// Two bfloat16 values lie in one word, the first in its lower half.
__device__ __forceinline__ unsigned pair_of(float first, float second) {
  unsigned bits;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(second), "f"(first));
  return bits;
}
__device__ __forceinline__ unsigned pair_fma(unsigned a, unsigned b, unsigned c) {
  unsigned bits;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(bits) : "r"(a), "r"(b), "r"(c));
  return bits;
}
__device__ __forceinline__ void half_step(
    float (&c)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// Two bfloat16 values as two of half precision.
__device__ __forceinline__ unsigned half_pair(unsigned bits) {
  unsigned out;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;"
      : "=r"(out) : "f"(__uint_as_float(bits & 0xffff0000u)), "f"(__uint_as_float(bits << 16)));
  return out;
}
// Two bytes, which `order` moves into the lower bits of 1024 as half precision, less 1024 and 128: exact.
__device__ __forceinline__ unsigned byte_pair(unsigned codes, unsigned order) {
  unsigned out;
  asm("add.rn.f16x2 %0, %1, %2;" : "=r"(out) : "r"(__byte_perm(codes, 0x64646464u, order)), "r"(0xe480e480u));
  return out;
}
// Two values times their gains; adds their squares to a sum.
__device__ __forceinline__ unsigned weigh(unsigned bits, float first, float second, float& square) {
  float x = __uint_as_float(bits << 16);
  float y = __uint_as_float(bits & 0xffff0000u);
  square += x * x;
  square += y * y;
  return pair_of(x * first, y * second);
}
// Eight values from `at` on, weighed where there is a gain.
__device__ __forceinline__ uint4 weigh_eight(uint4 x, const float* gain, float& square) {
  float4 a = *reinterpret_cast<const float4*>(gain);
  float4 b = *reinterpret_cast<const float4*>(gain + 4);
  x.x = weigh(x.x, a.x, a.y, square);
  x.y = weigh(x.y, a.z, a.w, square);
  x.z = weigh(x.z, b.x, b.y, square);
  x.w = weigh(x.w, b.z, b.w, square);
  return x;
}
// Two of eight 4-bit codes as weights: codes i and i + 4.
__device__ __forceinline__ unsigned decode_pair(unsigned codes, unsigned scale, unsigned bias) {
  // 128 + code, then that times 1 minus 128: exact.
  unsigned biased = (codes & 0x000f000fu) | 0x43004300u;
  unsigned plain = pair_fma(biased, 0x3f803f80u, 0xc300c300u);
  return pair_fma(plain, scale, bias);
}
"#;

/// x [B, L, K], w [N, K], (gain [K] float32), (added [B, L, N]) → y [B, L, N], or [B, L, N / 2] gated.
/// `NORM`: the rows are normalised first. `EPILOGUE`: 0 none, 1 adds `added`, 2 `silu(first half) * second half`.
/// `HALVES`: 1 for up to eight rows, 2 for up to sixteen.
pub const HEAD: &str = r"
  const int depth = x_shape[2];
  const int outs = w_shape[0];
  const int rows = x_shape[0] * x_shape[1];
  const int lane = threadIdx.x & 31;
  const int warp = threadIdx.x >> 5;
  const int g = lane >> 2;
  const int t = lane & 3;
  constexpr int RESULTS = EPILOGUE == 2 ? TILES / 2 : TILES;
  const int first = blockIdx.x * RESULTS * 8;
  const int width = EPILOGUE == 2 ? outs / 2 : outs;
  __shared__ float part[WARPS * TILES * HALVES * 64];
  __shared__ float squares[NORM ? WARPS * HALVES * 8 : 1];
  int at[TILES];
  for (int j = 0; j < TILES; j++) {
    int n = first + (j % RESULTS) * 8 + g + (j >= RESULTS ? width : 0);
    at[j] = n < outs ? n : outs - 1;
  }
  const bool low = g < rows;
  const bool high = HALVES == 2 && g + 8 < rows;
  const bf16* x_low = x + long(g) * depth;
  const bf16* x_high = x + long(g + 8) * depth;
  float acc[TILES][4];
  for (int j = 0; j < TILES; j++) {
    for (int i = 0; i < 4; i++) { acc[j][i] = 0.0f; }
  }
  float square_low = 0.0f;
  float square_high = 0.0f;
  const uint4 none = make_uint4(0u, 0u, 0u, 0u);
";

/// Plain weights: 64 inputs a step, two stretches of eight a lane.
pub const DENSE: &str = r"
  const int steps = depth >> 6;
  const bf16* from[TILES];
  for (int j = 0; j < TILES; j++) { from[j] = w + long(at[j]) * depth + t * 8; }
#pragma unroll UNROLL
  for (int step = warp; step < steps; step += WARPS) {
    uint4 b[TILES][2];
    for (int j = 0; j < TILES; j++) {
      b[j][0] = __ldcs(reinterpret_cast<const uint4*>(from[j] + step * 64));
      b[j][1] = __ldcs(reinterpret_cast<const uint4*>(from[j] + step * 64 + 32));
    }
    for (int s = 0; s < 2; s++) {
      const int k = step * 64 + s * 32 + t * 8;
      uint4 a = low ? *reinterpret_cast<const uint4*>(x_low + k) : none;
      uint4 c = high ? *reinterpret_cast<const uint4*>(x_high + k) : none;
      if (NORM) {
        a = weigh_eight(a, GAIN + k, square_low);
        if (HALVES == 2) { c = weigh_eight(c, GAIN + k, square_high); }
      }
      for (int j = 0; j < TILES; j++) {
        tensor_step(acc[j], a.x, c.x, a.y, c.y, b[j][s].x, b[j][s].y);
        tensor_step(acc[j], a.z, c.z, a.w, c.w, b[j][s].z, b[j][s].w);
      }
    }
  }
";

/// Affine 4-bit codes in groups of 32, 64 or 128: 128 inputs a step, one stretch of 32 a lane.
/// w [N, K / 8] uint32, scales and biases [N, K / GROUP].
pub const CODES: &str = r"
  const int steps = depth >> 7;
  const unsigned* from[TILES];
  long group_at[TILES];
  for (int j = 0; j < TILES; j++) {
    from[j] = w + long(at[j]) * (depth >> 3) + t * 4;
    group_at[j] = long(at[j]) * (depth / GROUP);
  }
#pragma unroll UNROLL
  for (int step = warp; step < steps; step += WARPS) {
    uint4 b[TILES];
    unsigned scale[TILES];
    unsigned bias[TILES];
    const int group = (step * 128 + t * 32) / GROUP;
    for (int j = 0; j < TILES; j++) {
      b[j] = __ldcs(reinterpret_cast<const uint4*>(from[j] + step * 16));
      scale[j] = scales[group_at[j] + group].bits * 0x10001u;
      bias[j] = biases[group_at[j] + group].bits * 0x10001u;
    }
    for (int s = 0; s < 4; s++) {
      const int k = step * 128 + t * 32 + s * 8;
      uint4 a = low ? *reinterpret_cast<const uint4*>(x_low + k) : none;
      uint4 c = high ? *reinterpret_cast<const uint4*>(x_high + k) : none;
      if (NORM) {
        a = weigh_eight(a, GAIN + k, square_low);
        if (HALVES == 2) { c = weigh_eight(c, GAIN + k, square_high); }
      }
      // Codes come out as pairs (i, i + 4); rows are paired alike.
      const unsigned a0 = __byte_perm(a.x, a.z, 0x5410), a1 = __byte_perm(a.x, a.z, 0x7632);
      const unsigned a2 = __byte_perm(a.y, a.w, 0x5410), a3 = __byte_perm(a.y, a.w, 0x7632);
      const unsigned c0 = __byte_perm(c.x, c.z, 0x5410), c1 = __byte_perm(c.x, c.z, 0x7632);
      const unsigned c2 = __byte_perm(c.y, c.w, 0x5410), c3 = __byte_perm(c.y, c.w, 0x7632);
      for (int j = 0; j < TILES; j++) {
        const unsigned codes = s == 0 ? b[j].x : s == 1 ? b[j].y : s == 2 ? b[j].z : b[j].w;
        tensor_step(acc[j], a0, c0, a1, c1,
            decode_pair(codes, scale[j], bias[j]), decode_pair(codes >> 4, scale[j], bias[j]));
        tensor_step(acc[j], a2, c2, a3, c3,
            decode_pair(codes >> 8, scale[j], bias[j]), decode_pair(codes >> 12, scale[j], bias[j]));
      }
    }
  }
";

/// Signed 8-bit codes with a scale a row: 128 inputs a step, two stretches of sixteen a lane. Rows are taken in half precision:
/// one beyond 65,504 makes the result infinite.
/// w [N, K / 4] uint32, each byte a code plus 128; scales [N] float32.
pub const BYTES: &str = r"
  const int steps = depth >> 7;
  const unsigned* from[TILES];
  for (int j = 0; j < TILES; j++) { from[j] = w + long(at[j]) * (depth >> 2) + t * 4; }
#pragma unroll UNROLL
  for (int step = warp; step < steps; step += WARPS) {
    uint4 b[TILES][2];
    for (int j = 0; j < TILES; j++) {
      b[j][0] = __ldcs(reinterpret_cast<const uint4*>(from[j] + step * 32));
      b[j][1] = __ldcs(reinterpret_cast<const uint4*>(from[j] + step * 32 + 16));
    }
    for (int s = 0; s < 4; s++) {
      // Half a stretch: eight inputs, two words of codes.
      const int k = step * 128 + (s >> 1) * 64 + t * 16 + (s & 1) * 8;
      const uint4 a = low ? *reinterpret_cast<const uint4*>(x_low + k) : none;
      const uint4 c = high ? *reinterpret_cast<const uint4*>(x_high + k) : none;
      const unsigned a0 = half_pair(a.x), a1 = half_pair(a.y), a2 = half_pair(a.z), a3 = half_pair(a.w);
      const unsigned c0 = half_pair(c.x), c1 = half_pair(c.y), c2 = half_pair(c.z), c3 = half_pair(c.w);
      for (int j = 0; j < TILES; j++) {
        const uint4 codes = b[j][s >> 1];
        const unsigned first = (s & 1) == 0 ? codes.x : codes.z;
        const unsigned second = (s & 1) == 0 ? codes.y : codes.w;
        half_step(acc[j], a0, c0, a1, c1, byte_pair(first, 0x4140), byte_pair(first, 0x4342));
        half_step(acc[j], a2, c2, a3, c3, byte_pair(second, 0x4140), byte_pair(second, 0x4342));
      }
    }
  }
";

/// Adds the warps' parts in order and writes the results.
pub const TAIL: &str = r"
  for (int j = 0; j < TILES; j++) {
    float* to = part + (warp * TILES + j) * HALVES * 64 + g * 8 + t * 2;
    to[0] = acc[j][0];
    to[1] = acc[j][1];
    if (HALVES == 2) {
      to[64] = acc[j][2];
      to[65] = acc[j][3];
    }
  }
  if (NORM) {
    for (int lanes = 1; lanes < 4; lanes *= 2) {
      square_low += __shfl_xor_sync(0xffffffffu, square_low, lanes);
      square_high += __shfl_xor_sync(0xffffffffu, square_high, lanes);
    }
    if (t == 0) {
      squares[warp * HALVES * 8 + g] = square_low;
      if (HALVES == 2) { squares[warp * HALVES * 8 + 8 + g] = square_high; }
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < RESULTS * HALVES * 64; i += WARPS * 32) {
    const int column = i % 8;
    const int j = (i / 8) % RESULTS;
    const int row = i / (8 * RESULTS);
    const int n = first + j * 8 + column;
    if (row >= rows || n >= width) { continue; }
    const float* from_part = part + (j * HALVES + row / 8) * 64 + (row % 8) * 8 + column;
    float value = 0.0f;
    for (int p = 0; p < WARPS; p++) { value += from_part[p * TILES * HALVES * 64]; }
    float gated = 0.0f;
    if (EPILOGUE == 2) {
      for (int p = 0; p < WARPS; p++) { gated += from_part[(p * TILES + RESULTS) * HALVES * 64]; }
    }
    if (NORM) {
      float total = 0.0f;
      for (int p = 0; p < WARPS; p++) { total += squares[p * HALVES * 8 + row]; }
      const float scale = rsqrtf(total / float(depth) + __int_as_float(EPS));
      value *= scale;
      gated *= scale;
    }
    value *= ROW_SCALE(n);
    if (EPILOGUE == 1) { value += float(ADDED[long(row) * width + n]); }
    if (EPILOGUE == 2) { value = value / (1.0f + __expf(-value)) * gated; }
    y[long(row) * width + n] = bf16(value);
  }
";
