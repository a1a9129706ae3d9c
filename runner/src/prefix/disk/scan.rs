//! What lies in the cache directory, of all models and runners, and which files to give up first.
//!
//! The directory is shared without locks: files appear whole by renaming, are never changed, and may vanish at any time.
//! Nobody's view is complete, so a scan precedes every decision, and removing a file that another has removed is no error.

use std::cmp::Reverse;
use std::collections::{BTreeSet, HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use super::name::{origin, Name, Place};
use super::Fingerprint;

/// Prefix of files that are still being written.
pub(super) const TEMPORARY: &str = ".tmp-";

/// A file under one model's directory.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Listed {
    pub(super) model: Fingerprint,
    pub(super) path: PathBuf,
    /// None where the file's name isn't one of ours.
    pub(super) name: Option<Name>,
    pub(super) size: u64,
    pub(super) modified: SystemTime,
    /// Still being written, by us or another runner.
    pub(super) temporary: bool,
}

/// All files of all models under `root`. Files left by a writer that died, older than `stale`, are removed on the way.
pub(super) fn scan(root: &Path, stale: Duration) -> Vec<Listed> {
    let mut files = Vec::new();
    for model in std::fs::read_dir(root).into_iter().flatten().flatten() {
        let Some(print) = model.file_name().to_str().and_then(|text| text.parse().ok()) else {
            continue;
        };
        for file in std::fs::read_dir(model.path()).into_iter().flatten().flatten() {
            let Ok(metadata) = file.metadata() else { continue };
            if !metadata.is_file() {
                continue;
            }
            let modified = metadata.modified().unwrap_or(SystemTime::UNIX_EPOCH);
            let text = file.file_name();
            let text = text.to_string_lossy();
            let temporary = text.starts_with(TEMPORARY);
            if temporary && modified.elapsed().is_ok_and(|age| age > stale) {
                // Best effort: it is counted and tried again at the next scan.
                if std::fs::remove_file(file.path()).is_ok() {
                    continue;
                }
            }
            let (path, size) = (file.path(), metadata.len());
            files.push(Listed {
                model: print,
                path,
                name: Name::parse(&text),
                size,
                modified,
                temporary,
            });
        }
    }
    files
}

/// The names of the entries in one model's directory.
pub(super) fn names(directory: &Path) -> impl Iterator<Item = Name> {
    let files = std::fs::read_dir(directory).into_iter().flatten().flatten();
    files.filter_map(|file| Name::parse(file.file_name().to_str()?))
}

/// Which files to remove, in order, to free `bytes` and `count` files; fewer than that if there are no more.
///
/// First what can't be used: foreign and damaged (`bad`) files, chains that lost a link. Then least recently used, the deepest
/// of equals, and never a segment that something else rests on or that ends at a place in `keep`.
pub(super) fn victims(
    files: &[Listed],
    bad: &HashSet<PathBuf>,
    keep: &HashSet<(Fingerprint, Place)>,
    bytes: u64,
    count: usize,
) -> Vec<usize> {
    let usable = usable_places(files);
    let mut resting: HashMap<(Fingerprint, Place), usize> = HashMap::new();
    let mut ending: HashMap<(Fingerprint, Place), Vec<usize>> = HashMap::new();
    let useless = |file: &Listed| {
        bad.contains(&file.path)
            || file
                .name
                .is_none_or(|name| !usable.contains(&(file.model, name.rests_on())))
    };
    for (index, file) in files.iter().enumerate() {
        let Some(name) = file.name else { continue };
        *resting.entry((file.model, name.rests_on())).or_default() += 1;
        if matches!(name, Name::Segment { .. }) {
            ending.entry((file.model, name.place())).or_default().push(index);
        }
    }
    let linked = |file: &Listed, name: Name| {
        matches!(name, Name::Segment { .. }) && keep.contains(&(file.model, name.place()))
    };
    let protected = |file: &Listed| file.temporary || file.name.is_some_and(|name| linked(file, name));
    let rank = |index: usize| {
        let file: &Listed = &files[index];
        (
            !useless(file),
            file.modified,
            Reverse(file.name.map_or(0, |name| name.place().0)),
            index,
        )
    };
    let free = |index: &usize, resting: &HashMap<(Fingerprint, Place), usize>| {
        let file: &Listed = &files[*index];
        let rested_on = |name: Name| {
            matches!(name, Name::Segment { .. })
                && resting.get(&(file.model, name.place())).is_some_and(|&n| n > 0)
        };
        !protected(file) && (useless(file) || !file.name.is_some_and(rested_on))
    };
    let mut candidates: BTreeSet<_> = (0..files.len())
        .filter(|index| free(index, &resting))
        .map(rank)
        .collect();
    let (mut freed, mut gone) = (0, Vec::new());
    while freed < bytes || gone.len() < count {
        let Some((.., index)) = candidates.pop_first() else {
            break;
        };
        freed += files[index].size;
        gone.push(index);
        let Some(name) = files[index].name else { continue };
        let below = (files[index].model, name.rests_on());
        if let Some(left) = resting.get_mut(&below) {
            *left -= 1;
        }
        let unburdened = ending
            .get(&below)
            .into_iter()
            .flatten()
            .filter(|index| !gone.contains(index));
        candidates.extend(
            unburdened
                .filter(|index| free(index, &resting))
                .map(|&index| rank(index)),
        );
    }
    gone
}

