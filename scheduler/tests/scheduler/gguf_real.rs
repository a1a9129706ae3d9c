//! GGUF files through the real llama-server, where the environment names one (`LOOKAHEAD_TEST_LLAMA_SERVER`) and a conversion of
//! the bundled model (`LOOKAHEAD_TEST_GGUF`): `scripts/test-gguf` sets both. Without them these tests say that they are skipped.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde_json::{json, Value};

use crate::gguf::{ids, servers_under};
use crate::host::{eventually, is_alive, kill, Host, Setup};

struct Real {
    server: PathBuf,
    model: PathBuf,
}

fn real() -> Option<Real> {
    let path = |name: &str| std::env::var_os(name).map(PathBuf::from);
    let found = path("LOOKAHEAD_TEST_LLAMA_SERVER").zip(path("LOOKAHEAD_TEST_GGUF"));
    if found.is_none() {
        println!("skipped: LOOKAHEAD_TEST_LLAMA_SERVER and LOOKAHEAD_TEST_GGUF are not set");
    }
    found.map(|(server, model)| Real { server, model })
}

impl Real {
    /// A scheduler with the model as `g`. One thread: the server's threads spin, and tests run beside others.
    fn host(&self, draft: &str) -> Host {
        self.host_of(&self.model, draft, "")
    }

    fn host_of(&self, model: &Path, draft: &str, lines: &str) -> Host {
        Setup::new()
            .setting(&format!("llama_server = {:?}", self.server.to_str().unwrap()))
            .setting(&format!(
                "[models.g]\npath = {:?}\nargs = [\"--threads\", \"1\", \"--context\", \"4096\", \"--draft\", {draft:?}]\n{lines}",
                model.to_str().unwrap()
            ))
            .start()
    }
}

/// A greedy question in the non-thinking form, which the bundled model answers best.
fn ask(id: &str, question: &str, options: Value) -> Value {
    let mut all = json!({"temperature": 0, "num_predict": 128});
    all.as_object_mut()
        .unwrap()
        .extend(options.as_object().unwrap().clone());
    json!({"type": "generate", "id": id, "model": "g", "messages": [{"role": "user", "content": question}], "think": false, "options": all})
}

/// The text of an answer, its ids, and its final event.
fn answer(host: &mut Host, id: &str) -> (String, Vec<u64>, Value) {
    let events = host.all_of(id);
    let tokens = || events.iter().filter(|event| event["type"] == "token");
    let text = tokens().map(|event| event["text"].as_str().unwrap()).collect();
    let ids: Vec<u64> = tokens()
        .flat_map(|event| event["tokens"].as_array().unwrap())
        .map(|id| id.as_u64().unwrap())
        .collect();
    let end = events.last().unwrap().clone();
    if end["type"] == "done" {
        assert_eq!(end["eval_count"].as_u64().unwrap() as usize, ids.len(), "{end}");
    }
    (text, ids, end)
}

fn detokenize(host: &mut Host, ids: &[u64]) -> String {
    host.send(json!({"type": "detokenize", "id": "d", "model": "g", "tokens": ids}));
    host.end_of("d")["text"].as_str().unwrap().to_owned()
}

/// What must hold between the figures of one request.
#[track_caller]
fn assert_adds_up(done: &Value, drafting: bool) {
    let draft = &done["draft"];
    let figure = |value: &Value| value.as_u64().unwrap();
    let depths: Vec<(u64, u64)> = draft["depth"]
        .as_object()
        .unwrap()
        .iter()
        .map(|(depth, rounds)| (depth.parse().unwrap(), figure(rounds)))
        .collect();
    let positions = draft["by_position"].as_array().unwrap();
    let sum = |field: &str| positions.iter().map(|it| figure(&it[field])).sum::<u64>();
    assert_eq!(
        depths.iter().map(|(_, rounds)| rounds).sum::<u64>(),
        figure(&draft["rounds"]),
        "{draft}"
    );
    assert_eq!(
        depths.iter().map(|(depth, rounds)| depth * rounds).sum::<u64>(),
        figure(&draft["proposed"]),
        "{draft}"
    );
    assert_eq!(
        (sum("tested"), sum("accepted")),
        (figure(&draft["tested"]), figure(&draft["accepted"])),
        "{draft}"
    );
    assert_eq!(figure(&draft["proposed"]) > 0, drafting, "{draft}");
    // Each round yields its accepted drafts and one id more, the prefill one, and the end of the text is not delivered.
    let generated = figure(&draft["rounds"]) + figure(&draft["accepted"]) + 1;
    assert!(figure(&done["eval_count"]) <= generated, "{done}");
}

