//! What a request samples with: its own options, else the checkpoint's generation_config.json, else the protocol's table.
//!
//! Invariant: a [`SamplingOptions`] holds only values inside their documented ranges, so nothing behind it checks again. A value
//! that a request gives out of range is an error naming the field; one that a checkpoint gives is reported and passed over.

use lookahead_protocol::request::{Options, MAX_STOPS};
use serde_json::{Map, Value};
use thiserror::Error;

/// Temperatures below this are greedy: divided by less, float32 logits overflow or differ by more than the exponent can hold.
pub const COLDEST: f32 = 1e-6;

/// An option out of its range.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("option `{field}` must be {expected}, got {got}")]
pub struct OptionError {
    /// The option's name on the wire.
    pub field: &'static str,
    /// The range in words.
    pub expected: &'static str,
    /// The value refused.
    pub got: String,
}

/// How far back the penalties look.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Window {
    /// The latest tokens, prompt and generated.
    Last(usize),
    /// Everything.
    All,
}

/// Penalties on tokens that occurred inside the window.
///
/// A logit l of a token that occurred n > 0 times becomes l / repeat (l * repeat where l < 0), less presence, less n * frequency.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PenaltyOptions {
    /// Divides positive logits and multiplies negative ones; 1 is neutral.
    pub repeat: f32,
    /// Subtracted once for a token that occurred.
    pub presence: f32,
    /// Subtracted for each occurrence.
    pub frequency: f32,
    /// The tokens that count.
    pub window: Window,
}

/// Truncation and temperature of a distribution, applied in the order of the fields.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Filter {
    /// Keep the k largest logits, ties to the lowest id; 0 keeps all.
    pub top_k: u32,
    /// Divides the logits before the softmax over what top-k kept; at least [`COLDEST`].
    pub temperature: f32,
    /// In order of falling probability (ties to the lowest id), keep a token while the mass before it is below this; 1 keeps all.
    pub top_p: f32,
    /// Keep a token with at least this share of the best one's probability; 0 keeps all.
    pub min_p: f32,
}

/// A point mass on the largest logit, or a filtered distribution.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Shape {
    /// Temperature 0, or top_k 1: the largest logit, ties to the lowest id.
    Greedy,
    /// Anything else.
    Filtered(Filter),
}

/// A request's options with every default filled in.
#[derive(Debug, Clone, PartialEq)]
pub struct SamplingOptions {
    /// Most tokens to generate; none: to the context's end.
    pub num_predict: Option<usize>,
    /// Cap on the context; none: the model's own.
    pub num_ctx: Option<usize>,
    /// What a token is drawn from.
    pub shape: Shape,
    /// None where they are neutral or their window is empty.
    pub penalties: Option<PenaltyOptions>,
    /// The key of every draw, where the request gave one.
    pub seed: Option<u64>,
    /// Strings that end the text.
    pub stop: Vec<String>,
    /// Whether an end-of-sequence id is an ordinary token.
    pub ignore_eos: bool,
}

/// Sampling values of a checkpoint, each within its range or absent.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct GenerationDefaults {
    temperature: Option<f32>,
    top_k: Option<u32>,
    top_p: Option<f32>,
    min_p: Option<f32>,
    repeat_penalty: Option<f32>,
}

impl GenerationDefaults {
    /// Reads generation_config.json; returns what can't be used as warnings in words.
    ///
    /// `do_sample: false` means greedy, whatever else the file says; absent, the other values hold.
    pub fn from_json(config: &Value) -> (Self, Vec<String>) {
        let mut warnings = Vec::new();
        let Some(fields) = config.as_object() else {
            warnings.push("generation_config.json is not an object and is passed over".to_owned());
            return (Self::default(), warnings);
        };
        let mut number =
            |name: &str, check: &dyn Fn(f64) -> bool| read_number(fields, name, check, &mut warnings);
        let mut defaults = Self {
            temperature: number("temperature", &|v| v >= 0.0).map(|v| v as f32),
            top_k: number("top_k", &|v| {
                v >= 0.0 && v.fract() == 0.0 && v <= f64::from(u32::MAX)
            })
            .map(|v| v as u32),
            top_p: number("top_p", &|v| v > 0.0 && v <= 1.0).map(|v| v as f32),
            min_p: number("min_p", &|v| (0.0..=1.0).contains(&v)).map(|v| v as f32),
            repeat_penalty: number("repetition_penalty", &|v| v > 0.0).map(|v| v as f32),
        };
        match fields.get("do_sample") {
            None | Some(Value::Null | Value::Bool(true)) => {}
            Some(Value::Bool(false)) => defaults.temperature = Some(0.0),
            Some(other) => warnings.push(format!(
                "generation_config.json: `do_sample` is {other} and is passed over"
            )),
        }
        (defaults, warnings)
    }
}

