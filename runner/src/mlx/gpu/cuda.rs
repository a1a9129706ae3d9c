//! Kernels that are compiled here and launched through MLX's entry for compiled CUDA kernels.
//!
//! Invariant: a kernel is compiled once for each set of constants and types, and described to MLX once for each size of
//! launch; repeating it costs the host a lookup and one graph node.

use std::cell::RefCell;
use std::collections::hash_map::Entry;
use std::collections::HashMap;
use std::ffi::{c_int, CString};
use std::fmt::Write as _;
use std::rc::Rc;

use mlx_rs::error::{Exception, Result};
use mlx_rs::{Array, Dtype};
use xxhash_rust::xxh3::xxh3_64;

use super::compiler::Compiler;
use super::kernel::{Call, Text};
use super::source::CUDA_PRELUDE;
use crate::mlx::ops::{arrays_op, ArrayVector};

/// Descriptions kept of a kernel: prompts have pieces of any length, each a size of its own.
const SIZES: usize = 32;

/// What is compiled apart: constants, types, and how many dimensions the inputs have.
type Key = Vec<i32>;

/// What is described apart: the launch's integers, grid and group.
type Size = Vec<c_int>;

/// A launch that MLX has been told of.
struct Primitive(mlx_sys::lookahead_cuda_primitive);

impl Drop for Primitive {
    fn drop(&mut self) {
        // SAFETY: owned by this value alone; null is allowed.
        unsafe { mlx_sys::lookahead_cuda_primitive_free(self.0) };
    }
}

/// A compiled kernel.
struct Module {
    /// Of its function; no other text has the same.
    name: CString,
    image: Vec<u8>,
    launches: HashMap<Size, Primitive>,
}

/// See the module's text.
pub(super) struct CudaKernel {
    compiler: Rc<Compiler>,
    text: Text,
    /// Inputs whose shape the body reads.
    shaped: Vec<bool>,
    modules: RefCell<HashMap<Key, Module>>,
}

fn type_name(dtype: Dtype) -> Result<&'static str> {
    Ok(match dtype {
        Dtype::Float32 => "float",
        Dtype::Bfloat16 => "bf16",
        Dtype::Float16 => "f16",
        Dtype::Int32 => "int",
        Dtype::Uint32 => "unsigned",
        other => return Err(Exception::custom(format!("no kernel takes {other:?}"))),
    })
}

impl CudaKernel {
    pub(super) fn new(compiler: Rc<Compiler>, text: Text) -> Self {
        let shaped = text
            .inputs
            .iter()
            .map(|name| text.body.contains(&format!("{name}_shape")))
            .collect();
        Self {
            compiler,
            text,
            shaped,
            modules: RefCell::default(),
        }
    }

    /// Adds a launch to the graph.
    pub(super) fn call(&self, call: &Call<'_>) -> Result<Vec<Array>> {
        let mut modules = self.modules.borrow_mut();
        let key = self.key(call);
        let module = match modules.entry(key) {
            Entry::Occupied(there) => there.into_mut(),
            Entry::Vacant(place) => place.insert(self.compile(call)?),
        };
        self.launch(call, module)
    }

    fn compile(&self, call: &Call<'_>) -> Result<Module> {
        let (name, program) = self.program(call)?;
        let image = self
            .compiler
            .image(&program)
            .map_err(|error| Exception::custom(format!("compiling {}: {error}", self.text.name)))?;
        let name = CString::new(name).map_err(|_| Exception::custom("kernel with a NUL in its name"))?;
        Ok(Module {
            name,
            image,
            launches: HashMap::new(),
        })
    }

    fn key(&self, call: &Call<'_>) -> Key {
        let mut key = Vec::with_capacity(32);
        key.extend(call.constants.iter().map(|constant| constant.1));
        key.push(call.dtype as i32);
        for (input, shaped) in call.inputs.iter().zip(&self.shaped) {
            key.push(input.dtype() as i32);
            key.push(if *shaped { input.ndim() as i32 } else { 0 });
        }
        key.extend(call.outputs.iter().map(|(_, dtype)| *dtype as i32));
        key
    }

