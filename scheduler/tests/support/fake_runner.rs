//! A program that speaks the runner's side of the wire protocol and misbehaves on demand.
//!
//! It shares no code with the crates that it tests. Its "model" is a folder; the answer to a prompt is a deterministic list of
//! words made from the folder's name. Faults come from `--fault NAME[=VALUE]` arguments and from lines of `MODEL/faults`;
//! with `--fault-once FILE` they act only in the first process that manages to create FILE.
#![expect(clippy::unwrap_used, reason = "a test program: a panic is a test's failure")]

use std::collections::{HashMap, HashSet};
use std::fs::OpenOptions;
use std::io::{self, BufRead, Write};
use std::path::{Path, PathBuf};
use std::process::exit;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{channel, Sender};
use std::sync::{Arc, Mutex};
use std::thread::{self, sleep};
use std::time::{Duration, Instant};

use serde_json::{json, Value};

type Faults = HashMap<String, String>;

struct Shared {
    faults: Faults,
    model: PathBuf,
    cancelled: Mutex<HashSet<String>>,
    waiting: Mutex<HashSet<String>>,
    frozen: AtomicBool,
    stopping: AtomicBool,
}

impl Shared {
    fn number(&self, fault: &str) -> Option<u64> {
        self.faults.get(fault).map(|value| value.parse().unwrap_or(0))
    }

    fn has(&self, fault: &str) -> bool {
        self.faults.contains_key(fault)
    }

    fn name(&self) -> String {
        self.model
            .file_name()
            .map(|name| name.to_string_lossy().into_owned())
            .unwrap_or_default()
    }
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let mut faults = Faults::new();
    let mut model = None;
    let mut once = None;
    let mut inspect = false;
    let mut arguments = arguments.into_iter();
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--model" => model = arguments.next(),
            "--fault" => add_fault(&mut faults, &arguments.next().unwrap_or_default()),
            "--fault-once" => once = arguments.next(),
            "--inspect" => inspect = true,
            other if !other.starts_with("--") && model.is_none() => model = Some(other.to_owned()),
            _ => {}
        }
    }
    let model = PathBuf::from(model.unwrap_or_else(|| {
        eprintln!("fake-runner: no --model");
        exit(2)
    }));
    if inspect {
        return print_inspection(&model);
    }
    if let Ok(text) = std::fs::read_to_string(model.join("faults")) {
        for line in text.lines() {
            add_fault(&mut faults, line);
        }
    }
    if let Some(file) = once {
        if OpenOptions::new()
            .write(true)
            .create_new(true)
            .open(file)
            .is_err()
        {
            faults.retain(|fault, _| fault.starts_with("slow") || fault == "memory");
        }
    }
    let shared = Arc::new(Shared {
        faults,
        model,
        cancelled: Mutex::default(),
        waiting: Mutex::default(),
        frozen: AtomicBool::new(false),
        stopping: AtomicBool::new(false),
    });
    run(&shared);
}

fn add_fault(faults: &mut Faults, text: &str) {
    let (name, value) = text.split_once('=').unwrap_or((text, ""));
    if !name.trim().is_empty() {
        faults.insert(name.trim().to_owned(), value.trim().to_owned());
    }
}

fn print_inspection(model: &Path) {
    match std::fs::read_to_string(model.join("estimate")) {
        Ok(bytes) => println!(
            "{}",
            json!({"memory": {"total": bytes.trim().parse::<u64>().unwrap()}})
        ),
        Err(_) => exit(2),
    }
}

fn emit(event: &Value) {
    let mut stdout = io::stdout().lock();
    if writeln!(stdout, "{event}").and_then(|()| stdout.flush()).is_err() {
        exit(0);
    }
}

fn run(shared: &Arc<Shared>) {
    if shared.has("ignore-term") {
        // SAFETY: changing a signal's disposition to SIG_IGN has no precondition.
        unsafe {
            libc::signal(libc::SIGTERM, libc::SIG_IGN);
        }
    }
    eprintln!("fake-runner: starting {}", shared.name());
    emit(
        &json!({"type": "hello", "protocol": {"major": 1, "minor": 0}, "program": "lookahead-runner",
        "version": "0", "pid": std::process::id(), "backend": "cpu"}),
    );
    let (queue, requests) = channel();
    let reader = {
        let shared = Arc::clone(shared);
        thread::spawn(move || read(&shared, &queue))
    };
    load(shared);
    for request in requests {
        answer(shared, &request);
    }
    reader.join().unwrap();
    if shared.has("ignore-term") {
        loop {
            sleep(Duration::from_secs(1));
        }
    }
}

