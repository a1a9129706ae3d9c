//! Requests as a host writes them.
//!
//! Invariant: nothing is added that a test doesn't ask for, but for the `type` and the `id`.

use serde_json::{json, Value};

/// Adds `more` to an object, one level deep.
fn with(mut request: Value, more: Value) -> Value {
    if let (Value::Object(map), Value::Object(more)) = (&mut request, more) {
        map.extend(more);
    }
    request
}

/// `generate` from raw text; `more` are further fields.
pub fn prompt(id: &str, prompt: &str, more: Value) -> Value {
    with(json!({"type": "generate", "id": id, "prompt": prompt}), more)
}

/// `generate` from token ids; `more` are further fields.
pub fn tokens(id: &str, tokens: &[u64], more: Value) -> Value {
    with(json!({"type": "generate", "id": id, "tokens": tokens}), more)
}

/// `generate` of a greedy answer to one user message; `think` as in the protocol.
pub fn chat(id: &str, content: &str, think: bool) -> Value {
    json!({
        "type": "generate", "id": id, "think": think, "options": {"temperature": 0, "num_predict": 200},
        "messages": [{"role": "user", "content": content}],
    })
}

/// `options` for a greedy continuation of exactly `n` tokens.
pub fn greedy(n: usize) -> Value {
    json!({"options": {"temperature": 0, "num_predict": n, "ignore_eos": true}})
}

/// The ways to draft that tests compare.
pub fn draftings() -> [Value; 5] {
    [
        json!({"mode": "off"}),
        json!({"mode": "fixed", "depth": 1}),
        json!({"mode": "fixed", "depth": 3}),
        json!({"mode": "fixed", "depth": 8}),
        json!({"mode": "auto"}),
    ]
}

/// A request with another `draft`.
pub fn drafting(request: Value, draft: &Value) -> Value {
    with(request, json!({ "draft": draft }))
}

/// A request with another `id`.
pub fn named(request: Value, id: &str) -> Value {
    with(request, json!({ "id": id }))
}

/// `cancel`.
pub fn cancel(id: &str, target: &str) -> Value {
    json!({"type": "cancel", "id": id, "target": target})
}

/// A request that has nothing but a type and an id: `ping`, `status`.
pub fn simple(kind: &str, id: &str) -> Value {
    json!({"type": kind, "id": id})
}
