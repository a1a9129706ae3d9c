//! Starting llama-server and waiting until it is ready.
//!
//! Invariant: the server serves exactly the file that was asked for (checked through its own properties, with a key that nobody
//! else knows), none of our environment's `LLAMA_ARG_*` acts on it, and a load that fails says why in one line.

use std::fs::File;
use std::io::{self, Read};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use lookahead_protocol::ErrorCode;
use serde_json::Value;

use super::drafting::Drafting;
use super::drafting::Known;
use super::http::Server;
use crate::process::{self, Tail};

/// How often readiness is asked for.
const POLL: Duration = Duration::from_millis(20);
/// How often a start is tried again because someone else took the port.
const PORT_TRIES: u32 = 5;
/// The least that a load may take, and the speed below which it counts as stalled.
const LOAD_BASE: Duration = Duration::from_secs(120);
const LOAD_BYTES_PER_SECOND: u64 = 20 << 20;

/// What to start.
#[derive(Debug, Clone)]
pub struct Launch {
    /// The server's executable.
    pub program: PathBuf,
    /// What it knows.
    pub known: Known,
    /// The model file.
    pub model: PathBuf,
    /// Bytes of the model, all parts.
    pub bytes: u64,
    /// Context length.
    pub context: u64,
    /// Threads.
    pub threads: usize,
    /// Drafting.
    pub drafting: Drafting,
}

/// A server that is ready.
#[derive(Debug)]
pub struct Running {
    /// Its process.
    pub child: Child,
    /// How to speak with it.
    pub server: Server,
    /// The end of its log.
    pub tail: Arc<Mutex<Tail>>,
    /// `/props`.
    pub props: Value,
}

/// Why there is no server.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{code}: {message}")]
pub struct LaunchError {
    /// For the host.
    pub code: ErrorCode,
    /// For people.
    pub message: String,
}

impl LaunchError {
    /// An error with a code.
    pub fn new(code: ErrorCode, message: impl Into<String>) -> Self {
        Self {
            code,
            message: message.into(),
        }
    }
}

impl Launch {
    /// Starts the server and waits for it. Must be called from a thread that lives as long as the process; `progress` gets
    /// the bytes that seem to be loaded.
    pub fn start(
        &self,
        stopping: &AtomicBool,
        mut progress: impl FnMut(u64),
    ) -> Result<Running, LaunchError> {
        let mut tries = 0;
        loop {
            tries += 1;
            match self.start_once(stopping, &mut progress) {
                Err(error) if error.message.contains(PORT_TAKEN) && tries < PORT_TRIES => {}
                other => return other,
            }
        }
    }

    fn start_once(
        &self,
        stopping: &AtomicBool,
        progress: &mut impl FnMut(u64),
    ) -> Result<Running, LaunchError> {
        let internal = |error: io::Error| LaunchError::new(ErrorCode::Internal, error.to_string());
        let port = free_port().map_err(internal)?;
        let key = random_key().map_err(internal)?;
        let server = Server::new(port, key.clone());
        let mut child = self.command(port, &key).spawn().map_err(|error| {
            let message = format!(
                "llama-server {} could not be started: {error}",
                self.program.display()
            );
            LaunchError::new(ErrorCode::RunnerCrashed, message)
        })?;
        let tail = Arc::new(Mutex::new(Tail::default()));
        if let Some(stderr) = child.stderr.take() {
            let kept = Arc::clone(&tail);
            thread::Builder::new()
                .name("llama-server".to_owned())
                .spawn(move || process::relay(stderr, "llama-server", &kept, crate::log::line))
                .map_err(internal)?;
        }
        match self.wait_until_ready(&mut child, &server, &tail, stopping, progress) {
            Ok(props) => Ok(Running {
                child,
                server,
                tail,
                props,
            }),
            Err(error) => {
                // It may have ended by itself, and then there is nothing to kill.
                let _ = child.kill();
                let _ = child.wait();
                Err(error)
            }
        }
    }

    fn command(&self, port: u16, key: &str) -> Command {
        let mut command = Command::new(&self.program);
        command
            .arg("-m")
            .arg(&self.model)
            .args(["--host", "127.0.0.1", "--port", &port.to_string()]);
        command.args([
            "-c",
            &self.context.to_string(),
            "-np",
            "1",
            "-t",
            &self.threads.to_string(),
        ]);
        for flag in ["--no-ui", "--no-webui", "--offline"] {
            if self.known.has(flag) {
                command.arg(flag);
            }
        }
        command.args(&self.drafting.flags);
        for (name, _) in std::env::vars_os() {
            if name.to_string_lossy().starts_with("LLAMA_ARG_") {
                command.env_remove(name);
            }
        }
        command.env("LLAMA_API_KEY", key);
        command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped());
        process::tie_to_parent(&mut command);
        command
    }

    fn wait_until_ready(
        &self,
        child: &mut Child,
        server: &Server,
        tail: &Arc<Mutex<Tail>>,
        stopping: &AtomicBool,
        progress: &mut impl FnMut(u64),
    ) -> Result<Value, LaunchError> {
        let limit = LOAD_BASE + Duration::from_secs(self.bytes / LOAD_BYTES_PER_SECOND);
        let deadline = Instant::now() + limit;
        let ask_limit = Duration::from_secs(10);
        loop {
            if let Ok(Some(status)) = child.try_wait() {
                // The last lines of its log may still be on their way.
                thread::sleep(Duration::from_millis(50));
                let log = tail.lock().unwrap_or_else(PoisonError::into_inner).text();
                return Err(explain(&process::describe(status), &log, &self.drafting));
            }
            if stopping.load(Ordering::SeqCst) {
                return Err(LaunchError::new(
                    ErrorCode::Internal,
                    "the host ended while the model was loading",
                ));
            }
            if let Ok((200, _)) = server.ask("GET", "/health", None, ask_limit) {
                let (_, props) = server.ask("GET", "/props", None, ask_limit).unwrap_or_default();
                let served = props
                    .get("model_path")
                    .and_then(Value::as_str)
                    .unwrap_or_default();
                if same_file(Path::new(served), &self.model) {
                    return Ok(props);
                }
                let message = format!("{PORT_TAKEN} by a server of something else ({served:?})");
                return Err(LaunchError::new(ErrorCode::Internal, message));
            }
            if Instant::now() >= deadline {
                let message = format!("llama-server was not ready after {} s", limit.as_secs());
                return Err(LaunchError::new(ErrorCode::RunnerStalled, message));
            }
            progress(resident(child.id()).min(self.bytes));
            thread::sleep(POLL);
        }
    }
}

