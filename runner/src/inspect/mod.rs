//! What a model directory is and whether it can run here, without putting a weight on the device.
//!
//! Invariant: an inspection always comes to an answer; whatever is wrong becomes a reason of its verdict, in the words that
//! loading would fail with, and what could be found out before is still reported.

mod report;

use std::collections::BTreeMap;
use std::path::Path;

use serde::Serialize;
use serde_json::json;

use crate::mlx::Backend;
use crate::model::checkpoint::{dtype_name, Checkpoint};
use crate::model::config::{LayerKind, ModelConfig};
use crate::model::error::{LoadError, Result as LoadResult};
use crate::model::estimate::{activations, draft_scores, state, StateBytes};
use crate::model::fingerprint::fingerprint;
use crate::model::layout::Convention;
use crate::model::plan::{plan, Plan, PlanOptions, VisionStatus};
use crate::model::quant::{Fp8Form, ModuleQuant};
use crate::model::weights::{memory_bytes, Precision};
use crate::text::{ChatTemplate, EosSet, RenderOptions, Tokenizer};

/// Tokens of context that the total counts with.
const SAMPLE_CONTEXT: u64 = 4096;

/// Where and how the model would run.
#[derive(Debug, Clone, Copy)]
pub struct Circumstances {
    /// What it would run on; on the host's cores weights widen to float32 if they fit.
    pub backend: Backend,
    /// Bytes that weights and caches may take.
    pub memory_limit: u64,
    /// Prompt tokens a prefill step.
    pub chunk: usize,
    /// Whether the head is switched off.
    pub no_draft: bool,
    /// How FP8 blocks would be held.
    pub fp8: Fp8Form,
}

/// Everything found out about a model.
#[derive(Debug, Clone, Serialize)]
pub struct Inspection {
    /// The directory, as given.
    pub model: String,
    /// Whether it can run.
    pub verdict: Verdict,
    /// What is odd but harmless.
    pub warnings: Vec<String>,
    /// From the config, if that could be read.
    #[serde(flatten)]
    pub architecture: Option<Architecture>,
    /// From the tensors, if they are sound.
    #[serde(flatten)]
    pub contents: Option<Contents>,
    /// From the tokenizer and template, if they could be read.
    #[serde(flatten)]
    pub text: Option<Text>,
}

/// Whether a model can run.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Verdict {
    /// It can.
    pub runs: bool,
    /// Why it can't.
    pub reasons: Vec<String>,
}

/// What the config says.
#[derive(Debug, Clone, Serialize)]
pub struct Architecture {
    /// Name in the config.
    pub architecture: String,
    /// Family's model type.
    pub family: &'static str,
    /// Layers by kind.
    pub layers: Layers,
    /// Longest sequence.
    pub context_length: usize,
    /// Rows of the embedding.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Mixture of experts.
    pub experts: Option<ExpertCounts>,
}

/// Layers of the trunk by kind.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Layers {
    /// All.
    pub total: usize,
    /// Full attention.
    pub full_attention: usize,
    /// Gated delta net.
    pub linear_attention: usize,
    /// With experts.
    pub sparse: usize,
}

/// Experts of a mixture.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct ExpertCounts {
    /// In a layer.
    pub total: usize,
    /// For a token.
    pub per_token: usize,
}

/// What the tensors show.
#[derive(Debug, Clone, Serialize)]
pub struct Contents {
    /// Of what would be loaded.
    pub parameters: u64,
    /// Names the weights and config.
    pub fingerprint: String,
    /// Files used.
    pub files: Vec<String>,
    /// Whether the embedding also scores.
    pub tied: bool,
    /// How norm gains are stored: "raw" (zero-centred) or "converted".
    pub norms: &'static str,
    /// How the matrices are stored, most parameters first.
    pub quantization: Vec<StorageRow>,
    /// The head.
    pub draft: Draft,
    /// The vision tower.
    pub vision: Vision,
    /// Memory.
    pub memory: Memory,
}

/// Matrices stored alike.
#[derive(Debug, Clone, Serialize)]
pub struct StorageRow {
    /// How.
    pub storage: String,
    /// Modules.
    pub modules: usize,
    /// Their parameters.
    pub parameters: u64,
    /// One of them.
    pub example: String,
}

/// The MTP head.
#[derive(Debug, Clone, Serialize)]
pub struct Draft {
    /// Whether the files hold tensors of one.
    pub present: bool,
    /// Whether it would draft.
    pub active: bool,
    /// Why not.
    pub reason: Option<String>,
    /// How its norm gains are stored.
    pub norms: Option<&'static str>,
}

