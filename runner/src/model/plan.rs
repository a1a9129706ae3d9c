//! Everything that must be settled before the first weight is read.
//!
//! Invariant: a [`Plan`] exists only for a checkpoint whose trunk is complete, of the shapes that its config implies, and
//! decodable; so building from it can fail on the device only.

use super::checkpoint::{Checkpoint, TensorView};
use super::error::{LoadError, Result};
use super::head::{head_status, HeadStatus};
use super::layout::{self, Convention, Part, Wanted};
use super::quant::{Fp8Form, ModuleQuant, QuantTable};
use super::vision_config::VisionConfig;

/// The vision tower of a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum VisionStatus {
    /// All there.
    Active(VisionConfig),
    /// Text only.
    Absent {
        /// Why; `None` where neither config nor files speak of one.
        reason: Option<String>,
    },
}

/// What the user decides about loading.
#[derive(Debug, Clone, Copy, Default)]
pub struct PlanOptions {
    /// Don't use the head, whatever is there.
    pub no_draft: bool,
    /// How to hold FP8 blocks.
    pub fp8: Fp8Form,
}

/// A module of a plan.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlannedModule {
    /// Canonical module path.
    pub path: String,
    /// Logical weight shape, […, out, in].
    pub shape: Vec<usize>,
    /// How it is stored.
    pub quant: ModuleQuant,
}

/// How to load a checkpoint.
#[derive(Debug)]
pub struct Plan {
    /// Convention of the trunk's norms.
    pub convention: Convention,
    /// Whether the embedding also scores.
    pub tied: bool,
    /// The head.
    pub head: HeadStatus,
    /// The vision tower.
    pub vision: VisionStatus,
    /// The config's quantisation table.
    pub quant: QuantTable,
    /// How FP8 blocks are held.
    pub fp8: Fp8Form,
    /// Every matrix of trunk, head and tower that will be loaded.
    pub modules: Vec<PlannedModule>,
    /// Parameters of what will be loaded.
    pub parameters: u64,
    /// What is odd but harmless.
    pub warnings: Vec<String>,
}

/// Types of a tensor that is never quantised.
const PLAIN_TYPES: [safetensors::Dtype; 3] = [
    safetensors::Dtype::BF16,
    safetensors::Dtype::F16,
    safetensors::Dtype::F32,
];

/// Checks one needed tensor against the files: how it is stored, [`ModuleQuant::Dense`] for plain ones.
pub(super) fn check(checkpoint: &Checkpoint, quant: &QuantTable, wanted: &Wanted) -> Result<ModuleQuant> {
    match &wanted.part {
        Part::Matrix(shape) => quant.module(checkpoint, &wanted.name, shape),
        Part::Plain(shapes) => {
            let view = checkpoint.need(&wanted.name)?;
            if !shapes.iter().any(|s| s == view.shape) {
                let wanted: Vec<String> = shapes.iter().map(|s| format!("{s:?}")).collect();
                return Err(view.wrong_shape(wanted.join(" or ")));
            }
            if !PLAIN_TYPES.contains(&view.dtype) {
                return Err(view.wrong_dtype("bf16, f16 or f32"));
            }
            Ok(ModuleQuant::Dense)
        }
    }
}

