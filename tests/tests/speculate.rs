//! Drafting through the process, on the trained model: the same tokens, the same distribution, the rates of the reference,
//! and nothing kept. The ordinary tests are samples of the ignored ones, which run for minutes.
#![expect(clippy::unwrap_used, reason = "a figure that is missing fails the test")]

use std::collections::BTreeMap;

use lookahead_tests::golden::goldens;
use lookahead_tests::process::{repository, Process};
use lookahead_tests::requests::{chat, drafting, greedy, named, prompt, simple, tokens};
use serde_json::{json, Value};

/// Beginnings of code, of prose, and questions.
const CODE: [&str; 8] = [
    "def __init__(self, name, value=None):\n",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "import os\nimport sys\n\ndef main():\n    ",
    "for i in range(10):\n    if i % 2 == 0:\n        print(",
    "def add(a, b):\n    \"\"\"Return the sum.\"\"\"\n",
    "    try:\n        with open(path) as f:\n            data = f.read()\n    except",
    "@property\ndef size(self):\n    return",
    "x = [1, 2, 3]\ny = {\"a\": 1, \"b\": 2}\n",
];
const PROSE: [&str; 8] = [
    "And it came to pass in those days, that there went out a",
    "In the beginning",
    "It was a dark and stormy night; the rain fell in",
    "The history of the city begins with",
    "\"I do not know,\" said the old man, and",
    "There was once a king who had three sons.",
    "To be, or not to be",
    "She looked out of the window and saw",
];
const QUESTIONS: [&str; 8] = [
    "Count from 12 to 60.",
    "Count from 1 to 20.",
    "What is 17 plus 25?",
    "Sort these numbers: 5 3 9 1",
    "Repeat the word apple five times.",
    "Hello!",
    "List the days of the week.",
    "What is the capital of France?",
];

/// Requests for up to `n` tokens each, `each` of a kind.
fn requests(each: usize, n: usize) -> Vec<Value> {
    let raw = CODE.iter().take(each).chain(PROSE.iter().take(each));
    let raw = raw.map(|text| prompt("", text, greedy(n)));
    let chats = QUESTIONS.iter().take(each).map(|text| {
        let mut request = chat("", text, false);
        request["options"] = greedy(n)["options"].clone();
        request
    });
    raw.chain(chats).collect()
}

fn fixed(depth: usize) -> Value {
    json!({"mode": "fixed", "depth": depth})
}

fn off() -> Value {
    json!({"mode": "off"})
}

fn auto() -> Value {
    json!({"mode": "auto"})
}

fn without_cache(mut request: Value) -> Value {
    request["cache"] = json!(false);
    request
}

fn set(request: &mut Value, options: &Value) {
    for (name, value) in options.as_object().into_iter().flatten() {
        request["options"][name] = value.clone();
    }
}

fn runner() -> Process {
    let runner = Process::runner(&[]);
    runner.ready();
    runner
}

/// Differences from plain decoding over `each` prompts of a kind, `n` tokens and all depths. Where one occurs, the plain
/// log-probabilities of the two tokens there are printed if the runner tells them.
fn greedy_differences(each: usize, n: usize) -> usize {
    let mut runner = runner();
    let mut differences = 0;
    let mut compared = 0;
    for (at, request) in requests(each, n).into_iter().enumerate() {
        let plain = runner.ask(&drafting(
            named(without_cache(request.clone()), &format!("p{at}")),
            &off(),
        ));
        assert_eq!(plain.done()["draft"]["proposed"], 0);
        let plain = plain.tokens();
        assert_eq!(plain.len(), n);
        for (kind, draft) in [fixed(1), fixed(2), fixed(3), fixed(5), auto()]
            .iter()
            .enumerate()
        {
            let request = named(without_cache(request.clone()), &format!("d{at}-{kind}"));
            let drafted = runner.ask(&drafting(request, draft)).tokens();
            compared += 1;
            if let Some(first) = (0..n).find(|&i| drafted.get(i) != plain.get(i)) {
                differences += 1;
                println!(
                    "prompt {at}, {draft}: token {first} is {:?}, plainly {}",
                    drafted.get(first),
                    plain[first]
                );
            }
        }
    }
    println!("{differences} of {compared} drafted generations of {n} tokens differ from plain decoding");
    differences
}

