//! Made-up GGUF headers for tests.

/// A key's value.
pub(crate) enum Key<'a> {
    U32(u32),
    F32(f32),
    Text(&'a str),
    Texts(&'a [&'a str]),
    Bools(u64),
}

/// A file with these keys and tensors and no data.
pub(crate) fn gguf(version: u32, keys: &[(&str, Key<'_>)], tensors: &[&str]) -> Vec<u8> {
    let mut bytes = b"GGUF".to_vec();
    bytes.extend(version.to_le_bytes());
    bytes.extend((tensors.len() as u64).to_le_bytes());
    bytes.extend((keys.len() as u64).to_le_bytes());
    for (name, key) in keys {
        text(&mut bytes, name);
        match key {
            Key::U32(value) => {
                bytes.extend(4_u32.to_le_bytes());
                bytes.extend(value.to_le_bytes());
            }
            Key::F32(value) => {
                bytes.extend(6_u32.to_le_bytes());
                bytes.extend(value.to_le_bytes());
            }
            Key::Text(value) => {
                bytes.extend(8_u32.to_le_bytes());
                text(&mut bytes, value);
            }
            Key::Texts(values) => {
                bytes.extend(9_u32.to_le_bytes());
                bytes.extend(8_u32.to_le_bytes());
                bytes.extend((values.len() as u64).to_le_bytes());
                for value in *values {
                    text(&mut bytes, value);
                }
            }
            Key::Bools(count) => {
                bytes.extend(9_u32.to_le_bytes());
                bytes.extend(7_u32.to_le_bytes());
                bytes.extend(count.to_le_bytes());
                bytes.extend((0..*count).map(|_| 1_u8));
            }
        }
    }
    for tensor in tensors {
        text(&mut bytes, tensor);
        bytes.extend(1_u32.to_le_bytes());
        bytes.extend(32_u64.to_le_bytes());
        bytes.extend(0_u32.to_le_bytes());
        bytes.extend(0_u64.to_le_bytes());
    }
    bytes
}

fn text(bytes: &mut Vec<u8>, text: &str) {
    bytes.extend((text.len() as u64).to_le_bytes());
    bytes.extend(text.as_bytes());
}
