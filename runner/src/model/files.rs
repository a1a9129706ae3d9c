//! Which files of a directory hold a model's weights.
//!
//! Invariant: shards that an index (or their own numbering) names are all there and inside of the directory; files that
//! nothing names come last, so that they only ever add tensors.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Component, Path};

use serde_json::{Map, Value};

use super::error::{LoadError, Result};
use super::fields::{brief, read_object};

/// The usual index; another `*.safetensors.index.json` serves where it is absent.
const INDEX_FILE: &str = "model.safetensors.index.json";
/// The single file of an unsharded model.
const SINGLE_FILE: &str = "model.safetensors";

/// How a file came to be considered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Role {
    /// The model's own, by index, name or numbering.
    Shard,
    /// Found beside it: a head in its own file, or something unrelated.
    Extra,
}

/// The files to read, in order of precedence.
#[derive(Debug, Default)]
pub(super) struct Listing {
    /// Index file, where there is one.
    pub(super) index: Option<String>,
    /// Files relative to the directory.
    pub(super) files: Vec<(String, Role)>,
    /// What is odd but harmless.
    pub(super) warnings: Vec<String>,
    places: BTreeMap<String, String>,
}

impl Listing {
    /// The file in which the index places a tensor.
    pub(super) fn place(&self, tensor: &str) -> Option<&str> {
        self.places.get(tensor).map(String::as_str)
    }

    /// Whether the index's file for the tensor is among the files to read.
    pub(super) fn is_present(&self, tensor: &str) -> bool {
        self.place(tensor)
            .is_some_and(|place| self.files.iter().any(|(f, _)| f == place))
    }

    /// Every (tensor, file) of the index.
    pub(super) fn placed(&self) -> impl Iterator<Item = (&str, &str)> {
        self.places.iter().map(|(t, f)| (t.as_str(), f.as_str()))
    }
}

/// Lists the files of `dir`; `config` may name further ones.
pub(super) fn list(dir: &Path, config: &Map<String, Value>) -> Result<Listing> {
    let all = safetensors_files(dir, "")?;
    let mut listing = Listing {
        index: find_index(dir, &all)?,
        ..Listing::default()
    };
    if let Some(index) = listing.index.clone() {
        listing.places = read_index(dir, &index)?;
    }
    let shards: BTreeSet<String> = if listing.places.is_empty() {
        own_shards(&all)?
    } else {
        listing.places.values().cloned().collect()
    };
    for shard in &shards {
        if !dir.join(shard).is_file() {
            let mut held = listing.places.iter().filter(|(_, f)| *f == shard).map(|(t, _)| t);
            let example = held.next().cloned().unwrap_or_default();
            let tensors = Some(1 + held.count());
            return Err(LoadError::MissingShard {
                file: shard.clone(),
                tensors,
                example,
            });
        }
    }
    let mut extras: Vec<String> = named_in(config).into_iter().filter(|f| is_inside(f)).collect();
    extras.extend(all.iter().cloned());
    extras.extend(safetensors_files(dir, "mtp")?);
    listing
        .files
        .extend(shards.iter().map(|f| (f.clone(), Role::Shard)));
    for extra in extras {
        if listing.files.iter().any(|(f, _)| *f == extra) {
            continue;
        }
        if dir.join(&extra).is_file() {
            listing.files.push((extra, Role::Extra));
        } else {
            listing
                .warnings
                .push(format!("config.json names {extra}, which is not there"));
        }
    }
    if listing.files.is_empty() {
        return Err(LoadError::NoWeights(dir.to_owned()));
    }
    Ok(listing)
}

/// Names of the `*.safetensors` files in `dir/sub`, sorted, relative to `dir`.
fn safetensors_files(dir: &Path, sub: &str) -> Result<Vec<String>> {
    let path = dir.join(sub);
    let entries = match std::fs::read_dir(&path) {
        Ok(entries) => entries,
        Err(_) if !sub.is_empty() => return Ok(Vec::new()),
        Err(source) => return Err(LoadError::Io { path, source }),
    };
    let mut names: Vec<String> = entries
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        // Files that begin with a dot are leftovers of downloads and of other systems' file managers.
        .filter(|name| name.ends_with(".safetensors") && !name.starts_with('.'))
        .map(|name| {
            if sub.is_empty() {
                name
            } else {
                format!("{sub}/{name}")
            }
        })
        .collect();
    names.sort();
    Ok(names)
}

