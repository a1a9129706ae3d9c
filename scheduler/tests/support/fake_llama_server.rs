//! A program that behaves as llama-server does towards a launcher, its traps included, and misbehaves on demand.
//!
//! It knows no model: an answer is a fixed list of pieces. Faults are lines of the file `MODEL.faults`.
#![expect(clippy::unwrap_used, reason = "a test program: a panic is a test's failure")]

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::exit;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{json, Value};

const HELP: &str = "-m -c -np -t --host --port --no-ui --offline --metrics\n--spec-type none,draft-mtp,draft-dflash\n\
    --spec-draft-n-max N --spec-draft-model FNAME\n--spec-draft-backend-sampling, --no-spec-draft-backend-sampling\n";

struct Server {
    flags: HashMap<String, String>,
    faults: HashMap<String, String>,
    key: String,
    ready_at: Instant,
    streams: AtomicU64,
    stopping: AtomicBool,
}

impl Server {
    fn number(&self, fault: &str) -> Option<u64> {
        self.faults.get(fault).map(|value| value.parse().unwrap_or(0))
    }

    fn drafting(&self) -> bool {
        self.flags.contains_key("--spec-type")
    }
}

fn fail(text: &str) -> ! {
    eprintln!("{text}");
    exit(1)
}

fn main() {
    let mut flags = HashMap::new();
    let mut arguments = std::env::args().skip(1);
    while let Some(flag) = arguments.next() {
        match flag.as_str() {
            "--help" => {
                print!("{HELP}");
                exit(0);
            }
            "--no-ui" | "--offline" | "--spec-draft-backend-sampling" => {
                flags.insert(flag, String::new());
            }
            "-m" | "--host" | "--port" | "-c" | "-np" | "-t" | "--spec-type" | "--spec-draft-n-max"
            | "--spec-draft-model" => {
                flags.insert(flag, arguments.next().unwrap_or_default());
            }
            _ => fail(&format!("error: invalid argument: {flag}")),
        }
    }
    if std::env::vars().any(|(name, _)| name.starts_with("LLAMA_ARG_")) {
        fail("error: the environment sets LLAMA_ARG_*");
    }
    let model = flags.get("-m").cloned().unwrap_or_default();
    let faults: HashMap<String, String> = std::fs::read_to_string(format!("{model}.faults"))
        .unwrap_or_default()
        .lines()
        .map(|line| line.split_once('=').unwrap_or((line, "")))
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .collect();
    if faults.contains_key("port-taken") && std::fs::File::create_new(format!("{model}.tried")).is_ok() {
        fail("0.00.001.000 E srv: couldn't bind HTTP server socket, hostname: 127.0.0.1, port: 1");
    }
    let port: u16 = flags["--port"].parse().unwrap();
    let listener = TcpListener::bind(("127.0.0.1", port)).unwrap();
    eprintln!("0.00.001.000 I srv    load_model: loading model '{model}'");
    let never = faults.keys().any(|fault| fault.starts_with("load-"));
    let delay = if never {
        1 << 30
    } else {
        faults.get("slow-load").map_or(0, |value| value.parse().unwrap())
    };
    let server = Arc::new(Server {
        key: std::env::var("LLAMA_API_KEY").unwrap_or_default(),
        ready_at: Instant::now() + Duration::from_millis(delay),
        flags,
        faults,
        streams: AtomicU64::new(0),
        stopping: AtomicBool::new(false),
    });
    let loading = Arc::clone(&server);
    thread::spawn(move || load(&loading));
    for stream in listener.incoming() {
        let server = Arc::clone(&server);
        thread::spawn(move || serve(&server, stream.unwrap()));
    }
}

/// Loads, or fails to; then waits for signals as the real one does.
fn load(server: &Arc<Server>) {
    if server.faults.contains_key("load-exit") {
        thread::sleep(Duration::from_millis(50));
        fail("0.00.010.000 E llama_model_load: unknown model architecture: 'foo'\n0.00.011.000 E srv: exiting due to model loading error");
    }
    if server.faults.contains_key("load-segv") {
        kill_self(libc::SIGSEGV);
    }
    thread::sleep(server.ready_at.saturating_duration_since(Instant::now()));
    let mut signals = signal_hook::iterator::Signals::new([libc::SIGTERM]).unwrap();
    let asked = Arc::clone(server);
    thread::spawn(move || {
        for _ in signals.forever() {
            if asked.stopping.swap(true, Ordering::SeqCst) {
                exit(1);
            }
        }
    });
    loop {
        // With a client connected it doesn't end, however long that takes.
        if server.stopping.load(Ordering::SeqCst) && server.streams.load(Ordering::SeqCst) == 0 {
            exit(0);
        }
        thread::sleep(Duration::from_millis(5));
    }
}

fn kill_self(signal: i32) -> ! {
    // SAFETY: plain integers; the signals used here end the process.
    unsafe {
        libc::signal(signal, libc::SIG_DFL);
        libc::kill(libc::getpid(), signal);
    }
    loop {
        thread::sleep(Duration::from_secs(1));
    }
}

