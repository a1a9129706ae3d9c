//! CUDA's runtime compiler, and what it has compiled, kept between runs.
//!
//! Invariant: a kept image is used only if its file holds exactly what was written for this text, architecture and compiler;
//! anything else is compiled again. The compiler is the one that MLX itself has loaded, so none is required beside it.

use std::ffi::{c_char, c_int, c_void, CStr, CString};
use std::fs;
use std::path::{Path, PathBuf};

use xxhash_rust::xxh3::xxh3_128;

/// Kept files; beyond this many the older half goes. A model has about twenty kernels.
const MOST_FILES: usize = 512;

type Program = *mut c_void;

type Version = unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int;
type Strings = *const *const c_char;
type Create =
    unsafe extern "C" fn(*mut Program, *const c_char, *const c_char, c_int, Strings, Strings) -> c_int;
type Compile = unsafe extern "C" fn(Program, c_int, Strings) -> c_int;
type SizeOf = unsafe extern "C" fn(Program, *mut usize) -> c_int;
type Copy = unsafe extern "C" fn(Program, *mut c_char) -> c_int;
type Destroy = unsafe extern "C" fn(*mut Program) -> c_int;
type Device = unsafe extern "C" fn(*mut c_int, c_int) -> c_int;
type Attribute = unsafe extern "C" fn(*mut c_int, c_int, c_int) -> c_int;

/// Functions of NVRTC and of the driver. Source: CUDA Toolkit documentation, "NVRTC" and "CUDA Driver API".
struct Library {
    version: Version,
    create: Create,
    compile: Compile,
    log_size: SizeOf,
    log: Copy,
    image_size: SizeOf,
    image: Copy,
    destroy: Destroy,
    device: Device,
    attribute: Attribute,
}

/// Finds a function among the libraries that the process has loaded.
fn symbol(name: &CStr) -> Option<*mut c_void> {
    // SAFETY: looks a name up; nothing is loaded or run.
    let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
    (!found.is_null()).then_some(found)
}

impl Library {
    fn find() -> Option<Self> {
        macro_rules! function {
            ($name:literal, $type:ty) => {{
                let found = symbol($name)?;
                // SAFETY: the function of this name has this type, by the documentation.
                unsafe { std::mem::transmute::<*mut c_void, $type>(found) }
            }};
        }
        Some(Self {
            version: function!(c"nvrtcVersion", Version),
            create: function!(c"nvrtcCreateProgram", Create),
            compile: function!(c"nvrtcCompileProgram", Compile),
            log_size: function!(c"nvrtcGetProgramLogSize", SizeOf),
            log: function!(c"nvrtcGetProgramLog", Copy),
            image_size: function!(c"nvrtcGetCUBINSize", SizeOf),
            image: function!(c"nvrtcGetCUBIN", Copy),
            destroy: function!(c"nvrtcDestroyProgram", Destroy),
            device: function!(c"cuDeviceGet", Device),
            attribute: function!(c"cuDeviceGetAttribute", Attribute),
        })
    }

    /// The first device's compute capability, which is what MLX computes on.
    fn capability(&self) -> Option<(c_int, c_int)> {
        const MAJOR: c_int = 75;
        const MINOR: c_int = 76;
        let (mut device, mut major, mut minor) = (0, 0, 0);
        // SAFETY: each call writes the integer that it is given.
        let status = unsafe {
            [
                (self.device)(&mut device, 0),
                (self.attribute)(&mut major, MAJOR, device),
                (self.attribute)(&mut minor, MINOR, device),
            ]
        };
        (status == [0; 3]).then_some((major, minor))
    }
}

/// See the module's text.
pub(super) struct Compiler {
    library: Library,
    architecture: String,
    version: (c_int, c_int),
    directory: Option<PathBuf>,
}

impl std::fmt::Debug for Compiler {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Compiler")
            .field("architecture", &self.architecture)
            .field("version", &self.version)
            .field("directory", &self.directory)
            .finish_non_exhaustive()
    }
}

impl Compiler {
    /// The compiler in the process, for its first device; images are kept in `directory`. `None` where CUDA isn't loaded.
    pub(super) fn find(directory: Option<&Path>) -> Option<Self> {
        let library = Library::find()?;
        let (major, minor) = library.capability()?;
        let mut version = (0, 0);
        // SAFETY: the call writes both integers.
        let status = unsafe { (library.version)(&mut version.0, &mut version.1) };
        (status == 0).then(|| Self {
            library,
            architecture: format!("--gpu-architecture=sm_{major}{minor}"),
            version,
            directory: directory.map(Path::to_path_buf),
        })
    }

