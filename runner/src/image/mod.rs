//! Pictures from a host's bytes to the patch rows that a vision tower reads.
//!
//! Invariant: whatever the bytes, memory stays bounded by [`MAX_BYTES`] and [`MAX_PIXELS`] (dimensions are read before a pixel
//! is decoded), and every refusal names the rule that the picture breaks.
//! Source: Qwen's image processor (resize to multiples of a merged patch inside of a pixel range, bicubic as in Pillow).

mod decode;
mod patches;
mod resize;
mod rules;
mod webp;

pub use decode::{decode, Rgb};
pub use patches::{patches, Patches};
pub use resize::bicubic;
pub use rules::{ImageRules, DEFAULT_PIXEL_BUDGET};

/// Most encoded bytes of one picture.
pub const MAX_BYTES: usize = 64 << 20;
/// Most pixels of one picture: at 16 bits a channel its decoding takes 270 MB at the most, of usual photographs 100 MB.
pub const MAX_PIXELS: u64 = 1 << 25;
/// Longest side over shortest side.
pub const MAX_ASPECT: usize = 200;

/// Why a picture is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ImageError {
    /// No bytes.
    #[error("image is empty")]
    Empty,
    /// More than [`MAX_BYTES`].
    #[error("image has {0} encoded bytes; at most {limit} are taken", limit = MAX_BYTES)]
    TooManyBytes(usize),
    /// None of the formats.
    #[error("image is not PNG, JPEG, WebP or GIF")]
    UnknownFormat,
    /// Damaged.
    #[error("broken {format} image: {message}")]
    Broken {
        /// Its format.
        format: &'static str,
        /// What the decoder says.
        message: String,
    },
    /// A side of no pixels.
    #[error("image has a zero side: {width} x {height}")]
    ZeroSize {
        /// Columns.
        width: u32,
        /// Rows.
        height: u32,
    },
    /// More than [`MAX_PIXELS`].
    #[error("image is {width} x {height}, {pixels} pixels; at most {limit} are decoded", pixels = u64::from(*width) * u64::from(*height), limit = MAX_PIXELS)]
    TooManyPixels {
        /// Columns.
        width: u32,
        /// Rows.
        height: u32,
    },
    /// Longer and thinner than [`MAX_ASPECT`].
    #[error("image is {width} x {height}: its aspect ratio is above {limit}", limit = MAX_ASPECT)]
    Aspect {
        /// Columns.
        width: usize,
        /// Rows.
        height: usize,
    },
}

/// Decodes, resizes and cuts a picture into the rows of the tower.
///
/// # Errors
/// Every way in which a picture can be refused; see [`ImageError`].
pub fn prepare(bytes: &[u8], rules: &ImageRules) -> Result<Patches, ImageError> {
    let image = decode(bytes)?;
    let (width, height) = rules.size(image.width, image.height)?;
    let image = if (width, height) == (image.width, image.height) {
        image
    } else {
        bicubic(&image, width, height)
    };
    Ok(patches(&image, rules))
}

#[cfg(test)]
mod tests;
