//! Requests that end in an error: what they leave behind is as good as nothing, or as what a cancelled one leaves.

use std::fs;
use std::path::Path;

use lookahead_tests::golden::long_prompt;
use lookahead_tests::process::{model, Process};
use serde_json::{json, Value};
use tempfile::TempDir;

use crate::support::{number, options, words, Session};

const REPLY: usize = 20;

/// What a runner of the trained model holds before its first request.
fn weights() -> u64 {
    let mut session = Session::start("greedy", &[]);
    let weights = number(&session.status()["memory"]["active"]);
    session.end();
    weights
}

#[test]
fn memory_comes_from_idle_prefixes_first_and_then_the_request_ends_with_an_error() {
    let limit = weights() + (16 << 20);
    let limit_text = limit.to_string();
    let args = [
        "--memory-limit",
        &limit_text,
        "--cache-device",
        "1GiB",
        "--chunk",
        "256",
    ];
    let mut session = Session::start("greedy", &args);
    let active = |session: &mut Session| number(&session.status()["memory"]["active"]);
    // The cache's own budget wouldn't stop it, the limit does.
    for conversation in 0..20 {
        let chat = session.encode(&words(conversation, 100));
        let outcome = session.plain(&chat, REPLY);
        assert_eq!(outcome.tokens, session.cold(&chat, REPLY));
        assert!(active(&mut session) <= limit);
    }
    let cache = session.status()["cache"].clone();
    assert!(number(&cache["evictions"]) > 0, "{cache}");

    // More than there is: the request ends, the runner doesn't, and the next request goes on where it got to.
    let long = long_prompt(9000);
    let answer = session.generate(&long, REPLY, json!({}));
    let error = answer.error();
    assert_eq!(
        (&error["code"], &error["retryable"]),
        (&json!("out_of_memory"), &json!(true))
    );
    let message = error["message"].as_str().unwrap_or_default();
    assert!(message.contains(&limit_text), "{error}");
    let log = session.process.log();
    assert!(
        log.contains("trying again without the prefix cache's share"),
        "{log}"
    );
    assert!(active(&mut session) <= limit);
    let again = session.generate(&long, REPLY, json!({}));
    let prompt = again.own().find(|event| event["type"] == "prompt");
    let restored = prompt.map_or(0, |prompt| number(&prompt["cached"]) as usize);
    assert!(restored > 256, "{restored} tokens restored");
    assert_eq!(again.error()["code"], "out_of_memory");
    let short = &long[..600];
    assert_eq!(session.plain(short, REPLY).tokens, session.cold(short, REPLY));
    session.end();
}

/// A copy of the trained model in which the embedding of one token is no number, and the output's row of it is sound.
fn poisoned(token: usize) -> Result<TempDir, Box<dyn std::error::Error>> {
    const SHARD: &str = "model-00001-of-00002.safetensors";
    const EMBEDDING: &str = "model.language_model.embed_tokens.weight";
    let copy = tempfile::tempdir()?;
    for entry in fs::read_dir(model())? {
        let path = entry?.path();
        fs::copy(&path, copy.path().join(path.file_name().unwrap_or_default()))?;
    }
    let read_json = |path: &Path| -> Result<Value, Box<dyn std::error::Error>> {
        Ok(serde_json::from_slice(&fs::read(path)?)?)
    };
    let shard = copy.path().join(SHARD);
    let mut bytes = fs::read(&shard)?;
    let header = u64::from_le_bytes(bytes[..8].try_into()?) as usize;
    let entry = serde_json::from_slice::<Value>(&bytes[8..8 + header])?[EMBEDDING].clone();
    assert_eq!(entry["dtype"], "BF16");
    let at = |index: usize| 8 + header + number(&entry["data_offsets"][index]) as usize;
    let table = bytes[at(0)..at(1)].to_vec();
    let row = 2 * number(&entry["shape"][1]) as usize;
    for half in bytes[at(0) + token * row..][..row].chunks_exact_mut(2) {
        half.copy_from_slice(&0x7fc0u16.to_le_bytes());
    }
    fs::write(&shard, bytes)?;

    let head = json!({"lm_head.weight": {
        "dtype": "BF16", "shape": entry["shape"], "data_offsets": [0, table.len()],
    }});
    let head = head.to_string().into_bytes();
    let file = [&(head.len() as u64).to_le_bytes()[..], &head, &table].concat();
    fs::write(copy.path().join("head.safetensors"), file)?;
    let index = copy.path().join("model.safetensors.index.json");
    let mut map = read_json(&index)?;
    map["weight_map"]["lm_head.weight"] = json!("head.safetensors");
    fs::write(&index, map.to_string())?;
    let config = copy.path().join("config.json");
    let mut settings = read_json(&config)?;
    settings["tie_word_embeddings"] = json!(false);
    settings["text_config"]["tie_word_embeddings"] = json!(false);
    fs::write(&config, settings.to_string())?;
    Ok(copy)
}

#[test]
fn logits_that_are_no_numbers_leave_nothing_to_resume_from() {
    const POISON: u64 = 3000;
    let dir = poisoned(POISON as usize).unwrap();
    let process = Process::runner_of(dir.path(), &["--cpu", "--draft", "3"]);
    let mut session = Session::of(process, "greedy");
    let other = session.encode(&words(1, 30));
    let sound = session.encode(&words(2, 30));
    assert!(!sound.contains(&POISON) && !other.contains(&POISON));
    session.ask(&other, REPLY);
    let told = session.ask(&sound, REPLY).tokens;
    // A request that ends before anything is drawn keeps a state that nobody has looked at.
    let mut bad = sound.clone();
    bad.push(POISON);
    bad.extend(session.encode(" and so on"));
    let unseen = session.generate(&bad, 0, json!({}));
    assert_eq!(unseen.done()["done_reason"], "length");
    bad.extend(session.encode(" and on"));
    let failed = session.generate(&bad, REPLY, json!({}));
    let prompt = failed.own().find(|event| event["type"] == "prompt");
    assert!(prompt.is_some_and(|prompt| number(&prompt["cached"]) as usize > sound.len()));
    assert_eq!(failed.error()["code"], "nan_logits");

    let after = session.plain(&sound, REPLY);
    assert_eq!((after.cached, after.tokens), (0, told.clone()));
    assert_eq!(session.plain(&sound, REPLY).tokens, told);
    assert_eq!(
        session.plain(&other, REPLY).cached,
        other.len() - 1,
        "it has nothing to do with it"
    );
    let request = json!({"options": options("greedy", REPLY)});
    let failed = session.generate(&bad, REPLY, request);
    let prompt = failed.own().find(|event| event["type"] == "prompt");
    assert!(prompt.is_some_and(|prompt| number(&prompt["cached"]) as usize <= sound.len()));
    session.end();
}
