//! From llama-server's stream to the protocol's events.
//!
//! Invariant: `eval_count` is exactly the number of ids delivered; the id that ends a request is not delivered, and no id is that
//! lies wholly in a stop string; and a stream that stops without its last event is a failure, whatever arrived before.

use lookahead_protocol::event::{
    Done, DoneReason, DraftStats, Prefill, Prompt, Token, TokenLogprob, TopLogprob,
};
use lookahead_protocol::Event;
use serde_json::Value;

use super::rounds::Rounds;

/// What the server can be asked about ids and text while it streams.
pub(super) trait Words {
    /// The ids of a text.
    fn ids_of(&self, text: &str) -> Option<Vec<u32>>;
    /// The text of ids.
    fn text_of(&self, ids: &[u32]) -> Option<String>;
}

/// One answer while it is streamed.
#[derive(Debug)]
pub(super) struct Answer {
    id: String,
    progress: bool,
    /// `num_predict` 0: the server generates one token all the same, which is dropped.
    silent: bool,
    stops: Vec<String>,
    prompt_tokens: u64,
    prompt_told: bool,
    cached: u64,
    /// Ids that the server has counted so far.
    predicted: u64,
    delivered: u64,
    /// Ids that came without text: hidden ones, the one that ends the answer, and those whose text the server keeps back
    /// because a stop string may begin in it.
    held: Vec<Token>,
    /// Text that came while ids were held: theirs. Its own id may be the one that ends the answer.
    late: Option<Token>,
    /// How many ids the server has counted but not sent, of text that is still to come.
    lacking: u64,
    rounds: Rounds,
    prompt_duration: u64,
    duration: u64,
}

/// What an answer is to.
#[derive(Debug, Clone, Default)]
pub(super) struct Asked {
    pub(super) id: String,
    pub(super) prompt_tokens: u64,
    /// Ids that the server may generate.
    pub(super) budget: u64,
    pub(super) stops: Vec<String>,
    pub(super) progress: bool,
    /// `num_predict` 0.
    pub(super) silent: bool,
}

impl Answer {
    pub(super) fn new(asked: Asked) -> Self {
        Self {
            id: asked.id,
            progress: asked.progress,
            silent: asked.silent,
            stops: asked.stops,
            prompt_tokens: asked.prompt_tokens,
            prompt_told: false,
            cached: 0,
            predicted: 0,
            delivered: 0,
            held: Vec::new(),
            late: None,
            lacking: 0,
            rounds: Rounds::new(asked.budget),
            prompt_duration: 0,
            duration: 0,
        }
    }

    /// Takes one event of the stream; the last one gives the request's `done`, of which the total and the queue time are still
    /// to be set.
    pub(super) fn take(
        &mut self,
        data: &Value,
        words: &dyn Words,
        mut emit: impl FnMut(Event),
    ) -> Option<Done> {
        if let Some(progress) = data.get("prompt_progress") {
            let figure = |name: &str| progress.get(name).and_then(Value::as_u64);
            self.tell_prompt(figure("cache").unwrap_or(0), &mut emit);
            if self.progress {
                emit(Event::Prefill(Prefill {
                    id: self.id.clone(),
                    done: figure("processed").unwrap_or(0),
                    total: figure("total").unwrap_or(self.prompt_tokens),
                }));
            }
            // The other fields of such an event are fillers.
            return None;
        }
        self.tell_prompt(timing(data, "cache_n"), &mut emit);
        let is_last = data.get("stop").and_then(Value::as_bool) == Some(true);
        let otherwise = if is_last {
            self.predicted
        } else {
            self.predicted + 1
        };
        let counted = data
            .get("tokens_predicted")
            .and_then(Value::as_u64)
            .unwrap_or(otherwise);
        self.rounds
            .see(counted, timing(data, "draft_n"), timing(data, "draft_n_accepted"));
        if data.get("timings").is_some() {
            self.cached = timing(data, "cache_n");
            self.prompt_duration = nanoseconds(data, "prompt_ms");
            self.duration = nanoseconds(data, "predicted_ms");
        }
        if is_last {
            return Some(self.finish(data, counted, words, emit));
        }
        let news = counted.saturating_sub(self.predicted);
        self.predicted = counted;
        if let Some(late) = self.late.take() {
            self.deliver_with_held(late, Some(words), &mut emit);
        }
        let token = self.token(data);
        // A character made of several ids arrives with only the last one.
        self.lacking += news.saturating_sub(token.tokens.len() as u64);
        if token.text.is_empty() {
            self.held.push(token);
        } else if self.held.is_empty() || self.stops.is_empty() {
            self.deliver_with_held(token, Some(words), &mut emit);
        } else {
            self.late = Some(token);
        }
        None
    }

