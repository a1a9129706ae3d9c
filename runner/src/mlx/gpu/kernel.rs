//! One kernel of our own on either GPU backend.
//!
//! Invariant: the same text runs on both; what differs is in the preludes, and in who compiles it.

use std::borrow::Cow;
use std::rc::Rc;

use mlx_rs::error::Result;
use mlx_rs::{Array, Dtype};

use super::compiler::Compiler;
use super::cuda::CudaKernel;
use super::metal::MetalKernel;

/// A kernel's text. The body sees inputs and outputs as pointers by their names, `NAME_shape` of an input, each integer as
/// `NAME[0]`, the constants of a call, and its type as `T`.
pub(super) struct Text {
    pub(super) name: &'static str,
    pub(super) inputs: &'static [&'static str],
    /// Integers that may differ between launches.
    pub(super) integers: &'static [&'static str],
    pub(super) outputs: &'static [&'static str],
    /// Functions that follow the prelude.
    pub(super) helpers: &'static str,
    pub(super) body: Cow<'static, str>,
}

/// Arguments of one launch.
pub(super) struct Call<'a> {
    /// Arrays in the order of the kernel's input names.
    pub(super) inputs: &'a [&'a Array],
    /// Integers in the order of their names.
    pub(super) integers: &'a [i32],
    /// Shape and type of each result.
    pub(super) outputs: &'a [(&'a [i32], Dtype)],
    /// Integer constants, for each set of which the kernel is compiled.
    pub(super) constants: &'a [(&'static str, i32)],
    /// The constant `T`.
    pub(super) dtype: Dtype,
    /// Threads in all, by axis.
    pub(super) grid: [i32; 3],
    /// Threads of a group, by axis.
    pub(super) group: [i32; 3],
}

/// What makes kernels for a backend.
#[derive(Debug)]
pub(super) enum Maker {
    /// CUDA, with the compiler that MLX has loaded.
    Cuda(Rc<Compiler>),
    /// MLX's custom kernels.
    Metal,
}

enum Handle {
    Cuda(CudaKernel),
    Metal(MetalKernel),
}

/// See the module's text.
pub(super) struct Kernel {
    name: &'static str,
    handle: Handle,
}

impl std::fmt::Debug for Kernel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Kernel").field(&self.name).finish()
    }
}

impl Maker {
    /// `None` where the text can't be passed on.
    pub(super) fn kernel(&self, text: Text) -> Option<Kernel> {
        Some(Kernel {
            name: text.name,
            handle: match self {
                Self::Cuda(compiler) => Handle::Cuda(CudaKernel::new(Rc::clone(compiler), text)),
                Self::Metal => Handle::Metal(MetalKernel::new(&text)?),
            },
        })
    }
}

impl Kernel {
    /// Adds a launch to the graph.
    pub(super) fn call(&self, call: &Call<'_>) -> Result<Vec<Array>> {
        match &self.handle {
            Handle::Cuda(kernel) => kernel.call(call),
            Handle::Metal(kernel) => kernel.call(call),
        }
    }
}
