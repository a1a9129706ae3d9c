//! Checkpoints on disk: copies to damage, and the tensors of safetensors files.
//!
//! Invariant: a file is written as it was read but for what a test changed; nothing here is shared with the code under test.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{json, Map, Value};

use crate::process::repository;

/// A small model of the fixtures.
pub fn tiny(name: &str) -> PathBuf {
    repository().join("fixtures/tiny").join(name)
}

/// One tensor as it is stored.
#[derive(Debug, Clone)]
pub struct Tensor {
    /// Type, as the file names it.
    pub dtype: String,
    /// Shape.
    pub shape: Vec<u64>,
    /// Bytes.
    pub data: Vec<u8>,
}

impl Tensor {
    /// The values of a float32 tensor.
    ///
    /// # Panics
    /// It is of another type.
    pub fn floats(&self) -> Vec<f32> {
        assert_eq!(self.dtype, "F32");
        let (values, _) = self.data.as_chunks::<4>();
        values.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
    }
}

/// The tensors of a file by name.
pub type Tensors = BTreeMap<String, Tensor>;

/// Reads a safetensors file.
///
/// # Panics
/// It isn't one.
pub fn read_tensors(path: &Path) -> Tensors {
    let bytes = fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let parts = bytes.split_first_chunk::<8>().and_then(|(length, rest)| {
        let length = usize::try_from(u64::from_le_bytes(*length)).ok()?;
        Some((rest.get(..length)?, rest.get(length..)?))
    });
    let Some((Ok(header), data)) =
        parts.map(|(text, data)| (serde_json::from_slice::<Map<String, Value>>(text), data))
    else {
        panic!("{} is no safetensors file", path.display())
    };
    let numbers = |value: &Value| -> Vec<u64> {
        value
            .as_array()
            .into_iter()
            .flatten()
            .filter_map(Value::as_u64)
            .collect()
    };
    header
        .into_iter()
        .filter(|(name, _)| name != "__metadata__")
        .map(|(name, info)| {
            let [from, to] = numbers(&info["data_offsets"])[..] else {
                panic!("{name} has no offsets")
            };
            let tensor = Tensor {
                dtype: info["dtype"].as_str().unwrap_or_default().to_owned(),
                shape: numbers(&info["shape"]),
                data: data[from as usize..to as usize].to_vec(),
            };
            (name, tensor)
        })
        .collect()
}

/// Writes a safetensors file.
///
/// # Panics
/// The file can't be written.
pub fn write_tensors(path: &Path, tensors: &Tensors) {
    let (mut header, mut data) = (Map::new(), Vec::new());
    for (name, tensor) in tensors {
        let offsets = [data.len(), data.len() + tensor.data.len()];
        data.extend_from_slice(&tensor.data);
        let info = json!({"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": offsets});
        header.insert(name.clone(), info);
    }
    let text = Value::Object(header).to_string();
    let file = [&(text.len() as u64).to_le_bytes()[..], text.as_bytes(), &data].concat();
    write(path, &file);
}

/// Writes a file anew: one that may be mapped is never changed in place.
///
/// # Panics
/// The file can't be written.
pub fn write(path: &Path, bytes: &[u8]) {
    let _ = fs::remove_file(path);
    if let Err(error) = fs::write(path, bytes) {
        panic!("{}: {error}", path.display())
    }
}

/// Copies the files of a model to an existing directory.
///
/// # Panics
/// One can't be copied.
pub fn copy_model(from: &Path, to: &Path) {
    let entries = fs::read_dir(from).unwrap_or_else(|error| panic!("{}: {error}", from.display()));
    for path in entries.flatten().map(|entry| entry.path()) {
        let copied = fs::copy(&path, to.join(path.file_name().unwrap_or_default()));
        assert!(copied.is_ok(), "{}: {copied:?}", path.display());
    }
}

/// Changes a JSON file.
///
/// # Panics
/// It can't be read or written, or isn't an object.
pub fn edit_json(path: &Path, edit: impl FnOnce(&mut Map<String, Value>)) {
    let bytes = fs::read(path).unwrap_or_default();
    let Ok(Value::Object(mut map)) = serde_json::from_slice(&bytes) else {
        panic!("{} holds no object", path.display())
    };
    edit(&mut map);
    write(path, Value::Object(map).to_string().as_bytes());
}

/// Changes the tensors of a file.
pub fn edit_tensors(path: &Path, edit: impl FnOnce(&mut Tensors)) {
    let mut tensors = read_tensors(path);
    edit(&mut tensors);
    write_tensors(path, &tensors);
}
