//! Every message as it stands on the wire. A snapshot that changes is a change of the format: allowed within a major
//! version only where something is added to an event.
#![expect(clippy::unwrap_used, reason = "a failure is the test's")]

mod common;

use lookahead_protocol::{Event, LineWriter, Request, SchedulerRequest, Tagged};
use serde::Serialize;

fn line(value: &impl Serialize) -> String {
    let mut writer = LineWriter::new(Vec::new());
    writer.write(value).unwrap();
    let line = String::from_utf8(writer.into_inner()).unwrap();
    assert_eq!(line.matches('\n').count(), 1);
    line.trim_end().to_owned()
}

#[test]
fn requests_are_written_as_recorded_and_read_back() {
    for (name, request) in common::requests() {
        let line = line(&request);
        insta::assert_snapshot!(name, line);
        assert_eq!(Request::parse(&line), Ok(request), "{line}");
    }
}

#[test]
fn scheduler_requests_are_written_as_recorded_and_read_back() {
    for (name, request) in common::scheduler_requests() {
        let line = line(&request);
        insta::assert_snapshot!(name, line);
        assert_eq!(SchedulerRequest::parse(&line), Ok(request), "{line}");
    }
}

#[test]
fn the_scheduler_reads_every_request_of_a_runner() {
    for (_, request) in common::requests() {
        let read = SchedulerRequest::parse(line(&request)).unwrap();
        assert_eq!(line(&read), line(&request));
        assert_eq!(read.id(), request.id());
    }
}

#[test]
fn events_are_written_as_recorded_and_read_back() {
    for (name, event) in common::events() {
        let line = line(&event);
        insta::assert_snapshot!(name, line);
        if name != "token_logprobs" {
            assert_eq!(Event::parse(&line).unwrap(), event, "{line}");
        }
    }
}

#[test]
fn scheduler_events_are_written_as_recorded_and_read_back() {
    for (name, event) in common::scheduler_events() {
        let line = line(&event);
        insta::assert_snapshot!(name, line);
        assert_eq!(Tagged::parse(&line).unwrap(), event, "{line}");
    }
}
