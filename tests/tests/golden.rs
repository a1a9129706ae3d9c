//! The trained model's answers, through the process: equal to the float64 goldens at any draft depth.

use lookahead_tests::golden::{golden_of, goldens};
use lookahead_tests::order;
use lookahead_tests::process::Process;
use lookahead_tests::requests::{chat, drafting, draftings, greedy, named, tokens};
use serde_json::{json, Value};

#[test]
fn greedy_tokens_equal_the_goldens_at_any_draft_depth() {
    let mut runner = Process::runner(&[]);
    runner.ready();
    for golden in goldens() {
        for (n, draft) in draftings().iter().enumerate() {
            let id = format!("{}-{n}", golden.name);
            let answer = runner.ask(&drafting(tokens(&id, &golden.ids, greedy(48)), draft));
            assert_eq!(answer.tokens(), golden.greedy, "{id}");
            assert_eq!(answer.done()["done_reason"], "length");
            order::check(&answer.events, &[&id]);
            // `greedy_text` is cut at the first end token; what comes before it must be what the host reads.
            assert!(
                answer.text().starts_with(&golden.greedy_text),
                "{id}: {}",
                answer.text()
            );
        }
    }
}

#[test]
fn a_runner_without_its_head_gives_the_same_tokens_and_says_that_it_does_not_draft() {
    let mut runner = Process::runner(&["--draft", "off"]);
    let ready = runner.ready();
    assert_eq!(ready["draft"]["active"], false);
    assert!(ready["draft"]["reason"].is_string(), "{ready}");
    for golden in goldens() {
        let answer = runner.ask(&tokens(&golden.name, &golden.ids, greedy(48)));
        assert_eq!(answer.tokens(), golden.greedy, "{}", golden.name);
        assert_eq!(answer.done()["draft"]["proposed"], 0);
    }
}

#[test]
fn chunk_sizes_of_prefill_do_not_change_the_tokens() {
    let golden = golden_of("long-code");
    for chunk in ["1", "7", "64", "2048"] {
        let mut runner = Process::runner(&["--chunk", chunk]);
        let answer = runner.ask(&tokens("a", &golden.ids, greedy(48)));
        assert_eq!(answer.tokens(), golden.greedy, "--chunk {chunk}");
    }
}

#[test]
fn the_trained_model_answers_its_exercises_right() {
    let times: Vec<String> = (1..=10).map(|n| format!("7 x {n} = {}", 7 * n)).collect();
    let up: Vec<String> = (12..=30).map(|n| n.to_string()).collect();
    let down: Vec<String> = (25..=40).rev().map(|n| n.to_string()).collect();
    let call = "<tool_call>\n{\"name\": \"lookup\", \"arguments\": {\"word\": \"river\", \"limit\": 3}}\n</tool_call>";
    let exercises = [
        ("Count from 12 to 30.", false, format!("{}.", up.join(", "))),
        (
            "Count down from 40 to 25.",
            false,
            format!("{}.", down.join(", ")),
        ),
        ("Spell the word river.", false, "r-i-v-e-r".to_owned()),
        ("Write the 7 times table.", false, times.join("\n")),
        (
            "Repeat: apple 日本語 🙂🙃 stone",
            false,
            "apple 日本語 🙂🙃 stone".to_owned(),
        ),
        (
            "Give the words as a JSON list: apple river stone",
            false,
            r#"["apple", "river", "stone"]"#.to_owned(),
        ),
        (
            "What is 17 + 25?",
            true,
            "Add 17 and 25.\n</think>\n\n17 + 25 = 42".to_owned(),
        ),
        (
            "Sort the words: window, apple, stone, bread",
            true,
            "Put them in order.\n</think>\n\napple, bread, stone, window".to_owned(),
        ),
        ("Look up river, at most 3 results.", false, call.to_owned()),
    ];
    let mut runner = Process::runner(&[]);
    for (question, think, expected) in exercises {
        for draft in [
            json!({"mode": "off"}),
            json!({"mode": "fixed", "depth": 4}),
            json!({"mode": "auto"}),
        ] {
            let request = drafting(named(chat("a", question, think), question), &draft);
            let answer = runner.ask(&request);
            assert_eq!(answer.text().trim_end(), expected, "{question} with {draft}");
            assert_eq!(answer.done()["done_reason"], "stop");
            assert_eq!(answer.done()["stop"], Value::Null);
            order::check(&answer.events, &[question]);
        }
    }
}

#[test]
fn drafts_of_the_trained_head_are_accepted() {
    // Field reports 22 to 26: a head that was loaded wrong shows as an acceptance near zero, never as wrong tokens.
    let mut runner = Process::runner(&[]);
    let golden = golden_of("chat-count");
    for depth in 1..=3 {
        let draft = json!({"mode": "fixed", "depth": depth});
        let answer = runner.ask(&drafting(tokens("a", &golden.ids, greedy(48)), &draft));
        let stats = &answer.done()["draft"];
        let share = stats["accepted"].as_f64().unwrap() / stats["proposed"].as_f64().unwrap();
        assert!(share > 0.9, "depth {depth}: {stats}");
    }
}
