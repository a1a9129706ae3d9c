//! Graph operations missing from `mlx-rs`, each one node, on the calling thread's default stream.
//!
//! Invariant: a failed call returns the message that MLX gave for exactly that call.

use std::cell::RefCell;
use std::ffi::{c_char, c_int, c_void, CStr};

use mlx_rs::error::{Exception, Result};
use mlx_rs::{Array, Dtype, Stream};
use mlx_sys::{mlx_array, mlx_stream};

thread_local! {
    static LAST_ERROR: RefCell<Option<String>> = const { RefCell::new(None) };
}

unsafe extern "C" fn keep_error(message: *const c_char, _data: *mut c_void) {
    if message.is_null() {
        return;
    }
    // SAFETY: MLX passes a NUL-terminated message that lives for the length of the call.
    let text = unsafe { CStr::from_ptr(message) }.to_string_lossy().into_owned();
    LAST_ERROR.with(|slot| *slot.borrow_mut() = Some(text));
}

/// Routes MLX's error messages to [`last_error`]; without it MLX ends the process on the first error.
///
/// `mlx-rs` installs a handler of its own at its first operation, so one is run before ours replaces it.
pub fn install_error_handler() {
    static ONCE: std::sync::Once = std::sync::Once::new();
    ONCE.call_once(|| {
        let _ = Array::from_int(0).add(Array::from_int(0));
        // SAFETY: the handler is a plain function without captured data, valid for the process's life.
        unsafe { mlx_sys::mlx_set_error_handler(Some(keep_error), std::ptr::null_mut(), None) };
    });
}

/// Takes the message of the last failed MLX call of this thread.
pub fn last_error() -> Option<String> {
    LAST_ERROR.with(|slot| slot.borrow_mut().take())
}

/// Says what went wrong in words: MLX's own message where there is one.
pub fn explain(error: &Exception) -> String {
    last_error().unwrap_or_else(|| error.what().to_owned())
}

/// Runs a C call that writes one array.
pub(crate) fn array_op(name: &str, call: impl FnOnce(*mut mlx_array, mlx_stream) -> c_int) -> Result<Array> {
    let stream = Stream::thread_local_or_default();
    // SAFETY: makes an empty handle that the call below fills; ownership passes to `Array` or is freed here.
    let mut handle = unsafe { mlx_sys::mlx_array_new() };
    if call(&mut handle, stream.as_ptr()) != 0 {
        // SAFETY: the handle was made above and has no other owner.
        unsafe { mlx_sys::mlx_array_free(handle) };
        return Err(Exception::custom(
            last_error().unwrap_or_else(|| format!("{name} failed")),
        ));
    }
    // SAFETY: the call succeeded, so the handle is valid and owned by us alone.
    Ok(unsafe { Array::from_ptr(handle) })
}

/// Runs a C call that writes a vector of arrays.
pub(crate) fn arrays_op(
    name: &str,
    call: impl FnOnce(*mut mlx_sys::mlx_vector_array, mlx_stream) -> c_int,
) -> Result<Vec<Array>> {
    let stream = Stream::thread_local_or_default();
    // SAFETY: an empty vector handle, freed at the end of this function.
    let mut vector = unsafe { mlx_sys::mlx_vector_array_new() };
    let status = call(&mut vector, stream.as_ptr());
    let mut out = Vec::new();
    if status == 0 {
        // SAFETY: the vector was filled by the call; every element is duplicated into a handle of its own.
        unsafe {
            for index in 0..mlx_sys::mlx_vector_array_size(vector) {
                let mut handle = mlx_sys::mlx_array_new();
                mlx_sys::mlx_vector_array_get(&mut handle, vector, index);
                out.push(Array::from_ptr(handle));
            }
        }
    }
    // SAFETY: made above; the arrays taken from it hold their own references.
    unsafe { mlx_sys::mlx_vector_array_free(vector) };
    if status != 0 {
        return Err(Exception::custom(
            last_error().unwrap_or_else(|| format!("{name} failed")),
        ));
    }
    Ok(out)
}

/// Holds borrowed arrays as the vector type of the C interface.
pub(crate) struct ArrayVector(pub(crate) mlx_sys::mlx_vector_array);

