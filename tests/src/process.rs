//! A program under test: its pipes, its events in order, its end.
//!
//! Invariant: stdout and stderr are drained by threads of their own, so that a test never blocks the program unless it means
//! to (see [`Process::start_unread`]).

use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
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
    assert!(
        path.exists(),
        "{} is not built; run cargo build --workspace",
        path.display()
    );
    path
}

/// The command line of a runner.
pub fn runner_command(model: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(executable("lookahead-runner"));
    command.arg("--model").arg(model).args(args);
    command
}

/// A started program.
#[derive(Debug)]
pub struct Process {
    child: Child,
    stdin: Option<ChildStdin>,
    events: Option<Receiver<(Instant, Value)>>,
    stderr: Arc<Mutex<String>>,
    /// Disconnected once the end of stderr has been read.
    stderr_open: Receiver<()>,
}

impl Process {
    /// Starts a runner on the trained model.
    pub fn runner(args: &[&str]) -> Self {
        Self::runner_of(&model(), args)
    }

    /// Starts a runner on another model directory.
    pub fn runner_of(model: &Path, args: &[&str]) -> Self {
        Self::start(runner_command(model, args))
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
        command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut child = match command.spawn() {
            Ok(child) => child,
            Err(error) => panic!("{command:?} can't be started: {error}"),
        };
        let stderr = Arc::new(Mutex::new(String::new()));
        let (still_open, stderr_open) = channel();
        if let Some(mut pipe) = child.stderr.take() {
            let kept = Arc::clone(&stderr);
            std::thread::spawn(move || {
                let _still_open = still_open;
                let mut buffer = [0; 4096];
                while let Ok(n @ 1..) = pipe.read(&mut buffer) {
                    let text = String::from_utf8_lossy(&buffer[..n]).into_owned();
                    kept.lock()
                        .unwrap_or_else(PoisonError::into_inner)
                        .push_str(&text);
                }
            });
        }
        let stdin = child.stdin.take();
        Self {
            child,
            stdin,
            events: None,
            stderr,
            stderr_open,
        }
    }

