//! A JSON Schema made ready for the grammar compiler.
//!
//! Invariant: what's changed makes no difference to which values the schema accepts: string formats that the compiler
//! doesn't know are dropped, being annotations, and blank space between tokens is bounded, which JSON leaves free.

use serde_json::{json, Map, Value};

/// String formats that the compiler turns into grammars.
const KNOWN_FORMATS: [&str; 10] = [
    "date-time",
    "time",
    "date",
    "duration",
    "email",
    "hostname",
    "ipv4",
    "ipv6",
    "uuid",
    "uri",
];

/// Blank space allowed between two JSON tokens: one space, or a new line with its indentation. So both compact and indented
/// JSON can be written, and no sampled run of blanks can use up the budget.
const BLANKS: &str = r"( |\r?\n[ \t]{0,32})?";

/// Keywords whose values are data, not schemas.
const DATA: [&str; 5] = ["const", "enum", "default", "example", "examples"];

/// Keywords whose values are schemas by name.
const BY_NAME: [&str; 5] = [
    "properties",
    "patternProperties",
    "$defs",
    "definitions",
    "dependentSchemas",
];

const OPTIONS: &str = "x-guidance";

/// The schema with unknown formats dropped and the compiler's options set.
pub(super) fn prepared(schema: &Value) -> Value {
    let mut schema = without_unknown_formats(schema);
    if let Value::Object(keywords) = &mut schema {
        if !keywords.contains_key(OPTIONS) {
            keywords.insert(OPTIONS.to_owned(), json!({ "whitespace_pattern": BLANKS }));
        }
    }
    schema
}

fn without_unknown_formats(schema: &Value) -> Value {
    match schema {
        Value::Object(keywords) => Value::Object(keywords.iter().filter_map(keyword).collect()),
        Value::Array(schemas) => Value::Array(schemas.iter().map(without_unknown_formats).collect()),
        _ => schema.clone(),
    }
}

fn keyword((name, value): (&String, &Value)) -> Option<(String, Value)> {
    let value = match value {
        Value::String(format) if name == "format" && !KNOWN_FORMATS.contains(&format.as_str()) => {
            return None
        }
        _ if DATA.contains(&name.as_str()) || name == OPTIONS => value.clone(),
        Value::Object(schemas) if BY_NAME.contains(&name.as_str()) => {
            let schemas: Map<String, Value> = schemas
                .iter()
                .map(|(name, schema)| (name.clone(), without_unknown_formats(schema)))
                .collect();
            Value::Object(schemas)
        }
        _ => without_unknown_formats(value),
    };
    Some((name.clone(), value))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_formats_are_dropped_and_only_those() {
        let schema = json!({"type": "object", "format": "x", "properties": {
            "format": {"type": "string", "format": "int32"},
            "when": {"type": "string", "format": "date"},
            "fixed": {"const": {"format": "kept"}}},
            "anyOf": [{"format": "password"}]});
        let expected = json!({"type": "object", "properties": {
            "format": {"type": "string"},
            "when": {"type": "string", "format": "date"},
            "fixed": {"const": {"format": "kept"}}},
            "anyOf": [{}],
            "x-guidance": {"whitespace_pattern": BLANKS}});
        assert_eq!(prepared(&schema), expected);
    }

    #[test]
    fn options_given_by_the_host_are_kept() {
        let schema = json!({"x-guidance": {"whitespace_flexible": false}});
        assert_eq!(prepared(&schema), schema);
    }
}
