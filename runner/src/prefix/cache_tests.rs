//! Timelines of requests against a fake engine: what each one finds, and what the cache costs.

use super::*;
use crate::prefix::budget::Size;
use crate::prefix::fake::{FakePayloads, FakePoint, FakeSegment, PER_KEY, PER_POINT};
use crate::prefix::key::{media_hash, path_hash, KeyStream, LookAhead, MediaSpan};
use crate::prefix::plan::{captures, Density, PointKind, Prompt, Role, Turn};

const NO_GRID: Density = Density {
    grid: 0,
    captures: 32,
};

/// A runner in miniature: one request at a time, live caches given up at the next.
struct Engine {
    cache: PrefixCache<FakePayloads>,
    payloads: FakePayloads,
    look_ahead: LookAhead,
    density: Density,
    pin: Option<Pin>,
    /// Largest device and host use seen after a call.
    peak: TierUse,
}

/// A conversation as tokens and turns.
#[derive(Clone, Default)]
struct Chat {
    tokens: Vec<u32>,
    turns: Vec<Turn>,
    media: Vec<MediaSpan>,
}

impl Chat {
    fn say(mut self, role: Role, tokens: impl IntoIterator<Item = u32>) -> Self {
        self.turns.push(Turn {
            start: self.tokens.len(),
            role,
        });
        self.tokens.push(1000);
        self.tokens.extend(tokens);
        self
    }

    /// The generation prompt: the turn opened, with the think block that the template starts.
    fn ask(self) -> Self {
        self.say(Role::Assistant, [1001, 1002])
    }
}

fn budgets(device: u64, host: u64) -> Budgets {
    Budgets {
        device,
        host,
        disk: Size::Percent(0.0).resolve(0),
    }
}

impl Engine {
    fn new(device: u64, host: u64, disk: Option<Arc<DiskStore>>) -> Self {
        let config = CacheConfig::new(budgets(device, host));
        Self {
            cache: PrefixCache::new(config, disk),
            payloads: FakePayloads::default(),
            look_ahead: LookAhead::NextToken,
            density: NO_GRID,
            pin: None,
            peak: TierUse::default(),
        }
    }

    fn unbounded() -> Self {
        Self::new(u64::MAX, 0, None)
    }

    /// Serve a request, generating `reply`; how many tokens came from the cache.
    fn run(&mut self, chat: &Chat, reply: &[u32]) -> usize {
        self.serve(chat, reply, usize::MAX)
    }

    /// The same, cancelled once `stop` positions are evaluated.
    fn serve(&mut self, chat: &Chat, reply: &[u32], stop: usize) -> usize {
        let mut stream = KeyStream::new(self.look_ahead, &chat.tokens, &chat.media);
        if let Some(pin) = self.pin.take() {
            self.cache.release(&mut self.payloads, pin);
        }
        let found = self
            .cache
            .lookup(&mut self.payloads, stream.keys(), stream.limit());
        assert!(found.cached <= stream.limit());
        // What is restored is the state of exactly these keys.
        if found.cached > 0 {
            let restore = self.cache.restore(&found.pin).unwrap();
            let held: Vec<Key> = restore
                .segments
                .iter()
                .flat_map(|(_, segment)| segment.keys.clone())
                .collect();
            assert_eq!(held, stream.keys()[..found.cached]);
            assert_eq!(restore.point.path, path_hash(&stream.keys()[..found.cached]));
        }
        let media: Vec<_> = chat.media.iter().map(|span| span.positions.clone()).collect();
        let prompt = Prompt {
            tokens: chat.tokens.len(),
            turns: &chat.turns,
            media: &media,
        };
        let planned = captures(&prompt, found.cached, found.parted, self.density);
        stream.extend(reply);
        // The last token is never evaluated: its key may not even exist.
        let rest = stream.limit().min(stop).max(found.cached);
        let mut captured: Vec<_> = planned
            .into_iter()
            .filter(|capture| capture.offset <= rest)
            .collect();
        if captured.last().is_none_or(|last| last.offset < rest) {
            captured.push(Capture {
                offset: rest,
                kind: PointKind::Rest,
            });
        }
        let keys = stream.keys().to_vec();
        let states = captured
            .into_iter()
            .map(|capture| (capture, FakePoint::of(&keys[..capture.offset])))
            .collect();
        let pin = self
            .cache
            .grow(&mut self.payloads, found.pin, &keys, states, |_, range| {
                Ok(FakeSegment::of(&keys[range]))
            });
        self.pin = Some(pin);
        let held = self.cache.stats().bytes;
        self.peak.device = self.peak.device.max(held.device);
        self.peak.host = self.peak.host.max(held.host);
        found.cached
    }
}

