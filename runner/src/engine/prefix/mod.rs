//! The engine's side of the prefix cache: a request's keys, restoring into live caches, and keeping what was computed.
//!
//! Invariant: everything stored is evaluated and compact, and holds the head's state exactly where the model has a head; the
//! path of a running request is pinned from [`Prefixes::begin`] to [`Prefixes::end`]; its live caches are counted, and so are those
//! that rest.

mod payload;
mod resting;

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use lookahead_protocol::event::{CacheStatus, DiskTier, Tier};
use mlx_rs::error::{Exception, Result};
use mlx_rs::Array;

use super::drafter::Drafter;
use crate::cache::{Caches, KvSegment, Snapshot};
use crate::prefix::budget::Budgets;
use crate::prefix::cache::{CacheConfig, PrefixCache};
use crate::prefix::disk::DiskStore;
use crate::prefix::key::{KeyStream, LookAhead, MediaSpan};
use crate::prefix::plan::{captures, Capture, Density, PointKind, Prompt, Turn};
use crate::prefix::trie::Pin;
use payload::{EdgeState, Mover, PointState};
pub use resting::Resting;

/// Most bytes copied out for the disk at a time: the engine waits for the copying, not for the disk.
const PERSIST: u64 = 256 << 20;

/// The latest sequence's buffers rest if they take at most this part of the device's budget: their slots are held twice.
const RESTING_PART: u64 = 3;

/// See the module's text.
#[derive(Debug)]
pub struct Prefixes {
    cache: PrefixCache<Mover>,
    look_ahead: LookAhead,
    /// The device's budget; 0 where the cache is off.
    budget: u64,
    /// Bytes of the running request's caches.
    running: u64,
    resting: Option<Resting>,
}

/// What brings live caches to where a request starts.
#[derive(Debug)]
pub struct Restored {
    key_values: KeyValues,
    /// Recurrent state, at the offset where the request starts.
    snapshot: Snapshot,
    /// The trunk's state at the last slot, where the model has a head.
    frontier: Option<Array>,
}

/// Key-values of the trunk, by layer, and of the head.
#[derive(Debug)]
enum KeyValues {
    /// In buffers that have room for more.
    Resting(Resting),
    /// In pieces, each list in order.
    Pieces(Vec<Vec<KvSegment>>, Option<Vec<KvSegment>>),
}

