//! The engine's side of the prefix cache: a request's keys, restoring into live caches, and keeping what was computed.
//!
//! Invariant: everything stored is evaluated and compact, and holds the head's state exactly where the model has a head; the
//! path of a running request is pinned from [`Prefixes::begin`] to [`Prefixes::end`]; its live caches are counted.

mod payload;

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use lookahead_protocol::event::{CacheStatus, DiskTier, Tier};
use mlx_rs::error::{Exception, Result};
use mlx_rs::Array;

use crate::cache::{Caches, KvSegment, Snapshot};
use crate::prefix::budget::Budgets;
use crate::prefix::cache::{CacheConfig, PrefixCache};
use crate::prefix::disk::DiskStore;
use crate::prefix::key::{KeyStream, LookAhead, MediaSpan};
use crate::prefix::plan::{captures, Capture, Density, PointKind, Prompt, Turn};
use crate::prefix::trie::Pin;
use payload::{EdgeState, Mover, PointState};

/// Most bytes copied out for the disk at a time: the engine waits for the copying, not for the disk.
const PERSIST: u64 = 256 << 20;

/// See the module's text.
#[derive(Debug)]
pub struct Prefixes {
    cache: PrefixCache<Mover>,
    look_ahead: LookAhead,
    is_on: bool,
    live: u64,
}

/// What brings live caches to where a request starts.
#[derive(Debug)]
pub struct Restored {
    /// Key-values by layer of the trunk, each a list in order.
    pub trunk: Vec<Vec<KvSegment>>,
    /// The head's, where there is one.
    pub head: Option<Vec<KvSegment>>,
    /// Recurrent state, at the offset where the request starts.
    pub snapshot: Snapshot,
    /// The trunk's state at the last slot.
    pub frontier: Option<Array>,
}

/// A running request's place in the cache.
#[derive(Debug)]
pub struct Path {
    keys: KeyStream,
    media: Vec<Range<usize>>,
    pin: Option<Pin>,
    cached: usize,
    parted: Option<usize>,
}

impl Path {
    /// Tokens that needn't be evaluated.
    pub fn cached(&self) -> usize {
        self.cached
    }

    /// The states to capture while the prompt is prefilled.
    pub fn captures(&self, turns: &[Turn]) -> Vec<Capture> {
        let prompt = Prompt {
            tokens: self.keys.tokens(),
            turns,
            media: &self.media,
        };
        captures(&prompt, self.cached, self.parted, Density::default())
    }

    /// Appends generated tokens.
    pub fn extend(&mut self, tokens: &[u32]) {
        self.keys.extend(tokens);
    }
}

/// A whole state at one offset, on its way into the cache.
#[derive(Debug)]
pub struct State {
    /// Why it is kept.
    pub kind: PointKind,
    /// Recurrent state and offset.
    pub snapshot: Snapshot,
    /// The trunk's state at the last slot, where the model has a head.
    pub frontier: Option<Array>,
}

/// A live sequence: the trunk's caches and the head's.
#[derive(Debug)]
pub struct Live<'a> {
    /// Trunk.
    pub trunk: &'a Caches,
    /// Head.
    pub head: Option<&'a Caches>,
}

impl Live<'_> {
    fn segments(&self, range: Range<usize>) -> Result<EdgeState> {
        let (from, to) = (range.start as i32, range.end as i32);
        let mut layers = self.trunk.kv_segments(from, to)?;
        if let Some(head) = self.head {
            layers.extend(head.kv_segments(from, to)?);
        }
        EdgeState::new(layers, range.len())
    }
}

impl Prefixes {
    /// An empty cache. `drafts` says whether a head's key-values are kept beside the trunk's.
    pub fn new(budgets: Budgets, drafts: bool, disk: Option<DiskStore>) -> Self {
        Self {
            cache: PrefixCache::new(CacheConfig::new(budgets), disk.map(Arc::new)),
            look_ahead: if drafts {
                LookAhead::NextToken
            } else {
                LookAhead::None
            },
            is_on: budgets.device > 0,
            live: 0,
        }
    }

    /// Whether anything is ever kept.
    pub fn is_on(&self) -> bool {
        self.is_on
    }

    /// Finds where a prompt may start; `kv_layers` is how many key-value layers the trunk has.
    pub fn begin(
        &mut self,
        tokens: &[u32],
        media: &[MediaSpan],
        kv_layers: usize,
    ) -> (Path, Option<Restored>) {
        let keys = KeyStream::new(self.look_ahead, tokens, media);
        let found = self.cache.lookup(&mut Mover, keys.keys(), keys.limit());
        let mut path = Path {
            keys,
            media: media.iter().map(|span| span.positions.clone()).collect(),
            pin: Some(found.pin),
            cached: found.cached,
            parted: found.parted,
        };
        let restored = self.restore(&path, kv_layers).unwrap_or_else(|error| {
            tracing::warn!(
                "prefix cache: {} positions can't be restored: {error}",
                path.cached
            );
            // Whatever is wrong with them, it must not be met again.
            self.cache.reset();
            None
        });
        if restored.is_none() {
            path.cached = 0;
        }
        (path, restored)
    }

