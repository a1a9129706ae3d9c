//! The disk tier: damage, foreign files, a full medium, two stores in one directory.

use super::*;
use crate::prefix::fake::{keys, point_name as point, segment_name as segment};
use crate::prefix::key::path_hash;
use safetensors::Dtype;
use std::fs;
use tempfile::TempDir;

const MODEL: Fingerprint = Fingerprint(0xabc);
const SOON: Duration = Duration::from_secs(20);

fn open(dir: &TempDir, budget: u64) -> DiskStore {
    DiskStore::open(DiskConfig::new(dir.path().to_owned(), MODEL, budget)).unwrap()
}

fn tensors(text: &str, bytes: usize) -> Vec<Tensor> {
    let fill = path_hash(&keys(text)).0 as u8;
    let tensor = |name: &str, bytes: usize| Tensor {
        name: name.to_owned(),
        dtype: Dtype::BF16,
        shape: vec![1, bytes / 2],
        data: vec![fill; bytes],
    };
    vec![tensor("b", bytes - 8), tensor("a", 8)]
}

fn put_segment(store: &DiskStore, text: &str, start: usize, bytes: usize) -> Put {
    store.put(segment(text, start), keys(&text[start..]), tensors(text, bytes))
}

fn put_point(store: &DiskStore, text: &str, bytes: usize) -> Put {
    store.put(point(text), Vec::new(), tensors(text, bytes))
}

/// One whole prefix: a segment from the start and the state at its end.
fn put_whole(store: &DiskStore, text: &str, bytes: usize) {
    assert_eq!(put_segment(store, text, 0, bytes), Put::Queued);
    assert_eq!(put_point(store, text, bytes), Put::Queued);
    assert!(store.flush(SOON));
}

fn found(store: &DiskStore, text: &str) -> Option<usize> {
    store
        .lookup(&keys(text), text.len() - 1)
        .map(|found| found.offset)
}

fn files(dir: &TempDir) -> Vec<PathBuf> {
    let listed = fs::read_dir(dir.path().join("prefix").join(MODEL.to_string())).unwrap();
    let mut paths: Vec<_> = listed.map(|file| file.unwrap().path()).collect();
    paths.sort();
    paths
}

fn bytes(dir: &TempDir) -> u64 {
    files(dir)
        .iter()
        .map(|path| fs::metadata(path).unwrap().len())
        .sum()
}

fn file(dir: &TempDir, name: Name) -> PathBuf {
    dir.path()
        .join("prefix")
        .join(MODEL.to_string())
        .join(name.to_string())
}

#[test]
fn what_was_written_is_found_and_read_after_a_restart() {
    let dir = TempDir::new().unwrap();
    {
        let store = open(&dir, 1 << 20);
        put_whole(&store, "hello", 100);
        assert_eq!(put_segment(&store, "hello world", 5, 60), Put::Queued);
        assert_eq!(put_point(&store, "hello world", 60), Put::Queued);
        assert!(store.flush(SOON));
        assert_eq!(put_point(&store, "hello", 100), Put::Present);
        let figures = store.figures();
        assert_eq!(
            (figures.entries, figures.bytes, figures.pending_bytes),
            (4, bytes(&dir), 0)
        );
        assert_eq!(figures.stored.count, 4);
    }
    let store = open(&dir, 1 << 20);
    assert_eq!(store.figures().bytes, bytes(&dir));
    let whole = store.lookup(&keys("hello world!"), 11).unwrap();
    assert_eq!(whole.offset, 11);
    assert_eq!(whole.segments, [segment("hello", 0), segment("hello world", 5)]);
    for (name, text, size) in [
        (whole.segments[1], "hello world", 60),
        (whole.point, "hello world", 60),
    ] {
        let mut expected = tensors(text, size);
        expected.sort_by(|a, b| a.name.cmp(&b.name));
        let mut loaded = store.load(name, &keys("hello world!")).unwrap();
        loaded.sort_by(|a, b| a.name.cmp(&b.name));
        assert_eq!(loaded, expected);
    }
    assert!(store.holds(&whole.point) && !store.holds(&point("hello worlds")));
    assert_eq!(found(&store, "hello there"), Some(5));
    assert_eq!(found(&store, "hello"), None, "one token is left to evaluate");
}

