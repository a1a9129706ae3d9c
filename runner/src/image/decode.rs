//! Encoded bytes to 8-bit RGB, upright.
//!
//! Invariant: size limits are checked on the header, before pixels are decoded; alpha is dropped, not blended; of an animation
//! the first frame counts.

use std::io::Cursor;

use image::metadata::Orientation;
use image::{DynamicImage, ImageDecoder, ImageFormat, ImageReader, Limits};

use super::{webp, ImageError, MAX_BYTES, MAX_PIXELS};

/// A decoded picture.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rgb {
    /// Columns.
    pub width: usize,
    /// Rows.
    pub height: usize,
    /// Rows of red, green, blue bytes.
    pub pixels: Vec<u8>,
}

/// Decodes a PNG, JPEG, WebP or GIF.
///
/// # Errors
/// See [`ImageError`].
pub fn decode(bytes: &[u8]) -> Result<Rgb, ImageError> {
    if bytes.is_empty() {
        return Err(ImageError::Empty);
    }
    if bytes.len() > MAX_BYTES {
        return Err(ImageError::TooManyBytes(bytes.len()));
    }
    let (format, name) = match image::guess_format(bytes) {
        Ok(ImageFormat::Png) => (ImageFormat::Png, "PNG"),
        Ok(ImageFormat::Jpeg) => (ImageFormat::Jpeg, "JPEG"),
        Ok(ImageFormat::WebP) => (ImageFormat::WebP, "WebP"),
        Ok(ImageFormat::Gif) => (ImageFormat::Gif, "GIF"),
        _ => return Err(ImageError::UnknownFormat),
    };
    let broken = |error: image::ImageError| ImageError::Broken {
        format: name,
        message: error.to_string(),
    };
    if format == ImageFormat::WebP {
        webp::check(bytes)?;
    }
    let mut reader = ImageReader::with_format(Cursor::new(bytes), format);
    let mut limits = Limits::default();
    limits.max_alloc = Some(MAX_PIXELS * 8);
    reader.limits(limits);
    let mut decoder = reader.into_decoder().map_err(broken)?;
    let (width, height) = decoder.dimensions();
    if width == 0 || height == 0 {
        return Err(ImageError::ZeroSize { width, height });
    }
    if u64::from(width) * u64::from(height) > MAX_PIXELS {
        return Err(ImageError::TooManyPixels { width, height });
    }
    // Damaged metadata is no reason to refuse a picture that decodes.
    let orientation = decoder.orientation().unwrap_or(Orientation::NoTransforms);
    let image = DynamicImage::from_decoder(decoder).map_err(broken)?;
    // Turning makes a copy, which is smallest at 8 bits without alpha.
    let mut image = DynamicImage::ImageRgb8(image.into_rgb8());
    image.apply_orientation(orientation);
    let rgb = image.into_rgb8();
    Ok(Rgb {
        width: rgb.width() as usize,
        height: rgb.height() as usize,
        pixels: rgb.into_raw(),
    })
}
