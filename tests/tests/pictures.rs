//! Pictures through the process: in prompts and messages, of every format, refused by rule, and never taken for one another by
//! the prefix cache.
#![expect(clippy::unwrap_used, reason = "helpers of tests: a panic is a test's failure")]

use std::fs;

use lookahead_tests::checkpoint::{read_tensors, tiny};
use lookahead_tests::picture::{base64, black, png, zeros};
use lookahead_tests::process::{repository, Answer, Process};
use lookahead_tests::requests::prompt;
use serde_json::{json, Value};

/// One placeholder, which the runner expands to as many as its picture has features.
const PLACE: &str = "<|vision_start|><|image_pad|><|vision_end|>";

fn fixture(path: &str) -> Vec<u8> {
    let path = repository().join("fixtures").join(path);
    fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn runner(args: &[&str]) -> Process {
    let runner = Process::runner_of(&tiny("vision"), args);
    assert_eq!(runner.ready()["model"]["vision"], true);
    runner
}

/// `generate` of a raw prompt with pictures, with what a comparison needs: greedy, ids and log-probabilities.
fn ask(id: &str, text: &str, pictures: &[&[u8]], more: Value) -> Value {
    let images: Vec<String> = pictures.iter().map(|bytes| base64(bytes)).collect();
    let mut request = prompt(id, text, greedy());
    if !images.is_empty() {
        request["images"] = json!(images);
    }
    if let (Value::Object(request), Value::Object(more)) = (&mut request, more) {
        request.extend(more);
    }
    request
}

fn greedy() -> Value {
    json!({"options": {"temperature": 0, "num_predict": 8, "ignore_eos": true}, "logprobs": true, "top_logprobs": 5})
}

/// The log-probabilities of the five best tokens at each place of an answer, best first.
fn scores(answer: &Answer) -> Vec<f64> {
    answer.done();
    let entries = answer
        .token_events()
        .filter_map(|event| event["logprobs"].as_array());
    let best = entries
        .flatten()
        .flat_map(|entry| entry["top"].as_array().into_iter().flatten());
    best.map(|top| top["logprob"].as_f64().unwrap()).collect()
}

/// How far apart two answers are: the largest difference of a log-probability, infinite where the tokens differ.
fn distance(a: &Answer, b: &Answer) -> f64 {
    let (first, second) = (scores(a), scores(b));
    assert!(!first.is_empty() && first.len() == second.len());
    if a.tokens() != b.tokens() {
        return f64::INFINITY;
    }
    first
        .iter()
        .zip(&second)
        .map(|(a, b)| (a - b).abs())
        .fold(0.0, f64::max)
}

/// What rounding may make of it.
const SAME: f64 = 1e-4;

fn prompt_event(answer: &Answer) -> &Value {
    answer.own().find(|event| event["type"] == "prompt").unwrap()
}

#[test]
fn prompts_with_pictures_answer_as_the_goldens_say() {
    for model in ["vision", "vision-mlx"] {
        let mut runner = Process::runner_of(&tiny(model), &[]);
        let golden: Value = serde_json::from_slice(&fixture(&format!("golden/{model}.json"))).unwrap();
        let tensors = read_tensors(&repository().join(format!("fixtures/golden/{model}.safetensors")));
        for case in golden["vision"].as_array().unwrap() {
            let name = case["name"].as_str().unwrap();
            let ids: Vec<u64> = serde_json::from_value(case["ids"].clone()).unwrap();
            let mut short = ids.clone();
            short.dedup_by(|a, b| a == b && *a == 292);
            let text = runner
                .ask(&json!({"type": "detokenize", "id": "d", "tokens": short}))
                .last()["text"]
                .clone();
            assert!(text.as_str().unwrap().contains(PLACE), "{text}");
            let pictures: Vec<Vec<u8>> = case["images"]
                .as_array()
                .unwrap()
                .iter()
                .map(|file| fixture(&format!("golden/{}", file.as_str().unwrap())))
                .collect();
            let pictures: Vec<&[u8]> = pictures.iter().map(Vec::as_slice).collect();
            for draft in [json!({"mode": "off"}), json!({"mode": "fixed", "depth": 3})] {
                let request = ask(
                    "a",
                    text.as_str().unwrap(),
                    &pictures,
                    json!({"draft": draft, "cache": false}),
                );
                let answer = runner.ask(&request);
                assert_eq!(
                    prompt_event(&answer)["tokens"],
                    ids.len() as u64,
                    "{model} {name}"
                );
                let greedy: Vec<u64> = serde_json::from_value(case["greedy"].clone()).unwrap();
                assert_eq!(answer.tokens(), greedy, "{model} {name}");
                // The last position's golden logits are what the first answered token was drawn from.
                let logits = &tensors[&format!("{name}.logits")];
                let (values, width) = (logits.floats(), logits.shape[1] as usize);
                let wanted = best(&values[values.len() - width..][..TOKENS]);
                for (wanted, found) in wanted.iter().zip(&scores(&answer)[..5]) {
                    assert!(
                        (wanted - found).abs() < 1e-3,
                        "{model} {name}: {found} for {wanted}"
                    );
                }
            }
        }
    }
}

/// Ids of the fixtures' tokenizer; the vocabulary has padded rows behind them, which are no tokens.
const TOKENS: usize = 306;

/// The five highest log-probabilities of `logits`, in order.
fn best(logits: &[f32]) -> Vec<f64> {
    let logits: Vec<f64> = logits.iter().map(|v| f64::from(*v)).collect();
    let total = logits.iter().map(|v| v.exp()).sum::<f64>().ln();
    let mut all: Vec<f64> = logits.iter().map(|v| v - total).collect();
    all.sort_by(|a, b| b.total_cmp(a));
    all.truncate(5);
    all
}

#[test]
fn messages_with_pictures_equal_the_prompts_that_they_render_to() {
    let mut runner = runner(&["--cache-device", "0"]);
    let (a, b) = (fixture("golden/a.png"), fixture("golden/b.png"));
    let messages = json!([
        {"role": "user", "content": [
            {"type": "text", "text": "Look: "}, {"type": "image", "data": base64(&a)}, {"type": "text", "text": " and "},
            {"type": "image", "data": base64(&b)}, {"type": "text", "text": " which?"}]},
        {"role": "assistant", "content": "the first"},
        {"role": "user", "content": [{"type": "image", "data": base64(&a)}]},
    ]);
    let rendered = runner
        .ask(&json!({"type": "render", "id": "r", "messages": messages}))
        .last()
        .clone();
    let text = rendered["prompt"]
        .as_str()
        .or(rendered["text"].as_str())
        .unwrap_or_else(|| panic!("{rendered}"));
    assert_eq!(text.matches(PLACE).count(), 3, "{text}");
    let mut request = greedy();
    request["type"] = json!("generate");
    request["id"] = json!("m");
    request["messages"] = messages;
    let by_messages = runner.ask(&request);
    let by_prompt = runner.ask(&ask("p", text, &[&a, &b, &a], json!({})));
    assert_eq!(
        prompt_event(&by_messages)["tokens"],
        prompt_event(&by_prompt)["tokens"]
    );
    assert!(distance(&by_messages, &by_prompt) < SAME);
    // The order of pictures matters.
    let swapped = runner.ask(&ask("s", text, &[&b, &a, &a], json!({})));
    assert!(distance(&by_prompt, &swapped) > SAME);
}

#[test]
fn every_format_is_read_and_the_same_pixels_are_the_same_picture() {
    let mut runner = runner(&[]);
    let text = format!("Look: {PLACE} which?");
    let mut see = |name: &str, bytes: &[u8]| runner.ask(&ask(name, &text, &[bytes], json!({"cache": false})));
    let photo = see("photo.png", &fixture("images/photo.png"));
    for name in ["photo.webp", "alpha.png"] {
        assert!(
            distance(&see(name, &fixture(&format!("images/{name}"))), &photo) < SAME,
            "{name}"
        );
    }
    let first = see("first.png", &fixture("images/first.png"));
    assert!(
        distance(&see("first.gif", &fixture("images/first.gif")), &first) < SAME,
        "an animation's first frame"
    );
    assert!(distance(&first, &photo) > SAME);
    // A JPEG that its EXIF turns upright: without that segment it is another picture of as many tokens.
    let turned = fixture("images/turned.jpg");
    let upright = see("turned.jpg", &turned);
    let exif = turned
        .windows(2)
        .position(|marker| marker == [0xff, 0xe1])
        .unwrap();
    let length = usize::from(u16::from_be_bytes([turned[exif + 2], turned[exif + 3]]));
    let plain = [&turned[..exif], &turned[exif + 2 + length..]].concat();
    let lying = see("plain.jpg", &plain);
    assert_eq!(prompt_event(&upright)["tokens"], prompt_event(&lying)["tokens"]);
    assert!(distance(&upright, &lying) > SAME);
}

#[test]
fn a_picture_that_cannot_be_used_is_refused_by_the_rule_that_it_breaks() {
    let mut runner = runner(&[]);
    let half = |name: &str| {
        let whole = fixture(name);
        whole[..whole.len() / 2].to_vec()
    };
    let rows: Vec<(Vec<u8>, &[&str])> = vec![
        (Vec::new(), &["empty"]),
        (b"BM a bitmap".to_vec(), &["not PNG, JPEG, WebP or GIF"]),
        (b"hello".to_vec(), &["not PNG, JPEG, WebP or GIF"]),
        (half("images/photo.png"), &["broken PNG"]),
        (half("images/turned.jpg"), &["broken JPEG"]),
        (half("images/photo.webp"), &["broken WebP"]),
        (half("images/first.gif"), &["broken GIF"]),
        (png(0, 7, &zeros(7)), &["PNG"]),
        (png(64, 64, b"no zlib"), &["broken PNG"]),
        (black(402, 2), &["402 x 2", "aspect ratio is above 200"]),
        (black(2, 402), &["2 x 402", "aspect ratio is above 200"]),
        (
            png(60_000, 60_000, &zeros(9)),
            &["60000 x 60000", "3600000000 pixels", "at most 33554432"],
        ),
    ];
    let good = fixture("golden/a.png");
    for (bytes, words) in &rows {
        // Behind a good one, so that the message has to say which.
        let text = format!("{PLACE}{PLACE}?");
        let by_prompt = runner.ask(&ask("p", &text, &[&good, bytes], json!({})));
        let by_message = runner.ask(&json!({"type": "generate", "id": "m", "messages": [
            {"role": "user", "content": [{"type": "image", "data": base64(&good)}, {"type": "image", "data": base64(bytes)}]}]}));
        for answer in [by_prompt, by_message] {
            assert_eq!(answer.error()["code"], "bad_image", "{}", answer.last());
            assert_eq!(answer.error()["retryable"], false);
            let message = answer.error()["message"].as_str().unwrap();
            assert!(message.contains("image 1"), "{message}");
            for word in *words {
                assert!(message.contains(word), "{message:?} doesn't say {word:?}");
            }
        }
    }
    let mut request = ask("t", PLACE, &[], json!({}));
    request["images"] = json!(["no base64!"]);
    let answer = runner.ask(&request);
    assert_eq!(answer.error()["code"], "bad_image");
    assert!(
        answer.error()["message"].as_str().unwrap().contains("not base64"),
        "{}",
        answer.last()
    );
    // More or fewer places than pictures.
    for text in ["no place", &format!("{PLACE}{PLACE}")] {
        let answer = runner.ask(&ask("n", text, &[&good], json!({})));
        assert_eq!(answer.error()["code"], "invalid_request", "{}", answer.last());
    }
    // And it goes on.
    assert_eq!(
        runner
            .ask(&ask("z", &format!("{PLACE}?"), &[&good], json!({})))
            .tokens()
            .len(),
        8
    );
}

#[test]
fn a_bomb_of_33_megapixels_costs_bounded_memory_and_the_budget_of_tokens() {
    let mut runner = runner(&["--image-pixels", "65536"]);
    let small = runner.ask(&ask("s", &format!("{PLACE}?"), &[&black(256, 256)], json!({})));
    let before = runner.most_resident();
    // 100 MB of pixels from 0.7 MB of file.
    let bomb = black(5790, 5790);
    assert!(bomb.len() < 1 << 20);
    let answer = runner.ask(&ask("b", &format!("{PLACE}?"), &[&bomb], json!({})));
    assert_eq!(prompt_event(&answer)["tokens"], prompt_event(&small)["tokens"]);
    if let (Some(before), Some(after)) = (before, runner.most_resident()) {
        println!(
            "peak of resident memory {} MiB before, {} MiB after",
            before >> 20,
            after >> 20
        );
        assert!(after - before < 256 << 20, "{} MiB", (after - before) >> 20);
    }
}

#[test]
fn the_pixel_budget_bounds_a_pictures_tokens() {
    let picture = black(640, 640);
    let mut tokens = Vec::new();
    for args in [&[][..], &["--image-pixels", "65536"], &["--image-pixels", "1024"]] {
        let mut runner = runner(args);
        let answer = runner.ask(&ask("a", PLACE, &[&picture], json!({})));
        answer.done();
        // Without the two that open and close it.
        tokens.push(prompt_event(&answer)["tokens"].as_u64().unwrap() - 2);
    }
    assert_eq!(tokens, [400, 64, 1]);
}

#[test]
fn the_prefix_cache_never_takes_one_picture_for_another() {
    let mut warm = runner(&[]);
    let mut cold = runner(&["--cache-device", "0"]);
    let (a, b) = (fixture("golden/a.png"), black(96, 64));
    let (words, more) = (
        "one two three four five six seven eight ".repeat(4),
        " and so on ".repeat(6),
    );
    let text = format!("{words}{PLACE}{more}");
    let place = format!("<|vision_start|>{}<|vision_end|>", "<|image_pad|>".repeat(6));
    let bare = format!("{words}{place}{more}");
    let longer = format!("{text} what? {PLACE} then?");
    let draft = json!({"draft": {"mode": "fixed", "depth": 3}});
    let steps: Vec<(&str, Vec<&[u8]>)> = vec![
        (&text, vec![&a]),
        (&text, vec![&b]),
        (&text, vec![&a]),
        (&text, vec![&b]),
        // As many placeholders, and no picture.
        (&bare, vec![]),
        (&text, vec![&a]),
        (&longer, vec![&a, &b]),
        (&longer, vec![&a, &a]),
        (&longer, vec![&b, &a]),
        (&longer, vec![&a, &b]),
        (&bare, vec![]),
    ];
    let behind = (words.len() / 4) as u64;
    let mut seen: Vec<(&str, Vec<&[u8]>)> = Vec::new();
    let mut answers = Vec::new();
    for (text, pictures) in steps {
        let from_cold = cold.ask(&ask("c", text, &pictures, draft.clone()));
        let from_warm = warm.ask(&ask("w", text, &pictures, draft.clone()));
        assert!(
            distance(&from_cold, &from_warm) < SAME,
            "{} pictures",
            pictures.len()
        );
        // The head sees pictures too: what it drafts from a restored prefix is what it drafts from a cold one.
        assert_eq!(
            from_cold.done()["draft"]["accepted"],
            from_warm.done()["draft"]["accepted"]
        );
        assert_eq!(from_cold.done()["cached_count"], 0);
        let cached = from_warm.done()["cached_count"].as_u64().unwrap();
        if seen.contains(&(text, pictures.clone())) {
            assert!(cached > behind, "the same again: {cached} tokens reused");
        }
        seen.push((text, pictures));
        answers.push(from_cold);
    }
    // What must not be confused does differ.
    for (one, other) in [(0, 1), (0, 4), (1, 4), (6, 7), (6, 8)] {
        assert!(
            distance(&answers[one], &answers[other]) > 10.0 * SAME,
            "{one} and {other} are alike"
        );
    }
}
