//! How much memory a model will need, before it is loaded.
//!
//! Invariant: there is always an answer within `ASK_LIMIT`: the runner's own estimate where it gives one, else the size of
//! the model's files.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::catalog::{Kind, Spec};
use crate::process;

/// How long the runner may take to look at a model's headers.
const ASK_LIMIT: Duration = Duration::from_secs(20);
/// What a process needs beside its weights, at least.
const OVERHEAD: u64 = 64 << 20;

/// Bytes that the model will need.
pub fn memory_of(spec: &Spec, runner: &Path) -> u64 {
    let told = match spec.kind {
        Kind::Mlx => ask(spec, runner),
        Kind::Gguf => None,
    };
    told.unwrap_or_else(|| weight_files(&spec.path).saturating_add(OVERHEAD))
}

/// Asks the runner; `None` where it can't say.
fn ask(spec: &Spec, runner: &Path) -> Option<u64> {
    let mut command = Command::new(runner);
    command
        .args(["--inspect", "--json", "--model"])
        .arg(&spec.path)
        .args(&spec.args)
        .envs(&spec.env);
    command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null());
    process::tie_to_parent(&mut command);
    let mut child = command.spawn().ok()?;
    let mut stdout = child.stdout.take()?;
    let (sender, receiver) = crossbeam_channel::bounded(1);
    let reader = std::thread::Builder::new()
        .name("inspect".to_owned())
        .spawn(move || {
            let mut text = String::new();
            // An answer cut short doesn't parse, which is all that matters.
            let _ = std::io::Read::read_to_string(&mut std::io::Read::take(&mut stdout, 1 << 20), &mut text);
            let _ = sender.send(text);
        });
    let deadline = Instant::now() + ASK_LIMIT;
    let text = reader.ok().and_then(|_| receiver.recv_deadline(deadline).ok());
    if text.is_none() {
        // It may have ended by itself meanwhile; then there is nothing to kill.
        let _ = child.kill();
    }
    let status = child.wait().ok()?;
    status.success().then_some(())?;
    memory_in(&serde_json::from_str(&text?).ok()?)
}

/// The estimate in an inspection: `memory.total`, or the sum of what `memory` lists.
fn memory_in(inspection: &Value) -> Option<u64> {
    inspection.get("memory")?.get("total")?.as_u64()
}

/// The bytes of the files that hold weights.
pub(crate) fn weight_files(path: &Path) -> u64 {
    if path.is_file() {
        return split_parts(path);
    }
    let Ok(entries) = fs::read_dir(path) else { return 0 };
    entries
        .flatten()
        .filter(|entry| {
            entry
                .path()
                .extension()
                .is_some_and(|extension| extension == "safetensors" || extension == "gguf")
        })
        .filter_map(|entry| fs::metadata(entry.path()).ok())
        .map(|meta| meta.len())
        .sum()
}

/// The size of a file, with the other parts where it is the first of a split model (`name-00001-of-00003.gguf`).
fn split_parts(path: &Path) -> u64 {
    let own = fs::metadata(path).map_or(0, |meta| meta.len());
    let name = path
        .file_name()
        .and_then(|name| name.to_str())
        .unwrap_or_default();
    let Some((stem, rest)) = name.split_once("-00001-of-") else {
        return own;
    };
    let Some(count) = rest
        .strip_suffix(".gguf")
        .and_then(|count| count.parse::<u32>().ok())
    else {
        return own;
    };
    let others =
        (2..=count.min(10_000)).map(|part| path.with_file_name(format!("{stem}-{part:05}-of-{rest}")));
    own + others
        .filter_map(|part| fs::metadata(part).ok())
        .map(|meta| meta.len())
        .sum::<u64>()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_are_counted_and_other_files_are_not() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("model-1.safetensors"), [0; 100]).unwrap();
        fs::write(folder.path().join("model-2.safetensors"), [0; 50]).unwrap();
        fs::write(folder.path().join("tokenizer.json"), [0; 999]).unwrap();
        assert_eq!(weight_files(folder.path()), 150);
        assert_eq!(weight_files(Path::new("/no/such/folder")), 0);
    }

    #[test]
    fn all_parts_of_a_split_file_count() {
        let folder = tempfile::tempdir().unwrap();
        for part in 1..=3 {
            fs::write(folder.path().join(format!("m-{part:05}-of-00003.gguf")), [0; 10]).unwrap();
        }
        assert_eq!(weight_files(&folder.path().join("m-00001-of-00003.gguf")), 30);
    }

    #[test]
    fn an_inspection_gives_its_total() {
        assert_eq!(memory_in(&serde_json::json!({"memory": {"total": 7}})), Some(7));
        assert_eq!(memory_in(&serde_json::json!({"memory": 7})), None);
    }
}
