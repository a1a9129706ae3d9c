//! What `mlx-rs` lacks: quantisation modes, slices with plain bounds, fused kernels, memory limits and the choice of backend.
//!
//! Invariant: every function here only builds graph nodes; nothing evaluates unless its name says so.

pub mod backend;
pub mod cpu;
pub mod delta;
pub mod gpu;
pub mod graph_size;
pub mod memory;
pub mod ops;

pub use backend::{Backend, Path};
pub use mlx_rs::error::{Exception, Result};
pub use mlx_rs::{Array, Dtype};
