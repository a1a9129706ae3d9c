//! The process's edge: threads, pipes, signals.
//!
//! Invariant: stdout carries protocol lines only; every thread ends when the latch trips, and the process's exit status
//! says how: 0 in good order, 1 the load failed, 3 an internal fault.

pub mod board;
pub mod cli;
mod dispatch;
pub mod latch;
pub mod outbox;
mod record;
pub mod registry;
mod signals;

use std::collections::BTreeMap;
use std::io::Write as _;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use crossbeam_channel::unbounded;
use lookahead_protocol::event::{Backend as WireBackend, Hello, ProtocolVersion};
use lookahead_protocol::transcript::Header;
use lookahead_protocol::Event;

use crate::engine::job::Refusal;
use crate::engine::text::Awaited;
use crate::engine::{self, Ending};
use crate::inspect::Circumstances;
use crate::mlx::{gpu, ops, Backend};
use crate::model::checkpoint::Checkpoint;
use crate::model::fingerprint::fingerprint;

/// What every thread shares.
#[derive(Debug, Clone)]
pub struct Host {
    /// Events to the host.
    pub outbox: outbox::Outbox,
    /// Busy ids.
    pub registry: Arc<registry::Registry>,
    /// What `status` tells.
    pub board: Arc<board::Board>,
    /// Whether the process ends.
    pub latch: latch::Latch,
    /// Why the model couldn't be loaded.
    load_failure: Arc<OnceLock<Refusal>>,
}

impl Host {
    /// Remembers why the model can't be loaded; to be called before anything else hears of it.
    pub fn fail_load(&self, refusal: Refusal) {
        // There is one load; a second call would say no more than the first.
        let _ = self.load_failure.set(refusal);
    }

    /// Why the model couldn't be loaded, once that is known.
    pub fn load_failure(&self) -> Option<&Refusal> {
        self.load_failure.get()
    }

    /// The final event of a generation that never started: the load's error if that is why, else that it was cancelled.
    pub fn unserved(&self, id: &str, arrived: Option<Instant>) -> Event {
        match self.load_failure() {
            Some(refusal) => Event::Error(refusal.failure(id)),
            None => Event::Done(Box::new(engine::cancelled_before_start(id, arrived))),
        }
    }

    /// Frees a request's id and sends its final event, if it has not had one.
    pub fn finish(&self, id: &str, event: Event) {
        if self.registry.end(id) {
            self.outbox.push(event);
        }
    }
}

/// The program's name on the wire.
pub const PROGRAM: &str = "lookahead-runner";

/// How long the last events may take to be read once everything else has ended.
const DRAIN: Duration = Duration::from_secs(2);

/// Tokens before the forwards that `--measure` times, and tokens of its prefill.
const MEASURED_CONTEXT: usize = 128;
const MEASURED_PREFILL: usize = 4096;

/// Prints the worst difference of each kernel from plain operations; returns the exit status.
fn check_kernels(backend: Backend) -> anyhow::Result<i32> {
    if !gpu::install(backend, None) {
        println!("no kernels of our own on the {} backend", backend.name());
        return Ok(0);
    }
    let mut worst: BTreeMap<&str, gpu::check::Difference> = BTreeMap::new();
    let mut wrong = 0;
    gpu::check::thorough(|rows, batch, constants, found| {
        if !found.is_fine() {
            wrong += 1;
            println!(
                "wrong: {} by {} at {rows} rows, batch {batch}, {constants:?}",
                found.name, found.by
            );
        }
        let worst = worst.entry(found.name).or_insert(found);
        if found.by > worst.by {
            *worst = found;
        }
    })
    .map_err(|error| anyhow::anyhow!("{}", ops::explain(&error)))?;
    for (name, worst) in &worst {
        println!("{name}: at most {:.1e} (limit {:.0e})", worst.by, worst.limit);
    }
    Ok(i32::from(wrong > 0))
}

