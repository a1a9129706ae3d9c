//! Where the programs are that serve models.
//!
//! Invariant: nothing is searched that the user has named, and what is used is an absolute path wherever one is known.

use std::io;
use std::path::{Path, PathBuf};

/// The name of the MLX runner's executable.
const RUNNER: &str = "lookahead-runner";

/// The executables that the scheduler starts.
#[derive(Debug, Clone)]
pub struct Programs {
    /// Serves checkpoint directories.
    pub runner: PathBuf,
    /// Serves GGUF files, started with the subcommand `gguf`: the scheduler's own executable.
    pub bridge: PathBuf,
}

impl Programs {
    /// The named runner, or else the one beside this executable, or else the one in PATH.
    pub fn find(runner: Option<&Path>) -> io::Result<Self> {
        let bridge = std::env::current_exe()?;
        // Behind a link the runner is looked for beside what the link leads to.
        let home = bridge.canonicalize().unwrap_or_else(|_| bridge.clone());
        let runner = match runner {
            Some(named) => named.to_owned(),
            None => {
                let beside = home.with_file_name(RUNNER);
                if beside.is_file() {
                    beside
                } else {
                    in_path(RUNNER).unwrap_or(beside)
                }
            }
        };
        Ok(Self { runner, bridge })
    }
}

/// An executable file of that name in one of PATH's folders.
pub fn in_path(name: &str) -> Option<PathBuf> {
    let folders = std::env::var_os("PATH")?;
    std::env::split_paths(&folders)
        .map(|folder| folder.join(name))
        .find(|path| is_executable(path))
}

/// Whether the path leads to a file that may be executed.
pub fn is_executable(path: &Path) -> bool {
    use std::os::unix::fs::PermissionsExt;
    path.metadata()
        .is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_named_runner_is_taken_as_it_is() {
        let programs = Programs::find(Some(Path::new("/no/such/runner"))).unwrap();
        assert_eq!(programs.runner, Path::new("/no/such/runner"));
    }

    #[test]
    fn only_executable_files_are_found_in_path() {
        assert!(in_path("sh").is_some_and(|path| path.is_absolute()));
        assert_eq!(in_path("no-such-program-anywhere"), None);
        assert!(!is_executable(Path::new("/")));
    }
}
