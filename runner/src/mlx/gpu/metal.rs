//! Kernels compiled and launched by MLX's own custom kernels for Metal.
//!
//! Invariant: the handle is freed once, on the thread that owns all of MLX; a kernel is compiled by MLX at its first launch
//! with each set of constants and kept for the process's life.

use std::ffi::{c_int, CString};

use mlx_rs::error::{Exception, Result};
use mlx_rs::Array;

use super::kernel::{Call, Text};
use super::source::METAL_PRELUDE;
use crate::mlx::ops::{arrays_op, ArrayVector};

/// See the module's text.
pub(super) struct MetalKernel {
    name: &'static str,
    handle: mlx_sys::mlx_fast_metal_kernel,
}

struct Names(mlx_sys::mlx_vector_string);

impl Names {
    fn new<'a>(names: impl IntoIterator<Item = &'a &'static str>) -> Option<Self> {
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

impl MetalKernel {
    /// `None` where a text holds a NUL.
    pub(super) fn new(text: &Text) -> Option<Self> {
        let name = CString::new(format!("lookahead_{}", text.name)).ok()?;
        let inputs = Names::new(text.inputs.iter().chain(text.integers))?;
        let outputs = Names::new(text.outputs)?;
        let source = CString::new(&*text.body).ok()?;
        let header = CString::new(format!("{METAL_PRELUDE}{}", text.helpers)).ok()?;
        // SAFETY: all pointers live for the call, which copies them.
        let handle = unsafe {
            mlx_sys::mlx_fast_metal_kernel_new(
                name.as_ptr(),
                inputs.0,
                outputs.0,
                source.as_ptr(),
                header.as_ptr(),
                true,
                false,
            )
        };
        Some(Self {
            name: text.name,
            handle,
        })
    }

    /// Adds a launch to the graph.
    pub(super) fn call(&self, call: &Call<'_>) -> Result<Vec<Array>> {
        let integers: Vec<Array> = call
            .integers
            .iter()
            // Three integers: arrays of at most eight bytes may lie in host memory, which a kernel reads slowly.
            .map(|&value| Array::from_slice(&[value, 0, 0], &[3]))
            .collect();
        let inputs = ArrayVector::new(call.inputs.iter().copied().chain(&integers));
        let names: Vec<CString> = call
            .constants
            .iter()
            .map(|(name, _)| {
                CString::new(*name).map_err(|_| Exception::custom("constant with a NUL in its name"))
            })
            .collect::<Result<_>>()?;
        let [gx, gy, gz] = call.grid;
        let [tx, ty, tz] = call.group;
        // SAFETY: the configuration is made here, filled through its own functions with pointers that live for each call, and
        // freed after the launch has copied it.
        unsafe {
            let config = mlx_sys::mlx_fast_metal_kernel_config_new();
            for (shape, dtype) in call.outputs {
                mlx_sys::mlx_fast_metal_kernel_config_add_output_arg(
                    config,
                    shape.as_ptr(),
                    shape.len(),
                    (*dtype).into(),
                );
            }
            mlx_sys::mlx_fast_metal_kernel_config_set_grid(config, gx, gy, gz);
            // Groups never exceed the grid: threads beyond it would be launched.
            mlx_sys::mlx_fast_metal_kernel_config_set_thread_group(
                config,
                tx.min(gx),
                ty.min(gy),
                tz.min(gz),
            );
            mlx_sys::mlx_fast_metal_kernel_config_add_template_arg_dtype(
                config,
                c"T".as_ptr(),
                call.dtype.into(),
            );
            for ((_, value), name) in call.constants.iter().zip(&names) {
                mlx_sys::mlx_fast_metal_kernel_config_add_template_arg_int(
                    config,
                    name.as_ptr(),
                    *value as c_int,
                );
            }
            let out = arrays_op(self.name, |res, stream| {
                mlx_sys::mlx_fast_metal_kernel_apply(res, self.handle, inputs.0, config, stream)
            });
            mlx_sys::mlx_fast_metal_kernel_config_free(config);
            out
        }
    }
}

impl Drop for MetalKernel {
    fn drop(&mut self) {
        // SAFETY: made in `new` and owned by this value alone.
        unsafe { mlx_sys::mlx_fast_metal_kernel_free(self.handle) };
    }
}
