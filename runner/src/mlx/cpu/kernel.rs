//! Host code as one node of MLX's lazy graph, over float32 and int32 buffers, and bfloat16 ones to read.
//!
//! Invariant: a kernel sees row-contiguous buffers of exactly the sizes and types that were declared; it runs on MLX's CPU stream
//! thread, calls no MLX, and never unwinds into C++ (a panic fails the evaluation instead).

use std::ffi::{c_int, c_void, CStr};
use std::panic::{catch_unwind, AssertUnwindSafe};

use mlx_rs::error::{Exception, Result};
use mlx_rs::{Array, Dtype};

use crate::mlx::ops::{arrays_op, ArrayVector};

/// An output's type and shape.
#[derive(Debug)]
pub(crate) enum Output {
    Floats(Vec<i32>),
    Ints(Vec<i32>),
    /// Float32 that starts as a copy of an input, in that input's own buffer where nothing else holds it.
    Updated {
        input: usize,
        shape: Vec<i32>,
    },
}

impl Output {
    fn shape(&self) -> &[i32] {
        match self {
            Self::Floats(shape) | Self::Ints(shape) | Self::Updated { shape, .. } => shape,
        }
    }

    fn size(&self) -> usize {
        self.shape().iter().map(|&d| d as usize).product()
    }

    fn dtype(&self) -> Dtype {
        match self {
            Self::Floats(_) | Self::Updated { .. } => Dtype::Float32,
            Self::Ints(_) => Dtype::Int32,
        }
    }

    fn donor(&self) -> c_int {
        match self {
            Self::Updated { input, .. } => *input as c_int,
            _ => -1,
        }
    }
}

/// One declared buffer of one evaluation.
struct Buffer {
    data: *mut c_void,
    size: usize,
    dtype: Dtype,
}

/// A kernel's inputs, by index.
pub(crate) struct Inputs(Vec<Buffer>);

impl Inputs {
    pub(crate) fn floats(&self, index: usize) -> &[f32] {
        let buffer = &self.0[index];
        assert_eq!(buffer.dtype, Dtype::Float32, "input {index}");
        // SAFETY: MLX hands a row-contiguous buffer of the declared size and type, alive for the length of the kernel.
        unsafe { std::slice::from_raw_parts(buffer.data.cast(), buffer.size) }
    }

    pub(crate) fn ints(&self, index: usize) -> &[i32] {
        let buffer = &self.0[index];
        assert_eq!(buffer.dtype, Dtype::Int32, "input {index}");
        // SAFETY: as for `floats`.
        unsafe { std::slice::from_raw_parts(buffer.data.cast(), buffer.size) }
    }
}

impl Inputs {
    /// Bfloat16 values, as their bits.
    pub(crate) fn halves(&self, index: usize) -> &[u16] {
        let buffer = &self.0[index];
        assert_eq!(buffer.dtype, Dtype::Bfloat16, "input {index}");
        // SAFETY: as for `floats`.
        unsafe { std::slice::from_raw_parts(buffer.data.cast(), buffer.size) }
    }
}

/// A kernel's outputs, taken in order, each once.
pub(crate) struct Outputs(std::vec::IntoIter<Buffer>);

impl Outputs {
    fn next(&mut self, dtype: Dtype) -> Buffer {
        let buffer = self.0.next().filter(|b| b.dtype == dtype);
        // A panic here is a kernel at odds with its own declaration; `call` turns it into a failed evaluation.
        buffer.unwrap_or_else(|| panic!("the kernel takes an output of {dtype:?} that it didn't declare"))
    }

    pub(crate) fn floats<'a>(&mut self) -> &'a mut [f32] {
        let buffer = self.next(Dtype::Float32);
        // SAFETY: as for inputs; every output has a buffer of its own and is handed out once. One that took over an input's
        // buffer is never read through `Inputs` as well.
        unsafe { std::slice::from_raw_parts_mut(buffer.data.cast(), buffer.size) }
    }

    pub(crate) fn ints<'a>(&mut self) -> &'a mut [i32] {
        let buffer = self.next(Dtype::Int32);
        // SAFETY: as for `floats`.
        unsafe { std::slice::from_raw_parts_mut(buffer.data.cast(), buffer.size) }
    }
}

type Run = dyn Fn(&Inputs, Outputs) + Send + Sync;

struct Kernel {
    run: Box<Run>,
    inputs: Vec<(usize, Dtype)>,
    outputs: Vec<(usize, Dtype)>,
}

unsafe extern "C" fn call(
    ctx: *mut c_void,
    inputs: *const *const c_void,
    outputs: *const *mut c_void,
) -> c_int {
    // SAFETY: `ctx` is the kernel that `cpu_op` boxed; MLX frees it only after the last call.
    let kernel = unsafe { &*ctx.cast::<Kernel>() };
    // SAFETY: MLX passes one pointer for each declared input and output.
    let (ins, outs) = unsafe {
        (
            std::slice::from_raw_parts(inputs, kernel.inputs.len()),
            std::slice::from_raw_parts(outputs, kernel.outputs.len()),
        )
    };
    let work = || {
        let ins = ins.iter().zip(&kernel.inputs);
        let outs = outs.iter().zip(&kernel.outputs);
        let inputs = ins
            .map(|(&data, &(size, dtype))| Buffer {
                data: data.cast_mut(),
                size,
                dtype,
            })
            .collect();
        let outputs: Vec<Buffer> = outs
            .map(|(&data, &(size, dtype))| Buffer { data, size, dtype })
            .collect();
        (kernel.run)(&Inputs(inputs), Outputs(outputs.into_iter()));
    };
    c_int::from(catch_unwind(AssertUnwindSafe(work)).is_err())
}

unsafe extern "C" fn free(ctx: *mut c_void) {
    // SAFETY: made by `Box::into_raw` in `cpu_op` and freed once.
    drop(unsafe { Box::from_raw(ctx.cast::<Kernel>()) });
}

/// Adds `run` to the graph; `N` is the number of outputs.
pub(crate) fn cpu_op<const N: usize>(
    name: &'static CStr,
    inputs: &[&Array],
    outputs: [Output; N],
    run: impl Fn(&Inputs, Outputs) + Send + Sync + 'static,
) -> Result<[Array; N]> {
    let kernel = Box::new(Kernel {
        run: Box::new(run),
        inputs: inputs.iter().map(|a| (a.size(), a.dtype())).collect(),
        outputs: outputs.iter().map(|o| (o.size(), o.dtype())).collect(),
    });
    let declared = outputs.each_ref().map(|output| mlx_sys::lookahead_cpu_output {
        shape: output.shape().as_ptr(),
        ndim: output.shape().len(),
        dtype: output.dtype().into(),
        donor: output.donor(),
    });
    let vector = ArrayVector::new(inputs.iter().copied());
    let ctx = Box::into_raw(kernel).cast::<c_void>();
    let arrays = arrays_op(&name.to_string_lossy(), |res, stream| {
        // SAFETY: all pointers live for the call; `ctx` is handed over in every case.
        unsafe {
            mlx_sys::lookahead_cpu_op(
                res,
                name.as_ptr(),
                vector.0,
                declared.as_ptr(),
                N,
                Some(call),
                ctx,
                Some(free),
                stream,
            )
        }
    })?;
    arrays
        .try_into()
        .map_err(|_| Exception::custom(format!("{} without its results", name.to_string_lossy())))
}
