//! Which tensors a model of a given config consists of, and which of the equivalent spellings a checkpoint uses.
//!
//! Invariant: trunk and head are looked at apart, layer by layer: a checkpoint may spell its head's experts otherwise than
//! its trunk's, and keep raw norms in one and converted ones in the other.
//! Source: the tensor lists of the Qwen3.5, Qwen3.5-MoE and Qwen3-Next releases and of their MLX conversions.

use super::checkpoint::Checkpoint;
use super::config::{DeltaConfig, LayerKind, ModelConfig, MoeConfig};
use super::error::{LoadError, Result};
use super::vision_config::VisionConfig;

/// What a file's zero-centred norms hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Convention {
    /// `w`; the gain is `1 + w`.
    Raw,
    /// The gain itself, as MLX conversions store it.
    Converted,
}

impl Convention {
    /// What to add to a stored value to get the gain.
    pub fn shift(self) -> f32 {
        match self {
            Self::Raw => 1.0,
            Self::Converted => 0.0,
        }
    }
}

/// How a layer's experts are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Experts {
    /// `experts.gate_up_proj` [E, 2 I, D] (gate rows first) and `experts.down_proj` [E, D, I], without `.weight`.
    Fused,
    /// `experts.{e}.{gate,up,down}_proj`, a module each.
    Each,
    /// `switch_mlp.{gate,up,down}_proj`, stacked modules [E, out, in].
    Stacked,
}

/// How a delta-net layer's input projections are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Projections {
    /// `in_proj_qkv`, `in_proj_z`, `in_proj_b`, `in_proj_a`.
    Split,
    /// `in_proj_qkvz` and `in_proj_ba`, interleaved by key head.
    Interleaved,
}

/// What a needed tensor is, for checks and for counting.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Part {
    /// A module's weight of that logical shape, which may be quantised. Named by its module path.
    Matrix(Vec<usize>),
    /// A tensor stored as it is, in one of these shapes.
    Plain(Vec<Vec<usize>>),
}

/// One needed tensor or module.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wanted {
    /// Canonical tensor name, or module path of a [`Part::Matrix`].
    pub name: String,
    /// What it is.
    pub part: Part,
}

fn matrix(name: impl Into<String>, shape: &[usize]) -> Wanted {
    Wanted {
        name: name.into(),
        part: Part::Matrix(shape.to_vec()),
    }
}

fn plain(name: impl Into<String>, shape: &[usize]) -> Wanted {
    Wanted {
        name: name.into(),
        part: Part::Plain(vec![shape.to_vec()]),
    }
}

/// Whether a module's weight is there in any form.
pub fn has_module(checkpoint: &Checkpoint, path: &str) -> bool {
    checkpoint.has(&format!("{path}.weight")) || checkpoint.has(path)
}

/// The spelling of the experts under `mlp` (a path such as `layers.0.mlp`); `None` where there are none.
pub fn experts(checkpoint: &Checkpoint, mlp: &str) -> Option<Experts> {
    let spellings = [
        ("experts.gate_up_proj", Experts::Fused),
        ("switch_mlp.gate_proj", Experts::Stacked),
        ("experts.0.gate_proj", Experts::Each),
    ];
    spellings
        .into_iter()
        .find(|(name, _)| has_module(checkpoint, &format!("{mlp}.{name}")))
        .map(|(_, s)| s)
}

/// The spelling of the projections under `mixer` (a path such as `layers.0.linear_attn`).
pub fn projections(checkpoint: &Checkpoint, mixer: &str) -> Projections {
    if has_module(checkpoint, &format!("{mixer}.in_proj_qkvz")) {
        Projections::Interleaved
    } else {
        Projections::Split
    }
}

/// For each row of [q | k | v | z], the row of the interleaved `in_proj_qkvz` that holds it.
pub fn qkvz_rows(delta: &DeltaConfig) -> Vec<usize> {
    let ratio = delta.value_heads / delta.key_heads;
    let (key, value) = (delta.key_dim, ratio * delta.value_dim);
    let block = 2 * key + 2 * value;
    let part = |from: usize, len: usize| {
        (0..delta.key_heads).flat_map(move |head| head * block + from..head * block + from + len)
    };
    part(0, key)
        .chain(part(key, key))
        .chain(part(2 * key, value))
        .chain(part(2 * key + value, value))
        .collect()
}

/// For each row of [b | a], the row of the interleaved `in_proj_ba` that holds it.
pub fn ba_rows(delta: &DeltaConfig) -> Vec<usize> {
    let ratio = delta.value_heads / delta.key_heads;
    let part = |from: usize| {
        (0..delta.key_heads).flat_map(move |head| head * 2 * ratio + from..head * 2 * ratio + from + ratio)
    };
    part(0).chain(part(ratio)).collect()
}

