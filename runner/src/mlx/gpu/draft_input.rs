//! What a multi-token-prediction head's first product reads, in one launch: the norm of a token's embedding, and beside it the
//! norm of the state that the token follows.
//!
//! Invariant: as if rows of the embedding were taken, decoded where they are codes, normed, and joined to the normed states.

use mlx_rs::error::{Exception, Result};
use mlx_rs::{Array, Dtype};

use super::kernel::{Call, Kernel, Maker, Text};
use super::products::{Gain, Stored};
use super::{bits, one, NORM_THREADS};

/// `VALUE(i)` is column i of the row's input. ids [B, L] int32, hidden [B, L, D], gains [D] float32 → y [B, L, 2 D].
const BODY: &str = r"
  SHARED float partial[32];
  int width = hidden_shape[2];
  long row = GRID_Y;
  bool second = GRID_Z == 1;
  long id = ids[row];
  int thread = GRID_X;
  float square = 0.0f;
  for (int i = thread; i < width; i += THREADS) {
    float v = VALUE(i);
    square += v * v;
  }
  square = warp_sum(square);
  if (LANE == 0) { partial[WARP] = square; }
  BARRIER;
  float total = warp_sum(int(LANE) < THREADS / 32 ? partial[LANE] : 0.0f);
  float scale = RSQRT(total / float(width) + (second ? FLOAT_BITS(STATE_EPS) : FLOAT_BITS(TOKEN_EPS)));
  for (int i = thread; i < width; i += THREADS) {
    y[row * 2 * width + (second ? width : 0) + i] = T(VALUE(i) * scale * (second ? state_gain[i] : token_gain[i]));
  }
";

const DENSE: &str = "
#define VALUE(i) (second ? float(hidden[row * width + (i)]) : float(T(w[id * width + (i)])))
";

const CODES: &str = "
#define CODE(i) float((w[id * (width >> 3) + ((i) >> 3)] >> (4 * ((i) & 7))) & 15u)
#define GROUP_OF(i) (id * (width / GROUP) + (i) / GROUP)
#define VALUE(i) (second ? float(hidden[row * width + (i)]) \\
    : float(T(CODE(i) * float(scales[GROUP_OF(i)]) + float(biases[GROUP_OF(i)]))))
";

/// See the module's text.
#[derive(Debug)]
pub(super) struct DraftInput {
    dense: Kernel,
    codes: Kernel,
}

impl DraftInput {
    pub(super) fn new(maker: &Maker) -> Option<Self> {
        let kernel = |name, inputs, helpers| {
            maker.kernel(Text {
                name,
                inputs,
                integers: &[],
                outputs: &["y"],
                helpers,
                body: BODY.into(),
            })
        };
        Some(Self {
            dense: kernel(
                "draft_input",
                &["ids", "w", "hidden", "token_gain", "state_gain"],
                DENSE,
            )?,
            codes: kernel(
                "draft_input_codes",
                &[
                    "ids",
                    "w",
                    "scales",
                    "biases",
                    "hidden",
                    "token_gain",
                    "state_gain",
                ],
                CODES,
            )?,
        })
    }

    /// `table` holds the embeddings [V, D]; gains of the token's norm and of the state's; ids [B, L] int32, hidden [B, L, D] → [B, L, 2 D] in the type of `hidden`.
    pub(super) fn of(
        &self,
        ids: &Array,
        table: Stored<'_>,
        hidden: &Array,
        (token, state): (Gain<'_>, Gain<'_>),
    ) -> Result<Array> {
        let &[batch, rows, width] = hidden.shape() else {
            return Err(Exception::custom("states of other than three axes"));
        };
        if ids.dtype() != Dtype::Int32 || ids.shape() != [batch, rows] {
            return Err(Exception::custom("a token a state is wanted"));
        }
        let mut constants = vec![
            ("THREADS", NORM_THREADS),
            ("TOKEN_EPS", bits(token.eps)),
            ("STATE_EPS", bits(state.eps)),
        ];
        let mut inputs = vec![ids];
        let kernel = match table {
            Stored::Dense(weight) => {
                inputs.push(weight);
                &self.dense
            }
            Stored::Codes {
                weight,
                scales,
                biases,
                group,
            } => {
                inputs.extend([weight, scales, biases]);
                constants.push(("GROUP", group));
                &self.codes
            }
            Stored::Bytes { .. } => return Err(Exception::custom("embeddings are not kept in bytes")),
        };
        inputs.extend([hidden, token.gain, state.gain]);
        let mut out = kernel.call(&Call {
            inputs: &inputs,
            integers: &[],
            outputs: &[(&[batch, rows, 2 * width], hidden.dtype())],
            constants: &constants,
            dtype: hidden.dtype(),
            grid: [NORM_THREADS, batch * rows, 2],
            group: [NORM_THREADS, 1, 1],
        })?;
        one(&mut out)
    }
}