#[cfg(unix)]
#[test]
fn prompts_are_private() {
    use std::os::unix::fs::PermissionsExt;
    let dir = TempDir::new().unwrap();
    let root = dir.path().join("prefix");
    fs::create_dir(&root).unwrap();
    fs::set_permissions(&root, fs::Permissions::from_mode(0o755)).unwrap();
    let store = open(&dir, 1 << 20);
    put_whole(&store, "secret", 100);
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!((mode(&root), mode(&store.shared.directory)), (0o700, 0o700));
    for path in files(&dir) {
        assert_eq!(mode(&path), 0o600, "{}", path.display());
    }
}

#[test]
fn damaged_files_are_ignored_with_a_warning_whatever_the_damage() {
    let dir = TempDir::new().unwrap();
    put_whole(&open(&dir, 1 << 20), "hello", 100);
    let path = file(&dir, segment("hello", 0));
    let whole = fs::read(&path).unwrap();
    let cut = (0..whole.len()).step_by(7).map(|length| whole[..length].to_vec());
    let flipped = (0..whole.len()).map(|at| {
        let mut bytes = whole.clone();
        bytes[at] ^= 0x10;
        bytes
    });
    let longer = [whole.iter().copied().chain([0]).collect::<Vec<u8>>()];
    let mut damages = 0;
    for damaged in cut.chain(flipped).chain(longer) {
        fs::write(&path, &damaged).unwrap();
        let store = open(&dir, 1 << 20);
        assert_eq!(found(&store, "hello!"), Some(5));
        if let Some(loaded) = store.load(segment("hello", 0), &keys("hello!")) {
            // Names and blanks in the header are outside the hash; what is used is intact all the same.
            let mut loaded: Vec<_> = loaded
                .into_iter()
                .map(|tensor| (tensor.name, tensor.data))
                .collect();
            loaded.sort();
            let mut expected: Vec<_> = tensors("hello", 100)
                .into_iter()
                .map(|t| (t.name, t.data))
                .collect();
            expected.sort();
            assert_eq!(loaded, expected);
            continue;
        }
        damages += 1;
        assert_eq!(found(&store, "hello!"), None, "it isn't offered again");
        let warnings = store.take_warnings();
        assert!(
            matches!(
                warnings[..],
                [DiskError::Malformed { .. } | DiskError::Foreign { .. }]
            ),
            "{warnings:?}"
        );
    }
    assert!(damages > whole.len(), "{damages} of {}", whole.len());
}

#[test]
fn a_damaged_entry_is_replaced_when_it_is_written_anew() {
    let dir = TempDir::new().unwrap();
    let store = open(&dir, 1 << 20);
    put_whole(&store, "hello", 100);
    fs::write(file(&dir, point("hello")), b"not a tensor file").unwrap();
    assert_eq!(store.load(point("hello"), &keys("hello")), None);
    assert_eq!(found(&store, "hello!"), None);
    assert_eq!(put_point(&store, "hello", 100), Put::Queued);
    assert!(store.flush(SOON));
    assert_eq!(found(&store, "hello!"), Some(5));
    assert!(store.load(point("hello"), &keys("hello")).is_some());
}

#[test]
fn an_entry_of_another_model_is_refused_even_under_our_name() {
    let dir = TempDir::new().unwrap();
    let other = DiskStore::open(DiskConfig::new(dir.path().to_owned(), Fingerprint(9), 1 << 20)).unwrap();
    put_whole(&other, "hello", 100);
    let store = open(&dir, 1 << 20);
    assert_eq!(found(&store, "hello!"), None);
    for name in [segment("hello", 0), point("hello")] {
        fs::copy(other.shared.directory.join(name.to_string()), file(&dir, name)).unwrap();
    }
    assert_eq!(found(&store, "hello!"), Some(5));
    assert_eq!(store.load(point("hello"), &keys("hello")), None);
    assert!(matches!(store.take_warnings()[..], [DiskError::Foreign { .. }]));
}

