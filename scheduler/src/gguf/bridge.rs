//! The process behind `lookahead gguf`: the edge between the wire protocol and llama-server.
//!
//! Invariant: control requests are answered from here at once, and the server is gone before this process is.

use std::io;
use std::path::PathBuf;
use std::process::{Child, ExitStatus};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use crossbeam_channel::{bounded, unbounded, Sender};
use lookahead_protocol::event::{
    DraftInfo, Failure, Hello, LoadProgress, LoadStage, MemoryInfo, ModelInfo, Pong, ProtocolVersion, Ready,
    State, Status,
};
use lookahead_protocol::{ErrorCode, Event, Line, LineReader, LineWriter, Request, RequestError};
use serde_json::Value;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use super::ask::Served;
use super::drafting::{decide, Drafting, Wish};
use super::find;
use super::header::Header;
use super::launch::{Launch, LaunchError, Running};
use super::requests::{Busy, Job, Shared};
use super::work::Work;
use crate::estimate::weight_files;
use crate::memory::machine_memory;
use crate::outbox::{Outbox, Popped};
use crate::process;

/// How the server is started.
#[derive(Debug, Clone)]
pub struct Options {
    /// The model file; of a split model the first part.
    pub model: PathBuf,
    /// The server's executable, where one is named.
    pub llama_server: Option<PathBuf>,
    /// A separate draft file.
    pub draft_model: Option<PathBuf>,
    /// What is wanted of drafting.
    pub draft: Wish,
    /// Context length; `None`: the model's own, up to a limit.
    pub context: Option<u64>,
    /// Threads; `None`: one a core.
    pub threads: Option<usize>,
    /// The longest request line.
    pub max_line_bytes: usize,
}

/// The largest context that is taken without being asked for: its memory is set aside at once.
const DEFAULT_CONTEXT: u64 = 32_768;
/// How often the server's life is looked at.
const WATCH: Duration = Duration::from_millis(20);
/// Grace of each step of stopping the server.
const GRACE: Duration = Duration::from_secs(2);

