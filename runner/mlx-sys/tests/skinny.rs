//! A few rows times a transposed matrix, the product that decoding and verifying drafts are made of: right for every
//! shape, and bit for bit the same row however many rows and threads there are.
#![cfg(target_os = "linux")]

use std::ffi::c_int;
use std::thread;

// Brings in the archive that defines the functions below.
use mlx_sys as _;

extern "C" {
    fn cblas_sgemm(
        order: c_int,
        transa: c_int,
        transb: c_int,
        m: c_int,
        n: c_int,
        k: c_int,
        alpha: f32,
        a: *const f32,
        lda: c_int,
        b: *const f32,
        ldb: c_int,
        beta: f32,
        c: *mut f32,
        ldc: c_int,
    );
    fn lookahead_skinny_sgemm(
        level: c_int,
        threads: c_int,
        m: c_int,
        n: c_int,
        k: c_int,
        alpha: f32,
        a: *const f32,
        lda: c_int,
        b: *const f32,
        ldb: c_int,
        beta: f32,
        c: *mut f32,
        ldc: c_int,
    ) -> bool;
}

extern "C" {
    fn lookahead_skinny_bf16(
        level: c_int,
        threads: c_int,
        m: c_int,
        n: c_int,
        k: c_int,
        a: *const f32,
        b: *const u16,
        c: *mut f32,
    ) -> bool;
}

const ROW_MAJOR: c_int = 101;
const PLAIN: c_int = 111;
const TRANSPOSED: c_int = 112;
const LEVELS: [c_int; 3] = [0, 1, 2];

/// Numbers in -1..1 whose sums round: a xorshift generator's.
fn noise(len: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..len)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 40) as f32 / (1 << 23) as f32 - 1.0
        })
        .collect()
}

/// Operands of `m` rows by `n` columns over `k`, each row followed by `gap` elements that belong to nobody.
#[derive(Clone, Debug)]
struct Case {
    m: usize,
    n: usize,
    k: usize,
    gap: usize,
    alpha: f32,
    beta: f32,
    a: Vec<f32>,
    b: Vec<f32>,
    c: Vec<f32>,
}

impl Case {
    fn new(m: usize, n: usize, k: usize, gap: usize) -> Self {
        let spoiled = |rows: usize, width: usize, seed| {
            let mut data = noise(rows * (width + gap), seed);
            for row in data.chunks_mut(width + gap) {
                row[width..].fill(f32::NAN);
            }
            data
        };
        let (a, b, c) = (spoiled(m, k, 1), spoiled(n, k, 2), spoiled(m, n, 3));
        Self {
            m,
            n,
            k,
            gap,
            alpha: 1.0,
            beta: 0.0,
            a,
            b,
            c,
        }
    }

    /// C at one instruction set, or nothing where this processor lacks it.
    fn at(&self, level: c_int, threads: c_int) -> Option<Vec<f32>> {
        let mut c = self.c.clone();
        let [m, n, k, lda, ldc] =
            [self.m, self.n, self.k, self.k + self.gap, self.n + self.gap].map(|size| size as c_int);
        // SAFETY: the operands have the sizes that are passed.
        let known = unsafe {
            let (a, b) = (self.a.as_ptr(), self.b.as_ptr());
            lookahead_skinny_sgemm(
                level,
                threads,
                m,
                n,
                k,
                self.alpha,
                a,
                lda,
                b,
                lda,
                self.beta,
                c.as_mut_ptr(),
                ldc,
            )
        };
        known.then_some(c)
    }

    /// C as MLX asks for it.
    fn blas(&self) -> Vec<f32> {
        let mut c = self.c.clone();
        let [m, n, k, lda, ldc] =
            [self.m, self.n, self.k, self.k + self.gap, self.n + self.gap].map(|size| size as c_int);
        // SAFETY: the operands have the sizes that are passed.
        unsafe {
            let (a, b) = (self.a.as_ptr(), self.b.as_ptr());
            cblas_sgemm(
                ROW_MAJOR,
                PLAIN,
                TRANSPOSED,
                m,
                n,
                k,
                self.alpha,
                a,
                lda,
                b,
                lda,
                self.beta,
                c.as_mut_ptr(),
                ldc,
            );
        }
        c
    }

