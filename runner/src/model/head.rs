//! Whether a checkpoint's MTP head can be used, and how its norms are stored.
//!
//! Invariant: the head runs only if every one of its tensors is there in the right shape and its convention is beyond doubt;
//! otherwise the model runs without it and [`HeadStatus`] says why. A head whose norms are shifted wrongly gives no error,
//! only drafts that are never accepted.

use std::collections::BTreeSet;

use super::checkpoint::Checkpoint;
use super::config::LayerKind;
use super::error::{shorten, LoadError};
use super::layout::{self, Convention, Part};
use super::means::mean;
use super::plan::check;
use super::quant::QuantTable;

/// The head of a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum HeadStatus {
    /// All there.
    Active {
        /// Convention of its seven norms.
        convention: Convention,
        /// What is odd but harmless.
        warnings: Vec<String>,
    },
    /// No head in the files.
    NoTensors {
        /// Whether the config says that there is one.
        claimed: bool,
    },
    /// Parts of a head.
    Incomplete {
        /// Canonical names of absent tensors.
        missing: Vec<String>,
    },
    /// A head of a kind that no release has, or tensors that don't fit the config.
    UnsupportedShape {
        /// What about it.
        reason: String,
    },
    /// Nothing tells whether its norms are raw or converted.
    AmbiguousNorms {
        /// The evidence.
        reason: String,
    },
    /// Switched off by the user.
    Disabled,
}

impl HeadStatus {
    /// Whether to draft with it.
    pub fn is_active(&self) -> bool {
        matches!(self, Self::Active { .. })
    }

    /// The convention of an active head.
    pub fn convention(&self) -> Option<Convention> {
        match self {
            Self::Active { convention, .. } => Some(*convention),
            _ => None,
        }
    }

    /// Why it isn't used; `None` when it is.
    pub fn reason(&self) -> Option<String> {
        match self {
            Self::Active { .. } => None,
            Self::NoTensors { claimed: false } => Some("the checkpoint has no MTP head".to_owned()),
            Self::NoTensors { claimed: true } => {
                Some("the config claims an MTP head but the files hold no tensor of one".to_owned())
            }
            Self::Incomplete { missing } => {
                let (n, names) = (missing.len(), shorten(missing));
                Some(format!(
                    "the MTP head is incomplete: {n} tensors are missing: {names}"
                ))
            }
            Self::UnsupportedShape { reason } => Some(format!("unsupported MTP head: {reason}")),
            Self::AmbiguousNorms { reason } => Some(format!(
                "can't tell how the MTP head's norms are stored: {reason}"
            )),
            Self::Disabled => Some("switched off".to_owned()),
        }
    }
}

/// Looks at the head of `checkpoint`, whose trunk is stored in convention `trunk`.
pub fn head_status(checkpoint: &Checkpoint, quant: &QuantTable, trunk: Convention) -> HeadStatus {
    let config = checkpoint.config();
    if checkpoint.under("mtp.").next().is_none() {
        return HeadStatus::NoTensors {
            claimed: config.mtp_layers > 0,
        };
    }
    if let Some(reason) = unknown_kind(checkpoint) {
        return HeadStatus::UnsupportedShape { reason };
    }
    let wanted = layout::head(config, checkpoint);
    let missing: Vec<String> = wanted
        .iter()
        .filter(|w| match w.part {
            Part::Matrix(_) => !layout::has_module(checkpoint, &w.name),
            Part::Plain(_) => !checkpoint.has(&w.name),
        })
        .map(|w| w.name.clone())
        .collect();
    if !missing.is_empty() {
        return HeadStatus::Incomplete { missing };
    }
    for w in &wanted {
        match check(checkpoint, quant, w) {
            Ok(_) => {}
            Err(LoadError::MissingScales { missing, .. }) => {
                return HeadStatus::Incomplete {
                    missing: vec![missing],
                };
            }
            Err(error) => {
                return HeadStatus::UnsupportedShape {
                    reason: error.to_string(),
                }
            }
        }
    }
    convention(checkpoint, trunk)
}

