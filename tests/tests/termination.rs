//! How a generation ends, and that its text doesn't depend on how its tokens were grouped.

use lookahead_tests::golden::{golden_of, goldens};
use lookahead_tests::order;
use lookahead_tests::process::{model, Answer, Process};
use lookahead_tests::requests::{chat, drafting, draftings, greedy, prompt, tokens};
use serde_json::{json, Value};

/// Greedy continuation of the `code` golden with stop strings, at every way of drafting; all must agree.
fn stopped(runner: &mut Process, stop: &[&str]) -> Answer {
    let golden = golden_of("code");
    let mut first: Option<Answer> = None;
    for draft in draftings() {
        let mut request = drafting(tokens("a", &golden.ids, greedy(48)), &draft);
        request["options"]["stop"] = json!(stop);
        let answer = runner.ask(&request);
        order::check(&answer.events, &["a"]);
        if let Some(first) = &first {
            assert_eq!(
                (answer.text(), answer.tokens()),
                (first.text(), first.tokens()),
                "{stop:?} with {draft}"
            );
            assert_eq!(
                answer.done()["stop"],
                first.done()["stop"],
                "{stop:?} with {draft}"
            );
            assert_eq!(
                answer.done()["done_reason"],
                first.done()["done_reason"],
                "{stop:?} with {draft}"
            );
        }
        first.get_or_insert(answer);
    }
    first.unwrap_or_else(|| panic!("there is at least one way to draft"))
}

#[test]
fn a_stop_string_across_tokens_ends_the_text_before_it() {
    // Field reports 10 and 35: the earliest terminator in a block wins, and no part of a stop string gets out.
    let mut runner = Process::runner(&[]);
    let full = golden_of("code").greedy_text;
    for stop in [
        "self._name",
        ")\n",
        "_",
        "\n        self._name = name\n        self._value",
        "(self):\n",
    ] {
        let answer = stopped(&mut runner, &[stop]);
        let expected = full.split(stop).next().unwrap();
        assert_eq!(answer.text(), expected, "{stop:?}");
        assert_eq!(
            (&answer.done()["done_reason"], &answer.done()["stop"]),
            (&json!("stop"), &json!(stop))
        );
        // Ids wholly behind the cut are not delivered: without the last one the text doesn't reach the cut.
        let ids = answer.tokens();
        let all = runner.ask(&json!({"type": "detokenize", "id": "d", "tokens": ids}));
        assert!(
            all.last()["text"].as_str().unwrap().starts_with(expected),
            "{stop:?}"
        );
        let shorter = &ids[..ids.len() - 1];
        let without = runner.ask(&json!({"type": "detokenize", "id": "d", "tokens": shorter}));
        assert!(
            without.last()["text"].as_str().unwrap().len() < expected.len(),
            "{stop:?}: {ids:?}"
        );
    }
}

#[test]
fn the_earliest_of_several_stop_strings_wins() {
    let mut runner = Process::runner(&[]);
    let answer = stopped(&mut runner, &["_value", "__repr__", "._name = ", "never there"]);
    assert_eq!(answer.done()["stop"], "._name = ");
    assert!(answer.text().ends_with("\n        self"), "{}", answer.text());
}

#[test]
fn what_was_held_back_for_a_stop_string_that_does_not_come_is_delivered() {
    let mut runner = Process::runner(&[]);
    let golden = golden_of("code");
    let answer = stopped(&mut runner, &["self._name = nameless", "'<%s: %s>' % (self"]);
    assert_eq!(answer.text(), golden.greedy_text);
    assert_eq!(answer.tokens(), golden.greedy);
    assert_eq!(
        (&answer.done()["done_reason"], &answer.done()["stop"]),
        (&json!("length"), &Value::Null)
    );
}

