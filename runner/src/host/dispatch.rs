//! Lines from stdin to whoever serves them.
//!
//! Invariant: whatever needs no engine is answered at once, also while the engine computes; a bad line is answered and the
//! next one is read. Text work has a thread of its own, so a long prompt being tokenised delays no `ping`.

use std::io::Read;
use std::sync::Arc;
use std::time::Instant;

use crossbeam_channel::{unbounded, Receiver, Sender};
use lookahead_protocol::event::{CacheReply, Cancelled, Detokenized, Failure, Pong, Rendered, Tokenized};
use lookahead_protocol::{ErrorCode, Event, Line, LineReader, Request, RequestError};

use super::latch::Reason;
use super::record::Recorder;
use super::registry::{Found, Held};
use super::{cli, spawn, Host};
use crate::engine::job::Refusal;
use crate::engine::prepare::{prepare, rendered, Incoming};
use crate::engine::text::{Awaited, TextStack};
use crate::engine::{cancelled_before_start, Command};
use crate::text::{Bos, Specials};

/// Starts the `stdin`, `prepare` and `text` threads.
pub(super) fn start(
    host: &Host,
    text: &Arc<Awaited<TextStack>>,
    commands: Sender<Command>,
    args: &cli::Args,
    recorder: Option<Arc<Recorder>>,
) -> std::io::Result<()> {
    let (to_prepare, incoming) = unbounded();
    let (to_text, text_work) = unbounded();
    {
        let (host, text, commands) = (host.clone(), Arc::clone(text), commands.clone());
        spawn("prepare", move || prepare_all(&host, &text, &commands, &incoming))?;
    }
    {
        let (host, text) = (host.clone(), Arc::clone(text));
        spawn("text", move || text_all(&host, &text, &text_work))?;
    }
    let reader = Reader {
        host: host.clone(),
        to_prepare,
        to_text,
        commands,
        queue: args.max_queue as usize,
        limit: args.max_line_bytes,
        recorder,
    };
    spawn("stdin", move || reader.run(std::io::stdin()))?;
    Ok(())
}

fn prepare_all(
    host: &Host,
    text: &Awaited<TextStack>,
    commands: &Sender<Command>,
    incoming: &Receiver<Held<Incoming>>,
) {
    for held in incoming {
        let text = text.get();
        // The final event of a request that was cancelled went out with the cancellation.
        let Some(request) = held.take() else { continue };
        let id = request.request.id.clone();
        let Some(text) = text else {
            host.finish(&id, host.unserved(&id, Some(request.arrived)));
            continue;
        };
        let flag = request.cancel.clone();
        let finish = |event| {
            if host.registry.end_own(&id, &flag) {
                host.outbox.push(event);
            }
        };
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| prepare(&text, request)));
        match result {
            Ok(Ok(job)) => {
                // A closed channel means that the engine has ended; what is outstanding then is answered on the way out.
                let _ = commands.send(Command::Run(flag.hold(Box::new(job))));
            }
            Ok(Err(refusal)) => {
                host.board.update(|figures| figures.requests.failed += 1);
                finish(Event::Error(refusal.failure(&id)));
            }
            Err(_) => {
                let refusal = Refusal::new(ErrorCode::Internal, "preparing the request panicked");
                finish(Event::Error(refusal.failure(&id)));
            }
        }
    }
}

fn text_all(host: &Host, text: &Awaited<TextStack>, work: &Receiver<Request>) {
    for request in work {
        let Some(id) = request.id().map(str::to_owned) else {
            continue;
        };
        let Some(text) = text.get() else {
            let ended = || {
                Refusal::new(
                    ErrorCode::Internal,
                    "the runner ended before the model was loaded",
                )
            };
            let refusal = host.load_failure().cloned().unwrap_or_else(ended);
            host.finish(&id, Event::Error(refusal.failure(&id)));
            continue;
        };
        let answer = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| text_request(&text, request)))
            .unwrap_or_else(|_| Err(Refusal::new(ErrorCode::Internal, "the text thread panicked")));
        host.finish(
            &id,
            answer.unwrap_or_else(|refusal| Event::Error(refusal.failure(&id))),
        );
    }
}

