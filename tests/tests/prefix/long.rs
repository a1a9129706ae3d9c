//! Long conversations, and prefixes from disk against computing them. The figures in docs/prefix-cache.md come from here:
//! `cargo test --release -p lookahead-tests --test prefix -- --ignored --nocapture`.

use std::time::{Duration, Instant};

use lookahead_tests::golden::long_prompt;
use serde_json::json;

use crate::support::{number, words, Outcome, Session};

fn milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

/// One more turn of about 40 prompt tokens, answered with 60.
fn turn(session: &mut Session, chat: &mut Vec<u64>, number: usize) -> Outcome {
    let mut content = session.encode(&words(number, 12));
    content.truncate(32);
    let opening = session.encode("<|im_start|>user\n");
    chat.extend(opening);
    chat.extend(content);
    chat.extend(session.closing());
    chat.extend(session.opening());
    let outcome = session.plain(chat, 60);
    chat.extend(&outcome.tokens);
    chat.extend(session.closing());
    outcome
}

#[test]
#[ignore = "takes minutes"]
fn turn_a_hundred_starts_far_faster_than_from_nothing() {
    let mut session = Session::start("greedy", &["--draft", "auto", "--cache-device", "128MiB"]);
    let mut chat = session.turn("system", &words(0, 30));
    let mut rested = 0;
    let (mut times, mut processor) = (Vec::new(), Vec::new());
    let mut last_cold = Duration::ZERO;
    println!(
        "turn tokens cached first_token_ms processor_ms cold_ms cache_MiB points nodes active_MiB peak_MiB"
    );
    for number_of_turn in 1..=100 {
        let before = chat.clone();
        let outcome = turn(&mut session, &mut chat, number_of_turn);
        assert_eq!(outcome.cached, rested, "turn {number_of_turn}");
        rested = chat.len() - session.closing().len() - 1;
        times.push(outcome.first_token);
        processor.extend(outcome.processor);
        let status = session.status();
        let (cache, memory) = (&status["cache"], &status["memory"]);
        let bytes = number(&cache["device"]["bytes"]);
        assert!(bytes <= 128 << 20, "{cache}");
        if [1, 2, 5, 10, 20, 40, 60, 80, 100].contains(&number_of_turn) {
            let mut prompt = before;
            prompt.extend(&chat[prompt.len()..chat.len() - 60 - session.closing().len()]);
            let start = Instant::now();
            let cold = session.cold(&prompt, 1);
            let cold_time = start.elapsed();
            last_cold = cold_time;
            assert_eq!(cold[0], outcome.tokens[0], "turn {number_of_turn}");
            let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
            println!(
                "{number_of_turn} {} {} {:.1} {:.1} {:.1} {:.1} {} {} {:.1} {:.1}",
                prompt.len(),
                outcome.cached,
                milliseconds(outcome.first_token),
                milliseconds(outcome.processor.unwrap_or_default()),
                milliseconds(cold_time),
                mib(bytes),
                cache["restore_points"],
                cache["nodes"],
                mib(number(&memory["active"]) - number(&memory["weights"])),
                mib(number(&memory["peak"]) - number(&memory["weights"])),
            );
        }
    }
    let median = |times: &[Duration]| {
        let mut times = times.to_vec();
        times.sort_unstable();
        times[times.len() / 2]
    };
    let pair = |times: &[Duration]| (median(&times[2..7]), median(&times[95..100]));
    let (early, late) = pair(&times);
    println!(
        "median first token: turns 3 to 7 {early:?}, turns 96 to 100 {late:?}; the last one cold {last_cold:?}"
    );
    assert!(late * 10 < last_cold, "{late:?} against {last_cold:?} cold");
    // The clock counts what else the machine does; processor time doesn't.
    let (early, late) = if processor.len() == times.len() {
        let (early, late) = pair(&processor);
        println!("in processor time: turns 3 to 7 {early:?}, turns 96 to 100 {late:?}");
        (early, late)
    } else {
        (early, late)
    };
    assert!(
        late.as_secs_f64() <= 1.5 * early.as_secs_f64(),
        "turn 100 takes {late:?}, turn 5 {early:?}"
    );
    session.end();
}

#[test]
#[ignore = "takes minutes"]
fn two_hundred_turns_fit_64_mib() {
    let mut session = Session::start("greedy", &["--draft", "auto", "--cache-device", "64MiB"]);
    let mut chat = session.turn("system", &words(0, 30));
    let mut cold = 0;
    println!("turn tokens cached first_token_ms cache_MiB points resident_MiB");
    for number_of_turn in 1..=200 {
        let outcome = turn(&mut session, &mut chat, number_of_turn);
        cold += usize::from(number_of_turn > 1 && outcome.cached + 120 < chat.len() - 60);
        let cache = session.status()["cache"].clone();
        let bytes = number(&cache["device"]["bytes"]);
        assert!(bytes <= 64 << 20, "{cache}");
        if number_of_turn % 20 == 0 {
            println!(
                "{number_of_turn} {} {} {:.1} {:.1} {} {:.0}",
                chat.len(),
                outcome.cached,
                milliseconds(outcome.first_token),
                bytes as f64 / f64::from(1 << 20),
                cache["restore_points"],
                session.process.resident().unwrap_or_default() as f64 / f64::from(1 << 20),
            );
        }
    }
    assert_eq!(cold, 0, "turns that didn't start near their predecessor's end");
    session.end();
}

#[test]
#[ignore = "takes minutes"]
fn a_prefix_from_disk_beats_computing_it() {
    let dir = tempfile::tempdir().unwrap_or_else(|error| panic!("{error}"));
    let path = dir.path().to_string_lossy().into_owned();
    let args = ["--cache-disk", "1GiB", "--cache-dir", &path];
    let prompt = long_prompt(4000);
    let mut best = [Duration::MAX; 2];
    let mut reply = None;
    for _ in 0..3 {
        let mut session = Session::start("greedy", &args);
        let clear = json!({"type": "cache", "id": session.id(), "action": "clear"});
        session.process.ask(&clear);
        let computed = session.plain(&prompt, 4);
        assert_eq!(computed.cached, 0);
        best[0] = best[0].min(computed.first_token);
        session.status_when(|status| {
            number(&status["cache"]["disk"]["stores"]) > 0 && status["cache"]["host"]["bytes"] == 0
        });
        session.end();
        let mut session = Session::start("greedy", &args);
        let restored = session.plain(&prompt, 4);
        assert_eq!(restored.cached, prompt.len() - 1);
        assert_eq!(&restored.tokens, reply.get_or_insert(computed.tokens));
        best[1] = best[1].min(restored.first_token);
        let disk = session.status()["cache"]["disk"].clone();
        println!(
            "first token: computed {:?}, from disk {:?}; {disk}",
            computed.first_token, restored.first_token
        );
        session.end();
    }
    assert!(
        best[1] * 5 < best[0],
        "computed {:?}, from disk {:?}",
        best[0],
        best[1]
    );
}