#[test]
fn chat_prompts_are_answered_the_same_with_and_without_drafting() {
    let Some(real) = real() else { return };
    let questions = [
        ("Count from 12 to 30.", "12, 13, 14"),
        ("Spell the word river.", "r-i-v-e-r"),
        ("Write the 7 times table.", "7 x 10 = 70"),
        ("Repeat: apple 日本語 🙂🙃 stone", "日本語 🙂🙃"),
    ];
    let mut texts: Vec<Vec<String>> = Vec::new();
    for draft in ["auto", "2", "off"] {
        let mut host = real.host(draft);
        let mut answers = Vec::new();
        for (id, (question, expected)) in questions.iter().enumerate() {
            let id = id.to_string();
            host.send(ask(&id, question, json!({})));
            let (text, ids, done) = answer(&mut host, &id);
            assert!(text.contains(expected), "{draft}: {text}");
            assert_eq!(done["done_reason"], "stop");
            println!("draft {draft}: {question} {} ids, {}", ids.len(), done["draft"]);
            if question.is_ascii() {
                assert_adds_up(&done, draft != "off");
            }
            assert_eq!(detokenize(&mut host, &ids), text);
            answers.push(text);
        }
        let entry = host.entry("g").unwrap();
        assert_eq!(entry["draft"]["active"], draft != "off", "{entry}");
        texts.push(answers);
    }
    assert!(texts.iter().all(|it| *it == texts[0]), "{texts:?}");
}

#[test]
fn budgets_and_stop_strings_cut_text_and_ids_alike() {
    let Some(real) = real() else { return };
    for draft in ["auto", "off"] {
        let mut host = real.host(draft);
        let question = "Count from 12 to 30.";
        host.send(ask("whole", question, json!({})));
        let (whole, whole_ids, _) = answer(&mut host, "whole");
        // Of strings that end the answer, and of those that begin in it again and again and never come.
        for stop in ["15", "15, 1", ", 17, 18,", "12"] {
            host.send(ask("s", question, json!({"stop": [stop]})));
            let (text, ids, done) = answer(&mut host, "s");
            assert_eq!(
                (done["done_reason"].as_str(), done["stop"].as_str()),
                (Some("stop"), Some(stop))
            );
            assert_eq!(text, whole[..whole.find(stop).unwrap()], "{stop}");
            assert_eq!(ids, whole_ids[..ids.len()], "{stop}");
            // Every id but the last lies wholly before the stop string.
            let spelled = detokenize(&mut host, &ids);
            assert!(spelled.starts_with(&text), "{stop}: {spelled:?} {text:?}");
            if let [before @ .., _] = ids.as_slice() {
                assert!(
                    detokenize(&mut host, before).len() < text.len().max(1),
                    "{stop}: {ids:?}"
                );
            }
        }
        for budget in 0..16 {
            for stop in [json!([]), json!([", 14, x", "13 "])] {
                host.send(ask("b", question, json!({"num_predict": budget, "stop": stop})));
                let (text, ids, done) = answer(&mut host, "b");
                assert_eq!(
                    (done["done_reason"].as_str(), ids.len()),
                    (Some("length"), budget)
                );
                assert_eq!(ids, whole_ids[..budget]);
                assert_eq!(text, detokenize(&mut host, &ids), "{budget} {stop}");
            }
        }
    }
}

