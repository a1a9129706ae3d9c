//! Row orders of fused projections.

use super::*;

#[test]
fn interleaved_rows_split_into_contiguous_parts() {
    let delta = DeltaConfig {
        key_heads: 2,
        value_heads: 4,
        key_dim: 2,
        value_dim: 3,
        conv_kernel: 4,
    };
    // Block of a key head: 2 q, 2 k, 6 v, 6 z rows.
    let head = |h: usize, from: usize, n: usize| (0..n).map(move |i| h * 16 + from + i);
    let wanted: Vec<usize> = [(0, 2), (2, 2), (4, 6), (10, 6)]
        .into_iter()
        .flat_map(|(from, n)| head(0, from, n).chain(head(1, from, n)).collect::<Vec<_>>())
        .collect();
    assert_eq!(qkvz_rows(&delta), wanted);
    assert_eq!(ba_rows(&delta), [0, 1, 4, 5, 2, 3, 6, 7]);
}

#[test]
fn every_row_is_used_once() {
    let delta = DeltaConfig {
        key_heads: 16,
        value_heads: 32,
        key_dim: 128,
        value_dim: 128,
        conv_kernel: 4,
    };
    for mut rows in [qkvz_rows(&delta), ba_rows(&delta)] {
        rows.sort_unstable();
        assert!(rows.iter().enumerate().all(|(i, r)| i == *r));
    }
}
