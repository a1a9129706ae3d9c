//! What eviction and reports see of the trie: every node with its bytes, its use and whether it is in use.
//!
//! Bytes are summed afresh on every call, so that no counter can drift from what is held.

use std::collections::BTreeMap;

use super::payload::{Bytes, Segment, TierBytes};
use super::plan::PointKind;
use super::trie::{NodeId, Trie};

/// What eviction and reports need to know of one node.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NodeView {
    /// The node.
    pub node: NodeId,
    /// Keys from the root to the node's end.
    pub offset: usize,
    /// Bytes of the edge's segment.
    pub segment: TierBytes,
    /// The restore point at the end.
    pub point: Option<PointView>,
    /// Whether the node lies on a pinned path.
    pub pinned: bool,
    /// Latest use of any restore point at or below the node, 0 where there is none.
    pub used: u64,
}

/// One restore point.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PointView {
    /// Why it was captured.
    pub kind: PointKind,
    /// Last use.
    pub used: u64,
    /// Bytes of the state.
    pub bytes: TierBytes,
}

impl<S: Segment, R: Bytes> Trie<S, R> {
    /// All nodes but the root, children before their parents.
    pub fn views(&self) -> Vec<NodeView> {
        let mut order: Vec<_> = self
            .nodes
            .iter()
            .map(|(id, _)| NodeId(id))
            .filter(|&id| id != self.root)
            .collect();
        order.sort_by_key(|&id| (std::cmp::Reverse(self.offset(id)), id));
        let mut used: BTreeMap<NodeId, u64> = BTreeMap::new();
        let view = |id: NodeId| {
            let node = self.node(id);
            let point = node.point.as_ref().map(|point| PointView {
                kind: point.kind,
                used: point.used,
                bytes: point.payload.bytes(),
            });
            let below = used.get(&id).copied().unwrap_or(0);
            let latest = point.map_or(below, |point| below.max(point.used));
            let above = used.entry(node.parent).or_default();
            *above = latest.max(*above);
            let segment = node
                .segment
                .as_ref()
                .map_or_else(TierBytes::default, Bytes::bytes);
            NodeView {
                node: id,
                offset: node.end,
                segment,
                point,
                pinned: node.pinned > 0,
                used: latest,
            }
        };
        order.into_iter().map(view).collect()
    }

    /// The least recently used restore point off every pinned path, the deepest of several.
    pub fn oldest_point(&self) -> Option<NodeId> {
        self.nodes
            .iter()
            .filter(|(_, node)| node.pinned == 0)
            .filter_map(|(id, node)| Some((node.point.as_ref()?.used, std::cmp::Reverse(node.end), id)))
            .min()
            .map(|(_, _, id)| NodeId(id))
    }

    /// Bytes of all payloads, summed afresh.
    pub fn bytes(&self) -> TierBytes {
        let mut sum = TierBytes::default();
        for (_, node) in &self.nodes {
            sum += node
                .segment
                .as_ref()
                .map_or_else(TierBytes::default, Bytes::bytes);
            sum += node
                .point
                .as_ref()
                .map_or_else(TierBytes::default, |point| point.payload.bytes());
        }
        sum
    }

    /// Nodes (the root excluded) and restore points.
    pub fn counts(&self) -> (usize, usize) {
        let points = self.nodes.iter().filter(|(_, node)| node.point.is_some()).count();
        (self.nodes.len() - 1, points)
    }
}
