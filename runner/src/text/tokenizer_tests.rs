//! Encoding and decoding against the goldens, and what damaged or foreign files are told.

use serde_json::json;

use super::super::test_support::{fixture_dir, golden, tiny, write_tokenizer};
use super::*;

#[test]
fn golden_prompts_encode_to_the_golden_ids() {
    let tokenizer = tiny();
    for prompt in golden()["prompts"].as_array().unwrap() {
        let text = prompt["text"].as_str().unwrap();
        let ids: Vec<u32> = serde_json::from_value(prompt["ids"].clone()).unwrap();
        assert_eq!(
            tokenizer.encode(text, Bos::ByRule).unwrap(),
            ids,
            "prompt {}",
            prompt["name"]
        );
        let mut greedy: Vec<u32> = serde_json::from_value(prompt["greedy"].clone()).unwrap();
        greedy.truncate(
            prompt["eos_index"]
                .as_u64()
                .map_or(usize::MAX, |end| usize::try_from(end).unwrap()),
        );
        assert_eq!(
            tokenizer.decode(&greedy, Specials::Hidden).unwrap(),
            prompt["greedy_text"].as_str().unwrap()
        );
    }
}

#[test]
fn special_tokens_in_the_text_are_parsed_as_such() {
    let tokenizer = tiny();
    let ids = tokenizer
        .encode("<|im_start|>user\n<think>", Bos::ByRule)
        .unwrap();
    assert_eq!(ids.first(), Some(&4084));
    assert_eq!(ids.last(), Some(&4090));
    assert!(tokenizer.is_special(4084) && !tokenizer.is_special(4090) && tokenizer.is_added(4090));
    assert_eq!(tokenizer.token_id("<|im_end|>"), Some(4085));
    assert_eq!(
        tokenizer.decode(&ids, Specials::Shown).unwrap(),
        "<|im_start|>user\n<think>"
    );
    assert_eq!(tokenizer.decode(&ids, Specials::Hidden).unwrap(), "user\n<think>");
}

#[test]
fn every_id_has_bytes_and_ids_beyond_have_none() {
    let tokenizer = tiny();
    assert_eq!(tokenizer.len(), 4096);
    assert!((0..4096).all(|id| tokenizer.token_bytes(id).is_some_and(|bytes| !bytes.is_empty())));
    assert_eq!(tokenizer.token_bytes(4096), None);
    assert!(matches!(
        tokenizer.decode(&[5000], Specials::Shown),
        Err(TextError::UnknownId { id: 5000, len: 4096 })
    ));
}

#[test]
fn bytes_of_the_ids_give_the_text_back() {
    let tokenizer = tiny();
    for text in [
        "नमस्ते दुनिया",
        "שָׁלוֹם",
        "👩‍👩‍👧 e\u{301}",
        "a\r\n\r\n  b\t\tc",
        "\u{0}\u{1f}",
        "你好，世界",
    ] {
        let ids = tokenizer.encode(text, Bos::Never).unwrap();
        let bytes: Vec<u8> = ids
            .iter()
            .flat_map(|id| tokenizer.token_bytes(*id).unwrap().to_vec())
            .collect();
        let normalised = tokenizer.decode(&ids, Specials::Shown).unwrap();
        assert_eq!(String::from_utf8(bytes).unwrap(), normalised);
        assert!(
            text == normalised || text.contains('\u{301}') || text.contains('ש'),
            "{text:?} {normalised:?}"
        );
    }
}

#[test]
fn a_long_run_of_blanks_is_tokenised_whole_and_in_bounded_time() {
    let tokenizer = tiny();
    for text in [
        " ".repeat(300_000),
        "\n".repeat(300_000),
        format!("{}x", " \n".repeat(150_000)),
        "ab".repeat(150_000),
    ] {
        let start = std::time::Instant::now();
        let ids = tokenizer.encode(&text, Bos::Never).unwrap();
        assert_eq!(tokenizer.decode(&ids, Specials::Shown).unwrap(), text);
        assert!(start.elapsed().as_secs() < 20, "{:?}", start.elapsed());
    }
}

#[test]
fn a_missing_file_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let error = Tokenizer::load(dir.path()).unwrap_err();
    assert!(matches!(error, TextError::Missing { .. }));
    assert!(error.to_string().contains("tokenizer.json"));
}

#[test]
fn a_damaged_file_and_a_foreign_kind_are_told_apart() {
    let dir = tempfile::tempdir().unwrap();
    for (contents, message) in [
        ("{\"model\":", "is invalid: EOF"),
        ("{}", "missing field `model`"),
        ("[]", "is invalid"),
        (
            r#"{"model":{"type":"BPE","merges":[]},"decoder":{"type":"ByteLevel"}}"#,
            "is invalid",
        ),
    ] {
        std::fs::write(dir.path().join("tokenizer.json"), contents).unwrap();
        let error = Tokenizer::load(dir.path()).unwrap_err();
        assert!(matches!(error, TextError::Invalid { .. }), "{contents}: {error}");
        assert!(error.to_string().contains(message), "{contents}: {error}");
    }
    std::fs::write(
        dir.path().join("tokenizer.json"),
        r#"{"model":{"type":"WordPiece","vocab":{}}}"#,
    )
    .unwrap();
    let error = Tokenizer::load(dir.path()).unwrap_err();
    assert!(
        matches!(&error, TextError::UnsupportedKind { kind, .. } if kind == "WordPiece"),
        "{error}"
    );
}

