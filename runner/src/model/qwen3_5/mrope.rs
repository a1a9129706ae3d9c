//! Rotary positions of a text with pictures in it.
//!
//! Invariant: slot (the index in the cache) and rotary position are separate numbers; behind the last picture a slot's position
//! is `slot + delta` on all three axes, and `delta` is never positive.
//! Source: interleaved M-RoPE of Qwen3-VL.

/// Where a picture's features stand in the text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ImageSpan {
    /// Slot of the first feature.
    pub slot: usize,
    /// Rows of features: the grid's rows over the merge size.
    pub rows: usize,
    /// Columns of features.
    pub cols: usize,
}

impl ImageSpan {
    /// Slots that the picture takes.
    pub fn len(&self) -> usize {
        self.rows * self.cols
    }

    /// Whether it takes none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The slot behind it.
    pub fn end(&self) -> usize {
        self.slot + self.len()
    }
}

/// Positions of every slot of a prompt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MropePositions {
    /// A position a slot, for time, height and width.
    pub axes: [Vec<i32>; 3],
    /// What the position of a later slot is off by.
    pub delta: i32,
}

impl MropePositions {
    /// Positions of slots `from..to`, those behind the prompt included.
    pub fn range(&self, from: usize, to: usize) -> [Vec<i32>; 3] {
        let later = |slot: usize| slot as i32 + self.delta;
        let at = |axis: &Vec<i32>| {
            (from..to)
                .map(|slot| axis.get(slot).copied().unwrap_or(later(slot)))
                .collect()
        };
        [at(&self.axes[0]), at(&self.axes[1]), at(&self.axes[2])]
    }
}

/// Positions of `length` slots with `images` in them, ascending and apart.
pub fn mrope_positions(length: usize, images: &[ImageSpan]) -> MropePositions {
    let mut axes: [Vec<i32>; 3] = std::array::from_fn(|_| Vec::with_capacity(length));
    let mut next = 0;
    let text = |axes: &mut [Vec<i32>; 3], next: &mut i32, to: usize| {
        for _ in axes[0].len()..to {
            axes.iter_mut().for_each(|axis| axis.push(*next));
            *next += 1;
        }
    };
    for image in images {
        text(&mut axes, &mut next, image.slot);
        for row in 0..image.rows as i32 {
            for col in 0..image.cols as i32 {
                axes[0].push(next);
                axes[1].push(next + row);
                axes[2].push(next + col);
            }
        }
        next += image.rows.max(image.cols) as i32;
    }
    text(&mut axes, &mut next, length);
    MropePositions {
        axes,
        delta: next - length as i32,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_alone_stands_at_its_slots() {
        let found = mrope_positions(3, &[]);
        assert_eq!(found.axes, [vec![0, 1, 2], vec![0, 1, 2], vec![0, 1, 2]]);
        assert_eq!(found.delta, 0);
    }

    #[test]
    fn a_picture_moves_the_text_behind_it_by_its_longer_side() {
        let found = mrope_positions(
            9,
            &[ImageSpan {
                slot: 1,
                rows: 2,
                cols: 3,
            }],
        );
        assert_eq!(found.axes[0], [0, 1, 1, 1, 1, 1, 1, 4, 5]);
        assert_eq!(found.axes[1], [0, 1, 1, 1, 2, 2, 2, 4, 5]);
        assert_eq!(found.axes[2], [0, 1, 2, 3, 1, 2, 3, 4, 5]);
        assert_eq!(found.delta, -3);
        assert_eq!(found.range(8, 11)[0], [5, 6, 7]);
    }
}
