//! What sampling costs on this machine. Run by hand: these print, and assert only what no load on the machine can blur.

use std::time::Instant;

use lookahead_protocol::request::Verify;
use mlx_rs::transforms::eval;
use mlx_rs::Array;

use super::options::{Filter, PenaltyOptions, Shape, Window};
use super::oracle;
use super::sampler::Sampler;
use super::sampler_tests::{options, paths, rows, sampler};

const DEFAULT: Filter = Filter {
    top_k: 40,
    temperature: 0.8,
    top_p: 0.9,
    min_p: 0.0,
};

/// Median microseconds of a call, building the graph and waiting for it.
fn micros(runs: usize, mut call: impl FnMut()) -> f64 {
    call();
    let mut times: Vec<f64> = (0..runs)
        .map(|_| {
            let start = Instant::now();
            call();
            start.elapsed().as_secs_f64() * 1e6
        })
        .collect();
    times.sort_by(f64::total_cmp);
    times[runs / 2]
}

fn step(sampler: &Sampler, logits: &Array) {
    let rows = sampler.next(logits, 100, None).unwrap();
    eval([&rows.choice, &rows.peak]).unwrap();
}

#[test]
#[ignore = "prints timings"]
fn cost_of_a_step_and_of_a_verification() {
    for (size, runs) in [(4096, 300), (248_320, 15)] {
        let all: Vec<Vec<f32>> = (0..4).map(|r| oracle::logits(r, size, 4.0)).collect();
        let (one, four) = (rows(&all[..1]), rows(&all));
        eval([&one, &four]).unwrap();
        let history: Vec<u32> = (0..4096u32).map(|i| i * 7 % size as u32).collect();
        let penalties = PenaltyOptions {
            repeat: 1.1,
            presence: 0.1,
            frequency: 0.1,
            window: Window::All,
        };
        for path in paths() {
            let base = micros(runs, || {
                let sum = one.add(Array::from_f32(1.0)).unwrap();
                eval([&sum]).unwrap();
            });
            println!("{size} ids, {path:?}: one addition {base:.0} us");
            let wide = Filter { top_k: 0, ..DEFAULT };
            for (name, shape) in [
                ("greedy", Shape::Greedy),
                ("default filters", Shape::Filtered(DEFAULT)),
                ("top-k off", Shape::Filtered(wide)),
                ("all filters off", Shape::Filtered(Filter { top_p: 1.0, ..wide })),
            ] {
                for rule in [Verify::Coupled, Verify::Rejection] {
                    let plain = sampler(&options(shape, None), rule, size, &[], path);
                    let alone = micros(runs, || step(&plain, &one));
                    let several = micros(runs, || step(&plain, &four));
                    let drafts: Vec<_> = (0..3)
                        .map(|i| plain.draft(&one, 100 + i, &[], None).unwrap())
                        .collect();
                    eval(drafts.iter().flat_map(|d| [d.ids(), &d.rows.peak])).unwrap();
                    let round = micros(runs, || {
                        plain.verify(&four, 100, &drafts, None).unwrap().read().unwrap();
                    });
                    println!("  {name}, {rule:?}: 1 row {alone:.0}, 4 rows {several:.0}, verify 3 drafts {round:.0} us");
                }
            }
            let mut counted = sampler(
                &options(Shape::Filtered(DEFAULT), Some(penalties)),
                Verify::Coupled,
                size,
                &history,
                path,
            );
            let plain = sampler(
                &options(Shape::Filtered(DEFAULT), None),
                Verify::Coupled,
                size,
                &[],
                path,
            );
            let without = micros(runs, || step(&plain, &one));
            let with = micros(runs, || {
                step(&counted, &one);
                counted.commit(&[17]).unwrap();
            });
            println!(
                "  penalties over 4096 tokens add {:.0} us to {without:.0}",
                with - without
            );
            let logprobs = micros(runs, || {
                let rows = plain.next(&one, 100, None).unwrap();
                let scores = plain.logprobs(&one, &rows.picks(), 5).unwrap();
                eval(scores.arrays().chain([&rows.peak])).unwrap();
            });
            println!("  logprobs with 5 rivals add {:.0} us", logprobs - without);
        }
    }
}
