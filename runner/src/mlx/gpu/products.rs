//! Launches of the products of few rows: decode and verification read each weight once, at the memory's pace.
//!
//! Invariant: a row's result is the same whatever rows are computed beside it. Which matrices are taken follows from their storage alone, never from values.

use mlx_rs::error::{Exception, Result};
use mlx_rs::{Array, Dtype};

use super::kernel::{Call, Kernel, Maker, Text};
use super::{bits, one, products_source as text};

/// Rows that one launch takes.
pub const ROWS: i32 = 16;

/// A weight matrix [out, in].
#[derive(Debug, Clone, Copy)]
pub enum Stored<'a> {
    /// Plain bfloat16 values.
    Dense(&'a Array),
    /// Affine 4-bit codes.
    Codes {
        /// [out, in / 8] uint32.
        weight: &'a Array,
        /// [out, in / group] bfloat16.
        scales: &'a Array,
        /// [out, in / group] bfloat16.
        biases: &'a Array,
        /// Inputs that share a scale: 32, 64 or 128.
        group: i32,
    },
    /// Signed 8-bit codes with a scale a row; nothing may be around the product.
    Bytes {
        /// [out, in / 4] uint32, each byte a code plus 128.
        weight: &'a Array,
        /// [out] float32.
        scales: &'a Array,
    },
}

impl Stored<'_> {
    fn outputs(&self) -> i32 {
        match self {
            Self::Dense(weight) | Self::Codes { weight, .. } | Self::Bytes { weight, .. } => weight.dim(0),
        }
    }

    fn inputs(&self) -> i32 {
        match self {
            Self::Dense(weight) => weight.dim(1),
            Self::Codes { weight, .. } => weight.dim(1) * 8,
            Self::Bytes { weight, .. } => weight.dim(1) * 4,
        }
    }

    fn storage(&self) -> Storage {
        match self {
            Self::Dense(_) => Storage::Dense,
            Self::Codes { .. } => Storage::Codes,
            Self::Bytes { .. } => Storage::Bytes,
        }
    }
}

/// Which text reads a matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Storage {
    Dense,
    Codes,
    Bytes,
}

/// Each kernel's storage, by its place among all: every kind of surroundings for the first two, none for the last.
const STORAGES: [(Storage, usize); 3] = [
    (Storage::Dense, Around::KINDS),
    (Storage::Codes, Around::KINDS),
    (Storage::Bytes, 1),
];

impl Storage {
    /// Place of its first kernel.
    fn first(self) -> usize {
        STORAGES
            .iter()
            .take_while(|(storage, _)| *storage != self)
            .map(|(_, kinds)| kinds)
            .sum()
    }
}

/// What is computed in the same launch as a product.
#[derive(Debug, Clone, Copy)]
pub enum Around<'a> {
    /// `x @ w^T` alone.
    Nothing,
    /// Another array of its shape is added to it.
    Added(&'a Array),
    /// The rows are normalised before it.
    Normed(Gain<'a>),
    /// The same, and the result is `silu(first half) * second half`.
    Gated(Gain<'a>),
}

/// A norm: gain [in] float32 and epsilon.
#[derive(Debug, Clone, Copy)]
pub struct Gain<'a> {
    /// Effective gain.
    pub gain: &'a Array,
    /// Added to the mean square.
    pub eps: f32,
}

/// How a launch is cut: what was fastest on an H200 at the matrices of a 4B model. It depends on nothing else, so that few
/// kernels are compiled and a row's sum is always formed in the same order.
#[derive(Debug, Clone, Copy)]
struct Cut {
    /// Groups of eight outputs a block.
    tiles: i32,
    /// Warps that share a block's inputs.
    warps: i32,
    /// Steps of a warp that are in flight together.
    unroll: i32,
}

const fn cut(tiles: i32, warps: i32, unroll: i32) -> Cut {
    Cut { tiles, warps, unroll }
}

impl Around<'_> {
    const KINDS: usize = 4;

    /// Place of the kernel among those of a storage.
    fn index(&self) -> usize {
        match self {
            Self::Nothing => 0,
            Self::Added(_) => 1,
            Self::Normed(_) => 2,
            Self::Gated(_) => 3,
        }
    }

    fn gain(&self) -> Option<Gain<'_>> {
        match *self {
            Self::Normed(gain) | Self::Gated(gain) => Some(gain),
            Self::Nothing | Self::Added(_) => None,
        }
    }

    fn cut(&self, storage: Storage) -> Cut {
        match (self, storage) {
            (Self::Nothing, Storage::Dense) => cut(1, 8, 2),
            (_, Storage::Bytes) => cut(2, 4, 1),
            (Self::Added(_), _) => cut(1, 16, 1),
            (Self::Normed(_), Storage::Dense) => cut(4, 8, 1),
            (Self::Gated(_), Storage::Dense) | (Self::Nothing | Self::Normed(_), Storage::Codes) => {
                cut(2, 4, 2)
            }
            (Self::Gated(_), Storage::Codes) => cut(2, 8, 1),
        }
    }
}

/// One kernel a storage and surroundings.
#[derive(Debug)]
pub struct Products {
    kernels: Vec<Kernel>,
}