#[test]
fn no_token_event_shows_a_part_of_the_stop_string_that_ends_it() {
    let mut runner = Process::runner(&[]);
    let stop = "self._name = name\n        self._name";
    let answer = stopped(&mut runner, &[stop]);
    let mut text = String::new();
    for event in answer.token_events() {
        text.push_str(event["text"].as_str().unwrap());
        assert!(
            !text.contains("self._name"),
            "{text:?} was shown before {stop:?} was complete"
        );
    }
    assert_eq!(answer.done()["stop"], stop);
}

#[test]
fn stop_strings_of_characters_that_are_split_over_tokens_are_found() {
    let mut runner = Process::runner(&[]);
    for stop in ["🙃", "語 🙂"] {
        let mut request = chat("a", "Repeat: apple 日本語 🙂🙃 stone", false);
        request["options"]["stop"] = json!([stop]);
        let answer = runner.ask(&request);
        assert_eq!(
            answer.text(),
            "apple 日本語 🙂🙃 stone".split(stop).next().unwrap()
        );
        assert_eq!(answer.done()["stop"], stop);
    }
}

#[test]
fn characters_split_over_tokens_arrive_whole_and_an_unfinished_one_is_flushed() {
    // Field report 34: U+FFFD on split emoji, and a tail that is lost at the end.
    let mut runner = Process::runner(&[]);
    let golden = "apple 日本語 🙂🙃 stone";
    let whole = runner.ask(&chat("a", "Repeat: apple 日本語 🙂🙃 stone", false));
    assert_eq!(whole.text(), golden);
    let count = whole.tokens().len();
    for n in 0..=count {
        for draft in [json!({"mode": "off"}), json!({"mode": "fixed", "depth": 8})] {
            let mut request = drafting(chat("b", "Repeat: apple 日本語 🙂🙃 stone", false), &draft);
            request["options"]["num_predict"] = json!(n);
            let answer = runner.ask(&request);
            let text = answer.text();
            let sound = text.trim_end_matches('\u{fffd}');
            assert!(golden.starts_with(sound), "{n}: {text:?}");
            let cut = sound.len() < text.len();
            assert!(
                !cut || answer.token_events().last().unwrap()["text"]
                    .as_str()
                    .unwrap()
                    .ends_with('\u{fffd}')
            );
            assert_eq!(answer.tokens().len(), n);
            assert_eq!(answer.tokens(), whole.tokens()[..n]);
        }
    }
}

#[test]
fn an_end_token_ends_the_request_and_is_neither_delivered_nor_counted() {
    // Field reports 8 and 9: a drafted end token counts only once the target accepts it, and nothing follows it.
    let mut runner = Process::runner(&[]);
    for golden in goldens() {
        for draft in draftings() {
            let request = json!({"options": {"temperature": 0, "num_predict": 48}});
            let answer = runner.ask(&drafting(tokens("a", &golden.ids, request), &draft));
            let (reason, end) = match golden.eos_index {
                Some(at) => ("stop", at),
                None => ("length", 48),
            };
            assert_eq!(
                answer.tokens(),
                golden.greedy[..end],
                "{} with {draft}",
                golden.name
            );
            assert_eq!(
                answer.done()["done_reason"],
                reason,
                "{} with {draft}",
                golden.name
            );
            assert_eq!(
                answer.text().trim_end_matches('\u{fffd}'),
                golden.greedy_text,
                "{} with {draft}",
                golden.name
            );
        }
    }
}

#[test]
fn with_ignore_eos_an_end_token_is_an_ordinary_one_whose_text_is_hidden() {
    let mut runner = Process::runner(&[]);
    let golden = golden_of("chat-unicode");
    let answer = runner.ask(&tokens("a", &golden.ids, greedy(48)));
    assert!(answer.tokens().contains(&4085), "the end token is delivered");
    assert_eq!(answer.done()["eval_count"], 48);
    assert!(!answer.text().contains("<|im_"), "{}", answer.text());
}

