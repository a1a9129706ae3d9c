//! What a model's process says and how it ends.
//!
//! Invariant: an event is passed on only for a request that this process has, with nothing changed but the model added and the
//! time of waiting here counted in; after a process's end none of its requests is left open.

use std::time::Instant;

use lookahead_protocol::event::{
    Backend, CacheReply, Failure, Hello, Loaded, Phase, ProtocolVersion, Ready, Unloaded,
};
use lookahead_protocol::request::CacheAction;
use lookahead_protocol::{ErrorCode, Event};
use serde_json::Value;

use super::model::{Child, Stage, Why};
use super::{Active, Kind, Own, Supervisor};
use crate::outbox::Object;
use crate::process::{self, Output};

/// Output of a child that is no protocol line, in bytes: more than this is no accident.
const NOISE_LIMIT: usize = 1 << 20;

impl Supervisor {
    pub(super) fn on_child(&mut self, key: &str, number: u64, output: Output) {
        let Some(child) = self.child(key).filter(|child| child.number == number) else {
            return;
        };
        child.heard = Instant::now();
        child.pinged = None;
        match output {
            Output::Event(event) => self.on_event(key, event),
            Output::Noise(bytes, start) => self.on_noise(key, bytes, &start),
            Output::Exited => {
                self.stirred = true;
                self.on_exit(key);
            }
        }
    }

    pub(super) fn child(&mut self, key: &str) -> Option<&mut Child> {
        self.models.get_mut(key)?.child.as_mut()
    }

    fn on_noise(&mut self, key: &str, bytes: usize, start: &str) {
        tracing::warn!("{key}: not a protocol line on stdout: {start:?}");
        let Some(child) = self.child(key) else { return };
        child.noise += bytes;
        if child.noise > NOISE_LIMIT {
            let message = format!(
                "runner of {key:?} wrote {} bytes that are no protocol lines to its stdout",
                child.noise
            );
            self.stop(key, Why::Fault(ErrorCode::RunnerCrashed, message));
        }
    }

    fn on_event(&mut self, key: &str, event: Object) {
        let kind = event.get("type").and_then(Value::as_str).unwrap_or_default();
        let id = event.get("id").and_then(Value::as_str).map(str::to_owned);
        match (kind, id) {
            ("hello", _) => self.on_hello(key, event),
            ("load", _) => self.on_progress(key, event),
            ("ready", _) => self.on_ready(key, event),
            ("error", None) => self.on_own_error(key, event),
            (_, Some(id)) => match self.own.remove(&id) {
                Some(own) => self.on_own_answer(&own, event),
                None => self.pass_on(key, &id, event),
            },
            (kind, None) => tracing::debug!("{key}: {kind} event without an id"),
        }
    }

    fn on_hello(&mut self, key: &str, event: Object) {
        let Ok(hello) = serde_json::from_value::<Hello>(Value::Object(event)) else {
            let message = format!("runner of {key:?} sent a hello that can't be read");
            return self.stop(key, Why::Fault(ErrorCode::RunnerCrashed, message));
        };
        if !ProtocolVersion::CURRENT.understands(hello.protocol) {
            let message = format!(
                "runner of {key:?} speaks protocol {}, this scheduler needs major version {}",
                hello.protocol,
                ProtocolVersion::CURRENT.major
            );
            return self.stop(key, Why::Fault(ErrorCode::Unsupported, message));
        }
        if let Some(child) = self.child(key) {
            child.backend = hello.backend;
        }
    }

    fn on_progress(&mut self, key: &str, event: Object) {
        let Some(model) = self.models.get_mut(key) else {
            return;
        };
        let name = model.name.clone();
        if let Some(Child {
            stage: Stage::Loading { at },
            since,
            ..
        }) = &mut model.child
        {
            let stage = event
                .get("stage")
                .and_then(Value::as_str)
                .unwrap_or_default()
                .to_owned();
            let done = event.get("done").and_then(Value::as_u64).unwrap_or(0);
            if at.as_ref() != Some(&(stage.clone(), done)) {
                *at = Some((stage, done));
                // The load's deadline counts from here.
                *since = Instant::now();
                self.stirred = true;
            }
        }
        self.push(event, &name);
    }

