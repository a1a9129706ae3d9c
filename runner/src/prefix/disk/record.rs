//! The form of one entry: a safetensors file that proves, when read, that it is whole, of this model and of this key path.
//!
//! The header's metadata names the format, the fingerprint, the entry and a hash over all tensors. A segment also carries its
//! keys, which are compared with the request's on reading: what is restored never rests on a hash alone.

use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io::Read;
use std::path::Path;

use safetensors::tensor::{Dtype, Metadata, TensorView};
use xxhash_rust::xxh3::Xxh3;

use super::{DiskError, Fingerprint, Name};
use crate::prefix::key::Key;

/// Value of the metadata entry `format`; another one is another format.
const FORMAT: &str = "lookahead-prefix-1";
/// No header of ours comes near this many bytes.
const MAX_HEADER: u64 = 4 << 20;
/// The tensor that holds a segment's keys, as pairs of words.
const KEYS: &str = "keys";

/// One tensor in host memory: row-major, little-endian.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Tensor {
    /// Its name, unique within the entry and not `keys`.
    pub name: String,
    /// Element type.
    pub dtype: Dtype,
    /// Dimensions.
    pub shape: Vec<usize>,
    /// The elements.
    pub data: Vec<u8>,
}

/// Bytes that an entry's file takes, but for the header.
pub(super) fn payload_bytes(tensors: &[Tensor], keys: &[Key]) -> u64 {
    tensors.iter().map(|tensor| tensor.data.len() as u64).sum::<u64>() + (keys.len() * Key::BYTES) as u64
}

fn key_tensor(keys: &[Key]) -> Tensor {
    let data = keys.iter().flat_map(|key| key.to_le_bytes()).collect();
    Tensor {
        name: KEYS.to_owned(),
        dtype: Dtype::U64,
        shape: vec![keys.len(), 2],
        data,
    }
}

/// Hash of all tensors, independent of their order in the file.
fn content_hash(mut tensors: Vec<&Tensor>) -> String {
    tensors.sort_by(|a, b| a.name.cmp(&b.name));
    let mut hash = Xxh3::new();
    for tensor in tensors {
        let shape = serde_json::json!([tensor.name, tensor.dtype, tensor.shape, tensor.data.len()]);
        hash.update(shape.to_string().as_bytes());
        hash.update(&tensor.data);
    }
    format!("{:032x}", hash.digest128())
}

