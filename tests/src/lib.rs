//! Drives the real executables through their pipes.
//!
//! Invariant: every wait has a deadline, and a process that a test started ends with the test.
#![deny(missing_docs)]

pub mod checkpoint;
pub mod golden;
pub mod order;
pub mod picture;
pub mod process;
pub mod requests;
