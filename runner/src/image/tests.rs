//! Decoding, resizing and cutting of pictures, and what is refused.

use proptest::prelude::*;

use super::*;
use crate::model::test_support::{fixtures, tiny};
use crate::model::vision_config::VisionConfig;

const TOWER: VisionConfig = VisionConfig {
    depth: 1,
    hidden_size: 16,
    intermediate_size: 16,
    heads: 2,
    in_channels: 3,
    patch_size: 16,
    temporal_patch_size: 2,
    spatial_merge_size: 2,
    positions: 64,
    out_hidden_size: 64,
};

fn bytes(name: &str) -> Vec<u8> {
    std::fs::read(fixtures("images").join(name)).unwrap()
}

fn picture(name: &str) -> Rgb {
    decode(&bytes(name)).unwrap_or_else(|e| panic!("{name}: {e}"))
}

fn full() -> ImageRules {
    ImageRules::new(&TOWER, usize::MAX)
}

#[test]
fn lossless_formats_give_the_same_pixels_and_alpha_is_dropped() {
    let photo = picture("photo.png");
    assert_eq!((photo.width, photo.height), (53, 37));
    assert_eq!(picture("photo.webp"), photo);
    assert_eq!(picture("alpha.png"), photo);
    assert_eq!(picture("first.gif"), picture("first.png"));
    let gray = picture("gray.png");
    assert!(gray.pixels.chunks(3).all(|p| p[0] == p[1] && p[1] == p[2]));
}

#[test]
fn a_picture_stored_on_its_side_is_set_upright() {
    let turned = picture("turned.jpg");
    assert_eq!((turned.width, turned.height), (32, 48));
    // Red was on the left; a quarter turn clockwise puts it on top.
    let near = |p: &[u8], q: [u8; 3]| p.iter().zip(q).all(|(a, b)| a.abs_diff(b) < 12);
    assert!(
        near(&turned.pixels[..3], [200, 30, 30]),
        "{:?}",
        &turned.pixels[..3]
    );
    let last = turned.pixels.len() - 3;
    assert!(
        near(&turned.pixels[last..], [30, 30, 200]),
        "{:?}",
        &turned.pixels[last..]
    );
    assert_eq!(picture("turned.webp").height, 48);
}

#[test]
fn bicubic_resizing_equals_pillows_to_the_byte() {
    let photo = picture("photo.png");
    for (width, height) in [(64, 32), (32, 32), (32, 96), (53, 64), (7, 5)] {
        let wanted = picture(&format!("photo-{width}x{height}.png"));
        // Not assert_eq: a failure would print every pixel.
        assert!(bicubic(&photo, width, height) == wanted, "{width} x {height}");
    }
    assert!(bicubic(&photo, 53, 37) == photo);
}

#[test]
fn sizes_are_those_of_the_reference() {
    // Reference: the published smart_resize, run in Python for these sides.
    let budget = ImageRules::new(&TOWER, DEFAULT_PIXEL_BUDGET);
    for (from, wanted, within_budget) in [
        ((1000, 750), (992, 736), (992, 736)),
        ((48, 48), (256, 256), (256, 256)),
        ((80, 112), (224, 320), (224, 320)),
        ((1, 1), (256, 256), (256, 256)),
        ((4000, 3000), (4000, 3008), (1312, 960)),
        ((10000, 8000), (4576, 3648), (1280, 1024)),
        ((200, 1), (3648, 32), (3648, 32)),
        ((4112, 4112), (4096, 4096), (1120, 1120)),
        ((304, 240), (320, 256), (320, 256)),
        ((272, 240), (256, 256), (256, 256)),
    ] {
        assert_eq!(full().size(from.0, from.1).unwrap(), wanted, "{from:?}");
        assert_eq!(budget.size(from.0, from.1).unwrap(), within_budget, "{from:?}");
    }
}

#[test]
fn extreme_aspect_ratios_are_refused_by_name() {
    let error = full().size(201, 1).unwrap_err().to_string();
    assert_eq!(error, "image is 201 x 1: its aspect ratio is above 200");
    assert!(full().size(0, 5).unwrap_err().to_string().contains("zero side"));
}

