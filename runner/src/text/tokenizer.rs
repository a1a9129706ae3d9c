//! A checkpoint's tokenizer: text to ids, and ids to the bytes they stand for.
//!
//! Invariants: encoding is the tokenizer library's (normaliser, split pattern, merges, added tokens), never cut or
//! padded whatever the file asks for; decoding goes by bytes alone, so it's the same for any grouping of ids.

use std::path::Path;

use serde::de::IgnoredAny;
use serde::Deserialize;
use serde_json::Value;
use tokenizers::AddedToken;

use super::error::TextError;
use super::pieces::{Piece, Pieces, Spelling};
use super::regex_fix;

/// Highest token id taken; far above every release.
const MAX_ID: u32 = 1 << 21;

/// Whether to apply the tokenizer's own rule for beginning-of-text tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bos {
    /// What the tokenizer's post-processor (or `add_bos_token`) says: for raw prompts.
    ByRule,
    /// None: for text rendered by a chat template, which writes its own, and for parts of a text.
    Never,
}

/// Whether decoding writes out special tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Specials {
    /// Special tokens become their literal text, so that decoding reverses encoding.
    Shown,
    /// Special tokens become nothing, as in streamed text.
    Hidden,
}

/// A loaded tokenizer. Immutable and shareable between threads.
#[derive(Debug)]
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    pieces: Pieces,
    config: Value,
    bos: Option<u32>,
}

/// The parts of `tokenizer.json` that say what kind it is, read before the library sees the file.
#[derive(Deserialize)]
struct Probe {
    model: ModelProbe,
    #[serde(default)]
    decoder: Value,
    #[serde(default)]
    pre_tokenizer: Value,
}

#[derive(Deserialize)]
struct ModelProbe {
    #[serde(rename = "type")]
    kind: Option<String>,
    merges: Option<IgnoredAny>,
    #[serde(default)]
    byte_fallback: Option<bool>,
}

impl Tokenizer {
    /// Loads `tokenizer.json`, with `tokenizer_config.json` beside it where there is one, from a model directory.
    ///
    /// # Errors
    /// [`TextError::Missing`] without `tokenizer.json`, [`TextError::Read`] where a file can't be read,
    /// [`TextError::Invalid`] where one isn't what its name says, [`TextError::UnsupportedKind`] for anything but BPE.
    pub fn load(dir: &Path) -> Result<Self, TextError> {
        let path = dir.join("tokenizer.json");
        let bytes = std::fs::read(&path).map_err(|source| match source.kind() {
            std::io::ErrorKind::NotFound => TextError::Missing { path: path.clone() },
            _ => TextError::Read {
                path: path.clone(),
                source,
            },
        })?;
        let config = read_optional_json(&dir.join("tokenizer_config.json"))?.unwrap_or(Value::Null);
        Self::parse(&path, &bytes, config)
    }

    fn parse(path: &Path, bytes: &[u8], config: Value) -> Result<Self, TextError> {
        let invalid = |reason: String| TextError::Invalid {
            path: path.to_owned(),
            reason,
        };
        let probe: Probe = serde_json::from_slice(bytes).map_err(|error| invalid(error.to_string()))?;
        let spelling = spelling_of(&probe, path)?;
        let mut inner =
            tokenizers::Tokenizer::from_bytes(bytes).map_err(|error| invalid(error.to_string()))?;
        inner
            .with_truncation(None)
            .map_err(|error| invalid(error.to_string()))?;
        inner.with_padding(None);
        let fixed = config
            .get("pretokenize_regex")
            .and_then(Value::as_str)
            .zip(inner.get_pre_tokenizer())
            .and_then(|(wanted, current)| regex_fix::with_marks(current, wanted));
        if let Some(fixed) = fixed {
            inner.with_pre_tokenizer(Some(fixed));
        }
        add_missing_tokens(&mut inner, &config);

        let vocabulary = inner.get_vocab(false);
        let added = inner.get_added_tokens_decoder();
        // Tables have a row for each id up to the highest, so a stray id must not decide on their size.
        let highest = vocabulary
            .values()
            .chain(added.keys())
            .max()
            .copied()
            .unwrap_or(0);
        if highest > MAX_ID {
            return Err(invalid(format!(
                "token id {highest} is above the limit of {MAX_ID}"
            )));
        }
        let base = vocabulary
            .iter()
            .filter(|(_, id)| !added.contains_key(id))
            .map(|(text, id)| Piece {
                id: *id,
                spelling: text,
                added: false,
                special: false,
            });
        let extra = added.iter().map(|(id, token)| Piece {
            id: *id,
            spelling: &token.content,
            added: true,
            special: token.special,
        });
        let pieces = Pieces::build(spelling, base.chain(extra));
        if pieces.len() == 0 {
            return Err(invalid("the vocabulary is empty".to_owned()));
        }
        let bos = config
            .get("add_bos_token")
            .and_then(Value::as_bool)
            .filter(|wanted| *wanted)
            .and_then(|_| token_text(&config, "bos_token"))
            .and_then(|text| inner.token_to_id(&text));
        Ok(Self {
            inner,
            pieces,
            config,
            bos,
        })
    }

    /// The ids of a text. Special tokens written in it are parsed as such.
    ///
    /// # Errors
    /// [`TextError::Encode`] where the library refuses the text.
    pub fn encode(&self, text: &str, bos: Bos) -> Result<Vec<u32>, TextError> {
        let encoding = self
            .inner
            .encode_fast(text, bos == Bos::ByRule)
            .map_err(|error| TextError::Encode {
                reason: error.to_string(),
            })?;
        let mut ids = encoding.get_ids().to_vec();
        if let Some(first) = self
            .bos
            .filter(|first| bos == Bos::ByRule && ids.first() != Some(first))
        {
            ids.insert(0, first);
        }
        Ok(ids)
    }

