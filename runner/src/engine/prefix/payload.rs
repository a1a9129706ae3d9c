//! What the prefix cache stores, as arrays: the key-values of an edge, and whole states at its end.
//!
//! Invariant: a chunk owns compact buffers; pieces cut from it share them and account together for exactly their bytes.

use std::cell::Cell;
use std::rc::Rc;

use mlx_rs::error::{Exception, Result};
use mlx_rs::ops::concatenate;
use mlx_rs::transforms::eval;
use mlx_rs::{Array, Dtype};
use safetensors::Dtype as FileDtype;

use crate::cache::{KvSegment, RecurrentState, Snapshot};
use crate::mlx::ops;
use crate::prefix::disk::Tensor;
use crate::prefix::payload::{Bytes, Payloads, Segment, TierBytes};

/// An array on the device or its bytes in host memory.
#[derive(Debug, Clone)]
enum Stored {
    Device(Array),
    Host(HostArray),
}

#[derive(Debug, Clone)]
struct HostArray {
    shape: Vec<i32>,
    dtype: Dtype,
    bytes: Rc<Vec<u8>>,
}

impl Stored {
    fn bytes(&self) -> TierBytes {
        match self {
            Self::Device(array) => TierBytes::device(array.nbytes() as u64),
            Self::Host(host) => TierBytes::host(host.bytes.len() as u64),
        }
    }

    fn shape(&self) -> &[i32] {
        match self {
            Self::Device(array) => array.shape(),
            Self::Host(host) => &host.shape,
        }
    }

    fn on_device(&self) -> Array {
        match self {
            Self::Device(array) => array.clone(),
            // SAFETY: the bytes are exactly those of an array of this shape and type, and MLX copies them.
            Self::Host(host) => unsafe {
                Array::from_raw_data(host.bytes.as_ptr().cast(), &host.shape, host.dtype)
            },
        }
    }

    fn to_host(&self) -> Result<HostArray> {
        match self {
            Self::Host(host) => Ok(host.clone()),
            Self::Device(array) => {
                let flat = ops::compact(array)?.reshape(&[-1])?.view_dtype(Dtype::Uint8)?;
                let bytes = flat
                    .try_as_slice::<u8>()
                    .map_err(|error| Exception::custom(error.to_string()))?;
                Ok(HostArray {
                    shape: array.shape().to_vec(),
                    dtype: array.dtype(),
                    bytes: Rc::new(bytes.to_vec()),
                })
            }
        }
    }

    fn to_tensor(&self, name: String) -> Result<Tensor> {
        let host = self.to_host()?;
        if !is_finite(&host) {
            // On disk it would outlive whatever went wrong.
            return Err(Exception::custom(format!(
                "{name} has values that are no numbers"
            )));
        }
        let dtype = match host.dtype {
            Dtype::Float32 => FileDtype::F32,
            Dtype::Bfloat16 => FileDtype::BF16,
            Dtype::Float16 => FileDtype::F16,
            other => {
                return Err(Exception::custom(format!(
                    "state of type {other:?} can't be stored"
                )))
            }
        };
        Ok(Tensor {
            name,
            dtype,
            shape: host.shape.iter().map(|&d| d as usize).collect(),
            data: host.bytes.to_vec(),
        })
    }

    fn from_tensor(tensor: Tensor) -> Result<Self> {
        let dtype = match tensor.dtype {
            FileDtype::F32 => Dtype::Float32,
            FileDtype::BF16 => Dtype::Bfloat16,
            FileDtype::F16 => Dtype::Float16,
            other => return Err(Exception::custom(format!("stored state has type {other:?}"))),
        };
        let shape: Vec<i32> = tensor.shape.iter().map(|&d| d as i32).collect();
        let wanted = tensor.shape.iter().product::<usize>() * dtype_bytes(dtype);
        if wanted != tensor.data.len() {
            return Err(Exception::custom(
                "stored state has another length than its shape",
            ));
        }
        // On the device at once: whoever asked for it restores it next, and the host tier may be off.
        // SAFETY: the bytes are exactly those of an array of this shape and type, and MLX copies them.
        Ok(Self::Device(unsafe {
            Array::from_raw_data(tensor.data.as_ptr().cast(), &shape, dtype)
        }))
    }
}

