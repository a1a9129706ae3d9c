//! `vision_config`: the vision tower's dimensions.
//!
//! Invariant: heads divide the width into an even number of quarters (2-D rotary embedding turns pairs in two halves), the
//! position table is square, and the tower's output has the text model's width.

use serde_json::Value;

use super::error::Result;
use super::fields::Fields;

/// Dimensions of a vision tower.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VisionConfig {
    /// Blocks.
    pub depth: usize,
    /// Width, Hv.
    pub hidden_size: usize,
    /// Width inside a block's feed-forward part.
    pub intermediate_size: usize,
    /// Attention heads.
    pub heads: usize,
    /// Colour channels.
    pub in_channels: usize,
    /// Side of a patch in pixels.
    pub patch_size: usize,
    /// Frames in a patch; a still image fills them all.
    pub temporal_patch_size: usize,
    /// Side of the square of patches that become one token.
    pub spatial_merge_size: usize,
    /// Rows of the position table, a square number.
    pub positions: usize,
    /// Width of the output.
    pub out_hidden_size: usize,
}

impl VisionConfig {
    /// Reads the object; `text_width` is the text model's D.
    pub fn parse(v: &Fields<'_>, text_width: usize) -> Result<Self> {
        let size = |name: &str, default: Option<usize>, max: usize| match (v.size(name, 1..=max)?, default) {
            (Some(n), _) | (None, Some(n)) => Ok(n),
            (None, None) => Err(v.missing(name, "")),
        };
        let config = Self {
            depth: size("depth", None, 1024)?,
            hidden_size: size("hidden_size", None, 1 << 16)?,
            intermediate_size: size("intermediate_size", None, 1 << 18)?,
            heads: size("num_heads", None, 1024)?,
            in_channels: size("in_channels", Some(3), 3)?,
            patch_size: size("patch_size", Some(16), 256)?,
            temporal_patch_size: size("temporal_patch_size", Some(2), 16)?,
            spatial_merge_size: size("spatial_merge_size", Some(2), 16)?,
            positions: size("num_position_embeddings", Some(2304), 1 << 24)?,
            out_hidden_size: size("out_hidden_size", Some(text_width), 1 << 20)?,
        };
        if let (Some(list), Some(value)) = (
            v.list("deepstack_visual_indexes")?,
            v.get("deepstack_visual_indexes"),
        ) {
            if !list.is_empty() {
                return Err(v.unsupported("deepstack_visual_indexes", value, "this family has none"));
            }
        }
        if let (Some(act), Some(value)) = (v.text("hidden_act")?, v.get("hidden_act")) {
            if act != "gelu_pytorch_tanh" {
                return Err(v.unsupported("hidden_act", value, "only gelu_pytorch_tanh"));
            }
        }
        let wrong = |name: &str, n: usize, expected: String| Err(v.bad(name, &Value::from(n), expected));
        if config.in_channels != 3 {
            return wrong("in_channels", config.in_channels, "3".to_owned());
        }
        if !config.hidden_size.is_multiple_of(4 * config.heads) {
            let expected = format!("a multiple of four times num_heads, which is {}", config.heads);
            return wrong("hidden_size", config.hidden_size, expected);
        }
        if config.positions.isqrt().pow(2) != config.positions {
            return wrong(
                "num_position_embeddings",
                config.positions,
                "a square number".to_owned(),
            );
        }
        if config.out_hidden_size != text_width {
            let expected = format!("the text model's hidden_size, {text_width}");
            return wrong("out_hidden_size", config.out_hidden_size, expected);
        }
        Ok(config)
    }

    /// Side of the square position table.
    pub fn table_side(&self) -> usize {
        self.positions.isqrt()
    }

    /// Values of a flattened patch, [channel][frame][row][column].
    pub fn patch_values(&self) -> usize {
        self.in_channels * self.temporal_patch_size * self.patch_size * self.patch_size
    }

    /// Sides of an image are multiples of this many pixels.
    pub fn pixel_factor(&self) -> usize {
        self.patch_size * self.spatial_merge_size
    }
}
