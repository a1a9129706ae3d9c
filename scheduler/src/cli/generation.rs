//! Flags that shape a generation, as the protocol's fields.
//!
//! Invariant: a flag that isn't given sends nothing, so that the checkpoint's own defaults apply.

use anyhow::Context;
use clap::Args;
use serde_json::{json, Map, Value};

/// Options of a generation, named as in the protocol.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Generation")]
pub(crate) struct GenerationArguments {
    /// Most tokens to generate; -1: to the end of the context, 0: only evaluate the prompt.
    #[arg(long, value_name = "N", allow_hyphen_values = true)]
    pub(crate) num_predict: Option<i64>,
    /// Cap on the context length.
    #[arg(long, value_name = "N")]
    num_ctx: Option<u64>,
    /// Sampling temperature; 0 is greedy.
    #[arg(long, value_name = "T")]
    pub(crate) temperature: Option<f64>,
    /// Sample from the K most likely tokens; 0: off.
    #[arg(long, value_name = "K")]
    top_k: Option<u32>,
    /// Sample from the most likely tokens that make up this probability.
    #[arg(long, value_name = "P")]
    top_p: Option<f64>,
    /// Leave out tokens less likely than this share of the most likely one.
    #[arg(long, value_name = "P")]
    min_p: Option<f64>,
    /// Divide the logits of tokens seen lately by this.
    #[arg(long, value_name = "X")]
    repeat_penalty: Option<f64>,
    /// How many tokens count as lately; -1: all.
    #[arg(long, value_name = "N", allow_hyphen_values = true)]
    repeat_last_n: Option<i64>,
    /// Subtract this from the logits of tokens seen lately.
    #[arg(long, value_name = "X", allow_hyphen_values = true)]
    presence_penalty: Option<f64>,
    /// Subtract this from the logits for each time that a token was seen lately.
    #[arg(long, value_name = "X", allow_hyphen_values = true)]
    frequency_penalty: Option<f64>,
    /// Makes the answer repeatable.
    #[arg(long, value_name = "N", allow_hyphen_values = true)]
    pub(crate) seed: Option<i64>,
    /// End the answer before this text; may be given several times.
    #[arg(long, value_name = "TEXT")]
    stop: Vec<String>,
    /// Go on after the model's end of text.
    #[arg(long)]
    ignore_eos: bool,
    /// Speculative drafting: auto, off, or a fixed depth from 1 to 16.
    #[arg(long, value_name = "MODE", value_parser = draft_mode)]
    pub(crate) draft: Option<String>,
    /// Constrain the answer: `json`, or a file with a JSON Schema.
    #[arg(long, value_name = "FORMAT")]
    format: Option<String>,
    /// Neither read nor write the prefix cache.
    #[arg(long)]
    no_cache: bool,
    /// Let the model think before it answers, where its template can.
    #[arg(long, overrides_with = "no_think")]
    think: bool,
    /// Don't let the model think before it answers, where its template can.
    #[arg(long, overrides_with = "think")]
    no_think: bool,
}

impl GenerationArguments {
    /// The template's `enable_thinking`, where a flag says so.
    pub(crate) fn thinking(&self) -> Option<bool> {
        match (self.think, self.no_think) {
            (true, _) => Some(true),
            (_, true) => Some(false),
            _ => None,
        }
    }

    /// Adds the fields that the flags ask for to a `generate` request.
    pub(crate) fn apply(&self, request: &mut Map<String, Value>) -> anyhow::Result<()> {
        let options = self.options();
        if !options.is_empty() {
            request.insert("options".to_owned(), Value::Object(options));
        }
        if let Some(draft) = &self.draft {
            request.insert("draft".to_owned(), draft_field(draft)?);
        }
        if let Some(format) = &self.format {
            request.insert("format".to_owned(), format_field(format)?);
        }
        if self.no_cache {
            request.insert("cache".to_owned(), Value::Bool(false));
        }
        Ok(())
    }

