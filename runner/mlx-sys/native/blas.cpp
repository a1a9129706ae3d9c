// The three BLAS functions that libmlx imports, sent to OpenBLAS. The wheel's own are the single-threaded reference
// implementation; defined in the executable, these come first in symbol lookup.

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

#define EXPORT __attribute__((visibility("default"), used))

EXPORT void cblas_sgemm(
    int order, int transa, int transb, int m, int n, int k, float alpha,
    const float* a, int lda, const float* b, int ldb, float beta, float* c, int ldc) {
  if (order == kRowMajor && m == 1) {
    // A single row is several times faster as a matrix-vector product: no operand is packed.
    bool transposed = transb == kTrans;
    scipy_cblas_sgemv(
        order, transposed ? kNoTrans : kTrans, transposed ? n : k, transposed ? k : n, alpha,
        b, ldb, a, transa == kNoTrans ? 1 : lda, beta, c, 1);
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
}