/// Kinds of head that other families have, or that a config may announce.
fn unknown_kind(checkpoint: &Checkpoint) -> Option<String> {
    let config = checkpoint.config();
    let layers: BTreeSet<&str> = checkpoint
        .under("mtp.layers.")
        .filter_map(|t| {
            t.name
                .strip_prefix("mtp.layers.")?
                .split_once('.')
                .map(|(index, _)| index)
        })
        .collect();
    if layers.len() > 1 {
        return Some(format!("it has {} layers; only one is supported", layers.len()));
    }
    if config.mtp_layers > 1 {
        return Some(format!(
            "the config says that it has {} layers; only one is supported",
            config.mtp_layers
        ));
    }
    if layout::has_module(checkpoint, "mtp.embed_tokens") || config.mtp_dedicated_embeddings {
        return Some("it has an embedding of its own".to_owned());
    }
    let own = checkpoint
        .under("mtp.shared_head.")
        .next()
        .map(|t| t.original.to_owned());
    own.map(|name| format!("it has a projection of its own ({name})"))
}

/// The four norms that a head shares with the trunk's full-attention layers.
const COMPARED: [&str; 4] = [
    "self_attn.q_norm.weight",
    "self_attn.k_norm.weight",
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
];

/// How much closer the better reading must be, on the average, to be believed.
const MARGIN: f64 = 0.3;
/// How far from the trunk's gains the better reading may be, on the average: beyond it neither reading is right.
const FARTHEST: f64 = 0.75;

/// Decides by value: a raw and a converted gain differ by exactly one, while head and trunk gains lie close together.
///
/// The mean decides for all norms at once. The head's own three norms take no part: real effective gains of its two input norms
/// are about 0.3 and 0.5, which a rule such as "below one half is raw" gets wrong.
fn convention(checkpoint: &Checkpoint, trunk: Convention) -> HeadStatus {
    let mut errors = [0.0f64; 2];
    for name in COMPARED {
        let (Some(ours), Some(theirs)) = (
            stored_mean(checkpoint, &format!("mtp.layers.0.{name}")),
            trunk_mean(checkpoint, name),
        ) else {
            let reason = format!("{name} has no finite mean in the head or in the trunk");
            return HeadStatus::AmbiguousNorms { reason };
        };
        let gain = theirs + f64::from(trunk.shift());
        errors[0] += (ours - gain).abs() / COMPARED.len() as f64;
        errors[1] += (ours + 1.0 - gain).abs() / COMPARED.len() as f64;
    }
    let [converted, raw] = errors;
    let reason = format!(
        "its gains differ from the trunk's by {converted:.2} on the average if they are converted, by {raw:.2} if raw"
    );
    if (converted - raw).abs() < MARGIN || converted.min(raw) > FARTHEST {
        return HeadStatus::AmbiguousNorms { reason };
    }
    let found = if raw < converted {
        Convention::Raw
    } else {
        Convention::Converted
    };
    let mut warnings = Vec::new();
    if found != presumed(checkpoint, trunk) {
        warnings.push(
            format!("the MTP head's names suggest otherwise, but its norms are {found:?}: {reason}")
                .to_lowercase(),
        );
    }
    HeadStatus::Active {
        convention: found,
        warnings,
    }
}

/// What names alone suggest: converters put the head under `language_model.` or leave the prefix off.
fn presumed(checkpoint: &Checkpoint, trunk: Convention) -> Convention {
    let top_level = checkpoint.under("mtp.").any(|t| t.original.starts_with("mtp."));
    match trunk {
        Convention::Raw => Convention::Raw,
        // A plain `mtp.` beside a converted trunk is as often a copied raw file as a converted one.
        Convention::Converted if top_level => {
            let sidecar = checkpoint
                .tensor("mtp.norm.weight")
                .is_some_and(|t| t.file.contains("mtp"));
            if sidecar {
                Convention::Raw
            } else {
                Convention::Converted
            }
        }
        Convention::Converted => Convention::Converted,
    }
}

fn stored_mean(checkpoint: &Checkpoint, name: &str) -> Option<f64> {
    mean(&checkpoint.tensor(name)?)
}

/// Mean of what the trunk stores for `name`, over its full-attention layers.
fn trunk_mean(checkpoint: &Checkpoint, name: &str) -> Option<f64> {
    let layers = checkpoint
        .config()
        .layers
        .iter()
        .enumerate()
        .filter(|(_, kind)| **kind == LayerKind::Full);
    let means: Option<Vec<f64>> = layers
        .map(|(index, _)| stored_mean(checkpoint, &format!("layers.{index}.{name}")))
        .collect();
    means
        .filter(|m| !m.is_empty())
        .map(|m| m.iter().sum::<f64>() / m.len() as f64)
}

#[cfg(test)]
#[path = "head_tests.rs"]
mod tests;
