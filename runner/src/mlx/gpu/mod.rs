//! Fused kernels for NVIDIA and Apple GPUs.
//!
//! Invariant: each kernel equals its counterpart in plain operations up to rounding; [`check::check`] holds them against each
//! other on random input before a model trusts them.

mod attention;
mod attention_source;
pub mod bytes;
pub mod check;
mod compiler;
mod cuda;
mod delta;
mod draft_input;
mod kernel;
mod metal;
mod peak;
pub mod products;
mod products_source;
mod source;

use std::cell::RefCell;
use std::path::Path;
use std::rc::Rc;

use mlx_rs::error::Result;
use mlx_rs::Array;

use super::Backend;
use attention::Attention;
use compiler::Compiler;
use draft_input::DraftInput;
use kernel::{Call, Kernel, Maker, Text};
use peak::Peak;
use products::{Gain, Products, Stored};

pub use attention::{Heads, Prepare};
pub use delta::DeltaResults;

/// Threads that share a row's norm.
const NORM_THREADS: i32 = 256;

/// All kernels, compiled at first use for each shape.
#[derive(Debug)]
pub struct Kernels {
    delta_rows: Kernel,
    delta_prepare: Kernel,
    delta_long: Kernel,
    gated_norm: Kernel,
    add_norm: Kernel,
    norm: Kernel,
    swiglu: Kernel,
    attention: Attention,
    peak: Peak,
    draft_input: DraftInput,
    products: Option<Products>,
}

thread_local! {
    static KERNELS: RefCell<Option<Rc<Kernels>>> = const { RefCell::new(None) };
}

/// Makes the kernels for the thread that owns all of MLX; false on the CPU backend. What is compiled is kept in `directory`
/// where the backend lets it.
pub fn install(backend: Backend, directory: Option<&Path>) -> bool {
    let kernels = Kernels::new(backend, directory);
    let there = kernels.is_some();
    KERNELS.with(|slot| *slot.borrow_mut() = kernels);
    there
}

/// Takes them away again, from a device that they compute wrongly on.
pub fn uninstall() {
    KERNELS.with(|slot| *slot.borrow_mut() = None);
}

/// This thread's kernels.
///
/// # Errors
/// [`install`] was not called on this thread.
pub fn kernels() -> Result<Rc<Kernels>> {
    let found = KERNELS.with(|slot| slot.borrow().clone());
    found.ok_or_else(|| mlx_rs::error::Exception::custom("no GPU kernels on this thread"))
}

/// Runs `with` on this thread's products of few rows; `None` where there are none.
///
/// # Errors
/// What `with` says.
pub fn with_products<R>(with: impl FnOnce(&Products) -> Result<R>) -> Result<Option<R>> {
    let found = KERNELS.with(|slot| slot.borrow().clone());
    found.as_deref().and_then(Kernels::products).map(with).transpose()
}

/// Whether this thread computes on CUDA, with kernels of our own.
pub fn on_cuda() -> bool {
    KERNELS.with(|slot| slot.borrow().as_ref().is_some_and(|k| k.products.is_some()))
}

