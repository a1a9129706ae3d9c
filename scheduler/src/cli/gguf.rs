//! `lookahead gguf`: one GGUF file as a process that speaks the runner's side of the wire protocol.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use lookahead_scheduler::gguf::bridge::{self, Options};
use lookahead_scheduler::gguf::drafting::Wish;
use lookahead_scheduler::log;

/// Flags of `gguf`.
#[derive(Debug, Args)]
pub(crate) struct GgufArguments {
    /// The GGUF file; of a split model the first part.
    #[arg(long, value_name = "FILE")]
    model: PathBuf,
    /// llama-server's executable; by default the one in PATH or of the Python package.
    #[arg(
        long,
        value_name = "PROGRAM",
        env = "LOOKAHEAD_LLAMA_SERVER",
        hide_env_values = true
    )]
    llama_server: Option<PathBuf>,
    /// A separate draft file.
    #[arg(long, value_name = "FILE")]
    draft_model: Option<PathBuf>,
    /// Drafting: auto (where the file has a head), off, or a depth from 1 to 16.
    #[arg(long, default_value = "auto", value_name = "MODE")]
    draft: Wish,
    /// Context length; by default the model's own, at most 32768.
    #[arg(long, value_name = "N")]
    context: Option<u64>,
    /// Threads; by default one a core.
    #[arg(long, value_name = "N")]
    threads: Option<usize>,
    /// The longest request line, in bytes.
    #[arg(long, value_name = "BYTES", default_value_t = 268_435_456)]
    max_line_bytes: usize,
}

/// Serves the file until the host is gone.
pub(crate) fn gguf(arguments: GgufArguments) -> anyhow::Result<ExitCode> {
    log::init("info");
    let code = bridge::serve(&Options {
        model: arguments.model,
        llama_server: arguments.llama_server,
        draft_model: arguments.draft_model,
        draft: arguments.draft,
        context: arguments.context,
        threads: arguments.threads,
        max_line_bytes: arguments.max_line_bytes,
    })
    .map_err(super::Broken)?;
    Ok(ExitCode::from(code))
}
