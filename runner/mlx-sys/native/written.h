// Arrays after a kernel has written into them.
#ifndef LOOKAHEAD_WRITTEN_H
#define LOOKAHEAD_WRITTEN_H

#include "mlx/c/array.h"
#include "mlx/c/stream.h"
#include "mlx/c/vector.h"

#ifdef __cplusplus
extern "C" {
#endif

/**
 * Stores in `res`, for each of `buffers`, an array of the same memory that is computed once `writer` is. For kernels that write
 * into an input's memory, which MLX knows nothing of: whoever reads the results reads what was written.
 *
 * The caller answers for nobody else relying on what the buffers held where they are written. Returns 0, or 1 after
 * reporting an error as mlx-c does.
 */
int lookahead_written(
    mlx_vector_array* res,
    const mlx_vector_array buffers,
    const mlx_array writer,
    const mlx_stream s);

#ifdef __cplusplus
}
#endif

#endif