fn serve(server: &Server, stream: TcpStream) {
    let mut reader = BufReader::new(stream.try_clone().unwrap());
    let mut first = String::new();
    if reader.read_line(&mut first).unwrap_or(0) == 0 {
        return;
    }
    let mut words = first.split(' ');
    let (_, path) = (words.next(), words.next().unwrap_or_default().to_owned());
    let (mut length, mut key) = (0, String::new());
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line).unwrap_or(0) == 0 || line.trim().is_empty() {
            break;
        }
        let (name, value) = line.split_once(':').unwrap();
        match name.to_ascii_lowercase().as_str() {
            "content-length" => length = value.trim().parse().unwrap(),
            "authorization" => key = value.trim().trim_start_matches("Bearer ").to_owned(),
            _ => {}
        }
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body).unwrap();
    let body: Value = serde_json::from_slice(&body).unwrap_or_default();
    if Instant::now() < server.ready_at {
        let message =
            json!({"error": {"message": "Loading model", "type": "unavailable_error", "code": 503}});
        return answer(stream, 503, &message);
    }
    if path != "/health" && key != server.key {
        return answer(
            stream,
            401,
            &json!({"error": {"code": 401, "message": "Invalid API Key", "type": "authentication_error"}}),
        );
    }
    route(server, stream, &path, &body);
}

fn route(server: &Server, stream: TcpStream, path: &str, body: &Value) {
    let bytes = |text: &str| text.bytes().map(u32::from).collect::<Vec<u32>>();
    match path {
        "/health" => answer(stream, 200, &json!({"status": "ok"})),
        "/props" => {
            let model = if server.faults.contains_key("wrong-model") {
                "/other.gguf"
            } else {
                server.flags["-m"].as_str()
            };
            let context: u64 = server.flags["-c"].parse().unwrap();
            answer(
                stream,
                200,
                &json!({"model_path": model, "default_generation_settings": {"n_ctx": context}}),
            );
        }
        "/v1/models" => answer(
            stream,
            200,
            &json!({"data": [{"meta": {"n_vocab": 300, "n_params": 8_900_000}}]}),
        ),
        "/slots" => answer(stream, 200, &json!([{"id": 0, "speculative": server.drafting()}])),
        "/tokenize" => answer(
            stream,
            200,
            &json!({"tokens": bytes(body["content"].as_str().unwrap())}),
        ),
        "/detokenize" => {
            let ids = body["tokens"]
                .as_array()
                .unwrap()
                .iter()
                .map(|id| id.as_u64().unwrap() as u8)
                .collect::<Vec<u8>>();
            answer(stream, 200, &json!({"content": String::from_utf8_lossy(&ids)}));
        }
        "/apply-template" => {
            let prompt: String = body["messages"]
                .as_array()
                .unwrap()
                .iter()
                .map(|message| {
                    format!(
                        "<{}>{}",
                        message["role"].as_str().unwrap(),
                        message["content"].as_str().unwrap()
                    )
                })
                .collect();
            let think = body["chat_template_kwargs"]["enable_thinking"] == true;
            answer(
                stream,
                200,
                &json!({"prompt": if think { prompt + "<think>" } else { prompt }}),
            );
        }
        "/completion" => complete(server, stream, body),
        _ => answer(
            stream,
            404,
            &json!({"error": {"code": 404, "message": "File Not Found", "type": "not_found_error"}}),
        ),
    }
}

