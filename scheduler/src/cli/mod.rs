//! The command line for people and for hosts.
//!
//! Invariant: what a command prints on stdout is its result and nothing else; progress, statistics and errors go to stderr.
//! Exit status: 0 for success, 1 for a failed request or load, 2 for a bad command line, 130 after Ctrl-C.

mod generation;
mod gguf;
mod programs;
mod replay;
mod run;
mod serve;
mod session;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Runs Qwen3.5-family models fast, each in a process of its own.
#[derive(Debug, Parser)]
#[command(
    name = "lookahead",
    version,
    arg_required_else_help = true,
    max_term_width = 110
)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Answer one prompt and stream the answer to the terminal.
    Run(Box<run::RunArguments>),
    /// Speak the wire protocol on stdin and stdout, for one or more models.
    Serve(serve::ServeArguments),
    /// Play a recorded session again and compare.
    Replay(replay::ReplayArguments),
    /// Speak the runner's side of the wire protocol for one GGUF file, through llama-server. `serve` and `run` start this.
    Gguf(gguf::GgufArguments),
}

/// Runs the command line and says how it went.
pub(crate) fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let result = match arguments.command {
        Command::Run(arguments) => run::run(&arguments),
        Command::Serve(arguments) => serve::serve(arguments),
        Command::Replay(arguments) => replay::run(&arguments),
        Command::Gguf(arguments) => gguf::gguf(arguments),
    };
    let code = result.unwrap_or_else(|error| {
        lookahead_scheduler::log::flush(std::time::Duration::from_millis(200));
        // The alternate form has the whole chain of causes on one line.
        eprintln!("lookahead: {error:#}");
        ExitCode::FAILURE
    });
    lookahead_scheduler::log::flush(std::time::Duration::from_millis(200));
    code
}
