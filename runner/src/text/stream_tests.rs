//! Any grouping of tokens gives the same text, and stop strings never show.

use proptest::prelude::*;

use super::super::test_support::tiny;
use super::*;

const IM_END: u32 = 4085;
const THINK: u32 = 4090;

fn stream(stops: &[&str]) -> TextStream<usize> {
    let stops: Vec<String> = stops.iter().map(|stop| (*stop).to_owned()).collect();
    let hidden = [IM_END].into_iter().collect();
    TextStream::new(tiny(), Arc::new(StopSet::new(&stops).unwrap()), Arc::new(hidden))
}

/// Ids of the tokenizer that are the given bytes exactly.
fn id(bytes: &[u8]) -> u32 {
    (0..4096)
        .find(|id| tiny().token_bytes(*id) == Some(bytes))
        .unwrap()
}

fn spell(parts: &[&str]) -> Vec<u32> {
    parts.iter().map(|part| id(part.as_bytes())).collect()
}

#[derive(Debug, Default, PartialEq)]
struct Outcome {
    text: String,
    tokens: Vec<u32>,
    stopped: Option<String>,
}

/// Pushes `ids` in runs of the given sizes and collects what comes out, checking what holds for every chunk.
fn run(stops: &[&str], ids: &[u32], sizes: &[usize]) -> Outcome {
    let mut stream = stream(stops);
    let mut outcome = Outcome::default();
    let mut at = 0;
    let mut sizes = sizes.iter().cycle();
    let take = |push: Push<usize>, outcome: &mut Outcome| {
        if let Some(chunk) = push.chunk {
            assert!(!chunk.tokens.is_empty(), "text without ids");
            let expected: Vec<usize> =
                (outcome.tokens.len()..outcome.tokens.len() + chunk.tokens.len()).collect();
            assert_eq!(chunk.data, expected, "data stays aligned with the ids");
            let visible: Vec<u32> = chunk
                .tokens
                .iter()
                .copied()
                .filter(|id| !tiny().is_special(*id))
                .collect();
            let own = tiny().decode(&visible, super::super::Specials::Hidden).unwrap();
            if push.stopped.is_none() {
                assert_eq!(chunk.text, own, "a chunk's text is its ids' text");
            } else {
                assert!(own.starts_with(&chunk.text) || chunk.text.ends_with('\u{FFFD}'));
            }
            outcome.text.push_str(&chunk.text);
            outcome.tokens.extend(chunk.tokens);
        }
        outcome.stopped = push.stopped;
    };
    while at < ids.len() && outcome.stopped.is_none() {
        let size = (*sizes.next().unwrap()).clamp(1, ids.len() - at);
        let push = stream.push_run((at..at + size).map(|index| (ids[index], index)));
        take(push, &mut outcome);
        at += size;
    }
    if outcome.stopped.is_none() {
        take(stream.finish(), &mut outcome);
    }
    assert_eq!(stream.kept(), outcome.tokens.len());
    assert_eq!(stream.held(), 0);
    outcome
}

#[test]
fn a_stop_across_tokens_is_never_sent_in_part() {
    let mut stream = stream(&["END"]);
    let ids = spell(&["a", "E", "N", "D"]);
    assert_eq!(stream.push(ids[0], 0).chunk.unwrap().text, "a");
    assert_eq!(stream.push(ids[1], 1).chunk, None);
    assert_eq!(stream.push(ids[2], 2).chunk, None);
    assert_eq!(stream.held(), 2);
    let last = stream.push(ids[3], 3);
    assert_eq!((last.chunk, last.stopped.as_deref()), (None, Some("END")));
    assert_eq!((stream.kept(), stream.held()), (1, 0));
}

#[test]
fn a_prefix_of_a_stop_is_released_with_its_ids_when_it_cannot_be_one() {
    let mut stream = stream(&["END"]);
    let ids = spell(&["E", "N", "x"]);
    assert_eq!(stream.push(ids[0], 0).chunk, None);
    assert_eq!(stream.push(ids[1], 1).chunk, None);
    let chunk = stream.push(ids[2], 2).chunk.unwrap();
    assert_eq!(
        (chunk.text.as_str(), chunk.tokens, chunk.data),
        ("ENx", ids, vec![0, 1, 2])
    );
}

