//! From a `generate` request to the body of `POST /completion`.
//!
//! Invariant: every option is sent explicitly, since llama-server fills in what is left out from the file and from defaults of
//! its own; and what it can't do, or would do wrongly without saying so, is refused by name.

use lookahead_protocol::request::{Content, DraftMode, Format, Generate, Input, Message, Part, Verify};
use lookahead_protocol::ErrorCode;
use serde_json::{json, Map, Value};

use super::header::Header;
use super::launch::LaunchError;

/// What the translation has to know of the server.
#[derive(Debug, Clone)]
pub struct Served {
    /// Context length.
    pub context: u64,
    /// Tokens drafted per round; 0 without drafting.
    pub depth: u32,
    /// Sampling defaults of the file.
    pub temperature: f64,
    /// As above.
    pub top_k: u64,
    /// As above.
    pub top_p: f64,
}

impl Served {
    /// With the file's own sampling defaults, or else the protocol's.
    pub fn new(header: &Header, context: u64, depth: u32) -> Self {
        let default = |key: &str, otherwise: f64| {
            header
                .number(&format!("general.sampling.{key}"))
                .unwrap_or(otherwise)
        };
        Self {
            context,
            depth,
            temperature: default("temp", 0.8),
            top_k: default("top_k", 40.0) as u64,
            top_p: default("top_p", 0.9),
        }
    }
}

fn unsupported(what: impl Into<String>) -> LaunchError {
    LaunchError::new(ErrorCode::Unsupported, what)
}

/// Refuses what can't be done before anything is asked of the server.
pub fn check(request: &Generate, served: &Served) -> Result<(), LaunchError> {
    match &request.format {
        Some(Format::Grammar(_)) => {
            return Err(unsupported(
                "llama-server takes no Lark grammar in `format`; use a JSON Schema",
            ))
        }
        Some(Format::Regex(_)) => {
            return Err(unsupported(
                "llama-server takes no regular expression in `format`; use a JSON Schema",
            ))
        }
        _ => {}
    }
    if let Input::Prompt { images, .. } = &request.input {
        if !images.is_empty() {
            return Err(unsupported("images are not supported with GGUF files"));
        }
    }
    let drafting = served.depth > 0;
    if request.logprobs.is_some() && drafting {
        return Err(unsupported(
            "llama-server's log-probabilities are wrong while it drafts; serve the file with --draft off to have `logprobs`",
        ));
    }
    let wanted = match request.draft.mode {
        DraftMode::Auto => None,
        DraftMode::Off => Some(0),
        DraftMode::Fixed { depth } => Some(u32::from(depth)),
    };
    let cap = request
        .draft
        .max_depth
        .map(u32::from)
        .filter(|&cap| cap < served.depth);
    if let Some(wanted) = cap.or(wanted).filter(|&wanted| wanted != served.depth) {
        return Err(unsupported(format!(
            "llama-server's draft depth is fixed at its start, here {}, and the request wants {wanted}",
            served.depth
        )));
    }
    if drafting && request.draft.verify == Some(Verify::Rejection) {
        return Err(unsupported(
            "`draft.verify` \"rejection\" is not what this llama-server does; use \"coupled\"",
        ));
    }
    Ok(())
}

/// The messages as `/apply-template` takes them.
pub fn template_body(
    messages: &[Message],
    tools: Option<&[Value]>,
    think: Option<bool>,
) -> Result<Value, LaunchError> {
    let mut list = Vec::new();
    for message in messages {
        let Ok(Value::Object(mut object)) = serde_json::to_value(message) else {
            continue;
        };
        if let Some(content) = &message.content {
            object.insert("content".to_owned(), Value::from(text_of(content)?));
        }
        list.push(Value::Object(object));
    }
    // Left out, the server switches thinking off; our runner leaves the choice to the template, and templates think.
    let mut body =
        json!({"messages": list, "chat_template_kwargs": {"enable_thinking": think.unwrap_or(true)}});
    if let Some(tools) = tools {
        body["tools"] = Value::from(tools.to_vec());
    }
    Ok(body)
}

fn text_of(content: &Content) -> Result<String, LaunchError> {
    match content {
        Content::Text(text) => Ok(text.clone()),
        Content::Parts(parts) => parts
            .iter()
            .map(|part| match part {
                Part::Text { text } => Ok(text.as_str()),
                _ => Err(unsupported("images are not supported with GGUF files")),
            })
            .collect(),
    }
}

/// The context that a request may use.
pub fn context_of(request: &Generate, served: &Served) -> u64 {
    request
        .options
        .num_ctx
        .map_or(served.context, |wanted| wanted.min(served.context))
}

