//! Damage: to bytes, to JSON, to the structure of safetensors files and pictures.
//!
//! Invariant: a mutation depends on its inputs and the random generator only.

use serde_json::{json, Map, Value};

use super::random::Random;

/// Flips, cuts, splices and repetitions of bytes.
pub fn bytes(random: &mut Random, sound: &[u8], other: &[u8]) -> Vec<u8> {
    let mut out = sound.to_vec();
    for _ in 0..1 + random.below(4) {
        let at = random.below(out.len());
        match random.below(8) {
            0 if !out.is_empty() => out[at] ^= 1 << random.below(8),
            1 if !out.is_empty() => out[at] = random.bits() as u8,
            2 => out.truncate(at),
            3 => {
                let len = random.below(out.len() - at + 1).min(64);
                out.drain(at..at + len);
            }
            4 => {
                let from = random.below(other.len());
                let piece = other[from..(from + random.below(256)).min(other.len())].to_vec();
                out.splice(at..at, piece);
            }
            5 => {
                let piece = out[at..(at + random.below(64)).min(out.len())].to_vec();
                out.splice(at..at, piece);
            }
            6 => {
                // Two halves of different files.
                let from = random.below(other.len());
                out.truncate(at);
                out.extend_from_slice(&other[from..]);
            }
            _ => {
                let number = integer(random);
                let width = *random.pick(&[1usize, 2, 4, 8]);
                for (byte, with) in out.iter_mut().skip(at).zip(number.to_le_bytes()).take(width) {
                    *byte = with;
                }
            }
        }
    }
    out
}

/// An integer at or near a limit.
fn integer(random: &mut Random) -> u64 {
    let limit = *random.pick(&[
        0,
        1 << 7,
        1 << 8,
        1 << 14,
        1 << 16,
        1 << 20,
        1 << 24,
        1 << 31,
        1 << 32,
        1 << 53,
        1 << 63,
    ]);
    match random.below(4) {
        0 => limit,
        1 => limit.wrapping_add(1),
        2 => limit.wrapping_sub(1),
        _ => random.bits() >> random.below(64),
    }
}

/// A JSON text with values replaced, removed, doubled or nested, or damaged as text.
pub fn json(random: &mut Random, sound: &[u8], other: &[u8]) -> Vec<u8> {
    let Ok(mut value) = serde_json::from_slice::<Value>(sound) else {
        return bytes(random, sound, other);
    };
    match random.below(10) {
        0 => return bytes(random, sound, other),
        1 => return textual(random, &value.to_string()),
        _ => {}
    }
    for _ in 0..1 + random.below(3) {
        let nodes = count(&value);
        let mut target = random.below(nodes);
        let donor = pick_node(&value, random.below(nodes));
        change(random, &mut value, &mut target, &donor);
    }
    value.to_string().into_bytes()
}

/// What only the text of JSON can say: keys twice, numbers beyond all types, deep nesting.
fn textual(random: &mut Random, text: &str) -> Vec<u8> {
    let places: Vec<usize> = text
        .match_indices([',', ':', '[', '{'])
        .map(|(at, _)| at + 1)
        .collect();
    let at = if places.is_empty() {
        0
    } else {
        *random.pick(&places)
    };
    let piece = match random.below(6) {
        0 => "[".repeat(1 + random.below(100_000)),
        1 => "{\"a\":".repeat(1 + random.below(100_000)),
        2 => "1e999,".to_owned(),
        3 => "9".repeat(1 + random.below(5000)),
        4 => "\u{feff}\\ud800\"".to_owned(),
        _ => {
            // A run of the text itself: mostly a key that then comes twice.
            let len = random.below(text.len() - at.min(text.len()) + 1).min(300);
            text.get(at..at + len).unwrap_or_default().to_owned() + ","
        }
    };
    let (before, after) = text.split_at(at);
    let cut = if random.one_in(3) {
        random.below(after.len())
    } else {
        0
    };
    [before.as_bytes(), piece.as_bytes(), &after.as_bytes()[cut..]].concat()
}

fn children(value: &Value) -> Vec<&Value> {
    match value {
        Value::Array(items) => items.iter().collect(),
        Value::Object(map) => map.values().collect(),
        _ => Vec::new(),
    }
}

fn count(value: &Value) -> usize {
    1 + children(value).into_iter().map(count).sum::<usize>()
}

/// The `at`-th value, parents before children.
fn pick_node(value: &Value, mut at: usize) -> Value {
    if at == 0 {
        return value.clone();
    }
    at -= 1;
    for child in children(value) {
        let n = count(child);
        if at < n {
            return pick_node(child, at);
        }
        at -= n;
    }
    Value::Null
}

fn change(random: &mut Random, value: &mut Value, at: &mut usize, donor: &Value) {
    if *at == 0 {
        *at = usize::MAX;
        alter(random, value, donor);
        return;
    }
    *at -= 1;
    let children: Vec<&mut Value> = match value {
        Value::Array(items) => items.iter_mut().collect(),
        Value::Object(map) => map.values_mut().collect(),
        _ => Vec::new(),
    };
    for child in children {
        if *at == usize::MAX {
            return;
        }
        change(random, child, at, donor);
    }
}