#[test]
fn a_hash_collision_is_caught_by_comparing_the_keys() {
    let dir = TempDir::new().unwrap();
    let store = open(&dir, 1 << 20);
    let collided = Name::Segment {
        start: 0,
        end: 5,
        parent: path_hash(&[]),
        path: PathHash(1),
    };
    store.put(collided, keys("hello"), tensors("hello", 100));
    assert!(store.flush(SOON));
    assert!(store.load(collided, &keys("hello!")).is_some());
    assert_eq!(store.load(collided, &keys("jello!")), None);
    assert!(store.take_warnings()[0].to_string().contains("other keys"));
}

#[test]
fn the_budget_holds_and_the_least_recently_used_goes() {
    let dir = TempDir::new().unwrap();
    let store = open(&dir, 20_000);
    for (age, text) in ["first", "second", "third"].into_iter().enumerate() {
        put_whole(&store, text, 2_000);
        for path in [file(&dir, segment(text, 0)), file(&dir, point(text))] {
            let time = SystemTime::now() - Duration::from_secs(100 - age as u64);
            fs::File::open(path).unwrap().set_modified(time).unwrap();
        }
    }
    assert!(
        store.load(point("first"), &keys("first")).is_some(),
        "loading counts as use"
    );
    assert!(store.load(segment("first", 0), &keys("first")).is_some());
    put_whole(&store, "fourth", 4_000);
    assert!(bytes(&dir) <= 20_000);
    let there = ["first!", "second!", "third!", "fourth!"].map(|text| found(&store, text));
    assert_eq!(there, [Some(5), None, Some(5), Some(6)]);
    assert_eq!(store.figures().bytes, bytes(&dir));
    assert!(store.figures().evicted > 0);
    put_whole(&store, "fifth, of much greater size", 8_000);
    assert!(bytes(&dir) <= 20_000);
}

#[test]
fn the_budget_bounds_all_models_together_and_foreign_files_go_first() {
    let dir = TempDir::new().unwrap();
    let other = DiskStore::open(DiskConfig::new(dir.path().to_owned(), Fingerprint(9), 20_000)).unwrap();
    put_whole(&other, "other", 4_000);
    let store = open(&dir, 20_000);
    let foreign = store.shared.directory.join("notes.txt");
    fs::write(&foreign, vec![0; 8_000]).unwrap();
    let outside = dir.path().join("prefix").join("mine.txt");
    fs::write(&outside, vec![0; 100_000]).unwrap();
    put_whole(&store, "hello", 3_000);
    assert!(!foreign.exists());
    assert!(outside.exists(), "only directories of ours are touched");
    assert_eq!(found(&other, "other!"), Some(5));
    put_whole(&store, "hello again", 4_000);
    assert_eq!(
        found(&other, "other!"),
        None,
        "the least recently used is another model's"
    );
}

#[test]
fn a_conversation_extends_its_chain_without_losing_its_front() {
    let dir = TempDir::new().unwrap();
    let store = open(&dir, 12_000);
    let text = "abcdefghijklmnopqrst";
    for end in 1..=text.len() {
        put_segment(&store, &text[..end], end - 1, 200);
        put_point(&store, &text[..end], 2_000);
        assert!(store.flush(SOON));
        assert!(bytes(&dir) <= 12_000, "{} at {end}", bytes(&dir));
        // Room for the chain and a state or two: older states go, the chain and the newest state stay.
        let next = format!("{}!", &text[..end]);
        if end <= 7 {
            assert_eq!(found(&store, &next), Some(end));
        }
    }
}

#[test]
fn entries_without_their_chain_are_dropped() {
    let dir = TempDir::new().unwrap();
    let store = open(&dir, 1 << 20);
    assert_eq!(put_segment(&store, "hello world", 5, 60), Put::Queued);
    assert_eq!(put_point(&store, "hello", 60), Put::Queued);
    assert!(store.flush(SOON));
    assert!(files(&dir).is_empty());
}

