//! Holds nothing: this package exists for its manifest and lock file, which fix the published mlx-sys.
