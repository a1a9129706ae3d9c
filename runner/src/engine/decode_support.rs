//! Sequences of a scripted target and head, for tests of the decoders.
//!
//! Invariant: what the target would say is known token by token, so that a test can name what the caches must hold.

use std::sync::{Arc, OnceLock};
use std::time::Instant;

use lookahead_protocol::request::{DraftOptions, Verify};

use super::super::scripted::{held, recurrent, Head, Target, VOCABULARY};
use super::*;
use crate::engine::job::Job;
use crate::engine::text::TextStack;
use crate::host::registry::CancelFlag;
use crate::mlx::{Backend, Path};
use crate::model::checkpoint::Checkpoint;
use crate::sample::{SamplingOptions, Shape, Vocabulary};
use crate::text::test_support::fixture_dir;
use crate::text::StopSet;

/// Tokens of the prompt; the last one is `current` before the first round.
pub(super) const PROMPT: usize = 6;

pub(super) fn text() -> &'static TextStack {
    static TEXT: OnceLock<TextStack> = OnceLock::new();
    TEXT.get_or_init(|| {
        let checkpoint = Checkpoint::open(&fixture_dir()).unwrap();
        TextStack::load(&fixture_dir(), checkpoint.config()).unwrap()
    })
}

/// How a generation is made to end.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Ending {
    Never,
    /// The token at this place of the answer, from 1, is an end token.
    Eos(usize),
    /// It completes the stop string.
    Stop(usize),
    /// It is the last of the budget.
    Budget(usize),
}

/// Distinct tokens of three letters or more, none of whose texts is within another's.
fn words(count: usize) -> Vec<u32> {
    let mut texts: Vec<String> = Vec::new();
    let mut ids = Vec::new();
    for id in 0..text().tokenizer.len() as u32 {
        let bytes = text().tokenizer.token_bytes(id).unwrap_or_default();
        let Ok(word) = std::str::from_utf8(bytes) else {
            continue;
        };
        if word.len() < 3 || !word.bytes().all(|b| b.is_ascii_lowercase()) {
            continue;
        }
        if texts
            .iter()
            .all(|text| !text.contains(word) && !word.contains(text.as_str()))
        {
            texts.push(word.to_owned());
            ids.push(id);
        }
        if ids.len() == count {
            break;
        }
    }
    assert_eq!(ids.len(), count);
    ids
}

/// A sequence: the prompt and all that the target would say after it.
pub(super) fn sequence(length: usize, ending: Ending) -> Vec<u32> {
    static WORDS: OnceLock<Vec<u32>> = OnceLock::new();
    let words = WORDS.get_or_init(|| words(48));
    let mut tokens: Vec<u32> = match length {
        0..=48 => words[..length].to_vec(),
        // Texts don't matter for long ones.
        _ => (100..100 + length as u32).collect(),
    };
    if let Ending::Eos(place) = ending {
        tokens[PROMPT + place - 1] = text().eos.ids()[0];
    }
    tokens
}

pub(super) fn target(tokens: &[u32]) -> Target {
    let mut next: Vec<u32> = (0..VOCABULARY as u32)
        .map(|id| (id + 7) % VOCABULARY as u32)
        .collect();
    for pair in tokens.windows(2) {
        next[pair[0] as usize] = pair[1];
    }
    let guesses = tokens[2..].to_vec();
    let head = Head {
        guesses: guesses.into(),
        ..Head::default()
    };
    Target {
        next,
        head: Some(head),
        calls: Vec::new().into(),
    }
}

impl Target {
    /// Makes the draft for the token at `slot` a wrong one.
    pub(super) fn mislead(&self, slot: usize) {
        self.head.as_ref().unwrap().guesses.borrow_mut()[slot - 2] = 3000 + slot as u32;
    }

    pub(super) fn take_extents(&self) -> Vec<(i32, i32)> {
        self.calls
            .take()
            .iter()
            .map(crate::engine::scripted::Call::extent)
            .collect()
    }

    pub(super) fn take_head_extents(&self) -> Vec<(i32, i32)> {
        self.head
            .as_ref()
            .unwrap()
            .calls
            .take()
            .iter()
            .map(crate::engine::scripted::Call::extent)
            .collect()
    }
}