fn load(shared: &Shared) {
    let exists = shared.model.is_dir();
    if !exists {
        fail_load(
            "model_not_found",
            &format!("no model at {}", shared.model.display()),
        );
    }
    if let Some(code) = shared.faults.get("load-error") {
        fail_load(code, "the load fails on purpose");
    }
    if shared.has("load-crash") {
        eprintln!("fake-runner: about to crash while loading");
        std::process::abort();
    }
    if shared.has("load-exit") {
        eprintln!("fake-runner: giving up while loading");
        exit(77);
    }
    if shared.has("load-hang") {
        freeze(shared);
    }
    let step = shared.number("slow-load").unwrap_or(0);
    for done in 0..=4_u64 {
        emit(&json!({"type": "load", "stage": "weights", "done": done * 25, "total": 100}));
        let until = Instant::now() + Duration::from_millis(step);
        while Instant::now() < until && !shared.stopping.load(Ordering::Relaxed) {
            sleep(Duration::from_millis(5));
        }
    }
    let weights = shared.number("memory").unwrap_or(1 << 20);
    emit(&json!({"type": "ready",
        "model": {"path": shared.model, "architecture": "fake", "parameters": 1, "quantization": null,
                  "context_length": 4096, "vocab_size": 256, "vision": false, "eos": [0]},
        "draft": {"active": true, "kind": "mtp", "reason": null, "max_depth": 4},
        "memory": {"weights": weights, "limit": 1_u64 << 40}, "load_duration": 1000}));
}

fn fail_load(code: &str, message: &str) -> ! {
    emit(&json!({"type": "error", "id": null, "code": code, "message": message, "retryable": false}));
    exit(1)
}

/// Stops answering anything, for ever.
fn freeze(shared: &Shared) -> ! {
    shared.frozen.store(true, Ordering::SeqCst);
    loop {
        sleep(Duration::from_secs(1));
    }
}

fn read(shared: &Shared, queue: &Sender<Value>) {
    for line in io::stdin().lock().lines() {
        let Ok(line) = line else { break };
        if line.trim().is_empty() {
            continue;
        }
        while shared.frozen.load(Ordering::SeqCst) {
            sleep(Duration::from_millis(50));
        }
        let request: Value = serde_json::from_str(&line).unwrap();
        let id = request["id"].clone();
        match request["type"].as_str().unwrap() {
            "ping" => emit(&json!({"type": "pong", "id": id})),
            "status" => {
                emit(&json!({"type": "status", "id": id, "waiting": shared.waiting.lock().unwrap().len()}))
            }
            "cache" => emit(&json!({"type": "cache", "id": id})),
            "cancel" => {
                let target = request["target"].as_str().unwrap().to_owned();
                let found = shared.waiting.lock().unwrap().contains(&target);
                shared.cancelled.lock().unwrap().insert(target.clone());
                emit(&json!({"type": "cancelled", "id": id, "target": target, "found": found}));
            }
            "shutdown" => {
                if !shared.has("ignore-term") {
                    break;
                }
            }
            "generate" | "tokenize" | "detokenize" | "render" => {
                shared
                    .waiting
                    .lock()
                    .unwrap()
                    .insert(id.as_str().unwrap().to_owned());
                queue.send(request).unwrap();
            }
            other => emit(
                &json!({"type": "error", "id": id, "code": "unknown_type", "message": other, "retryable": false}),
            ),
        }
    }
    shared.stopping.store(true, Ordering::SeqCst);
    // A wedged engine doesn't keep a runner alive whose host is gone.
    if shared.frozen.load(Ordering::SeqCst) && !shared.has("ignore-term") {
        exit(0);
    }
}