/// The trunk's tensors but for `lm_head`, whose presence is what makes a model untied.
pub fn trunk(config: &ModelConfig, checkpoint: &Checkpoint) -> Vec<Wanted> {
    let d = config.hidden_size;
    let mut out = vec![
        matrix("embed_tokens", &[config.vocab_size, d]),
        plain("norm.weight", &[d]),
    ];
    for (index, (kind, sparse)) in config.layers.iter().zip(&config.sparse).enumerate() {
        let path = format!("layers.{index}");
        layer(&mut out, config, checkpoint, &path, *kind, *sparse);
        // One absent layer is enough for an error; a config that claims many more must not cost memory.
        if !checkpoint.has(&format!("{path}.input_layernorm.weight")) {
            break;
        }
    }
    out
}

/// The head's tensors.
pub fn head(config: &ModelConfig, checkpoint: &Checkpoint) -> Vec<Wanted> {
    let d = config.hidden_size;
    let mut out = vec![matrix("mtp.fc", &[d, 2 * d])];
    out.extend(
        ["pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"]
            .map(|n| plain(format!("mtp.{n}.weight"), &[d])),
    );
    layer(
        &mut out,
        config,
        checkpoint,
        "mtp.layers.0",
        LayerKind::Full,
        config.moe.is_some(),
    );
    out
}

fn layer(
    out: &mut Vec<Wanted>,
    config: &ModelConfig,
    checkpoint: &Checkpoint,
    path: &str,
    kind: LayerKind,
    sparse: bool,
) {
    let d = config.hidden_size;
    out.push(plain(format!("{path}.input_layernorm.weight"), &[d]));
    out.push(plain(format!("{path}.post_attention_layernorm.weight"), &[d]));
    match kind {
        LayerKind::Full => {
            let (p, hd) = (format!("{path}.self_attn"), config.head_dim);
            let (q, kv) = (config.heads * hd, config.kv_heads * hd);
            out.push(matrix(format!("{p}.q_proj"), &[2 * q, d]));
            out.push(matrix(format!("{p}.k_proj"), &[kv, d]));
            out.push(matrix(format!("{p}.v_proj"), &[kv, d]));
            out.push(matrix(format!("{p}.o_proj"), &[d, q]));
            out.extend(["q_norm", "k_norm"].map(|n| plain(format!("{p}.{n}.weight"), &[hd])));
        }
        LayerKind::Linear => delta_net(out, &config.delta, checkpoint, &format!("{path}.linear_attn"), d),
    }
    let p = format!("{path}.mlp");
    match &config.moe {
        Some(moe) if sparse => mixture(out, moe, checkpoint, &p, d),
        _ => swiglu(out, &p, d, config.intermediate_size),
    }
}

fn delta_net(out: &mut Vec<Wanted>, delta: &DeltaConfig, checkpoint: &Checkpoint, p: &str, d: usize) {
    let (c, taps, nv) = (delta.channels(), delta.conv_kernel, delta.value_heads);
    match projections(checkpoint, p) {
        Projections::Split => {
            out.push(matrix(format!("{p}.in_proj_qkv"), &[c, d]));
            out.push(matrix(format!("{p}.in_proj_z"), &[delta.value_width(), d]));
            out.push(matrix(format!("{p}.in_proj_b"), &[nv, d]));
            out.push(matrix(format!("{p}.in_proj_a"), &[nv, d]));
        }
        Projections::Interleaved => {
            out.push(matrix(format!("{p}.in_proj_qkvz"), &[c + delta.value_width(), d]));
            out.push(matrix(format!("{p}.in_proj_ba"), &[2 * nv, d]));
        }
    }
    let conv = Part::Plain(vec![vec![c, 1, taps], vec![c, taps, 1]]);
    out.push(Wanted {
        name: format!("{p}.conv1d.weight"),
        part: conv,
    });
    out.extend(["A_log", "dt_bias"].map(|n| plain(format!("{p}.{n}"), &[nv])));
    out.push(plain(format!("{p}.norm.weight"), &[delta.value_dim]));
    out.push(matrix(format!("{p}.out_proj"), &[d, delta.value_width()]));
}

fn swiglu(out: &mut Vec<Wanted>, p: &str, d: usize, inter: usize) {
    out.push(matrix(format!("{p}.gate_proj"), &[inter, d]));
    out.push(matrix(format!("{p}.up_proj"), &[inter, d]));
    out.push(matrix(format!("{p}.down_proj"), &[d, inter]));
}

