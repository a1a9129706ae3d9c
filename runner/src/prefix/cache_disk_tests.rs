//! Timelines that reach the disk tier: restarts, eviction to disk, damage.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use super::*;
use crate::prefix::disk::{DiskConfig, DiskStore, Fingerprint};
use crate::prefix::stats::{Lookups, TierUse};

fn disk(path: &Path, budget: u64) -> Option<Arc<DiskStore>> {
    let config = DiskConfig::new(path.to_owned(), Fingerprint(1), budget);
    Some(Arc::new(DiskStore::open(config).unwrap()))
}

const SOON: Duration = Duration::from_secs(20);

#[test]
fn a_conversation_survives_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let chat = system().say(Role::User, question(1)).ask();
    let mut next = chat.clone();
    {
        let mut engine = Engine::new(1 << 20, 0, disk(dir.path(), 1 << 20));
        engine.run(&chat, &answer(1));
        assert!(engine.cache.persist(&mut engine.payloads, u64::MAX) > 0);
        assert!(engine.cache.flush(SOON));
        assert_eq!(
            engine.cache.persist(&mut engine.payloads, u64::MAX),
            0,
            "all of it is there"
        );
    }
    next.tokens.extend(answer(1));
    let rested = next.tokens.len() - 1;
    let next = next.say(Role::User, question(2)).ask();
    let mut engine = Engine::new(1 << 20, 1 << 20, disk(dir.path(), 1 << 20));
    assert_eq!(engine.run(&next, &answer(2)), rested);
    assert_eq!(
        engine.run(&chat, &answer(3)),
        chat.tokens.len() - 3,
        "the retry starts at the answer's start"
    );
    let stats = engine.cache.stats();
    assert_eq!((stats.lookups.hits, stats.lookups.disk_hits), (2, 2));
    assert!(stats.load.count >= 3 && stats.load.bytes > 0);
}

#[test]
fn a_conversation_costs_disk_in_proportion_to_its_length() {
    let dir = tempfile::tempdir().unwrap();
    let mut engine = Engine::new(u64::MAX, 0, disk(dir.path(), 1 << 30));
    let mut chat = system();
    let mut sizes = Vec::new();
    for turn in 0..40 {
        chat = chat.say(Role::User, question(turn)).ask();
        engine.run(&chat, &answer(turn));
        chat.tokens.extend(answer(turn));
        engine.cache.persist(&mut engine.payloads, u64::MAX);
        assert!(engine.cache.flush(SOON));
        sizes.push(engine.cache.stats().bytes.disk);
    }
    let (half, whole) = (sizes[19], sizes[39]);
    assert!(
        whole < half * 21 / 10,
        "{half} bytes after 20 turns, {whole} after 40"
    );
}

#[test]
fn what_leaves_memory_lives_on_disk() {
    let dir = tempfile::tempdir().unwrap();
    let mut engine = Engine::new(2_500, 0, disk(dir.path(), 1 << 20));
    let chat = |number| system().say(Role::User, question(number)).ask();
    for number in 0..6 {
        engine.run(&chat(number), &answer(number));
        assert!(engine.cache.flush(SOON));
    }
    assert!(engine.cache.stats().bytes.device <= 2_500);
    engine.cache.config.budgets.host = 1 << 20;
    assert_eq!(engine.run(&chat(0), &answer(0)), chat(0).tokens.len() - 3);
    assert_eq!(engine.cache.stats().lookups.disk_hits, 1);
}

#[test]
fn a_damaged_link_falls_back_to_what_is_whole() {
    let dir = tempfile::tempdir().unwrap();
    let chat = system().say(Role::User, question(1)).ask();
    {
        let mut engine = Engine::new(1 << 20, 0, disk(dir.path(), 1 << 20));
        engine.run(&chat, &answer(1));
        engine.cache.persist(&mut engine.payloads, u64::MAX);
        assert!(engine.cache.flush(SOON));
    }
    for file in std::fs::read_dir(dir.path().join("prefix").join(Fingerprint(1).to_string())).unwrap() {
        let path = file.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if name.starts_with("point-") && !name.starts_with("point-31-") {
            std::fs::write(&path, b"damaged").unwrap();
        }
    }
    let mut engine = Engine::new(1 << 20, 1 << 20, disk(dir.path(), 1 << 20));
    assert_eq!(engine.cache.lookups, Lookups::default());
    engine.cache.disk.as_ref().unwrap().take_warnings();
    assert!([0, 31].contains(&engine.run(&chat, &answer(1))));
    assert!(!engine.cache.disk.as_ref().unwrap().take_warnings().is_empty());
}

#[test]
fn clearing_reaches_the_disk() {
    let dir = tempfile::tempdir().unwrap();
    let chat = system().say(Role::User, question(1)).ask();
    let mut engine = Engine::new(1 << 20, 0, disk(dir.path(), 1 << 20));
    engine.run(&chat, &answer(1));
    engine.cache.persist(&mut engine.payloads, u64::MAX);
    engine.cache.clear().unwrap();
    assert!(engine.cache.flush(SOON));
    assert_eq!(engine.cache.stats().bytes, TierUse::default());
    assert_eq!(engine.run(&chat, &answer(1)), 0);
}
