//! A request with pictures, from base64 to the head's key-values, in chunks of every size.

use std::path::Path as FilePath;
use std::rc::Rc;

use base64::prelude::{Engine as _, BASE64_STANDARD};
use mlx_rs::Array;
use serde_json::Value;

use super::decode::ids_array;
use super::drafter::Drafter;
use super::media::{place, PictureRules, Placed};
use crate::image::{ImageRules, DEFAULT_PIXEL_BUDGET};
use crate::mlx::{ops, Backend, Path};
use crate::model::checkpoint::Checkpoint;
use crate::model::plan::{plan, PlanOptions};
use crate::model::qwen3_5::{load, Scores};
use crate::model::weights::{Precision, Weights};
use crate::model::{Batch, Dispatch, Model as _};

fn worst(a: &Array, b: &Array) -> f32 {
    assert_eq!(a.shape(), b.shape());
    let (a, b) = (a.to_vec_cast::<f32>().unwrap(), b.to_vec_cast::<f32>().unwrap());
    a.iter()
        .zip(&b)
        .map(|(a, b)| (a - b).abs())
        .fold(0f32, |a, b| if b.is_nan() { b } else { a.max(b) })
}

#[test]
fn chunks_of_a_prompt_with_pictures_leave_what_one_pass_leaves_in_trunk_and_head() {
    Backend::select(true);
    let fixtures = FilePath::new(env!("CARGO_MANIFEST_DIR")).join("../fixtures");
    let dir = fixtures.join("tiny/vision");
    let checkpoint = Checkpoint::open(&dir).unwrap();
    let plan = plan(&checkpoint, PlanOptions::default()).unwrap();
    let mut progress = |_| true;
    let weights = Weights::new(&checkpoint, &plan, Precision::Widen, &mut progress).unwrap();
    let model = load(&weights, Path::Cpu, Scores::Stored).unwrap().model;
    let vision = checkpoint.config().vision.unwrap();
    let rules = PictureRules {
        token: checkpoint.config().media.image.unwrap(),
        rules: ImageRules::read(&dir, &vision, DEFAULT_PIXEL_BUDGET).unwrap(),
    };

    let golden: Value =
        serde_json::from_slice(&std::fs::read(fixtures.join("golden/vision.json")).unwrap()).unwrap();
    let case = &golden["vision"][1];
    let ids: Vec<u32> = case["ids"]
        .as_array()
        .unwrap()
        .iter()
        .map(|id| id.as_u64().unwrap() as u32)
        .collect();
    let mut prompt = ids.clone();
    prompt.dedup_by(|a, b| a == b && *a == rules.token);
    let images: Vec<String> = ["a.png", "b.png"]
        .iter()
        .map(|name| BASE64_STANDARD.encode(std::fs::read(fixtures.join("golden").join(name)).unwrap()))
        .collect();
    let images: Vec<&str> = images.iter().map(String::as_str).collect();
    let (tokens, pictures) = place(Some(&rules), prompt, &images).unwrap();
    assert_eq!(tokens, ids);

    let total = tokens.len() as i32;
    let placed = Rc::new(Placed::new(model.tower(), &pictures, tokens.len(), 0).unwrap());
    assert_eq!(i64::from(placed.delta()), case["delta"].as_i64().unwrap());
    let head = model.self_draft().unwrap();
    let run = |chunk: usize| {
        let mut caches = model.new_caches();
        let mut drafter = Drafter::new(head).with_media(&placed);
        let mut parts = Vec::new();
        for part in tokens.chunks(chunk) {
            let (ids, slot) = (ids_array(part), caches.offset());
            let batch = Batch {
                ids: &ids,
                positions: placed.positions(slot, ids.dim(1)),
                media: &placed.media(slot, ids.dim(1)).unwrap(),
                conditioning: None,
                dispatch: Dispatch::Together,
            };
            let hidden = model.forward(&batch, &mut caches).unwrap();
            drafter.observe(&ids, &hidden, &caches).unwrap();
            parts.push(hidden);
        }
        drafter.flush(&caches).unwrap();
        let segments = drafter.caches().kv_segments(0, total - 1).unwrap();
        (mlx_rs::ops::concatenate(&parts, 1).unwrap(), segments)
    };

    // One pass of the head over all pairs, as the goldens have it.
    let (hidden, _) = run(tokens.len());
    let ahead = ids_array(&tokens[1..]);
    let before = ops::slice_axis(&hidden, 1, 0, total - 1).unwrap();
    let mut draft = head.new_caches();
    let batch = Batch {
        ids: &ahead,
        positions: placed.positions(0, total - 1),
        media: &placed.media(1, total - 1).unwrap(),
        conditioning: Some(&before),
        dispatch: Dispatch::Together,
    };
    head.forward(&batch, &model.new_caches(), &mut draft).unwrap();
    let wanted = draft.kv_segments(0, total - 1).unwrap();
    for chunk in [1, 3, 8, tokens.len()] {
        let (states, segments) = run(chunk);
        assert!(worst(&states, &hidden) < 1e-4, "chunks of {chunk}: trunk");
        for (found, wanted) in segments.iter().zip(&wanted) {
            assert!(
                worst(&found.keys, &wanted.keys) < 1e-4,
                "chunks of {chunk}: the head's keys"
            );
            assert!(
                worst(&found.values, &wanted.values) < 1e-4,
                "chunks of {chunk}: the head's values"
            );
        }
    }

    // A prompt restored in the middle of a picture runs the tower for what is still to come only.
    let late = Placed::new(model.tower(), &pictures, tokens.len(), pictures[0].span.end()).unwrap();
    assert!(late.media(0, total).unwrap().len() == 1);
    let slot = pictures[1].span.slot as i32;
    let (early, late) = (placed.media(slot, 2).unwrap(), late.media(slot, 2).unwrap());
    assert_eq!(worst(&early[0].features, &late[0].features), 0.0);
}
