//! One custom kernel of MLX on either GPU backend.
//!
//! Invariant: the handle is freed once, on the thread that owns all of MLX; a kernel is compiled by MLX at its first launch
//! with each set of constants and kept for the process's life.

use std::ffi::{c_int, CString};

use mlx_rs::error::{Exception, Result};
use mlx_rs::{Array, Dtype};

use super::source::{CUDA_PRELUDE, METAL_PRELUDE};
use crate::mlx::ops::{arrays_op, ArrayVector};
use crate::mlx::Backend;

enum Handle {
    Cuda(mlx_sys::mlx_fast_cuda_kernel),
    Metal(mlx_sys::mlx_fast_metal_kernel),
}

/// See the module's text.
pub(super) struct Kernel {
    name: String,
    handle: Handle,
}

impl std::fmt::Debug for Kernel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Kernel").field(&self.name).finish()
    }
}

/// Arguments of one launch.
pub(super) struct Call<'a> {
    /// Arrays in the order of the kernel's input names.
    pub(super) inputs: &'a [&'a Array],
    /// Shape and type of each result.
    pub(super) outputs: &'a [(&'a [i32], Dtype)],
    /// Integer constants.
    pub(super) ints: &'a [(&'static str, i32)],
    /// The constant `T`.
    pub(super) dtype: Dtype,
    /// Threads in all, by axis.
    pub(super) grid: [i32; 3],
    /// Threads of a group, by axis.
    pub(super) group: [i32; 3],
}

struct Names(mlx_sys::mlx_vector_string);

impl Names {
    fn new(names: &[&str]) -> Option<Self> {
        // SAFETY: an empty vector, freed in `drop`; values are copied.
        unsafe {
            let vector = Self(mlx_sys::mlx_vector_string_new());
            for name in names {
                let name = CString::new(*name).ok()?;
                mlx_sys::mlx_vector_string_append_value(vector.0, name.as_ptr());
            }
            Some(vector)
        }
    }
}

impl Drop for Names {
    fn drop(&mut self) {
        // SAFETY: owned by this value alone.
        unsafe { mlx_sys::mlx_vector_string_free(self.0) };
    }
}

impl Kernel {
    /// `None` on the CPU backend. `helpers` follow the prelude.
    pub(super) fn new(
        backend: Backend,
        name: &str,
        (inputs, outputs): (&[&str], &[&str]),
        helpers: &str,
        body: &str,
    ) -> Option<Self> {
        let full = CString::new(format!("lookahead_{name}")).ok()?;
        let (inputs, outputs) = (Names::new(inputs)?, Names::new(outputs)?);
        let source = CString::new(body).ok()?;
        let handle = match backend {
            Backend::Cpu => return None,
            Backend::Cuda => {
                let header = CString::new(format!("{CUDA_PRELUDE}{helpers}")).ok()?;
                // SAFETY: all pointers live for the call, which copies them.
                Handle::Cuda(unsafe {
                    mlx_sys::mlx_fast_cuda_kernel_new(
                        full.as_ptr(),
                        inputs.0,
                        outputs.0,
                        source.as_ptr(),
                        header.as_ptr(),
                        true,
                        0,
                    )
                })
            }
            Backend::Metal => {
                let header = CString::new(format!("{METAL_PRELUDE}{helpers}")).ok()?;
                // SAFETY: as above.
                Handle::Metal(unsafe {
                    mlx_sys::mlx_fast_metal_kernel_new(
                        full.as_ptr(),
                        inputs.0,
                        outputs.0,
                        source.as_ptr(),
                        header.as_ptr(),
                        true,
                        false,
                    )
                })
            }
        };
        Some(Self {
            name: name.to_owned(),
            handle,
        })
    }

    /// Adds a launch to the graph.
    pub(super) fn call(&self, call: &Call<'_>) -> Result<Vec<Array>> {
        let inputs = ArrayVector::new(call.inputs.iter().copied());
        let names: Vec<CString> = call
            .ints
            .iter()
            .map(|(name, _)| {
                CString::new(*name).map_err(|_| Exception::custom("constant with a NUL in its name"))
            })
            .collect::<Result<_>>()?;
        let [gx, gy, gz] = call.grid;
        let [tx, ty, tz] = call.group;
        // Groups never exceed the grid: Metal would launch threads beyond it, CUDA rounds up.
        let (tx, ty, tz) = (tx.min(gx), ty.min(gy), tz.min(gz));
        macro_rules! configure {
            ($new:ident, $free:ident, $output:ident, $grid:ident, $group:ident, $int:ident, $dtype:ident, $apply:ident, $kernel:expr) => {{
                // SAFETY: the configuration is made here, filled through its own functions with pointers that live for each
                // call, and freed after the launch has copied it.
                unsafe {
                    let config = mlx_sys::$new();
                    for (shape, dtype) in call.outputs {
                        mlx_sys::$output(config, shape.as_ptr(), shape.len(), (*dtype).into());
                    }
                    mlx_sys::$grid(config, gx as c_int, gy as c_int, gz as c_int);
                    mlx_sys::$group(config, tx as c_int, ty as c_int, tz as c_int);
                    mlx_sys::$dtype(config, c"T".as_ptr(), call.dtype.into());
                    for ((_, value), name) in call.ints.iter().zip(&names) {
                        mlx_sys::$int(config, name.as_ptr(), *value as c_int);
                    }
                    let out = arrays_op(&self.name, |res, stream| {
                        mlx_sys::$apply(res, $kernel, inputs.0, config, stream)
                    });
                    mlx_sys::$free(config);
                    out
                }
            }};
        }
        match self.handle {
            Handle::Cuda(kernel) => configure!(
                mlx_fast_cuda_kernel_config_new,
                mlx_fast_cuda_kernel_config_free,
                mlx_fast_cuda_kernel_config_add_output_arg,
                mlx_fast_cuda_kernel_config_set_grid,
                mlx_fast_cuda_kernel_config_set_thread_group,
                mlx_fast_cuda_kernel_config_add_template_arg_int,
                mlx_fast_cuda_kernel_config_add_template_arg_dtype,
                mlx_fast_cuda_kernel_apply,
                kernel
            ),
            Handle::Metal(kernel) => configure!(
                mlx_fast_metal_kernel_config_new,
                mlx_fast_metal_kernel_config_free,
                mlx_fast_metal_kernel_config_add_output_arg,
                mlx_fast_metal_kernel_config_set_grid,
                mlx_fast_metal_kernel_config_set_thread_group,
                mlx_fast_metal_kernel_config_add_template_arg_int,
                mlx_fast_metal_kernel_config_add_template_arg_dtype,
                mlx_fast_metal_kernel_apply,
                kernel
            ),
        }
    }
}

impl Drop for Kernel {
    fn drop(&mut self) {
        // SAFETY: made in `new` and owned by this value alone.
        unsafe {
            match self.handle {
                Handle::Cuda(kernel) => mlx_sys::mlx_fast_cuda_kernel_free(kernel),
                Handle::Metal(kernel) => mlx_sys::mlx_fast_metal_kernel_free(kernel),
            }
        }
    }
}