/// The vision tower.
#[derive(Debug, Clone, Serialize)]
pub struct Vision {
    /// Whether pictures can be given.
    pub active: bool,
    /// Why not, where something speaks of a tower.
    pub reason: Option<String>,
}

/// Bytes that running takes.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Memory {
    /// Tensors on disk.
    pub stored: u64,
    /// Weights in memory.
    pub weights: u64,
    /// Caches.
    #[serde(flatten)]
    pub state: StateBytes,
    /// Intermediates of a prefill step, about.
    pub activations: u64,
    /// Tokens of context that `total` counts with.
    pub context: u64,
    /// Weights, activations, and one sequence of that context.
    pub total: u64,
    /// What is allowed.
    pub limit: u64,
}

/// What the text files say.
#[derive(Debug, Clone, Serialize)]
pub struct Text {
    /// Tokens that end a generation.
    pub eos: Vec<EosToken>,
    /// Whether the template thinks unless told not to; absent where it says nothing about thinking.
    pub thinking_default: Option<bool>,
    /// Whether there is a chat template that compiles.
    pub chat_template: bool,
}

/// One end token.
#[derive(Debug, Clone, Serialize)]
pub struct EosToken {
    /// Its id.
    pub id: u32,
    /// Its text.
    pub text: String,
}

/// Looks at the model directory `dir`.
pub fn inspect(dir: &Path, circumstances: Circumstances) -> Inspection {
    let mut found = Inspection {
        model: dir.display().to_string(),
        verdict: Verdict::default(),
        warnings: Vec::new(),
        architecture: None,
        contents: None,
        text: None,
    };
    // An error of the config is also the checkpoint's: it is reported once, below.
    found.architecture = ModelConfig::read(dir).ok().as_ref().map(architecture);
    match contents(dir, circumstances, &mut found.warnings) {
        Ok(contents) => {
            let Memory {
                weights,
                total,
                limit,
                ..
            } = contents.memory;
            if weights > limit {
                let reason =
                    format!("the weights take {weights} bytes, more than the memory limit of {limit} bytes");
                found.verdict.reasons.push(reason);
            } else if total > limit {
                let context = contents.memory.context;
                found.warnings.push(format!(
                    "with {context} tokens of context it takes about {total} bytes, more than the memory limit of {limit}"
                ));
            }
            found.contents = Some(contents);
        }
        Err(error) => found.verdict.reasons.push(error.to_string()),
    }
    if dir.is_dir() {
        match text(dir, &mut found.warnings) {
            Ok(text) => found.text = Some(text),
            Err(reason) => found.verdict.reasons.push(reason),
        }
    }
    found.verdict.runs = found.verdict.reasons.is_empty();
    found
}

fn architecture(config: &ModelConfig) -> Architecture {
    Architecture {
        architecture: config.architecture.clone(),
        family: config.family.name(),
        layers: Layers {
            total: config.layers.len(),
            full_attention: config.count(LayerKind::Full),
            linear_attention: config.count(LayerKind::Linear),
            sparse: config.sparse.iter().filter(|s| **s).count(),
        },
        context_length: config.context_length,
        vocab_size: config.vocab_size,
        hidden_size: config.hidden_size,
        experts: config.moe.map(|moe| ExpertCounts {
            total: moe.experts,
            per_token: moe.per_token,
        }),
    }
}

fn contents(dir: &Path, circumstances: Circumstances, warnings: &mut Vec<String>) -> LoadResult<Contents> {
    let checkpoint = Checkpoint::open(dir)?;
    let plan = plan(
        &checkpoint,
        PlanOptions {
            no_draft: circumstances.no_draft,
            fp8: circumstances.fp8,
        },
    )?;
    warnings.extend(plan.warnings.iter().cloned());
    let (active, reason) = match &plan.vision {
        VisionStatus::Active(_) => (true, None),
        VisionStatus::Absent { reason } => (false, reason.clone()),
    };
    let present = checkpoint.under("mtp.").next().is_some();
    Ok(Contents {
        parameters: plan.parameters,
        fingerprint: fingerprint(&checkpoint),
        files: checkpoint.files().map(|(name, _)| name.to_owned()).collect(),
        tied: plan.tied,
        norms: words(plan.convention),
        quantization: storage(&checkpoint, &plan)?,
        draft: Draft {
            present,
            active: plan.head.is_active(),
            reason: plan.head.reason(),
            norms: plan.head.convention().map(words),
        },
        vision: Vision { active, reason },
        memory: memory(&checkpoint, &plan, circumstances),
    })
}

