//! What the cache stores, seen from the logic that decides where it is stored: lengths, bytes per tier, cuts and moves.
//!
//! Payloads report the bytes that they really occupy: a slice that keeps a larger buffer alive reports the share of it that
//! nothing else accounts for. Everything that touches arrays is behind these traits, so the logic is tested without them.

use std::ops::AddAssign;

use super::disk::Tensor;

/// Bytes of a payload in memory, by tier.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct TierBytes {
    /// In the device's memory.
    pub device: u64,
    /// In host memory.
    pub host: u64,
}

impl TierBytes {
    /// Bytes in the device's memory only.
    pub const fn device(bytes: u64) -> Self {
        Self {
            device: bytes,
            host: 0,
        }
    }

    /// Bytes in host memory only.
    pub const fn host(bytes: u64) -> Self {
        Self {
            device: 0,
            host: bytes,
        }
    }

    /// Both tiers together.
    pub const fn total(self) -> u64 {
        self.device + self.host
    }
}

impl AddAssign for TierBytes {
    fn add_assign(&mut self, other: Self) {
        self.device += other.device;
        self.host += other.host;
    }
}

/// Anything that occupies memory.
pub trait Bytes {
    /// The bytes occupied now, exact.
    fn bytes(&self) -> TierBytes;
}

/// The per-position state (K and V of the target and the draft head) of the positions of one trie edge.
///
/// Cutting and joining must not fail and should not copy: a list of chunks does both without touching the device, so that
/// tidying up under memory pressure never needs memory first.
pub trait Segment: Bytes + Sized {
    /// Positions covered.
    fn len(&self) -> usize;

    /// Whether no position is covered.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Cut into the first `at` positions and the rest, `0 < at < len`.
    fn split_at(self, at: usize) -> (Self, Self);

    /// Join two adjacent segments.
    fn merge(upper: Self, lower: Self) -> Self;
}

/// Moves payloads between tiers. Implemented by the owner of the arrays.
pub trait Payloads {
    /// Per-position state of an edge.
    type Segment: Segment;
    /// Whole state at one offset: recurrent states and convolution tails of every layer, and the frontier hidden.
    type Point: Bytes;
    /// Why a move failed, such as a failed allocation.
    type Error: std::error::Error;

    /// Move whatever of `segment` is in device memory to host memory.
    ///
    /// # Errors
    /// The payload is unchanged.
    fn segment_to_host(&mut self, segment: &mut Self::Segment) -> Result<(), Self::Error>;

    /// Move `point` to host memory.
    ///
    /// # Errors
    /// The payload is unchanged.
    fn point_to_host(&mut self, point: &mut Self::Point) -> Result<(), Self::Error>;

    /// Copy a segment out for the disk tier.
    ///
    /// # Errors
    /// Nothing was written.
    fn write_segment(&mut self, segment: &Self::Segment) -> Result<Vec<Tensor>, Self::Error>;

    /// Copy a restore point out for the disk tier.
    ///
    /// # Errors
    /// Nothing was written.
    fn write_point(&mut self, point: &Self::Point) -> Result<Vec<Tensor>, Self::Error>;

    /// Rebuild a segment of `len` positions, in either memory, from what [`Self::write_segment`] gave.
    ///
    /// # Errors
    /// The tensors aren't those of such a segment.
    fn read_segment(&mut self, tensors: Vec<Tensor>, len: usize) -> Result<Self::Segment, Self::Error>;

    /// Rebuild a restore point, in either memory, from what [`Self::write_point`] gave.
    ///
    /// # Errors
    /// The tensors aren't those of a restore point.
    fn read_point(&mut self, tensors: Vec<Tensor>) -> Result<Self::Point, Self::Error>;
}
