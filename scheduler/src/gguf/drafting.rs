//! Whether a GGUF file is served with speculative drafting, and with which flags.
//!
//! Invariant: a pure function of the headers, the wish and what the binary knows; no flag is given that the binary would refuse
//! or abort on.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use super::header::Header;

/// What the user wants of drafting.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wish {
    /// On where the file has a head, at the server's own depth.
    Auto,
    /// Off.
    Off,
    /// On where the file has a head, at this depth.
    Depth(u8),
}

impl std::str::FromStr for Wish {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(Self::Auto),
            "off" | "0" => Ok(Self::Off),
            depth => match depth.parse() {
                Ok(depth @ 1..=16) => Ok(Self::Depth(depth)),
                _ => Err(format!("{text:?} is neither auto, off nor a depth from 1 to 16")),
            },
        }
    }
}

/// The flags that a llama-server knows, found in the text of its `--help`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Known {
    help: String,
}

impl Known {
    /// From the text of `--help`.
    pub fn from_help(help: impl Into<String>) -> Self {
        Self { help: help.into() }
    }

    /// Whether the text names the flag or value.
    pub fn has(&self, word: &str) -> bool {
        let boundary = |c: Option<char>| c.is_none_or(|c| !c.is_ascii_alphanumeric() && c != '-' && c != '_');
        self.help.match_indices(word).any(|(at, _)| {
            boundary(self.help[..at].chars().next_back())
                && boundary(self.help[at + word.len()..].chars().next())
        })
    }
}

/// What to do about drafting.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Drafting {
    /// Flags for the server.
    pub flags: Vec<OsString>,
    /// The drafter's kind, where there is one.
    pub kind: Option<&'static str>,
    /// Why there is no drafting; `None` where there is.
    pub reason: Option<String>,
    /// Tokens drafted per round; the server's default where nothing was set.
    pub depth: u32,
    /// Something that a failed load has to do with.
    pub hint: Option<String>,
}

/// llama-server's own default of `--spec-draft-n-max`.
const DEFAULT_DEPTH: u32 = 3;

/// Decides for a model file and, where one is given, a separate draft file.
pub fn decide(
    model: &Header,
    draft: Option<(&Path, &Header)>,
    wish: Wish,
    known: &Known,
) -> Result<Drafting, String> {
    if is_head_only(model) {
        return Err("the file holds only a draft head; give it beside the model as --draft-model".to_owned());
    }
    let off = |reason: &str| {
        Ok(Drafting {
            flags: Vec::new(),
            kind: None,
            reason: Some(reason.to_owned()),
            depth: 0,
            hint: None,
        })
    };
    if wish == Wish::Off {
        return off("drafting is switched off");
    }
    let (kind, separate, hint): (&'static str, Option<PathBuf>, Option<String>) = match draft {
        Some((path, header)) if header.architecture() == "dflash" => ("draft-dflash", Some(path.to_owned()), None),
        Some((path, _)) => ("draft-mtp", Some(path.to_owned()), None),
        None => match head_of(model) {
            Head::Inside => ("draft-mtp", None, None),
            Head::Foreign => (
                "draft-mtp",
                None,
                Some("the file stores its head as mtp.* tensors, which llama.cpp can't load; convert the model again".to_owned()),
            ),
            Head::Claimed(tensor) => {
                return off(&format!("the file claims a draft head but has no tensor {tensor}"));
            }
            Head::None => return off("the file has no draft head"),
        },
    };
    if !known.has(kind) || !known.has("--spec-type") {
        return off(&format!("this llama-server doesn't know {kind}"));
    }
    let mut flags: Vec<OsString> = vec!["--spec-type".into(), kind.into()];
    if let Wish::Depth(depth) = wish {
        flags.extend(["--spec-draft-n-max".into(), depth.to_string().into()]);
    }
    if kind == "draft-mtp" && known.has("--spec-draft-backend-sampling") {
        flags.push("--spec-draft-backend-sampling".into());
    }
    if let Some(path) = separate {
        flags.extend(["--spec-draft-model".into(), path.into_os_string()]);
    }
    let depth = if let Wish::Depth(depth) = wish {
        u32::from(depth)
    } else {
        DEFAULT_DEPTH
    };
    let kind = if kind == "draft-mtp" { "mtp" } else { "dflash" };
    Ok(Drafting {
        flags,
        kind: Some(kind),
        reason: None,
        depth,
        hint,
    })
}

enum Head {
    Inside,
    /// Stored under Hugging Face's names.
    Foreign,
    /// In the metadata only; this tensor is missing.
    Claimed(String),
    None,
}

fn head_of(model: &Header) -> Head {
    if model.own("nextn_predict_layers").unwrap_or(0) > 0 {
        let last = model.own("block_count").unwrap_or(1).saturating_sub(1);
        let projection = format!("blk.{last}.nextn.eh_proj.weight");
        return if model.has_tensor(&projection) {
            Head::Inside
        } else {
            Head::Claimed(projection)
        };
    }
    let family = matches!(model.architecture(), "qwen35" | "qwen35moe");
    if family && model.tensors.iter().any(|tensor| tensor.starts_with("mtp.")) {
        return Head::Foreign;
    }
    Head::None
}

fn is_head_only(model: &Header) -> bool {
    model.own("nextn_predict_layers").unwrap_or(0) > 0 && !model.has_tensor("blk.0.attn_norm.weight")
}

#[cfg(test)]
mod tests {
    use super::super::synthetic::{gguf, Key};
    use super::*;

