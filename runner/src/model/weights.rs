//! Tensors of a checkpoint as MLX arrays.
//!
//! Invariant: every array handed out is evaluated and owns its bytes, and what was read for it is released before the next
//! one is read, so loading peaks at little more than the weights.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::ffi::c_void;

use mlx_rs::transforms::eval;
use mlx_rs::{Array, Dtype};
use safetensors::Dtype as FileDtype;

use super::checkpoint::{Checkpoint, TensorView};
use super::error::LoadError;
use super::fp8;
use super::linear::Linear;
use super::matrix::{Codes, Matrix};
use super::plan::Plan;
use super::quant::ModuleQuant;
use crate::mlx::ops::{self, QuantMode};
use crate::mlx::{cpu, memory};

/// Why a model could not be built.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// The files.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// The device.
    #[error("the device failed while loading: {0}")]
    Device(String),
    /// The host wanted us to end.
    #[error("loading was interrupted")]
    Interrupted,
}

impl From<mlx_rs::error::Exception> for ModelError {
    fn from(error: mlx_rs::error::Exception) -> Self {
        Self::Device(ops::explain(&error))
    }
}

/// A result of this module.
pub type Result<T> = std::result::Result<T, ModelError>;

/// The types that weights and activations have in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Precision {
    /// Float32 for everything.
    Widen,
    /// Bfloat16 matrices as stored, which the host's cores multiply in float32 all the same; float32 for everything else. As
    /// exact as widening them, faster, and half the memory.
    Half,
    /// Weights as stored, activations in float32: on the host's cores where widened weights don't fit.
    Stored,
    /// Weights as stored, activations in the checkpoint's type: GPUs.
    Native,
}

impl Precision {
    /// What the host's cores compute with where it fits: exact, and as fast as may be.
    pub fn wide() -> Self {
        if cpu::product::AVAILABLE {
            Self::Half
        } else {
            Self::Widen
        }
    }

    /// For the log.
    pub fn words(self) -> &'static str {
        match self {
            Self::Widen => "widened to float32",
            Self::Half => "bfloat16 matrices as stored, the rest widened to float32",
            Self::Stored => "as stored, activations in float32",
            Self::Native => "as stored",
        }
    }
}

/// Bytes that the weights of `plan` take in memory, before anything is read.
pub fn memory_bytes(checkpoint: &Checkpoint, plan: &Plan, precision: Precision) -> u64 {
    let size = |name: &str| checkpoint.tensor(name).map_or(0, |view| view.data.len() as u64);
    let mut plain = plan.parameters;
    let mut bytes = 0;
    for module in &plan.modules {
        let entries = module.shape.iter().map(|&n| n as u64).product::<u64>();
        plain -= entries.min(plain);
        // As [`Weights::stack`] reads them.
        let in_stack = [".experts.", ".switch_mlp."]
            .iter()
            .any(|part| module.path.contains(part));
        bytes += match (module.quant, precision) {
            (ModuleQuant::Dense, Precision::Half) if !in_stack && is_half(checkpoint, &module.path) => {
                2 * entries
            }
            (_, Precision::Widen | Precision::Half) => 4 * entries,
            (ModuleQuant::Fp8Block { .. }, _) => {
                let input = module.shape.last().copied().unwrap_or(0);
                match plan.fp8.requantised(input) {
                    // A byte a value and a byte a group.
                    Some(_) => entries + entries / 32,
                    None => 2 * entries,
                }
            }
            (ModuleQuant::Dense, Precision::Stored) if entries <= WIDEN_UP_TO as u64 && !in_stack => {
                4 * entries
            }
            _ => {
                let parts =
                    ["weight", "scales", "biases"].map(|part| size(&format!("{}.{part}", module.path)));
                size(&module.path) + parts.iter().sum::<u64>()
            }
        };
    }
    // Gains, decays and conv taps are kept in float32 whatever the rest is.
    bytes + 4 * plain
}

/// Whether a matrix is stored in bfloat16 and stays so under [`Precision::Half`].
fn is_half(checkpoint: &Checkpoint, path: &str) -> bool {
    let view = checkpoint.tensor(&format!("{path}.weight"));
    view.or_else(|| checkpoint.tensor(path))
        .is_some_and(|view| view.dtype == FileDtype::BF16 && view.shape.len() == 2 && path != POSITIONS)
}

/// The tower's table of positions, which is computed with and no factor of a product.
const POSITIONS: &str = "visual.pos_embed";

/// Watches loading: bytes done so far; returns whether to go on.
pub type Progress<'a> = &'a mut dyn FnMut(u64) -> bool;

/// Bytes read between two returns of freed buffers to the system.
const TIDY_AFTER: u64 = 256 << 20;

/// Entries up to which a dense matrix that would stay as stored is widened all the same: routers, gates and the like cost little
/// memory, and rounding there costs most.
const WIDEN_UP_TO: usize = 1 << 20;