#[test]
fn every_source_of_end_tokens_counts() {
    // Field report 36: end tokens from one file only, so generation runs on.
    let sources: [(&str, Value); 3] = [
        ("generation_config.json", json!({"eos_token_id": 4083})),
        ("generation_config.json", json!({})),
        ("tokenizer_config.json", json!({"eos_token": "<|endoftext|>"})),
    ];
    for (file, change) in sources {
        let copy = tempfile::tempdir().unwrap();
        for entry in std::fs::read_dir(model()).unwrap() {
            let path = entry.unwrap().path();
            std::fs::copy(&path, copy.path().join(path.file_name().unwrap())).unwrap();
        }
        let path = copy.path().join(file);
        let mut value: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        let map = value.as_object_mut().unwrap();
        map.remove("eos_token_id");
        map.extend(change.as_object().unwrap().clone());
        std::fs::write(&path, value.to_string()).unwrap();
        let mut runner = Process::runner_of(copy.path(), &[]);
        assert_eq!(
            runner.ready()["model"]["eos"],
            json!([4083, 4085]),
            "{file} with {change}"
        );
        let answer = runner.ask(&chat("a", "Spell the word river.", false));
        assert_eq!(
            (answer.text().trim_end(), &answer.done()["done_reason"]),
            ("r-i-v-e-r", &json!("stop"))
        );
    }
}

#[test]
fn num_predict_0_fills_the_prompt_only() {
    let mut runner = Process::runner(&[]);
    let golden = golden_of("code");
    let answer = runner.ask(&tokens("a", &golden.ids, greedy(0)));
    assert_eq!(
        (&answer.done()["done_reason"], &answer.done()["eval_count"]),
        (&json!("length"), &json!(0))
    );
    assert_eq!(answer.token_events().count(), 0);
    let next = runner.ask(&tokens("b", &golden.ids, greedy(48)));
    assert_eq!(next.tokens(), golden.greedy);
}

#[test]
fn num_predict_minus_1_goes_on_to_the_context_end_which_num_ctx_brings_nearer() {
    let mut runner = Process::runner(&[]);
    let golden = golden_of("code");
    for draft in draftings() {
        let more =
            json!({"options": {"temperature": 0, "num_predict": -1, "num_ctx": 40, "ignore_eos": true}});
        let answer = runner.ask(&drafting(tokens("a", &golden.ids, more), &draft));
        assert_eq!(answer.done()["done_reason"], "length");
        assert_eq!(answer.tokens(), golden.greedy[..40 - golden.ids.len()], "{draft}");
    }
}

#[test]
fn a_prompt_that_does_not_fit_is_refused_with_both_lengths() {
    let mut runner = Process::runner(&[]);
    let golden = golden_of("code");
    let more = json!({"options": {"num_ctx": golden.ids.len()}});
    let answer = runner.ask(&tokens("a", &golden.ids, more));
    assert_eq!(answer.error()["code"], "context_exceeded");
    let long = vec![260; 40_000];
    let answer = runner.ask(&tokens("a", &long, json!({})));
    let message = answer.error()["message"].as_str().unwrap();
    assert!(
        message.contains("40000") && message.contains("32768"),
        "{message}"
    );
}

#[test]
fn a_prompt_without_a_token_is_refused() {
    let mut runner = Process::runner(&[]);
    assert_eq!(
        runner.ask(&prompt("a", "", json!({}))).error()["code"],
        "empty_prompt"
    );
    assert_eq!(
        runner.ask(&tokens("a", &[], json!({}))).error()["code"],
        "empty_prompt"
    );
}

#[test]
fn a_prompt_of_one_token_works_at_any_depth() {
    let mut runner = Process::runner(&[]);
    let expected = runner.ask(&drafting(
        tokens("a", &[731], greedy(24)),
        &json!({"mode": "off"}),
    ));
    for draft in draftings() {
        let answer = runner.ask(&drafting(tokens("a", &[731], greedy(24)), &draft));
        assert_eq!(answer.tokens(), expected.tokens(), "{draft}");
    }
}
