//! Pixels to the rows of a vision tower.
//!
//! Invariant: rows come in merged blocks, row-major over blocks and row-major inside of a block, so that consecutive rows become
//! one token; a row is flattened as [channel][frame][y][x].

use xxhash_rust::xxh3::xxh3_128;

use super::{ImageRules, Rgb};

/// One picture, ready for the tower.
#[derive(Debug, Clone, PartialEq)]
pub struct Patches {
    /// Normalised values, `rows * row_width`.
    pub values: Vec<f32>,
    /// Values of a row.
    pub row_width: usize,
    /// Rows of patches, gh.
    pub grid_rows: usize,
    /// Columns of patches, gw.
    pub grid_cols: usize,
    /// Tokens that the picture takes in the text.
    pub tokens: usize,
    /// Names the resized picture: equal pictures have equal digests, so a prefix cache can tell pictures apart.
    pub digest: u128,
}

/// Cuts `image`, whose sides are multiples of a merged patch.
pub fn patches(image: &Rgb, rules: &ImageRules) -> Patches {
    let (patch, merge, frames) = (rules.patch, rules.merge, rules.frames);
    let (grid_rows, grid_cols) = (image.height / patch, image.width / patch);
    let row_width = 3 * frames * patch * patch;
    let mut values = Vec::with_capacity(grid_rows * grid_cols * row_width);
    for block_row in 0..grid_rows / merge {
        for block_col in 0..grid_cols / merge {
            for row in 0..merge {
                for col in 0..merge {
                    let top = (block_row * merge + row) * patch;
                    let left = (block_col * merge + col) * patch;
                    push_patch(&mut values, image, rules, top, left);
                }
            }
        }
    }
    let mut named = image.pixels.clone();
    named.extend_from_slice(&(image.width as u64).to_le_bytes());
    Patches {
        values,
        row_width,
        grid_rows,
        grid_cols,
        tokens: grid_rows * grid_cols / (merge * merge),
        digest: xxh3_128(&named),
    }
}

fn push_patch(values: &mut Vec<f32>, image: &Rgb, rules: &ImageRules, top: usize, left: usize) {
    for channel in 0..3 {
        let (mean, std) = (rules.mean[channel] * 255.0, rules.std[channel] * 255.0);
        for _ in 0..rules.frames {
            for y in top..top + rules.patch {
                let start = (y * image.width + left) * 3 + channel;
                let line = image.pixels[start..].iter().step_by(3).take(rules.patch);
                values.extend(line.map(|v| (f32::from(*v) - mean) / std));
            }
        }
    }
}
