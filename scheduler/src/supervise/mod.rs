//! The scheduler proper: one thread that owns all state about models, processes and requests.
//!
//! Invariant: nothing here blocks. Hosts, children and timers reach the thread through one bounded channel; what it says goes
//! into the [`Outbox`] and into unbounded but quota-controlled queues to the children. Every accepted request ends in exactly
//! one final event, whatever happens to its model.

mod child;
mod lifecycle;
mod model;
mod report;
mod request;

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crossbeam_channel::{bounded, Receiver, RecvTimeoutError, Sender};
use lookahead_protocol::event::{Phase, RequestCounts};
use lookahead_protocol::{RequestError, SchedulerRequest};

use crate::config::Settings;
use crate::memory;
use crate::outbox::Outbox;
use crate::process::Output;
use crate::programs::Programs;
use model::Model;

pub(crate) use report::empty_done;

/// Inputs that may wait for the thread; whoever produces more waits.
const INPUT_QUEUE: usize = 256;

/// Everything that can happen to the scheduler.
#[derive(Debug)]
pub enum Input {
    /// A request from the host, with the length of its line.
    Request(Box<SchedulerRequest>, usize),
    /// A line from the host that is no request.
    Refused(RequestError),
    /// The host is gone or wants the end.
    Quit,
    /// A child did something.
    Child {
        /// The model's key.
        key: String,
        /// The child's number.
        number: u64,
        /// What it did.
        output: Output,
    },
    /// The memory that a model needs is known.
    Estimated {
        /// The model's key.
        key: String,
        /// Bytes.
        bytes: u64,
    },
}

/// A running scheduler, seen by its host.
#[derive(Debug)]
pub struct Connection {
    inputs: Sender<Input>,
    outbox: Arc<Outbox>,
    thread: JoinHandle<()>,
}

impl Connection {
    /// Starts the scheduler's thread. Models marked for it are loaded at once.
    pub fn start(settings: Settings, programs: Programs) -> io::Result<Self> {
        let outbox = Arc::new(Outbox::default());
        let (inputs, received) = bounded(INPUT_QUEUE);
        let mut supervisor = Supervisor::new(settings, programs, Arc::clone(&outbox), inputs.clone());
        // The thread ends only when no child is left, as it must: children are tied to the thread that started them.
        let thread = thread::Builder::new()
            .name("scheduler".to_owned())
            .spawn(move || supervisor.run(&received))?;
        Ok(Self {
            inputs,
            outbox,
            thread,
        })
    }

    /// Where events come out.
    pub fn outbox(&self) -> &Arc<Outbox> {
        &self.outbox
    }

    /// Where requests go in.
    pub fn inputs(&self) -> Sender<Input> {
        self.inputs.clone()
    }

    /// Sends a request; false once the scheduler has ended.
    pub fn request(&self, request: SchedulerRequest) -> bool {
        self.inputs.send(Input::Request(Box::new(request), 0)).is_ok()
    }

    /// Asks for the end: requests end as cancelled, children are stopped.
    pub fn quit(&self) {
        // A scheduler that has ended already is what was asked for.
        let _ = self.inputs.send(Input::Quit);
    }

    /// Waits for the end. A panic of the thread becomes an error.
    pub fn join(self) -> io::Result<()> {
        self.thread
            .join()
            .map_err(|_| io::Error::other("the scheduler's thread panicked"))
    }
}

/// A request that has not ended.
#[derive(Debug)]
struct Active {
    /// The model's key.
    key: String,
    /// The model as this request names it.
    name: String,
    kind: Kind,
    arrived: Instant,
    /// When it was handed to the model's process.
    sent: Option<Instant>,
    phase: Phase,
    prompt_tokens: u64,
    cached: u64,
    prefilled: u64,
    generated: u64,
}

impl Active {
    fn new(key: String, name: String, kind: Kind) -> Self {
        Self {
            key,
            name,
            kind,
            arrived: Instant::now(),
            sent: None,
            phase: Phase::Prepare,
            prompt_tokens: 0,
            cached: 0,
            prefilled: 0,
            generated: 0,
        }
    }
}

/// What a request is, as far as its end is concerned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Generate,
    /// `tokenize` and the like: one answer, and not to be cancelled once it is with the process.
    Simple,
    Load,
    Unload,
    /// `status` or `cache` of a model, answered by its process.
    Ask,
    /// `cache` of all models.
    AskAll,
}

/// A request that the scheduler itself has sent to a child.
#[derive(Debug)]
struct Own {
    key: String,
    /// The host's request that it is for; `None` for pings and cancels.
    host: Option<String>,
}

/// A `cache` request to all models.
#[derive(Debug, Default)]
struct AskedAll {
    open: usize,
    nodes: u64,
    bytes: u64,
}

#[derive(Debug)]
struct Supervisor {
    settings: Settings,
    programs: Programs,
    budget: u64,
    outbox: Arc<Outbox>,
    inputs: Sender<Input>,
    models: BTreeMap<String, Model>,
    /// Keys of names that were resolved before.
    names: HashMap<String, String>,
    requests: HashMap<String, Active>,
    own: HashMap<String, Own>,
    asked_all: HashMap<String, AskedAll>,
    queued_bytes: usize,
    last_number: u64,
    counts: RequestCounts,
    started: Instant,
    quitting: bool,
    /// Something happened that may let a model start, work or stop.
    stirred: bool,
}

impl Supervisor {
    fn new(settings: Settings, programs: Programs, outbox: Arc<Outbox>, inputs: Sender<Input>) -> Self {
        let budget = settings.memory_budget.unwrap_or_else(memory::default_budget);
        Self {
            settings,
            programs,
            budget,
            outbox,
            inputs,
            models: BTreeMap::new(),
            names: HashMap::new(),
            requests: HashMap::new(),
            own: HashMap::new(),
            asked_all: HashMap::new(),
            queued_bytes: 0,
            last_number: 0,
            counts: RequestCounts::default(),
            started: Instant::now(),
            quitting: false,
            stirred: true,
        }
    }

    fn run(&mut self, received: &Receiver<Input>) {
        self.say_hello();
        self.preload();
        let mut next = None;
        loop {
            if self.stirred || next.is_some_and(|next: Instant| next <= Instant::now()) {
                self.stirred = false;
                next = self.advance(Instant::now());
            }
            if self.quitting && self.models.values().all(|model| model.child.is_none()) {
                break;
            }
            let wait = next.map_or(Duration::from_secs(3600), |next| {
                next.saturating_duration_since(Instant::now())
            });
            match received.recv_timeout(wait) {
                Ok(input) => self.handle(input),
                Err(RecvTimeoutError::Timeout) => self.stirred = true,
                Err(RecvTimeoutError::Disconnected) => break,
            }
        }
        self.end_leftovers();
        self.outbox.close();
    }

    fn handle(&mut self, input: Input) {
        match input {
            Input::Request(request, bytes) => self.on_request(*request, bytes),
            Input::Refused(error) => self.emit(error.into(), None),
            Input::Quit => self.quit(),
            Input::Child { key, number, output } => self.on_child(&key, number, output),
            Input::Estimated { key, bytes } => self.on_estimate(&key, bytes),
        }
    }

    /// A number never used before.
    fn number(&mut self) -> u64 {
        self.last_number += 1;
        self.last_number
    }

    /// An id for a request of the scheduler's own that no request of a host has.
    fn own_id(&mut self) -> String {
        loop {
            let id = format!("lookahead:{}", self.number());
            if !self.requests.contains_key(&id) {
                return id;
            }
        }
    }
}
