// A few rows times a transposed matrix, C = alpha * A * B^T + beta * C: what a linear layer is while decoding and
// while verifying drafts. No operand is packed, B is read once for all rows, and a row of C does not depend on how
// many rows are computed with it or on the number of threads (skinny_kernel.h says why), so that a verified token
// has exactly the logits that plain decoding would have given it.

#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "thread_pool.h"
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace skinny {

// More rows than this are worth packing.
constexpr int kMaxRows = 16;

// The upper half of a float32.
struct bf16 {
  std::uint16_t bits;
};

inline float widen(bf16 x) {
  std::uint32_t bits = static_cast<std::uint32_t>(x.bits) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// Row-major: A is [m, k], B is [n, k] of float or bf16, C is [m, n].
template <class Number>
struct Product {
  int m, n, k;
  float alpha;
  const float* a;
  std::ptrdiff_t lda;
  const Number* b;
  std::ptrdiff_t ldb;
  float beta;
  float* c;
  std::ptrdiff_t ldc;
};

#define INLINE inline __attribute__((always_inline))

#define KERNEL base
#define TARGET
namespace base {
constexpr int kLanes = 4;
constexpr int kWider = 1;
#if defined(__aarch64__)
using Vec = float32x4_t;
INLINE Vec fma(Vec x, Vec y, Vec sum) { return vfmaq_f32(sum, x, y); }
#else
typedef float Vec __attribute__((vector_size(16)));
INLINE Vec fma(Vec x, Vec y, Vec sum) { return sum + x * y; }
#endif
INLINE Vec zero() { return Vec{0, 0, 0, 0}; }
INLINE Vec load(const float* from) {
  Vec v;
  std::memcpy(&v, from, sizeof v);
  return v;
}
INLINE Vec load(const bf16* from) { return Vec{widen(from[0]), widen(from[1]), widen(from[2]), widen(from[3])}; }
INLINE void sum4(Vec v, Vec w, Vec x, Vec y, float* out) {
  out[0] = (v[0] + v[1]) + (v[2] + v[3]);
  out[1] = (w[0] + w[1]) + (w[2] + w[3]);
  out[2] = (x[0] + x[1]) + (x[2] + x[3]);
  out[3] = (y[0] + y[1]) + (y[2] + y[3]);
}
} // namespace base
#include "skinny_kernel.h"
#undef KERNEL
#undef TARGET

#if defined(__x86_64__)
#define KERNEL avx2
#define TARGET __attribute__((target("avx2,fma")))
namespace avx2 {
constexpr int kLanes = 8;
constexpr int kWider = 1;
using Vec = __m256;
TARGET INLINE Vec zero() { return _mm256_setzero_ps(); }
TARGET INLINE Vec load(const float* from) { return _mm256_loadu_ps(from); }
TARGET INLINE Vec load(const bf16* from) {
  __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}
TARGET INLINE Vec fma(Vec x, Vec y, Vec sum) { return _mm256_fmadd_ps(x, y, sum); }
TARGET INLINE void sum4(Vec v, Vec w, Vec x, Vec y, float* out) {
  Vec sums = _mm256_hadd_ps(_mm256_hadd_ps(v, w), _mm256_hadd_ps(x, y));
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(sums), _mm256_extractf128_ps(sums, 1)));
}
} // namespace avx2
#include "skinny_kernel.h"
#undef KERNEL
#undef TARGET

#define KERNEL avx512
#define TARGET __attribute__((target("avx512f,avx2,fma")))
namespace avx512 {
constexpr int kLanes = 16;
constexpr int kWider = 2;
using Vec = __m512;
TARGET INLINE Vec zero() { return _mm512_setzero_ps(); }
TARGET INLINE Vec load(const float* from) { return _mm512_loadu_ps(from); }
TARGET INLINE Vec load(const bf16* from) {
  __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}
TARGET INLINE Vec fma(Vec x, Vec y, Vec sum) { return _mm512_fmadd_ps(x, y, sum); }
TARGET INLINE __m256 half(Vec v) {
  __m256 high = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(v), 1));
  return _mm256_add_ps(_mm512_castps512_ps256(v), high);
}
TARGET INLINE void sum4(Vec v, Vec w, Vec x, Vec y, float* out) {
  __m256 sums = _mm256_hadd_ps(_mm256_hadd_ps(half(v), half(w)), _mm256_hadd_ps(half(x), half(y)));
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(sums), _mm256_extractf128_ps(sums, 1)));
}
} // namespace avx512
#include "skinny_kernel.h"
#undef KERNEL
#undef TARGET
#endif
#undef INLINE

template <class Number>
using Kernel = void (*)(const Product<Number>&, int, int);

// Level 0 is what every processor has; null where this one lacks the level.
template <class Number>
Kernel<Number> kernel(int level) {
#if defined(__x86_64__)
  if (level == 2) {
    return __builtin_cpu_supports("avx512f") ? avx512::columns<Number> : nullptr;
  }
  if (level == 1) {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? avx2::columns<Number> : nullptr;
  }
#endif
  return level == 0 ? base::columns<Number> : nullptr;
}

template <class Number>
Kernel<Number> best_kernel() {
  static const Kernel<Number> best = [] {
    Kernel<Number> found = kernel<Number>(2);
    found = found ? found : kernel<Number>(1);
    return found ? found : kernel<Number>(0);
  }();
  return best;
}

// All numbers of a piece of memory, by this processor's widest instructions.
inline void widen_all(const bf16* from, std::size_t count, float* to) {
  using Widen = void (*)(const bf16*, std::size_t, float*);
  static const Widen best = [] {
#if defined(__x86_64__)
    if (kernel<bf16>(2)) {
      return avx512::widen_all;
    }
    if (kernel<bf16>(1)) {
      return avx2::widen_all;
    }
#endif
    return base::widen_all;
  }();
  best(from, count, to);
}

template <class Number>
void multiply(const Product<Number>& p, Kernel<Number> kernel, int threads) {
  // A part is a few microseconds of work, so that waking a thread pays and a slow one holds nobody up for long.
  constexpr double kPart = 32768;
  // Whole tiles of any width: no part but the last repeats a row.
  constexpr int kStep = 24;
  double work = static_cast<double>(p.n) * p.k * std::max(1.0, p.m / 4.0);
  int parts = static_cast<int>(std::min(work / kPart, 4.0 * threads));
  if (threads < 2 || parts < 2) {
    kernel(p, 0, p.n);
    return;
  }
  int width = share(p.n, parts, kStep);
  parts = (p.n + width - 1) / width;
  pool().run(std::min(threads, parts), parts, [&](int part) {
    int begin = part * width;
    kernel(p, begin, std::min(p.n, begin + width));
  });
}

} // namespace skinny
