//! The formats a request can ask for, and their compilation.
//!
//! Invariant: compiling never takes the process down, however deep or large the format is: sizes and nesting are checked
//! before the compiler recurses, and everything else runs under its own limits.

use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::Arc;
use std::time::Duration;

use llguidance::api::TopLevelGrammar;
use llguidance::Matcher;
use serde_json::{json, Value};

use super::error::{plain, ConstraintError};
use super::factory::Vocabulary;
use super::schema;

/// Longest grammar or regex in bytes, and longest schema as text.
const LONGEST: usize = 1 << 20;
/// Deepest nesting of brackets in a grammar or a regex. Schemas can't come deeper than JSON is parsed.
const DEEPEST: usize = 100;
/// Stack of the compiler's thread in bytes; only what's used of it is ever taken from memory.
const STACK: usize = 256 << 20;

/// How long a compilation is waited for.
const DEADLINE: Duration = Duration::from_secs(5);

/// What the output has to be.
#[derive(Debug, Clone, PartialEq)]
pub enum Format {
    /// Any JSON object.
    Json,
    /// JSON that a schema accepts. Formats of strings that aren't known are annotations, as the standard has it; an
    /// `x-guidance` object at the top sets llguidance's own options.
    Schema(Value),
    /// Text that a regular expression (Rust's syntax, without look-around) matches whole.
    Regex(String),
    /// Text that a grammar in llguidance's dialect of Lark derives from `start`. Special tokens are written by name
    /// (`<|im_start|>`); other added tokens are plain strings.
    Lark(String),
}

impl Format {
    /// Whether the output is JSON, before which blank lines don't matter.
    pub(super) fn is_json(&self) -> bool {
        matches!(self, Self::Json | Self::Schema(_))
    }

    pub(super) fn compile(&self, vocabulary: &Arc<Vocabulary>) -> Result<Matcher, ConstraintError> {
        self.check()?;
        let grammar = match self {
            Self::Json => TopLevelGrammar::from_json_schema(schema::prepared(&json!({"type": "object"}))),
            Self::Schema(schema) => TopLevelGrammar::from_json_schema(schema::prepared(schema)),
            Self::Regex(pattern) => TopLevelGrammar::from_regex(pattern),
            Self::Lark(grammar) => TopLevelGrammar::from_lark(grammar.clone()),
        };
        let parser = {
            let vocabulary = Arc::clone(vocabulary);
            in_bounds(move || vocabulary.parsers().create_parser(grammar))?
        };
        Ok(Matcher::new(Ok(
            parser.map_err(|error| classify(&format!("{error:#}")))?
        )))
    }

    fn check(&self) -> Result<(), ConstraintError> {
        let (len, depth) = match self {
            Self::Json => (0, 0),
            Self::Schema(schema) => (schema.to_string().len(), 0),
            Self::Regex(text) | Self::Lark(text) => (text.len(), bracket_depth(text)),
        };
        if len > LONGEST {
            let reason = format!("it has {len} bytes, the limit is {LONGEST}");
            return Err(ConstraintError::TooComplex { reason });
        }
        if depth > DEEPEST {
            let reason = format!("brackets are nested {depth} deep, the limit is {DEEPEST}");
            return Err(ConstraintError::TooComplex { reason });
        }
        if let Self::Lark(text) = self {
            if text.trim().is_empty() {
                return Err(ConstraintError::BadFormat {
                    reason: "the grammar is empty".to_owned(),
                });
            }
        }
        Ok(())
    }
}

/// Runs the compiler with a stack that the longest chain of definitions fits into, since it follows them by recursion,
/// and with a deadline: one that misses it ends by its own limits, but nobody waits for it.
fn in_bounds<T: Send + 'static>(compile: impl FnOnce() -> T + Send + 'static) -> Result<T, ConstraintError> {
    let internal = |reason: String| ConstraintError::Internal { reason };
    let (sender, receiver) = mpsc::sync_channel(1);
    std::thread::Builder::new()
        .name("grammar".to_owned())
        .stack_size(STACK)
        .spawn(move || sender.send(compile()))
        .map_err(|error| internal(error.to_string()))?;
    receiver.recv_timeout(DEADLINE).map_err(|error| match error {
        RecvTimeoutError::Timeout => ConstraintError::TooComplex {
            reason: format!("compiling it takes more than {} s", DEADLINE.as_secs()),
        },
        RecvTimeoutError::Disconnected => internal("the grammar compiler panicked".to_owned()),
    })
}

/// What the compiler says when one of its limits is hit, as opposed to a mistake in the format.
const LIMIT_WORDS: [&str; 6] = [
    "fuel",
    "too large",
    "too complex",
    "too deeply nested",
    "limit",
    "too many",
];

fn classify(message: &str) -> ConstraintError {
    let reason = plain(message);
    if let Some(assertion) = reason.strip_prefix("panic: ") {
        // The compiler asserts some of its limits instead of checking them.
        return ConstraintError::TooComplex {
            reason: format!("the grammar compiler gave up: {assertion}"),
        };
    }
    let lower = reason.to_lowercase();
    if LIMIT_WORDS.iter().any(|words| lower.contains(words)) {
        ConstraintError::TooComplex { reason }
    } else {
        ConstraintError::BadFormat { reason }
    }
}

/// How deep brackets are nested, those behind a backslash left out.
fn bracket_depth(text: &str) -> usize {
    let mut deepest = 0;
    let mut depth = 0_usize;
    let mut escaped = false;
    for letter in text.chars() {
        match letter {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            '(' | '[' | '{' => {
                depth += 1;
                deepest = deepest.max(depth);
            }
            ')' | ']' | '}' => depth = depth.saturating_sub(1),
            _ => {}
        }
    }
    deepest
}
