//! Generates the Rust declarations of mlx-c and of this crate's own C functions.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

use crate::target::Target;
use crate::wheels::Wheels;
use crate::Result;

pub(crate) fn generate(
    crate_dir: &Path,
    mlx_c: &Path,
    wheels: &Wheels,
    target: Target,
    out_dir: &Path,
) -> Result<()> {
    println!("cargo::rerun-if-env-changed=LIBCLANG_PATH");
    if let (Some(libclang), None) = (&wheels.libclang, env::var_os("LIBCLANG_PATH")) {
        env::set_var("LIBCLANG_PATH", libclang);
    }
    let mut builder = bindgen::Builder::default()
        .rust_target(bindgen::RustTarget::stable(82, 0).map_err(|error| error.to_string())?)
        .clang_arg(format!("-I{}", mlx_c.display()))
        // Their bindgen signatures differ from the ones the compiler knows.
        .blocklist_function("malloc")
        .blocklist_function("realloc");
    if target == Target::Linux {
        builder = builder.clang_arg("-DMLX_HALF_H");
        // A libclang from a wheel comes without stddef.h and its kin; the C compiler's do as well.
        if let Some(dir) = compiler_headers() {
            builder = builder.clang_arg("-isystem").clang_arg(dir.display().to_string());
        }
    }
    for header in headers(mlx_c)? {
        builder = builder.header(header.to_string_lossy());
    }
    builder
        .header(crate_dir.join("native/cpu_op.h").to_string_lossy())
        .header(crate_dir.join("native/cuda_op.h").to_string_lossy())
        .header(crate_dir.join("native/written.h").to_string_lossy())
        .generate()?
        .write_to_file(out_dir.join("bindings.rs"))?;
    Ok(())
}

fn headers(mlx_c: &Path) -> Result<Vec<PathBuf>> {
    let mut headers = Vec::new();
    for entry in fs::read_dir(mlx_c.join("mlx/c"))? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "h") {
            headers.push(path);
        }
    }
    headers.sort();
    Ok(headers)
}

fn compiler_headers() -> Option<PathBuf> {
    let compiler = cc::Build::new().cargo_metadata(false).try_get_compiler().ok()?;
    let output = Command::new(compiler.path())
        .arg("-print-file-name=include")
        .output()
        .ok()?;
    let dir = PathBuf::from(String::from_utf8(output.stdout).ok()?.trim());
    dir.join("stddef.h").is_file().then_some(dir)
}
