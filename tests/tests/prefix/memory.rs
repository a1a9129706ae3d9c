//! Bytes: what `status` says, what the allocator says, and what the budgets allow.

use lookahead_tests::requests;
use serde_json::json;

use crate::support::{number, words, Session, SAMPLINGS};

const REPLY: usize = 20;

/// What each array may occupy beyond its elements: the allocator rounds, and a copy of a buffer that is hardly larger than
/// itself keeps that buffer.
const SLACK_PER_ARRAY: u64 = 16 << 10;

/// Arrays of a point (two a recurrent layer and the frontier) and of an edge (two a key-value layer, the head's included).
const ARRAYS_OF_A_NODE: u64 = 2 * 6 + 1 + 2 * 3;

#[test]
fn the_bytes_told_are_the_allocators() {
    let mut session = Session::start("greedy", &[]);
    // The first request builds tables that stay.
    let warm = session.encode(&words(9, 10));
    session.cold(&warm, 4);
    let empty = number(&session.status()["memory"]["active"]);
    for conversation in 0..5 {
        let mut chat = session.turn("system", &words(1, 30));
        for turn in 0..4 {
            chat.extend(session.turn("user", &words(conversation * 10 + turn, 12)));
            chat.extend(session.opening());
            let outcome = session.plain(&chat, REPLY);
            chat.extend(outcome.tokens);
            chat.extend(session.closing());
            let status = session.status();
            let told = number(&status["cache"]["device"]["bytes"]);
            let active = number(&status["memory"]["active"]) - empty;
            let slack = number(&status["cache"]["nodes"]) * ARRAYS_OF_A_NODE * SLACK_PER_ARRAY;
            assert!(told > 0 && active + 4096 >= told, "{told} told, {active} held");
            assert!(
                active <= told + slack && active * 10 <= told * 11,
                "{told} told, {active} held"
            );
        }
    }
    let clear = json!({"type": "cache", "id": session.id(), "action": "clear"});
    session.process.ask(&clear);
    let status = session.status_when(|status| status["cache"]["nodes"] == 0);
    assert_eq!(status["cache"]["device"]["bytes"], 0);
    let left = number(&status["memory"]["active"]);
    assert!(
        left <= empty + 4096,
        "{left} bytes after clearing, {empty} before anything was cached"
    );
    assert_eq!(session.plain(&warm, 4).cached, 0);
    session.end();
}

#[test]
fn a_small_budget_holds_and_the_latest_conversation_stays() {
    for sampling in SAMPLINGS {
        a_small_budget_holds(sampling);
    }
}

fn a_small_budget_holds(sampling: &'static str) {
    let mut session = Session::start(sampling, &["--cache-device", "4MiB"]);
    let mut evicted = 0;
    for conversation in 0..10 {
        let mut chat = session.turn("system", &words(conversation, 20));
        chat.extend(session.turn("user", &words(60 + conversation, 20)));
        chat.extend(session.opening());
        let first = session.plain(&chat, REPLY);
        assert_eq!(first.tokens, session.cold(&chat, REPLY));
        assert_eq!(session.plain(&chat, REPLY).cached, chat.len() - 1, "a retry");
        let cache = session.status()["cache"].clone();
        assert!(number(&cache["device"]["bytes"]) <= 4 << 20, "{cache}");
        assert_eq!(cache["device"]["limit"], 4 << 20);
        evicted = number(&cache["evictions"]);
    }
    assert!(evicted > 0, "ten conversations can't all fit");
    session.end();
}

#[test]
fn a_budget_that_nothing_fits_costs_hits_only() {
    let mut session = Session::start("greedy", &["--cache-device", "64KiB", "--chunk", "64"]);
    let mut chat = session.turn("system", &words(1, 40));
    chat.extend(session.opening());
    for _ in 0..2 {
        let outcome = session.plain(&chat, REPLY);
        assert_eq!(outcome.tokens, session.cold(&chat, REPLY));
        let cache = session.status()["cache"].clone();
        assert!(number(&cache["device"]["bytes"]) <= 64 << 10, "{cache}");
    }
    session.end();
}

#[test]
fn idle_conversations_wait_in_host_memory() {
    let mut session = Session::start("greedy", &["--cache-device", "4MiB", "--cache-host", "64MiB"]);
    let chats: Vec<Vec<u64>> = (0..8)
        .map(|conversation| {
            let mut chat = session.turn("system", &words(conversation, 20));
            chat.extend(session.turn("user", &words(60 + conversation, 20)));
            chat.extend(session.opening());
            chat
        })
        .collect();
    for chat in &chats {
        session.plain(chat, REPLY);
    }
    for chat in &chats {
        let outcome = session.plain(chat, REPLY);
        assert_eq!(outcome.cached, chat.len() - 1);
        assert_eq!(outcome.tokens, session.cold(chat, REPLY));
    }
    let cache = session.status()["cache"].clone();
    assert!(
        number(&cache["demotions"]) > 0 && number(&cache["host"]["bytes"]) > 0,
        "{cache}"
    );
    assert!(number(&cache["device"]["bytes"]) <= 4 << 20, "{cache}");
    session.end();
}

#[test]
fn clearing_while_a_request_runs_leaves_no_trace_of_what_came_before() {
    let mut session = Session::start("greedy", &[]);
    let chat = session.encode(&words(1, 60));
    session.plain(&chat, REPLY);
    let id = session.id();
    session
        .process
        .send(&requests::tokens(&id, &chat, requests::greedy(200)));
    session.process.until(|event| event["type"] == "prompt");
    let clear = json!({"type": "cache", "id": session.id(), "action": "clear"});
    session.process.send(&clear);
    session
        .process
        .until_final(&[&id, clear["id"].as_str().unwrap_or_default()]);
    let status = session.status_when(|status| status["cache"]["nodes"] == 0);
    assert_eq!(status["cache"]["device"]["bytes"], 0);
    assert_eq!(session.plain(&chat, REPLY).cached, 0);
    session.end();
}
