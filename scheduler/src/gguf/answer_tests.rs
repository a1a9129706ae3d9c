//! llama-server's stream, event by event.

use super::*;
use serde_json::json;

/// Ids are their characters' code points; the unicorn is made of three.
struct Letters;

impl Words for Letters {
    fn ids_of(&self, text: &str) -> Option<Vec<u32>> {
        (text == " \u{1f984}").then(|| vec![1, 2, 3])
    }

    fn text_of(&self, ids: &[u32]) -> Option<String> {
        ids.iter().map(|&id| char::from_u32(id)).collect()
    }
}

fn play(silent: bool, stream: &[Value]) -> (Vec<Event>, Option<Done>) {
    play_with(silent, &[], stream)
}

fn play_with(silent: bool, stops: &[&str], stream: &[Value]) -> (Vec<Event>, Option<Done>) {
    let mut answer = Answer::new(Asked {
        id: "a".to_owned(),
        prompt_tokens: 5,
        budget: 100,
        stops: stops.iter().map(|&stop| stop.to_owned()).collect(),
        progress: false,
        silent,
    });
    let mut events = Vec::new();
    let mut ending = None;
    for data in stream {
        ending = answer.take(data, &Letters, |event| events.push(event));
    }
    (events, ending)
}

/// The stream of a text of one letter an id, as the server sends it: what may begin a stop string is kept back.
fn letters(sent: &[&str], text: &str) -> Vec<Value> {
    let ids = text.chars().map(u32::from);
    sent.iter()
        .zip(ids)
        .enumerate()
        .map(|(at, (&sent, id))| piece(sent, &[id], at as u64 + 1))
        .collect()
}

fn piece(text: &str, ids: &[u32], predicted: u64) -> Value {
    json!({"index": 0, "content": text, "tokens": ids, "stop": false, "tokens_predicted": predicted})
}

fn end(kind: &str, predicted: u64) -> Value {
    json!({"content": "", "tokens": [], "stop": true, "stop_type": kind, "stopping_word": "", "tokens_predicted": predicted,
        "timings": {"cache_n": 2, "prompt_ms": 1.5, "predicted_ms": 3.0, "draft_n": 8, "draft_n_accepted": 6}})
}

fn tokens(events: &[Event]) -> Vec<(&str, &[u32])> {
    events
        .iter()
        .filter_map(|event| match event {
            Event::Token(token) => Some((token.text.as_str(), token.tokens.as_slice())),
            _ => None,
        })
        .collect()
}

#[test]
fn the_id_that_ends_the_answer_is_neither_delivered_nor_counted() {
    let (events, ending) = play(false, &[piece("1", &[16], 1), piece("", &[99], 2), end("eos", 2)]);
    assert_eq!(tokens(&events), [("1", [16].as_slice())]);
    let done = ending.unwrap();
    assert_eq!((done.eval_count, done.done_reason), (1, DoneReason::Stop));
    assert_eq!(
        (done.cached_count, done.prompt_eval_duration, done.eval_duration),
        (2, 1_500_000, 3_000_000)
    );
    assert_eq!(
        (done.draft.proposed, done.draft.accepted, done.draft.rounds),
        (8, 6, None)
    );
}

#[test]
fn a_hidden_id_inside_the_answer_is_delivered_with_the_next_text() {
    let (events, _) = play(
        false,
        &[piece("", &[98], 1), piece("x", &[5], 2), end("limit", 2)],
    );
    assert_eq!(tokens(&events), [("x", [98, 5].as_slice())]);
}

#[test]
fn all_ids_of_a_character_are_delivered() {
    let (events, ending) = play(false, &[piece(" \u{1f984}", &[3], 3), end("limit", 3)]);
    assert_eq!(tokens(&events), [(" \u{1f984}", [1, 2, 3].as_slice())]);
    assert_eq!(ending.unwrap().eval_count, 3);
}

#[test]
fn an_incomplete_character_at_the_end_is_shown_as_such() {
    let (events, ending) = play(false, &[piece("x", &[5], 1), end("limit", 3)]);
    assert_eq!(
        tokens(&events),
        [("x", [5].as_slice()), ("\u{fffd}", [].as_slice())]
    );
    assert_eq!(ending.unwrap().eval_count, 1);
}

#[test]
fn num_predict_0_delivers_nothing() {
    let (events, ending) = play(true, &[piece("1", &[16], 1), end("limit", 1)]);
    assert!(tokens(&events).is_empty());
    let done = ending.unwrap();
    assert_eq!((done.eval_count, done.done_reason), (0, DoneReason::Length));
}

#[test]
fn fillers_in_progress_events_are_ignored() {
    let progress = json!({"content": "", "tokens": [0], "stop": false,
        "prompt_progress": {"total": 5, "cache": 3, "processed": 5, "time_ms": 1}});
    let (events, ending) = play(false, &[progress, piece("1", &[16], 1), end("limit", 1)]);
    assert!(matches!(&events[0], Event::Prompt(prompt) if prompt.cached == 3 && prompt.tokens == 5));
    assert_eq!(ending.unwrap().eval_count, 1);
}

