//! GGUF files, served by llama.cpp's `llama-server` behind the runner's side of the wire protocol.
//!
//! Invariant: to the scheduler a GGUF model is a process like any other. `lookahead gguf` is that process: it starts the server,
//! translates, and takes it along in every way of ending.

mod answer;
pub mod ask;
pub mod bridge;
pub mod drafting;
pub mod find;
pub mod header;
pub mod http;
pub mod launch;
mod requests;
mod rounds;
#[cfg(test)]
mod synthetic;
mod work;
