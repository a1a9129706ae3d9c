//! Payloads for tests: they remember which keys they were made for, so that a test sees any state that reaches another path.

use super::disk::{Name, Tensor};
use super::key::{path_hash, Key, PathHash};
use super::payload::{Bytes, Payloads, Segment, TierBytes};
use super::plan::PointKind;
use super::trie::{NodeId, Trie};

/// Bytes per position of a [`FakeSegment`].
pub(crate) const PER_KEY: u64 = 10;
/// Bytes of a [`FakePoint`].
pub(crate) const PER_POINT: u64 = 100;

/// Per-position state: the keys themselves, each with the tier that it is in.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct FakeSegment {
    pub(crate) keys: Vec<Key>,
    on_device: Vec<bool>,
}

impl FakeSegment {
    pub(crate) fn of(keys: &[Key]) -> Self {
        Self {
            keys: keys.to_vec(),
            on_device: vec![true; keys.len()],
        }
    }
}

impl Bytes for FakeSegment {
    fn bytes(&self) -> TierBytes {
        let device = self.on_device.iter().filter(|&&there| there).count() as u64;
        TierBytes {
            device: device * PER_KEY,
            host: (self.keys.len() as u64 - device) * PER_KEY,
        }
    }
}

impl Segment for FakeSegment {
    fn len(&self) -> usize {
        self.keys.len()
    }

    fn split_at(mut self, at: usize) -> (Self, Self) {
        assert!(
            0 < at && at < self.keys.len(),
            "cut at {at} of {}",
            self.keys.len()
        );
        let lower = Self {
            keys: self.keys.split_off(at),
            on_device: self.on_device.split_off(at),
        };
        (self, lower)
    }

    fn merge(mut upper: Self, lower: Self) -> Self {
        upper.keys.extend(lower.keys);
        upper.on_device.extend(lower.on_device);
        upper
    }
}

/// Whole state: the hash of all keys before it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct FakePoint {
    pub(crate) path: PathHash,
    pub(crate) on_device: bool,
}

impl FakePoint {
    pub(crate) fn of(keys: &[Key]) -> Self {
        Self {
            path: path_hash(keys),
            on_device: true,
        }
    }
}

impl Bytes for FakePoint {
    fn bytes(&self) -> TierBytes {
        if self.on_device {
            TierBytes::device(PER_POINT)
        } else {
            TierBytes::host(PER_POINT)
        }
    }
}

/// A failed move.
#[derive(Debug, thiserror::Error)]
#[error("move refused")]
pub(crate) struct Refused;

/// Moves fakes; refuses the next moves where told to.
#[derive(Debug, Default)]
pub(crate) struct FakePayloads {
    pub(crate) refuse: usize,
    pub(crate) moves: usize,
}

impl FakePayloads {
    fn step(&mut self) -> Result<(), Refused> {
        self.moves += 1;
        if self.refuse > 0 {
            self.refuse -= 1;
            return Err(Refused);
        }
        Ok(())
    }
}

fn tensor(name: &str, words: &[u64]) -> Tensor {
    let data = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    Tensor {
        name: name.to_owned(),
        dtype: safetensors::Dtype::U64,
        shape: vec![words.len()],
        data,
    }
}

fn words(tensors: &[Tensor], name: &str) -> Result<Vec<u64>, Refused> {
    let tensor = tensors.iter().find(|tensor| tensor.name == name).ok_or(Refused)?;
    let word = |chunk: &[u8]| chunk.try_into().map(u64::from_le_bytes).map_err(|_| Refused);
    tensor.data.chunks(8).map(word).collect()
}

impl Payloads for FakePayloads {
    type Segment = FakeSegment;
    type Point = FakePoint;
    type Error = Refused;

    fn segment_to_host(&mut self, segment: &mut FakeSegment) -> Result<(), Refused> {
        self.step()?;
        segment.on_device.fill(false);
        Ok(())
    }

    fn point_to_host(&mut self, point: &mut FakePoint) -> Result<(), Refused> {
        self.step()?;
        point.on_device = false;
        Ok(())
    }

    fn write_segment(&mut self, segment: &FakeSegment) -> Result<Vec<Tensor>, Refused> {
        self.step()?;
        let words: Vec<u64> = segment.keys.iter().flat_map(|key| [key.this, key.next]).collect();
        Ok(vec![tensor("kv.0", &words)])
    }

    fn write_point(&mut self, point: &FakePoint) -> Result<Vec<Tensor>, Refused> {
        self.step()?;
        Ok(vec![tensor(
            "state.0",
            &[(point.path.0 >> 64) as u64, point.path.0 as u64],
        )])
    }

    fn read_segment(&mut self, tensors: Vec<Tensor>, len: usize) -> Result<FakeSegment, Refused> {
        let words = words(&tensors, "kv.0")?;
        let keys: Vec<Key> = words
            .chunks(2)
            .map(|pair| Key {
                this: pair[0],
                next: pair[1],
            })
            .collect();
        if keys.len() != len {
            return Err(Refused);
        }
        Ok(FakeSegment {
            on_device: vec![false; len],
            keys,
        })
    }

    fn read_point(&mut self, tensors: Vec<Tensor>) -> Result<FakePoint, Refused> {
        let words = words(&tensors, "state.0")?;
        let [high, low] = words[..] else {
            return Err(Refused);
        };
        Ok(FakePoint {
            path: PathHash(u128::from(high) << 64 | u128::from(low)),
            on_device: false,
        })
    }
}

/// A trie of fakes.
pub(crate) type Fake = Trie<FakeSegment, FakePoint>;

/// One key a letter.
pub(crate) fn keys(text: &str) -> Vec<Key> {
    text.bytes()
        .map(|byte| Key {
            this: byte.into(),
            next: 0,
        })
        .collect()
}

/// Puts a restore point at the end of `text` into a trie.
pub(crate) fn put(trie: &mut Fake, text: &str, used: u64) -> NodeId {
    let keys = keys(text);
    trie.insert_point(&keys, PointKind::Rest, used, FakePoint::of(&keys), |range| {
        FakeSegment::of(&keys[range])
    })
}

/// What the positions of `text` from `start` on are called on disk.
pub(crate) fn segment_name(text: &str, start: usize) -> Name {
    let keys = keys(text);
    Name::Segment {
        start,
        end: keys.len(),
        parent: path_hash(&keys[..start]),
        path: path_hash(&keys),
    }
}

/// What the restore point at the end of `text` is called on disk.
pub(crate) fn point_name(text: &str) -> Name {
    Name::Point {
        end: text.len(),
        path: path_hash(&keys(text)),
    }
}