    fn launch(&self, call: &Call<'_>, module: &mut Module) -> Result<Vec<Array>> {
        let mut size: Size = Vec::with_capacity(24);
        for (input, shaped) in call.inputs.iter().zip(&self.shaped) {
            if *shaped {
                size.extend(input.shape());
            }
        }
        size.extend(call.integers);
        let integers = size.len();
        size.extend(call.grid.iter().chain(&call.group));
        let outputs: Vec<mlx_sys::lookahead_cuda_output> = call
            .outputs
            .iter()
            .map(|(shape, dtype)| mlx_sys::lookahead_cuda_output {
                shape: shape.as_ptr(),
                ndim: shape.len(),
                dtype: (*dtype).into(),
            })
            .collect();
        let inputs = ArrayVector::new(call.inputs.iter().copied());
        let Module {
            name,
            image,
            launches,
        } = module;
        let launch = mlx_sys::lookahead_cuda_launch {
            name: name.as_ptr(),
            image: image.as_ptr().cast(),
            image_size: image.len(),
            outputs: outputs.as_ptr(),
            num_outputs: outputs.len(),
            integers: size.as_ptr(),
            num_integers: integers,
            grid: call.grid,
            group: call.group,
        };
        let add = |primitive: &mut Primitive| {
            arrays_op(self.text.name, |res, stream| {
                // SAFETY: everything that the launch points to lives for the call, which copies it; the integers are those
                // that the program was compiled to take; a primitive is repeated for the size that it was made for, and
                // all kernels of a thread are on that thread's stream.
                unsafe { mlx_sys::lookahead_cuda_op(res, &mut primitive.0, &launch, inputs.0, stream) }
            })
        };
        if let Some(primitive) = launches.get_mut(&size) {
            return add(primitive);
        }
        let none = std::ptr::null_mut();
        let mut primitive = Primitive(mlx_sys::lookahead_cuda_primitive { ctx: none });
        let out = add(&mut primitive)?;
        if launches.len() >= SIZES {
            launches.clear();
        }
        launches.insert(size, primitive);
        Ok(out)
    }

    /// The name of the kernel's function for one set of constants and types, and the whole program.
    fn program(&self, call: &Call<'_>) -> Result<(String, String)> {
        let text = &self.text;
        let mut parameters = Vec::new();
        for (input, name) in call.inputs.iter().zip(text.inputs) {
            parameters.push(format!("const {}* {name}", type_name(input.dtype())?));
        }
        for ((_, dtype), name) in call.outputs.iter().zip(text.outputs) {
            parameters.push(format!("{}* {name}", type_name(*dtype)?));
        }
        let mut locals = String::new();
        let shapes = call.inputs.iter().zip(text.inputs).zip(&self.shaped);
        let shapes = shapes
            .filter(|(_, shaped)| **shaped)
            .map(|((input, name), _)| (format!("{name}_shape"), input.ndim()));
        let integers = text.integers.iter().map(|name| ((*name).to_owned(), 1));
        for (name, len) in shapes.chain(integers) {
            let items: Vec<String> = (0..len).map(|i| format!("{name}_{i}")).collect();
            parameters.extend(items.iter().map(|item| format!("int {item}")));
            // Writing to a string can't fail.
            let _ = writeln!(locals, "  const int {name}[{len}] = {{{}}};", items.join(", "));
        }
        for (name, value) in call.constants {
            let _ = writeln!(locals, "  constexpr int {name} = {value};");
        }
        let _ = writeln!(locals, "  typedef {} T;", type_name(call.dtype)?);
        let (head, parameters) = (format!("{CUDA_PRELUDE}{}", text.helpers), parameters.join(", "));
        let tail = format!("({parameters}) {{\n{locals}{}\n}}\n", text.body);
        let name = format!(
            "lookahead_{}_{:016x}",
            text.name,
            xxh3_64(format!("{head}{tail}").as_bytes())
        );
        let program = format!("{head}extern \"C\" __global__ void {name}{tail}");
        Ok((name, program))
    }
}
