//! The compressed trie of everything cached: edges own the per-position state of their keys, nodes may own a restore point.
//!
//! Invariants (see [`Trie::check`]): siblings never share a first key; a segment spans exactly its edge; every node but the
//! root is there for a reason: it holds a restore point, is where a pinned path ends, or branches. Hence no per-position state
//! is kept beyond the last restore point of a path, from which recurrent layers could never be resumed, and every leaf can be
//! restored to or is in use. A node on a pinned path is never removed; its restore point may be.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::ops::Range;

use slab::Slab;

use super::key::Key;
use super::payload::{Bytes, Segment};
use super::plan::PointKind;

/// A node. Valid until the next call that changes the trie, unless pinned.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct NodeId(pub(super) usize);

/// Keeps the path to a node. Not `Clone`: one owner, who gives it back to [`Trie::unpin`].
#[derive(PartialEq, Eq, Debug)]
pub struct Pin(u64);

/// Whole state at a node's end.
#[derive(Debug)]
pub struct Point<R> {
    /// Why it was captured.
    pub kind: PointKind,
    /// When it was captured or last of use, in the cache's clock.
    pub used: u64,
    /// The state.
    pub payload: R,
}

/// Where a key sequence leads.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Found {
    /// Keys in common with the trie.
    pub matched: usize,
    /// The deepest node with a restore point on the matched path within the limit, and its offset.
    pub point: Option<(NodeId, usize)>,
}

#[derive(Debug)]
pub(super) struct Node<S, R> {
    /// Itself for the root.
    pub(super) parent: NodeId,
    pub(super) edge: Vec<Key>,
    /// Keys from the root to here.
    pub(super) end: usize,
    pub(super) children: BTreeMap<Key, NodeId>,
    /// None for the root only.
    pub(super) segment: Option<S>,
    pub(super) point: Option<Point<R>>,
    /// Pinned paths through or to here, and those that end here.
    pub(super) pinned: usize,
    pub(super) pin_ends: usize,
}

/// The trie. `S` is the per-position state of an edge, `R` the whole state at a node.
#[derive(Debug)]
pub struct Trie<S, R> {
    pub(super) nodes: Slab<Node<S, R>>,
    pub(super) root: NodeId,
    pub(super) pins: BTreeMap<u64, NodeId>,
    next_pin: u64,
}

/// How far a walk got: the last node whose whole edge matched, and the child whose edge matched in part.
struct Walk {
    node: NodeId,
    partial: Option<(NodeId, usize)>,
    matched: usize,
}

impl<S: Segment, R: Bytes> Default for Trie<S, R> {
    fn default() -> Self {
        Self::new()
    }
}

impl<S: Segment, R: Bytes> Trie<S, R> {
    /// A trie that holds nothing.
    pub fn new() -> Self {
        let mut trie = Self {
            nodes: Slab::new(),
            root: NodeId(0),
            pins: BTreeMap::new(),
            next_pin: 0,
        };
        trie.plant();
        trie
    }

    fn plant(&mut self) {
        let entry = self.nodes.vacant_entry();
        self.root = NodeId(entry.key());
        entry.insert(Node {
            parent: self.root,
            edge: Vec::new(),
            end: 0,
            children: BTreeMap::new(),
            segment: None,
            point: None,
            pinned: 0,
            pin_ends: 0,
        });
    }

    /// Forget everything, pinned paths included: pins taken before are void, and giving them back is harmless.
    pub fn clear(&mut self) {
        self.nodes.clear();
        self.pins.clear();
        self.plant();
    }

    /// The root, at offset 0.
    pub fn root(&self) -> NodeId {
        self.root
    }

    /// Keys from the root to the end of `node`.
    pub fn offset(&self, node: NodeId) -> usize {
        self.node(node).end
    }

    /// The node where `pin` ends; none once [`Trie::clear`] has made it void.
    pub fn pinned(&self, pin: &Pin) -> Option<NodeId> {
        self.pins.get(&pin.0).copied()
    }

    /// The longest common prefix with the trie, and the deepest restore point on it at or before `limit`.
    pub fn find(&self, keys: &[Key], limit: usize) -> Found {
        let walk = self.walk(keys);
        let point = std::iter::successors(Some(walk.node), |&node| self.parent(node))
            .map(|node| (node, self.offset(node)))
            .find(|&(node, offset)| offset <= limit && self.node(node).point.is_some());
        Found {
            matched: walk.matched,
            point,
        }
    }

    /// Store a restore point at the end of `keys`, with `segment(range)` for the positions that the trie lacks. What is there
    /// already is kept, except that an earlier restore point at the same offset is replaced and the more telling kind kept.
    /// At offset 0 there is nothing to restore: the root is returned and nothing stored.
    pub fn insert_point(
        &mut self,
        keys: &[Key],
        kind: PointKind,
        used: u64,
        payload: R,
        segment: impl FnOnce(Range<usize>) -> S,
    ) -> NodeId {
        let Ok(node) = self.try_insert_point(keys, kind, used, payload, |range| {
            Ok::<_, Infallible>(segment(range))
        });
        node
    }

