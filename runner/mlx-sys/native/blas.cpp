// The three BLAS functions that libmlx imports. The wheel's own are the single-threaded reference implementation;
// defined in the executable, these come first in symbol lookup. They go to OpenBLAS, all but a few rows times a
// transposed matrix, where packing costs more than the product.
//
// OpenBLAS computes on the thread that calls it, and large products are cut here: its own threads stay awake for 27 ms
// after each product, on processors that the model's other operations need.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "skinny.h"

namespace {
constexpr int kRowMajor = 101;
constexpr int kNoTrans = 111;
constexpr int kTrans = 112;
} // namespace

extern "C" {
void scipy_cblas_sgemm(
    int, int, int, int, int, int, float, const float*, int, const float*, int, float, float*, int);
void scipy_cblas_sgemv(
    int, int, int, int, float, const float*, int, const float*, int, float, float*, int);
void scipy_cblas_dgemm(
    int, int, int, int, int, int, double, const double*, int, const double*, int, double, double*, int);
void scipy_cblas_cgemm(
    int, int, int, int, int, int, const void*, const void*, int, const void*, int, const void*, void*, int);
int scipy_openblas_get_num_threads();
void scipy_openblas_set_num_threads(int);
}

namespace {
// As many threads as OpenBLAS would have used, by its own variables and the number of processors.
int threads() {
  static const int count = [] {
    int wanted = scipy_openblas_get_num_threads();
    scipy_openblas_set_num_threads(1);
    return wanted;
  }();
  return count;
}

// A product by OpenBLAS, row-major, cut along the larger of its outer dimensions: the other operand is packed once a part.
void packed_sgemm(
    int transa, int transb, int m, int n, int k, float alpha,
    const float* a, int lda, const float* b, int ldb, float beta, float* c, int ldc) {
  // Less than this many multiplications, some 20 microseconds, isn't worth a second thread.
  constexpr double kPart = 1 << 19;
  // Whole register tiles of any of OpenBLAS's kernels.
  constexpr int kStep = 48;
  bool by_columns = n >= m;
  int extent = by_columns ? n : m;
  double work = static_cast<double>(m) * n * k;
  // Twice as many parts as threads, so that one which is held up doesn't keep the rest waiting for long.
  int parts = static_cast<int>(std::min(work / kPart, 2.0 * threads()));
  if (threads() < 2 || parts < 2) {
    scipy_cblas_sgemm(kRowMajor, transa, transb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
    return;
  }
  int width = skinny::share(extent, parts, kStep);
  parts = (extent + width - 1) / width;
  skinny::pool().run(std::min(threads(), parts), parts, [&](int part) {
    std::ptrdiff_t begin = static_cast<std::ptrdiff_t>(part) * width;
    int size = std::min(width, extent - part * width);
    if (by_columns) {
      const float* columns = b + (transb == kNoTrans ? begin : begin * ldb);
      scipy_cblas_sgemm(kRowMajor, transa, transb, m, size, k, alpha, a, lda, columns, ldb, beta, c + begin, ldc);
    } else {
      const float* rows = a + (transa == kNoTrans ? begin * lda : begin);
      scipy_cblas_sgemm(
          kRowMajor, transa, transb, size, n, k, alpha, rows, lda, b, ldb, beta, c + begin * ldc, ldc);
    }
  });
}
} // namespace

extern "C" {
#define EXPORT __attribute__((visibility("default"), used))

EXPORT void cblas_sgemm(
    int order, int transa, int transb, int m, int n, int k, float alpha,
    const float* a, int lda, const float* b, int ldb, float beta, float* c, int ldc) {
  if (order == kRowMajor && transb == kNoTrans && n == 1 && ldb == 1) {
    // MLX calls a contiguous column plain; it is a transposed row just as well.
    transb = kTrans;
    ldb = k;
  }
  if (order == kRowMajor && transb == kTrans && m > 0 && m <= skinny::kMaxRows && n > 0 && k > 0) {
    thread_local std::vector<float> rows;
    if (transa != kNoTrans) {
      rows.resize(static_cast<std::size_t>(m) * k);
      for (int row = 0; row < m; ++row) {
        for (int i = 0; i < k; ++i) {
          rows[static_cast<std::size_t>(row) * k + i] = a[static_cast<std::ptrdiff_t>(i) * lda + row];
        }
      }
      a = rows.data();
      lda = k;
    }
    skinny::multiply<float>(
        {m, n, k, alpha, a, lda, b, ldb, beta, c, ldc}, skinny::best_kernel<float>(), threads());
    return;
  }
  if (order == kRowMajor && m == 1 && transb == kNoTrans) {
    // A single row is several times faster as a matrix-vector product: no operand is packed.
    scipy_cblas_sgemv(order, kTrans, k, n, alpha, b, ldb, a, transa == kNoTrans ? 1 : lda, beta, c, 1);
    return;
  }
  if (order == kRowMajor) {
    packed_sgemm(transa, transb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
    return;
  }
  scipy_cblas_sgemm(order, transa, transb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}

EXPORT void cblas_dgemm(
    int order, int transa, int transb, int m, int n, int k, double alpha,
    const double* a, int lda, const double* b, int ldb, double beta, double* c, int ldc) {
  scipy_cblas_dgemm(order, transa, transb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}

EXPORT void cblas_cgemm(
    int order, int transa, int transb, int m, int n, int k, const void* alpha,
    const void* a, int lda, const void* b, int ldb, const void* beta, void* c, int ldc) {
  scipy_cblas_cgemm(order, transa, transb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}

// y [m, n] = x [m, k] * w^T for w [n, k] of bfloat16, all rows without gaps, as if w had been widened to float32 before:
// few rows as they lie, many a panel of w at a time, widened where the thread's cache holds it.
EXPORT void lookahead_bf16_product(int m, int n, int k, const float* x, const std::uint16_t* w, float* y) {
  static_assert(sizeof(skinny::bf16) == sizeof(std::uint16_t));
  const auto* numbers = reinterpret_cast<const skinny::bf16*>(w);
  if (m <= skinny::kMaxRows) {
    skinny::multiply<skinny::bf16>(
        {m, n, k, 1, x, k, numbers, k, 0, y, n}, skinny::best_kernel<skinny::bf16>(), threads());
    return;
  }
  // Whole register tiles of any of OpenBLAS's kernels, and at most so many numbers: the rows are packed anew for each panel,
  // so it is as wide as a cache allows.
  constexpr int kStep = 48;
  constexpr int kNumbers = 1 << 20;
  int widest = std::max(kNumbers / std::max(k, 1) / kStep, 1) * kStep;
  int width = std::min(skinny::share(n, 2 * threads(), kStep), widest);
  int parts = (n + width - 1) / width;
  skinny::pool().run(threads(), parts, [&](int part) {
    thread_local std::vector<float> panel;
    int begin = part * width;
    int columns = std::min(width, n - begin);
    std::size_t count = static_cast<std::size_t>(columns) * k;
    panel.resize(std::max(panel.size(), count));
    const skinny::bf16* from = numbers + static_cast<std::ptrdiff_t>(begin) * k;
    skinny::widen_all(from, count, panel.data());
    scipy_cblas_sgemm(
        kRowMajor, kNoTrans, kTrans, m, columns, k, 1, x, k, panel.data(), k, 0, y + begin, n);
  });
}

// One way of computing a product, of those that cblas_sgemm chooses from: an instruction set (0 is what every
// processor has) and a number of threads. Says whether this processor has the instruction set.
EXPORT bool lookahead_skinny_sgemm(
    int level, int threads, int m, int n, int k, float alpha,
    const float* a, int lda, const float* b, int ldb, float beta, float* c, int ldc) {
  skinny::Kernel<float> kernel = skinny::kernel<float>(level);
  if (kernel) {
    skinny::multiply<float>({m, n, k, alpha, a, lda, b, ldb, beta, c, ldc}, kernel, threads);
  }
  return kernel != nullptr;
}

// The same of a product with bfloat16 numbers, without gaps.
EXPORT bool lookahead_skinny_bf16(
    int level, int threads, int m, int n, int k, const float* a, const std::uint16_t* b, float* c) {
  skinny::Kernel<skinny::bf16> kernel = skinny::kernel<skinny::bf16>(level);
  if (kernel) {
    const auto* numbers = reinterpret_cast<const skinny::bf16*>(b);
    skinny::multiply<skinny::bf16>({m, n, k, 1, a, k, numbers, k, 0, c, n}, kernel, threads);
  }
  return kernel != nullptr;
}
}
