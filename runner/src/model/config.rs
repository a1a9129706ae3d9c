//! `config.json`: what a checkpoint says about its architecture.
//!
//! Invariant: a [`ModelConfig`] has only values that a model can be built from: every size is in range, heads divide, the
//! rotary dimensions are even and covered by the M-RoPE sections. What a config may leave out has the family's default; what
//! must not be guessed (rope theta above all) is an error.
//! Source: the released configs of Qwen3.5, 3.6, 3.8 and Qwen3-Next.

use serde_json::{Map, Value};
use std::path::Path;

use super::error::{LoadError, Result};
use super::fields::{read_object, Fields};
use super::vision_config::VisionConfig;

pub use super::family::{supported_architectures, Family};
pub use super::rope_config::RopeConfig;

/// The file.
pub const CONFIG_FILE: &str = "config.json";

/// Largest value of any width; far above every release, far below overflow of a product of two.
const MAX_WIDTH: usize = 1 << 20;
/// Largest number of layers, heads or experts.
const MAX_COUNT: usize = 1 << 14;

/// What mixes tokens in a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LayerKind {
    /// Gated delta net ("linear_attention").
    Linear,
    /// Full attention.
    Full,
}

/// The gated delta net's dimensions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeltaConfig {
    /// Key (and query) heads, nk.
    pub key_heads: usize,
    /// Value heads, nv; a multiple of nk.
    pub value_heads: usize,
    /// Width of a key head, dk.
    pub key_dim: usize,
    /// Width of a value head, dv.
    pub value_dim: usize,
    /// Taps of the depthwise convolution.
    pub conv_kernel: usize,
}

impl DeltaConfig {
    /// Channels of the convolution: queries, keys and values.
    pub fn channels(&self) -> usize {
        2 * self.key_width() + self.value_width()
    }

    /// nk * dk.
    pub fn key_width(&self) -> usize {
        self.key_heads * self.key_dim
    }

    /// nv * dv.
    pub fn value_width(&self) -> usize {
        self.value_heads * self.value_dim
    }
}

/// Mixture-of-experts dimensions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MoeConfig {
    /// Experts.
    pub experts: usize,
    /// Experts a token.
    pub per_token: usize,
    /// Width inside an expert.
    pub intermediate: usize,
    /// Width inside the shared expert.
    pub shared_intermediate: usize,
    /// Whether the chosen experts' weights are made to sum to one.
    pub renormalise: bool,
}

/// `tie_word_embeddings` as it is written. The tensors decide; these only show a contradiction.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct TieClaims {
    /// Outer level.
    pub outer: Option<bool>,
    /// In `text_config`.
    pub inner: Option<bool>,
}

/// Ids of the tokens around and in place of pictures.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct MediaTokens {
    /// Placeholder of one merged image patch.
    pub image: Option<u32>,
    /// Placeholder of one merged video patch.
    pub video: Option<u32>,
    /// Opens a picture.
    pub start: Option<u32>,
    /// Closes it.
    pub end: Option<u32>,
}

/// A checked config.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelConfig {
    /// Family.
    pub family: Family,
    /// The name that the config itself gives.
    pub architecture: String,
    /// Width of the residual stream, D.
    pub hidden_size: usize,
    /// Kind of every layer of the trunk.
    pub layers: Vec<LayerKind>,
    /// Whether each layer of the trunk has experts.
    pub sparse: Vec<bool>,
    /// Query heads of full attention.
    pub heads: usize,
    /// Key-value heads of full attention.
    pub kv_heads: usize,
    /// Width of such a head.
    pub head_dim: usize,
    /// Rows of the embedding, padding included.
    pub vocab_size: usize,
    /// Width inside a dense feed-forward part; 0 where no layer has one.
    pub intermediate_size: usize,
    /// Experts, where the family has them.
    pub moe: Option<MoeConfig>,
    /// Added to mean squares by every norm of the text model.
    pub rms_norm_eps: f64,
    /// Delta net.
    pub delta: DeltaConfig,
    /// Rotary embedding.
    pub rope: RopeConfig,
    /// Longest sequence.
    pub context_length: usize,
    /// `tie_word_embeddings`.
    pub tie: TieClaims,
    /// Layers of the MTP head that the config claims; tensors decide.
    pub mtp_layers: usize,
    /// Whether the head is said to have an embedding of its own.
    pub mtp_dedicated_embeddings: bool,
    /// EOS ids that this file names; never the whole set.
    pub eos_ids: Vec<u32>,
    /// Vision tower, where the checkpoint is said to have one.
    pub vision: Option<VisionConfig>,
    /// Picture tokens.
    pub media: MediaTokens,
    /// The outer object, for what other concepts read from it (quantisation, files named in it).
    pub raw: Map<String, Value>,
}

