//! What the rest of Lookahead assumes of the native side: products go through OpenBLAS, half floats keep their bits,
//! and a kernel written in Rust is a lazy operation like any other.

use std::ffi::{c_char, c_int, c_void, CStr};
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::ptr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use mlx_sys as mlx;

const NULL: mlx::mlx_vector_array = mlx::mlx_vector_array { ctx: ptr::null_mut() };

/// MLX is not thread-safe and its error handler is global, so tests run one at a time.
fn serial() -> MutexGuard<'static, ()> {
    static LOCK: Mutex<()> = Mutex::new(());
    let guard = LOCK.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    // SAFETY: the handler matches the C type and lives for ever.
    unsafe { mlx::mlx_set_error_handler(Some(record), ptr::null_mut(), None) };
    guard
}

static LAST_ERROR: Mutex<String> = Mutex::new(String::new());

unsafe extern "C" fn record(message: *const c_char, _: *mut c_void) {
    // SAFETY: mlx-c passes a string that lives during the call.
    let message = unsafe { CStr::from_ptr(message) };
    *LAST_ERROR.lock().unwrap() = message.to_string_lossy().into_owned();
}

/// An owned array with the few operations that these tests need.
#[derive(Debug)]
struct Array(mlx::mlx_array);

impl Drop for Array {
    fn drop(&mut self) {
        // SAFETY: this handle owns the array.
        unsafe { mlx::mlx_array_free(self.0) };
    }
}

impl Array {
    fn new(data: &[f32], shape: &[i32]) -> Self {
        assert_eq!(data.len(), shape.iter().product::<i32>() as usize);
        // SAFETY: the data has as many elements as the shape says, and MLX copies it.
        Self(unsafe {
            mlx::mlx_array_new_data(
                data.as_ptr().cast(),
                shape.as_ptr(),
                shape.len() as c_int,
                mlx::mlx_dtype__MLX_FLOAT32,
            )
        })
    }

    fn from(make: impl FnOnce(*mut mlx::mlx_array, mlx::mlx_stream) -> c_int) -> Self {
        let mut out = mlx::mlx_array { ctx: ptr::null_mut() };
        assert_eq!(make(&mut out, cpu()), 0, "{}", LAST_ERROR.lock().unwrap());
        Self(out)
    }

    fn transposed(&self) -> Self {
        // SAFETY: both arrays are live.
        Self::from(|out, s| unsafe { mlx::mlx_transpose(out, self.0, s) })
    }

    fn plus(&self, other: &Self) -> Self {
        // SAFETY: all arrays are live.
        Self::from(|out, s| unsafe { mlx::mlx_add(out, self.0, other.0, s) })
    }

    fn times(&self, other: &Self) -> Self {
        // SAFETY: all arrays are live.
        Self::from(|out, s| unsafe { mlx::mlx_matmul(out, self.0, other.0, s) })
    }

    fn to_dtype(&self, dtype: mlx::mlx_dtype) -> Self {
        // SAFETY: both arrays are live.
        Self::from(|out, s| unsafe { mlx::mlx_astype(out, self.0, dtype, s) })
    }

    fn eval(&self) -> c_int {
        // SAFETY: the array is live.
        unsafe { mlx::mlx_array_eval(self.0) }
    }

    fn values(&self) -> Vec<f32> {
        assert_eq!(self.eval(), 0, "{}", LAST_ERROR.lock().unwrap());
        // SAFETY: a CPU operation's result is row-contiguous here and has been evaluated.
        unsafe {
            let data = mlx::mlx_array_data_float32(self.0);
            std::slice::from_raw_parts(data, mlx::mlx_array_size(self.0)).to_vec()
        }
    }

    fn address(&self) -> *const f32 {
        assert_eq!(self.eval(), 0);
        // SAFETY: the array has been evaluated.
        unsafe { mlx::mlx_array_data_float32(self.0) }
    }
}

fn cpu() -> mlx::mlx_stream {
    // SAFETY: takes nothing; the default stream lives as long as the process, and the handle is small and leaked.
    unsafe { mlx::mlx_default_cpu_stream_new() }
}

type Kernel = dyn Fn(&[*const f32], &[*mut f32]) + Send + Sync;

struct Context {
    kernel: Box<Kernel>,
    inputs: usize,
    outputs: usize,
}

unsafe extern "C" fn call(
    ctx: *mut c_void,
    inputs: *const *const c_void,
    outputs: *const *mut c_void,
) -> c_int {
    // SAFETY: `op` passed a Context, and as many inputs and outputs as it says.
    let (context, inputs, outputs) = unsafe {
        let context = &*ctx.cast::<Context>();
        (
            context,
            std::slice::from_raw_parts(inputs.cast(), context.inputs),
            std::slice::from_raw_parts(outputs.cast(), context.outputs),
        )
    };
    catch_unwind(AssertUnwindSafe(|| (context.kernel)(inputs, outputs))).map_or(1, |()| 0)
}

