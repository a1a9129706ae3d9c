//! The trie against a plain set of sequences.

use super::*;
use crate::prefix::fake::{keys, put, Fake, FakePoint, FakeSegment, PER_KEY, PER_POINT};
use crate::prefix::trie_view::NodeView;

fn found(trie: &Fake, text: &str) -> (usize, usize) {
    let found = trie.find(&keys(text), text.len() - 1);
    (found.matched, found.point.map_or(0, |(_, offset)| offset))
}

/// Every edge below the root as "offset:keys", a star where there is a restore point.
fn shape(trie: &Fake) -> Vec<String> {
    let mut views = trie.views();
    views.reverse();
    let line = |view: NodeView| {
        let edge: String = trie
            .segment(view.node)
            .into_iter()
            .flat_map(|s| &s.keys)
            .map(|key| key.this as u8 as char)
            .collect();
        format!(
            "{}:{edge}{}",
            view.offset,
            if view.point.is_some() { "*" } else { "" }
        )
    };
    views.into_iter().map(line).collect()
}

#[test]
fn an_empty_trie_matches_nothing() {
    let trie = Fake::new();
    assert_eq!(found(&trie, "abc"), (0, 0));
    assert_eq!((trie.counts(), trie.bytes().total()), ((0, 0), 0));
}

#[test]
fn a_match_never_leaves_nothing_to_evaluate() {
    let mut trie = Fake::new();
    put(&mut trie, "abc", 1);
    assert_eq!(
        found(&trie, "abc"),
        (3, 0),
        "the only point is at the end of the same prompt"
    );
    put(&mut trie, "ab", 2);
    assert_eq!(found(&trie, "abc"), (3, 2));
    assert_eq!(found(&trie, "abcd"), (3, 3));
}

#[test]
fn divergence_inside_an_edge_restores_above_it_until_captured() {
    // D.5: a whole state at 100, a prompt that shares 60, nothing to restore there; its capture at 60 serves the third.
    let mut trie = Fake::new();
    put(&mut trie, "aaaaaabbbb", 1);
    assert_eq!(found(&trie, "aaaaaacccc"), (6, 0));
    put(&mut trie, "aaaaaa", 2);
    put(&mut trie, "aaaaaaccc", 2);
    assert_eq!(shape(&trie), ["6:aaaaaa*", "9:ccc*", "10:bbbb*"]);
    assert_eq!(found(&trie, "aaaaaadddd"), (6, 6));
    assert_eq!(trie.bytes().device, 13 * PER_KEY + 3 * PER_POINT);
}

#[test]
fn an_uncaptured_divergence_branches_without_a_restore_point() {
    let mut trie = Fake::new();
    put(&mut trie, "aabb", 1);
    put(&mut trie, "aacc", 2);
    assert_eq!(shape(&trie), ["2:aa", "4:cc*", "4:bb*"]);
    assert_eq!(found(&trie, "aax"), (2, 0));
}

#[test]
fn a_split_leaves_the_restore_point_with_the_deeper_half() {
    let mut trie = Fake::new();
    let deep = put(&mut trie, "abcd", 1);
    let upper = put(&mut trie, "ab", 2);
    assert_eq!(
        trie.point(deep).map(|point| point.payload.path),
        Some(FakePoint::of(&keys("abcd")).path)
    );
    assert_eq!(
        trie.point(upper).map(|point| point.payload.path),
        Some(FakePoint::of(&keys("ab")).path)
    );
    assert_eq!((trie.offset(deep), trie.offset(upper)), (4, 2));
    assert_eq!(trie.keys(deep), keys("abcd"));
}

#[test]
fn removing_an_inner_point_joins_the_edges_and_frees_only_the_state() {
    let mut trie = Fake::new();
    let inner = put(&mut trie, "ab", 1);
    put(&mut trie, "abcd", 2);
    assert!(trie.remove_point(inner).is_some());
    assert_eq!(shape(&trie), ["4:abcd*"]);
    assert_eq!(trie.bytes().device, 4 * PER_KEY + PER_POINT);
}

#[test]
fn removing_a_leaf_point_frees_the_positions_that_nothing_can_resume() {
    let mut trie = Fake::new();
    put(&mut trie, "ab", 1);
    let leaf = put(&mut trie, "abcd", 2);
    trie.remove_point(leaf);
    assert_eq!(shape(&trie), ["2:ab*"]);
    put(&mut trie, "abxx", 3);
    let other = put(&mut trie, "abyy", 3);
    trie.remove_point(other);
    assert_eq!(
        shape(&trie),
        ["2:ab*", "4:xx*"],
        "a branch that is none any more stays for its own point only"
    );
}

#[test]
fn removing_one_of_two_branches_joins_the_other_with_its_stem() {
    let mut trie = Fake::new();
    put(&mut trie, "aabb", 1);
    let gone = put(&mut trie, "aacc", 2);
    trie.remove_point(gone);
    assert_eq!(shape(&trie), ["4:aabb*"]);
}

#[test]
fn a_pinned_path_survives_the_loss_of_its_points() {
    let mut trie = Fake::new();
    let inner = put(&mut trie, "ab", 1);
    let leaf = put(&mut trie, "abcd", 2);
    let pin = trie.pin(leaf);
    trie.remove_point(leaf);
    trie.remove_point(inner);
    assert_eq!(shape(&trie), ["4:abcd"]);
    assert_eq!(trie.pinned(&pin), Some(leaf));
    assert!(trie.views().iter().all(|view| view.pinned));
    trie.unpin(pin);
    assert_eq!(trie.counts(), (0, 0));
}

