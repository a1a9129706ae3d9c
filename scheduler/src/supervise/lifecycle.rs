//! Starting, feeding, watching and stopping processes.
//!
//! Invariant: [`Supervisor::advance`] looks at every model and does whatever is due, so that it may be called at any time and
//! as often as one likes; it returns when something will be due next. Models are considered in the order of their oldest
//! request, so that none waits for ever.

use std::process::Command;
use std::time::{Duration, Instant};

use lookahead_protocol::request::{KeepAlive, Ping};
use lookahead_protocol::{ErrorCode, Request};

use super::model::{Child, Estimate, Model, Stage, Step, Stop, Why};
use super::{Input, Kind, Own, Supervisor};
use crate::catalog::Kind as ModelKind;
use crate::estimate;
use crate::memory::show_size;
use crate::placement::{plan, Plan, Resident};
use crate::process::ChildProcess;

/// The configuration's seconds as a duration; negative means for ever.
pub(super) fn keep_alive_of(seconds: i64) -> KeepAlive {
    u64::try_from(seconds).map_or(KeepAlive::Forever, |seconds| {
        KeepAlive::For(Duration::from_secs(seconds))
    })
}

/// The next moment at which something is due.
#[derive(Debug, Default)]
struct Alarm(Option<Instant>);

impl Alarm {
    fn at(&mut self, time: Instant) {
        self.0 = Some(self.0.map_or(time, |earlier| earlier.min(time)));
    }
}

impl Supervisor {
    /// Does what is due and says when to come back at the latest.
    pub(super) fn advance(&mut self, now: Instant) -> Option<Instant> {
        let mut alarm = Alarm::default();
        self.place(now, &mut alarm);
        let keys: Vec<String> = self.models.keys().cloned().collect();
        for key in &keys {
            self.hand_out(key, now);
            self.rest(key, now, &mut alarm);
            self.watch(key, now, &mut alarm);
            self.go_on_stopping(key, now, &mut alarm);
        }
        alarm.0
    }

    /// Starts models that something waits for, oldest first, making room where it is needed.
    fn place(&mut self, now: Instant, alarm: &mut Alarm) {
        for model in self.models.values_mut() {
            model.drain_before = None;
        }
        if self.quitting {
            return;
        }
        let mut waiting: Vec<(u64, String)> = self
            .models
            .iter()
            .filter(|(_, model)| model.child.is_none())
            .filter_map(|(key, model)| Some((model.oldest_demand()?, key.clone())))
            .collect();
        waiting.sort();
        for (ticket, key) in waiting {
            let Some(model) = self.models.get_mut(&key) else {
                continue;
            };
            if let Some(retry_at) = model.crashes.retry_at.filter(|&at| at > now) {
                alarm.at(retry_at);
                continue;
            }
            let Some(need) = model.bytes() else {
                if model.estimate == Estimate::Unknown {
                    model.estimate = Estimate::Asked;
                    self.ask_estimate(&key);
                }
                continue;
            };
            if !self.make_room(&key, ticket, need, now, alarm) {
                // A younger model that happens to fit must not take the room that is being made for this one.
                break;
            }
        }
        self.shrink(now);
    }

    /// Starts the model if it fits, else sees to it that it will; true if no room has to be made for it any more.
    fn make_room(&mut self, key: &str, ticket: u64, need: u64, now: Instant, alarm: &mut Alarm) -> bool {
        let residents = self.residents(ticket, now);
        match plan(need, self.budget, &residents, now, self.settings.quantum) {
            Plan::Admit => {
                self.start(key, now);
                true
            }
            Plan::TooLarge => {
                let message = format!(
                    "model {key:?} needs {}, and all models together may take {}; raise the memory budget to load it",
                    show_size(need),
                    show_size(self.budget)
                );
                self.fail_all(key, &ErrorCode::OutOfMemory, &message, false);
                true
            }
            Plan::Evict(keys) => {
                for victim in keys {
                    tracing::info!("{victim}: unloaded to make room for {key}");
                    self.stop(&victim, Why::Idle);
                }
                false
            }
            Plan::Drain(keys) => {
                for victim in keys {
                    if let Some(model) = self.models.get_mut(&victim) {
                        model.drain_before = Some(ticket);
                    }
                }
                false
            }
            Plan::Wait(until) => {
                if let Some(until) = until {
                    alarm.at(until);
                }
                false
            }
        }
    }

    fn residents(&self, ticket: u64, now: Instant) -> Vec<Resident> {
        self.models
            .values()
            .filter_map(|model| model.resident(ticket, now, self.settings.quantum))
            .collect()
    }

