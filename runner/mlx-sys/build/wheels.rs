//! Finds what `scripts/setup` unpacked: MLX itself, and OpenBLAS and libclang where it fetched them. Every path is
//! absolute and watched, so a clone that moved, or a setup that chose another backend, is linked anew.

use std::path::{Path, PathBuf};
use std::{env, fs};

use crate::target::Target;
use crate::Result;

#[derive(Debug)]
pub(crate) struct Wheels {
    /// Holds `mlx/mlx.h`.
    pub(crate) include: PathBuf,
    /// Holds libmlx.
    pub(crate) lib: PathBuf,
    /// Holds `libscipy_openblas.so`; absent where MLX needs no replacement of its BLAS.
    pub(crate) openblas: Option<PathBuf>,
    /// Holds libclang; absent where the system's is to be used.
    pub(crate) libclang: Option<PathBuf>,
}

impl Wheels {
    pub(crate) fn library_dirs(&self) -> impl Iterator<Item = &PathBuf> {
        std::iter::once(&self.lib).chain(&self.openblas)
    }
}

pub(crate) fn find(crate_dir: &Path, target: Target) -> Result<Wheels> {
    println!("cargo::rerun-if-env-changed=MLX_ROOT");
    let store = crate_dir.join("../../.lookahead");
    // The chosen backend, and a marker that appears with a first setup.
    println!("cargo::rerun-if-changed={}", store.join("backend").display());
    let store = fs::canonicalize(&store).ok();

    let root = match env::var_os("MLX_ROOT") {
        Some(root) => fs::canonicalize(&root)
            .map_err(|error| format!("MLX_ROOT names {}: {error}", Path::new(&root).display()))?,
        None => store
            .as_deref()
            .and_then(chosen)
            .ok_or("MLX is not set up in this clone: run scripts/setup (or point MLX_ROOT at a folder with include/ and lib/)")?,
    };
    let (include, lib) = (root.join("include"), root.join("lib"));
    for needed in [include.join("mlx/mlx.h"), lib.join(target.libmlx())] {
        if !needed.is_file() {
            return Err(format!("{} is missing: run scripts/setup again", needed.display()).into());
        }
        println!("cargo::rerun-if-changed={}", needed.display());
    }
    let optional = |folder: &str, file: &str| {
        let folder = store.as_ref()?.join(folder);
        folder.join(file).is_file().then_some(folder)
    };
    let openblas = (target == Target::Linux)
        .then(|| optional("openblas/scipy_openblas32/lib", "libscipy_openblas.so"))
        .flatten();
    let libclang = ["libclang.so", "libclang.dylib"]
        .iter()
        .find_map(|file| optional("libclang/clang/native", file));
    Ok(Wheels {
        include,
        lib,
        openblas,
        libclang,
    })
}

/// The `mlx` folder of the backend that setup recorded.
fn chosen(store: &Path) -> Option<PathBuf> {
    let backend = fs::read_to_string(store.join("backend")).ok()?;
    Some(store.join(format!("mlx-{}", backend.trim())).join("mlx"))
}
