//! Identifies everything outside the key path that cached state depends on: weights, configuration, numerics, layout.

use std::fmt;
use std::str::FromStr;

use xxhash_rust::xxh3::Xxh3;

/// Equal fingerprints mean interchangeable cached state.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Fingerprint(pub u128);

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

/// A text that is no fingerprint.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("fingerprint {0:?}: expected 32 lower-case hexadecimal digits")]
pub struct FingerprintError(String);

impl FromStr for Fingerprint {
    type Err = FingerprintError;

    fn from_str(text: &str) -> Result<Self, FingerprintError> {
        let parsed = u128::from_str_radix(text, 16).ok().map(Self);
        parsed
            .filter(|value| value.to_string() == text)
            .ok_or_else(|| FingerprintError(text.to_owned()))
    }
}

/// Collects named facts, in order.
#[derive(Clone, Default)]
pub struct FingerprintBuilder(Xxh3);

impl fmt::Debug for FingerprintBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("FingerprintBuilder")
    }
}

impl FingerprintBuilder {
    /// No facts yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Add a fact. Names and values are length-prefixed: moving a byte from one to the other changes the result.
    #[must_use]
    pub fn fact(mut self, name: &str, value: &[u8]) -> Self {
        for part in [name.as_bytes(), value] {
            self.0.update(&(part.len() as u64).to_le_bytes());
            self.0.update(part);
        }
        self
    }

    /// The fingerprint of the facts so far.
    pub fn finish(&self) -> Fingerprint {
        Fingerprint(self.0.digest128())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_fact_counts() {
        let base = FingerprintBuilder::new().fact("config", b"{}").finish();
        assert_eq!(base, FingerprintBuilder::new().fact("config", b"{}").finish());
        assert_ne!(base, FingerprintBuilder::new().fact("config{", b"}").finish());
        assert_ne!(
            base,
            FingerprintBuilder::new()
                .fact("config", b"{}")
                .fact("look-ahead", b"1")
                .finish()
        );
    }

    #[test]
    fn the_text_form_reads_back_and_has_one_spelling() {
        let print = Fingerprint(0xab);
        assert_eq!(print.to_string().parse(), Ok(print));
        assert!("AB".parse::<Fingerprint>().is_err());
        assert!("0000000000000000000000000000000000000000000000ab"
            .parse::<Fingerprint>()
            .is_err());
    }
}
