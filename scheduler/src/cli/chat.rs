//! `lookahead chat`: a conversation in the terminal.
//!
//! Invariant: an answer that was interrupted stays in the conversation as far as it came, and one that failed takes its
//! question out again, so that the next question starts from what is on the screen.

use std::io::IsTerminal;
use std::path::Path;
use std::process::ExitCode;

use anyhow::Context;
use base64::Engine;
use clap::Args;
use lookahead_protocol::event::{Done, DoneReason};
use lookahead_scheduler::log;
use rustyline::error::ReadlineError;
use rustyline::DefaultEditor;
use serde_json::{json, Map, Value};

use super::generation::GenerationArguments;
use super::programs::ProgramArguments;
use super::run::user_content;
use super::session::{print_now, statistics, Ending, Session};
use super::style::{paint, say, shows_colours, Tone};

const HELP: &str = "/image FILE   send a picture with the next message
/think on|off|auto   let the model think before it answers, or not
/stats        figures of the last answer
/save FILE    write the conversation as JSON
/clear        forget the conversation
/quit         end (as does Ctrl-D)
\"\"\"           begins and ends a message of several lines
Ctrl-C        ends the answer that is being written";

/// Flags of `chat`.
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  lookahead chat models/Qwen3.5-4B\n  lookahead chat model.gguf --system \"Answer briefly.\"\n\n\
    Type /help inside for its commands."
)]
pub(crate) struct ChatArguments {
    /// A checkpoint directory, a GGUF file or a configured name.
    model: String,
    /// Instructions before the conversation.
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,
    /// Show what the model's process logs.
    #[arg(long, short)]
    verbose: bool,
    #[command(flatten)]
    generation: GenerationArguments,
    #[command(flatten)]
    programs: ProgramArguments,
}

struct Chat {
    session: Session,
    messages: Vec<Value>,
    images: Vec<String>,
    think: Option<bool>,
    last: Option<Done>,
}

/// Converses until the end of the input.
pub(crate) fn run(arguments: &ChatArguments) -> anyhow::Result<ExitCode> {
    log::init(if arguments.verbose { "info" } else { "off" });
    let mut settings = arguments.programs.settings()?;
    settings.relay_stderr = arguments.verbose;
    // While a person thinks about the next question the model stays.
    settings.keep_alive = -1;
    let mut chat = Chat {
        session: Session::start(settings)?,
        messages: Vec::new(),
        images: Vec::new(),
        think: arguments.generation.thinking(),
        last: None,
    };
    chat.clear(arguments);
    let mut editor = DefaultEditor::new().context("the terminal can't be used")?;
    let asks = std::io::stdin().is_terminal();
    let coloured = asks && shows_colours(&std::io::stdout());
    let marks = if asks { [">>> ", "... "] } else { ["", ""] };
    let marks = marks.map(|mark| match mark {
        "" => String::new(),
        mark => paint(mark, Tone::Prompt, coloured),
    });
    loop {
        let text = match read_message(&mut editor, &marks) {
            Ok(text) => text,
            Err(ReadlineError::Interrupted) => {
                say("(Ctrl-D ends)", Tone::Note);
                continue;
            }
            Err(ReadlineError::Eof) => break,
            Err(error) => return Err(error).context("the input can't be read"),
        };
        if text.trim().is_empty() {
            continue;
        }
        if let Some(command) = text.trim().strip_prefix('/') {
            if command == "quit" || command == "exit" {
                break;
            }
            if let Err(error) = chat.command(arguments, command) {
                say(format!("{error:#}"), Tone::Fault);
            }
            continue;
        }
        chat.ask(arguments, &text)?;
    }
    chat.session.end()?;
    Ok(ExitCode::SUCCESS)
}

/// One line, or all lines between two `"""`.
fn read_message(editor: &mut DefaultEditor, marks: &[String; 2]) -> Result<String, ReadlineError> {
    let first = editor.readline(&marks[0])?;
    let message = match first.trim_start().strip_prefix("\"\"\"") {
        None => first,
        Some(start) => {
            let mut text = start.to_owned();
            loop {
                if let Some(whole) = text.trim_end().strip_suffix("\"\"\"") {
                    break whole.trim_matches('\n').to_owned();
                }
                text.push('\n');
                text.push_str(&editor.readline(&marks[1])?);
            }
        }
    };
    // A history that can't be kept is no reason to stop.
    let _ = editor.add_history_entry(&message);
    Ok(message)
}