#[test]
fn an_entry_larger_than_the_budget_is_refused() {
    let dir = TempDir::new().unwrap();
    let store = open(&dir, 1_000);
    assert_eq!(put_segment(&store, "hello", 0, 2_000), Put::Refused);
    assert_eq!(
        put_segment(&store, "hello", 0, 900),
        Put::Queued,
        "the header may be what exceeds it"
    );
    assert!(store.flush(SOON));
    assert!(files(&dir).is_empty());
    assert!(store.figures().writable);
}

#[test]
fn what_waits_is_bounded() {
    let dir = TempDir::new().unwrap();
    let config = DiskConfig {
        max_pending: 500,
        ..DiskConfig::new(dir.path().to_owned(), MODEL, 1 << 20)
    };
    let store = DiskStore::open(config).unwrap();
    let state = store.shared.lock();
    drop(state);
    // A single large entry may wait alone; while it does, others are turned away or find the queue empty again.
    assert_eq!(put_segment(&store, "large", 0, 4_000), Put::Queued);
    let second = put_segment(&store, "other", 0, 4_000);
    assert!(matches!(second, Put::Busy | Put::Queued));
    assert!(store.figures().pending_bytes <= 8_200);
    assert!(store.flush(SOON));
    assert_eq!(store.figures().pending_bytes, 0);
}

#[test]
fn files_left_by_a_killed_writer_are_never_read_and_removed_when_stale() {
    let dir = TempDir::new().unwrap();
    put_whole(&open(&dir, 1 << 20), "hello", 100);
    let whole = fs::read(file(&dir, point("hello"))).unwrap();
    let left = dir
        .path()
        .join("prefix")
        .join(MODEL.to_string())
        .join(format!("{TEMPORARY}1-2-3"));
    fs::write(&left, &whole[..whole.len() / 2]).unwrap();
    let store = open(&dir, 1 << 20);
    assert_eq!(store.figures().entries, 2);
    assert!(left.exists(), "it may be another runner's, in writing");
    assert_eq!(store.figures().bytes, bytes(&dir), "it is counted meanwhile");
    let time = SystemTime::now() - Duration::from_secs(3_600);
    fs::File::open(&left).unwrap().set_modified(time).unwrap();
    put_whole(&store, "other", 100);
    assert!(!left.exists());
    assert_eq!(found(&store, "hello!"), Some(5));
}

#[test]
fn two_runners_share_a_directory() {
    let dir = TempDir::new().unwrap();
    let (one, two) = (open(&dir, 60_000), open(&dir, 60_000));
    put_whole(&one, "hello", 100);
    std::thread::sleep(UNSETTLED * 2);
    assert_eq!(found(&two, "hello!"), Some(5), "what one writes the other finds");
    // Both write the same and different entries at once, under a budget that makes them evict each other's.
    std::thread::scope(|scope| {
        for store in [&one, &two] {
            scope.spawn(move || {
                for turn in 0..40 {
                    let text = format!("conversation {}", turn % 13);
                    put_segment(store, &text, 0, 3_000);
                    put_point(store, &text, 3_000);
                    if let Some(found) = store.lookup(&keys(&format!("{text}!")), text.len()) {
                        for name in [found.segments[0], found.point] {
                            if let Some(loaded) = store.load(name, &keys(&text)) {
                                let expected = tensors(&text, 3_000);
                                assert!(loaded.iter().all(|tensor| expected.contains(tensor)));
                            }
                        }
                    }
                }
                assert!(store.flush(SOON));
            });
        }
    });
    for store in [&one, &two] {
        let warnings = store.take_warnings();
        assert!(warnings.is_empty(), "{warnings:?}");
        assert!(store.figures().writable);
    }
    // Each decides on its own scan: together they exceed the budget by at most what the other was writing.
    assert!(bytes(&dir) <= 60_000 + 8_000, "{}", bytes(&dir));
    assert!(files(&dir)
        .iter()
        .all(|path| !path.to_string_lossy().contains(TEMPORARY)));
}

