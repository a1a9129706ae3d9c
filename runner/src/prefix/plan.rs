//! Which offsets of a request become restore points, and which of a path's restore points to give up first.
//!
//! A restore point of a hybrid model costs megabytes per layer whatever its offset, so they are placed where a later request
//! is likely to part from this one, and thinned so that what remains gets sparser with the distance from the path's end: the
//! number kept grows with the logarithm of the conversation. Both are pure functions of their arguments.
//!
//! An offset n means "n positions evaluated". A state at n is restorable by every prompt that shares n keys and has at least
//! one more token.

use std::cmp::{Ordering, Reverse};
use std::collections::BinaryHeap;
use std::ops::Range;

/// Why a restore point is kept; the later in this list, the more telling.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum PointKind {
    /// On the coarse grid of a long prompt.
    Grid,
    /// Where a request came to rest: finished, cancelled or failed.
    Rest,
    /// Start of a turn inside the prompt.
    Turn,
    /// Where an earlier request took another way.
    Divergence,
    /// All of a prompt but its last token, for an exact retry.
    PromptEnd,
    /// Start of the first answer after the user's last words: where the next turn's prompt parts from this request when the
    /// chat template drops old think blocks (Qwen3.5's does), and where another answer to the same question starts.
    Answer,
    /// End of the system turn, shared by conversations.
    Shared,
}

/// Who speaks in a turn, as far as it matters here.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Role {
    /// Instructions and tool descriptions.
    System,
    /// A person's words.
    User,
    /// The model, the opened turn that the request is to fill included.
    Assistant,
    /// Tool results and anything else.
    Other,
}

/// One turn of a rendered conversation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Turn {
    /// Position of the token that opens the turn.
    pub start: usize,
    /// Its speaker.
    pub role: Role,
}

/// A prompt as the planner sees it.
#[derive(Clone, Copy, Debug, Default)]
pub struct Prompt<'a> {
    /// Length in tokens.
    pub tokens: usize,
    /// Turns in order; empty for a raw prompt.
    pub turns: &'a [Turn],
    /// Positions of pictures; no grid point falls inside one.
    pub media: &'a [Range<usize>],
}

/// How densely to capture.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Density {
    /// Distance of grid points on long prompts, in tokens; 0 for none.
    pub grid: usize,
    /// Most captures of one prefill, thinned like a path if there are more.
    pub captures: usize,
}

impl Default for Density {
    fn default() -> Self {
        Self {
            grid: 2048,
            captures: 32,
        }
    }
}

/// A state to capture when prefill crosses `offset`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Capture {
    /// Positions evaluated by then.
    pub offset: usize,
    /// Why.
    pub kind: PointKind,
}

/// The captures of one prefill that starts at `restored`, in order of offset, all in `restored + 1 ..= tokens - 1`.
///
/// `parted` is where the prompt left what the trie holds, if it did. The last capture is the prompt's end
/// (where `density` allows for at least four).
pub fn captures(
    prompt: &Prompt<'_>,
    restored: usize,
    parted: Option<usize>,
    density: Density,
) -> Vec<Capture> {
    let limit = prompt.tokens.saturating_sub(1);
    let mut wanted: Vec<Capture> = Vec::new();
    let mut want = |offset, kind| wanted.push(Capture { offset, kind });
    for offset in (1..=limit.checked_div(density.grid).unwrap_or(0)).map(|step| step * density.grid) {
        let outside = prompt
            .media
            .iter()
            .find(|span| span.contains(&offset))
            .map_or(offset, |span| span.start);
        want(outside, PointKind::Grid);
    }
    for turn in prompt.turns {
        want(turn.start, PointKind::Turn);
    }
    if let Some(offset) = parted {
        want(offset, PointKind::Divergence);
    }
    if let Some(offset) = answer_start(prompt.turns) {
        want(offset, PointKind::Answer);
    }
    if let [Turn {
        role: Role::System, ..
    }, next, ..] = prompt.turns
    {
        want(next.start, PointKind::Shared);
    }
    want(limit, PointKind::PromptEnd);

    wanted.retain(|capture| (restored + 1..=limit).contains(&capture.offset));
    // The most telling kind of an offset comes first and is the one that stays.
    wanted.sort_by_key(|capture| (capture.offset, std::cmp::Reverse(capture.kind)));
    wanted.dedup_by_key(|capture| capture.offset);
    let excess = wanted.len().saturating_sub(density.captures);
    if excess > 0 {
        let points: Vec<_> = wanted
            .iter()
            .map(|&Capture { offset, kind }| PathPoint { offset, kind })
            .collect();
        let mut gone = removal_order(&points, limit);
        gone.truncate(excess);
        let mut index = 0..;
        wanted.retain(|_| index.next().is_some_and(|index| !gone.contains(&index)));
    }
    wanted
}

