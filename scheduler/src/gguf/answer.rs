//! From llama-server's stream to the protocol's events.
//!
//! Invariant: `eval_count` is exactly the number of ids delivered; the id that ends a request is not delivered; and a stream
//! that stops without its last event is a failure, whatever arrived before.

use lookahead_protocol::event::{
    Done, DoneReason, DraftStats, Prefill, Prompt, Token, TokenLogprob, TopLogprob,
};
use lookahead_protocol::Event;
use serde_json::Value;

/// One answer while it is streamed.
#[derive(Debug)]
pub struct Answer {
    id: String,
    progress: bool,
    /// `num_predict` 0: the server generates one token all the same, which is dropped.
    silent: bool,
    prompt_tokens: u64,
    prompt_told: bool,
    /// Ids that the server has counted so far.
    predicted: u64,
    delivered: u64,
    /// The last id if it came without text: the one that ends the answer, or a hidden one.
    held: Option<Token>,
}

impl Answer {
    /// For a request with a prompt of so many tokens.
    pub fn new(id: String, prompt_tokens: u64, progress: bool, silent: bool) -> Self {
        Self {
            id,
            progress,
            silent,
            prompt_tokens,
            prompt_told: false,
            predicted: 0,
            delivered: 0,
            held: None,
        }
    }

    /// How many ids were delivered.
    pub fn delivered(&self) -> u64 {
        self.delivered
    }

    /// Takes one event of the stream; the last one gives the request's `done`, of which the total and the queue time are still
    /// to be set. `ids_of` gives a text's ids; it is asked where the server sent fewer than it counted.
    pub fn take(
        &mut self,
        data: &Value,
        ids_of: impl FnOnce(&str) -> Option<Vec<u32>>,
        mut emit: impl FnMut(Event),
    ) -> Option<Done> {
        if let Some(progress) = data.get("prompt_progress") {
            let cached = progress.get("cache").and_then(Value::as_u64).unwrap_or(0);
            self.tell_prompt(cached, &mut emit);
            if self.progress {
                let done = progress.get("processed").and_then(Value::as_u64).unwrap_or(0);
                let total = progress
                    .get("total")
                    .and_then(Value::as_u64)
                    .unwrap_or(self.prompt_tokens);
                emit(Event::Prefill(Prefill {
                    id: self.id.clone(),
                    done,
                    total,
                }));
            }
            // The other fields of such an event are fillers.
            return None;
        }
        let last = data.get("stop").and_then(Value::as_bool) == Some(true);
        let cached = data
            .pointer("/timings/cache_n")
            .and_then(Value::as_u64)
            .unwrap_or(0);
        self.tell_prompt(cached, &mut emit);
        if last {
            return Some(self.finish(data, emit));
        }
        let counted = data
            .get("tokens_predicted")
            .and_then(Value::as_u64)
            .unwrap_or(self.predicted + 1);
        let news = counted.saturating_sub(self.predicted);
        self.predicted = counted;
        let text = data
            .get("content")
            .and_then(Value::as_str)
            .unwrap_or_default()
            .to_owned();
        let mut tokens = ids(data);
        if (tokens.len() as u64) < news && !text.is_empty() {
            // A character made of several ids arrives with only the last one.
            if let Some(all) = ids_of(&text).filter(|all| all.len() as u64 == news && all.ends_with(&tokens))
            {
                tokens = all;
            }
        }
        let logprobs = data
            .get("completion_probabilities")
            .and_then(Value::as_array)
            .map(|list| logprobs(list));
        let token = Token {
            id: self.id.clone(),
            text,
            tokens,
            logprobs,
        };
        self.release(&mut emit);
        if token.text.is_empty() {
            self.held = Some(token);
        } else {
            self.deliver(token, &mut emit);
        }
        None
    }

    fn tell_prompt(&mut self, cached: u64, emit: &mut impl FnMut(Event)) {
        if !self.prompt_told {
            self.prompt_told = true;
            emit(Event::Prompt(Prompt {
                id: self.id.clone(),
                tokens: self.prompt_tokens,
                cached,
            }));
        }
    }

    fn release(&mut self, emit: &mut impl FnMut(Event)) {
        if let Some(held) = self.held.take() {
            self.deliver(held, emit);
        }
    }

    fn deliver(&mut self, token: Token, emit: &mut impl FnMut(Event)) {
        if self.silent || (token.tokens.is_empty() && token.text.is_empty()) {
            return;
        }
        self.delivered += token.tokens.len() as u64;
        emit(Event::Token(token));
    }

