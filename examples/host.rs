//! A host for Lookahead in Rust, on the types of `lookahead-protocol`: one scheduler, several answers at once.
//!
//! ```text
//! cargo run --example host -- target/release/lookahead MODEL PROMPT...
//! ```

use std::collections::BTreeMap;
use std::process::{ChildStdin, Command, ExitCode, Stdio};
use std::sync::mpsc::{channel, Receiver};

use anyhow::{bail, Context};
use lookahead_protocol::event::{ProtocolVersion, Tagged};
use lookahead_protocol::request::{Forward, Generate, Input, Message, Route};
use lookahead_protocol::{Event, Line, LineReader, LineWriter, Request, SchedulerRequest};

/// What has arrived of an answer.
#[derive(Default)]
struct Answer {
    text: String,
    end: Option<Event>,
}

fn main() -> anyhow::Result<ExitCode> {
    let mut arguments = std::env::args().skip(1);
    let usage = "usage: host PROGRAM MODEL PROMPT...";
    let program = arguments.next().context(usage)?;
    let model = arguments.next().context(usage)?;
    let prompts: Vec<String> = arguments.collect();

    let mut scheduler = Command::new(program)
        .arg("serve")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .context("can't start")?;
    let stdout = scheduler.stdout.take().context("no stdout")?;
    let mut requests = LineWriter::new(scheduler.stdin.take().context("no stdin")?);
    let events = read(stdout);
    match events.recv().context("the scheduler ended at once")?.event {
        Event::Hello(hello) if ProtocolVersion::CURRENT.understands(hello.protocol) => {}
        other => bail!("unknown protocol: {other:?}"),
    }

    let answers = ask(&mut requests, &events, &model, &prompts)?;
    let mut code = ExitCode::SUCCESS;
    for answer in answers.values() {
        println!("{}", answer.text.trim());
        match &answer.end {
            Some(Event::Done(done)) => eprintln!("[{} tokens, {}]", done.eval_count, done.done_reason),
            Some(Event::Error(failure)) => {
                eprintln!("{}: {}", failure.code, failure.message);
                code = ExitCode::FAILURE;
            }
            other => bail!("the answer ended with {other:?}"),
        }
    }
    // The end of stdin means that the host is gone: all models are unloaded.
    drop(requests);
    anyhow::ensure!(scheduler.wait()?.success(), "the scheduler failed");
    Ok(code)
}

/// Reads events in a thread of its own, so that reading never waits for writing.
fn read(stdout: impl std::io::Read + Send + 'static) -> Receiver<Tagged> {
    let (sender, events) = channel();
    std::thread::spawn(move || {
        for line in LineReader::new(stdout, usize::MAX).flatten() {
            let Line::Text(text) = line else { continue };
            match Tagged::parse(&text) {
                Ok(event) => {
                    if sender.send(event).is_err() {
                        return;
                    }
                }
                Err(error) => eprintln!("{error}: {text}"),
            }
        }
    });
    events
}

/// Asks all prompts at once and waits for all answers.
fn ask(
    requests: &mut LineWriter<ChildStdin>,
    events: &Receiver<Tagged>,
    model: &str,
    prompts: &[String],
) -> anyhow::Result<BTreeMap<String, Answer>> {
    let mut answers = BTreeMap::new();
    for (number, prompt) in prompts.iter().enumerate() {
        let id = number.to_string();
        let input = Input::Messages {
            messages: vec![Message::text("user", prompt.as_str())],
            tools: None,
            think: None,
        };
        let request = Request::Generate(Box::new(Generate::new(id.as_str(), input)));
        let route = Route {
            model: Some(model.to_owned()),
            keep_alive: None,
        };
        requests.write(&SchedulerRequest::Forward(Forward { request, route }))?;
        answers.insert(id, Answer::default());
    }
    while answers.values().any(|answer| answer.end.is_none()) {
        let Tagged { event, .. } = events.recv().context("the scheduler ended before its answers")?;
        let Some(answer) = event.id().and_then(|id| answers.get_mut(id)) else {
            continue;
        };
        match event {
            Event::Token(token) => answer.text.push_str(&token.text),
            event if event.is_final() => answer.end = Some(event),
            _ => {}
        }
    }
    Ok(answers)
}
