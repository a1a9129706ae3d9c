//! What a request finds of those before it, and that it says the same as from nothing.

use base64::prelude::{Engine as _, BASE64_STANDARD};
use lookahead_tests::process::{is_final, repository, Process};
use lookahead_tests::requests;
use serde_json::{json, Value};

use crate::support::{cached, number, options, words, Session, SAMPLINGS};

const REPLY: usize = 24;

fn with_each_sampling(args: &[&str], timeline: impl Fn(&mut Session)) {
    for sampling in SAMPLINGS {
        let mut session = Session::start(sampling, args);
        timeline(&mut session);
        session.end();
    }
}

/// A system turn and a question.
fn asked(session: &mut Session, system: usize, question: usize) -> Vec<u64> {
    let mut chat = session.turn("system", &words(system, 20));
    chat.extend(session.turn("user", &words(question, 10)));
    chat
}

#[test]
fn every_turn_starts_where_the_last_one_ended() {
    with_each_sampling(&[], |session| {
        let mut chat = asked(session, 1, 2);
        for turn in 0..4 {
            chat.extend(session.opening());
            let outcome = session.ask(&chat, REPLY);
            chat.extend(&outcome.tokens);
            let rested = chat.len() - 1;
            chat.extend(session.closing());
            chat.extend(session.turn("user", &words(10 + turn, 8)));
            let mut next = chat.clone();
            next.extend(session.opening());
            assert_eq!(
                session.ideal.cached(&next),
                rested,
                "turn {turn} must resume at its predecessor's end"
            );
        }
    });
}

#[test]
fn a_template_that_strips_thoughts_hits_at_the_start_of_the_last_answer() {
    // Field report: every turn on a hybrid recomputes the whole conversation.
    with_each_sampling(&[], |session| {
        let mut chat = asked(session, 1, 2);
        for turn in 0..4 {
            let answer = chat.len();
            let mut open = chat.clone();
            open.extend(session.opening());
            let outcome = session.ask(&open, REPLY);
            // What the next prompt shows of it lacks the thoughts that came first.
            chat.extend(session.encode("<|im_start|>assistant\n"));
            chat.extend(&outcome.tokens[REPLY / 2..]);
            chat.extend(session.closing());
            chat.extend(session.turn("user", &words(20 + turn, 8)));
            assert!(
                session.ideal.cached(&chat) >= answer,
                "turn {turn} finds the answer's start"
            );
        }
    });
}

#[test]
fn messages_resume_too() {
    let mut session = Session::start("greedy", &[]);
    let mut messages = vec![json!({"role": "system", "content": words(3, 20)})];
    let mut least = 0;
    for turn in 0..3 {
        messages.push(json!({"role": "user", "content": words(30 + turn, 10)}));
        let id = session.id();
        let request = json!({
            "type": "generate", "id": id, "messages": messages, "think": false, "options": options("greedy", REPLY),
        });
        let warm = session.process.ask(&request);
        assert!(
            cached(&warm) >= least,
            "turn {turn}: {} of at least {least}",
            cached(&warm)
        );
        least = number(&warm.done()["prompt_eval_count"]) as usize - 16;
        let mut again = requests::named(request, &session.id());
        again["cache"] = json!(false);
        assert_eq!(warm.tokens(), session.process.ask(&again).tokens());
        messages.push(json!({"role": "assistant", "content": warm.text()}));
    }
    session.end();
}

#[test]
fn a_retry_of_the_last_turn_evaluates_one_token() {
    with_each_sampling(&[], |session| {
        let mut chat = asked(session, 1, 2);
        chat.extend(session.opening());
        session.ask(&chat, REPLY);
        assert_eq!(session.ask(&chat, REPLY).cached, chat.len() - 1);
        assert_eq!(session.ask(&chat, REPLY + 8).cached, chat.len() - 1);
    });
}

#[test]
fn an_edit_in_the_middle_restores_the_turns_before_it() {
    with_each_sampling(&[], |session| {
        let mut chat = asked(session, 1, 2);
        let mut starts = Vec::new();
        for turn in 0..3 {
            chat.extend(session.opening());
            let outcome = session.ask(&chat, REPLY);
            chat.extend(outcome.tokens);
            chat.extend(session.closing());
            starts.push(chat.len());
            chat.extend(session.turn("user", &words(40 + turn, 8)));
        }
        let mut edited = chat[..starts[1]].to_vec();
        edited.extend(session.turn("user", &words(90, 8)));
        edited.extend(session.opening());
        assert!(session.ask(&edited, REPLY).cached >= starts[1]);
    });
}

#[test]
fn conversations_share_their_system_prompt() {
    with_each_sampling(&[], |session| {
        let system = session.turn("system", &words(1, 20)).len();
        for question in 0..3 {
            let mut chat = asked(session, 1, 100 + question);
            chat.extend(session.opening());
            let outcome = session.ask(&chat, REPLY);
            assert!(
                question == 0 || outcome.cached >= system,
                "{} of {system}",
                outcome.cached
            );
        }
    });
}