/// In an error's message: trying again with another port may help.
const PORT_TAKEN: &str = "the port was taken";

/// What a failed load's status and log mean.
fn explain(status: &str, log: &str, drafting: &Drafting) -> LaunchError {
    let cause = log
        .lines()
        .find(|line| is_error_line(line))
        .map_or("", |line| after_prefix(line));
    let has = |text: &str| log.contains(text);
    let code = if has("couldn't bind") {
        return LaunchError::new(ErrorCode::Internal, format!("{PORT_TAKEN}: {cause}"));
    } else if has("unknown model architecture") {
        ErrorCode::ArchitectureUnsupported
    } else if has("failed to allocate") || has("out of memory") {
        ErrorCode::OutOfMemory
    } else if has("failed to open GGUF file") {
        ErrorCode::ModelNotFound
    } else if status.contains("signal") {
        ErrorCode::RunnerCrashed
    } else {
        ErrorCode::ModelInvalid
    };
    let mut message = format!("llama-server {status}");
    if !cause.is_empty() {
        message += &format!(": {cause}");
    } else if !log.is_empty() {
        message += &format!("; the end of its log:\n{log}");
    }
    if let Some(hint) = &drafting.hint {
        message += &format!(" ({hint})");
    }
    LaunchError::new(code, message)
}

/// Log lines are `0.00.013.497 E component: text`; a bad command line is told without any of that.
fn is_error_line(line: &str) -> bool {
    line.split_whitespace().nth(1) == Some("E") || line.starts_with("error")
}

fn after_prefix(line: &str) -> &str {
    match line.split_once(" E ") {
        Some((_, text)) => text.trim(),
        None => line.trim(),
    }
}

fn free_port() -> io::Result<u16> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?.port())
}

fn random_key() -> io::Result<String> {
    let mut bytes = [0; 16];
    File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

fn same_file(one: &Path, other: &Path) -> bool {
    match (one.canonicalize(), other.canonicalize()) {
        (Ok(one), Ok(other)) => one == other,
        _ => one == other,
    }
}

/// Bytes of a process in memory, mapped files included: how far a load has come, where nothing better is known.
fn resident(pid: u32) -> u64 {
    let pages = std::fs::read_to_string(format!("/proc/{pid}/statm"))
        .ok()
        .and_then(|text| text.split(' ').nth(1)?.parse::<u64>().ok());
    pages.unwrap_or(0) * 4096
}

#[cfg(test)]
mod tests {
    use super::*;

    fn drafting(hint: Option<&str>) -> Drafting {
        Drafting {
            flags: Vec::new(),
            kind: None,
            reason: None,
            depth: 0,
            hint: hint.map(str::to_owned),
        }
    }

    #[test]
    fn failed_loads_are_told_by_code_and_cause() {
        let table = [
            (
                "0.00.1 E gguf: failed to open GGUF file 'x' (No such file)",
                ErrorCode::ModelNotFound,
            ),
            (
                "0.00.1 I x: y\n0.00.2 E load: unknown model architecture: 'foo'",
                ErrorCode::ArchitectureUnsupported,
            ),
            (
                "0.00.1 E gguf_init_from_reader: failed to read magic",
                ErrorCode::ModelInvalid,
            ),
            (
                "0.00.1 E x: tensor 'a' data is not within the file bounds, model is corrupted",
                ErrorCode::ModelInvalid,
            ),
            ("error: invalid argument: --x", ErrorCode::ModelInvalid),
        ];
        for (log, code) in table {
            let error = explain("exited with status 1", log, &drafting(None));
            assert_eq!(error.code, code, "{log}");
            assert!(!error.message.contains(" E "), "{}", error.message);
        }
        let error = explain(
            "was killed by SIGSEGV (signal 11, x)",
            "loading model",
            &drafting(None),
        );
        assert_eq!(error.code, ErrorCode::RunnerCrashed);
        assert!(error.message.contains("SIGSEGV") && error.message.contains("loading model"));
    }

    #[test]
    fn a_head_that_upstream_cannot_load_is_named() {
        let log = "0.00.1 E x: wrong number of tensors; expected 123, got 108";
        let error = explain(
            "exited with status 1",
            log,
            &drafting(Some("the file stores its head as mtp.* tensors")),
        );
        assert!(
            error.message.contains("wrong number of tensors") && error.message.contains("mtp.*"),
            "{error}"
        );
    }

    #[test]
    fn a_taken_port_can_be_told_from_a_bad_model() {
        let log = "0.00.1 E srv: couldn't bind HTTP server socket, hostname: 127.0.0.1, port: 8080";
        assert!(explain("exited with status 1", log, &drafting(None))
            .message
            .contains(PORT_TAKEN));
    }
}