impl Kernels {
    /// Kernels for a GPU backend; `None` for the CPU, and on CUDA where its compiler isn't found.
    fn new(backend: Backend, directory: Option<&Path>) -> Option<Rc<Self>> {
        let maker = match backend {
            Backend::Cpu => return None,
            Backend::Metal => Maker::Metal,
            Backend::Cuda => Maker::Cuda(Rc::new(Compiler::find(directory)?)),
        };
        let make = |name, inputs, outputs, body: &'static str| {
            maker.kernel(Text {
                name,
                inputs,
                integers: if body.contains("slots[0]") {
                    &["slots"]
                } else {
                    &[]
                },
                outputs,
                helpers: "",
                body: body.into(),
            })
        };
        Some(Rc::new(Self {
            delta_rows: make(
                "delta_rows",
                &["packed", "tail", "conv", "state", "decay", "dt_bias", "norm"],
                &["y", "mix", "states"],
                source::DELTA_ROWS,
            )?,
            delta_prepare: make(
                "delta_prepare",
                &["packed", "tail", "conv", "decay", "dt_bias"],
                &["x", "gates"],
                source::DELTA_PREPARE,
            )?,
            delta_long: make(
                "delta_long",
                &["x", "gates", "state"],
                &["o", "last"],
                source::DELTA_LONG,
            )?,
            gated_norm: make("gated_norm", &["o", "packed", "norm"], &["y"], source::GATED_NORM)?,
            add_norm: make(
                "add_norm",
                &["x", "added", "gain"],
                &["sum", "normed"],
                source::ADD_NORM,
            )?,
            norm: make("norm", &["x", "gain"], &["normed"], source::NORM)?,
            swiglu: make("swiglu", &["gate_up"], &["y"], source::SWIGLU)?,
            attention: Attention::new(&maker)?,
            peak: Peak::new(&maker)?,
            draft_input: DraftInput::new(&maker)?,
            products: Products::new(&maker),
        }))
    }

    /// Products of few rows, where the backend has them.
    pub fn products(&self) -> Option<&Products> {
        self.products.as_ref()
    }

    /// Ids [R] int32 and values [R] float32 of the largest logits among the first `known` ids of [R, V]; the lowest of equals,
    /// NaN for a row that holds one.
    pub fn peak(&self, logits: &Array, known: i32) -> Result<(Array, Array)> {
        self.peak.of(logits, known)
    }

    /// The norm of each token's embedding beside the norm of each state, [B, L, 2 D] in the type of `hidden` [B, L, D]; ids [B, L]
    /// int32, `table` the embeddings [V, D]. The norms are the token's and the state's.
    pub fn draft_input(
        &self,
        ids: &Array,
        table: Stored<'_>,
        hidden: &Array,
        norms: (Gain<'_>, Gain<'_>),
    ) -> Result<Array> {
        self.draft_input.of(ids, table, hidden, norms)
    }

    /// `x + added` and its norm, in the type of `x`.
    pub fn add_norm(&self, x: &Array, added: &Array, gain: &Array, eps: f32) -> Result<(Array, Array)> {
        let shape = x.shape();
        let width = gain.dim(0);
        let rows = (x.size() as i32) / width;
        let mut out = self.add_norm.call(&Call {
            inputs: &[x, added, gain],
            integers: &[],
            outputs: &[(shape, x.dtype()), (shape, x.dtype())],
            constants: &[("THREADS", NORM_THREADS), ("EPS", bits(eps))],
            dtype: x.dtype(),
            grid: [NORM_THREADS, rows, 1],
            group: [NORM_THREADS, 1, 1],
        })?;
        let (normed, sum) = two(&mut out)?;
        Ok((sum, normed))
    }

    /// The norm of `x`, in its type.
    pub fn norm(&self, x: &Array, gain: &Array, eps: f32) -> Result<Array> {
        let width = gain.dim(0);
        let rows = (x.size() as i32) / width;
        let mut out = self.norm.call(&Call {
            inputs: &[x, gain],
            integers: &[],
            outputs: &[(x.shape(), x.dtype())],
            constants: &[("THREADS", NORM_THREADS), ("EPS", bits(eps))],
            dtype: x.dtype(),
            grid: [NORM_THREADS, rows, 1],
            group: [NORM_THREADS, 1, 1],
        })?;
        one(&mut out)
    }

    /// `silu(gate) * up` of packed rows [..., 2 I] → [..., I].
    pub fn swiglu(&self, gate_up: &Array) -> Result<Array> {
        let mut shape = gate_up.shape().to_vec();
        let width = gate_up.dim(-1) / 2;
        if let Some(last) = shape.last_mut() {
            *last = width;
        }
        let rows = (gate_up.size() as i32) / (2 * width);
        let mut out = self.swiglu.call(&Call {
            inputs: &[gate_up],
            integers: &[],
            outputs: &[(&shape, gate_up.dtype())],
            constants: &[("I", width)],
            dtype: gate_up.dtype(),
            grid: [width, rows, 1],
            group: [256, 1, 1],
        })?;
        one(&mut out)
    }
}

/// A float as an integer constant of a kernel: MLX's constants are integers, and an array of one value would be read from
/// host memory.
fn bits(value: f32) -> i32 {
    value.to_bits() as i32
}

fn one(out: &mut Vec<Array>) -> Result<Array> {
    out.pop()
        .ok_or_else(|| mlx_rs::error::Exception::custom("kernel without a result"))
}

/// The last result and the one before it.
fn two(out: &mut Vec<Array>) -> Result<(Array, Array)> {
    Ok((one(out)?, one(out)?))
}
