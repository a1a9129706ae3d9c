//! The commands for people and the example hosts, on fake models.

use std::io::Write;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use serde_json::Value;

use crate::host::{example, lookahead};
use crate::synthetic::{gguf, Key};

fn model(folder: &Path, faults: &str) -> String {
    let path = folder.join("toy");
    std::fs::create_dir(&path).unwrap();
    std::fs::write(path.join("faults"), faults).unwrap();
    path.to_str().unwrap().to_owned()
}

fn run(arguments: &[&str], stdin: &str) -> Output {
    let mut child = Command::new(lookahead())
        .args(arguments)
        .env("LOOKAHEAD_RUNNER", example("fake-runner"))
        .env("LOOKAHEAD_LLAMA_SERVER", example("fake-llama-server"))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // A command that needs no input may have ended.
    let _ = child.stdin.take().unwrap().write_all(stdin.as_bytes());
    child.wait_with_output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn a_chat_keeps_its_conversation_and_its_commands_work() {
    let folder = tempfile::tempdir().unwrap();
    let toy = model(folder.path(), "");
    let saved = folder.path().join("saved.json");
    let input = format!(
        "/stats\nhello\n\"\"\"two\nlines\"\"\"\n/think off\n/think maybe\n/stats\n/save {}\n/nonsense\n/quit\nnever asked\n",
        saved.display()
    );
    let output = run(
        &["chat", &toy, "--num-predict", "2", "--system", "Be brief."],
        &input,
    );
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert_eq!(
        text(&output.stdout).matches("toy-0 toy-1").count(),
        2,
        "{}",
        text(&output.stdout)
    );
    let stderr = text(&output.stderr);
    for words in [
        "nothing was answered yet",
        "/think takes",
        "answer 2 tokens",
        "5 messages written",
        "no command /nonsense",
    ] {
        assert!(stderr.contains(words), "{words:?} is not in {stderr}");
    }
    let messages: Value = serde_json::from_str(&std::fs::read_to_string(saved).unwrap()).unwrap();
    assert_eq!(
        (messages[0]["content"].as_str(), messages[3]["content"].as_str()),
        (Some("Be brief."), Some("two\nlines"))
    );
}

#[test]
fn a_failed_question_leaves_the_conversation() {
    let folder = tempfile::tempdir().unwrap();
    let toy = model(folder.path(), "request-error=context_exceeded");
    let saved = folder.path().join("saved.json");
    let output = run(&["chat", &toy], &format!("hello\n/save {}\n", saved.display()));
    assert!(text(&output.stderr).contains("context_exceeded: on purpose"));
    assert_eq!(std::fs::read_to_string(saved).unwrap(), "[]\n");
}

#[test]
fn a_bench_measures_every_mode_on_every_prompt() {
    let folder = tempfile::tempdir().unwrap();
    let toy = model(folder.path(), "");
    let output = run(
        &[
            "bench", &toy, "--runs", "1", "--tokens", "4", "--draft", "off", "--draft", "2", "--json",
        ],
        "",
    );
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["decode"].as_array().unwrap().len(), 6);
    assert!(report["prefill"]["tokens_per_second"].as_f64().unwrap() > 0.0);
    let table = text(
        &run(
            &["bench", &toy, "--runs", "1", "--tokens", "4", "--draft", "off"],
            "",
        )
        .stdout,
    );
    assert!(
        table.contains("counting") && table.contains("1.00x") && table.contains("prefill of 1024"),
        "{table}"
    );
}

#[test]
fn a_gguf_file_is_measured_with_a_server_for_every_mode() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.gguf");
    crate::gguf::write_model(&path, &[]);
    let model = path.to_str().unwrap();
    let output = run(
        &[
            "bench",
            model,
            "--runs",
            "1",
            "--tokens",
            "7",
            "--prefill",
            "64",
            "--draft",
            "off",
            "--draft",
            "2",
            "--json",
        ],
        "",
    );
    assert!(output.status.success(), "{}", text(&output.stderr));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let accepted = |draft: &str| {
        let rows = report["decode"].as_array().unwrap();
        rows.iter().find(|row| row["draft"] == draft).unwrap()["accepted_per_proposed"].clone()
    };
    assert!(accepted("off").is_null() && accepted("2").is_f64(), "{report}");
    let output = run(&["tune", model, "--runs", "1", "--tokens", "7"], "");
    assert!(
        text(&output.stdout).contains("drafting"),
        "{}",
        text(&output.stderr)
    );
}

