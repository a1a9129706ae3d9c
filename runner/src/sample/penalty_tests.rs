//! The penalties' window against a plain list of tokens.

use lookahead_protocol::request::Verify;
use mlx_rs::Array;

use super::options::{PenaltyOptions, Shape, Window};
use super::oracle;
use super::sampler::{Draft, Sampler};
use super::sampler_tests::{assert_close, evaluate, options, paths, probabilities, rows, sampler, PLAIN};

#[test]
fn penalties_follow_the_window_through_commits_drafts_and_pending_tokens() {
    let size = 64;
    let logits: Vec<Vec<f32>> = (0..4).map(|r| oracle::logits(100 + r, size, 3.0)).collect();
    let shape = Shape::Filtered(PLAIN);
    for path in paths() {
        for window in [
            Window::Last(1),
            Window::Last(2),
            Window::Last(7),
            Window::Last(64),
            Window::All,
        ] {
            let penalties = PenaltyOptions {
                repeat: 1.4,
                presence: 0.5,
                frequency: 0.3,
                window,
            };
            let mut list: Vec<u32> = (0..10).map(|i| i * 3 % 11).collect();
            let mut sampler = sampler(
                &options(shape, Some(penalties)),
                Verify::Coupled,
                size,
                &list,
                path,
            );
            let check = |sampler: &Sampler, list: &[u32]| {
                let got = sampler.next(&rows(&logits[..1]), 0, None).unwrap();
                evaluate(&got);
                let want = oracle::penalise(&oracle::wide(&logits[0]), list, &penalties);
                let name = format!("{window:?}, {path:?}, {} tokens", list.len());
                assert_close(
                    &name,
                    &probabilities(&got.dist, 0, size),
                    &oracle::distribution(&want, &shape),
                );
            };
            check(&sampler, &list);
            for step in 0..12u32 {
                let tokens: Vec<u32> = (0..step % 4).map(|i| (step * 7 + i * 3) % 13).collect();
                sampler.commit(&tokens).unwrap();
                list.extend(&tokens);
                check(&sampler, &list);
                let token = step * 5 % 13;
                sampler
                    .commit_pending(&Array::from_slice(&[token as i32], &[1]))
                    .unwrap();
                list.push(token);
                check(&sampler, &list);
                // One step later its id is known.
                let late = (step + 1) % 13;
                sampler
                    .commit_pending(&Array::from_slice(&[late as i32], &[1]))
                    .unwrap();
                sampler.confirm(token);
                list.push(late);
                check(&sampler, &list);
                sampler.confirm(late);
            }
            // Drafts: row r sees those before it, and the window moves on.
            let mut drafts = Vec::new();
            for (i, row) in logits[..3].iter().enumerate() {
                let draft = sampler
                    .draft(&rows(&[&row]), 50 + i as u64, &drafts, None)
                    .unwrap();
                evaluate(&draft.rows);
                let mut seen = list.clone();
                seen.extend(drafts.iter().map(|d: &Draft| d.ids().as_slice::<i32>()[0] as u32));
                let want = oracle::penalise(&oracle::wide(row), &seen, &penalties);
                let name = format!("draft {i}, {window:?}, {path:?}");
                assert_close(
                    &name,
                    &probabilities(&draft.rows.dist, 0, size),
                    &oracle::distribution(&want, &shape),
                );
                drafts.push(draft);
            }
            let verdict = sampler.verify(&rows(&logits), 50, &drafts, None).unwrap();
            evaluate(verdict.rows());
            for (r, row) in logits.iter().enumerate() {
                let mut seen = list.clone();
                seen.extend(drafts[..r].iter().map(|d| d.ids().as_slice::<i32>()[0] as u32));
                let want = oracle::penalise(&oracle::wide(row), &seen, &penalties);
                let name = format!("row {r}, {window:?}, {path:?}");
                let got = probabilities(&verdict.rows().dist, r, size);
                assert_close(&name, &got, &oracle::distribution(&want, &shape));
            }
            // Nothing of the drafts stays.
            check(&sampler, &list);
        }
    }
}

#[test]
fn tokens_beyond_the_vocabulary_do_not_touch_the_counts() {
    let penalties = PenaltyOptions {
        repeat: 1.4,
        presence: 0.5,
        frequency: 0.0,
        window: Window::Last(3),
    };
    let logits = oracle::logits(7, 64, 3.0);
    for path in paths() {
        let mut sampler = sampler(
            &options(Shape::Filtered(PLAIN), Some(penalties)),
            Verify::Coupled,
            64,
            &[1, 64, 9_999_999],
            path,
        );
        sampler.commit(&[5, u32::MAX, 70]).unwrap();
        sampler.commit(&[6]).unwrap();
        let got = sampler.next(&rows(&[&logits]), 0, None).unwrap();
        evaluate(&got);
        let want = oracle::penalise(&oracle::wide(&logits), &[6], &penalties);
        let want = oracle::distribution(&want, &Shape::Filtered(PLAIN));
        assert_close("out of range", &probabilities(&got.dist, 0, 64), &want);
    }
}