#[test]
fn a_pin_inside_an_edge_keeps_its_place_when_others_split_it() {
    let mut trie = Fake::new();
    put(&mut trie, "abcdef", 1);
    let path = keys("abcd");
    let pin = trie.pin_path(&path, |_| unreachable!("the path is there"));
    put(&mut trie, "abxx", 2);
    let node = trie.pinned(&pin).unwrap();
    assert_eq!(trie.keys(node), path);
    assert_eq!(shape(&trie), ["2:ab", "4:xx*", "4:cd", "6:ef*"]);
    trie.unpin(pin);
    assert_eq!(shape(&trie), ["2:ab", "4:xx*", "6:cdef*"]);
}

#[test]
fn several_pins_on_one_path_are_independent() {
    let mut trie = Fake::new();
    let inner = put(&mut trie, "ab", 1);
    let leaf = put(&mut trie, "abcd", 2);
    let (first, second) = (trie.pin(inner), trie.pin(leaf));
    trie.remove_point(inner);
    trie.unpin(second);
    assert_eq!(shape(&trie), ["2:ab", "4:cd*"]);
    let moved = trie.repin(first, leaf);
    assert_eq!(shape(&trie), ["4:abcd*"]);
    trie.unpin(moved);
    assert_eq!(shape(&trie), ["4:abcd*"]);
}

#[test]
fn clearing_voids_pins() {
    let mut trie = Fake::new();
    let leaf = put(&mut trie, "ab", 1);
    let pin = trie.pin(leaf);
    trie.clear();
    put(&mut trie, "xy", 2);
    assert_eq!(trie.pinned(&pin), None);
    trie.unpin(pin);
    assert_eq!(shape(&trie), ["2:xy*"]);
}

#[test]
fn eviction_takes_the_least_recently_used_and_the_deepest_of_equals() {
    let mut trie = Fake::new();
    put(&mut trie, "ab", 5);
    let deep = put(&mut trie, "abcd", 5);
    let old = put(&mut trie, "xy", 3);
    assert_eq!(trie.oldest_point(), Some(old));
    trie.touch(old, 9);
    assert_eq!(trie.oldest_point(), Some(deep));
    let pin = trie.pin(deep);
    assert_eq!(trie.oldest_point(), Some(old), "the path in use is no candidate");
    trie.unpin(pin);
}

#[test]
fn passing_a_branch_counts_as_its_use_and_passing_other_points_does_not() {
    let mut trie = Fake::new();
    let stem = put(&mut trie, "s", 1);
    put(&mut trie, "sa", 1);
    let inner = put(&mut trie, "sb", 1);
    let leaf = put(&mut trie, "sbb", 1);
    trie.touch(leaf, 7);
    let used = |node| trie.point(node).map(|point| point.used);
    assert_eq!((used(stem), used(inner), used(leaf)), (Some(7), Some(1), Some(7)));
}

#[test]
fn a_second_point_at_the_same_offset_replaces_the_first_and_keeps_the_telling_kind() {
    let mut trie = Fake::new();
    let path = keys("ab");
    let insert = |trie: &mut Fake, kind, used| {
        trie.insert_point(&path, kind, used, FakePoint::of(&path), |range| {
            FakeSegment::of(&path[range])
        })
    };
    let first = insert(&mut trie, PointKind::Answer, 1);
    let second = insert(&mut trie, PointKind::Grid, 4);
    assert_eq!(first, second);
    assert_eq!(
        trie.point(first).map(|point| (point.kind, point.used)),
        Some((PointKind::Answer, 4))
    );
    assert_eq!(trie.bytes().total(), 2 * PER_KEY + PER_POINT);
}

#[test]
fn nothing_is_stored_at_offset_zero() {
    let mut trie = Fake::new();
    let root = put(&mut trie, "", 1);
    assert_eq!((root, trie.counts()), (trie.root(), (0, 0)));
}

#[test]
fn edges_follow_the_path() {
    let mut trie = Fake::new();
    let stem = put(&mut trie, "ab", 1);
    put(&mut trie, "abcd", 1);
    let right = put(&mut trie, "abxyz", 1);
    assert_eq!(trie.edges(right), [(stem, 0..2), (right, 2..5)]);
}

#[test]
fn a_segment_that_cannot_be_made_leaves_no_trace() {
    let mut trie = Fake::new();
    put(&mut trie, "abcd", 1);
    let path = keys("abxy");
    let made = trie.try_insert_point(&path, PointKind::Rest, 2, FakePoint::of(&path), |_| {
        Err("no memory")
    });
    assert_eq!(made, Err("no memory"));
    assert_eq!((trie.counts(), trie.check()), ((1, 1), Ok(())));
}

#[test]
fn views_list_children_first_with_the_latest_use_below() {
    let mut trie = Fake::new();
    put(&mut trie, "ab", 2);
    put(&mut trie, "abc", 1);
    put(&mut trie, "abdd", 6);
    let used: Vec<_> = trie.views().iter().map(|view| (view.offset, view.used)).collect();
    assert_eq!(used, [(4, 6), (3, 1), (2, 6)]);
}
