//! What the tests of this folder share: the fixture model's tokenizer, and variants of it.

use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use serde_json::Value;

use super::Tokenizer;

pub(crate) fn fixture_dir() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../fixtures/models/tiny-qwen3.5-mtp")
}

/// The trained fixture model's tokenizer, loaded once for all tests.
pub(crate) fn tiny() -> Arc<Tokenizer> {
    static TINY: OnceLock<Arc<Tokenizer>> = OnceLock::new();
    Arc::clone(TINY.get_or_init(|| Arc::new(Tokenizer::load(&fixture_dir()).unwrap())))
}

pub(crate) fn golden() -> Value {
    let path = fixture_dir().join("../tiny-qwen3.5-mtp.golden.json");
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

/// Writes the fixture's `tokenizer.json`, changed, and the given `tokenizer_config.json` (or none) into `dir`.
pub(crate) fn write_tokenizer(dir: &Path, change: impl FnOnce(&mut Value), config: Option<Value>) {
    let bytes = std::fs::read(fixture_dir().join("tokenizer.json")).unwrap();
    let mut json: Value = serde_json::from_slice(&bytes).unwrap();
    change(&mut json);
    std::fs::write(dir.join("tokenizer.json"), json.to_string()).unwrap();
    let path = dir.join("tokenizer_config.json");
    match config {
        Some(config) => std::fs::write(path, config.to_string()).unwrap(),
        None => drop(std::fs::remove_file(path)),
    }
}