#[test]
fn the_second_to_leave_a_path_marks_the_place_for_the_third() {
    with_each_sampling(&[], |session| {
        let mut chat = asked(session, 1, 2);
        chat.extend(session.opening());
        let outcome = session.ask(&chat, REPLY);
        // In the middle of the answer, where nothing was captured.
        let fork = chat.len() + REPLY / 2;
        chat.extend(&outcome.tokens[..REPLY / 2]);
        for (branch, word) in ["\nFirst", "Another", "no third"].into_iter().enumerate() {
            let mut other = chat.clone();
            other.extend(session.encode(word));
            other.extend(session.encode(&words(branch, 6)));
            let cached = session.ask(&other, REPLY).cached;
            // The last position in common is vouched for by the token after it, which differs.
            assert!(
                branch < 2 || cached >= fork - 1,
                "branch {branch} starts at {cached} of {fork}"
            );
        }
    });
}

#[test]
fn branches_of_a_conversation_resume_whichever_was_last() {
    // The latest sequence's buffers are handed on; each branch must find its own state all the same.
    with_each_sampling(&[], |session| {
        let mut stem = asked(session, 1, 2);
        stem.extend(session.opening());
        let outcome = session.ask(&stem, REPLY);
        stem.extend(&outcome.tokens);
        stem.extend(session.closing());
        let mut branches: Vec<Vec<u64>> = Vec::new();
        for branch in 0..2 {
            let mut chat = stem.clone();
            chat.extend(session.turn("user", &words(60 + branch, 8)));
            branches.push(chat);
        }
        for turn in 0..2 {
            for (branch, chat) in branches.iter_mut().enumerate() {
                chat.extend(session.opening());
                let outcome = session.ask(chat, REPLY);
                chat.extend(&outcome.tokens);
                let rested = chat.len() - 1;
                chat.extend(session.closing());
                chat.extend(session.turn("user", &words(70 + 10 * turn + branch, 8)));
                assert_eq!(
                    session.ideal.cached(chat),
                    rested,
                    "branch {branch} goes on at its own end"
                );
            }
        }
        // One branch twice in a row, then the other again at its start.
        for chat in [&branches[1], &branches[0], &stem] {
            session.ask(chat, REPLY);
        }
    });
}

#[test]
fn conversations_about_pictures_resume_and_never_mix_them_up() {
    let model = repository().join("fixtures/tiny/vision");
    let picture = |name: &str| {
        let bytes = std::fs::read(repository().join("fixtures/images").join(name));
        BASE64_STANDARD.encode(bytes.unwrap_or_else(|error| panic!("{name}: {error}")))
    };
    let (first, other) = (picture("photo-64x32.png"), picture("photo-32x96.png"));
    for sampling in SAMPLINGS {
        let process = Process::runner_of(&model, &["--cpu", "--draft", "3"]);
        let mut session = Session::of(process, sampling);
        let mut asks = |messages: &[Value]| {
            let request = json!({
                "type": "generate", "id": session.id(), "messages": messages, "think": false,
                "options": options(sampling, REPLY),
            });
            let warm = session.process.ask(&request);
            let mut again = requests::named(request, &session.id());
            again["cache"] = json!(false);
            assert_eq!(warm.tokens(), session.process.ask(&again).tokens());
            let prompt = number(&warm.done()["prompt_eval_count"]) as usize;
            (cached(&warm), prompt, warm.text())
        };
        let shown = |image: &str| {
            json!({"role": "user", "content": [
                {"type": "text", "text": "What is it?"}, {"type": "image", "data": image},
            ]})
        };
        let mut chat = vec![shown(&first)];
        let (_, prompt, answer) = asks(&chat);
        assert_eq!(asks(&chat).0, prompt - 1, "a retry");
        // Another picture in the same place leaves nothing of the first one to be found.
        let (before, ..) = asks(&[shown(&other)]);
        assert!(
            before + 8 < prompt,
            "{before} of {prompt} tokens come before the picture"
        );
        // The answer's opening, letter by letter in this vocabulary, reads otherwise once the answer is there.
        chat.push(json!({"role": "assistant", "content": answer}));
        chat.push(json!({"role": "user", "content": "And now?"}));
        let (found, longer, _) = asks(&chat);
        assert!(
            found > before && found + 20 >= prompt && longer > prompt,
            "{found} of {prompt}"
        );
        let second = [
            shown(&first),
            json!({"role": "assistant", "content": answer}),
            shown(&other),
        ];
        let (found, ..) = asks(&second);
        assert!(found > before && found + 20 >= prompt, "{found} of {prompt}");
        let (found, whole, _) = asks(&second);
        assert_eq!(found, whole - 1);
        session.end();
    }
}

