//! Pictures made for a test: PNG files of any size, whatever it claims.
//!
//! Invariant: checksums are right, so that a decoder looks at what a test is about.
//! Source: the PNG specification (third edition) and RFC 1951 for the compressed data.

use base64::prelude::{Engine as _, BASE64_STANDARD};

/// The bytes as requests carry them.
pub fn base64(bytes: &[u8]) -> String {
    BASE64_STANDARD.encode(bytes)
}

/// A black RGB picture of `width` x `height`, whole, a thousandth of its pixels in size.
pub fn black(width: u32, height: u32) -> Vec<u8> {
    let bytes = (3 * u64::from(width) + 1) * u64::from(height);
    png(width, height, &zeros(bytes))
}

/// A PNG that claims a size, with this compressed data.
pub fn png(width: u32, height: u32, data: &[u8]) -> Vec<u8> {
    let size = [width.to_be_bytes(), height.to_be_bytes()].concat();
    let mut out = b"\x89PNG\r\n\x1a\n".to_vec();
    chunk(&mut out, b"IHDR", &[&size[..], &[8, 2, 0, 0, 0]].concat());
    chunk(&mut out, b"IDAT", data);
    chunk(&mut out, b"IEND", &[]);
    out
}

fn chunk(out: &mut Vec<u8>, kind: &[u8; 4], data: &[u8]) {
    out.extend_from_slice(&(data.len() as u32).to_be_bytes());
    let body = [&kind[..], data].concat();
    out.extend_from_slice(&body);
    out.extend_from_slice(&crc32(&body).to_be_bytes());
}

fn crc32(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0u32, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |c, _| {
            if c & 1 == 1 {
                (c >> 1) ^ 0xedb8_8320
            } else {
                c >> 1
            }
        })
    })
}

/// `count` zero bytes in zlib's format: one literal, then copies of 258 bytes at distance 1, 13 bits each.
pub fn zeros(count: u64) -> Vec<u8> {
    let mut bits = Bits::default();
    // The last block, with fixed codes.
    bits.push(0b1, 1);
    bits.push(0b10, 2);
    if count > 0 {
        bits.push(0b0011_0000, 8);
    }
    let rest = count.saturating_sub(1);
    for _ in 0..rest / 258 {
        bits.push(0b1100_0101, 8);
        bits.push(0, 5);
    }
    for _ in 0..rest % 258 {
        bits.push(0b0011_0000, 8);
    }
    bits.push(0, 7);
    let mut out = vec![0x78, 0x9c];
    out.extend(bits.bytes);
    // Adler-32 of zeros: the first sum stays 1, the second counts.
    let sum = (((count % 65_521) as u32) << 16) | 1;
    out.extend_from_slice(&sum.to_be_bytes());
    out
}

/// Bits as deflate packs them: codes from their high end, bytes from their low one.
#[derive(Default)]
struct Bits {
    bytes: Vec<u8>,
    used: u32,
}

impl Bits {
    /// The `count` low bits of `code`, the highest of them first.
    fn push(&mut self, code: u32, count: u32) {
        for at in (0..count).rev() {
            if self.used.is_multiple_of(8) {
                self.bytes.push(0);
            }
            if let Some(last) = self.bytes.last_mut() {
                *last |= (((code >> at) & 1) as u8) << (self.used % 8);
            }
            self.used += 1;
        }
    }
}
