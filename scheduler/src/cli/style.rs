//! What people see on their terminal beside the result.
//!
//! Invariant: colours only where a terminal shows them and `NO_COLOR` is unset, and a reader of stdout that goes away early is no
//! failure.

use std::fmt::Display;
use std::io::{IsTerminal, Write};

/// What a text is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Tone {
    /// Where the person writes.
    Prompt,
    /// Figures and remarks.
    Note,
    /// Something went wrong.
    Fault,
}

/// The text in its tone's colour where `coloured`.
pub(crate) fn paint(text: impl Display, tone: Tone, coloured: bool) -> String {
    if !coloured {
        return text.to_string();
    }
    let code = match tone {
        Tone::Prompt => "1;36",
        Tone::Note => "2",
        Tone::Fault => "31",
    };
    format!("\x1b[{code}m{text}\x1b[0m")
}

/// Whether a stream shows colours.
pub(crate) fn shows_colours(stream: &impl IsTerminal) -> bool {
    stream.is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
}

/// Writes a line to stderr.
pub(crate) fn say(text: impl Display, tone: Tone) {
    eprintln!("{}", paint(text, tone, shows_colours(&std::io::stderr())));
}

/// Writes a command's result to stdout.
pub(crate) fn print_result(text: &str) -> std::io::Result<()> {
    let mut stdout = std::io::stdout().lock();
    let written = stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush());
    match written {
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn colours_are_only_for_terminals() {
        assert_eq!(paint("x", Tone::Fault, false), "x");
        assert_eq!(paint("x", Tone::Fault, true), "\x1b[31mx\x1b[0m");
    }
}