    /// Unloads idle models where a process turned out to need more than was thought. The latest used one stays.
    fn shrink(&mut self, now: Instant) {
        let mut residents = self.residents(u64::MAX, now);
        let Some(latest) = residents
            .iter()
            .enumerate()
            .max_by_key(|(_, it)| it.last_used)
            .map(|(at, _)| at)
        else {
            return;
        };
        let latest = residents.swap_remove(latest);
        let Some(budget) = self.budget.checked_sub(latest.bytes) else {
            return;
        };
        if let Plan::Evict(keys) = plan(0, budget, &residents, now, self.settings.quantum) {
            for victim in keys {
                if self.models.get(&victim).is_none_or(|model| model.pending() > 0) {
                    continue;
                }
                tracing::info!("{victim}: unloaded, the models together exceed the memory budget");
                self.stop(&victim, Why::Idle);
            }
        }
    }

    fn ask_estimate(&mut self, key: &str) {
        let Some(model) = self.models.get(key) else { return };
        let (spec, runner) = (model.spec.clone(), self.programs.runner.clone());
        let (inputs, key) = (self.inputs.clone(), key.to_owned());
        let asked = std::thread::Builder::new()
            .name("estimate".to_owned())
            .spawn(move || {
                let bytes = estimate::memory_of(&spec, &runner);
                // The scheduler may have ended meanwhile, and then nobody wants to know.
                let _ = inputs.send(Input::Estimated { key: spec.key, bytes });
            });
        if let Err(error) = asked {
            self.fail_all(
                &key,
                &ErrorCode::Internal,
                &format!("can't start a thread: {error}"),
                true,
            );
        }
    }

    pub(super) fn on_estimate(&mut self, key: &str, bytes: u64) {
        self.stirred = true;
        if let Some(model) = self.models.get_mut(key) {
            model.estimate = Estimate::Known(bytes);
        }
    }

    fn command(&self, model: &Model) -> Command {
        let mut command = match model.spec.kind {
            ModelKind::Mlx => Command::new(&self.programs.runner),
            ModelKind::Gguf => {
                let mut command = Command::new(&self.programs.bridge);
                command.arg("gguf");
                if let Some(server) = &self.settings.llama_server {
                    command.arg("--llama-server").arg(server);
                }
                command
            }
        };
        command
            .arg("--model")
            .arg(&model.spec.path)
            .args(&model.spec.args)
            .envs(&model.spec.env);
        command
    }

    fn start(&mut self, key: &str, now: Instant) {
        let number = self.number();
        let Some(model) = self.models.get(key) else { return };
        let command = self.command(model);
        let program = command.get_program().to_string_lossy().into_owned();
        let (inputs, sink_key) = (self.inputs.clone(), key.to_owned());
        let sink = move |output| {
            // The scheduler's thread outlives every child that it started.
            let _ = inputs.send(Input::Child {
                key: sink_key.clone(),
                number,
                output,
            });
        };
        let started = ChildProcess::spawn(
            command,
            &model.name,
            self.settings.relay_stderr,
            &self.outbox,
            sink,
        );
        let Some(model) = self.models.get_mut(key) else {
            return;
        };
        match started {
            Ok(process) => {
                tracing::info!("{key}: started process {}", process.pid());
                model.failure = None;
                model.child = Some(Child {
                    number,
                    process,
                    stage: Stage::Loading { at: None },
                    since: now,
                    heard: now,
                    pinged: None,
                    noise: 0,
                    backend: None,
                    load_error: None,
                });
            }
            Err(error) => {
                model.crashes.count(now);
                let message = format!(
                    "the runner of {:?} could not be started: {program}: {error}",
                    model.name
                );
                self.fail_all(key, &ErrorCode::RunnerCrashed, &message, true);
            }
        }
    }

    /// Hands waiting requests to a ready process, as many as it may have at once.
    fn hand_out(&mut self, key: &str, now: Instant) {
        let window = self.settings.window;
        let Some(model) = self.models.get_mut(key).filter(|model| model.is_ready()) else {
            return;
        };
        let Some(child) = &model.child else { return };
        while model.running.len() < window {
            let due = model
                .queue
                .front()
                .is_some_and(|next| model.drain_before.is_none_or(|before| next.ticket < before));
            let Some(next) = due.then(|| model.queue.pop_front()).flatten() else {
                break;
            };
            self.queued_bytes -= next.bytes;
            if let Some(active) = self.requests.get_mut(&next.id) {
                active.sent = Some(now);
            }
            model.running.push(next.id);
            child.process.send(next.request);
        }
    }