#[test]
fn a_held_prefix_is_flushed_at_the_end() {
    let outcome = run(&["END"], &spell(&["a", "E", "N"]), &[1]);
    assert_eq!(
        (outcome.text.as_str(), outcome.tokens.len(), outcome.stopped),
        ("aEN", 3, None)
    );
}

#[test]
fn an_id_with_text_before_the_cut_is_delivered_and_those_inside_or_after_are_not() {
    let ids = spell(&[" return", "n", "e", "w"]);
    let outcome = run(&["urn", "zz"], &ids, &[4]);
    assert_eq!(outcome.text, " ret");
    assert_eq!(outcome.tokens, ids[..1]);
    assert_eq!(outcome.stopped.as_deref(), Some("urn"));
    let outcome = run(&["n"], &spell(&["a", "n", "e"]), &[3]);
    assert_eq!((outcome.text.as_str(), outcome.tokens.len()), ("a", 1));
}

#[test]
fn split_characters_are_whole_and_their_ids_come_together() {
    let bytes = "你".as_bytes();
    let ids: Vec<u32> = bytes.iter().map(|byte| id(&[*byte])).collect();
    let mut stream = stream(&[]);
    assert_eq!(stream.push(ids[0], 0).chunk, None);
    assert_eq!(stream.push(ids[1], 1).chunk, None);
    let chunk = stream.push(ids[2], 2).chunk.unwrap();
    assert_eq!((chunk.text.as_str(), chunk.tokens), ("你", ids.clone()));
    assert_eq!(run(&[], &ids[..2], &[1]).text, "\u{FFFD}", "the tail is flushed");
    let outcome = run(&["你"], &ids, &[1]);
    assert_eq!((outcome.text.as_str(), outcome.tokens.len()), ("", 0));
}

#[test]
fn hidden_tokens_are_delivered_without_text_and_visible_added_ones_with() {
    let ids = [id(b"a"), IM_END, 4087, THINK, id(b"b")];
    let outcome = run(&[], &ids, &[1]);
    assert_eq!(
        (outcome.text.as_str(), outcome.tokens.as_slice()),
        ("a<think>b", &ids[..])
    );
    let mut stream = stream(&[]);
    let chunk = stream.push(IM_END, 0).chunk.unwrap();
    assert_eq!((chunk.text.as_str(), chunk.tokens), ("", vec![IM_END]));
}

#[test]
fn a_hidden_token_inside_a_stop_does_not_break_it_and_is_not_delivered() {
    let ids = [id(b"a"), IM_END, id(b"E"), IM_END, id(b"N")];
    let outcome = run(&["EN"], &ids, &[1]);
    assert_eq!(
        (outcome.text.as_str(), outcome.tokens.as_slice()),
        ("a", &ids[..2])
    );
}

#[test]
fn an_eos_that_the_tokenizer_does_not_mark_special_is_hidden_too() {
    let mut stream: TextStream = TextStream::new(
        tiny(),
        Arc::new(StopSet::new(&[]).unwrap()),
        Arc::new([THINK].into_iter().collect()),
    );
    assert_eq!(stream.push(THINK, ()).chunk.unwrap().text, "");
}

#[test]
fn the_flushed_replacement_character_can_complete_a_stop() {
    let outcome = run(&["a\u{FFFD}"], &[id(b"a"), id(b"\xE4")], &[1]);
    assert_eq!(
        (outcome.text.as_str(), outcome.stopped.as_deref()),
        ("", Some("a\u{FFFD}"))
    );
}

#[test]
fn a_clone_of_the_stream_looks_ahead_without_moving_it() {
    let mut original = stream(&["END"]);
    original.push(id(b"E"), 0);
    let mut ahead = original.clone();
    assert!(ahead
        .push_run(spell(&["N", "D"]).into_iter().map(|id| (id, 1)))
        .stopped
        .is_some());
    assert!(original
        .push(id(b"x"), 1)
        .chunk
        .is_some_and(|chunk| chunk.text == "Ex"));
}