/// Start of the first assistant turn after the last user turn.
fn answer_start(turns: &[Turn]) -> Option<usize> {
    let asked = turns
        .iter()
        .rposition(|turn| turn.role == Role::User)
        .map_or(0, |index| index + 1);
    turns[asked..]
        .iter()
        .find(|turn| turn.role == Role::Assistant)
        .map(|turn| turn.start)
}

/// A restore point of one path.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PathPoint {
    /// Its offset.
    pub offset: usize,
    /// Why it is there.
    pub kind: PointKind,
}

/// In which order to give up the restore points of a path that ends at `end`; indices into `points`, which are in order of
/// offset.
///
/// Giving up a point costs whoever would have used it the distance to the one before; how likely that is falls with the
/// distance from the path's end. The cheapest goes first, which leaves exponentially growing gaps. The newest of each telling
/// kind goes after all others: prompt end (an answer start is near), shared system turn, resting point, answer start.
pub fn removal_order(points: &[PathPoint], end: usize) -> Vec<usize> {
    let keep_last = [
        PointKind::PromptEnd,
        PointKind::Shared,
        PointKind::Rest,
        PointKind::Answer,
    ];
    let newest = keep_last.map(|kind| points.iter().rposition(|point| point.kind == kind));
    let is_newest = |index: usize| newest.contains(&Some(index));
    // The neighbours that are left: a removal widens one gap only, the next one's.
    let mut before: Vec<Option<usize>> = (0..points.len()).map(|index| index.checked_sub(1)).collect();
    let mut after: Vec<usize> = (1..=points.len()).collect();
    let loss = |index: usize, before: Option<usize>| Loss {
        index,
        gap: points[index].offset - before.map_or(0, |other| points[other].offset),
        weight: match points[index].kind {
            PointKind::Grid | PointKind::Rest | PointKind::PromptEnd => 1,
            PointKind::Turn | PointKind::Divergence | PointKind::Answer => 2,
            PointKind::Shared => 4,
        },
        far: end.saturating_sub(points[index].offset) as u128 + 1,
    };
    let mut left: BinaryHeap<Reverse<Loss>> = (0..points.len())
        .filter(|&index| !is_newest(index))
        .map(|index| Reverse(loss(index, before[index])))
        .collect();
    let mut order = Vec::with_capacity(points.len());
    while let Some(Reverse(cheapest)) = left.pop() {
        let index = cheapest.index;
        let now = loss(index, before[index]);
        if now.gap != cheapest.gap {
            // Its gap has widened since it was queued.
            left.push(Reverse(now));
            continue;
        }
        order.push(index);
        let (previous, next) = (before[index], after[index]);
        if let Some(previous) = previous {
            after[previous] = next;
        }
        if let Some(next) = before.get_mut(next) {
            *next = previous;
        }
    }
    order.extend(newest.into_iter().flatten());
    order
}

/// What giving up a point costs; ordered by cost, ties by the place on the path.
#[derive(Debug)]
struct Loss {
    index: usize,
    gap: usize,
    weight: u128,
    far: u128,
}

impl Ord for Loss {
    fn cmp(&self, other: &Self) -> Ordering {
        let (mine, others) = (self.gap as u128 * self.weight, other.gap as u128 * other.weight);
        (mine * other.far)
            .cmp(&(others * self.far))
            .then(self.index.cmp(&other.index))
    }
}

impl PartialOrd for Loss {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Loss {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Loss {}

/// Which restore points of a path are worth a place on disk, as indices: not the one of a close pair that the other serves
/// as well, so that a turn costs one state and not three. `spacing` is what counts as close, in tokens.
pub fn lasting(points: &[PathPoint], spacing: usize) -> Vec<usize> {
    let mut kept: Vec<usize> = Vec::new();
    let mut order: Vec<usize> = (0..points.len()).collect();
    order.sort_by_key(|&index| (std::cmp::Reverse(points[index].kind), index));
    for index in order {
        let offset = points[index].offset;
        // A point serves those after it, not those before it.
        let served = kept
            .iter()
            .any(|&other| (0..spacing).contains(&offset.wrapping_sub(points[other].offset)));
        if !served {
            kept.push(index);
        }
    }
    kept.sort_unstable();
    kept
}

#[cfg(test)]
#[path = "plan_tests.rs"]
mod tests;
