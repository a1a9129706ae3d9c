//! The runner's executable.

use clap::Parser;
use lookahead_runner::host::{cli, run};

/// What MLX reads from the environment, where the user hasn't chosen: float32 products in float32, as results promise, not in
/// TF32; and room for the launch graphs of every width and chunk size.
const MLX_DEFAULTS: [(&str, &str); 2] = [("MLX_ENABLE_TF32", "0"), ("MLX_CUDA_GRAPH_CACHE_SIZE", "4000")];

fn main() {
    // No other thread runs yet that could read the environment meanwhile.
    for (name, value) in MLX_DEFAULTS {
        if std::env::var_os(name).is_none() {
            std::env::set_var(name, value);
        }
    }
    lookahead_runner::mlx::memory::keep_buffers();
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
