//! Tensors of a checkpoint as MLX arrays.
//!
//! Invariant: every array handed out is evaluated and owns its bytes, and what was read for it is released before the next
//! one is read, so loading peaks at little more than the weights.

use std::cell::{Cell, RefCell};
use std::ffi::c_void;

use mlx_rs::transforms::eval;
use mlx_rs::{Array, Dtype};
use safetensors::Dtype as FileDtype;

use super::checkpoint::{Checkpoint, TensorView};
use super::error::LoadError;
use super::linear::Linear;
use crate::mlx::ops;

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

/// The type that weights have in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Precision {
    /// Float32 for everything: what the fused CPU kernels take.
    Widen,
    /// As stored.
    Native,
}

/// Watches loading: bytes done so far; returns whether to go on.
pub type Progress<'a> = &'a mut dyn FnMut(u64) -> bool;

/// Reads tensors one by one and counts the bytes.
pub struct Weights<'a> {
    checkpoint: &'a Checkpoint,
    precision: Precision,
    done: Cell<u64>,
    progress: RefCell<Progress<'a>>,
}

impl std::fmt::Debug for Weights<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Weights").field("precision", &self.precision).field("done", &self.done).finish_non_exhaustive()
    }
}

impl<'a> Weights<'a> {
    /// Reads from `checkpoint`.
    pub fn new(checkpoint: &'a Checkpoint, precision: Precision, progress: Progress<'a>) -> Self {
        Self { checkpoint, precision, done: Cell::new(0), progress: RefCell::new(progress) }
    }

    /// The checkpoint.
    pub fn checkpoint(&self) -> &'a Checkpoint {
        self.checkpoint
    }

    /// The type that activations have when weights stay as stored: that of the first norm.
    pub fn activation_dtype(&self) -> Result<Dtype> {
        mlx_dtype(&self.checkpoint.need("layers.0.input_layernorm.weight")?)
    }

    fn count(&self, view: &TensorView<'_>) -> Result<()> {
        self.done.set(self.done.get() + view.data.len() as u64);
        if (self.progress.borrow_mut())(self.done.get()) {
            Ok(())
        } else {
            Err(ModelError::Interrupted)
        }
    }

    /// The tensor as it is stored.
    pub fn stored(&self, name: &str) -> Result<Array> {
        let view = self.checkpoint.need(name)?;
        let array = upload(&view)?;
        self.count(&view)?;
        Ok(array)
    }

    /// The tensor in the type that weights have in memory.
    pub fn array(&self, name: &str) -> Result<Array> {
        let array = self.stored(name)?;
        match self.precision {
            Precision::Widen => widen(&array),
            Precision::Native => Ok(array),
        }
    }

    /// The tensor in float32: norm gains, decays, conv taps.
    pub fn f32(&self, name: &str) -> Result<Array> {
        widen(&self.stored(name)?)
    }

    /// A norm's effective gain, float32: `shift` is 1 where the file stores zero-centred gains, else 0.
    pub fn gain(&self, name: &str, shift: f32) -> Result<Array> {
        let gain = self.f32(name)?;
        if shift == 0.0 {
            return Ok(gain);
        }
        let gain = gain.add(Array::from_f32(shift))?;
        gain.eval()?;
        Ok(gain)
    }

    /// The matrix of module `path`.
    pub fn linear(&self, path: &str) -> Result<Linear> {
        Ok(Linear::dense(&self.array(&format!("{path}.weight"))?)?)
    }
}

/// Float32 copy, evaluated.
fn widen(array: &Array) -> Result<Array> {
    let wide = ops::cast(array, Dtype::Float32)?;
    eval([&wide])?;
    Ok(wide)
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
