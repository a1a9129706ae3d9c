//! Pictures against goldens: the tower alone, then one and two pictures through trunk and head.

use std::collections::BTreeMap;

use mlx_rs::ops::indexing::{argmax_axis, take_axis};
use mlx_rs::Array;

use super::golden_tests::{build_as, fixtures, ids, ints};
use super::mrope::{mrope_positions, ImageSpan};
use super::tiny_tests::Golden;
use super::Qwen35;
use crate::mlx::{ops, Path};
use crate::model::weights::Precision;
use crate::model::{Batch, MediaSpan, Model, Positions};

/// Patch rows of a picture at its final size, and its grid.
fn rows(name: &str) -> (Vec<f32>, usize, usize) {
    let picture = ::image::open(fixtures().join("golden").join(name))
        .unwrap()
        .to_rgb8();
    let (gh, gw) = (picture.height() as usize / 16, picture.width() as usize / 16);
    let mut out = Vec::new();
    for block in 0..gh * gw / 4 {
        for inner in 0..4 {
            let row = block / (gw / 2) * 2 + inner / 2;
            let col = block % (gw / 2) * 2 + inner % 2;
            for channel in 0..3 {
                for _ in 0..2 {
                    for place in 0..256 {
                        let (x, y) = (col * 16 + place % 16, row * 16 + place / 16);
                        let value = picture.get_pixel(x as u32, y as u32)[channel];
                        out.push(f32::from(value) / 127.5 - 1.0);
                    }
                }
            }
        }
    }
    (out, gh, gw)
}

fn features(model: &Qwen35, name: &str) -> Array {
    let (values, gh, gw) = rows(name);
    model.tower().unwrap().forward(&values, gh, gw).unwrap()
}

fn each(check: impl Fn(&Qwen35, &Golden)) {
    for name in ["vision", "vision-mlx"] {
        for path in [Path::Cpu, Path::Graph] {
            let golden = Golden::read(name, format!("{name} {path:?}"));
            check(
                &build_as(&format!("tiny/{name}"), Precision::Widen, path).model,
                &golden,
            );
        }
    }
}

#[test]
fn the_tower_gives_the_golden_features_in_both_layouts() {
    each(|model, golden| {
        for name in ["a", "b"] {
            golden.check(
                &features(model, &format!("{name}.png")),
                &format!("v.{name}.features"),
            );
        }
    });
}

/// Media of slots `from..` shifted by `ahead`: the head sees slot S + 1 at row S.
fn media(spans: &[ImageSpan], features: &[Array], ahead: usize) -> Vec<MediaSpan> {
    let span = |(span, features): (&ImageSpan, &Array)| MediaSpan {
        row: (span.slot - ahead) as i32,
        features: features.clone(),
    };
    spans.iter().zip(features).map(span).collect()
}

#[test]
fn pictures_reach_trunk_and_head_at_their_positions() {
    each(|model, golden| {
        let cases = golden.info["vision"].as_array().unwrap();
        assert_eq!(cases.len(), 2);
        let mut seen: BTreeMap<String, Array> = BTreeMap::new();
        for case in cases {
            let name = case["name"].as_str().unwrap();
            let list = ints(&case["ids"]);
            let pictures: Vec<String> = case["images"]
                .as_array()
                .unwrap()
                .iter()
                .map(|v| v.as_str().unwrap().to_owned())
                .collect();
            let features: Vec<Array> = pictures
                .iter()
                .map(|p| {
                    seen.entry(p.clone())
                        .or_insert_with(|| features(model, p))
                        .clone()
                })
                .collect();
            let mut spans = Vec::new();
            let mut at = 0;
            for grid in case["grids"].as_array().unwrap() {
                let grid = ints(grid);
                let (rows, cols) = (grid[0] as usize / 2, grid[1] as usize / 2);
                let slot = at + list[at..].iter().position(|&id| id == 292).unwrap();
                spans.push(ImageSpan { slot, rows, cols });
                at = slot + rows * cols;
            }
            let positions = mrope_positions(list.len(), &spans);
            assert_eq!(i64::from(positions.delta), case["delta"].as_i64().unwrap());
            let flat: Vec<i32> = positions.axes.iter().flatten().copied().collect();
            assert_eq!(
                flat,
                golden.get(&format!("{name}.pos")).to_vec_cast::<i32>().unwrap()
            );

            let mut caches = model.new_caches();
            let tokens = ids(&list);
            let batch = Batch {
                positions: Positions::Axes(positions.axes.clone()),
                media: &media(&spans, &features, 0),
                ..Batch::text(&tokens, 0)
            };
            let hidden = model.forward(&batch, &mut caches).unwrap();
            let logits = model.unembed(&hidden).unwrap();
            let pick = |a: &Array| take_axis(a, golden.get(&format!("{name}.rows")), 1).unwrap();
            golden.check(&pick(&logits), &format!("{name}.logits"));

            let head = model.self_draft().unwrap();
            let first = case["mtp"]["first_token"].as_i64().unwrap() as i32;
            let ahead = ids(&[&list[1..], &[first]].concat());
            let mut draft = head.new_caches();
            let batch = Batch {
                positions: Positions::Axes(positions.axes.clone()),
                media: &media(&spans, &features, 1),
                conditioning: Some(&hidden),
                ..Batch::text(&ahead, 0)
            };
            let out = head.forward(&batch, &caches, &mut draft).unwrap();
            golden.check(&pick(&out), &format!("{name}.mtp.prefill_hidden"));
            let n = list.len() as i32;
            let last = ops::slice_axis(&out, 1, n - 1, n).unwrap();
            let (_, scored) = super::tiny_tests::chain(model, last, n + positions.delta, &mut draft);
            golden.check(&scored, &format!("{name}.mtp.logits"));

            let mut next = argmax_axis(ops::slice_axis(&logits, 1, n - 1, n).unwrap(), -1, None)
                .unwrap()
                .item_cast::<i32>();
            let mut greedy = vec![next];
            while greedy.len() < 8 {
                let batch = ids(&[next]);
                let start = caches.offset() + positions.delta;
                let hidden = model.forward(&Batch::text(&batch, start), &mut caches).unwrap();
                next = argmax_axis(model.unembed(&hidden).unwrap(), -1, None)
                    .unwrap()
                    .item_cast::<i32>();
                greedy.push(next);
            }
            assert_eq!(greedy, ints(&case["greedy"]), "{name}");
        }
    });
}