fn find_index(dir: &Path, all: &[String]) -> Result<Option<String>> {
    if dir.join(INDEX_FILE).is_file() {
        return Ok(Some(INDEX_FILE.to_owned()));
    }
    if all.iter().any(|f| f == SINGLE_FILE) {
        return Ok(None);
    }
    let entries = std::fs::read_dir(dir).map_err(|source| LoadError::Io {
        path: dir.to_owned(),
        source,
    })?;
    let mut found: Vec<String> = entries
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .filter(|name| name.ends_with(".safetensors.index.json"))
        .collect();
    found.sort();
    Ok(found.into_iter().next())
}

fn read_index(dir: &Path, index: &str) -> Result<BTreeMap<String, String>> {
    let bad = |message: String| LoadError::Json {
        file: index.to_owned(),
        message,
    };
    let map = read_object(dir, index)?.ok_or_else(|| bad("file vanished".to_owned()))?;
    let Some(Value::Object(places)) = map.get("weight_map") else {
        return Err(bad("it has no object \"weight_map\"".to_owned()));
    };
    if places.is_empty() {
        return Err(bad("its \"weight_map\" is empty".to_owned()));
    }
    let mut out = BTreeMap::new();
    for (tensor, file) in places {
        let Value::String(file) = file else {
            return Err(bad(format!(
                "tensor {tensor:?} is placed in {}, which is not a file name",
                brief(file)
            )));
        };
        if !is_inside(file) {
            return Err(LoadError::UnsafePath {
                index: index.to_owned(),
                file: file.clone(),
            });
        }
        out.insert(tensor.clone(), file.clone());
    }
    Ok(out)
}

/// A relative path without `..`: a checkpoint must not reach files outside of its directory.
fn is_inside(file: &str) -> bool {
    !file.is_empty()
        && Path::new(file)
            .components()
            .all(|c| matches!(c, Component::Normal(_)))
}

/// Without an index: `model.safetensors`, else every numbered shard of the largest numbered set.
fn own_shards(all: &[String]) -> Result<BTreeSet<String>> {
    if let Some(single) = all.iter().find(|f| *f == SINGLE_FILE) {
        return Ok(BTreeSet::from([single.clone()]));
    }
    let mut shards = BTreeSet::new();
    for name in all {
        let Some((stem, count)) = numbering(name) else {
            continue;
        };
        for n in 1..=count {
            let sibling = format!("{stem}-{n:05}-of-{count:05}.safetensors");
            if !all.contains(&sibling) {
                return Err(LoadError::MissingShard {
                    file: sibling,
                    tensors: None,
                    example: String::new(),
                });
            }
            shards.insert(sibling);
        }
    }
    Ok(shards)
}

/// (stem, shard count) of `stem-00001-of-00004.safetensors`.
fn numbering(name: &str) -> Option<(&str, usize)> {
    const MAX_SHARDS: usize = 10_000;
    let (rest, count) = name.strip_suffix(".safetensors")?.rsplit_once("-of-")?;
    let (stem, number) = rest.rsplit_once('-')?;
    let digits = |s: &str| (s.len() == 5).then(|| s.parse::<usize>().ok()).flatten();
    let (number, count) = (digits(number)?, digits(count)?);
    (1..=count)
        .contains(&number)
        .then_some((stem, count))
        .filter(|(_, n)| *n <= MAX_SHARDS)
}

/// Weight files that the config names under a key that speaks of a head.
fn named_in(config: &Map<String, Value>) -> Vec<String> {
    let mut found = Vec::new();
    let mut visit = |map: &Map<String, Value>| {
        for (key, value) in map {
            if !["mtp", "draft", "nextn"].iter().any(|word| key.contains(word)) {
                continue;
            }
            let nested = value.as_object().into_iter().flat_map(Map::values);
            let names = std::iter::once(value).chain(nested).filter_map(Value::as_str);
            found.extend(names.filter(|s| s.ends_with(".safetensors")).map(str::to_owned));
        }
    };
    visit(config);
    if let Some(Value::Object(text)) = config.get("text_config") {
        visit(text);
    }
    found
}
