//! What a config says about rotary embedding.
//!
//! Invariant: the rotated dimensions are an even number above zero and covered by the M-RoPE sections; theta is never guessed.

use serde_json::{Map, Value};

use super::config::CONFIG_FILE;
use super::error::Result;
use super::fields::Fields;

/// Rotary embedding.
#[derive(Debug, Clone, PartialEq)]
pub struct RopeConfig {
    /// Base.
    pub theta: f64,
    /// Dimensions of a head that rotate; even.
    pub dims: usize,
    /// Frequencies of each axis (time, height, width), interleaved; they sum to `dims / 2`. `None`: one axis only.
    pub mrope_section: Option<[usize; 3]>,
}

impl RopeConfig {
    /// Looks in `rope_parameters`, else `rope_scaling`, then at the level of the text config.
    pub(super) fn parse(t: &Fields<'_>, head_dim: usize) -> Result<Self> {
        let (name, map) = match t.object("rope_parameters")? {
            Some(map) => ("rope_parameters", Some(map)),
            None => ("rope_scaling", t.object("rope_scaling")?),
        };
        let (empty, scope) = (Map::new(), t.path(&format!("{name}.")));
        let r = Fields::new(CONFIG_FILE, &scope, map.unwrap_or(&empty));
        for key in ["rope_type", "type"] {
            if let (Some(kind), Some(value)) = (r.text(key)?, r.get(key)) {
                if !["default", "mrope"].contains(&kind) {
                    return Err(r.unsupported(key, value, "only default"));
                }
            }
        }
        const MAX_THETA: f64 = 1e15;
        let theta = match r.positive("rope_theta", MAX_THETA)? {
            Some(theta) => theta,
            None => t.positive("rope_theta", MAX_THETA)?.ok_or_else(|| {
                t.missing(
                    "rope_theta",
                    " (looked in rope_parameters, rope_scaling and beside them); it can't be guessed",
                )
            })?,
        };
        let (at, factor) = match r.positive("partial_rotary_factor", 1.0)? {
            Some(factor) => (&r, factor),
            None => (t, t.positive("partial_rotary_factor", 1.0)?.unwrap_or(0.25)),
        };
        let dims = (head_dim as f64 * factor) as usize;
        if dims == 0 || !dims.is_multiple_of(2) {
            let expected =
                format!("a share of head_dim {head_dim} that is an even number of dimensions, not {dims}");
            return Err(at.bad("partial_rotary_factor", &Value::from(factor), expected));
        }
        let mrope_section = match r.list("mrope_section")? {
            None => None,
            Some(items) => Some(mrope_section(&r, items, dims)?),
        };
        if r.flag("mrope_interleaved")? == Some(false) && mrope_section.is_some() {
            return Err(r.unsupported("mrope_interleaved", &Value::from(false), "only true"));
        }
        Ok(Self {
            theta,
            dims,
            mrope_section,
        })
    }
}

fn mrope_section(r: &Fields<'_>, items: &[Value], dims: usize) -> Result<[usize; 3]> {
    let sizes: Vec<usize> = items
        .iter()
        .filter_map(Value::as_u64)
        .filter_map(|n| usize::try_from(n).ok())
        .collect();
    match <[usize; 3]>::try_from(sizes) {
        Ok(s)
            if items.len() == 3 && s.iter().try_fold(0usize, |a, n| a.checked_add(*n)) == Some(dims / 2) =>
        {
            Ok(s)
        }
        _ => {
            let expected = format!(
                "three counts that sum to {}, half of the {dims} rotated dimensions",
                dims / 2
            );
            Err(r.bad("mrope_section", &Value::from(items.to_vec()), expected))
        }
    }
}
