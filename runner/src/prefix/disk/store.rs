//! The handle on the disk tier: look up, load, queue for writing, clear.
//!
//! Shared by threads; no call but [`DiskStore::load`], [`DiskStore::flush`] and [`DiskStore::clear`] does more file work than
//! listing a directory that has changed.

use std::collections::HashSet;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime};

use crossbeam_channel::{bounded, Sender};

use super::index::{DiskMatch, Index};
use super::record::{self, Tensor};
use super::scan::{names, scan, TEMPORARY};
use super::writer::{run, Job};
use super::{DiskError, Fingerprint, Name};
use crate::prefix::key::{Key, PathHash};
use crate::prefix::stats::Transfers;

/// Most entries that wait to be written.
const QUEUE: usize = 256;
/// Most warnings kept for the host; all are logged.
const MAX_WARNINGS: usize = 16;
/// A directory changed this recently may change again within its time stamp's resolution.
const UNSETTLED: Duration = Duration::from_millis(50);

/// How to open the tier.
#[derive(Clone, Debug)]
pub struct DiskConfig {
    /// The cache directory; everything is kept in `prefix` below it.
    pub directory: PathBuf,
    /// Whose state it is.
    pub fingerprint: Fingerprint,
    /// Most bytes of all models together.
    pub budget: u64,
    /// Most bytes that wait in host memory to be written; a single larger entry may wait alone.
    pub max_pending: u64,
    /// Age at which a half-written file counts as left by a runner that died.
    pub stale_after: Duration,
}

impl DiskConfig {
    /// The usual limits: 256 MiB waiting, ten minutes to write one entry.
    pub fn new(directory: PathBuf, fingerprint: Fingerprint, budget: u64) -> Self {
        Self {
            directory,
            fingerprint,
            budget,
            max_pending: 256 << 20,
            stale_after: Duration::from_secs(600),
        }
    }
}

/// What became of an entry offered for writing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Put {
    /// It will be written.
    Queued,
    /// It is there or on its way.
    Present,
    /// Too much is waiting; offer it again later.
    Busy,
    /// The tier doesn't write (any more), or the entry exceeds its budget.
    Refused,
}

/// State shared with the writer thread.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) root: PathBuf,
    pub(super) directory: PathBuf,
    pub(super) fingerprint: Fingerprint,
    pub(super) budget: u64,
    pub(super) stale_after: Duration,
    state: Mutex<State>,
    /// Signalled after every job.
    pub(super) progress: Condvar,
    stopping: AtomicBool,
}

#[derive(Debug)]
pub(super) struct State {
    pub(super) index: Index,
    /// Modification time of the directory that the index reflects, where it had settled.
    seen: Option<SystemTime>,
    /// Entries found damaged or foreign.
    pub(super) bad: HashSet<Name>,
    pub(super) pending: HashSet<Name>,
    pub(super) pending_bytes: u64,
    pub(super) writable: bool,
    /// Counts clearings.
    pub(super) epoch: u64,
    /// Bytes of all models' files, as of the last scan and what was written since.
    pub(super) disk_bytes: u64,
    pub(super) evicted: u64,
    pub(super) stored: Transfers,
    loaded: Transfers,
    rejected: u64,
    warnings: Vec<DiskError>,
}

impl State {
    pub(super) fn warn(&mut self, warning: DiskError) {
        tracing::warn!("{warning}");
        if self.warnings.len() < MAX_WARNINGS {
            self.warnings.push(warning);
        }
    }
}

impl Shared {
    /// A thread that panicked can't have left the sets half changed in a way that matters: entries are verified on reading.
    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn stopping(&self) -> bool {
        self.stopping.load(Ordering::Relaxed)
    }
}

/// The tier. Dropping it ends the writer after the entry in hand; what waits is lost unless [`DiskStore::flush`]ed.
#[derive(Debug)]
pub struct DiskStore {
    shared: Arc<Shared>,
    jobs: Option<Sender<Job>>,
    writer: Option<JoinHandle<()>>,
    max_pending: u64,
}

