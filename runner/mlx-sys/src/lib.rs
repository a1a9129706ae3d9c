//! Declarations of mlx-c, of the half-float accessors that it lacks off Apple's platforms, and of Lookahead's own
//! extensions: MLX operations with a CPU kernel written in Rust ([`lookahead_cpu_op`]), or with a compiled CUDA kernel
//! ([`lookahead_cuda_op`]).
//!
//! Stands in for the published crate of the same name and version; every item of that one is here with the same type.

#[cfg(not(target_vendor = "apple"))]
mod half;

mod product;
pub use product::{bf16_product, HAS_BF16_PRODUCT};

mod bindings {
    #![allow(warnings, clippy::all, reason = "generated")]
    include!(concat!(env!("OUT_DIR"), "/bindings.rs"));
}

pub use bindings::*;
#[cfg(not(target_vendor = "apple"))]
pub use half::*;
