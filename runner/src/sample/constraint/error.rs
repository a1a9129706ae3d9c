//! Why a constraint can't be built or used.

/// Longest reason passed on, in characters; grammar compilers can quote whole grammars.
const LONGEST: usize = 600;

/// What went wrong with a constrained request.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConstraintError {
    /// The format is wrong, or asks for what isn't supported.
    #[error("format: {reason}")]
    BadFormat {
        /// What, in the grammar compiler's words.
        reason: String,
    },
    /// The format, or a step through it, exceeds the limits on time and memory.
    #[error("format is too complex: {reason}")]
    TooComplex {
        /// The limit that was hit.
        reason: String,
    },
    /// The format can't be satisfied from where the output has come to.
    #[error("format can't be continued by any token, it has parts that nothing satisfies")]
    DeadEnd,
    /// An id was committed that the mask doesn't allow: a fault of the caller.
    #[error("token id {id} isn't allowed by the format")]
    Illegal {
        /// The id.
        id: u32,
    },
    /// The grammar engine failed.
    #[error("constrained output failed: {reason}")]
    Internal {
        /// What it said.
        reason: String,
    },
}

impl ConstraintError {
    /// Whether the request's format is at fault, rather than this program.
    #[must_use]
    pub fn is_bad_format(&self) -> bool {
        matches!(
            self,
            Self::BadFormat { .. } | Self::TooComplex { .. } | Self::DeadEnd
        )
    }
}

/// What the engine says of a step that hit a limit.
const STEP_LIMITS: [&str; 3] = ["lexer error:", "parser error:", "parsertoocomplex"];

/// The error of a failed step, told apart by the engine's words: its own state doesn't keep the cause.
pub(super) fn of_step(message: &str) -> ConstraintError {
    let reason = plain(message);
    let lower = reason.to_lowercase();
    if lower.starts_with("noextension") {
        ConstraintError::DeadEnd
    } else if STEP_LIMITS.iter().any(|words| lower.starts_with(words)) {
        ConstraintError::TooComplex { reason }
    } else {
        ConstraintError::Internal { reason }
    }
}

/// A reason in one line and of sensible length, without the engine's own markers and backtraces.
pub(super) fn plain(reason: &str) -> String {
    let markers = ["\n<state>", "<non-verbose/>", "\n<backtrace>"];
    let end = markers
        .iter()
        .filter_map(|marker| reason.find(marker))
        .min()
        .unwrap_or(reason.len());
    let words: Vec<&str> = reason[..end].split_whitespace().collect();
    let line = words.join(" ");
    match line.char_indices().nth(LONGEST) {
        Some((cut, _)) => format!("{} …", &line[..cut]),
        None => line,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reasons_are_one_line_without_markers() {
        assert_eq!(plain("bad\n  thing\n<state>\nx"), "bad thing");
        assert_eq!(plain("panic: x\n<backtrace>\n1: y"), "panic: x");
        assert_eq!(plain("a\n<non-verbose/>"), "a");
        assert_eq!(plain(&"é".repeat(1000)).chars().count(), LONGEST + 2);
    }
}
