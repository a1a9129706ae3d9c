//! Loading fault of the field: the trained model's weights, each read, widened and packed, may not pile up.
//!
//! Alone in its process, since the allocator's peak is the process's.

use std::path::Path as FilePath;

use lookahead_runner::mlx::{memory, Backend, Path};
use lookahead_runner::model::checkpoint::Checkpoint;
use lookahead_runner::model::plan::{plan, PlanOptions};
use lookahead_runner::model::qwen3_5::{load, Scores};
use lookahead_runner::model::weights::{Precision, Weights};

#[test]
fn loading_peaks_at_little_more_than_the_weights() {
    Backend::select(true);
    let dir = FilePath::new(env!("CARGO_MANIFEST_DIR")).join("../fixtures/models/tiny-qwen3.5-mtp");
    for precision in [Precision::Widen, Precision::wide()] {
        let checkpoint = Checkpoint::open(&dir).unwrap();
        let plan = plan(&checkpoint, PlanOptions::default()).unwrap();
        let mut progress = |_| true;
        let before = memory::usage().active;
        mlx_rs::memory::reset_peak_memory().unwrap();
        let weights = Weights::new(&checkpoint, &plan, precision, &mut progress).unwrap();
        let loaded = load(&weights, Path::Cpu, Scores::Stored).unwrap();
        let peak = memory::usage().peak - before;
        println!(
            "{precision:?}: weights {} bytes, peak while loading {peak} bytes",
            loaded.bytes
        );
        assert!(
            peak as f64 <= loaded.bytes as f64 * 1.15,
            "{precision:?}: {peak} bytes at the peak for {}",
            loaded.bytes
        );
    }
}
