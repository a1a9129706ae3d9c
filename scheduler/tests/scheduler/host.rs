//! A host for tests: a real `lookahead serve` process, spoken to over its pipes.

use std::collections::VecDeque;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{channel, Receiver};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use serde_json::Value;
use tempfile::TempDir;

/// Long enough for a slow machine that does other things as well.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// An environment variable by which everything that one scheduler has started can be told, children of children too.
const MARK: &str = "LOOKAHEAD_TEST_FOLDER";

/// The program under test.
pub(crate) fn lookahead() -> PathBuf {
    PathBuf::from(env!("CARGO_BIN_EXE_lookahead"))
}

/// A helper program of the tests, which `cargo test` builds as an example.
pub(crate) fn example(name: &str) -> PathBuf {
    let path = lookahead().with_file_name("examples").join(name);
    assert!(
        path.is_file(),
        "{} is missing: run `cargo test` or `cargo build --examples` first",
        path.display()
    );
    path
}

/// A folder of fake models and a configuration for them.
pub(crate) struct Setup {
    folder: TempDir,
    settings: String,
    models: String,
    arguments: Vec<String>,
}

impl Setup {
    pub(crate) fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let runner = example("fake-runner");
        let settings = format!("runner = {:?}\n", runner.to_str().unwrap());
        Self {
            folder,
            settings,
            models: String::new(),
            arguments: Vec::new(),
        }
    }

    pub(crate) fn path(&self) -> &Path {
        self.folder.path()
    }

    /// Adds lines to the configuration, those that begin with a table after all others.
    pub(crate) fn setting(mut self, lines: &str) -> Self {
        let part = if lines.starts_with('[') {
            &mut self.models
        } else {
            &mut self.settings
        };
        *part += &format!("{lines}\n");
        self
    }

    pub(crate) fn argument(mut self, argument: &str) -> Self {
        self.arguments.push(argument.to_owned());
        self
    }

    /// Adds a fake model with faults.
    pub(crate) fn model(self, name: &str, faults: &[&str]) -> Self {
        self.model_with(name, faults, "")
    }

    /// The same with further lines in its part of the configuration.
    pub(crate) fn model_with(mut self, name: &str, faults: &[&str], lines: &str) -> Self {
        let path = self.folder.path().join(name);
        fs::create_dir(&path).unwrap();
        fs::write(path.join("faults"), faults.join("\n")).unwrap();
        self.models += &format!("[models.{name}]\npath = {name:?}\n{lines}\n");
        self
    }

    pub(crate) fn start(self) -> Host {
        let config = self.folder.path().join("lookahead.toml");
        fs::write(&config, format!("{}{}", self.settings, self.models)).unwrap();
        let mut child = Command::new(lookahead())
            .args(["serve", "--config"])
            .arg(&config)
            .args(&self.arguments)
            .env("LOOKAHEAD_LOG", "debug")
            .env(MARK, self.folder.path())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let (sender, events) = channel();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        std::thread::spawn(move || {
            for line in stdout.lines() {
                let Ok(line) = line else { break };
                let value = serde_json::from_str(&line).unwrap_or_else(|error| panic!("{error}: {line}"));
                if sender.send(value).is_err() {
                    break;
                }
            }
        });
        let log = Arc::new(Mutex::new(String::new()));
        let (kept, stderr) = (Arc::clone(&log), child.stderr.take().unwrap());
        std::thread::spawn(move || {
            for line in BufReader::new(stderr).split(b'\n') {
                let Ok(line) = line else { break };
                let mut log = kept.lock().unwrap();
                log.push_str(&String::from_utf8_lossy(&line));
                log.push('\n');
            }
        });
        let stdin = child.stdin.take();
        let mut host = Host {
            child,
            stdin,
            events,
            seen: VecDeque::new(),
            log,
            folder: self.folder,
        };
        let hello = host.wait(|event| event["type"] == "hello");
        assert_eq!(hello["program"], "lookahead");
        host
    }
}

/// A running scheduler and its pipes.
pub(crate) struct Host {
    pub(crate) child: Child,
    pub(crate) stdin: Option<ChildStdin>,
    events: Receiver<Value>,
    /// Events that were received while another one was waited for.
    seen: VecDeque<Value>,
    pub(crate) log: Arc<Mutex<String>>,
    folder: TempDir,
}

impl Host {
    /// The configuration file.
    pub(crate) fn config(&self) -> PathBuf {
        self.folder.path().join("lookahead.toml")
    }

    pub(crate) fn send(&mut self, request: Value) {
        writeln!(self.stdin.as_mut().unwrap(), "{request}").unwrap();
    }

    /// The first event, among those not taken yet, that fits; later ones stay.
    pub(crate) fn wait(&mut self, fits: impl Fn(&Value) -> bool) -> Value {
        self.wait_for(PATIENCE, fits).unwrap_or_else(|| {
            panic!(
                "no such event; seen: {:#?}\nlog: {}",
                self.seen,
                self.log.lock().unwrap()
            )
        })
    }

