//! Builds mlx-c against an MLX that is already compiled, and generates the bindings to it. Downloads no native code:
//! the mlx-c sources come with the published mlx-sys, MLX comes with a wheel that `scripts/setup` unpacked.

use std::error::Error;
use std::path::{Path, PathBuf};
use std::{env, fs, process};

#[path = "build/bindings.rs"]
mod bindings;
#[path = "build/native.rs"]
mod native;
#[path = "build/target.rs"]
mod target;
#[path = "build/upstream.rs"]
mod upstream;
#[path = "build/wheels.rs"]
mod wheels;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

fn main() {
    if let Err(error) = build() {
        println!("cargo::error={error}");
        process::exit(1);
    }
}

fn build() -> Result<()> {
    for path in ["build.rs", "build", "native", "upstream"] {
        println!("cargo::rerun-if-changed={path}");
    }
    let crate_dir = PathBuf::from(env::var("CARGO_MANIFEST_DIR")?);
    let out_dir = PathBuf::from(env::var("OUT_DIR")?);
    let target = target::Target::current()?;
    let mlx_c = upstream::mlx_c(&crate_dir)?;
    let wheels = wheels::find(&crate_dir, target)?;

    native::compile(&crate_dir, &mlx_c, &wheels, target)?;
    bindings::generate(&crate_dir, &mlx_c, &wheels, target, &out_dir)?;
    publish(&mlx_c, &wheels)
}

/// Tells dependents' build scripts, as `DEP_MLX_*`, what they need for an rpath and for C++ of their own.
fn publish(mlx_c: &Path, wheels: &wheels::Wheels) -> Result<()> {
    let rpath = env::join_paths(wheels.library_dirs())?;
    let include = env::join_paths([&wheels.include, mlx_c])?;
    println!("cargo::metadata=rpath={}", rpath.display());
    println!("cargo::metadata=include={}", include.display());
    println!("cargo::metadata=version={}", mlx_version(mlx_c)?);
    // The rpath of this crate's own tests; a link argument reaches no other package.
    for dir in wheels.library_dirs() {
        println!("cargo::rustc-link-arg=-Wl,-rpath,{}", dir.display());
    }
    Ok(())
}

/// The MLX release that these mlx-c sources are written for, for example `0.32.2`.
fn mlx_version(mlx_c: &Path) -> Result<String> {
    let lists = mlx_c.join("CMakeLists.txt");
    fs::read_to_string(&lists)?
        .split_whitespace()
        .skip_while(|word| *word != "GIT_TAG")
        .nth(1)
        .and_then(|tag| tag.trim_end_matches(')').strip_prefix('v'))
        .map(str::to_owned)
        .ok_or_else(|| format!("{} names no MLX version", lists.display()).into())
}
