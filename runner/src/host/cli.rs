//! The runner's command line.
//!
//! Invariant: a bad command line exits with status 2 before anything is written to stdout.

use std::path::PathBuf;

use clap::Parser;

use crate::engine::{DraftFlag, Settings};
use crate::model::quant::Fp8Form;
use crate::prefix::budget::{Budgets, Size};
use crate::prefix::disk::default_directory;

/// Serves one model over line-delimited JSON on stdin and stdout.
#[derive(Debug, Clone, Parser)]
#[command(version, about)]
pub struct Args {
    /// Model directory (Hugging Face or MLX layout).
    #[arg(long)]
    pub model: PathBuf,
    /// Look at the model and print what it is, without loading it; exit 1 if it can't run.
    #[arg(long)]
    pub inspect: bool,
    /// With --inspect: print JSON.
    #[arg(long, requires = "inspect")]
    pub json: bool,
    /// Measure what forwards of several widths and prefill cost here, print JSON and exit.
    #[arg(long, conflicts_with = "inspect")]
    pub measure: bool,
    /// Hold this device's kernels against plain operations in many shapes, print the differences and exit; 1 if any is wrong.
    #[arg(long, conflicts_with_all = ["inspect", "measure"])]
    pub check_kernels: bool,
    /// Drafting: off, auto (as deep as pays), or a fixed depth from 1 to 16.
    #[arg(long, default_value = "auto")]
    pub draft: DraftFlag,
    /// Prompt tokens a prefill step; cancellation is seen between steps.
    #[arg(long, default_value_t = DEFAULT_CHUNK, value_parser = clap::value_parser!(u32).range(1..=65536))]
    pub chunk: u32,
    /// How FP8 block weights are held, which can't be multiplied as they are stored: bf16, or mxfp8, which takes half the
    /// memory and rounds once more. Where weights widen to float32 on a processor, mxfp8 saves nothing.
    #[arg(long, value_name = "FORM", default_value = "bf16")]
    pub fp8: Fp8Form,
    /// Bytes that weights and caches may take, such as 12GiB or 70%; default: three quarters of the memory.
    #[arg(long, value_name = "BYTES")]
    pub memory_limit: Option<Size>,
    /// Device memory for the prefix cache, such as 2GiB or 20% (of the memory limit); 0 switches it off.
    #[arg(long, value_name = "SIZE", default_value = "20%")]
    pub cache_device: Size,
    /// Host memory for prefixes that leave the device; of no use where both are the same memory.
    #[arg(long, value_name = "SIZE", default_value = "0")]
    pub cache_host: Size,
    /// Disk space for prefixes, which survive a restart; off unless given, since prompts are private.
    #[arg(long, value_name = "SIZE", default_value = "0")]
    pub cache_disk: Size,
    /// Directory of the disk tier, and of compiled CUDA kernels; default: lookahead in the user's cache directory.
    #[arg(long, value_name = "DIR")]
    pub cache_dir: Option<PathBuf>,
    /// Longest input line in bytes.
    #[arg(long, default_value_t = lookahead_protocol::request::DEFAULT_MAX_LINE_BYTES)]
    pub max_line_bytes: usize,
    /// Requests that may wait; a further one gets queue_full.
    #[arg(long, default_value_t = 512, value_parser = clap::value_parser!(u32).range(1..))]
    pub max_queue: u32,
    /// Most pixels of a picture after resizing; 1024 of them take a token.
    #[arg(long, value_name = "PIXELS", default_value_t = crate::image::DEFAULT_PIXEL_BUDGET as u32, value_parser = clap::value_parser!(u32).range(1024..=16_777_216))]
    pub image_pixels: u32,
    /// Compute on the processor even where there is a GPU.
    #[arg(long)]
    pub cpu: bool,
    /// Write every line read and written to this file.
    #[arg(long, value_name = "FILE")]
    pub record: Option<PathBuf>,
}

/// Prompt tokens a prefill step: longer ones gain nothing measurable and delay cancellation.
const DEFAULT_CHUNK: u32 = 512;

impl Args {
    /// What the engine needs of it.
    pub fn settings(&self) -> Settings {
        Settings {
            model: self.model.clone(),
            chunk: self.chunk as usize,
            draft: self.draft,
            memory_limit: self.memory_limit(),
            cache: Budgets {
                device: self.cache_device.resolve(self.memory_limit()),
                host: self.cache_host.resolve(total_memory()),
                // A share of a disk is a share of what is free on it.
                disk: self.cache_disk.resolve(self.free_disk()),
            },
            cache_dir: self
                .cache_dir
                .clone()
                .or_else(|| default_directory(|name| std::env::var_os(name))),
            force_cpu: self.cpu,
            image_pixels: self.image_pixels as usize,
            fp8: self.fp8,
        }
    }

    fn free_disk(&self) -> u64 {
        let dir = self.cache_dir.clone().unwrap_or_else(std::env::temp_dir);
        let Ok(path) = std::ffi::CString::new(dir.as_os_str().as_encoded_bytes()) else {
            return 0;
        };
        // SAFETY: `statvfs` fills the zeroed struct; the path is NUL-terminated.
        unsafe {
            let mut stat: libc::statvfs = std::mem::zeroed();
            if libc::statvfs(path.as_ptr(), &mut stat) != 0 {
                return 0;
            }
            (stat.f_bavail as u64).saturating_mul(stat.f_frsize as u64)
        }
    }

    fn memory_limit(&self) -> u64 {
        self.memory_limit
            .map_or(total_memory() / 4 * 3, |size| size.resolve(total_memory()))
    }
}

/// The machine's memory in bytes.
fn total_memory() -> u64 {
    // SAFETY: `sysconf` takes no pointer.
    let (pages, size) = unsafe {
        (
            libc::sysconf(libc::_SC_PHYS_PAGES),
            libc::sysconf(libc::_SC_PAGESIZE),
        )
    };
    u64::try_from(pages)
        .unwrap_or(0)
        .saturating_mul(u64::try_from(size).unwrap_or(0))
}