unsafe extern "C" fn free(ctx: *mut c_void) {
    // SAFETY: `op` leaked this box, and MLX frees it once.
    drop(unsafe { Box::from_raw(ctx.cast::<Context>()) });
}

/// Adds a float32 operation to the graph; an output is a shape and the input that it starts from.
fn op(
    inputs: &[&Array],
    outputs: &[(&[i32], Option<usize>)],
    kernel: impl Fn(&[*const f32], &[*mut f32]) + Send + Sync + 'static,
) -> Result<Vec<Array>, String> {
    let described: Vec<_> = outputs
        .iter()
        .map(|(shape, donor)| mlx::lookahead_cpu_output {
            shape: shape.as_ptr(),
            ndim: shape.len(),
            dtype: mlx::mlx_dtype__MLX_FLOAT32,
            donor: donor.map_or(-1, |donor| donor as c_int),
        })
        .collect();
    let context = Context {
        kernel: Box::new(kernel),
        inputs: inputs.len(),
        outputs: outputs.len(),
    };
    let handles: Vec<_> = inputs.iter().map(|array| array.0).collect();
    let mut result = NULL;
    // SAFETY: every pointer outlives the call, and the context is handed over with the function that frees it.
    unsafe {
        let vector = mlx::mlx_vector_array_new_data(handles.as_ptr(), handles.len());
        let status = mlx::lookahead_cpu_op(
            &mut result,
            c"test_op".as_ptr(),
            vector,
            described.as_ptr(),
            described.len(),
            Some(call),
            Box::into_raw(Box::new(context)).cast(),
            Some(free),
            cpu(),
        );
        mlx::mlx_vector_array_free(vector);
        if status != 0 {
            return Err(LAST_ERROR.lock().unwrap().clone());
        }
        let arrays = (0..mlx::mlx_vector_array_size(result))
            .map(|index| Array::from(|out, _| mlx::mlx_vector_array_get(out, result, index)))
            .collect();
        mlx::mlx_vector_array_free(result);
        Ok(arrays)
    }
}

fn ramp(len: usize) -> Vec<f32> {
    (0..len).map(|i| ((i * 37) % 101) as f32 / 50.0 - 1.0).collect()
}

/// One row takes another path than several, and each operand may come transposed.
#[test]
fn float32_product_equals_a_naive_one() {
    let _serial = serial();
    let (k, n) = (67, 33);
    for m in [1, 5] {
        let (a, b) = (ramp(m * k), ramp(n * k));
        let transpose = |x: &[f32], columns: usize| -> Vec<f32> {
            (0..x.len())
                .map(|i| x[i % (x.len() / columns) * columns + i / (x.len() / columns)])
                .collect()
        };
        let shape = |rows: usize, columns: usize| [rows as i32, columns as i32];
        let lefts = [
            Array::new(&a, &shape(m, k)),
            Array::new(&transpose(&a, k), &shape(k, m)).transposed(),
        ];
        let rights = [
            Array::new(&b, &shape(n, k)).transposed(),
            Array::new(&transpose(&b, k), &shape(k, n)),
        ];
        for (left, right) in lefts
            .iter()
            .flat_map(|left| rights.iter().map(move |right| (left, right)))
        {
            for (index, value) in left.times(right).values().into_iter().enumerate() {
                let (row, column) = (index / n, index % n);
                let expected: f32 = (0..k).map(|i| a[row * k + i] * b[column * k + i]).sum();
                assert!(
                    (value - expected).abs() < 1e-4,
                    "{m} rows, element {index}: {value} is not {expected}"
                );
            }
        }
    }
}

/// Otherwise a token that verification accepts might not be the one that decoding would have chosen.
#[cfg(target_os = "linux")]
#[test]
fn linear_layer_gives_a_row_the_same_bits_alone_and_among_others() {
    let _serial = serial();
    let (k, n) = (256, 1300);
    let weight = Array::new(&ramp(n * k), &[n as i32, k as i32]).transposed();
    for m in 2..=16 {
        let rows: Vec<f32> = (0..m * k).map(|i| (i as f32 * 0.7).sin()).collect();
        let together = Array::new(&rows, &[1, m as i32, k as i32])
            .times(&weight)
            .values();
        for (row, expected) in rows.chunks(k).zip(together.chunks(n)) {
            let alone = Array::new(row, &[1, 1, k as i32]).times(&weight).values();
            assert!(alone == expected, "{m} rows");
        }
    }
}

