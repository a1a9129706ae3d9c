//! Headers of safetensors files, sound and damaged: nothing is read that they don't vouch for.

use proptest::prelude::*;
use serde_json::json;

use super::*;
use crate::model::test_support::with_header;

fn parse(header: &str, data: usize) -> Result<Header, HeaderFault> {
    Header::parse(&with_header(header, &vec![0; data]))
}

fn one(dtype: &str, shape: Value, offsets: Value) -> String {
    json!({"a": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}).to_string()
}

#[test]
fn offsets_are_given_from_the_files_start() {
    let header = parse(&one("F32", json!([2, 1]), json!([0, 8])), 8).unwrap();
    let a = &header.tensors["a"];
    assert_eq!(
        (a.dtype, &a.shape[..], a.range.len()),
        (Dtype::F32, &[2usize, 1][..], 8)
    );
    assert!(a.range.start > 8);
}

#[test]
fn metadata_scalars_and_empty_tensors_are_fine() {
    let text = r#"{"__metadata__":{"format":"pt","odd":[1]},"s":{"dtype":"F32","shape":[],"data_offsets":[0,4]},
        "e":{"dtype":"BF16","shape":[0,7],"data_offsets":[4,4]}}   "#;
    assert_eq!(parse(text, 4).unwrap().tensors.len(), 2);
}

#[test]
fn every_damage_has_its_own_message() {
    let dup = r#"{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}"#;
    let two = |second: [u64; 2]| {
        json!({"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]},
               "b": {"dtype": "U8", "shape": [4], "data_offsets": second}})
        .to_string()
    };
    for (header, data, wanted) in [
        (
            one("F32", json!([2]), json!([0, 8])),
            4,
            "ends at byte 8 of the data but the file holds 4",
        ),
        (
            one("F32", json!([2]), json!([8, 0])),
            8,
            "ends at 0, before its begin at 8",
        ),
        (
            one("F32", json!([3]), json!([0, 8])),
            8,
            "needs 12 bytes but its offsets span 8",
        ),
        (
            one("F32", json!([u64::MAX, 2]), json!([0, 8])),
            8,
            "needs too many bytes",
        ),
        (one("F42", json!([2]), json!([0, 8])), 8, "unknown dtype \"F42\""),
        (one("F4", json!([2]), json!([0, 1])), 1, "unknown dtype \"F4\""),
        (
            one("F32", json!([-1]), json!([0, 8])),
            8,
            "tensor \"a\": invalid value",
        ),
        (
            one("F32", json!([2]), json!([0])),
            8,
            "tensor \"a\": invalid length 1",
        ),
        (r#"{"a":7}"#.to_owned(), 0, "header is not valid: tensor \"a\""),
        ("[]".to_owned(), 0, "header is not valid"),
        ("{".to_owned(), 0, "header is not valid"),
        (dup.to_owned(), 2, "\"a\" is listed twice"),
        (two([2, 6]), 6, "\"a\" and \"b\" overlap"),
        (
            two([6, 10]),
            10,
            "2 bytes before tensor \"b\" belong to no tensor",
        ),
        (two([4, 8]), 9, "1 bytes at the file's end belong to no tensor"),
    ] {
        let message = parse(&header, data).unwrap_err().to_string();
        assert!(message.contains(wanted), "{header}: {message}");
    }
}

#[test]
fn a_length_that_lies_is_caught_before_anything_is_allocated() {
    assert_eq!(Header::parse(&[0; 7]), Err(HeaderFault::TooShort(7)));
    let mut file = with_header("{}", &[]);
    file[..8].copy_from_slice(&u64::MAX.to_le_bytes());
    assert_eq!(
        Header::parse(&file),
        Err(HeaderFault::LengthBeyondFile {
            claimed: u64::MAX,
            available: 2
        })
    );
    let mut file = with_header("{\"\u{e4}\":1}", &[]);
    file[10] = 0xff;
    assert_eq!(Header::parse(&file), Err(HeaderFault::NotUtf8(2)));
    assert!(matches!(
        Header::parse(&with_header("", &[])),
        Err(HeaderFault::NotJson(_))
    ));
}

proptest! {
    #[test]
    fn no_bytes_panic_as_a_file(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        let _ = Header::parse(&bytes);
    }

    #[test]
    fn no_header_text_panics(text in ".{0,200}", data in 0usize..64) {
        let _ = parse(&text, data);
    }

    /// Flips of single bytes in a sound file either leave it sound or are refused; what passes lies inside of the file.
    #[test]
    fn damaged_headers_never_point_outside(at in 0usize..500, with in any::<u8>(), cut in 0usize..64) {
        let text = json!({"__metadata__": {"format": "pt"},
            "x.weight": {"dtype": "BF16", "shape": [4, 8], "data_offsets": [0, 64]},
            "y.scales": {"dtype": "F32", "shape": [2], "data_offsets": [64, 72]}}).to_string();
        let mut file = with_header(&text, &[7; 72]);
        let at = at % file.len();
        file[at] = with;
        file.truncate(file.len() - cut);
        if let Ok(header) = Header::parse(&file) {
            for t in header.tensors.values() {
                prop_assert!(t.range.end <= file.len() && t.range.start <= t.range.end);
            }
        }
    }

    /// Headers of any numbers at all.
    #[test]
    fn any_offsets_and_shapes_are_checked(
        tensors in prop::collection::vec((prop::collection::vec(any::<u64>(), 0..4), any::<u64>(), any::<u64>()), 0..5),
    ) {
        let map: serde_json::Map<String, Value> = tensors.iter().enumerate().map(|(i, (shape, a, b))| {
            (format!("t{i}"), json!({"dtype": "F64", "shape": shape, "data_offsets": [a, b]}))
        }).collect();
        let _ = parse(&Value::Object(map).to_string(), 100);
    }
}