#[test]
fn a_command_line_that_cannot_be_followed_exits_with_2() {
    for arguments in [
        &["serve", "--config", "/no/such/file"][..],
        &["serve", "--record", "/no/such/folder/file"],
        &["run", "model", "hello", "--draft", "99"],
        &["bench", "model", "--draft", "on"],
        &["serve", "--no-such-flag"],
        &["gguf"],
    ] {
        let output = run(arguments, "");
        let stderr = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {stderr}");
        assert!(stderr.matches("No such file").count() <= 1, "{stderr}");
        assert!(output.stdout.is_empty());
    }
}

#[test]
fn a_reader_of_a_result_that_goes_away_is_no_failure() {
    for command in ["man", "completions bash"] {
        let script = format!("{} {command} | head -c 1; echo done", lookahead().display());
        let output = Command::new("sh").arg("-c").arg(script).output().unwrap();
        assert_eq!(text(&output.stderr), "", "{command}");
    }
}

#[test]
fn tuning_saves_nothing_where_drafting_does_not_help() {
    let folder = tempfile::tempdir().unwrap();
    // Every mode of the fake model is equally fast.
    let toy = model(folder.path(), "");
    let file = folder.path().join("tuned.toml");
    let output = run(
        &[
            "tune",
            &toy,
            "--runs",
            "1",
            "--tokens",
            "4",
            "--save",
            file.to_str().unwrap(),
        ],
        "",
    );
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(
        text(&output.stdout).contains("drafting doesn't help on this machine"),
        "{}",
        text(&output.stdout)
    );
    assert!(!file.exists());
}

#[test]
fn a_gguf_file_is_inspected_without_a_runner() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.gguf");
    let keys = [
        ("general.architecture", Key::Text("qwen35")),
        ("qwen35.block_count", Key::U32(9)),
        ("qwen35.nextn_predict_layers", Key::U32(1)),
    ];
    std::fs::write(
        &path,
        gguf(
            3,
            &keys,
            &["blk.0.attn_norm.weight", "blk.8.nextn.eh_proj.weight"],
        ),
    )
    .unwrap();
    let output = run(&["inspect", path.to_str().unwrap(), "--json"], "");
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(
        (
            report["verdict"]["runs"].as_bool(),
            report["draft"]["kind"].as_str()
        ),
        (Some(true), Some("mtp"))
    );
    std::fs::write(&path, gguf(3, &keys, &["blk.8.nextn.eh_proj.weight"])).unwrap();
    let output = run(&["inspect", path.to_str().unwrap()], "");
    assert_eq!(output.status.code(), Some(1));
    assert!(
        text(&output.stdout).contains("only a draft head"),
        "{}",
        text(&output.stdout)
    );
}

#[test]
fn completions_and_manual_name_every_command() {
    let completions = text(&run(&["completions", "bash"], "").stdout);
    let manual = text(&run(&["man"], "").stdout);
    for command in ["run", "chat", "inspect", "serve", "replay", "bench", "tune"] {
        assert!(completions.contains(command), "{command}");
        assert!(manual.contains(&format!("lookahead\\-{command}")), "{command}");
        let help = text(&run(&[command, "--help"], "").stdout);
        assert!(help.contains("Usage: lookahead"), "{help}");
    }
}

#[test]
fn the_example_hosts_get_all_answers() {
    let folder = tempfile::tempdir().unwrap();
    let toy = model(folder.path(), "slow-token=1");
    let python = Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/host.py");
    let mut hosts = vec![{
        let mut command = Command::new(example("host"));
        command.arg(lookahead());
        command
    }];
    if Command::new("python3").arg("--version").output().is_ok() {
        let mut command = Command::new("python3");
        command.arg(python).arg("--program").arg(lookahead());
        hosts.push(command);
    }
    for mut command in hosts {
        let output = command
            .arg(&toy)
            .args(["one", "two"])
            .env("LOOKAHEAD_RUNNER", example("fake-runner"))
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", text(&output.stderr));
        assert_eq!(
            text(&output.stdout).matches("toy-0 toy-1").count(),
            2,
            "{}",
            text(&output.stdout)
        );
    }
}
