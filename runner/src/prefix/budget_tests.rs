//! Eviction and thinning: what goes first, and what never goes.

use super::*;
use crate::prefix::fake::{keys, put, Fake, FakePayloads, PER_KEY, PER_POINT};
use crate::prefix::payload::Payloads;
use proptest::prelude::*;

/// Carry out steps until there is none; what was done, as text.
fn settle(trie: &mut Fake, device: u64, host: u64) -> (Vec<String>, Next) {
    let mut done = Vec::new();
    loop {
        let name = |trie: &Fake, node| {
            trie.keys(node)
                .iter()
                .map(|key| key.this as u8 as char)
                .collect::<String>()
        };
        match next_step(trie, TierBytes { device, host }) {
            Next::Step(Step::ToHost(node, part)) => {
                done.push(format!("{part:?} {} to host", name(trie, node)));
                match part {
                    Part::Segment => FakePayloads::default()
                        .segment_to_host(trie.segment_mut(node).unwrap())
                        .unwrap(),
                    Part::Point => {
                        FakePayloads::default()
                            .point_to_host(&mut trie.point_mut(node).unwrap().payload)
                            .unwrap();
                    }
                }
            }
            Next::Step(Step::Forget(node)) => {
                done.push(format!("forget {}", name(trie, node)));
                trie.remove_point(node).unwrap();
            }
            end => return (done, end),
        }
    }
}

#[test]
fn sizes_are_read_in_every_usual_spelling() {
    for (text, expected) in [
        ("0", Size::Bytes(0)),
        ("4096", Size::Bytes(4096)),
        ("8GiB", Size::Bytes(8 << 30)),
        ("512MB", Size::Bytes(512_000_000)),
        (" 1.5 gib ", Size::Bytes(3 << 29)),
        ("64k", Size::Bytes(64_000)),
        ("18446744073709551615", Size::Bytes(u64::MAX)),
        ("25%", Size::Percent(25.0)),
        ("0.5 %", Size::Percent(0.5)),
    ] {
        assert_eq!(text.parse(), Ok(expected), "{text}");
    }
    assert_eq!(Size::Percent(25.0).resolve(1000), 250);
    assert_eq!(Size::Bytes(7).resolve(1000), 7);
}

#[test]
fn unreadable_sizes_name_the_text() {
    for text in [
        "",
        "GiB",
        "-1",
        "8XB",
        "101%",
        "99999999999999TiB",
        "1.2.3",
        "1e9",
    ] {
        let error = text.parse::<Size>().unwrap_err().to_string();
        assert!(error.contains(&format!("{text:?}")), "{error}");
    }
}

#[test]
fn the_device_spills_to_host_memory_oldest_first_and_deepest_of_equals() {
    let mut trie = Fake::new();
    put(&mut trie, "new", 9);
    put(&mut trie, "a", 3);
    put(&mut trie, "ab", 3);
    let all = 5 * PER_KEY + 3 * PER_POINT;
    let (done, end) = settle(&mut trie, all - 2 * PER_POINT - PER_KEY, u64::MAX);
    assert_eq!(
        done,
        ["Point ab to host", "Segment ab to host", "Point a to host"]
    );
    assert_eq!(end, Next::Fits);
    assert_eq!(
        trie.bytes(),
        TierBytes {
            device: all - 210,
            host: 210
        }
    );
}

#[test]
fn host_memory_forgets_the_oldest_and_the_edges_go_with_it() {
    let mut trie = Fake::new();
    put(&mut trie, "new", 9);
    put(&mut trie, "old", 3);
    let (done, end) = settle(&mut trie, 0, 3 * PER_KEY + PER_POINT);
    assert_eq!(done.last().map(String::as_str), Some("forget old"));
    assert_eq!(end, Next::Fits);
    assert_eq!(trie.bytes(), TierBytes::host(3 * PER_KEY + PER_POINT));
}

