// A lazily evaluated MLX operation whose CUDA kernel was compiled by the caller.
#ifndef LOOKAHEAD_CUDA_OP_H
#define LOOKAHEAD_CUDA_OP_H

#include "mlx/c/array.h"
#include "mlx/c/stream.h"
#include "mlx/c/vector.h"

#ifdef __cplusplus
extern "C" {
#endif

/** One output: its shape in elements, row-contiguous, and its type. */
typedef struct lookahead_cuda_output_ {
  const int* shape;
  size_t ndim;
  mlx_dtype dtype;
} lookahead_cuda_output;

/**
 * One launch. The kernel's parameters are the inputs' and the outputs' pointers and then the integers. `grid` and `group`
 * count threads by axis. `name` is the kernel's own.
 */
typedef struct lookahead_cuda_launch_ {
  const char* name;
  const void* image;
  size_t image_size;
  const lookahead_cuda_output* outputs;
  size_t num_outputs;
  const int* integers;
  size_t num_integers;
  int grid[3];
  int group[3];
} lookahead_cuda_launch;

/** A launch that has been described once, without its arrays. */
typedef struct lookahead_cuda_primitive_ {
  void* ctx;
} lookahead_cuda_primitive;

/**
 * Adds a launch to the graph and stores its outputs in `res`. Inputs that aren't row-contiguous are copied.
 *
 * With `primitive->ctx` null, describes the launch and stores it there; else repeats what is stored there, which must be
 * a launch of the same name, integers, grid, group and number of inputs, on the same stream: nothing of it is copied again.
 * Returns 0, or 1 after reporting an error as mlx-c does: without CUDA always.
 */
int lookahead_cuda_op(
    mlx_vector_array* res,
    lookahead_cuda_primitive* primitive,
    const lookahead_cuda_launch* launch,
    const mlx_vector_array inputs,
    const mlx_stream s);

/** Ends a description. Launches in graphs keep what they need. */
void lookahead_cuda_primitive_free(lookahead_cuda_primitive primitive);

#ifdef __cplusplus
}
#endif

#endif
