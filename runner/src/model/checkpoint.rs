//! A checkpoint's files, memory-mapped, as one set of tensors under canonical names.
//!
//! Invariant: every [`TensorView`] points at bytes that a checked header vouches for; a tensor that two files hold is taken
//! from the file that the index names, else from the first in name order, and the other is reported.
//!
//! Weights are mapped, not read: a file that another process truncates while it is mapped ends this process with SIGBUS,
//! which no check made here can prevent. Hosts should replace model directories, never rewrite files in place.

use std::collections::BTreeMap;
use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};

use memmap2::Mmap;
use safetensors::Dtype;

use super::config::ModelConfig;
use super::error::{LoadError, Result};
use super::files::{self, Listing, Role};
use super::header::{Header, TensorInfo};
use super::names;

/// One tensor's description and bytes.
#[derive(Debug, Clone, Copy)]
pub struct TensorView<'a> {
    /// Canonical name.
    pub name: &'a str,
    /// Its name in the file.
    pub original: &'a str,
    /// Storage type.
    pub dtype: Dtype,
    /// Shape; empty for a scalar.
    pub shape: &'a [usize],
    /// Its bytes, little-endian, row-major. Not necessarily aligned for its type.
    pub data: &'a [u8],
    /// The file, relative to the checkpoint.
    pub file: &'a str,
}

impl TensorView<'_> {
    /// The error of a tensor whose shape doesn't fit.
    pub fn wrong_shape(&self, wanted: impl Into<String>) -> LoadError {
        LoadError::WrongShape {
            tensor: self.original.to_owned(),
            file: self.file.to_owned(),
            found: self.shape.to_vec(),
            wanted: wanted.into(),
        }
    }

    /// The error of a tensor whose type doesn't fit.
    pub fn wrong_dtype(&self, wanted: &'static str) -> LoadError {
        LoadError::WrongDtype {
            tensor: self.original.to_owned(),
            file: self.file.to_owned(),
            found: dtype_name(self.dtype),
            wanted,
        }
    }
}

/// A storage type's name in the format ("BF16").
pub fn dtype_name(dtype: Dtype) -> String {
    serde_json::to_value(dtype)
        .ok()
        .and_then(|v| v.as_str().map(str::to_owned))
        .unwrap_or_default()
}

#[derive(Debug)]
struct MappedFile {
    /// Relative to the checkpoint.
    name: String,
    map: Mmap,
}

#[derive(Debug)]
struct Entry {
    file: usize,
    original: String,
    info: TensorInfo,
}

/// A checkpoint whose config and headers have been checked; no tensor data has been read.
#[derive(Debug)]
pub struct Checkpoint {
    dir: PathBuf,
    config: ModelConfig,
    files: Vec<MappedFile>,
    tensors: BTreeMap<String, Entry>,
    warnings: Vec<String>,
}

