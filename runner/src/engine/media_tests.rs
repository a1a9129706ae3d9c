//! Placeholders, their features and positions, and the refusals.

use super::*;
use crate::mlx::Backend;
use crate::model::vision_config::VisionConfig;

const PLACEHOLDER: u32 = 9;

fn rules() -> PictureRules {
    let vision = VisionConfig {
        depth: 1,
        hidden_size: 32,
        intermediate_size: 32,
        heads: 2,
        in_channels: 3,
        patch_size: 16,
        temporal_patch_size: 2,
        spatial_merge_size: 2,
        positions: 16,
        out_hidden_size: 32,
    };
    let mut rules = ImageRules::new(&vision, 1 << 20);
    rules.min_pixels = 1024;
    PictureRules {
        token: PLACEHOLDER,
        rules,
    }
}

fn picture(width: u32, height: u32) -> String {
    let mut bytes = std::io::Cursor::new(Vec::new());
    ::image::RgbImage::new(width, height)
        .write_to(&mut bytes, ::image::ImageFormat::Png)
        .unwrap();
    BASE64_STANDARD.encode(bytes.into_inner())
}

#[test]
fn placeholders_grow_to_the_features_of_their_own_picture() {
    let (wide, tall) = (picture(96, 64), picture(32, 96));
    let prompt = vec![1, PLACEHOLDER, 2, PLACEHOLDER, 3];
    let (tokens, pictures) = place(Some(&rules()), prompt, &[&wide, &tall]).unwrap();
    assert_eq!(tokens, [1, 9, 9, 9, 9, 9, 9, 2, 9, 9, 9, 3]);
    assert_eq!(
        pictures[0].span,
        ImageSpan {
            slot: 1,
            rows: 2,
            cols: 3
        }
    );
    assert_eq!(
        pictures[1].span,
        ImageSpan {
            slot: 8,
            rows: 3,
            cols: 1
        }
    );
    assert_ne!(pictures[0].key().hash, pictures[1].key().hash);
}

#[test]
fn a_request_that_does_not_fit_its_pictures_is_refused_by_name() {
    let code = |rules: Option<&PictureRules>, tokens: &[u32], images: &[&str]| {
        let refusal = place(rules, tokens.to_vec(), images).unwrap_err();
        (refusal.code.clone(), refusal.message)
    };
    let (rules, good) = (rules(), picture(32, 32));
    let (found, message) = code(Some(&rules), &[1, 2], &[&good]);
    assert_eq!(found, ErrorCode::InvalidRequest);
    assert!(message.contains("0 image placeholders for 1 images"), "{message}");
    let (found, message) = code(Some(&rules), &[9, 9], &[&good, "!!"]);
    assert_eq!(found, ErrorCode::BadImage);
    assert!(message.starts_with("image 1: not base64"), "{message}");
    let broken = BASE64_STANDARD.encode(b"GIF89a");
    assert_eq!(code(Some(&rules), &[9], &[&broken]).0, ErrorCode::BadImage);
    assert_eq!(code(None, &[9], &[&good]).0, ErrorCode::Unsupported);
}

#[test]
fn a_chunk_takes_its_part_of_a_picture_and_the_slot_ahead_its_feature() {
    Backend::select(true);
    let span = ImageSpan {
        slot: 2,
        rows: 2,
        cols: 2,
    };
    let values: Vec<f32> = (0..4).map(|v| v as f32).collect();
    let features = vec![(span, Array::from_slice(&values, &[4, 1]))];
    let placed = Placed {
        positions: Some(mrope_positions(8, &[span])),
        features,
    };
    let rows = |slot, rows| {
        let found = placed.media(slot, rows).unwrap();
        found
            .iter()
            .map(|m| (m.row, m.features.to_vec_cast::<f32>().unwrap()))
            .collect::<Vec<_>>()
    };
    assert_eq!(rows(0, 4), [(2, vec![0.0, 1.0])]);
    assert_eq!(rows(4, 4), [(0, vec![2.0, 3.0])]);
    // The head's pairs of slots 0.. read one slot ahead.
    assert_eq!(rows(1, 4), [(1, vec![0.0, 1.0, 2.0])]);
    assert!(rows(6, 2).is_empty());
    assert_eq!(placed.delta(), -2);
    assert!(matches!(
        placed.positions(8, 1),
        Positions::Sequential { start: 6 }
    ));
    assert!(matches!(placed.positions(6, 2), Positions::Axes(axes) if axes[1] == [4, 5]));
}

#[test]
fn a_prompt_without_pictures_stands_at_its_slots() {
    let placed = Placed::default();
    assert!(matches!(
        placed.positions(5, 3),
        Positions::Sequential { start: 5 }
    ));
    assert!(placed.media(0, 9).unwrap().is_empty());
}