#[test]
fn a_stop_string_is_named() {
    let mut last = end("word", 2);
    last["stopping_word"] = json!("END");
    let (_, ending) = play(false, &[piece("x", &[5], 1), last]);
    assert_eq!(ending.unwrap().stop.as_deref(), Some("END"));
}

#[test]
fn no_id_of_a_stop_string_is_delivered_or_counted() {
    let cut = |sent: &[&str], text: &str| {
        let mut last = end("word", sent.len() as u64);
        last["stopping_word"] = json!("END");
        let stream: Vec<Value> = letters(sent, text).into_iter().chain([last]).collect();
        let (events, ending) = play_with(false, &["END"], &stream);
        let done = ending.unwrap();
        assert_eq!(
            (done.done_reason, done.stop.as_deref()),
            (DoneReason::Stop, Some("END"))
        );
        let (texts, ids): (Vec<&str>, Vec<&[u32]>) = tokens(&events).into_iter().unzip();
        assert_eq!(done.eval_count as usize, ids.concat().len());
        (
            texts.concat(),
            ids.concat()
                .iter()
                .filter_map(|&id| char::from_u32(id))
                .collect::<String>(),
        )
    };
    let same = |text: &str| (text.to_owned(), text.to_owned());
    assert_eq!(cut(&["x", "", "", ""], "xEND"), same("x"));
    // Text that was kept back in vain belongs to the ids before it.
    assert_eq!(cut(&["x", "", "Ex", "", "", ""], "xExEND"), same("xEx"));
    assert_eq!(cut(&["", "", "", "", "EE"], "EEEND"), same("EE"));
}

#[test]
fn an_id_with_text_before_a_stop_string_is_delivered_with_its_text_cut() {
    let mut last = end("word", 2);
    last["stopping_word"] = json!("bc");
    // One id of two characters, kept back whole, then the one that completes the stop string.
    struct Pair;
    impl Words for Pair {
        fn ids_of(&self, _: &str) -> Option<Vec<u32>> {
            None
        }
        fn text_of(&self, ids: &[u32]) -> Option<String> {
            Some(ids.iter().map(|&id| if id == 1 { "ab" } else { "c" }).collect())
        }
    }
    let asked = Asked {
        budget: 9,
        stops: vec!["bc".to_owned()],
        ..Asked::default()
    };
    let mut answer = Answer::new(asked);
    let mut events = Vec::new();
    for data in [piece("", &[1], 1), piece("a", &[2], 2), last] {
        answer.take(&data, &Pair, |event| events.push(event));
    }
    assert_eq!(tokens(&events), [("a", [1].as_slice())]);
}

#[test]
fn text_kept_back_for_a_stop_string_that_never_came_is_delivered_at_the_end() {
    let stream = |kind, sent: &[&str], text: &str| -> Vec<Value> {
        letters(sent, text)
            .into_iter()
            .chain([end(kind, sent.len() as u64)])
            .collect()
    };
    // The server drops it where the budget ends.
    let (events, ending) = play_with(false, &["END"], &stream("limit", &["x", "", ""], "xEN"));
    assert_eq!(
        tokens(&events),
        [("x", [120].as_slice()), ("EN", [69, 78].as_slice())]
    );
    assert_eq!(ending.unwrap().eval_count, 3);
    // It sends it with the id that ends the answer where the model does.
    let (events, ending) = play_with(false, &["END"], &stream("eos", &["x", "", "", "EN"], "xEN\u{1}"));
    assert_eq!(
        tokens(&events),
        [("x", [120].as_slice()), ("EN", [69, 78].as_slice())]
    );
    assert_eq!(ending.unwrap().eval_count, 3);
}

#[test]
fn a_cancelled_answer_says_what_it_came_to() {
    let mut answer = Answer::new(Asked {
        prompt_tokens: 5,
        budget: 100,
        ..Asked::default()
    });
    let mut data = piece("x", &[7], 1);
    data["timings"] = json!({"cache_n": 2, "prompt_ms": 1.5, "predicted_ms": 0.0});
    answer.take(&data, &Letters, |_| {});
    data = piece("y", &[8], 2);
    data["timings"] =
        json!({"cache_n": 2, "prompt_ms": 1.5, "predicted_ms": 2.0, "draft_n": 3, "draft_n_accepted": 1});
    answer.take(&data, &Letters, |_| {});
    let done = answer.cancelled(|_| {});
    assert_eq!(
        (done.done_reason, done.prompt_eval_count, done.cached_count),
        (DoneReason::Cancelled, 5, 2)
    );
    assert_eq!(
        (done.eval_count, done.prompt_eval_duration, done.eval_duration),
        (2, 1_500_000, 2_000_000)
    );
    assert_eq!(
        (done.draft.rounds, done.draft.proposed, done.draft.accepted),
        (Some(1), 3, 1)
    );
}
