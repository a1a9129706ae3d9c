//! Sampling and drafting options: every value that is set lies in the range its documentation gives. An unset one is
//! `None`, since its default comes from the checkpoint first and from this table last.

use serde::{Serialize, Serializer};

use super::fields::{Fault, Field, Result};

/// The deepest draft that a request may ask for.
pub const MAX_DRAFT_DEPTH: u8 = 16;

/// The most stop strings that a request may have.
pub const MAX_STOPS: usize = 16;

/// `options` of a `generate` request; names and meaning as in Ollama's API.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Options {
    /// Most tokens to generate, at least -1: -1 to the context's end (the default), 0 prefill only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub num_predict: Option<i64>,
    /// Cap on prompt and generated tokens together, at least 1; the default is the model's context length.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub num_ctx: Option<u64>,
    /// At least 0; 0 is greedy. Default 0.8.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub temperature: Option<f32>,
    /// Keep the k most probable tokens; 0 is off. Default 40.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub top_k: Option<u32>,
    /// Keep the most probable tokens that reach this probability together; in (0, 1], 1 is off. Default 0.9.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub top_p: Option<f32>,
    /// Keep tokens with at least this share of the best one's probability; in [0, 1], 0 is off. Default 0.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub min_p: Option<f32>,
    /// Above 0; 1 is off. Default 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub repeat_penalty: Option<f32>,
    /// How many of the latest prompt and generated tokens the penalties look at, at least -1: -1 all, 0 none. Default 64.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub repeat_last_n: Option<i64>,
    /// Any finite number; 0 is off. Default 0.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub presence_penalty: Option<f32>,
    /// Any finite number; 0 is off. Default 0.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub frequency_penalty: Option<f32>,
    /// Key of the request's random numbers; unset draws one. The wire takes any integer of 64 bits: a negative one stands
    /// for its two's complement, so -1 is a seed like any other.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub seed: Option<u64>,
    /// Strings that end the request, each non-empty, at most [`MAX_STOPS`].
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub stop: Vec<String>,
    /// Treat the model's end-of-sequence ids as ordinary tokens. Default false.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ignore_eos: Option<bool>,
}

impl Options {
    const FIELDS: [&'static str; 13] = [
        "num_predict",
        "num_ctx",
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "repeat_penalty",
        "repeat_last_n",
        "presence_penalty",
        "frequency_penalty",
        "seed",
        "stop",
        "ignore_eos",
    ];

    pub(super) fn is_unset(&self) -> bool {
        *self == Self::default()
    }

    pub(super) fn read(field: Field) -> Result<Self> {
        let mut fields = field.object(&Self::FIELDS)?;
        let mut number = |name: &str, expected: &str, accept: fn(f32) -> bool| {
            fields
                .take(name)
                .map(|field| field.number(expected, accept))
                .transpose()
        };
        let temperature = number("temperature", "a number of at least 0", |t| t >= 0.0)?;
        let top_p = number("top_p", "a number above 0 and at most 1", |p| p > 0.0 && p <= 1.0)?;
        let min_p = number("min_p", "a number from 0 to 1", |p| (0.0..=1.0).contains(&p))?;
        let repeat_penalty = number("repeat_penalty", "a number above 0", |p| p > 0.0)?;
        let presence_penalty = number("presence_penalty", "a finite number", |_| true)?;
        let frequency_penalty = number("frequency_penalty", "a finite number", |_| true)?;
        let mut from_minus_one = |name: &str| {
            let read = |field: Field| field.integer("an integer of at least -1", |n| n >= -1);
            fields.take(name).map(read).transpose()
        };
        let num_predict = from_minus_one("num_predict")?;
        let repeat_last_n = from_minus_one("repeat_last_n")?;
        let num_ctx = fields.take("num_ctx");
        let top_k = fields.take("top_k");
        Ok(Self {
            num_predict,
            num_ctx: num_ctx
                .map(|f| f.unsigned("an integer of at least 1", |n| n >= 1))
                .transpose()?,
            temperature,
            top_k: top_k
                .map(|f| f.unsigned("an integer from 0 to 4294967295", |_| true))
                .transpose()?,
            top_p,
            min_p,
            repeat_penalty,
            repeat_last_n,
            presence_penalty,
            frequency_penalty,
            seed: fields.take("seed").map(read_seed).transpose()?,
            stop: fields
                .take("stop")
                .map(read_stops)
                .transpose()?
                .unwrap_or_default(),
            ignore_eos: fields.take("ignore_eos").map(Field::boolean).transpose()?,
        })
    }
}

