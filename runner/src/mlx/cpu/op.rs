//! Puts the kernels of this folder into MLX's lazy graph.
//!
//! Invariant: a kernel sees row-contiguous float32 buffers of exactly the sizes that its shapes say, and runs on MLX's CPU
//! stream thread; it never unwinds into C++ (a panic fails the evaluation instead).

use std::ffi::{c_int, c_void, CStr};
use std::panic::{catch_unwind, AssertUnwindSafe};

use mlx_rs::error::{Exception, Result};
use mlx_rs::{Array, Dtype};

use super::{attention, delta, elementwise};
use crate::mlx::delta::{DeltaParams, DeltaShape};
use crate::mlx::ops::{arrays_op, ArrayVector};

/// Result of an operation: its shape, and the input whose buffer it may take over.
struct Output<'a> {
    shape: &'a [i32],
    donor: Option<usize>,
}

fn fresh(shape: &[i32]) -> Output<'_> {
    Output { shape, donor: None }
}

/// Buffers of one evaluation.
struct Buffers<'a> {
    inputs: &'a [*const c_void],
    outputs: &'a [*mut c_void],
    input_sizes: &'a [usize],
    output_sizes: &'a [usize],
}

impl Buffers<'_> {
    fn input(&self, index: usize) -> &[f32] {
        // SAFETY: MLX hands a row-contiguous float32 buffer of the input's size, alive for the length of the kernel.
        unsafe { std::slice::from_raw_parts(self.inputs[index].cast(), self.input_sizes[index]) }
    }

    /// Each output may be taken once.
    #[expect(clippy::mut_from_ref, reason = "kernels take every output exactly once")]
    fn output(&self, index: usize) -> &mut [f32] {
        // SAFETY: as for inputs; outputs have buffers of their own unless declared as taking over a donor, which no kernel
        // here reads through `input` as well.
        unsafe { std::slice::from_raw_parts_mut(self.outputs[index].cast(), self.output_sizes[index]) }
    }
}

