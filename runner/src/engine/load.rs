//! From a model directory to a model that is ready to run.
//!
//! Invariant: everything that can be checked without the device is checked before anything is put on it.

use std::path::Path as FilePath;
use std::sync::Arc;
use std::time::{Duration, Instant};

use lookahead_protocol::event::{DraftInfo, LoadProgress, LoadStage, MemoryInfo, ModelInfo, Ready};
use lookahead_protocol::{ErrorCode, Event};

use super::job::Refusal;
use super::media::PictureRules;
use super::prefix::Prefixes;
use super::text::{Awaited, TextStack};
use super::Settings;
use crate::host::latch::Latch;
use crate::host::outbox::Outbox;
use crate::image::ImageRules;
use crate::mlx::gpu::check::Constants;
use crate::mlx::{gpu, memory, Backend, Path};
use crate::model::checkpoint::Checkpoint;
use crate::model::config::ModelConfig;
use crate::model::error::{LoadError, LoadErrorKind};
use crate::model::estimate;
use crate::model::plan::{plan, Plan, PlanOptions, VisionStatus};
use crate::model::quant::ModuleQuant;
use crate::model::qwen3_5::{delta, load, Qwen35, Scores};
use crate::model::weights::{memory_bytes, ModelError, Precision, Weights};
use crate::model::Model as _;
use crate::prefix::disk::{DiskConfig, DiskStore, FingerprintBuilder};

/// A model ready to run, with what the host is told of it.
#[derive(Debug)]
pub struct LoadedModel {
    /// Trunk and head.
    pub model: Qwen35,
    /// Text side.
    pub text: Arc<TextStack>,
    /// The `ready` event.
    pub ready: Ready,
    /// How the parts are computed.
    pub path: Path,
    /// An empty prefix cache, its disk tier opened.
    pub prefix: Prefixes,
}

fn refusal(error: &LoadError) -> Refusal {
    let code = match error.kind() {
        LoadErrorKind::NotFound => ErrorCode::ModelNotFound,
        LoadErrorKind::Unsupported => ErrorCode::ArchitectureUnsupported,
        LoadErrorKind::Invalid => ErrorCode::ModelInvalid,
    };
    Refusal::new(code, error.to_string())
}

impl From<LoadError> for Refusal {
    fn from(error: LoadError) -> Self {
        refusal(&error)
    }
}

impl From<ModelError> for Refusal {
    fn from(error: ModelError) -> Self {
        match error {
            ModelError::Load(error) => refusal(&error),
            other => Self::new(ErrorCode::Internal, other.to_string()),
        }
    }
}

