//! JSON as Python's `json.dumps` writes it.
//!
//! Invariant: byte for byte what the publishers' tooling (transformers' `tojson`) puts into a prompt, since a tool schema
//! spelt otherwise than in training is another prompt: separators `", "` and `": "`, no HTML escapes, non-ASCII as it
//! is unless asked otherwise, floats as Python's `repr`.

use std::fmt::Write as _;

use serde_json::{Map, Number, Value};

/// The keyword arguments of `json.dumps` that templates use.
#[derive(Debug, Clone)]
pub(super) struct Style {
    pub(super) indent: Option<usize>,
    pub(super) item_separator: String,
    pub(super) key_separator: String,
    pub(super) ensure_ascii: bool,
    pub(super) sort_keys: bool,
}

impl Style {
    /// The defaults that go with an indentation or with none.
    pub(super) fn new(indent: Option<usize>) -> Self {
        let item_separator = if indent.is_some() { "," } else { ", " };
        Self {
            indent,
            item_separator: item_separator.to_owned(),
            key_separator: ": ".to_owned(),
            ensure_ascii: false,
            sort_keys: false,
        }
    }
}

/// The value as JSON text.
pub(super) fn dumps(value: &Value, style: &Style) -> String {
    let mut out = String::new();
    write_value(&mut out, value, style, 0);
    out
}

fn write_value(out: &mut String, value: &Value, style: &Style, depth: usize) {
    match value {
        Value::Null => out.push_str("null"),
        Value::Bool(value) => out.push_str(if *value { "true" } else { "false" }),
        Value::Number(number) => write_number(out, number),
        Value::String(text) => write_string(out, text, style),
        Value::Array(items) => {
            write_items(out, ['[', ']'], items, style, depth, |out, item| {
                write_value(out, item, style, depth + 1)
            });
        }
        Value::Object(entries) => {
            write_items(
                out,
                ['{', '}'],
                entries_of(entries, style),
                style,
                depth,
                |out, (key, value)| {
                    write_string(out, key, style);
                    out.push_str(&style.key_separator);
                    write_value(out, value, style, depth + 1);
                },
            );
        }
    }
}

fn entries_of<'a>(entries: &'a Map<String, Value>, style: &Style) -> Vec<(&'a String, &'a Value)> {
    let mut entries: Vec<_> = entries.iter().collect();
    if style.sort_keys {
        entries.sort_by_key(|(key, _)| *key);
    }
    entries
}

fn write_items<I: IntoIterator>(
    out: &mut String,
    brackets: [char; 2],
    items: I,
    style: &Style,
    depth: usize,
    write: impl Fn(&mut String, I::Item),
) {
    out.push(brackets[0]);
    let mut any = false;
    for item in items {
        if any {
            out.push_str(&style.item_separator);
        }
        any = true;
        break_line(out, style, depth + 1);
        write(out, item);
    }
    if any {
        break_line(out, style, depth);
    }
    out.push(brackets[1]);
}

fn break_line(out: &mut String, style: &Style, depth: usize) {
    if let Some(width) = style.indent {
        out.push('\n');
        out.extend(std::iter::repeat_n(' ', width.saturating_mul(depth)));
    }
}

fn write_number(out: &mut String, number: &Number) {
    match number.as_f64() {
        Some(float) if number.is_f64() => out.push_str(&python_float(float)),
        _ => out.push_str(&number.to_string()),
    }
}

/// A float as Python's `repr` writes it.
///
/// Rust and Python both print the shortest digits that read back, and switch to exponents at the same sizes; Python
/// signs the exponent and gives it two digits at least.
pub(super) fn python_float(float: f64) -> String {
    let shortest = format!("{float:?}");
    let Some((digits, exponent)) = shortest.split_once('e') else {
        return shortest;
    };
    let (sign, exponent) = exponent
        .strip_prefix('-')
        .map_or(('+', exponent), |rest| ('-', rest));
    format!("{digits}e{sign}{exponent:0>2}")
}

fn write_string(out: &mut String, text: &str, style: &Style) {
    out.push('"');
    for letter in text.chars() {
        match letter {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\u{8}' => out.push_str("\\b"),
            '\u{c}' => out.push_str("\\f"),
            _ if letter < ' ' || (style.ensure_ascii && letter > '~') => {
                for unit in letter.encode_utf16(&mut [0; 2]) {
                    let _ = write!(out, "\\u{unit:04x}");
                }
            }
            _ => out.push(letter),
        }
    }
    out.push('"');
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_defaults_are_those_of_python() {
        let value = json!({"b": [1, -2.5, 1e16, 0.00001, 100_000.0], "a": {"<x>": "é\"\\\n\u{1}\u{7f}&'"}, "n": null, "e": [], "o": {}, "t": true});
        let expected = r#"{"b": [1, -2.5, 1e+16, 1e-05, 100000.0], "a": {"<x>": "é\"\\\n\u0001"#.to_owned()
            + "\u{7f}"
            + r#"&'"}, "n": null, "e": [], "o": {}, "t": true}"#;
        assert_eq!(dumps(&value, &Style::new(None)), expected);
    }

    #[test]
    fn indentation_sorting_and_ascii_are_those_of_python() {
        let style = Style {
            ensure_ascii: true,
            sort_keys: true,
            ..Style::new(Some(2))
        };
        let expected = "{\n  \"a\": \"\\u00e9\\ud83e\\udd80\",\n  \"b\": [\n    1,\n    []\n  ]\n}";
        assert_eq!(dumps(&json!({"b": [1, []], "a": "é🦀"}), &style), expected);
    }
}
