//! Which ids end a generation.
//!
//! Invariant: the set is the union of every place a checkpoint names an end token in, since conversions lose some of
//! them and one alone lets the model run on past its turn (Qwen3.5's `config.json` lacks `<|im_end|>`).

use std::path::Path;

use serde_json::Value;

use super::error::TextError;
use super::tokenizer::{read_optional_json, token_text, Tokenizer};

/// Tokens that end a turn or a text wherever the tokenizer has them as special tokens.
const LITERALS: [&str; 2] = ["<|im_end|>", "<|endoftext|>"];

/// The ids that end a generation; small, in order of first mention.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct EosSet {
    ids: Vec<u32>,
}

impl EosSet {
    /// Collects the set from a model directory: `generation_config.json`, `config.json` (its `text_config` included),
    /// `tokenizer_config.json`, and the literal end tokens.
    ///
    /// # Errors
    /// [`TextError::Read`] or [`TextError::Invalid`] for a file that's there but damaged.
    pub fn load(dir: &Path, tokenizer: &Tokenizer) -> Result<Self, TextError> {
        let generation = read_optional_json(&dir.join("generation_config.json"))?;
        let config = read_optional_json(&dir.join("config.json"))?;
        Ok(Self::collect(generation.as_ref(), config.as_ref(), tokenizer))
    }

    /// Collects the set from parsed files. Ids that the tokenizer doesn't have are left out.
    #[must_use]
    pub fn collect(generation: Option<&Value>, config: Option<&Value>, tokenizer: &Tokenizer) -> Self {
        let mut set = Self::default();
        for source in [
            generation,
            config,
            config.and_then(|config| config.get("text_config")),
        ]
        .into_iter()
        .flatten()
        {
            set.add_ids(source.get("eos_token_id"), tokenizer);
        }
        let named = token_text(tokenizer.config(), "eos_token");
        let literals = LITERALS.iter().map(|text| (*text).to_owned());
        for text in named.into_iter().chain(literals) {
            let found = tokenizer.token_id(&text).filter(|id| tokenizer.is_added(*id));
            set.ids.extend(found);
        }
        let mut seen = std::collections::HashSet::new();
        set.ids.retain(|id| seen.insert(*id));
        set
    }

    fn add_ids(&mut self, value: Option<&Value>, tokenizer: &Tokenizer) {
        let Some(value) = value else { return };
        let list = value
            .as_array()
            .map_or(std::slice::from_ref(value), Vec::as_slice);
        let known = list
            .iter()
            .filter_map(|id| u32::try_from(id.as_u64()?).ok())
            .filter(|id| tokenizer.token_bytes(*id).is_some());
        self.ids.extend(known);
    }

    /// Whether the id ends a generation.
    #[must_use]
    pub fn contains(&self, id: u32) -> bool {
        self.ids.contains(&id)
    }

    /// The ids, without repetition.
    #[must_use]
    pub fn ids(&self) -> &[u32] {
        &self.ids
    }
}

impl FromIterator<u32> for EosSet {
    fn from_iter<I: IntoIterator<Item = u32>>(ids: I) -> Self {
        let mut set = Self::default();
        for id in ids {
            if !set.contains(id) {
                set.ids.push(id);
            }
        }
        set
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::test_support::{fixture_dir, tiny};
    use super::*;

    #[test]
    fn the_fixture_ends_at_both_tokens_of_its_generation_config() {
        let set = EosSet::load(&fixture_dir(), &tiny()).unwrap();
        assert_eq!(set.ids(), [4085, 4083]);
        assert!(set.contains(4085) && !set.contains(4084));
    }

    #[test]
    fn each_source_counts_alone() {
        let tokenizer = tiny();
        let ids = |generation: Value, config: Value| {
            let mut ids = EosSet::collect(Some(&generation), Some(&config), &tokenizer)
                .ids()
                .to_vec();
            ids.sort_unstable();
            ids
        };
        assert_eq!(
            ids(json!({}), json!({})),
            [4083, 4085],
            "the literal tokens and the tokenizer's own"
        );
        assert_eq!(ids(json!({"eos_token_id": 7}), json!({})), [7, 4083, 4085]);
        assert_eq!(
            ids(json!({"eos_token_id": [8, 9]}), json!({})),
            [8, 9, 4083, 4085]
        );
        assert_eq!(ids(json!({}), json!({"eos_token_id": 5})), [5, 4083, 4085]);
        assert_eq!(
            ids(json!({}), json!({"text_config": {"eos_token_id": 6}})),
            [6, 4083, 4085]
        );
    }

    #[test]
    fn nonsense_and_ids_out_of_range_are_left_out() {
        let generation = json!({"eos_token_id": [null, "x", -1, 4096, 1e10, 4085]});
        let set = EosSet::collect(Some(&generation), None, &tiny());
        assert_eq!(set.ids(), [4085, 4083]);
    }

    #[test]
    fn a_checkpoint_without_any_of_the_files_still_has_its_literal_tokens() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(EosSet::load(dir.path(), &tiny()).unwrap().ids(), [4085, 4083]);
        std::fs::write(dir.path().join("config.json"), "{").unwrap();
        assert!(EosSet::load(dir.path(), &tiny()).is_err());
    }
}
