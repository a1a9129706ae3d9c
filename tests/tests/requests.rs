//! Every request type, and what a host gets for it.

use std::time::Duration;

use lookahead_tests::golden::golden_of;
use lookahead_tests::process::{answer, Process};
use lookahead_tests::requests::{chat, greedy, prompt, simple, tokens};
use serde_json::{json, Value};

fn ready() -> Process {
    let runner = Process::runner(&[]);
    runner.ready();
    runner
}

#[test]
fn ready_describes_the_model() {
    let runner = Process::runner(&["--memory-limit", "2GiB"]);
    let ready = runner.ready();
    let model = &ready["model"];
    assert_eq!(model["architecture"], "Qwen3_5ForConditionalGeneration");
    assert_eq!(model["parameters"], 8_890_528);
    assert_eq!(
        (&model["context_length"], &model["vocab_size"]),
        (&json!(32768), &json!(4096))
    );
    assert_eq!(
        (&model["vision"], &model["quantization"]),
        (&json!(false), &Value::Null)
    );
    // Field report 36: config.json has 4083 only, generation_config.json both.
    assert_eq!(model["eos"], json!([4083, 4085]));
    assert_eq!(
        (&ready["draft"]["active"], &ready["draft"]["kind"]),
        (&json!(true), &json!("mtp"))
    );
    assert_eq!(ready["memory"]["limit"], 2_u64 << 30);
    assert!(ready["memory"]["weights"].as_u64().unwrap() >= 17_000_000);
    assert!(ready["load_duration"].as_u64().unwrap() > 0);
}

#[test]
fn prompt_tokens_and_messages_of_the_same_text_continue_alike() {
    let mut runner = ready();
    let golden = golden_of("chat-count");
    let by_text = runner.ask(&prompt("a", &golden.text, greedy(24)));
    let by_ids = runner.ask(&tokens("b", &golden.ids, greedy(24)));
    let mut by_chat = chat("c", "Count from 12 to 30.", false);
    by_chat["options"] = greedy(24)["options"].clone();
    let by_chat = runner.ask(&by_chat);
    for answer in [&by_text, &by_ids, &by_chat] {
        assert_eq!(answer.tokens(), golden.greedy[..24]);
        assert_eq!(answer.done()["prompt_eval_count"], golden.ids.len());
    }
}

#[test]
fn content_in_parts_means_the_same_as_a_string() {
    let mut runner = ready();
    let whole = runner.ask(&json!({
        "type": "render", "id": "a", "think": false, "messages": [{"role": "user", "content": "Spell the word river."}],
    }));
    let parts = runner.ask(&json!({
        "type": "render", "id": "b", "think": false,
        "messages": [{"role": "user", "content": [
            {"type": "text", "text": "Spell the "}, {"type": "text", "text": "word river."},
        ]}],
    }));
    assert_eq!(whole.last()["prompt"], parts.last()["prompt"]);
}

#[test]
fn tokenize_and_detokenize_are_inverse_and_know_special_tokens() {
    let mut runner = ready();
    let texts = [
        "",
        "def f(x):\n    return x",
        "apple 日本語 🙂🙃 stone",
        "<|im_start|>user\nHi<|im_end|>\n",
        " \t\r\n  e\u{301}",
    ];
    for text in texts {
        let tokenized = runner.ask(&json!({"type": "tokenize", "id": "t", "text": text}));
        assert_eq!(tokenized.last()["type"], "tokenized");
        let ids = tokenized.last()["tokens"].clone();
        let back = runner.ask(&json!({"type": "detokenize", "id": "d", "tokens": ids}));
        // The tokenizer composes characters (NFC) before it splits.
        let expected = text.replace("e\u{301}", "é");
        assert_eq!(
            *back.last(),
            json!({"type": "detokenized", "id": "d", "text": expected})
        );
    }
    for golden in lookahead_tests::golden::goldens() {
        let tokenized = runner.ask(&json!({"type": "tokenize", "id": "t", "text": golden.text}));
        assert_eq!(tokenized.last()["tokens"], json!(golden.ids), "{}", golden.name);
    }
}

#[test]
fn render_shows_the_prompt_that_generate_would_use() {
    let mut runner = ready();
    let messages = json!([{"role": "user", "content": "What is 17 + 25?"}]);
    let plain = runner.ask(&json!({"type": "render", "id": "a", "messages": messages}));
    let thinking = runner.ask(&json!({"type": "render", "id": "b", "messages": messages, "think": true}));
    let quick = runner.ask(&json!({"type": "render", "id": "c", "messages": messages, "think": false}));
    let head = "<|im_start|>user\nWhat is 17 + 25?<|im_end|>\n<|im_start|>assistant\n<think>\n";
    assert_eq!(plain.last()["prompt"], head);
    assert_eq!(thinking.last()["prompt"], head);
    assert_eq!(quick.last()["prompt"], format!("{head}\n</think>\n\n"));
}