/// Loads the model of `settings`, telling the host how far it is. `None` if the latch tripped meanwhile.
///
/// # Errors
/// The files can't be used or the device fails.
pub fn load_model(
    settings: &Settings,
    backend: Backend,
    outbox: &Outbox,
    latch: &Latch,
    text: &Awaited<TextStack>,
) -> Result<Option<LoadedModel>, Refusal> {
    let start = Instant::now();
    let checkpoint = Checkpoint::open(&settings.model)?;
    let plan = plan(
        &checkpoint,
        PlanOptions {
            no_draft: settings.draft.is_off(),
            fp8: settings.fp8,
        },
    )?;
    for warning in &plan.warnings {
        tracing::warn!("{warning}");
    }
    let config = checkpoint.config();
    let mut stack = TextStack::load(&settings.model, config)
        .map_err(|error| Refusal::new(ErrorCode::ModelInvalid, error.to_string()))?;
    if let (VisionStatus::Active(vision), Some(token)) = (&plan.vision, config.media.image) {
        let rules = ImageRules::read(&settings.model, vision, settings.image_pixels)?;
        stack.pictures = Some(PictureRules { token, rules });
    }
    let stack = Arc::new(stack);
    text.provide(Arc::clone(&stack));

    let total = checkpoint.total_bytes();
    let limit = settings.memory_limit;
    memory::set_limit(limit);
    let wide = Precision::wide();
    let (precision, path) = match backend {
        Backend::Cpu if memory_bytes(&checkpoint, &plan, wide) <= limit => (wide, Path::Cpu),
        Backend::Cpu => (Precision::Stored, Path::Cpu),
        Backend::Metal | Backend::Cuda => {
            let alive = || {
                outbox.push(Event::Load(LoadProgress {
                    done: 0,
                    total,
                    stage: LoadStage::Weights,
                }));
            };
            let kept = settings.cache_dir.as_ref().map(|dir| dir.join("kernels"));
            (
                Precision::Native,
                gpu_path(backend, kept.as_deref(), &plan, config, alive),
            )
        }
    };
    let needed = memory_bytes(&checkpoint, &plan, precision);
    if needed > limit {
        let message = format!("the weights take {needed} bytes, more than the memory limit of {limit} bytes");
        return Err(Refusal::new(ErrorCode::OutOfMemory, message));
    }
    tracing::info!("weights: {needed} of {limit} bytes, {}", precision.words());
    let scores = draft_scores(
        backend,
        path,
        estimate::draft_scores(&checkpoint, &plan, limit - needed),
    );
    if plan
        .modules
        .iter()
        .any(|m| matches!(m.quant, ModuleQuant::Fp8Block { .. }))
    {
        tracing::info!("fp8 blocks are held as {}", settings.fp8.name());
    }
    let mut last = None::<Instant>;
    let mut progress = |done: u64| {
        if last.is_none_or(|at| at.elapsed() >= Duration::from_millis(100)) {
            last = Some(Instant::now());
            let load = LoadProgress {
                done: done.min(total),
                total,
                stage: LoadStage::Weights,
            };
            outbox.push(Event::Load(load));
        }
        !latch.is_set()
    };
    let loaded = match Weights::new(&checkpoint, &plan, precision, &mut progress)
        .and_then(|w| load(&w, path, scores))
    {
        Err(ModelError::Interrupted) => return Ok(None),
        result => result?,
    };
    outbox.push(Event::Load(LoadProgress {
        done: total,
        total,
        stage: LoadStage::Weights,
    }));
    let peak = memory::usage().peak;
    tracing::info!(
        "weights: {} bytes held, at most {peak} at once while loading ({:+.1} %)",
        loaded.bytes,
        100.0 * (peak as f64 / loaded.bytes.max(1) as f64 - 1.0)
    );
    let draft = draft_info(&plan, &loaded.model, settings);
    tracing::info!(
        "draft head: {}",
        draft
            .reason
            .clone()
            .unwrap_or_else(|| format!("active, depth up to {}", draft.max_depth))
    );
    let ready = Ready {
        model: model_info(&settings.model, &checkpoint, &plan, &stack),
        draft,
        memory: MemoryInfo {
            weights: loaded.bytes,
            limit,
        },
        load_duration: u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX),
    };
    let drafts = loaded.model.self_draft().is_some();
    let disk = open_disk(settings, &checkpoint, path, drafts);
    let prefix = Prefixes::new(settings.cache, drafts, disk);
    Ok(Some(LoadedModel {
        model: loaded.model,
        text: stack,
        ready,
        path,
        prefix,
    }))
}

/// What scores drafts; `bytes` is what a copy of the vocabulary projection in bytes takes, where it may be made.
fn draft_scores(backend: Backend, path: Path, bytes: Option<u64>) -> Scores {
    match bytes {
        Some(bytes) if backend == Backend::Cuda && path == Path::Gpu => {
            tracing::info!("drafts are scored with a vocabulary projection of 8 bits: {bytes} bytes more");
            Scores::Bytes
        }
        _ => Scores::Stored,
    }
}

/// The fused path where this device computes it right and the model's shapes fit, else plain operations.
///
/// Kernels that aren't kept in the directory `kept` have to be compiled first; `alive` is called between them.
fn gpu_path(
    backend: Backend,
    kept: Option<&FilePath>,
    plan: &Plan,
    config: &ModelConfig,
    alive: impl Fn(),
) -> Path {
    if !gpu::install(backend, kept) {
        return Path::Graph;
    }
    let constants = kernel_constants(plan, config);
    let shape = constants.delta;
    let fits = if gpu::Kernels::takes(shape) {
        gpu::check::check(&constants, alive)
    } else {
        Err(format!(
            "they don't take heads of {} and {} columns",
            shape.key_dim, shape.value_dim
        ))
    };
    match fits {
        Ok(()) => Path::Gpu,
        Err(reason) => {
            tracing::warn!("the fused kernels are off: {reason}");
            gpu::uninstall();
            Path::Graph
        }
    }
}

