//! Plain steps of a scripted target, before, between and instead of rounds: nothing is lost, repeated or left behind.

use lookahead_protocol::request::Verify;

use super::support::{begin, check_caches, job, sequence, target, waits, Ending, PROMPT};
use super::*;
use crate::engine::scripted::VOCABULARY;
use crate::mlx::Path;
use crate::sample::{Filter, SamplingOptions, Shape, Vocabulary};

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
        let behind = PROMPT as i32 - 1;
        model.take_extents();
        assert_eq!(
            model.take_head_extents(),
            [(0, behind), (behind, 1), (behind, 3)],
            "the next chain is begun by the round before it"
        );
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
        assert_eq!(
            model.take_head_extents(),
            [(behind + 3, parked as i32), (slot as i32, 1), (slot as i32, 3)]
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
        [(512, slot - 512), (slot, 1), (slot + 1, 1), (slot, 4)]
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
