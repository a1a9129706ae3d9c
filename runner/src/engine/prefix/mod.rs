//! The engine's prefix cache: finds where a request may start, and keeps what it has computed.
//!
//! Invariant: everything stored is evaluated and compact; the live caches of a running request are counted with the trie's
//! own bytes against the device budget.

mod payload;

use mlx_rs::error::Result;
use mlx_rs::transforms::eval;
use mlx_rs::Array;

use lookahead_protocol::event::{CacheStatus, DiskTier, Tier};

use crate::cache::{Caches, KvSegment, Snapshot};
use crate::prefix::budget::{next_step, next_thinning, Budgets, Next, Part, Step};
use crate::prefix::disk::{DiskStore, Name};
use crate::prefix::key::{path_hash, KeyStream, LookAhead, MediaSpan};
use crate::prefix::payload::{Payloads as _, Segment as _, TierBytes};
use crate::prefix::plan::{captures, lasting, Capture, Density, PathPoint, PointKind, Prompt, Turn};
use crate::prefix::trie::{NodeId, Trie};
use payload::{EdgeState, Mover, PointState};

/// Points closer than this, in tokens, share one place on disk.
const DISK_SPACING: usize = 64;

/// Counters since the process's start.
#[derive(Debug, Default, Clone, Copy)]
struct Counters {
    hits: u64,
    misses: u64,
    hit_tokens: u64,
    evictions: u64,
    demotions: u64,
    promotions: u64,
    rejected: u64,
}

/// See the module's text.
#[derive(Debug)]
pub struct PrefixCache {
    trie: Trie<EdgeState, PointState>,
    look_ahead: LookAhead,
    budgets: Budgets,
    disk: Option<DiskStore>,
    clock: u64,
    counters: Counters,
}

/// Where a request starts from.
#[derive(Debug)]
pub struct Restored {
    /// Tokens restored.
    pub offset: usize,
    /// Key-values by layer of the trunk, each a list in order.
    pub trunk: Vec<Vec<KvSegment>>,
    /// The head's, where there is one.
    pub head: Option<Vec<KvSegment>>,
    /// Recurrent state.
    pub snapshot: Snapshot,
    /// The trunk's state at the last slot.
    pub frontier: Option<Array>,
}

/// A running request's view of the cache: its keys.
#[derive(Debug)]
pub struct Path {
    keys: KeyStream,
}

/// Something that holds the key-values of a live sequence.
pub trait Source {
    /// Compact copies of slots `from..to`, every layer of the trunk, then the head's.
    fn segments(&self, from: usize, to: usize) -> Result<Vec<KvSegment>>;
}

impl PrefixCache {
    /// An empty cache. `drafts` says whether a head's key-values are kept beside the trunk's.
    pub fn new(budgets: Budgets, drafts: bool, disk: Option<DiskStore>) -> Self {
        let look_ahead = if drafts { LookAhead::NextToken } else { LookAhead::None };
        Self { trie: Trie::new(), look_ahead, budgets, disk, clock: 0, counters: Counters::default() }
    }

    /// Whether anything is ever kept.
    pub fn is_on(&self) -> bool {
        self.budgets.device > 0
    }

    /// The path of a prompt.
    pub fn path(&self, tokens: &[u32], media: &[MediaSpan]) -> Path {
        Path { keys: KeyStream::new(self.look_ahead, tokens, media) }
    }

    /// The longest restorable prefix, and how many keys the trie has in common with the prompt.
    pub fn find(&mut self, path: &Path, trunk_layers: usize) -> (Option<Restored>, usize) {
        self.clock += 1;
        let limit = path.keys.limit();
        self.fetch_from_disk(path, limit);
        let found = self.trie.find(path.keys.keys(), limit);
        let restored = match found.point {
            Some((node, offset)) if offset > 0 => match self.restore(node, offset, trunk_layers) {
                Ok(restored) => Some(restored),
                Err(error) => {
                    tracing::warn!("a cached prefix could not be restored: {error}");
                    self.trie.remove_point(node);
                    None
                }
            },
            _ => None,
        };
        match &restored {
            Some(restored) => {
                self.counters.hits += 1;
                self.counters.hit_tokens += restored.offset as u64;
            }
            None => self.counters.misses += 1,
        }
        (restored, found.matched)
    }

