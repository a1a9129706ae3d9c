//! Counter-based randomness: every draw is a pure function of (seed, position, purpose, token id).
//!
//! Invariant: no state. The same key gives the same 32-bit words on the host and on every device, in any process, at any draft
//! depth and in any order of evaluation, because they come of wrapping integer arithmetic alone.
//!
//! The generator is SplitMix (Steele, Lea, Flood: "Fast Splittable Pseudorandom Number Generators", 2014): a Weyl sequence with a
//! stream's own odd increment, passed through a mixing function. The 64-bit form turns (seed, position, purpose) into a
//! [`RowKey`]; the 32-bit form, keyed by it, gives one word for each token id. Only the latter runs on the device
//! (`noise`), where 32-bit multiply, add, xor and shift exist on every backend.
//!
//! What is guaranteed across backends: the words, and everything derived from a whole row on the host ([`uniform`]). The float32
//! exponentials made from words on a device pass through its `log1p`, whose last bit may differ between backends; within one
//! backend they are reproducible.

/// What a draw is for; keeps draws at one position independent of each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u64)]
pub enum Purpose {
    /// The token at a position: plain decoding, a bonus row, and both sides of the coupled rule.
    Token = 1,
    /// A drafted token under the rejection rule.
    Draft = 2,
    /// The acceptance test of a drafted token.
    Accept = 3,
    /// The replacement after a refusal.
    Residual = 4,
}

const GOLDEN: u64 = 0x9E37_79B9_7F4A_7C15;

/// First multiplier of the 32-bit finaliser (Wellons' low-bias constants).
pub const MIX_A: u32 = 0x21F0_AAAD;
/// Second multiplier of the 32-bit finaliser.
pub const MIX_B: u32 = 0x735A_2D97;

/// Turns a word into the open unit interval: `(word + 0.5) * UNIT`, slightly under 2^-32 so that a word that rounds up to 2^32 in
/// float32 still stays below one.
pub const UNIT: f32 = 2.328_306e-10;

fn mix64(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

fn row_word(seed: u64, position: u64, purpose: Purpose) -> u64 {
    let stream = mix64(mix64(seed.wrapping_add(GOLDEN)) ^ position);
    mix64(stream.wrapping_add(GOLDEN.wrapping_mul(purpose as u64)))
}

/// One number in [0, 1) with 24 random bits for a whole row, exact in float32.
pub fn uniform(seed: u64, position: u64, purpose: Purpose) -> f32 {
    (row_word(seed, position, purpose) >> 40) as f32 * (1.0 / 16_777_216.0)
}

/// The stream of 32-bit words of one row, one word for each token id.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RowKey {
    /// The stream's start.
    pub base: u32,
    /// The stream's odd increment.
    pub gamma: u32,
}

impl RowKey {
    /// The stream of (seed, position, purpose).
    pub fn new(seed: u64, position: u64, purpose: Purpose) -> Self {
        let word = row_word(seed, position, purpose);
        let gamma = (word >> 32) as u32 | 1;
        // SplitMix's own guard: an increment with few changes of bit would make neighbouring ids alike.
        let gamma = if (gamma ^ (gamma >> 1)).count_ones() < 12 {
            gamma ^ 0xAAAA_AAAA
        } else {
            gamma
        };
        Self {
            base: word as u32,
            gamma,
        }
    }

    /// The word of a token id.
    pub fn word(self, token: u32) -> u32 {
        let mut x = token.wrapping_mul(self.gamma).wrapping_add(self.base);
        x ^= x >> 16;
        x = x.wrapping_mul(MIX_A);
        x ^= x >> 15;
        x = x.wrapping_mul(MIX_B);
        x ^ (x >> 15)
    }

    /// A standard exponential for a token id, in float64 from the same word as the device's float32 one.
    ///
    /// The token with the smallest exponential/probability is a draw from the distribution; its negative logarithm is the Gumbel
    /// noise of the "Gumbel-max trick", so the two races have one winner.
    pub fn exponential(self, token: u32) -> f64 {
        -(-((f64::from(self.word(token)) + 0.5) * f64::from(UNIT))).ln_1p()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_never_change_between_versions() {
        let key = RowKey::new(42, 7, Purpose::Token);
        let words: Vec<u32> = [0, 1, 2, 4095, 248_319].map(|t| key.word(t)).to_vec();
        insta::assert_debug_snapshot!((key, words, uniform(42, 7, Purpose::Accept)));
    }

    #[test]
    fn every_part_of_the_key_changes_the_draw() {
        let base = RowKey::new(1, 10, Purpose::Token);
        assert_ne!(base, RowKey::new(2, 10, Purpose::Token));
        assert_ne!(base, RowKey::new(1, 11, Purpose::Token));
        assert_ne!(base, RowKey::new(1, 10, Purpose::Draft));
        assert_ne!(base.word(5), base.word(6));
    }

    /// Chi-square of `draws` against equal cells; 5 standard deviations above its mean is far beyond chance.
    fn assert_uniform(name: &str, cells: &[u32]) {
        let draws: u32 = cells.iter().sum();
        let expected = f64::from(draws) / cells.len() as f64;
        let chi: f64 = cells
            .iter()
            .map(|&c| (f64::from(c) - expected).powi(2) / expected)
            .sum();
        let freedom = cells.len() as f64 - 1.0;
        assert!(
            (chi - freedom).abs() < 5.0 * (2.0 * freedom).sqrt(),
            "{name}: chi-square {chi} at {freedom}"
        );
    }

    #[test]
    fn rows_and_words_are_uniform_and_independent_of_their_neighbours() {
        let mut rows = vec![0u32; 256];
        let mut words = vec![0u32; 256];
        let mut pairs = vec![0u32; 256];
        let mut across = vec![0u32; 256];
        for position in 0..4000u64 {
            rows[(uniform(9, position, Purpose::Accept) * 256.0) as usize] += 1;
            let key = RowKey::new(9, position, Purpose::Token);
            let next = RowKey::new(9, position + 1, Purpose::Token);
            for token in 0..50u32 {
                words[(key.word(token) >> 24) as usize] += 1;
                pairs[((key.word(token) >> 28 << 4) | (key.word(token + 1) >> 28)) as usize] += 1;
                across[((key.word(token) >> 28 << 4) | (next.word(token) >> 28)) as usize] += 1;
            }
        }
        assert_uniform("rows", &rows);
        assert_uniform("words", &words);
        assert_uniform("neighbouring ids", &pairs);
        assert_uniform("neighbouring positions", &across);
    }

    #[test]
    fn extreme_words_stay_inside_the_open_interval() {
        for word in [0u32, 1, u32::MAX - 1, u32::MAX] {
            let value = (word as f32 + 0.5) * UNIT;
            assert!(value > 0.0 && value < 1.0, "{word} gives {value}");
        }
        assert!(uniform(0, 0, Purpose::Draft) < 1.0);
    }

    #[test]
    fn exponentials_have_mean_and_variance_one() {
        let key = RowKey::new(3, 3, Purpose::Token);
        let n = 200_000u32;
        let draws: Vec<f64> = (0..n).map(|t| key.exponential(t)).collect();
        let mean = draws.iter().sum::<f64>() / f64::from(n);
        let var = draws.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / f64::from(n);
        assert!((mean - 1.0).abs() < 0.01, "mean {mean}");
        assert!((var - 1.0).abs() < 0.03, "variance {var}");
    }
}
