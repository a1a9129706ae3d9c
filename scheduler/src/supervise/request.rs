//! What a host asks for.
//!
//! Invariant: `ping`, `status`, `list` and `cancel` are answered at once from the scheduler's own state, whatever the models
//! are doing; everything else is recorded under its id until its final event.

use std::time::Instant;

use lookahead_protocol::event::{
    CacheReply, Cancelled, DoneReason, Failure, Loaded, Models, Pong, Ready, Unloaded,
};
use lookahead_protocol::request::{CacheRequest, Cancel, Forward, LoadModel, StatusRequest, UnloadModel};
use lookahead_protocol::{ErrorCode, Event, Request, SchedulerRequest};

use super::lifecycle::keep_alive_of;
use super::model::{Model, Queued, Stage, Why};
use super::{Active, AskedAll, Kind, Own, Supervisor};
use crate::catalog::{self, LookupError};

/// Spellings of models that are remembered; there is no end to the ways of writing a path.
const REMEMBERED_NAMES: usize = 1000;
/// Bytes of request lines that may wait in the scheduler altogether.
const QUEUED_BYTES: usize = 512 << 20;

impl Supervisor {
    pub(super) fn on_request(&mut self, request: SchedulerRequest, bytes: usize) {
        if let Some(id) = request.id() {
            if self.requests.contains_key(id) || self.own.contains_key(id) {
                let id = id.to_owned();
                return self.emit(Event::Error(Failure::duplicate_id(id)), None);
            }
        }
        match request {
            SchedulerRequest::Ping(ping) => self.emit(Event::Pong(Pong { id: ping.id }), None),
            SchedulerRequest::List(list) => {
                let models = self.model_entries();
                self.emit(Event::Models(Models { id: list.id, models }), None);
            }
            SchedulerRequest::Status(status) => self.on_status(status),
            SchedulerRequest::Cancel(cancel) => self.on_cancel(cancel),
            SchedulerRequest::Cache(cache) => self.on_cache(cache),
            SchedulerRequest::Shutdown => self.quit(),
            SchedulerRequest::Load(load) => self.on_load(load),
            SchedulerRequest::Unload(unload) => self.on_unload(unload),
            SchedulerRequest::Forward(forward) => self.on_forward(forward, bytes),
        }
        self.stirred = true;
    }

    fn on_forward(&mut self, forward: Forward, bytes: usize) {
        let Some(id) = forward.request.id().map(str::to_owned) else {
            return;
        };
        let Some(name) = forward
            .route
            .model
            .clone()
            .or_else(|| self.settings.default_model.clone())
        else {
            let message = "the request names no model, and the scheduler has no default one".to_owned();
            return self.fail_new(Some(id), None, ErrorCode::NoModel, message);
        };
        if self.quitting {
            return self.fail_new(
                Some(id),
                Some(&name),
                ErrorCode::QueueFull,
                "the scheduler is ending".to_owned(),
            );
        }
        let key = match self.resolve(&name) {
            Ok(key) => key,
            Err(error) => return self.refuse_lookup(id, &name, &error),
        };
        let kind = if matches!(forward.request, Request::Generate(_)) {
            Kind::Generate
        } else {
            Kind::Simple
        };
        let ticket = self.number();
        let limit = self.settings.queue_limit;
        let queued_bytes = self.queued_bytes;
        let Some(model) = self.models.get_mut(&key) else {
            return;
        };
        if model.pending() >= limit || queued_bytes + bytes > QUEUED_BYTES {
            let message = format!(
                "model {name:?} has {} requests waiting or running, the limit is {limit}",
                model.pending()
            );
            return self.fail_new(Some(id), Some(&name), ErrorCode::QueueFull, message);
        }
        if let Some(keep_alive) = forward.route.keep_alive {
            model.keep_alive = keep_alive;
        }
        model.queue.push_back(Queued {
            id: id.clone(),
            request: forward.request,
            ticket,
            bytes,
        });
        self.queued_bytes += bytes;
        self.requests.insert(id, Active::new(key, name, kind));
    }

    /// Finds the model that `name` means, making an entry for it where there is none.
    fn resolve(&mut self, name: &str) -> Result<String, LookupError> {
        if let Some(key) = self.names.get(name) {
            return Ok(key.clone());
        }
        let spec = catalog::find(&self.settings, name)?;
        let key = spec.key.clone();
        let keep_alive = keep_alive_of(spec.keep_alive.unwrap_or(self.settings.keep_alive));
        if self.names.len() >= REMEMBERED_NAMES {
            self.names.clear();
        }
        self.names.insert(name.to_owned(), key.clone());
        self.models
            .entry(key.clone())
            .or_insert_with(|| Model::new(spec, name.to_owned(), keep_alive));
        Ok(key)
    }