/// Serves one GGUF file on stdin and stdout; gives the exit status of the protocol.
pub fn serve(options: &Options) -> io::Result<u8> {
    let shared = Arc::new(Shared {
        outbox: Arc::new(Outbox::default()),
        busy: Mutex::default(),
        stopping: AtomicBool::new(false),
        ready: AtomicBool::new(false),
        last_serial: AtomicU64::new(0),
        started: Instant::now(),
        counts: Mutex::default(),
    });
    shared.emit(Event::Hello(Hello {
        protocol: ProtocolVersion::CURRENT,
        program: "lookahead-gguf".to_owned(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        pid: std::process::id(),
        backend: None,
    }));
    let mut signals = Signals::new([SIGTERM, SIGINT])?;
    let stopper = Arc::clone(&shared);
    thread::Builder::new().name("signals".to_owned()).spawn(move || {
        let mut asked = false;
        for signal in signals.forever() {
            if asked {
                // The server is tied to this process and ends with it.
                std::process::exit(128 + signal);
            }
            asked = true;
            stopper.stop();
        }
    })?;
    let writer = Arc::clone(&shared);
    let (written, all_written) = bounded::<()>(0);
    thread::Builder::new().name("stdout".to_owned()).spawn(move || {
        write(&writer);
        drop(written);
    })?;
    let (generations, to_generate) = unbounded();
    let (asides, to_answer) = unbounded();
    let (reader, max_line_bytes) = (Arc::clone(&shared), options.max_line_bytes);
    thread::Builder::new()
        .name("stdin".to_owned())
        .spawn(move || read(&reader, max_line_bytes, &generations, &asides))?;

    let code = match start(options, &shared) {
        Ok((running, work)) => {
            let generator = work.clone();
            thread::Builder::new()
                .name("generate".to_owned())
                .spawn(move || {
                    for job in to_generate {
                        generator.generate(&job);
                    }
                })?;
            thread::Builder::new().name("aside".to_owned()).spawn(move || {
                for (request, serial) in to_answer {
                    work.aside(&request, serial);
                }
            })?;
            watch(running, &shared)
        }
        Err(_) if shared.stopping.load(Ordering::SeqCst) => 0,
        Err(error) => {
            shared.emit(Event::Error(Failure::new(None, error.code, error.message)));
            1
        }
    };
    if code == 0 {
        // What was streaming when its connection was closed ends by itself, with what it came to.
        let deadline = Instant::now() + GRACE;
        while shared.busy().values().any(|it| it.hangup.is_some()) && Instant::now() < deadline {
            thread::sleep(WATCH);
        }
        shared.cancel_all();
    }
    shared.outbox.close();
    // Nothing is ever sent: the channel ends with the writer.
    let _ = all_written.recv_timeout(Duration::from_secs(5));
    Ok(code)
}

fn start(options: &Options, shared: &Arc<Shared>) -> Result<(Running, Work), LaunchError> {
    let path = &options.model;
    if !path.is_file() {
        return Err(LaunchError::new(
            ErrorCode::ModelNotFound,
            format!("no GGUF file at {}", path.display()),
        ));
    }
    let header = open_header(path)?;
    let draft_header = options.draft_model.as_deref().map(open_header).transpose()?;
    let program = find::find(options.llama_server.as_deref())
        .map_err(|it| LaunchError::new(ErrorCode::Unsupported, it))?;
    let known = find::known_flags(&program);
    let draft = options.draft_model.as_deref().zip(draft_header.as_ref());
    let drafting = decide(&header, draft, options.draft, &known)
        .map_err(|it| LaunchError::new(ErrorCode::ModelInvalid, it))?;
    let own_context = header.own("context_length").unwrap_or(DEFAULT_CONTEXT);
    let launch = Launch {
        program,
        known,
        model: path.clone(),
        bytes: weight_files(path),
        context: options.context.unwrap_or(own_context.min(DEFAULT_CONTEXT)),
        threads: options
            .threads
            .unwrap_or_else(|| thread::available_parallelism().map_or(1, |count| count.get())),
        drafting,
    };
    let began = Instant::now();
    let mut told = (Instant::now(), None);
    let running = launch.start(&shared.stopping, |done| {
        if told.1 != Some(done) && (told.1.is_none() || told.0.elapsed() >= Duration::from_millis(100)) {
            told = (Instant::now(), Some(done));
            shared.emit(Event::Load(LoadProgress {
                done,
                total: launch.bytes,
                stage: LoadStage::Weights,
            }));
        }
    })?;
    shared.emit(Event::Load(LoadProgress {
        done: launch.bytes,
        total: launch.bytes,
        stage: LoadStage::Weights,
    }));
    let (ready, served) = describe(&launch, &header, &running, began.elapsed());
    let work = Work {
        server: running.server.clone(),
        served: Arc::new(served),
        shared: Arc::clone(shared),
        composes: header
            .text("tokenizer.ggml.pre")
            .is_some_and(|pre| pre.starts_with("qwen")),
        vocabulary: ready.model.vocab_size,
    };
    shared.ready.store(true, Ordering::SeqCst);
    shared.emit(Event::Ready(Box::new(ready)));
    Ok((running, work))
}

fn open_header(path: impl AsRef<std::path::Path>) -> Result<Header, LaunchError> {
    let path = path.as_ref();
    Header::open(path).map_err(|error| {
        LaunchError::new(
            ErrorCode::ModelInvalid,
            format!("GGUF file {}: {error}", path.display()),
        )
    })
}

fn describe(launch: &Launch, header: &Header, running: &Running, took: Duration) -> (Ready, Served) {
    let limit = Duration::from_secs(10);
    let ask = |path: &str| {
        running
            .server
            .ask("GET", path, None, limit)
            .map(|(_, answer)| answer)
            .unwrap_or_default()
    };
    let meta = ask("/v1/models")
        .pointer("/data/0/meta")
        .cloned()
        .unwrap_or_default();
    let figure = |name: &str| meta.get(name).and_then(Value::as_u64);
    // Only the slots say whether drafting is really on.
    let slots = ask("/slots");
    let speculative = slots.pointer("/0/speculative").and_then(Value::as_bool);
    let wanted = launch.drafting.kind.is_some();
    let active = speculative.unwrap_or(wanted);
    let context = running
        .props
        .pointer("/default_generation_settings/n_ctx")
        .and_then(Value::as_u64);
    let context = context.or(figure("n_ctx")).unwrap_or(launch.context);
    let Drafting {
        kind, reason, depth, ..
    } = &launch.drafting;
    let reason = match (wanted, active) {
        (true, false) => Some("llama-server says that it doesn't draft".to_owned()),
        _ => reason.clone(),
    };
    let depth = if active { *depth } else { 0 };
    let ready = Ready {
        model: ModelInfo {
            path: launch.model.to_string_lossy().into_owned(),
            architecture: header.architecture().to_owned(),
            parameters: figure("n_params").unwrap_or(0),
            quantization: header.quantization(),
            context_length: context,
            vocab_size: figure("n_vocab").unwrap_or(u64::MAX),
            vision: false,
            eos: header
                .integer("tokenizer.ggml.eos_token_id")
                .and_then(|id| u32::try_from(id).ok())
                .into_iter()
                .collect(),
        },
        draft: DraftInfo {
            active,
            kind: kind.map(str::to_owned),
            reason,
            max_depth: depth,
        },
        memory: MemoryInfo {
            weights: launch.bytes,
            limit: machine_memory().unwrap_or(0),
        },
        load_duration: took.as_nanos() as u64,
    };
    (ready, Served::new(header, context, depth))
}

/// Waits for the end of the server or of the host.
fn watch(running: Running, shared: &Shared) -> u8 {
    let Running { mut child, .. } = running;
    loop {
        if let Ok(Some(status)) = child.try_wait() {
            thread::sleep(Duration::from_millis(50));
            let ending = process::describe(status);
            // Requests are left open: whoever started this process sees it end and fails all of them at one stroke, with the
            // log that this line closes. Failing them here would leave a moment in which new ones arrive in vain.
            crate::log::line(&format!("llama-server {ending}"));
            crate::log::flush(Duration::from_secs(1));
            return 3;
        }
        if shared.stopping.load(Ordering::SeqCst) {
            // It doesn't end while a client is connected, so the connections were closed first.
            stop_server(&mut child);
            return 0;
        }
        thread::sleep(WATCH);
    }
}

fn stop_server(child: &mut Child) -> Option<ExitStatus> {
    let pid = i32::try_from(child.id()).ok()?;
    for signal in [libc::SIGTERM, libc::SIGTERM, libc::SIGKILL] {
        // SAFETY: plain integers; the child has not been waited for, so the id is still its own.
        unsafe {
            libc::kill(pid, signal);
        }
        let deadline = Instant::now() + GRACE;
        while Instant::now() < deadline {
            if let Ok(Some(status)) = child.try_wait() {
                return Some(status);
            }
            thread::sleep(Duration::from_millis(5));
        }
    }
    child.wait().ok()
}

fn write(shared: &Shared) {
    let mut lines = LineWriter::new(io::stdout());
    while let Popped::Event(event) = shared.outbox.pop(None) {
        if lines.write(&event).is_err() {
            shared.outbox.close();
            return shared.stop();
        }
    }
}

fn read(shared: &Shared, max_line_bytes: usize, generations: &Sender<Job>, asides: &Sender<(Request, u64)>) {
    let mut lines = LineReader::new(io::stdin(), max_line_bytes);
    loop {
        shared.outbox.wait_for_more_room();
        let parsed = match lines.next_line() {
            Ok(Some(Line::Text(text))) => Request::parse(text),
            Ok(Some(Line::NotUtf8(bytes))) => Err(RequestError::not_utf8(&bytes)),
            Ok(Some(Line::TooLong { length })) => Err(RequestError::line_too_long(length, max_line_bytes)),
            Ok(None) | Err(_) => return shared.stop(),
        };
        match parsed {
            Ok(Request::Shutdown) => return shared.stop(),
            Ok(request) => accept(shared, request, generations, asides),
            Err(error) => shared.emit(error.into()),
        }
    }
}

fn accept(shared: &Shared, request: Request, generations: &Sender<Job>, asides: &Sender<(Request, u64)>) {
    let Some(id) = request.id().map(str::to_owned) else {
        return;
    };
    if shared.busy().contains_key(&id) {
        return shared.emit(Event::Error(Failure::duplicate_id(id)));
    }
    let arrived = Instant::now();
    let serial = shared.last_serial.fetch_add(1, Ordering::Relaxed);
    let busy = |generate| {
        shared.busy().insert(
            id.clone(),
            Busy {
                serial,
                cancelled: false,
                generate,
                hangup: None,
                arrived,
            },
        );
    };
    // The receivers live as long as the process; while the model loads, requests wait in the channel.
    match request {
        Request::Generate(generate) => {
            busy(true);
            let _ = generations.send(Job {
                request: generate,
                serial,
                arrived,
            });
        }
        Request::Tokenize(_) | Request::Detokenize(_) | Request::Render(_) => {
            busy(false);
            let _ = asides.send((request, serial));
        }
        Request::Cancel(cancel) => shared.cancel(cancel),
        Request::Ping(ping) => shared.emit(Event::Pong(Pong { id: ping.id })),
        Request::Status(status) => shared.emit(Event::Status(Box::new(status_of(shared, status.id)))),
        Request::Cache(cache) => {
            let message =
                "llama-server keeps its prefix cache to itself; `cache` is not supported with GGUF files";
            shared.emit(Event::Error(Failure::new(
                Some(cache.id),
                ErrorCode::Unsupported,
                message,
            )));
        }
        Request::Shutdown => shared.stop(),
    }
}

fn status_of(shared: &Shared, id: String) -> Status {
    let generating = shared.busy().values().filter(|busy| busy.generate).count() as u64;
    let state = match (shared.ready.load(Ordering::SeqCst), generating) {
        _ if shared.stopping.load(Ordering::SeqCst) => State::Stopping,
        (false, _) => State::Loading,
        (true, 0) => State::Idle,
        (true, _) => State::Busy,
    };
    let mut status = Status::new(id, state);
    status.uptime = shared.started.elapsed().as_nanos() as u64;
    status.waiting = generating.saturating_sub(1);
    status.requests = shared.counts();
    status
}
