//! What the cache holds of real state: bytes, restores and moves between tiers.

use std::cell::RefCell;

use mlx_rs::transforms::eval;

use super::*;
use crate::engine::decode::ids_array;
use crate::engine::scripted::{held, recurrent, Target};
use crate::mlx::Backend;
use crate::model::{Batch, Model as _};

fn target() -> Target {
    Backend::select(true);
    Target {
        next: Vec::new(),
        head: None,
        calls: RefCell::default(),
    }
}

fn prefixes(device: u64) -> Prefixes {
    let budgets = Budgets {
        device,
        host: 0,
        disk: 0,
    };
    Prefixes::new(budgets, false, None)
}

/// Serves a prompt up to its last token and lets the caches rest; what it started from, and its caches' content.
fn serve(prefixes: &mut Prefixes, target: &Target, tokens: &[u32]) -> (Option<&'static str>, Vec<[f32; 3]>) {
    let (mut path, restored) = prefixes.begin(tokens, &[], 1);
    let mut caches = target.new_caches();
    let from = restored.as_ref().map(|restored| match restored.key_values {
        KeyValues::Resting(_) => "resting",
        KeyValues::Pieces(..) => "pieces",
    });
    if let Some(restored) = restored {
        restored.load(&mut caches, None).unwrap();
    }
    assert_eq!(caches.offset() as usize, path.cached());
    let end = tokens.len() - 1;
    let ids = ids_array(&tokens[path.cached()..end]);
    if ids.size() > 0 {
        target
            .forward(&Batch::text(&ids, caches.offset()), &mut caches)
            .unwrap();
    }
    eval(caches.arrays()).unwrap();
    prefixes.set_running(caches.bytes());
    let snapshot = caches.snapshot().unwrap().unwrap();
    let state = State {
        kind: PointKind::Rest,
        snapshot,
        frontier: None,
    };
    let live = Live {
        trunk: &caches,
        head: None,
    };
    prefixes.keep(&mut path, vec![state], &live);
    let content = held(&caches).into_iter().map(|(keys, _)| keys).collect();
    let sum: u32 = tokens[..end].iter().sum();
    assert_eq!(recurrent(&caches).0, sum as f32);
    prefixes.end(Some(path), Some((caches, None)));
    (from, content)
}

fn slots(tokens: &[u32]) -> Vec<[f32; 3]> {
    let slot = |(slot, &token): (usize, &u32)| [token as f32, slot as f32, 0.0];
    tokens[..tokens.len() - 1].iter().enumerate().map(slot).collect()
}

#[test]
fn the_next_turn_goes_on_in_the_same_buffers_and_a_stranger_does_not() {
    let (target, mut prefixes) = (target(), prefixes(1 << 20));
    let mut chat: Vec<u32> = (1..40).collect();
    assert_eq!(serve(&mut prefixes, &target, &chat), (None, slots(&chat)));
    for turn in 0..3 {
        chat.extend((0..10).map(|i| 100 * turn + i));
        assert_eq!(
            serve(&mut prefixes, &target, &chat),
            (Some("resting"), slots(&chat))
        );
    }
    // A retry, another end of the same conversation (held by nobody but the buffers and one restore point), a stranger.
    assert_eq!(serve(&mut prefixes, &target, &chat).0, Some("resting"));
    let mut branch = chat[..chat.len() - 1].to_vec();
    branch.extend([7, 8, 9]);
    assert_eq!(
        serve(&mut prefixes, &target, &branch),
        (Some("resting"), slots(&branch))
    );
    assert_eq!(serve(&mut prefixes, &target, &[900, 901, 902]).0, None);
    // Its buffers are gone, the pieces aren't.
    assert_eq!(
        serve(&mut prefixes, &target, &chat),
        (Some("pieces"), slots(&chat))
    );
    assert_eq!(serve(&mut prefixes, &target, &chat).0, Some("resting"));
}

#[test]
fn resting_buffers_are_counted_and_given_up_before_they_break_the_budget() {
    let (target, mut prefixes) = (target(), prefixes(1 << 20));
    let chat: Vec<u32> = (1..40).collect();
    serve(&mut prefixes, &target, &chat);
    let resting = prefixes.resting.as_ref().map(Resting::bytes).unwrap();
    let told = prefixes.status().device.bytes;
    assert!(resting > 0 && told > resting);
    // What runs beside them needs the room.
    prefixes.set_running((1 << 20) - resting + 1);
    assert!(prefixes.resting.is_none());
    prefixes.end(None, None);
    assert_eq!(
        prefixes.status().device.bytes,
        told - resting,
        "the pieces fit beside it"
    );

    serve(&mut prefixes, &target, &chat);
    assert!(prefixes.make_room(1) && prefixes.resting.is_none());
    assert_eq!(prefixes.status().device.bytes, told - resting);
    serve(&mut prefixes, &target, &chat);
    assert!(prefixes.resting.is_some());
    prefixes.clear();
    assert_eq!(prefixes.status().device.bytes, 0);
}

#[test]
fn buffers_larger_than_their_part_of_the_budget_do_not_rest() {
    let target = target();
    let chat: Vec<u32> = (1..40).collect();
    let mut wide = prefixes(1 << 20);
    serve(&mut wide, &target, &chat);
    let resting = wide.resting.as_ref().map(Resting::bytes).unwrap();
    let mut narrow = prefixes(resting * RESTING_PART - 1);
    serve(&mut narrow, &target, &chat);
    assert!(narrow.resting.is_none());
    assert_eq!(serve(&mut narrow, &target, &chat).0, Some("pieces"));
}

#[test]
fn a_path_that_was_let_go_of_is_recorded_again_from_the_live_caches() {
    let (target, mut prefixes) = (target(), prefixes(1 << 20));
    let chat: Vec<u32> = (1..40).collect();
    serve(&mut prefixes, &target, &chat);
    prefixes.resting = None;
    let (mut path, restored) = prefixes.begin(&chat, &[], 1);
    let mut caches = target.new_caches();
    restored.unwrap().load(&mut caches, None).unwrap();
    assert!(!prefixes.make_room(u64::MAX), "the path is in use");
    prefixes.loosen(&mut path);
    assert!(prefixes.make_room(u64::MAX));
    assert_eq!(prefixes.status().nodes, 0);
    let state = State {
        kind: PointKind::Rest,
        snapshot: caches.snapshot().unwrap().unwrap(),
        frontier: None,
    };
    let live = Live {
        trunk: &caches,
        head: None,
    };
    prefixes.keep(&mut path, vec![state], &live);
    prefixes.end(Some(path), None);
    assert_eq!(
        serve(&mut prefixes, &target, &chat),
        (Some("pieces"), slots(&chat))
    );
}
