//! What running a model takes besides its weights.
//!
//! Invariant: caches are counted exactly as the model keeps them (keys and values of full layers for each token; delta state
//! in float32 and the convolution's tail for each sequence); activations are an estimate from above for one prefill chunk.

use safetensors::Dtype as FileDtype;

use super::checkpoint::Checkpoint;
use super::config::{LayerKind, ModelConfig};
use super::plan::Plan;
use super::quant::ModuleQuant;

/// Below this many bytes in bfloat16 a projection takes no longer than a launch.
const SMALLEST: u64 = 64 << 20;
/// The part of the memory left beside the weights that the bytes may take.
const SHARE: u64 = 8;

/// Bytes of state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct StateBytes {
    /// Trunk's keys and values for one token.
    pub kv_per_token: u64,
    /// Head's keys and values for one token, were it used.
    pub draft_kv_per_token: u64,
    /// Delta-net state of one sequence, whatever its length.
    pub recurrent_per_sequence: u64,
}

/// Bytes of state where an activation takes `element` bytes.
pub fn state(config: &ModelConfig, element: u64) -> StateBytes {
    let layer_kv = 2 * (config.kv_heads * config.head_dim) as u64 * element;
    let delta = &config.delta;
    let matrix = (delta.value_heads * delta.value_dim * delta.key_dim) as u64 * 4;
    let tail = ((delta.conv_kernel - 1) * delta.channels()) as u64 * element;
    StateBytes {
        kv_per_token: config.count(LayerKind::Full) as u64 * layer_kv,
        draft_kv_per_token: layer_kv,
        recurrent_per_sequence: config.count(LayerKind::Linear) as u64 * (matrix + tail),
    }
}

/// Bytes of activations while `rows` tokens pass: the widest layer's intermediates twice over, and a few rows of logits.
pub fn activations(config: &ModelConfig, rows: usize, element: u64) -> u64 {
    const LOGIT_ROWS: usize = 17;
    let (d, hd, delta) = (config.hidden_size, config.head_dim, &config.delta);
    let full = (3 * config.heads + 2 * config.kv_heads) * hd;
    let linear = delta.channels() + 3 * delta.value_width();
    let mlp = match &config.moe {
        Some(moe) => 3 * (moe.per_token * moe.intermediate + moe.shared_intermediate) + moe.per_token * d,
        None => 3 * config.intermediate_size,
    };
    let widest = full.max(linear).max(mlp).max(3 * config.intermediate_size);
    (rows as u64 * (4 * d + 2 * widest) as u64 + (LOGIT_ROWS * config.vocab_size) as u64) * element
}

/// Bytes in memory of a second vocabulary projection in [`crate::mlx::gpu::bytes::ByteRows`], for the head's drafts, where a CUDA
/// device gains by it and `room`, what the memory limit leaves beside the weights, is plenty.
pub fn draft_scores(checkpoint: &Checkpoint, plan: &Plan, room: u64) -> Option<u64> {
    let name = if plan.tied { "embed_tokens" } else { "lm_head" };
    let module = plan.modules.iter().find(|module| module.path == name)?;
    let stored = checkpoint.tensor(&format!("{name}.weight"))?;
    let &[outputs, inputs] = &module.shape[..] else {
        return None;
    };
    let dense = module.quant == ModuleQuant::Dense && stored.dtype == FileDtype::BF16;
    (plan.head.is_active() && dense)
        .then(|| byte_rows([outputs as u64, inputs as u64], room))
        .flatten()
}

/// The same of a dense bfloat16 matrix [out, in].
fn byte_rows([outputs, inputs]: [u64; 2], room: u64) -> Option<u64> {
    let bytes = outputs * (inputs + 4);
    let pays = inputs % 128 == 0 && 2 * outputs * inputs >= SMALLEST;
    (pays && bytes <= room / SHARE).then_some(bytes)
}

#[cfg(test)]
mod tests {
    use serde_json::{json, Value};

    use super::*;

    fn published(hidden: usize, layers: usize, heads: [usize; 2], nv: usize) -> ModelConfig {
        let text = json!({
            "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads[0],
            "num_key_value_heads": heads[1], "head_dim": 256, "vocab_size": 248_320, "intermediate_size": 4 * hidden,
            "linear_num_key_heads": 16, "linear_num_value_heads": nv, "linear_key_head_dim": 128,
            "linear_value_head_dim": 128, "rope_theta": 1e7
        });
        match json!({"model_type": "qwen3_5", "text_config": text}) {
            Value::Object(map) => ModelConfig::parse(map).unwrap(),
            _ => unreachable!(),
        }
    }

    #[test]
    fn published_models_take_what_their_dimensions_say() {
        const MIB: u64 = 1 << 20;
        for (config, kv, draft, state_mib) in [
            // (0.8B, 9B, 27B): keys and values a token, the head's, and delta state in MiB, bf16 activations.
            (published(1024, 24, [8, 2], 16), 12 << 10, 2 << 10, 18),
            (published(4096, 32, [16, 4], 32), 32 << 10, 4 << 10, 48),
            (published(5120, 64, [24, 4], 48), 64 << 10, 4 << 10, 144),
        ] {
            let bytes = state(&config, 2);
            assert_eq!((bytes.kv_per_token, bytes.draft_kv_per_token), (kv, draft));
            // Tails add less than 4 %.
            let (low, high) = (state_mib * MIB, state_mib * MIB * 104 / 100);
            assert!(
                (low..high).contains(&bytes.recurrent_per_sequence),
                "{}",
                bytes.recurrent_per_sequence
            );
        }
    }

    #[test]
    fn a_second_projection_needs_room_and_a_vocabulary_that_takes_long_to_read() {
        const GIB: u64 = 1 << 30;
        let real = [248_320, 2560];
        assert_eq!(byte_rows(real, 120 * GIB), Some(248_320 * 2564));
        // An eighth of what is left must do.
        assert_eq!(byte_rows(real, 4 * GIB), None);
        assert_eq!(byte_rows([4096, 256], 120 * GIB), None);
        assert_eq!(byte_rows([248_320, 2562], 120 * GIB), None);
    }

    #[test]
    fn activations_grow_with_rows_and_stay_far_below_the_weights() {
        let config = published(5120, 64, [24, 4], 48);
        let (one, chunk) = (activations(&config, 1, 2), activations(&config, 512, 2));
        assert!(one < chunk && chunk < 1 << 30, "{one} {chunk}");
    }
}
