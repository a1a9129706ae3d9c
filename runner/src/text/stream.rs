//! A request's ids to the text and ids it streams.
//!
//! Invariants:
//! - The text handed out, put together, is [`String::from_utf8_lossy`] of all visible bytes, cut before the stop string
//!   that completes first; it's the same however ids were grouped into pushes, and never holds part of a stop string.
//! - Every id is handed out once, in order, in the chunk that has its text: a chunk's text is exactly the text of its
//!   ids, but for the chunk that a stop string cuts. What isn't decided yet is held together with its ids.
//! - At a stop, an id with some text before the cut is handed out; ids wholly inside or after the stop string are not.

use std::collections::VecDeque;
use std::sync::Arc;

use super::detokenizer::Utf8Decoder;
use super::eos::EosSet;
use super::stop::{StopMatch, StopScanner, StopSet};
use super::tokenizer::Tokenizer;

/// Text ready to be sent, with the ids it comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Chunk<T = ()> {
    /// Valid UTF-8; empty where the ids are hidden ones only.
    pub text: String,
    /// The ids that `text` comes from, in order; never empty.
    pub tokens: Vec<u32>,
    /// What was pushed with each of `tokens`.
    pub data: Vec<T>,
}

/// What one push has settled.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Push<T = ()> {
    /// What can be sent now; none where everything is still held.
    pub chunk: Option<Chunk<T>>,
    /// The stop string that ended the stream, if one did. Nothing may be pushed after it.
    pub stopped: Option<String>,
}

/// One pushed id, not yet handed out.
#[derive(Debug, Clone)]
struct Held<T> {
    id: u32,
    data: T,
    /// Offset in the whole text of the character that the id's first byte belongs to.
    start: usize,
    /// Whether the id contributes no bytes.
    silent: bool,
    /// Offset in the whole text at which the id's own text ends; none while its last character is incomplete.
    end: Option<usize>,
}

/// The text side of one request: pushes ids, hands out text. `T` is anything that has to stay aligned with the ids,
/// such as their log-probabilities.
#[derive(Debug, Clone)]
pub struct TextStream<T = ()> {
    tokenizer: Arc<Tokenizer>,
    hidden: Arc<EosSet>,
    decoder: Utf8Decoder,
    scanner: StopScanner,
    /// Decoded text that hasn't been handed out.
    text: String,
    /// Offset in the whole text of the start of `text`.
    base: usize,
    held: VecDeque<Held<T>>,
    delivered: usize,
    done: bool,
}

impl<T> TextStream<T> {
    /// A stream at the start of a generation.
    ///
    /// `hidden` are ids whose text is hidden besides the tokenizer's special tokens: the end-of-generation ids, which
    /// some conversions forget to mark and which are ordinary tokens where they are ignored.
    #[must_use]
    pub fn new(tokenizer: Arc<Tokenizer>, stops: Arc<StopSet>, hidden: Arc<EosSet>) -> Self {
        Self {
            tokenizer,
            hidden,
            decoder: Utf8Decoder::default(),
            scanner: StopScanner::new(stops),
            text: String::new(),
            base: 0,
            held: VecDeque::new(),
            delivered: 0,
            done: false,
        }
    }

    /// Takes the next generated id. After a stop, or after [`TextStream::finish`], pushes are ignored.
    pub fn push(&mut self, id: u32, data: T) -> Push<T> {
        self.push_run([(id, data)])
    }

    /// Takes a run of generated ids, up to the first that completes a stop string; what is settled comes out as one
    /// chunk, equal to the chunks of single pushes put together.
    pub fn push_run(&mut self, run: impl IntoIterator<Item = (u32, T)>) -> Push<T> {
        for (id, data) in run {
            if let Some(found) = self.take(id, data) {
                return self.cut(found);
            }
        }
        Push {
            chunk: self.release(),
            stopped: None,
        }
    }

    /// Ends the stream: flushes an incomplete character as U+FFFD and hands out everything still held. The flushed
    /// character can itself complete a stop string.
    pub fn finish(&mut self) -> Push<T> {
        if self.done {
            return Push {
                chunk: None,
                stopped: None,
            };
        }
        let before = self.text.len();
        self.decoder.finish(&mut self.text);
        let flushed = self.scanner.scan(&self.text[before..]);
        if let Some(found) = flushed {
            return self.cut(StopMatch {
                end: before + found.end,
                ..found
            });
        }
        self.done = true;
        let text = std::mem::take(&mut self.text);
        let count = self.held.len();
        Push {
            chunk: self.hand_out(text, count),
            stopped: None,
        }
    }

    /// How many ids have been handed out: after the end, how many count as generated. Caches rest after this many.
    #[must_use]
    pub fn kept(&self) -> usize {
        self.delivered
    }

    /// How many pushed ids are still held, their fate undecided.
    #[must_use]
    pub fn held(&self) -> usize {
        self.held.len()
    }

    /// Records one id; returns a stop that it completes, `end` counted from the start of `self.text`.
    fn take(&mut self, id: u32, data: T) -> Option<StopMatch> {
        if self.done {
            return None;
        }
        let visible = !self.tokenizer.is_special(id) && !self.hidden.contains(id);
        let bytes = if visible {
            self.tokenizer.token_bytes(id).unwrap_or_default()
        } else {
            &[]
        };
        let before = self.text.len();
        let first = self.decoder.push(bytes, &mut self.text);
        let end = self.decoder.is_settled().then_some(self.base + self.text.len());
        self.held.push_back(Held {
            id,
            data,
            start: self.base + before + first,
            silent: bytes.is_empty(),
            end,
        });
        let found = self.scanner.scan(&self.text[before..])?;
        Some(StopMatch {
            end: before + found.end,
            ..found
        })
    }

    /// Hands out the longest run of ids whose text is decided and ends where a character ends.
    fn release(&mut self) -> Option<Chunk<T>> {
        if self.done {
            return None;
        }
        let decided = self.base + self.text.len() - self.scanner.held();
        let count = self
            .held
            .iter()
            .rposition(|held| held.end.is_some_and(|end| end <= decided))?
            + 1;
        let end = self.held[count - 1].end?;
        let text = self.text.drain(..end - self.base).collect();
        self.base = end;
        self.hand_out(text, count)
    }

    fn cut(&mut self, found: StopMatch) -> Push<T> {
        self.done = true;
        let at = found.end - found.len;
        let mut text = std::mem::take(&mut self.text);
        text.truncate(at);
        let cut = self.base + at;
        let before = |held: &Held<T>| held.start < cut || (held.silent && held.start == cut);
        let count = self.held.iter().take_while(|held| before(held)).count();
        let chunk = self.hand_out(text, count);
        self.held.clear();
        let stopped = self.scanner.set().text(found.index).map(str::to_owned);
        Push { chunk, stopped }
    }

    fn hand_out(&mut self, text: String, count: usize) -> Option<Chunk<T>> {
        if count == 0 {
            return None;
        }
        self.delivered += count;
        let (tokens, data) = self.held.drain(..count).map(|held| (held.id, held.data)).unzip();
        Some(Chunk { text, tokens, data })
    }
}

#[cfg(test)]
#[path = "stream_tests.rs"]
mod tests;
