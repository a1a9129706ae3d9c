//! `lookahead inspect`: what a model is and whether it can run, without loading it.

use std::process::{Command, ExitCode};

use anyhow::Context;
use clap::Args;
use lookahead_scheduler::catalog::{self, Kind, Spec};
use lookahead_scheduler::gguf::drafting::{decide, Known, Wish};
use lookahead_scheduler::gguf::find;
use lookahead_scheduler::gguf::header::Header;
use lookahead_scheduler::memory::show_size;
use lookahead_scheduler::programs::Programs;
use serde_json::{json, Value};

use super::programs::ProgramArguments;
use super::style::print_result;

/// Flags of `inspect`.
#[derive(Debug, Args)]
pub(crate) struct InspectArguments {
    /// A checkpoint directory, a GGUF file or a configured name.
    model: String,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    programs: ProgramArguments,
}

/// Prints what the model is; exit status 1 where it can't run.
pub(crate) fn run(arguments: &InspectArguments) -> anyhow::Result<ExitCode> {
    let settings = arguments.programs.settings()?;
    let spec = catalog::find(&settings, &arguments.model)?;
    if spec.kind == Kind::Gguf {
        let report = gguf_report(&spec, settings.llama_server.as_deref())?;
        let runs = report["verdict"]["runs"] == true;
        if arguments.json {
            print_result(&(serde_json::to_string_pretty(&report)? + "\n"))?;
        } else {
            print_result(&shown(&report))?;
        }
        return Ok(if runs {
            ExitCode::SUCCESS
        } else {
            ExitCode::FAILURE
        });
    }
    let programs =
        Programs::find(settings.runner.as_deref()).context("can't find this program's own executable")?;
    let mut command = Command::new(&programs.runner);
    command
        .arg("--inspect")
        .args(arguments.json.then_some("--json"))
        .arg("--model")
        .arg(&spec.path);
    command.args(&spec.args).envs(&spec.env);
    let status = command
        .status()
        .with_context(|| format!("can't start {}", programs.runner.display()))?;
    let code = status.code().and_then(|code| u8::try_from(code).ok());
    Ok(code.map_or(ExitCode::FAILURE, ExitCode::from))
}

fn gguf_report(spec: &Spec, named: Option<&std::path::Path>) -> anyhow::Result<Value> {
    let header = Header::open(&spec.path).with_context(|| format!("{}", spec.path.display()))?;
    let server = find::find(named);
    let known = match &server {
        Ok(server) => find::known_flags(server),
        // Without a server the file is judged as the newest one would.
        Err(_) => Known::from_help("--spec-type draft-mtp draft-dflash"),
    };
    let drafting = decide(&header, None, Wish::Auto, &known);
    let mut reasons: Vec<String> = Vec::new();
    reasons.extend(server.as_ref().err().cloned());
    reasons.extend(drafting.as_ref().err().cloned());
    let draft = drafting.map_or(Value::Null, |drafting| {
        json!({"active": drafting.kind.is_some(), "kind": drafting.kind, "reason": drafting.reason, "warning": drafting.hint})
    });
    let bytes = spec.path.metadata().map_or(0, |meta| meta.len());
    Ok(json!({
        "model": spec.path,
        "verdict": {"runs": reasons.is_empty(), "reasons": reasons},
        "architecture": header.architecture(),
        "name": header.text("general.name"),
        "quantization": header.quantization(),
        "layers": header.own("block_count"),
        "context_length": header.own("context_length"),
        "hidden_size": header.own("embedding_length"),
        "tensors": header.tensors.len(),
        "chat_template": header.text("tokenizer.chat_template").is_some(),
        "draft": draft,
        "memory": {"stored": bytes},
        "llama_server": server.ok(),
    }))
}

fn shown(report: &Value) -> String {
    let mut text = String::new();
    for (name, value) in report.as_object().into_iter().flatten() {
        let words = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        let list = |value: &Value| {
            let words: Vec<String> = value.as_array().into_iter().flatten().map(words).collect();
            words.join("; ")
        };
        let shown = match (name.as_str(), value) {
            (_, Value::Null) => "-".to_owned(),
            ("verdict", value) if value["runs"] == true => "runs".to_owned(),
            ("verdict", value) => format!("can't run: {}", list(&value["reasons"])),
            ("draft", value) => {
                let what = match (&value["kind"], &value["reason"]) {
                    (Value::String(kind), _) => kind.clone(),
                    (_, reason) => format!("none: {}", words(reason)),
                };
                match &value["warning"] {
                    Value::String(warning) => format!("{what} ({warning})"),
                    _ => what,
                }
            }
            ("memory", value) => format!("{} of weights", show_size(value["stored"].as_u64().unwrap_or(0))),
            (_, Value::Bool(true)) => "yes".to_owned(),
            (_, Value::Bool(false)) => "no".to_owned(),
            (_, value) => words(value),
        };
        text += &format!("{:<16}{shown}\n", name.replace('_', " "));
    }
    text
}
