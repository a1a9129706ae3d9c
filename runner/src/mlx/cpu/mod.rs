//! Fused float32 kernels for the host's cores, on plain slices.
//!
//! Invariant: a kernel's result for a row does not depend on how many rows a call has, so verifying several rows at once
//! gives bit for bit what decoding them one by one gives. Vector width is chosen once a process.
//!
//! MLX's CPU backend pays about five microseconds a graph node and has no fused norms, attention or recurrence; for small
//! models that overhead exceeds the arithmetic.

pub mod attention;
mod attention_tiles;
pub mod delta;
pub mod elementwise;
pub(crate) mod kernel;
pub mod op;
pub mod product;
pub mod simd;
