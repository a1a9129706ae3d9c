//! A runner with a model of its prefix cache beside it, kept as a naive list of restore points.
//!
//! Invariant: the list follows the documented rules alone (where states are captured, that a match needs the token after it
//! too), so a runner that finds more or less than the list is at fault.

use std::time::{Duration, Instant};

use lookahead_tests::process::{Answer, Process};
use lookahead_tests::requests;
use serde_json::{json, Value};

/// The id that opens a turn in the trained model's template.
const TURN: u64 = 4084;

/// How tokens are drawn; both ways are deterministic, drafting or not.
pub const SAMPLINGS: [&str; 2] = ["greedy", "coupled"];

/// The options of a sampling, for exactly `n` tokens.
pub fn options(sampling: &str, n: usize) -> Value {
    match sampling {
        "greedy" => json!({"temperature": 0, "num_predict": n, "ignore_eos": true}),
        _ => json!({"temperature": 0.9, "top_p": 0.95, "seed": 11, "num_predict": n, "ignore_eos": true}),
    }
}

/// Every restore point that an unbounded cache holds: the tokens up to one beyond it, and its offset.
#[derive(Default)]
pub struct Ideal {
    points: Vec<Vec<u64>>,
}

impl Ideal {
    /// Positions that a prompt may spare.
    pub fn cached(&self, tokens: &[u64]) -> usize {
        let fits = self.points.iter().filter(|point| tokens.starts_with(point));
        fits.map(|point| point.len() - 1).max().unwrap_or(0)
    }

    fn matched(&self, tokens: &[u64]) -> usize {
        let common = |point: &Vec<u64>| point.iter().zip(tokens).take_while(|(a, b)| a == b).count();
        self.points
            .iter()
            .map(common)
            .max()
            .unwrap_or(0)
            .saturating_sub(1)
    }

    /// Takes up a request that came to rest after `generated`.
    pub fn record(&mut self, tokens: &[u64], generated: &[u64]) {
        let cached = self.cached(tokens);
        let mut offsets: Vec<usize> = (0..tokens.len()).filter(|&at| tokens[at] == TURN).collect();
        offsets.push(self.matched(tokens));
        offsets.extend((2048..tokens.len()).step_by(2048));
        offsets.push(tokens.len() - 1);
        offsets.retain(|&offset| offset > cached && offset < tokens.len());
        let all = [tokens, generated].concat();
        offsets.push(all.len() - 1);
        self.points
            .extend(offsets.into_iter().map(|offset| all[..=offset].to_vec()));
    }

    /// Takes up a request that was cancelled with `done` prompt tokens evaluated.
    pub fn record_cut(&mut self, tokens: &[u64], done: usize) {
        self.points.push(tokens[..=done].to_vec());
    }
}

/// What a request brought.
#[derive(Debug, Clone)]
pub struct Outcome {
    pub cached: usize,
    pub tokens: Vec<u64>,
    pub first_token: Duration,
    /// The same in the runner's processor time, which other programs don't add to; a little more, since it goes on meanwhile.
    pub processor: Option<Duration>,
}

/// A runner and the model of its cache.
pub struct Session {
    pub process: Process,
    pub ideal: Ideal,
    pub sampling: &'static str,
    asked: usize,
}

impl Session {
    /// A runner that drafts three tokens a round, for what restores drafting too.
    pub fn start(sampling: &'static str, args: &[&str]) -> Self {
        let drafts: &[&str] = if args.contains(&"--draft") {
            &[]
        } else {
            &["--draft", "3"]
        };
        let args = [&["--cpu"], drafts, args].concat();
        Self::of(Process::runner(&args), sampling)
    }

    /// The same for a process that was started otherwise.
    pub fn of(process: Process, sampling: &'static str) -> Self {
        let ready = process.ready();
        assert_eq!(ready["type"], "ready", "{ready}");
        assert_eq!(ready["draft"]["active"], true, "{ready}");
        Self {
            process,
            ideal: Ideal::default(),
            sampling,
            asked: 0,
        }
    }

    /// A fresh id.
    pub fn id(&mut self) -> String {
        self.asked += 1;
        format!("r{}", self.asked)
    }

    /// The ids of a text.
    pub fn encode(&mut self, text: &str) -> Vec<u64> {
        let request = json!({"type": "tokenize", "id": self.id(), "text": text});
        let answer = self.process.ask(&request);
        let ids = answer.last()["tokens"].as_array().into_iter().flatten();
        ids.filter_map(Value::as_u64).collect()
    }

    /// One turn, closed.
    pub fn turn(&mut self, role: &str, content: &str) -> Vec<u64> {
        self.encode(&format!("<|im_start|>{role}\n{content}<|im_end|>\n"))
    }

