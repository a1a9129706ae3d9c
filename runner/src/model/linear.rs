//! Matrices without bias, dense or quantised, alone or packed.
//!
//! Invariant: `forward(x)` is `x @ W^T` with W [out, in] as the checkpoint stores it; packing rows changes no result row.

use mlx_rs::error::Result;
use mlx_rs::ops::{concatenate, matmul};
use mlx_rs::{Array, Dtype};

use crate::mlx::ops::{self, QuantMode};

/// One matrix [out, in].
#[derive(Debug, Clone)]
pub enum Linear {
    /// Plain values; kept as the transposed view [in, out] that the product wants.
    Dense {
        /// W^T.
        transposed: Array,
    },
    /// Packed codes with their scales.
    Quantized {
        /// Codes, [out, in * bits / 32] uint32.
        weight: Array,
        /// Scales, [out, in / group].
        scales: Array,
        /// Biases of the affine mode, [out, in / group].
        biases: Option<Array>,
        /// Extra factor of the whole matrix (imported nvfp4 files).
        global_scale: Option<Array>,
        /// Storage mode.
        mode: QuantMode,
    },
}

impl Linear {
    /// A dense matrix from its [out, in] values.
    pub fn dense(weight: &Array) -> Result<Self> {
        Ok(Self::Dense { transposed: weight.transpose_axes(&[1, 0])? })
    }

    /// Rows of W.
    pub fn outputs(&self) -> i32 {
        match self {
            Self::Dense { transposed } => transposed.dim(1),
            Self::Quantized { weight, .. } => weight.dim(0),
        }
    }

    /// `x @ W^T`; x [..., in] → [..., out] in x's type.
    pub fn forward(&self, x: &Array) -> Result<Array> {
        match self {
            Self::Dense { transposed } => matmul(x, transposed),
            Self::Quantized { weight, scales, biases, global_scale, mode } => {
                let y = ops::quantized_matmul(x, weight, scales, biases.as_ref(), *mode)?;
                match global_scale {
                    Some(scale) => ops::cast(&y.multiply(scale)?, x.dtype()),
                    None => Ok(y),
                }
            }
        }
    }

    /// Rows of W by id: an embedding. ids [B, L] → [B, L, in] in `dtype`.
    pub fn embed(&self, ids: &Array, dtype: Dtype) -> Result<Array> {
        use mlx_rs::ops::indexing::take_axis;
        match self {
            Self::Dense { transposed } => {
                let rows = transposed.transpose_axes(&[1, 0])?;
                ops::cast(&take_axis(&rows, ids, 0)?, dtype)
            }
            Self::Quantized { weight, scales, biases, global_scale, mode } => {
                let biases = biases.as_ref().map(|b| take_axis(b, ids, 0)).transpose()?;
                let w = take_axis(weight, ids, 0)?;
                let s = take_axis(scales, ids, 0)?;
                let rows = ops::dequantize(&w, &s, biases.as_ref(), *mode, dtype)?;
                match global_scale {
                    Some(scale) => ops::cast(&rows.multiply(scale)?, dtype),
                    None => Ok(rows),
                }
            }
        }
    }

    /// Arrays held.
    pub fn arrays(&self) -> Vec<&Array> {
        match self {
            Self::Dense { transposed } => vec![transposed],
            Self::Quantized { weight, scales, biases, global_scale, .. } => {
                let mut out = vec![weight, scales];
                out.extend(biases.iter());
                out.extend(global_scale.iter());
                out
            }
        }
    }

    fn join(parts: &[&Self]) -> Result<Option<Self>> {
        match parts[0] {
            Self::Dense { transposed: first } => {
                let mut rows = Vec::with_capacity(parts.len());
                for part in parts {
                    match part {
                        Self::Dense { transposed } if transposed.dtype() == first.dtype() => rows.push(transposed),
                        _ => return Ok(None),
                    }
                }
                // Joined as rows of W, then viewed transposed again, so that the product keeps its fast layout.
                let rows = rows.iter().map(|t| t.transpose_axes(&[1, 0])).collect::<Result<Vec<_>>>()?;
                Ok(Some(Self::dense(&concatenate(&rows, 0)?)?))
            }
            Self::Quantized { mode, biases, global_scale: None, scales, .. } => {
                let (mut ws, mut ss, mut bs) = (Vec::new(), Vec::new(), Vec::new());
                for part in parts {
                    match part {
                        Self::Quantized { weight, scales: s, biases: b, global_scale: None, mode: m }
                            if m == mode && b.is_some() == biases.is_some() && s.dtype() == scales.dtype() =>
                        {
                            ws.push(weight);
                            ss.push(s);
                            bs.extend(b.iter());
                        }
                        _ => return Ok(None),
                    }
                }
                Ok(Some(Self::Quantized {
                    weight: concatenate(&ws, 0)?,
                    scales: concatenate(&ss, 0)?,
                    biases: if bs.is_empty() { None } else { Some(concatenate(&bs, 0)?) },
                    global_scale: None,
                    mode: *mode,
                }))
            }
            Self::Quantized { .. } => Ok(None),
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
    pub fn new(parts: Vec<Linear>) -> Result<Self> {
        let mut products: Vec<Linear> = Vec::new();
        let mut widths: Vec<Vec<i32>> = Vec::new();
        for part in parts {
            let width = part.outputs();
            if let (Some(last), Some(group)) = (products.last_mut(), widths.last_mut()) {
                if let Some(joined) = Linear::join(&[last, &part])? {
                    // Evaluated at once: the parts' own buffers are released before the next tensor is read.
                    mlx_rs::transforms::eval(joined.arrays())?;
                    *last = joined;
                    group.push(width);
                    continue;
                }
            }
            products.push(part);
            widths.push(vec![width]);
        }
        Ok(Self { products, widths })
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

    /// Arrays held.
    pub fn arrays(&self) -> Vec<&Array> {
        self.products.iter().flat_map(Linear::arrays).collect()
    }
}
