//! `lookahead bench`: how fast a model decodes and prefills here, with and without drafting.

use std::io::IsTerminal;
use std::process::ExitCode;

use anyhow::Context;
use clap::Args;
use indicatif::{ProgressBar, ProgressDrawTarget};
use lookahead_protocol::event::Done;
use lookahead_scheduler::{catalog, log};
use serde_json::{json, Value};

use super::generation::draft_mode;
use super::modes::{median, modes, rate};
use super::programs::ProgramArguments;
use super::session::Session;
use super::style::print_result;

/// Prompts of different kinds: drafting pays on some and not on others.
pub(crate) const PROMPTS: [(&str, &str); 3] = [
    (
        "code",
        "def fibonacci(n):\n    \"\"\"Return the n-th Fibonacci number.\"\"\"\n",
    ),
    ("counting", "Count from 12 to 30: 12, 13, 14, 15, 16,"),
    (
        "prose",
        "The old lighthouse keeper climbed the stairs every evening, and",
    ),
];

/// Flags of `bench`.
#[derive(Debug, Args)]
#[command(
    after_help = "Example:\n  lookahead bench models/Qwen3.5-4B --draft off --draft 2 --draft auto --json"
)]
pub(crate) struct BenchArguments {
    /// A checkpoint directory, a GGUF file or a configured name.
    model: String,
    /// Drafting modes to compare; may be given several times.
    #[arg(long, value_name = "MODE", value_parser = draft_mode, default_values_t = ["off".to_owned(), "1".to_owned(), "2".to_owned(), "4".to_owned(), "auto".to_owned()])]
    draft: Vec<String>,
    /// Tokens to generate.
    #[arg(long, value_name = "N", default_value_t = 128)]
    tokens: u32,
    /// Tokens of the prefill prompt.
    #[arg(long, value_name = "N", default_value_t = 1024)]
    prefill: u32,
    /// Runs of each measurement, of which the median counts.
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    runs: u32,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    programs: ProgramArguments,
}

/// Measures and prints.
pub(crate) fn run(arguments: &BenchArguments) -> anyhow::Result<ExitCode> {
    log::init("off");
    let mut settings = arguments.programs.settings()?;
    settings.relay_stderr = false;
    settings.keep_alive = -1;
    let spec = catalog::find(&settings, &arguments.model)?;
    let names = arguments.draft.iter().map(String::as_str);
    let modes = modes(&mut settings, &arguments.model, &spec, names)?;
    let first = modes.first().context("there is no drafting mode to measure")?;
    let mut session = Session::start(settings)?;
    let steps = (PROMPTS.len() * modes.len() + 1) as u64 * u64::from(arguments.runs);
    let bar = ProgressBar::new(steps);
    if !std::io::stderr().is_terminal() {
        bar.set_draw_target(ProgressDrawTarget::hidden());
    }
    let mut rows = Vec::new();
    for (kind, prompt) in PROMPTS {
        let mut runs: Vec<Vec<Done>> = vec![Vec::new(); modes.len()];
        // Modes take turns, so that a machine that is slow for a while is so for all of them.
        for _ in 0..arguments.runs {
            for (mode, runs) in modes.iter().zip(&mut runs) {
                runs.push(mode.generate(&mut session, prompt, arguments.tokens)?);
                bar.inc(1);
            }
        }
        rows.extend(
            modes
                .iter()
                .zip(&runs)
                .map(|(mode, runs)| row(kind, &mode.name, runs)),
        );
    }
    let mut prefills = Vec::new();
    for run in 0..arguments.runs {
        let done = first.prefill(&mut session, arguments.prefill, run)?;
        prefills.push(rate(done.prompt_eval_count, done.prompt_eval_duration));
        bar.inc(1);
    }
    bar.finish_and_clear();
    session.end()?;
    let report = json!({"model": arguments.model, "tokens": arguments.tokens, "runs": arguments.runs, "decode": rows,
        "prefill": {"tokens": arguments.prefill, "tokens_per_second": median(&mut prefills)}});
    if arguments.json {
        print_result(&(serde_json::to_string_pretty(&report)? + "\n"))?;
    } else {
        print_result(&table(&report))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn row(kind: &str, draft: &str, runs: &[Done]) -> Value {
    let mut rates: Vec<f64> = runs
        .iter()
        .map(|done| rate(done.eval_count, done.eval_duration))
        .collect();
    let (proposed, accepted) = runs.iter().fold((0, 0), |(proposed, accepted), it| {
        (proposed + it.draft.proposed, accepted + it.draft.accepted)
    });
    let share = (proposed > 0).then(|| accepted as f64 / proposed as f64);
    json!({"prompt": kind, "draft": draft, "tokens_per_second": median(&mut rates), "accepted_per_proposed": share})
}

fn table(report: &Value) -> String {
    let mut table = format!(
        "{:<10} {:<6} {:>10} {:>10} {:>9}\n",
        "prompt", "draft", "tokens/s", "to off", "accepted"
    );
    let rows = report["decode"].as_array().cloned().unwrap_or_default();
    for row in &rows {
        let off = rows
            .iter()
            .find(|other| other["prompt"] == row["prompt"] && other["draft"] == "off");
        let speed = row["tokens_per_second"].as_f64().unwrap_or(0.0);
        let ratio = off
            .and_then(|off| off["tokens_per_second"].as_f64())
            .filter(|&off| off > 0.0)
            .map(|off| speed / off);
        table += &format!(
            "{:<10} {:<6} {speed:>10.1} {:>10} {:>9}\n",
            row["prompt"].as_str().unwrap_or_default(),
            row["draft"].as_str().unwrap_or_default(),
            ratio.map_or("-".to_owned(), |ratio| format!("{ratio:.2}x")),
            row["accepted_per_proposed"]
                .as_f64()
                .map_or("-".to_owned(), |share| format!("{:.0} %", 100.0 * share)),
        );
    }
    let prefill = &report["prefill"];
    table += &format!(
        "prefill of {} tokens: {:.1} tokens/s\n",
        prefill["tokens"],
        prefill["tokens_per_second"].as_f64().unwrap_or(0.0)
    );
    table
}
