//! Random requests under random budgets: whatever is moved, thinned and forgotten, what is restored is the state of exactly
//! the keys asked for, it is the longest that is held, and no tier exceeds its budget by more than what is in use.

use proptest::prelude::*;

use super::*;
use crate::prefix::fake::{FakePayloads, FakePoint, FakeSegment};
use crate::prefix::key::path_hash;
use crate::prefix::plan::PointKind;

#[derive(Clone, Debug)]
struct Request {
    tokens: Vec<u8>,
    captures: Vec<prop::sample::Index>,
    live: u64,
    refuse: usize,
    room: Option<u64>,
    keep: bool,
}

fn request() -> impl Strategy<Value = Request> {
    (
        prop::collection::vec(0u8..3, 1..16),
        prop::collection::vec(any::<prop::sample::Index>(), 0..5),
        prop_oneof![Just(0), 0u64..1000],
        prop_oneof![4 => Just(0usize), 1 => 0usize..3],
        prop::option::weighted(0.2, 0u64..800),
        prop::bool::weighted(0.8),
    )
        .prop_map(|(tokens, captures, live, refuse, room, keep)| Request {
            tokens,
            captures,
            live,
            refuse,
            room,
            keep,
        })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4_000, ..ProptestConfig::default() })]

    #[test]
    fn any_request_under_any_budget_restores_its_own_state(
        requests in prop::collection::vec(request(), 1..10),
        device in prop_oneof![Just(0), 0u64..2500, Just(u64::MAX)],
        host in prop_oneof![Just(0), 0u64..2500],
        share in prop_oneof![Just(1.0), 0.0f64..1.0],
    ) {
        let config = CacheConfig { budgets: Budgets { device, host, disk: 0 }, path_share: share, disk_spacing: 16 };
        let mut cache: PrefixCache<FakePayloads> = PrefixCache::new(config, None);
        let mut payloads = FakePayloads::default();
        let mut pin: Option<Pin> = None;
        let mut hits = 0;
        for request in requests {
            let keys: Vec<Key> = request.tokens.iter().map(|&token| Key { this: token.into(), next: 0 }).collect();
            let limit = keys.len() - 1;
            payloads.refuse = request.refuse;
            if let Some(pin) = pin.take() {
                cache.release(&mut payloads, pin);
            }
            // The naive model: every restore point held, as a sequence.
            let points: Vec<Vec<Key>> = cache
                .trie()
                .views()
                .iter()
                .filter(|view| view.point.is_some())
                .map(|view| cache.trie().keys(view.node))
                .collect();
            let best = points.iter().filter(|path| path.len() <= limit && keys.starts_with(path)).map(Vec::len).max();

            let found = cache.lookup(&mut payloads, &keys, limit);
            // Budgets may have shrunk with the live caches since the last request.
            prop_assert!(found.cached <= best.unwrap_or(0));
            hits += found.cached as u64;
            if found.cached > 0 {
                let restore = cache.restore(&found.pin).unwrap();
                let held: Vec<Key> = restore.segments.iter().flat_map(|(_, segment)| segment.keys.clone()).collect();
                prop_assert_eq!(&held, &keys[..found.cached]);
                prop_assert_eq!(restore.point.path, path_hash(&keys[..found.cached]));
            }
            cache.set_live_bytes(request.live);
            let mut offsets: Vec<usize> = request.captures.iter().map(|index| index.index(keys.len() + 3)).collect();
            offsets.sort_unstable();
            let states = offsets
                .iter()
                .map(|&offset| {
                    let path = &keys[..offset.min(keys.len())];
                    (Capture { offset, kind: PointKind::Rest }, FakePoint::of(path))
                })
                .collect();
            let grown = cache.grow(&mut payloads, found.pin, &keys, states, |_, range| Ok(FakeSegment::of(&keys[range])));
            if let Some(room) = request.room {
                cache.make_room(&mut payloads, room);
            }
            let shortage = cache.settle(&mut payloads);
            let bytes = cache.trie().bytes();
            let stats = cache.stats();
            prop_assert_eq!(stats.lookups.hit_tokens, hits);
            prop_assert_eq!(cache.trie().check(), Ok(()));
            if shortage == Shortage::default() {
                prop_assert!(bytes.host <= host && bytes.device <= device.saturating_sub(request.live));
            } else {
                // Only the path in use is left in the tier that is short.
                for view in cache.trie().views().iter().filter(|view| !view.pinned) {
                    let point = view.point.map_or_else(TierBytes::default, |point| point.bytes);
                    prop_assert!(shortage.device == 0 || point.device + view.segment.device == 0);
                }
            }
            if request.keep {
                pin = Some(grown);
            } else {
                cache.release(&mut payloads, grown);
                let bytes = cache.trie().bytes();
                prop_assert!(bytes.host <= host && bytes.device <= device.saturating_sub(request.live));
            }
        }
    }
}
