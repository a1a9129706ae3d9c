//! Byte budgets of the three tiers, and the next thing to move or forget when one is exceeded.
//!
//! Order: least recently used first, the deepest of equals, never a path in use; only when nothing else is left are the
//! restore points of a path in use thinned (never its per-position state), and not in vain: where even all of them wouldn't
//! do, the request itself is what is too large, and its end frees more than they hold. What leaves the device goes to host
//! memory if it fits there; what leaves host memory is forgotten, and lives on if the disk tier has it. The plan is one step
//! at a time, since forgetting a point may free the edges that only it kept.

use std::str::FromStr;

use super::payload::{Bytes, Segment, TierBytes};
use super::plan::{removal_order, PathPoint};
use super::trie::{NodeId, Trie};
use super::trie_view::NodeView;

/// An amount of memory or disk as given on the command line: `0`, `4096`, `512MB`, `8GiB`, `1.5 GiB`, `25%`.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Size {
    /// An absolute number of bytes.
    Bytes(u64),
    /// A share of what there is, 0 to 100.
    Percent(f64),
}

/// Why a size can't be read.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("size {text:?}: {reason}")]
pub struct SizeError {
    text: String,
    reason: &'static str,
}

impl FromStr for Size {
    type Err = SizeError;

    fn from_str(text: &str) -> Result<Self, SizeError> {
        let error = |reason| SizeError {
            text: text.to_owned(),
            reason,
        };
        let trimmed = text.trim();
        let digits = trimmed
            .find(|c: char| !c.is_ascii_digit() && c != '.')
            .unwrap_or(trimmed.len());
        let (number, unit) = trimmed.split_at(digits);
        let value: f64 = number
            .parse()
            .map_err(|_| error("expected a number, such as 8GiB, 512MB, 25% or 0"))?;
        let factor: u64 = match unit.trim().to_ascii_lowercase().as_str() {
            "%" if value <= 100.0 => return Ok(Self::Percent(value)),
            "%" => return Err(error("a share can't exceed 100%")),
            "" | "b" => 1,
            "k" | "kb" => 1000,
            "m" | "mb" => 1_000_000,
            "g" | "gb" => 1_000_000_000,
            "t" | "tb" => 1_000_000_000_000,
            "kib" => 1 << 10,
            "mib" => 1 << 20,
            "gib" => 1 << 30,
            "tib" => 1 << 40,
            _ => {
                return Err(error(
                    "unknown unit; use B, KB, MB, GB, TB, KiB, MiB, GiB, TiB or %",
                ))
            }
        };
        if let Ok(whole) = number.parse::<u64>() {
            return whole
                .checked_mul(factor)
                .map(Self::Bytes)
                .ok_or_else(|| error("too large"));
        }
        Ok(Self::Bytes((value * factor as f64) as u64))
    }
}

impl Size {
    /// Bytes, given what there is in all.
    pub fn resolve(self, total: u64) -> u64 {
        match self {
            Self::Bytes(bytes) => bytes,
            Self::Percent(percent) => (total as f64 * percent / 100.0) as u64,
        }
    }
}

/// Most bytes that each tier may hold; 0 switches a tier off.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Budgets {
    /// Device memory, live caches included.
    pub device: u64,
    /// Host memory.
    pub host: u64,
    /// Disk.
    pub disk: u64,
}

/// Which payload of a node.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Part {
    /// The per-position state of its edge.
    Segment,
    /// The restore point at its end.
    Point,
}

/// One thing to do towards fitting the budgets.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Step {
    /// Move a payload from the device to host memory.
    ToHost(NodeId, Part),
    /// Remove a restore point, and what only it kept.
    Forget(NodeId),
}

/// What is left to do.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Next {
    /// Both tiers are within their limits.
    Fits,
    /// Do this and ask again.
    Step(Step),
    /// Nothing can be given up any more: this many bytes too many are in use by running requests.
    Short {
        /// Too many on the device.
        device: u64,
        /// Too many in host memory.
        host: u64,
    },
}

