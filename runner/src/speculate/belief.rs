//! What is believed of several quantities together: a Gaussian, corrected by one measurement after the other.
//!
//! Invariant: the covariance stays symmetric and no variance leaves 0..=[`WIDEST`], whatever is measured, so that a
//! correction never overshoots its measurement.
//! Source: R. E. Kalman, "A new approach to linear filtering and prediction problems" (1960).

use serde::{Deserialize, Serialize};

/// Largest variance; both users hold logarithms, so this is a factor of e squared.
pub const WIDEST: f64 = 4.0;

/// Means and covariances of quantities 0, 1, ….
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Belief {
    means: Vec<f64>,
    /// Row `a` has the covariances with the quantities up to `a`.
    covariance: Vec<Vec<f64>>,
}

impl Belief {
    /// Number of quantities.
    #[must_use]
    pub fn len(&self) -> usize {
        self.means.len()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.means.is_empty()
    }

    /// Adds a quantity that has nothing in common with the others.
    pub fn push(&mut self, mean: f64, variance: f64) {
        let mut row = vec![0.0; self.len()];
        row.push(variance);
        self.means.push(mean);
        self.covariance.push(row);
    }

    /// What a quantity most likely is.
    #[must_use]
    pub fn mean(&self, a: usize) -> Option<f64> {
        self.means.get(a).copied()
    }

    /// Replaces the mean, the covariances aside.
    pub fn set_mean(&mut self, a: usize, mean: f64) {
        if let Some(place) = self.means.get_mut(a) {
            *place = mean;
        }
    }

    /// Keeps a mean in bounds.
    pub fn bound(&mut self, low: f64, high: f64) {
        for mean in &mut self.means {
            *mean = mean.clamp(low, high);
        }
    }

    /// Covariance of two quantities; 0 where there is none of them.
    #[must_use]
    pub fn covariance(&self, a: usize, b: usize) -> f64 {
        let row = self.covariance.get(a.max(b));
        row.and_then(|row| row.get(a.min(b))).copied().unwrap_or(0.0)
    }

    /// Variance of the difference of two quantities.
    #[must_use]
    pub fn contrast(&self, a: usize, b: usize) -> f64 {
        (self.covariance(a, a) + self.covariance(b, b) - 2.0 * self.covariance(a, b)).max(0.0)
    }

    /// Replaces the covariances by what `of` makes of each pair; it is asked once for each, the larger index first.
    pub fn change(&mut self, of: impl Fn(usize, usize, f64) -> f64) {
        for (a, row) in self.covariance.iter_mut().enumerate() {
            for (b, entry) in row.iter_mut().enumerate() {
                *entry = of(a, b, *entry);
            }
        }
        if (0..self.len()).all(|a| self.covariance(a, a) <= WIDEST) {
            return;
        }
        // Scaled rather than cut, which keeps what two quantities have in common within what each may be off by.
        let scale: Vec<f64> = (0..self.len())
            .map(|a| (WIDEST / self.covariance(a, a)).sqrt().min(1.0))
            .collect();
        for (a, row) in self.covariance.iter_mut().enumerate() {
            for (b, entry) in row.iter_mut().enumerate() {
                *entry *= scale[a] * scale[b];
            }
        }
    }

    /// Takes in a measurement of one quantity: it is off by `innovation`, known to within `variance`.
    pub fn update(&mut self, a: usize, innovation: f64, variance: f64) {
        let total = self.covariance(a, a) + variance;
        if total <= 0.0 || !total.is_finite() || !innovation.is_finite() {
            return;
        }
        let column: Vec<f64> = (0..self.len()).map(|b| self.covariance(a, b)).collect();
        for (mean, shared) in self.means.iter_mut().zip(&column) {
            *mean += shared / total * innovation;
        }
        self.change(|b, c, old| {
            let left = old - column[b] * column[c] / total;
            if b == c {
                left.max(0.0)
            } else {
                left
            }
        });
    }

    /// Whether a state read back from a file keeps the invariant for at most `most` quantities.
    #[must_use]
    pub fn is_sound(&self, most: usize) -> bool {
        let shaped = self.covariance.len() == self.len()
            && self
                .covariance
                .iter()
                .enumerate()
                .all(|(a, row)| row.len() == a + 1);
        let bounded = |a: usize, b: usize| {
            let (own, other) = (self.covariance(a, a), self.covariance(b, b));
            (0.0..=WIDEST * (1.0 + 1e-9)).contains(&own)
                && self.covariance(a, b).abs() <= (own * other).sqrt() * (1.0 + 1e-6) + 1e-9
        };
        self.len() <= most
            && shaped
            && self.means.iter().all(|mean| mean.is_finite())
            && (0..self.len()).all(|a| (0..=a).all(|b| bounded(a, b)))
    }
}