#[test]
fn small_requests_and_formats_work_and_the_rest_is_refused_by_name() {
    let Some(real) = real() else { return };
    let mut host = real.host("off");
    host.send(json!({"type": "tokenize", "id": "t", "model": "g", "text": "e\u{301} river"}));
    let decomposed = host.end_of("t")["tokens"].clone();
    host.send(json!({"type": "tokenize", "id": "t", "model": "g", "text": "é river"}));
    assert_eq!(host.end_of("t")["tokens"], decomposed);
    let user = json!([{"role": "user", "content": "Hi"}]);
    for (think, ending) in [(json!(true), "<think>\n"), (json!(false), "</think>\n\n")] {
        host.send(json!({"type": "render", "id": "r", "model": "g", "messages": user, "think": think}));
        let prompt = host.end_of("r")["prompt"].as_str().unwrap().to_owned();
        assert!(
            prompt.contains("<|im_start|>user\nHi<|im_end|>") && prompt.ends_with(ending),
            "{prompt:?}"
        );
    }
    let schema = json!({"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": false});
    for format in [json!("json"), schema] {
        let mut request = ask(
            "f",
            "Give the words as a JSON list: apple river",
            json!({"num_predict": 200}),
        );
        request["format"] = format.clone();
        host.send(request);
        let (text, _, done) = answer(&mut host, "f");
        if done["done_reason"] == "stop" {
            let value: Value =
                serde_json::from_str(&text).unwrap_or_else(|error| panic!("{format}: {text:?}: {error}"));
            assert!(format == "json" || value["n"].is_i64(), "{value}");
        }
    }
    let mut request = ask("l", "Spell the word river.", json!({"num_predict": 3}));
    request["logprobs"] = json!(true);
    request["top_logprobs"] = json!(2);
    host.send(request);
    let events = host.all_of("l");
    let entries: Vec<&Value> = events
        .iter()
        .filter(|event| event["type"] == "token")
        .flat_map(|event| event["logprobs"].as_array().unwrap())
        .collect();
    assert_eq!(entries.len(), 3);
    assert!(entries
        .iter()
        .all(|it| it["logprob"].as_f64().unwrap() <= 0.0 && it["top"].as_array().unwrap().len() == 2));
    for (fields, code) in [
        (json!({"prompt": ""}), "empty_prompt"),
        (json!({"prompt": "a ".repeat(9000)}), "context_exceeded"),
        (json!({"prompt": "a", "tokens": null}), "invalid_request"),
        (json!({"prompt": "a", "format": {"regex": "a+"}}), "unsupported"),
        (
            json!({"prompt": "a", "format": {"type": "nonsense"}}),
            "bad_format",
        ),
        (
            json!({"prompt": "a", "draft": {"mode": "fixed", "depth": 2}}),
            "unsupported",
        ),
        (json!({"tokens": [99999999]}), "invalid_request"),
    ] {
        let mut request = json!({"type": "generate", "id": "x", "model": "g"});
        request
            .as_object_mut()
            .unwrap()
            .extend(fields.as_object().unwrap().clone());
        host.send(request);
        assert_eq!(host.end_of("x")["code"], code, "{fields:.100}");
    }
    host.send(json!({"type": "detokenize", "id": "d", "model": "g", "tokens": [99999999]}));
    assert_eq!(host.end_of("d")["code"], "invalid_request");
}

#[test]
fn seeds_repeat_and_options_reach_the_server() {
    let Some(real) = real() else { return };
    let mut host = real.host("auto");
    let mut sample = |seed: u64| {
        let request = json!({"type": "generate", "id": "s", "model": "g", "prompt": "def f(", "options": {"temperature": 1, "seed": seed, "num_predict": 24}});
        host.send(request);
        answer(&mut host, "s").0
    };
    assert_eq!(sample(7), sample(7));
    assert!((8..12).any(|seed| sample(seed) != sample(7)));
}

#[test]
fn cancel_works_while_loading_queued_prefilling_and_generating() {
    let Some(real) = real() else { return };
    let mut host = real.host("auto");
    let long = |id: &str| json!({"type": "generate", "id": id, "model": "g", "prompt": "fn main() {", "options": {"num_predict": 4000, "ignore_eos": true}});
    host.send(long("loading"));
    host.send(json!({"type": "cancel", "id": "c", "target": "loading"}));
    assert_eq!(host.end_of("loading")["done_reason"], "cancelled");
    host.send(long("running"));
    let first = host.wait(|event| event["id"] == "running" && event["type"] == "token");
    host.send(long("queued"));
    host.send(
        json!({"type": "generate", "id": "prefilling", "model": "g", "prompt": "a b c d ".repeat(450)}),
    );
    for target in ["queued", "running", "prefilling"] {
        if target == "prefilling" {
            std::thread::sleep(Duration::from_millis(20));
        }
        host.send(json!({"type": "cancel", "id": "c", "target": target}));
        let sent = Instant::now();
        assert_eq!(host.end_of("c")["found"], true);
        let events = host.all_of(target);
        let done = events.last().unwrap();
        assert_eq!(done["done_reason"], "cancelled", "{target}: {done}");
        let seen = if target == "running" {
            ids(std::slice::from_ref(&first))
        } else {
            0
        };
        let delivered: Vec<Value> = events
            .iter()
            .filter(|event| event["type"] == "token")
            .cloned()
            .collect();
        assert_eq!(
            done["eval_count"].as_u64().unwrap() as usize,
            seen + ids(&delivered),
            "{target}: {done}"
        );
        println!("{target} cancelled in {:?}", sent.elapsed());
        assert!(sent.elapsed() < Duration::from_secs(5));
    }
    host.send(ask("after", "Spell the word river.", json!({})));
    assert!(answer(&mut host, "after").0.contains("r-i-v-e-r"));
}

