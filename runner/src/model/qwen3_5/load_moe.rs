//! Builds a mixture of experts from each of the spellings that checkpoints use.
//!
//! Invariant: expert e of a stack is the checkpoint's expert e, gate rows before up rows, however they were spread over tensors;
//! at most one projection's experts are held twice at a time.

use mlx_rs::transforms::eval;

use super::experts::{ExpertStack, Experts, GateUp};
use super::load::Builder;
use super::mlp::Moe;
use crate::model::config::MoeConfig;
use crate::model::error::LoadError;
use crate::model::layout::{self, Experts as Spelling};
use crate::model::matrix::Matrix;
use crate::model::weights::Result;

impl Builder<'_, '_> {
    /// The mixture at `path` (such as `layers.0.mlp`).
    pub(super) fn moe(&self, path: &str, moe: &MoeConfig) -> Result<Moe> {
        Ok(Moe {
            router: self.weights.linear(&format!("{path}.gate"))?,
            experts: self.experts(path, moe)?,
            shared: self.swiglu(&format!("{path}.shared_expert"))?,
            shared_gate: self.weights.linear(&format!("{path}.shared_expert_gate"))?,
            top_k: moe.per_token as i32,
            renormalise: moe.renormalise,
        })
    }

    fn experts(&self, path: &str, moe: &MoeConfig) -> Result<Experts> {
        let spelling =
            layout::experts(self.weights.checkpoint(), path).ok_or_else(|| LoadError::MissingTensors {
                names: vec![format!("{path}.experts.gate_up_proj")],
            })?;
        let stack =
            |matrix: Matrix| Ok::<_, crate::model::weights::ModelError>(ExpertStack::new(matrix, self.path)?);
        let (gate_up, down) = match spelling {
            Spelling::Fused => {
                let both = self.weights.stack(&format!("{path}.experts.gate_up_proj"))?;
                let down = self.weights.stack(&format!("{path}.experts.down_proj"))?;
                (GateUp::Joined(stack(both)?), down)
            }
            Spelling::Stacked => {
                let part = |name: &str| self.weights.stack(&format!("{path}.switch_mlp.{name}"));
                (
                    self.gate_up(part("gate_proj")?, part("up_proj")?)?,
                    part("down_proj")?,
                )
            }
            Spelling::Each => {
                let all = |name: &str| self.stacked(path, name, moe.experts);
                (
                    self.gate_up(all("gate_proj")?, all("up_proj")?)?,
                    all("down_proj")?,
                )
            }
        };
        Ok(Experts {
            gate_up,
            down: stack(down)?,
            path: self.path,
        })
    }

    fn gate_up(&self, gate: Matrix, up: Matrix) -> Result<GateUp> {
        if !(gate.is_like(&up) && gate.joins() && up.joins()) {
            return Ok(GateUp::Apart {
                gate: ExpertStack::new(gate, self.path)?,
                up: ExpertStack::new(up, self.path)?,
            });
        }
        let both = Matrix::join(&[gate, up])?;
        eval(both.arrays())?;
        Ok(GateUp::Joined(ExpertStack::new(both, self.path)?))
    }

    /// One projection of experts that are modules each, as one stack.
    fn stacked(&self, path: &str, name: &str, experts: usize) -> Result<Matrix> {
        let mut parts = (0..experts)
            .map(|e| self.weights.stack(&format!("{path}.experts.{e}.{name}")))
            .collect::<Result<Vec<_>>>()?;
        // One expert stored otherwise than the rest keeps the codes of none: a stack has one form.
        if !parts.iter().all(|part| part.is_like(&parts[0])) {
            for part in &mut parts {
                let values = Matrix::Dense(part.decode(self.weights.activations())?);
                eval(values.arrays())?;
                *part = values;
            }
        }
        let stack = Matrix::stack(&parts)?;
        eval(stack.arrays())?;
        Ok(stack)
    }
}
