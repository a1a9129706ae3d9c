//! An inspection for people.
//!
//! Invariant: one fact a line, the verdict last, with its reasons.

use std::fmt;

use super::{Architecture, Contents, Inspection, Text};

impl fmt::Display for Inspection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        line(f, "model", &self.model)?;
        if let Some(architecture) = &self.architecture {
            write!(f, "{architecture}")?;
        }
        if let Some(contents) = &self.contents {
            write!(f, "{contents}")?;
        }
        if let Some(text) = &self.text {
            write!(f, "{text}")?;
        }
        for warning in &self.warnings {
            line(f, "warning", warning)?;
        }
        line(f, "verdict", if self.verdict.runs { "runs" } else { "can't run" })?;
        for reason in &self.verdict.reasons {
            line(f, "", reason)?;
        }
        Ok(())
    }
}

fn line(f: &mut fmt::Formatter<'_>, name: &str, value: impl fmt::Display) -> fmt::Result {
    writeln!(f, "{name:<14}{value}")
}

impl fmt::Display for Architecture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let layers = self.layers;
        line(
            f,
            "architecture",
            format_args!("{} ({})", self.architecture, self.family),
        )?;
        let sparse = match self.experts {
            Some(experts) => {
                format!(
                    ", {} with {} experts of which {} a token",
                    layers.sparse, experts.total, experts.per_token
                )
            }
            None => String::new(),
        };
        let (total, full, linear) = (layers.total, layers.full_attention, layers.linear_attention);
        line(
            f,
            "layers",
            format_args!("{total}: {full} full attention, {linear} gated delta net{sparse}"),
        )?;
        line(f, "context", format_args!("{} tokens", self.context_length))?;
        line(f, "vocabulary", self.vocab_size)
    }
}

impl fmt::Display for Contents {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        line(f, "parameters", count(self.parameters))?;
        line(f, "embeddings", if self.tied { "tied" } else { "untied" })?;
        line(f, "norms", self.norms)?;
        if let [only] = &self.quantization[..] {
            line(f, "storage", &only.storage)?;
        } else {
            for (index, row) in self.quantization.iter().enumerate() {
                let name = if index == 0 { "storage" } else { "" };
                let modules = if row.modules == 1 { "module" } else { "modules" };
                let (n, parameters) = (row.modules, count(row.parameters));
                let text = format!(
                    "{:<26} {n:>6} {modules:<8} {parameters:>9}  {}",
                    row.storage, row.example
                );
                line(f, name, text)?;
            }
        }
        let draft = match &self.draft.reason {
            None => format!("active ({} norms)", self.draft.norms.unwrap_or("unknown")),
            Some(reason) => format!("inactive: {reason}"),
        };
        line(f, "draft head", draft)?;
        let vision = match (&self.vision.reason, self.vision.active) {
            (_, true) => "yes".to_owned(),
            (Some(reason), false) => format!("no: {reason}"),
            (None, false) => "no".to_owned(),
        };
        line(f, "vision", vision)?;
        let m = &self.memory;
        line(
            f,
            "memory",
            format_args!("{} weights ({} on disk)", bytes(m.weights), bytes(m.stored)),
        )?;
        let (kv, draft) = (bytes(m.state.kv_per_token), bytes(m.state.draft_kv_per_token));
        line(f, "", format_args!("{kv} a token, and {draft} of the draft head"))?;
        line(
            f,
            "",
            format_args!(
                "{} recurrent state a sequence",
                bytes(m.state.recurrent_per_sequence)
            ),
        )?;
        line(f, "", format_args!("{} activations, about", bytes(m.activations)))?;
        let (total, limit) = (bytes(m.total), bytes(m.limit));
        line(
            f,
            "",
            format_args!("{total} in all with {} tokens, limit {limit}", m.context),
        )?;
        line(f, "fingerprint", &self.fingerprint)
    }
}

impl fmt::Display for Text {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let eos: Vec<String> = self.eos.iter().map(|t| format!("{} {}", t.id, t.text)).collect();
        line(f, "end tokens", eos.join(", "))?;
        let thinking = match (self.chat_template, self.thinking_default) {
            (false, _) => "no usable chat template",
            (true, None) => "chat template without a switch",
            (true, Some(true)) => "on unless switched off",
            (true, Some(false)) => "off unless switched on",
        };
        line(f, "thinking", thinking)
    }
}

/// A count with a unit of a thousand.
fn count(n: u64) -> String {
    scaled(n, 1000.0, &["", " K", " M", " B", " T"])
}

/// Bytes with a binary unit.
fn bytes(n: u64) -> String {
    scaled(n, 1024.0, &[" B", " KiB", " MiB", " GiB", " TiB"])
}

fn scaled(n: u64, base: f64, units: &[&str]) -> String {
    let mut value = n as f64;
    let mut unit = 0;
    while value >= base && unit + 1 < units.len() {
        value /= base;
        unit += 1;
    }
    let digits = usize::from(unit > 0);
    format!("{value:.digits$}{}", units[unit])
}
