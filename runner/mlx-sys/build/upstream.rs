//! Locates the mlx-c sources inside the published mlx-sys. The lock file in `upstream/` fixes version and checksum,
//! and Cargo fetches and verifies the package; nothing of it is copied into this repository.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use crate::Result;

pub(crate) fn mlx_c(crate_dir: &Path) -> Result<PathBuf> {
    let manifest = crate_dir.join("upstream/Cargo.toml");
    let output = Command::new(env::var("CARGO")?)
        .args(["metadata", "--locked", "--format-version", "1", "--manifest-path"])
        .arg(&manifest)
        // Settings of the build in progress are not meant for this one.
        .env_remove("RUSTC_WORKSPACE_WRAPPER")
        .env_remove("CARGO_ENCODED_RUSTFLAGS")
        .output()?;
    if !output.status.success() {
        let stderr = String::from_utf8_lossy(&output.stderr).trim().replace('\n', " ");
        return Err(format!("the published mlx-sys could not be located: {stderr}").into());
    }
    let metadata: Value = serde_json::from_slice(&output.stdout)?;
    let sources = metadata["packages"]
        .as_array()
        .into_iter()
        .flatten()
        .find(|package| package["name"] == "mlx-sys")
        .and_then(|package| Path::new(package["manifest_path"].as_str()?).parent())
        .map(|package| package.join("src/mlx-c"))
        .ok_or_else(|| format!("{} does not name mlx-sys", manifest.display()))?;
    if !sources.join("mlx/c/mlx.h").is_file() {
        return Err(format!("{} holds no mlx-c sources", sources.display()).into());
    }
    Ok(sources)
}
