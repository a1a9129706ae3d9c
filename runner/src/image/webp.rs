//! What a WebP file claims, checked before a decoder believes it.
//!
//! Invariant: every chunk that passes lies inside of the file, and no frame inside of it claims more pixels than a picture may
//! have; a decoder allocates what a chunk's length says before it reads.
//! Source: the WebP container specification, and RFC 6386 for the frame header.

use super::{ImageError, MAX_PIXELS};

/// Checks the chunks of `file`.
///
/// # Errors
/// A chunk runs over the end of what holds it, or a frame is too large.
pub(super) fn check(file: &[u8]) -> Result<(), ImageError> {
    // "RIFF", the length of the rest, "WEBP": the length is often off by a little, so the file's own end counts.
    match file.get(12..) {
        Some(chunks) => check_chunks(chunks, true),
        None => Err(broken("the file ends in its header")),
    }
}

fn broken(message: &str) -> ImageError {
    ImageError::Broken {
        format: "WebP",
        message: message.to_owned(),
    }
}

fn check_chunks(mut rest: &[u8], outermost: bool) -> Result<(), ImageError> {
    while let Some((head, body)) = rest.split_first_chunk::<8>() {
        let [a, b, c, d, length @ ..] = *head;
        let length = u32::from_le_bytes(length) as usize;
        let name = [a, b, c, d];
        let Some(data) = body.get(..length) else {
            let shown = String::from_utf8_lossy(&name).into_owned();
            return Err(broken(&format!(
                "chunk {shown:?} claims {length} bytes but only {} follow",
                body.len()
            )));
        };
        match &name {
            b"VP8 " => check_frame(data)?,
            // A frame of an animation holds chunks of its own behind 16 bytes of place and duration.
            b"ANMF" if outermost => check_chunks(data.get(16..).unwrap_or_default(), false)?,
            _ => {}
        }
        // Chunks of odd length have a byte of padding, which the last one may lack.
        rest = body.get(length + length % 2..).unwrap_or_default();
    }
    Ok(())
}

/// A lossy frame states its size itself, whatever the file's header says.
fn check_frame(data: &[u8]) -> Result<(), ImageError> {
    let Some(&[w0, w1, h0, h1]) = data.get(6..10) else {
        return Err(broken("a frame ends in its header"));
    };
    let side = |low, high| u32::from(u16::from_le_bytes([low, high]) & 0x3fff);
    let (width, height) = (side(w0, w1), side(h0, h1));
    if u64::from(width) * u64::from(height) > MAX_PIXELS {
        return Err(ImageError::TooManyPixels { width, height });
    }
    Ok(())
}