fn system() -> Chat {
    Chat::default().say(Role::System, 0..30)
}

fn question(number: u32) -> impl Iterator<Item = u32> {
    (0..20).map(move |i| 10_000 + number * 100 + i)
}

fn answer(number: u32) -> Vec<u32> {
    (0..40).map(|i| 50_000 + number * 100 + i).chain([1003]).collect()
}

#[test]
fn an_exact_retry_evaluates_one_token() {
    let mut engine = Engine::unbounded();
    let chat = system().say(Role::User, question(1)).ask();
    assert_eq!(engine.run(&chat, &answer(1)), 0);
    assert_eq!(engine.run(&chat, &answer(2)), chat.tokens.len() - 1);
    assert_eq!(engine.run(&chat, &[]), chat.tokens.len() - 1);
}

#[test]
fn the_next_turn_starts_where_the_last_one_ended() {
    let mut engine = Engine::unbounded();
    let chat = system().say(Role::User, question(1)).ask();
    engine.run(&chat, &answer(1));
    let mut next = chat.clone();
    next.tokens.extend(answer(1));
    let rested = next.tokens.len() - 1;
    let next = next.say(Role::User, question(2)).ask();
    assert_eq!(engine.run(&next, &answer(2)), rested);
}

#[test]
fn a_template_that_strips_thoughts_still_hits_at_the_start_of_the_answer() {
    // Field report: every turn on a hybrid misses.
    let mut engine = Engine::unbounded();
    let mut chat = system().say(Role::User, question(1));
    engine.run(&chat.clone().ask(), &answer(1));
    for turn in 2..6 {
        let start = chat.tokens.len();
        // The history's answer opens the same way and then goes on without the think block.
        chat = chat
            .say(Role::Assistant, answer(turn - 1)[20..].to_vec())
            .say(Role::User, question(turn));
        assert_eq!(
            engine.run(&chat.clone().ask(), &answer(turn)),
            start,
            "turn {turn}"
        );
    }
}

#[test]
fn an_edit_in_the_middle_restores_the_turn_before_it() {
    let mut engine = Engine::unbounded();
    let mut chat = system();
    let mut starts = Vec::new();
    for turn in 1..5 {
        starts.push(chat.tokens.len());
        chat = chat.say(Role::User, question(turn));
        engine.run(&chat.clone().ask(), &answer(turn));
        chat = chat.say(Role::Assistant, answer(turn));
    }
    let mut edited = chat.clone();
    edited.tokens[starts[2] + 5] = 7;
    assert_eq!(
        engine.run(&edited.say(Role::User, question(9)).ask(), &answer(9)),
        starts[2]
    );
}

#[test]
fn conversations_share_their_system_prompt() {
    let mut engine = Engine::unbounded();
    engine.run(&system().say(Role::User, question(1)).ask(), &answer(1));
    let other = system().say(Role::User, question(2)).ask();
    assert_eq!(engine.run(&other, &answer(2)), 31);
    assert_eq!(
        engine.run(&system().say(Role::User, question(1)).ask(), &[]),
        other.tokens.len() - 1
    );
}

#[test]
fn a_raw_prompt_is_captured_where_an_earlier_one_parted() {
    // D.5 with look-ahead 1: 60 shared keys vouch for 61 shared tokens.
    let mut engine = Engine::unbounded();
    let prompt = |tail: u32| Chat {
        tokens: (0..61).chain(tail..tail + 40).collect(),
        ..Chat::default()
    };
    assert_eq!(engine.run(&prompt(1000), &[1]), 0);
    assert_eq!(
        engine.run(&prompt(2000), &[2]),
        0,
        "no whole state at the divergence yet"
    );
    assert_eq!(engine.run(&prompt(3000), &[3]), 60);
}

