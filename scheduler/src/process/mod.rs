//! One child process that speaks the wire protocol, and the threads that keep its three pipes moving.
//!
//! Invariant: both output pipes are read until their end whatever happens elsewhere, writing to the child never blocks the
//! caller, and `Exited` is reported exactly once, after everything that the child wrote. The process id stays valid until
//! [`ChildProcess::reap`], since the waiting thread only watches.

mod death;
mod group;
mod stderr;
mod tail;

pub use death::{describe, signal_of};
pub use group::{kill_all, tie_to_parent};
pub use stderr::relay;
pub use tail::Tail;

use std::io;
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use crossbeam_channel::{bounded, unbounded, Receiver, Sender};
use lookahead_protocol::{Line, LineReader, LineWriter, Request, WriteError};
use serde_json::Value;

use crate::outbox::{Object, Outbox};

/// The longest line taken from a child, in bytes.
const CHILD_LINE_BYTES: usize = 64 << 20;
/// How long the pipes of an ended child are read on, for the case that something it started holds them open.
const DRAIN_LIMIT: Duration = Duration::from_millis(500);

/// What a child does.
#[derive(Debug)]
pub enum Output {
    /// It wrote a line that is a JSON object.
    Event(Object),
    /// It wrote something else: this many bytes, of which the start is given.
    Noise(usize, String),
    /// It has ended, and so has its output.
    Exited,
}

/// A started child.
#[derive(Debug)]
pub struct ChildProcess {
    child: Child,
    input: Option<Sender<Request>>,
    tail: Arc<Mutex<Tail>>,
}

impl ChildProcess {
    /// Starts `command` with its pipes connected. What it logs goes to our stderr too if `relay_stderr`. `sink` is called from the child's threads for everything that it does;
    /// it may block, and its reading of stdout waits while `outbox` is full.
    ///
    /// Must be called from a thread that lives as long as the process: where the system ties a child's life to its parent,
    /// it ties it to the parent's thread.
    pub fn spawn(
        mut command: Command,
        name: &str,
        relay_stderr: bool,
        outbox: &Arc<Outbox>,
        sink: impl Fn(Output) + Clone + Send + 'static,
    ) -> io::Result<Self> {
        command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        group::own_group(&mut command);
        tie_to_parent(&mut command);
        let mut child = command.spawn()?;
        group::register(child.id());
        match Self::connect(&mut child, name, relay_stderr, outbox, sink) {
            Ok((input, tail)) => Ok(Self {
                child,
                input: Some(input),
                tail,
            }),
            Err(error) => {
                group::signal(child.id(), libc::SIGKILL);
                let _ = child.wait();
                group::forget(child.id());
                Err(error)
            }
        }
    }

    fn connect(
        child: &mut Child,
        name: &str,
        relay_stderr: bool,
        outbox: &Arc<Outbox>,
        sink: impl Fn(Output) + Clone + Send + 'static,
    ) -> io::Result<(Sender<Request>, Arc<Mutex<Tail>>)> {
        let (Some(stdin), Some(stdout), Some(stderr)) =
            (child.stdin.take(), child.stdout.take(), child.stderr.take())
        else {
            return Err(io::Error::other("the child's pipes are missing"));
        };
        let tail = Arc::new(Mutex::new(Tail::default()));
        let (ended, readers) = bounded::<()>(0);

        let (input, requests) = unbounded();
        named(name, "in").spawn(move || feed(stdin, &requests))?;

        let (out_sink, out_ended, outbox) = (sink.clone(), ended.clone(), Arc::clone(outbox));
        named(name, "out").spawn(move || {
            read_lines(stdout, &outbox, &out_sink);
            drop(out_ended);
        })?;

        let (err_tail, err_name) = (Arc::clone(&tail), name.to_owned());
        named(name, "err").spawn(move || {
            let pass_on: fn(&str) = if relay_stderr { crate::log::line } else { |_| {} };
            relay(stderr, &err_name, &err_tail, pass_on);
            drop(ended);
        })?;

        let pid = child.id();
        named(name, "wait").spawn(move || {
            group::wait_without_reaping(pid);
            // Nothing is ever sent: the channel ends when both readers have reached the end of their pipes.
            let _ = readers.recv_timeout(DRAIN_LIMIT);
            sink(Output::Exited);
        })?;
        Ok((input, tail))
    }

    /// The process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Queues a request; false once the input is closed.
    pub fn send(&self, request: Request) -> bool {
        self.input
            .as_ref()
            .is_some_and(|input| input.send(request).is_ok())
    }

    /// Closes the child's stdin after what is queued.
    pub fn close_input(&mut self) {
        self.input = None;
    }

    /// Sends a signal to the child and to everything in its process group.
    pub fn signal(&self, signal: i32) {
        group::signal(self.child.id(), signal);
    }

    /// The end of what it wrote to stderr.
    pub fn stderr_tail(&self) -> String {
        self.tail.lock().unwrap_or_else(PoisonError::into_inner).text()
    }

    /// Takes the exit status of a child that was reported as `Exited`, and ends what is left of its group.
    pub fn reap(mut self) -> io::Result<ExitStatus> {
        // The leader is a zombie here, so the group's id can't have been given to anyone else yet.
        group::signal(self.child.id(), libc::SIGKILL);
        let status = self.child.wait();
        group::forget(self.child.id());
        status
    }
}

fn named(name: &str, part: &str) -> thread::Builder {
    let short: String = name.rsplit('/').next().unwrap_or(name).chars().take(11).collect();
    thread::Builder::new().name(format!("{part} {}", short.replace('\0', "")))
}

/// Writes requests until the channel closes or the child stops reading.
fn feed(stdin: ChildStdin, requests: &Receiver<Request>) {
    let mut lines = LineWriter::new(stdin);
    for request in requests {
        match lines.write(&request) {
            Ok(()) | Err(WriteError::Serialize(_)) => {}
            Err(_) => return,
        }
    }
}

fn read_lines(stdout: impl io::Read, outbox: &Outbox, sink: &impl Fn(Output)) {
    let mut lines = LineReader::new(stdout, CHILD_LINE_BYTES);
    loop {
        outbox.wait_for_room();
        match lines.next_line() {
            Ok(Some(Line::Text(text))) => sink(parse(&text)),
            Ok(Some(Line::NotUtf8(bytes))) => sink(noise(&bytes)),
            Ok(Some(Line::TooLong { length })) => {
                sink(Output::Noise(length as usize, "an endless line".to_owned()))
            }
            Ok(None) | Err(_) => return,
        }
    }
}

fn parse(text: &str) -> Output {
    match serde_json::from_str::<Value>(text) {
        Ok(Value::Object(event)) if event.get("type").is_some_and(Value::is_string) => Output::Event(event),
        _ => noise(text.as_bytes()),
    }
}

fn noise(bytes: &[u8]) -> Output {
    Output::Noise(
        bytes.len(),
        String::from_utf8_lossy(&bytes[..bytes.len().min(200)]).into_owned(),
    )
}
