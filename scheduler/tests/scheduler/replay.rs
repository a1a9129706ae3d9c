//! Sessions recorded and played again.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::json;

use crate::host::{example, lookahead, Setup};

/// Records a session with concurrency, cancels, errors and a crash, and gives the folder's path and the transcript.
fn record(folder: &Path) -> PathBuf {
    let transcript = folder.join("session.jsonl");
    let mut setup = Setup::new()
        .argument("--record")
        .argument(transcript.to_str().unwrap());
    for (name, faults) in [
        ("a", "slow-token=3"),
        ("b", "slow-token=3"),
        ("c", "token-kill=2"),
    ] {
        fs::create_dir(folder.join(name)).unwrap();
        fs::write(folder.join(name).join("faults"), faults).unwrap();
        setup = setup.argument(folder.join(name).to_str().unwrap());
    }
    let mut host = setup.start();
    let path = |name: &str| folder.join(name).to_str().unwrap().to_owned();
    let generate = |id: &str, model: &str, count: u64| json!({"type": "generate", "id": id, "model": path(model), "prompt": "x", "options": {"num_predict": count}});
    host.send(generate("1", "a", 30));
    host.send(generate("2", "b", 500));
    host.send(generate("3", "c", 10));
    host.send(json!({"type": "generate", "id": "4", "model": "nobody", "prompt": "x"}));
    host.send(json!({"type": "nonsense", "id": "5"}));
    for _ in 0..5 {
        host.wait(|event| event["id"] == "2" && event["type"] == "token");
    }
    host.send(json!({"type": "cancel", "id": "6", "target": "2"}));
    host.end_of("1");
    host.end_of("2");
    host.end_of("3");
    host.send(json!({"type": "tokenize", "id": "7", "model": path("a"), "text": "hi"}));
    host.end_of("7");
    host.send(json!({"type": "status", "id": "8"}));
    host.end_of("8");
    host.send(generate("9", "a", 100_000));
    host.wait(|event| event["id"] == "9" && event["type"] == "token");
    // The end of stdin cancels the last one.
    let (status, _) = host.finish();
    assert!(status.success());
    transcript
}

fn replay(transcript: &Path, arguments: &[&str]) -> Output {
    Command::new(lookahead())
        .arg("replay")
        .arg(transcript)
        .args(arguments)
        .env("LOOKAHEAD_RUNNER", example("fake-runner"))
        .output()
        .unwrap()
}

#[track_caller]
fn assert_exit(output: &Output, code: i32, words: &str) {
    let text = format!(
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    assert_eq!(output.status.code(), Some(code), "{text}");
    assert!(text.contains(words), "{text}");
}

#[test]
fn a_session_with_cancels_errors_and_a_crash_replays_as_the_same_on_slower_and_faster_machines() {
    let folder = tempfile::tempdir().unwrap();
    let transcript = record(folder.path());
    assert_exit(&replay(&transcript, &[]), 0, "same");
    for speed in ["slow-token=12", "slow-token=1"] {
        for model in ["a", "b"] {
            fs::write(folder.path().join(model).join("faults"), speed).unwrap();
        }
        assert_exit(&replay(&transcript, &[]), 0, "same");
    }
    let entries: Vec<_> = fs::read_dir(folder.path())
        .unwrap()
        .flatten()
        .map(|it| it.file_name())
        .collect();
    assert_eq!(entries.len(), 4, "the replay left something behind: {entries:?}");
}

#[test]
fn a_changed_token_is_a_difference_and_an_update_takes_it_over() {
    let folder = tempfile::tempdir().unwrap();
    let transcript = record(folder.path());
    let text = fs::read_to_string(&transcript).unwrap();
    assert!(text.contains("a-17 "));
    fs::write(&transcript, text.replace("a-17 ", "a-71 ")).unwrap();
    assert_exit(&replay(&transcript, &[]), 1, "request \"1\": text parted: after");
    assert_exit(&replay(&transcript, &["--update"]), 0, "updated");
    assert_exit(&replay(&transcript, &[]), 0, "same");
}

#[test]
fn a_crash_that_does_not_happen_again_is_a_difference() {
    let folder = tempfile::tempdir().unwrap();
    let transcript = record(folder.path());
    fs::write(folder.path().join("c").join("faults"), "").unwrap();
    assert_exit(&replay(&transcript, &[]), 1, "request \"3\"");
}

#[test]
fn what_cannot_be_replayed_says_why_and_exits_with_2() {
    let folder = tempfile::tempdir().unwrap();
    let transcript = folder.path().join("t.jsonl");
    let header = |major: u32, program: &str| {
        json!({"format": {"name": "lookahead-transcript", "major": major, "minor": 0}, "program": program, "version": "0",
            "model": null, "fingerprint": null})
    };
    for (text, words) in [
        (format!("{}\n", header(2, "lookahead")), "version 2"),
        (format!("{}\n", header(1, "other")), "\"other\""),
        (
            format!("{}\n{{\"t\":1,\"dir\":\"in\",\"line\":{{", header(1, "lookahead")),
            "incomplete",
        ),
        ("hello\n".to_owned(), "not a transcript"),
    ] {
        fs::write(&transcript, text).unwrap();
        assert_exit(&replay(&transcript, &[]), 2, words);
    }
    assert_exit(&replay(&folder.path().join("missing"), &[]), 2, "missing");
}

/// The recorded sessions of the bundled model, with the real runner where one has been built beside the scheduler.
#[test]
fn the_recorded_sessions_of_the_bundled_model_replay() {
    let beside = lookahead().with_file_name("lookahead-runner");
    let runner = std::env::var_os("LOOKAHEAD_TEST_RUNNER").map_or(beside, PathBuf::from);
    if !runner.is_file() {
        println!("skipped: there is no lookahead-runner; build it or set LOOKAHEAD_TEST_RUNNER");
        return;
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    for name in ["scheduler.jsonl", "runner.jsonl"] {
        let output = Command::new(lookahead())
            .current_dir(&root)
            .arg("replay")
            .arg(Path::new("fixtures/transcripts").join(name))
            .env("LOOKAHEAD_RUNNER", &runner)
            .output()
            .unwrap();
        assert_exit(&output, 0, "same");
    }
}
