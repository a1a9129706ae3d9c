//! Serves one Qwen3.5-family model on MLX over line-delimited JSON.
//!
//! Arrows between the modules point one way: `host → engine → {speculate, prefix, sample, text} → {cache, model} → mlx`.
//! Everything that touches an MLX array runs on the engine's thread; the rest is plain data.
#![deny(missing_docs)]

pub mod cache;
pub mod engine;
pub mod host;
pub mod image;
pub mod inspect;
pub mod mlx;
pub mod model;
pub mod prefix;
pub mod sample;
pub mod speculate;
pub mod text;