    /// The opening of an answer.
    pub fn opening(&mut self) -> Vec<u64> {
        self.encode("<|im_start|>assistant\n<think>\n")
    }

    /// The end of an answer.
    pub fn closing(&mut self) -> Vec<u64> {
        self.encode("<|im_end|>\n")
    }

    /// Sends a request and reads it to its end.
    pub fn generate(&mut self, tokens: &[u64], n: usize, more: Value) -> Answer {
        let mut request = requests::tokens(&self.id(), tokens, json!({"options": options(self.sampling, n)}));
        if let (Value::Object(request), Value::Object(more)) = (&mut request, more) {
            request.extend(more);
        }
        self.process.ask(&request)
    }

    /// Asks for `n` tokens without looking at what they are.
    pub fn plain(&mut self, tokens: &[u64], n: usize) -> Outcome {
        let mut request = requests::tokens(&self.id(), tokens, json!({}));
        request["options"] = options(self.sampling, n);
        let before = self.process.processor_time();
        let start = Instant::now();
        self.process.send(&request);
        let (mut first_token, mut processor) = (None, None);
        let mut events = Vec::new();
        while let Some((at, event)) = self.process.next_timed() {
            if event["type"] == "token" && first_token.is_none() {
                first_token = Some(at.saturating_duration_since(start));
                let now = self.process.processor_time();
                processor = now.zip(before).map(|(now, before)| now.saturating_sub(before));
            }
            let last = event["type"] == "done" || event["type"] == "error";
            events.push(event);
            if last {
                break;
            }
        }
        let answer = Answer {
            events,
            id: request["id"].clone(),
        };
        Outcome {
            cached: cached(&answer),
            tokens: answer.tokens(),
            first_token: first_token.unwrap_or_default(),
            processor,
        }
    }

    /// Asks, and holds what came from the cache and what was generated to the model and to a run without the cache.
    pub fn ask(&mut self, tokens: &[u64], n: usize) -> Outcome {
        let outcome = self.plain(tokens, n);
        assert_eq!(
            outcome.cached,
            self.ideal.cached(tokens),
            "cached of {} tokens",
            tokens.len()
        );
        self.ideal.record(tokens, &outcome.tokens);
        assert_eq!(
            outcome.tokens,
            self.cold(tokens, n),
            "with {} tokens restored",
            outcome.cached
        );
        outcome
    }

    /// The same tokens computed from nothing.
    pub fn cold(&mut self, tokens: &[u64], n: usize) -> Vec<u64> {
        let answer = self.generate(tokens, n, json!({"cache": false}));
        assert_eq!(cached(&answer), 0);
        answer.tokens()
    }

    /// The `status` event.
    pub fn status(&mut self) -> Value {
        let request = requests::simple("status", &self.id());
        self.process.ask(&request).last().clone()
    }

    /// The first `status` event that `wanted` takes: what the disk does shows after a while.
    pub fn status_when(&mut self, wanted: impl Fn(&Value) -> bool) -> Value {
        let deadline = Instant::now() + Duration::from_secs(30);
        loop {
            let status = self.status();
            if wanted(&status) {
                return status;
            }
            assert!(Instant::now() < deadline, "still {status}");
            std::thread::sleep(Duration::from_millis(30));
        }
    }

    /// Ends the runner in good order.
    pub fn end(mut self) {
        self.process.close();
        let status = self.process.wait(Duration::from_secs(30));
        assert_eq!(status.code(), Some(0), "{}", self.process.log());
    }
}

/// `done.cached_count`, which `prompt.cached` must agree with.
pub fn cached(answer: &Answer) -> usize {
    let told = answer
        .own()
        .find(|event| event["type"] == "prompt")
        .map(|event| event["cached"].clone());
    assert_eq!(told, Some(answer.done()["cached_count"].clone()));
    number(&answer.done()["cached_count"]) as usize
}

/// A number in an event.
pub fn number(value: &Value) -> u64 {
    match value.as_u64() {
        Some(number) => number,
        None => panic!("{value} is no number"),
    }
}

/// Some words, different for every `seed`.
pub fn words(seed: usize, n: usize) -> String {
    const WORDS: [&str; 12] = [
        "the function",
        "returns",
        "a list",
        "of numbers",
        "when",
        "the index",
        "is greater",
        "than zero",
        "otherwise",
        "it prints",
        "an error",
        "and stops",
    ];
    let word = |i: usize| WORDS[(i * i + 7 * seed * (i + 1) + seed) % WORDS.len()];
    let text: Vec<&str> = (0..n).map(word).collect();
    format!("{seed}: {}.", text.join(" "))
}