    /// Begins to read stdout.
    ///
    /// # Panics
    /// It is being read already.
    pub fn read_events(&mut self) {
        let Some(pipe) = self.child.stdout.take() else {
            panic!("stdout is being read already")
        };
        let (sender, receiver) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(pipe).lines().map_while(Result::ok) {
                // A line that isn't JSON comes up as a string, so that tests can assert on it.
                let value = serde_json::from_str(&line).unwrap_or(Value::String(line));
                if sender.send((Instant::now(), value)).is_err() {
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
        let Some(stdin) = &mut self.stdin else {
            panic!("stdin is closed")
        };
        if let Err(error) = stdin.write_all(bytes).and_then(|()| stdin.flush()) {
            panic!("the program reads no more: {error}; its log: {}", self.log());
        }
    }

    /// Closes stdout unread, as a host that dies does.
    pub fn close_output(&mut self) {
        self.child.stdout = None;
    }

    /// Closes stdin.
    pub fn close(&mut self) {
        self.stdin = None;
    }

    /// The next event with the time of its arrival, or none if the program has closed stdout.
    ///
    /// # Panics
    /// Nothing comes within the deadline.
    pub fn next_timed(&self) -> Option<(Instant, Value)> {
        let Some(events) = &self.events else {
            panic!("stdout is not being read")
        };
        match events.recv_timeout(DEADLINE) {
            Ok(event) => Some(event),
            Err(RecvTimeoutError::Disconnected) => None,
            Err(RecvTimeoutError::Timeout) => panic!("no event within the deadline; log: {}", self.log()),
        }
    }

    /// The next event, or none if the program has closed stdout.
    pub fn next(&self) -> Option<Value> {
        self.next_timed().map(|(_, event)| event)
    }

    /// Reads on to the first event that `wanted` takes; returns all events up to it, itself the last.
    ///
    /// # Panics
    /// The program ends before.
    pub fn until(&self, mut wanted: impl FnMut(&Value) -> bool) -> Vec<Value> {
        let mut seen = Vec::new();
        while let Some(event) = self.next() {
            let found = wanted(&event);
            seen.push(event);
            if found {
                return seen;
            }
        }
        panic!(
            "the program ended before the event came; seen {seen:?}; log: {}",
            self.log()
        );
    }

    /// Reads on until each of these requests has had its final event.
    pub fn until_final(&self, ids: &[&str]) -> Vec<Value> {
        let mut open: Vec<Value> = ids.iter().map(|&id| Value::from(id)).collect();
        self.until(|event| {
            open.retain(|id| !is_final(event, id));
            open.is_empty()
        })
    }

    /// Everything up to the end of stdout.
    pub fn rest(&self) -> Vec<Value> {
        std::iter::from_fn(|| self.next()).collect()
    }

    /// Waits for `ready`.
    pub fn ready(&self) -> Value {
        self.until(|event| event["type"] == "ready" || event["type"] == "error")
            .pop()
            .unwrap_or_default()
    }

    /// Sends a request and reads its events up to the final one.
    pub fn ask(&mut self, request: &Value) -> Answer {
        self.send(request);
        let id = request["id"].clone();
        Answer {
            events: self.until(|event| is_final(event, &id)),
            id,
        }
    }

    /// Sends a request that has one event for an answer, while others may run; returns that event and how long it took.
    /// Other requests' events on the way go to `seen`.
    pub fn ask_beside(&mut self, request: &Value, seen: &mut Vec<Value>) -> (Value, Duration) {
        let start = Instant::now();
        self.send(request);
        while let Some((at, event)) = self.next_timed() {
            if event["id"] == request["id"] {
                return (event, at.saturating_duration_since(start));
            }
            seen.push(event);
        }
        panic!(
            "the program ended instead of answering {request}; log: {}",
            self.log()
        );
    }

    /// Bytes of memory that it has resident; none where the system doesn't tell.
    pub fn resident(&self) -> Option<u64> {
        let statm = std::fs::read_to_string(format!("/proc/{}/statm", self.pid())).ok()?;
        let pages: u64 = statm.split_whitespace().nth(1)?.parse().ok()?;
        Some(pages * 4096)
    }

    /// The most bytes of memory that it has had resident; none where the system doesn't tell.
    pub fn most_resident(&self) -> Option<u64> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.pid())).ok()?;
        let line = status.lines().find(|line| line.starts_with("VmHWM:"))?;
        let kib: u64 = line.split_whitespace().nth(1)?.parse().ok()?;
        Some(kib << 10)
    }

    /// Processor time that its threads have taken; none where the system doesn't tell to the nanosecond.
    pub fn processor_time(&self) -> Option<Duration> {
        let threads = std::fs::read_dir(format!("/proc/{}/task", self.pid())).ok()?;
        let nanoseconds = threads.flatten().filter_map(|thread| {
            let figures = std::fs::read_to_string(thread.path().join("schedstat")).ok()?;
            figures.split_whitespace().next()?.parse::<u64>().ok()
        });
        Some(Duration::from_nanos(nanoseconds.sum())).filter(|time| !time.is_zero())
    }

    /// What it has logged.
    pub fn log(&self) -> String {
        self.stderr.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Sends it a signal, as `kill` does.
    ///
    /// # Panics
    /// There is no `kill`, or it fails.
    pub fn signal(&self, name: &str) {
        let sent = Command::new("kill")
            .args(["-s", name, &self.pid().to_string()])
            .status();
        assert!(
            sent.as_ref().is_ok_and(ExitStatus::success),
            "kill -s {name}: {sent:?}"
        );
    }

    /// Waits for its end; the log is whole then, unless a process that it left behind holds stderr open.
    ///
    /// # Panics
    /// It doesn't end within `limit`.
    pub fn wait(&mut self, limit: Duration) -> ExitStatus {
        let end = Instant::now() + limit;
        loop {
            match self.child.try_wait() {
                Ok(Some(status)) => {
                    // An exit status can be had before the last bytes of the pipe have been read.
                    let _ = self.stderr_open.recv_timeout(Duration::from_secs(2));
                    return status;
                }
                Ok(None) if Instant::now() < end => std::thread::sleep(Duration::from_millis(5)),
                other => panic!(
                    "the program didn't end within {limit:?} ({other:?}); log: {}",
                    self.log()
                ),
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
    /// There is none, which whoever waited for it rules out.
    pub fn last(&self) -> &Value {
        match self.own().last() {
            Some(event) => event,
            None => panic!("no event of {} among {:?}", self.id, self.events),
        }
    }

    /// Its `done` event.
    ///
    /// # Panics
    /// It ended otherwise.
    pub fn done(&self) -> &Value {
        let last = self.last();
        assert_eq!(last["type"], "done", "{last}");
        last
    }

    /// Its `error` event.
    ///
    /// # Panics
    /// It ended otherwise.
    pub fn error(&self) -> &Value {
        let last = self.last();
        assert_eq!(last["type"], "error", "{last}");
        last
    }

    /// Its text, put together.
    pub fn text(&self) -> String {
        self.token_events().filter_map(|e| e["text"].as_str()).collect()
    }

    /// Its ids, put together.
    pub fn tokens(&self) -> Vec<u64> {
        ids(self.token_events())
    }

    /// Its `token` events.
    pub fn token_events(&self) -> impl Iterator<Item = &Value> {
        self.own().filter(|e| e["type"] == "token")
    }
}

/// The ids that events deliver.
pub fn ids<'a>(events: impl Iterator<Item = &'a Value>) -> Vec<u64> {
    events
        .filter_map(|e| e["tokens"].as_array())
        .flatten()
        .filter_map(Value::as_u64)
        .collect()
}

/// What a host learns about one request from events that carry other requests' too.
pub fn answer(events: &[Value], id: &str) -> Answer {
    Answer {
        events: events.to_vec(),
        id: Value::from(id),
    }
}