fn mixture(out: &mut Vec<Wanted>, moe: &MoeConfig, checkpoint: &Checkpoint, p: &str, d: usize) {
    let (e, inter) = (moe.experts, moe.intermediate);
    out.push(matrix(format!("{p}.gate"), &[e, d]));
    // Where no spelling is found the publisher's own is asked for, so that the error names tensors that can be looked for.
    match experts(checkpoint, p).unwrap_or(Experts::Fused) {
        Experts::Fused => {
            out.push(matrix(format!("{p}.experts.gate_up_proj"), &[e, 2 * inter, d]));
            out.push(matrix(format!("{p}.experts.down_proj"), &[e, d, inter]));
        }
        Experts::Stacked => {
            out.push(matrix(format!("{p}.switch_mlp.gate_proj"), &[e, inter, d]));
            out.push(matrix(format!("{p}.switch_mlp.up_proj"), &[e, inter, d]));
            out.push(matrix(format!("{p}.switch_mlp.down_proj"), &[e, d, inter]));
        }
        Experts::Each => {
            for i in 0..e {
                swiglu(out, &format!("{p}.experts.{i}"), d, inter);
                if !has_module(checkpoint, &format!("{p}.experts.{i}.gate_proj")) {
                    break;
                }
            }
        }
    }
    swiglu(out, &format!("{p}.shared_expert"), d, moe.shared_intermediate);
    out.push(matrix(format!("{p}.shared_expert_gate"), &[1, d]));
}

/// The vision tower's tensors.
pub fn vision(v: &VisionConfig) -> Vec<Wanted> {
    let (h, i, m) = (
        v.hidden_size,
        v.intermediate_size,
        v.hidden_size * v.spatial_merge_size.pow(2),
    );
    let (c, t, s) = (v.in_channels, v.temporal_patch_size, v.patch_size);
    // Publisher's channel order, and MLX's with channels last.
    let patch = Part::Plain(vec![vec![h, c, t, s, s], vec![h, t, s, s, c]]);
    let mut out = vec![
        Wanted {
            name: "visual.patch_embed.proj.weight".to_owned(),
            part: patch,
        },
        plain("visual.patch_embed.proj.bias", &[h]),
        matrix("visual.pos_embed", &[v.positions, h]),
    ];
    let biased = |out: &mut Vec<Wanted>, path: String, rows: usize, cols: usize| {
        out.push(plain(format!("{path}.bias"), &[rows]));
        out.push(matrix(path, &[rows, cols]));
    };
    let norm = |out: &mut Vec<Wanted>, path: String| {
        out.extend(["weight", "bias"].map(|n| plain(format!("{path}.{n}"), &[h])));
    };
    for b in 0..v.depth {
        let p = format!("visual.blocks.{b}");
        norm(&mut out, format!("{p}.norm1"));
        norm(&mut out, format!("{p}.norm2"));
        biased(&mut out, format!("{p}.attn.qkv"), 3 * h, h);
        biased(&mut out, format!("{p}.attn.proj"), h, h);
        biased(&mut out, format!("{p}.mlp.linear_fc1"), i, h);
        biased(&mut out, format!("{p}.mlp.linear_fc2"), h, i);
    }
    norm(&mut out, "visual.merger.norm".to_owned());
    biased(&mut out, "visual.merger.linear_fc1".to_owned(), m, m);
    biased(
        &mut out,
        "visual.merger.linear_fc2".to_owned(),
        v.out_hidden_size,
        m,
    );
    out
}

/// The trunk's convention, by the layout of its convolution weights: nothing else tells reliably.
///
/// # Errors
/// No convolution weight, one of another shape, or layers that disagree.
pub fn trunk_convention(config: &ModelConfig, checkpoint: &Checkpoint) -> Result<Convention> {
    let (c, taps) = (config.delta.channels(), config.delta.conv_kernel);
    let mut found: Option<(Convention, String)> = None;
    let linear = config
        .layers
        .iter()
        .enumerate()
        .filter(|(_, kind)| **kind == LayerKind::Linear);
    for (index, _) in linear {
        let view = checkpoint.need(&format!("layers.{index}.linear_attn.conv1d.weight"))?;
        let convention = match view.shape {
            [a, 1, b] if (*a, *b) == (c, taps) => Convention::Raw,
            [a, b, 1] if (*a, *b) == (c, taps) => Convention::Converted,
            _ => return Err(view.wrong_shape(format!("[{c}, 1, {taps}] or [{c}, {taps}, 1]"))),
        };
        match &found {
            Some((first, name)) if *first != convention => {
                let names = format!("{name} is {first:?} and {} is {convention:?}", view.original);
                return Err(LoadError::UnknownConvention(names.to_lowercase()));
            }
            Some(_) => {}
            None => found = Some((convention, view.original.to_owned())),
        }
    }
    found.map(|(convention, _)| convention).ok_or_else(|| {
        LoadError::UnknownConvention(
            "the model has no linear-attention layer, whose conv1d would show it".to_owned(),
        )
    })
}

#[cfg(test)]
#[path = "layout_tests.rs"]
mod tests;