/// The next step towards `limits`, which bound what the trie's own payloads may occupy (the live caches' bytes are already
/// subtracted).
pub fn next_step<S: Segment, R: Bytes>(trie: &Trie<S, R>, limits: TierBytes) -> Next {
    let held = trie.bytes();
    let device = held.device.saturating_sub(limits.device);
    let host = held.host.saturating_sub(limits.host);
    if device == 0 && host == 0 {
        return Next::Fits;
    }
    let views = trie.views();
    let step = if device > 0 {
        relieve_device(trie, &views, limits.host, device)
    } else {
        let idle = views.iter().any(|view| !view.pinned && bytes(view).host > 0);
        let oldest = trie.oldest_point().filter(|_| idle);
        oldest
            .or_else(|| cheapest_in_use(&views, |bytes| bytes.host > 0).map(|(node, _)| node))
            .map(Step::Forget)
    };
    step.map_or(Next::Short { device, host }, Next::Step)
}

/// The next restore point of the paths in use to give up so that these occupy at most `limit` bytes. Without it one long
/// conversation would push out all others.
pub fn next_thinning<S: Segment, R: Bytes>(trie: &Trie<S, R>, limit: u64) -> Option<NodeId> {
    let views = trie.views();
    let in_use = views
        .iter()
        .filter(|view| view.pinned)
        .filter_map(|view| view.point);
    let held: u64 = in_use.map(|point| point.bytes.total()).sum();
    if held <= limit {
        return None;
    }
    cheapest_in_use(&views, |_| true).map(|(node, _)| node)
}

fn relieve_device<S: Segment, R: Bytes>(
    trie: &Trie<S, R>,
    views: &[NodeView],
    host: u64,
    excess: u64,
) -> Option<Step> {
    if let Some((node, part, bytes)) = oldest_on_device(views) {
        return if bytes <= host {
            Some(Step::ToHost(node, part))
        } else {
            trie.oldest_point().map(Step::Forget)
        };
    }
    let (node, bytes) = cheapest_in_use(views, |bytes| bytes.device > 0)?;
    if bytes.device <= host {
        return Some(Step::ToHost(node, Part::Point));
    }
    let in_use = views
        .iter()
        .filter(|view| view.pinned)
        .filter_map(|view| view.point);
    let gain: u64 = in_use.map(|point| point.bytes.device).sum();
    (gain >= excess).then_some(Step::Forget(node))
}

fn bytes(view: &NodeView) -> TierBytes {
    let mut sum = view.segment;
    sum += view.point.map_or_else(TierBytes::default, |point| point.bytes);
    sum
}

/// The least recently used payload in device memory off the paths in use, and its bytes there. Of equally old ones the
/// deepest comes first, at one node the restore point before the edge, so that nothing goes before what depends on it.
fn oldest_on_device(views: &[NodeView]) -> Option<(NodeId, Part, u64)> {
    let parts = views.iter().filter(|view| !view.pinned).flat_map(|view| {
        let point = view
            .point
            .map(|point| (point.used, view, Part::Point, point.bytes.device));
        [point, Some((view.used, view, Part::Segment, view.segment.device))]
    });
    parts
        .flatten()
        .filter(|&(.., device)| device > 0)
        .min_by_key(|&(used, view, part, _)| {
            (
                used,
                std::cmp::Reverse(view.offset),
                part == Part::Segment,
                view.node,
            )
        })
        .map(|(_, view, part, device)| (view.node, part, device))
}

/// Of the restore points on paths in use that pass `filter`, the one whose loss costs least.
fn cheapest_in_use(views: &[NodeView], filter: impl Fn(TierBytes) -> bool) -> Option<(NodeId, TierBytes)> {
    let mut in_use: Vec<_> = views.iter().filter(|view| view.pinned).collect();
    in_use.sort_by_key(|view| (view.offset, view.node));
    let end = in_use.last()?.offset;
    let points: Vec<_> = in_use
        .iter()
        .filter_map(|view| Some((view.node, view.offset, view.point?)))
        .collect();
    let on_path: Vec<_> = points
        .iter()
        .map(|&(_, offset, point)| PathPoint {
            offset,
            kind: point.kind,
        })
        .collect();
    removal_order(&on_path, end)
        .into_iter()
        .map(|index| (points[index].0, points[index].2.bytes))
        .find(|&(_, bytes)| filter(bytes))
}

#[cfg(test)]
#[path = "budget_tests.rs"]
mod tests;