#[test]
fn rules_come_from_the_checkpoint_and_contradictions_are_errors() {
    let rules = ImageRules::read(&tiny("vision"), &TOWER, DEFAULT_PIXEL_BUDGET).unwrap();
    assert_eq!((rules.min_pixels, rules.max_pixels), (1024, DEFAULT_PIXEL_BUDGET));
    let dir = tempfile::tempdir().unwrap();
    let write = |text: &str| std::fs::write(dir.path().join("preprocessor_config.json"), text).unwrap();
    assert_eq!(ImageRules::read(dir.path(), &TOWER, usize::MAX).unwrap(), full());
    write(r#"{"patch_size": 14}"#);
    let error = ImageRules::read(dir.path(), &TOWER, 1).unwrap_err().to_string();
    assert!(error.contains("patch_size is 14; expected 16"), "{error}");
    write(r#"{"image_std": [0, 1, 1]}"#);
    assert!(ImageRules::read(dir.path(), &TOWER, 1).is_err());
    write(r#"{"min_pixels": 2048, "max_pixels": 4096, "image_mean": [0.1, 0.2, 0.3]}"#);
    let rules = ImageRules::read(dir.path(), &TOWER, usize::MAX).unwrap();
    assert_eq!(
        (rules.min_pixels, rules.max_pixels, rules.mean[1]),
        (2048, 4096, 0.2)
    );
}

#[test]
fn rows_follow_merged_blocks_and_hold_channel_frame_y_x() {
    // A picture whose red channel counts columns and whose green channel counts rows.
    let (width, height) = (64usize, 32usize);
    let pixels = (0..height)
        .flat_map(|y| (0..width).flat_map(move |x| [x as u8, y as u8, 9]))
        .collect();
    let cut = patches(
        &Rgb {
            width,
            height,
            pixels,
        },
        &full(),
    );
    assert_eq!(
        (cut.grid_rows, cut.grid_cols, cut.tokens, cut.row_width),
        (2, 4, 2, 1536)
    );
    let value = |v: usize| v as f32 / 127.5 - 1.0;
    // (top, left) patch of each row: first block, then the one to its right.
    let order = [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (0, 3), (1, 2), (1, 3)];
    for (row, (patch_y, patch_x)) in cut.values.chunks(1536).zip(order) {
        for frame in 0..2 {
            for (y, x) in [(0, 0), (3, 5), (15, 15)] {
                let at = |channel: usize| row[((channel * 2 + frame) * 16 + y) * 16 + x];
                assert!((at(0) - value(patch_x * 16 + x)).abs() < 1e-6);
                assert!((at(1) - value(patch_y * 16 + y)).abs() < 1e-6);
                assert!((at(2) - value(9)).abs() < 1e-6);
            }
        }
    }
}

#[test]
fn digests_tell_pictures_and_shapes_apart() {
    let rgb = |width, height, fill| Rgb {
        width,
        height,
        pixels: vec![fill; width * height * 3],
    };
    let digest = |image: &Rgb| patches(image, &full()).digest;
    assert_eq!(digest(&rgb(64, 32, 1)), digest(&rgb(64, 32, 1)));
    assert_ne!(digest(&rgb(64, 32, 1)), digest(&rgb(32, 64, 1)));
    assert_ne!(digest(&rgb(64, 32, 1)), digest(&rgb(64, 32, 2)));
}

#[test]
fn the_fixtures_pictures_pass_unresized() {
    let rules = ImageRules::read(&tiny("vision"), &TOWER, DEFAULT_PIXEL_BUDGET).unwrap();
    let a = std::fs::read(fixtures("golden").join("a.png")).unwrap();
    let patches = prepare(&a, &rules).unwrap();
    assert_eq!((patches.grid_rows, patches.grid_cols, patches.tokens), (4, 6, 6));
}

#[test]
fn broken_and_unknown_bytes_are_refused_with_the_reason() {
    assert_eq!(decode(&[]), Err(ImageError::Empty));
    assert_eq!(decode(b"hello, I am text"), Err(ImageError::UnknownFormat));
    assert_eq!(decode(b"BM rest of a bitmap"), Err(ImageError::UnknownFormat));
    for name in ["photo.png", "turned.jpg", "photo.webp", "first.gif"] {
        let whole = bytes(name);
        let error = decode(&whole[..whole.len() / 3]).unwrap_err();
        assert!(matches!(error, ImageError::Broken { .. }), "{name}: {error}");
    }
}

/// A PNG that claims a size and holds next to no data.
fn png_of(width: u32, height: u32) -> Vec<u8> {
    let chunk = |kind: &[u8; 4], data: &[u8]| {
        let mut out = (data.len() as u32).to_be_bytes().to_vec();
        out.extend_from_slice(kind);
        out.extend_from_slice(data);
        let crc = crc32(&out[4..]);
        out.extend_from_slice(&crc.to_be_bytes());
        out
    };
    let mut header = width.to_be_bytes().to_vec();
    header.extend_from_slice(&height.to_be_bytes());
    header.extend_from_slice(&[8, 2, 0, 0, 0]);
    let mut out = b"\x89PNG\r\n\x1a\n".to_vec();
    out.extend(chunk(b"IHDR", &header));
    out.extend(chunk(b"IDAT", &[0x78, 0x9c, 0x63, 0, 0, 0, 0, 0xff, 0xff]));
    out.extend(chunk(b"IEND", &[]));
    out
}

fn crc32(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0u32, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |c, _| {
            if c & 1 == 1 {
                (c >> 1) ^ 0xedb8_8320
            } else {
                c >> 1
            }
        })
    })
}