    /// The same with a segment that may fail to be made.
    ///
    /// # Errors
    /// That of `segment`; the trie is as it was.
    pub fn try_insert_point<E>(
        &mut self,
        keys: &[Key],
        kind: PointKind,
        used: u64,
        payload: R,
        segment: impl FnOnce(Range<usize>) -> Result<S, E>,
    ) -> Result<NodeId, E> {
        if keys.is_empty() {
            return Ok(self.root);
        }
        let node = self.reach(keys, segment)?;
        let point = &mut self.node_mut(node).point;
        let kind = point.as_ref().map_or(kind, |old| old.kind.max(kind));
        *point = Some(Point { kind, used, payload });
        self.debug_check();
        Ok(node)
    }

    /// Pin the path to `node`.
    pub fn pin(&mut self, node: NodeId) -> Pin {
        let pin = Pin(self.next_pin);
        self.next_pin += 1;
        self.pins.insert(pin.0, node);
        self.node_mut(node).pin_ends += 1;
        self.count_pins(node, 1);
        self.debug_check();
        pin
    }

    /// Pin the path to the end of `keys`, with `segment(range)` for the positions that the trie lacks.
    #[cfg(test)]
    pub(crate) fn pin_path(&mut self, keys: &[Key], segment: impl FnOnce(Range<usize>) -> S) -> Pin {
        let Ok(node) = self.reach(keys, |range| Ok::<_, Infallible>(segment(range)));
        self.pin(node)
    }

    /// Release a path; what has no reason to stay leaves.
    pub fn unpin(&mut self, pin: Pin) {
        let Some(node) = self.pins.remove(&pin.0) else {
            return;
        };
        self.node_mut(node).pin_ends -= 1;
        self.count_pins(node, -1);
        self.tidy(node);
        self.debug_check();
    }

    /// Let a pin end at `node` instead.
    pub fn repin(&mut self, pin: Pin, node: NodeId) -> Pin {
        let moved = self.pin(node);
        self.unpin(pin);
        moved
    }

    /// Record the use of a path at `now`: of the restore point at its end, and of those where it passed a branch, since a
    /// place where requests parted will see them part again. The points in between age.
    pub fn touch(&mut self, node: NodeId, now: u64) {
        let path: Vec<_> = self.path(node).collect();
        for at in path {
            let shared = at == node || self.node(at).children.len() > 1;
            if let Some(point) = self.node_mut(at).point.as_mut().filter(|_| shared) {
                point.used = point.used.max(now);
            }
        }
    }

    /// Remove the restore point at `node`, and with it whatever was kept only for its sake.
    pub fn remove_point(&mut self, node: NodeId) -> Option<Point<R>> {
        let point = self.node_mut(node).point.take();
        self.tidy(node);
        self.debug_check();
        point
    }