impl DiskStore {
    /// Open the tier, creating its directories.
    ///
    /// # Errors
    /// [`DiskError::Io`] where the directories neither exist nor can be made, [`DiskError::Thread`].
    pub fn open(config: DiskConfig) -> Result<Self, DiskError> {
        let root = config.directory.join("prefix");
        let directory = root.join(config.fingerprint.to_string());
        create_directories(&root, &directory)?;
        let disk_bytes = scan(&root, config.stale_after).iter().map(|file| file.size).sum();
        let state = State {
            index: Index::default(),
            seen: None,
            bad: HashSet::new(),
            pending: HashSet::new(),
            pending_bytes: 0,
            writable: true,
            epoch: 0,
            disk_bytes,
            evicted: 0,
            stored: Transfers::default(),
            loaded: Transfers::default(),
            rejected: 0,
            warnings: Vec::new(),
        };
        let shared = Arc::new(Shared {
            root,
            directory,
            fingerprint: config.fingerprint,
            budget: config.budget,
            stale_after: config.stale_after,
            state: Mutex::new(state),
            progress: Condvar::new(),
            stopping: AtomicBool::new(false),
        });
        let (jobs, queue) = bounded(QUEUE);
        let for_writer = Arc::clone(&shared);
        let writer = std::thread::Builder::new()
            .name("prefix-disk".to_owned())
            .spawn(move || run(&for_writer, &queue))
            .map_err(DiskError::Thread)?;
        let store = Self {
            shared,
            jobs: Some(jobs),
            writer: Some(writer),
            max_pending: config.max_pending,
        };
        store.refresh(&mut store.shared.lock());
        Ok(store)
    }

    /// The longest prefix of `keys` of at most `limit` positions that the disk holds.
    pub fn lookup(&self, keys: &[Key], limit: usize) -> Option<DiskMatch> {
        let mut state = self.shared.lock();
        self.refresh(&mut state);
        state.index.lookup(keys, limit)
    }

    /// Whether `name` and the whole chain below it are there or on their way.
    pub fn holds(&self, name: &Name) -> bool {
        let state = self.shared.lock();
        state.pending.contains(name) || (state.index.contains(name) && state.index.leads_to(name.rests_on()))
    }

    /// Whether segments lead to `end` on the path with hash `path`, those on their way included.
    pub fn reaches(&self, end: usize, path: PathHash) -> bool {
        let state = self.shared.lock();
        let coming = |name: &Name| matches!(name, Name::Segment { .. }) && name.place() == (end, path);
        state.index.leads_to((end, path)) || state.pending.iter().any(coming)
    }

    /// Read an entry and mark it used; `keys` are those of its whole path, from position 0 on. None where it has vanished, is
    /// damaged or foreign: it is then no longer found, and for the latter two a warning is kept.
    pub fn load(&self, name: Name, keys: &[Key]) -> Option<Vec<Tensor>> {
        let begun = Instant::now();
        let path = self.shared.directory.join(name.to_string());
        let read = record::read(&path, self.shared.fingerprint, name, keys);
        let mut state = self.shared.lock();
        match read {
            Ok(tensors) => {
                let bytes = tensors.iter().map(|tensor| tensor.data.len() as u64).sum();
                state.loaded.add(bytes, begun.elapsed());
                // Recency for everybody's eviction; on a read-only medium there is none to do.
                let _ = std::fs::File::open(&path).and_then(|file| file.set_modified(SystemTime::now()));
                Some(tensors)
            }
            Err(error) => {
                state.index.remove(&name);
                let vanished =
                    matches!(&error, DiskError::Io { source, .. } if source.kind() == ErrorKind::NotFound);
                if !vanished && state.bad.insert(name) {
                    state.rejected += 1;
                    state.warn(error);
                }
                None
            }
        }
    }

    /// Stop finding an entry whose content turned out to be unusable, until it is written anew.
    pub fn reject(&self, name: Name, reason: String) {
        let mut state = self.shared.lock();
        state.index.remove(&name);
        if state.bad.insert(name) {
            state.rejected += 1;
            state.warn(DiskError::Malformed {
                name: name.to_string(),
                reason,
            });
        }
    }

    /// Offer an entry for writing in the background. A segment comes with the keys of its own positions, a point with none.
    /// Chains are offered from the front: an entry whose chain isn't there when its turn comes is dropped.
    pub fn put(&self, name: Name, keys: Vec<Key>, tensors: Vec<Tensor>) -> Put {
        let Some(jobs) = &self.jobs else {
            return Put::Refused;
        };
        let mut state = self.shared.lock();
        if state.pending.contains(&name) || state.index.contains(&name) {
            return Put::Present;
        }
        let job = Job {
            name,
            keys,
            tensors,
            epoch: state.epoch,
        };
        let bytes = job.bytes();
        if !state.writable || bytes > self.shared.budget {
            return Put::Refused;
        }
        if !state.pending.is_empty() && state.pending_bytes + bytes > self.max_pending {
            return Put::Busy;
        }
        if jobs.try_send(job).is_err() {
            return Put::Busy;
        }
        state.pending.insert(name);
        state.pending_bytes += bytes;
        Put::Queued
    }

