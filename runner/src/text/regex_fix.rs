//! The split pattern that a checkpoint was trained with.
//!
//! Some conversions of Qwen3.5 ship Qwen2's split pattern in `tokenizer.json`, while `pretokenize_regex` in
//! `tokenizer_config.json` has the right one. They differ in `\p{M}` only, so text with combining marks (Hindi, Hebrew,
//! Thai …) is split otherwise than in training. Where the two disagree, the one with `\p{M}` is used.

use serde_json::Value;
use tokenizers::PreTokenizerWrapper;

const MARKS: &str = r"\p{M}";

/// The pre-tokenizer with `wanted` in place of its split pattern, or none where nothing is to be changed.
///
/// Only a pattern without `\p{M}` is replaced, and only by one that has it.
pub(super) fn with_marks(current: &PreTokenizerWrapper, wanted: &str) -> Option<PreTokenizerWrapper> {
    if !wanted.contains(MARKS) {
        return None;
    }
    let mut description = serde_json::to_value(current).ok()?;
    if !replace_split(&mut description, wanted) {
        return None;
    }
    serde_json::from_value(description).ok()
}

fn replace_split(node: &mut Value, wanted: &str) -> bool {
    match node.get("type").and_then(Value::as_str) {
        Some("Split") => match node.pointer_mut("/pattern/Regex") {
            Some(Value::String(pattern)) if !pattern.contains(MARKS) => {
                *pattern = wanted.to_owned();
                true
            }
            _ => false,
        },
        Some("Sequence") => node
            .get_mut("pretokenizers")
            .and_then(Value::as_array_mut)
            .and_then(|parts| parts.iter_mut().find(|part| part["type"] == "Split"))
            .is_some_and(|split| replace_split(split, wanted)),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OLD: &str = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|\s+";
    const NEW: &str = r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}|\s+";

    fn sequence(pattern: &str) -> PreTokenizerWrapper {
        serde_json::from_value(serde_json::json!({"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false},
            {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false}]}))
        .unwrap()
    }

    #[test]
    fn the_older_pattern_gives_way_to_the_one_with_marks() {
        let fixed = with_marks(&sequence(OLD), NEW).unwrap();
        assert_eq!(
            serde_json::to_value(fixed).unwrap()["pretokenizers"][0]["pattern"]["Regex"],
            NEW
        );
    }

    #[test]
    fn a_pattern_with_marks_is_never_replaced() {
        assert!(with_marks(&sequence(NEW), NEW).is_none());
        assert!(with_marks(&sequence(NEW), OLD).is_none());
        assert!(with_marks(&sequence(OLD), OLD).is_none());
    }
}
