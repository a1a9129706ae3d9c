//! The tier on disk: restarts, damage, a medium that refuses, runners beside each other, and sudden death.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use lookahead_tests::process::{executable, model, Process};
use serde_json::json;
use tempfile::TempDir;

use crate::support::{number, words, Session, SAMPLINGS};

const REPLY: usize = 24;
/// Restore points nearer than this to the one before them share its place on disk.
const SPACING: usize = 16;

fn started(dir: &Path) -> Session {
    started_with("greedy", dir)
}

fn started_with(sampling: &'static str, dir: &Path) -> Session {
    let dir = dir.to_string_lossy();
    Session::start(sampling, &["--cache-disk", "64MiB", "--cache-dir", &dir])
}

fn chat(session: &mut Session) -> Vec<u64> {
    let mut chat = session.turn("system", &words(1, 30));
    chat.extend(session.turn("user", &words(2, 20)));
    chat.extend(session.opening());
    chat
}

/// Waits until something new, and all of it, is on the disk.
fn settle(session: &mut Session, before: u64) {
    session.status_when(|status| {
        let cache = &status["cache"];
        number(&cache["disk"]["stores"]) > before && cache["host"]["bytes"] == 0
    });
}

/// The entries of the only model in a cache directory.
fn entries(dir: &Path) -> Vec<PathBuf> {
    let list = |dir: &Path| -> Vec<PathBuf> {
        let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
        entries.map(|entry| entry.path()).collect()
    };
    list(&dir.join("prefix"))
        .iter()
        .flat_map(|model| list(model))
        .collect()
}

/// A directory with one conversation in it, that conversation, and its continuation.
fn filled() -> (TempDir, Vec<u64>, Vec<u64>) {
    filled_with("greedy")
}

fn filled_with(sampling: &'static str) -> (TempDir, Vec<u64>, Vec<u64>) {
    let dir = tempfile::tempdir().unwrap_or_else(|error| panic!("{error}"));
    let mut session = started_with(sampling, dir.path());
    let chat = chat(&mut session);
    let outcome = session.ask(&chat, REPLY);
    settle(&mut session, 0);
    session.end();
    assert!(!entries(dir.path()).is_empty());
    (dir, chat, outcome.tokens)
}

#[test]
fn a_conversation_goes_on_after_a_restart() {
    for sampling in SAMPLINGS {
        goes_on_after_a_restart(sampling);
    }
}

fn goes_on_after_a_restart(sampling: &'static str) {
    let (dir, mut chat, reply) = filled_with(sampling);
    let mut session = started_with(sampling, dir.path());
    let retry = session.plain(&chat, REPLY);
    assert!(
        retry.cached + SPACING >= chat.len(),
        "{} of {}",
        retry.cached,
        chat.len()
    );
    assert_eq!(retry.tokens, reply);
    session.end();

    let mut session = started_with(sampling, dir.path());
    chat.extend(&reply);
    let rested = chat.len() - 1;
    chat.extend(session.closing());
    chat.extend(session.turn("user", &words(3, 10)));
    chat.extend(session.opening());
    let next = session.plain(&chat, REPLY);
    assert_eq!(next.cached, rested);
    assert_eq!(next.tokens, session.cold(&chat, REPLY));
    let cache = session.status()["cache"].clone();
    assert_eq!(cache["hits"], 1);
    assert!(
        number(&cache["promotions"]) > 0 && number(&cache["disk"]["loads"]) > 0,
        "{cache}"
    );
    assert!(
        number(&cache["disk"]["files"]) > 0 && number(&cache["disk"]["bytes"]) > 0,
        "{cache}"
    );
    session.end();
}

#[test]
fn what_memory_gives_up_is_found_on_disk() {
    for sampling in SAMPLINGS {
        what_memory_gives_up_is_found(sampling);
    }
}

fn what_memory_gives_up_is_found(sampling: &'static str) {
    let dir = tempfile::tempdir().unwrap_or_else(|error| panic!("{error}"));
    let path = dir.path().to_string_lossy();
    let args = [
        "--cache-device",
        "4MiB",
        "--cache-disk",
        "64MiB",
        "--cache-dir",
        &path,
    ];
    let mut session = Session::start(sampling, &args);
    let chats: Vec<Vec<u64>> = (0..8).map(|number| session.encode(&words(number, 100))).collect();
    for chat in &chats {
        session.plain(chat, REPLY);
    }
    session.status_when(|status| status["cache"]["host"]["bytes"] == 0);
    for chat in &chats {
        let outcome = session.plain(chat, REPLY);
        assert_eq!(outcome.cached, chat.len() - 1);
        assert_eq!(outcome.tokens, session.cold(chat, REPLY));
        assert!(number(&session.status()["cache"]["device"]["bytes"]) <= 4 << 20);
    }
    assert!(number(&session.status()["cache"]["promotions"]) > 0);
    session.end();
}

