//! One request's way through llama-server.
//!
//! Invariant: [`Work::generate`] always ends its request, and a cancelled one within a decode round, because its connection is
//! closed from outside.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use lookahead_protocol::event::{Detokenized, DoneReason, Failure, Rendered, Tokenized};
use lookahead_protocol::request::Input;
use lookahead_protocol::{ErrorCode, Event, Request};
use serde_json::{json, Value};
use unicode_normalization::UnicodeNormalization;

use super::answer::{Answer, Asked, Words};
use super::ask::{check, completion_body, context_of, template_body, Served};
use super::http::{Response, Server};
use super::launch::LaunchError;
use super::requests::{Job, Shared};
use crate::supervise::empty_done;

/// How long the server may take for a question that needs no generation: it answers between decodes.
const ASK_LIMIT: Duration = Duration::from_secs(60);
/// How long a broken stream waits for the news that the server is gone.
const NEWS_LIMIT: Duration = Duration::from_secs(2);

/// What a worker needs.
#[derive(Debug, Clone)]
pub(super) struct Work {
    pub(super) server: Server,
    pub(super) served: Arc<Served>,
    pub(super) shared: Arc<Shared>,
    /// The tokenizer expects composed characters, and the server doesn't compose them.
    pub(super) composes: bool,
    pub(super) vocabulary: u64,
}

impl Work {
    /// Works on a `generate` request to its end.
    pub(super) fn generate(&self, job: &Job) {
        let (id, serial) = (job.request.id.as_str(), job.serial);
        let queued = job.arrived.elapsed().as_nanos() as u64;
        let Err(error) = self.try_generate(job, queued) else {
            return;
        };
        if self.shared.is_cancelled(id, serial) {
            let done = empty_done(id, DoneReason::Cancelled, job.arrived.elapsed().as_nanos() as u64);
            return self.shared.end(id, serial, Event::Done(Box::new(done)));
        }
        if error.code == ErrorCode::Internal {
            // A server that has just died is the better explanation; this process ends then and the request with it.
            let deadline = Instant::now() + NEWS_LIMIT;
            while self.shared.has(id, serial) && Instant::now() < deadline {
                thread::sleep(Duration::from_millis(10));
            }
        }
        self.shared.end(
            id,
            serial,
            Event::Error(Failure::new(Some(id.to_owned()), error.code, error.message)),
        );
    }

    fn try_generate(&self, job: &Job, queued: u64) -> Result<(), LaunchError> {
        let (request, serial, arrived) = (&*job.request, job.serial, job.arrived);
        let id = request.id.as_str();
        if self.shared.is_cancelled(id, serial) {
            return Err(lost("the request was cancelled"));
        }
        check(request, &self.served)?;
        let ids = self.prompt_ids(&request.input)?;
        let context = context_of(request, &self.served);
        if ids.is_empty() {
            return Err(LaunchError::new(
                ErrorCode::EmptyPrompt,
                "the prompt has no token",
            ));
        }
        if ids.len() as u64 >= context {
            let message = format!("the prompt has {} tokens, the context is {context}", ids.len());
            return Err(LaunchError::new(ErrorCode::ContextExceeded, message));
        }
        let body = completion_body(request, &self.served, &ids, random_seed());
        let connected = |hangup| self.shared.connected(id, serial, hangup);
        let mut response = self
            .server
            .send("POST", "/completion", Some(&body), None, connected)
            .map_err(|error| lost(&error.to_string()))?;
        if response.status != 200 {
            return Err(refusal(response, request.format.is_some()));
        }
        let mut answer = Answer::new(Asked {
            id: id.to_owned(),
            prompt_tokens: ids.len() as u64,
            budget: body.get("n_predict").and_then(Value::as_u64).unwrap_or(0),
            stops: request.options.stop.clone(),
            progress: request.progress,
            silent: request.options.num_predict == Some(0),
        });
        let ended = loop {
            let data = match response.next_data() {
                Ok(Some(data)) => data,
                Ok(None) => break Err(lost("llama-server's answer ended before its end")),
                Err(error) => break Err(lost(&format!("llama-server's answer broke off: {error}"))),
            };
            let Ok(data) = serde_json::from_str::<Value>(&data) else {
                continue;
            };
            if let Some(error) = data.get("error") {
                break Err(from_error(error, request.format.is_some()));
            }
            if let Some(done) = answer.take(&data, self, |event| self.shared.emit_for(id, serial, event)) {
                break Ok(done);
            }
        };
        let mut done = match ended {
            Err(_) if self.shared.is_cancelled(id, serial) => {
                answer.cancelled(|event| self.shared.emit_for(id, serial, event))
            }
            other => other?,
        };
        done.queue_duration = queued;
        done.total_duration = arrived.elapsed().as_nanos() as u64;
        self.shared.end(id, serial, Event::Done(Box::new(done)));
        Ok(())
    }

    fn prompt_ids(&self, input: &Input) -> Result<Vec<u32>, LaunchError> {
        match input {
            Input::Tokens { tokens } => self.check_ids(tokens).map(|()| tokens.clone()),
            Input::Prompt { prompt, .. } => self.tokenize(prompt),
            Input::Messages {
                messages,
                tools,
                think,
            } => {
                let prompt = self.render(&template_body(messages, tools.as_deref(), *think)?)?;
                self.tokenize(&prompt)
            }
        }
    }