#[test]
fn status_tells_what_runs_and_what_waits() {
    let mut runner = ready();
    let idle = runner.ask(&simple("status", "s"));
    assert_eq!(
        (&idle.last()["state"], &idle.last()["waiting"]),
        (&json!("idle"), &json!(0))
    );
    runner.send(&prompt("a", "And it came to pass", greedy(20_000)));
    runner.until(|e| e["type"] == "token");
    runner.send(&prompt("b", "def f(", greedy(4)));
    runner.send(&prompt("c", "def f(", greedy(4)));
    let (busy, _) = runner.ask_beside(&simple("status", "s"), &mut Vec::new());
    assert_eq!(
        (&busy["state"], &busy["waiting"]),
        (&json!("busy"), &json!(2)),
        "{busy}"
    );
    assert_eq!(busy["running"][0]["id"], "a");
    assert_eq!(busy["running"][0]["phase"], "decode");
    runner.send(&json!({"type": "cancel", "id": "k", "target": "a"}));
    runner.until_final(&["a", "b", "c"]);
    let after = runner.ask(&simple("status", "s"));
    let status = after.last();
    assert_eq!(
        status["requests"],
        json!({"completed": 2, "cancelled": 1, "failed": 0})
    );
    for field in ["active", "peak", "cache", "limit", "weights"] {
        assert!(status["memory"][field].is_u64(), "{status}");
    }
    assert!(status["draft"]["rounds"].as_u64().unwrap() > 0);
}

#[test]
fn cache_clear_is_answered_and_the_next_request_starts_anew() {
    let mut runner = ready();
    let golden = golden_of("long-code");
    let request = tokens("a", &golden.ids, greedy(8));
    let first = runner.ask(&request);
    let cleared = runner.ask(&json!({"type": "cache", "id": "k", "action": "clear"}));
    assert_eq!(
        (&cleared.last()["type"], &cleared.last()["action"]),
        (&json!("cache"), &json!("clear"))
    );
    let second = runner.ask(&request);
    assert_eq!(second.done()["cached_count"], 0);
    assert_eq!(first.tokens(), second.tokens());
}

#[test]
fn ping_is_answered_with_pong() {
    let mut runner = ready();
    assert_eq!(
        *runner.ask(&simple("ping", "p")).last(),
        json!({"type": "pong", "id": "p"})
    );
}

#[test]
fn shutdown_cancels_what_runs_and_waits_and_exits_0() {
    let mut runner = ready();
    runner.send(&prompt("a", "And it came to pass", greedy(20_000)));
    runner.until(|e| e["type"] == "token");
    runner.send(&prompt("b", "def f(", greedy(4)));
    runner.send(&json!({"type": "shutdown"}));
    let events = runner.rest();
    for id in ["a", "b"] {
        assert_eq!(answer(&events, id).done()["done_reason"], "cancelled");
    }
    assert_eq!(runner.wait(Duration::from_secs(10)).code(), Some(0));
}

#[test]
fn a_model_without_vision_refuses_pictures_by_name() {
    let mut runner = ready();
    let pixel =
        "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg==";
    let by_prompt = runner.ask(&prompt(
        "a",
        "<|vision_start|><|image_pad|><|vision_end|>",
        json!({"images": [pixel]}),
    ));
    assert_eq!(by_prompt.error()["code"], "unsupported");
    assert!(
        by_prompt.error()["message"].as_str().unwrap().contains("image"),
        "{}",
        by_prompt.last()
    );
    let by_message = runner.ask(&json!({
        "type": "generate", "id": "b",
        "messages": [{"role": "user", "content": [{"type": "image", "data": pixel}, {"type": "text", "text": "?"}]}],
    }));
    assert_eq!(by_message.error()["code"], "unsupported");
}

#[test]
fn log_probabilities_come_with_every_id_drafting_or_not() {
    // Field report 16: zero, null or another token's log-probabilities with speculation.
    let mut runner = ready();
    let golden = golden_of("code");
    let mut all = Vec::new();
    for draft in [json!({"mode": "off"}), json!({"mode": "fixed", "depth": 3})] {
        let mut request = tokens("a", &golden.ids, greedy(24));
        request["logprobs"] = json!(true);
        request["top_logprobs"] = json!(2);
        request["draft"] = draft;
        let answer = runner.ask(&request);
        answer.done();
        let mut entries = Vec::new();
        for event in answer.token_events() {
            let logprobs = event["logprobs"].as_array().unwrap_or_else(|| panic!("{event}"));
            assert_eq!(
                logprobs.len(),
                event["tokens"].as_array().unwrap().len(),
                "{event}"
            );
            entries.extend(logprobs.iter().cloned());
        }
        for entry in &entries {
            // Greedy takes the most probable token, so the chosen one leads the list.
            assert_eq!(entry["top"][0]["token"], entry["token"], "{entry}");
            assert_eq!(entry["top"].as_array().unwrap().len(), 2);
            let value = entry["logprob"].as_f64().unwrap();
            assert!(value <= 0.0 && value > -4.0, "{entry}");
        }
        all.push(entries);
    }
    for (plain, drafted) in all[0].iter().zip(&all[1]) {
        assert_eq!(plain["token"], drafted["token"]);
        let gap = plain["logprob"].as_f64().unwrap() - drafted["logprob"].as_f64().unwrap();
        assert!(gap.abs() < 1e-3, "{plain} and {drafted}");
    }
}