#[test]
fn a_prompt_cancelled_in_prefill_goes_on_where_it_was_cut() {
    with_each_sampling(&["--chunk", "32"], |session| {
        for (round, cut) in [1, 33, 160, 400].into_iter().enumerate() {
            let prompt = session.encode(&words(200 + round, 400));
            let n = 8;
            let id = session.id();
            let more = json!({"options": options(session.sampling, n), "progress": true});
            let request = requests::tokens(&id, &prompt, more);
            session.process.send(&request);
            let done = |event: &Value| {
                if event["type"] == "prefill" {
                    number(&event["done"]) as usize
                } else {
                    0
                }
            };
            let mut seen = session.process.until(|event| done(event) >= cut);
            let cancel = requests::cancel(&session.id(), &id);
            session.process.send(&cancel);
            let over = |event: &Value| is_final(event, &json!(id));
            seen.extend(session.process.until(over));
            let last = seen.last().cloned().unwrap_or_default();
            assert_eq!(
                (&last["type"], &last["done_reason"]),
                (&json!("done"), &json!("cancelled")),
                "{last}"
            );
            let reached = seen.iter().map(done).max().unwrap_or_default();
            assert!((cut..prompt.len()).contains(&reached));
            session.ideal.record_cut(&prompt, reached);
            assert_eq!(
                session.ask(&prompt, n).cached,
                reached,
                "cut at {reached} of {}",
                prompt.len()
            );
        }
    });
}

#[test]
fn an_answer_cancelled_midway_resumes_where_it_was_cut() {
    with_each_sampling(&[], |session| {
        let mut chat = asked(session, 1, 2);
        chat.extend(session.opening());
        let id = session.id();
        let options = options(session.sampling, 4000);
        session
            .process
            .send(&requests::tokens(&id, &chat, json!({"options": options})));
        let mut events = session.process.until(|event| event["type"] == "token");
        let cancel = requests::cancel(&session.id(), &id);
        session.process.send(&cancel);
        events.extend(session.process.until(|event| is_final(event, &json!(id))));
        let told: Vec<u64> = lookahead_tests::process::ids(events.iter().filter(|event| event["id"] == *id));
        assert!(!told.is_empty() && told.len() < 4000);
        // What the host was told is on the path; a few tokens of text may have been held back.
        chat.extend(told);
        let rested = chat.len();
        chat.extend(session.closing());
        let outcome = session.plain(&chat, 8);
        assert!(outcome.cached + 4 >= rested, "{} of {rested}", outcome.cached);
        assert_eq!(outcome.tokens, session.cold(&chat, 8));
    });
}

#[test]
fn nothing_of_one_request_reaches_another() {
    with_each_sampling(&[], |session| {
        let mut a = asked(session, 1, 2);
        let mut b = asked(session, 5, 6);
        a.extend(session.opening());
        b.extend(session.opening());
        let first = session.ask(&a, REPLY).tokens;
        let other = session.ask(&b, REPLY).tokens;
        assert_eq!(session.ask(&a, REPLY).tokens, first);
        assert_eq!(session.ask(&b, REPLY).tokens, other);
        assert_ne!(first, other);
    });
}

#[test]
fn a_request_without_cache_neither_reads_nor_writes() {
    let mut session = Session::start("greedy", &[]);
    let mut chat = asked(&mut session, 1, 2);
    chat.extend(session.opening());
    session.ask(&chat, REPLY);
    let before = session.status()["cache"].clone();
    session.cold(&chat, REPLY);
    let other = session.encode(&words(77, 30));
    session.cold(&other, REPLY);
    assert_eq!(session.status()["cache"], before);
    assert_eq!(session.plain(&other, REPLY).cached, 0);
    session.end();
}

#[test]
fn a_cache_of_no_bytes_is_off() {
    let mut session = Session::start("greedy", &["--cache-device", "0"]);
    let chat = asked(&mut session, 1, 2);
    let first = session.plain(&chat, REPLY);
    let second = session.plain(&chat, REPLY);
    assert_eq!((first.cached, second.cached), (0, 0));
    assert_eq!(first.tokens, second.tokens);
    session.end();
}

#[test]
fn drafting_as_deep_as_pays_changes_nothing_after_a_restore() {
    for sampling in SAMPLINGS {
        let mut session = Session::start(sampling, &["--draft", "auto"]);
        let mut chat = asked(&mut session, 1, 2);
        for turn in 0..3 {
            chat.extend(session.opening());
            let outcome = session.ask(&chat, 40);
            chat.extend(outcome.tokens);
            chat.extend(session.closing());
            chat.extend(session.turn("user", &words(50 + turn, 8)));
        }
        session.end();
    }
}