/// The body of `/completion` for a prompt of these ids.
pub fn completion_body(request: &Generate, served: &Served, ids: &[u32], random_seed: u32) -> Value {
    let options = &request.options;
    let context = context_of(request, served);
    let room = context.saturating_sub(ids.len() as u64) as i64;
    let num_predict = match options.num_predict {
        None | Some(-1) => room,
        Some(wanted) => wanted.min(room),
    };
    let temperature = options.temperature.map_or(served.temperature, f64::from);
    let repeat_last_n = match options.repeat_last_n {
        None => 64,
        Some(-1) => served.context as i64,
        Some(last) => last,
    };
    // A seed of all ones means a random one to llama-server.
    let seed = options
        .seed
        .map_or(random_seed, |seed| (seed ^ (seed >> 32)) as u32)
        .min(u32::MAX - 1);
    let mut body = Map::new();
    let mut set = |name: &str, value: Value| body.insert(name.to_owned(), value);
    set("prompt", Value::from(ids));
    set("n_predict", Value::from(num_predict));
    set("temperature", Value::from(temperature));
    set(
        "top_k",
        Value::from(if temperature == 0.0 {
            1
        } else {
            options.top_k.map_or(served.top_k, u64::from)
        }),
    );
    set(
        "top_p",
        Value::from(options.top_p.map_or(served.top_p, f64::from)),
    );
    set("min_p", Value::from(options.min_p.map_or(0.0, f64::from)));
    set(
        "repeat_penalty",
        Value::from(options.repeat_penalty.map_or(1.0, f64::from)),
    );
    set("repeat_last_n", Value::from(repeat_last_n));
    set(
        "presence_penalty",
        Value::from(options.presence_penalty.map_or(0.0, f64::from)),
    );
    set(
        "frequency_penalty",
        Value::from(options.frequency_penalty.map_or(0.0, f64::from)),
    );
    set(
        "samplers",
        json!(["penalties", "temperature", "top_k", "top_p", "min_p"]),
    );
    set("seed", Value::from(seed));
    // An empty stop string would end the answer at once; the protocol has none.
    set("stop", Value::from(options.stop.clone()));
    set("ignore_eos", Value::from(options.ignore_eos.unwrap_or(false)));
    set("cache_prompt", Value::from(request.cache));
    // Also without a wish for progress: its first event says how much of the prompt was cached.
    set("return_progress", Value::from(true));
    set("return_tokens", Value::from(true));
    // The draft figures of every token, from which rounds are told.
    set("timings_per_token", Value::from(true));
    set("stream", Value::from(true));
    match &request.format {
        Some(Format::Json) => {
            set("json_schema", json!({}));
        }
        Some(Format::Schema(schema)) => {
            set("json_schema", Value::Object(schema.clone()));
        }
        _ => {}
    }
    if let Some(logprobs) = request.logprobs {
        set("n_probs", Value::from(logprobs.top.max(1)));
    }
    Value::Object(body)
}

#[cfg(test)]
mod tests {
    use super::*;
    use lookahead_protocol::Request;

    fn generate(fields: Value) -> Generate {
        let mut request = json!({"type": "generate", "id": "1", "prompt": "x"});
        request
            .as_object_mut()
            .unwrap()
            .extend(fields.as_object().unwrap().clone());
        match Request::parse(request.to_string()).unwrap() {
            Request::Generate(generate) => *generate,
            other => panic!("{other:?}"),
        }
    }

    fn served(depth: u32) -> Served {
        Served {
            context: 100,
            depth,
            temperature: 0.6,
            top_k: 20,
            top_p: 0.95,
        }
    }

    fn body(fields: Value) -> Value {
        completion_body(&generate(fields), &served(0), &[1, 2, 3], 7)
    }

    #[test]
    fn unset_options_are_sent_with_the_files_or_the_protocols_defaults() {
        let body = body(json!({}));
        for (name, value) in [
            ("temperature", json!(0.6)),
            ("top_k", json!(20)),
            ("top_p", json!(0.95)),
            ("min_p", json!(0.0)),
            ("n_predict", json!(97)),
            ("repeat_last_n", json!(64)),
            ("seed", json!(7)),
            ("cache_prompt", json!(true)),
        ] {
            assert_eq!(body[name], value, "{name}");
        }
    }

    #[test]
    fn values_that_the_server_would_misread_are_translated() {
        let body = body(
            json!({"options": {"repeat_last_n": -1, "num_predict": -1, "num_ctx": 50, "temperature": 0, "seed": -1}}),
        );
        assert_eq!(
            (body["repeat_last_n"].as_i64(), body["n_predict"].as_i64()),
            (Some(100), Some(47))
        );
        assert_eq!(
            (body["top_k"].as_i64(), body["seed"].as_u64()),
            (Some(1), Some(0))
        );
    }

    #[test]
    fn formats_and_logprobs_are_passed_on() {
        assert_eq!(body(json!({"format": "json"}))["json_schema"], json!({}));
        assert_eq!(
            body(json!({"format": {"type": "object"}}))["json_schema"],
            json!({"type": "object"})
        );
        assert_eq!(body(json!({"logprobs": true}))["n_probs"], 1);
        assert_eq!(body(json!({"logprobs": true, "top_logprobs": 5}))["n_probs"], 5);
    }

    #[test]
    fn what_the_server_cannot_do_is_refused_by_name() {
        for (fields, depth, word) in [
            (json!({"format": {"grammar": "start: \"a\""}}), 0, "Lark"),
            (json!({"format": {"regex": "a"}}), 0, "regular expression"),
            (json!({"logprobs": true}), 3, "logprobs"),
            (json!({"draft": {"mode": "off"}}), 3, "depth"),
            (json!({"draft": {"mode": "fixed", "depth": 2}}), 3, "wants 2"),
        ] {
            let error = check(&generate(fields.clone()), &served(depth)).unwrap_err();
            assert_eq!(error.code, ErrorCode::Unsupported);
            assert!(error.message.contains(word), "{fields}: {}", error.message);
        }
        assert!(check(&generate(json!({"draft": {"mode": "off"}})), &served(0)).is_ok());
        assert!(check(
            &generate(json!({"draft": {"mode": "fixed", "depth": 3}})),
            &served(3)
        )
        .is_ok());
        assert!(check(&generate(json!({"logprobs": true})), &served(0)).is_ok());
    }
}