fn read_number(
    fields: &Map<String, Value>,
    name: &str,
    check: &dyn Fn(f64) -> bool,
    warnings: &mut Vec<String>,
) -> Option<f64> {
    let value = fields.get(name).filter(|value| !value.is_null())?;
    let number = value.as_f64().filter(|&v| (v as f32).is_finite() && check(v));
    if number.is_none() {
        warnings.push(format!(
            "generation_config.json: `{name}` is {value} and is passed over"
        ));
    }
    number
}

fn check<T: Copy + ToString>(
    field: &'static str,
    value: T,
    expected: &'static str,
    fits: bool,
) -> Result<T, OptionError> {
    if fits {
        Ok(value)
    } else {
        Err(OptionError {
            field,
            expected,
            got: value.to_string(),
        })
    }
}

impl SamplingOptions {
    /// Fills a request's options from the checkpoint's defaults, then from the protocol's table.
    pub fn resolve(request: &Options, defaults: &GenerationDefaults) -> Result<Self, OptionError> {
        let temperature = request.temperature.or(defaults.temperature).unwrap_or(0.8);
        check(
            "temperature",
            temperature,
            "a number of at least 0",
            temperature >= 0.0 && temperature.is_finite(),
        )?;
        let top_k = request.top_k.or(defaults.top_k).unwrap_or(40);
        let top_p = request.top_p.or(defaults.top_p).unwrap_or(0.9);
        check(
            "top_p",
            top_p,
            "a number above 0 and at most 1",
            top_p > 0.0 && top_p <= 1.0,
        )?;
        let min_p = request.min_p.or(defaults.min_p).unwrap_or(0.0);
        check(
            "min_p",
            min_p,
            "a number from 0 to 1",
            (0.0..=1.0).contains(&min_p),
        )?;
        let shape = if temperature < COLDEST || top_k == 1 {
            Shape::Greedy
        } else {
            Shape::Filtered(Filter {
                top_k,
                temperature,
                top_p,
                min_p,
            })
        };
        Ok(Self {
            num_predict: limit("num_predict", request.num_predict.unwrap_or(-1))?,
            num_ctx: match request.num_ctx {
                Some(n) => Some(check("num_ctx", n, "an integer of at least 1", n >= 1)? as usize),
                None => None,
            },
            shape,
            penalties: resolve_penalties(request, defaults)?,
            seed: request.seed,
            stop: checked_stops(&request.stop)?,
            ignore_eos: request.ignore_eos.unwrap_or(false),
        })
    }
}

/// -1 stands for no limit.
fn limit(field: &'static str, value: i64) -> Result<Option<usize>, OptionError> {
    check(field, value, "an integer of at least -1", value >= -1)?;
    Ok(usize::try_from(value).ok())
}

fn resolve_penalties(
    request: &Options,
    defaults: &GenerationDefaults,
) -> Result<Option<PenaltyOptions>, OptionError> {
    let repeat = request.repeat_penalty.or(defaults.repeat_penalty).unwrap_or(1.0);
    check(
        "repeat_penalty",
        repeat,
        "a number above 0",
        repeat > 0.0 && repeat.is_finite(),
    )?;
    let presence = request.presence_penalty.unwrap_or(0.0);
    check(
        "presence_penalty",
        presence,
        "a finite number",
        presence.is_finite(),
    )?;
    let frequency = request.frequency_penalty.unwrap_or(0.0);
    check(
        "frequency_penalty",
        frequency,
        "a finite number",
        frequency.is_finite(),
    )?;
    let window = match limit("repeat_last_n", request.repeat_last_n.unwrap_or(64))? {
        None => Window::All,
        Some(n) => Window::Last(n),
    };
    let neutral = repeat == 1.0 && presence == 0.0 && frequency == 0.0;
    let off = neutral || window == Window::Last(0);
    Ok((!off).then_some(PenaltyOptions {
        repeat,
        presence,
        frequency,
        window,
    }))
}

fn checked_stops(stops: &[String]) -> Result<Vec<String>, OptionError> {
    check(
        "stop",
        stops.len(),
        "at most 16 strings",
        stops.len() <= MAX_STOPS,
    )?;
    match stops.iter().position(String::is_empty) {
        None => Ok(stops.to_vec()),
        Some(index) => Err(OptionError {
            field: "stop",
            expected: "strings that aren't empty",
            got: format!("an empty one at index {index}"),
        }),
    }
}

#[cfg(test)]
#[path = "options_tests.rs"]
mod tests;