#[test]
fn a_decompression_bomb_is_refused_on_its_header() {
    let error = decode(&png_of(60_000, 60_000)).unwrap_err();
    assert_eq!(
        error.to_string(),
        "image is 60000 x 60000, 3600000000 pixels; at most 33554432 are decoded"
    );
    assert!(matches!(
        decode(&png_of(u32::MAX, 1)),
        Err(ImageError::TooManyPixels { .. } | ImageError::Broken { .. })
    ));
    assert!(matches!(
        decode(&png_of(0, 7)),
        Err(ImageError::ZeroSize { .. } | ImageError::Broken { .. })
    ));
    assert_eq!(
        decode(&vec![0; MAX_BYTES + 1]),
        Err(ImageError::TooManyBytes(MAX_BYTES + 1))
    );
}

/// A WebP file of these chunks.
fn webp(chunks: &[(&[u8; 4], u32, &[u8])]) -> Vec<u8> {
    let mut body = b"WEBP".to_vec();
    for (name, length, data) in chunks {
        body.extend_from_slice(*name);
        body.extend_from_slice(&length.to_le_bytes());
        body.extend_from_slice(data);
    }
    let length = (body.len() as u32).to_le_bytes();
    [&b"RIFF"[..], &length, &body].concat()
}

#[test]
fn a_webp_chunk_that_claims_more_than_the_file_has_is_refused_before_it_is_allocated() {
    // Found by fuzzing: a length of 1.4 GB in front of the EXIF chunk was allocated for metadata.
    let turned = bytes("turned.webp");
    let at = turned.windows(4).position(|name| name == b"EXIF").unwrap();
    let mut lying = turned.clone();
    lying[at + 4..at + 8].copy_from_slice(&0x5800_0000u32.to_le_bytes());
    let message = decode(&lying).unwrap_err().to_string();
    assert_eq!(
        message,
        format!(
            "broken WebP image: chunk \"EXIF\" claims 1476395008 bytes but only {} follow",
            turned.len() - at - 8
        )
    );
    // A frame inside of a small canvas that claims the largest size there is.
    let canvas: &[u8] = &[0, 0, 0, 0, 31, 0, 0, 31, 0, 0];
    let frame: &[u8] = &[0x10, 0, 0, 0x9d, 1, 0x2a, 0xff, 0x3f, 0xff, 0x3f];
    let file = webp(&[(b"VP8X", 10, canvas), (b"VP8 ", 10, frame)]);
    assert_eq!(
        decode(&file),
        Err(ImageError::TooManyPixels {
            width: 16_383,
            height: 16_383
        })
    );
}

#[test]
fn a_25_megapixel_picture_fits_the_budget_afterwards() {
    // Field reports: a 24.5-megapixel picture once asked for 125 GB of attention scores.
    let (width, height) = (6000, 4100);
    let image = Rgb {
        width,
        height,
        pixels: vec![77; width * height * 3],
    };
    let rules = ImageRules::new(&TOWER, DEFAULT_PIXEL_BUDGET);
    let (w, h) = rules.size(width, height).unwrap();
    let cut = patches(&bicubic(&image, w, h), &rules);
    assert!(
        cut.tokens <= 1280
            && cut
                .values
                .iter()
                .all(|v| (*v - (77.0 / 127.5 - 1.0)).abs() < 1e-6)
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn no_bytes_panic_as_a_picture(which in 0usize..5, at in any::<prop::sample::Index>(), with in any::<u8>(), cut in any::<prop::sample::Index>()) {
        let mut data = bytes(["photo.png", "turned.jpg", "photo.webp", "first.gif", "turned.webp"][which]);
        let at = at.index(data.len());
        data[at] = with;
        let len = cut.index(data.len()) + 1;
        let _ = decode(&data);
        data.truncate(len);
        let _ = decode(&data);
    }

    #[test]
    fn sizes_are_whole_blocks_inside_of_the_range(w in 1usize..9000, h in 1usize..9000, budget in 1024usize..3_000_000) {
        let rules = ImageRules::new(&TOWER, budget);
        if let Ok((width, height)) = rules.size(w, h) {
            prop_assert!(width % 32 == 0 && height % 32 == 0 && width > 0 && height > 0);
            // Thin pictures can't go below one block a side.
            prop_assert!(width * height <= budget.max(32 * width.max(height)).max(65_536 + 32 * (width + height)));
        } else {
            prop_assert!(w.max(h) > 200 * w.min(h));
        }
    }
}
