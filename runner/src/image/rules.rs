//! The size that a picture gets.
//!
//! Invariant: both sides are multiples of a merged patch, the area lies in the allowed range as far as the aspect ratio lets
//! it, and a host's budget only ever makes pictures smaller.

use std::path::Path;

use serde_json::{Map, Value};

use super::{ImageError, MAX_ASPECT};
use crate::model::error::{LoadError, Result};
use crate::model::fields::{read_object, Fields};
use crate::model::vision_config::VisionConfig;

/// Pixels of a picture unless a flag says otherwise: 1280 tokens of 32 x 32 pixels, a twelfth of the releases' maximum, whose
/// attention over 65,536 patches no interactive host wants.
pub const DEFAULT_PIXEL_BUDGET: usize = 1280 * 32 * 32;

/// The releases' range of areas.
const PIXELS: [usize; 2] = [65_536, 16_777_216];

/// How pictures are resized and normalised for a tower.
#[derive(Debug, Clone, PartialEq)]
pub struct ImageRules {
    /// Smallest area in pixels.
    pub min_pixels: usize,
    /// Largest area in pixels, budget included.
    pub max_pixels: usize,
    /// Side of a patch.
    pub patch: usize,
    /// Side of a merged block, in patches.
    pub merge: usize,
    /// Frames in a patch, all filled by the one picture.
    pub frames: usize,
    /// Mean of each channel, of 1.
    pub mean: [f32; 3],
    /// Deviation of each channel, of 1.
    pub std: [f32; 3],
}

impl ImageRules {
    /// The releases' rules for a tower, with `budget` pixels at most.
    pub fn new(vision: &VisionConfig, budget: usize) -> Self {
        Self {
            min_pixels: PIXELS[0].min(budget),
            max_pixels: PIXELS[1].min(budget),
            patch: vision.patch_size,
            merge: vision.spatial_merge_size,
            frames: vision.temporal_patch_size,
            mean: [0.5; 3],
            std: [0.5; 3],
        }
    }

    /// As [`ImageRules::new`], with what `preprocessor_config.json` (or `processor_config.json`) of `dir` says.
    ///
    /// # Errors
    /// The file is damaged or has values that can't be.
    pub fn read(dir: &Path, vision: &VisionConfig, budget: usize) -> Result<Self> {
        const FILES: [&str; 2] = ["preprocessor_config.json", "processor_config.json"];
        let rules = Self::new(vision, budget);
        for file in FILES {
            let Some(top) = read_object(dir, file)? else {
                continue;
            };
            let nested = top.get("image_processor").and_then(Value::as_object);
            return rules.adjusted(file, nested.unwrap_or(&top), budget);
        }
        Ok(rules)
    }

    fn adjusted(mut self, file: &str, map: &Map<String, Value>, budget: usize) -> Result<Self> {
        const AREA: std::ops::RangeInclusive<usize> = 1..=1 << 30;
        let top = Fields::new(file, "", map);
        let size = top.object("size")?.map(|map| Fields::new(file, "size.", map));
        let area = |edge: &str, name: &str| match size {
            Some(size) if size.get(edge).is_some() => size.size(edge, AREA),
            _ => top.size(name, AREA),
        };
        if let Some(min) = area("shortest_edge", "min_pixels")? {
            self.min_pixels = min.min(budget);
        }
        if let Some(max) = area("longest_edge", "max_pixels")? {
            self.max_pixels = max.min(budget);
        }
        self.min_pixels = self.min_pixels.min(self.max_pixels);
        for (name, target) in [("image_mean", &mut self.mean), ("image_std", &mut self.std)] {
            if let (Some(items), Some(value)) = (top.list(name)?, top.get(name)) {
                let values: Vec<f32> = items.iter().filter_map(Value::as_f64).map(|x| x as f32).collect();
                *target = <[f32; 3]>::try_from(values)
                    .ok()
                    .filter(|v| v.iter().all(|x| x.is_finite() && *x > 0.0))
                    .ok_or_else(|| top.bad(name, value, "three numbers above 0"))?;
            }
        }
        for (name, wanted) in [
            ("patch_size", self.patch),
            ("merge_size", self.merge),
            ("temporal_patch_size", self.frames),
        ] {
            if let Some(found) = top.size(name, 1..=1 << 16)?.filter(|found| *found != wanted) {
                return Err(LoadError::BadField {
                    file: file.to_owned(),
                    field: name.to_owned(),
                    value: found.to_string(),
                    expected: format!("{wanted}, as vision_config in config.json has it"),
                });
            }
        }
        Ok(self)
    }

    /// (width, height) that a picture is resized to.
    ///
    /// # Errors
    /// [`ImageError::Aspect`].
    pub fn size(&self, width: usize, height: usize) -> std::result::Result<(usize, usize), ImageError> {
        let (long, short) = (width.max(height), width.min(height));
        if short == 0 {
            return Err(ImageError::ZeroSize {
                width: width as u32,
                height: height as u32,
            });
        }
        if long as f64 / short as f64 > MAX_ASPECT as f64 {
            return Err(ImageError::Aspect { width, height });
        }
        let factor = self.patch * self.merge;
        let (f, w, h) = (factor as f64, width as f64, height as f64);
        // Halves go to the even multiple, as Python's round does.
        let near = |x: f64| (x / f).round_ties_even() as usize * factor;
        let area = near(w) * near(h);
        let (min, max) = (self.min_pixels, self.max_pixels);
        Ok(if area > max {
            let shrink = (w * h / max as f64).sqrt();
            let below = |x: f64| ((x / shrink / f).floor() as usize * factor).max(factor);
            (below(w), below(h))
        } else if area < min {
            let grow = (min as f64 / (w * h)).sqrt();
            let above = |x: f64| (x * grow / f).ceil() as usize * factor;
            (above(w), above(h))
        } else {
            (near(w).max(factor), near(h).max(factor))
        })
    }
}
