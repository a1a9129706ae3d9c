//! The examples in the crate's documentation are valid, and are exactly what this crate writes for them.

use lookahead_protocol::{Event, SchedulerRequest, Tagged};
use serde_json::Value;

fn examples() -> Vec<&'static str> {
    let mut inside = false;
    let mut examples = Vec::new();
    for line in include_str!("../src/lib.rs").lines() {
        let line = line.strip_prefix("//! ").unwrap_or(line);
        match (inside, line) {
            (false, "```json") => inside = true,
            (true, "```") => inside = false,
            (true, example) => examples.push(example),
            (false, _) => {}
        }
    }
    examples
}

#[test]
fn every_example_in_the_documentation_reads_and_writes_back_the_same() {
    let examples = examples();
    assert!(examples.len() > 40, "found {} examples", examples.len());
    for example in examples {
        let written = match SchedulerRequest::parse(example) {
            Ok(request) => serde_json::to_value(request),
            Err(as_request) => match Tagged::parse(example) {
                Ok(Tagged {
                    event: Event::Unknown(_),
                    ..
                }) => panic!("{example}: {as_request}"),
                Ok(event) => serde_json::to_value(event),
                Err(as_event) => panic!("{example}: {as_request}; {as_event}"),
            },
        };
        let example: Value = serde_json::from_str(example).unwrap();
        assert_eq!(written.unwrap(), example);
    }
}