    /// The text of ids: their bytes in order, with anything that isn't UTF-8 as U+FFFD.
    ///
    /// # Errors
    /// [`TextError::UnknownId`] for an id that the tokenizer doesn't have.
    pub fn decode(&self, ids: &[u32], specials: Specials) -> Result<String, TextError> {
        let mut bytes = Vec::new();
        for &id in ids {
            let piece = self
                .token_bytes(id)
                .ok_or(TextError::UnknownId { id, len: self.len() })?;
            if specials == Specials::Shown || !self.is_special(id) {
                bytes.extend_from_slice(piece);
            }
        }
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// One more than the highest id. A model's logits may be wider; ids from here on are never to be sampled.
    #[must_use]
    pub fn len(&self) -> usize {
        self.pieces.len()
    }

    /// Whether there are no ids; never the case for a loaded tokenizer.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The exact bytes an id stands for, special or not; none where the tokenizer has no such id.
    #[must_use]
    pub fn token_bytes(&self, id: u32) -> Option<&[u8]> {
        self.pieces.get(id)
    }

    /// Whether the id is a special token, hidden in streamed text. Added tokens such as `<think>` aren't.
    #[must_use]
    pub fn is_special(&self, id: u32) -> bool {
        self.pieces.is_special(id)
    }

    /// Whether the id was added to the vocabulary as a whole, special or not.
    #[must_use]
    pub fn is_added(&self, id: u32) -> bool {
        self.pieces.is_added(id)
    }

    /// The id of a token by its spelling, `<|im_end|>` for example.
    #[must_use]
    pub fn token_id(&self, text: &str) -> Option<u32> {
        self.inner.token_to_id(text)
    }

    /// The contents of `tokenizer_config.json`; null where there is none.
    #[must_use]
    pub fn config(&self) -> &Value {
        &self.config
    }
}

/// A token named in a configuration: a plain string, or an object with `content`.
pub(super) fn token_text(config: &Value, key: &str) -> Option<String> {
    let entry = config.get(key)?;
    entry
        .as_str()
        .or_else(|| entry.get("content")?.as_str())
        .map(str::to_owned)
}

/// A JSON file's contents, none where there is no such file.
pub(super) fn read_optional_json(path: &Path) -> Result<Option<Value>, TextError> {
    let bytes = match std::fs::read(path) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(source) => {
            return Err(TextError::Read {
                path: path.to_owned(),
                source,
            })
        }
    };
    serde_json::from_slice(&bytes)
        .map(Some)
        .map_err(|error| TextError::Invalid {
            path: path.to_owned(),
            reason: error.to_string(),
        })
}

fn spelling_of(probe: &Probe, path: &Path) -> Result<Spelling, TextError> {
    // Files from before the library wrote a type are BPE where they have merges.
    let kind = match (&probe.model.kind, &probe.model.merges) {
        (Some(kind), _) => kind.as_str(),
        (None, Some(_)) => "BPE",
        (None, None) => "unknown",
    };
    if kind != "BPE" {
        return Err(TextError::UnsupportedKind {
            path: path.to_owned(),
            kind: kind.to_owned(),
        });
    }
    let mentions = |part: &Value, kind: &str| {
        let members = ["decoders", "pretokenizers"]
            .iter()
            .filter_map(|key| part.get(key)?.as_array())
            .flatten();
        members.chain([part]).any(|member| member["type"] == kind)
    };
    if mentions(&probe.decoder, "ByteLevel") || mentions(&probe.pre_tokenizer, "ByteLevel") {
        Ok(Spelling::ByteLevel)
    } else if probe.model.byte_fallback == Some(true) || mentions(&probe.decoder, "ByteFallback") {
        Ok(Spelling::ByteFallback)
    } else {
        Err(TextError::Invalid {
            path: path.to_owned(),
            reason: "the tokenizer is neither byte-level nor has byte fallback".to_owned(),
        })
    }
}

/// Adds the tokens that only `tokenizer_config.json` lists, as the publishers' own loader does.
///
/// One whose id isn't the next free one can't be added and is left out: the model never learnt it under another id.
fn add_missing_tokens(inner: &mut tokenizers::Tokenizer, config: &Value) {
    let Some(entries) = config.get("added_tokens_decoder").and_then(Value::as_object) else {
        return;
    };
    let mut missing: Vec<(u32, AddedToken)> = entries
        .iter()
        .filter_map(|(id, entry)| {
            let content = entry.get("content")?.as_str()?;
            let flag = |key: &str| entry.get(key).and_then(Value::as_bool).unwrap_or(false);
            let token = AddedToken::from(content, flag("special"))
                .single_word(flag("single_word"))
                .lstrip(flag("lstrip"))
                .rstrip(flag("rstrip"))
                .normalized(flag("normalized"));
            Some((id.parse().ok()?, token))
        })
        .filter(|(_, token)| inner.token_to_id(&token.content).is_none())
        .collect();
    missing.sort_by_key(|(id, _)| *id);
    for (id, token) in missing {
        let next = inner.get_vocab_size(true);
        if usize::try_from(id).is_ok_and(|id| id == next) {
            inner.add_tokens(&[token]);
        } else {
            tracing::warn!(id, next, token = %token.content, "tokenizer_config.json lists a token that can't get its id");
        }
    }
}

#[cfg(test)]
#[path = "tokenizer_tests.rs"]
mod tests;