    fn refuse_lookup(&mut self, id: String, name: &str, error: &LookupError) {
        let code = match error {
            LookupError::Unknown { .. } => ErrorCode::NoModel,
            LookupError::Missing { .. } => ErrorCode::ModelNotFound,
        };
        self.fail_new(Some(id), Some(name), code, error.to_string());
    }

    /// Loads the models that the configuration or the command line marks for it.
    pub(super) fn preload(&mut self) {
        let configured = self
            .settings
            .models
            .iter()
            .filter(|(_, model)| model.preload)
            .map(|(name, _)| name.clone());
        let names: Vec<String> = configured.chain(self.settings.preload.iter().cloned()).collect();
        for name in names {
            match self.resolve(&name) {
                Ok(key) => {
                    let ticket = self.number();
                    if let Some(model) = self.models.get_mut(&key) {
                        model.preload = Some(ticket);
                    }
                }
                Err(error) => self.fail_new(None, Some(&name), ErrorCode::ModelNotFound, error.to_string()),
            }
        }
    }

    fn on_load(&mut self, load: LoadModel) {
        if self.quitting {
            return self.fail_new(
                Some(load.id),
                Some(&load.model),
                ErrorCode::QueueFull,
                "the scheduler is ending".to_owned(),
            );
        }
        let key = match self.resolve(&load.model) {
            Ok(key) => key,
            Err(error) => return self.refuse_lookup(load.id, &load.model, &error),
        };
        let ticket = self.number();
        let Some(model) = self.models.get_mut(&key) else {
            return;
        };
        if let Some(keep_alive) = load.keep_alive {
            model.keep_alive = keep_alive;
        }
        if let Some(ready) = model.ready() {
            let loaded = Loaded {
                id: load.id,
                info: Some(ready.model.clone()),
                draft: Some(ready.draft.clone()),
                memory: Some(ready.memory),
                load_duration: 0,
            };
            model.last_used = Some(Instant::now());
            return self.emit(Event::Loaded(Box::new(loaded)), Some(&load.model));
        }
        if model.pending() >= self.settings.queue_limit {
            let message = format!("model {:?} has too many requests waiting", load.model);
            return self.fail_new(Some(load.id), Some(&load.model), ErrorCode::QueueFull, message);
        }
        model.loads.push((load.id.clone(), ticket));
        self.requests
            .insert(load.id, Active::new(key, load.model, Kind::Load));
    }

    fn on_unload(&mut self, unload: UnloadModel) {
        let key = match self.resolve(&unload.model) {
            Ok(key) => key,
            Err(error) => return self.refuse_lookup(unload.id, &unload.model, &error),
        };
        self.cancel_waiting(&key);
        let Some(model) = self.models.get_mut(&key) else {
            return;
        };
        if model.child.is_none() {
            let event = Event::Unloaded(Unloaded {
                id: unload.id,
                found: false,
            });
            return self.emit(event, Some(&unload.model));
        }
        model.unloads.push(unload.id.clone());
        self.requests
            .insert(unload.id, Active::new(key.clone(), unload.model, Kind::Unload));
        self.stop(&key, Why::Asked);
    }

    /// Ends as cancelled what waits for a model.
    pub(super) fn cancel_waiting(&mut self, key: &str) {
        let Some(model) = self.models.get_mut(key) else {
            return;
        };
        let mut ids: Vec<String> = model.loads.drain(..).map(|(id, _)| id).collect();
        model.preload = None;
        for queued in model.queue.drain(..) {
            self.queued_bytes -= queued.bytes;
            ids.push(queued.id);
        }
        for id in ids {
            self.end_cancelled(&id);
        }
    }

    fn on_cancel(&mut self, cancel: Cancel) {
        let Cancel { id, target } = cancel;
        let active = self
            .requests
            .get(&target)
            .map(|active| (active.key.clone(), active.kind, active.sent.is_some()));
        let found = matches!(
            active,
            Some((_, Kind::Generate | Kind::Load, _)) | Some((_, Kind::Simple, false))
        );
        let name = self
            .requests
            .get(&target)
            .filter(|_| found)
            .map(|active| active.name.clone());
        self.emit(
            Event::Cancelled(Cancelled {
                id,
                target: target.clone(),
                found,
            }),
            name.as_deref(),
        );
        let Some((key, _, sent)) = active.filter(|_| found) else {
            return;
        };
        if sent {
            let own = self.own_id();
            self.tell(
                &key,
                Request::Cancel(Cancel {
                    id: own.clone(),
                    target,
                }),
            );
            self.own.insert(own, Own { key, host: None });
            return;
        }
        if let Some(model) = self.models.get_mut(&key) {
            model.loads.retain(|(id, _)| *id != target);
            if let Some(at) = model.queue.iter().position(|queued| queued.id == target) {
                self.queued_bytes -= model.queue.remove(at).map_or(0, |queued| queued.bytes);
            }
        }
        self.end_cancelled(&target);
    }

