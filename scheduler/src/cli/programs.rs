//! Flags that every command which starts models has in common.
//!
//! Invariant: a flag beats the environment, which beats the configuration file, which beats the default.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use lookahead_scheduler::config::{ConfigError, Settings};
use lookahead_scheduler::memory::parse_size;

/// Where the programs are and how they are treated.
#[derive(Debug, Clone, Default, Args)]
pub(crate) struct ProgramArguments {
    /// Configuration file (TOML): names, paths and flags of models, and settings.
    #[arg(long, value_name = "FILE", env = "LOOKAHEAD_CONFIG", hide_env_values = true)]
    pub(crate) config: Option<PathBuf>,
    /// The MLX runner's executable; by default the one beside this program.
    #[arg(
        long,
        value_name = "PROGRAM",
        env = "LOOKAHEAD_RUNNER",
        hide_env_values = true
    )]
    pub(crate) runner: Option<PathBuf>,
    /// llama-server's executable for GGUF files; by default the one in PATH or of the Python package.
    #[arg(
        long,
        value_name = "PROGRAM",
        env = "LOOKAHEAD_LLAMA_SERVER",
        hide_env_values = true
    )]
    pub(crate) llama_server: Option<PathBuf>,
    /// Memory that all models together may take, such as 20GiB; by default four fifths of the machine's.
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub(crate) memory_budget: Option<u64>,
    /// Seconds that loading may go without progress.
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    pub(crate) load_timeout: Option<Duration>,
    /// Seconds that a model's process may be silent before it counts as stalled.
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    pub(crate) stall_timeout: Option<Duration>,
    /// Seconds that each step of stopping a process is waited for.
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    pub(crate) stop_grace: Option<Duration>,
}

fn seconds(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text
        .parse()
        .map_err(|_| format!("{text:?} is no number of seconds"))?;
    Duration::try_from_secs_f64(seconds).map_err(|_| format!("{text} is no number of seconds"))
}

impl ProgramArguments {
    /// The settings that follow from the configuration file and these flags.
    pub(crate) fn settings(&self) -> Result<Settings, ConfigError> {
        let mut settings = match &self.config {
            Some(path) => Settings::from_file(path)?,
            None => Settings::default(),
        };
        settings.runner = self.runner.clone().or(settings.runner);
        settings.llama_server = self.llama_server.clone().or(settings.llama_server);
        settings.memory_budget = self.memory_budget.or(settings.memory_budget);
        settings.load_timeout = self.load_timeout.unwrap_or(settings.load_timeout);
        settings.stall_timeout = self.stall_timeout.unwrap_or(settings.stall_timeout);
        settings.stop_grace = self.stop_grace.unwrap_or(settings.stop_grace);
        Ok(settings)
    }
}