/// Write an entry to `path`, which must not exist, and bring it to the medium.
pub(super) fn write(
    path: &Path,
    fingerprint: Fingerprint,
    name: Name,
    keys: &[Key],
    tensors: &[Tensor],
) -> Result<(), DiskError> {
    let key_tensor = (!keys.is_empty()).then(|| key_tensor(keys));
    let tensors: Vec<&Tensor> = tensors.iter().chain(&key_tensor).collect();
    let hash = content_hash(tensors.clone());
    let metadata = HashMap::from([
        ("format".to_owned(), FORMAT.to_owned()),
        ("fingerprint".to_owned(), fingerprint.to_string()),
        ("entry".to_owned(), name.to_string()),
        ("hash".to_owned(), hash),
    ]);
    let views: Vec<_> = tensors
        .iter()
        .map(|tensor| {
            Ok((
                &tensor.name,
                TensorView::new(tensor.dtype, tensor.shape.clone(), &tensor.data)?,
            ))
        })
        .collect::<Result<_, safetensors::SafeTensorError>>()
        .map_err(|error| DiskError::Malformed {
            name: name.to_string(),
            reason: error.to_string(),
        })?;
    let failed = |source| DiskError::Io {
        path: path.to_owned(),
        source,
    };

    let mut options = OpenOptions::new();
    options.write(true).create_new(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    // The file exists with its permissions before it holds anything; the writer below only truncates and fills it.
    let file = options.open(path).map_err(failed)?;
    safetensors::serialize_to_file(views, Some(metadata), path).map_err(|error| match error {
        safetensors::SafeTensorError::IoError(source) => failed(source),
        other => DiskError::Malformed {
            name: name.to_string(),
            reason: other.to_string(),
        },
    })?;
    file.sync_all().map_err(failed)
}

/// Read the entry `name` from `path` and check all of it. `keys` are the whole path's, up to the entry's end at least.
pub(super) fn read(
    path: &Path,
    fingerprint: Fingerprint,
    name: Name,
    keys: &[Key],
) -> Result<Vec<Tensor>, DiskError> {
    let failed = |source| DiskError::Io {
        path: path.to_owned(),
        source,
    };
    let malformed = |reason: String| DiskError::Malformed {
        name: name.to_string(),
        reason,
    };
    let mut file = File::open(path).map_err(failed)?;
    let length = file.metadata().map_err(failed)?.len();
    let (metadata, header) = read_header(&mut file, length).map_err(&malformed)?;
    let facts = metadata.metadata().as_ref();
    let fact = |key: &str| facts.and_then(|facts| facts.get(key)).map_or("", String::as_str);
    if fact("format") != FORMAT {
        return Err(malformed(format!(
            "format {:?}, expected {FORMAT:?}",
            fact("format")
        )));
    }
    if fact("fingerprint") != fingerprint.to_string() {
        return Err(DiskError::Foreign {
            name: name.to_string(),
            fingerprint: fact("fingerprint").to_owned(),
        });
    }
    if fact("entry") != name.to_string() {
        return Err(malformed(format!("holds the entry {:?}", fact("entry"))));
    }

    let mut tensors = Vec::new();
    let mut expected = 0;
    for tensor in metadata.offset_keys() {
        let Some(info) = metadata.info(&tensor) else {
            continue;
        };
        let (from, to) = info.data_offsets;
        if from != expected || to < from || (to as u64) > length - header {
            return Err(malformed(format!(
                "tensor {tensor:?} lies at {from}..{to} in {} bytes",
                length - header
            )));
        }
        expected = to;
        let mut data = vec![0; to - from];
        file.read_exact(&mut data)
            .map_err(|error| malformed(format!("tensor {tensor:?}: {error}")))?;
        if TensorView::new(info.dtype, info.shape.clone(), &data).is_err() {
            return Err(malformed(format!(
                "tensor {tensor:?} of shape {:?} has {} bytes",
                info.shape,
                data.len()
            )));
        }
        tensors.push(Tensor {
            name: tensor,
            dtype: info.dtype,
            shape: info.shape.clone(),
            data,
        });
    }
    if header + expected as u64 != length {
        return Err(malformed(format!(
            "{length} bytes, expected {}",
            header + expected as u64
        )));
    }
    let hash = content_hash(tensors.iter().collect());
    if fact("hash") != hash {
        return Err(malformed(format!(
            "content hash {hash}, expected {:?}",
            fact("hash")
        )));
    }
    if let Name::Segment { start, end, .. } = name {
        let stored = tensors
            .iter()
            .position(|tensor| tensor.name == KEYS)
            .map(|index| tensors.remove(index));
        let wanted = keys.get(start..end).map(key_tensor);
        if stored.is_none() || stored != wanted {
            return Err(malformed("holds other keys than asked for".to_owned()));
        }
    }
    Ok(tensors)
}

/// The header and its length with the length prefix.
fn read_header(file: &mut File, length: u64) -> Result<(Metadata, u64), String> {
    let mut prefix = [0; 8];
    file.read_exact(&mut prefix)
        .map_err(|error| format!("header: {error}"))?;
    let size = u64::from_le_bytes(prefix);
    if size > MAX_HEADER || size + 8 > length {
        return Err(format!("header of {size} bytes in a file of {length}"));
    }
    let mut header = vec![0; size as usize];
    file.read_exact(&mut header)
        .map_err(|error| format!("header: {error}"))?;
    let metadata = serde_json::from_slice(&header).map_err(|error| format!("header: {error}"))?;
    Ok((metadata, size + 8))
}
