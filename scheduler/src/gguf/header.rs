//! The header of a GGUF file, as far as a launcher needs it (GGUF specification, versions 2 and 3).
//!
//! Invariant: a damaged header is an error, never a panic and never a large allocation: every length is checked against what
//! is left of the file before anything is read, and arrays are skipped without being built.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufReader, Read};
use std::path::Path;

/// Longest string that is kept; longer ones, such as chat templates beyond reason, are damage.
const STRING_LIMIT: u64 = 16 << 20;

/// Why a header can't be read.
#[derive(Debug, thiserror::Error)]
pub enum HeaderError {
    /// The file can't be opened or read.
    #[error("can't read the file: {0}")]
    Io(#[from] std::io::Error),
    /// The file doesn't begin as a GGUF file does.
    #[error("not a GGUF file: it begins with {0:?}")]
    Magic(String),
    /// A version that this reader doesn't know.
    #[error("GGUF version {0} is not supported, only 2 and 3 are")]
    Version(u32),
    /// The file is for big-endian machines.
    #[error("the file is big-endian, which is not supported")]
    BigEndian,
    /// A length or type that can't be.
    #[error("damaged header: {0}")]
    Damaged(String),
}

/// A value of a key, as far as it is kept.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    /// Any integer type, or a bool.
    Integer(i64),
    /// Any float type.
    Float(f64),
    /// Text.
    Text(String),
    /// An array, of which the length is kept.
    Array(u64),
}

/// What a header says.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Header {
    /// The keys.
    pub keys: BTreeMap<String, Value>,
    /// The tensors' names, in the file's order.
    pub tensors: Vec<String>,
}

impl Header {
    /// Reads a file's header.
    pub fn open(path: &Path) -> Result<Self, HeaderError> {
        let file = File::open(path)?;
        let length = file.metadata()?.len();
        Self::read(BufReader::with_capacity(1 << 16, file), length)
    }

    /// Reads a header from a stream of `length` bytes.
    pub fn read(input: impl Read, length: u64) -> Result<Self, HeaderError> {
        let mut input = Input { input, left: length };
        let magic = input.bytes::<4>()?;
        if &magic != b"GGUF" {
            return Err(HeaderError::Magic(String::from_utf8_lossy(&magic).into_owned()));
        }
        match input.u32()? {
            2 | 3 => {}
            0x0200_0000 | 0x0300_0000 => return Err(HeaderError::BigEndian),
            version => return Err(HeaderError::Version(version)),
        }
        let (tensors, keys) = (input.u64()?, input.u64()?);
        // A tensor takes at least 24 bytes in the header, a key 13.
        input.must_fit(tensors, 24, "tensors")?;
        input.must_fit(keys, 13, "keys")?;
        let mut header = Self::default();
        for _ in 0..keys {
            let key = input.string()?;
            let kind = input.u32()?;
            let value = input.value(kind)?;
            header.keys.insert(key, value);
        }
        for _ in 0..tensors {
            let name = input.string()?;
            let dimensions = u64::from(input.u32()?);
            if dimensions > 8 {
                return Err(HeaderError::Damaged(format!(
                    "tensor {name:?} has {dimensions} dimensions"
                )));
            }
            input.skip(dimensions * 8 + 4 + 8)?;
            header.tensors.push(name);
        }
        Ok(header)
    }

    /// A key's text.
    pub fn text(&self, key: &str) -> Option<&str> {
        match self.keys.get(key)? {
            Value::Text(text) => Some(text),
            _ => None,
        }
    }

    /// A key's integer.
    pub fn integer(&self, key: &str) -> Option<u64> {
        match self.keys.get(key)? {
            Value::Integer(value) => u64::try_from(*value).ok(),
            _ => None,
        }
    }

    /// A key's number, whatever its type.
    pub fn number(&self, key: &str) -> Option<f64> {
        match self.keys.get(key)? {
            Value::Integer(value) => Some(*value as f64),
            Value::Float(value) => Some(*value),
            _ => None,
        }
    }

    /// `general.architecture`.
    pub fn architecture(&self) -> &str {
        self.text("general.architecture").unwrap_or_default()
    }

