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

/// Gives buffers kept for reuse back to the system.
pub fn clear_cache() {
    let _ = mlx_rs::memory::clear_cache();
}

/// Tells the allocator what it should stay below: it gives spare buffers back sooner. It is a guideline to MLX, so whoever
/// needs it kept compares [`usage`] with it.
pub fn set_limit(bytes: u64) {
    let _ = mlx_rs::memory::set_memory_limit(usize::try_from(bytes).unwrap_or(usize::MAX));
}