impl Checkpoint {
    /// Opens the model directory `dir`.
    ///
    /// # Errors
    /// Every way in which the directory, its config, its index or a file's header can be wrong; see [`LoadError`].
    pub fn open(dir: &Path) -> Result<Self> {
        match std::fs::metadata(dir) {
            Ok(meta) if meta.is_dir() => {}
            Ok(_) => return Err(LoadError::NotADirectory(dir.to_owned())),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
                return Err(LoadError::NotFound(dir.to_owned()))
            }
            Err(source) => {
                return Err(LoadError::Io {
                    path: dir.to_owned(),
                    source,
                })
            }
        }
        let config = ModelConfig::read(dir)?;
        let listing = files::list(dir, &config.raw)?;
        let mut checkpoint = Self {
            dir: dir.to_owned(),
            config,
            files: Vec::new(),
            tensors: BTreeMap::new(),
            warnings: listing.warnings.clone(),
        };
        for (file, role) in &listing.files {
            checkpoint.add(file, *role, &listing)?;
        }
        checkpoint.check_index(&listing)?;
        Ok(checkpoint)
    }

    fn add(&mut self, file: &str, role: Role, listing: &Listing) -> Result<()> {
        let path = self.dir.join(file);
        let io = |source| LoadError::Io {
            path: path.clone(),
            source,
        };
        let handle = File::open(&path).map_err(io)?;
        // SAFETY: the mapping is private and read-only; that nobody truncates the file while it is mapped is the caller's
        // promise, stated in the module's documentation.
        let map = unsafe { Mmap::map(&handle) }.map_err(io)?;
        let header = Header::parse(&map).map_err(|fault| LoadError::Header {
            file: file.to_owned(),
            fault: Box::new(fault),
        })?;
        let bare = names::is_bare_head(header.tensors.keys().map(String::as_str));
        let entries: Vec<(String, String, TensorInfo)> = header
            .tensors
            .into_iter()
            .map(|(original, info)| {
                let name = if bare {
                    names::canonical_in_bare_head(&original)
                } else {
                    names::canonical(&original)
                };
                (name, original, info)
            })
            .collect();
        if role == Role::Extra && !entries.iter().any(|(name, ..)| names::is_known(name)) {
            self.warnings.push(format!(
                "{file} ignored: none of its {} tensors belongs to a model",
                entries.len()
            ));
            return Ok(());
        }
        let index = self.files.len();
        let (mut added, mut duplicates) = (0, Vec::new());
        for (name, original, info) in entries {
            let elsewhere = listing.place(&original).is_some_and(|place| place != file);
            let taken = self.tensors.contains_key(&name);
            // What the index places in another file is left to that file, whichever of the two comes first.
            if taken || (elsewhere && listing.is_present(&original)) {
                duplicates.push(original);
            } else {
                self.tensors.insert(
                    name,
                    Entry {
                        file: index,
                        original,
                        info,
                    },
                );
                added += 1;
            }
        }
        if !duplicates.is_empty() {
            let (n, one) = (duplicates.len(), &duplicates[0]);
            let rest = if added == 0 { "; the file is not used" } else { "" };
            self.warnings.push(format!(
                "{file}: {n} tensors ignored that another file holds, {one} for one{rest}"
            ));
        }
        self.files.push(MappedFile {
            name: file.to_owned(),
            map,
        });
        Ok(())
    }

    /// That every tensor of the index was found somewhere.
    fn check_index(&self, listing: &Listing) -> Result<()> {
        let mut absent = listing.placed().filter(|(tensor, _)| {
            !self.tensors.contains_key(&names::canonical(tensor))
                && !self.tensors.contains_key(&names::canonical_in_bare_head(tensor))
        });
        match absent.next() {
            None => Ok(()),
            Some((tensor, file)) => Err(LoadError::IndexedTensorAbsent {
                index: listing.index.clone().unwrap_or_default(),
                tensor: tensor.to_owned(),
                file: file.to_owned(),
                count: 1 + absent.count(),
            }),
        }
    }

    /// The directory.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The checked config.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// What is odd but harmless, for the log.
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }

    /// The tensor of that canonical name.
    pub fn tensor(&self, name: &str) -> Option<TensorView<'_>> {
        let (name, entry) = self.tensors.get_key_value(name)?;
        Some(self.view(name, entry))
    }

    /// The tensor of that canonical name, or the error that names it.
    pub fn need(&self, name: &str) -> Result<TensorView<'_>> {
        self.tensor(name).ok_or_else(|| LoadError::MissingTensors {
            names: vec![name.to_owned()],
        })
    }

    /// Whether there is such a tensor.
    pub fn has(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// Every tensor, by canonical name.
    pub fn tensors(&self) -> impl Iterator<Item = TensorView<'_>> {
        self.tensors.iter().map(|(name, entry)| self.view(name, entry))
    }

    /// Tensors whose canonical name starts with `prefix`.
    pub fn under<'a>(&'a self, prefix: &'a str) -> impl Iterator<Item = TensorView<'a>> {
        self.tensors
            .range(prefix.to_owned()..)
            .take_while(move |(name, _)| name.starts_with(prefix))
            .map(|(name, entry)| self.view(name, entry))
    }

    /// Bytes of all tensors.
    pub fn total_bytes(&self) -> u64 {
        self.tensors.values().map(|e| e.info.range.len() as u64).sum()
    }

    /// Files used: name and length.
    pub fn files(&self) -> impl Iterator<Item = (&str, u64)> {
        self.files.iter().map(|f| (f.name.as_str(), f.map.len() as u64))
    }

    fn view<'a>(&'a self, name: &'a str, entry: &'a Entry) -> TensorView<'a> {
        let file = &self.files[entry.file];
        let range: Range<usize> = entry.info.range.clone();
        TensorView {
            name,
            original: &entry.original,
            dtype: entry.info.dtype,
            shape: &entry.info.shape,
            data: &file.map[range],
            file: &file.name,
        }
    }
}

#[cfg(test)]
#[path = "checkpoint_tests.rs"]
mod tests;