#[test]
fn greedy_tokens_are_those_of_plain_decoding_at_any_depth() {
    assert_eq!(greedy_differences(2, 40), 0);
}

#[test]
#[ignore = "minutes: 24 prompts of 256 tokens at five depths"]
fn greedy_tokens_are_those_of_plain_decoding_on_many_prompts() {
    assert_eq!(greedy_differences(8, 256), 0);
}

/// Accepted and tested drafts by position.
type Counts = Vec<(u64, u64)>;

fn add(sum: &mut Counts, by_position: &Value) {
    for (at, position) in by_position.as_array().into_iter().flatten().enumerate() {
        if sum.len() <= at {
            sum.resize(at + 1, (0, 0));
        }
        sum[at].0 += position["accepted"].as_u64().unwrap();
        sum[at].1 += position["tested"].as_u64().unwrap();
    }
}

#[test]
fn acceptance_by_position_is_the_references() {
    let path = repository().join("fixtures/models/tiny-qwen3.5-mtp.golden.json");
    let file: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    let mut runner = runner();
    for depth in 1..=3usize {
        let (mut ours, mut theirs) = (Counts::new(), Counts::new());
        for (golden, source) in goldens().iter().zip(file["prompts"].as_array().unwrap()) {
            let Some(reference) = source["speculative"]
                .as_array()
                .and_then(|all| all.iter().find(|run| run["depth"] == depth))
            else {
                continue;
            };
            add(&mut theirs, &reference["by_position"]);
            let n = reference["tokens"].as_array().unwrap().len();
            let request = without_cache(tokens(
                &format!("{}-{depth}", golden.name),
                &golden.ids,
                greedy(n),
            ));
            let answer = runner.ask(&drafting(request, &fixed(depth)));
            add(&mut ours, &answer.done()["draft"]["by_position"]);
        }
        println!("depth {depth}: accepted and tested by position {ours:?}, in the reference {theirs:?}");
        assert_eq!((ours.len(), theirs.len()), (depth, depth));
        for (position, (ours, theirs)) in ours.iter().zip(&theirs).enumerate() {
            let rate = |counts: &(u64, u64)| counts.0 as f64 / counts.1 as f64;
            let (ours, theirs) = (rate(ours), rate(theirs));
            assert!(
                (ours - theirs).abs() < 0.03,
                "depth {depth}, position {}: {ours} and {theirs}",
                position + 1
            );
        }
    }
}

/// The options of the `n`-th sampled request.
fn sampling(n: usize) -> Value {
    let kinds = [
        json!({"temperature": 0.7, "top_k": 20, "top_p": 0.9}),
        json!({"temperature": 1.0, "top_k": 0, "top_p": 1.0}),
        json!({"temperature": 1.2, "top_k": 40, "min_p": 0.05}),
        json!({"temperature": 0.8, "repeat_penalty": 1.3, "repeat_last_n": 32}),
        json!({"temperature": 1.0, "presence_penalty": 0.7, "frequency_penalty": 0.3}),
    ];
    kinds[n % kinds.len()].clone()
}

fn coupled_requests_agree(count: usize, n: usize) {
    let mut runner = runner();
    let all = requests(8, n);
    let mut drafted = 0;
    for at in 0..count {
        let mut request = all[at % all.len()].clone();
        set(&mut request, &sampling(at));
        request["options"]["seed"] = json!(at + 1);
        let plain = drafting(named(without_cache(request.clone()), &format!("p{at}")), &off());
        let plain = runner.ask(&plain).tokens();
        assert_eq!(plain.len(), n);
        for (kind, draft) in [fixed(1), fixed(3), auto(), off()].iter().enumerate() {
            for cached in [false, true] {
                let request = named(request.clone(), &format!("d{at}-{kind}-{cached}"));
                let request = if cached { request } else { without_cache(request) };
                let answer = runner.ask(&drafting(request, draft));
                assert_eq!(
                    answer.tokens(),
                    plain,
                    "request {at} with {draft}, cached: {cached}"
                );
                drafted += answer.done()["draft"]["accepted"].as_u64().unwrap();
            }
        }
    }
    assert!(drafted > 0);
}

