//! The thread that writes entries: one at a time, into a temporary file that is renamed when it is whole and on the medium.

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Instant, SystemTime};

use crossbeam_channel::Receiver;

use super::record::{self, payload_bytes, Tensor};
use super::scan::{scan, victims, TEMPORARY};
use super::store::{create_directories, Shared};
use super::{DiskError, Name};
use crate::prefix::key::Key;

/// More files than this slow down every scan.
const MAX_FILES: usize = 16_384;

/// An entry to write.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) name: Name,
    pub(super) keys: Vec<Key>,
    pub(super) tensors: Vec<Tensor>,
    /// Of the store when the job was made; an older one was cleared since.
    pub(super) epoch: u64,
}

impl Job {
    pub(super) fn bytes(&self) -> u64 {
        payload_bytes(&self.tensors, &self.keys)
    }

    /// At least what the file will take.
    fn file_bytes(&self) -> u64 {
        let names: usize = self
            .tensors
            .iter()
            .map(|tensor| tensor.name.len() + 24 * tensor.shape.len() + 96)
            .sum();
        self.bytes() + names as u64 + 1024
    }
}

pub(super) fn run(shared: &Shared, jobs: &Receiver<Job>) {
    for job in jobs {
        let (name, bytes) = (job.name, job.bytes());
        let begun = Instant::now();
        let outcome = if shared.stopping() {
            Ok(None)
        } else {
            write(shared, &job)
        };
        let mut state = shared.lock();
        state.pending.remove(&name);
        state.pending_bytes -= bytes;
        match outcome {
            Ok(Some(size)) => state.stored.add(size, begun.elapsed()),
            Ok(None) => {}
            Err(error @ DiskError::Malformed { .. }) => state.warn(error),
            Err(error) => {
                state.writable = false;
                state.warn(DiskError::WritesOff(Box::new(error)));
            }
        }
        shared.progress.notify_all();
    }
}

/// Write one entry; the bytes of its file, or none where it wasn't wanted any more or found no room.
fn write(shared: &Shared, job: &Job) -> Result<Option<u64>, DiskError> {
    {
        let state = shared.lock();
        // Without the chain that it rests on an entry would be of no use.
        let supported = state.index.leads_to(job.name.rests_on());
        if state.epoch != job.epoch || !state.writable || !supported {
            return Ok(None);
        }
    }
    if !make_room(shared, job) {
        return Ok(None);
    }
    let temporary = shared.directory.join(temporary_name());
    let written = write_temporary(shared, &temporary, job);
    let renamed = written.and_then(|size| {
        let mut state = shared.lock();
        if state.epoch != job.epoch {
            return Ok(None);
        }
        let path = shared.directory.join(job.name.to_string());
        match std::fs::rename(&temporary, &path) {
            Ok(()) => {}
            // Somebody has cleaned up the directory meanwhile.
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(source) => return Err(DiskError::Io { path, source }),
        }
        state.bad.remove(&job.name);
        state.index.insert(job.name);
        state.disk_bytes += size;
        Ok(Some(size))
    });
    if !matches!(renamed, Ok(Some(_))) {
        // Best effort: a file left over is removed as stale later.
        let _ = std::fs::remove_file(&temporary);
    } else if let Ok(directory) = std::fs::File::open(&shared.directory) {
        // The rename itself reaches the medium; where directories can't be synced, a crash costs the entry only.
        let _ = directory.sync_all();
    }
    renamed
}

fn write_temporary(shared: &Shared, path: &Path, job: &Job) -> Result<u64, DiskError> {
    let attempt = || record::write(path, shared.fingerprint, job.name, &job.keys, &job.tensors);
    match attempt() {
        // The directory was removed while we ran; an empty cache is no reason to stop caching.
        Err(DiskError::Io { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => {
            create_directories(&shared.root, &shared.directory)?;
            attempt()?;
        }
        other => other?,
    }
    let length = std::fs::metadata(path).map(|metadata| metadata.len());
    length.map_err(|source| DiskError::Io {
        path: path.to_owned(),
        source,
    })
}

/// A name that no other writer uses, not even a dead one whose process id came round again.
fn temporary_name() -> String {
    static COUNTER: AtomicU64 = AtomicU64::new(0);
    let now = SystemTime::UNIX_EPOCH
        .elapsed()
        .map_or(0, |since| since.as_nanos());
    format!(
        "{TEMPORARY}{}-{now}-{}",
        std::process::id(),
        COUNTER.fetch_add(1, Ordering::Relaxed)
    )
}

/// Remove old files until the job's fits the budget; false if it can't.
fn make_room(shared: &Shared, job: &Job) -> bool {
    let needed = job.file_bytes();
    if needed > shared.budget {
        return false;
    }
    let files = scan(&shared.root, shared.stale_after);
    let total: u64 = files.iter().map(|file| file.size).sum();
    let (keep, bad) = {
        let state = shared.lock();
        let below = state.index.below(job.name.rests_on());
        let keep: HashSet<_> = below
            .into_iter()
            .map(|place| (shared.fingerprint, place))
            .collect();
        let bad: HashSet<PathBuf> = state
            .bad
            .iter()
            .map(|name| shared.directory.join(name.to_string()))
            .collect();
        (keep, bad)
    };
    let excess = (total + needed).saturating_sub(shared.budget);
    let gone = victims(
        &files,
        &bad,
        &keep,
        excess,
        (files.len() + 1).saturating_sub(MAX_FILES),
    );
    let mut left = total;
    for index in gone {
        let file = &files[index];
        match std::fs::remove_file(&file.path) {
            Ok(()) => {}
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            // It stays and counts; the sum below decides.
            Err(_) => continue,
        }
        left -= file.size;
        if let Some(name) = file.name.filter(|_| file.model == shared.fingerprint) {
            let mut state = shared.lock();
            state.index.remove(&name);
            state.bad.remove(&name);
            state.evicted += 1;
        }
    }
    shared.lock().disk_bytes = left;
    left + needed <= shared.budget
}