    /// Unloads a model that has had nothing to do for its time.
    fn rest(&mut self, key: &str, now: Instant, alarm: &mut Alarm) {
        match self.models.get(key).and_then(Model::idle_deadline) {
            Some(deadline) if deadline <= now => {
                tracing::info!("{key}: idle, unloaded");
                self.stop(key, Why::Idle);
            }
            Some(deadline) => alarm.at(deadline),
            None => {}
        }
    }

    /// Ends a process that makes no progress in loading, or gives no sign of life while it has requests.
    fn watch(&mut self, key: &str, now: Instant, alarm: &mut Alarm) {
        let (load_timeout, stall_timeout) = (self.settings.load_timeout, self.settings.stall_timeout);
        let host_is_behind = self.outbox.is_full();
        let Some(model) = self.models.get_mut(key) else {
            return;
        };
        let busy = !model.running.is_empty()
            || self
                .requests
                .values()
                .any(|it| it.key == key && it.kind == Kind::Ask);
        let Some(child) = &mut model.child else { return };
        match &child.stage {
            Stage::Loading { .. } => {
                let deadline = child.since + load_timeout;
                if host_is_behind {
                    // Its progress isn't read while the host doesn't read.
                    child.since = now;
                    alarm.at(now + load_timeout);
                } else if deadline <= now {
                    let message = format!(
                        "the runner of {:?} made no progress in loading for {:.1} s; the end of its stderr:\n{}",
                        model.name,
                        load_timeout.as_secs_f64(),
                        child.process.stderr_tail()
                    );
                    self.stop(key, Why::Fault(ErrorCode::RunnerStalled, message));
                } else {
                    alarm.at(deadline);
                }
            }
            Stage::Ready(_) if host_is_behind => {
                child.heard = now;
                child.pinged = None;
                alarm.at(now + stall_timeout);
            }
            Stage::Ready(_) if busy => match child.pinged.map(|pinged| pinged + stall_timeout) {
                Some(deadline) if deadline <= now => {
                    let message = format!(
                        "the runner of {:?} gave no sign of life for {:.1} s; the end of its stderr:\n{}",
                        model.name,
                        now.saturating_duration_since(child.heard).as_secs_f64(),
                        child.process.stderr_tail()
                    );
                    self.stop(key, Why::Fault(ErrorCode::RunnerStalled, message));
                }
                Some(deadline) => alarm.at(deadline),
                None => {
                    let ping_at = child.heard + stall_timeout / 4;
                    if ping_at <= now {
                        child.pinged = Some(now);
                        alarm.at(now + stall_timeout);
                        let id = self.own_id();
                        self.own.insert(
                            id.clone(),
                            Own {
                                key: key.to_owned(),
                                host: None,
                            },
                        );
                        self.tell(key, Request::Ping(Ping { id }));
                    } else {
                        alarm.at(ping_at);
                    }
                }
            },
            Stage::Ready(_) => {
                child.pinged = None;
                child.heard = now;
            }
            Stage::Stopping(_) => {}
        }
    }

    /// Begins to stop a model's process; a reason that is already being acted on stays, unless the new one is a fault.
    pub(super) fn stop(&mut self, key: &str, why: Why) {
        let grace = self.settings.stop_grace;
        let Some(child) = self.child(key) else { return };
        let now = Instant::now();
        let faulty = matches!(why, Why::Fault(..));
        if let Stage::Stopping(stop) = &mut child.stage {
            if stop.why == Why::Idle || (faulty && stop.why != Why::Asked) {
                stop.why = why;
            }
            return;
        }
        // A process that misbehaves gets no request to end that it wouldn't read.
        let step = if faulty { Step::Term } else { Step::Shutdown };
        child.take_step(step);
        child.stage = Stage::Stopping(Stop {
            why,
            step,
            next: now + grace,
        });
        self.stirred = true;
    }

    fn go_on_stopping(&mut self, key: &str, now: Instant, alarm: &mut Alarm) {
        let grace = self.settings.stop_grace;
        let Some(child) = self.child(key) else { return };
        let Stage::Stopping(stop) = &mut child.stage else {
            return;
        };
        if stop.next > now {
            return alarm.at(stop.next);
        }
        let Some(step) = stop.step.next() else { return };
        stop.step = step;
        stop.next = now + grace;
        if step < Step::Kill {
            alarm.at(stop.next);
        }
        tracing::debug!("{key}: process {} is still there, {step:?}", child.process.pid());
        child.take_step(step);
    }
}

impl Child {
    fn take_step(&mut self, step: Step) {
        match step {
            Step::Shutdown => {
                self.process.send(Request::Shutdown);
            }
            Step::Eof => self.process.close_input(),
            Step::Term => self.process.signal(libc::SIGTERM),
            Step::Kill => self.process.signal(libc::SIGKILL),
        }
    }
}
