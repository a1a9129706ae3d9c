//! The scheduler's settings and its configuration file.
//!
//! Invariant: an unknown or ill-typed setting is an error that names it, never ignored; paths in the file are relative to
//! the file.
//!
//! ```toml
//! memory_budget = "20GiB"      # default: four fifths of the machine's memory
//! keep_alive = 300             # seconds until an idle model is unloaded; -1: never, 0: at once
//! queue_limit = 512            # requests that may wait or run per model
//!
//! [models.qwen]
//! path = "models/Qwen3.5-4B"   # a checkpoint directory or a GGUF file
//! args = ["--fp8", "mxfp8"]    # of the runner, or of llama-server
//! keep_alive = -1
//! preload = true
//! ```

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Deserialize;

use crate::memory;

/// What is wrong with a configuration file.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file can't be read.
    #[error("configuration {path} can't be read")]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The file isn't valid TOML or has an unknown or ill-typed setting.
    #[error("configuration {path}: {message}")]
    Invalid {
        /// The file.
        path: PathBuf,
        /// Why, with the place.
        message: String,
    },
}

/// Settings of the scheduler as a whole.
#[derive(Debug, Clone)]
pub struct Settings {
    /// The runner's executable; `None`: beside the scheduler's own.
    pub runner: Option<PathBuf>,
    /// llama-server's executable; `None`: found by PATH or the Python package.
    pub llama_server: Option<PathBuf>,
    /// Bytes that all models may take together; `None`: from the machine.
    pub memory_budget: Option<u64>,
    /// Seconds until an idle model is unloaded; negative: never.
    pub keep_alive: i64,
    /// Requests that may wait or run per model.
    pub queue_limit: usize,
    /// Requests that a runner is given at once; the others wait in the scheduler.
    pub window: usize,
    /// How long loading may go without progress.
    pub load_timeout: Duration,
    /// How long a runner may be silent, a ping unanswered, before it counts as stalled.
    pub stall_timeout: Duration,
    /// How long each step of a stop is waited for.
    pub stop_grace: Duration,
    /// How long a busy model may work before it has to make room for another.
    pub quantum: Duration,
    /// The longest line accepted from the host, in bytes.
    pub max_line_bytes: usize,
    /// Models known by name.
    pub models: BTreeMap<String, ModelConfig>,
    /// The model of requests that name none.
    pub default_model: Option<String>,
    /// Whether what the models' processes log goes to our stderr.
    pub relay_stderr: bool,
    /// Models to load at the start, beside those that the configuration marks.
    pub preload: Vec<String>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            runner: None,
            llama_server: None,
            memory_budget: None,
            keep_alive: 300,
            queue_limit: 512,
            window: 8,
            load_timeout: Duration::from_secs(300),
            stall_timeout: Duration::from_secs(30),
            stop_grace: Duration::from_secs(5),
            quantum: Duration::from_secs(2),
            max_line_bytes: 268_435_456,
            models: BTreeMap::new(),
            default_model: None,
            relay_stderr: true,
            preload: Vec::new(),
        }
    }
}

/// One model of the configuration file.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelConfig {
    /// A checkpoint directory or a GGUF file.
    pub path: PathBuf,
    /// Further arguments for the program that serves it.
    #[serde(default)]
    pub args: Vec<String>,
    /// Environment variables for that program.
    #[serde(default)]
    pub env: BTreeMap<String, String>,
    /// Overrides the scheduler's `keep_alive`.
    pub keep_alive: Option<i64>,
    /// Memory that the model needs, such as `3GiB`, instead of the estimate.
    pub memory: Option<Size>,
    /// Load it when the scheduler starts.
    #[serde(default)]
    pub preload: bool,
}

/// A size in bytes, written as a number or as text with a unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(try_from = "toml::Value")]
pub struct Size(pub u64);

impl TryFrom<toml::Value> for Size {
    type Error = String;

    fn try_from(value: toml::Value) -> Result<Self, String> {
        match value {
            toml::Value::Integer(bytes) => u64::try_from(bytes)
                .map(Size)
                .map_err(|_| format!("size {bytes} is negative")),
            toml::Value::String(text) => memory::parse_size(&text).map(Size),
            other => Err(format!(
                "size must be a number or text such as \"20GiB\", not {}",
                other.type_str()
            )),
        }
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    runner: Option<PathBuf>,
    llama_server: Option<PathBuf>,
    memory_budget: Option<Size>,
    keep_alive: Option<i64>,
    queue_limit: Option<usize>,
    window: Option<usize>,
    load_timeout: Option<f64>,
    stall_timeout: Option<f64>,
    stop_grace: Option<f64>,
    quantum: Option<f64>,
    max_line_bytes: Option<usize>,
    default_model: Option<String>,
    #[serde(default)]
    models: BTreeMap<String, ModelConfig>,
}

impl Settings {
    /// Reads a configuration file over the defaults.
    pub fn from_file(path: &Path) -> Result<Self, ConfigError> {
        let text = std::fs::read_to_string(path).map_err(|source| ConfigError::Read {
            path: path.to_owned(),
            source,
        })?;
        let base = path.parent().unwrap_or(Path::new(""));
        Self::from_toml(&text, base).map_err(|message| ConfigError::Invalid {
            path: path.to_owned(),
            message,
        })
    }