fn sum<'a>(stored: impl Iterator<Item = &'a Stored>) -> TierBytes {
    let mut sum = TierBytes::default();
    for stored in stored {
        sum += stored.bytes();
    }
    sum
}

/// A copy in a buffer of its own size. [`ops::compact`] keeps a buffer that is up to 16 KiB larger, which for the smallest
/// arrays would be most of what a point occupies, and not counted.
fn exact(array: &Array) -> Result<Array> {
    let flat = array.reshape(&[-1])?;
    let len = flat.dim(0);
    let halves = [
        ops::slice_axis(&flat, 0, 0, len / 2)?,
        ops::slice_axis(&flat, 0, len / 2, len)?,
    ];
    concatenate(&halves, 0)?.reshape(array.shape())
}

/// Whether no element is infinite or no number: those have all bits of the exponent set.
fn is_finite(host: &HostArray) -> bool {
    let halves = |exponent: u16| {
        let mut words = host.bytes.chunks_exact(2);
        words.all(|word| u16::from_le_bytes([word[0], word[1]]) & exponent != exponent)
    };
    match host.dtype {
        Dtype::Bfloat16 => halves(0x7f80),
        Dtype::Float16 => halves(0x7c00),
        _ => {
            let mut words = host.bytes.chunks_exact(4);
            words.all(|word| f32::from_le_bytes([word[0], word[1], word[2], word[3]]).is_finite())
        }
    }
}

fn dtype_bytes(dtype: Dtype) -> usize {
    if dtype == Dtype::Float32 {
        4
    } else {
        2
    }
}

/// Key-values of a run of slots, every layer of the trunk and then the head's.
#[derive(Debug)]
struct Chunk {
    layers: Vec<(Stored, Stored)>,
    /// Of all layers; budgets ask for it far more often than it could change, which it can't.
    bytes: TierBytes,
    len: usize,
    /// Slots that living pieces cover.
    alive: Cell<usize>,
}

/// A part of a chunk.
#[derive(Debug)]
struct Piece {
    chunk: Rc<Chunk>,
    from: usize,
    to: usize,
}

impl Piece {
    fn new(chunk: Rc<Chunk>, from: usize, to: usize) -> Self {
        chunk.alive.set(chunk.alive.get() + to - from);
        Self { chunk, from, to }
    }

    fn whole(&self) -> bool {
        self.from == 0 && self.to == self.chunk.len
    }
}

impl Drop for Piece {
    fn drop(&mut self) {
        self.chunk
            .alive
            .set(self.chunk.alive.get() - (self.to - self.from));
    }
}

/// The key-values of one edge.
#[derive(Debug, Default)]
pub struct EdgeState {
    pieces: Vec<Piece>,
}

impl EdgeState {
    /// From copies of `len` slots, one entry a layer; computes them.
    pub fn new(layers: Vec<KvSegment>, len: usize) -> Result<Self> {
        eval(layers.iter().flat_map(|s| [&s.keys, &s.values]))?;
        let layers = layers
            .into_iter()
            .map(|s| (Stored::Device(s.keys), Stored::Device(s.values)))
            .collect();
        Ok(Self::of(layers, len))
    }

    fn of(layers: Vec<(Stored, Stored)>, len: usize) -> Self {
        let chunk = Rc::new(Chunk {
            bytes: sum(layers.iter().flat_map(|(keys, values)| [keys, values])),
            layers,
            len,
            alive: Cell::new(0),
        });
        Self {
            pieces: vec![Piece::new(chunk, 0, len)],
        }
    }

    /// Appends this edge's key-values to those of the path so far, one list a layer.
    pub fn append_to(&self, path: &mut Vec<Vec<KvSegment>>) -> Result<()> {
        for piece in &self.pieces {
            if path.is_empty() {
                path.resize_with(piece.chunk.layers.len(), Vec::new);
            }
            if path.len() != piece.chunk.layers.len() {
                return Err(Exception::custom("cached edges have different numbers of layers"));
            }
            for (list, (keys, values)) in path.iter_mut().zip(&piece.chunk.layers) {
                let cut = |stored: &Stored| {
                    ops::slice_axis(&stored.on_device(), 2, piece.from as i32, piece.to as i32)
                };
                list.push(KvSegment {
                    keys: cut(keys)?,
                    values: cut(values)?,
                });
            }
        }
        Ok(())
    }

