//! `lookahead tune`: what drafting is worth on this machine.
//!
//! Invariant: a depth is only recommended, and only saved, where generations with it were measured to be faster than without.

use std::path::PathBuf;
use std::process::{Command, ExitCode, Stdio};

use anyhow::Context;
use clap::Args;
use lookahead_protocol::event::Done;
use lookahead_scheduler::catalog::{self, Kind};
use lookahead_scheduler::log;
use lookahead_scheduler::programs::Programs;
use serde_json::{json, Value};

use super::bench::PROMPTS;
use super::modes::{median, modes, rate, Mode};
use super::programs::ProgramArguments;
use super::session::Session;
use super::style::print_result;

/// The least gain that counts, as a ratio: less is within the noise.
const WORTH: f64 = 1.03;
/// What is tried, the one that all others are compared with first.
const MODES: [&str; 6] = ["off", "auto", "1", "2", "3", "4"];

/// Flags of `tune`.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  lookahead tune models/Qwen3.5-4B --save lookahead.toml")]
pub(crate) struct TuneArguments {
    /// A checkpoint directory, a GGUF file or a configured name.
    model: String,
    /// Tokens of each generation.
    #[arg(long, value_name = "N", default_value_t = 96)]
    tokens: u32,
    /// Rounds of measurement.
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    runs: u32,
    /// Append the model with the best setting to this configuration file, if it helps.
    #[arg(long, value_name = "FILE")]
    save: Option<PathBuf>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    programs: ProgramArguments,
}

/// Measures, prints and, where it helps, saves.
pub(crate) fn run(arguments: &TuneArguments) -> anyhow::Result<ExitCode> {
    log::init("off");
    let mut settings = arguments.programs.settings()?;
    settings.relay_stderr = false;
    settings.keep_alive = -1;
    let spec = catalog::find(&settings, &arguments.model)?;
    let programs =
        Programs::find(settings.runner.as_deref()).context("can't find this program's own executable")?;
    let cost = match spec.kind {
        Kind::Mlx => {
            eprintln!("measuring the cost of each width");
            cost_of_widths(&programs, &spec)
        }
        Kind::Gguf => Value::Null,
    };
    let modes = modes(&mut settings, &arguments.model, &spec, MODES.into_iter())?;
    let mut tried: Vec<Tried> = modes.into_iter().map(Tried::new).collect();
    let mut session = Session::start(settings)?;
    for round in 1..=arguments.runs {
        eprintln!("measuring generations, round {round} of {}", arguments.runs);
        for (_, prompt) in PROMPTS {
            // Modes take turns, so that a machine that is slow for a while is so for all of them.
            for mode in &mut tried {
                let done = mode.mode.generate(&mut session, prompt, arguments.tokens)?;
                mode.count(&done);
            }
        }
    }
    let off = tried[0].speeds.clone();
    let rows: Vec<Value> = tried.iter().map(|mode| mode.report(&off)).collect();
    session.end()?;
    let (best, gain) = best_of(&rows);
    let helps = gain >= WORTH && best != "off";
    let report = json!({"model": arguments.model, "cost": cost, "modes": rows, "best": best, "gain": gain, "helps": helps});
    if arguments.json {
        print_result(&(serde_json::to_string_pretty(&report)? + "\n"))?;
    } else {
        print_result(&shown(&report))?;
    }
    if let Some(path) = arguments.save.as_ref().filter(|_| helps) {
        save(path, &arguments.model, &spec.path, &best)?;
        eprintln!("saved to {}", path.display());
    } else if arguments.save.is_some() {
        eprintln!("nothing was saved: drafting doesn't help here");
    }
    Ok(ExitCode::SUCCESS)
}

/// What was measured of one drafting mode.
struct Tried {
    mode: Mode,
    /// Tokens a second, one for each generation.
    speeds: Vec<f64>,
    /// Tested and accepted by position.
    positions: Vec<(u64, u64)>,
}

impl Tried {
    fn new(mode: Mode) -> Self {
        Self {
            mode,
            speeds: Vec::new(),
            positions: Vec::new(),
        }
    }

    fn count(&mut self, done: &Done) {
        self.speeds.push(rate(done.eval_count, done.eval_duration));
        for (at, stats) in done.draft.by_position.iter().flatten().enumerate() {
            self.positions.resize(self.positions.len().max(at + 1), (0, 0));
            self.positions[at].0 += stats.tested;
            self.positions[at].1 += stats.accepted;
        }
    }

    /// With the median ratio to the generations without drafting, each to the one of the same round and prompt.
    fn report(&self, off: &[f64]) -> Value {
        let pairs = self.speeds.iter().zip(off).filter(|(_, &off)| off > 0.0);
        let mut ratios: Vec<f64> = pairs.map(|(speed, off)| speed / off).collect();
        let share = |&(tested, accepted): &(u64, u64)| (tested > 0).then(|| accepted as f64 / tested as f64);
        let acceptance: Vec<Option<f64>> = self.positions.iter().map(share).collect();
        json!({"draft": self.mode.name, "tokens_per_second": median(&mut self.speeds.clone()), "to_off": median(&mut ratios),
            "acceptance": acceptance})
    }
}