#[test]
fn without_a_host_tier_the_device_forgets() {
    let mut trie = Fake::new();
    put(&mut trie, "new", 9);
    put(&mut trie, "old", 3);
    let (done, end) = settle(&mut trie, 200, 0);
    assert_eq!((done, end), (vec!["forget old".to_owned()], Next::Fits));
}

#[test]
fn the_path_in_use_loses_only_restore_points_and_says_when_nothing_is_left() {
    let mut trie = Fake::new();
    put(&mut trie, "ab", 1);
    let leaf = put(&mut trie, "abcd", 1);
    put(&mut trie, "old", 7);
    let pin = trie.pin(leaf);
    let (done, end) = settle(&mut trie, 10, 0);
    assert_eq!(done, ["forget old"], "the rest would be given up in vain");
    assert_eq!(
        end,
        Next::Short {
            device: 4 * PER_KEY + 2 * PER_POINT - 10,
            host: 0
        }
    );
    let (done, end) = settle(&mut trie, 4 * PER_KEY, 0);
    assert_eq!(
        (done, end),
        (vec!["forget ab".to_owned(), "forget abcd".to_owned()], Next::Fits)
    );
    assert_eq!(
        trie.bytes().device,
        4 * PER_KEY,
        "the edges of the path in use stay"
    );
    trie.unpin(pin);
}

#[test]
fn a_short_device_does_not_forget_what_lies_in_host_memory() {
    let mut trie = Fake::new();
    put(&mut trie, "old", 1);
    settle(&mut trie, 0, 500);
    let leaf = put(&mut trie, "live", 2);
    let pin = trie.pin(leaf);
    let (done, end) = settle(&mut trie, 0, 500);
    assert_eq!(done, ["Point live to host"]);
    assert_eq!(
        end,
        Next::Short {
            device: 4 * PER_KEY,
            host: 0
        }
    );
    assert_eq!(trie.counts().1, 2);
    trie.unpin(pin);
}

#[test]
fn thinning_bounds_the_points_of_the_path_in_use() {
    let mut trie = Fake::new();
    let text = "x".repeat(64);
    let nodes: Vec<_> = (1..=64)
        .map(|end| put(&mut trie, &text[..end], end as u64))
        .collect();
    let pin = trie.pin(nodes[63]);
    while let Some(node) = next_thinning(&trie, 6 * PER_POINT) {
        trie.remove_point(node);
    }
    let mut left: Vec<_> = trie
        .views()
        .iter()
        .filter(|view| view.point.is_some())
        .map(|view| view.offset)
        .collect();
    left.reverse();
    assert_eq!(left.len(), 6);
    assert_eq!(left[5], 64);
    let gaps: Vec<_> = left.windows(2).map(|pair| pair[1] - pair[0]).collect();
    assert!(gaps.windows(2).all(|pair| pair[0] >= pair[1]), "{left:?}");
    trie.unpin(pin);
}

proptest! {
    #[test]
    fn any_budget_is_met_or_the_shortage_is_all_in_use(
        texts in prop::collection::vec("[ab]{1,8}", 1..12),
        pinned in prop::option::of(any::<prop::sample::Index>()),
        device in 0u64..900,
        host in 0u64..900,
    ) {
        let mut trie = Fake::new();
        for (now, text) in texts.iter().enumerate() {
            put(&mut trie, text, now as u64 + 1);
        }
        let pin = pinned.map(|index| {
            let path = keys(&texts[index.index(texts.len())]);
            trie.pin_path(&path, |_| unreachable!("stored above"))
        });
        let (_, end) = settle(&mut trie, device, host);
        match end {
            Next::Fits => prop_assert!(trie.bytes().device <= device && trie.bytes().host <= host),
            Next::Short { .. } => {
                prop_assert!(pin.is_some());
                let views = trie.views();
                let movable = views.iter().filter(|view| !view.pinned).map(|view| bytes(view).device).sum::<u64>();
                prop_assert!(movable == 0 || trie.bytes().device <= device);
            }
            Next::Step(_) => prop_assert!(false, "settle ends on no step"),
        }
    }
}
