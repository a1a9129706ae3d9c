//! `lookahead serve`: the scheduler for a host that speaks the wire protocol.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use clap::Args;
use lookahead_protocol::WriteError;
use lookahead_scheduler::programs::Programs;
use lookahead_scheduler::record::Recorder;
use lookahead_scheduler::{log, stdio};

use super::programs::ProgramArguments;
use super::{Broken, Refused};

/// Flags of `serve`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    lookahead serve models/Qwen3.5-4B\n  \
    lookahead serve --config lookahead.toml --memory-budget 20GiB\n  \
    (echo '{\"type\":\"generate\",\"id\":\"1\",\"model\":\"models/Qwen3.5-4B\",\"prompt\":\"Hello\"}'; cat) | lookahead serve\n\n\
    A request names its model by path or by its name in the configuration file; with exactly one MODEL on the command line\n\
    that is the model of requests that name none. At the end of stdin requests end as cancelled and all models are unloaded.")]
pub(crate) struct ServeArguments {
    /// Models to load at once: checkpoint directories, GGUF files or configured names.
    #[arg(value_name = "MODEL")]
    models: Vec<String>,
    #[command(flatten)]
    programs: ProgramArguments,
    /// Write every line read and written to this file, for `lookahead replay`.
    #[arg(long, value_name = "FILE")]
    record: Option<PathBuf>,
    /// Seconds until an idle model is unloaded, -1 for never, unless a request says otherwise [default: 300].
    #[arg(long, value_name = "SECONDS", allow_hyphen_values = true)]
    keep_alive: Option<i64>,
    /// Requests that may wait or run per model [default: 512].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    queue_limit: Option<u32>,
    /// The longest request line, in bytes [default: 268435456].
    #[arg(long, value_name = "BYTES")]
    max_line_bytes: Option<usize>,
}

/// Why the file can't be written, without the words for a line that can't.
fn cause(error: &WriteError) -> String {
    match error {
        WriteError::Io(error) => error.to_string(),
        other => other.to_string(),
    }
}

/// Serves until the host is gone.
pub(crate) fn serve(arguments: ServeArguments) -> anyhow::Result<ExitCode> {
    log::init("info");
    let mut settings = arguments.programs.settings()?;
    settings.keep_alive = arguments.keep_alive.unwrap_or(settings.keep_alive);
    settings.queue_limit = arguments
        .queue_limit
        .map_or(settings.queue_limit, |limit| limit as usize);
    settings.max_line_bytes = arguments.max_line_bytes.unwrap_or(settings.max_line_bytes);
    if let [only] = arguments.models.as_slice() {
        settings.default_model = Some(only.clone());
    }
    settings.preload.extend(arguments.models);
    let programs =
        Programs::find(settings.runner.as_deref()).context("can't find this program's own executable")?;
    let recorder = match &arguments.record {
        Some(path) => Some(
            Recorder::create(path)
                .map_err(|error| Refused(format!("--record {}: {}", path.display(), cause(&error))))?,
        ),
        None => None,
    };
    stdio::serve(settings, programs, recorder).map_err(Broken)?;
    Ok(ExitCode::SUCCESS)
}