    fn on_status(&mut self, status: StatusRequest) {
        let Some(name) = status.model else {
            let event = Event::Status(Box::new(self.status(status.id)));
            return self.emit(event, None);
        };
        self.ask_one(status.id, name, |id| {
            Request::Status(StatusRequest { id, model: None })
        });
    }

    fn on_cache(&mut self, cache: CacheRequest) {
        let action = cache.action;
        let request = |id| {
            Request::Cache(CacheRequest {
                id,
                action,
                model: None,
            })
        };
        if let Some(name) = cache.model {
            return self.ask_one(cache.id, name, request);
        }
        let ready: Vec<String> = self
            .models
            .iter()
            .filter(|(_, model)| model.is_ready())
            .map(|(key, _)| key.clone())
            .collect();
        if ready.is_empty() {
            return self.emit(
                Event::Cache(CacheReply {
                    id: cache.id,
                    action,
                    nodes: 0,
                    bytes: 0,
                }),
                None,
            );
        }
        self.asked_all.insert(
            cache.id.clone(),
            AskedAll {
                open: ready.len(),
                ..AskedAll::default()
            },
        );
        self.requests.insert(
            cache.id.clone(),
            Active::new(String::new(), String::new(), Kind::AskAll),
        );
        for key in ready {
            let own = self.own_id();
            self.tell(&key, request(own.clone()));
            self.own.insert(
                own,
                Own {
                    key,
                    host: Some(cache.id.clone()),
                },
            );
        }
    }

    /// Passes a question on to the process of one model, which answers it between its other work.
    fn ask_one(&mut self, id: String, name: String, request: impl FnOnce(String) -> Request) {
        let key = match self.resolve(&name) {
            Ok(key) => key,
            Err(error) => return self.refuse_lookup(id, &name, &error),
        };
        if !self.models.get(&key).is_some_and(Model::is_ready) {
            return self.fail_new(
                Some(id),
                Some(&name),
                ErrorCode::NoModel,
                format!("model {name:?} is not loaded"),
            );
        }
        let own = self.own_id();
        self.tell(&key, request(own.clone()));
        self.own.insert(
            own,
            Own {
                key: key.clone(),
                host: Some(id.clone()),
            },
        );
        self.requests.insert(id, Active::new(key, name, Kind::Ask));
    }

    /// Sends a request to a model's process.
    pub(super) fn tell(&mut self, key: &str, request: Request) {
        if let Some(child) = self.models.get(key).and_then(|model| model.child.as_ref()) {
            child.process.send(request);
        }
    }

    /// The host is gone or wants the end.
    pub(super) fn quit(&mut self) {
        if self.quitting {
            return;
        }
        self.quitting = true;
        self.stirred = true;
        let keys: Vec<String> = self.models.keys().cloned().collect();
        for key in keys {
            self.cancel_waiting(&key);
            if self.models.get(&key).is_some_and(|model| model.child.is_some()) {
                self.stop(&key, Why::Asked);
            }
        }
    }

    /// Ends a request as cancelled that no process has, or whose process can't say so any more.
    pub(super) fn end_cancelled(&mut self, id: &str) {
        let Some(active) = self.requests.remove(id) else {
            return;
        };
        if active.kind == Kind::Generate {
            self.counts.cancelled += 1;
        }
        let lived = active.arrived.elapsed().as_nanos() as u64;
        let mut done = super::report::empty_done(id, DoneReason::Cancelled, lived);
        if let Some(sent) = active.sent {
            // Its process can't say any more what it came to, but what was passed on is known.
            done.queue_duration = sent.saturating_duration_since(active.arrived).as_nanos() as u64;
            done.prompt_eval_count = active.prompt_tokens;
            done.cached_count = active.cached;
            done.eval_count = active.generated;
        }
        self.emit(Event::Done(Box::new(done)), Some(&active.name));
    }
}

impl Model {
    pub(super) fn ready(&self) -> Option<&Ready> {
        match &self.child.as_ref()?.stage {
            Stage::Ready(ready) => Some(ready),
            _ => None,
        }
    }
}
