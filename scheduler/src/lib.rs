//! Spawns and supervises one process per model and speaks the wire protocol of [`lookahead_protocol`] with all of them.
//!
//! The crate never links MLX: a model's process may crash, hang or take all memory without harm to this one.
#![deny(missing_docs)]

pub mod catalog;
pub mod config;
pub mod estimate;
pub mod gguf;
pub mod log;
pub mod memory;
pub mod outbox;
pub mod placement;
pub mod process;
pub mod programs;
pub mod record;
pub mod replay;
pub mod stdio;
pub mod supervise;