impl ArrayVector {
    pub(crate) fn new<'a>(arrays: impl IntoIterator<Item = &'a Array>) -> Self {
        // SAFETY: appending copies a reference; the vector is freed in `drop`.
        unsafe {
            let vector = mlx_sys::mlx_vector_array_new();
            for array in arrays {
                mlx_sys::mlx_vector_array_append_value(vector, array.as_ptr());
            }
            Self(vector)
        }
    }
}

impl Drop for ArrayVector {
    fn drop(&mut self) {
        // SAFETY: owned by this value alone.
        unsafe { mlx_sys::mlx_vector_array_free(self.0) };
    }
}

/// `a[start..stop]` along every axis, step 1. `start` and `stop` have one entry an axis.
pub fn slice(a: &Array, start: &[i32], stop: &[i32]) -> Result<Array> {
    const ONES: [i32; 8] = [1; 8];
    let n = start.len();
    debug_assert!(n == stop.len() && n <= 8);
    array_op("slice", |res, s| {
        // SAFETY: the three bounds have `n` entries each.
        unsafe {
            mlx_sys::mlx_slice(
                res,
                a.as_ptr(),
                start.as_ptr(),
                n,
                stop.as_ptr(),
                n,
                ONES.as_ptr(),
                n,
                s,
            )
        }
    })
}

/// `a[..., from..to, ...]` along one axis; `axis` may count from the end.
pub fn slice_axis(a: &Array, axis: i32, from: i32, to: i32) -> Result<Array> {
    let shape = a.shape();
    let n = shape.len();
    let axis = if axis < 0 { n as i32 + axis } else { axis } as usize;
    if from == 0 && to == shape[axis] {
        return Ok(a.clone());
    }
    let mut start = [0i32; 8];
    let mut stop = [0i32; 8];
    stop[..n].copy_from_slice(shape);
    start[axis] = from;
    stop[axis] = to;
    slice(a, &start[..n], &stop[..n])
}

/// Writes `update` over `a[start..stop]`; in place when nothing else holds `a`.
pub fn slice_update(a: &Array, update: &Array, start: &[i32], stop: &[i32]) -> Result<Array> {
    const ONES: [i32; 8] = [1; 8];
    let n = start.len();
    debug_assert!(n == stop.len() && n <= 8);
    array_op("slice_update", |res, s| {
        // SAFETY: the three bounds have `n` entries each.
        unsafe {
            mlx_sys::mlx_slice_update(
                res,
                a.as_ptr(),
                update.as_ptr(),
                start.as_ptr(),
                n,
                stop.as_ptr(),
                n,
                ONES.as_ptr(),
                n,
                s,
            )
        }
    })
}

/// Casts only when the type differs, so that an equal type costs no node.
pub fn cast(a: &Array, dtype: Dtype) -> Result<Array> {
    if a.dtype() == dtype {
        Ok(a.clone())
    } else {
        a.as_dtype(dtype)
    }
}

/// The bytes of `a` as elements of another type; the last axis grows or shrinks by the sizes' ratio.
pub fn view(a: &Array, dtype: Dtype) -> Result<Array> {
    // SAFETY: the array handle is valid for the call.
    array_op("view", |res, s| unsafe {
        mlx_sys::mlx_view(res, a.as_ptr(), dtype.into(), s)
    })
}

/// Two buffers after `writer`, a kernel that writes into them behind MLX's back, has run: the same memory, computed with it. In
/// the writer's own dispatch only operations that also read one of its results are sure to run after it.
pub fn written(buffers: (&Array, &Array), writer: &Array) -> Result<(Array, Array)> {
    let inputs = ArrayVector::new([buffers.0, buffers.1]);
    let mut out = arrays_op("written", |res, s| {
        // SAFETY: the vector and the array are valid for the call, which copies references.
        unsafe { mlx_sys::lookahead_written(res, inputs.0, writer.as_ptr(), s) }
    })?;
    match (out.pop(), out.pop()) {
        (Some(second), Some(first)) => Ok((first, second)),
        _ => Err(Exception::custom("two buffers have become fewer")),
    }
}

