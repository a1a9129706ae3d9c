//! A scheduler of our own for one person's command: start it, ask it, follow one request to its end.
//!
//! Invariant: the first Ctrl-C cancels what is running, the second ends the program; in both cases no process is left behind.

use std::io::{IsTerminal, Write};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::Context;
use indicatif::{ProgressBar, ProgressStyle};
use lookahead_protocol::event::{Done, Failure};
use lookahead_protocol::request::Cancel;
use lookahead_protocol::SchedulerRequest;
use lookahead_scheduler::config::Settings;
use lookahead_scheduler::outbox::{Object, Popped};
use lookahead_scheduler::programs::Programs;
use lookahead_scheduler::stdio::end_now;
use lookahead_scheduler::supervise::{Connection, Input};
use serde_json::Value;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

/// How a followed request ended.
#[derive(Debug)]
pub(crate) enum Ending {
    /// With its `done` event.
    Done(Box<Done>),
    /// With its `error` event.
    Failed(Failure),
    /// With the answer to a request that isn't a generation.
    Answer,
}

/// A scheduler in this process.
pub(crate) struct Session {
    connection: Connection,
    /// The request that Ctrl-C cancels.
    current: Arc<Mutex<Option<String>>>,
    interrupted: Arc<AtomicU64>,
    last_id: u64,
    bar: Option<ProgressBar>,
}

impl Session {
    /// Starts the scheduler.
    pub(crate) fn start(settings: Settings) -> anyhow::Result<Self> {
        let programs =
            Programs::find(settings.runner.as_deref()).context("can't find this program's own executable")?;
        let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP])?;
        let connection = Connection::start(settings, programs)?;
        let current: Arc<Mutex<Option<String>>> = Arc::default();
        let interrupted = Arc::new(AtomicU64::new(0));
        let (inputs, shared, count) = (
            connection.inputs(),
            Arc::clone(&current),
            Arc::clone(&interrupted),
        );
        std::thread::Builder::new()
            .name("signals".to_owned())
            .spawn(move || {
                for signal in signals.forever() {
                    let running = shared.lock().unwrap_or_else(PoisonError::into_inner).take();
                    count.fetch_add(1, Ordering::SeqCst);
                    match running {
                        Some(target) if signal == SIGINT => {
                            let cancel = Cancel {
                                id: format!("cancel {target}"),
                                target,
                            };
                            // A scheduler that has ended has nothing left to cancel.
                            let _ =
                                inputs.send(Input::Request(Box::new(SchedulerRequest::Cancel(cancel)), 0));
                        }
                        _ => end_now(signal),
                    }
                }
            })?;
        Ok(Self {
            connection,
            current,
            interrupted,
            last_id: 0,
            bar: None,
        })
    }

    /// An id for the next request.
    pub(crate) fn next_id(&mut self) -> String {
        self.last_id += 1;
        format!("{}", self.last_id)
    }

    /// How often Ctrl-C was pressed so far.
    pub(crate) fn interruptions(&self) -> u64 {
        self.interrupted.load(Ordering::SeqCst)
    }

    /// Sends a request and hands its events to `each` until its end. Loads are shown as a progress bar on a terminal.
    pub(crate) fn follow(
        &mut self,
        request: &Value,
        mut each: impl FnMut(&Object) -> std::io::Result<()>,
    ) -> anyhow::Result<Ending> {
        let id = request
            .get("id")
            .and_then(Value::as_str)
            .unwrap_or_default()
            .to_owned();
        let parsed =
            SchedulerRequest::parse(request.to_string()).map_err(|error| anyhow::anyhow!(error.message))?;
        *self.current.lock().unwrap_or_else(PoisonError::into_inner) = Some(id.clone());
        anyhow::ensure!(self.connection.request(parsed), "the scheduler has ended");
        let mut reader_is_gone = false;
        let ending = loop {
            let event = match self.connection.outbox().pop(None) {
                Popped::Event(event) => event,
                Popped::Empty => continue,
                Popped::Closed => anyhow::bail!("the scheduler ended before the request"),
            };
            self.show_load(&event);
            if !reader_is_gone && each(&event).is_err() {
                reader_is_gone = true;
                let cancel = Cancel {
                    id: format!("cancel {id}"),
                    target: id.clone(),
                };
                self.connection.request(SchedulerRequest::Cancel(cancel));
            }
            if event.get("id").and_then(Value::as_str) == Some(&id) {
                if let Some(ending) = ending_of(event)? {
                    break ending;
                }
            }
        };
        self.hide_load();
        *self.current.lock().unwrap_or_else(PoisonError::into_inner) = None;
        Ok(ending)
    }

    fn show_load(&mut self, event: &Object) {
        let kind = event.get("type").and_then(Value::as_str);
        if kind != Some("load") {
            if event.contains_key("id") {
                self.hide_load();
            }
            return;
        }
        if !std::io::stderr().is_terminal() {
            return;
        }
        let figure = |field: &str| event.get(field).and_then(Value::as_u64).unwrap_or(0);
        let stage = event.get("stage").and_then(Value::as_str).unwrap_or_default();
        // Weights are counted in bytes, the first runs of the kernels by themselves.
        let template = match stage {
            "weights" => "loading {msg} {bar:40} {bytes}/{total_bytes} {eta}",
            _ => "loading {msg} {bar:40} {pos}/{len} {eta}",
        };
        let bar = self.bar.get_or_insert_with(|| ProgressBar::new(figure("total")));
        if bar.message() != stage {
            if let Ok(style) = ProgressStyle::with_template(template) {
                bar.set_style(style);
            }
            bar.set_message(stage.to_owned());
        }
        bar.set_length(figure("total"));
        bar.set_position(figure("done"));
    }

    fn hide_load(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
    }

    /// Unloads everything and ends.
    pub(crate) fn end(self) -> anyhow::Result<()> {
        self.connection.quit();
        // The last events are nobody's; taking them lets the readers of children reach their ends.
        while !matches!(
            self.connection.outbox().pop(Some(Duration::from_secs(60))),
            Popped::Closed | Popped::Empty
        ) {}
        self.connection.join().context("the scheduler failed")
    }
}

