//! Where a checkpoint keeps its chat template, and what has to be changed in its text.
//!
//! Invariant: the newest convention wins (`chat_template.jinja`, then `chat_template.json`, then `tokenizer_config.json`),
//! and line numbers in the text that is compiled are those of the text that was found.

use std::path::Path;

use serde_json::Value;

use super::error::TextError;
use super::template::TemplateError;
use super::tokenizer::read_optional_json;

/// A checkpoint's templates by name; a plain one is called `default`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct TemplateSource {
    templates: Vec<(String, String)>,
}

impl TemplateSource {
    /// A source with a single template.
    pub(super) fn single(text: &str) -> Self {
        Self {
            templates: vec![("default".to_owned(), without_generation_tags(text))],
        }
    }

    /// Finds a model directory's templates.
    pub(super) fn find(dir: &Path, tokenizer_config: &Value) -> Result<Self, TemplateError> {
        let file = dir.join("chat_template.jinja");
        match std::fs::read_to_string(&file) {
            Ok(text) if text.trim().is_empty() => return Err(TemplateError::NoTemplate),
            Ok(text) => return Ok(Self::single(&text)),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            Err(error) => return Err(invalid("chat_template.jinja", error.to_string())),
        }
        match read_optional_json(&dir.join("chat_template.json")) {
            Ok(Some(json)) => {
                Self::from_json("chat_template.json", json.get("chat_template").unwrap_or(&json))
            }
            Ok(None) => match tokenizer_config.get("chat_template") {
                Some(value) => Self::from_json("tokenizer_config.json", value),
                None => Err(TemplateError::NoTemplate),
            },
            Err(TextError::Read { source, .. }) => Err(invalid("chat_template.json", source.to_string())),
            Err(TextError::Invalid { reason, .. }) => Err(invalid("chat_template.json", reason)),
            Err(error) => Err(invalid("chat_template.json", error.to_string())),
        }
    }

    fn from_json(file: &str, value: &Value) -> Result<Self, TemplateError> {
        match value {
            Value::Null => Err(TemplateError::NoTemplate),
            Value::String(text) if text.trim().is_empty() => Err(TemplateError::NoTemplate),
            Value::String(text) => Ok(Self::single(text)),
            Value::Array(entries) => {
                let templates: Option<Vec<_>> = entries.iter().map(named).collect();
                let templates = templates.ok_or_else(|| {
                    invalid(
                        file,
                        "an entry of chat_template lacks name or template".to_owned(),
                    )
                })?;
                if templates.iter().any(|(name, _)| name == "default") {
                    Ok(Self { templates })
                } else {
                    Err(invalid(
                        file,
                        "none of the named chat templates is called \"default\"".to_owned(),
                    ))
                }
            }
            _ => Err(invalid(
                file,
                "chat_template is neither a string nor a list".to_owned(),
            )),
        }
    }

    /// Names and texts.
    pub(super) fn templates(&self) -> impl Iterator<Item = (&str, &str)> {
        self.templates
            .iter()
            .map(|(name, text)| (name.as_str(), text.as_str()))
    }
}

fn named(entry: &Value) -> Option<(String, String)> {
    let name = entry.get("name")?.as_str()?;
    let text = entry.get("template")?.as_str()?;
    Some((name.to_owned(), without_generation_tags(text)))
}

fn invalid(file: &str, reason: String) -> TemplateError {
    TemplateError::Source {
        file: file.to_owned(),
        reason,
    }
}

/// Replaces `{% generation %}` blocks, which mark assistant text for training masks and are transformers' own extension
/// of Jinja, by blocks that do nothing.
fn without_generation_tags(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find("{%") {
        let (before, tag) = rest.split_at(at);
        out.push_str(before);
        // Behind the opening: in `{%}` its percent sign closes nothing.
        let Some(len) = tag[2..].find("%}").map(|end| end + 4) else {
            rest = tag;
            break;
        };
        let (tag, after) = tag.split_at(len);
        let inner =
            tag[2..len - 2].trim_matches(|edge: char| edge.is_whitespace() || matches!(edge, '-' | '+'));
        match inner {
            "generation" => out.push_str(&tag.replacen("generation", "if true", 1)),
            "endgeneration" => out.push_str(&tag.replacen("endgeneration", "endif", 1)),
            _ => out.push_str(tag),
        }
        rest = after;
    }
    out.push_str(rest);
    out
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn only(source: TemplateSource) -> String {
        assert_eq!(source.templates.len(), 1);
        source.templates[0].1.clone()
    }

    #[test]
    fn the_newest_convention_wins() {
        let dir = tempfile::tempdir().unwrap();
        let config = json!({"chat_template": "config"});
        let found = |config: &Value| TemplateSource::find(dir.path(), config).map(only);
        assert_eq!(found(&json!({})), Err(TemplateError::NoTemplate));
        assert_eq!(
            found(&json!({"chat_template": null})),
            Err(TemplateError::NoTemplate)
        );
        assert_eq!(found(&config).unwrap(), "config");
        std::fs::write(
            dir.path().join("chat_template.json"),
            r#"{"chat_template": "json"}"#,
        )
        .unwrap();
        assert_eq!(found(&config).unwrap(), "json");
        std::fs::write(dir.path().join("chat_template.jinja"), "jinja").unwrap();
        assert_eq!(found(&config).unwrap(), "jinja");
    }

    #[test]
    fn named_templates_need_a_default() {
        let list = json!([{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]);
        let source = TemplateSource::from_json("f", &list).unwrap();
        assert_eq!(
            source.templates().collect::<Vec<_>>(),
            [("default", "a"), ("tool_use", "b")]
        );
        for bad in [
            json!([{"name": "rag", "template": "a"}]),
            json!([{"name": "default"}]),
            json!(3),
        ] {
            assert!(
                matches!(
                    TemplateSource::from_json("f", &bad),
                    Err(TemplateError::Source { .. })
                ),
                "{bad}"
            );
        }
    }

    #[test]
    fn damaged_files_are_named() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("chat_template.json"), "{").unwrap();
        let error = TemplateSource::find(dir.path(), &Value::Null).unwrap_err();
        assert!(
            error.to_string().contains("chat_template.json is invalid: EOF"),
            "{error}"
        );
        std::fs::write(dir.path().join("chat_template.jinja"), b"\xFF").unwrap();
        let error = TemplateSource::find(dir.path(), &Value::Null).unwrap_err();
        assert!(error.to_string().contains("chat_template.jinja"), "{error}");
    }

    #[test]
    fn generation_tags_become_blocks_that_do_nothing() {
        assert_eq!(
            without_generation_tags("a{%- generation -%}{% generate %}b{% endgeneration %}{{ '{%' }} {%"),
            "a{%- if true -%}{% generate %}b{% endif %}{{ '{%' }} {%"
        );
        // Found by fuzzing: what opens must not close with its own percent sign.
        for text in ["{%}", "a{%}b{% c %}", "{%%}", "{%"] {
            assert_eq!(without_generation_tags(text), text);
        }
    }
}