#[test]
fn a_cancelled_prefill_is_resumed_exactly_where_it_stopped() {
    // D.4: cancelled after 18 of 47 and again after 36.
    let mut engine = Engine::unbounded();
    engine.density = Density {
        grid: 8,
        captures: 32,
    };
    let prompt = Chat {
        tokens: (0..47).collect(),
        ..Chat::default()
    };
    assert_eq!(engine.serve(&prompt, &[], 18), 0);
    let probe = Chat {
        tokens: (0..18).chain(900..920).collect(),
        ..Chat::default()
    };
    assert_eq!(
        engine.serve(&probe, &[], 18),
        16,
        "17 keys match, the grid point below is restored"
    );
    assert_eq!(engine.serve(&prompt, &[], 36), 18);
    assert_eq!(engine.serve(&prompt, &[5, 6], usize::MAX), 36);
}

#[test]
fn cancelling_at_any_point_costs_nothing_already_computed() {
    for stop in 1..70 {
        let mut engine = Engine::unbounded();
        let chat = system().say(Role::User, question(1)).ask();
        engine.serve(&chat, &answer(1), stop);
        assert_eq!(
            engine.run(&chat, &answer(1)),
            stop.min(chat.tokens.len() - 1),
            "cancelled at {stop}"
        );
    }
}

#[test]
fn pictures_match_by_content() {
    let mut engine = Engine::unbounded();
    let with = |byte: u8| {
        let mut chat = system().say(Role::User, [7; 64]).ask();
        chat.media = vec![MediaSpan {
            positions: 32..96,
            hash: media_hash(&[byte], &[256, 256]),
        }];
        chat
    };
    engine.run(&with(1), &answer(1));
    assert_eq!(
        engine.run(&with(2), &answer(1)),
        31,
        "another picture shares what comes before it"
    );
    assert_eq!(engine.run(&with(1), &answer(1)), with(1).tokens.len() - 1);
}

#[test]
fn a_long_agent_conversation_keeps_a_bounded_number_of_states() {
    // The growth that permanent restore points cause: 105 states at 100 turns, 210 at 200.
    let mut counts = Vec::new();
    for turns in [50, 100, 200] {
        let mut engine = Engine::unbounded();
        engine.cache.config.budgets.device = 2_000_000;
        engine.cache.config.path_share = 0.001;
        engine.density = Density {
            grid: 8192,
            captures: 32,
        };
        let mut chat = Chat::default().say(Role::System, 0..3000);
        let mut rested = 0;
        for turn in 0..turns {
            chat = chat.say(Role::User, (0..400).map(|i| turn * 1000 + i)).ask();
            assert_eq!(engine.run(&chat, &answer(turn)), rested, "turn {turn}");
            chat.tokens.extend(answer(turn));
            rested = chat.tokens.len() - 1;
        }
        counts.push(engine.cache.stats().restore_points);
    }
    assert_eq!(counts, [20; 3]);
}

#[test]
fn hundreds_of_turns_stay_under_a_small_budget() {
    // Room for the path itself and a few states; stripped thoughts leave dead branches that have to go.
    let mut engine = Engine::new(40_000 * PER_KEY, 30 * PER_POINT, None);
    let mut chat = system();
    for turn in 0..200 {
        chat = chat.say(Role::User, question(turn));
        let start = chat.tokens.len();
        let cached = engine.run(&chat.clone().ask(), &answer(turn));
        assert!(
            turn == 0 || cached + 65 >= start,
            "turn {turn} starts at {cached} of {start}"
        );
        chat = chat.say(Role::Assistant, answer(turn)[20..].to_vec());
    }
    assert!(
        engine.peak.device <= 40_000 * PER_KEY && engine.peak.host <= 30 * PER_POINT,
        "{:?}",
        engine.peak
    );
}

#[test]
fn the_live_caches_count() {
    let mut engine = Engine::new(10_000, 0, None);
    for number in 0..5 {
        engine.run(
            &Chat {
                tokens: question(number).collect(),
                ..Chat::default()
            },
            &[1],
        );
    }
    let before = engine.cache.stats().restore_points;
    engine.cache.set_live_bytes(9_500);
    engine.cache.settle(&mut engine.payloads);
    let stats = engine.cache.stats();
    assert!(stats.restore_points < before);
    assert!(stats.bytes.device <= 10_000, "{stats:?}");
}