    fn on_ready(&mut self, key: &str, event: Object) {
        let ready = match serde_json::from_value::<Ready>(Value::Object(event)) {
            Ok(ready) => ready,
            Err(error) => {
                let message = format!("runner of {key:?} sent a ready that can't be read: {error}");
                return self.stop(key, Why::Fault(ErrorCode::RunnerCrashed, message));
            }
        };
        self.stirred = true;
        let Some(model) = self.models.get_mut(key) else {
            return;
        };
        let Some(child) = model
            .child
            .as_mut()
            .filter(|child| matches!(child.stage, Stage::Loading { .. }))
        else {
            return;
        };
        tracing::info!("{key}: ready, process {}", child.process.pid());
        child.since = Instant::now();
        model.measured = Some(ready.memory.weights);
        model.failure = None;
        model.preload = None;
        if self.settings.memory_budget.is_none() && child.backend == Some(Backend::Cuda) {
            // The models lie in the device's memory, and only a process that has the device knows its size.
            self.budget = ready.memory.limit;
        }
        let loaded = Loaded {
            id: String::new(),
            info: Some(ready.model.clone()),
            draft: Some(ready.draft.clone()),
            memory: Some(ready.memory),
            load_duration: ready.load_duration,
        };
        child.stage = Stage::Ready(Box::new(ready));
        let waiting: Vec<String> = model.loads.drain(..).map(|(id, _)| id).collect();
        for id in waiting {
            let Some(active) = self.requests.remove(&id) else {
                continue;
            };
            self.emit(
                Event::Loaded(Box::new(Loaded { id, ..loaded.clone() })),
                Some(&active.name),
            );
        }
    }

    /// An error that belongs to no request: while loading it is the load's.
    fn on_own_error(&mut self, key: &str, event: Object) {
        let text = |field: &str| {
            event
                .get(field)
                .and_then(Value::as_str)
                .unwrap_or_default()
                .to_owned()
        };
        let (code, message) = (ErrorCode::from(text("code").as_str()), text("message"));
        let retryable = event
            .get("retryable")
            .and_then(Value::as_bool)
            .unwrap_or(code.retryable());
        let Some(model) = self.models.get_mut(key) else {
            return;
        };
        let name = model.name.clone();
        match &mut model.child {
            Some(child) if matches!(child.stage, Stage::Loading { .. }) => {
                child.load_error = Some((code, message, retryable));
            }
            _ => {
                tracing::warn!("{key}: {code}: {message}");
                self.push(event, &name);
            }
        }
    }

    /// The answer to a question of the scheduler's own.
    fn on_own_answer(&mut self, own: &Own, mut event: Object) {
        let Some(host) = &own.host else { return };
        let Some(active) = self.requests.get(host) else {
            return;
        };
        if active.kind == Kind::AskAll {
            let figure = |field: &str| event.get(field).and_then(Value::as_u64).unwrap_or(0);
            return self.count_answer(host, figure("nodes"), figure("bytes"));
        }
        let Some(active) = self.requests.remove(host) else {
            return;
        };
        event.insert("id".to_owned(), Value::from(host.as_str()));
        self.push(event, &active.name);
    }

    /// Counts one process's answer to a `cache` request to all.
    pub(super) fn count_answer(&mut self, host: &str, nodes: u64, bytes: u64) {
        let Some(asked) = self.asked_all.get_mut(host) else {
            return;
        };
        asked.open -= 1;
        asked.nodes += nodes;
        asked.bytes += bytes;
        if asked.open == 0 {
            let (nodes, bytes) = (asked.nodes, asked.bytes);
            self.asked_all.remove(host);
            self.requests.remove(host);
            let reply = CacheReply {
                id: host.to_owned(),
                action: CacheAction::Clear,
                nodes,
                bytes,
            };
            self.emit(Event::Cache(reply), None);
        }
    }

    fn pass_on(&mut self, key: &str, id: &str, mut event: Object) {
        let Some(active) = self
            .requests
            .get_mut(id)
            .filter(|active| active.key == key && active.sent.is_some())
        else {
            tracing::debug!("{key}: event for {id:?}, which it doesn't have");
            return;
        };
        active.follow(&event);
        let name = active.name.clone();
        if !is_final(&event) {
            return self.push(event, &name);
        }
        self.stirred = true;
        let waited = active.sent.map_or(0, |sent| {
            sent.saturating_duration_since(active.arrived).as_nanos() as u64
        });
        for field in ["total_duration", "queue_duration"] {
            if let Some(own) = event.get(field).and_then(Value::as_u64) {
                event.insert(field.to_owned(), Value::from(own.saturating_add(waited)));
            }
        }
        if active.kind == Kind::Generate {
            match event.get("done_reason").and_then(Value::as_str) {
                Some("cancelled") => self.counts.cancelled += 1,
                Some(_) => self.counts.completed += 1,
                None => self.counts.failed += 1,
            }
        }
        self.requests.remove(id);
        if let Some(model) = self.models.get_mut(key) {
            model.running.retain(|running| running != id);
            model.last_used = Some(Instant::now());
            model.crashes.forget();
        }
        self.push(event, &name);
    }

    fn push(&self, mut event: Object, model: &str) {
        event.insert("model".to_owned(), Value::from(model));
        self.outbox.push(event);
    }