fn text_request(text: &TextStack, request: Request) -> Result<Event, Refusal> {
    let invalid = |error: crate::text::TextError| Refusal::new(ErrorCode::InvalidRequest, error.to_string());
    Ok(match request {
        Request::Tokenize(r) => {
            let tokens = text.tokenizer.encode(&r.text, Bos::ByRule).map_err(invalid)?;
            Event::Tokenized(Tokenized { id: r.id, tokens })
        }
        Request::Detokenize(r) => {
            let decoded = text
                .tokenizer
                .decode(&r.tokens, Specials::Shown)
                .map_err(invalid)?;
            Event::Detokenized(Detokenized {
                id: r.id,
                text: decoded,
            })
        }
        Request::Render(r) => Event::Rendered(Rendered {
            prompt: rendered(text, &r)?,
            id: r.id,
        }),
        other => {
            let message = format!("`{}` is no text request", other.kind());
            return Err(Refusal::new(ErrorCode::Internal, message));
        }
    })
}

struct Reader {
    host: Host,
    to_prepare: Sender<Held<Incoming>>,
    to_text: Sender<Request>,
    commands: Sender<Command>,
    queue: usize,
    limit: usize,
    recorder: Option<Arc<Recorder>>,
}

impl Reader {
    fn run(self, input: impl Read) {
        let mut lines = LineReader::new(input, self.limit);
        while !self.host.latch.is_set() {
            self.host.outbox.wait_for_room(&self.host.latch);
            match lines.next_line() {
                Ok(Some(line)) => {
                    if let Some(recorder) = &self.recorder {
                        recorder.input(&line);
                    }
                    self.line(line);
                }
                Ok(None) => break,
                Err(error) => {
                    tracing::error!("reading requests failed: {error}");
                    break;
                }
            }
        }
        self.host.latch.trip(Reason::EndOfInput);
    }

    fn line(&self, line: Line) {
        let parsed = match line {
            Line::Text(text) => Request::parse(&text),
            Line::NotUtf8(bytes) => Err(RequestError::not_utf8(&bytes)),
            Line::TooLong { length } => Err(RequestError::line_too_long(length, self.limit)),
        };
        match parsed {
            Ok(request) => self.request(request),
            Err(error) => {
                // The failure must not end a running request that has the same id.
                let mut event = Event::from(error);
                if let Event::Error(failure) = &mut event {
                    let busy = failure
                        .id
                        .as_deref()
                        .is_some_and(|id| self.host.registry.is_busy(id));
                    failure.duplicate |= busy;
                }
                self.host.outbox.push(event);
            }
        }
    }

    fn request(&self, request: Request) {
        let Some(id) = request.id().map(str::to_owned) else {
            self.host.latch.trip(Reason::Request);
            return;
        };
        let generates = matches!(request, Request::Generate(_));
        // One request runs; the limit is on those behind it.
        if generates && self.host.registry.generating() > self.queue && !self.host.registry.is_busy(&id) {
            let message = format!("{} requests wait already, the limit of the queue", self.queue);
            self.host.outbox.push(Event::Error(Failure::new(
                Some(id),
                ErrorCode::QueueFull,
                message,
            )));
            return;
        }
        let Some(cancel) = self.host.registry.begin(&id, generates) else {
            self.host.outbox.push(Event::Error(Failure::duplicate_id(id)));
            return;
        };
        let answer = match request {
            Request::Generate(request) => {
                let flag = cancel.clone();
                let _ = self.to_prepare.send(flag.hold(Incoming {
                    request,
                    arrived: Instant::now(),
                    cancel,
                }));
                return;
            }
            Request::Tokenize(_) | Request::Detokenize(_) | Request::Render(_) => {
                let _ = self.to_text.send(request);
                return;
            }
            Request::Cancel(r) => {
                let found = self.host.registry.cancel(&r.target);
                let target = r.target.clone();
                let known = found != Found::Nothing;
                self.host.finish(
                    &id,
                    Event::Cancelled(Cancelled {
                        id: r.id,
                        found: known,
                        target: r.target,
                    }),
                );
                if let Found::Waiting(arrived) = found {
                    self.host.board.update(|figures| figures.requests.cancelled += 1);
                    let done = cancelled_before_start(&target, Some(arrived));
                    self.host.outbox.push(Event::Done(Box::new(done)));
                }
                return;
            }
            Request::Ping(r) => Event::Pong(Pong { id: r.id }),
            Request::Status(r) => {
                let generating = self.host.registry.generating();
                Event::Status(Box::new(self.host.board.status(
                    &r.id,
                    generating,
                    self.host.latch.is_set(),
                )))
            }
            Request::Cache(r) => {
                let held = self.host.board.cache().unwrap_or_default();
                let _ = self.commands.send(Command::ClearCache);
                Event::Cache(CacheReply {
                    id: r.id,
                    action: r.action,
                    nodes: held.nodes,
                    bytes: held.device.bytes + held.host.bytes + held.disk.bytes,
                })
            }
            Request::Shutdown => return,
        };
        self.host.finish(&id, answer);
    }
}
