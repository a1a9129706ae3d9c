//! Rounds of a scripted target and head: tokens, caches, forwards and waits, one by one.

use super::support::{begin, check_caches, sequence, target, text, waits, Ending, PROMPT};
use super::*;
use crate::engine::scripted::Target;

/// Whether the last forward's ids were known to the host, or those of the chained calls of the head.
fn any_known(model: &Target, depth: usize, when: When) -> bool {
    let target = model.calls.borrow().iter().any(|call| call.known);
    let chained = model.head.as_ref().unwrap().calls.borrow();
    let ahead = usize::from(when == When::Ahead);
    let chained = chained.iter().skip(1).take(depth - 1 + ahead);
    target || chained.into_iter().any(|call| call.known)
}

/// When the chain after a round begins.
#[derive(Debug, Clone, Copy, PartialEq)]
enum When {
    /// Once the host has read it.
    Read,
    /// Before, for every outcome.
    Ahead,
}

/// One round with the drafts at the places of `wrong` wrong, then one with all right.
fn one_pattern(depth: usize, wrong: u32, ending: Ending, when: When) {
    let case = &format!("depth {depth}, wrong {wrong:b}, {ending:?}, {when:?}");
    let tokens = sequence(40, ending);
    let model = target(&tokens);
    for place in 0..depth {
        if wrong >> place & 1 == 1 {
            model.mislead(PROMPT + place);
        }
    }
    let mut decoding = begin(&model, &tokens, ending);
    if when == When::Ahead {
        decoding.drafter = decoding.drafter.map(|drafter| drafter.looking_ahead(true));
    }
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
        !any_known(&model, depth, when),
        "{case}: a draft was read before its verification"
    );
    let slot = PROMPT as i32 - 1;
    assert_eq!(model.take_extents(), [(slot, depth as i32 + 1)], "{case}");
    let chained = (0..depth as i32 - 1).map(|step| (slot + step, 1));
    let first = std::iter::once((0, slot));
    let next = match when {
        // Where the generation goes on, the next chain is begun at once, from what stands.
        When::Read => finish.is_none().then_some((slot, recorded as i32)),
        When::Ahead => Some((slot, depth as i32 + 1)),
    };
    assert_eq!(
        model.take_head_extents(),
        first.chain(chained).chain(next).collect::<Vec<_>>(),
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
            one_pattern(depth, wrong, Ending::Never, When::Read);
            one_pattern(depth, wrong, Ending::Never, When::Ahead);
            for place in 1..=depth + 1 {
                for when in [When::Read, When::Ahead] {
                    one_pattern(depth, wrong, Ending::Eos(place), when);
                    one_pattern(depth, wrong, Ending::Stop(place), when);
                    one_pattern(depth, wrong, Ending::Budget(place), when);
                }
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
    assert_eq!((decoding.caches.offset(), decoding.current), (7, tokens[7]));
    assert_eq!(
        decoding.drafter.as_ref().unwrap().caches().offset(),
        7,
        "chained slots are rewound, accepted ones rewritten by the next chain's first call"
    );
    let first = model.head.as_ref().unwrap().calls.borrow()[3].clone();
    assert_eq!(model.take_head_extents(), [(0, 5), (5, 1), (6, 1), (5, 2)]);
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
    decoding.round(3, &outbox).unwrap();
    assert_eq!(model.take_head_extents(), [(7, 1), (8, 1), (7, 4)]);
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
