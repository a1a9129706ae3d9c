//! The header of a safetensors file.
//!
//! Invariant: a [`Header`] describes only bytes that are in the file: every tensor's offsets lie in the data, hold exactly
//! dtype × shape bytes, and cover the data without overlap or hole. Nothing reads tensor data before this holds.
//! Source: the safetensors format's specification.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;

use safetensors::Dtype;
use serde::de::{Deserialize, Deserializer, Error as _, IgnoredAny, MapAccess, Visitor};
use serde_json::Value;

use super::error::HeaderFault;

/// Longest header read; the largest real one (64,000 tensors) has about 10 MB.
pub const MAX_HEADER_BYTES: u64 = 100 << 20;

/// Bytes of the length field in front of the header.
const LENGTH_BYTES: u64 = 8;

/// One tensor as a file describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorInfo {
    /// Storage type.
    pub dtype: Dtype,
    /// Shape; empty for a scalar.
    pub shape: Vec<usize>,
    /// Its bytes, from the start of the file.
    pub range: Range<usize>,
}

/// A checked header.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Header {
    /// Tensors by their name in the file.
    pub tensors: BTreeMap<String, TensorInfo>,
}

impl Header {
    /// Checks the header of `file`, the whole file's bytes.
    pub fn parse(file: &[u8]) -> Result<Self, HeaderFault> {
        let total = file.len() as u64;
        let Some((length, rest)) = file.split_first_chunk::<8>() else {
            return Err(HeaderFault::TooShort(total));
        };
        let (claimed, available) = (u64::from_le_bytes(*length), rest.len() as u64);
        if claimed > available {
            return Err(HeaderFault::LengthBeyondFile { claimed, available });
        }
        if claimed > MAX_HEADER_BYTES {
            return Err(HeaderFault::LengthAbsurd(claimed));
        }
        let (text, data) = rest.split_at(claimed as usize);
        let text = std::str::from_utf8(text).map_err(|e| HeaderFault::NotUtf8(e.valid_up_to()))?;
        let listed: Listed = serde_json::from_str(text).map_err(|e| HeaderFault::NotJson(e.to_string()))?;
        let data_start = (LENGTH_BYTES + claimed) as usize;
        let mut tensors = BTreeMap::new();
        for (name, raw) in listed.0 {
            let info = check(&name, raw, data.len() as u64, data_start)?;
            if tensors.insert(name.clone(), info).is_some() {
                return Err(HeaderFault::DuplicateTensor(name));
            }
        }
        covers(&tensors, data_start..file.len())?;
        Ok(Self { tensors })
    }
}

/// Bytes of one element; `None` for types whose elements share bytes.
fn element_bytes(dtype: Dtype) -> Option<u64> {
    let bits = dtype.bitsize() as u64;
    bits.is_multiple_of(8).then_some(bits / 8)
}

fn check(name: &str, raw: RawTensor, data_len: u64, data_start: usize) -> Result<TensorInfo, HeaderFault> {
    let tensor = || name.to_owned();
    let dtype = serde_json::from_value::<Dtype>(Value::String(raw.dtype.clone())).ok();
    let Some((dtype, bytes)) = dtype.and_then(|d| element_bytes(d).map(|b| (d, b))) else {
        return Err(HeaderFault::UnknownDtype {
            tensor: tensor(),
            dtype: raw.dtype,
        });
    };
    let [begin, end] = raw.data_offsets;
    if begin > end {
        return Err(HeaderFault::OffsetsReversed {
            tensor: tensor(),
            begin,
            end,
        });
    }
    if end > data_len {
        return Err(HeaderFault::OffsetsBeyondFile {
            tensor: tensor(),
            end,
            available: data_len,
        });
    }
    let wanted = raw.shape.iter().try_fold(bytes, |n, d| n.checked_mul(*d));
    let shape: Option<Vec<usize>> = raw.shape.iter().map(|d| usize::try_from(*d).ok()).collect();
    match (wanted, shape) {
        (Some(n), Some(shape)) if n == end - begin => Ok(TensorInfo {
            dtype,
            shape,
            range: data_start + begin as usize..data_start + end as usize,
        }),
        _ => Err(HeaderFault::SizeMismatch {
            tensor: tensor(),
            dtype: raw.dtype,
            shape: raw.shape,
            wanted: wanted.map_or_else(|| "too many".to_owned(), |n| n.to_string()),
            found: end - begin,
        }),
    }
}

/// That the tensors' ranges follow each other through `data` without overlap or hole.
fn covers(tensors: &BTreeMap<String, TensorInfo>, data: Range<usize>) -> Result<(), HeaderFault> {
    let mut order: Vec<_> = tensors.iter().collect();
    order.sort_by_key(|(_, t)| (t.range.start, t.range.end));
    let mut at = data.start;
    let mut last = "";
    for (name, tensor) in order {
        if tensor.range.start < at {
            return Err(HeaderFault::Overlap {
                first: last.to_owned(),
                second: name.clone(),
            });
        }
        if tensor.range.start > at {
            let bytes = (tensor.range.start - at) as u64;
            return Err(HeaderFault::Hole {
                bytes,
                before: format!("before tensor {name:?}"),
            });
        }
        at = tensor.range.end;
        last = name;
    }
    match data.end - at {
        0 => Ok(()),
        bytes => Err(HeaderFault::Hole {
            bytes: bytes as u64,
            before: "at the file's end".to_owned(),
        }),
    }
}

#[derive(serde::Deserialize)]
struct RawTensor {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: [u64; 2],
}

/// Entries in file order, duplicates included: a map would silently keep one of them.
struct Listed(Vec<(String, RawTensor)>);

impl<'de> Deserialize<'de> for Listed {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries;
        impl<'de> Visitor<'de> for Entries {
            type Value = Listed;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of tensors")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Listed, A::Error> {
                let mut entries = Vec::new();
                while let Some(name) = map.next_key::<String>()? {
                    if name == "__metadata__" {
                        map.next_value::<IgnoredAny>()?;
                        continue;
                    }
                    let tensor = map.next_value::<RawTensor>();
                    entries.push((
                        name.clone(),
                        tensor.map_err(|e| A::Error::custom(format!("tensor {name:?}: {e}")))?,
                    ));
                }
                Ok(Listed(entries))
            }
        }
        deserializer.deserialize_map(Entries)
    }
}

#[cfg(test)]
#[path = "header_tests.rs"]
mod tests;
