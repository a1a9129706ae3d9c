//! The runner's executable.

use clap::Parser;
use lookahead_runner::host::{cli, run};

fn main() {
    let args = cli::Args::parse();
    tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .with_ansi(false)
        .with_target(false)
        .with_env_filter(
            tracing_subscriber::EnvFilter::try_from_env("LOOKAHEAD_LOG")
                .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("info")),
        )
        .init();
    let status = match run(&args) {
        Ok(status) => status,
        Err(error) => {
            tracing::error!("{error:#}");
            3
        }
    };
    // Threads that wait on a pipe would hold the process; everything of worth has been written.
    std::process::exit(status);
}