/// The places that unbroken chains of segments lead to.
fn usable_places(files: &[Listed]) -> HashSet<(Fingerprint, Place)> {
    let mut segments: Vec<_> = files
        .iter()
        .filter_map(|file| match file.name {
            Some(name @ Name::Segment { end, .. }) => Some((end, file.model, name)),
            _ => None,
        })
        .collect();
    segments.sort_by_key(|&(end, ..)| end);
    let mut usable: HashSet<_> = files.iter().map(|file| (file.model, origin())).collect();
    for (_, model, name) in segments {
        if usable.contains(&(model, name.rests_on())) {
            usable.insert((model, name.place()));
        }
    }
    usable
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::prefix::key::PathHash;

    const MODEL: Fingerprint = Fingerprint(1);

    fn place(end: usize) -> PathHash {
        if end == 0 {
            origin().1
        } else {
            PathHash(end as u128)
        }
    }

    fn file(name: Option<Name>, age: u64) -> Listed {
        let modified = SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000 - age);
        let path = PathBuf::from(name.map_or("notes.txt".to_owned(), |name| name.to_string()));
        Listed {
            model: MODEL,
            path,
            name,
            size: 10,
            modified,
            temporary: false,
        }
    }

    fn segment(start: usize, end: usize, age: u64) -> Listed {
        file(
            Some(Name::Segment {
                start,
                end,
                parent: place(start),
                path: place(end),
            }),
            age,
        )
    }

    fn point(end: usize, age: u64) -> Listed {
        file(
            Some(Name::Point {
                end,
                path: place(end),
            }),
            age,
        )
    }

    fn order(files: &[Listed], keep: &[usize], bytes: u64) -> Vec<usize> {
        let keep = keep.iter().map(|&end| (MODEL, (end, place(end)))).collect();
        victims(files, &HashSet::new(), &keep, bytes, 0)
    }

    #[test]
    fn the_oldest_goes_first_and_nothing_goes_before_what_rests_on_it() {
        let files = [segment(0, 5, 90), point(5, 80), segment(5, 9, 70), point(9, 60)];
        assert_eq!(order(&files, &[], 40), [1, 3, 2, 0]);
        assert_eq!(order(&files, &[], 11), [1, 3], "as many as needed");
        assert_eq!(order(&files, &[9], 40), [1, 3], "the chain being extended stays");
    }

    #[test]
    fn the_deepest_of_equally_old_entries_goes_first() {
        let files = [segment(0, 5, 9), point(5, 9), segment(5, 9, 9), point(9, 9)];
        assert_eq!(order(&files, &[], 40), [3, 2, 1, 0]);
    }

    #[test]
    fn useless_files_go_before_all_others() {
        let files = [
            segment(0, 5, 90),
            point(5, 90),
            file(None, 0),
            segment(7, 9, 1),
            point(9, 2),
        ];
        assert_eq!(order(&files, &[], 50), [4, 3, 2, 1, 0]);
        let bad = HashSet::from([files[0].path.clone()]);
        assert_eq!(victims(&files[..2], &bad, &HashSet::new(), 10, 0), [0]);
    }

    #[test]
    fn files_in_writing_are_left_alone() {
        let temporary = Listed {
            temporary: true,
            ..file(None, 99)
        };
        assert_eq!(order(&[temporary], &[], 10), [0; 0]);
    }

    #[test]
    fn too_many_files_count_as_much_as_too_many_bytes() {
        let files = [segment(0, 5, 3), point(5, 3), segment(0, 6, 2), point(6, 2)];
        assert_eq!(victims(&files, &HashSet::new(), &HashSet::new(), 0, 3), [1, 0, 3]);
    }
}
