//! Transcripts: what is written is read again, other versions are refused.

use serde_json::json;

use super::*;

const HEADER: &str = r#"{"format":{"name":"lookahead-transcript","major":1,"minor":0},"program":"lookahead-runner","version":"0.1.0","model":"m","fingerprint":"f"}"#;

fn read(text: &str) -> Result<Vec<Result<Entry, TranscriptError>>, TranscriptError> {
    Ok(TranscriptReader::new(text.as_bytes())?.collect())
}

fn entry(t: u64, dir: Direction, line: &[u8]) -> Entry {
    let line = LineReader::new(line, 100)
        .next()
        .expect("one line")
        .expect("a slice doesn't fail");
    Entry {
        t,
        dir,
        line: line.into(),
    }
}

#[test]
fn what_was_written_reads_back_and_looks_as_specified() {
    let long = [b'y'; 101];
    let entries = [
        entry(0, Direction::In, br#"{"type":"ping", "id":"p"}"#),
        entry(3, Direction::Out, br#"{"type":"pong","id":"p"}"#),
        entry(4, Direction::In, b"[1, 2]"),
        entry(5, Direction::In, b"nonsense"),
        entry(6, Direction::In, b"{\"id\":\"\xff\"}"),
        entry(7, Direction::In, &long),
    ];
    let header = Header::new("lookahead-runner", "0.1.0").with_model("m", "f");
    let mut writer = TranscriptWriter::new(Vec::new(), &header).unwrap();
    for entry in entries.clone() {
        writer.write(entry).unwrap();
    }
    let text = String::from_utf8(writer.into_inner()).unwrap();
    insta::assert_snapshot!(text, @r#"
    {"format":{"name":"lookahead-transcript","major":1,"minor":0},"program":"lookahead-runner","version":"0.1.0","model":"m","fingerprint":"f"}
    {"t":0,"dir":"in","line":{"type":"ping","id":"p"}}
    {"t":3,"dir":"out","line":{"type":"pong","id":"p"}}
    {"t":4,"dir":"in","line":"[1, 2]"}
    {"t":5,"dir":"in","line":"nonsense"}
    {"t":6,"dir":"in","line":"{\"id\":\"�\"}","base64":"eyJpZCI6Iv8ifQ=="}
    {"t":7,"dir":"in","line":"","too_long":101}
    "#);
    let reader = TranscriptReader::new(text.as_bytes()).unwrap();
    assert_eq!(*reader.header(), header);
    assert_eq!(reader.collect::<Result<Vec<_>, _>>().unwrap(), entries);
}

#[test]
fn a_recorded_line_is_sent_as_it_came() {
    for line in [
        &br#"{"b":1,"a":[2]}"#[..],
        b"[1, 2]",
        b"{\"id\":\"\xff\"}",
        b" not json",
    ] {
        let mut sent = Vec::new();
        entry(0, Direction::In, line).line.write_to(&mut sent).unwrap();
        assert_eq!(sent, line);
    }
    let mut sent = Vec::new();
    Recorded::TooLong(70_000).write_to(&mut sent).unwrap();
    assert_eq!(sent.len(), 70_000);
}

#[test]
fn a_newer_minor_version_is_read_and_what_it_adds_ignored() {
    let header = json!({"format": {"name": "lookahead-transcript", "major": 1, "minor": 7, "x": 1},
        "program": "lookahead", "version": "9", "model": null, "fingerprint": null, "host": "h"});
    let entries = read(&format!(
        "{header}\n{}\n",
        r#"{"t":1.75,"dir":"out","line":"x","thread":3}"#
    ))
    .unwrap();
    let line = Recorded::Text("x".to_owned());
    assert_eq!(
        entries.into_iter().next().unwrap().unwrap(),
        Entry {
            t: 1,
            dir: Direction::Out,
            line
        }
    );
}

#[test]
fn another_major_version_is_refused_before_its_header_is_understood() {
    let error =
        read(r#"{"format":{"name":"lookahead-transcript","major":2,"minor":0},"prog":"?"}"#).unwrap_err();
    assert!(
        matches!(
            error,
            TranscriptError::OtherMajor {
                found: 2,
                supported: 1
            }
        ),
        "{error:?}"
    );
    assert_eq!(
        error.to_string(),
        "transcript has version 2, this program reads 1 only"
    );
}

#[test]
fn a_file_that_is_no_transcript_is_refused() {
    let other = HEADER.replace("lookahead-transcript", "other");
    for text in [
        "",
        "\n\n",
        "hello\n",
        "{}\n",
        "[]\n",
        r#"{"type":"ping","id":"p"}"#,
        &other,
    ] {
        let error = read(text).unwrap_err();
        assert!(
            matches!(error, TranscriptError::NotATranscript(_)),
            "{text:?}: {error:?}"
        );
    }
}

#[test]
fn a_last_line_without_an_end_is_incomplete_and_the_lines_before_it_are_read() {
    for last in [r#"{"t":2,"dir":"in","li"#, r#"{"t":2,"dir":"in","line":"b"}"#] {
        let text = format!("{HEADER}\n{}\n{last}", r#"{"t":1,"dir":"in","line":"a"}"#);
        let entries = read(&text).unwrap();
        assert_eq!(entries.len(), 2);
        assert!(entries[0].is_ok());
        assert!(
            matches!(entries[1], Err(TranscriptError::Incomplete { line: 3 })),
            "{:?}",
            entries[1]
        );
    }
    assert!(matches!(
        read(HEADER),
        Err(TranscriptError::Incomplete { line: 1 })
    ));
}

#[test]
fn a_bad_entry_is_named_by_its_line_and_ends_the_reading() {
    let good = r#"{"t":1,"dir":"in","line":"a"}"#;
    for bad in [
        "x",
        r#"{"t":-1,"dir":"in","line":"a"}"#,
        r#"{"t":1,"dir":"up","line":"a"}"#,
        r#"{"t":1,"dir":"in","line":[1]}"#,
        r#"{"t":1,"dir":"in","line":"a","base64":"?"}"#,
        r#"{"t":1,"dir":"in"}"#,
    ] {
        let entries = read(&format!("{HEADER}\n{good}\n{bad}\n{good}\n")).unwrap();
        assert_eq!(entries.len(), 2, "{bad}");
        assert!(
            matches!(entries[1], Err(TranscriptError::Malformed { line: 3, .. })),
            "{bad}: {:?}",
            entries[1]
        );
    }
}
