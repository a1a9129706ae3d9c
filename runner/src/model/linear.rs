//! Matrices without bias, dense or quantised, alone or packed.
//!
//! Invariant: `forward(x)` is `x @ W^T` with W [out, in] as the checkpoint stores it; packing rows changes no result row.

use mlx_rs::error::Result;
use mlx_rs::ops::indexing::take_axis;
use mlx_rs::ops::{concatenate, matmul};
use mlx_rs::{Array, Dtype};

use super::matrix::{Codes, Matrix};
use crate::mlx::backend::on_host;
use crate::mlx::gpu::products::{Around, Gain, Products, Stored};
use crate::mlx::{cpu, gpu, ops};

/// Rows from which a quantised matrix is decoded for the product, on CUDA.
const MANY_ROWS: usize = 64;

/// Whether a bfloat16 matrix is multiplied in float32: on the host's cores, where that costs nothing.
fn wide_product(x: &Array, rows: &Array) -> bool {
    cpu::product::AVAILABLE
        && on_host()
        && rows.dtype() == Dtype::Bfloat16
        && x.dtype() == Dtype::Float32
        && x.size() > 0
}

/// One matrix [out, in].
#[derive(Debug, Clone)]
pub enum Linear {
    /// Plain values, with the transposed view [in, out] that the library's product wants.
    Dense {
        /// W.
        rows: Array,
        /// W^T.
        transposed: Array,
    },
    /// Packed codes with their scales.
    Quantized(Codes),
}

impl Linear {
    /// The product with a stored matrix.
    pub fn new(matrix: Matrix) -> Result<Self> {
        Ok(match matrix {
            Matrix::Dense(values) => Self::Dense {
                transposed: values.transpose_axes(&[1, 0])?,
                rows: values,
            },
            Matrix::Quantized(codes) => Self::Quantized(codes),
        })
    }

    /// W, where it is plain values.
    pub fn dense(&self) -> Option<&Array> {
        match self {
            Self::Dense { rows, .. } => Some(rows),
            Self::Quantized(_) => None,
        }
    }

    /// Rows of W.
    pub fn outputs(&self) -> i32 {
        match self {
            Self::Dense { rows, .. } => rows.dim(0),
            Self::Quantized(codes) => codes.weight.dim(0),
        }
    }

    /// `x @ W^T`; x [..., in] → [..., out] in x's type.
    pub fn forward(&self, x: &Array) -> Result<Array> {
        if let Some(y) = self.few(x, Around::Nothing)? {
            return Ok(y);
        }
        let y = match self {
            Self::Dense { rows, .. } if wide_product(x, rows) => cpu::product::bf16_product(x, rows)?,
            // Promotion would widen the whole matrix at every call; the row is narrowed instead.
            Self::Dense { transposed, .. } if transposed.dtype() == Dtype::Bfloat16 => {
                matmul(&ops::cast(x, Dtype::Bfloat16)?, transposed)?
            }
            Self::Dense { transposed, .. } => matmul(x, transposed)?,
            // Many rows pay for decoding the matrix once: the product of plain values is so much faster.
            Self::Quantized(codes) if gpu::on_cuda() && x.size() >= MANY_ROWS * x.dim(-1) as usize => {
                let values = codes.decode(x.dtype())?;
                matmul(x, &values.transpose_axes(&[1, 0])?)?
            }
            Self::Quantized(codes) => {
                let y = ops::quantized_matmul(
                    x,
                    &codes.weight,
                    &codes.scales,
                    codes.biases.as_ref(),
                    codes.mode,
                )?;
                match &codes.global_scale {
                    Some(scale) => y.multiply(scale)?,
                    None => y,
                }
            }
        };
        ops::cast(&y, x.dtype())
    }

    /// `x @ W^T + residual`, in one launch where there is one.
    pub fn forward_added(&self, x: &Array, residual: &Array) -> Result<Option<Array>> {
        self.few(x, Around::Added(residual))
    }