    /// An integer of the architecture's own keys, such as `block_count`.
    pub fn own(&self, key: &str) -> Option<u64> {
        self.integer(&format!("{}.{key}", self.architecture()))
    }

    /// Whether there is a tensor of that name.
    pub fn has_tensor(&self, name: &str) -> bool {
        self.tensors.iter().any(|tensor| tensor == name)
    }

    /// The quantisation's usual name, where the file has a known one.
    pub fn quantization(&self) -> Option<String> {
        let name = match self.integer("general.file_type")? {
            0 => return None,
            1 => "F16",
            2 => "Q4_0",
            3 => "Q4_1",
            7 => "Q8_0",
            8 => "Q5_0",
            9 => "Q5_1",
            10 => "Q2_K",
            11 => "Q3_K_S",
            12 => "Q3_K_M",
            13 => "Q3_K_L",
            14 => "Q4_K_S",
            15 => "Q4_K_M",
            16 => "Q5_K_S",
            17 => "Q5_K_M",
            18 => "Q6_K",
            32 => "BF16",
            other => return Some(format!("type {other}")),
        };
        Some(name.to_owned())
    }
}

struct Input<R> {
    input: R,
    left: u64,
}

impl<R: Read> Input<R> {
    fn must_fit(&self, count: u64, each: u64, what: &str) -> Result<(), HeaderError> {
        match count.checked_mul(each) {
            Some(bytes) if bytes <= self.left => Ok(()),
            _ => Err(HeaderError::Damaged(format!(
                "{count} {what} don't fit into the {} bytes that are left",
                self.left
            ))),
        }
    }

    fn bytes<const N: usize>(&mut self) -> Result<[u8; N], HeaderError> {
        self.must_fit(1, N as u64, "fields")?;
        let mut bytes = [0; N];
        self.input.read_exact(&mut bytes)?;
        self.left -= N as u64;
        Ok(bytes)
    }