    fn finish(&mut self, data: &Value, mut emit: impl FnMut(Event)) -> Done {
        let stop_type = data.get("stop_type").and_then(Value::as_str).unwrap_or_default();
        if stop_type == "eos" {
            self.held = None;
        }
        self.release(&mut emit);
        let text = data.get("content").and_then(Value::as_str).unwrap_or_default();
        if !text.is_empty() {
            let token = Token {
                id: self.id.clone(),
                text: text.to_owned(),
                tokens: ids(data),
                logprobs: None,
            };
            self.deliver(token, &mut emit);
        }
        let counted = data
            .get("tokens_predicted")
            .and_then(Value::as_u64)
            .unwrap_or(self.predicted);
        if stop_type == "limit" && counted > self.predicted && text.is_empty() {
            // The budget ended inside a character, whose bytes the server keeps to itself.
            let tail = Token {
                id: self.id.clone(),
                text: "\u{fffd}".to_owned(),
                tokens: Vec::new(),
                logprobs: None,
            };
            self.deliver(tail, &mut emit);
        }
        let nanoseconds = |name: &str| {
            let milliseconds = data
                .pointer(&format!("/timings/{name}"))
                .and_then(Value::as_f64)
                .unwrap_or(0.0);
            (milliseconds.max(0.0) * 1e6) as u64
        };
        let count = |name: &str| {
            data.pointer(&format!("/timings/{name}"))
                .and_then(Value::as_u64)
                .unwrap_or(0)
        };
        let stop = data
            .get("stopping_word")
            .and_then(Value::as_str)
            .filter(|word| !word.is_empty());
        let by_limit = self.silent || !matches!(stop_type, "eos" | "word");
        Done {
            id: self.id.clone(),
            done_reason: if by_limit {
                DoneReason::Length
            } else {
                DoneReason::Stop
            },
            stop: stop
                .filter(|_| stop_type == "word" && !self.silent)
                .map(str::to_owned),
            total_duration: 0,
            queue_duration: 0,
            prompt_eval_count: self.prompt_tokens,
            cached_count: count("cache_n"),
            prompt_eval_duration: nanoseconds("prompt_ms"),
            eval_count: self.delivered,
            eval_duration: nanoseconds("predicted_ms"),
            // Rounds and figures by position are nowhere to be had, so they are left out rather than invented.
            draft: DraftStats {
                proposed: count("draft_n"),
                accepted: count("draft_n_accepted"),
                ..DraftStats::default()
            },
        }
    }
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
mod tests {
    use super::*;
    use serde_json::json;

    fn play(silent: bool, stream: &[Value]) -> (Vec<Event>, Option<Done>) {
        let mut answer = Answer::new("a".to_owned(), 5, false, silent);
        let mut events = Vec::new();
        let mut ending = None;
        for data in stream {
            let ids_of = |text: &str| (text == " \u{1f984}").then(|| vec![1, 2, 3]);
            ending = answer.take(data, ids_of, |event| events.push(event));
        }
        (events, ending)
    }

    fn piece(text: &str, ids: &[u32], predicted: u64) -> Value {
        json!({"index": 0, "content": text, "tokens": ids, "stop": false, "tokens_predicted": predicted})
    }

    fn end(kind: &str, predicted: u64) -> Value {
        json!({"content": "", "tokens": [], "stop": true, "stop_type": kind, "stopping_word": "", "tokens_predicted": predicted,
            "timings": {"cache_n": 2, "prompt_ms": 1.5, "predicted_ms": 3.0, "draft_n": 8, "draft_n_accepted": 6}})
    }

    fn tokens(events: &[Event]) -> Vec<(&str, &[u32])> {
        events
            .iter()
            .filter_map(|event| match event {
                Event::Token(token) => Some((token.text.as_str(), token.tokens.as_slice())),
                _ => None,
            })
            .collect()
    }

    #[test]
    fn the_id_that_ends_the_answer_is_neither_delivered_nor_counted() {
        let (events, ending) = play(false, &[piece("1", &[16], 1), piece("", &[99], 2), end("eos", 2)]);
        assert_eq!(tokens(&events), [("1", [16].as_slice())]);
        let done = ending.unwrap();
        assert_eq!((done.eval_count, done.done_reason), (1, DoneReason::Stop));
        assert_eq!(
            (done.cached_count, done.prompt_eval_duration, done.eval_duration),
            (2, 1_500_000, 3_000_000)
        );
        assert_eq!(
            (done.draft.proposed, done.draft.accepted, done.draft.rounds),
            (8, 6, None)
        );
    }

    #[test]
    fn a_hidden_id_inside_the_answer_is_delivered_without_text() {
        let (events, _) = play(
            false,
            &[piece("", &[98], 1), piece("x", &[5], 2), end("limit", 2)],
        );
        assert_eq!(tokens(&events), [("", [98].as_slice()), ("x", [5].as_slice())]);
    }

    #[test]
    fn all_ids_of_a_character_are_delivered() {
        let (events, ending) = play(false, &[piece(" \u{1f984}", &[3], 3), end("limit", 3)]);
        assert_eq!(tokens(&events), [(" \u{1f984}", [1, 2, 3].as_slice())]);
        assert_eq!(ending.unwrap().eval_count, 3);
    }

    #[test]
    fn an_incomplete_character_at_the_end_is_shown_as_such() {
        let (events, ending) = play(false, &[piece("x", &[5], 1), end("limit", 3)]);
        assert_eq!(
            tokens(&events),
            [("x", [5].as_slice()), ("\u{fffd}", [].as_slice())]
        );
        assert_eq!(ending.unwrap().eval_count, 1);
    }

    #[test]
    fn num_predict_0_delivers_nothing() {
        let (events, ending) = play(true, &[piece("1", &[16], 1), end("limit", 1)]);
        assert!(tokens(&events).is_empty());
        let done = ending.unwrap();
        assert_eq!((done.eval_count, done.done_reason), (0, DoneReason::Length));
    }

    #[test]
    fn fillers_in_progress_events_are_ignored() {
        let progress = json!({"content": "", "tokens": [0], "stop": false,
            "prompt_progress": {"total": 5, "cache": 3, "processed": 5, "time_ms": 1}});
        let (events, ending) = play(false, &[progress, piece("1", &[16], 1), end("limit", 1)]);
        assert!(matches!(&events[0], Event::Prompt(prompt) if prompt.cached == 3 && prompt.tokens == 5));
        assert_eq!(ending.unwrap().eval_count, 1);
    }

    #[test]
    fn a_stop_string_is_named() {
        let mut last = end("word", 2);
        last["stopping_word"] = json!("END");
        let (_, ending) = play(false, &[piece("x", &[5], 1), last]);
        assert_eq!(ending.unwrap().stop.as_deref(), Some("END"));
    }
}