    /// As kernels of ours read it, where they do: plain values, and affine 4-bit codes.
    pub fn stored(&self) -> Option<Stored<'_>> {
        match self {
            Self::Dense { rows, .. } => Some(Stored::Dense(rows)),
            Self::Quantized(Codes {
                weight,
                scales,
                biases: Some(biases),
                global_scale: None,
                mode,
            }) if mode.bits == 4 => Some(Stored::Codes {
                weight,
                scales,
                biases,
                group: mode.group_size,
            }),
            Self::Quantized(_) => None,
        }
    }

    /// The product of few rows in one launch with its surroundings, where the device has a kernel for it.
    fn few(&self, x: &Array, around: Around<'_>) -> Result<Option<Array>> {
        let Some(stored) = self.stored() else {
            return Ok(None);
        };
        if !Products::takes(x, stored) {
            return Ok(None);
        }
        gpu::with_products(|products| products.product(x, stored, around))
    }

    /// Rows of W by id: an embedding. ids [B, L] → [B, L, in] in `dtype`.
    pub fn embed(&self, ids: &Array, dtype: Dtype) -> Result<Array> {
        match self {
            Self::Dense { rows, .. } => ops::cast(&take_axis(rows, ids, 0)?, dtype),
            Self::Quantized(codes) => {
                let rows = Codes {
                    weight: take_axis(&codes.weight, ids, 0)?,
                    scales: take_axis(&codes.scales, ids, 0)?,
                    biases: codes.biases.as_ref().map(|b| take_axis(b, ids, 0)).transpose()?,
                    global_scale: codes.global_scale.clone(),
                    mode: codes.mode,
                };
                rows.decode(dtype)
            }
        }
    }

    /// Arrays held.
    pub fn arrays(&self) -> Vec<&Array> {
        match self {
            Self::Dense { rows, .. } => vec![rows],
            Self::Quantized(codes) => codes.arrays(),
        }
    }
}

/// Several matrices that read the same input, as few products as their storage allows.
#[derive(Debug, Clone)]
pub struct Packed {
    products: Vec<Linear>,
    /// Outputs of each matrix, grouped by the product that computes it.
    widths: Vec<Vec<i32>>,
}

impl Packed {
    /// Packs neighbours that are stored alike.
    pub fn new(parts: Vec<Matrix>) -> Result<Self> {
        let mut products = Vec::new();
        let mut widths = Vec::new();
        let mut run: Vec<Matrix> = Vec::new();
        for part in parts {
            if run
                .last()
                .is_some_and(|last| !(last.is_like(&part) && last.joins() && part.joins()))
            {
                Self::close(&mut run, &mut products, &mut widths)?;
            }
            run.push(part);
        }
        Self::close(&mut run, &mut products, &mut widths)?;
        Ok(Self { products, widths })
    }

    fn close(run: &mut Vec<Matrix>, products: &mut Vec<Linear>, widths: &mut Vec<Vec<i32>>) -> Result<()> {
        widths.push(
            run.iter()
                .filter_map(|m| m.arrays().first().map(|a| a.dim(0)))
                .collect(),
        );
        let joined = match run.len() {
            1 => run.swap_remove(0),
            _ => Matrix::join(run)?,
        };
        // Evaluated at once: the parts' own buffers are released before the next tensor is read.
        mlx_rs::transforms::eval(joined.arrays())?;
        run.clear();
        products.push(Linear::new(joined)?);
        Ok(())
    }

    /// All products of `x` [..., in], one array a matrix in the order given to [`Packed::new`].
    pub fn forward(&self, x: &Array) -> Result<Vec<Array>> {
        let mut out = Vec::new();
        for (product, widths) in self.products.iter().zip(&self.widths) {
            let y = product.forward(x)?;
            if let [_] = widths[..] {
                out.push(y);
                continue;
            }
            let mut from = 0;
            for width in widths {
                out.push(ops::slice_axis(&y, -1, from, from + width)?);
                from += width;
            }
        }
        Ok(out)
    }

    /// All products side by side, [..., sum of outputs].
    pub fn joined(&self, x: &Array) -> Result<Array> {
        match &self.products[..] {
            [one] => one.forward(x),
            several => {
                let parts = several.iter().map(|p| p.forward(x)).collect::<Result<Vec<_>>>()?;
                concatenate(&parts, -1)
            }
        }
    }

    /// The product of the norm of `x`, in one launch where there is one; gated, it is `silu(first half) * second half`.
    /// `None`: norm and product have to be computed one after the other.
    pub fn few_normed(&self, x: &Array, norm: Gain<'_>, gated: bool) -> Result<Option<Array>> {
        match &self.products[..] {
            [one] if gated => one.few(x, Around::Gated(norm)),
            [one] => one.few(x, Around::Normed(norm)),
            _ => Ok(None),
        }
    }

    /// Arrays held.
    pub fn arrays(&self) -> Vec<&Array> {
        self.products.iter().flat_map(Linear::arrays).collect()
    }
}
