//! Typed access to the fields of a JSON object.
//!
//! Invariant: `null` is absent, a value of another type or outside its range is an error that names field and value, and no
//! value can cause a panic.

use std::fs;
use std::ops::RangeInclusive;
use std::path::Path;

use serde_json::{Map, Value};

use super::error::{LoadError, Result};

/// Largest JSON file read whole; real configs have a few kilobytes, real indexes a few megabytes.
const MAX_JSON_BYTES: u64 = 256 << 20;

/// One object of a file.
#[derive(Debug, Clone, Copy)]
pub struct Fields<'a> {
    file: &'a str,
    /// Prefix of field paths, with its dot; empty at the top.
    scope: &'a str,
    map: &'a Map<String, Value>,
}

impl<'a> Fields<'a> {
    /// Fields of `map`, which is `scope` of `file`.
    pub fn new(file: &'a str, scope: &'a str, map: &'a Map<String, Value>) -> Self {
        Self { file, scope, map }
    }

    /// The value, unless absent or null.
    pub fn get(&self, name: &str) -> Option<&'a Value> {
        self.map.get(name).filter(|v| !v.is_null())
    }

    /// The field's full path.
    pub fn path(&self, name: &str) -> String {
        format!("{}{name}", self.scope)
    }

    /// An error about a present field.
    pub fn bad(&self, name: &str, value: &Value, expected: impl Into<String>) -> LoadError {
        LoadError::BadField {
            file: self.file.to_owned(),
            field: self.path(name),
            value: brief(value),
            expected: expected.into(),
        }
    }

    /// An error about a value that is sound but that this build can't do.
    pub fn unsupported(&self, name: &str, value: &Value, supported: impl Into<String>) -> LoadError {
        LoadError::FeatureUnsupported {
            file: self.file.to_owned(),
            field: self.path(name),
            value: brief(value),
            supported: supported.into(),
        }
    }

    /// An error about an absent field.
    pub fn missing(&self, name: &str, hint: &'static str) -> LoadError {
        LoadError::MissingField {
            file: self.file.to_owned(),
            field: self.path(name),
            hint,
        }
    }

    /// An integer in `range`; integral floats count.
    pub fn size(&self, name: &str, range: RangeInclusive<usize>) -> Result<Option<usize>> {
        let Some(value) = self.get(name) else {
            return Ok(None);
        };
        integer(value)
            .filter(|n| range.contains(n))
            .map(Some)
            .ok_or_else(|| {
                self.bad(
                    name,
                    value,
                    format!("an integer from {} to {}", range.start(), range.end()),
                )
            })
    }

    /// A required integer in `range`.
    pub fn need_size(&self, name: &str, range: RangeInclusive<usize>) -> Result<usize> {
        self.size(name, range)?.ok_or_else(|| self.missing(name, ""))
    }

    /// A finite number above zero and at most `max`.
    pub fn positive(&self, name: &str, max: f64) -> Result<Option<f64>> {
        let Some(value) = self.get(name) else {
            return Ok(None);
        };
        value
            .as_f64()
            .filter(|x| x.is_finite() && *x > 0.0 && *x <= max)
            .map(Some)
            .ok_or_else(|| self.bad(name, value, format!("a number above 0 and at most {max}")))
    }

    /// A truth value.
    pub fn flag(&self, name: &str) -> Result<Option<bool>> {
        let Some(value) = self.get(name) else {
            return Ok(None);
        };
        value
            .as_bool()
            .map(Some)
            .ok_or_else(|| self.bad(name, value, "true or false"))
    }

    /// A string.
    pub fn text(&self, name: &str) -> Result<Option<&'a str>> {
        let Some(value) = self.get(name) else {
            return Ok(None);
        };
        value
            .as_str()
            .map(Some)
            .ok_or_else(|| self.bad(name, value, "a string"))
    }

    /// An array.
    pub fn list(&self, name: &str) -> Result<Option<&'a [Value]>> {
        let Some(value) = self.get(name) else {
            return Ok(None);
        };
        value
            .as_array()
            .map(|a| Some(a.as_slice()))
            .ok_or_else(|| self.bad(name, value, "an array"))
    }

    /// An object.
    pub fn object(&self, name: &str) -> Result<Option<&'a Map<String, Value>>> {
        let Some(value) = self.get(name) else {
            return Ok(None);
        };
        value
            .as_object()
            .map(Some)
            .ok_or_else(|| self.bad(name, value, "an object"))
    }

    /// Token ids: one integer or an array of them; empty where absent.
    pub fn ids(&self, name: &str) -> Result<Vec<u32>> {
        let Some(value) = self.get(name) else {
            return Ok(Vec::new());
        };
        let one = |v: &Value| {
            integer(v)
                .and_then(|n| u32::try_from(n).ok())
                .ok_or_else(|| self.bad(name, value, "a token id or an array of token ids"))
        };
        match value {
            Value::Array(items) => items.iter().map(one).collect(),
            other => Ok(vec![one(other)?]),
        }
    }
}

fn integer(value: &Value) -> Option<usize> {
    if let Some(n) = value.as_u64() {
        return usize::try_from(n).ok();
    }
    // 2^53: beyond it a float no longer names one integer.
    value
        .as_f64()
        .filter(|x| *x >= 0.0 && *x <= 9_007_199_254_740_992.0 && x.fract() == 0.0)
        .map(|x| x as usize)
}

/// The value as JSON, cut where it is long.
pub fn brief(value: &Value) -> String {
    const SHOWN: usize = 80;
    let text = value.to_string();
    match text.char_indices().nth(SHOWN) {
        Some((at, _)) => format!("{}…", &text[..at]),
        None => text,
    }
}

/// Reads `dir/file` as a JSON object; `None` where there is no such file.
pub fn read_object(dir: &Path, file: &str) -> Result<Option<Map<String, Value>>> {
    let path = dir.join(file);
    let bytes = match fs::metadata(&path) {
        Ok(meta) if meta.len() > MAX_JSON_BYTES => {
            return Err(LoadError::JsonTooLarge {
                file: file.to_owned(),
                bytes: meta.len(),
                limit: MAX_JSON_BYTES,
            })
        }
        Ok(_) => fs::read(&path).map_err(|source| LoadError::Io { path, source })?,
        Err(source) if source.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(source) => return Err(LoadError::Io { path, source }),
    };
    // Some editors and Windows tools write a byte order mark, which no JSON parser takes.
    let text = bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(&bytes);
    match serde_json::from_slice(text) {
        Ok(Value::Object(map)) => Ok(Some(map)),
        Ok(other) => Err(LoadError::Json {
            file: file.to_owned(),
            message: format!("{} is not an object", brief(&other)),
        }),
        Err(e) => Err(LoadError::Json {
            file: file.to_owned(),
            message: e.to_string(),
        }),
    }
}