#[cfg(target_os = "linux")]
#[test]
fn blas_calls_of_libmlx_arrive_in_this_executable() {
    // MLX_ROOT may name a build with a good BLAS of its own, but then setup has put no OpenBLAS beside it.
    // SAFETY: plain symbol look-ups with valid names, and a plain C struct to fill.
    unsafe {
        let file = |symbol: &CStr| {
            let address = libc::dlsym(libc::RTLD_DEFAULT, symbol.as_ptr());
            assert!(!address.is_null(), "{symbol:?} is not found");
            let mut info: libc::Dl_info = std::mem::zeroed();
            assert_ne!(libc::dladdr(address, &mut info), 0);
            CStr::from_ptr(info.dli_fname).to_string_lossy().into_owned()
        };
        let executable = std::env::current_exe().unwrap();
        for symbol in [c"cblas_sgemm", c"cblas_dgemm", c"cblas_cgemm"] {
            let found = std::fs::canonicalize(file(symbol)).unwrap();
            assert_eq!(found, executable, "{symbol:?}");
        }
        assert!(file(c"scipy_cblas_sgemm").contains("libscipy_openblas"));
    }
}

#[test]
fn half_floats_keep_their_value() {
    let _serial = serial();
    let one_and_a_half = Array::new(&[1.5], &[]);
    let half = one_and_a_half.to_dtype(mlx::mlx_dtype__MLX_FLOAT16);
    let brain = one_and_a_half.to_dtype(mlx::mlx_dtype__MLX_BFLOAT16);
    // SAFETY: the arrays are live, have one element of the type read, and are evaluated by `item`.
    unsafe {
        let mut bits: u16 = 0;
        assert_eq!(
            mlx::mlx_array_item_float16(ptr::from_mut(&mut bits).cast(), half.0),
            0
        );
        assert_eq!(bits, 0x3e00);
        assert_eq!(*mlx::mlx_array_data_float16(half.0).cast::<u16>(), 0x3e00);
        assert_eq!(
            mlx::mlx_array_item_bfloat16(ptr::from_mut(&mut bits).cast(), brain.0),
            0
        );
        assert_eq!(bits, 0x3fc0);
        assert_eq!(*mlx::mlx_array_data_bfloat16(brain.0).cast::<u16>(), 0x3fc0);
    }
}

#[test]
fn cpu_op_sits_lazily_in_the_graph_with_two_outputs() {
    let _serial = serial();
    let calls = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&calls);
    let a = Array::new(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], &[2, 3]);
    let sum = a.plus(&a);
    // A transposed view: the kernel must see it packed.
    let view = sum.transposed();
    let outputs = op(
        &[&view, &a],
        &[(&[3, 2], None), (&[], None)],
        move |inputs, outputs| {
            counted.fetch_add(1, Ordering::SeqCst);
            // SAFETY: both inputs and the first output have six elements, the second output has one.
            unsafe {
                let view = std::slice::from_raw_parts(inputs[0], 6);
                let a = std::slice::from_raw_parts(inputs[1], 6);
                std::slice::from_raw_parts_mut(outputs[0], 6)
                    .iter_mut()
                    .zip(view.iter().zip(a))
                    .for_each(|(out, (x, y))| *out = x * 10.0 + y);
                *outputs[1] = view.iter().sum();
            }
        },
    )
    .unwrap();
    let doubled = outputs[0].plus(&outputs[0]);
    assert_eq!(calls.load(Ordering::SeqCst), 0);
    assert_eq!(doubled.values(), [42.0, 164.0, 86.0, 208.0, 130.0, 252.0]);
    assert_eq!(outputs[1].values(), [42.0]);
    assert_eq!(calls.load(Ordering::SeqCst), 1);
    drop((outputs, doubled));
    assert_eq!(Arc::strong_count(&calls), 1, "the context outlived its operation");
}