#[test]
fn seeded_tokens_depend_neither_on_the_depth_nor_on_the_cache() {
    coupled_requests_agree(5, 24);
}

#[test]
#[ignore = "minutes: 50 requests of 96 tokens, eight ways each"]
fn seeded_tokens_depend_neither_on_the_depth_nor_on_the_cache_many_times() {
    coupled_requests_agree(50, 96);
}

/// How often each continuation of three tokens came, of `count` requests.
fn continuations(
    runner: &mut Process,
    request: &Value,
    (first, count): (usize, usize),
) -> BTreeMap<Vec<u64>, f64> {
    let mut seen = BTreeMap::new();
    for seed in first..first + count {
        let mut request = named(request.clone(), &format!("s{seed}"));
        request["options"]["seed"] = json!(seed);
        *seen.entry(runner.ask(&request).tokens()).or_default() += 1.0;
    }
    seen
}

/// Chi-square of two samples of the same size with its degrees of freedom; continuations seen fewer than ten times in
/// both together are taken as one.
fn chi_square(a: &BTreeMap<Vec<u64>, f64>, b: &BTreeMap<Vec<u64>, f64>) -> (f64, f64) {
    let mut cells: Vec<(f64, f64)> = Vec::new();
    let mut rest = (0.0, 0.0);
    let keys: std::collections::BTreeSet<_> = a.keys().chain(b.keys()).collect();
    for key in keys {
        let cell = (
            a.get(key).copied().unwrap_or(0.0),
            b.get(key).copied().unwrap_or(0.0),
        );
        if cell.0 + cell.1 < 10.0 {
            rest = (rest.0 + cell.0, rest.1 + cell.1);
        } else {
            cells.push(cell);
        }
    }
    if rest.0 + rest.1 > 0.0 {
        cells.push(rest);
    }
    let sum = cells.iter().map(|(a, b)| (a - b).powi(2) / (a + b)).sum();
    (sum, cells.len() as f64 - 1.0)
}

fn rejection_keeps_the_distribution(options: &[Value], count: usize) {
    let mut runner = runner();
    for (kind, options) in options.iter().enumerate() {
        let text = if kind % 2 == 0 { PROSE[0] } else { CODE[0] };
        let mut request = prompt(
            "",
            text,
            json!({"options": {"num_predict": 3, "ignore_eos": true}}),
        );
        set(&mut request, options);
        let drafted = drafting(
            request.clone(),
            &json!({"mode": "fixed", "depth": 3, "verify": "rejection"}),
        );
        let plain = continuations(&mut runner, &drafting(request, &off()), (1, count));
        let drafted = continuations(&mut runner, &drafted, (1_000_001, count));
        let (sum, freedom) = chi_square(&plain, &drafted);
        // The square root of twice a chi-square is nearly normal, with variance 1.
        let deviation = (2.0 * sum).sqrt() - (2.0 * freedom - 1.0).max(0.0).sqrt();
        println!("{options}: chi-square {sum:.1} of {freedom} degrees, {deviation:+.2} deviations");
        assert!(freedom >= 3.0, "{options} leaves nothing to compare");
        assert!(
            deviation < 3.5,
            "{options}: chi-square {sum} of {freedom} degrees"
        );
    }
}

#[test]
fn rejection_draws_from_the_distribution_of_plain_sampling() {
    rejection_keeps_the_distribution(&[json!({"temperature": 1.0, "top_k": 4})], 150);
}

