//! Directories, indexes, shards and sidecars, sound and damaged.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;
use crate::model::config::LayerKind;
use crate::model::test_support::{tiny, Edited, Tensor};

fn error(edited: &Edited) -> String {
    edited.open().1.unwrap_err().to_string()
}

#[test]
fn a_sharded_tied_model_opens_under_canonical_names() {
    let c = Checkpoint::open(&tiny("dense-tied")).unwrap();
    assert_eq!(c.config().layers, [LayerKind::Linear, LayerKind::Full]);
    assert_eq!(c.files().count(), 3);
    assert!(c.warnings().is_empty(), "{:?}", c.warnings());
    let embed = c.tensor("embed_tokens.weight").unwrap();
    assert_eq!((embed.dtype, embed.shape), (Dtype::BF16, &[320, 64][..]));
    assert_eq!(embed.original, "model.language_model.embed_tokens.weight");
    assert_eq!(embed.data.len(), 320 * 64 * 2);
    assert!(c.has("mtp.fc.weight") && !c.has("lm_head.weight"));
    let on_disk: u64 = c.files().map(|(_, bytes)| bytes).sum();
    assert!(c.total_bytes() < on_disk && c.total_bytes() > on_disk / 2);
}

#[test]
fn a_path_that_is_no_model_says_what_it_is() {
    let dir = tempfile::tempdir().unwrap();
    let gone = Checkpoint::open(&dir.path().join("gone")).unwrap_err();
    assert_eq!(gone.kind().code(), "model_not_found");
    let file = dir.path().join("file");
    std::fs::write(&file, "x").unwrap();
    let not_dir = Checkpoint::open(&file).unwrap_err();
    assert_eq!(not_dir.kind().code(), "model_invalid");
    assert!(not_dir.to_string().contains("is not a directory"));
    let some = Checkpoint::open(dir.path()).unwrap_err().to_string();
    assert!(
        some.contains("has no config.json (not a model directory?)"),
        "{some}"
    );
    std::fs::remove_file(&file).unwrap();
    let empty = Checkpoint::open(dir.path()).unwrap_err().to_string();
    assert!(empty.contains("has no config.json (it is empty)"), "{empty}");
    std::fs::copy(tiny("dense").join("config.json"), dir.path().join("config.json")).unwrap();
    assert!(Checkpoint::open(dir.path())
        .unwrap_err()
        .to_string()
        .contains("has no safetensors file"));
    std::fs::write(dir.path().join("config.json"), "{\"a\": 1,}").unwrap();
    let json = Checkpoint::open(dir.path()).unwrap_err().to_string();
    assert!(
        json.starts_with("config.json is not valid JSON: trailing comma"),
        "{json}"
    );
}

#[test]
fn a_missing_shard_is_named_with_what_it_held() {
    let e = Edited::of("dense-tied");
    let held = e
        .index
        .as_ref()
        .unwrap()
        .values()
        .filter(|f| f.contains("00002"))
        .count();
    let dir = e.save();
    std::fs::remove_file(dir.path().join("model-00002-of-00003.safetensors")).unwrap();
    let message = Checkpoint::open(dir.path()).unwrap_err().to_string();
    let wanted =
        format!("shard model-00002-of-00003.safetensors is missing ({held} tensors of the index are in it");
    assert!(message.starts_with(&wanted), "{message}");
    // The same without an index, by the numbering of its siblings.
    std::fs::remove_file(dir.path().join("model.safetensors.index.json")).unwrap();
    let message = Checkpoint::open(dir.path()).unwrap_err().to_string();
    assert_eq!(message, "shard model-00002-of-00003.safetensors is missing");
}

#[test]
fn shards_are_found_without_an_index_too() {
    let mut e = Edited::of("dense-tied");
    e.index = None;
    let (_dir, opened) = e.open();
    assert_eq!(opened.unwrap().files().count(), 3);
    let mut e = Edited::of("fp8");
    e.index = None;
    let (_dir, opened) = e.open();
    assert!(opened.unwrap().has("mtp.fc.weight"));
}

#[test]
fn an_index_that_names_an_absent_tensor_is_refused() {
    let mut e = Edited::of("dense-tied");
    let index = e.index.as_mut().unwrap();
    index.insert(
        "model.language_model.layers.9.foo.weight".into(),
        "model-00003-of-00003.safetensors".into(),
    );
    assert_eq!(
        error(&e),
        "model.safetensors.index.json places 1 tensors in files that don't hold them, \
         model.language_model.layers.9.foo.weight in model-00003-of-00003.safetensors for one"
    );
}