impl Restored {
    /// Puts everything into a request's caches.
    ///
    /// # Errors
    /// The device fails.
    pub fn load(self, caches: &mut Caches, drafter: Option<&mut Drafter<'_>>) -> Result<()> {
        let offset = self.snapshot.offset;
        match self.key_values {
            KeyValues::Resting(resting) => {
                *caches = resting.trunk;
                caches.resume(&self.snapshot);
                if let (Some(drafter), Some(head), Some(frontier)) = (drafter, resting.head, self.frontier) {
                    drafter.resume(offset, head, frontier);
                }
            }
            KeyValues::Pieces(trunk, head) => {
                caches.restore(offset, trunk, Some(&self.snapshot))?;
                if let (Some(drafter), Some(head), Some(frontier)) = (drafter, head, self.frontier) {
                    drafter.restore(offset, head, frontier)?;
                }
            }
        }
        Ok(())
    }
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
            budget: budgets.device,
            running: 0,
            resting: None,
        }
    }

    /// Whether anything is ever kept.
    pub fn is_on(&self) -> bool {
        self.budget > 0
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
        // Whatever can't go on in the resting buffers replaces them when it ends, and needs the memory before.
        let held = self.resting.take();
        let resting = held.filter(|held| held.serves(&path.keys.keys()[..path.cached]));
        self.count_live();
        let restored = self.restore(&path, kv_layers, resting).unwrap_or_else(|error| {
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

    fn restore(&self, path: &Path, kv_layers: usize, resting: Option<Resting>) -> Result<Option<Restored>> {
        let found = path
            .pin
            .as_ref()
            .filter(|_| path.cached > 0)
            .and_then(|pin| self.cache.restore(pin));
        let Some(found) = found else { return Ok(None) };
        let frontier = found.point.frontier();
        let (key_values, has_head) = match resting {
            Some(resting) => {
                let has_head = resting.head.is_some();
                (KeyValues::Resting(resting), has_head)
            }
            None => {
                let mut trunk = Vec::new();
                for (_, segment) in found.segments {
                    segment.append_to(&mut trunk)?;
                }
                let mut beyond = trunk.split_off(kv_layers.min(trunk.len()));
                if trunk.len() != kv_layers {
                    return Err(Exception::custom("they have other layers than the model"));
                }
                let head = beyond.pop();
                let has_head = head.is_some();
                (KeyValues::Pieces(trunk, head), has_head)
            }
        };
        let drafts = self.look_ahead == LookAhead::NextToken;
        if has_head != drafts || frontier.is_some() != drafts {
            return Err(Exception::custom("they have another head than the model"));
        }
        Ok(Some(Restored {
            key_values,
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
    pub fn set_running(&mut self, bytes: u64) {
        if bytes != self.running {
            self.running = bytes;
            self.count_live();
        }
    }

    fn count_live(&mut self) {
        let resting = self.resting.as_ref().map_or(0, Resting::bytes);
        let mut live = self.running + resting;
        if live > self.budget && resting > 0 {
            self.resting = None;
            live = self.running;
        }
        if self.cache.set_live_bytes(live) {
            self.cache.settle(&mut Mover);
        }
    }

    /// Lets a running request's path be given up: its live caches hold the same.
    pub fn loosen(&mut self, path: &mut Path) {
        path.pin = path.pin.take().map(|pin| self.cache.loosen(pin));
    }

    /// Forgets what a request started from and what it kept: it has led to logits that are no numbers.
    pub fn distrust(&mut self, path: &Path) {
        if let Some(pin) = &path.pin {
            self.cache.distrust(pin);
        }
    }

    /// Ends a request: its path may be given up from now on. `caches` are the trunk's and the head's if they are sound; the
    /// next turn may go on in them.
    pub fn end(&mut self, path: Option<Path>, caches: Option<(Caches, Option<Caches>)>) {
        let path = path.and_then(|path| Some((path.keys, path.pin?)));
        if let Some((keys, pin)) = &path {
            // After a `clear` nothing from before may stay.
            let is_known = self.cache.trie().pinned(pin).is_some();
            if let Some((trunk, head)) = caches.filter(|_| is_known) {
                self.rest(keys, trunk, head);
            }
        }
        self.running = 0;
        self.count_live();
        if let Some((_, pin)) = path {
            self.cache.release(&mut Mover, pin);
        }
    }

    fn rest(&mut self, keys: &KeyStream, trunk: Caches, head: Option<Caches>) {
        let drafts = self.look_ahead == LookAhead::NextToken;
        if trunk.offset() == 0 || head.is_some() != drafts {
            return;
        }
        match Resting::new(keys.keys(), trunk, head) {
            Ok(resting) if resting.bytes() <= self.budget / RESTING_PART => self.resting = Some(resting),
            Ok(_) => {}
            Err(error) => tracing::warn!("prefix cache: keeping a request's buffers: {error}"),
        }
    }

    /// Gives `bytes` of the device's memory back, or as much as isn't in use; false if there was nothing to give.
    pub fn make_room(&mut self, bytes: u64) -> bool {
        let rested = self.resting.take().map_or(0, |resting| resting.bytes());
        self.count_live();
        let made = rested < bytes && self.cache.make_room(&mut Mover, bytes - rested);
        made || rested > 0
    }

    /// Forgets everything, disk included.
    pub fn clear(&mut self) {
        self.resting = None;
        self.count_live();
        if let Err(error) = self.cache.clear() {
            tracing::warn!("{error}");
        }
    }

    /// Forgets what is in memory, after a fault.
    pub fn reset(&mut self) {
        self.cache.reset();
        self.resting = None;
        self.running = 0;
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

#[cfg(test)]
mod tests;
