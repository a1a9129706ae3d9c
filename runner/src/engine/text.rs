//! Everything about a model that is text: tokenizer, template, end tokens, generation defaults.
//!
//! Invariant: immutable once loaded and shared by all threads; nothing here needs the weights.

use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use serde_json::Value;

use super::media::PictureRules;
use crate::model::config::ModelConfig;
use crate::sample::constraint::ConstraintFactory;
use crate::sample::GenerationDefaults;
use crate::text::{ChatTemplate, EosSet, TextError, Tokenizer};

/// See the module's text.
#[derive(Debug)]
pub struct TextStack {
    /// Tokenizer.
    pub tokenizer: Arc<Tokenizer>,
    /// Chat template, or the reason why there is none.
    pub template: ChatTemplate,
    /// Ids that end a generation.
    pub eos: Arc<EosSet>,
    /// Builds constraints on the output.
    pub constraints: ConstraintFactory,
    /// Sampling values of the checkpoint.
    pub defaults: GenerationDefaults,
    /// Most tokens of prompt and answer together.
    pub context_length: usize,
    /// Rows of the vocabulary projection.
    pub vocab_size: usize,
    /// How pictures are taken; `None` without a vision tower.
    pub pictures: Option<PictureRules>,
}

impl TextStack {
    /// Reads a model directory's text files.
    ///
    /// # Errors
    /// The tokenizer is missing or damaged, or a config file is.
    pub fn load(dir: &Path, config: &ModelConfig) -> Result<Self, TextError> {
        let tokenizer = Arc::new(Tokenizer::load(dir)?);
        let eos = Arc::new(EosSet::load(dir, &tokenizer)?);
        let template = ChatTemplate::load(dir, &tokenizer);
        let defaults = match std::fs::read(dir.join("generation_config.json")) {
            Ok(bytes) => {
                // A damaged file has been reported by `EosSet::load` already.
                let value: Value = serde_json::from_slice(&bytes).unwrap_or(Value::Null);
                let (defaults, warnings) = GenerationDefaults::from_json(&value);
                for warning in warnings {
                    tracing::warn!("{warning}");
                }
                defaults
            }
            Err(_) => GenerationDefaults::default(),
        };
        let set = EosSet::clone(&eos);
        let constraints = ConstraintFactory::new(Arc::clone(&tokenizer), set, config.vocab_size);
        Ok(Self {
            constraints,
            tokenizer,
            template,
            eos,
            defaults,
            context_length: config.context_length,
            vocab_size: config.vocab_size,
            pictures: None,
        })
    }
}

/// A value that one thread provides and others wait for.
#[derive(Debug)]
pub struct Awaited<T> {
    state: Mutex<State<T>>,
    changed: Condvar,
}

#[derive(Debug)]
enum State<T> {
    Waiting,
    There(Arc<T>),
    Never,
}

impl<T> Default for Awaited<T> {
    fn default() -> Self {
        Self {
            state: Mutex::new(State::Waiting),
            changed: Condvar::new(),
        }
    }
}

impl<T> Awaited<T> {
    /// Provides the value.
    pub fn provide(&self, value: Arc<T>) {
        self.set(State::There(value));
    }

    /// Tells that it won't come; no effect once it is there.
    pub fn give_up(&self) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if matches!(*state, State::Waiting) {
            *state = State::Never;
        }
        self.changed.notify_all();
    }

    fn set(&self, new: State<T>) {
        *self.state.lock().unwrap_or_else(PoisonError::into_inner) = new;
        self.changed.notify_all();
    }

    /// Waits for it; `None` if it never comes.
    pub fn get(&self) -> Option<Arc<T>> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            match &*state {
                State::Waiting => state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
                State::There(value) => return Some(Arc::clone(value)),
                State::Never => return None,
            }
        }
    }
}