fn alter(random: &mut Random, value: &mut Value, donor: &Value) {
    match value {
        Value::Object(map) if !map.is_empty() && random.one_in(2) => entry(random, map, donor),
        Value::Array(items) if !items.is_empty() && random.one_in(2) => {
            let at = random.below(items.len());
            match random.below(3) {
                0 => drop(items.remove(at)),
                1 => items.insert(at, donor.clone()),
                _ => items.extend(items.clone()),
            }
        }
        Value::Number(n) if random.one_in(2) => {
            let near = n.as_i64().unwrap_or(0);
            *value = match random.below(4) {
                0 => json!(near.wrapping_add(1)),
                1 => json!(near.wrapping_sub(1)),
                2 => json!(near.wrapping_mul(2)),
                _ => json!(near / 2),
            };
        }
        _ => {
            *value = match random.below(10) {
                0 => Value::Null,
                1 => json!(random.one_in(2)),
                2 => json!(integer(random)),
                3 => json!(-1 - (integer(random) >> 1) as i64),
                4 => json!(*random.pick(&[0.5, 1e-300, 1e300, -0.0, 4.0, 1e19])),
                5 => json!(*random.pick(&[
                    "",
                    "model.safetensors",
                    "../x",
                    "linear_attention",
                    "full_attention",
                    "\u{0}",
                    "日本"
                ])),
                6 => json!([]),
                7 => json!({}),
                8 => json!([value.clone()]),
                _ => donor.clone(),
            }
        }
    }
}

fn entry(random: &mut Random, map: &mut Map<String, Value>, donor: &Value) {
    let keys: Vec<String> = map.keys().cloned().collect();
    let key = random.pick(&keys).clone();
    let taken = map.remove(&key);
    match random.below(4) {
        0 => {}
        1 => drop(map.insert(key, donor.clone())),
        2 => {
            let cut = key
                .char_indices()
                .nth(random.below(key.len()))
                .map_or(0, |(at, _)| at);
            map.insert(key[cut..].to_owned(), taken.unwrap_or_default());
        }
        _ => {
            map.insert(key.clone() + "x", taken.clone().unwrap_or_default());
            map.insert(key, taken.unwrap_or_default());
        }
    }
}

/// A safetensors file whose header, its length, or its data lies.
pub fn safetensors(random: &mut Random, sound: &[u8], other: &[u8]) -> Vec<u8> {
    let Some((length, rest)) = sound.split_first_chunk::<8>() else {
        return bytes(random, sound, other);
    };
    let header = usize::try_from(u64::from_le_bytes(*length))
        .unwrap_or(0)
        .min(rest.len());
    let (text, data) = rest.split_at(header);
    let (text, data) = match random.below(8) {
        0 => return bytes(random, sound, other),
        1 => (bytes(random, text, other), data.to_vec()),
        2 => {
            let keep = random.below(data.len());
            (text.to_vec(), data[..keep].to_vec())
        }
        _ => (json(random, text, other), data.to_vec()),
    };
    let mut length = text.len() as u64;
    if random.one_in(8) {
        length = integer(random);
    }
    [&length.to_le_bytes()[..], &text, &data].concat()
}

/// A damaged picture; checksums of PNG chunks are mended half of the time, or no decoder would look at what they guard.
pub fn picture(random: &mut Random, sound: &[u8], other: &[u8]) -> Vec<u8> {
    let mut out = bytes(random, sound, other);
    if random.one_in(2) {
        // Sizes stand near the start in every format.
        let number = integer(random);
        let at = random.below(out.len().min(40));
        let width = *random.pick(&[2usize, 4]);
        let big = random.one_in(2);
        let number = if big {
            number.swap_bytes() >> (64 - 8 * width)
        } else {
            number
        };
        for (byte, with) in out.iter_mut().skip(at).zip(number.to_le_bytes()).take(width) {
            *byte = with;
        }
    }
    if random.one_in(2) {
        mend_png(&mut out);
    }
    out
}

fn mend_png(file: &mut [u8]) {
    if !file.starts_with(b"\x89PNG\r\n\x1a\n") {
        return;
    }
    let mut at = 8;
    while let Some(head) = file.get(at..at + 8) {
        let length = u32::from_be_bytes([head[0], head[1], head[2], head[3]]) as usize;
        let end = at + 8 + length;
        let Some(body) = file.get(at + 4..end) else { return };
        let sum = crc32(body);
        let Some(place) = file.get_mut(end..end + 4) else {
            return;
        };
        place.copy_from_slice(&sum.to_be_bytes());
        at = end + 4;
    }
}

fn crc32(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0u32, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |c, _| {
            if c & 1 == 1 {
                (c >> 1) ^ 0xedb8_8320
            } else {
                c >> 1
            }
        })
    })
}
