//! What the prefix cache did and holds, as a host sees it in `status`.

use std::time::Duration;

/// Everything at one moment. Counters run since the start of the process.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct PrefixStats {
    /// Nodes of the trie.
    pub nodes: usize,
    /// Restore points in memory.
    pub restore_points: usize,
    /// Bytes held now.
    pub bytes: TierUse,
    /// Most bytes allowed.
    pub budget: TierUse,
    /// Entries in the disk tier.
    pub disk_entries: usize,
    /// Entries in the disk tier that were ignored as damaged or foreign.
    pub disk_rejected: u64,
    /// What requests found.
    pub lookups: Lookups,
    /// What was given up or moved to fit the budgets.
    pub evictions: Evictions,
    /// Entries read from disk.
    pub load: Transfers,
    /// Entries written to disk.
    pub store: Transfers,
}

/// Bytes by tier.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct TierUse {
    /// Device memory, live caches included.
    pub device: u64,
    /// Host memory, entries waiting to be written included.
    pub host: u64,
    /// Disk, all models together.
    pub disk: u64,
}

/// Hits and misses.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Lookups {
    /// Requests that restored something.
    pub hits: u64,
    /// Requests that restored nothing.
    pub misses: u64,
    /// Tokens not evaluated thanks to hits.
    pub hit_tokens: u64,
    /// Hits whose state came from disk, at least in part.
    pub disk_hits: u64,
}

/// Payloads moved and forgotten.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Evictions {
    /// Payloads moved from the device to host memory.
    pub to_host: u64,
    /// Restore points forgotten, least recently used.
    pub forgotten: u64,
    /// Restore points of a path in use given up to keep it sparse.
    pub thinned: u64,
    /// Moves that failed.
    pub failed: u64,
    /// Entries removed from disk to make room there.
    pub from_disk: u64,
}

/// Work between memory and disk.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Transfers {
    /// Entries moved.
    pub count: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Time taken, nanoseconds.
    pub nanoseconds: u64,
}

impl Transfers {
    /// Count one entry.
    pub fn add(&mut self, bytes: u64, took: Duration) {
        self.count += 1;
        self.bytes += bytes;
        self.nanoseconds += u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
    }
}