    fn restore(&self, path: &Path, kv_layers: usize) -> Result<Option<Restored>> {
        let found = path
            .pin
            .as_ref()
            .filter(|_| path.cached > 0)
            .and_then(|pin| self.cache.restore(pin));
        let Some(found) = found else { return Ok(None) };
        let mut trunk = Vec::new();
        for (_, segment) in found.segments {
            segment.append_to(&mut trunk)?;
        }
        let mut beyond = trunk.split_off(kv_layers.min(trunk.len()));
        let (head, frontier) = (beyond.pop(), found.point.frontier());
        let drafts = self.look_ahead == LookAhead::NextToken;
        if trunk.len() != kv_layers || head.is_some() != drafts || frontier.is_some() != drafts {
            return Err(Exception::custom("they have other layers than the model"));
        }
        Ok(Some(Restored {
            trunk,
            head,
            snapshot: found.point.snapshot(path.cached as i32),
            frontier,
        }))
    }

    /// Keeps states of a running request, key-values up to them included.
    pub fn keep(&mut self, path: &mut Path, states: Vec<State>, live: &Live<'_>) {
        let Some(pin) = path.pin.take() else { return };
        let mut captured = Vec::with_capacity(states.len());
        for State {
            kind,
            snapshot,
            frontier,
        } in states
        {
            let capture = Capture {
                offset: snapshot.offset as usize,
                kind,
            };
            match PointState::new(snapshot, frontier) {
                Ok(point) => captured.push((capture, point)),
                Err(error) => tracing::warn!("prefix cache: keeping a state: {error}"),
            }
        }
        let segment = |_: &mut Mover, range| live.segments(range);
        path.pin = Some(
            self.cache
                .grow(&mut Mover, pin, path.keys.keys(), captured, segment),
        );
    }

    /// Counts the bytes of a running request's caches, and moves and forgets others' until the budgets hold.
    pub fn set_live(&mut self, bytes: u64) {
        if bytes != self.live {
            self.live = bytes;
            self.cache.set_live_bytes(bytes);
            self.cache.settle(&mut Mover);
        }
    }

    /// Ends a request: its path may be given up from now on, and its caches are gone.
    pub fn end(&mut self, path: Option<Path>) {
        if let Some(pin) = path.and_then(|path| path.pin) {
            self.cache.release(pin);
        }
        self.set_live(0);
    }

    /// Gives the device's memory back after a failed allocation; false if there was nothing to give.
    pub fn make_room(&mut self) -> bool {
        self.cache.make_room(&mut Mover, u64::MAX)
    }

    /// Forgets everything, disk included.
    pub fn clear(&mut self) {
        if let Err(error) = self.cache.clear() {
            tracing::warn!("{error}");
        }
    }

    /// Forgets what is in memory, after a fault.
    pub fn reset(&mut self) {
        self.cache.reset();
        self.live = 0;
    }

    /// Offers to the disk what it lacks, for idle times.
    pub fn persist(&mut self) {
        self.cache.persist(&mut Mover, PERSIST);
    }

    /// Whether something is on its way to the disk.
    pub fn is_writing(&self) -> bool {
        self.cache.is_writing()
    }

    /// Waits for what is on its way to the disk.
    pub fn flush(&self, limit: Duration) {
        if !self.cache.flush(limit) {
            tracing::warn!("prefix cache: not everything has reached the disk within {limit:?}");
        }
    }

    /// What `status` tells.
    pub fn status(&self) -> CacheStatus {
        let stats = self.cache.stats();
        CacheStatus {
            nodes: stats.nodes as u64,
            restore_points: stats.restore_points as u64,
            device: Tier {
                bytes: stats.bytes.device,
                limit: stats.budget.device,
            },
            host: Tier {
                bytes: stats.bytes.host,
                limit: stats.budget.host,
            },
            disk: DiskTier {
                bytes: stats.bytes.disk,
                limit: stats.budget.disk,
                files: stats.disk_entries as u64,
                loads: stats.load.count,
                load_duration: stats.load.nanoseconds,
                stores: stats.store.count,
                store_duration: stats.store.nanoseconds,
                rejected: stats.disk_rejected,
            },
            hits: stats.lookups.hits,
            misses: stats.lookups.misses,
            hit_tokens: stats.lookups.hit_tokens,
            evictions: stats.evictions.forgotten + stats.evictions.thinned + stats.evictions.from_disk,
            demotions: stats.evictions.to_host,
            promotions: stats.lookups.disk_hits,
        }
    }
}
