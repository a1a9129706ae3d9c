//! A seed fixes a request's tokens, whatever else the process does (field reports 12 and 39).

use lookahead_tests::golden::golden_of;
use lookahead_tests::process::{answer, Process};
use lookahead_tests::requests::{drafting, draftings, prompt, tokens};
use serde_json::{json, Value};

fn sampled(id: &str, seed: Value) -> Value {
    let mut options =
        json!({"temperature": 1.0, "top_k": 0, "top_p": 1.0, "num_predict": 40, "ignore_eos": true});
    if !seed.is_null() {
        options["seed"] = seed;
    }
    tokens(id, &golden_of("prose").ids, json!({ "options": options }))
}

#[test]
fn a_seeded_request_gives_the_same_tokens_at_any_depth_and_in_any_process() {
    let mut runner = Process::runner(&[]);
    let expected = runner.ask(&sampled("a", json!(7))).tokens();
    assert_eq!(expected.len(), 40);
    for draft in draftings() {
        assert_eq!(
            runner.ask(&drafting(sampled("a", json!(7)), &draft)).tokens(),
            expected,
            "{draft}"
        );
    }
    let mut other = Process::runner(&["--draft", "off", "--chunk", "4"]);
    assert_eq!(
        other.ask(&sampled("a", json!(7))).tokens(),
        expected,
        "another process"
    );
}

#[test]
fn a_seeded_request_is_not_disturbed_by_its_neighbours_or_the_cache() {
    let mut runner = Process::runner(&[]);
    let expected = runner.ask(&sampled("a", json!(-3))).tokens();
    runner.send(&prompt(
        "n1",
        "def f(",
        json!({"options": {"num_predict": 9, "seed": 1}}),
    ));
    runner.send(&sampled("b", json!(-3)));
    runner.send(&prompt(
        "n2",
        "And it came to pass",
        json!({"options": {"num_predict": 9}}),
    ));
    runner.send(&sampled("c", json!(-3)));
    let mut uncached = sampled("d", json!(-3));
    uncached["cache"] = json!(false);
    runner.send(&uncached);
    let events = runner.until_final(&["n1", "b", "n2", "c", "d"]);
    for id in ["b", "c", "d"] {
        assert_eq!(answer(&events, id).tokens(), expected, "{id}");
    }
}

#[test]
fn a_seeded_request_that_is_continued_gives_the_rest_of_the_same_tokens() {
    // The noise of a draw is a function of the seed and the position alone.
    let mut runner = Process::runner(&[]);
    let whole = runner.ask(&sampled("a", json!(11))).tokens();
    let mut rest = sampled("b", json!(11));
    let mut ids = golden_of("prose").ids;
    ids.extend(&whole[..15]);
    rest["tokens"] = json!(ids);
    rest["options"]["num_predict"] = json!(25);
    assert_eq!(runner.ask(&rest).tokens(), whole[15..]);
}

#[test]
fn seeds_differ_and_so_do_requests_without_one() {
    let mut runner = Process::runner(&[]);
    let mut seen: Vec<Vec<u64>> = Vec::new();
    for seed in [
        json!(0),
        json!(1),
        json!(2),
        json!(-1),
        json!(u64::MAX / 3),
        Value::Null,
        Value::Null,
        Value::Null,
    ] {
        let tokens = runner.ask(&sampled("a", seed.clone())).tokens();
        assert!(!seen.contains(&tokens), "seed {seed} repeats another's tokens");
        seen.push(tokens);
    }
}

#[test]
fn temperature_0_is_greedy_whatever_the_seed_and_the_acceptance_rule() {
    // Field report 12: greedy went down the sampled path.
    let mut runner = Process::runner(&[]);
    let golden = golden_of("code");
    for verify in ["rejection", "coupled"] {
        for seed in [1, 2] {
            let request = tokens(
                "a",
                &golden.ids,
                json!({
                    "options": {"temperature": 0, "seed": seed, "num_predict": 48, "ignore_eos": true, "top_k": 3},
                    "draft": {"mode": "fixed", "depth": 3, "verify": verify},
                }),
            );
            assert_eq!(
                runner.ask(&request).tokens(),
                golden.greedy,
                "{verify}, seed {seed}"
            );
        }
    }
}

#[test]
fn sampled_drafts_are_accepted_by_both_rules() {
    // Field report 11: exact-match acceptance above temperature 0 accepts next to nothing.
    let mut runner = Process::runner(&[]);
    for verify in ["rejection", "coupled"] {
        let request = tokens(
            "a",
            &golden_of("code").ids,
            json!({
                "options": {"temperature": 1.0, "seed": 5, "num_predict": 120, "ignore_eos": true},
                "draft": {"mode": "fixed", "depth": 1, "verify": verify},
            }),
        );
        let answer = runner.ask(&request);
        let draft = &answer.done()["draft"];
        let share = draft["accepted"].as_f64().unwrap() / draft["tested"].as_f64().unwrap();
        assert!(share > 0.3, "{verify}: {draft}");
    }
}