/// A compact copy: owns exactly its own bytes (up to MLX's 16 KiB slack) and never pins the buffer that it was cut from.
pub fn compact(a: &Array) -> Result<Array> {
    // `mlx_copy` shares its input's buffer; `mlx_contiguous` copies whenever the input is a part of a larger one.
    array_op("contiguous", |res, s| {
        // SAFETY: plain one-input call.
        unsafe { mlx_sys::mlx_contiguous(res, a.as_ptr(), false, s) }
    })
}

/// How a quantised matrix stores its values; names are MLX's own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QuantMode {
    /// Input columns that share a scale.
    pub group_size: i32,
    /// Bits a value.
    pub bits: i32,
    /// MLX's name: `affine`, `mxfp4`, `mxfp8` or `nvfp4`.
    pub mode: &'static CStr,
}

impl QuantMode {
    fn optional(value: i32) -> mlx_sys::mlx_optional_int {
        mlx_sys::mlx_optional_int {
            value,
            has_value: true,
        }
    }
}

fn handle_or_null(a: Option<&Array>) -> mlx_array {
    match a {
        Some(a) => a.as_ptr(),
        None => mlx_array {
            ctx: std::ptr::null_mut(),
        },
    }
}

/// `x @ w^T` for a quantised `w` [out, in]; `x` [..., in].
pub fn quantized_matmul(
    x: &Array,
    w: &Array,
    scales: &Array,
    biases: Option<&Array>,
    mode: QuantMode,
) -> Result<Array> {
    array_op("quantized_matmul", |res, s| {
        // SAFETY: all handles outlive the call; a null handle stands for no biases.
        unsafe {
            mlx_sys::mlx_quantized_matmul(
                res,
                x.as_ptr(),
                w.as_ptr(),
                scales.as_ptr(),
                handle_or_null(biases),
                true,
                QuantMode::optional(mode.group_size),
                QuantMode::optional(mode.bits),
                mode.mode.as_ptr(),
                s,
            )
        }
    })
}

/// `x @ w[rhs]^T` with one quantised matrix of a stack for each row; `w` [E, out, in], `rhs` the expert ids.
pub fn gather_qmm(
    x: &Array,
    w: &Array,
    scales: &Array,
    biases: Option<&Array>,
    rhs: &Array,
    mode: QuantMode,
    sorted: bool,
) -> Result<Array> {
    array_op("gather_qmm", |res, s| {
        // SAFETY: all handles outlive the call; null handles stand for absent arguments.
        unsafe {
            mlx_sys::mlx_gather_qmm(
                res,
                x.as_ptr(),
                w.as_ptr(),
                scales.as_ptr(),
                handle_or_null(biases),
                handle_or_null(None),
                rhs.as_ptr(),
                true,
                QuantMode::optional(mode.group_size),
                QuantMode::optional(mode.bits),
                mode.mode.as_ptr(),
                sorted,
                s,
            )
        }
    })
}

/// The full matrix behind a quantised one, in `dtype`.
pub fn dequantize(
    w: &Array,
    scales: &Array,
    biases: Option<&Array>,
    mode: QuantMode,
    dtype: Dtype,
) -> Result<Array> {
    array_op("dequantize", |res, s| {
        // SAFETY: all handles outlive the call; null handles stand for absent arguments.
        unsafe {
            mlx_sys::mlx_dequantize(
                res,
                w.as_ptr(),
                scales.as_ptr(),
                handle_or_null(biases),
                QuantMode::optional(mode.group_size),
                QuantMode::optional(mode.bits),
                mode.mode.as_ptr(),
                handle_or_null(None),
                mlx_sys::mlx_optional_dtype {
                    value: dtype.into(),
                    has_value: true,
                },
                s,
            )
        }
    })
}

/// Quantises `w` [out, in]; returns weight, scales and, for `affine`, biases.
pub fn quantize(w: &Array, mode: QuantMode) -> Result<Vec<Array>> {
    arrays_op("quantize", |res, s| {
        // SAFETY: all handles outlive the call; a null handle stands for no global scale.
        unsafe {
            mlx_sys::mlx_quantize(
                res,
                w.as_ptr(),
                QuantMode::optional(mode.group_size),
                QuantMode::optional(mode.bits),
                mode.mode.as_ptr(),
                handle_or_null(None),
                s,
            )
        }
    })
}
