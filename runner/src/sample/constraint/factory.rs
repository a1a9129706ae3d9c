//! A tokenizer's vocabulary as grammars need it, built once per model and only when first asked for.
//!
//! Invariant: hidden and end tokens are never part of a text, whatever bytes they spell; they're marked so that a grammar
//! can at most name them.

use std::fmt;
use std::sync::{Arc, OnceLock};

use llguidance::api::ParserLimits;
use llguidance::ParserFactory;
use toktrie::{ApproximateTokEnv, TokEnv, TokRxInfo, TokTrie};

use super::error::{plain, ConstraintError};
use super::is_line_feeds;
use crate::text::{EosSet, Tokenizer};

/// Makes constraints for one model. Cheap until the first constraint is asked for; shareable between threads.
#[derive(Debug)]
pub struct ConstraintFactory {
    tokenizer: Arc<Tokenizer>,
    eos: EosSet,
    width: usize,
    vocabulary: OnceLock<Result<Arc<Vocabulary>, String>>,
}

impl ConstraintFactory {
    /// A factory for a tokenizer, the ids that end a generation, and the width of the model's logits.
    #[must_use]
    pub fn new(tokenizer: Arc<Tokenizer>, eos: EosSet, width: usize) -> Self {
        Self {
            tokenizer,
            eos,
            width,
            vocabulary: OnceLock::new(),
        }
    }

    pub(super) fn vocabulary(&self) -> Result<Arc<Vocabulary>, ConstraintError> {
        let built = self.vocabulary.get_or_init(|| {
            Vocabulary::build(Arc::clone(&self.tokenizer), &self.eos, self.width).map(Arc::new)
        });
        built
            .clone()
            .map_err(|reason| ConstraintError::Internal { reason })
    }
}

/// The tables that all constraints of a model share.
pub(super) struct Vocabulary {
    tokenizer: Arc<Tokenizer>,
    eos: EosSet,
    words: usize,
    parsers: ParserFactory,
    anything: Vec<u32>,
    ends: Vec<u32>,
    /// Ids that are line feeds only, with how many.
    line_feeds: Vec<(u32, usize)>,
}

impl fmt::Debug for Vocabulary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Vocabulary")
            .field("words", &self.words)
            .field("eos", &self.eos)
            .finish_non_exhaustive()
    }
}

impl Vocabulary {
    fn build(tokenizer: Arc<Tokenizer>, eos: &EosSet, width: usize) -> Result<Self, String> {
        let real = tokenizer.len().min(width);
        let ids = 0..u32::try_from(width).map_err(|_| format!("logits of width {width} are too wide"))?;
        let in_range: Vec<u32> = eos
            .ids()
            .iter()
            .copied()
            .filter(|id| (*id as usize) < real)
            .collect();
        let Some(first) = in_range.first() else {
            return Err("the model has no end-of-generation token".to_owned());
        };
        let spelling = |id: u32| {
            let bytes = if (id as usize) < real {
                tokenizer.token_bytes(id)
            } else {
                None
            }?;
            let marker =
                (tokenizer.is_special(id) || eos.contains(id)).then_some(TokTrie::SPECIAL_TOKEN_MARKER);
            Some(
                marker
                    .into_iter()
                    .chain(bytes.iter().copied())
                    .collect::<Vec<u8>>(),
            )
        };
        let spellings: Vec<Vec<u8>> = ids.clone().map(|id| spelling(id).unwrap_or_default()).collect();
        let info = TokRxInfo::new(ids.end, *first);
        let trie = TokTrie::from(&info, &spellings).with_eos_tokens(&in_range);
        let environment: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
        let mut parsers =
            ParserFactory::new_simple(&environment).map_err(|error| plain(&error.to_string()))?;
        parsers.quiet();
        *parsers.limits_mut() = limits();

        let words = width.div_ceil(32);
        let bits = |wanted: &dyn Fn(u32) -> bool| {
            let mut mask = vec![0; words];
            for id in ids.clone().filter(|id| wanted(*id)) {
                mask[id as usize / 32] |= 1 << (id % 32);
            }
            mask
        };
        let present = |id: u32| !spellings[id as usize].is_empty();
        let anything = bits(&|id| present(id) && !in_range.contains(&id));
        let ends = bits(&|id| in_range.contains(&id));
        let line_feeds = ids
            .clone()
            .filter(|id| is_line_feeds(&spellings[*id as usize], usize::MAX))
            .map(|id| (id, spellings[id as usize].len()))
            .collect();
        Ok(Self {
            tokenizer,
            eos: in_range.into_iter().collect(),
            words,
            parsers,
            anything,
            ends,
            line_feeds,
        })
    }

    pub(super) fn parsers(&self) -> &ParserFactory {
        &self.parsers
    }

    pub(super) fn words(&self) -> usize {
        self.words
    }

    pub(super) fn is_end(&self, id: u32) -> bool {
        self.eos.contains(id)
    }

    /// The id's bytes; none where it can't be sampled.
    pub(super) fn bytes(&self, id: u32) -> Option<&[u8]> {
        let in_mask = self
            .anything
            .get(id as usize / 32)
            .is_some_and(|word| word >> (id % 32) & 1 == 1);
        if in_mask || self.is_end(id) {
            self.tokenizer.token_bytes(id)
        } else {
            None
        }
    }

    /// The mask of everything but end tokens.
    pub(super) fn anything(&self) -> &[u32] {
        &self.anything
    }

    /// The mask of end tokens only.
    pub(super) fn ends(&self) -> &[u32] {
        &self.ends
    }

    /// Ids of at most so many line feeds and nothing else.
    pub(super) fn line_feeds(&self, most: usize) -> impl Iterator<Item = u32> + '_ {
        self.line_feeds
            .iter()
            .filter(move |(_, len)| *len <= most)
            .map(|(id, _)| *id)
    }
}

/// Bounds for one request: about 100 ms to compile, tens of ms a step at worst, 100 MB of lexer states.
fn limits() -> ParserLimits {
    ParserLimits {
        max_lexer_states: 50_000,
        verbose_errors: false,
        ..ParserLimits::default()
    }
}
