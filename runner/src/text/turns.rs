//! Where turns begin and end in a prompt's ids.
//!
//! Invariant: the tokens that mark a turn are found by rendering a probe conversation with the checkpoint's own template,
//! never assumed; a template that gives nothing away has no markers, and then no boundaries are reported.

use serde_json::{json, Value};

use super::tokenizer::{Bos, Tokenizer};

/// Contents of the probe's three turns: words no template writes by itself.
const CONTENTS: [&str; 3] = ["zqfirstprobe", "zqsecondprobe", "zqthirdprobe"];

/// The tokens around a turn.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TurnMarkers {
    start: Option<u32>,
    end: Option<u32>,
    /// Ids between a turn's end and the next one's start, a line feed for ChatML.
    gap: Vec<u32>,
}

impl TurnMarkers {
    /// Finds the markers by rendering user, assistant and user turns with `render`.
    pub(super) fn probe(render: impl FnOnce(&[Value]) -> Option<String>, tokenizer: &Tokenizer) -> Self {
        let roles = ["user", "assistant", "user"];
        let messages: Vec<Value> = roles
            .iter()
            .zip(CONTENTS)
            .map(|(role, content)| json!({"role": role, "content": content}))
            .collect();
        render(&messages)
            .and_then(|text| Self::read(&text, tokenizer))
            .unwrap_or_default()
    }

    fn read(text: &str, tokenizer: &Tokenizer) -> Option<Self> {
        let (_, rest) = text.split_once(CONTENTS[0])?;
        let (to_assistant, rest) = rest.split_once(CONTENTS[1])?;
        let (to_user, _) = rest.split_once(CONTENTS[2])?;
        let to_assistant = tokenizer.encode(to_assistant, Bos::Never).ok()?;
        let to_user = tokenizer.encode(to_user, Bos::Never).ok()?;
        let marks = |ids: &[u32]| -> Vec<(usize, u32)> {
            ids.iter()
                .copied()
                .enumerate()
                .filter(|(_, id)| tokenizer.is_added(*id))
                .collect()
        };
        // What follows the second mark is the assistant's header, which may hold a think block.
        match (marks(&to_assistant).as_slice(), marks(&to_user).as_slice()) {
            (&[(_, end), (_, start), ..], &[(end_at, end2), (start_at, start2), ..])
                if end == end2 && start == start2 =>
            {
                Some(Self {
                    start: Some(start),
                    end: Some(end),
                    gap: to_user[end_at + 1..start_at].to_vec(),
                })
            }
            (&[(_, mark), ..], &[(_, mark2), ..]) if mark == mark2 => Some(Self {
                start: Some(mark),
                end: None,
                gap: Vec::new(),
            }),
            _ => None,
        }
    }

    /// The id that opens a turn.
    #[must_use]
    pub fn start(&self) -> Option<u32> {
        self.start
    }

    /// The id that closes a turn.
    #[must_use]
    pub fn end(&self) -> Option<u32> {
        self.end
    }

    /// The positions at which a turn begins or ends, ascending and distinct, each from 1 to `ids.len()`: how many ids lie
    /// before the boundary. Where a turn follows another, its beginning and the other's end are one position.
    #[must_use]
    pub fn boundaries(&self, ids: &[u32]) -> Vec<usize> {
        let mut positions = Vec::new();
        for (index, id) in ids.iter().enumerate() {
            let position = if Some(*id) == self.start {
                index
            } else if Some(*id) == self.end {
                let after = &ids[index + 1..];
                index
                    + 1
                    + if after.starts_with(&self.gap) {
                        self.gap.len()
                    } else {
                        0
                    }
            } else {
                continue;
            };
            if position > 0 && positions.last() != Some(&position) {
                positions.push(position);
            }
        }
        positions
    }
}

#[cfg(test)]
mod tests {
    use super::super::template::{ChatTemplate, RenderOptions};
    use super::super::test_support::{fixture_dir, tiny};
    use super::*;

    #[test]
    fn the_fixture_has_chatml_markers_and_boundaries_between_its_turns() {
        let tokenizer = tiny();
        let template = ChatTemplate::load(&fixture_dir(), &tokenizer);
        let markers = template.turn_markers();
        assert_eq!((markers.start(), markers.end()), (Some(4084), Some(4085)));
        let messages = [
            json!({"role": "user", "content": "Hi"}),
            json!({"role": "assistant", "content": "Hello"}),
            json!({"role": "user", "content": "a"}),
        ];
        let prompt = template.render(&messages, &RenderOptions::default()).unwrap();
        let ids = tokenizer.encode(&prompt, Bos::Never).unwrap();
        let boundaries = markers.boundaries(&ids);
        assert_eq!(boundaries.len(), 3);
        assert!(boundaries.iter().all(|position| ids[*position] == 4084));
        let ended = [&ids[..boundaries[2]], &[4084, 5, 4085][..]].concat();
        assert_eq!(
            markers.boundaries(&ended).last(),
            Some(&ended.len()),
            "an end at the very end counts"
        );
    }

    #[test]
    fn a_single_mark_between_turns_is_taken_as_the_start() {
        let template = ChatTemplate::from_source(
            "{% for m in messages %}<|im_start|>{{ m.role }}: {{ m.content }}\n{% endfor %}",
            &tiny(),
        );
        assert_eq!(template.turn_markers().start(), Some(4084));
        assert_eq!(template.turn_markers().boundaries(&[4084, 1, 2, 4084, 1]), [3]);
    }

    #[test]
    fn templates_that_give_nothing_away_have_no_boundaries() {
        let sources = [
            "{% for m in messages %}{{ m.content }}{% endfor %}",
            "{{ raise_exception('no') }}",
            "fixed",
        ];
        for source in sources {
            let template = ChatTemplate::from_source(source, &tiny());
            assert_eq!(template.turn_markers(), &TurnMarkers::default());
            assert_eq!(template.turn_markers().boundaries(&[4084, 4085]), [0_usize; 0]);
        }
    }
}
