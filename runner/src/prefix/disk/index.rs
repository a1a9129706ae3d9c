//! Which entries this model has on disk and how far along a request's keys they lead.
//!
//! A cache of the directory, never the truth: another runner may add and remove files at any time, so every use of an entry
//! tolerates that its file is gone.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use super::name::{origin, Name, Place};
use crate::prefix::key::{Key, PathHasher};

#[derive(Default, Debug)]
pub(super) struct Index {
    points: HashSet<Place>,
    /// Segments by where they end; more than one where edges were cut differently at different times.
    segments: HashMap<Place, BTreeSet<Name>>,
    /// How many entries end at an offset.
    ends: BTreeMap<usize, usize>,
    entries: HashSet<Name>,
}

/// A prefix that the disk holds whole.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DiskMatch {
    /// Its length in positions.
    pub offset: usize,
    /// The segments that make it up, in order, without gap or overlap.
    pub segments: Vec<Name>,
    /// The whole state at its end.
    pub point: Name,
}

impl Index {
    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    pub(super) fn contains(&self, name: &Name) -> bool {
        self.entries.contains(name)
    }

    pub(super) fn insert(&mut self, name: Name) {
        if !self.entries.insert(name) {
            return;
        }
        *self.ends.entry(name.place().0).or_default() += 1;
        match name {
            Name::Segment { .. } => {
                self.segments.entry(name.place()).or_default().insert(name);
            }
            Name::Point { .. } => {
                self.points.insert(name.place());
            }
        }
    }

    pub(super) fn remove(&mut self, name: &Name) {
        if !self.entries.remove(name) {
            return;
        }
        let (end, _) = name.place();
        if let Some(count) = self.ends.get_mut(&end) {
            *count -= 1;
            if *count == 0 {
                self.ends.remove(&end);
            }
        }
        match name {
            Name::Segment { .. } => {
                if let Some(there) = self.segments.get_mut(&name.place()) {
                    there.remove(name);
                    if there.is_empty() {
                        self.segments.remove(&name.place());
                    }
                }
            }
            Name::Point { .. } => {
                self.points.remove(&name.place());
            }
        }
    }

    /// The longest prefix of `keys` of at most `limit` positions that can be restored.
    pub(super) fn lookup(&self, keys: &[Key], limit: usize) -> Option<DiskMatch> {
        let mut hasher = PathHasher::new();
        let mut reached: BTreeMap<Place, Option<Name>> = BTreeMap::from([(origin(), None)]);
        let mut best = None;
        for &end in self.ends.keys().take_while(|&&end| end <= limit.min(keys.len())) {
            let place = (end, hasher.advance(keys, end));
            let segments = self.segments.get(&place).into_iter().flatten();
            // In order of start, so the one with the fewest links to its front comes first.
            let Some(segment) = segments
                .copied()
                .find(|segment| reached.contains_key(&segment.rests_on()))
            else {
                continue;
            };
            reached.insert(place, Some(segment));
            if self.points.contains(&place) {
                best = Some(place);
            }
        }
        let (end, path) = best?;
        let mut segments = Vec::new();
        let mut at = (end, path);
        while let Some(Some(segment)) = reached.get(&at) {
            segments.push(*segment);
            at = segment.rests_on();
        }
        segments.reverse();
        Some(DiskMatch {
            offset: end,
            segments,
            point: Name::Point { end, path },
        })
    }

    /// Whether an unbroken chain of segments leads to `place`.
    pub(super) fn leads_to(&self, place: Place) -> bool {
        self.below(place).contains(&origin())
    }

    /// Every place that a chain to `place` may pass, itself and the origin included.
    pub(super) fn below(&self, place: Place) -> HashSet<Place> {
        let mut seen = HashSet::from([place]);
        let mut open = vec![place];
        while let Some(at) = open.pop() {
            let next = self.segments.get(&at).into_iter().flatten().map(Name::rests_on);
            open.extend(next.filter(|&place| seen.insert(place)));
        }
        seen
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::prefix::fake::{keys, point_name as point, segment_name as segment};

    fn index(names: &[Name]) -> Index {
        let mut index = Index::default();
        for &name in names {
            index.insert(name);
        }
        index
    }

    fn found(index: &Index, text: &str, limit: usize) -> Option<usize> {
        index.lookup(&keys(text), limit).map(|found| found.offset)
    }

    #[test]
    fn the_longest_whole_chain_within_the_limit_is_found() {
        let index = index(&[
            segment("ab", 0),
            point("ab"),
            segment("abcd", 2),
            segment("abcdef", 4),
            point("abcdef"),
        ]);
        assert_eq!(found(&index, "abcdefgh", 8), Some(6));
        assert_eq!(
            found(&index, "abcdef", 5),
            Some(2),
            "one token is left to evaluate"
        );
        assert_eq!(
            found(&index, "abcdxx", 6),
            Some(2),
            "no whole state at the divergence"
        );
        assert_eq!(found(&index, "xbcdef", 6), None);
        let whole = index.lookup(&keys("abcdefgh"), 7).unwrap();
        assert_eq!(
            whole.segments,
            [segment("ab", 0), segment("abcd", 2), segment("abcdef", 4)]
        );
        assert_eq!(whole.point, point("abcdef"));
    }

    #[test]
    fn a_chain_with_a_missing_link_does_not_count() {
        let mut index = index(&[segment("ab", 0), segment("abcd", 2), point("abcd"), point("ab")]);
        assert_eq!(found(&index, "abcde", 5), Some(4));
        index.remove(&segment("ab", 0));
        assert_eq!(found(&index, "abcde", 5), None);
        assert!(!index.leads_to(point("abcd").place()));
        index.insert(segment("abcd", 0));
        assert_eq!(
            found(&index, "abcde", 5),
            Some(4),
            "another cut of the same path serves as well"
        );
        assert!(index.leads_to(point("abcd").place()));
    }

    #[test]
    fn inserting_and_removing_twice_is_harmless() {
        let mut index = index(&[segment("ab", 0), segment("ab", 0), point("ab"), point("ab")]);
        assert_eq!(index.len(), 2);
        index.remove(&point("ab"));
        index.remove(&point("ab"));
        assert_eq!((index.len(), found(&index, "abc", 3)), (1, None));
        index.remove(&segment("ab", 0));
        assert!(index.ends.is_empty() && index.segments.is_empty());
    }
}
