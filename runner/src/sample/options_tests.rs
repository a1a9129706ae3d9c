//! Options from a request and from generation_config.json: defaults, and every limit by the name of its field.

use super::*;
use serde_json::json;

fn options(change: impl FnOnce(&mut Options)) -> Options {
    let mut options = Options::default();
    change(&mut options);
    options
}

fn resolve(change: impl FnOnce(&mut Options)) -> Result<SamplingOptions, OptionError> {
    SamplingOptions::resolve(&options(change), &GenerationDefaults::default())
}

fn defaults(config: &Value) -> GenerationDefaults {
    let (defaults, warnings) = GenerationDefaults::from_json(config);
    assert!(warnings.is_empty(), "{warnings:?}");
    defaults
}

#[test]
fn an_empty_request_gets_the_protocols_table() {
    let got = resolve(|_| {}).unwrap();
    assert_eq!(
        got,
        SamplingOptions {
            num_predict: None,
            num_ctx: None,
            shape: Shape::Filtered(Filter {
                top_k: 40,
                temperature: 0.8,
                top_p: 0.9,
                min_p: 0.0
            }),
            penalties: None,
            seed: None,
            stop: Vec::new(),
            ignore_eos: false,
        }
    );
}

#[test]
fn the_checkpoint_fills_what_the_request_leaves_open_and_never_more() {
    let checkpoint = defaults(
        &json!({"do_sample": true, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.1}),
    );
    let got = SamplingOptions::resolve(&options(|o| o.top_k = Some(5)), &checkpoint).unwrap();
    assert_eq!(
        got.shape,
        Shape::Filtered(Filter {
            top_k: 5,
            temperature: 0.6,
            top_p: 0.95,
            min_p: 0.0
        })
    );
    assert_eq!(
        got.penalties.map(|p| (p.repeat, p.window)),
        Some((1.1, Window::Last(64)))
    );
}

#[test]
fn do_sample_false_is_greedy_until_the_request_gives_a_temperature() {
    let checkpoint = defaults(&json!({"do_sample": false, "temperature": 0.6}));
    let silent = SamplingOptions::resolve(&Options::default(), &checkpoint).unwrap();
    assert_eq!(silent.shape, Shape::Greedy);
    let warm = SamplingOptions::resolve(&options(|o| o.temperature = Some(0.7)), &checkpoint).unwrap();
    assert!(matches!(warm.shape, Shape::Filtered(f) if f.temperature == 0.7));
}

#[test]
fn a_checkpoints_nonsense_is_reported_and_passed_over() {
    let config = json!({"temperature": "hot", "top_k": -3, "top_p": 7, "min_p": null, "do_sample": "yes", "repetition_penalty": 0});
    let (defaults, warnings) = GenerationDefaults::from_json(&config);
    assert_eq!(defaults, GenerationDefaults::default());
    insta::assert_snapshot!(warnings.join("\n"));
    assert_eq!(GenerationDefaults::from_json(&json!([1])).1.len(), 1);
}

#[test]
fn zero_temperature_and_top_k_one_are_greedy() {
    for change in [
        |o: &mut Options| o.temperature = Some(0.0),
        |o: &mut Options| o.top_k = Some(1),
        |o: &mut Options| {
            o.temperature = Some(1e-9);
        },
    ] {
        assert_eq!(resolve(change).unwrap().shape, Shape::Greedy);
    }
}

#[test]
fn penalties_that_do_nothing_cost_nothing() {
    assert_eq!(resolve(|o| o.repeat_penalty = Some(1.0)).unwrap().penalties, None);
    let off = resolve(|o| {
        o.repeat_penalty = Some(1.5);
        o.repeat_last_n = Some(0);
    });
    assert_eq!(off.unwrap().penalties, None);
    let all = resolve(|o| {
        o.frequency_penalty = Some(0.5);
        o.repeat_last_n = Some(-1);
    });
    assert_eq!(all.unwrap().penalties.unwrap().window, Window::All);
}

#[test]
fn num_predict_tells_no_limit_from_none() {
    assert_eq!(resolve(|o| o.num_predict = Some(-1)).unwrap().num_predict, None);
    assert_eq!(resolve(|o| o.num_predict = Some(0)).unwrap().num_predict, Some(0));
}

#[test]
fn every_limit_is_checked_by_its_fields_name() {
    type Change = fn(&mut Options);
    let cases: [(&str, Change); 20] = [
        ("temperature", |o| o.temperature = Some(-0.1)),
        ("temperature", |o| o.temperature = Some(f32::NAN)),
        ("temperature", |o| o.temperature = Some(f32::INFINITY)),
        ("top_p", |o| o.top_p = Some(0.0)),
        ("top_p", |o| o.top_p = Some(1.01)),
        ("top_p", |o| o.top_p = Some(f32::NAN)),
        ("min_p", |o| o.min_p = Some(-0.1)),
        ("min_p", |o| o.min_p = Some(1.1)),
        ("min_p", |o| o.min_p = Some(f32::NAN)),
        ("repeat_penalty", |o| o.repeat_penalty = Some(0.0)),
        ("repeat_penalty", |o| o.repeat_penalty = Some(-1.0)),
        ("repeat_penalty", |o| o.repeat_penalty = Some(f32::INFINITY)),
        ("repeat_last_n", |o| o.repeat_last_n = Some(-2)),
        ("presence_penalty", |o| o.presence_penalty = Some(f32::NAN)),
        ("frequency_penalty", |o| {
            o.frequency_penalty = Some(f32::NEG_INFINITY)
        }),
        ("num_predict", |o| o.num_predict = Some(-2)),
        ("num_ctx", |o| o.num_ctx = Some(0)),
        ("stop", |o| o.stop = vec!["x".to_owned(); 17]),
        ("stop", |o| o.stop = vec![String::new()]),
        ("stop", |o| o.stop = vec!["a".to_owned(), String::new()]),
    ];
    let mut lines = Vec::new();
    for (field, change) in cases {
        let error = resolve(change).expect_err(field);
        assert_eq!(error.field, field);
        lines.push(error.to_string());
    }
    insta::assert_snapshot!(lines.join("\n"));
}

#[test]
fn sixteen_stops_are_taken() {
    assert_eq!(
        resolve(|o| o.stop = vec!["x".to_owned(); 16]).unwrap().stop.len(),
        16
    );
}
