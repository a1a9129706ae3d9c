//! Stop strings found in text that comes in pieces.
//!
//! Invariant: each byte is looked at once, whatever the number of stop strings; the match reported is the one whose end
//! comes first, and of those ending at the same byte the longest (it starts earliest). Until then [`StopScanner::held`]
//! is the length of the longest end of the text that a stop string could still grow from, no more and no less.

use std::collections::HashMap;
use std::sync::Arc;

use aho_corasick::automaton::{Automaton, StateID};
use aho_corasick::nfa::contiguous::NFA;
use aho_corasick::{Anchored, MatchKind};

/// Why a list of stop strings was refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum StopError {
    /// A stop string is empty; it would end every generation before its first token.
    #[error("stop string {index} is empty")]
    Empty {
        /// Its place in the list, from 0.
        index: usize,
    },
    /// The stop strings are too long for an automaton.
    #[error("stop strings of {bytes} bytes in all are too long: {reason}")]
    TooLong {
        /// Their length together.
        bytes: usize,
        /// What the automaton's builder said.
        reason: String,
    },
}

/// A stop string that was found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StopMatch {
    /// Its place in the list given to [`StopSet::new`].
    pub index: usize,
    /// Its length in bytes.
    pub len: usize,
    /// Where it ends, in bytes from the start of the text handed to the call that found it.
    pub end: usize,
}

/// A request's stop strings, compiled.
#[derive(Debug)]
pub struct StopSet {
    stops: Vec<String>,
    /// None without stop strings.
    automaton: Option<Compiled>,
}

#[derive(Debug)]
struct Compiled {
    nfa: NFA,
    start: StateID,
    /// How many bytes of a stop string each state stands for; the start state, 0, is left out.
    depth: HashMap<StateID, usize>,
}

impl StopSet {
    /// Compiles stop strings; none at all is fine and matches nothing.
    ///
    /// # Errors
    /// [`StopError::Empty`] for an empty one, [`StopError::TooLong`] where the automaton's limits are exceeded.
    pub fn new(stops: &[String]) -> Result<Self, StopError> {
        if let Some(index) = stops.iter().position(String::is_empty) {
            return Err(StopError::Empty { index });
        }
        let automaton = if stops.is_empty() {
            None
        } else {
            Some(Compiled::new(stops)?)
        };
        Ok(Self {
            stops: stops.to_vec(),
            automaton,
        })
    }

    /// The stop string at `index`.
    #[must_use]
    pub fn text(&self, index: usize) -> Option<&str> {
        self.stops.get(index).map(String::as_str)
    }
}

impl Compiled {
    fn new(stops: &[String]) -> Result<Self, StopError> {
        let too_long = |reason: String| StopError::TooLong {
            bytes: stops.iter().map(String::len).sum(),
            reason,
        };
        let nfa = NFA::builder()
            .match_kind(MatchKind::Standard)
            .prefilter(false)
            .build(stops)
            .map_err(|error| too_long(error.to_string()))?;
        let start = nfa
            .start_state(Anchored::No)
            .map_err(|error| too_long(error.to_string()))?;
        // A state of the automaton is a distinct prefix of the stop strings, so walking each of them once from the
        // start meets every state at its depth.
        let mut depth = HashMap::new();
        for stop in stops {
            let mut state = start;
            for (before, byte) in stop.bytes().enumerate() {
                state = nfa.next_state(Anchored::No, state, byte);
                depth.insert(state, before + 1);
            }
        }
        Ok(Self { nfa, start, depth })
    }

    fn longest_match(&self, state: StateID) -> Option<usize> {
        (0..self.nfa.match_len(state))
            .map(|which| self.nfa.match_pattern(state, which))
            // Equal strings tie; the first in the list wins.
            .max_by_key(|pattern| (self.nfa.pattern_len(*pattern), std::cmp::Reverse(*pattern)))
            .map(|pattern| pattern.as_usize())
    }
}

/// Looks for a [`StopSet`] in one text. Cloning costs a reference count.
#[derive(Debug, Clone)]
pub struct StopScanner {
    set: Arc<StopSet>,
    state: Option<StateID>,
}

impl StopScanner {
    /// A scanner at the start of a text.
    #[must_use]
    pub fn new(set: Arc<StopSet>) -> Self {
        let state = set.automaton.as_ref().map(|compiled| compiled.start);
        Self { set, state }
    }