impl ModelConfig {
    /// Reads and checks `dir/config.json`.
    pub fn read(dir: &Path) -> Result<Self> {
        match read_object(dir, CONFIG_FILE)? {
            Some(top) => Self::parse(top),
            None => {
                let empty = std::fs::read_dir(dir).is_ok_and(|mut entries| entries.next().is_none());
                Err(LoadError::NoConfig {
                    dir: dir.to_owned(),
                    empty,
                })
            }
        }
    }

    /// Checks a parsed file.
    pub fn parse(top: Map<String, Value>) -> Result<Self> {
        let outer = Fields::new(CONFIG_FILE, "", &top);
        let inner = outer.object("text_config")?;
        let (family, architecture) = Family::find(&top, inner.unwrap_or(&top))?;
        let t = match inner {
            Some(map) => Fields::new(CONFIG_FILE, "text_config.", map),
            None => outer,
        };
        refuse_variants(&t)?;
        let hidden_size = t.need_size("hidden_size", 1..=MAX_WIDTH)?;
        let heads = t.need_size("num_attention_heads", 1..=MAX_COUNT)?;
        let kv_heads = t.need_size("num_key_value_heads", 1..=MAX_COUNT)?;
        divides(&t, "num_attention_heads", heads, "num_key_value_heads", kv_heads)?;
        let head_dim = match t.size("head_dim", 1..=MAX_COUNT)? {
            Some(n) => n,
            None if hidden_size % heads == 0 => hidden_size / heads,
            None => {
                return Err(t.missing(
                    "head_dim",
                    " and hidden_size is not a multiple of num_attention_heads",
                ))
            }
        };
        let layers = layer_kinds(&t)?;
        let moe = if family == Family::Qwen35 {
            None
        } else {
            Some(moe(&t)?)
        };
        let sparse = sparse_layers(&t, family, layers.len())?;
        let dense = sparse.iter().any(|s| !s);
        let intermediate_size = match t.size("intermediate_size", 1..=MAX_WIDTH)? {
            None if dense => return Err(t.missing("intermediate_size", "")),
            found => found.unwrap_or(0),
        };
        let mtp_layers = match t.size("mtp_num_hidden_layers", 0..=MAX_COUNT)? {
            Some(n) => n,
            None => t.size("num_nextn_predict_layers", 0..=MAX_COUNT)?.unwrap_or(0),
        };
        let vision = match outer.object("vision_config")? {
            Some(map) if family != Family::Qwen3Next => Some(VisionConfig::parse(
                &Fields::new(CONFIG_FILE, "vision_config.", map),
                hidden_size,
            )?),
            _ => None,
        };
        let tie_inner = inner
            .map(|_| t.flag("tie_word_embeddings"))
            .transpose()?
            .flatten();
        let id = |name: &str| outer.ids(name).map(|ids| ids.first().copied());
        let mut eos_ids = outer.ids("eos_token_id")?;
        eos_ids.extend(t.ids("eos_token_id")?);
        eos_ids.sort_unstable();
        eos_ids.dedup();
        let config = Self {
            family,
            architecture,
            hidden_size,
            sparse,
            heads,
            kv_heads,
            head_dim,
            vocab_size: t.need_size("vocab_size", 1..=1 << 24)?,
            intermediate_size,
            moe,
            rms_norm_eps: t.positive("rms_norm_eps", 1.0)?.unwrap_or(1e-6),
            delta: delta(&t)?,
            rope: RopeConfig::parse(&t, head_dim)?,
            context_length: t
                .size("max_position_embeddings", 1..=1 << 30)?
                .unwrap_or(DEFAULT_CONTEXT),
            tie: TieClaims {
                outer: outer.flag("tie_word_embeddings")?,
                inner: tie_inner,
            },
            mtp_layers,
            mtp_dedicated_embeddings: t.flag("mtp_use_dedicated_embeddings")?.unwrap_or(false),
            eos_ids,
            vision,
            media: MediaTokens {
                image: id("image_token_id")?,
                video: id("video_token_id")?,
                start: id("vision_start_token_id")?,
                end: id("vision_end_token_id")?,
            },
            layers,
            raw: Map::new(),
        };
        Ok(Self { raw: top, ..config })
    }

    /// Number of layers of `kind` in the trunk.
    pub fn count(&self, kind: LayerKind) -> usize {
        self.layers.iter().filter(|k| **k == kind).count()
    }
}

/// The releases' context length, for configs that leave it out.
const DEFAULT_CONTEXT: usize = 262_144;