    fn restore(&mut self, node: NodeId, offset: usize, trunk_layers: usize) -> Result<Restored> {
        let mut layers = Vec::new();
        for (edge, _) in self.trie.edges(node) {
            if let Some(segment) = self.trie.segment(edge) {
                segment.append_to(&mut layers)?;
            }
        }
        let head = (layers.len() > trunk_layers).then(|| layers.split_off(trunk_layers)).and_then(|mut h| h.pop());
        let point = self
            .trie
            .point(node)
            .ok_or_else(|| mlx_rs::error::Exception::custom("restore point has vanished"))?;
        let (snapshot, frontier) = (point.payload.snapshot(), point.payload.frontier());
        self.trie.touch(node, self.clock);
        Ok(Restored { offset, trunk: layers, head, snapshot, frontier })
    }

    /// The states to capture while a prompt is prefilled from `restored` on.
    pub fn captures(&self, path: &Path, turns: &[Turn], restored: usize, matched: usize) -> Vec<Capture> {
        let tokens = path.keys.tokens();
        let prompt = Prompt { tokens, turns, media: &[] };
        let parted = (matched > restored && matched + 1 < tokens).then_some(matched);
        captures(&prompt, restored, parted, Density::default())
    }

    /// Appends generated tokens to a path.
    pub fn extend(&self, path: &mut Path, tokens: &[u32]) {
        path.keys.extend(tokens);
    }

    /// Keeps the state at `snapshot.offset` of a path; slots that the trie lacks come from `source`.
    pub fn keep(
        &mut self,
        path: &Path,
        kind: PointKind,
        snapshot: Snapshot,
        frontier: Option<Array>,
        source: &dyn Source,
    ) -> Result<()> {
        let offset = snapshot.offset as usize;
        let keys = path.keys.keys();
        if offset == 0 || offset > keys.len() {
            return Ok(());
        }
        let keys = &keys[..offset];
        let matched = self.trie.find(keys, offset).matched;
        let edge = match matched < offset {
            true => EdgeState::new(source.segments(matched, offset)?, offset - matched),
            false => EdgeState::default(),
        };
        let point = PointState::new(snapshot, frontier);
        let arrays: Vec<Array> = edge.arrays().into_iter().chain(point.arrays()).collect();
        eval(&arrays)?;
        self.clock += 1;
        self.trie.insert_point(keys, kind, self.clock, point, |range| {
            debug_assert_eq!(range, matched..offset, "the trie lacks what it lacked before");
            edge
        });
        Ok(())
    }

    /// Moves and forgets until the budgets hold, `live` bytes being taken by running requests.
    pub fn fit(&mut self, live: u64) {
        let limits = TierBytes { device: self.budgets.device.saturating_sub(live), host: self.budgets.host };
        while let Some(node) = next_thinning(&self.trie, limits.device / 2) {
            self.trie.remove_point(node);
            self.counters.evictions += 1;
        }
        loop {
            match next_step(&self.trie, limits) {
                Next::Fits | Next::Short { .. } => return,
                Next::Step(Step::Forget(node)) => {
                    self.trie.remove_point(node);
                    self.counters.evictions += 1;
                }
                Next::Step(Step::ToHost(node, part)) => {
                    let moved = match part {
                        Part::Segment => self.trie.segment_mut(node).map(|s| Mover.segment_to_host(s)),
                        Part::Point => self.trie.point_mut(node).map(|p| Mover.point_to_host(&mut p.payload)),
                    };
                    match moved {
                        Some(Ok(())) => self.counters.demotions += 1,
                        _ => {
                            self.trie.remove_point(node);
                            self.counters.evictions += 1;
                        }
                    }
                }
            }
        }
    }

    /// Gives the device's memory back after a failed allocation; false if there was nothing to give.
    pub fn evict_all(&mut self) -> bool {
        let held = self.trie.bytes().device > 0;
        let before = self.budgets.device;
        self.budgets.device = 0;
        self.fit(0);
        self.budgets.device = before;
        held
    }

    /// Forgets everything, disk included.
    pub fn clear(&mut self) {
        self.trie.clear();
        if let Some(Err(error)) = self.disk.as_ref().map(DiskStore::clear) {
            tracing::warn!("clearing the disk cache: {error}");
        }
    }

    /// Reads a prefix from disk into the trie where that is longer than what memory has.
    fn fetch_from_disk(&mut self, path: &Path, limit: usize) {
        let Some(disk) = &self.disk else { return };
        self.counters.rejected += disk.take_warnings().len() as u64;
        let keys = path.keys.keys();
        let memory = self.trie.find(keys, limit).point.map_or(0, |(_, offset)| offset);
        let Some(found) = disk.lookup(keys, limit.min(keys.len())).filter(|found| found.offset > memory) else {
            return;
        };
        let mut edges = EdgeState::default();
        for name in &found.segments {
            let Name::Segment { start, end, .. } = *name else { return };
            let Some(tensors) = disk.load(*name, &keys[start..end]) else { return };
            match Mover.read_segment(tensors, end - start) {
                Ok(edge) => edges = EdgeState::merge(edges, edge),
                Err(error) => return disk.reject(*name, error.to_string()),
            }
        }
        let Some(tensors) = disk.load(found.point, &[]) else { return };
        let point = match Mover.read_point(tensors) {
            Ok(point) => point.at(found.offset),
            Err(error) => return disk.reject(found.point, error.to_string()),
        };
        let keys = &keys[..found.offset];
        let matched = self.trie.find(keys, found.offset).matched;
        let edge = match matched {
            0 => edges,
            matched if matched < found.offset => edges.split_at(matched).1,
            _ => EdgeState::default(),
        };
        self.trie.insert_point(keys, PointKind::Rest, self.clock, point, |_| edge);
        self.counters.promotions += 1;
    }