fn ending_of(event: Object) -> anyhow::Result<Option<Ending>> {
    let kind = event
        .get("type")
        .and_then(Value::as_str)
        .unwrap_or_default()
        .to_owned();
    let value = |event: Object| Value::Object(event);
    Ok(match kind.as_str() {
        "prompt" | "prefill" | "token" => None,
        "done" => Some(Ending::Done(
            serde_json::from_value(value(event)).context("the runner's `done` can't be read")?,
        )),
        "error" if event.get("duplicate").and_then(Value::as_bool) == Some(true) => None,
        "error" => Some(Ending::Failed(
            serde_json::from_value(value(event)).context("an error that can't be read")?,
        )),
        _ => Some(Ending::Answer),
    })
}

/// Writes and flushes, so that text appears as it is made.
pub(crate) fn print_now(text: &str) -> std::io::Result<()> {
    let mut stdout = std::io::stdout().lock();
    stdout.write_all(text.as_bytes())?;
    stdout.flush()
}

/// One line about a finished generation.
pub(crate) fn statistics(done: &Done) -> String {
    let per_second = |count: u64, nanoseconds: u64| match nanoseconds {
        0 => "-".to_owned(),
        nanoseconds => format!("{:.1}", count as f64 * 1e9 / nanoseconds as f64),
    };
    let evaluated = done.prompt_eval_count.saturating_sub(done.cached_count);
    let mut line = format!(
        "prompt {} tokens ({} cached), {} tokens/s; answer {} tokens, {} tokens/s",
        done.prompt_eval_count,
        done.cached_count,
        per_second(evaluated, done.prompt_eval_duration),
        done.eval_count,
        per_second(done.eval_count, done.eval_duration),
    );
    if done.draft.proposed > 0 {
        let share = 100.0 * done.draft.accepted as f64 / done.draft.proposed as f64;
        line += &format!(
            "; drafts {} of {} accepted ({share:.0} %)",
            done.draft.accepted, done.draft.proposed
        );
    }
    line += &format!(
        "; {:.2} s; {}",
        done.total_duration as f64 / 1e9,
        done.done_reason
    );
    line
}
