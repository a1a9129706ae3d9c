//! `lookahead replay`: a recorded session, played again and compared.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::time::Duration;

use anyhow::Context;
use clap::Args;
use lookahead_scheduler::log;
use lookahead_scheduler::programs::Programs;
use lookahead_scheduler::replay::{replay, ReplayError, Session};

/// Flags of `replay`.
#[derive(Debug, Args)]
#[command(
    after_help = "Exit status: 0 the same, 1 different, 2 can't be replayed.\n\nExamples:\n  \
    lookahead serve --record session.jsonl models/Qwen3.5-4B\n  \
    lookahead replay session.jsonl\n  \
    lookahead replay runner.jsonl --model models/Qwen3.5-4B -- --draft off"
)]
pub(crate) struct ReplayArguments {
    /// The transcript.
    file: PathBuf,
    /// Write what the program answers now over the transcript.
    #[arg(long)]
    update: bool,
    /// Where the model of a runner's transcript lies now.
    #[arg(long, value_name = "PATH")]
    model: Option<PathBuf>,
    /// The configuration of a scheduler's transcript.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// The MLX runner's executable; by default the one beside this program.
    #[arg(
        long,
        value_name = "PROGRAM",
        env = "LOOKAHEAD_RUNNER",
        hide_env_values = true
    )]
    runner: Option<PathBuf>,
    /// Seconds without an event after which the session counts as different.
    #[arg(long, value_name = "SECONDS", default_value_t = 120.0)]
    timeout: f64,
    /// Show what the program logs.
    #[arg(long, short)]
    verbose: bool,
    /// Further arguments for the program.
    #[arg(last = true)]
    arguments: Vec<OsString>,
}

/// Replays the file.
pub(crate) fn run(arguments: &ReplayArguments) -> anyhow::Result<ExitCode> {
    log::init("warn");
    match play(arguments) {
        Ok(differences) if differences.is_empty() => {
            println!("same");
            Ok(ExitCode::SUCCESS)
        }
        Ok(differences) => {
            for difference in &differences {
                println!("{difference}");
            }
            if arguments.update {
                println!("updated {}", arguments.file.display());
                return Ok(ExitCode::SUCCESS);
            }
            Ok(ExitCode::FAILURE)
        }
        Err(error) => match error.downcast::<ReplayError>() {
            Ok(error) => {
                eprintln!(
                    "lookahead: {} can't be replayed: {error}",
                    arguments.file.display()
                );
                Ok(ExitCode::from(2))
            }
            Err(error) => Err(error),
        },
    }
}

fn play(arguments: &ReplayArguments) -> anyhow::Result<Vec<String>> {
    let session = Session::open(&arguments.file)?;
    let limit = Duration::try_from_secs_f64(arguments.timeout).context("--timeout")?;
    // Beside the transcript, so that an update can put it into its place in one step.
    let recording = arguments
        .file
        .with_extension(format!("replay-{}", std::process::id()));
    let command = command(arguments, &session, &recording)?;
    let result = replay(&session, command, &recording, limit, arguments.update);
    let differs = result.as_ref().is_ok_and(|differences| !differences.is_empty());
    if arguments.update && differs {
        std::fs::rename(&recording, &arguments.file)
            .with_context(|| format!("{}", arguments.file.display()))?;
    } else {
        // The program may not have come as far as making it.
        let _ = std::fs::remove_file(&recording);
    }
    Ok(result?)
}

fn command(arguments: &ReplayArguments, session: &Session, recording: &Path) -> anyhow::Result<Command> {
    let programs =
        Programs::find(arguments.runner.as_deref()).context("can't find this program's own executable")?;
    let mut command = match session.header.program.as_str() {
        "lookahead" => {
            let mut command = Command::new(&programs.bridge);
            command.arg("serve").arg("--runner").arg(&programs.runner);
            if let Some(config) = &arguments.config {
                command.arg("--config").arg(config);
            }
            command
        }
        "lookahead-runner" => {
            let mut command = Command::new(&programs.runner);
            let recorded = session.header.model.as_ref().map(PathBuf::from);
            let model = arguments
                .model
                .clone()
                .or(recorded)
                .context("the transcript names no model; use --model")?;
            command.arg("--model").arg(model);
            command
        }
        other => return Err(ReplayError::OtherProgram(other.to_owned()).into()),
    };
    command.arg("--record").arg(recording).args(&arguments.arguments);
    if !arguments.verbose {
        command.stderr(Stdio::null());
    }
    Ok(command)
}
