//! Rounds and plain steps of a scripted target and head: tokens, caches, forwards and waits, one by one.

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
use crate::sample::{Filter, SamplingOptions, Shape, Vocabulary};
use crate::text::test_support::fixture_dir;
use crate::text::StopSet;

/// Tokens of the prompt; the last one is `current` before the first round.
const PROMPT: usize = 6;

fn text() -> &'static TextStack {
    static TEXT: OnceLock<TextStack> = OnceLock::new();
    TEXT.get_or_init(|| {
        let checkpoint = Checkpoint::open(&fixture_dir()).unwrap();
        TextStack::load(&fixture_dir(), checkpoint.config()).unwrap()
    })
}

/// How a generation is made to end.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Ending {
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
fn sequence(length: usize, ending: Ending) -> Vec<u32> {
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

fn target(tokens: &[u32]) -> Target {
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
    fn mislead(&self, slot: usize) {
        self.head.as_ref().unwrap().guesses.borrow_mut()[slot - 2] = 3000 + slot as u32;
    }

    fn take_extents(&self) -> Vec<(i32, i32)> {
        self.calls
            .take()
            .iter()
            .map(crate::engine::scripted::Call::extent)
            .collect()
    }

    fn take_head_extents(&self) -> Vec<(i32, i32)> {
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

fn job(tokens: &[u32], ending: Ending) -> Job {
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
fn begin<'m>(model: &'m Target, tokens: &[u32], ending: Ending) -> Decoding<'m> {
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

fn waits() -> usize {
    WAITS.with(|waits| waits.replace(0))
}

/// The caches hold exactly `tokens[..n]`, the head's pairs included, which come from the target's states.
fn check_caches(decoding: &mut Decoding<'_>, tokens: &[u32], n: usize, case: &str) {
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

/// Whether the last forward's ids were known to the host, and that of the head's calls behind the first.
fn any_known(model: &Target) -> bool {
    let target = model.calls.borrow().iter().any(|call| call.known);
    let chained = model.head.as_ref().unwrap().calls.borrow();
    target || chained.iter().skip(1).any(|call| call.known)
}

/// One round with the drafts at the places of `wrong` wrong, then one with all right.
fn one_pattern(depth: usize, wrong: u32, ending: Ending) {
    let case = &format!("depth {depth}, wrong {wrong:b}, {ending:?}");
    let tokens = sequence(40, ending);
    let model = target(&tokens);
    for place in 0..depth {
        if wrong >> place & 1 == 1 {
            model.mislead(PROMPT + place);
        }
    }
    let mut decoding = begin(&model, &tokens, ending);
    let outbox = Outbox::default();
    let finish = decoding.round(depth, &outbox).unwrap();
    let accepted = (wrong.trailing_zeros() as usize).min(depth);
    let (at, want) = match ending {
        Ending::Never => (usize::MAX, None),
        Ending::Eos(at) => (at, Some(Finish::Stop(None))),
        Ending::Stop(at) => {
            let bytes = text().tokenizer.token_bytes(tokens[PROMPT + at - 1]).unwrap();
            (
                at,
                Some(Finish::Stop(Some(String::from_utf8(bytes.to_vec()).unwrap()))),
            )
        }
        Ending::Budget(at) => (at, Some(Finish::Length)),
    };
    let recorded = (accepted + 1).min(at);
    assert_eq!(finish, want.filter(|_| at <= accepted + 1), "{case}");
    // One wait, before which nobody knew a draft; one forward, and no head call for the first draft.
    assert_eq!(waits(), 1, "{case}");
    assert!(
        !any_known(&model),
        "{case}: a draft was read before its verification"
    );
    let slot = PROMPT as i32 - 1;
    assert_eq!(model.take_extents(), [(slot, depth as i32 + 1)], "{case}");
    let chained = (0..depth as i32 - 1).map(|step| (slot + step, 1));
    let first = std::iter::once((0, slot));
    assert_eq!(
        model.take_head_extents(),
        first.chain(chained).collect::<Vec<_>>(),
        "{case}"
    );
    let tested = decoding.stats.last_round();
    let want = Tested {
        drafts: depth,
        tested: recorded.min(depth),
        accepted: recorded.min(accepted),
    };
    assert_eq!(tested, want, "{case}");
    check_caches(&mut decoding, &tokens, PROMPT - 1 + recorded, case);
    if finish.is_some() || ending != Ending::Never {
        return;
    }
    *model.head.as_ref().unwrap().guesses.borrow_mut() = tokens[2..].to_vec();
    let again = decoding.round(depth, &outbox).unwrap();
    assert_eq!(again, None, "{case}");
    assert_eq!(waits(), 1, "{case}");
    check_caches(&mut decoding, &tokens, PROMPT + recorded + depth, case);
}

#[test]
fn every_pattern_of_a_round_ends_where_it_should_with_exactly_the_committed_tokens_in_the_caches() {
    for depth in 1..=4 {
        for wrong in 0..1 << depth {
            one_pattern(depth, wrong, Ending::Never);
            for place in 1..=depth + 1 {
                one_pattern(depth, wrong, Ending::Eos(place));
                one_pattern(depth, wrong, Ending::Stop(place));
                one_pattern(depth, wrong, Ending::Budget(place));
            }
        }
    }
}

/// Worked example of pairing across rounds: prompt t0..t5, depth 3, d6 accepted, d7 refused, then d6 an end token.
#[test]
fn accepted_pairs_are_rewritten_from_the_targets_states_in_the_next_first_call() {
    let tokens = sequence(40, Ending::Never);
    let model = target(&tokens);
    model.mislead(7);
    let mut decoding = begin(&model, &tokens, Ending::Never);
    let outbox = Outbox::default();
    assert!(
        model.take_head_extents().is_empty(),
        "nothing is flushed before somebody drafts"
    );
    decoding.round(3, &outbox).unwrap();
    assert_eq!(model.take_extents(), [(5, 4)]);
    assert_eq!(model.take_head_extents(), [(0, 5), (5, 1), (6, 1)]);
    assert_eq!((decoding.caches.offset(), decoding.current), (7, tokens[7]));
    assert_eq!(
        decoding.drafter.as_ref().unwrap().caches().offset(),
        5,
        "chained slots are rewound"
    );
    decoding.round(3, &outbox).unwrap();
    let first = model.head.as_ref().unwrap().calls.borrow()[0].clone();
    assert_eq!(first.extent(), (5, 2), "as wide as what was accepted, and one");
    let fed = first.states.unwrap().to_vec_cast::<f32>().unwrap();
    assert_eq!(
        fed,
        [tokens[5] as f32, 5.0, 0.0, tokens[6] as f32, 6.0, 0.0],
        "the target's states, not the head's"
    );
    assert_eq!(
        first.ids.to_vec_cast::<i32>().unwrap(),
        [tokens[6] as i32, tokens[7] as i32]
    );
    assert_eq!(model.take_head_extents(), [(5, 2), (7, 1), (8, 1)]);
    assert_eq!(model.take_extents(), [(7, 4)]);
    check_caches(&mut decoding, &tokens, 11, "after the second round");

    let tokens = sequence(40, Ending::Eos(1));
    let model = target(&tokens);
    let mut decoding = begin(&model, &tokens, Ending::Eos(1));
    assert_eq!(decoding.round(3, &outbox).unwrap(), Some(Finish::Stop(None)));
    assert_eq!((decoding.caches.offset(), decoding.current), (6, tokens[6]));
    check_caches(
        &mut decoding,
        &tokens,
        6,
        "an end token is never in the caches, its pair is",
    );
}

/// Worked example of a parked stretch.
#[test]
fn parking_and_resuming_neither_lose_nor_repeat_a_token() {
    let tokens = sequence(44, Ending::Never);
    for parked in 1..=8u32 {
        let model = target(&tokens);
        let mut decoding = begin(&model, &tokens, Ending::Never);
        let outbox = Outbox::default();
        decoding.round(2, &outbox).unwrap();
        let slot = PROMPT + 2;
        model.take_extents();
        model.take_head_extents();
        waits();
        assert_eq!(decoding.plain(parked, &outbox, || false).unwrap(), None);
        let steps: Vec<(i32, i32)> = (0..parked as i32).map(|step| (slot as i32 + step, 1)).collect();
        assert_eq!(
            model.take_extents(),
            steps,
            "one forward a token, none for a token nobody asked for"
        );
        assert_eq!(waits(), parked as usize);
        assert!(
            model.take_head_extents().is_empty(),
            "pairs wait while nobody drafts"
        );
        let slot = slot + parked as usize;
        decoding.round(2, &outbox).unwrap();
        assert_eq!(
            model.take_extents(),
            [(slot as i32, 3)],
            "the round begins with the last token drawn"
        );
        let behind = PROMPT as i32 - 1;
        assert_eq!(
            model.take_head_extents(),
            [(behind, parked as i32 + 3), (slot as i32, 1)]
        );
        check_caches(&mut decoding, &tokens, slot + 3, &format!("parked for {parked}"));
        let told = decoding.stats.to_wire();
        assert_eq!(
            told.depth.unwrap().into_iter().collect::<Vec<_>>(),
            [(0, u64::from(parked)), (2, 2)]
        );
    }
}

#[test]
fn a_plain_step_is_dispatched_before_the_one_before_it_is_read() {
    let tokens = sequence(40, Ending::Never);
    let model = target(&tokens);
    let mut decoding = begin(&model, &tokens, Ending::Never);
    decoding.plain(5, &Outbox::default(), || false).unwrap();
    let known: Vec<bool> = model.calls.borrow().iter().map(|call| call.known).collect();
    assert!(known[0], "the first token was there");
    // An asynchronous evaluation may be through by the time of the look, but not before it began.
    assert_eq!(known.len(), 5);
    check_caches(&mut decoding, &tokens, PROMPT + 4, "plain");
}

#[test]
fn cancelling_at_any_token_undoes_the_step_under_way() {
    let tokens = sequence(44, Ending::Never);
    for at in 1..=20 {
        let model = target(&tokens);
        let mut decoding = begin(&model, &tokens, Ending::Never);
        let seen = std::cell::Cell::new(0);
        let cancelled = || {
            seen.set(seen.get() + 1);
            seen.get() == at
        };
        let finish = decoding.plain(32, &Outbox::default(), cancelled).unwrap();
        assert_eq!(finish, Some(Finish::Cancelled));
        check_caches(
            &mut decoding,
            &tokens,
            PROMPT - 1 + at,
            &format!("cancelled at {at}"),
        );
    }
}

#[test]
fn terminators_end_plain_decoding_with_the_same_state_as_a_round() {
    for place in 1..=6 {
        for ending in [Ending::Eos(place), Ending::Stop(place), Ending::Budget(place)] {
            let tokens = sequence(40, ending);
            let model = target(&tokens);
            let mut decoding = begin(&model, &tokens, ending);
            assert!(decoding
                .plain(32, &Outbox::default(), || false)
                .unwrap()
                .is_some());
            check_caches(&mut decoding, &tokens, PROMPT - 1 + place, &format!("{ending:?}"));
        }
    }
}

#[test]
fn pairs_are_written_in_one_call_once_256_wait() {
    let tokens = sequence(900, Ending::Never);
    let model = target(&tokens);
    let mut decoding = begin(&model, &tokens, Ending::Never);
    let outbox = Outbox::default();
    // The prompt has left four pairs.
    decoding.plain(252, &outbox, || false).unwrap();
    assert_eq!(model.take_head_extents(), [(0, 256)]);
    assert_eq!(waits(), 252 + 1, "a wait a token, and one for the flush");
    decoding.plain(300, &outbox, || false).unwrap();
    assert_eq!(model.take_head_extents(), [(256, 256)]);
    decoding.round(3, &outbox).unwrap();
    let slot = PROMPT as i32 - 1 + 552;
    assert_eq!(
        model.take_head_extents(),
        [(512, slot - 512), (slot, 1), (slot + 1, 1)]
    );
    check_caches(&mut decoding, &tokens, slot as usize + 4, "after two flushes");
}

#[test]
fn a_drafter_without_a_state_to_start_from_leaves_a_plain_step() {
    let tokens = sequence(40, Ending::Never);
    let model = target(&tokens);
    let mut decoding = begin(&model, &tokens, Ending::Never);
    decoding.caches = model.new_caches();
    decoding.consumed.clear();
    decoding.current = tokens[0];
    decoding.drafter = model.self_draft().map(Drafter::new);
    decoding.round(3, &Outbox::default()).unwrap();
    assert_eq!(model.take_extents(), [(0, 1)]);
    assert_eq!(decoding.stats.last_round(), Tested::default());
    assert_eq!((decoding.consumed.len(), decoding.current), (1, tokens[1]));
    decoding.round(3, &Outbox::default()).unwrap();
    assert_eq!(model.take_extents(), [(1, 4)]);
    check_caches(&mut decoding, &tokens, 5, "primed by one token");
}

#[test]
fn broken_drafts_end_drafting_but_not_the_request() {
    let tokens = sequence(40, Ending::Never);
    let model = target(&tokens);
    let mut decoding = begin(&model, &tokens, Ending::Never);
    let options = SamplingOptions {
        shape: Shape::Filtered(Filter {
            top_k: 20,
            temperature: 1.0,
            top_p: 1.0,
            min_p: 0.0,
        }),
        ..job(&tokens, Ending::Never).options
    };
    let vocabulary = Vocabulary {
        logits: VOCABULARY,
        tokens: VOCABULARY,
    };
    decoding.sampler = Sampler::new(&options, Verify::Rejection, 1, vocabulary, &[], Path::Cpu);
    model.head.as_ref().unwrap().broken.set(true);
    assert_eq!(decoding.round(3, &Outbox::default()).unwrap(), None);
    assert!(decoding.drafter.is_none());
    assert_eq!(decoding.consumed.len(), PROMPT);
    let tokens = [&tokens[..PROMPT], &[decoding.current]].concat();
    check_caches(&mut decoding, &tokens, PROMPT, "without a drafter");
}