fn answer(mut stream: TcpStream, status: u16, body: &Value) {
    let body = body.to_string();
    // A client that has gone needs no answer.
    let _ = write!(
        stream,
        "HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    );
}

fn complete(server: &Server, mut stream: TcpStream, body: &Value) {
    let prompt = body["prompt"].as_array().unwrap().len();
    if server
        .flags
        .get("--spec-draft-n-max")
        .is_some_and(|depth| depth == "0")
    {
        kill_self(libc::SIGABRT);
    }
    if body["repeat_last_n"] == -1 {
        return answer(
            stream,
            400,
            &json!({"error": {"code": 400, "message": "Error: repeat_last_n", "type": "invalid_request_error"}}),
        );
    }
    if body["json_schema"]["type"] == "nonsense" {
        return answer(
            stream,
            400,
            &json!({"error": {"code": 400, "message": "failed to parse schema", "type": "invalid_request_error"}}),
        );
    }
    server.streams.fetch_add(1, Ordering::SeqCst);
    let started = Instant::now();
    let head = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n";
    let written = stream.write_all(head.as_bytes()).is_ok()
        && stream_answer(server, &mut stream, body, prompt, started);
    if written {
        let _ = stream.write_all(b"0\r\n\r\n");
    }
    server.streams.fetch_sub(1, Ordering::SeqCst);
}

fn chunk(stream: &mut TcpStream, text: &str) -> bool {
    write!(stream, "{:x}\r\n{text}\r\n", text.len())
        .and_then(|()| stream.flush())
        .is_ok()
}

fn event(stream: &mut TcpStream, value: &Value) -> bool {
    chunk(stream, &format!("data: {value}\n\n"))
}

/// The pieces of an answer with the number of ids that each is made of: the unicorn comes as one event with its last id only.
fn piece(n: u64) -> (String, Vec<u32>) {
    match n % 4 {
        3 => (
            "\u{1f984}".to_owned(),
            "\u{1f984}".bytes().map(u32::from).collect(),
        ),
        n => (
            char::from(b'a' + n as u8).to_string(),
            vec![u32::from(b'a') + n as u32],
        ),
    }
}

/// The server's two sums over drafts, as rounds make them grow: every draft is as long as the flags and the budget allow, and of
/// each three in turn 2, none and all are accepted.
struct Drafts {
    depth: u64,
    /// Ids up to the end of the current round; the first comes from the prefill.
    round_end: u64,
    rounds: u64,
    drafted: u64,
    accepted: u64,
}

impl Drafts {
    fn new(server: &Server) -> Self {
        let depth = server
            .flags
            .get("--spec-draft-n-max")
            .map_or(3, |depth| depth.parse().unwrap());
        Self {
            depth: if server.drafting() { depth } else { 0 },
            round_end: 1,
            rounds: 0,
            drafted: 0,
            accepted: 0,
        }
    }

    /// The id with this number was generated.
    fn reach(&mut self, id: u64, wanted: u64) {
        while id > self.round_end {
            let draft = self.depth.min(wanted.saturating_sub(self.round_end + 1));
            let agreed = [2, 0, draft][self.rounds as usize % 3].min(draft);
            self.rounds += u64::from(draft > 0);
            self.drafted += draft;
            self.accepted += agreed;
            self.round_end += agreed + 1;
        }
    }
}

/// Ends of `text` that a stop string may begin in.
fn may_stop(text: &str, stops: &[&str]) -> bool {
    stops.iter().any(|stop| {
        (1..stop.len()).any(|length| stop.is_char_boundary(length) && text.ends_with(&stop[..length]))
    })
}

fn stream_answer(
    server: &Server,
    stream: &mut TcpStream,
    body: &Value,
    prompt: usize,
    started: Instant,
) -> bool {
    let pause = Duration::from_millis(server.number("slow-token").unwrap_or(0));
    let wanted = body["n_predict"].as_u64().unwrap_or(u64::MAX).max(1);
    let endless = body["ignore_eos"] == true || server.faults.contains_key("endless");
    let stops: Vec<&str> = body["stop"]
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(Value::as_str)
        .collect();
    let progress = json!({"content": "", "tokens": [0], "stop": false,
        "prompt_progress": {"total": prompt, "cache": 1, "processed": prompt, "time_ms": 1}});
    if body["return_progress"] == true && !(chunk(stream, ": ping\n\n") && event(stream, &progress)) {
        return false;
    }
    let mut drafts = Drafts::new(server);
    let timings = |predicted: u64, drafts: &Drafts| {
        let mut timings = json!({"cache_n": 1, "prompt_n": prompt - 1, "prompt_ms": 1.0, "predicted_n": predicted,
            "predicted_ms": started.elapsed().as_secs_f64() * 1e3});
        if drafts.drafted > 0 {
            timings["draft_n"] = json!(drafts.drafted);
            timings["draft_n_accepted"] = json!(drafts.accepted);
        }
        timings
    };
    // Text that was kept back because a stop string may begin in it.
    let mut unsent = String::new();
    let (mut predicted, mut n, mut kind, mut word) = (0, 0, "limit", "");
    while predicted < wanted {
        if server.number("token-kill") == Some(n) {
            kill_self(libc::SIGKILL);
        }
        if server.number("cut") == Some(n) {
            return false;
        }
        let is_end = n == 8 && !endless;
        let (text, ids) = if is_end {
            (String::new(), vec![1])
        } else {
            piece(n)
        };
        n += 1;
        predicted += ids.len() as u64;
        drafts.reach(predicted.min(wanted), wanted);
        if predicted > wanted {
            predicted = wanted;
            break;
        }
        unsent += &text;
        let found = stops.iter().find_map(|stop| Some((unsent.find(stop)?, *stop)));
        let sent = match found {
            Some((at, stop)) => {
                (kind, word) = ("word", stop);
                unsent[..at].to_owned()
            }
            None if !is_end && may_stop(&unsent, &stops) => String::new(),
            None => std::mem::take(&mut unsent),
        };
        let last = *ids.last().unwrap();
        let mut value = json!({"index": 0, "content": sent, "tokens": [last], "stop": false, "tokens_predicted": predicted});
        if body["timings_per_token"] == true {
            value["timings"] = timings(predicted, &drafts);
        }
        if body["n_probs"].as_u64().unwrap_or(0) > 0 {
            value["completion_probabilities"] = json!([{"id": last, "token": text, "bytes": text.as_bytes(), "logprob": -0.5, "top_logprobs": []}]);
        }
        if !event(stream, &value) {
            return false;
        }
        if is_end {
            kind = "eos";
        }
        if kind != "limit" {
            break;
        }
        thread::sleep(pause);
    }
    event(
        stream,
        &json!({"content": "", "tokens": [], "stop": true, "stop_type": kind, "stopping_word": word, "truncated": false,
            "tokens_evaluated": prompt, "tokens_predicted": predicted, "timings": timings(predicted, &drafts)}),
    )
}