/// The runner's own measurement of forwards by width; null where it can't say.
fn cost_of_widths(programs: &Programs, spec: &catalog::Spec) -> Value {
    let mut command = Command::new(&programs.runner);
    command
        .arg("--measure")
        .arg("--model")
        .arg(&spec.path)
        .args(&spec.args)
        .envs(&spec.env);
    let output = command.stdin(Stdio::null()).stderr(Stdio::null()).output();
    output
        .ok()
        .and_then(|output| serde_json::from_slice(&output.stdout).ok())
        .unwrap_or_default()
}

/// The fastest mode and how much faster it is than none.
fn best_of(rows: &[Value]) -> (String, f64) {
    let ratio = |row: &Value| row["to_off"].as_f64().unwrap_or(0.0);
    let best = rows.iter().max_by(|one, two| ratio(one).total_cmp(&ratio(two)));
    let name = best
        .and_then(|best| best["draft"].as_str())
        .unwrap_or("off")
        .to_owned();
    (name, best.map_or(1.0, ratio))
}

fn shown(report: &Value) -> String {
    let mut text = String::new();
    if let Some(widths) = report["cost"]["widths"].as_array() {
        text += &format!(
            "cost of a forward on {}:\n",
            report["cost"]["backend"].as_str().unwrap_or("this machine")
        );
        for width in widths {
            text += &format!(
                "  {:>3} rows {:>9.2} ms\n",
                width["rows"],
                width["milliseconds"].as_f64().unwrap_or(0.0)
            );
        }
    }
    text += &format!(
        "{:<6} {:>10} {:>8}  acceptance by position\n",
        "draft", "tokens/s", "to off"
    );
    for row in report["modes"].as_array().into_iter().flatten() {
        let acceptance: Vec<String> = row["acceptance"]
            .as_array()
            .into_iter()
            .flatten()
            .map(|share| {
                share
                    .as_f64()
                    .map_or("-".to_owned(), |share| format!("{share:.2}"))
            })
            .collect();
        let (mode, speed) = (
            row["draft"].as_str().unwrap_or_default(),
            row["tokens_per_second"].as_f64().unwrap_or(0.0),
        );
        let ratio = row["to_off"].as_f64().unwrap_or(0.0);
        text += &format!(
            "{mode:<6} {speed:>10.1} {:>8}  {}\n",
            format!("{ratio:.2}x"),
            acceptance.join(" ")
        );
    }
    let (best, gain) = (
        report["best"].as_str().unwrap_or_default(),
        report["gain"].as_f64().unwrap_or(1.0),
    );
    if report["helps"] == true {
        text +=
            &format!("drafting helps on this machine: --draft {best} is {gain:.2} times as fast as off\n");
    } else {
        text +=
            &format!("drafting doesn't help on this machine: the best is {gain:.2} times as fast as off\n");
    }
    text
}

fn save(path: &std::path::Path, name: &str, model: &std::path::Path, draft: &str) -> anyhow::Result<()> {
    let before = match std::fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => String::new(),
        Err(error) => return Err(error).with_context(|| format!("{}", path.display())),
    };
    let short = model
        .file_name()
        .map_or(name.to_owned(), |name| name.to_string_lossy().into_owned());
    let mut table: toml::Table = before.parse().with_context(|| format!("{}", path.display()))?;
    let models = table.entry("models").or_insert_with(|| toml::Table::new().into());
    let models = models
        .as_table_mut()
        .with_context(|| format!("{}: `models` is no table", path.display()))?;
    anyhow::ensure!(
        !models.contains_key(&short),
        "{} has a model {short:?} already: set its args to --draft {draft}",
        path.display()
    );
    let mut entry = toml::Table::new();
    entry.insert("path".to_owned(), model.to_string_lossy().into_owned().into());
    entry.insert(
        "args".to_owned(),
        vec!["--draft".to_owned(), draft.to_owned()].into(),
    );
    // Appended as text, so that what a person wrote above keeps its comments and order.
    let mut wrapped = toml::Table::new();
    wrapped.insert(short, entry.into());
    let mut addition = toml::Table::new();
    addition.insert("models".to_owned(), wrapped.into());
    let separator = if before.is_empty() || before.ends_with('\n') {
        ""
    } else {
        "\n"
    };
    std::fs::write(
        path,
        format!("{before}{separator}\n{}", toml::to_string(&addition)?),
    )
    .with_context(|| format!("{}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_best_mode_is_named_with_its_gain() {
        let rows = [
            json!({"draft": "off", "to_off": 1.0}),
            json!({"draft": "2", "to_off": 1.5}),
        ];
        assert_eq!(best_of(&rows), ("2".to_owned(), 1.5));
        assert_eq!(best_of(&rows[..1]), ("off".to_owned(), 1.0));
    }

    #[test]
    fn saving_keeps_what_a_person_wrote() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("c.toml");
        std::fs::write(&path, "# mine\nkeep_alive = 60").unwrap();
        save(&path, "m", std::path::Path::new("/models/Qwen3.5-4B"), "2").unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        assert!(text.starts_with("# mine\n"), "{text}");
        let settings = lookahead_scheduler::config::Settings::from_file(&path).unwrap();
        assert_eq!(settings.models["Qwen3.5-4B"].args, ["--draft", "2"]);
        assert!(save(&path, "m", std::path::Path::new("/models/Qwen3.5-4B"), "3").is_err());
    }
}