fn answer(shared: &Shared, request: &Value) {
    let id = request["id"].as_str().unwrap();
    match request["type"].as_str().unwrap() {
        "tokenize" => {
            let tokens: Vec<u32> = request["text"].as_str().unwrap().bytes().map(u32::from).collect();
            emit(&json!({"type": "tokenized", "id": id, "tokens": tokens}));
        }
        "detokenize" => emit(&json!({"type": "detokenized", "id": id, "text": "text"})),
        "render" => emit(&json!({"type": "rendered", "id": id, "prompt": request["messages"].to_string()})),
        _ => generate(shared, id, request),
    }
    shared.waiting.lock().unwrap().remove(id);
}

fn generate(shared: &Shared, id: &str, request: &Value) {
    let stopped = || shared.stopping.load(Ordering::SeqCst) || shared.cancelled.lock().unwrap().contains(id);
    if stopped() {
        return done(id, "cancelled", 0);
    }
    if shared.has("prefill-crash") {
        eprintln!("fake-runner: crashing in prefill");
        exit(3);
    }
    if let Some(code) = shared.faults.get("request-error") {
        return emit(
            &json!({"type": "error", "id": id, "code": code, "message": "on purpose", "retryable": false}),
        );
    }
    emit(&json!({"type": "prompt", "id": id, "tokens": 5, "cached": 0}));
    let count = request["options"]["num_predict"].as_u64().unwrap_or(8);
    let pause = Duration::from_millis(shared.number("slow-token").unwrap_or(0));
    for n in 0..count {
        misbehave(shared, id, n);
        if stopped() {
            return done(id, "cancelled", n);
        }
        let text = match shared.number("big-token") {
            Some(bytes) => "x".repeat(bytes as usize),
            None => format!("{}-{n} ", shared.name()),
        };
        emit(&json!({"type": "token", "id": id, "text": text, "tokens": [n]}));
        if !pause.is_zero() {
            sleep(pause);
        }
    }
    done(id, "stop", count);
}

fn done(id: &str, reason: &str, count: u64) {
    emit(
        &json!({"type": "done", "id": id, "done_reason": reason, "stop": null, "total_duration": 3000, "queue_duration": 1000,
        "prompt_eval_count": 5, "cached_count": 0, "prompt_eval_duration": 1000, "eval_count": count, "eval_duration": 1000,
        "draft": {"rounds": 0, "proposed": 0, "tested": 0, "accepted": 0, "by_position": [], "depth": {}}}),
    );
}

fn misbehave(shared: &Shared, id: &str, token: u64) {
    let due = |fault: &str| shared.number(fault) == Some(token);
    if due("token-exit") {
        eprintln!("fake-runner: internal fault at token {token}");
        exit(3);
    }
    if due("token-kill") {
        kill_self(libc::SIGKILL);
    }
    if due("token-segv") {
        kill_self(libc::SIGSEGV);
    }
    if due("hang") {
        freeze(shared);
    }
    if due("garbage") {
        let mut stdout = io::stdout().lock();
        stdout
            .write_all(b"WARNING: a library that prints\n[1,2]\n\xff\xfe\n")
            .unwrap();
        stdout.flush().unwrap();
    }
    if due("garbage-flood") {
        let mut stdout = io::stdout().lock();
        for _ in 0..100_000 {
            stdout
                .write_all(b"this is no protocol line at all, and there are many of it\n")
                .unwrap();
        }
        stdout.flush().unwrap();
    }
    if due("half-line") {
        let mut stdout = io::stdout().lock();
        write!(stdout, "{{\"type\":\"token\",\"id\":\"{id}\",\"te").unwrap();
        stdout.flush().unwrap();
        kill_self(libc::SIGKILL);
    }
    if let (0, Some(megabytes)) = (token, shared.number("flood")) {
        let noise = format!("{}\n", "flooding stderr ".repeat(8));
        let chunk = noise.repeat((1 << 20) / noise.len());
        for _ in 0..megabytes {
            io::stderr().write_all(chunk.as_bytes()).unwrap();
        }
    }
}

fn kill_self(signal: i32) -> ! {
    // SAFETY: plain integers; the signals used here end the process.
    unsafe {
        libc::signal(signal, libc::SIG_DFL);
        libc::kill(libc::getpid(), signal);
    }
    loop {
        sleep(Duration::from_secs(1));
    }
}