    pub(crate) fn wait_for(&mut self, limit: Duration, fits: impl Fn(&Value) -> bool) -> Option<Value> {
        if let Some(at) = self.seen.iter().position(&fits) {
            return self.seen.remove(at);
        }
        let deadline = Instant::now() + limit;
        loop {
            let event = self
                .events
                .recv_timeout(deadline.saturating_duration_since(Instant::now()))
                .ok()?;
            if fits(&event) {
                return Some(event);
            }
            self.seen.push_back(event);
        }
    }

    /// The final event of a request.
    pub(crate) fn end_of(&mut self, id: &str) -> Value {
        self.wait(|event| event["id"] == id && is_final(event))
    }

    /// All events of a request, its final one last.
    pub(crate) fn all_of(&mut self, id: &str) -> Vec<Value> {
        let end = self.end_of(id);
        let (mine, rest): (VecDeque<Value>, _) = std::mem::take(&mut self.seen)
            .into_iter()
            .partition(|it| it["id"] == id);
        self.seen = rest;
        mine.into_iter().chain([end]).collect()
    }

    /// The text that a request was answered with, and its final event.
    pub(crate) fn text_of(&mut self, id: &str) -> (String, Value) {
        let events = self.all_of(id);
        let text = events
            .iter()
            .filter(|it| it["type"] == "token")
            .map(|it| it["text"].as_str().unwrap())
            .collect();
        (text, events.last().unwrap().clone())
    }

    /// The entry of a model in `list`.
    pub(crate) fn entry(&mut self, model: &str) -> Option<Value> {
        self.send(serde_json::json!({"type": "list", "id": "list"}));
        let list = self.end_of("list");
        list["models"]
            .as_array()
            .unwrap()
            .iter()
            .find(|entry| entry["model"] == model)
            .cloned()
    }

    pub(crate) fn pid_of(&mut self, model: &str) -> i32 {
        self.entry(model).unwrap()["pid"].as_i64().unwrap() as i32
    }

    /// What tells the processes of this scheduler.
    pub(crate) fn mark(&self) -> String {
        format!("{MARK}={}", self.folder.path().display())
    }

    pub(crate) fn signal(&self, signal: i32) {
        kill(self.child.id() as i32, signal);
    }

    /// Closes stdin and takes the exit status.
    pub(crate) fn finish(mut self) -> (std::process::ExitStatus, Vec<Value>) {
        drop(self.stdin.take());
        let status = self.exit_status(PATIENCE);
        let mut rest: Vec<Value> = self.seen.drain(..).collect();
        while let Ok(event) = self.events.recv_timeout(PATIENCE) {
            rest.push(event);
        }
        (status, rest)
    }

    pub(crate) fn exit_status(&mut self, limit: Duration) -> std::process::ExitStatus {
        let deadline = Instant::now() + limit;
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            assert!(
                Instant::now() < deadline,
                "still running; log: {}",
                self.log.lock().unwrap()
            );
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        // A test that failed leaves it running; one that ended it finds nothing to kill.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub(crate) fn is_final(event: &Value) -> bool {
    match event["type"].as_str().unwrap() {
        "prompt" | "prefill" | "token" | "load" | "hello" => false,
        "error" => event["duplicate"] != true,
        _ => true,
    }
}

pub(crate) fn kill(pid: i32, signal: i32) {
    // SAFETY: plain integers.
    unsafe {
        libc::kill(pid, signal);
    }
}

/// The live processes that carry a mark.
pub(crate) fn marked(mark: &str) -> Vec<i32> {
    let mut pids = Vec::new();
    for entry in fs::read_dir("/proc").unwrap().flatten() {
        let Ok(pid) = entry.file_name().to_string_lossy().parse::<i32>() else {
            continue;
        };
        let environment = fs::read(entry.path().join("environ")).unwrap_or_default();
        if environment
            .split(|&byte| byte == 0)
            .any(|it| it == mark.as_bytes())
            && is_alive(pid)
        {
            pids.push(pid);
        }
    }
    pids
}

/// Whether a process of that id is there and not a zombie.
pub(crate) fn is_alive(pid: i32) -> bool {
    match fs::read_to_string(format!("/proc/{pid}/stat")) {
        Ok(stat) => !stat
            .rsplit(')')
            .next()
            .unwrap_or_default()
            .trim_start()
            .starts_with(['Z', 'X']),
        Err(_) => false,
    }
}

/// Waits until a condition holds.
pub(crate) fn eventually(limit: Duration, what: &str, condition: impl Fn() -> bool) {
    let deadline = Instant::now() + limit;
    while !condition() {
        assert!(Instant::now() < deadline, "not in time: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}