    /// Reads the next part of the text, up to the first match. After a match the scanner is done.
    pub fn scan(&mut self, text: &str) -> Option<StopMatch> {
        let compiled = self.set.automaton.as_ref()?;
        let mut state = self.state?;
        for (before, byte) in text.bytes().enumerate() {
            state = compiled.nfa.next_state(Anchored::No, state, byte);
            if !compiled.nfa.is_special(state) {
                continue;
            }
            if let Some(index) = compiled.longest_match(state) {
                self.state = None;
                return Some(StopMatch {
                    index,
                    len: self.set.stops[index].len(),
                    end: before + 1,
                });
            }
        }
        self.state = Some(state);
        None
    }

    /// How many bytes at the end of the text read so far may still become part of a stop string. Always whole
    /// characters, since a stop string begins with one.
    #[must_use]
    pub fn held(&self) -> usize {
        let depth = self.set.automaton.as_ref().zip(self.state);
        depth
            .and_then(|(compiled, state)| compiled.depth.get(&state).copied())
            .unwrap_or(0)
    }

    /// The set that this scanner looks for.
    #[must_use]
    pub fn set(&self) -> &StopSet {
        &self.set
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn set(stops: &[&str]) -> Arc<StopSet> {
        let stops: Vec<String> = stops.iter().map(|stop| (*stop).to_owned()).collect();
        Arc::new(StopSet::new(&stops).unwrap())
    }

    #[test]
    fn an_empty_stop_is_refused_by_its_place() {
        let error = StopSet::new(&["a".to_owned(), String::new()]).unwrap_err();
        assert_eq!(error, StopError::Empty { index: 1 });
    }

    #[test]
    fn without_stops_nothing_is_held() {
        let mut scanner = StopScanner::new(set(&[]));
        assert_eq!(scanner.scan("anything"), None);
        assert_eq!(scanner.held(), 0);
    }

    #[test]
    fn a_partial_stop_is_held_and_released() {
        let mut scanner = StopScanner::new(set(&["</s>", "STOP"]));
        assert_eq!(scanner.scan("a </"), None);
        assert_eq!(scanner.held(), 2);
        assert_eq!(scanner.scan("S"), None);
        assert_eq!(scanner.held(), 1, "the S may begin the other stop");
        assert_eq!(
            scanner.scan("TOPS"),
            Some(StopMatch {
                index: 1,
                len: 4,
                end: 3
            })
        );
    }

    #[test]
    fn the_earliest_end_wins_and_of_equal_ends_the_earliest_start() {
        let mut scanner = StopScanner::new(set(&["bcd", "c", "abc"]));
        assert_eq!(
            scanner.scan("xabcd"),
            Some(StopMatch {
                index: 2,
                len: 3,
                end: 4
            })
        );
        let mut scanner = StopScanner::new(set(&["ab", "ab"]));
        assert_eq!(scanner.scan("ab").map(|found| found.index), Some(0));
    }

    /// The rule, written down plainly.
    fn reference(text: &str, stops: &[String]) -> Option<(usize, usize)> {
        (1..=text.len()).find_map(|end| {
            let ending = stops
                .iter()
                .filter(|stop| text.as_bytes()[..end].ends_with(stop.as_bytes()));
            ending.map(String::len).max().map(|len| (end, len))
        })
    }

    proptest! {
        #[test]
        fn scanning_in_parts_equals_the_rule_on_the_whole(
            parts in proptest::collection::vec("[abé]{0,4}", 0..8),
            stops in proptest::collection::vec("[abé]{1,4}", 0..5),
        ) {
            let mut scanner = StopScanner::new(Arc::new(StopSet::new(&stops).unwrap()));
            let text = parts.concat();
            let expected = reference(&text, &stops);
            let mut read = 0;
            let mut found = None;
            for part in &parts {
                if let Some(hit) = scanner.scan(part) {
                    found = Some((read + hit.end, hit.len));
                    break;
                }
                read += part.len();
                let seen = &text[..read];
                let held = (0..=seen.len())
                    .filter(|len| stops.iter().any(|stop| stop.as_bytes().starts_with(&seen.as_bytes()[seen.len() - len..])))
                    .max().unwrap_or(0);
                prop_assert_eq!(scanner.held(), held);
                prop_assert!(seen.is_char_boundary(read - held));
            }
            prop_assert_eq!(found, expected);
        }
    }
}
