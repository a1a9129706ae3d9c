//! `lookahead run`: one prompt, one answer.

use std::io::{IsTerminal, Read};
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use base64::Engine;
use clap::Args;
use lookahead_protocol::event::DoneReason;
use lookahead_scheduler::log;
use serde_json::{json, Map, Value};

use super::generation::GenerationArguments;
use super::programs::ProgramArguments;
use super::session::{print_now, statistics, Ending, Session};
use super::style::{say, Tone};

/// Flags of `run`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    lookahead run models/Qwen3.5-4B \"Count from 12 to 30.\"\n  \
    git diff | lookahead run qwen --config lookahead.toml --system \"Write a commit message.\"\n  \
    lookahead run model.gguf --raw \"fn main() {\" --temperature 0 --num-predict 64\n\n\
    Ctrl-C ends the answer; a second one ends the program.")]
pub(crate) struct RunArguments {
    /// A checkpoint directory, a GGUF file or a configured name.
    model: String,
    /// The prompt; without it stdin is read.
    prompt: Option<String>,
    /// Send the prompt as it is, without the chat template.
    #[arg(long, conflicts_with_all = ["system", "think", "no_think"])]
    raw: bool,
    /// Instructions before the prompt.
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,
    /// A picture to go with the prompt; may be given several times.
    #[arg(long, value_name = "FILE")]
    image: Vec<PathBuf>,
    /// Print the protocol's events instead of the text.
    #[arg(long)]
    json: bool,
    /// No statistics at the end.
    #[arg(long, short)]
    quiet: bool,
    /// Show what the model's process logs.
    #[arg(long, short)]
    verbose: bool,
    #[command(flatten)]
    generation: GenerationArguments,
    #[command(flatten)]
    programs: ProgramArguments,
}

/// Answers the prompt.
pub(crate) fn run(arguments: &RunArguments) -> anyhow::Result<ExitCode> {
    log::init(if arguments.verbose { "info" } else { "off" });
    let prompt = match &arguments.prompt {
        Some(prompt) => prompt.clone(),
        None => read_prompt()?,
    };
    let mut settings = arguments.programs.settings()?;
    settings.relay_stderr = arguments.verbose;
    let mut session = Session::start(settings)?;
    let request = request(arguments, &prompt, session.next_id())?;
    let json = arguments.json;
    let mut at_line_start = true;
    let ending = session.follow(&request, |event| {
        if json {
            return print_now(&format!("{}\n", Value::Object(event.clone())));
        }
        if let (Some("token"), Some(text)) = (
            event.get("type").and_then(Value::as_str),
            event.get("text").and_then(Value::as_str),
        ) {
            if !text.is_empty() {
                at_line_start = text.ends_with('\n');
                print_now(text)?;
            }
        }
        Ok(())
    })?;
    if !json && !at_line_start && matches!(ending, Ending::Done(_)) {
        // A reader that has gone has no use for the last line end either.
        let _ = print_now("\n");
    }
    let interrupted = session.interruptions() > 0;
    let code = match &ending {
        Ending::Done(done) => {
            if !arguments.quiet {
                say(statistics(done), Tone::Note);
            }
            if interrupted && done.done_reason == DoneReason::Cancelled {
                ExitCode::from(130)
            } else {
                ExitCode::SUCCESS
            }
        }
        Ending::Failed(failure) => {
            say(
                format!("lookahead: {}: {}", failure.code, failure.message),
                Tone::Fault,
            );
            ExitCode::FAILURE
        }
        Ending::Answer => ExitCode::SUCCESS,
    };
    session.end()?;
    Ok(code)
}

fn read_prompt() -> anyhow::Result<String> {
    let mut stdin = std::io::stdin();
    anyhow::ensure!(
        !stdin.is_terminal(),
        "no prompt: give it as an argument or on stdin"
    );
    let mut bytes = Vec::new();
    stdin.read_to_end(&mut bytes).context("stdin can't be read")?;
    let mut text = String::from_utf8(bytes).context("the prompt on stdin is not UTF-8")?;
    if text.ends_with('\n') {
        text.pop();
    }
    Ok(text)
}

fn request(arguments: &RunArguments, prompt: &str, id: String) -> anyhow::Result<Value> {
    let images = arguments.image.iter().map(|path| {
        let bytes = std::fs::read(path).with_context(|| format!("--image {}", path.display()))?;
        Ok(base64::engine::general_purpose::STANDARD.encode(bytes))
    });
    let images = images.collect::<anyhow::Result<Vec<String>>>()?;
    let mut request = Map::new();
    request.insert("type".to_owned(), Value::from("generate"));
    request.insert("id".to_owned(), Value::from(id));
    request.insert("model".to_owned(), Value::from(arguments.model.as_str()));
    if arguments.raw {
        request.insert("prompt".to_owned(), Value::from(prompt));
        if !images.is_empty() {
            request.insert("images".to_owned(), Value::from(images));
        }
    } else {
        let mut messages = Vec::new();
        if let Some(system) = &arguments.system {
            messages.push(json!({"role": "system", "content": system}));
        }
        messages.push(json!({"role": "user", "content": user_content(prompt, &images)}));
        request.insert("messages".to_owned(), Value::from(messages));
        if let Some(think) = arguments.generation.thinking() {
            request.insert("think".to_owned(), Value::from(think));
        }
    }
    arguments.generation.apply(&mut request)?;
    Ok(Value::Object(request))
}

/// A user's message: text alone, or pictures before the text.
pub(crate) fn user_content(text: &str, images: &[String]) -> Value {
    if images.is_empty() {
        return Value::from(text);
    }
    let mut parts: Vec<Value> = images
        .iter()
        .map(|data| json!({"type": "image", "data": data}))
        .collect();
    parts.push(json!({"type": "text", "text": text}));
    Value::from(parts)
}