impl Products {
    /// `None` where the library's own products serve.
    pub(super) fn new(maker: &Maker) -> Option<Self> {
        let Maker::Cuda(_) = maker else { return None };
        let kernels = STORAGES
            .into_iter()
            .flat_map(|(storage, kinds)| (0..kinds).map(move |kind| Self::kernel(maker, storage, kind)))
            .collect::<Option<_>>()?;
        Some(Self { kernels })
    }

    fn kernel(maker: &Maker, storage: Storage, kind: usize) -> Option<Kernel> {
        let (norm, added, gated) = (kind >= 2, kind == 1, kind == 3);
        let (name, inputs): (_, &[&str]) = match (storage, kind) {
            (Storage::Dense, 0) => ("product", &["x", "w"]),
            (Storage::Dense, 1) => ("product_added", &["x", "w", "added"]),
            (Storage::Dense, 2) => ("product_normed", &["x", "w", "gain"]),
            (Storage::Dense, _) => ("product_gated", &["x", "w", "gain"]),
            (Storage::Codes, 0) => ("codes", &["x", "w", "scales", "biases"]),
            (Storage::Codes, 1) => ("codes_added", &["x", "w", "scales", "biases", "added"]),
            (Storage::Codes, 2) => ("codes_normed", &["x", "w", "scales", "biases", "gain"]),
            (Storage::Codes, _) => ("codes_gated", &["x", "w", "scales", "biases", "gain"]),
            (Storage::Bytes, _) => ("bytes", &["x", "w", "scales"]),
        };
        let body = format!(
            "#define NORM {}\n#define EPILOGUE {}\n#define GAIN {}\n#define ADDED {}\n#define ROW_SCALE(n) {}\n{}{}{}",
            u8::from(norm),
            u8::from(added) + 2 * u8::from(gated),
            if norm {
                "gain"
            } else {
                "static_cast<const float*>(nullptr)"
            },
            if added { "added" } else { "x" },
            match storage {
                Storage::Bytes => "scales[n]",
                Storage::Dense | Storage::Codes => "1.0f",
            },
            text::HEAD,
            match storage {
                Storage::Dense => text::DENSE,
                Storage::Codes => text::CODES,
                Storage::Bytes => text::BYTES,
            },
            text::TAIL,
        );
        maker.kernel(Text {
            name,
            inputs,
            integers: &[],
            outputs: &["y"],
            helpers: text::PRELUDE,
            body: body.into(),
        })
    }

    /// Whether a product of `x` [B, L, in] is taken.
    pub fn takes(x: &Array, stored: Stored<'_>) -> bool {
        let whole = |step: i32| stored.inputs() % step == 0;
        x.ndim() == 3
            && x.dtype() == Dtype::Bfloat16
            && x.dim(0) * x.dim(1) <= ROWS
            && match stored {
                Stored::Dense(weight) => weight.dtype() == Dtype::Bfloat16 && whole(64),
                Stored::Codes {
                    scales,
                    biases,
                    group,
                    ..
                } => {
                    let narrow = scales.dtype() == Dtype::Bfloat16 && biases.dtype() == Dtype::Bfloat16;
                    narrow && matches!(group, 32 | 64 | 128) && whole(128)
                }
                Stored::Bytes { .. } => whole(128),
            }
    }

    /// The product with what is around it, of what [`Products::takes`]; x [B, L, in] → [B, L, out], half of it when gated.
    pub fn product(&self, x: &Array, stored: Stored<'_>, around: Around<'_>) -> Result<Array> {
        let outputs = stored.outputs();
        let gated = matches!(around, Around::Gated(_));
        let width = if gated { outputs / 2 } else { outputs };
        let mut inputs = vec![x];
        let mut group = None;
        match stored {
            Stored::Dense(weight) => inputs.push(weight),
            Stored::Codes {
                weight,
                scales,
                biases,
                group: inputs_a_scale,
            } => {
                inputs.extend([weight, scales, biases]);
                group = Some(inputs_a_scale);
            }
            Stored::Bytes { weight, scales } => {
                if !matches!(around, Around::Nothing) {
                    return Err(Exception::custom("a product of bytes has nothing around it"));
                }
                inputs.extend([weight, scales]);
            }
        }
        let gain = around.gain();
        inputs.extend(gain.map(|gain| gain.gain));
        if let Around::Added(added) = around {
            inputs.push(added);
        }
        let storage = stored.storage();
        let cut = around.cut(storage);
        let rows = x.dim(0) * x.dim(1);
        let mut ints = vec![
            ("TILES", cut.tiles),
            ("WARPS", cut.warps),
            ("HALVES", if rows <= ROWS / 2 { 1 } else { 2 }),
            ("UNROLL", cut.unroll),
            ("EPS", bits(gain.map_or(0.0, |gain| gain.eps))),
        ];
        ints.extend(group.map(|group| ("GROUP", group)));
        let results = 8 * if gated { cut.tiles / 2 } else { cut.tiles };
        let blocks = (width + results - 1) / results;
        let kernel = &self.kernels[storage.first() + around.index()];
        let mut out = kernel.call(&Call {
            inputs: &inputs,
            integers: &[],
            outputs: &[(&[x.dim(0), x.dim(1), width], Dtype::Bfloat16)],
            constants: &ints,
            dtype: Dtype::Bfloat16,
            grid: [blocks * cut.warps * 32, 1, 1],
            group: [cut.warps * 32, 1, 1],
        })?;
        one(&mut out)
    }
}