impl Chat {
    fn clear(&mut self, arguments: &ChatArguments) {
        self.messages.clear();
        self.images.clear();
        if let Some(system) = &arguments.system {
            self.messages.push(json!({"role": "system", "content": system}));
        }
    }

    fn command(&mut self, arguments: &ChatArguments, command: &str) -> anyhow::Result<()> {
        let (name, rest) = command.split_once(' ').unwrap_or((command, ""));
        let rest = rest.trim();
        match name {
            "help" | "?" => say(HELP, Tone::Note),
            "image" | "save" if rest.is_empty() => anyhow::bail!("/{name} takes a file"),
            "image" => {
                let bytes = std::fs::read(rest).with_context(|| format!("/image {rest}"))?;
                self.images
                    .push(base64::engine::general_purpose::STANDARD.encode(bytes));
                say("it goes with the next message", Tone::Note);
            }
            "think" => {
                self.think = match rest {
                    "on" => Some(true),
                    "off" => Some(false),
                    "auto" => None,
                    _ => anyhow::bail!("/think takes on, off or auto"),
                };
            }
            "stats" => match &self.last {
                Some(done) => say(statistics(done), Tone::Note),
                None => say("nothing was answered yet", Tone::Note),
            },
            "save" => self.save(Path::new(rest))?,
            "clear" => self.clear(arguments),
            other => anyhow::bail!("no command /{other}; /help lists them"),
        }
        Ok(())
    }

    fn save(&self, path: &Path) -> anyhow::Result<()> {
        let text = serde_json::to_string_pretty(&self.messages)?;
        std::fs::write(path, text + "\n").with_context(|| format!("/save {}", path.display()))?;
        let count = self.messages.len();
        say(
            format!("{count} messages written to {}", path.display()),
            Tone::Note,
        );
        Ok(())
    }

    fn ask(&mut self, arguments: &ChatArguments, text: &str) -> anyhow::Result<()> {
        let images = std::mem::take(&mut self.images);
        self.messages
            .push(json!({"role": "user", "content": user_content(text, &images)}));
        let mut request = Map::new();
        request.insert("type".to_owned(), Value::from("generate"));
        request.insert("id".to_owned(), Value::from(self.session.next_id()));
        request.insert("model".to_owned(), Value::from(arguments.model.as_str()));
        request.insert("messages".to_owned(), Value::from(self.messages.clone()));
        if let Some(think) = self.think {
            request.insert("think".to_owned(), Value::from(think));
        }
        arguments.generation.apply(&mut request)?;
        let mut answer = String::new();
        let ending = self.session.follow(&Value::Object(request), |event| {
            match (
                event.get("type").and_then(Value::as_str),
                event.get("text").and_then(Value::as_str),
            ) {
                (Some("token"), Some(text)) => {
                    answer.push_str(text);
                    print_now(text)
                }
                _ => Ok(()),
            }
        })?;
        if !answer.is_empty() && !answer.ends_with('\n') {
            print_now("\n")?;
        }
        match ending {
            // Nothing is on the screen that the next question could start from.
            Ending::Done(done) if done.done_reason == DoneReason::Cancelled && answer.is_empty() => {
                self.messages.pop();
            }
            Ending::Done(done) => {
                self.messages
                    .push(json!({"role": "assistant", "content": spoken(&answer)}));
                self.last = Some(*done);
            }
            Ending::Failed(failure) => {
                self.messages.pop();
                say(format!("{}: {}", failure.code, failure.message), Tone::Fault);
            }
            Ending::Answer => {}
        }
        Ok(())
    }
}

/// An answer without the thinking before it, which templates don't want back.
fn spoken(answer: &str) -> &str {
    answer
        .rsplit_once("</think>")
        .map_or(answer, |(_, spoken)| spoken)
        .trim_start_matches('\n')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thinking_does_not_go_back_to_the_model() {
        assert_eq!(spoken("I wonder\n</think>\n\nYes."), "Yes.");
        assert_eq!(spoken("Yes."), "Yes.");
    }
}
