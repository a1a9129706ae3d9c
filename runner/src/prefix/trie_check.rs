//! States the trie's invariants as code; debug builds run it after every change.

use super::payload::{Bytes, Segment};
use super::trie::Trie;

impl<S: Segment, R: Bytes> Trie<S, R> {
    /// Check every invariant of the structure.
    ///
    /// # Errors
    /// What is broken, in words.
    pub fn check(&self) -> Result<(), String> {
        let ensure = |holds: bool, what: String| if holds { Ok(()) } else { Err(what) };
        let mut edges = 0;
        for (index, node) in &self.nodes {
            let is_root = node.edge.is_empty();
            for (first, &child) in &node.children {
                let child = self.node(child);
                ensure(
                    child.edge.first() == Some(first),
                    format!("node {index}: child under a foreign key"),
                )?;
                ensure(
                    child.end == node.end + child.edge.len(),
                    format!("node {index}: child's offset is off"),
                )?;
                ensure(
                    self.nodes.key_of(self.node(child.parent)) == index,
                    format!("node {index}: child has another parent"),
                )?;
                edges += 1;
            }
            let ends = self
                .pins
                .values()
                .filter(|&&end| std::ptr::eq(self.node(end), node))
                .count();
            ensure(
                ends == node.pin_ends,
                format!("node {index}: {} pins end here, {ends} known", node.pin_ends),
            )?;
            let below: usize = node.children.values().map(|&child| self.node(child).pinned).sum();
            ensure(
                node.pinned == ends + below,
                format!("node {index}: {} pins, expected {}", node.pinned, ends + below),
            )?;
            if is_root {
                ensure(
                    node.end == 0 && node.segment.is_none() && node.point.is_none(),
                    "root holds state".to_owned(),
                )?;
                continue;
            }
            let length = node.segment.as_ref().map(Segment::len);
            ensure(
                length == Some(node.edge.len()),
                format!("node {index}: segment of {length:?} on {} keys", node.edge.len()),
            )?;
            let kept = node.point.is_some() || node.pin_ends > 0 || node.children.len() > 1;
            ensure(kept, format!("node {index}: nothing keeps it"))?;
        }
        ensure(
            edges + 1 == self.nodes.len(),
            format!("{} nodes, {edges} edges", self.nodes.len()),
        )
    }
}