    /// One list of arrays a layer with everything in the shape of a single chunk.
    fn joined(&self) -> Result<Vec<(Stored, Stored)>> {
        if let [piece] = &self.pieces[..] {
            if piece.whole() {
                return Ok(piece.chunk.layers.clone());
            }
        }
        let mut path = Vec::new();
        self.append_to(&mut path)?;
        let join = |parts: Vec<&Array>| -> Result<Stored> {
            Ok(Stored::Device(ops::compact(&concatenate(&parts, 2)?)?))
        };
        path.iter()
            .map(|list| {
                Ok((
                    join(list.iter().map(|s| &s.keys).collect())?,
                    join(list.iter().map(|s| &s.values).collect())?,
                ))
            })
            .collect()
    }
}

impl Bytes for EdgeState {
    fn bytes(&self) -> TierBytes {
        let mut sum = TierBytes::default();
        for piece in &self.pieces {
            let whole = piece.chunk.bytes;
            // A buffer that outlives some of its pieces is charged to those that keep it alive.
            let (mine, alive) = (
                (piece.to - piece.from) as u64,
                piece.chunk.alive.get().max(1) as u64,
            );
            sum += TierBytes {
                device: whole.device * mine / alive,
                host: whole.host * mine / alive,
            };
        }
        sum
    }
}

impl Segment for EdgeState {
    fn len(&self) -> usize {
        self.pieces.iter().map(|p| p.to - p.from).sum()
    }

    fn split_at(self, at: usize) -> (Self, Self) {
        let (mut upper, mut lower) = (Self::default(), Self::default());
        let mut done = 0;
        for piece in self.pieces {
            let len = piece.to - piece.from;
            if done + len <= at {
                upper.pieces.push(piece);
            } else if done >= at {
                lower.pieces.push(piece);
            } else {
                let middle = piece.from + at - done;
                upper
                    .pieces
                    .push(Piece::new(Rc::clone(&piece.chunk), piece.from, middle));
                lower
                    .pieces
                    .push(Piece::new(Rc::clone(&piece.chunk), middle, piece.to));
            }
            done += len;
        }
        (upper, lower)
    }

    fn merge(upper: Self, lower: Self) -> Self {
        let mut pieces = upper.pieces;
        pieces.extend(lower.pieces);
        Self { pieces }
    }
}

/// Whole state at one offset: recurrent layers, and the frontier hidden where the model drafts.
#[derive(Debug)]
pub struct PointState {
    states: Vec<(Stored, Stored)>,
    frontier: Option<Stored>,
    bytes: TierBytes,
}

impl PointState {
    /// From compact copies; computes them.
    pub fn new(mut snapshot: Snapshot, frontier: Option<Array>) -> Result<Self> {
        for state in &mut snapshot.states {
            state.conv = exact(&state.conv)?;
        }
        let frontier = frontier.as_ref().map(exact).transpose()?;
        eval(snapshot.arrays().chain(&frontier))?;
        let states = snapshot
            .states
            .into_iter()
            .map(|s| (Stored::Device(s.conv), Stored::Device(s.state)));
        Ok(Self::of(states.collect(), frontier.map(Stored::Device)))
    }

    fn of(states: Vec<(Stored, Stored)>, frontier: Option<Stored>) -> Self {
        let bytes = sum(states.iter().flat_map(|(a, b)| [a, b]).chain(&frontier));
        Self {
            states,
            frontier,
            bytes,
        }
    }

    /// The recurrent layers' state, at `offset`.
    pub fn snapshot(&self, offset: i32) -> Snapshot {
        let states = self
            .states
            .iter()
            .map(|(conv, state)| RecurrentState {
                conv: conv.on_device(),
                state: state.on_device(),
            })
            .collect();
        Snapshot { offset, states }
    }