pub(super) fn job(tokens: &[u32], ending: Ending) -> Job {
    let stop = match ending {
        Ending::Stop(place) => text()
            .tokenizer
            .token_bytes(tokens[PROMPT + place - 1])
            .map(<[u8]>::to_vec),
        _ => None,
    };
    let stops: Vec<String> = stop
        .map(|bytes| String::from_utf8(bytes).unwrap())
        .into_iter()
        .collect();
    let budget = match ending {
        Ending::Budget(place) => place,
        _ => 10_000,
    };
    let options = SamplingOptions {
        num_predict: None,
        num_ctx: None,
        shape: Shape::Greedy,
        penalties: None,
        seed: None,
        stop: stops.clone(),
        ignore_eos: false,
    };
    Job {
        id: "r".to_owned(),
        arrived: Instant::now(),
        cancel: CancelFlag::default(),
        tokens: tokens[..PROMPT].to_vec(),
        pictures: Vec::new(),
        options,
        seed: 1,
        stops: Arc::new(StopSet::new(&stops).unwrap()),
        budget,
        draft: DraftOptions::default(),
        verify: Verify::Rejection,
        constraint: None,
        logprobs: None,
        cache: false,
        progress: false,
    }
}

/// A sequence whose prompt but for the last token is in the caches.
pub(super) fn begin<'m>(model: &'m Target, tokens: &[u32], ending: Ending) -> Decoding<'m> {
    Backend::select(true);
    let job = job(tokens, ending);
    let vocabulary = Vocabulary {
        logits: VOCABULARY,
        tokens: VOCABULARY,
    };
    let mut decoding = Decoding {
        model,
        caches: model.new_caches(),
        drafter: model.self_draft().map(Drafter::new),
        sampler: Sampler::new(
            &job.options,
            job.verify,
            job.seed,
            vocabulary,
            &job.tokens,
            Path::Cpu,
        ),
        emitter: Emitter::new(&job, text()),
        constraint: None,
        consumed: job.tokens[..PROMPT - 1].to_vec(),
        current: job.tokens[PROMPT - 1],
        delta: 0,
        stats: RoundStats::default(),
    };
    let ids = ids_array(&decoding.consumed);
    let hidden = model
        .forward(&Batch::text(&ids, 0), &mut decoding.caches)
        .unwrap();
    eval(decoding.caches.arrays().into_iter().chain([&hidden])).unwrap();
    if let Some(drafter) = &mut decoding.drafter {
        drafter.observe(&ids, &hidden, &decoding.caches).unwrap();
    }
    model.calls.take();
    WAITS.with(|waits| waits.set(0));
    decoding
}

pub(super) fn waits() -> usize {
    WAITS.with(|waits| waits.replace(0))
}

/// The caches hold exactly `tokens[..n]`, the head's pairs included, which come from the target's states.
pub(super) fn check_caches(decoding: &mut Decoding<'_>, tokens: &[u32], n: usize, case: &str) {
    assert_eq!(decoding.consumed, tokens[..n], "{case}");
    assert_eq!(decoding.current, tokens[n], "{case}");
    assert_eq!(decoding.caches.offset() as usize, n, "{case}");
    let keys: Vec<[f32; 3]> = held(&decoding.caches).into_iter().map(|(key, _)| key).collect();
    let want: Vec<[f32; 3]> = (0..n)
        .map(|slot| [tokens[slot] as f32, slot as f32, 0.0])
        .collect();
    assert_eq!(keys, want, "{case}");
    let (sum, tail) = recurrent(&decoding.caches);
    assert_eq!(
        sum,
        tokens[..n].iter().map(|&id| id as f32).sum::<f32>(),
        "{case}"
    );
    assert_eq!(
        tail,
        tokens[n - 3..n].iter().map(|&id| id as f32).collect::<Vec<_>>(),
        "{case}"
    );
    let Some(drafter) = &mut decoding.drafter else {
        return;
    };
    drafter.settle(tokens[n], &decoding.caches).unwrap();
    let pairs = held(drafter.caches());
    let want: Vec<([f32; 3], [f32; 3])> = (0..n)
        .map(|slot| {
            (
                [tokens[slot + 1] as f32, slot as f32, 1.0],
                [tokens[slot] as f32, slot as f32, 0.0],
            )
        })
        .collect();
    assert_eq!(pairs, want, "{case}: the head's pairs");
    drafter.unsettle();
    let frontier = drafter.frontier().unwrap().to_vec_cast::<f32>().unwrap();
    assert_eq!(
        frontier,
        [tokens[n - 1] as f32, (n - 1) as f32, 0.0],
        "{case}: the frontier"
    );
    waits();
}
