// A lazily evaluated MLX operation whose CPU kernel is a C function.
#ifndef LOOKAHEAD_CPU_OP_H
#define LOOKAHEAD_CPU_OP_H

#include "mlx/c/array.h"
#include "mlx/c/stream.h"
#include "mlx/c/vector.h"

#ifdef __cplusplus
extern "C" {
#endif

/**
 * One output of an operation. Shape in elements, row-contiguous.
 *
 * `donor` is the index of an input of the same type and size that the output starts as a copy of, or -1 for an output
 * that starts uninitialised. The copy costs nothing when nobody else holds that input's buffer: the output then takes it
 * over. Either way the kernel's pointers to the donor and to the output are equal.
 */
typedef struct lookahead_cpu_output_ {
  const int* shape;
  size_t ndim;
  mlx_dtype dtype;
  int donor;
} lookahead_cpu_output;

/**
 * Reads row-contiguous inputs and fills every output. Runs on the stream's thread, once for each evaluation; must not
 * unwind and must not call MLX. Returns 0, or else the evaluation fails with an error naming the operation.
 */
typedef int (*lookahead_cpu_kernel)(
    void* ctx,
    const void* const* inputs,
    void* const* outputs);

/**
 * Adds an operation to the graph and stores its outputs in `res`. The stream must be a CPU stream.
 *
 * Takes over `ctx` in every case and ends it with `free_ctx`, on any thread, when no evaluation can need it any more.
 * Returns 0, or 1 after reporting an error as mlx-c does.
 */
int lookahead_cpu_op(
    mlx_vector_array* res,
    const char* name,
    const mlx_vector_array inputs,
    const lookahead_cpu_output* outputs,
    size_t num_outputs,
    lookahead_cpu_kernel kernel,
    void* ctx,
    void (*free_ctx)(void*),
    const mlx_stream s);

#ifdef __cplusplus
}
#endif

#endif