/// What the model's kernels are compiled with.
fn kernel_constants(plan: &Plan, config: &ModelConfig) -> Constants {
    let group = plan.modules.iter().find_map(|module| match module.quant {
        ModuleQuant::Affine { bits: 4, group } => Some(group as i32),
        _ => None,
    });
    Constants {
        delta: delta::shape(&config.delta),
        heads: gpu::Heads {
            query: config.heads as i32,
            kv: config.kv_heads as i32,
            dim: config.head_dim as i32,
        },
        half: (config.rope.dims / 2) as i32,
        eps: config.rms_norm_eps as f32,
        group,
    }
}

/// Opens the disk tier where it is on; a tier that can't be opened is a warning.
fn open_disk(settings: &Settings, checkpoint: &Checkpoint, path: Path, drafts: bool) -> Option<DiskStore> {
    let directory = settings.cache_dir.clone().filter(|_| settings.cache.disk > 0)?;
    let mut facts = FingerprintBuilder::new()
        .fact("format", b"1")
        .fact("numerics", format!("{path:?}").as_bytes())
        .fact("head", &[u8::from(drafts)])
        .fact("fp8", settings.fp8.name().as_bytes())
        .fact(
            "config",
            serde_json::to_string(&checkpoint.config().raw)
                .unwrap_or_default()
                .as_bytes(),
        );
    for tensor in checkpoint.tensors() {
        // The ends and a stride between them: enough to tell trained weights apart without reading all of them.
        let stride = (tensor.data.len() / 64).max(1);
        let sample: Vec<u8> = tensor.data.iter().step_by(stride).copied().collect();
        facts = facts
            .fact(
                tensor.name,
                format!("{:?} {:?}", tensor.dtype, tensor.shape).as_bytes(),
            )
            .fact("sample", &sample);
    }
    match DiskStore::open(DiskConfig::new(directory, facts.finish(), settings.cache.disk)) {
        Ok(store) => Some(store),
        Err(error) => {
            tracing::warn!("the disk tier of the prefix cache is off: {error}");
            None
        }
    }
}

fn draft_info(plan: &Plan, model: &Qwen35, settings: &Settings) -> DraftInfo {
    let reason = plan.head.reason();
    DraftInfo {
        active: reason.is_none(),
        kind: model.self_draft().map(|draft| draft.kind().name().to_owned()),
        max_depth: if reason.is_none() {
            settings.draft.max_depth() as u32
        } else {
            0
        },
        reason,
    }
}

fn model_info(dir: &FilePath, checkpoint: &Checkpoint, plan: &Plan, text: &TextStack) -> ModelInfo {
    let mut eos = text.eos.ids().to_vec();
    eos.sort_unstable();
    ModelInfo {
        path: dir.display().to_string(),
        architecture: checkpoint.config().architecture.clone(),
        parameters: plan.parameters,
        quantization: quantization(plan),
        context_length: text.context_length as u64,
        vocab_size: text.vocab_size as u64,
        vision: matches!(plan.vision, VisionStatus::Active(_)),
        eos,
    }
}

/// The storage of most parameters in words; `None` where all are plain floats.
fn quantization(plan: &Plan) -> Option<String> {
    let mut kinds: std::collections::BTreeMap<String, u64> = std::collections::BTreeMap::new();
    for module in plan.modules.iter().filter(|m| m.quant != ModuleQuant::Dense) {
        *kinds.entry(module.quant.to_string()).or_default() +=
            module.shape.iter().map(|&n| n as u64).product::<u64>();
    }
    kinds
        .into_iter()
        .max_by_key(|(_, parameters)| *parameters)
        .map(|(kind, _)| kind)
}
