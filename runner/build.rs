//! Gives every executable of this package, tests included, the folders in which MLX and its BLAS lie.
//!
//! They go in as a runpath, which `LD_LIBRARY_PATH` precedes: a binary linked to one backend's library runs on another's.

use std::env;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-env-changed=DEP_MLX_RPATH");
    let dirs = env::var_os("DEP_MLX_RPATH").unwrap_or_default();
    for dir in env::split_paths(&dirs) {
        println!("cargo::rustc-link-arg=-Wl,-rpath,{}", dir.display());
    }
    if env::var("CARGO_CFG_TARGET_OS").as_deref() == Ok("linux") {
        println!("cargo::rustc-link-arg=-Wl,--enable-new-dtags");
        // A GPU backend's library needs others that only the machine with that GPU has.
        println!("cargo::rustc-link-arg=-Wl,--allow-shlib-undefined");
    }
}
