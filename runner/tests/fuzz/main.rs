//! Damaged files of every kind that a checkpoint or a host can hand over, made from sound ones.
//!
//! Invariant: whatever the bytes, reading them ends in a result within [`guard::CASE_LIMIT`], never in a panic, an overflow or
//! an abort, and never holds more memory than the target allows; what a plan accepts can be built and run.
//!
//! In the ordinary tests each target runs the same few cases. For longer:
//! `LOOKAHEAD_FUZZ_SECONDS=600 LOOKAHEAD_FUZZ_SEED=7 cargo test -p lookahead-runner --test fuzz -- --nocapture`.
#![expect(clippy::unwrap_used, reason = "helpers of tests: a panic is a test's failure")]

mod guard;
mod mutate;
mod random;

use std::path::{Path, PathBuf};

use lookahead_runner::image::{prepare, ImageRules};
use lookahead_runner::inspect::{inspect, Circumstances};
use lookahead_runner::mlx::{self, Array, Backend};
use lookahead_runner::model::checkpoint::Checkpoint;
use lookahead_runner::model::plan::{plan, PlanOptions};
use lookahead_runner::model::quant::Fp8Form;
use lookahead_runner::model::qwen3_5::{load, Scores};
use lookahead_runner::model::vision_config::VisionConfig;
use lookahead_runner::model::weights::{memory_bytes, Precision, Weights};
use lookahead_runner::model::{Batch, Model as _};
use lookahead_runner::text::{ChatTemplate, EosSet, RenderOptions, Tokenizer};
use tempfile::TempDir;

use guard::run;
use random::Random;

/// Bytes that reading a damaged checkpoint of a few hundred kilobytes may hold at once.
const MODEL_MEMORY: usize = 256 << 20;
/// Bytes that a picture may hold at once: its decoder's frame at 16 bits a channel, and the same in 8.
const PICTURE_MEMORY: usize = 512 << 20;

fn fixtures(sub: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../fixtures")
        .join(sub)
}