/// Reads tensors one by one and counts the bytes.
pub struct Weights<'a> {
    checkpoint: &'a Checkpoint,
    plan: &'a Plan,
    modules: BTreeMap<&'a str, ModuleQuant>,
    precision: Precision,
    activations: Dtype,
    done: Cell<u64>,
    tidied: Cell<u64>,
    progress: RefCell<Progress<'a>>,
}

impl std::fmt::Debug for Weights<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Weights")
            .field("precision", &self.precision)
            .field("done", &self.done)
            .finish_non_exhaustive()
    }
}

impl<'a> Weights<'a> {
    /// Reads from `checkpoint` what `plan` says of it.
    ///
    /// # Errors
    /// The plan is of another checkpoint.
    pub fn new(
        checkpoint: &'a Checkpoint,
        plan: &'a Plan,
        precision: Precision,
        progress: Progress<'a>,
    ) -> Result<Self> {
        let activations = match precision {
            Precision::Widen | Precision::Half | Precision::Stored => Dtype::Float32,
            Precision::Native => stored_activations(checkpoint)?,
        };
        Ok(Self {
            checkpoint,
            plan,
            modules: plan.modules.iter().map(|m| (m.path.as_str(), m.quant)).collect(),
            precision,
            activations,
            done: Cell::new(0),
            tidied: Cell::new(0),
            progress: RefCell::new(progress),
        })
    }

    /// The checkpoint.
    pub fn checkpoint(&self) -> &'a Checkpoint {
        self.checkpoint
    }

    /// What was settled about it.
    pub fn plan(&self) -> &'a Plan {
        self.plan
    }

    /// The type that activations have.
    pub fn activations(&self) -> Dtype {
        self.activations
    }

    fn count(&self, view: &TensorView<'_>) -> Result<()> {
        self.done.set(self.done.get() + view.data.len() as u64);
        if self.done.get() - self.tidied.get() >= TIDY_AFTER {
            self.tidied.set(self.done.get());
            memory::give_back();
        }
        if (self.progress.borrow_mut())(self.done.get()) {
            Ok(())
        } else {
            Err(ModelError::Interrupted)
        }
    }

    /// The tensor as it is stored; float8 as its bytes.
    pub fn stored(&self, name: &str) -> Result<Array> {
        let view = self.checkpoint.need(name)?;
        let array = upload(&view)?;
        self.count(&view)?;
        Ok(array)
    }

    /// The tensor in float32: norm gains, decays, conv taps.
    pub fn f32(&self, name: &str) -> Result<Array> {
        settled(ops::cast(&self.stored(name)?, Dtype::Float32)?)
    }

    /// The tensor in the type of activations: biases.
    pub fn plain(&self, name: &str) -> Result<Array> {
        settled(ops::cast(&self.stored(name)?, self.activations)?)
    }

    /// A norm's effective gain, float32: `shift` is 1 where the file stores zero-centred gains, else 0.
    pub fn gain(&self, name: &str, shift: f32) -> Result<Array> {
        let gain = self.f32(name)?;
        if shift == 0.0 {
            return Ok(gain);
        }
        settled(gain.add(Array::from_f32(shift))?)
    }

    /// The matrix of module `path`, evaluated, in the form that it has in memory.
    ///
    /// # Errors
    /// The plan doesn't have the module, or the device fails.
    pub fn matrix(&self, path: &str) -> Result<Matrix> {
        self.read(path, WIDEN_UP_TO)
    }

    /// The same of a stack, or of a matrix that becomes a part of one: never widened for being small.
    ///
    /// # Errors
    /// As [`Weights::matrix`].
    pub fn stack(&self, path: &str) -> Result<Matrix> {
        self.read(path, 0)
    }

    fn read(&self, path: &str, small: usize) -> Result<Matrix> {
        let suffixed = format!("{path}.weight");
        let name = if self.checkpoint.has(&suffixed) {
            suffixed
        } else {
            path.to_owned()
        };
        let quant = self.modules.get(path).copied();
        let quant = quant.ok_or_else(|| LoadError::MissingTensors {
            names: vec![name.clone()],
        })?;
        let matrix = match (quant, self.precision) {
            (ModuleQuant::Dense, Precision::Stored) => {
                let values = self.stored(&name)?;
                match values.size() <= small {
                    true => Matrix::Dense(ops::cast(&values, Dtype::Float32)?),
                    false => Matrix::Dense(values),
                }
            }
            (ModuleQuant::Dense, Precision::Half) if small > 0 && is_half(self.checkpoint, path) => {
                Matrix::Dense(self.stored(&name)?)
            }
            (ModuleQuant::Dense, _) => Matrix::Dense(ops::cast(&self.stored(&name)?, self.activations)?),
            (ModuleQuant::Fp8Block { rows, cols }, _) => {
                let scales = self.stored(&format!("{name}_scale_inv"))?;
                let dtype = match self.precision {
                    Precision::Widen | Precision::Half => Dtype::Float32,
                    Precision::Stored => Dtype::Bfloat16,
                    Precision::Native => self.activations,
                };
                let values = fp8::decode(&self.stored(&name)?, &scales, [rows as i32, cols as i32])?;
                let input = usize::try_from(values.dim(-1)).unwrap_or(0);
                match self.plan.fp8.requantised(input).and_then(mode) {
                    Some(mode) => self.held(Codes::encode(&values, mode)?)?,
                    None => Matrix::Dense(ops::cast(&values, dtype)?),
                }
            }
            (quant, _) => self.held(self.codes(&name, path, quant)?)?,
        };
        eval(matrix.arrays())?;
        Ok(matrix)
    }

    /// Codes as this precision holds them.
    fn held(&self, codes: Codes) -> Result<Matrix> {
        Ok(match self.precision {
            Precision::Widen | Precision::Half => Matrix::Dense(codes.decode(Dtype::Float32)?),
            Precision::Stored | Precision::Native => Matrix::Quantized(codes),
        })
    }

    fn codes(&self, weight: &str, path: &str, quant: ModuleQuant) -> Result<Codes> {
        let mode = mode(quant).ok_or_else(|| ModelError::Device(format!("{path} has no codes: {quant}")))?;
        let part = |name: &str| {
            let name = format!("{path}.{name}");
            self.checkpoint.has(&name).then_some(name)
        };
        let factor = |name: String| Ok::<_, ModelError>(self.f32(&name)?.reshape(&[-1])?);
        let affine = matches!(quant, ModuleQuant::Affine { .. });
        Ok(Codes {
            weight: self.stored(weight)?,
            scales: self.stored(&format!("{path}.scales"))?,
            biases: part("biases")
                .filter(|_| affine)
                .map(|name| self.stored(&name))
                .transpose()?,
            global_scale: part("global_scale").map(factor).transpose()?,
            mode,
        })
    }

    /// The product with the matrix of module `path`.
    pub fn linear(&self, path: &str) -> Result<Linear> {
        Ok(Linear::new(self.matrix(path)?)?)
    }
}

