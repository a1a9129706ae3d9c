//! The cache as a request sees it: look up, grow, settle. Ties the trie, the budgets, the disk tier and the figures together.
//!
//! One owner, the engine's thread. A request holds a [`Pin`] from [`PrefixCache::lookup`] on, which keeps the path that it
//! started from; [`PrefixCache::grow`] moves it to where the request has come to rest, finished or cancelled.
//! Budgets hold after every call that can grow anything; a failed move costs cached state, never a request.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use super::budget::{next_step, next_thinning, Budgets, Next, Part, Step};
use super::disk::{DiskError, DiskStore};
use super::key::Key;
use super::payload::{Payloads, TierBytes};
use super::plan::Capture;
use super::stats::{Evictions, Lookups, PrefixStats, TierUse};
use super::trie::{NodeId, Pin, Trie};

/// How the cache is to behave.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct CacheConfig {
    /// Most bytes per tier.
    pub budgets: Budgets,
    /// Most that the restore points of the path in use may take of the memory budgets, 0 to 1.
    pub path_share: f64,
    /// What counts as close on disk, in tokens: restore points nearer than this to another share its place, and a hit there
    /// must save as much over what memory holds.
    pub disk_spacing: usize,
}

impl CacheConfig {
    /// The usual policy: half for the path in use; 16 tokens, more than a generation prompt has.
    pub fn new(budgets: Budgets) -> Self {
        Self {
            budgets,
            path_share: 0.5,
            disk_spacing: 16,
        }
    }
}

/// Where a request starts.
#[derive(Debug)]
pub struct Lookup {
    /// Keeps the path; to be given to [`PrefixCache::grow`] or [`PrefixCache::release`].
    pub pin: Pin,
    /// Positions that needn't be evaluated: restore them with [`PrefixCache::restore`].
    pub cached: usize,
    /// Keys in common with what the cache holds, which may reach beyond what can be restored.
    pub matched: usize,
    /// Where to capture a state since an earlier request parted from this one there.
    pub parted: Option<usize>,
}

/// What brings the live caches to the end of a path.
#[derive(Debug)]
pub struct Restore<'a, S, R> {
    /// Per-position state, in order, from position 0 without gaps.
    pub segments: Vec<(Range<usize>, &'a S)>,
    /// Whole state at the end.
    pub point: &'a R,
}

/// How much of a shortage could be met.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Shortage {
    /// Bytes over the device's budget that running requests hold.
    pub device: u64,
    /// Bytes over the host budget that running requests hold.
    pub host: u64,
}

/// The prefix cache of one model.
#[derive(Debug)]
pub struct PrefixCache<P: Payloads> {
    trie: Trie<P::Segment, P::Point>,
    config: CacheConfig,
    disk: Option<Arc<DiskStore>>,
    live: u64,
    /// Most live bytes for which everything held fits the device's budget.
    room: u64,
    clock: u64,
    lookups: Lookups,
    evictions: Evictions,
}

impl<P: Payloads> PrefixCache<P> {
    /// An empty cache; `disk` is absent where that tier is off.
    pub fn new(config: CacheConfig, disk: Option<Arc<DiskStore>>) -> Self {
        Self {
            trie: Trie::new(),
            config,
            disk,
            live: 0,
            room: 0,
            clock: 0,
            lookups: Lookups::default(),
            evictions: Evictions::default(),
        }
    }

    /// Find and pin the longest restorable prefix of `keys` of at most `limit` positions, from disk where that reaches
    /// further. Counts as a hit or a miss.
    pub fn lookup(&mut self, payloads: &mut P, keys: &[Key], limit: usize) -> Lookup {
        self.clock += 1;
        let from_disk = self.load(payloads, keys, limit);
        let (pin, cached, matched) = loop {
            let found = self.trie.find(keys, limit);
            let (node, cached) = found.point.unwrap_or((self.trie.root(), 0));
            self.trie.touch(node, self.clock);
            let pin = self.trie.pin(node);
            let short = self.settle(payloads) != Shortage::default();
            // What came from disk may exceed the budgets by itself; then the next shorter prefix has to do.
            if cached > 0 && from_disk && short {
                self.trie.remove_point(node);
            }
            if cached == 0 || self.trie.point(node).is_some() {
                break (pin, cached, found.matched);
            }
            self.trie.unpin(pin);
        };
        if cached > 0 {
            self.lookups.hits += 1;
            self.lookups.hit_tokens += cached as u64;
            self.lookups.disk_hits += u64::from(from_disk);
        } else {
            self.lookups.misses += 1;
        }
        let parted = Some(matched).filter(|&matched| matched > cached && matched <= limit);
        Lookup {
            pin,
            cached,
            matched,
            parted,
        }
    }