/// Settles how to load `checkpoint`.
///
/// # Errors
/// The trunk is incomplete, misshapen, contradicts its config, or can't be decoded. A head or tower that can't be used is not
/// an error: the model runs without it.
pub fn plan(checkpoint: &Checkpoint, options: PlanOptions) -> Result<Plan> {
    let config = checkpoint.config();
    let quant = QuantTable::parse(&config.raw)?;
    let mut warnings = checkpoint.warnings().to_vec();
    let mut wanted = layout::trunk(config, checkpoint);
    let missing: Vec<String> = wanted
        .iter()
        .filter_map(|w| match &w.part {
            Part::Matrix(_) if !layout::has_module(checkpoint, &w.name) => Some(format!("{}.weight", w.name)),
            Part::Plain(_) if !checkpoint.has(&w.name) => Some(w.name.clone()),
            _ => None,
        })
        .collect();
    if !missing.is_empty() {
        return Err(LoadError::MissingTensors { names: missing });
    }
    let tied = is_tied(checkpoint, &mut warnings);
    if !tied {
        let shape = vec![config.vocab_size, config.hidden_size];
        wanted.push(Wanted {
            name: "lm_head".to_owned(),
            part: Part::Matrix(shape),
        });
    }
    let convention = layout::trunk_convention(config, checkpoint)?;
    let head = if options.no_draft && checkpoint.under("mtp.").next().is_some() {
        HeadStatus::Disabled
    } else {
        head_status(checkpoint, &quant, convention)
    };
    if let HeadStatus::Active { warnings: odd, .. } = &head {
        warnings.extend(odd.iter().cloned());
        wanted.extend(layout::head(config, checkpoint));
    }
    let vision = vision_status(checkpoint, &quant);
    if let VisionStatus::Active(tower) = &vision {
        wanted.extend(layout::vision(tower));
    }
    let (mut modules, mut parameters) = (Vec::new(), 0u64);
    for w in &wanted {
        let stored = check(checkpoint, &quant, w)?;
        match &w.part {
            Part::Matrix(shape) => {
                parameters += product(shape);
                modules.push(PlannedModule {
                    path: w.name.clone(),
                    shape: shape.clone(),
                    quant: stored,
                });
            }
            Part::Plain(shapes) => parameters += shapes.first().map_or(0, |s| product(s)),
        }
    }
    Ok(Plan {
        convention,
        tied,
        head,
        vision,
        quant,
        fp8: options.fp8,
        modules,
        parameters,
        warnings,
    })
}

fn product(shape: &[usize]) -> u64 {
    shape.iter().map(|n| *n as u64).product()
}

/// The tensors decide: without `lm_head`, or with one that repeats the embedding, the model is tied.
fn is_tied(checkpoint: &Checkpoint, warnings: &mut Vec<String>) -> bool {
    let claims = checkpoint.config().tie;
    let claimed = claims.inner.or(claims.outer);
    if let (Some(outer), Some(inner)) = (claims.outer, claims.inner) {
        if outer != inner {
            warnings.push(format!(
                "tie_word_embeddings is {outer} at the top of config.json and {inner} in text_config; the tensors decide"
            ));
        }
    }
    let Some(lm_head) = checkpoint.tensor("lm_head.weight") else {
        if claimed == Some(false) {
            warnings.push("config.json says untied but there is no lm_head: the embedding scores".to_owned());
        }
        return true;
    };
    if claimed != Some(true) && claims.outer != Some(true) {
        return false;
    }
    let same = checkpoint
        .tensor("embed_tokens.weight")
        .is_some_and(|embed| same_rows(&embed, &lm_head));
    if !same {
        warnings
            .push("config.json says tied but lm_head differs from the embedding: lm_head scores".to_owned());
    }
    same
}

/// Whether two tensors hold the same bytes; of large ones only a sample is read, since a real difference shows everywhere.
fn same_rows(a: &TensorView<'_>, b: &TensorView<'_>) -> bool {
    const SAMPLES: usize = 256;
    const SPAN: usize = 4096;
    if (a.dtype, a.shape) != (b.dtype, b.shape) {
        return false;
    }
    let step = (a.data.len() / SAMPLES).max(SPAN);
    (0..a.data.len()).step_by(step).all(|at| {
        let end = (at + SPAN).min(a.data.len());
        a.data[at..end] == b.data[at..end]
    })
}

fn vision_status(checkpoint: &Checkpoint, quant: &QuantTable) -> VisionStatus {
    let present = checkpoint.under("visual.").next().is_some();
    let absent = |reason: &str| VisionStatus::Absent {
        reason: Some(reason.to_owned()),
    };
    let Some(tower) = checkpoint.config().vision else {
        return match present {
            true => absent("the files hold a vision tower but config.json has no vision_config"),
            false => VisionStatus::Absent { reason: None },
        };
    };
    if !present {
        return absent("config.json has a vision_config but the files hold no vision tower");
    }
    if checkpoint.config().media.image.is_none() {
        return absent("config.json has no image_token_id");
    }
    let bad = layout::vision(&tower)
        .iter()
        .find_map(|w| check(checkpoint, quant, w).err());
    match bad {
        None => VisionStatus::Active(tower),
        Some(error) => VisionStatus::Absent {
            reason: Some(format!("unusable vision tower: {error}")),
        },
    }
}

#[cfg(test)]
#[path = "plan_tests.rs"]
mod tests;