#[test]
fn a_killed_server_ends_its_requests_and_is_started_again() {
    let Some(real) = real() else { return };
    let mut host = real.host("auto");
    for _ in 0..2 {
        host.send(json!({"type": "generate", "id": "1", "model": "g", "prompt": "fn main() {", "options": {"num_predict": 4000, "ignore_eos": true}}));
        host.wait(|event| event["id"] == "1" && event["type"] == "token");
        let bridge = host.pid_of("g");
        kill(servers_under(bridge)[0], libc::SIGKILL);
        let error = host.end_of("1");
        assert_eq!(
            (error["code"].as_str(), error["retryable"].as_bool()),
            (Some("runner_crashed"), Some(true)),
            "{error}"
        );
        assert!(error["message"].as_str().unwrap().contains("SIGKILL"), "{error}");
    }
    host.send(ask("after", "Spell the word river.", json!({})));
    assert!(answer(&mut host, "after").0.contains("r-i-v-e-r"));
}

#[test]
fn no_server_outlives_its_scheduler() {
    let Some(real) = real() else { return };
    for way in ["kill the scheduler", "kill the bridge", "end stdin"] {
        let mut host = real.host("auto");
        host.send(json!({"type": "generate", "id": "1", "model": "g", "prompt": "fn main() {", "options": {"num_predict": 4000, "ignore_eos": true}}));
        host.wait(|event| event["id"] == "1" && event["type"] == "token");
        let bridge = host.pid_of("g");
        let servers = servers_under(bridge);
        assert_eq!(servers.len(), 1);
        match way {
            "kill the scheduler" => host.signal(libc::SIGKILL),
            "kill the bridge" => kill(bridge, libc::SIGKILL),
            _ => drop(host.stdin.take()),
        }
        let ended = Instant::now();
        eventually(Duration::from_secs(2), way, || {
            !is_alive(bridge) && !is_alive(servers[0])
        });
        println!("{way}: bridge and server gone in {:?}", ended.elapsed());
    }
}

#[test]
fn files_that_cannot_be_served_are_told_by_their_cause() {
    let Some(real) = real() else { return };
    let folder = tempfile::tempdir().unwrap();
    let whole = std::fs::read(&real.model).unwrap();
    for (name, bytes, code, word) in [
        (
            "data-cut.gguf",
            &whole[..whole.len() / 2],
            "model_invalid",
            "not within the file bounds",
        ),
        ("header-cut.gguf", &whole[..1000], "model_invalid", "header"),
        (
            "text.gguf",
            b"hello, I am no model".as_slice(),
            "model_invalid",
            "hell",
        ),
        ("empty.gguf", b"".as_slice(), "model_invalid", "GGUF file"),
    ] {
        let path = folder.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        let mut host = real.host_of(&path, "auto", "");
        host.send(ask("1", "Hi", json!({})));
        let error = host.end_of("1");
        assert_eq!(error["code"], code, "{name}: {error}");
        assert!(
            error["message"].as_str().unwrap().contains(word),
            "{name}: {error}"
        );
    }
}

#[test]
fn the_servers_own_environment_variables_do_not_act() {
    let Some(real) = real() else { return };
    let mut host = real.host_of(
        &real.model,
        "auto",
        "env = { LLAMA_ARG_CTX_SIZE = \"512\", LLAMA_ARG_SPEC_TYPE = \"none\" }",
    );
    host.send(json!({"type": "load", "id": "l", "model": "g"}));
    let loaded = host.end_of("l");
    assert_eq!(loaded["info"]["context_length"], 4096, "{loaded}");
    assert_eq!(
        (
            loaded["draft"]["active"].as_bool(),
            loaded["draft"]["max_depth"].as_u64()
        ),
        (Some(true), Some(3))
    );
}