#[test]
fn an_index_reaches_no_file_outside_of_the_model() {
    for path in [
        "../secret.safetensors",
        "/etc/passwd",
        "a/../../b.safetensors",
        "",
    ] {
        let mut e = Edited::of("dense-tied");
        e.index
            .as_mut()
            .unwrap()
            .insert("norm.weight".into(), path.into());
        assert!(error(&e).contains("not inside of the model directory"), "{path}");
    }
}

#[test]
fn a_stray_shard_adds_nothing_and_is_reported() {
    let mut e = Edited::of("dense-tied");
    let copy = e.files["model-00001-of-00003.safetensors"].clone();
    let n = copy.len();
    e.files.insert("model-00001-of-00002.safetensors".into(), copy);
    let (_dir, opened) = e.open();
    let c = opened.unwrap();
    assert_eq!(c.warnings().len(), 1);
    let warning = &c.warnings()[0];
    assert!(
        warning.starts_with(&format!("model-00001-of-00002.safetensors: {n} tensors ignored")),
        "{warning}"
    );
    assert!(warning.ends_with("the file is not used"), "{warning}");
    assert!(c.tensors().all(|t| t.file != "model-00001-of-00002.safetensors"));
}

#[test]
fn files_of_other_programs_are_left_alone() {
    let mut e = Edited::of("dense");
    let t = Tensor {
        dtype: Dtype::F32,
        shape: vec![1],
        data: vec![0; 4],
    };
    e.files.insert(
        "adapter.safetensors".into(),
        BTreeMap::from([("lora.a".to_owned(), t)]),
    );
    let (_dir, opened) = e.open();
    assert_eq!(
        opened.unwrap().warnings(),
        ["adapter.safetensors ignored: none of its 1 tensors belongs to a model"]
    );
}

#[test]
fn a_tensor_under_two_names_counts_once() {
    let mut e = Edited::of("dense");
    let norm = e.tensor("language_model.norm.weight").clone();
    e.holding("embed_tokens.weight")
        .insert("language_model.model.norm.weight".into(), norm);
    let (_dir, opened) = e.open();
    assert!(opened.unwrap().warnings()[0].contains("1 tensors ignored"));
}

#[test]
fn truncated_and_damaged_shards_say_so() {
    let dir = Edited::of("dense").save();
    let path = dir.path().join("model.safetensors");
    let whole = std::fs::read(&path).unwrap();
    let message = |bytes: &[u8]| {
        std::fs::write(&path, bytes).unwrap();
        Checkpoint::open(dir.path()).unwrap_err().to_string()
    };
    let cut = message(&whole[..whole.len() - 1000]);
    assert!(
        cut.starts_with("model.safetensors: tensor \"") && cut.ends_with("the file is truncated"),
        "{cut}"
    );
    assert!(message(&whole[..100]).contains("the file is truncated or its header length is damaged"));
    assert!(message(&[]).contains("file has 0 bytes"));
    let mut lies = whole.clone();
    lies[7] = 0x40;
    assert!(message(&lies).contains("header claims"));
    let mut flipped = whole.clone();
    let at = whole.windows(7).position(|w| w == b"\"dtype\"").unwrap();
    flipped[at + 1] ^= 0x20;
    assert!(message(&flipped).contains("missing field `dtype`"));
    std::fs::write(&path, &whole).unwrap();
    Checkpoint::open(dir.path()).unwrap();
}

#[test]
fn index_files_that_are_no_index_are_refused() {
    for (text, wanted) in [
        ("{}", "it has no object \"weight_map\""),
        ("{\"weight_map\": {}}", "its \"weight_map\" is empty"),
        (
            "{\"weight_map\": {\"a\": 3}}",
            "tensor \"a\" is placed in 3, which is not a file name",
        ),
        ("nonsense", "is not valid JSON"),
        ("[1]", "[1] is not an object"),
    ] {
        let dir = Edited::of("dense-tied").save();
        std::fs::write(dir.path().join("model.safetensors.index.json"), text).unwrap();
        let message = Checkpoint::open(dir.path()).unwrap_err().to_string();
        assert!(message.contains(wanted), "{message}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn no_bytes_panic_as_an_index(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let dir = Edited::of("dense-tied").save();
        std::fs::write(dir.path().join("model.safetensors.index.json"), &bytes).unwrap();
        let _ = Checkpoint::open(dir.path());
    }

    #[test]
    fn no_weight_map_panics(places in prop::collection::btree_map(".{0,20}", ".{0,30}", 0..6)) {
        let mut e = Edited::of("dense-tied");
        e.index.as_mut().unwrap().extend(places);
        let _ = e.open();
    }
}
