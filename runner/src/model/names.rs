//! One name for every tensor, whoever wrote the file.
//!
//! Invariant: publishers' and converters' names of the same tensor (and module paths in quantisation tables) map to the same
//! canonical name: trunk tensors bare (`layers.0.…`, `embed_tokens.weight`, `norm.weight`, `lm_head.weight`), the head under
//! `mtp.`, the vision tower under `visual.`.

/// Prefixes of the text model, longest first.
const TEXT_PREFIXES: [&str; 5] = [
    "model.language_model.model.",
    "model.language_model.",
    "language_model.model.",
    "language_model.",
    "model.",
];

/// Prefixes of the vision tower.
const VISION_PREFIXES: [&str; 5] = [
    "model.visual.",
    "model.vision_tower.",
    "vision_tower.",
    "vision_model.",
    "visual.",
];

/// The canonical name of a tensor or module path.
pub fn canonical(name: &str) -> String {
    if let Some(rest) = VISION_PREFIXES.iter().find_map(|p| name.strip_prefix(p)) {
        return format!("visual.{rest}");
    }
    // Also covers `model.mtp.`: what follows the prefix is already canonical.
    TEXT_PREFIXES
        .iter()
        .find_map(|p| name.strip_prefix(p))
        .unwrap_or(name)
        .to_owned()
}

/// Whether the canonical names are those of a draft head stored without its prefix, as separate drafter files do.
///
/// Decided by the joining projection: nothing in a trunk is called `fc`.
pub fn is_bare_head<'a>(mut names: impl Iterator<Item = &'a str>) -> bool {
    names.any(|n| n == "fc.weight" || n == "fc.scales")
}

/// The canonical name of a tensor in a file of bare head names.
pub fn canonical_in_bare_head(name: &str) -> String {
    let name = canonical(name);
    if name.starts_with("mtp.") {
        name
    } else {
        format!("mtp.{name}")
    }
}

/// Whether a canonical name can belong to a model of the family at all.
pub fn is_known(name: &str) -> bool {
    ["layers.", "embed_tokens.", "norm.", "lm_head.", "mtp.", "visual."]
        .iter()
        .any(|p| name.starts_with(p))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_spelling_of_a_name_becomes_the_same() {
        for (name, wanted) in [
            ("model.language_model.model.norm.weight", "norm.weight"),
            (
                "model.language_model.layers.3.mlp.gate.weight",
                "layers.3.mlp.gate.weight",
            ),
            (
                "language_model.model.layers.3.mlp.gate.weight",
                "layers.3.mlp.gate.weight",
            ),
            ("language_model.lm_head.weight", "lm_head.weight"),
            ("model.embed_tokens.weight", "embed_tokens.weight"),
            ("model.visual.blocks.0.norm1.bias", "visual.blocks.0.norm1.bias"),
            ("vision_tower.blocks.0.norm1.bias", "visual.blocks.0.norm1.bias"),
            ("model.mtp.fc.weight", "mtp.fc.weight"),
            ("language_model.mtp.fc.weight", "mtp.fc.weight"),
            ("mtp.fc.weight", "mtp.fc.weight"),
            ("lm_head.weight", "lm_head.weight"),
        ] {
            assert_eq!(canonical(name), wanted, "{name}");
        }
    }

    #[test]
    fn a_bare_head_gets_its_prefix() {
        let names = ["fc.weight", "layers.0.self_attn.q_proj.weight", "norm.weight"];
        assert!(is_bare_head(names.into_iter()));
        assert_eq!(
            canonical_in_bare_head(names[1]),
            "mtp.layers.0.self_attn.q_proj.weight"
        );
        assert!(!is_bare_head(["mtp.fc.weight", "layers.0.fc.weight"].into_iter()));
    }
}
