//! The command line for people and for hosts.
//!
//! Invariant: what a command prints on stdout is its result and nothing else; progress, statistics and errors go to stderr.
//! Exit status: 0 for success, 1 for a failed request or load, 2 for a bad command line or configuration, 3 for a fault of the
//! program's own, 130 after Ctrl-C.

mod bench;
mod chat;
mod generation;
mod gguf;
mod inspect;
mod modes;
mod programs;
mod replay;
mod run;
mod serve;
mod session;
mod style;
mod tune;

use std::process::ExitCode;

use clap::{CommandFactory, Parser, Subcommand};
use lookahead_scheduler::config::ConfigError;

use style::{say, Tone};

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
    /// Converse in the terminal.
    Chat(Box<chat::ChatArguments>),
    /// Say what a model is and whether it can run, without loading it.
    Inspect(inspect::InspectArguments),
    /// Speak the wire protocol on stdin and stdout, for one or more models.
    Serve(serve::ServeArguments),
    /// Play a recorded session again and compare.
    Replay(replay::ReplayArguments),
    /// Measure decoding and prefill, with and without drafting.
    Bench(bench::BenchArguments),
    /// Find out what drafting is worth on this machine.
    Tune(tune::TuneArguments),
    /// Speak the runner's side of the wire protocol for one GGUF file, through llama-server. `serve` and `run` start this.
    Gguf(gguf::GgufArguments),
    /// Print completions for a shell.
    Completions {
        /// The shell.
        shell: clap_complete::Shell,
    },
    /// Print the manual page.
    Man,
}

/// Runs the command line and says how it went.
pub(crate) fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let result = match arguments.command {
        Command::Run(arguments) => run::run(&arguments),
        Command::Serve(arguments) => serve::serve(arguments),
        Command::Replay(arguments) => replay::run(&arguments),
        Command::Chat(arguments) => chat::run(&arguments),
        Command::Inspect(arguments) => inspect::run(&arguments),
        Command::Bench(arguments) => bench::run(&arguments),
        Command::Tune(arguments) => tune::run(&arguments),
        Command::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Arguments::command(), "lookahead", &mut script);
            printed(&script)
        }
        Command::Man => manual(),
        Command::Gguf(arguments) => gguf::gguf(arguments),
    };
    let code = result.unwrap_or_else(|error| {
        lookahead_scheduler::log::flush(std::time::Duration::from_millis(200));
        // The alternate form has the whole chain of causes on one line.
        say(format!("lookahead: {error:#}"), Tone::Fault);
        if error.is::<ConfigError>() || error.is::<Refused>() {
            ExitCode::from(2)
        } else if error.is::<Broken>() {
            ExitCode::from(3)
        } else {
            ExitCode::FAILURE
        }
    });
    lookahead_scheduler::log::flush(std::time::Duration::from_millis(200));
    code
}

/// A command line that is well formed and can't be followed all the same.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Refused(String);

/// A fault of this program's own.
#[derive(Debug, thiserror::Error)]
#[error("the scheduler failed")]
struct Broken(#[source] std::io::Error);

/// Writes the manual: one page for the program, followed by one for each command.
fn manual() -> anyhow::Result<ExitCode> {
    let mut pages = Vec::new();
    let command = Arguments::command();
    clap_mangen::Man::new(command.clone()).render(&mut pages)?;
    for subcommand in command.get_subcommands() {
        let name: &'static str = Box::leak(format!("lookahead-{}", subcommand.get_name()).into_boxed_str());
        clap_mangen::Man::new(subcommand.clone().name(name)).render(&mut pages)?;
    }
    printed(&pages)
}

fn printed(text: &[u8]) -> anyhow::Result<ExitCode> {
    style::print_result(&String::from_utf8_lossy(text))?;
    Ok(ExitCode::SUCCESS)
}