    fn options(&self) -> Map<String, Value> {
        let mut options = Map::new();
        let mut set = |name: &str, value: Option<Value>| {
            if let Some(value) = value {
                options.insert(name.to_owned(), value);
            }
        };
        set("num_predict", self.num_predict.map(Value::from));
        set("num_ctx", self.num_ctx.map(Value::from));
        set("temperature", self.temperature.map(Value::from));
        set("top_k", self.top_k.map(Value::from));
        set("top_p", self.top_p.map(Value::from));
        set("min_p", self.min_p.map(Value::from));
        set("repeat_penalty", self.repeat_penalty.map(Value::from));
        set("repeat_last_n", self.repeat_last_n.map(Value::from));
        set("presence_penalty", self.presence_penalty.map(Value::from));
        set("frequency_penalty", self.frequency_penalty.map(Value::from));
        set("seed", self.seed.map(Value::from));
        set(
            "stop",
            (!self.stop.is_empty()).then(|| Value::from(self.stop.clone())),
        );
        set("ignore_eos", self.ignore_eos.then_some(Value::Bool(true)));
        options
    }
}

/// The protocol's `draft` for `auto`, `off` or a depth.
pub(crate) fn draft_field(text: &str) -> anyhow::Result<Value> {
    match text {
        "auto" | "off" => Ok(json!({ "mode": text })),
        depth => match depth.parse::<u8>() {
            Ok(depth @ 1..=16) => Ok(json!({"mode": "fixed", "depth": depth})),
            _ => anyhow::bail!("--draft {text:?} is neither auto, off nor a depth from 1 to 16"),
        },
    }
}

/// Checks a drafting mode of the command line.
pub(crate) fn draft_mode(text: &str) -> Result<String, String> {
    match draft_field(text) {
        Ok(_) => Ok(text.to_owned()),
        Err(_) => Err("neither auto, off nor a depth from 1 to 16".to_owned()),
    }
}

fn format_field(text: &str) -> anyhow::Result<Value> {
    if text == "json" {
        return Ok(Value::from("json"));
    }
    let schema = std::fs::read_to_string(text).with_context(|| format!("--format {text}"))?;
    serde_json::from_str(&schema).with_context(|| format!("--format {text} is no JSON Schema"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Command {
        #[command(flatten)]
        generation: GenerationArguments,
    }

    fn request(arguments: &[&str]) -> Value {
        let command = Command::parse_from(std::iter::once(&"test").chain(arguments));
        let mut request = Map::new();
        command.generation.apply(&mut request).unwrap();
        Value::Object(request)
    }

    #[test]
    fn no_flag_sends_nothing() {
        assert_eq!(request(&[]), json!({}));
    }

    #[test]
    fn flags_become_the_fields_of_the_same_name() {
        assert_eq!(
            request(&[
                "--temperature",
                "0",
                "--num-predict",
                "-1",
                "--seed",
                "-3",
                "--stop",
                "a",
                "--stop",
                "b",
                "--draft",
                "3"
            ]),
            json!({"options": {"num_predict": -1, "temperature": 0.0, "seed": -3, "stop": ["a", "b"]},
                   "draft": {"mode": "fixed", "depth": 3}})
        );
        assert_eq!(
            request(&["--draft", "off", "--no-cache"]),
            json!({"draft": {"mode": "off"}, "cache": false})
        );
    }

    #[test]
    fn the_last_of_think_and_no_think_counts() {
        let thinking = |arguments: &[&str]| {
            Command::parse_from(std::iter::once(&"test").chain(arguments))
                .generation
                .thinking()
        };
        assert_eq!(thinking(&[]), None);
        assert_eq!(thinking(&["--think", "--no-think"]), Some(false));
        assert_eq!(thinking(&["--think"]), Some(true));
    }

    #[test]
    fn a_depth_out_of_range_is_refused() {
        assert!(draft_field("17").unwrap_err().to_string().contains("17"));
        assert!(draft_field("on").is_err());
    }
}
