//! From the `model` of a request to the thing on disk that serves it.
//!
//! Invariant: two ways of writing the same model (a configured name, a path to the same place, a path through a link)
//! lead to the same key, and so to one process.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use crate::config::Settings;

/// What serves a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A checkpoint directory, served by the MLX runner.
    Mlx,
    /// A GGUF file, served through llama-server.
    Gguf,
}

/// A model that can be started.
#[derive(Debug, Clone)]
pub struct Spec {
    /// One key per model: the configured name, else the canonical path.
    pub key: String,
    /// Where it lies.
    pub path: PathBuf,
    /// What serves it.
    pub kind: Kind,
    /// Further arguments for the serving program.
    pub args: Vec<OsString>,
    /// Environment variables for the serving program.
    pub env: BTreeMap<String, String>,
    /// Seconds until an idle unload, where the configuration says so.
    pub keep_alive: Option<i64>,
    /// Bytes, where the configuration says so.
    pub memory: Option<u64>,
}

/// Why a name leads to no model.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LookupError {
    /// Neither a configured name nor a path.
    #[error("no model {name:?}: it is neither a configured name nor a checkpoint directory or GGUF file")]
    Unknown {
        /// As the host wrote it.
        name: String,
    },
    /// A path at which there is nothing.
    #[error("model {path:?} not found: {reason}")]
    Missing {
        /// As the host wrote it.
        path: String,
        /// The system's reason.
        reason: String,
    },
}

/// Finds the model that `name` means.
pub fn find(settings: &Settings, name: &str) -> Result<Spec, LookupError> {
    if let Some(model) = settings.models.get(name) {
        return Ok(Spec {
            key: name.to_owned(),
            path: model.path.clone(),
            kind: kind_of(&model.path),
            args: model.args.iter().map(OsString::from).collect(),
            env: model.env.clone(),
            keep_alive: model.keep_alive,
            memory: model.memory.map(|size| size.0),
        });
    }
    let path = Path::new(name);
    let canonical = match path.canonicalize() {
        Ok(canonical) if !name.is_empty() => canonical,
        Ok(_) => {
            return Err(LookupError::Unknown {
                name: name.to_owned(),
            })
        }
        Err(_) if !looks_like_a_path(name) => {
            return Err(LookupError::Unknown {
                name: name.to_owned(),
            })
        }
        Err(error) => {
            return Err(LookupError::Missing {
                path: name.to_owned(),
                reason: error.to_string(),
            })
        }
    };
    let configured = settings
        .models
        .iter()
        .find(|(_, model)| model.path.canonicalize().is_ok_and(|it| it == canonical));
    if let Some((configured, _)) = configured {
        return find(settings, configured);
    }
    Ok(Spec {
        key: canonical.to_string_lossy().into_owned(),
        kind: kind_of(&canonical),
        path: canonical,
        args: Vec::new(),
        env: BTreeMap::new(),
        keep_alive: None,
        memory: None,
    })
}

fn looks_like_a_path(name: &str) -> bool {
    name.contains(std::path::MAIN_SEPARATOR) || name.starts_with('.') || name.ends_with(".gguf")
}

/// A file is a GGUF, by its name or its first bytes; everything else is left to the runner, whose errors name what is wrong.
fn kind_of(path: &Path) -> Kind {
    if path
        .extension()
        .is_some_and(|extension| extension.eq_ignore_ascii_case("gguf"))
    {
        return Kind::Gguf;
    }
    let mut magic = [0_u8; 4];
    let read = path
        .is_file()
        .then(|| File::open(path).and_then(|mut file| file.read_exact(&mut magic)));
    if matches!(read, Some(Ok(()))) && &magic == b"GGUF" {
        return Kind::Gguf;
    }
    Kind::Mlx
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::ModelConfig;

    fn settings(folder: &Path) -> Settings {
        let mut settings = Settings::default();
        let model = ModelConfig {
            path: folder.join("a"),
            args: vec!["--x".to_owned()],
            ..ModelConfig::default()
        };
        settings.models.insert("named".to_owned(), model);
        settings
    }

    #[test]
    fn a_name_its_path_and_a_link_to_it_are_one_model() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join("a")).unwrap();
        std::os::unix::fs::symlink(folder.path().join("a"), folder.path().join("link")).unwrap();
        let settings = settings(folder.path());
        for name in [
            "named",
            folder.path().join("a").to_str().unwrap(),
            folder.path().join("link").to_str().unwrap(),
        ] {
            let spec = find(&settings, name).unwrap();
            assert_eq!(
                (spec.key.as_str(), spec.args.len(), spec.kind),
                ("named", 1, Kind::Mlx)
            );
        }
    }

    #[test]
    fn what_leads_nowhere_is_told_apart() {
        let folder = tempfile::tempdir().unwrap();
        let settings = settings(folder.path());
        assert!(matches!(
            find(&settings, "qwen"),
            Err(LookupError::Unknown { .. })
        ));
        assert!(matches!(find(&settings, ""), Err(LookupError::Unknown { .. })));
        assert!(matches!(
            find(&settings, "/no/such/model"),
            Err(LookupError::Missing { .. })
        ));
        assert!(matches!(
            find(&settings, "no-such.gguf"),
            Err(LookupError::Missing { .. })
        ));
    }

    #[test]
    fn gguf_files_are_known_by_name_or_first_bytes() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("m.GGUF"), b"").unwrap();
        std::fs::write(folder.path().join("blob"), b"GGUF\x03\0\0\0").unwrap();
        std::fs::write(folder.path().join("text"), b"hello").unwrap();
        let kind = |name: &str| {
            find(&Settings::default(), folder.path().join(name).to_str().unwrap())
                .unwrap()
                .kind
        };
        assert_eq!(
            (kind("m.GGUF"), kind("blob"), kind("text")),
            (Kind::Gguf, Kind::Gguf, Kind::Mlx)
        );
    }
}