#[test]
fn an_id_far_above_all_others_costs_no_table_of_that_size() {
    let dir = tempfile::tempdir().unwrap();
    let stray = |json: &mut Value| {
        json["model"]["vocab"]["stray"] = json!(4_000_000_000_u32);
    };
    write_tokenizer(dir.path(), stray, None);
    let error = Tokenizer::load(dir.path()).unwrap_err().to_string();
    assert!(
        error.contains("token id 4000000000 is above the limit"),
        "{error}"
    );
}

#[test]
fn a_damaged_tokenizer_config_is_named() {
    let dir = tempfile::tempdir().unwrap();
    write_tokenizer(dir.path(), |_| {}, None);
    std::fs::write(dir.path().join("tokenizer_config.json"), "{").unwrap();
    let error = Tokenizer::load(dir.path()).unwrap_err();
    assert!(error.to_string().contains("tokenizer_config.json"), "{error}");
}

#[test]
fn truncation_and_padding_asked_for_by_the_file_are_ignored() {
    let dir = tempfile::tempdir().unwrap();
    let cut = |json: &mut Value| {
        json["truncation"] =
            json!({"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0});
    };
    write_tokenizer(dir.path(), cut, None);
    let text = "one two three four five six seven";
    let ids = Tokenizer::load(dir.path())
        .unwrap()
        .encode(text, Bos::ByRule)
        .unwrap();
    assert_eq!(ids, tiny().encode(text, Bos::ByRule).unwrap());
}

#[test]
fn an_older_split_pattern_gives_way_to_the_one_in_the_config() {
    let original: Value =
        serde_json::from_slice(&std::fs::read(fixture_dir().join("tokenizer.json")).unwrap()).unwrap();
    let wanted = original["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"].clone();
    let older = wanted
        .as_str()
        .unwrap()
        .replace(r"[\p{L}\p{M}]+", r"\p{L}+")
        .replace(r"\p{L}\p{M}\p{N}", r"\p{L}\p{N}");
    assert!(!older.contains(r"\p{M}"));
    let downgrade = |json: &mut Value| {
        json["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = json!(older);
    };
    let pattern = |dir: &Path| {
        let tokenizer = Tokenizer::load(dir).unwrap();
        let json = serde_json::to_value(tokenizer.inner.get_pre_tokenizer().unwrap()).unwrap();
        json["pretokenizers"][0]["pattern"]["Regex"].clone()
    };
    let dir = tempfile::tempdir().unwrap();
    write_tokenizer(dir.path(), downgrade, None);
    assert_eq!(pattern(dir.path()), json!(older));
    write_tokenizer(dir.path(), downgrade, Some(json!({"pretokenize_regex": wanted})));
    assert_eq!(pattern(dir.path()), wanted);
    write_tokenizer(dir.path(), |_| {}, Some(json!({"pretokenize_regex": older})));
    assert_eq!(pattern(dir.path()), wanted);
}

#[test]
fn the_bos_rule_applies_to_prompts_only_and_once() {
    let dir = tempfile::tempdir().unwrap();
    let config = json!({"add_bos_token": true, "bos_token": {"content": "<|endoftext|>"}});
    write_tokenizer(dir.path(), |_| {}, Some(config));
    let tokenizer = Tokenizer::load(dir.path()).unwrap();
    assert_eq!(tokenizer.encode("hi", Bos::ByRule).unwrap()[0], 4083);
    assert_ne!(tokenizer.encode("hi", Bos::Never).unwrap()[0], 4083);
    assert_eq!(
        tokenizer.encode("<|endoftext|>hi", Bos::ByRule).unwrap()[..1],
        [4083]
    );
    assert_ne!(tokenizer.encode("<|endoftext|>hi", Bos::ByRule).unwrap()[1], 4083);

    let template = |json: &mut Value| {
        json["post_processor"] = json!({"type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [4083], "tokens": ["<|endoftext|>"]}}});
    };
    write_tokenizer(dir.path(), template, None);
    let tokenizer = Tokenizer::load(dir.path()).unwrap();
    assert_eq!(tokenizer.encode("hi", Bos::ByRule).unwrap()[0], 4083);
    assert_ne!(tokenizer.encode("hi", Bos::Never).unwrap()[0], 4083);
}

#[test]
fn tokens_that_only_the_config_lists_are_added_under_their_ids() {
    let dir = tempfile::tempdir().unwrap();
    let config = json!({"added_tokens_decoder": {
        "4097": {"content": "<|b|>", "special": false},
        "4096": {"content": "<|a|>", "special": true},
        "5000": {"content": "<|far|>", "special": true}}});
    write_tokenizer(dir.path(), |_| {}, Some(config));
    let tokenizer = Tokenizer::load(dir.path()).unwrap();
    assert_eq!(tokenizer.len(), 4098);
    assert_eq!(tokenizer.encode("<|a|><|b|>", Bos::Never).unwrap(), [4096, 4097]);
    assert!(tokenizer.is_special(4096) && !tokenizer.is_special(4097));
    assert_eq!(tokenizer.token_id("<|far|>"), None);
}
