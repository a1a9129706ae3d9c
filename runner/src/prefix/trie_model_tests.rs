//! The trie against a naive model: a set of key sequences. What is held is every prefix of a restore point's or a pin's path;
//! matches, bytes, use and eviction order follow from the sets alone, whatever the edges look like.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;
use crate::prefix::fake::{FakePoint, FakeSegment, PER_KEY, PER_POINT};

#[derive(Default)]
struct Model {
    points: BTreeMap<Vec<Key>, (PointKind, u64)>,
    pins: Vec<Vec<Key>>,
}

impl Model {
    fn paths(&self) -> impl Iterator<Item = &Vec<Key>> {
        self.points.keys().chain(&self.pins)
    }

    fn prefixes(&self) -> BTreeSet<&[Key]> {
        self.paths()
            .flat_map(|path| (1..=path.len()).map(|end| &path[..end]))
            .collect()
    }

    fn matched(&self, keys: &[Key]) -> usize {
        let shared = |path: &Vec<Key>| path.iter().zip(keys).take_while(|(a, b)| a == b).count();
        self.paths().map(shared).max().unwrap_or(0)
    }

    fn restorable(&self, keys: &[Key], limit: usize) -> usize {
        let points = self
            .points
            .keys()
            .filter(|path| path.len() <= limit && keys.starts_with(path));
        points.map(Vec::len).max().unwrap_or(0)
    }

    fn bytes(&self) -> u64 {
        self.prefixes().len() as u64 * PER_KEY + self.points.len() as u64 * PER_POINT
    }

    fn branches(&self, path: &[Key]) -> bool {
        let next: BTreeSet<_> = self
            .prefixes()
            .into_iter()
            .filter(|prefix| prefix.len() == path.len() + 1 && prefix.starts_with(path))
            .map(|prefix| prefix[path.len()])
            .collect();
        next.len() > 1
    }

    fn touch(&mut self, path: &[Key], now: u64) {
        let used: Vec<_> = self
            .points
            .keys()
            .filter(|point| path.starts_with(point) && (point.len() == path.len() || self.branches(point)))
            .cloned()
            .collect();
        for point in used {
            if let Some((_, used)) = self.points.get_mut(&point) {
                *used = now.max(*used);
            }
        }
    }

    fn oldest(&self) -> Option<Vec<Key>> {
        let free = self
            .points
            .iter()
            .filter(|(path, _)| !self.pins.iter().any(|pin| pin.starts_with(path)));
        free.min_by_key(|(path, (_, used))| (*used, std::cmp::Reverse(path.len())))
            .map(|(path, _)| path.clone())
    }
}

/// One request: tokens, where it comes to rest, what it captures on the way, whether it stays in use.
#[derive(Clone, Debug)]
struct Request {
    tokens: Vec<u8>,
    captures: Vec<prop::sample::Index>,
    keep: bool,
    release: Option<prop::sample::Index>,
    budget: u64,
}

fn request() -> impl Strategy<Value = Request> {
    (
        prop::collection::vec(0u8..3, 1..14),
        prop::collection::vec(any::<prop::sample::Index>(), 0..4),
        prop::bool::weighted(0.2),
        prop::option::weighted(0.3, any::<prop::sample::Index>()),
        prop_oneof![Just(0), 0u64..1500, Just(u64::MAX)],
    )
        .prop_map(|(tokens, captures, keep, release, budget)| Request {
            tokens,
            captures,
            keep,
            release,
            budget,
        })
}

fn check(trie: &Trie<FakeSegment, FakePoint>, model: &Model, probe: &[Key]) -> Result<(), TestCaseError> {
    for limit in [0, probe.len() / 2, probe.len().saturating_sub(1), probe.len()] {
        let found = trie.find(probe, limit);
        prop_assert_eq!(found.matched, model.matched(probe));
        prop_assert_eq!(
            found.point.map_or(0, |(_, offset)| offset),
            model.restorable(probe, limit)
        );
        if let Some((node, offset)) = found.point {
            // What would be restored is exactly the state of these keys and of no others.
            let held: Vec<Key> = trie
                .edges(node)
                .iter()
                .flat_map(|(at, _)| trie.segment(*at).unwrap().keys.clone())
                .collect();
            prop_assert_eq!(&held, &probe[..offset]);
            prop_assert_eq!(
                &trie.point(node).unwrap().payload,
                &FakePoint::of(&probe[..offset])
            );
        }
    }
    prop_assert_eq!(trie.bytes().total(), model.bytes());
    prop_assert_eq!(trie.counts().1, model.points.len());
    let oldest = trie.oldest_point().map(|node| trie.keys(node));
    prop_assert_eq!(oldest, model.oldest());
    prop_assert_eq!(trie.check(), Ok(()));
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 10_000, ..ProptestConfig::default() })]

    #[test]
    fn the_trie_equals_a_set_of_sequences(requests in prop::collection::vec(request(), 1..12), pairs in any::<bool>()) {
        let mut trie: Trie<FakeSegment, FakePoint> = Trie::new();
        let mut model = Model::default();
        let mut pins: Vec<Pin> = Vec::new();
        for (turn, request) in requests.into_iter().enumerate() {
            let now = turn as u64 + 1;
            let keys: Vec<Key> = (0..request.tokens.len() - usize::from(pairs))
                .map(|i| Key {
                    this: request.tokens[i].into(),
                    next: if pairs { request.tokens[i + 1].into() } else { 0 },
                })
                .collect();
            check(&trie, &model, &keys)?;

            if let Some((node, offset)) = trie.find(&keys, request.tokens.len() - 1).point {
                trie.touch(node, now);
                model.touch(&keys[..offset], now);
            }
            let mut offsets: Vec<usize> = request.captures.iter().map(|index| index.index(keys.len() + 1)).collect();
            offsets.sort_unstable();
            for &offset in &offsets {
                let path = &keys[..offset];
                let missing = model.matched(path)..offset;
                trie.insert_point(path, PointKind::Rest, now, FakePoint::of(path), |range| {
                    assert_eq!(range, missing, "only what is missing is asked for");
                    FakeSegment::of(&keys[range])
                });
                if offset > 0 {
                    model.points.insert(path.to_vec(), (PointKind::Rest, now));
                }
            }
            if request.keep {
                pins.push(trie.pin_path(&keys, |range| FakeSegment::of(&keys[range])));
                model.pins.push(keys.clone());
            }
            check(&trie, &model, &keys)?;

            if let Some(index) = request.release.filter(|_| !pins.is_empty()) {
                let index = index.index(pins.len());
                trie.unpin(pins.remove(index));
                model.pins.remove(index);
                check(&trie, &model, &keys)?;
            }
            while trie.bytes().total() > request.budget {
                let Some(node) = trie.oldest_point() else { break };
                let path = trie.keys(node);
                prop_assert_eq!(Some(path.clone()), model.oldest());
                trie.remove_point(node);
                model.points.remove(&path);
            }
            check(&trie, &model, &keys)?;
        }
    }
}
