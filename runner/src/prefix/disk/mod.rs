//! The disk tier: cached state that survives a restart, shared by the runners of one user.
//!
//! Whatever happens to the directory (a runner killed while writing, two runners at once, damaged or foreign files, a full or
//! read-only medium) costs cache hits and a warning, never a wrong state and never the process. Prompts are private: the
//! directories have mode 0700, the files 0600.

mod fingerprint;
mod index;
mod name;
mod record;
mod scan;
mod store;
mod writer;

use std::ffi::OsString;
use std::path::PathBuf;

pub use fingerprint::{Fingerprint, FingerprintBuilder, FingerprintError};
pub use index::DiskMatch;
pub use name::Name;
pub use record::Tensor;
pub use store::{DiskConfig, DiskFigures, DiskStore, Put};

/// What went wrong with the disk tier. Never fatal to a request.
#[derive(Debug, thiserror::Error)]
pub enum DiskError {
    /// The file system refused.
    #[error("prefix cache: {path}: {source}", path = path.display())]
    Io {
        /// The file or directory.
        path: PathBuf,
        /// Its words.
        source: std::io::Error,
    },
    /// An entry isn't what its name says: cut short, changed, or of another format. It is ignored and goes with the next
    /// eviction.
    #[error("prefix cache: entry {name} is damaged: {reason}")]
    Malformed {
        /// The entry.
        name: String,
        /// What doesn't hold.
        reason: String,
    },
    /// An entry belongs to another model. It is ignored and goes with the next eviction.
    #[error("prefix cache: entry {name} belongs to another model ({fingerprint})")]
    Foreign {
        /// The entry.
        name: String,
        /// The fingerprint that it carries.
        fingerprint: String,
    },
    /// Writing failed; the tier only reads from now on, until it is cleared.
    #[error("prefix cache: nothing is written to disk any more: {0}")]
    WritesOff(Box<DiskError>),
    /// The writer thread couldn't be started.
    #[error("prefix cache: writer thread: {0}")]
    Thread(std::io::Error),
}

/// The cache directory where none is given: `lookahead` under `$XDG_CACHE_HOME` (where absolute, as the XDG Base Directory
/// Specification demands) or else under `$HOME/.cache`; none if neither is set.
pub fn default_directory(variable: impl Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    let absolute = |name: &str| {
        variable(name)
            .map(PathBuf::from)
            .filter(|path| path.is_absolute())
    };
    let base = absolute("XDG_CACHE_HOME").or_else(|| absolute("HOME").map(|home| home.join(".cache")))?;
    Some(base.join("lookahead"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_directory_follows_xdg() {
        let with = |xdg: &'static str, home: &'static str| {
            default_directory(move |name| {
                let value = if name == "HOME" { home } else { xdg };
                (!value.is_empty()).then(|| value.into())
            })
        };
        assert_eq!(with("/x", "/h"), Some(PathBuf::from("/x/lookahead")));
        assert_eq!(with("", "/h"), Some(PathBuf::from("/h/.cache/lookahead")));
        assert_eq!(with("relative", "/h"), Some(PathBuf::from("/h/.cache/lookahead")));
        assert_eq!(with("", ""), None);
    }
}
