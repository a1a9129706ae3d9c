//! The cache's dealings with the disk tier: what is worth writing, and bringing a longer prefix than memory holds.

use std::ops::Range;

use super::{NodeId, PrefixCache};
use crate::prefix::disk::{DiskMatch, DiskStore, Name, Put};
use crate::prefix::key::{path_hash, Key, PathHasher};
use crate::prefix::payload::{Payloads, Segment};
use crate::prefix::plan::{lasting, PathPoint, PointKind};

impl<P: Payloads> PrefixCache<P> {
    /// Write what isn't on disk yet, most recently used first, until `bytes` are queued or the queue is full: for idle times.
    /// Returns how many restore points are new.
    pub fn persist(&mut self, payloads: &mut P, bytes: u64) -> usize {
        let Some(disk) = self.disk.clone() else { return 0 };
        let mut points: Vec<_> = self
            .trie
            .views()
            .into_iter()
            .filter_map(|view| Some((std::cmp::Reverse(view.point?.used), view.offset, view.node)))
            .collect();
        points.sort_unstable();
        let before = disk.figures().pending_bytes;
        let mut new = 0;
        for (.., node) in points {
            if disk.figures().pending_bytes.saturating_sub(before) >= bytes {
                break;
            }
            if self.lasting_on(node).contains(&node) {
                new += usize::from(self.store(payloads, node) == Some(Put::Queued));
            }
        }
        new
    }

    /// The nodes on the path to `node` whose restore points are worth a place on disk.
    pub(super) fn lasting_on(&self, node: NodeId) -> Vec<NodeId> {
        let edges = self.trie.edges(node).into_iter();
        let points: Vec<_> = edges
            .filter_map(|(at, range)| Some((at, range.end, self.trie.point(at)?.kind)))
            .collect();
        let path: Vec<_> = points
            .iter()
            .map(|&(_, offset, kind)| PathPoint { offset, kind })
            .collect();
        lasting(&path, self.config.disk_spacing)
            .into_iter()
            .map(|index| points[index].0)
            .collect()
    }

    /// Queue a restore point and the part of its chain that the disk lacks. None where writing isn't possible now.
    pub(super) fn store(&self, payloads: &mut P, node: NodeId) -> Option<Put> {
        let disk = self.disk.as_ref()?;
        let keys = self.trie.keys(node);
        let point = Name::Point {
            end: keys.len(),
            path: path_hash(&keys),
        };
        if disk.holds(&point) {
            return Some(Put::Present);
        }
        if !disk.figures().writable {
            return None;
        }
        let mut hasher = PathHasher::new();
        for (at, range) in self.trie.edges(node) {
            let (parent, path) = (
                hasher.advance(&keys, range.start),
                hasher.advance(&keys, range.end),
            );
            let name = Name::Segment {
                start: range.start,
                end: range.end,
                parent,
                path,
            };
            if disk.reaches(range.end, path) {
                continue;
            }
            let tensors = payloads
                .write_segment(self.trie.segment(at)?)
                .map_err(report)
                .ok()?;
            if !matches!(
                disk.put(name, keys[range].to_vec(), tensors),
                Put::Queued | Put::Present
            ) {
                return None;
            }
        }
        let tensors = payloads
            .write_point(&self.trie.point(node)?.payload)
            .map_err(report)
            .ok()?;
        Some(disk.put(point, Vec::new(), tensors))
    }

    /// Bring a longer prefix than memory holds from disk; whether there was one.
    pub(super) fn load(&mut self, payloads: &mut P, keys: &[Key], limit: usize) -> bool {
        let Some(disk) = self.disk.clone() else {
            return false;
        };
        let found = self.trie.find(keys, limit);
        let in_memory = found.point.map_or(0, |(_, offset)| offset);
        let gain = self.config.disk_spacing.max(1);
        // Every failed attempt makes the tier find less, so this ends.
        while let Some(there) = disk
            .lookup(keys, limit)
            .filter(|there| there.offset >= in_memory + gain)
        {
            let missing = found.matched.min(there.offset)..there.offset;
            let Some(segment) = read_segments(&disk, payloads, &there, keys, missing) else {
                continue;
            };
            let Some(point) = read_point(&disk, payloads, &there, keys) else {
                continue;
            };
            let path = &keys[..there.offset];
            match segment {
                Some(segment) => {
                    self.trie
                        .insert_point(path, PointKind::Rest, self.clock, point, |_| segment);
                }
                // All positions are held already, as part of a longer edge: only the state was missing.
                None => self.insert_held(path, point),
            }
            return true;
        }
        false
    }

    #[expect(
        clippy::unreachable,
        reason = "only called for paths that the trie matches to their end"
    )]
    fn insert_held(&mut self, path: &[Key], point: P::Point) {
        self.trie
            .insert_point(path, PointKind::Rest, self.clock, point, |_| {
                unreachable!("no position is missing")
            });
    }
}

fn report(error: impl std::error::Error) {
    tracing::warn!("prefix cache: copying for the disk tier: {error}");
}

/// The positions `missing` of a chain, as one segment: Some(None) where none are missing, None where an entry can't be read.
fn read_segments<P: Payloads>(
    disk: &DiskStore,
    payloads: &mut P,
    chain: &DiskMatch,
    keys: &[Key],
    missing: Range<usize>,
) -> Option<Option<P::Segment>> {
    let mut joined: Option<P::Segment> = None;
    for &name in &chain.segments {
        let Name::Segment { start, end, .. } = name else {
            continue;
        };
        if end <= missing.start || missing.is_empty() {
            continue;
        }
        let tensors = disk.load(name, keys)?;
        let read = payloads.read_segment(tensors, end - start);
        let whole = read.map_err(|error| disk.reject(name, error.to_string())).ok()?;
        let part = if start < missing.start {
            whole.split_at(missing.start - start).1
        } else {
            whole
        };
        joined = Some(match joined {
            Some(upper) => P::Segment::merge(upper, part),
            None => part,
        });
    }
    Some(joined)
}

fn read_point<P: Payloads>(
    disk: &DiskStore,
    payloads: &mut P,
    chain: &DiskMatch,
    keys: &[Key],
) -> Option<P::Point> {
    let tensors = disk.load(chain.point, keys)?;
    payloads
        .read_point(tensors)
        .map_err(|error| disk.reject(chain.point, error.to_string()))
        .ok()
}
