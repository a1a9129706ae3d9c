//! Fixtures, and edited copies of them, for tests.
//!
//! Invariant: an edit never touches the committed fixture.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use safetensors::Dtype;
use serde_json::{json, Map, Value};
use tempfile::TempDir;

use super::checkpoint::{dtype_name, Checkpoint};
use super::error::Result;
use super::header::Header;
use super::plan::{plan, Plan, PlanOptions};

/// A folder of the repository's fixtures.
pub(crate) fn fixtures(sub: &str) -> PathBuf {
    let source = Path::new(file!());
    let manifest = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    // From wherever the sources are seen: the repository's root is the first ancestor that has the fixtures.
    let starts = [manifest.join(source), source.to_owned(), manifest.clone()];
    let found = starts
        .iter()
        .flat_map(|p| p.ancestors())
        .map(|dir| dir.join("fixtures").join(sub))
        .find(|p| p.exists());
    found.unwrap_or_else(|| panic!("no fixtures/{sub} above {}", manifest.display()))
}

/// A tiny model.
pub(crate) fn tiny(name: &str) -> PathBuf {
    fixtures("tiny").join(name)
}

/// One tensor.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Tensor {
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<usize>,
    pub(crate) data: Vec<u8>,
}

/// A copy of a fixture in memory, to be changed and written out.
#[derive(Debug, Clone)]
pub(crate) struct Edited {
    pub(crate) config: Map<String, Value>,
    /// Tensors by file, under their names in the file.
    pub(crate) files: BTreeMap<String, BTreeMap<String, Tensor>>,
    /// `weight_map`, where the fixture has an index.
    pub(crate) index: Option<BTreeMap<String, String>>,
    source: PathBuf,
}

impl Edited {
    pub(crate) fn of(name: &str) -> Self {
        let source = tiny(name);
        let read = |file: &str| std::fs::read(source.join(file));
        let mut files = BTreeMap::new();
        for entry in std::fs::read_dir(&source).unwrap() {
            let file = entry.unwrap().file_name().into_string().unwrap();
            if file.ends_with(".safetensors") {
                files.insert(file.clone(), read_file(&read(&file).unwrap()));
            }
        }
        let index = read("model.safetensors.index.json").ok().map(|bytes| {
            let value: Value = serde_json::from_slice(&bytes).unwrap();
            serde_json::from_value(value["weight_map"].clone()).unwrap()
        });
        let config = serde_json::from_slice(&read("config.json").unwrap()).unwrap();
        Self {
            config,
            files,
            index,
            source,
        }
    }

    /// `text_config`, or the config itself where it is flat.
    pub(crate) fn text(&mut self) -> &mut Map<String, Value> {
        if self.config.contains_key("text_config") {
            self.config["text_config"].as_object_mut().unwrap()
        } else {
            &mut self.config
        }
    }

    /// The tensors of the file that holds one whose name ends so.
    pub(crate) fn holding(&mut self, end: &str) -> &mut BTreeMap<String, Tensor> {
        self.files
            .values_mut()
            .find(|t| t.keys().any(|k| k.ends_with(end)))
            .unwrap()
    }

    /// The one tensor whose name ends so.
    pub(crate) fn tensor(&mut self, end: &str) -> &mut Tensor {
        self.files
            .values_mut()
            .flatten()
            .find(|(k, _)| k.ends_with(end))
            .map(|(_, t)| t)
            .unwrap()
    }

    /// Takes out every tensor for which `which` says so.
    pub(crate) fn take(&mut self, which: impl Fn(&str) -> bool) -> BTreeMap<String, Tensor> {
        let mut taken = BTreeMap::new();
        for tensors in self.files.values_mut() {
            let names: Vec<String> = tensors.keys().filter(|k| which(k)).cloned().collect();
            for name in names {
                taken.insert(name.clone(), tensors.remove(&name).unwrap());
            }
        }
        if let Some(index) = &mut self.index {
            index.retain(|k, _| !taken.contains_key(k));
        }
        taken
    }

    /// Writes everything to a new folder, tokenizer files included.
    pub(crate) fn save(&self) -> TempDir {
        let dir = tempfile::tempdir().unwrap();
        for entry in std::fs::read_dir(&self.source).unwrap() {
            let file = entry.unwrap().file_name().into_string().unwrap();
            if !file.ends_with(".safetensors") && !file.ends_with("index.json") && file != "config.json" {
                std::fs::copy(self.source.join(&file), dir.path().join(&file)).unwrap();
            }
        }
        for (file, tensors) in &self.files {
            let path = dir.path().join(file);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, write_file(tensors)).unwrap();
        }
        if let Some(index) = &self.index {
            let text = json!({"metadata": {}, "weight_map": index}).to_string();
            std::fs::write(dir.path().join("model.safetensors.index.json"), text).unwrap();
        }
        let config = serde_json::to_string(&self.config).unwrap();
        std::fs::write(dir.path().join("config.json"), config).unwrap();
        dir
    }

    /// Saves and opens; the folder lives as long as the first part.
    pub(crate) fn open(&self) -> (TempDir, Result<Checkpoint>) {
        let dir = self.save();
        let opened = Checkpoint::open(dir.path());
        (dir, opened)
    }
}

/// Tensors of a safetensors file.
pub(crate) fn read_file(bytes: &[u8]) -> BTreeMap<String, Tensor> {
    let header = Header::parse(bytes).unwrap();
    let tensor = |t: super::header::TensorInfo| Tensor {
        dtype: t.dtype,
        shape: t.shape,
        data: bytes[t.range].to_vec(),
    };
    header
        .tensors
        .into_iter()
        .map(|(name, t)| (name, tensor(t)))
        .collect()
}

/// A safetensors file of these tensors, in name order.
pub(crate) fn write_file(tensors: &BTreeMap<String, Tensor>) -> Vec<u8> {
    let (mut header, mut data) = (Map::new(), Vec::new());
    for (name, t) in tensors {
        let offsets = [data.len(), data.len() + t.data.len()];
        data.extend_from_slice(&t.data);
        header.insert(
            name.clone(),
            json!({"dtype": dtype_name(t.dtype), "shape": t.shape, "data_offsets": offsets}),
        );
    }
    with_header(&Value::Object(header).to_string(), &data)
}

/// A file with that header text, whatever it says, and that data.
pub(crate) fn with_header(header: &str, data: &[u8]) -> Vec<u8> {
    let mut out = (header.len() as u64).to_le_bytes().to_vec();
    out.extend_from_slice(header.as_bytes());
    out.extend_from_slice(data);
    out
}

/// The plan of an edited checkpoint.
pub(crate) fn plan_edited(edited: &Edited) -> Result<Plan> {
    let (_dir, opened) = edited.open();
    plan(&opened?, PlanOptions::default())
}