#[test]
fn a_vanished_file_is_a_miss_without_a_warning() {
    let dir = TempDir::new().unwrap();
    let store = open(&dir, 1 << 20);
    put_whole(&store, "hello", 100);
    fs::remove_file(file(&dir, point("hello"))).unwrap();
    assert_eq!(store.load(point("hello"), &keys("hello")), None);
    assert_eq!(found(&store, "hello!"), None);
    assert!(store.take_warnings().is_empty());
}

#[test]
fn a_directory_removed_while_running_is_made_again() {
    let dir = TempDir::new().unwrap();
    let store = open(&dir, 1 << 20);
    put_whole(&store, "hello", 100);
    fs::remove_dir_all(dir.path().join("prefix")).unwrap();
    assert_eq!(found(&store, "hello!"), None);
    put_whole(&store, "hello", 100);
    assert_eq!(found(&store, "hello!"), Some(5));
}

#[test]
fn a_failed_write_switches_writing_off_once_and_reading_goes_on() {
    let dir = TempDir::new().unwrap();
    let store = open(&dir, 1 << 20);
    put_whole(&store, "hello", 100);
    // A name in the way that can't be renamed over stands for a medium that refuses; root ignores permissions.
    fs::create_dir(file(&dir, point("other"))).unwrap();
    fs::write(file(&dir, point("other")).join("x"), b"x").unwrap();
    assert_eq!(put_segment(&store, "other", 0, 100), Put::Queued);
    assert_eq!(put_point(&store, "other", 100), Put::Queued);
    assert!(store.flush(SOON));
    assert!(matches!(store.take_warnings()[..], [DiskError::WritesOff(_)]));
    assert!(!store.figures().writable);
    assert_eq!(put_segment(&store, "third", 0, 100), Put::Refused);
    assert!(store.take_warnings().is_empty(), "one warning");
    assert_eq!(found(&store, "hello!"), Some(5));
    assert!(store.load(point("hello"), &keys("hello")).is_some());
    assert!(files(&dir)
        .iter()
        .all(|path| !path.to_string_lossy().contains(TEMPORARY)));
}

#[test]
fn a_cache_directory_that_cannot_be_made_is_an_error_with_its_path() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("file");
    fs::write(&path, b"").unwrap();
    let error = DiskStore::open(DiskConfig::new(path.clone(), MODEL, 1 << 20)).unwrap_err();
    assert!(error.to_string().contains(&path.display().to_string()), "{error}");
}

#[test]
fn clearing_deletes_everything_of_this_model_and_what_is_on_its_way() {
    let dir = TempDir::new().unwrap();
    let other = DiskStore::open(DiskConfig::new(dir.path().to_owned(), Fingerprint(9), 1 << 20)).unwrap();
    put_whole(&other, "other", 100);
    let store = open(&dir, 1 << 20);
    put_whole(&store, "hello", 100);
    for turn in 0..50 {
        put_segment(&store, &format!("many {turn}"), 0, 10_000);
    }
    store.clear().unwrap();
    assert!(store.flush(SOON));
    assert!(files(&dir).is_empty());
    assert_eq!((found(&store, "hello!"), store.figures().entries), (None, 0));
    assert_eq!(found(&other, "other!"), Some(5));
    put_whole(&store, "hello", 100);
    assert_eq!(found(&store, "hello!"), Some(5));
}

#[test]
fn dropping_does_not_wait_for_the_queue() {
    let dir = TempDir::new().unwrap();
    let store = open(&dir, 1 << 30);
    for turn in 0..200 {
        put_segment(&store, &format!("many {turn}"), 0, 100_000);
    }
    let begun = Instant::now();
    drop(store);
    assert!(begun.elapsed() < Duration::from_secs(5));
    assert!(files(&dir).len() <= 200);
}