#[test]
fn broadcast_and_sliced_inputs_arrive_packed() {
    let _serial = serial();
    let column = Array::new(&[1.0, 2.0], &[2, 1]);
    let wide = Array::from(|out, s| {
        // SAFETY: the array is live and the shape has two dimensions.
        unsafe { mlx::mlx_broadcast_to(out, column.0, [2, 3].as_ptr(), 2, s) }
    });
    let grid = Array::new(&ramp(12), &[3, 4]);
    let sliced = Array::from(|out, s| {
        let (start, stop, step) = ([0, 1], [3, 3], [1, 1]);
        // SAFETY: the array is live and has two dimensions.
        unsafe {
            mlx::mlx_slice(
                out,
                grid.0,
                start.as_ptr(),
                2,
                stop.as_ptr(),
                2,
                step.as_ptr(),
                2,
                s,
            )
        }
    });
    let outputs = op(
        &[&wide, &sliced],
        &[(&[6], None), (&[6], None)],
        |inputs, outputs| {
            // SAFETY: inputs and outputs have six elements each.
            unsafe {
                inputs[0].copy_to(outputs[0], 6);
                inputs[1].copy_to(outputs[1], 6);
            }
        },
    )
    .unwrap();
    assert_eq!(outputs[0].values(), [1.0, 1.0, 1.0, 2.0, 2.0, 2.0]);
    let grid = ramp(12);
    assert_eq!(
        outputs[1].values(),
        [grid[1], grid[2], grid[5], grid[6], grid[9], grid[10]]
    );
}

fn increment(inputs: &[*const f32], outputs: &[*mut f32]) {
    assert_eq!(
        inputs[0],
        outputs[0].cast_const(),
        "a donor and its output are one buffer"
    );
    // SAFETY: the output has 4096 elements and starts as a copy of the input; the second output has one.
    unsafe {
        std::slice::from_raw_parts_mut(outputs[0], 4096)
            .iter_mut()
            .for_each(|x| *x += 1.0);
        *outputs[1] = *outputs[0];
    }
}

#[test]
fn state_is_updated_in_place_when_nobody_else_holds_it() {
    let _serial = serial();
    let zeros = Array::new(&vec![0.0; 4096], &[4096]);
    let mut state = zeros.plus(&zeros);
    let address = state.address();
    for step in 1..=3 {
        let outputs = op(&[&state], &[(&[64, 64], Some(0)), (&[], None)], increment).unwrap();
        drop(state);
        let [next, first] = <[Array; 2]>::try_from(outputs).unwrap();
        assert_eq!(first.values(), [step as f32]);
        state = Array::from(|out, s| {
            // SAFETY: the array is live and the shape has one dimension.
            unsafe { mlx::mlx_reshape(out, next.0, [4096].as_ptr(), 1, s) }
        });
        drop((next, first));
        assert_eq!(state.address(), address, "step {step} moved the state");
    }
    assert!(state.values().iter().all(|x| *x == 3.0));
}

#[test]
fn state_that_somebody_holds_is_copied_before_an_update() {
    let _serial = serial();
    let state = Array::new(&vec![7.0; 4096], &[4096]);
    let outputs = op(&[&state], &[(&[4096], Some(0)), (&[], None)], increment).unwrap();
    assert!(outputs[0].values().iter().all(|x| *x == 8.0));
    assert!(state.values().iter().all(|x| *x == 7.0));
}

#[test]
fn donor_of_another_size_is_refused_by_name() {
    let _serial = serial();
    let state = Array::new(&[1.0, 2.0], &[2]);
    let error = op(&[&state], &[(&[3], Some(0))], |_, _| {}).unwrap_err();
    assert!(error.contains("[test_op]"), "{error}");
}

#[test]
fn failing_kernel_fails_the_evaluation_and_leaves_mlx_usable() {
    let _serial = serial();
    let a = Array::new(&[1.0], &[1]);
    let outputs = op(&[&a], &[(&[1], None)], |_, _| panic!("told to")).unwrap();
    assert_eq!(outputs[0].eval(), 1);
    let error = LAST_ERROR.lock().unwrap().clone();
    assert!(error.contains("[test_op] the CPU kernel failed"), "{error}");
    assert_eq!(a.plus(&a).values(), [2.0]);
}

#[test]
fn async_eval_runs_a_cpu_op_without_being_waited_for() {
    let _serial = serial();
    let (send, receive) = std::sync::mpsc::channel();
    let send = Mutex::new(send);
    let a = Array::new(&[20.0], &[1]);
    let outputs = op(&[&a], &[(&[1], None)], move |inputs, outputs| {
        // SAFETY: one element each.
        unsafe { *outputs[0] = *inputs[0] + 1.0 };
        send.lock().unwrap().send(std::thread::current().id()).unwrap();
    })
    .unwrap();
    let result = outputs[0].plus(&outputs[0]);
    // SAFETY: the array is live; the vector is freed after the call.
    unsafe {
        let vector = mlx::mlx_vector_array_new_data(&result.0, 1);
        assert_eq!(mlx::mlx_async_eval(vector), 0);
        mlx::mlx_vector_array_free(vector);
    }
    let thread = receive.recv_timeout(std::time::Duration::from_secs(10)).unwrap();
    assert_ne!(thread, std::thread::current().id());
    assert_eq!(result.values(), [42.0]);
}
