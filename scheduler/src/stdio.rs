//! A host on the other side of stdin and stdout.
//!
//! Invariant: every line read is answered or acted on, the end of stdin or a closed stdout is the host's end and ends the
//! scheduler in order, and a host that never reads again delays that end by no more than `LAST_WORDS`.

use std::io;
use std::process::exit;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use crossbeam_channel::{bounded, Sender};
use lookahead_protocol::{Line, LineReader, LineWriter, RequestError, SchedulerRequest};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::config::Settings;
use crate::log;
use crate::outbox::{Outbox, Popped};
use crate::process;
use crate::programs::Programs;
use crate::record::Recorder;
use crate::supervise::{Connection, Input};

/// How long the last events may take to be read.
const LAST_WORDS: Duration = Duration::from_secs(5);

/// Serves the host on stdin and stdout until it is gone or asks for the end.
pub fn serve(settings: Settings, programs: Programs, recorder: Option<Recorder>) -> io::Result<()> {
    let recorder = recorder.map(Arc::new);
    let max_line_bytes = settings.max_line_bytes;
    let mut signals = Signals::new([SIGTERM, SIGINT, SIGHUP])?;
    let connection = Connection::start(settings, programs)?;

    let inputs = connection.inputs();
    thread::Builder::new().name("signals".to_owned()).spawn(move || {
        let mut asked = false;
        for signal in signals.forever() {
            if asked {
                end_now(signal);
            }
            asked = true;
            // A scheduler that has ended already is what was asked for.
            let _ = inputs.send(Input::Quit);
        }
    })?;

    let (inputs, outbox) = (connection.inputs(), Arc::clone(connection.outbox()));
    thread::Builder::new().name("stdin".to_owned()).spawn({
        let recorder = recorder.clone();
        move || read(&inputs, &outbox, max_line_bytes, recorder.as_deref())
    })?;

    let (inputs, outbox) = (connection.inputs(), Arc::clone(connection.outbox()));
    let (written, all_written) = bounded::<()>(0);
    thread::Builder::new().name("stdout".to_owned()).spawn(move || {
        write(&inputs, &outbox, recorder.as_deref());
        drop(written);
    })?;

    let result = connection.join();
    if result.is_err() {
        process::kill_all();
    }
    // Nothing is ever sent: the channel ends with the writer.
    let _ = all_written.recv_timeout(LAST_WORDS);
    log::flush(Duration::from_millis(200));
    result
}

/// Ends the process and everything that it started, at once.
pub fn end_now(signal: i32) -> ! {
    process::kill_all();
    exit(128 + signal)
}

fn read(inputs: &Sender<Input>, outbox: &Outbox, max_line_bytes: usize, recorder: Option<&Recorder>) {
    let mut lines = LineReader::new(io::stdin(), max_line_bytes);
    loop {
        outbox.wait_for_more_room();
        let input = match lines.next_line() {
            Ok(Some(line)) => {
                if let Some(recorder) = recorder {
                    recorder.input(&line);
                }
                input_of(line, max_line_bytes)
            }
            Ok(None) => Input::Quit,
            Err(error) => {
                tracing::error!("stdin can't be read: {error}");
                Input::Quit
            }
        };
        let last = matches!(input, Input::Quit);
        if inputs.send(input).is_err() || last {
            return;
        }
    }
}

/// What a line of the host means.
pub fn input_of(line: Line, max_line_bytes: usize) -> Input {
    match line {
        Line::Text(text) => match SchedulerRequest::parse(&text) {
            Ok(request) => Input::Request(Box::new(request), text.len()),
            Err(error) => Input::Refused(error),
        },
        Line::NotUtf8(bytes) => Input::Refused(RequestError::not_utf8(&bytes)),
        Line::TooLong { length } => Input::Refused(RequestError::line_too_long(length, max_line_bytes)),
    }
}

fn write(inputs: &Sender<Input>, outbox: &Outbox, recorder: Option<&Recorder>) {
    let mut lines = LineWriter::new(io::stdout());
    while let Popped::Event(event) = outbox.pop(None) {
        if let Some(recorder) = recorder {
            recorder.output(&event);
        }
        if let Err(error) = lines.write(&event) {
            tracing::warn!("the host is gone: {error}");
            // Nobody will read the rest; closing lets the readers of children go on to their ends.
            outbox.close();
            let _ = inputs.send(Input::Quit);
            return;
        }
    }
}