/// Runs the process; returns its exit status.
///
/// # Errors
/// A thread or signal handler can't be started, or the transcript can't be created.
pub fn run(args: &cli::Args) -> anyhow::Result<i32> {
    if args.inspect {
        return inspect(args);
    }
    if args.measure {
        let figures = engine::measure::measure(&args.settings(), MEASURED_CONTEXT, MEASURED_PREFILL)?;
        println!("{}", serde_json::to_string_pretty(&figures)?);
        return Ok(0);
    }
    let backend = Backend::select(args.cpu);
    if args.check_kernels {
        return check_kernels(backend);
    }
    let host = Host {
        outbox: outbox::Outbox::default(),
        registry: Arc::default(),
        board: Arc::default(),
        latch: latch::Latch::default(),
        load_failure: Arc::default(),
    };
    signals::watch(host.latch.clone())?;
    let recorder = match &args.record {
        Some(path) => {
            // A model that can't be opened is told by the load.
            let fingerprint = Checkpoint::open(&args.model)
                .map(|c| fingerprint(&c))
                .unwrap_or_default();
            let header = Header::new(PROGRAM, env!("CARGO_PKG_VERSION"))
                .with_model(args.model.display().to_string(), fingerprint);
            Some(Arc::new(record::Recorder::create(path, &header)?))
        }
        None => None,
    };
    host.outbox.push(Event::Hello(Hello {
        protocol: ProtocolVersion::CURRENT,
        program: PROGRAM.to_owned(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        pid: std::process::id(),
        backend: Some(WireBackend::from(backend.name())),
    }));
    let writer = {
        let (host, recorder) = (host.clone(), recorder.clone());
        spawn("stdout", move || {
            host.outbox
                .run(std::io::stdout(), &host.latch, recorder.as_deref());
        })?
    };
    let text = Arc::new(Awaited::default());
    let (commands, work) = unbounded();
    dispatch::start(&host, &text, commands, args, recorder)?;
    let settings = args.settings();
    let engine = {
        let (host, text) = (host.clone(), Arc::clone(&text));
        spawn("engine", move || {
            engine::serve(settings, backend, host, &text, &work)
        })?
    };
    let status = match engine.join() {
        Ok(Ending::Orderly) => 0,
        Ok(Ending::LoadFailed) => 1,
        Err(_) => 3,
    };
    answer_outstanding(&host);
    host.outbox.close(DRAIN);
    drop(writer);
    Ok(status)
}

/// Gives every request that was read its final event: generations end as cancelled, or with the error of a load that failed;
/// text requests are about to be answered.
fn answer_outstanding(host: &Host) {
    let end = Instant::now() + DRAIN;
    loop {
        for id in host.registry.outstanding() {
            host.finish(&id, host.unserved(&id, None));
        }
        if host.registry.is_empty() || Instant::now() >= end {
            return;
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Prints what the model is; 1 if it can't run.
fn inspect(args: &cli::Args) -> anyhow::Result<i32> {
    let settings = args.settings();
    let circumstances = Circumstances {
        backend: Backend::select(args.cpu),
        memory_limit: settings.memory_limit,
        chunk: settings.chunk,
        no_draft: settings.draft.is_off(),
        fp8: settings.fp8,
    };
    let inspection = crate::inspect::inspect(&args.model, circumstances);
    let text = if args.json {
        serde_json::to_string(&inspection)? + "\n"
    } else {
        inspection.to_string()
    };
    // A reader that stops half-way has seen what it wanted.
    let _ = std::io::stdout().write_all(text.as_bytes());
    Ok(i32::from(!inspection.verdict.runs))
}

fn spawn<T: Send + 'static>(
    name: &str,
    body: impl FnOnce() -> T + Send + 'static,
) -> std::io::Result<std::thread::JoinHandle<T>> {
    std::thread::Builder::new().name(name.to_owned()).spawn(body)
}
