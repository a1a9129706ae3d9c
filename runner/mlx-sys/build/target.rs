//! The platform being built for, reduced to what the build decides on.

use std::env;

use crate::Result;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Target {
    Linux,
    Mac,
}

impl Target {
    pub(crate) fn current() -> Result<Self> {
        match env::var("CARGO_CFG_TARGET_OS")?.as_str() {
            "linux" => Ok(Self::Linux),
            "macos" => Ok(Self::Mac),
            other => Err(format!("MLX has no published library for {other}; build on Linux or macOS").into()),
        }
    }

    pub(crate) fn libmlx(self) -> &'static str {
        match self {
            Self::Linux => "libmlx.so",
            Self::Mac => "libmlx.dylib",
        }
    }
}
