//! Generated ids to `token` events, and the conditions that end a generation.
//!
//! Invariant: an id is judged (end token, stop string, budget) in the order of generation, and nothing behind the first
//! terminator counts, however many ids a round yields.

use std::sync::Arc;

use lookahead_protocol::event::{Token, TokenLogprob, TopLogprob};
use lookahead_protocol::Event;

use super::job::Job;
use super::text::TextStack;
use crate::host::outbox::Outbox;
use crate::sample::TokenScores;
use crate::text::{Chunk, EosSet, Push, TextStream, Tokenizer};

/// Why a generation ends.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Finish {
    /// The model ended it, or this stop string did.
    Stop(Option<String>),
    /// The budget is used up.
    Length,
    /// The host wanted it.
    Cancelled,
}

/// The text side of a running request.
#[derive(Debug)]
pub struct Emitter {
    id: String,
    stream: TextStream<Option<TokenLogprob>>,
    eos: Arc<EosSet>,
    ignore_eos: bool,
    budget: usize,
    taken: usize,
    tokenizer: Arc<Tokenizer>,
    /// Rivals to list with each log-probability, where wanted.
    logprobs: Option<usize>,
    pending: Option<Chunk<Option<TokenLogprob>>>,
}

impl Emitter {
    /// The emitter of a job.
    pub fn new(job: &Job, text: &TextStack) -> Self {
        Self {
            id: job.id.clone(),
            stream: TextStream::new(
                Arc::clone(&text.tokenizer),
                Arc::clone(&job.stops),
                Arc::clone(&text.eos),
            ),
            eos: Arc::clone(&text.eos),
            ignore_eos: job.options.ignore_eos,
            budget: job.budget,
            taken: 0,
            tokenizer: Arc::clone(&text.tokenizer),
            logprobs: job.logprobs,
            pending: None,
        }
    }

    /// Ids that may still be generated.
    pub fn remaining(&self) -> usize {
        self.budget - self.taken
    }

    /// Ids taken so far, those whose fate is undecided included.
    pub fn taken(&self) -> usize {
        self.taken
    }

    /// Ids delivered.
    pub fn delivered(&self) -> usize {
        self.stream.kept()
    }

    /// Judges the next id. What became sendable waits for [`Emitter::send`].
    pub fn take(&mut self, token: u32, scores: Option<&TokenScores>) -> Option<Finish> {
        if !self.ignore_eos && self.eos.contains(token) {
            return Some(Finish::Stop(None));
        }
        self.taken += 1;
        let logprob = scores.map(|scores| self.logprob(scores));
        let push = self.stream.push(token, logprob);
        if let Some(stop) = self.keep(push) {
            return Some(Finish::Stop(Some(stop)));
        }
        (self.taken >= self.budget).then_some(Finish::Length)
    }

    /// How many rivals to list with each log-probability; `None` where none are wanted.
    pub fn logprobs(&self) -> Option<usize> {
        self.logprobs
    }

    fn logprob(&self, scores: &TokenScores) -> TokenLogprob {
        let bytes = |id: u32| self.tokenizer.token_bytes(id).unwrap_or_default().to_vec();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let top = scores.top.iter().map(|rival| {
            let bytes = bytes(rival.token);
            TopLogprob {
                token: text(&bytes),
                bytes,
                logprob: rival.logprob,
            }
        });
        let own = bytes(scores.chosen.token);
        TokenLogprob {
            token: text(&own),
            bytes: own,
            logprob: scores.chosen.logprob,
            top: top.collect(),
        }
    }

    fn keep(&mut self, push: Push<Option<TokenLogprob>>) -> Option<String> {
        match (&mut self.pending, push.chunk) {
            (Some(waiting), Some(chunk)) => {
                waiting.text.push_str(&chunk.text);
                waiting.tokens.extend(chunk.tokens);
                waiting.data.extend(chunk.data);
            }
            (None, Some(chunk)) => self.pending = Some(chunk),
            (_, None) => {}
        }
        push.stopped
    }

    /// Sends what is sendable.
    pub fn send(&mut self, outbox: &Outbox) {
        if let Some(chunk) = self.pending.take() {
            let logprobs = self.logprobs.map(|_| chunk.data.into_iter().flatten().collect());
            outbox.push(Event::Token(Token {
                id: self.id.clone(),
                text: chunk.text,
                tokens: chunk.tokens,
                logprobs,
            }));
        }
    }

    /// Flushes what was held back. The flushed tail can complete a stop string, which is returned.
    pub fn finish(&mut self, outbox: &Outbox) -> Option<String> {
        let push = self.stream.finish();
        let stop = self.keep(push);
        self.send(outbox);
        stop
    }
}
