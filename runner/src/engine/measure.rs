//! `--measure`: what a forward costs on this machine, by number of rows; and prefill. What `lookahead tune` and benchmarks read.
//!
//! Invariant: every figure is the median of several runs after untimed ones, with everything evaluated that a real step
//! evaluates.

use std::time::Instant;

use lookahead_protocol::ErrorCode;
use mlx_rs::ops::indexing::argmax_axis;
use mlx_rs::transforms::{async_eval, eval};
use serde::Serialize;

use super::decode::ids_array;
use super::job::Refusal;
use super::load::load_model;
use super::simulated::{self, Simulated};
use super::text::Awaited;
use super::Settings;
use crate::host::latch::Latch;
use crate::host::outbox::Outbox;
use crate::mlx::{graph_size, Backend};
use crate::model::qwen3_5::Qwen35;
use crate::model::{Batch, Dispatch, Model as _};

/// Cost of one width.
#[derive(Debug, Serialize)]
pub struct Width {
    /// Rows of the forward.
    pub rows: usize,
    /// Milliseconds, states of every row kept, logits and choice evaluated.
    pub milliseconds: f64,
    /// Of these, until the host has described the whole graph, some of which the device is computing by then.
    pub described: f64,
    /// And until it has handed all of it to the device.
    pub submitted: f64,
}

/// All figures.
#[derive(Debug, Serialize)]
pub struct Measurement {
    /// What it ran on.
    pub backend: &'static str,
    /// Operations of one step's graph: each costs the host a few microseconds, whatever the device does.
    pub operations: usize,
    /// Milliseconds of one step of plain decoding, each step dispatched before the last one is read.
    pub pipelined_step: f64,
    /// Forwards by width.
    pub widths: Vec<Width>,
    /// Tokens of the prefill.
    pub prefill_tokens: usize,
    /// Its tokens per second, in chunks as the runner takes them.
    pub prefill_rate: f64,
    /// What drafting would give at a known acceptance; empty without a head.
    pub simulated: Vec<Simulated>,
}

/// Measures the model of `settings` after a context of `context` tokens.
///
/// # Errors
/// The model can't be loaded or the device fails.
pub fn measure(settings: &Settings, context: usize, prefill_tokens: usize) -> Result<Measurement, Refusal> {
    let backend = Backend::select(settings.force_cpu);
    let loaded = load_model(
        settings,
        backend,
        &Outbox::default(),
        &Latch::default(),
        &Awaited::default(),
    )?
    .ok_or_else(|| Refusal::new(ErrorCode::Internal, "loading was interrupted"))?;
    let model = &loaded.model;
    let vocabulary = loaded.text.tokenizer.len().min(model.vocabulary_size() as usize) as u32;
    let ids: Vec<u32> = (0..prefill_tokens.max(context).max(64) as u32)
        .map(|i| i * 7919 % vocabulary)
        .collect();
    let mut rates = Vec::new();
    for _ in 0..4 {
        let start = Instant::now();
        prefill(model, &ids[..prefill_tokens], settings.chunk)?;
        rates.push(prefill_tokens as f64 / start.elapsed().as_secs_f64());
    }
    let mut caches = prefill(model, &ids[..context], settings.chunk)?;
    let mut widths = Vec::new();
    for rows in [1, 2, 3, 4, 6, 8, 12, 16] {
        let batch = ids_array(&ids[..rows]);
        let slot = caches.offset();
        let (mut times, mut described, mut submitted) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..24 {
            let start = Instant::now();
            let elapsed = || start.elapsed().as_secs_f64() * 1e3;
            let before = caches.mark();
            caches.keep_rows(true);
            let waited = Batch::text(&batch, slot).dispatched(Dispatch::AsBuilt);
            let hidden = model.forward(&waited, &mut caches)?;
            let best = argmax_axis(model.unembed(&hidden)?, -1, None)?;
            described.push(elapsed());
            async_eval([&best])?;
            submitted.push(elapsed());
            eval([&best])?;
            times.push(elapsed());
            caches.keep_rows(false);
            caches.reset(before);
        }
        widths.push(Width {
            rows,
            milliseconds: median(&mut times[4..]),
            described: median(&mut described[4..]),
            submitted: median(&mut submitted[4..]),
        });
    }
    let mut token = ids_array(&ids[..1]);
    let mut operations = 0;
    let mut times = Vec::new();
    for _ in 0..64 {
        let start = Instant::now();
        let slot = caches.offset();
        let hidden = model.forward(&Batch::text(&token, slot), &mut caches)?;
        let next = argmax_axis(model.unembed(&hidden)?, -1, None)?;
        if operations == 0 {
            operations = graph_size::operations(&[&next])?;
        }
        async_eval([&next])?;
        eval([&token])?;
        token = next;
        times.push(start.elapsed().as_secs_f64() * 1e3);
    }
    Ok(Measurement {
        backend: backend.name(),
        operations,
        pipelined_step: median(&mut times[8..]),
        widths,
        prefill_tokens,
        prefill_rate: median(&mut rates[1..]),
        simulated: simulated::simulate(model, &loaded.text, loaded.path)?,
    })
}

fn prefill(model: &Qwen35, ids: &[u32], chunk: usize) -> Result<crate::cache::Caches, Refusal> {
    let mut caches = model.new_caches();
    for part in ids.chunks(chunk) {
        let part = ids_array(part);
        let slot = caches.offset();
        let hidden = model.forward(&Batch::text(&part, slot), &mut caches)?;
        let mut arrays = caches.arrays();
        arrays.push(&hidden);
        eval(arrays)?;
    }
    Ok(caches)
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(0.0)
}
