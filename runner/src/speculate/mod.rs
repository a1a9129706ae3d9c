//! Speculative decoding: how drafts are proposed, judged, kept and paid for.
//!
//! Invariant: whatever is drafted, the tokens that a request receives have the distribution of plain decoding.

pub mod acceptance;
pub mod belief;
pub mod cost;
pub mod depth;
pub mod health;
pub mod memory;
pub mod probe;
pub mod round;
pub mod selection;

#[cfg(test)]
mod depth_tests;
#[cfg(test)]
mod round_tests;
#[cfg(test)]
mod sim_tests;
