//! `lookahead run`, as a person uses it.

use std::io::{Read, Write};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use crate::host::{example, kill, lookahead};

fn run(faults: &str, arguments: &[&str], stdin: &str) -> Output {
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("toy");
    std::fs::create_dir(&model).unwrap();
    std::fs::write(model.join("faults"), faults).unwrap();
    let mut child = Command::new(lookahead())
        .arg("run")
        .arg(&model)
        .args(arguments)
        .env("LOOKAHEAD_RUNNER", example("fake-runner"))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(stdin.as_bytes()).unwrap();
    child.wait_with_output().unwrap()
}

#[test]
fn the_answer_is_on_stdout_and_the_statistics_on_stderr() {
    let output = run("", &["hello", "--num-predict", "3"], "");
    assert_eq!(String::from_utf8_lossy(&output.stdout), "toy-0 toy-1 toy-2 \n");
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(
        stderr.contains("answer 3 tokens") && stderr.contains("prompt 5 tokens"),
        "{stderr}"
    );
    assert!(
        !stderr.contains("fake-runner"),
        "the runner's log is for --verbose: {stderr}"
    );
    assert!(output.status.success());
}

#[test]
fn the_prompt_may_come_on_stdin_and_events_may_be_asked_for() {
    let output = run("", &["--json", "--quiet", "--num-predict", "1"], "hello\n");
    let stdout = String::from_utf8_lossy(&output.stdout);
    let types: Vec<String> = stdout
        .lines()
        .map(|line| {
            serde_json::from_str::<serde_json::Value>(line).unwrap()["type"]
                .as_str()
                .unwrap()
                .to_owned()
        })
        .collect();
    assert_eq!(types.first().map(String::as_str), Some("hello"));
    assert_eq!(types[types.len() - 3..], ["prompt", "token", "done"]);
    assert!(output.stderr.is_empty());
}

#[test]
fn a_failure_is_told_with_its_code_and_exit_status_1() {
    let output = run("load-error=model_invalid", &["hello"], "");
    assert_eq!(output.status.code(), Some(1));
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(
        stderr.contains("model_invalid: the load fails on purpose"),
        "{stderr}"
    );
    assert!(output.stdout.is_empty());
    let output = run("", &["hello", "--temperature", "-1"], "");
    assert_eq!(
        output.status.code(),
        Some(2),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
}

#[test]
fn ctrl_c_ends_the_answer_and_a_second_one_the_program() {
    for (faults, presses, code) in [("slow-token=5", 1, 130), ("hang=2", 2, 130)] {
        let folder = tempfile::tempdir().unwrap();
        let model = folder.path().join("toy");
        std::fs::create_dir(&model).unwrap();
        std::fs::write(model.join("faults"), faults).unwrap();
        let mut child = Command::new(lookahead())
            .arg("run")
            .arg(&model)
            .args(["hello", "--num-predict", "100000"])
            .env("LOOKAHEAD_RUNNER", example("fake-runner"))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut first = [0; 5];
        child.stdout.as_mut().unwrap().read_exact(&mut first).unwrap();
        for _ in 0..presses {
            kill(child.id() as i32, libc::SIGINT);
            std::thread::sleep(Duration::from_millis(300));
        }
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(code), "{faults}");
        if presses == 1 {
            let stderr = String::from_utf8_lossy(&output.stderr);
            assert!(stderr.contains("cancelled"), "{stderr}");
        }
    }
}

#[test]
fn a_reader_that_goes_away_is_no_failure() {
    let mut child = Command::new("sh")
        .arg("-c")
        .arg(format!(
            "d=$(mktemp -d) && echo slow-token=1 > $d/faults && {} run $d hello --num-predict 100000 | head -c 5; rm -r $d",
            lookahead().display()
        ))
        .env("LOOKAHEAD_RUNNER", example("fake-runner"))
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let status = child.wait().unwrap();
    assert!(status.success());
}