    fn check(&self, got: &[f32], what: &str) {
        let (Self { m, n, k, gap, .. }, ldc) = (self, self.n + self.gap);
        for row in 0..*m {
            for column in 0..*n {
                let a = &self.a[row * (k + gap)..][..*k];
                let b = &self.b[column * (k + gap)..][..*k];
                let dot: f64 = a.iter().zip(b).map(|(x, y)| f64::from(*x) * f64::from(*y)).sum();
                let mut expected = f64::from(self.alpha) * dot;
                if self.beta != 0.0 {
                    expected += f64::from(self.beta) * f64::from(self.c[row * ldc + column]);
                }
                let value = f64::from(got[row * ldc + column]);
                assert!(
                    (value - expected).abs() < 1e-6 * (*k as f64).sqrt().max(4.0),
                    "{what}, {m} x {n} over {k}, element {row}, {column}: {value} is not {expected}"
                );
            }
            let beyond = &got[row * ldc + n..(row + 1) * ldc];
            assert!(beyond.iter().all(|x| x.is_nan()), "{what} wrote beyond row {row}");
        }
    }

    fn row(&self, c: &[f32], row: usize) -> Vec<u32> {
        let row = &c[row * (self.n + self.gap)..][..self.n];
        row.iter().map(|x| x.to_bits()).collect()
    }

    /// The same with nothing but row `row` of A.
    fn alone(&self, row: usize) -> Self {
        let (lda, ldc) = (self.k + self.gap, self.n + self.gap);
        Self {
            m: 1,
            a: self.a[row * lda..][..lda].to_vec(),
            c: self.c[row * ldc..][..ldc].to_vec(),
            ..self.clone()
        }
    }
}

#[test]
fn every_instruction_set_is_right_for_odd_sizes_and_padded_rows() {
    for m in 1..=16 {
        for (n, k) in [(1, 1), (2, 7), (5, 16), (9, 33), (25, 100), (50, 259)] {
            for gap in [0, 3] {
                let case = Case::new(m, n, k, gap);
                for level in LEVELS {
                    if let Some(c) = case.at(level, 1) {
                        case.check(&c, &format!("level {level}"));
                    }
                }
                case.check(&case.blas(), "BLAS");
            }
        }
    }
}

#[test]
fn alpha_and_beta_scale_product_and_accumulator() {
    for m in [1, 4, 7, 16, 17] {
        for (alpha, beta) in [(0.5, 0.0), (1.0, 1.0), (-2.0, 0.25), (0.0, 3.0)] {
            let case = Case {
                alpha,
                beta,
                ..Case::new(m, 21, 75, 2)
            };
            case.check(&case.blas(), "BLAS");
        }
    }
}

#[test]
fn zero_beta_ignores_what_the_result_held() {
    let mut case = Case::new(3, 10, 40, 1);
    case.c.fill(f32::NAN);
    case.check(&case.blas(), "BLAS");
}

#[test]
fn verified_row_has_the_bits_of_a_row_decoded_alone() {
    // The first is too small for a second thread, the second is not.
    for (n, k, gap) in [(37, 83, 5), (1296, 256, 0)] {
        for m in 2..=16 {
            let case = Case::new(m, n, k, gap);
            let together = case.blas();
            for row in 0..m {
                let alone = case.alone(row);
                assert_eq!(
                    case.row(&together, row),
                    alone.row(&alone.blas(), 0),
                    "row {row} of {m}"
                );
            }
        }
    }
}

#[test]
fn element_does_not_depend_on_the_number_of_columns() {
    let wide = Case::new(4, 40, 70, 0);
    let whole = wide.blas();
    for n in 1..40 {
        let narrow = Case {
            n,
            b: wide.b[..n * 70].to_vec(),
            c: vec![0.0; 4 * n],
            ..wide.clone()
        };
        let part = narrow.blas();
        for row in 0..4 {
            assert_eq!(narrow.row(&part, row), wide.row(&whole, row)[..n], "{n} columns");
        }
    }
}

#[test]
fn number_of_threads_changes_no_bit() {
    for (m, n, k) in [(1, 4096, 256), (5, 1297, 256), (16, 515, 131)] {
        let case = Case::new(m, n, k, 0);
        for level in LEVELS {
            let Some(single) = case.at(level, 1) else {
                continue;
            };
            for threads in [2, 3, 8, 64] {
                for _ in 0..20 {
                    assert!(case.at(level, threads).unwrap() == single, "{threads} threads");
                }
            }
        }
    }
}

#[test]
fn callers_at_once_and_sleeping_helpers_neither_block_nor_mix() {
    thread::scope(|scope| {
        for caller in 0..4 {
            scope.spawn(move || {
                let case = Case::new(1 + caller, 1000 + 100 * caller, 128, 0);
                let expected = case.at(0, 1).unwrap();
                for turn in 0..200 {
                    assert!(case.at(0, 3).unwrap() == expected, "caller {caller}, turn {turn}");
                    if turn % 50 == 0 {
                        // Long enough for every helper to have gone to sleep.
                        thread::sleep(std::time::Duration::from_millis(5));
                    }
                }
            });
        }
    });
}

