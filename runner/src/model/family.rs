//! The architectures that can be loaded, and the names that configs give them.
//!
//! Invariant: an architecture is taken for what it says that it is; one that isn't registered is refused by its name.
//! Source: the released configs of Qwen3.5, 3.6, 3.8 and Qwen3-Next.

use serde_json::{Map, Value};

use super::config::CONFIG_FILE;
use super::error::{LoadError, Result};
use super::fields::Fields;

/// A member of the model family.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Family {
    /// Dense Qwen3.5, 3.6, 3.8.
    Qwen35,
    /// Mixture of experts of the same.
    Qwen35Moe,
    /// Qwen3-Next: fused delta-net projections, flat config, no vision.
    Qwen3Next,
}

/// How configs name a family.
struct Registration {
    family: Family,
    model_types: &'static [&'static str],
    architectures: &'static [&'static str],
}

const REGISTRY: &[Registration] = &[
    Registration {
        family: Family::Qwen35,
        model_types: &["qwen3_5", "qwen3_5_text"],
        architectures: &["Qwen3_5ForConditionalGeneration", "Qwen3_5ForCausalLM"],
    },
    Registration {
        family: Family::Qwen35Moe,
        model_types: &["qwen3_5_moe", "qwen3_5_moe_text"],
        architectures: &["Qwen3_5MoeForConditionalGeneration", "Qwen3_5MoeForCausalLM"],
    },
    Registration {
        family: Family::Qwen3Next,
        model_types: &["qwen3_next"],
        architectures: &["Qwen3NextForCausalLM"],
    },
];

/// Every architecture that can be loaded.
pub fn supported_architectures() -> Vec<&'static str> {
    REGISTRY
        .iter()
        .flat_map(|r| r.architectures.iter().copied())
        .collect()
}

impl Family {
    /// The family's `model_type`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Qwen35 => "qwen3_5",
            Self::Qwen35Moe => "qwen3_5_moe",
            Self::Qwen3Next => "qwen3_next",
        }
    }

    /// Finds the family that `top` names, with the name it goes by.
    ///
    /// `architectures` decides where it is given: a model type alone would let a classifier of the same family through, which
    /// has no vocabulary to generate from.
    pub(super) fn find(top: &Map<String, Value>, text: &Map<String, Value>) -> Result<(Self, String)> {
        let file = Fields::new(CONFIG_FILE, "", top);
        let names = file.list("architectures")?.unwrap_or_default();
        let names: Vec<&str> = names.iter().filter_map(Value::as_str).collect();
        let unsupported = |found: &str| LoadError::ArchitectureUnsupported {
            found: found.to_owned(),
            supported: supported_architectures(),
        };
        for name in &names {
            if let Some(r) = REGISTRY.iter().find(|r| r.architectures.contains(name)) {
                return Ok((r.family, (*name).to_owned()));
            }
        }
        if let Some(first) = names.first() {
            return Err(unsupported(first));
        }
        let inner = Fields::new(CONFIG_FILE, "text_config.", text);
        let Some(model_type) = file.text("model_type")?.or(inner.text("model_type")?) else {
            return Err(file.missing("architectures", " and so is model_type"));
        };
        let found = REGISTRY.iter().find(|r| r.model_types.contains(&model_type));
        found
            .map(|r| (r.family, model_type.to_owned()))
            .ok_or_else(|| unsupported(model_type))
    }
}