#[test]
fn clearing_reaches_the_disk() {
    let (dir, chat, _) = filled();
    let mut session = started(dir.path());
    let clear = json!({"type": "cache", "id": session.id(), "action": "clear"});
    session.process.ask(&clear);
    session.status_when(|status| status["cache"]["disk"]["files"] == 0);
    assert_eq!(entries(dir.path()), Vec::<PathBuf>::new());
    assert_eq!(session.plain(&chat, REPLY).cached, 0);
    session.end();
}

#[test]
fn prompts_on_disk_are_private() {
    use std::os::unix::fs::PermissionsExt;
    let (dir, ..) = filled();
    let mode =
        |path: &Path| std::fs::metadata(path).map_or(0, |metadata| metadata.permissions().mode() & 0o777);
    for entry in entries(dir.path()) {
        assert_eq!(mode(&entry), 0o600, "{}", entry.display());
        assert_eq!(entry.parent().map(mode), Some(0o700));
    }
}

/// Does something to every entry's bytes.
fn damage(dir: &Path, change: impl Fn(usize, &mut Vec<u8>)) {
    for (index, path) in entries(dir).into_iter().enumerate() {
        let mut bytes = std::fs::read(&path).unwrap_or_default();
        change(index, &mut bytes);
        std::fs::write(&path, bytes).unwrap_or_else(|error| panic!("{error}"));
    }
}

fn is_met_with_a_warning(dir: &Path, chat: &[u64], reply: &[u64], words: &str) {
    let mut session = started(dir);
    let outcome = session.plain(chat, REPLY);
    assert_eq!((outcome.cached, &outcome.tokens[..]), (0, reply));
    assert!(number(&session.status()["cache"]["disk"]["rejected"]) > 0);
    let log = session.process.log();
    assert!(log.contains("WARN") && log.contains(words), "{log}");
    settle(&mut session, 0);
    session.end();
    // What is found to be bad is written anew; an entry is looked at when those before it are good.
    let files = entries(dir).len();
    let healed = (0..=files).any(|_| {
        let mut session = started(dir);
        let outcome = session.plain(chat, REPLY);
        assert_eq!(outcome.tokens, reply);
        session.end();
        outcome.cached + SPACING >= chat.len()
    });
    assert!(healed, "{files} entries are good again one after the other");
}

#[test]
fn damaged_files_cost_a_hit_and_a_warning() {
    let (dir, chat, reply) = filled();
    damage(dir.path(), |index, bytes| match index % 3 {
        0 => bytes.truncate(bytes.len() / 2),
        1 => bytes.clear(),
        _ => {
            let middle = bytes.len() / 2;
            bytes[middle] ^= 0x40;
        }
    });
    is_met_with_a_warning(dir.path(), &chat, &reply, "is damaged");
}

#[test]
fn another_models_files_cost_a_hit_and_a_warning() {
    let (dir, chat, reply) = filled();
    let own = entries(dir.path())[0]
        .parent()
        .and_then(Path::file_name)
        .map(|name| name.to_string_lossy().into_owned());
    let own = own.unwrap_or_default().into_bytes();
    let other: Vec<u8> = own
        .iter()
        .map(|&digit| if digit == b'0' { b'1' } else { b'0' })
        .collect();
    damage(dir.path(), |_, bytes| {
        let at = bytes.windows(own.len()).position(|window| window == own);
        let at = at.unwrap_or_else(|| panic!("an entry carries its model's fingerprint"));
        bytes[at..at + own.len()].copy_from_slice(&other);
    });
    is_met_with_a_warning(dir.path(), &chat, &reply, "another model");
}

#[test]
fn files_of_no_entry_are_left_alone() {
    let (dir, chat, reply) = filled();
    let folder = entries(dir.path())[0]
        .parent()
        .map(Path::to_path_buf)
        .unwrap_or_default();
    for name in ["README", "point-.safetensors", "segment-9-1-zz-zz.safetensors"] {
        std::fs::write(folder.join(name), b"not ours").unwrap_or_else(|error| panic!("{error}"));
    }
    let mut session = started(dir.path());
    let outcome = session.plain(&chat, REPLY);
    assert!(outcome.cached > 0);
    assert_eq!(outcome.tokens, reply);
    session.end();
}

#[test]
fn a_place_where_no_directory_can_be_turns_the_tier_off_with_a_warning() {
    let dir = tempfile::tempdir().unwrap_or_else(|error| panic!("{error}"));
    let file = dir.path().join("file");
    std::fs::write(&file, b"in the way").unwrap_or_else(|error| panic!("{error}"));
    let mut session = started(&file);
    let chat = chat(&mut session);
    session.ask(&chat, REPLY);
    assert!(
        session.process.log().contains("WARN"),
        "{}",
        session.process.log()
    );
    assert_eq!(session.status()["cache"]["disk"]["files"], 0);
    session.end();
}

/// Ways to a name space of one's own: as root, and as a user who may be root in one.
const UNSHARE: [&[&str]; 2] = [&["--mount"], &["--user", "--map-root-user", "--mount"]];