    /// The nodes from `node` up to the root, both included.
    pub fn path(&self, node: NodeId) -> impl Iterator<Item = NodeId> + '_ {
        std::iter::successors(Some(node), |&node| self.parent(node))
    }

    /// The nodes below the root down to `node`, in order of offset, with the positions of their edges.
    pub fn edges(&self, node: NodeId) -> Vec<(NodeId, Range<usize>)> {
        let mut edges: Vec<_> = self
            .path(node)
            .filter(|&at| at != self.root)
            .map(|at| (at, self.start(at)..self.offset(at)))
            .collect();
        edges.reverse();
        edges
    }

    /// All keys from the root to the end of `node`.
    pub fn keys(&self, node: NodeId) -> Vec<Key> {
        let mut edges: Vec<_> = self.path(node).map(|at| &self.node(at).edge).collect();
        edges.reverse();
        edges.into_iter().flatten().copied().collect()
    }

    /// The per-position state of a node's edge; none for the root.
    pub fn segment(&self, node: NodeId) -> Option<&S> {
        self.node(node).segment.as_ref()
    }

    /// The same, to be moved between tiers. Its length must not change.
    pub fn segment_mut(&mut self, node: NodeId) -> Option<&mut S> {
        self.node_mut(node).segment.as_mut()
    }

    /// The restore point at a node's end.
    pub fn point(&self, node: NodeId) -> Option<&Point<R>> {
        self.node(node).point.as_ref()
    }

    /// The same, to be moved between tiers.
    pub fn point_mut(&mut self, node: NodeId) -> Option<&mut Point<R>> {
        self.node_mut(node).point.as_mut()
    }

    pub(super) fn node(&self, id: NodeId) -> &Node<S, R> {
        &self.nodes[id.0]
    }

    fn node_mut(&mut self, id: NodeId) -> &mut Node<S, R> {
        &mut self.nodes[id.0]
    }

    fn parent(&self, id: NodeId) -> Option<NodeId> {
        (id != self.root).then(|| self.node(id).parent)
    }

    pub(super) fn start(&self, id: NodeId) -> usize {
        self.node(id).end - self.node(id).edge.len()
    }

    fn walk(&self, keys: &[Key]) -> Walk {
        let mut walk = Walk {
            node: self.root,
            partial: None,
            matched: 0,
        };
        while let Some(&child) = keys
            .get(walk.matched)
            .and_then(|key| self.node(walk.node).children.get(key))
        {
            let edge = &self.node(child).edge;
            let same = edge
                .iter()
                .zip(&keys[walk.matched..])
                .take_while(|(a, b)| a == b)
                .count();
            walk.matched += same;
            if same < edge.len() {
                walk.partial = Some((child, same));
                break;
            }
            walk.node = child;
        }
        walk
    }

    /// The node at the end of `keys`, made where it is missing: by cutting the edge it lies in, or as a new child. An existing
    /// node is never extended under its payloads.
    fn reach<E>(
        &mut self,
        keys: &[Key],
        segment: impl FnOnce(Range<usize>) -> Result<S, E>,
    ) -> Result<NodeId, E> {
        let walk = self.walk(keys);
        let missing = walk.matched..keys.len();
        // Before anything is cut, so that a failure leaves no trace.
        let segment = if missing.is_empty() {
            None
        } else {
            Some(segment(missing)?)
        };
        let at = walk
            .partial
            .map_or(walk.node, |(child, same)| self.cut(child, same));
        let Some(segment) = segment else { return Ok(at) };
        debug_assert_eq!(
            segment.len(),
            keys.len() - walk.matched,
            "a segment spans its edge"
        );
        let node = NodeId(self.nodes.insert(Node {
            parent: at,
            edge: keys[walk.matched..].to_vec(),
            end: keys.len(),
            children: BTreeMap::new(),
            segment: Some(segment),
            point: None,
            pinned: 0,
            pin_ends: 0,
        }));
        self.node_mut(at).children.insert(keys[walk.matched], node);
        Ok(node)
    }

    /// Cut the edge of `lower` after its first `at` keys; `lower` keeps its identity and its restore point.
    fn cut(&mut self, lower: NodeId, at: usize) -> NodeId {
        let upper = NodeId(self.nodes.vacant_key());
        let node = &mut self.nodes[lower.0];
        let rest = node.edge.split_off(at);
        let edge = std::mem::replace(&mut node.edge, rest);
        let end = node.end - node.edge.len();
        let (parent, pinned, branch) = (node.parent, node.pinned, node.edge[0]);
        node.parent = upper;
        let segment = node.segment.take().map(|segment| segment.split_at(at));
        let (above, below) = segment.unzip();
        node.segment = below;
        self.node_mut(parent).children.insert(edge[0], upper);
        let children = BTreeMap::from([(branch, lower)]);
        self.nodes.insert(Node {
            parent,
            edge,
            end,
            children,
            segment: above,
            point: None,
            pinned,
            pin_ends: 0,
        });
        upper
    }

    /// Remove or join nodes from `node` upwards as long as nothing keeps them.
    fn tidy(&mut self, node: NodeId) {
        let mut at = node;
        while at != self.root && self.node(at).point.is_none() && self.node(at).pin_ends == 0 {
            let parent = self.node(at).parent;
            match self.node(at).children.first_key_value().map(|(_, &child)| child) {
                None => {
                    let gone = self.nodes.remove(at.0);
                    self.node_mut(parent).children.remove(&gone.edge[0]);
                    at = parent;
                }
                Some(child) if self.node(at).children.len() == 1 => {
                    self.join(at, child);
                    break;
                }
                Some(_) => break,
            }
        }
    }

    /// Join `upper` into its only child, which keeps its identity.
    fn join(&mut self, upper: NodeId, child: NodeId) {
        let mut gone = self.nodes.remove(upper.0);
        let node = self.node_mut(child);
        let first = gone.edge[0];
        gone.edge.append(&mut node.edge);
        node.edge = gone.edge;
        node.parent = gone.parent;
        node.segment = match (gone.segment, node.segment.take()) {
            (Some(above), Some(below)) => Some(S::merge(above, below)),
            (above, below) => above.or(below),
        };
        self.node_mut(gone.parent).children.insert(first, child);
    }

    fn count_pins(&mut self, node: NodeId, by: isize) {
        let path: Vec<_> = self.path(node).collect();
        for at in path {
            let pinned = &mut self.node_mut(at).pinned;
            *pinned = pinned.saturating_add_signed(by);
        }
    }

    fn debug_check(&self) {
        if cfg!(debug_assertions) {
            if let Err(broken) = self.check() {
                panic!("prefix trie: {broken}");
            }
        }
    }
}

#[cfg(test)]
#[path = "trie_tests.rs"]
mod tests;

#[cfg(test)]
#[path = "trie_model_tests.rs"]
mod model_tests;
