//! The scheduler with real processes, seen from its host.
#![expect(clippy::unwrap_used, reason = "helpers of tests: a panic is a test's failure")]

mod commands;
mod faults;
mod gguf;
mod gguf_real;
mod host;
mod lifecycle;
mod replay;
mod requests;
mod run;
mod soak;

#[expect(dead_code, reason = "shared with the unit tests, which use more of it")]
#[path = "../../src/gguf/synthetic.rs"]
mod synthetic;