#[test]
#[ignore = "minutes: thousands of requests"]
fn rejection_draws_from_the_distribution_of_plain_sampling_whatever_the_options() {
    let options = [
        json!({"temperature": 0.5, "top_k": 4}),
        json!({"temperature": 0.5, "top_k": 4}),
        json!({"temperature": 1.0, "top_k": 4}),
        json!({"temperature": 1.0, "top_k": 4}),
        json!({"temperature": 1.0, "top_k": 5, "repeat_penalty": 1.5, "presence_penalty": 0.8}),
        json!({"temperature": 1.0, "top_k": 5, "repeat_penalty": 1.5, "presence_penalty": 0.8}),
        json!({"temperature": 1.0, "top_k": 0, "top_p": 0.6}),
        json!({"temperature": 1.0, "top_k": 0, "top_p": 0.6}),
    ];
    rejection_keeps_the_distribution(&options, 1500);
}

#[test]
fn no_option_switches_drafting_off() {
    let mut runner = runner();
    let ways = [
        json!({"options": {"temperature": 0, "repeat_penalty": 1.2, "presence_penalty": 0.5}}),
        json!({"options": {"temperature": 0, "stop": ["nothing that it will ever say"]}}),
        json!({"options": {"temperature": 0.9, "frequency_penalty": 0.5, "seed": 3}}),
        json!({"options": {"temperature": 0.9, "min_p": 0.1}}),
        json!({"options": {"temperature": 0}, "format": "json"}),
        json!({"options": {"temperature": 0}, "logprobs": true, "top_logprobs": 3}),
    ];
    for (at, way) in ways.iter().enumerate() {
        for verify in ["rejection", "coupled"] {
            let mut request = prompt(&format!("w{at}-{verify}"), CODE[0], way.clone());
            request["options"]["num_predict"] = json!(24);
            let draft = json!({"mode": "fixed", "depth": 3, "verify": verify});
            let answer = runner.ask(&drafting(request, &draft));
            let told = &answer.done()["draft"];
            assert!(told["proposed"].as_u64().unwrap() > 0, "{way}: {told}");
            assert!(told["tested"].as_u64().unwrap() > 0, "{way}: {told}");
        }
    }
}

fn active(runner: &mut Process, id: &str) -> u64 {
    let status = runner.ask(&simple("status", id));
    status.last()["memory"]["active"].as_u64().unwrap()
}

/// Active bytes after each of `count` requests of `n` tokens, beyond those after the first few.
fn growth(count: usize, n: usize) -> i64 {
    let mut runner = runner();
    let all = requests(2, n);
    let mut settled = 0;
    let mut last = 0;
    for at in 0..count {
        let mut request = named(without_cache(all[at % all.len()].clone()), &format!("m{at}"));
        if at % 3 == 0 {
            set(&mut request, &sampling(at));
        }
        let draft = [fixed(3), auto(), fixed(7)][at % 3].clone();
        runner.ask(&drafting(request, &draft)).done();
        last = active(&mut runner, &format!("a{at}"));
        if at < 6 {
            settled = last.max(settled);
        }
    }
    println!("active memory after {count} requests: {last} bytes, after the first six at most {settled}");
    last as i64 - settled as i64
}

#[test]
fn requests_leave_no_memory_behind() {
    assert!(growth(18, 24) < 64 << 10);
}

#[test]
#[ignore = "a minute: 200 requests"]
fn many_requests_leave_no_memory_behind() {
    assert!(growth(200, 64) < 64 << 10);
}

/// Peak bytes after a request of `n` tokens drafted two deep in a fresh process, and its rounds.
fn peak(n: usize) -> (u64, u64) {
    let mut runner = runner();
    let request = without_cache(prompt("r", PROSE[1], greedy(n)));
    let answer = runner.ask(&drafting(request, &fixed(2)));
    let rounds = answer.done()["draft"]["rounds"].as_u64().unwrap();
    let status = runner.ask(&simple("status", "s"));
    (status.last()["memory"]["peak"].as_u64().unwrap(), rounds)
}

#[test]
#[ignore = "a minute: 500 rounds in one request"]
fn rounds_leave_no_memory_behind() {
    let (short, few) = peak(100);
    let (long, many) = peak(1400);
    println!("peak of {few} rounds: {short} bytes; of {many} rounds: {long} bytes");
    assert!(many >= few + 450);
    // The keys and values of 1,300 tokens, and not a recurrent state a round.
    assert!(long - short.min(long) < 24 << 20, "{short} grew to {long}");
}