/// MLX's parameters of a mode that it computes with.
fn mode(quant: ModuleQuant) -> Option<QuantMode> {
    let (_, bits, group) = quant.mlx()?;
    let mode = match quant {
        ModuleQuant::Affine { .. } => c"affine",
        ModuleQuant::Mxfp4 => c"mxfp4",
        ModuleQuant::Mxfp8 => c"mxfp8",
        ModuleQuant::Nvfp4 { .. } => c"nvfp4",
        ModuleQuant::Dense | ModuleQuant::Fp8Block { .. } => return None,
    };
    Some(QuantMode {
        group_size: i32::try_from(group).ok()?,
        bits: i32::try_from(bits).ok()?,
        mode,
    })
}

/// The type of a checkpoint's activations: that of its embedding, or of the embedding's scales, or else of the first norm.
fn stored_activations(checkpoint: &Checkpoint) -> Result<Dtype> {
    for name in ["embed_tokens.weight", "embed_tokens.scales"] {
        if let Some(view) = checkpoint.tensor(name) {
            let dtype = mlx_dtype(&view)?;
            if matches!(dtype, Dtype::Bfloat16 | Dtype::Float16 | Dtype::Float32) {
                return Ok(dtype);
            }
        }
    }
    mlx_dtype(&checkpoint.need("layers.0.input_layernorm.weight")?)
}

/// Evaluated at once, so that what it was made from is released.
fn settled(array: Array) -> Result<Array> {
    eval([&array])?;
    Ok(array)
}

/// MLX's name of a storage type.
pub fn mlx_dtype(view: &TensorView<'_>) -> Result<Dtype> {
    Ok(match view.dtype {
        FileDtype::F32 => Dtype::Float32,
        FileDtype::F16 => Dtype::Float16,
        FileDtype::BF16 => Dtype::Bfloat16,
        FileDtype::U32 => Dtype::Uint32,
        FileDtype::I32 => Dtype::Int32,
        // Float8 bytes are decoded by the caller.
        FileDtype::U8 | FileDtype::F8_E4M3 => Dtype::Uint8,
        _ => return Err(view.wrong_dtype("a float, uint32 or float8").into()),
    })
}

/// Copies a tensor's bytes into an array of its stored type.
fn upload(view: &TensorView<'_>) -> Result<Array> {
    let dtype = mlx_dtype(view)?;
    let mut shape = Vec::with_capacity(view.shape.len());
    for &dim in view.shape {
        shape.push(i32::try_from(dim).map_err(|_| view.wrong_shape("dimensions below 2^31"))?);
    }
    // SAFETY: the header check has made sure that the bytes are exactly shape times type, and MLX copies them. Reads of
    // unaligned data go through memcpy there.
    Ok(unsafe { Array::from_raw_data(view.data.as_ptr().cast::<c_void>(), &shape, dtype) })
}