    /// Wait until everything offered so far is written or dropped; false if that takes longer than `timeout`.
    pub fn flush(&self, timeout: Duration) -> bool {
        let state = self.shared.lock();
        let waiting = |state: &mut State| !state.pending.is_empty();
        let (state, _) = self
            .shared
            .progress
            .wait_timeout_while(state, timeout, waiting)
            .unwrap_or_else(PoisonError::into_inner);
        state.pending.is_empty()
    }

    /// Delete every entry of this model, also those on their way, and write again where writing was given up.
    ///
    /// # Errors
    /// The first file that couldn't be removed; the others are.
    pub fn clear(&self) -> Result<(), DiskError> {
        let mut state = self.shared.lock();
        state.epoch += 1;
        state.writable = true;
        state.index = Index::default();
        state.bad.clear();
        state.seen = None;
        let mut outcome = Ok(());
        for file in std::fs::read_dir(&self.shared.directory)
            .into_iter()
            .flatten()
            .flatten()
        {
            // Another runner's file in writing is its own business.
            if file.file_name().to_string_lossy().starts_with(TEMPORARY) {
                continue;
            }
            match std::fs::remove_file(file.path()) {
                Err(source) if source.kind() != ErrorKind::NotFound && outcome.is_ok() => {
                    outcome = Err(DiskError::Io {
                        path: file.path(),
                        source,
                    });
                }
                _ => {}
            }
        }
        state.disk_bytes = scan(&self.shared.root, self.shared.stale_after)
            .iter()
            .map(|file| file.size)
            .sum();
        outcome
    }

    /// Entries, bytes of all models on disk, bytes waiting to be written, files evicted, whether writing works.
    pub fn figures(&self) -> DiskFigures {
        let state = self.shared.lock();
        DiskFigures {
            entries: state.index.len(),
            bytes: state.disk_bytes,
            pending_bytes: state.pending_bytes,
            evicted: state.evicted,
            writable: state.writable,
            stored: state.stored,
            loaded: state.loaded,
            rejected: state.rejected,
        }
    }

    /// The warnings since the last call.
    pub fn take_warnings(&self) -> Vec<DiskError> {
        std::mem::take(&mut self.shared.lock().warnings)
    }

    /// Take up what other runners have written or removed.
    fn refresh(&self, state: &mut State) {
        let modified = std::fs::metadata(&self.shared.directory)
            .and_then(|metadata| metadata.modified())
            .ok();
        if state.seen.is_some() && state.seen == modified {
            return;
        }
        let mut index = Index::default();
        for name in names(&self.shared.directory).filter(|name| !state.bad.contains(name)) {
            index.insert(name);
        }
        state.index = index;
        state.seen = modified.filter(|time| time.elapsed().is_ok_and(|age| age > UNSETTLED));
    }
}

/// The tier at one moment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DiskFigures {
    /// Entries of this model.
    pub entries: usize,
    /// Bytes of all models' files.
    pub bytes: u64,
    /// Bytes in host memory that wait to be written.
    pub pending_bytes: u64,
    /// Entries of this model removed to make room.
    pub evicted: u64,
    /// Whether entries are accepted.
    pub writable: bool,
    /// Entries written.
    pub stored: Transfers,
    /// Entries read.
    pub loaded: Transfers,
    /// Entries ignored as damaged or foreign.
    pub rejected: u64,
}

impl Drop for DiskStore {
    fn drop(&mut self) {
        self.shared.stopping.store(true, Ordering::Relaxed);
        self.jobs = None;
        if let Some(writer) = self.writer.take() {
            // A panic of the writer has been reported by the panic hook and cost entries only.
            let _ = writer.join();
        }
    }
}

/// Make our two directories, private to the user; the cache directory itself may be shared and is left as it is.
pub(super) fn create_directories(root: &Path, directory: &Path) -> Result<(), DiskError> {
    for path in [root, directory] {
        let failed = |source| DiskError::Io {
            path: path.to_owned(),
            source,
        };
        let mut builder = std::fs::DirBuilder::new();
        builder.recursive(true);
        #[cfg(unix)]
        std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
        builder.create(path).map_err(failed)?;
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt;
            let there = std::fs::metadata(path).map_err(failed)?.permissions().mode() & 0o777;
            // A read-only medium refuses, and what is there stays readable.
            if there != 0o700 {
                let _ = std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o700));
            }
        }
    }
    Ok(())
}

#[cfg(test)]
#[path = "store_tests.rs"]
mod tests;