    fn on_exit(&mut self, key: &str) {
        let Some(model) = self.models.get_mut(key) else {
            return;
        };
        let Some(child) = model.child.take() else { return };
        let tail = child.process.stderr_tail();
        let (pid, status) = (child.process.pid(), child.process.reap());
        let ending = match &status {
            Ok(status) => process::describe(*status),
            Err(error) => format!("ended, and its status can't be read: {error}"),
        };
        let failed_load = child.load_error;
        model.drain_before = None;
        let asked_to = match &child.stage {
            Stage::Stopping(stop) => Some(stop.why.clone()),
            _ => None,
        };
        let clean = matches!(&status, Ok(status) if status.success());
        match asked_to {
            Some(Why::Idle | Why::Asked) => {
                tracing::info!("{key}: process {pid} {ending}");
                for id in std::mem::take(&mut model.running) {
                    self.end_cancelled(&id);
                }
            }
            Some(Why::Fault(code, message)) => {
                model.crashes.count(Instant::now());
                self.fail_all(key, &code, &message, code.retryable());
            }
            None if failed_load.is_some() => {
                if let Some((code, message, retryable)) = failed_load {
                    self.fail_all(key, &code, &message, retryable);
                }
            }
            // It was asked to end by someone else and did so properly: what waits here is served by the next process.
            None if clean && model.running.is_empty() && matches!(child.stage, Stage::Ready(_)) => {
                tracing::warn!("{key}: process {pid} was ended from outside");
            }
            None => {
                model.crashes.count(Instant::now());
                let message = crash_message(&model.name, &ending, &tail);
                self.fail_all(key, &ErrorCode::RunnerCrashed, &message, true);
            }
        }
        self.settle_questions(key, &ending);
        self.answer_unloads(key);
    }

    /// Ends everything that a model has with an error; with nothing to end, the error stands alone.
    pub(super) fn fail_all(&mut self, key: &str, code: &ErrorCode, message: &str, retryable: bool) {
        tracing::error!("{key}: {code}: {message}");
        let Some(model) = self.models.get_mut(key) else {
            return;
        };
        let name = model.name.clone();
        model.failure = Some(message.to_owned());
        model.preload = None;
        let mut ids = std::mem::take(&mut model.running);
        ids.extend(model.loads.drain(..).map(|(id, _)| id));
        for queued in model.queue.drain(..) {
            self.queued_bytes -= queued.bytes;
            ids.push(queued.id);
        }
        if ids.is_empty() {
            let mut failure = Failure::new(None, code.clone(), message);
            failure.retryable = retryable;
            self.emit(Event::Error(failure), Some(&name));
        }
        for id in ids {
            self.end_failed(&id, code, message, retryable);
        }
    }

    /// Answers the questions that an ended process can't answer any more.
    fn settle_questions(&mut self, key: &str, ending: &str) {
        let lost: Vec<String> = self
            .own
            .iter()
            .filter(|(_, own)| own.key == key)
            .map(|(id, _)| id.clone())
            .collect();
        for id in lost {
            let Some(host) = self.own.remove(&id).and_then(|own| own.host) else {
                continue;
            };
            if self.asked_all.contains_key(&host) {
                self.count_answer(&host, 0, 0);
            } else {
                let message = format!("the model's runner {ending}");
                self.end_failed(&host, &ErrorCode::RunnerCrashed, &message, true);
            }
        }
    }

    fn answer_unloads(&mut self, key: &str) {
        let Some(model) = self.models.get_mut(key) else {
            return;
        };
        for id in std::mem::take(&mut model.unloads) {
            let Some(active) = self.requests.remove(&id) else {
                continue;
            };
            self.emit(Event::Unloaded(Unloaded { id, found: true }), Some(&active.name));
        }
    }

    /// At the very end: whatever is still open ends as cancelled.
    pub(super) fn end_leftovers(&mut self) {
        let ids: Vec<String> = self.requests.keys().cloned().collect();
        for id in ids {
            self.end_cancelled(&id);
        }
    }
}

impl Active {
    /// Keeps what `status` says about the request level with its events.
    fn follow(&mut self, event: &Object) {
        let figure = |field: &str| event.get(field).and_then(Value::as_u64).unwrap_or(0);
        match event.get("type").and_then(Value::as_str) {
            Some("prompt") => {
                (self.prompt_tokens, self.cached) = (figure("tokens"), figure("cached"));
                self.prefilled = self.cached;
                self.phase = Phase::Prefill;
            }
            Some("prefill") => self.prefilled = figure("done"),
            Some("token") => {
                self.phase = Phase::Decode;
                self.prefilled = self.prompt_tokens;
                self.generated += event
                    .get("tokens")
                    .and_then(Value::as_array)
                    .map_or(0, |ids| ids.len() as u64);
            }
            _ => {}
        }
    }
}

/// Whether a request's id is free again after this event.
fn is_final(event: &Object) -> bool {
    match event.get("type").and_then(Value::as_str) {
        Some("error") => event.get("duplicate").and_then(Value::as_bool) != Some(true),
        Some("done" | "tokenized" | "detokenized" | "rendered") => true,
        _ => false,
    }
}

fn crash_message(name: &str, ending: &str, tail: &str) -> String {
    if tail.is_empty() {
        format!("the runner of {name:?} {ending}; it wrote nothing to stderr")
    } else {
        format!("the runner of {name:?} {ending}; the end of its stderr:\n{tail}")
    }
}