    fn from_toml(text: &str, base: &Path) -> Result<Self, String> {
        let file: File = toml::from_str(text).map_err(|error| error.to_string().trim().to_owned())?;
        let mut settings = Self::default();
        let absolute = |path: PathBuf| if path.is_absolute() { path } else { base.join(path) };
        settings.runner = file.runner.map(absolute);
        settings.llama_server = file.llama_server.map(absolute);
        settings.memory_budget = file.memory_budget.map(|size| size.0);
        settings.keep_alive = file.keep_alive.unwrap_or(settings.keep_alive);
        settings.queue_limit = positive("queue_limit", file.queue_limit, settings.queue_limit)?;
        settings.window = positive("window", file.window, settings.window)?;
        settings.max_line_bytes = positive("max_line_bytes", file.max_line_bytes, settings.max_line_bytes)?;
        settings.load_timeout = seconds("load_timeout", file.load_timeout, settings.load_timeout)?;
        settings.stall_timeout = seconds("stall_timeout", file.stall_timeout, settings.stall_timeout)?;
        settings.stop_grace = seconds("stop_grace", file.stop_grace, settings.stop_grace)?;
        settings.quantum = seconds("quantum", file.quantum, settings.quantum)?;
        settings.default_model = file.default_model;
        settings.models = file.models;
        for (name, model) in &mut settings.models {
            if model.path.as_os_str().is_empty() {
                return Err(format!("models.{name}.path is empty"));
            }
            model.path = absolute(std::mem::take(&mut model.path));
        }
        Ok(settings)
    }
}

fn positive(name: &str, value: Option<usize>, default: usize) -> Result<usize, String> {
    match value {
        Some(0) => Err(format!("{name} must be at least 1")),
        value => Ok(value.unwrap_or(default)),
    }
}

fn seconds(name: &str, value: Option<f64>, default: Duration) -> Result<Duration, String> {
    match value {
        None => Ok(default),
        Some(value) => Duration::try_from_secs_f64(value)
            .map_err(|_| format!("{name} = {value} isn't a number of seconds")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_file_is_read() {
        let settings = Settings::from_toml(
            "memory_budget = \"20GiB\"\nkeep_alive = -1\nqueue_limit = 4\nload_timeout = 0.5\n\
             [models.a]\npath = \"sub/a\"\nargs = [\"--x\"]\nenv = { K = \"v\" }\nmemory = 1024\npreload = true\n\
             [models.b]\npath = \"/abs/b.gguf\"\nkeep_alive = 0\n",
            Path::new("/conf"),
        )
        .unwrap();
        assert_eq!(settings.memory_budget, Some(20 << 30));
        assert_eq!((settings.keep_alive, settings.queue_limit), (-1, 4));
        assert_eq!(settings.load_timeout, Duration::from_millis(500));
        assert_eq!(settings.models["a"].path, Path::new("/conf/sub/a"));
        assert_eq!(settings.models["a"].memory, Some(Size(1024)));
        assert!(settings.models["a"].preload);
        assert_eq!(settings.models["b"].path, Path::new("/abs/b.gguf"));
        assert_eq!(settings.models["b"].keep_alive, Some(0));
    }

    #[test]
    fn a_misspelt_setting_is_named() {
        let error = Settings::from_toml("keepalive = 3\n", Path::new("")).unwrap_err();
        assert!(error.contains("keepalive"), "{error}");
        let error = Settings::from_toml("[models.a]\npath = \"x\"\narg = []\n", Path::new("")).unwrap_err();
        assert!(error.contains("arg"), "{error}");
    }

    #[test]
    fn values_out_of_range_are_named() {
        for (text, name) in [
            ("queue_limit = 0", "queue_limit"),
            ("stall_timeout = -1.0", "stall_timeout"),
            ("memory_budget = \"lots\"", "lots"),
            ("[models.a]\npath = \"\"", "models.a.path"),
            ("[models.a]\nargs = []", "path"),
        ] {
            let error = Settings::from_toml(text, Path::new("")).unwrap_err();
            assert!(error.contains(name), "{text}: {error}");
        }
    }
}
