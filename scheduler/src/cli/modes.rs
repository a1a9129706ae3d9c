//! Drafting modes to be compared on one model.
//!
//! Invariant: a mode is asked for in the way that the model's server has: of the MLX runner with each request, of llama-server,
//! which can't change it, with a server of its own.

use lookahead_protocol::event::Done;
use lookahead_scheduler::catalog::{Kind, Spec};
use lookahead_scheduler::config::{ModelConfig, Settings, Size};
use serde_json::{json, Value};

use super::generation::draft_field;
use super::session::{Ending, Session};

/// One drafting mode.
#[derive(Debug, Clone)]
pub(crate) struct Mode {
    /// `off`, `auto` or a depth.
    pub(crate) name: String,
    /// The model that has it.
    model: String,
    /// The request's `draft`.
    field: Option<Value>,
}

/// The modes of a model, with what they need added to the settings.
pub(crate) fn modes<'a>(
    settings: &mut Settings,
    model: &str,
    spec: &Spec,
    names: impl Iterator<Item = &'a str>,
) -> anyhow::Result<Vec<Mode>> {
    names
        .map(|name| {
            let field = draft_field(name)?;
            if spec.kind == Kind::Mlx {
                return Ok(Mode {
                    name: name.to_owned(),
                    model: model.to_owned(),
                    field: Some(field),
                });
            }
            let own = format!("{model} --draft {name}");
            settings.models.insert(own.clone(), served_with(spec, name));
            Ok(Mode {
                name: name.to_owned(),
                model: own,
                field: None,
            })
        })
        .collect()
}

fn served_with(spec: &Spec, draft: &str) -> ModelConfig {
    let mut args: Vec<String> = Vec::new();
    let mut given = spec.args.iter().map(|it| it.to_string_lossy().into_owned());
    while let Some(argument) = given.next() {
        if argument == "--draft" {
            given.next();
        } else if !argument.starts_with("--draft=") {
            args.push(argument);
        }
    }
    args.extend(["--draft".to_owned(), draft.to_owned()]);
    ModelConfig {
        path: spec.path.clone(),
        args,
        env: spec.env.clone(),
        keep_alive: None,
        memory: spec.memory.map(Size),
        preload: false,
    }
}

impl Mode {
    /// One greedy generation of a fixed length.
    pub(crate) fn generate(&self, session: &mut Session, prompt: &str, tokens: u32) -> anyhow::Result<Done> {
        let mut request = json!({"type": "generate", "id": session.next_id(), "model": self.model, "prompt": prompt, "cache": false,
            "options": {"temperature": 0, "num_predict": tokens, "ignore_eos": true}});
        if let Some(field) = &self.field {
            request["draft"] = field.clone();
        }
        done_of(session.follow(&request, |_| Ok(()))?)
    }

    /// The prefill of a prompt of so many tokens, which differs from run to run.
    pub(crate) fn prefill(&self, session: &mut Session, tokens: u32, run: u32) -> anyhow::Result<Done> {
        let mut vocabulary = 0;
        let load = json!({"type": "load", "id": session.next_id(), "model": self.model});
        let loaded = session.follow(&load, |event| {
            let size = event.get("info").and_then(|info| info.get("vocab_size"));
            vocabulary = size.and_then(Value::as_u64).unwrap_or(vocabulary);
            Ok(())
        })?;
        if let Ending::Failed(failure) = loaded {
            anyhow::bail!("{}: {}", failure.code, failure.message);
        }
        // Ids from the middle of the vocabulary are ordinary text; special ones lie at its end.
        let span = (vocabulary / 2).clamp(1, 1000);
        let ids: Vec<u64> = (0..u64::from(tokens))
            .map(|at| vocabulary / 8 + (at * 7 + u64::from(run) * 13) % span)
            .collect();
        let request = json!({"type": "generate", "id": session.next_id(), "model": self.model, "tokens": ids, "cache": false,
            "options": {"num_predict": 0}});
        done_of(session.follow(&request, |_| Ok(()))?)
    }
}

fn done_of(ending: Ending) -> anyhow::Result<Done> {
    match ending {
        Ending::Done(done) => Ok(*done),
        Ending::Failed(failure) => anyhow::bail!("{}: {}", failure.code, failure.message),
        Ending::Answer => anyhow::bail!("an answer that is no generation"),
    }
}

/// Tokens a second.
pub(crate) fn rate(tokens: u64, nanoseconds: u64) -> f64 {
    if nanoseconds == 0 {
        0.0
    } else {
        tokens as f64 * 1e9 / nanoseconds as f64
    }
}

/// The middle value.
pub(crate) fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use lookahead_scheduler::config::Settings;

    #[test]
    fn the_median_is_the_middle_one() {
        assert_eq!(median(&mut [3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&mut []), 0.0);
        assert_eq!(rate(10, 2_000_000_000), 5.0);
    }

    #[test]
    fn a_gguf_file_gets_a_server_for_every_mode() {
        let spec = |kind| Spec {
            key: "k".to_owned(),
            path: "m.gguf".into(),
            kind,
            args: ["--threads", "1", "--draft", "4"]
                .iter()
                .map(Into::into)
                .collect(),
            env: std::collections::BTreeMap::new(),
            keep_alive: None,
            memory: None,
        };
        let mut settings = Settings::default();
        let names = || ["off", "2"].into_iter();
        let gguf = modes(&mut settings, "m", &spec(Kind::Gguf), names()).unwrap();
        let args = |mode: &Mode| settings.models[&mode.model].args.clone();
        assert_eq!(args(&gguf[0]), ["--threads", "1", "--draft", "off"]);
        assert_eq!(args(&gguf[1]), ["--threads", "1", "--draft", "2"]);
        assert!(gguf.iter().all(|mode| mode.field.is_none()));
        let mlx = modes(&mut settings, "m", &spec(Kind::Mlx), names()).unwrap();
        assert!(mlx.iter().all(|mode| mode.model == "m" && mode.field.is_some()));
        assert_eq!(settings.models.len(), 2);
        assert!(modes(&mut settings, "m", &spec(Kind::Mlx), ["99"].into_iter()).is_err());
    }
}
