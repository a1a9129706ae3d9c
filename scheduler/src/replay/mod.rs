//! Recorded sessions, played again.
//!
//! Invariant: inputs keep their causal order: one that was recorded after an event is only sent once that event, or as much of
//! its request, has come again. The program ends in every case.

mod compare;
mod progress;

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crossbeam_channel::{unbounded, Receiver, RecvTimeoutError};
use lookahead_protocol::transcript::{Direction, Header, Recorded, TranscriptError, TranscriptReader};
use lookahead_protocol::{Line, LineReader};
use serde_json::Value;

use crate::outbox::Object;
use crate::process;
use progress::Progress;

/// A transcript in memory.
#[derive(Debug)]
pub struct Session {
    /// Its header.
    pub header: Header,
    steps: Vec<Step>,
}

#[derive(Debug)]
enum Step {
    Input(Recorded),
    Output(Object),
}

/// Why a transcript can't be replayed.
#[derive(Debug, thiserror::Error)]
pub enum ReplayError {
    /// The file is no transcript, of another major version, or incomplete.
    #[error(transparent)]
    Transcript(#[from] TranscriptError),
    /// It was recorded with a program that isn't known.
    #[error("the transcript is of the program {0:?}, which is neither lookahead nor lookahead-runner")]
    OtherProgram(String),
    /// The model is another one.
    #[error("the transcript is of a model with fingerprint {recorded}, this one has {found}")]
    OtherModel {
        /// In the transcript.
        recorded: String,
        /// Of the model at hand.
        found: String,
    },
    /// The program can't be started.
    #[error("can't start {program}: {source}")]
    Start {
        /// The program.
        program: String,
        /// Why.
        source: std::io::Error,
    },
    /// A file can't be read or written.
    #[error("{path}: {source}")]
    File {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
}

impl Session {
    /// Reads a transcript.
    pub fn open(path: &Path) -> Result<Self, ReplayError> {
        let file = File::open(path).map_err(|source| ReplayError::File {
            path: path.to_owned(),
            source,
        })?;
        let reader = TranscriptReader::new(file)?;
        let header = reader.header().clone();
        let mut steps = Vec::new();
        for entry in reader {
            let entry = entry?;
            steps.push(match (entry.dir, entry.line) {
                (Direction::In, line) => Step::Input(line),
                (Direction::Out, Recorded::Object(event)) => Step::Output(event),
                // A program that wrote such a line broke the protocol; its events are compared all the same.
                (Direction::Out, _) => continue,
            });
        }
        Ok(Self { header, steps })
    }

    fn inputs(&self) -> Vec<Object> {
        let objects = self.steps.iter().filter_map(|step| match step {
            Step::Input(Recorded::Object(object)) => Some(object.clone()),
            _ => None,
        });
        objects.collect()
    }

    fn outputs(&self) -> Vec<Object> {
        let events = self.steps.iter().filter_map(|step| match step {
            Step::Output(event) => Some(event.clone()),
            _ => None,
        });
        events.collect()
    }

    /// Ids that some input cancels.
    fn cancelled(&self) -> BTreeSet<String> {
        let inputs = self.inputs();
        let cancels = inputs
            .iter()
            .filter(|input| input.get("type").and_then(Value::as_str) == Some("cancel"));
        cancels
            .filter_map(|input| Some(input.get("target")?.as_str()?.to_owned()))
            .collect()
    }

    /// Ids that ended as cancelled though nothing asked for it: the end of stdin did.
    fn ended_by_eof(&self) -> BTreeSet<String> {
        let cancelled = self.cancelled();
        let outputs = self.outputs();
        let ends = outputs
            .iter()
            .filter(|event| event.get("done_reason").and_then(Value::as_str) == Some("cancelled"));
        let ids = ends.filter_map(|event| Some(event.get("id")?.as_str()?.to_owned()));
        ids.filter(|id| !cancelled.contains(id)).collect()
    }
}

/// Plays a session with a program and gives the differences in words, none where there are none. The program must record to
/// `recording`, whose header tells its model. `limit` is how long it may go without an event while one is waited for.
pub fn replay(
    session: &Session,
    mut command: Command,
    recording: &Path,
    limit: Duration,
    accept_other_model: bool,
) -> Result<Vec<String>, ReplayError> {
    command.stdin(Stdio::piped()).stdout(Stdio::piped());
    process::tie_to_parent(&mut command);
    let program = command.get_program().to_string_lossy().into_owned();
    let mut child = command
        .spawn()
        .map_err(|source| ReplayError::Start { program, source })?;
    let (events, mut problems) = drive(session, &mut child, limit);
    let stopped = Instant::now();
    while child.try_wait().is_ok_and(|status| status.is_none()) {
        if stopped.elapsed() > limit {
            problems.push("the program didn't end with its input".to_owned());
            // The wait below is what matters.
            let _ = child.kill();
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    let _ = child.wait();
    if let (Some(recorded), false) = (&session.header.fingerprint, accept_other_model) {
        let found = Session::open(recording)
            .ok()
            .and_then(|it| it.header.fingerprint)
            .unwrap_or_default();
        if !recorded.is_empty() && !found.is_empty() && *recorded != found {
            return Err(ReplayError::OtherModel {
                recorded: recorded.clone(),
                found,
            });
        }
    }
    let (inputs, outputs) = (session.inputs(), session.outputs());
    let (then, now) = (
        compare::unfinished(&inputs, &outputs),
        compare::unfinished(&inputs, &events),
    );
    for id in then.symmetric_difference(&now) {
        let when = if then.contains(id) {
            "then, but not now"
        } else {
            "now, but not then"
        };
        problems.push(format!("request {id:?} never ended {when}"));
    }
    problems.extend(compare::compare(&outputs, &events, &session.cancelled()));
    Ok(problems)
}

/// Sends the inputs and collects the events until the program's end.
fn drive(session: &Session, child: &mut Child, limit: Duration) -> (Vec<Object>, Vec<String>) {
    let (mut events, mut problems) = (Vec::new(), Vec::new());
    let mut now = Progress::default();
    let (Some(stdin), Some(stdout)) = (child.stdin.take(), child.stdout.take()) else {
        return (events, vec!["the program has no pipes".to_owned()]);
    };
    let mut stdin = BufWriter::new(stdin);
    let (sender, received) = unbounded();
    let reader = std::thread::spawn(move || {
        for line in LineReader::new(stdout, usize::MAX).flatten() {
            let Line::Text(text) = line else { continue };
            if let Ok(Value::Object(event)) = serde_json::from_str(&text) {
                if sender.send(event).is_err() {
                    return;
                }
            }
        }
    });
    let by_eof = session.ended_by_eof();
    let mut goal = Progress::default();
    let mut open = true;
    for (at, step) in session.steps.iter().enumerate() {
        match step {
            Step::Output(event) => {
                let ends_at_eof = event
                    .get("id")
                    .and_then(Value::as_str)
                    .is_some_and(|id| by_eof.contains(id));
                if ends_at_eof && progress::is_final(event) {
                    // Here the recorded host went away.
                    break;
                }
                goal.count(event);
            }
            Step::Input(line) => {
                if let Err(problem) = catch_up(&received, &mut events, &mut now, &goal, limit) {
                    problems.push(format!("line {} was never due: {problem}", at + 2));
                    open = false;
                    break;
                }
                let sent = line
                    .write_to(&mut stdin)
                    .and_then(|()| stdin.write_all(b"\n"))
                    .and_then(|()| stdin.flush());
                if sent.is_err() {
                    problems.push(format!("the program ended before line {}", at + 2));
                    open = false;
                    break;
                }
            }
        }
    }
    if open {
        // A program that ends by itself here has crashed, as the recorded one may have too: the comparison tells.
        let _ = catch_up(&received, &mut events, &mut now, &goal, limit);
    }
    drop(stdin);
    while let Ok(event) = received.recv_timeout(limit) {
        events.push(event);
    }
    drop(received);
    // A reader that still waits for a program that doesn't end is let go.
    if reader.is_finished() {
        let _ = reader.join();
    }
    (events, problems)
}

fn catch_up(
    received: &Receiver<Object>,
    events: &mut Vec<Object>,
    now: &mut Progress,
    goal: &Progress,
    limit: Duration,
) -> Result<(), String> {
    while let Some(lack) = now.lacks(goal) {
        match received.recv_timeout(limit) {
            Ok(event) => {
                now.count(&event);
                events.push(event);
            }
            Err(RecvTimeoutError::Timeout) => return Err(format!("it waited for {lack}")),
            Err(RecvTimeoutError::Disconnected) => return Err(format!("the program ended without {lack}")),
        }
    }
    Ok(())
}