    fn u32(&mut self) -> Result<u32, HeaderError> {
        self.bytes().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64, HeaderError> {
        self.bytes().map(u64::from_le_bytes)
    }

    fn skip(&mut self, count: u64) -> Result<(), HeaderError> {
        self.must_fit(count, 1, "bytes")?;
        let skipped = std::io::copy(&mut self.input.by_ref().take(count), &mut std::io::sink())?;
        if skipped < count {
            return Err(HeaderError::Damaged("the file ends inside the header".to_owned()));
        }
        self.left -= count;
        Ok(())
    }

    fn string(&mut self) -> Result<String, HeaderError> {
        let length = self.u64()?;
        self.must_fit(length, 1, "bytes of text")?;
        if length > STRING_LIMIT {
            return Err(HeaderError::Damaged(format!("a text of {length} bytes")));
        }
        let mut bytes = vec![0; length as usize];
        self.input.read_exact(&mut bytes)?;
        self.left -= length;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    fn value(&mut self, kind: u32) -> Result<Value, HeaderError> {
        Ok(match kind {
            0 => Value::Integer(i64::from(u8::from_le_bytes(self.bytes()?))),
            1 => Value::Integer(i64::from(i8::from_le_bytes(self.bytes()?))),
            2 => Value::Integer(i64::from(u16::from_le_bytes(self.bytes()?))),
            3 => Value::Integer(i64::from(i16::from_le_bytes(self.bytes()?))),
            4 => Value::Integer(i64::from(self.u32()?)),
            5 => Value::Integer(i64::from(i32::from_le_bytes(self.bytes()?))),
            6 => Value::Float(f64::from(f32::from_le_bytes(self.bytes()?))),
            7 => Value::Integer(i64::from(self.bytes::<1>()?[0] != 0)),
            8 => Value::Text(self.string()?),
            9 => {
                let (kind, count) = (self.u32()?, self.u64()?);
                self.skip_items(kind, count)?;
                Value::Array(count)
            }
            10 => Value::Integer(i64::try_from(self.u64()?).unwrap_or(i64::MAX)),
            11 => Value::Integer(i64::from_le_bytes(self.bytes()?)),
            12 => Value::Float(f64::from_le_bytes(self.bytes()?)),
            other => return Err(HeaderError::Damaged(format!("value type {other}"))),
        })
    }

    fn skip_items(&mut self, kind: u32, count: u64) -> Result<(), HeaderError> {
        let size = match kind {
            0 | 1 | 7 => 1,
            2 | 3 => 2,
            4..=6 => 4,
            10..=12 => 8,
            8 => {
                self.must_fit(count, 8, "texts")?;
                for _ in 0..count {
                    let length = self.u64()?;
                    self.skip(length)?;
                }
                return Ok(());
            }
            other => return Err(HeaderError::Damaged(format!("array of type {other}"))),
        };
        self.must_fit(count, size, "array items")?;
        self.skip(count * size)
    }
}

#[cfg(test)]
mod tests {
    use super::super::synthetic::{gguf, Key};
    use super::*;

    fn read(bytes: &[u8]) -> Result<Header, HeaderError> {
        Header::read(bytes, bytes.len() as u64)
    }

    #[test]
    fn keys_and_tensors_are_read_and_arrays_skipped() {
        let bytes = gguf(
            3,
            &[
                ("general.architecture", Key::Text("qwen35")),
                ("tokenizer.ggml.tokens", Key::Texts(&["a", "bc", ""])),
                ("qwen35.attention.recurrent_layers", Key::Bools(9)),
                ("qwen35.nextn_predict_layers", Key::U32(1)),
                ("general.sampling.temp", Key::F32(0.6)),
            ],
            &["token_embd.weight", "blk.0.attn_norm.weight"],
        );
        let header = read(&bytes).unwrap();
        assert_eq!(
            (header.architecture(), header.own("nextn_predict_layers")),
            ("qwen35", Some(1))
        );
        assert_eq!(header.keys["tokenizer.ggml.tokens"], Value::Array(3));
        assert!((header.number("general.sampling.temp").unwrap() - 0.6).abs() < 1e-6);
        assert_eq!(header.tensors, ["token_embd.weight", "blk.0.attn_norm.weight"]);
    }

    #[test]
    fn a_header_cut_anywhere_is_an_error() {
        let bytes = gguf(
            3,
            &[
                ("a", Key::Text("b")),
                ("t", Key::Texts(&["x"])),
                ("n", Key::U32(1)),
            ],
            &["w"],
        );
        assert!(read(&bytes).is_ok());
        for end in 0..bytes.len() {
            assert!(read(&bytes[..end]).is_err(), "cut at {end}");
        }
    }

    #[test]
    fn foreign_files_and_versions_are_named() {
        assert!(
            matches!(read(b"hello world, this is no model"), Err(HeaderError::Magic(magic)) if magic == "hell")
        );
        assert!(matches!(read(&gguf(1, &[], &[])), Err(HeaderError::Version(1))));
        assert!(matches!(
            read(&gguf(0x0300_0000, &[], &[])),
            Err(HeaderError::BigEndian)
        ));
    }

    #[test]
    fn lengths_beyond_the_file_allocate_nothing() {
        for at in [8, 16] {
            let mut bytes = gguf(3, &[("a", Key::Text("b"))], &["w"]);
            bytes[at..at + 8].copy_from_slice(&u64::MAX.to_le_bytes());
            assert!(
                matches!(read(&bytes), Err(HeaderError::Damaged(_))),
                "count at {at}"
            );
        }
        let mut bytes = gguf(3, &[("a", Key::Text("b"))], &[]);
        bytes[24..32].copy_from_slice(&(1_u64 << 60).to_le_bytes());
        assert!(matches!(read(&bytes), Err(HeaderError::Damaged(_))));
    }

    #[test]
    fn random_bytes_never_panic() {
        let base = gguf(
            3,
            &[("a", Key::Texts(&["b", "c"])), ("n", Key::U32(7))],
            &["w", "v"],
        );
        for at in 0..base.len() {
            for value in [0, 1, 8, 9, 127, 255] {
                let mut bytes = base.clone();
                bytes[at] = value;
                // Most of these are damaged; all that matters is that each gives an answer.
                let _ = read(&bytes);
            }
        }
    }
}
