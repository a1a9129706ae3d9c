//! The scheduler with real processes, seen from its host.
#![expect(clippy::unwrap_used, reason = "helpers of tests: a panic is a test's failure")]

mod faults;
mod host;
mod lifecycle;
mod requests;
mod run;
mod soak;