fn read(path: &Path) -> Vec<u8> {
    std::fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Copies of tiny models, of which one file at a time is damaged and mended again.
struct Models(Vec<(TempDir, String, Vec<u8>)>);

impl Models {
    /// One copy for each pair of a model and the file of it to damage.
    fn new(files: &[(&str, &str)]) -> Self {
        let copy = |(model, file): &(&str, &str)| {
            let dir = tempfile::tempdir().unwrap();
            for entry in std::fs::read_dir(fixtures("tiny").join(model)).unwrap() {
                let path = entry.unwrap().path();
                std::fs::copy(&path, dir.path().join(path.file_name().unwrap())).unwrap();
            }
            let sound = read(&dir.path().join(file));
            (dir, (*file).to_owned(), sound)
        };
        Self(files.iter().map(copy).collect())
    }

    /// Damages a file and returns the model and the file's bytes.
    fn damage(
        &self,
        random: &mut Random,
        with: fn(&mut Random, &[u8], &[u8]) -> Vec<u8>,
    ) -> (&Path, Vec<u8>) {
        let (dir, file, sound) = &self.0[random.below(self.0.len())];
        let other = &self.0[random.below(self.0.len())].2;
        let damaged = with(random, sound, other);
        // A new file: the old one may be mapped.
        let path = dir.path().join(file);
        std::fs::remove_file(&path).ok();
        std::fs::write(&path, &damaged).unwrap();
        (dir.path(), damaged)
    }
}

/// Looks at a model as loading does before it reads a weight, or `whole` as `inspect` does; true if it can be built.
fn look(dir: &Path, whole: bool) -> bool {
    if !whole {
        let settled = Checkpoint::open(dir).and_then(|checkpoint| {
            let plan = plan(&checkpoint, PlanOptions::default())?;
            Ok(memory_bytes(&checkpoint, &plan, Precision::Stored))
        });
        return settled.is_ok();
    }
    let found = inspect(
        dir,
        Circumstances {
            backend: Backend::Cpu,
            memory_limit: 64 << 20,
            chunk: 64,
            no_draft: false,
            fp8: Fp8Form::Bf16,
        },
    );
    assert!(found.verdict.runs || !found.verdict.reasons.is_empty());
    assert!(!found.to_string().is_empty());
    found.verdict.runs
}

/// Builds a model and runs a few tokens, a picture and a draft through it. What MLX refuses is an error like any other.
fn try_out(dir: &Path) -> Result<(), Box<dyn std::error::Error>> {
    let checkpoint = Checkpoint::open(dir)?;
    let plan = plan(&checkpoint, PlanOptions::default())?;
    let mut progress = |_| true;
    let weights = Weights::new(&checkpoint, &plan, Precision::Widen, &mut progress)?;
    let model = load(&weights, mlx::Path::Cpu, Scores::Stored)?.model;
    if let (Some(tower), Some(vision)) = (model.tower(), &checkpoint.config().vision) {
        let rules = ImageRules::read(dir, vision, 1 << 16)?;
        let patches = prepare(&read(&fixtures("golden/a.png")), &rules)?;
        let features = tower.forward(&patches.values, patches.grid_rows, patches.grid_cols)?;
        mlx_rs::transforms::eval([&features])?;
    }
    let ids = Array::from_slice(&[1, 2, 3, 4, 5], &[1, 5]);
    let mut caches = model.new_caches();
    let hidden = model.forward(&Batch::text(&ids, 0), &mut caches)?;
    let logits = model.unembed(&hidden)?;
    mlx_rs::transforms::eval([&logits])?;
    if let Some(head) = model.self_draft() {
        let batch = Batch {
            conditioning: Some(&hidden),
            ..Batch::text(&ids, 0)
        };
        let mut draft = head.new_caches();
        mlx_rs::transforms::eval([&head.forward(&batch, &caches, &mut draft)?])?;
    }
    Ok(())
}

#[test]
fn safetensors_files() {
    let models = Models::new(&[
        ("dense-tied", "model-00002-of-00003.safetensors"),
        ("affine-mixed", "model.safetensors"),
        ("fp8", "mtp.safetensors"),
        ("moe-nvfp4-global", "model.safetensors"),
        ("vision", "model.safetensors"),
    ]);
    run("safetensors", MODEL_MEMORY, |random| {
        let (dir, damaged) = models.damage(random, mutate::safetensors);
        // Text files take most of an inspection's time, and are sound here.
        let whole = random.one_in(16);
        (
            damaged,
            Box::new(move || {
                look(dir, whole);
            }),
        )
    });
}

#[test]
fn configs() {
    let models = Models::new(&[
        ("dense", "config.json"),
        ("dense-flat", "config.json"),
        ("affine-mixed", "config.json"),
        ("fp8", "config.json"),
        ("moe-each-head-fused", "config.json"),
        ("next", "config.json"),
        ("vision", "config.json"),
        ("vision", "preprocessor_config.json"),
    ]);
    run("config", MODEL_MEMORY, |random| {
        let (dir, damaged) = models.damage(random, mutate::json);
        // Text files take most of an inspection's time, and are sound here.
        let whole = random.one_in(16);
        (
            damaged,
            Box::new(move || {
                // MLX's own state belongs to the thread that runs the cases.
                Backend::select(true);
                if look(dir, whole) {
                    // The refusals are MLX's; that they are no panics is what counts.
                    let _ = try_out(dir);
                }
            }),
        )
    });
}

#[test]
fn indexes() {
    let models = Models::new(&[
        ("dense-tied", "model.safetensors.index.json"),
        ("fp8", "model.safetensors.index.json"),
    ]);
    run("index", MODEL_MEMORY, |random| {
        let (dir, damaged) = models.damage(random, mutate::json);
        // Text files take most of an inspection's time, and are sound here.
        let whole = random.one_in(16);
        (
            damaged,
            Box::new(move || {
                look(dir, whole);
            }),
        )
    });
}

#[test]
fn text_files() {
    let models = Models::new(&[
        ("dense", "tokenizer.json"),
        ("dense", "tokenizer_config.json"),
        ("dense", "generation_config.json"),
        ("vision", "chat_template.jinja"),
    ]);
    run("text", MODEL_MEMORY, |random| {
        let (dir, damaged) = models.damage(random, |random, sound, other| {
            if sound.starts_with(b"{\"") || sound.starts_with(b"{\n") {
                mutate::json(random, sound, other)
            } else {
                mutate::bytes(random, sound, other)
            }
        });
        (
            damaged,
            Box::new(move || {
                let Ok(tokenizer) = Tokenizer::load(dir) else {
                    return;
                };
                let _ = EosSet::load(dir, &tokenizer);
                if let Ok(ids) = tokenizer.encode(
                    "Look: <|im_start|>é 日本\n 12 x",
                    lookahead_runner::text::Bos::ByRule,
                ) {
                    let _ = tokenizer.decode(&ids, lookahead_runner::text::Specials::Shown);
                }
                let template = ChatTemplate::load(dir, &tokenizer);
                let messages = [serde_json::json!({"role": "user", "content": "hi"})];
                let _ = template.render(&messages, &RenderOptions::default());
            }),
        )
    });
}

#[test]
fn pictures() {
    let tower = VisionConfig {
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
    let rules = ImageRules::new(&tower, 1 << 16);
    let mut sound: Vec<Vec<u8>> = std::fs::read_dir(fixtures("images"))
        .unwrap()
        .map(|entry| read(&entry.unwrap().path()))
        .collect();
    // The order of a folder is any; that of a seed's cases isn't.
    sound.sort();
    run("picture", PICTURE_MEMORY, |random| {
        let (picture, other) = (
            &sound[random.below(sound.len())],
            &sound[random.below(sound.len())],
        );
        let damaged = mutate::picture(random, picture, other);
        let (input, rules) = (damaged.clone(), &rules);
        (
            damaged,
            Box::new(move || {
                if let Ok(patches) = prepare(&input, rules) {
                    assert_eq!(
                        patches.values.len(),
                        patches.grid_rows * patches.grid_cols * patches.row_width
                    );
                    assert!(patches.values.iter().all(|value| value.is_finite()));
                }
            }),
        )
    });
}