struct Kernel {
    run: Box<dyn Fn(&Buffers<'_>) + Send + Sync>,
    input_sizes: Vec<usize>,
    output_sizes: Vec<usize>,
}

unsafe extern "C" fn call(
    ctx: *mut c_void,
    inputs: *const *const c_void,
    outputs: *const *mut c_void,
) -> c_int {
    // SAFETY: `ctx` is the kernel that `cpu_op` boxed; MLX frees it only after the last call.
    let kernel = unsafe { &*ctx.cast::<Kernel>() };
    // SAFETY: MLX passes one pointer for each declared input and output.
    let (inputs, outputs) = unsafe {
        (
            std::slice::from_raw_parts(inputs, kernel.input_sizes.len()),
            std::slice::from_raw_parts(outputs, kernel.output_sizes.len()),
        )
    };
    let buffers = Buffers {
        inputs,
        outputs,
        input_sizes: &kernel.input_sizes,
        output_sizes: &kernel.output_sizes,
    };
    c_int::from(catch_unwind(AssertUnwindSafe(|| (kernel.run)(&buffers))).is_err())
}

unsafe extern "C" fn free(ctx: *mut c_void) {
    // SAFETY: made by `Box::into_raw` in `cpu_op` and freed once.
    drop(unsafe { Box::from_raw(ctx.cast::<Kernel>()) });
}

fn cpu_op(
    name: &'static CStr,
    inputs: &[&Array],
    outputs: &[Output<'_>],
    run: impl Fn(&Buffers<'_>) + Send + Sync + 'static,
) -> Result<Vec<Array>> {
    if let Some(other) = inputs.iter().find(|a| a.dtype() != Dtype::Float32) {
        return Err(Exception::custom(format!(
            "{} takes float32, got {:?}",
            name.to_string_lossy(),
            other.dtype()
        )));
    }
    let kernel = Box::new(Kernel {
        run: Box::new(run),
        input_sizes: inputs.iter().map(|a| a.size()).collect(),
        output_sizes: outputs
            .iter()
            .map(|o| o.shape.iter().map(|&d| d as usize).product())
            .collect(),
    });
    let declared: Vec<mlx_sys::lookahead_cpu_output> = outputs
        .iter()
        .map(|o| mlx_sys::lookahead_cpu_output {
            shape: o.shape.as_ptr(),
            ndim: o.shape.len(),
            dtype: Dtype::Float32.into(),
            donor: o.donor.map_or(-1, |d| d as c_int),
        })
        .collect();
    let vector = ArrayVector::new(inputs.iter().copied());
    let ctx = Box::into_raw(kernel).cast::<c_void>();
    arrays_op(&name.to_string_lossy(), |res, stream| {
        // SAFETY: all pointers live for the call; `ctx` is handed over in every case.
        unsafe {
            mlx_sys::lookahead_cpu_op(
                res,
                name.as_ptr(),
                vector.0,
                declared.as_ptr(),
                declared.len(),
                Some(call),
                ctx,
                Some(free),
                stream,
            )
        }
    })
}

fn one(mut arrays: Vec<Array>) -> Result<Array> {
    arrays
        .pop()
        .ok_or_else(|| Exception::custom("operation without a result"))
}

/// See [`elementwise::rms_norm`]; x [..., D].
pub fn rms_norm(x: &Array, gain: &Array, eps: f32) -> Result<Array> {
    cpu_op(c"rms_norm", &[x, gain], &[fresh(x.shape())], move |b| {
        elementwise::rms_norm(b.input(0), b.input(1), eps, b.output(0));
    })
    .and_then(one)
}

/// See [`elementwise::add_norm`]: the sum and its norm.
pub fn add_norm(x: &Array, added: &Array, gain: &Array, eps: f32) -> Result<(Array, Array)> {
    let shape = x.shape();
    let mut out = cpu_op(
        c"add_norm",
        &[x, added, gain],
        &[fresh(shape), fresh(shape)],
        move |b| {
            elementwise::add_norm(b.input(0), b.input(1), b.input(2), eps, b.output(0), b.output(1));
        },
    )?;
    match (out.pop(), out.pop()) {
        (Some(normed), Some(sum)) => Ok((sum, normed)),
        _ => Err(Exception::custom("add_norm without results")),
    }
}

/// See [`elementwise::swiglu`]; gate_up [..., 2 I] → [..., I].
pub fn swiglu(gate_up: &Array) -> Result<Array> {
    let mut shape = gate_up.shape().to_vec();
    let width = match shape.last_mut() {
        Some(last) => {
            *last /= 2;
            *last as usize
        }
        None => return Err(Exception::custom("swiglu of a scalar")),
    };
    cpu_op(c"swiglu", &[gate_up], &[fresh(&shape)], move |b| {
        elementwise::swiglu(b.input(0), width, b.output(0));
    })
    .and_then(one)
}

/// Results of [`delta_net`].
#[derive(Debug)]
pub struct DeltaResults {
    /// [B, L, nv * dv].
    pub y: Array,
    /// [B, taps - 1 + L, C].
    pub mix: Array,
    /// [B, nv, dv, dk], or [B, L, nv, dv, dk] when every row's was asked for.
    pub states: Array,
}

/// The whole mixer as one node; `packed` [B, L, C + nv * dv + 2 nv] holds mix | z | b | a.
pub fn delta_net(
    params: &DeltaParams,
    packed: &Array,
    tail: &Array,
    state: &Array,
    every_row: bool,
) -> Result<DeltaResults> {
    let shape: DeltaShape = params.shape;
    let (batch, rows) = (packed.dim(0), packed.dim(1));
    let sizes = delta::Sizes {
        shape,
        batch: batch as usize,
        rows: rows as usize,
        eps: params.eps,
        every_row,
    };
    let y_shape = [batch, rows, shape.value_columns()];
    let mix_shape = [batch, shape.taps - 1 + rows, shape.channels()];
    let (nv, dv, dk) = (shape.value_heads, shape.value_dim, shape.key_dim);
    let every = [batch, rows, nv, dv, dk];
    let last = [batch, nv, dv, dk];
    let states_shape: &[i32] = if every_row { &every } else { &last };
    let inputs = [
        packed,
        tail,
        state,
        &params.conv,
        &params.decay,
        &params.dt_bias,
        &params.norm,
    ];
    let mut out = cpu_op(
        c"delta_net",
        &inputs,
        &[fresh(&y_shape), fresh(&mix_shape), fresh(states_shape)],
        move |b| {
            let input = delta::Inputs {
                packed: b.input(0),
                tail: b.input(1),
                state: b.input(2),
                conv: b.input(3),
                decay: b.input(4),
                dt_bias: b.input(5),
                norm: b.input(6),
            };
            let mut output = delta::Outputs {
                y: b.output(0),
                mix: b.output(1),
                states: b.output(2),
            };
            delta::run(&sizes, &input, &mut output);
        },
    )?;
    match (out.pop(), out.pop(), out.pop()) {
        (Some(states), Some(mix), Some(y)) => Ok(DeltaResults { y, mix, states }),
        _ => Err(Exception::custom("delta_net without results")),
    }
}

/// What one attention call needs besides arrays.
#[derive(Debug, Clone, Copy)]
pub struct AttentionCall {
    /// Heads.
    pub heads: attention::Heads,
    /// Epsilon of the query and key norms.
    pub eps: f32,
    /// Slots filled before the call.
    pub before: usize,
}

/// Norms, rotates and appends: packed [1, L, ...], `cos` and `sin` [L, rotated / 2], buffers [1, KV, capacity, D] with room
/// for the new slots. Returns queries [L, H, D] and the buffers.
pub fn attention_prepare(
    call: AttentionCall,
    packed: &Array,
    gains: (&Array, &Array),
    (cos, sin): (&Array, &Array),
    keys: &Array,
    values: &Array,
) -> Result<(Array, Array, Array)> {
    let AttentionCall { heads, eps, before } = call;
    let rows = packed.dim(1);
    let q_shape = [rows, heads.query as i32, heads.dim as i32];
    let outputs = [
        fresh(&q_shape),
        Output {
            shape: keys.shape(),
            donor: Some(5),
        },
        Output {
            shape: values.shape(),
            donor: Some(6),
        },
    ];
    let mut out = cpu_op(
        c"attention_prepare",
        &[packed, gains.0, gains.1, cos, sin, keys, values],
        &outputs,
        move |b| {
            let norms = attention::Norms {
                q: b.input(1),
                k: b.input(2),
                eps,
            };
            let target = attention::Append {
                before,
                keys: b.output(1),
                values: b.output(2),
            };
            attention::prepare(
                heads,
                b.input(0),
                norms,
                (b.input(3), b.input(4)),
                b.output(0),
                target,
            );
        },
    )?;
    match (out.pop(), out.pop(), out.pop()) {
        (Some(values), Some(keys), Some(queries)) => Ok((queries, keys, values)),
        _ => Err(Exception::custom("attention_prepare without results")),
    }
}

/// Attention with output gate over the buffers of [`attention_prepare`]; returns [1, L, H * D].
pub fn attention(
    call: AttentionCall,
    packed: &Array,
    queries: &Array,
    keys: &Array,
    values: &Array,
) -> Result<Array> {
    let AttentionCall { heads, before, .. } = call;
    let shape = [1, packed.dim(1), (heads.query * heads.dim) as i32];
    cpu_op(
        c"attention",
        &[packed, queries, keys, values],
        &[fresh(&shape)],
        move |b| {
            attention::run(
                heads,
                b.input(0),
                b.input(1),
                b.input(2),
                b.input(3),
                before,
                b.output(0),
            );
        },
    )
    .and_then(one)
}
