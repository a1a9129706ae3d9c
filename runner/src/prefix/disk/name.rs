//! Names of entries: everything that finding and evicting an entry needs, so that a start reads the directory and no file.
//!
//! An entry is a segment, the per-position state of `start..end` of one key path, or a point, the whole state at `end`. A path
//! of any length is a chain: each segment names the path hash at its start, where the one before it ends. So a conversation
//! of n turns costs n segments and not n copies of a growing prefix.

use std::fmt;

use crate::prefix::key::{path_hash, PathHash};

/// The name of an entry. Its text form is the file's name.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Name {
    /// Per-position state.
    Segment {
        /// First position.
        start: usize,
        /// Position after the last.
        end: usize,
        /// Hash of the keys before `start`.
        parent: PathHash,
        /// Hash of the keys before `end`.
        path: PathHash,
    },
    /// Whole state.
    Point {
        /// Positions evaluated.
        end: usize,
        /// Hash of their keys.
        path: PathHash,
    },
}

/// A place on a key path: an offset and the hash of the keys before it.
pub(super) type Place = (usize, PathHash);

/// The start of every path.
pub(super) fn origin() -> Place {
    (0, path_hash(&[]))
}

impl Name {
    /// Where the entry ends.
    pub(super) fn place(&self) -> Place {
        match *self {
            Self::Segment { end, path, .. } | Self::Point { end, path } => (end, path),
        }
    }

    /// What must be present for the entry to be of use: where the chain below it ends.
    pub(super) fn rests_on(&self) -> Place {
        match *self {
            Self::Segment { start, parent, .. } => (start, parent),
            Self::Point { end, path } => (end, path),
        }
    }

    /// Read a file's name.
    pub(super) fn parse(text: &str) -> Option<Self> {
        let mut parts = text.strip_suffix(".safetensors")?.split('-');
        let kind = parts.next()?;
        let mut number = || parts.next()?.parse().ok();
        let name = match kind {
            "segment" => {
                let (start, end): (usize, usize) = (number()?, number()?);
                Self::Segment {
                    start,
                    end,
                    parent: hash(parts.next()?)?,
                    path: hash(parts.next()?)?,
                }
            }
            "point" => Self::Point {
                end: number()?,
                path: hash(parts.next()?)?,
            },
            _ => return None,
        };
        let sound = match name {
            Self::Segment { start, end, .. } => start < end,
            Self::Point { end, .. } => end > 0,
        };
        // The round trip refuses other spellings of the same numbers, so that an entry has one file.
        (sound && name.to_string() == text).then_some(name)
    }
}

fn hash(text: &str) -> Option<PathHash> {
    u128::from_str_radix(text, 16).ok().map(PathHash)
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Segment {
                start,
                end,
                parent,
                path,
            } => {
                write!(
                    f,
                    "segment-{start}-{end}-{:032x}-{:032x}.safetensors",
                    parent.0, path.0
                )
            }
            Self::Point { end, path } => write!(f, "point-{end}-{:032x}.safetensors", path.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_survive_the_file_system() {
        let segment = Name::Segment {
            start: 0,
            end: 2048,
            parent: origin().1,
            path: PathHash(7),
        };
        let point = Name::Point {
            end: 12,
            path: PathHash(u128::MAX),
        };
        insta::assert_snapshot!(segment, @"segment-0-2048-99aa06d3014798d86001c324468d497f-00000000000000000000000000000007.safetensors");
        insta::assert_snapshot!(point, @"point-12-ffffffffffffffffffffffffffffffff.safetensors");
        for name in [segment, point] {
            assert_eq!(Name::parse(&name.to_string()), Some(name));
        }
    }

    #[test]
    fn foreign_names_are_refused() {
        for text in [
            "",
            "segment",
            "notes.safetensors",
            "point-12.safetensors",
            "point-0-00000000000000000000000000000007.safetensors",
            "point-012-00000000000000000000000000000007.safetensors",
            "point-12-7.safetensors",
            "point-12-00000000000000000000000000000007-1.safetensors",
            "point-12-00000000000000000000000000000007.safetensors.bak",
            "segment-9-3-00000000000000000000000000000007-00000000000000000000000000000008.safetensors",
        ] {
            assert_eq!(Name::parse(text), None, "{text}");
        }
    }
}