    /// The `done` of an answer that was cancelled, after what was held back only for want of the next event.
    pub(super) fn cancelled(mut self, mut emit: impl FnMut(Event)) -> Done {
        if let Some(late) = self.late.take() {
            self.deliver_with_held(late, None, &mut emit);
        }
        self.done(DoneReason::Cancelled, None)
    }

    fn token(&self, data: &Value) -> Token {
        let text = data
            .get("content")
            .and_then(Value::as_str)
            .unwrap_or_default()
            .to_owned();
        let logprobs = data
            .get("completion_probabilities")
            .and_then(Value::as_array)
            .map(|list| logprobs(list));
        Token {
            id: self.id.clone(),
            text,
            tokens: ids(data),
            logprobs,
        }
    }

    fn tell_prompt(&mut self, cached: u64, emit: &mut impl FnMut(Event)) {
        if !self.prompt_told {
            self.prompt_told = true;
            self.cached = cached;
            emit(Event::Prompt(Prompt {
                id: self.id.clone(),
                tokens: self.prompt_tokens,
                cached,
            }));
        }
    }

    /// Delivers the ids that were held together with the text that is theirs. Ids that the server didn't send are those that
    /// the text has more, where it has exactly as many as the server counted.
    fn deliver_with_held(&mut self, token: Token, words: Option<&dyn Words>, emit: &mut impl FnMut(Event)) {
        let mut held = std::mem::take(&mut self.held).into_iter();
        let mut whole = match held.next() {
            None => token,
            Some(mut first) => {
                held.for_each(|next| first.merge(next));
                first.merge(token);
                first
            }
        };
        let lacking = std::mem::take(&mut self.lacking);
        if lacking > 0 && !whole.text.is_empty() && whole.logprobs.is_none() {
            let count = whole.tokens.len() as u64 + lacking;
            let is_whole = |all: &Vec<u32>| all.len() as u64 == count && all.last() == whole.tokens.last();
            if let Some(all) = words.and_then(|words| words.ids_of(&whole.text)).filter(is_whole) {
                whole.tokens = all;
            }
        }
        self.deliver(whole, emit);
    }

    fn deliver(&mut self, token: Token, emit: &mut impl FnMut(Event)) {
        if self.silent || (token.tokens.is_empty() && token.text.is_empty()) {
            return;
        }
        self.delivered += token.tokens.len() as u64;
        emit(Event::Token(token));
    }

    fn finish(&mut self, data: &Value, counted: u64, words: &dyn Words, mut emit: impl FnMut(Event)) -> Done {
        let stop_type = data.get("stop_type").and_then(Value::as_str).unwrap_or_default();
        let mut last = self.late.take().unwrap_or_else(|| self.text_only(String::new()));
        match stop_type {
            // Where it came without an event there is nothing to drop.
            "eos" if counted > self.predicted => {}
            "eos" => {
                // The last id of all ended the answer.
                let ending = if last.tokens.is_empty() {
                    self.held.pop().unwrap_or_else(|| self.text_only(String::new()))
                } else {
                    std::mem::replace(&mut last, self.text_only(String::new()))
                };
                last.text = ending.text;
            }
            "word" => self.cut(&mut last, words),
            _ if last.text.is_empty() => last.text = self.kept_back(words),
            _ => {}
        }
        self.deliver_with_held(last, Some(words), &mut emit);
        if counted > self.predicted {
            // The answer ended inside a character, whose bytes the server keeps to itself.
            self.deliver(self.text_only("\u{fffd}".to_owned()), &mut emit);
        }
        let word = data
            .get("stopping_word")
            .and_then(Value::as_str)
            .filter(|word| !word.is_empty() && stop_type == "word" && !self.silent);
        let is_stop = matches!(stop_type, "eos" | "word") && !self.silent;
        let reason = if is_stop {
            DoneReason::Stop
        } else {
            DoneReason::Length
        };
        self.done(reason, word.map(str::to_owned))
    }

