//! From logits to tokens: options, penalties, distributions, draws, acceptance and logprobs.
//!
//! [`Sampler`] is the door. `options`, `rng` and `row` are plain data and loops; `fused` runs them as single nodes of MLX's graph
//! on the CPU, and `graph` does the same in tensor operations on any device. Both are held against one float64 implementation.

mod accept;
pub mod constraint;
mod dist;
mod fused;
mod graph;
mod logprobs;
mod noise;
pub mod options;
mod penalty;
pub mod rng;
pub mod row;
mod sampler;

pub use accept::{Outcome, Verdict};
pub use dist::{Dist, Rows};
pub use logprobs::{Logprobs, Scored, TokenScores};
pub use options::{Filter, GenerationDefaults, OptionError, SamplingOptions, Shape};
pub use sampler::{Draft, SampleError, Sampler, Vocabulary};

#[cfg(test)]
mod accept_tests;
#[cfg(test)]
mod cost_tests;
#[cfg(test)]
mod logprobs_tests;
#[cfg(test)]
pub(crate) mod oracle;
#[cfg(test)]
mod penalty_tests;
#[cfg(test)]
mod sampler_tests;
