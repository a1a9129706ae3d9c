//! What the trained model must say, computed apart from this project in float64.
//!
//! Invariant: the file lists ten prompts with their ids, the greedy continuation of 48 ids that ignores end tokens, and for
//! each id the logit gap to the runner-up, so that a test can tell a near tie from a fault.

use serde_json::Value;

use crate::process::repository;

/// One prompt and its continuation.
#[derive(Debug, Clone)]
pub struct Golden {
    /// Short name.
    pub name: String,
    /// The prompt.
    pub text: String,
    /// Its ids.
    pub ids: Vec<u64>,
    /// The greedy continuation, end tokens treated as ordinary.
    pub greedy: Vec<u64>,
    /// Where in `greedy` the first end token is.
    pub eos_index: Option<usize>,
    /// The text of `greedy`, cut before the first end token.
    pub greedy_text: String,
}

/// All of them.
///
/// # Panics
/// The file is missing or isn't as described.
pub fn goldens() -> Vec<Golden> {
    let path = repository().join("fixtures/models/tiny-qwen3.5-mtp.golden.json");
    let file: Value = match std::fs::read(&path).map(|bytes| serde_json::from_slice(&bytes)) {
        Ok(Ok(value)) => value,
        other => panic!("{}: {other:?}", path.display()),
    };
    let all: Vec<Golden> = file["prompts"]
        .as_array()
        .into_iter()
        .flatten()
        .map(golden)
        .collect();
    assert_eq!(
        all.len(),
        10,
        "{} has other prompts than expected",
        path.display()
    );
    all
}

/// The one of this name.
///
/// # Panics
/// There is none.
pub fn golden_of(name: &str) -> Golden {
    match goldens().into_iter().find(|golden| golden.name == name) {
        Some(golden) => golden,
        None => panic!("no golden is named {name}"),
    }
}

/// `n` prompt ids of ordinary code, for requests whose prefill shall take a while.
pub fn long_prompt(n: usize) -> Vec<u64> {
    golden_of("long-code").ids.into_iter().cycle().take(n).collect()
}

fn golden(value: &Value) -> Golden {
    let ids = |name: &str| {
        value[name]
            .as_array()
            .into_iter()
            .flatten()
            .filter_map(Value::as_u64)
            .collect()
    };
    let text = |name: &str| value[name].as_str().unwrap_or_default().to_owned();
    Golden {
        name: text("name"),
        text: text("text"),
        ids: ids("ids"),
        greedy: ids("greedy"),
        eos_index: value["eos_index"].as_u64().map(|at| at as usize),
        greedy_text: text("greedy_text"),
    }
}
