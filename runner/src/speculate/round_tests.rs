//! Whole generations with a scripted target and drafter: every pattern of acceptance and refusal, every terminator at
//! every place, with the exact forwards and caches.

use super::round::{settle, Judged};

/// Why a scripted generation ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Eos,
    Stop,
    Length,
}

/// What ends a generation; positions count generated tokens from 0.
#[derive(Debug, Clone, Copy)]
struct Terminators {
    eos: Option<usize>,
    stop: Option<usize>,
    budget: usize,
}

const PROMPT: [u32; 3] = [100, 101, 102];

/// The target's token after `history`: a hash, so that any slip changes all that follows.
fn target(history: &[u32]) -> u32 {
    let hash = history
        .iter()
        .fold(7_u32, |hash, &token| hash.wrapping_mul(31).wrapping_add(token));
    1_000 + hash % 9_973
}

/// A generation in rounds. `plan` gives depth and accepted drafts of each round, over and over.
struct Scripted {
    cache: Vec<u32>,
    current: u32,
    recorded: Vec<u32>,
    forwards: Vec<Vec<u32>>,
    drafter: Vec<u32>,
    reads: usize,
}

impl Scripted {
    fn new() -> Self {
        let (current, prefilled) = PROMPT
            .split_last()
            .map(|(last, rest)| (*last, rest.to_vec()))
            .unwrap();
        Self {
            drafter: prefilled.clone(),
            cache: prefilled,
            current,
            recorded: Vec::new(),
            forwards: Vec::new(),
            reads: 0,
        }
    }

    /// One round with `depth` drafts, of which the target agrees with the first `agreed`.
    fn round(&mut self, depth: usize, agreed: usize, ends: &Terminators) -> Option<End> {
        let mut history = self.cache.clone();
        history.push(self.current);
        let mut drafts = Vec::new();
        for place in 0..depth {
            let right = target(&history);
            drafts.push(if place < agreed { right } else { right + 1 });
            history.push(drafts[place]);
        }
        let forward: Vec<u32> = std::iter::once(self.current)
            .chain(drafts.iter().copied())
            .collect();
        let slot = self.cache.len();
        self.cache.extend(&forward);
        // The verdict compares each draft with the target's choice in its row.
        let choice = |row: usize| target(&self.cache[..=slot + row]);
        let accepted = (0..depth).take_while(|&row| drafts[row] == choice(row)).count();
        assert_eq!(accepted, agreed.min(depth));
        self.reads += 1;
        let judged = Judged {
            current: self.current,
            drafts: &drafts,
            accepted,
            next: choice(accepted),
        };
        let mut place = self.recorded.len();
        let settled = settle(&judged, |_| {
            let end = match place {
                at if ends.eos == Some(at) => Some(End::Eos),
                at if ends.stop == Some(at) => Some(End::Stop),
                at => (at + 1 == ends.budget).then_some(End::Length),
            };
            place += 1;
            end
        });
        self.cache.truncate(slot + settled.kept());
        assert_eq!(self.cache[slot..], settled.committed[..]);
        self.drafter.extend(&settled.committed);
        self.recorded.extend(&settled.recorded);
        self.current = settled.current().unwrap();
        self.forwards.push(forward);
        assert!(settled.accepted <= settled.tested && settled.tested <= depth);
        settled.finish
    }

    fn check(&self) {
        // The caches, and what the drafter was told, are exactly the tokens before the current one.
        let mut all = PROMPT.to_vec();
        all.extend(&self.recorded);
        assert_eq!(all.pop(), Some(self.current));
        assert_eq!(self.cache, all);
        assert_eq!(self.drafter, all);
        assert_eq!(self.reads, self.forwards.len());
    }
}

/// What plain decoding gives.
fn plain(ends: &Terminators) -> (Vec<u32>, End) {
    let mut scripted = Scripted::new();
    loop {
        if let Some(end) = scripted.round(0, 0, ends) {
            return (scripted.recorded, end);
        }
    }
}

/// All sequences of two rounds: depths up to 4, each with every number of accepted drafts.
fn patterns() -> Vec<[(usize, usize); 2]> {
    let rounds: Vec<(usize, usize)> = (0..=4)
        .flat_map(|depth| (0..=depth).map(move |agreed| (depth, agreed)))
        .collect();
    rounds
        .iter()
        .flat_map(|&first| rounds.iter().map(move |&second| [first, second]))
        .collect()
}