/// MLX calls a row that happens to be a column, or a transposed view, transposed.
#[test]
fn transposed_left_side_and_lone_column_take_the_same_path() {
    let (n, k) = (19, 45);
    for m in [1, 3, 16] {
        let case = Case::new(m, n, k, 0);
        let expected = case.blas();
        let transposed: Vec<f32> = (0..k * m).map(|i| case.a[i % m * k + i / m]).collect();
        let mut c = vec![0.0; m * n];
        let mut column = vec![0.0; m];
        let [m_, n_, k_] = [m, n, k].map(|size| size as c_int);
        // SAFETY: the operands have the sizes that are passed.
        unsafe {
            let (a, b) = (case.a.as_ptr(), case.b.as_ptr());
            let view = transposed.as_ptr();
            cblas_sgemm(
                ROW_MAJOR,
                TRANSPOSED,
                TRANSPOSED,
                m_,
                n_,
                k_,
                1.0,
                view,
                m_,
                b,
                k_,
                0.0,
                c.as_mut_ptr(),
                n_,
            );
            cblas_sgemm(
                ROW_MAJOR,
                PLAIN,
                PLAIN,
                m_,
                1,
                k_,
                1.0,
                a,
                k_,
                b,
                1,
                0.0,
                column.as_mut_ptr(),
                1,
            );
        }
        assert!(c == expected, "{m} rows");
        let first: Vec<f32> = expected.iter().step_by(n).copied().collect();
        assert!(column == first, "{m} rows");
    }
}

/// Rows of a bfloat16 matrix, widened on the way, against the same numbers in float32, on every instruction set.
#[test]
fn bfloat16_numbers_give_what_they_give_in_float32() {
    for (m, n, k) in [
        (1, 3, 5),
        (1, 40, 64),
        (2, 7, 33),
        (4, 50, 100),
        (9, 5, 16),
        (16, 24, 31),
    ] {
        let a = noise(m * k, 5);
        let halves: Vec<u16> = noise(n * k, 6)
            .iter()
            .map(|x| (x.to_bits() >> 16) as u16)
            .collect();
        let wide: Vec<f32> = halves
            .iter()
            .map(|&x| f32::from_bits(u32::from(x) << 16))
            .collect();
        let (rows, columns, depth) = (m as c_int, n as c_int, k as c_int);
        for level in LEVELS {
            for threads in [1, 3] {
                let (mut got, mut wanted) = (vec![f32::NAN; m * n], vec![f32::NAN; m * n]);
                // SAFETY: the buffers have the sizes that the numbers say.
                let there = unsafe {
                    lookahead_skinny_bf16(
                        level,
                        threads,
                        rows,
                        columns,
                        depth,
                        a.as_ptr(),
                        halves.as_ptr(),
                        got.as_mut_ptr(),
                    )
                };
                if !there {
                    continue;
                }
                // SAFETY: as above.
                unsafe {
                    lookahead_skinny_sgemm(
                        level,
                        1,
                        rows,
                        columns,
                        depth,
                        1.0,
                        a.as_ptr(),
                        depth,
                        wide.as_ptr(),
                        depth,
                        0.0,
                        wanted.as_mut_ptr(),
                        columns,
                    );
                }
                assert_eq!(got, wanted, "level {level}, {m} x {n} x {k}, {threads} threads");
            }
        }
    }
}

/// Fewer columns than there would be parts for the work: the cut must not come out empty.
#[test]
fn few_columns_over_a_long_row_are_cut_into_whole_parts() {
    for (m, n, k, transb) in [
        (1, 5, 90_000, TRANSPOSED),
        (2, 2, 600_000, PLAIN),
        (20, 3, 60_000, TRANSPOSED),
    ] {
        let (a, b) = (vec![1.0f32; m * k], vec![1.0f32; n * k]);
        let mut c = vec![f32::NAN; m * n];
        let (rows, columns, depth) = (m as c_int, n as c_int, k as c_int);
        let ldb = if transb == TRANSPOSED { depth } else { columns };
        // SAFETY: the buffers have the sizes that the numbers say.
        unsafe {
            cblas_sgemm(
                ROW_MAJOR,
                PLAIN,
                transb,
                rows,
                columns,
                depth,
                1.0,
                a.as_ptr(),
                depth,
                b.as_ptr(),
                ldb,
                0.0,
                c.as_mut_ptr(),
                columns,
            );
            if transb == TRANSPOSED && m == 1 {
                assert!(lookahead_skinny_sgemm(
                    0,
                    64,
                    rows,
                    columns,
                    depth,
                    1.0,
                    a.as_ptr(),
                    depth,
                    b.as_ptr(),
                    depth,
                    0.0,
                    c.as_mut_ptr(),
                    columns,
                ));
            }
        }
        assert!(c.iter().all(|&x| x == k as f32), "{m} x {n} x {k}: {c:?}");
    }
}