    /// Offers a path's lasting points to the disk tier.
    pub fn write_behind(&mut self, path: &Path) {
        let Some(disk) = &self.disk else { return };
        let keys = path.keys.keys();
        let Some((node, _)) = self.trie.find(keys, keys.len()).point else { return };
        let edges = self.trie.edges(node);
        let points: Vec<(NodeId, PathPoint)> = edges
            .iter()
            .filter_map(|(at, range)| {
                let point = self.trie.point(*at)?;
                Some((*at, PathPoint { offset: range.end, kind: point.kind }))
            })
            .collect();
        let offered: Vec<PathPoint> = points.iter().map(|(_, p)| *p).collect();
        let kept = lasting(&offered, DISK_SPACING);
        let Some(end) = kept.last().map(|&index| offered[index].offset) else { return };
        for (at, range) in edges.iter().filter(|(_, range)| range.end <= end) {
            let (start, end) = (range.start, range.end);
            let name = Name::Segment {
                start,
                end,
                parent: path_hash(&keys[..start]),
                path: path_hash(&keys[..end]),
            };
            if disk.reaches(end, path_hash(&keys[..end])) {
                continue;
            }
            let Some(segment) = self.trie.segment(*at) else { return };
            match Mover.write_segment(segment) {
                Ok(tensors) => {
                    disk.put(name, keys[start..end].to_vec(), tensors);
                }
                Err(error) => return tracing::warn!("a prefix can't be written to disk: {error}"),
            }
        }
        for index in kept {
            let (at, point) = points[index];
            let name = Name::Point { end: point.offset, path: path_hash(&keys[..point.offset]) };
            if disk.holds(&name) {
                continue;
            }
            let Some(held) = self.trie.point(at) else { continue };
            match Mover.write_point(&held.payload) {
                Ok(tensors) => {
                    disk.put(name, Vec::new(), tensors);
                }
                Err(error) => return tracing::warn!("a prefix can't be written to disk: {error}"),
            }
        }
    }

    /// Waits for what is on its way to the disk.
    pub fn flush(&self, limit: std::time::Duration) {
        if let Some(disk) = &self.disk {
            disk.flush(limit);
        }
    }

    /// What `status` tells; `live` bytes are taken by running requests.
    pub fn status(&self, live: u64) -> CacheStatus {
        let (nodes, points) = self.trie.counts();
        let bytes = self.trie.bytes();
        let disk = self.disk.as_ref().map_or_else(DiskTier::default, |disk| {
            let figures = disk.figures();
            DiskTier {
                bytes: figures.bytes,
                limit: self.budgets.disk,
                files: figures.entries as u64,
                loads: figures.loaded.count,
                load_duration: figures.loaded.nanoseconds,
                stores: figures.stored.count,
                store_duration: figures.stored.nanoseconds,
                rejected: self.counters.rejected,
            }
        });
        CacheStatus {
            nodes: nodes as u64,
            restore_points: points as u64,
            device: Tier { bytes: bytes.device + live, limit: self.budgets.device },
            host: Tier { bytes: bytes.host, limit: self.budgets.host },
            disk,
            hits: self.counters.hits,
            misses: self.counters.misses,
            hit_tokens: self.counters.hit_tokens,
            evictions: self.counters.evictions,
            demotions: self.counters.demotions,
            promotions: self.counters.promotions,
        }
    }
}

/// A live sequence: the trunk's caches and the head's.
#[derive(Debug)]
pub struct Live<'a> {
    /// Trunk.
    pub trunk: &'a Caches,
    /// Head.
    pub head: Option<&'a Caches>,
}

impl Source for Live<'_> {
    fn segments(&self, from: usize, to: usize) -> Result<Vec<KvSegment>> {
        let mut out = self.trunk.kv_segments(from as i32, to as i32)?;
        if let Some(head) = self.head {
            out.extend(head.kv_segments(from as i32, to as i32)?);
        }
        Ok(out)
    }
}