    /// The state at the end of a pinned path; none at the root, after [`PrefixCache::clear`], or where the restore point has
    /// been given up since the path was pinned.
    pub fn restore(&self, pin: &Pin) -> Option<Restore<'_, P::Segment, P::Point>> {
        let node = self.trie.pinned(pin)?;
        let point = &self.trie.point(node)?.payload;
        let edges = self.trie.edges(node).into_iter();
        let segments = edges
            .filter_map(|(at, range)| Some((range, self.trie.segment(at)?)))
            .collect();
        Some(Restore { segments, point })
    }

    /// Record what a request has computed: states captured on the way along `keys` (those beyond the keys are dropped), the
    /// last of them where it rests, and `segment(range)` for positions that weren't held yet. Returns the pin, moved to the
    /// last state. What comes after a segment that can't be made isn't recorded, nor is anything under a pin from before
    /// [`PrefixCache::clear`].
    pub fn grow(
        &mut self,
        payloads: &mut P,
        pin: Pin,
        keys: &[Key],
        mut captured: Vec<(Capture, P::Point)>,
        mut segment: impl FnMut(&mut P, Range<usize>) -> Result<P::Segment, P::Error>,
    ) -> Pin {
        if self.trie.pinned(&pin).is_none() {
            return pin;
        }
        self.clock += 1;
        captured.sort_by_key(|(capture, _)| capture.offset);
        let mut last = None;
        for (capture, point) in captured {
            let Some(path) = keys.get(..capture.offset).filter(|path| !path.is_empty()) else {
                continue;
            };
            let made = |range| segment(payloads, range);
            match self
                .trie
                .try_insert_point(path, capture.kind, self.clock, point, made)
            {
                Ok(node) => last = Some(node),
                Err(error) => {
                    tracing::warn!("prefix cache: keeping {} positions: {error}", path.len());
                    break;
                }
            }
        }
        let pin = match last {
            Some(node) => {
                self.trie.touch(node, self.clock);
                self.trie.repin(pin, node)
            }
            None => pin,
        };
        self.settle(payloads);
        pin
    }

    /// Give up every restore point of a path, the shared ones too: one of them, nobody knows which, led to nonsense.
    pub fn distrust(&mut self, pin: &Pin) {
        let Some(end) = self.trie.pinned(pin) else { return };
        let next = |trie: &Trie<_, _>| trie.path(end).find(|&node| trie.point(node).is_some());
        while let Some(node) = next(&self.trie) {
            self.trie.remove_point(node);
        }
    }

    /// Keep a path no longer, but go on recording under its pin: [`PrefixCache::grow`] asks for what has been given up by then.
    pub fn loosen(&mut self, pin: Pin) -> Pin {
        match self.trie.pinned(&pin) {
            Some(_) => self.trie.repin(pin, self.trie.root()),
            None => pin,
        }
    }

    /// Let go of a path. It may have been too long for the budgets while it was in use; from here on they hold for it as well.
    pub fn release(&mut self, payloads: &mut P, pin: Pin) {
        self.trie.unpin(pin);
        self.settle(payloads);
    }

    /// Tell how many bytes the live caches occupy; they count against the device's budget. True if that calls for
    /// [`PrefixCache::settle`]: most calls don't, and they come with every decoding round.
    pub fn set_live_bytes(&mut self, bytes: u64) -> bool {
        self.live = bytes;
        bytes > self.room
    }

    /// Move and forget until the budgets hold.
    pub fn settle(&mut self, payloads: &mut P) -> Shortage {
        let budgets = self.config.budgets;
        let memory = budgets.device.saturating_add(budgets.host);
        let share = (memory as f64 * self.config.path_share.clamp(0.0, 1.0)) as u64;
        while let Some(node) = next_thinning(&self.trie, share) {
            self.evictions.thinned += 1;
            self.trie.remove_point(node);
        }
        let shortage = self.fit(payloads, budgets.device.saturating_sub(self.live));
        self.room = budgets.device.saturating_sub(self.trie.bytes().device);
        shortage
    }

    /// After a failed allocation: give up device memory, at least `bytes` of it where that much isn't in use. False if
    /// nothing could be freed, so that trying again is pointless.
    pub fn make_room(&mut self, payloads: &mut P, bytes: u64) -> bool {
        let held = self.trie.bytes().device;
        self.fit(payloads, held.saturating_sub(bytes.max(1)));
        self.trie.bytes().device < held
    }

    fn fit(&mut self, payloads: &mut P, device: u64) -> Shortage {
        let limits = TierBytes {
            device,
            host: self.config.budgets.host,
        };
        loop {
            match next_step(&self.trie, limits) {
                Next::Fits => return Shortage::default(),
                Next::Short { device, host } => return Shortage { device, host },
                Next::Step(Step::Forget(node)) => self.forget(payloads, node),
                Next::Step(Step::ToHost(node, part)) => {
                    if self.demote(payloads, node, part) {
                        self.evictions.to_host += 1;
                    } else {
                        self.evictions.failed += 1;
                        // What can't be moved is given up, together with whatever would keep it: the oldest goes first
                        // again, until the payload itself has gone.
                        let oldest = self.trie.oldest_point().filter(|_| !matches!(part, Part::Point));
                        self.forget(payloads, oldest.unwrap_or(node));
                    }
                }
            }
        }
    }

    fn demote(&mut self, payloads: &mut P, node: NodeId, part: Part) -> bool {
        let moved = match part {
            Part::Segment => self
                .trie
                .segment_mut(node)
                .map(|segment| payloads.segment_to_host(segment)),
            Part::Point => self
                .trie
                .point_mut(node)
                .map(|point| payloads.point_to_host(&mut point.payload)),
        };
        match moved {
            Some(Err(error)) => {
                tracing::warn!("prefix cache: moving to host memory: {error}");
                false
            }
            Some(Ok(())) => true,
            None => false,
        }
    }

    /// Remove a restore point from memory, leaving it to the disk tier if that has room for it.
    fn forget(&mut self, payloads: &mut P, node: NodeId) {
        self.evictions.forgotten += 1;
        if self.lasting_on(node).contains(&node) {
            self.store(payloads, node);
        }
        self.trie.remove_point(node);
    }

    /// Forget everything, on disk too. Pins of running requests are void; what these compute isn't recorded.
    ///
    /// # Errors
    /// A file that couldn't be removed; everything else is gone.
    pub fn clear(&mut self) -> Result<(), DiskError> {
        self.trie.clear();
        self.disk.as_ref().map_or(Ok(()), |disk| disk.clear())
    }

    /// Forget what is in memory, pinned or not: after a fault, when it can't be trusted any more.
    pub fn reset(&mut self) {
        self.trie.clear();
        self.live = 0;
    }

    /// Whether something waits to be written to disk.
    pub fn is_writing(&self) -> bool {
        self.disk
            .as_ref()
            .is_some_and(|disk| disk.figures().pending_bytes > 0)
    }

    /// Wait for what is queued for disk, at shutdown; false if that takes longer than `timeout`.
    pub fn flush(&self, timeout: Duration) -> bool {
        self.disk.as_ref().is_none_or(|disk| disk.flush(timeout))
    }

    /// The trie, read only.
    pub fn trie(&self) -> &Trie<P::Segment, P::Point> {
        &self.trie
    }

    /// Everything a host may want to know.
    pub fn stats(&self) -> PrefixStats {
        let (nodes, restore_points) = self.trie.counts();
        let held = self.trie.bytes();
        let disk = self.disk.as_ref().map(|disk| disk.figures());
        let budgets = self.config.budgets;
        PrefixStats {
            nodes,
            restore_points,
            bytes: TierUse {
                device: held.device + self.live,
                host: held.host + disk.map_or(0, |disk| disk.pending_bytes),
                disk: disk.map_or(0, |disk| disk.bytes),
            },
            budget: TierUse {
                device: budgets.device,
                host: budgets.host,
                disk: budgets.disk,
            },
            disk_entries: disk.map_or(0, |disk| disk.entries),
            disk_rejected: disk.map_or(0, |disk| disk.rejected),
            lookups: self.lookups,
            evictions: Evictions {
                from_disk: disk.map_or(0, |disk| disk.evicted),
                ..self.evictions
            },
            load: disk.map(|disk| disk.loaded).unwrap_or_default(),
            store: disk.map(|disk| disk.stored).unwrap_or_default(),
        }
    }
}

#[path = "cache_disk.rs"]
mod disk_tier;

#[cfg(test)]
#[path = "cache_tests.rs"]
mod tests;

#[cfg(test)]
#[path = "cache_model_tests.rs"]
mod model_tests;