    /// The trunk's state at the last slot, [1, 1, D].
    pub fn frontier(&self) -> Option<Array> {
        self.frontier.as_ref().map(Stored::on_device)
    }
}

impl Bytes for PointState {
    fn bytes(&self) -> TierBytes {
        self.bytes
    }
}

/// Moves payloads between tiers.
#[derive(Debug, Clone, Copy, Default)]
pub struct Mover;

fn host_pair((a, b): &(Stored, Stored)) -> Result<(Stored, Stored)> {
    Ok((Stored::Host(a.to_host()?), Stored::Host(b.to_host()?)))
}

impl Payloads for Mover {
    type Segment = EdgeState;
    type Point = PointState;
    type Error = Exception;

    fn segment_to_host(&mut self, segment: &mut EdgeState) -> Result<()> {
        let layers = segment
            .joined()?
            .iter()
            .map(host_pair)
            .collect::<Result<Vec<_>>>()?;
        *segment = EdgeState::of(layers, segment.len());
        Ok(())
    }

    fn point_to_host(&mut self, point: &mut PointState) -> Result<()> {
        let states = point.states.iter().map(host_pair).collect::<Result<Vec<_>>>()?;
        let frontier = point
            .frontier
            .as_ref()
            .map(Stored::to_host)
            .transpose()?
            .map(Stored::Host);
        *point = PointState::of(states, frontier);
        Ok(())
    }

    fn write_segment(&mut self, segment: &EdgeState) -> Result<Vec<Tensor>> {
        let mut tensors = Vec::new();
        for (layer, (keys, values)) in segment.joined()?.iter().enumerate() {
            tensors.push(keys.to_tensor(format!("layer.{layer}.keys"))?);
            tensors.push(values.to_tensor(format!("layer.{layer}.values"))?);
        }
        Ok(tensors)
    }

    fn write_point(&mut self, point: &PointState) -> Result<Vec<Tensor>> {
        let mut tensors = Vec::new();
        for (layer, (conv, state)) in point.states.iter().enumerate() {
            tensors.push(conv.to_tensor(format!("layer.{layer}.conv"))?);
            tensors.push(state.to_tensor(format!("layer.{layer}.state"))?);
        }
        if let Some(frontier) = &point.frontier {
            tensors.push(frontier.to_tensor("frontier".to_owned())?);
        }
        Ok(tensors)
    }

    fn read_segment(&mut self, tensors: Vec<Tensor>, len: usize) -> Result<EdgeState> {
        let mut found = by_name(tensors);
        let layers = pairs(&mut found, "keys", "values")?;
        let fits = |stored: &Stored| stored.shape().get(2) == Some(&(len as i32));
        if layers.is_empty() || !layers.iter().all(|(k, v)| fits(k) && fits(v)) {
            return Err(Exception::custom(
                "a stored segment has another length than its name says",
            ));
        }
        Ok(EdgeState::of(layers, len))
    }

    fn read_point(&mut self, tensors: Vec<Tensor>) -> Result<PointState> {
        let mut found = by_name(tensors);
        let frontier = found.remove("frontier").map(Stored::from_tensor).transpose()?;
        let states = pairs(&mut found, "conv", "state")?;
        Ok(PointState::of(states, frontier))
    }
}

fn by_name(tensors: Vec<Tensor>) -> std::collections::HashMap<String, Tensor> {
    tensors
        .into_iter()
        .map(|tensor| (tensor.name.clone(), tensor))
        .collect()
}

fn pairs(
    found: &mut std::collections::HashMap<String, Tensor>,
    first: &str,
    second: &str,
) -> Result<Vec<(Stored, Stored)>> {
    let mut out = Vec::new();
    while let Some(a) = found.remove(&format!("layer.{}.{first}", out.len())) {
        let b = found
            .remove(&format!("layer.{}.{second}", out.len()))
            .ok_or_else(|| Exception::custom("stored state lacks a tensor"))?;
        out.push((Stored::from_tensor(a)?, Stored::from_tensor(b)?));
    }
    Ok(out)
}
