//! A name for what a checkpoint computes.
//!
//! Invariant: equal for the same tensors and config however they are spread over files or formatted, different for other
//! weights of the same shape; cheap, since only a bounded number of places is read.

use xxhash_rust::xxh3::Xxh3;

use super::checkpoint::{dtype_name, Checkpoint};

/// Places read in all: each may cost a page from disk, and a mixture can have 64,000 tensors.
const PLACES: usize = 1 << 14;
/// Most places in one tensor.
const PLACES_A_TENSOR: usize = 16;
/// Bytes at a place.
const SPAN: usize = 64;

/// 32 hexadecimal digits that name `checkpoint`'s weights and config.
pub fn fingerprint(checkpoint: &Checkpoint) -> String {
    let mut hash = Xxh3::new();
    let mut add = |bytes: &[u8]| {
        // Length first: moving a byte from one fact to its neighbour must change the result.
        hash.update(&(bytes.len() as u64).to_le_bytes());
        hash.update(bytes);
    };
    let mut config: Vec<(&String, String)> = checkpoint
        .config()
        .raw
        .iter()
        .map(|(key, value)| (key, value.to_string()))
        .collect();
    config.sort();
    for (key, value) in config {
        add(key.as_bytes());
        add(value.as_bytes());
    }
    let places = (PLACES / checkpoint.tensors().count().max(1)).clamp(1, PLACES_A_TENSOR);
    for tensor in checkpoint.tensors() {
        add(tensor.name.as_bytes());
        add(dtype_name(tensor.dtype).as_bytes());
        for dim in tensor.shape {
            add(&(*dim as u64).to_le_bytes());
        }
        let step = (tensor.data.len() / places).max(SPAN);
        for at in (0..tensor.data.len()).step_by(step) {
            add(&tensor.data[at..(at + SPAN).min(tensor.data.len())]);
        }
    }
    format!("{:032x}", hash.digest128())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::model::test_support::{tiny, Edited};

    fn of(edited: &Edited) -> String {
        let (_dir, opened) = edited.open();
        fingerprint(&opened.unwrap())
    }

    #[test]
    fn files_and_their_order_do_not_count() {
        let committed = fingerprint(&Checkpoint::open(&tiny("dense-tied")).unwrap());
        let mut e = Edited::of("dense-tied");
        assert_eq!(of(&e), committed);
        e.index = None;
        let all = std::mem::take(&mut e.files).into_values().flatten().collect();
        e.files.insert("model.safetensors".into(), all);
        assert_eq!(of(&e), committed);
    }

    #[test]
    fn weights_and_config_count() {
        let mut e = Edited::of("dense-tied");
        let before = of(&e);
        e.tensor("embed_tokens.weight").data[0] ^= 1;
        let other_weights = of(&e);
        e.text().insert("rms_norm_eps".into(), json!(1e-5));
        assert!(before != other_weights && other_weights != of(&e) && before.len() == 32);
    }
}