    /// The image of a program, from the last time or compiled now; the compiler's log if it doesn't compile.
    pub(super) fn image(&self, source: &str) -> Result<Vec<u8>, String> {
        let Some(directory) = &self.directory else {
            return self.compile(source);
        };
        let (Self { architecture, .. }, version) = (self, self.version);
        let key = xxh3_128(format!("{architecture} {version:?}\n{source}").as_bytes());
        let path = directory.join(format!("{key:032x}.cubin"));
        if let Some(image) = read(&path) {
            return Ok(image);
        }
        let image = self.compile(source)?;
        if let Err(error) = keep(directory, &path, &image) {
            tracing::debug!("{}: a compiled kernel isn't kept: {error}", path.display());
        }
        Ok(image)
    }

    fn compile(&self, source: &str) -> Result<Vec<u8>, String> {
        let text = CString::new(source).map_err(|_| "the text holds a NUL".to_owned())?;
        let options = [&*self.architecture, "--std=c++17"].map(CString::new);
        let [Ok(architecture), Ok(standard)] = options else {
            return Err("an option holds a NUL".to_owned());
        };
        let options = [architecture.as_ptr(), standard.as_ptr()];
        let Library {
            create,
            compile,
            log_size,
            log,
            image_size,
            image,
            destroy,
            ..
        } = self.library;
        let mut program: Program = std::ptr::null_mut();
        // SAFETY: all strings are NUL-terminated and live for the calls; buffers have the sizes that the library has told;
        // the program is destroyed once, after its last use.
        unsafe {
            let none = std::ptr::null();
            let status = create(&mut program, text.as_ptr(), c"kernel.cu".as_ptr(), 0, none, none);
            if status != 0 {
                return Err(format!("NVRTC made no program: status {status}"));
            }
            let status = compile(program, options.len() as c_int, options.as_ptr());
            let mut size = 0;
            let result = if status == 0 && image_size(program, &mut size) == 0 {
                let mut bytes = vec![0u8; size];
                match image(program, bytes.as_mut_ptr().cast()) {
                    0 => Ok(bytes),
                    status => Err(format!("NVRTC gave no image: status {status}")),
                }
            } else {
                let mut bytes = vec![
                    0u8;
                    if log_size(program, &mut size) == 0 {
                        size
                    } else {
                        0
                    }
                ];
                log(program, bytes.as_mut_ptr().cast());
                let text = String::from_utf8_lossy(&bytes);
                Err(format!(
                    "NVRTC status {status}: {}",
                    text.trim_matches(['\0', '\n'])
                ))
            };
            destroy(&mut program);
            result
        }
    }
}

/// An image from a file that is whole: its hash stands behind it.
fn read(path: &Path) -> Option<Vec<u8>> {
    let mut bytes = fs::read(path).ok()?;
    let hash = bytes.split_off(bytes.len().checked_sub(16)?);
    (!bytes.is_empty() && hash == xxh3_128(&bytes).to_le_bytes()).then_some(bytes)
}

/// Writes an image so that readers see all of it or nothing.
fn keep(directory: &Path, path: &Path, image: &[u8]) -> std::io::Result<()> {
    fs::create_dir_all(directory)?;
    thin_out(directory)?;
    let mut bytes = image.to_vec();
    bytes.extend(xxh3_128(image).to_le_bytes());
    let temporary = path.with_extension(format!("{}.part", std::process::id()));
    let written = fs::write(&temporary, bytes).and_then(|()| fs::rename(&temporary, path));
    if written.is_err() {
        let _ = fs::remove_file(&temporary);
    }
    written
}

/// Removes the older half once there are too many files.
fn thin_out(directory: &Path) -> std::io::Result<()> {
    let mut files: Vec<_> = fs::read_dir(directory)?
        .filter_map(|entry| {
            let entry = entry.ok()?;
            Some((entry.metadata().ok()?.modified().ok()?, entry.path()))
        })
        .collect();
    if files.len() >= MOST_FILES {
        files.sort();
        for (_, path) in &files[..files.len() / 2] {
            fs::remove_file(path)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kept_image_comes_back_and_a_damaged_one_does_not() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("deep/one.cubin");
        keep(path.parent().unwrap(), &path, b"image").unwrap();
        assert_eq!(read(&path).unwrap(), b"image");
        for damaged in [&b"imagf"[..], b"", b"0123456789abcdef", b"short"] {
            fs::write(&path, damaged).unwrap();
            assert_eq!(read(&path), None);
        }
        keep(path.parent().unwrap(), &path, b"again").unwrap();
        let mut bytes = fs::read(&path).unwrap();
        bytes[0] ^= 1;
        fs::write(&path, bytes).unwrap();
        assert_eq!(read(&path), None);
    }

    #[test]
    fn kept_images_do_not_grow_without_end() {
        let directory = tempfile::tempdir().unwrap();
        for index in 0..MOST_FILES {
            fs::write(directory.path().join(format!("{index}.cubin")), b"x").unwrap();
        }
        keep(directory.path(), &directory.path().join("new.cubin"), b"image").unwrap();
        let left = fs::read_dir(directory.path()).unwrap().count();
        assert_eq!(left, MOST_FILES / 2 + 1);
        assert!(directory.path().join("new.cubin").exists());
    }
}
