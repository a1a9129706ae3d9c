//! Pictures of a prompt: from a request's base64 to patches beside the engine, and from patches to features inside of it.
//!
//! Invariant: every placeholder of the expanded prompt belongs to exactly one picture, in order; slots and rotary positions are
//! kept apart, and trunk and head take a slot's position and feature from the same [`Placed`].

use base64::prelude::{Engine as _, BASE64_STANDARD};
use lookahead_protocol::ErrorCode;
use mlx_rs::error::Result;
use mlx_rs::transforms::eval;
use mlx_rs::Array;

use super::job::Refusal;
use crate::image::{self, ImageRules, Patches};
use crate::mlx::{memory, ops};
use crate::model::qwen3_5::mrope::{mrope_positions, ImageSpan, MropePositions};
use crate::model::qwen3_5::vision::VisionTower;
use crate::model::{MediaSpan, Positions};
use crate::prefix::key;

/// How a model takes pictures.
#[derive(Debug, Clone)]
pub struct PictureRules {
    /// Placeholder of one feature.
    pub token: u32,
    /// Sizes and normalisation.
    pub rules: ImageRules,
}

/// A picture of a prompt, ready for the tower.
#[derive(Debug, Clone)]
pub struct Picture {
    /// Where its features stand.
    pub span: ImageSpan,
    /// What the tower reads.
    pub patches: Patches,
}

impl Picture {
    /// What the prefix cache knows it by.
    pub fn key(&self) -> key::MediaSpan {
        key::MediaSpan {
            positions: self.span.slot..self.span.end(),
            hash: self.patches.digest,
        }
    }
}

/// What a request with pictures is told where the model can't see.
pub fn no_images() -> Refusal {
    Refusal::new(ErrorCode::Unsupported, "this model takes no images")
}

/// Decodes `images` (base64) and expands each placeholder of `tokens` to as many as its picture has features.
///
/// # Errors
/// The model takes no pictures, one can't be read, or there are not as many placeholders as pictures.
pub fn place(
    rules: Option<&PictureRules>,
    tokens: Vec<u32>,
    images: &[&str],
) -> std::result::Result<(Vec<u32>, Vec<Picture>), Refusal> {
    if images.is_empty() {
        return Ok((tokens, Vec::new()));
    }
    let rules = rules.ok_or_else(no_images)?;
    let places = tokens.iter().filter(|&&id| id == rules.token).count();
    if places != images.len() {
        let message = format!(
            "the prompt has {places} image placeholders for {} images",
            images.len()
        );
        return Err(Refusal::new(ErrorCode::InvalidRequest, message));
    }
    let mut read = images.iter().enumerate().map(|(index, data)| {
        let bad = |reason: String| Refusal::new(ErrorCode::BadImage, format!("image {index}: {reason}"));
        let bytes = BASE64_STANDARD
            .decode(data.trim())
            .map_err(|error| bad(format!("not base64: {error}")))?;
        image::prepare(&bytes, &rules.rules).map_err(|error| bad(error.to_string()))
    });
    let mut expanded = Vec::with_capacity(tokens.len());
    let mut pictures = Vec::new();
    for id in tokens {
        if id != rules.token {
            expanded.push(id);
            continue;
        }
        let Some(patches) = read.next().transpose()? else {
            continue;
        };
        let merge = rules.rules.merge;
        let span = ImageSpan {
            slot: expanded.len(),
            rows: patches.grid_rows / merge,
            cols: patches.grid_cols / merge,
        };
        expanded.extend(std::iter::repeat_n(rules.token, span.len()));
        pictures.push(Picture { span, patches });
    }
    Ok((expanded, pictures))
}

/// A prompt's pictures as trunk and head need them; the default is a prompt without any.
#[derive(Debug, Default)]
pub struct Placed {
    positions: Option<MropePositions>,
    features: Vec<(ImageSpan, Array)>,
}

impl Placed {
    /// Runs the tower over the pictures of a prompt of `length` tokens that end behind slot `cached`.
    pub fn new(
        tower: Option<&VisionTower>,
        pictures: &[Picture],
        length: usize,
        cached: usize,
    ) -> Result<Self> {
        let spans: Vec<ImageSpan> = pictures.iter().map(|picture| picture.span).collect();
        if spans.is_empty() {
            return Ok(Self::default());
        }
        let mut features = Vec::new();
        for Picture { span, patches } in pictures.iter().filter(|picture| picture.span.end() > cached) {
            if let Some(tower) = tower {
                let found = tower.forward(&patches.values, patches.grid_rows, patches.grid_cols)?;
                // One at a time: a picture's attention takes far more than its features.
                eval([&found])?;
                memory::clear_cache();
                features.push((*span, found));
            }
        }
        Ok(Self {
            positions: Some(mrope_positions(length, &spans)),
            features,
        })
    }

    /// What the rotary position of a slot behind the prompt is off by.
    pub fn delta(&self) -> i32 {
        self.positions.as_ref().map_or(0, |positions| positions.delta)
    }

    /// Rotary positions of the `rows` slots from `slot` on.
    pub fn positions(&self, slot: i32, rows: i32) -> Positions {
        match &self.positions {
            Some(positions) if (slot as usize) < positions.axes[0].len() => {
                Positions::Axes(positions.range(slot as usize, (slot + rows) as usize))
            }
            _ => Positions::Sequential {
                start: slot + self.delta(),
            },
        }
    }

    /// Features among the `rows` slots from `slot` on, at the rows of a batch that begins there.
    pub fn media(&self, slot: i32, rows: i32) -> Result<Vec<MediaSpan>> {
        let mut out = Vec::new();
        for (span, features) in &self.features {
            let (start, end) = (span.slot as i32, span.end() as i32);
            let (from, to) = (start.max(slot), end.min(slot + rows));
            if from < to {
                let features = ops::slice_axis(features, 0, from - start, to - start)?;
                out.push(MediaSpan {
                    row: from - slot,
                    features,
                });
            }
        }
        Ok(out)
    }
}

#[cfg(test)]
#[path = "media_tests.rs"]
mod tests;