/// A runner in a name space of its own, where `mount` has changed what lies at the directory; none where that isn't allowed.
fn mounted(dir: &Path, mount: &str) -> Option<Session> {
    let allowed = |flags: &&&[&str]| {
        let mut probe = Command::new("unshare");
        probe.args(**flags).args(["sh", "-c", mount, "sh"]).arg(dir);
        probe.output().is_ok_and(|output| output.status.success())
    };
    let flags = UNSHARE.iter().find(allowed)?;
    let mut command = Command::new("unshare");
    // The directory is the script's first argument; what follows is the runner's command line.
    let script = format!("{mount} && shift && exec \"$@\"");
    command.args(*flags).args(["sh", "-c", &script, "sh"]).arg(dir);
    command
        .arg(executable("lookahead-runner"))
        .arg("--model")
        .arg(model());
    command
        .args(["--cpu", "--draft", "3", "--cache-disk", "64MiB", "--cache-dir"])
        .arg(dir);
    Some(Session::of(Process::start(command), "greedy"))
}

#[test]
fn a_read_only_directory_is_read_and_not_written() {
    let (dir, chat, reply) = filled();
    let before = entries(dir.path()).len();
    let read_only = "mount --bind \"$1\" \"$1\" && mount -o remount,ro,bind \"$1\"";
    let Some(mut session) = mounted(dir.path(), read_only) else {
        eprintln!("skipped: this user may not mount");
        return;
    };
    let outcome = session.plain(&chat, REPLY);
    assert!(outcome.cached > 0);
    assert_eq!(outcome.tokens, reply);
    let other = session.encode(&words(50, 60));
    session.ask(&other, REPLY);
    std::thread::sleep(Duration::from_millis(300));
    session.ask(&other, REPLY);
    assert!(
        session
            .process
            .log()
            .contains("nothing is written to disk any more"),
        "{}",
        session.process.log()
    );
    session.end();
    assert_eq!(entries(dir.path()).len(), before);
}

#[test]
fn a_full_disk_costs_nothing_but_hits() {
    let dir = tempfile::tempdir().unwrap_or_else(|error| panic!("{error}"));
    let Some(mut session) = mounted(dir.path(), "mount -t tmpfs -o size=400k none \"$1\"") else {
        eprintln!("skipped: this user may not mount");
        return;
    };
    for number in 0..6 {
        let chat = session.encode(&words(number, 60));
        session.ask(&chat, REPLY);
    }
    session.status_when(|status| status["cache"]["host"]["bytes"] == 0);
    assert!(
        session
            .process
            .log()
            .contains("nothing is written to disk any more"),
        "{}",
        session.process.log()
    );
    session.end();
}

#[test]
fn two_runners_share_a_directory() {
    let dir = tempfile::tempdir().unwrap_or_else(|error| panic!("{error}"));
    let mut writer = started(dir.path());
    let mut reader = started(dir.path());
    let first = chat(&mut writer);
    let said = writer.ask(&first, REPLY);
    settle(&mut writer, 0);
    // The directory's time stamp is trusted once it has aged.
    std::thread::sleep(Duration::from_millis(100));
    let heard = reader.plain(&first, REPLY);
    assert!(
        heard.cached + SPACING >= first.len(),
        "{} of {}",
        heard.cached,
        first.len()
    );
    assert_eq!(heard.tokens, said.tokens);
    // Both at once, on the same and on different prompts; one clears in between.
    for round in 0..6 {
        let shared = writer.encode(&words(10 + round, 60));
        let (one, other) = (writer.plain(&shared, REPLY), reader.plain(&shared, REPLY));
        assert_eq!(one.tokens, other.tokens);
        assert_eq!(one.tokens, writer.cold(&shared, REPLY));
        if round == 3 {
            let clear = json!({"type": "cache", "id": reader.id(), "action": "clear"});
            reader.process.ask(&clear);
        }
    }
    writer.end();
    reader.end();
}

#[test]
fn death_in_the_middle_of_writing_costs_hits_only() {
    let dir = tempfile::tempdir().unwrap_or_else(|error| panic!("{error}"));
    let mut expected = None;
    let mut found = 0;
    for round in 0..8 {
        let mut session = started(dir.path());
        let chat = chat(&mut session);
        let outcome = session.plain(&chat, REPLY);
        found = found.max(outcome.cached);
        let tokens = expected.get_or_insert_with(|| outcome.tokens.clone());
        assert_eq!(&outcome.tokens, tokens, "after {round} deaths");
        // Something new for the disk every time, and less time than it takes to write it at first.
        let other = session.encode(&words(100 + round, 200));
        session.plain(&other, REPLY);
        std::thread::sleep(Duration::from_millis(3 * round as u64));
        session.process.signal("KILL");
        session.process.wait(Duration::from_secs(10));
    }
    assert!(found > 0, "some rounds left enough time to write");
}