#[test]
fn nothing_comes_after_the_end() {
    let mut stream = stream(&["E"]);
    assert!(stream.push(id(b"E"), 0).stopped.is_some());
    assert_eq!(
        stream.push(id(b"a"), 1),
        Push {
            chunk: None,
            stopped: None
        }
    );
    assert_eq!(
        stream.finish(),
        Push {
            chunk: None,
            stopped: None
        }
    );
    assert_eq!(stream.kept(), 0);
}

/// The cut and the delivered ids computed from the whole text, by the rules of the wire protocol.
fn reference(stops: &[&str], ids: &[u32]) -> Outcome {
    let visible = |id: u32| {
        if tiny().is_special(id) {
            Vec::new()
        } else {
            tiny().token_bytes(id).unwrap().to_vec()
        }
    };
    let bytes: Vec<u8> = ids.iter().flat_map(|id| visible(*id)).collect();
    let mut text = String::new();
    // Where in the text the character of each byte starts.
    let mut place = Vec::new();
    for chunk in bytes.utf8_chunks() {
        for letter in chunk.valid().chars() {
            place.extend(std::iter::repeat_n(text.len(), letter.len_utf8()));
            text.push(letter);
        }
        if !chunk.invalid().is_empty() {
            place.extend(std::iter::repeat_n(text.len(), chunk.invalid().len()));
            text.push('\u{FFFD}');
        }
    }
    let found = (1..=text.len()).find_map(|end| {
        let ending = stops
            .iter()
            .filter(|stop| text.as_bytes()[..end].ends_with(stop.as_bytes()));
        ending
            .max_by_key(|stop| stop.len())
            .map(|stop| (end - stop.len(), *stop))
    });
    let Some((cut, stop)) = found else {
        return Outcome {
            text,
            tokens: ids.to_vec(),
            stopped: None,
        };
    };
    let mut at = 0;
    let mut tokens = Vec::new();
    for &id in ids {
        let len = visible(id).len();
        let start = place.get(at).copied().unwrap_or(text.len());
        let delivered = start < cut || (len == 0 && start == cut && (at == 0 || place[at - 1] < cut));
        if !delivered {
            break;
        }
        tokens.push(id);
        at += len;
    }
    Outcome {
        text: text[..cut].to_owned(),
        tokens,
        stopped: Some(stop.to_owned()),
    }
}

fn some_ids() -> impl Strategy<Value = Vec<u32>> {
    let letters = spell(&["a", "b", "E", " ", "\n"]);
    let fragments: Vec<u32> = "你é👩"
        .bytes()
        .map(|byte| id(&[byte]))
        .chain([id(b"\xFF")])
        .collect();
    let one = prop_oneof![
        4 => proptest::sample::select(letters),
        4 => proptest::sample::select(fragments),
        2 => 0_u32..4096,
        1 => proptest::sample::select(vec![IM_END, 4087, THINK]),
        2 => proptest::sample::select(vec!["你".to_owned(), "👩".to_owned(), "ab".to_owned()])
            .prop_map(|text| tiny().encode(&text, super::super::Bos::Never).unwrap()[0]),
    ];
    proptest::collection::vec(one, 0..24)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1500))]
    #[test]
    fn any_grouping_gives_the_reference_cut_of_the_whole(
        ids in some_ids(),
        stops in proptest::collection::vec("[abE \n你é]{1,3}|\u{FFFD}a?|a\u{FFFD}", 0..4),
        cuts in proptest::collection::vec((any::<proptest::sample::Index>(), 1_usize..6), 0..3),
        sizes in proptest::collection::vec(1_usize..5, 1..4),
    ) {
        let whole = reference(&[], &ids).text;
        let letters: Vec<char> = whole.chars().collect();
        // Stops taken from the text itself, so that most cases have one.
        let inside = cuts.iter().filter(|_| !letters.is_empty()).map(|(at, len)| {
            letters[at.index(letters.len())..].iter().take(*len).collect::<String>()
        });
        let stops: Vec<String> = stops.iter().cloned().chain(inside).collect();
        let stops: Vec<&str> = stops.iter().map(String::as_str).collect();
        let expected = reference(&stops, &ids);
        prop_assert_eq!(run(&stops, &ids, &sizes), expected);
    }
}
