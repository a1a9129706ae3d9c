//! Partial rotary embedding, plain and with three interleaved position axes.
//!
//! Invariant: both forms agree where all axes are equal; columns from `dims` on pass through.
//! Source: Su et al., "RoFormer" (2021); interleaved M-RoPE as in Qwen3-VL.

use std::cell::RefCell;
use std::rc::Rc;

use mlx_rs::error::Result;
use mlx_rs::ops::concatenate;
use mlx_rs::Array;

use crate::mlx::{ops, Path};
use crate::model::Positions;

/// Rotation of the first `dims` columns of every head.
#[derive(Debug, Clone)]
pub struct Rope {
    /// Rotated columns, even.
    pub dims: i32,
    /// Base of the frequencies.
    pub theta: f32,
    /// Frequencies of each axis (time, height, width); sums to `dims / 2`.
    pub sections: [i32; 3],
    /// How it is computed: the fused kernels always take tables.
    pub path: Path,
    /// Where a GPU's decoding is.
    pub window: Window,
}

/// Cosines and sines of the positions around those last asked for, kept on the device: a table that the host writes for every
/// step would be moved there for every step.
#[derive(Debug, Clone, Default)]
pub struct Window(Rc<RefCell<Option<Rows>>>);

/// Tables [n, dims / 2] of the positions from `from` on.
#[derive(Debug)]
struct Rows {
    from: i32,
    cos: Array,
    sin: Array,
}

/// Positions of a window, beside the rows asked for.
const WINDOW: i32 = 512;
/// Of these, positions before the one asked for: drafts that don't stand take decoding back.
const BEHIND: i32 = 32;

/// Rotation of one batch, ready for every layer.
#[derive(Debug)]
pub enum Rotation {
    /// Consecutive positions from here.
    From(i32),
    /// Cosines and sines, [L, dims / 2] float32.
    Table(Array, Array),
}

impl Rope {
    /// Prepares the rotation of a batch.
    pub fn rotation(&self, positions: &Positions, rows: i32) -> Result<Rotation> {
        match (positions, self.path) {
            (Positions::Sequential { start }, Path::Graph) => Ok(Rotation::From(*start)),
            (Positions::Sequential { start }, Path::Gpu) if rows <= BEHIND => {
                let (cos, sin) = self.in_window(*start, rows)?;
                Ok(Rotation::Table(cos, sin))
            }
            _ => {
                let (cos, sin) = self.tables(positions, rows);
                Ok(Rotation::Table(cos, sin))
            }
        }
    }

    /// Cosines and sines of consecutive positions, cut from the window, which is moved where it has to be.
    fn in_window(&self, start: i32, rows: i32) -> Result<(Array, Array)> {
        let mut window = self.window.0.borrow_mut();
        let held = window.take().filter(|held| {
            let there = held.from..=held.from + held.cos.dim(0);
            there.contains(&start) && there.contains(&(start + rows))
        });
        let held = match held {
            Some(held) => held,
            None => {
                let from = (start - BEHIND).max(0);
                let (cos, sin) = self.tables(&Positions::Sequential { start: from }, WINDOW);
                Rows { from, cos, sin }
            }
        };
        let at = start - held.from;
        let cut = |table: &Array| ops::slice_axis(table, 0, at, at + rows);
        let cuts = (cut(&held.cos)?, cut(&held.sin)?);
        *window = Some(held);
        Ok(cuts)
    }

    /// Cosines and sines of a batch, [L, dims / 2].
    fn tables(&self, positions: &Positions, rows: i32) -> (Array, Array) {
        let position = |row: i32, axis: usize| match positions {
            Positions::Sequential { start } => start + row,
            Positions::Axes(axes) => axes[axis][row as usize],
        };
        let half = self.dims / 2;
        let frequencies: Vec<(usize, f64)> = (0..half)
            .map(|j| {
                let axis = match j % 3 {
                    1 if j < 3 * self.sections[1] => 1,
                    2 if j < 3 * self.sections[2] => 2,
                    _ => 0,
                };
                (
                    axis,
                    f64::from(self.theta).powf(-2.0 * f64::from(j) / f64::from(self.dims)),
                )
            })
            .collect();
        let mut cos = Vec::with_capacity((rows * half) as usize);
        let mut sin = Vec::with_capacity((rows * half) as usize);
        for row in 0..rows {
            for (axis, frequency) in &frequencies {
                let angle = f64::from(position(row, *axis)) * frequency;
                cos.push(angle.cos() as f32);
                sin.push(angle.sin() as f32);
            }
        }
        (
            Array::from_slice(&cos, &[rows, half]),
            Array::from_slice(&sin, &[rows, half]),
        )
    }

    /// Rotates `x` [B, H, L, D].
    pub fn apply(&self, x: &Array, rotation: &Rotation) -> Result<Array> {
        let (cos, sin) = match rotation {
            Rotation::From(start) => {
                return mlx_rs::fast::rope(x, self.dims, false, self.theta, 1.0, *start, None);
            }
            Rotation::Table(cos, sin) => (cos, sin),
        };
        let half = self.dims / 2;
        let wide = ops::cast(x, mlx_rs::Dtype::Float32)?;
        let a = ops::slice_axis(&wide, 3, 0, half)?;
        let b = ops::slice_axis(&wide, 3, half, self.dims)?;
        let first = a.multiply(cos)?.subtract(&b.multiply(sin)?)?;
        let second = b.multiply(cos)?.add(&a.multiply(sin)?)?;
        let mut parts = vec![first, second];
        if x.dim(3) > self.dims {
            parts.push(ops::slice_axis(&wide, 3, self.dims, x.dim(3))?);
        }
        ops::cast(&concatenate(&parts, 3)?, x.dtype())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mlx::Backend;

    #[test]
    fn a_window_that_moves_back_and_forth_holds_what_a_table_of_its_own_would() {
        Backend::select(true);
        let rope = |path| Rope {
            dims: 8,
            theta: 1e4,
            sections: [4, 0, 0],
            path,
            window: Window::default(),
        };
        let (gpu, cpu) = (rope(Path::Gpu), rope(Path::Cpu));
        let ends = [WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW];
        for start in [0, 1, 30, 17]
            .into_iter()
            .chain(ends)
            .chain([WINDOW - 3, 5, 100_000, 99_990, 99_900])
        {
            for rows in [1, 4, 17, BEHIND, BEHIND + 1] {
                let positions = Positions::Sequential { start };
                let of = |rope: &Rope| match rope.rotation(&positions, rows).unwrap() {
                    Rotation::Table(cos, sin) => [cos, sin].map(|table| {
                        assert_eq!(table.shape(), [rows, 4]);
                        ops::compact(&table).unwrap().as_slice::<f32>().to_vec()
                    }),
                    Rotation::From(_) => unreachable!(),
                };
                assert_eq!(of(&gpu), of(&cpu), "{rows} rows from {start}");
            }
        }
    }
}