fn words(convention: Convention) -> &'static str {
    match convention {
        Convention::Raw => "raw",
        Convention::Converted => "converted",
    }
}

/// Modules by how they are stored, dense ones by their type.
fn storage(checkpoint: &Checkpoint, plan: &Plan) -> LoadResult<Vec<StorageRow>> {
    let mut rows: BTreeMap<String, StorageRow> = BTreeMap::new();
    for module in &plan.modules {
        let storage = match module.quant {
            ModuleQuant::Dense => {
                let weight = checkpoint.tensor(&format!("{}.weight", module.path));
                let weight = weight.or_else(|| checkpoint.tensor(&module.path));
                let missing = || LoadError::MissingTensors {
                    names: vec![module.path.clone()],
                };
                dtype_name(weight.ok_or_else(missing)?.dtype).to_lowercase()
            }
            quantised => quantised.to_string(),
        };
        let row = rows.entry(storage.clone()).or_insert_with(|| StorageRow {
            storage,
            modules: 0,
            parameters: 0,
            example: module.path.clone(),
        });
        row.modules += 1;
        row.parameters += module.shape.iter().map(|n| *n as u64).product::<u64>();
    }
    let mut rows: Vec<StorageRow> = rows.into_values().collect();
    rows.sort_by_key(|row| std::cmp::Reverse(row.parameters));
    Ok(rows)
}

fn memory(checkpoint: &Checkpoint, plan: &Plan, circumstances: Circumstances) -> Memory {
    let config = checkpoint.config();
    let limit = circumstances.memory_limit;
    let wide = Precision::wide();
    let widened = memory_bytes(checkpoint, plan, wide);
    let (precision, element) = match circumstances.backend {
        Backend::Cpu if widened <= limit => (wide, 4),
        Backend::Cpu => (Precision::Stored, 4),
        Backend::Metal | Backend::Cuda => (Precision::Native, 2),
    };
    let weights = memory_bytes(checkpoint, plan, precision);
    let room = limit.saturating_sub(weights);
    let scores = match circumstances.backend {
        Backend::Cuda => draft_scores(checkpoint, plan, room).unwrap_or(0),
        Backend::Cpu | Backend::Metal => 0,
    };
    let weights = weights + scores;
    let state = state(config, element);
    let activations = activations(config, circumstances.chunk, element);
    let context = SAMPLE_CONTEXT.min(config.context_length as u64);
    let draft = if plan.head.is_active() {
        state.draft_kv_per_token
    } else {
        0
    };
    // A round keeps a second copy of the recurrent state to roll back to.
    let sequence = 2 * state.recurrent_per_sequence + context * (state.kv_per_token + draft);
    let total = weights + activations + sequence;
    Memory {
        stored: checkpoint.total_bytes(),
        weights,
        state,
        activations,
        context,
        total,
        limit,
    }
}

fn text(dir: &Path, warnings: &mut Vec<String>) -> Result<Text, String> {
    let tokenizer = Tokenizer::load(dir).map_err(|error| error.to_string())?;
    let eos = EosSet::load(dir, &tokenizer).map_err(|error| error.to_string())?;
    let template = ChatTemplate::load(dir, &tokenizer);
    if let Some(error) = template.error() {
        warnings.push(error.to_string());
    }
    let token = |id: &u32| EosToken {
        id: *id,
        text: tokenizer
            .token_bytes(*id)
            .map(|b| String::from_utf8_lossy(b).into_owned())
            .unwrap_or_default(),
    };
    Ok(Text {
        eos: eos.ids().iter().map(token).collect(),
        thinking_default: thinking_default(&template),
        chat_template: template.error().is_none(),
    })
}

/// Whether the assistant's turn opens a think block when nothing is said about it; `None` where saying so changes nothing.
fn thinking_default(template: &ChatTemplate) -> Option<bool> {
    let messages = [json!({"role": "user", "content": "hi"})];
    let render = |think| {
        template
            .render(
                &messages,
                &RenderOptions {
                    think,
                    ..RenderOptions::default()
                },
            )
            .ok()
    };
    let (unset, on, off) = (render(None)?, render(Some(true))?, render(Some(false))?);
    (on != off).then(|| template.think_open(&unset))
}

#[cfg(test)]
mod tests;
