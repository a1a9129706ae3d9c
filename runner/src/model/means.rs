//! Means of small tensors, from their bytes.
//!
//! Invariant: a mean is finite or absent.

use half::{bf16, f16};
use safetensors::Dtype;

use super::checkpoint::TensorView;

/// Mean of a float tensor; `None` where it is empty, not of a float type, or not finite.
pub fn mean(view: &TensorView<'_>) -> Option<f64> {
    let sum = match view.dtype {
        Dtype::F32 => sum::<4>(view.data, |b| f64::from(f32::from_le_bytes(b))),
        Dtype::F16 => sum::<2>(view.data, |b| f16::from_le_bytes(b).to_f64()),
        Dtype::BF16 => sum::<2>(view.data, |b| bf16::from_le_bytes(b).to_f64()),
        _ => return None,
    };
    let count: usize = view.shape.iter().product();
    let mean = sum / count as f64;
    mean.is_finite().then_some(mean)
}

fn sum<const N: usize>(data: &[u8], value: impl Fn([u8; N]) -> f64) -> f64 {
    let (chunks, _) = data.as_chunks::<N>();
    chunks.iter().map(|bytes| value(*bytes)).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn means_come_from_every_float_type_and_nothing_else() {
        let view = |dtype, data, n: &'static [usize]| TensorView {
            name: "",
            original: "",
            dtype,
            shape: n,
            data,
            file: "",
        };
        let f32s: Vec<u8> = [1.0f32, 2.0].iter().flat_map(|x| x.to_le_bytes()).collect();
        let bf16s: Vec<u8> = [1.0f32, 2.0]
            .iter()
            .flat_map(|x| bf16::from_f32(*x).to_le_bytes())
            .collect();
        let f16s: Vec<u8> = [1.0f32, 2.0]
            .iter()
            .flat_map(|x| f16::from_f32(*x).to_le_bytes())
            .collect();
        assert_eq!(mean(&view(Dtype::F32, &f32s, &[2])), Some(1.5));
        assert_eq!(mean(&view(Dtype::BF16, &bf16s, &[2])), Some(1.5));
        assert_eq!(mean(&view(Dtype::F16, &f16s, &[2])), Some(1.5));
        assert_eq!(mean(&view(Dtype::F32, &[], &[0])), None);
        let nan = f32::NAN.to_le_bytes();
        assert_eq!(mean(&view(Dtype::F32, &nan, &[1])), None);
        assert_eq!(mean(&view(Dtype::U8, &[1, 2], &[2])), None);
    }
}
