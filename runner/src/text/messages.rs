//! Messages as templates expect them.
//!
//! Invariant: what a template doesn't read never reaches it (image data), and what it iterates is an object (arguments of
//! tool calls); everything else is handed on unchanged, unknown fields included.

use serde_json::{json, Map, Value};

/// One message, prepared for rendering.
pub(super) fn for_template(message: &Value) -> Value {
    let Value::Object(fields) = message else {
        return message.clone();
    };
    let prepared = fields.iter().map(|(name, value)| {
        let value = match (name.as_str(), value) {
            ("content", Value::Array(parts)) => Value::Array(parts.iter().map(part).collect()),
            ("tool_calls", Value::Array(calls)) => Value::Array(calls.iter().map(tool_call).collect()),
            _ => value.clone(),
        };
        (name.clone(), value)
    });
    Value::Object(prepared.collect())
}

/// Publishers' templates look for an `image` key or for type `image`; the type does for both.
fn part(part: &Value) -> Value {
    match part["type"].as_str() {
        Some(kind @ ("image" | "video")) => json!({ "type": kind }),
        _ => part.clone(),
    }
}

fn tool_call(call: &Value) -> Value {
    let Value::Object(fields) = call else {
        return call.clone();
    };
    let prepared = fields.iter().map(|(name, value)| {
        let value = match (name.as_str(), value) {
            ("function", Value::Object(function)) => Value::Object(with_parsed_arguments(function)),
            ("arguments", value) => parsed(value),
            _ => value.clone(),
        };
        (name.clone(), value)
    });
    Value::Object(prepared.collect())
}

fn with_parsed_arguments(function: &Map<String, Value>) -> Map<String, Value> {
    let entries = function.iter().map(|(name, value)| {
        let value = if name == "arguments" {
            parsed(value)
        } else {
            value.clone()
        };
        (name.clone(), value)
    });
    entries.collect()
}

/// An object that OpenAI-style clients send as text; anything else stays as it is.
fn parsed(arguments: &Value) -> Value {
    let object = arguments
        .as_str()
        .and_then(|text| serde_json::from_str::<Map<String, Value>>(text).ok());
    object.map_or_else(|| arguments.clone(), Value::Object)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn image_data_stays_behind_and_other_fields_pass() {
        let message = json!({"role": "user", "name": "x", "content": [
            {"type": "image", "data": "AAAA"}, {"type": "text", "text": "what is it?"}]});
        let expected = json!({"role": "user", "name": "x", "content": [
            {"type": "image"}, {"type": "text", "text": "what is it?"}]});
        assert_eq!(for_template(&message), expected);
    }

    #[test]
    fn arguments_in_a_string_become_an_object_where_they_are_one() {
        let message =
            |arguments: Value| json!({"tool_calls": [{"function": {"name": "f", "arguments": arguments}}]});
        assert_eq!(
            for_template(&message(json!("{\"b\": 1, \"a\": 2}"))),
            message(json!({"b": 1, "a": 2}))
        );
        assert_eq!(
            for_template(&message(json!("not json"))),
            message(json!("not json"))
        );
        let flat = json!({"tool_calls": [{"name": "f", "arguments": "{}"}]});
        assert_eq!(
            for_template(&flat),
            json!({"tool_calls": [{"name": "f", "arguments": {}}]})
        );
    }
}