    fn text_only(&self, text: String) -> Token {
        Token {
            id: self.id.clone(),
            text,
            tokens: Vec::new(),
            logprobs: None,
        }
    }

    /// At a stop string: keeps of the held ids and of `last` those that begin before the cut, which is where `last`'s text ends.
    fn cut(&mut self, last: &mut Token, words: &dyn Words) {
        let text = std::mem::take(&mut last.text);
        let own = std::mem::replace(last, self.text_only(text));
        let mut at = 0;
        let mut kept = Vec::new();
        for token in std::mem::take(&mut self.held).into_iter().chain([own]) {
            let length = words.text_of(&token.tokens).map_or(0, |text| text.len());
            if token.tokens.is_empty() || (length > 0 && at >= last.text.len()) {
                break;
            }
            at += length;
            kept.push(token);
        }
        self.held = kept;
    }

    /// At the budget's end: the text of the held ids where the server kept it back because a stop string may begin in it. It
    /// doesn't send it any more.
    fn kept_back(&self, words: &dyn Words) -> String {
        if self.stops.is_empty() || self.held.is_empty() {
            return String::new();
        }
        let ids: Vec<u32> = self
            .held
            .iter()
            .flat_map(|token| &token.tokens)
            .copied()
            .collect();
        let text = words.text_of(&ids).unwrap_or_default();
        let may_stop = |stop: &String| {
            let begins = |at: usize| stop.is_char_boundary(at) && text.ends_with(&stop[..at]);
            (1..stop.len()).any(begins)
        };
        if self.stops.iter().any(may_stop) {
            text
        } else {
            String::new()
        }
    }

    fn done(&self, reason: DoneReason, stop: Option<String>) -> Done {
        Done {
            id: self.id.clone(),
            done_reason: reason,
            stop,
            total_duration: 0,
            queue_duration: 0,
            prompt_eval_count: self.prompt_tokens,
            cached_count: self.cached,
            prompt_eval_duration: self.prompt_duration,
            eval_count: self.delivered,
            eval_duration: self.duration,
            draft: if self.silent {
                DraftStats::none()
            } else {
                self.rounds.stats()
            },
        }
    }
}

fn timing(data: &Value, name: &str) -> u64 {
    let timings = data.get("timings");
    timings.and_then(|it| it.get(name)?.as_u64()).unwrap_or(0)
}

fn nanoseconds(data: &Value, name: &str) -> u64 {
    let timings = data.get("timings");
    let milliseconds = timings.and_then(|it| it.get(name)?.as_f64()).unwrap_or(0.0);
    (milliseconds.max(0.0) * 1e6) as u64
}

fn ids(data: &Value) -> Vec<u32> {
    let list = data.get("tokens").and_then(Value::as_array);
    list.into_iter()
        .flatten()
        .filter_map(|id| u32::try_from(id.as_u64()?).ok())
        .collect()
}

fn logprobs(list: &[Value]) -> Vec<TokenLogprob> {
    let text = |entry: &Value| {
        entry
            .get("token")
            .and_then(Value::as_str)
            .unwrap_or_default()
            .to_owned()
    };
    let bytes = |entry: &Value| -> Vec<u8> {
        let list = entry.get("bytes").and_then(Value::as_array);
        list.into_iter()
            .flatten()
            .filter_map(|byte| u8::try_from(byte.as_u64()?).ok())
            .collect()
    };
    let logprob = |entry: &Value| {
        entry
            .get("logprob")
            .and_then(Value::as_f64)
            .unwrap_or(f64::NEG_INFINITY) as f32
    };
    list.iter()
        .map(|entry| TokenLogprob {
            token: text(entry),
            bytes: bytes(entry),
            logprob: logprob(entry),
            top: entry
                .get("top_logprobs")
                .and_then(Value::as_array)
                .into_iter()
                .flatten()
                .map(|entry| TopLogprob {
                    token: text(entry),
                    bytes: bytes(entry),
                    logprob: logprob(entry),
                })
                .collect(),
        })
        .collect()
}

#[cfg(test)]
#[path = "answer_tests.rs"]
mod tests;