/// Switches that no release sets otherwise: another value is another model.
fn refuse_variants(t: &Fields<'_>) -> Result<()> {
    for (name, wanted) in [("attention_bias", false), ("attn_output_gate", true)] {
        if let (Some(found), Some(value)) = (t.flag(name)?, t.get(name)) {
            if found != wanted {
                return Err(t.unsupported(name, value, format!("only {wanted}")));
            }
        }
    }
    for (name, wanted) in [
        ("hidden_act", ["silu", "swish"].as_slice()),
        ("output_gate_type", ["silu", "swish"].as_slice()),
    ] {
        if let (Some(found), Some(value)) = (t.text(name)?, t.get(name)) {
            if !wanted.contains(&found) {
                return Err(t.unsupported(name, value, format!("only {}", wanted.join(" and "))));
            }
        }
    }
    Ok(())
}

fn divides(t: &Fields<'_>, name: &str, whole: usize, part_name: &str, part: usize) -> Result<()> {
    if whole.is_multiple_of(part) {
        return Ok(());
    }
    Err(t.bad(
        name,
        &Value::from(whole),
        format!("a multiple of {part_name}, which is {part}"),
    ))
}

/// `layer_types` where given, else every `full_attention_interval`-th layer is a full one.
fn layer_kinds(t: &Fields<'_>) -> Result<Vec<LayerKind>> {
    let count = t.need_size("num_hidden_layers", 1..=MAX_COUNT)?;
    let every = t.size("full_attention_interval", 1..=MAX_COUNT)?.unwrap_or(4);
    let Some(types) = t.list("layer_types")? else {
        let kind = |i: usize| {
            if (i + 1).is_multiple_of(every) {
                LayerKind::Full
            } else {
                LayerKind::Linear
            }
        };
        return Ok((0..count).map(kind).collect());
    };
    if types.len() != count {
        let expected = format!("{count} entries, as num_hidden_layers says");
        return Err(t.bad(
            "layer_types",
            &Value::from(format!("{} entries", types.len())),
            expected,
        ));
    }
    types
        .iter()
        .map(|v| match v.as_str() {
            Some("linear_attention") => Ok(LayerKind::Linear),
            Some("full_attention") => Ok(LayerKind::Full),
            _ => Err(t.unsupported("layer_types", v, "only linear_attention and full_attention")),
        })
        .collect()
}

fn delta(t: &Fields<'_>) -> Result<DeltaConfig> {
    let config = DeltaConfig {
        key_heads: t.need_size("linear_num_key_heads", 1..=MAX_COUNT)?,
        value_heads: t.need_size("linear_num_value_heads", 1..=MAX_COUNT)?,
        key_dim: t.need_size("linear_key_head_dim", 1..=MAX_COUNT)?,
        value_dim: t.need_size("linear_value_head_dim", 1..=MAX_COUNT)?,
        conv_kernel: t.size("linear_conv_kernel_dim", 2..=64)?.unwrap_or(4),
    };
    divides(
        t,
        "linear_num_value_heads",
        config.value_heads,
        "linear_num_key_heads",
        config.key_heads,
    )?;
    Ok(config)
}

fn moe(t: &Fields<'_>) -> Result<MoeConfig> {
    let experts = t.need_size("num_experts", 1..=MAX_COUNT)?;
    Ok(MoeConfig {
        experts,
        per_token: t.need_size("num_experts_per_tok", 1..=experts)?,
        intermediate: t.need_size("moe_intermediate_size", 1..=MAX_WIDTH)?,
        shared_intermediate: t.need_size("shared_expert_intermediate_size", 1..=MAX_WIDTH)?,
        renormalise: t.flag("norm_topk_prob")?.unwrap_or(true),
    })
}

/// Which layers have experts: all of a Qwen3.5 mixture, and of Qwen3-Next those that its two fields leave.
fn sparse_layers(t: &Fields<'_>, family: Family, count: usize) -> Result<Vec<bool>> {
    let step = t.size("decoder_sparse_step", 1..=MAX_COUNT)?.unwrap_or(1);
    let dense: Vec<u64> = t
        .list("mlp_only_layers")?
        .unwrap_or_default()
        .iter()
        .filter_map(Value::as_u64)
        .collect();
    let sparse = |i: usize| match family {
        Family::Qwen35 => false,
        Family::Qwen35Moe => true,
        Family::Qwen3Next => (i + 1).is_multiple_of(step) && !dense.contains(&(i as u64)),
    };
    Ok((0..count).map(sparse).collect())
}

#[cfg(test)]
#[path = "config_tests.rs"]
mod tests;
