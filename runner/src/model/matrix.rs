//! Weight matrices as a checkpoint stores them, and the row operations that need no decoding.
//!
//! Invariant: rows are outputs; choosing, ordering, joining or stacking rows of codes gives what the same does to the decoded
//! values, since scales run along the inputs.

use mlx_rs::error::{Exception, Result};
use mlx_rs::ops::{concatenate, stack};
use mlx_rs::{Array, Dtype};

use crate::mlx::ops::{self, QuantMode};

/// A quantised matrix [..., out, in], a stack of them where it has leading axes.
#[derive(Debug, Clone)]
pub struct Codes {
    /// Codes, [..., out, in * bits / 32] uint32.
    pub weight: Array,
    /// Scales, [..., out, in / group].
    pub scales: Array,
    /// Biases of the affine mode, [..., out, in / group].
    pub biases: Option<Array>,
    /// Extra factor of a matrix (imported nvfp4 files), [1], or [E] of a stack; float32.
    pub global_scale: Option<Array>,
    /// Storage mode.
    pub mode: QuantMode,
}

impl Codes {
    /// Rounds `values` [..., out, in] to `mode`, which has no biases.
    pub fn encode(values: &Array, mode: QuantMode) -> Result<Self> {
        let parts = ops::quantize(values, mode)?;
        let [weight, scales] = <[Array; 2]>::try_from(parts)
            .map_err(|parts| Exception::custom(format!("quantising gave {} arrays", parts.len())))?;
        Ok(Self {
            weight,
            scales,
            biases: None,
            global_scale: None,
            mode,
        })
    }

    /// The values, [..., out, in].
    pub fn decode(&self, dtype: Dtype) -> Result<Array> {
        // The affine modes decode in the type of their scales: float32 results need float32 scales.
        let affine = self.biases.is_some();
        let cast = |a: &Array| {
            if affine {
                ops::cast(a, dtype)
            } else {
                Ok(a.clone())
            }
        };
        let biases = self.biases.as_ref().map(cast).transpose()?;
        let values = ops::dequantize(
            &self.weight,
            &cast(&self.scales)?,
            biases.as_ref(),
            self.mode,
            dtype,
        )?;
        match &self.global_scale {
            Some(scale) => {
                let mut shape = vec![1; values.ndim()];
                shape[0] = scale.dim(0);
                ops::cast(&values.multiply(&scale.reshape(&shape)?)?, dtype)
            }
            None => Ok(values),
        }
    }

    /// Arrays held.
    pub fn arrays(&self) -> Vec<&Array> {
        let mut out = vec![&self.weight, &self.scales];
        out.extend(self.biases.iter());
        out.extend(self.global_scale.iter());
        out
    }

    fn map(&self, rows: impl Fn(&Array) -> Result<Array>) -> Result<Self> {
        Ok(Self {
            weight: rows(&self.weight)?,
            scales: rows(&self.scales)?,
            biases: self.biases.as_ref().map(rows).transpose()?,
            global_scale: self.global_scale.clone(),
            mode: self.mode,
        })
    }

    /// Whether rows of both can lie side by side.
    fn is_like(&self, other: &Self) -> bool {
        self.mode == other.mode
            && self.scales.dtype() == other.scales.dtype()
            && self.biases.is_some() == other.biases.is_some()
            && self.global_scale.is_some() == other.global_scale.is_some()
    }

    fn merge(parts: &[&Self], join: impl Fn(&[&Array]) -> Result<Array>) -> Result<Self> {
        let all = |part: fn(&Self) -> &Array| join(&parts.iter().map(|p| part(p)).collect::<Vec<_>>());
        let biases: Vec<&Array> = parts.iter().filter_map(|p| p.biases.as_ref()).collect();
        let factors: Vec<&Array> = parts.iter().filter_map(|p| p.global_scale.as_ref()).collect();
        Ok(Self {
            weight: all(|p| &p.weight)?,
            scales: all(|p| &p.scales)?,
            biases: if biases.is_empty() {
                None
            } else {
                Some(join(&biases)?)
            },
            global_scale: if factors.is_empty() {
                None
            } else {
                Some(concatenate(&factors, 0)?)
            },
            mode: parts[0].mode,
        })
    }
}

/// A matrix [..., out, in].
#[derive(Debug, Clone)]
pub enum Matrix {
    /// Plain values.
    Dense(Array),
    /// Codes with their scales.
    Quantized(Codes),
}

impl Matrix {
    /// Arrays held.
    pub fn arrays(&self) -> Vec<&Array> {
        match self {
            Self::Dense(values) => vec![values],
            Self::Quantized(codes) => codes.arrays(),
        }
    }

    /// The values, [..., out, in], in `dtype`.
    pub fn decode(&self, dtype: Dtype) -> Result<Array> {
        match self {
            Self::Dense(values) => ops::cast(values, dtype),
            Self::Quantized(codes) => codes.decode(dtype),
        }
    }

    fn map(&self, rows: impl Fn(&Array) -> Result<Array>) -> Result<Self> {
        Ok(match self {
            Self::Dense(values) => Self::Dense(rows(values)?),
            Self::Quantized(codes) => Self::Quantized(codes.map(rows)?),
        })
    }

    /// Rows `from..to`, as compact copies.
    pub fn rows(&self, from: i32, to: i32) -> Result<Self> {
        self.map(|a| ops::compact(&ops::slice_axis(a, -2, from, to)?))
    }

    /// The rows that `index` (int32) names, in its order.
    pub fn pick(&self, index: &Array) -> Result<Self> {
        self.map(|a| mlx_rs::ops::indexing::take_axis(a, index, -2))
    }

    /// Whether rows of both can lie side by side in one matrix, and matrices of both in one stack.
    pub fn is_like(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Dense(a), Self::Dense(b)) => a.dtype() == b.dtype(),
            (Self::Quantized(a), Self::Quantized(b)) => a.is_like(b),
            _ => false,
        }
    }

    /// Whether [`Matrix::join`] can take it beside others: a factor of the whole matrix belongs to its own rows only.
    pub fn joins(&self) -> bool {
        !matches!(
            self,
            Self::Quantized(Codes {
                global_scale: Some(_),
                ..
            })
        )
    }

    /// Rows one below the other; the parts are alike and [`Matrix::joins`].
    pub fn join(parts: &[Self]) -> Result<Self> {
        Self::merge(parts, |arrays| concatenate(arrays, -2))
    }

    /// Matrices [out, in] as one stack [E, out, in]; the parts are alike.
    pub fn stack(parts: &[Self]) -> Result<Self> {
        Self::merge(parts, |arrays| stack(arrays, 0))
    }

    fn merge(parts: &[Self], join: impl Fn(&[&Array]) -> Result<Array>) -> Result<Self> {
        let (mut dense, mut codes) = (Vec::new(), Vec::new());
        for part in parts {
            match part {
                Self::Dense(values) => dense.push(values),
                Self::Quantized(part) => codes.push(part),
            }
        }
        match codes.is_empty() {
            true => Ok(Self::Dense(join(&dense)?)),
            false => Ok(Self::Quantized(Codes::merge(&codes, join)?)),
        }
    }
}