    fn tokenize(&self, text: &str) -> Result<Vec<u32>, LaunchError> {
        let content = if self.composes {
            text.nfc().collect()
        } else {
            text.to_owned()
        };
        let body = json!({"content": content, "add_special": true, "parse_special": true});
        let answer = self.ask("/tokenize", &body)?;
        let list = answer
            .get("tokens")
            .and_then(Value::as_array)
            .ok_or_else(|| lost("/tokenize gave no tokens"))?;
        Ok(list
            .iter()
            .filter_map(|id| u32::try_from(id.as_u64()?).ok())
            .collect())
    }

    fn detokenize(&self, ids: &[u32]) -> Result<String, LaunchError> {
        self.check_ids(ids)?;
        let answer = self.ask("/detokenize", &json!({"tokens": ids}))?;
        let text = answer.get("content").and_then(Value::as_str);
        text.map(str::to_owned)
            .ok_or_else(|| lost("/detokenize gave no text"))
    }

    /// The server answers an id that it doesn't have with an error that names none.
    fn check_ids(&self, ids: &[u32]) -> Result<(), LaunchError> {
        match ids.iter().find(|&&id| u64::from(id) >= self.vocabulary) {
            None => Ok(()),
            Some(id) => {
                let message = format!("token {id} is outside the vocabulary of {}", self.vocabulary);
                Err(LaunchError::new(ErrorCode::InvalidRequest, message))
            }
        }
    }

    fn render(&self, body: &Value) -> Result<String, LaunchError> {
        let answer = self.ask("/apply-template", body)?;
        let prompt = answer.get("prompt").and_then(Value::as_str);
        prompt
            .map(str::to_owned)
            .ok_or_else(|| lost("/apply-template gave no prompt"))
    }

    fn ask(&self, path: &str, body: &Value) -> Result<Value, LaunchError> {
        let (status, answer) = self
            .server
            .ask("POST", path, Some(body), ASK_LIMIT)
            .map_err(|error| lost(&format!("{path}: {error}")))?;
        match answer.get("error") {
            Some(error) => Err(from_error(error, false)),
            None if status != 200 => Err(lost(&format!("{path} answered with status {status}"))),
            None => Ok(answer),
        }
    }

    /// Answers `tokenize`, `detokenize` and `render`.
    pub(super) fn aside(&self, request: &Request, serial: u64) {
        let Some(id) = request.id().map(str::to_owned) else {
            return;
        };
        let result = match request {
            Request::Tokenize(it) => self.tokenize(&it.text).map(|tokens| {
                Event::Tokenized(Tokenized {
                    id: id.clone(),
                    tokens,
                })
            }),
            Request::Detokenize(it) => self
                .detokenize(&it.tokens)
                .map(|text| Event::Detokenized(Detokenized { id: id.clone(), text })),
            Request::Render(it) => template_body(&it.messages, it.tools.as_deref(), it.think)
                .and_then(|body| self.render(&body))
                .map(|prompt| {
                    Event::Rendered(Rendered {
                        id: id.clone(),
                        prompt,
                    })
                }),
            _ => return,
        };
        let event = result
            .unwrap_or_else(|error| Event::Error(Failure::new(Some(id.clone()), error.code, error.message)));
        self.shared.end(&id, serial, event);
    }
}

impl Words for Work {
    fn ids_of(&self, text: &str) -> Option<Vec<u32>> {
        self.tokenize(text).ok()
    }

    fn text_of(&self, ids: &[u32]) -> Option<String> {
        self.detokenize(ids).ok()
    }
}

fn lost(message: &str) -> LaunchError {
    LaunchError::new(ErrorCode::Internal, message)
}

fn refusal(mut response: Response, with_format: bool) -> LaunchError {
    let status = response.status;
    let text = response.text().unwrap_or_default();
    let body: Value = serde_json::from_str(&text).unwrap_or_default();
    match body.get("error") {
        Some(error) => from_error(error, with_format),
        None => lost(&format!("llama-server answered with status {status}: {text}")),
    }
}

/// The server's error as one of the protocol's.
fn from_error(error: &Value, with_format: bool) -> LaunchError {
    let text = |field: &str| error.get(field).and_then(Value::as_str).unwrap_or_default();
    let message = text("message");
    let about_format = ["schema", "grammar"]
        .iter()
        .any(|word| message.to_ascii_lowercase().contains(word));
    let code = match text("type") {
        "exceed_context_size_error" => ErrorCode::ContextExceeded,
        "invalid_request_error" | "server_error" if with_format && about_format => ErrorCode::BadFormat,
        "invalid_request_error" => ErrorCode::InvalidRequest,
        "not_supported_error" => ErrorCode::Unsupported,
        _ => ErrorCode::Internal,
    };
    LaunchError::new(code, format!("llama-server: {message}"))
}

fn random_seed() -> u32 {
    use std::hash::{BuildHasher, Hasher};
    // A fresh state's keys come from the system's randomness.
    std::collections::hash_map::RandomState::new()
        .build_hasher()
        .finish() as u32
}