#[test]
fn idle_conversations_wait_in_host_memory() {
    let mut engine = Engine::new(1_000, 100_000, None);
    let chat = |number| Chat {
        tokens: question(number).collect(),
        ..Chat::default()
    };
    for number in 0..10 {
        engine.run(&chat(number), &[1]);
    }
    let stats = engine.cache.stats();
    assert!(
        stats.bytes.device <= 1_000 && stats.bytes.host > 1_000,
        "{stats:?}"
    );
    for number in 0..10 {
        assert_eq!(engine.run(&chat(number), &[1]), 19);
    }
}

#[test]
fn a_failed_move_gives_the_state_up_and_the_request_goes_on() {
    let mut engine = Engine::new(500, 100_000, None);
    engine.payloads.refuse = usize::MAX;
    for number in 0..10 {
        engine.run(
            &Chat {
                tokens: question(number).collect(),
                ..Chat::default()
            },
            &[1],
        );
    }
    let stats = engine.cache.stats();
    assert!(
        stats.bytes.device <= 500 && stats.bytes.host == 0 && stats.evictions.failed > 0,
        "{stats:?}"
    );
}

#[test]
fn making_room_frees_what_is_asked_or_says_that_it_is_pointless() {
    let mut engine = Engine::unbounded();
    for number in 0..5 {
        engine.run(
            &Chat {
                tokens: question(number).collect(),
                ..Chat::default()
            },
            &[1],
        );
    }
    let before = engine.cache.stats().bytes.device;
    assert!(engine.cache.make_room(&mut engine.payloads, 400));
    assert!(engine.cache.stats().bytes.device + 400 <= before);
    while engine.cache.make_room(&mut engine.payloads, 400) {}
    assert_eq!(
        engine.cache.stats().bytes.device,
        20 * PER_KEY + 2 * PER_POINT,
        "the path in use stays"
    );
}

#[test]
fn clearing_forgets_and_a_running_request_leaves_no_trace() {
    let mut engine = Engine::unbounded();
    let chat = system().say(Role::User, question(1)).ask();
    engine.run(&chat, &answer(1));
    let stream = KeyStream::new(LookAhead::NextToken, &chat.tokens, &[]);
    let running = engine
        .cache
        .lookup(&mut engine.payloads, stream.keys(), stream.limit());
    engine.cache.clear().unwrap();
    assert!(engine.cache.restore(&running.pin).is_none());
    let state = vec![(
        Capture {
            offset: 9,
            kind: PointKind::Rest,
        },
        FakePoint::of(&stream.keys()[..9]),
    )];
    let pin = engine.cache.grow(
        &mut engine.payloads,
        running.pin,
        stream.keys(),
        state,
        |_, _| unreachable!(),
    );
    engine.cache.release(&mut engine.payloads, pin);
    assert_eq!(
        (engine.cache.stats().nodes, engine.cache.stats().bytes.device),
        (0, 0)
    );
    assert_eq!(engine.run(&chat, &answer(1)), 0);
}

#[path = "cache_disk_tests.rs"]
mod disk_tests;

#[test]
fn a_path_that_led_to_nonsense_is_forgotten_and_others_are_not() {
    let mut engine = Engine::new(u64::MAX, 0, None);
    let chat = system().say(Role::User, question(1)).ask();
    let other = Chat::default().say(Role::User, question(2)).ask();
    engine.run(&chat, &answer(1));
    engine.run(&other, &answer(2));
    let keys = KeyStream::new(LookAhead::NextToken, &chat.tokens, &[]);
    let found = engine
        .cache
        .lookup(&mut engine.payloads, keys.keys(), keys.limit());
    assert!(found.cached > 0);
    engine.cache.distrust(&found.pin);
    engine.cache.release(&mut engine.payloads, found.pin);
    engine.cache.trie().check().unwrap();
    assert_eq!(engine.run(&chat, &answer(1)), 0);
    assert_eq!(engine.run(&other, &answer(2)), other.tokens.len() - 1);
    // Distrust of a path that was cleared meanwhile touches nothing.
    let found = engine
        .cache
        .lookup(&mut engine.payloads, keys.keys(), keys.limit());
    engine.cache.clear().unwrap();
    engine.cache.distrust(&found.pin);
    engine.cache.release(&mut engine.payloads, found.pin);
}