fn read_seed(field: Field) -> Result<u64> {
    let number = &field.value;
    let bits = number
        .as_u64()
        .or_else(|| number.as_i64().map(|seed| seed as u64));
    bits.ok_or_else(|| field.refuse("an integer of at most 64 bits"))
}

fn read_stops(field: Field) -> Result<Vec<String>> {
    let path = field.path.clone();
    let stops = field
        .items()?
        .map(Field::non_empty_string)
        .collect::<Result<Vec<_>>>()?;
    if stops.len() > MAX_STOPS {
        return Err(Fault::invalid(format!(
            "field `{path}` must be at most {MAX_STOPS} strings, got {}",
            stops.len()
        )));
    }
    Ok(stops)
}

/// `draft` of a `generate` request.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DraftOptions {
    /// How the depth is chosen.
    pub mode: DraftMode,
    /// Never draft deeper than this, 0 to [`MAX_DRAFT_DEPTH`], whatever `mode` says; 0 is as good as off.
    pub max_depth: Option<u8>,
    /// The acceptance rule, where the request names one; see [`super::Generate::verify`].
    pub verify: Option<Verify>,
}

/// How deep a request drafts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum DraftMode {
    /// As deep as pays, by live measurement.
    #[default]
    Auto,
    /// Not at all.
    Off,
    /// The same depth in every round.
    Fixed {
        /// 1 to [`MAX_DRAFT_DEPTH`].
        depth: u8,
    },
}

/// The rule that accepts or refuses drafted tokens. Both sample exactly from the target's distribution.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Verify {
    /// Rejection sampling: accept with min(1, p/q), draw from the residual at the first refusal. The most acceptance.
    Rejection,
    /// Draft and target draw with the same noise, a function of (seed, position): the same tokens at any depth.
    Coupled,
}

impl DraftOptions {
    pub(super) fn is_unset(&self) -> bool {
        *self == Self::default()
    }

    pub(super) fn read(field: Field) -> Result<Self> {
        let mut fields = field.object(&["mode", "depth", "max_depth", "verify"])?;
        let depth = fields
            .take("depth")
            .map(|f| {
                f.unsigned("an integer from 1 to 16", |n| {
                    (1..=u64::from(MAX_DRAFT_DEPTH)).contains(&n)
                })
            })
            .transpose()?;
        let max_depth = fields
            .take("max_depth")
            .map(|f| f.unsigned("an integer from 0 to 16", |n| n <= u64::from(MAX_DRAFT_DEPTH)))
            .transpose()?;
        let verify = fields.take("verify").map(read_verify).transpose()?;
        let mode = fields.take("mode");
        let depth_path = fields.path_of("depth");
        let mode = match (
            mode.as_ref().map_or(Some("auto"), |mode| mode.value.as_str()),
            depth,
            &mode,
        ) {
            (Some("auto"), None, _) => DraftMode::Auto,
            (Some("off"), None, _) => DraftMode::Off,
            (Some("fixed"), Some(depth), _) => DraftMode::Fixed { depth },
            (Some("fixed"), None, _) => {
                return Err(Fault::invalid(format!(
                    "field `{depth_path}` is missing: mode \"fixed\" needs it"
                )))
            }
            (Some("auto" | "off"), Some(_), _) | (_, _, None) => {
                return Err(Fault::invalid(format!(
                    "field `{depth_path}` belongs to mode \"fixed\" only"
                )))
            }
            (_, _, Some(mode)) => return Err(mode.refuse("\"auto\", \"off\" or \"fixed\"")),
        };
        Ok(Self {
            mode,
            max_depth,
            verify,
        })
    }
}

fn read_verify(field: Field) -> Result<Verify> {
    match field.value.as_str() {
        Some("rejection") => Ok(Verify::Rejection),
        Some("coupled") => Ok(Verify::Coupled),
        _ => Err(field.refuse("\"rejection\" or \"coupled\"")),
    }
}

impl Serialize for DraftOptions {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        use serde::ser::SerializeMap;
        let mut map = serializer.serialize_map(None)?;
        match self.mode {
            DraftMode::Auto => map.serialize_entry("mode", "auto")?,
            DraftMode::Off => map.serialize_entry("mode", "off")?,
            DraftMode::Fixed { depth } => {
                map.serialize_entry("mode", "fixed")?;
                map.serialize_entry("depth", &depth)?;
            }
        }
        if let Some(max_depth) = self.max_depth {
            map.serialize_entry("max_depth", &max_depth)?;
        }
        if let Some(verify) = self.verify {
            map.serialize_entry("verify", &verify)?;
        }
        map.end()
    }
}
