//! Compiles the C++ side into archives: mlx-c with this crate's additions, and, on Linux, the BLAS entry points that take the
//! place of the wheel's and a faster hash in place of the C++ library's. libmlx itself stays a shared library, so that
//! another backend's can be put before it at run time.

use std::path::Path;
use std::{env, fs};

use cc::Build;

use crate::target::Target;
use crate::wheels::Wheels;
use crate::Result;

pub(crate) fn compile(crate_dir: &Path, mlx_c: &Path, wheels: &Wheels, target: Target) -> Result<()> {
    let native = crate_dir.join("native");
    let mut build = cpp();
    build
        .include(mlx_c)
        .include(&native)
        .flag("-isystem")
        .flag(&wheels.include);
    build.flag("-include").flag(native.join("format.h"));
    for entry in fs::read_dir(mlx_c.join("mlx/c"))? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "cpp") {
            build.file(path);
        }
    }
    build
        .file(native.join("cpu_op.cpp"))
        .file(native.join("cuda_op.cpp"))
        .file(native.join("written.cpp"));
    if target == Target::Linux {
        // Leaves out mlx-c's half-float section, which depends on the processor; half.cpp fills in for all of them.
        build.define("MLX_HALF_H", None);
        build.file(native.join("half.cpp")).file(native.join("clock.cpp"));
    }
    build.try_compile("mlxc")?;

    println!("cargo::rustc-check-cfg=cfg(openblas)");
    println!("cargo::rustc-link-search=native={}", wheels.lib.display());
    println!("cargo::rustc-link-lib=dylib=mlx");
    if target == Target::Linux {
        override_with(&native, "hash")?;
    }
    match (&wheels.openblas, target) {
        (Some(openblas), _) => {
            override_with(&native, "blas")?;
            println!("cargo::rustc-cfg=openblas");
            println!("cargo::rustc-link-search=native={}", openblas.display());
            println!("cargo::rustc-link-lib=dylib=scipy_openblas");
        }
        (None, Target::Mac) => println!("cargo::rustc-link-lib=framework=Accelerate"),
        (None, Target::Linux) => {}
    }
    Ok(())
}

/// An archive of `part`, whose functions take the place of a shared library's.
///
/// Whole, because nothing but libmlx refers to these symbols and an archive is searched for the executable's needs only.
/// Linkers export an executable's definition of what a shared library on the command line misses. Not bundled into the Rust
/// library, because a compiler cache does not see such an archive and hands out an old one.
fn override_with(native: &Path, part: &str) -> Result<()> {
    cpp()
        .cargo_metadata(false)
        .file(native.join(format!("{part}.cpp")))
        .try_compile(&format!("lookahead_{part}"))?;
    println!("cargo::rustc-link-search=native={}", env::var("OUT_DIR")?);
    println!("cargo::rustc-link-lib=static:-bundle,+whole-archive=lookahead_{part}");
    Ok(())
}

fn cpp() -> Build {
    let mut build = Build::new();
    // Always optimised: a debug build of the Rust side runs real models too.
    build
        .cpp(true)
        .std("c++20")
        .pic(true)
        .opt_level(2)
        .debug(false)
        .warnings(false);
    build
}
