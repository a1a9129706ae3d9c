//! A program under test: its pipes, its events in order, its end.
//!
//! Invariant: stdout and stderr are drained by threads of their own, so that a test never blocks the program unless it means
//! to (see [`Process::start_unread`]).

use std::io::{BufRead, BufReader, Read, Write};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::mpsc::{channel, Receiver, RecvTimeoutError};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde_json::Value;

/// How long anything may take before a test fails; generous, since machines under test are slow and shared.
pub const DEADLINE: Duration = Duration::from_secs(120);

/// The repository's folder.
pub fn repository() -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/.."))
}

/// The trained model.
pub fn model() -> PathBuf {
    repository().join("fixtures/models/tiny-qwen3.5-mtp")
}

/// An executable of the workspace, beside the running test's folder.
///
/// # Panics
/// It has not been built: tests need `cargo build --workspace` first, as scripts/test does.
pub fn executable(name: &str) -> PathBuf {
    let mut dir = std::env::current_exe().unwrap_or_default();
    dir.pop();
    if dir.ends_with("deps") {
        dir.pop();
    }
    let path = dir.join(name);
    assert!(path.exists(), "{} is not built; run cargo build --workspace", path.display());
    path
}

/// A started program.
#[derive(Debug)]
pub struct Process {
    child: Child,
    stdin: Option<ChildStdin>,
    events: Option<Receiver<Value>>,
    stderr: Arc<Mutex<String>>,
}

impl Process {
    /// Starts a runner on the trained model.
    pub fn runner(args: &[&str]) -> Self {
        let mut command = Command::new(executable("lookahead-runner"));
        command.arg("--model").arg(model()).args(args);
        Self::start(command)
    }

    /// Starts a program whose events are read.
    pub fn start(command: Command) -> Self {
        let mut process = Self::start_unread(command);
        process.read_events();
        process
    }

    /// Starts a program whose stdout nobody reads until [`Process::read_events`].
    ///
    /// # Panics
    /// It can't be started.
    pub fn start_unread(mut command: Command) -> Self {
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = match command.spawn() {
            Ok(child) => child,
            Err(error) => panic!("{command:?} can't be started: {error}"),
        };
        let stderr = Arc::new(Mutex::new(String::new()));
        if let Some(mut pipe) = child.stderr.take() {
            let kept = Arc::clone(&stderr);
            std::thread::spawn(move || {
                let mut buffer = [0; 4096];
                while let Ok(n @ 1..) = pipe.read(&mut buffer) {
                    let text = String::from_utf8_lossy(&buffer[..n]).into_owned();
                    kept.lock().unwrap_or_else(PoisonError::into_inner).push_str(&text);
                }
            });
        }
        let stdin = child.stdin.take();
        Self { child, stdin, events: None, stderr }
    }

    /// Begins to read stdout.
    ///
    /// # Panics
    /// It is being read already.
    pub fn read_events(&mut self) {
        let Some(pipe) = self.child.stdout.take() else { panic!("stdout is being read already") };
        let (sender, receiver) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(pipe).lines().map_while(Result::ok) {
                // A line that isn't JSON comes up as a string, so that tests can assert on it.
                let value = serde_json::from_str(&line).unwrap_or(Value::String(line));
                if sender.send(value).is_err() {
                    return;
                }
            }
        });
        self.events = Some(receiver);
    }

    /// Sends a request.
    pub fn send(&mut self, request: &Value) {
        self.send_bytes(format!("{request}\n").as_bytes());
    }

    /// Sends bytes as they are.
    ///
    /// # Panics
    /// Stdin is closed.
    pub fn send_bytes(&mut self, bytes: &[u8]) {
        let Some(stdin) = &mut self.stdin else { panic!("stdin is closed") };
        if let Err(error) = stdin.write_all(bytes).and_then(|()| stdin.flush()) {
            panic!("the program reads no more: {error}; its log: {}", self.log());
        }
    }

    /// Closes stdin.
    pub fn close(&mut self) {
        self.stdin = None;
    }

    /// The next event, or none if the program has closed stdout.
    ///
    /// # Panics
    /// Nothing comes within the deadline.
    pub fn next(&self) -> Option<Value> {
        let Some(events) = &self.events else { panic!("stdout is not being read") };
        match events.recv_timeout(DEADLINE) {
            Ok(event) => Some(event),
            Err(RecvTimeoutError::Disconnected) => None,
            Err(RecvTimeoutError::Timeout) => panic!("no event within the deadline; log: {}", self.log()),
        }
    }

    /// Reads on to the first event that `wanted` takes; returns all events up to it, itself the last.
    ///
    /// # Panics
    /// The program ends before.
    pub fn until(&self, wanted: impl Fn(&Value) -> bool) -> Vec<Value> {
        let mut seen = Vec::new();
        while let Some(event) = self.next() {
            let found = wanted(&event);
            seen.push(event);
            if found {
                return seen;
            }
        }
        panic!("the program ended before the event came; seen {seen:?}; log: {}", self.log());
    }

    /// Waits for `ready`.
    pub fn ready(&self) -> Value {
        self.until(|event| event["type"] == "ready" || event["type"] == "error").pop().unwrap_or_default()
    }

    /// Sends a request and reads its events up to the final one.
    pub fn ask(&mut self, request: &Value) -> Answer {
        self.send(request);
        let id = request["id"].clone();
        Answer { events: self.until(|event| is_final(event, &id)), id }
    }

    /// What it has logged.
    pub fn log(&self) -> String {
        self.stderr.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Waits for its end.
    ///
    /// # Panics
    /// It doesn't end within `limit`.
    pub fn wait(&mut self, limit: Duration) -> ExitStatus {
        let end = Instant::now() + limit;
        loop {
            match self.child.try_wait() {
                Ok(Some(status)) => return status,
                Ok(None) if Instant::now() < end => std::thread::sleep(Duration::from_millis(5)),
                other => panic!("the program didn't end within {limit:?} ({other:?}); log: {}", self.log()),
            }
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Whether an event is the last of the request `id`.
pub fn is_final(event: &Value, id: &Value) -> bool {
    event["id"] == *id
        && !matches!(event["type"].as_str(), Some("prompt" | "prefill" | "token"))
        && event["duplicate"] != true
}

/// All events up to a request's final one.
#[derive(Debug, Clone)]
pub struct Answer {
    /// In the order seen, other requests' events included.
    pub events: Vec<Value>,
    /// The request's id.
    pub id: Value,
}

impl Answer {
    /// The request's own events.
    pub fn own(&self) -> impl Iterator<Item = &Value> {
        self.events.iter().filter(|event| event["id"] == self.id)
    }

    /// Its final event.
    ///
    /// # Panics
    /// There is none, which `until` rules out.
    pub fn last(&self) -> &Value {
        match self.events.last() {
            Some(event) => event,
            None => panic!("an answer without events"),
        }
    }

    /// Its text, put together.
    pub fn text(&self) -> String {
        self.own().filter(|e| e["type"] == "token").filter_map(|e| e["text"].as_str()).collect()
    }

    /// Its ids, put together.
    pub fn tokens(&self) -> Vec<u64> {
        self.own()
            .filter(|e| e["type"] == "token")
            .filter_map(|e| e["tokens"].as_array())
            .flatten()
            .filter_map(Value::as_u64)
            .collect()
    }
}