    fn header(architecture: &str, nextn: Option<u32>, tensors: &[&str]) -> Header {
        let nextn_key = format!("{architecture}.nextn_predict_layers");
        let count_key = format!("{architecture}.block_count");
        let mut keys = vec![
            ("general.architecture", Key::Text(architecture)),
            (count_key.as_str(), Key::U32(9)),
        ];
        if let Some(nextn) = nextn {
            keys.push((nextn_key.as_str(), Key::U32(nextn)));
        }
        let bytes = gguf(3, &keys, tensors);
        Header::read(bytes.as_slice(), bytes.len() as u64).unwrap()
    }

    fn known() -> Known {
        Known::from_help(
            "--spec-type LIST none,draft-mtp,draft-dflash\n--[no-]x --spec-draft-backend-sampling, --y",
        )
    }

    fn flags(drafting: &Drafting) -> String {
        let words: Vec<_> = drafting.flags.iter().map(|flag| flag.to_str().unwrap()).collect();
        words.join(" ")
    }

    const TRUNK: &str = "blk.0.attn_norm.weight";
    const HEAD: &str = "blk.8.nextn.eh_proj.weight";

    #[test]
    fn flags_for_every_kind_of_file() {
        let mtp = "--spec-type draft-mtp --spec-draft-backend-sampling";
        type Row<'a> = (&'a str, Option<u32>, &'a [&'a str], Wish, &'a str);
        let table: &[Row<'_>] = &[
            ("qwen35", Some(1), &[TRUNK, HEAD], Wish::Auto, mtp),
            (
                "qwen35",
                Some(1),
                &[TRUNK, HEAD],
                Wish::Depth(2),
                "--spec-type draft-mtp --spec-draft-n-max 2 --spec-draft-backend-sampling",
            ),
            ("qwen35", Some(1), &[TRUNK, HEAD], Wish::Off, ""),
            ("glm4moe", Some(1), &[TRUNK, HEAD], Wish::Auto, mtp),
            ("qwen35", Some(1), &[TRUNK], Wish::Auto, ""),
            ("qwen35", Some(0), &[TRUNK], Wish::Auto, ""),
            ("qwen35", None, &[TRUNK], Wish::Auto, ""),
            ("qwen35", None, &[TRUNK, "mtp.fc.weight"], Wish::Auto, mtp),
            ("qwen35moe", None, &[TRUNK, "mtp.norm.weight"], Wish::Auto, mtp),
            ("llama", None, &[TRUNK, "mtp.fc.weight"], Wish::Auto, ""),
            ("qwen35", None, &[TRUNK, "x.mtp.fc.weight"], Wish::Auto, ""),
        ];
        for (architecture, nextn, tensors, wish, expected) in table {
            let drafting = decide(&header(architecture, *nextn, tensors), None, *wish, &known()).unwrap();
            assert_eq!(
                flags(&drafting),
                *expected,
                "{architecture} {nextn:?} {tensors:?} {wish:?}"
            );
            assert_eq!(drafting.reason.is_some(), expected.is_empty());
        }
    }

    #[test]
    fn the_head_of_a_converted_model_is_found() {
        let path =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("../fixtures/models/tiny-qwen3.5-mtp-q8_0.gguf");
        let model = Header::open(&path).unwrap();
        assert_eq!(
            (model.architecture(), model.quantization().as_deref()),
            ("qwen35", Some("Q8_0"))
        );
        let drafting = decide(&model, None, Wish::Auto, &known()).unwrap();
        assert_eq!(
            flags(&drafting),
            "--spec-type draft-mtp --spec-draft-backend-sampling"
        );
    }

    #[test]
    fn a_separate_draft_file_beats_the_head_inside() {
        let model = header("qwen35", Some(1), &[TRUNK, HEAD]);
        let draft = |architecture| header(architecture, Some(1), &[HEAD]);
        let path = Path::new("head.gguf");
        let mtp = decide(&model, Some((path, &draft("qwen35"))), Wish::Auto, &known()).unwrap();
        assert_eq!(
            flags(&mtp),
            "--spec-type draft-mtp --spec-draft-backend-sampling --spec-draft-model head.gguf"
        );
        let block = decide(&model, Some((path, &draft("dflash"))), Wish::Depth(4), &known()).unwrap();
        assert_eq!(
            flags(&block),
            "--spec-type draft-dflash --spec-draft-n-max 4 --spec-draft-model head.gguf"
        );
        assert_eq!(block.kind, Some("dflash"));
        let off = decide(&model, Some((path, &draft("qwen35"))), Wish::Off, &known()).unwrap();
        assert_eq!(flags(&off), "");
    }

    #[test]
    fn a_file_with_nothing_but_a_head_is_refused_before_the_server_would_crash_on_it() {
        let error = decide(&header("qwen35", Some(1), &[HEAD]), None, Wish::Auto, &known()).unwrap_err();
        assert!(error.contains("--draft-model"), "{error}");
    }

    #[test]
    fn flags_that_the_binary_does_not_know_are_left_out() {
        let model = header("qwen35", Some(1), &[TRUNK, HEAD]);
        let older = Known::from_help("--spec-type LIST none,draft-mtp,draft-dflash");
        assert_eq!(
            flags(&decide(&model, None, Wish::Auto, &older).unwrap()),
            "--spec-type draft-mtp"
        );
        let oldest = Known::from_help("--draft-max N");
        let drafting = decide(&model, None, Wish::Auto, &oldest).unwrap();
        assert_eq!(flags(&drafting), "");
        assert!(drafting.reason.unwrap().contains("doesn't know draft-mtp"));
    }

    #[test]
    fn help_is_searched_for_whole_words() {
        let known = Known::from_help("--no-ui-x, --spec-draft-n-max N\n--spec-type draft-mtp|x");
        assert!(
            !known.has("--no-ui")
                && !known.has("--spec-draft")
                && known.has("--spec-type")
                && known.has("draft-mtp")
        );
    }
}