#[test]
fn every_pattern_with_every_terminator_at_every_place_gives_plain_decodings_tokens() {
    let mut ends = vec![];
    for place in 0..9 {
        ends.push(Terminators {
            eos: Some(place),
            stop: None,
            budget: 12,
        });
        ends.push(Terminators {
            eos: None,
            stop: Some(place),
            budget: 12,
        });
        ends.push(Terminators {
            eos: None,
            stop: None,
            budget: place + 1,
        });
        // Two terminators in one block: the earlier one wins.
        ends.push(Terminators {
            eos: Some(place),
            stop: Some(place + 1),
            budget: place + 2,
        });
        ends.push(Terminators {
            eos: Some(place + 2),
            stop: Some(place),
            budget: 12,
        });
    }
    for pattern in patterns() {
        for ends in &ends {
            let mut scripted = Scripted::new();
            let mut rounds = pattern.iter().cycle();
            let end = loop {
                let &(depth, agreed) = rounds.next().unwrap();
                let end = scripted.round(depth, agreed, ends);
                scripted.check();
                if let Some(end) = end {
                    break end;
                }
            };
            assert_eq!((scripted.recorded, end), plain(ends), "{pattern:?}, {ends:?}");
        }
    }
}

#[test]
fn a_round_forwards_the_current_token_and_the_drafts_and_nothing_else() {
    let ends = Terminators {
        eos: None,
        stop: None,
        budget: 100,
    };
    let mut scripted = Scripted::new();
    scripted.round(3, 1, &ends);
    scripted.round(2, 2, &ends);
    scripted.round(0, 0, &ends);
    let out = scripted.recorded.clone();
    // Round 1 yields out[0] (accepted) and out[1] (the target's); round 2 out[2..5].
    let refused = [target(&[100, 101, 102, out[0]]) + 1];
    assert_eq!(scripted.forwards[0][..3], [102, out[0], refused[0]]);
    assert_eq!(scripted.forwards[0].len(), 4);
    assert_eq!(scripted.forwards[1], [out[1], out[2], out[3]]);
    assert_eq!(scripted.forwards[2], [out[4]]);
    assert_eq!(scripted.cache.len(), 2 + 2 + 3 + 1);
}

#[test]
fn a_refusal_after_one_draft_keeps_two_rows_and_tells_the_drafter_of_both() {
    // Slots 5..8 verify [t5, d6, d7, d8]; d6 stands, d7 doesn't: the caches roll back to 7 and the pair (d6, h5) is told.
    let round = Judged {
        current: 5,
        drafts: &[6, 7, 8],
        accepted: 1,
        next: 70,
    };
    let settled = settle(&round, |_| None::<End>);
    assert_eq!(settled.recorded, [6, 70]);
    assert_eq!(settled.committed, [5, 6]);
    assert_eq!((settled.kept(), settled.tested, settled.accepted), (2, 2, 1));
    assert_eq!(settled.current(), Some(70));
}

#[test]
fn an_accepted_end_token_is_recorded_but_not_committed() {
    let round = Judged {
        current: 5,
        drafts: &[6, 7, 8],
        accepted: 3,
        next: 9,
    };
    let settled = settle(&round, |token| (token == 6).then_some(End::Eos));
    assert_eq!(settled.recorded, [6]);
    assert_eq!(settled.committed, [5]);
    assert_eq!(
        (settled.tested, settled.accepted, settled.finish),
        (1, 1, Some(End::Eos))
    );
}

#[test]
fn an_end_token_that_was_only_drafted_ends_nothing() {
    // Drafting an end token is not generating one: the target has to choose it.
    let round = Judged {
        current: 5,
        drafts: &[6, 2, 8],
        accepted: 1,
        next: 70,
    };
    let settled = settle(&round, |token| (token == 2).then_some(End::Eos));
    assert_eq!(settled.recorded, [6, 70]);
    assert_eq!(settled.finish, None);
}

#[test]
fn a_round_without_drafts_is_a_plain_step() {
    let round = Judged {
        current: 5,
        drafts: &[],
        accepted: 0,
        next: 6,
    };
    let settled = settle(&round, |_| None::<End>);
    assert_eq!((settled.recorded, settled.committed), (vec![6], vec![5]));
    assert_eq!((settled.tested, settled.accepted), (0, 0));
}
