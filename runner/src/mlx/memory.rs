//! MLX's allocator figures, in bytes.
//!
//! Invariant: a figure that MLX can't give reads as zero; asking never fails a request.

/// What the allocator holds now.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Usage {
    /// Bytes in live arrays.
    pub active: u64,
    /// Bytes kept for reuse.
    pub cached: u64,
    /// The highest `active` so far.
    pub peak: u64,
}

/// Reads the allocator's figures.
pub fn usage() -> Usage {
    let read = |value: mlx_rs::error::Result<usize>| value.unwrap_or(0) as u64;
    Usage {
        active: read(mlx_rs::memory::active_memory()),
        cached: read(mlx_rs::memory::cache_memory()),
        peak: read(mlx_rs::memory::peak_memory()),
    }
}

/// Gives buffers that MLX keeps for reuse back to the C library, which may keep them for the next chunk.
pub fn clear_cache() {
    let _ = mlx_rs::memory::clear_cache();
}

/// Gives all that nobody uses back to the system: what a request leaves behind, and what is missing elsewhere.
pub fn give_back() {
    clear_cache();
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    {
        /// Less than this isn't worth the page faults of the next request.
        const SPARE: usize = 16 << 20;
        // SAFETY: reads the C library's own figures.
        let spare = unsafe { libc::mallinfo2() }.fordblks;
        if spare > SPARE {
            // SAFETY: releases memory that is free already; safe at any time and from any thread.
            unsafe { libc::malloc_trim(0) };
        }
    }
}

/// Has the C library keep buffers of a forward's size for the next operation, where it would return each to the system and
/// fault it in again, page by page. [`give_back`] returns them once a request has ended. Does nothing elsewhere than on
/// glibc, and nothing that the user has set by glibc's own variables.
pub fn keep_buffers() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    {
        // The largest threshold that glibc takes.
        const LARGE: libc::c_int = 32 << 20;
        const KEPT: libc::c_int = 128 << 20;
        let parameters = [
            (libc::M_MMAP_THRESHOLD, LARGE, "MALLOC_MMAP_THRESHOLD_"),
            (libc::M_TRIM_THRESHOLD, KEPT, "MALLOC_TRIM_THRESHOLD_"),
        ];
        for (parameter, value, variable) in parameters {
            if std::env::var_os(variable).is_none() {
                // SAFETY: sets a tuning parameter of the allocator, whatever it has handed out so far.
                unsafe { libc::mallopt(parameter, value) };
            }
        }
    }
}

/// Tells the allocator what it should stay below: it gives spare buffers back sooner. It is a guideline to MLX, so whoever
/// needs it kept compares [`usage`] with it.
pub fn set_limit(bytes: u64) {
    let _ = mlx_rs::memory::set_memory_limit(usize::try_from(bytes).unwrap_or(usize::MAX));
}
