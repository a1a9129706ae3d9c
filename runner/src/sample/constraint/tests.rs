//! Constraints on a small tokenizer: what is let through, where an output may end, and how wrong formats are refused.

use std::time::{Duration, Instant};

use serde_json::{json, Value};

use super::*;
use crate::text::test_support::tiny;
use crate::text::{Bos, Specials};

/// Wider than the tokenizer's 4096 ids, and no multiple of 32.
const WIDTH: usize = 4100;
const IM_END: u32 = 4085;
const END_OF_TEXT: u32 = 4083;

pub(super) fn factory() -> &'static ConstraintFactory {
    static FACTORY: std::sync::OnceLock<ConstraintFactory> = std::sync::OnceLock::new();
    FACTORY.get_or_init(|| ConstraintFactory::new(tiny(), [IM_END, END_OF_TEXT].into_iter().collect(), WIDTH))
}

pub(super) fn constraint(format: &Format) -> Constraint {
    Constraint::new(factory(), format, Start::AtOnce).unwrap()
}

fn ids(text: &str) -> Vec<u32> {
    tiny().encode(text, Bos::Never).unwrap()
}

pub(super) fn allows(mask: &[u32], id: u32) -> bool {
    mask[id as usize / 32] >> (id % 32) & 1 == 1
}

/// Commits the text; panics where it isn't allowed, mask and commit having to agree.
fn write(constraint: &mut Constraint, text: &str) {
    for id in ids(text) {
        assert!(
            allows(constraint.mask().unwrap(), id),
            "{:?} in {text:?}",
            tiny().decode(&[id], Specials::Shown)
        );
        constraint.commit(id).unwrap();
    }
}

fn schema(schema: Value) -> Format {
    Format::Schema(schema)
}

fn lark(grammar: &str) -> Format {
    Format::Lark(grammar.to_owned())
}

#[test]
fn constraints_can_be_sent_and_factories_shared() {
    fn sendable<T: Send>() {}
    fn shareable<T: Send + Sync>() {}
    sendable::<Constraint>();
    shareable::<ConstraintFactory>();
}

#[test]
fn an_end_token_goes_only_where_the_grammar_allows_it() {
    let mut constraint = constraint(&Format::Regex("ab?".to_owned()));
    let mask = constraint.mask().unwrap();
    assert!(!allows(mask, IM_END) && !allows(mask, END_OF_TEXT));
    assert!(!constraint.may_end().unwrap());
    write(&mut constraint, "a");
    let mask = constraint.mask().unwrap();
    assert!(allows(mask, IM_END) && allows(mask, END_OF_TEXT) && allows(mask, ids("b")[0]));
    assert!(constraint.may_end().unwrap() && !constraint.is_complete());
    assert!(constraint.commit(ids("c")[0]).is_err());
    let mut constraint = super::tests::constraint(&Format::Regex("ab?".to_owned()));
    write(&mut constraint, "a");
    constraint.commit(IM_END).unwrap();
    assert!(constraint.is_complete());
    assert_eq!(
        constraint.commit(ids("b")[0]),
        Err(ConstraintError::Illegal { id: ids("b")[0] })
    );
}

#[test]
fn a_finished_document_is_complete_and_lets_end_tokens_through_only() {
    let mut constraint = constraint(&Format::Json);
    write(&mut constraint, "{\"a\": [1, {\"b\": null}]}");
    assert!(constraint.is_complete() && constraint.may_end().unwrap());
    let mask = constraint.mask().unwrap().to_vec();
    let allowed: Vec<u32> = (0..4096).filter(|id| allows(&mask, *id)).collect();
    assert_eq!(allowed, [END_OF_TEXT, IM_END]);
    constraint.commit(END_OF_TEXT).unwrap();
    assert_eq!(constraint.mask().unwrap(), mask);
}

#[test]
fn the_json_format_is_an_object_compact_or_indented() {
    for text in [
        "{}",
        "{\"a\":1}",
        "{\n  \"a\": [\n    true\n  ],\n  \"b\": \"é\\n\"\n}",
    ] {
        let mut constraint = constraint(&Format::Json);
        write(&mut constraint, text);
        assert!(constraint.may_end().unwrap(), "{text}");
    }
    for text in ["[1]", "1", " {}", "x"] {
        let mut constraint = constraint(&Format::Json);
        assert_eq!(constraint.accepts_prefix(&ids(text)).unwrap(), 0, "{text}");
    }
}

#[test]
fn ids_beyond_the_tokenizer_and_special_tokens_are_masked_also_in_free_text() {
    let mut constraint = constraint(&Format::Regex("(?s:.*)".to_owned()));
    let mask = constraint.mask().unwrap().to_vec();
    assert_eq!(mask.len(), WIDTH.div_ceil(32));
    assert!((4096..u32::try_from(mask.len() * 32).unwrap()).all(|id| !allows(&mask, id)));
    assert!(!allows(&mask, 4084) && !allows(&mask, 4088), "special tokens");
    assert!(
        allows(&mask, 4090) && allows(&mask, ids("a")[0]),
        "visible tokens"
    );
    assert!(matches!(
        constraint.commit(4097),
        Err(ConstraintError::Illegal { id: 4097 })
    ));
    assert!(matches!(
        constraint.commit(u32::MAX),
        Err(ConstraintError::Illegal { .. })
    ));
    let waiting = Constraint::new(factory(), &Format::Json, Start::After("</think>".to_owned()));
    let mask = waiting.unwrap().mask().unwrap().to_vec();
    assert_eq!(mask.len(), WIDTH.div_ceil(32));
    assert!((4096..u32::try_from(mask.len() * 32).unwrap()).all(|id| !allows(&mask, id)));
}

#[test]
fn after_thinking_the_constraint_begins_behind_the_closing_tag() {
    let mut constraint =
        Constraint::new(factory(), &Format::Json, Start::After("</think>".to_owned())).unwrap();
    write(&mut constraint, "Let me {think} <");
    let mask = constraint.mask().unwrap();
    assert!(
        !allows(mask, IM_END),
        "an end token in the block would leave no result"
    );
    assert!(!constraint.has_begun() && !constraint.may_end().unwrap() && !constraint.is_complete());
    let close = tiny().token_id("</think>").unwrap();
    let brace = ids("{")[0];
    constraint.commit(close).unwrap();
    assert!(constraint.has_begun());
    let mask = constraint.mask().unwrap();
    assert!(
        allows(mask, brace)
            && allows(mask, ids("\n\n")[0])
            && !allows(mask, ids("a")[0])
            && !allows(mask, IM_END)
    );
    write(&mut constraint, "\n\n");
    assert_eq!(
        constraint.accepts_prefix(&ids("\n")).unwrap(),
        0,
        "no blank lines without end"
    );
    write(&mut constraint, "{}");
    assert!(constraint.is_complete());
}

#[test]
fn a_closing_tag_in_pieces_counts_and_other_formats_begin_right_behind_it() {
    let regex = Format::Regex("[0-9]+".to_owned());
    let mut constraint = Constraint::new(factory(), &regex, Start::After("</think>".to_owned())).unwrap();
    for piece in ["x", "<", "/", "t", "h", "i", "n", "k", ">"] {
        assert!(!constraint.has_begun());
        constraint.commit(ids(piece)[0]).unwrap();
    }
    assert!(constraint.has_begun());
    assert_eq!(constraint.accepts_prefix(&ids("\n")).unwrap(), 0);
    write(&mut constraint, "17");
    assert!(constraint.may_end().unwrap());
}

#[test]
fn looking_ahead_along_drafts_leaves_the_constraint_where_it_was() {
    let mut constraint =
        Constraint::new(factory(), &Format::Json, Start::After("</think>".to_owned())).unwrap();
    let mut drafts = ids("so.</think>\n\n{\"a\": 1}");
    drafts.push(IM_END);
    let rows = constraint.masks_along(&drafts).unwrap();
    assert_eq!(rows.legal, drafts.len());
    assert_eq!(rows.words.len(), rows.words_per_row * (drafts.len() + 1));
    for (index, draft) in drafts.iter().enumerate() {
        assert_eq!(
            constraint.accepts_prefix(&drafts[index..]).unwrap(),
            drafts.len() - index
        );
        assert_eq!(constraint.mask().unwrap(), rows.row(index), "row {index}");
        constraint.commit(*draft).unwrap();
    }
    assert_eq!(constraint.mask().unwrap(), rows.row(drafts.len()));
}

#[test]
fn an_illegal_draft_ends_the_legal_run() {
    let mut constraint = constraint(&schema(json!({"enum": ["left", "right"]})));
    let drafts = ids("\"lexx");
    let legal = constraint.accepts_prefix(&drafts).unwrap();
    assert!(legal < drafts.len());
    let rows = constraint.masks_along(&drafts).unwrap();
    assert_eq!(rows.legal, legal);
    assert!(
        (0..=drafts.len()).all(|index| rows.row(index).iter().any(|word| *word != 0)),
        "no row is empty"
    );
    assert_eq!(
        constraint
            .accepts_prefix(&[ids("\"")[0], 4097, u32::MAX])
            .unwrap(),
        1
    );
    write(&mut constraint, "\"right\"");
    assert!(constraint.is_complete());
    assert_eq!(
        constraint.accepts_prefix(&[IM_END, IM_END]).unwrap(),
        1,
        "nothing follows an end token"
    );
}

#[test]
fn a_grammar_can_be_written_in_lark_and_name_special_tokens() {
    let mut constraint = constraint(&lark("start: \"<tool_call>\" /[a-z]+/ <|vision_start|> \"!\""));
    let call = tiny().token_id("<tool_call>").unwrap();
    assert!(
        allows(constraint.mask().unwrap(), call),
        "an added token is spelt by its text"
    );
    constraint.commit(call).unwrap();
    write(&mut constraint, "get");
    assert!(allows(constraint.mask().unwrap(), 4086));
    constraint.commit(4086).unwrap();
    write(&mut constraint, "!");
    assert!(constraint.is_complete());
}

#[test]
fn wrong_formats_are_refused_with_the_reason() {
    let cases = [
        (schema(json!({"type": "strng"})), "strng"),
        (schema(json!({"type": "object", "properties": 3})), "properties"),
        (
            schema(json!({"type": "array", "uniqueItems": true})),
            "uniqueItems",
        ),
        (schema(json!({"$ref": "#/$defs/missing"})), "missing"),
        (
            schema(json!({"$ref": "https://example.com/a.json"})),
            "example.com",
        ),
        (
            schema(json!({"type": "integer", "minimum": 3, "maximum": 1})),
            "minimum",
        ),
        (schema(json!({"type": "string", "pattern": "("})), "("),
        (schema(json!({"x-guidance": {"nonsense": 1}})), "nonsense"),
        (schema(json!(false)), ""),
        (Format::Regex("a(".to_owned()), ""),
        (Format::Regex("(?=a)b".to_owned()), ""),
        (lark("begin: \"a\""), "start"),
        (lark("start: nope"), "nope"),
        (lark("start: <no_such_token>"), "no_such_token"),
        (lark("start: \"a"), ""),
        (lark("  "), "empty"),
    ];
    for (format, word) in cases {
        let error = Constraint::new(factory(), &format, Start::AtOnce).unwrap_err();
        let text = error.to_string();
        assert!(error.is_bad_format(), "{format:?}: {text}");
        assert!(
            text.contains(word) && !text.contains('\n') && text.len() > 12,
            "{format:?}: {text}"
        );
    }
}

/// Formats that explode when expanded, are very large, or very deep.
fn exploding() -> Vec<(&'static str, Format)> {
    let choice = |name: &str| json!({"anyOf": (0..8).map(|n| json!({"properties": {format!("{name}{n}"): {"type": "string"}}})).collect::<Vec<_>>()});
    let nested = |depth: usize| {
        let mut inner = json!({"type": "integer"});
        for _ in 0..depth {
            inner = json!({"type": "object", "properties": {"a": inner}, "required": ["a"]});
        }
        inner
    };
    let lists = |count: usize| -> serde_json::Map<String, Value> {
        let list = |n: usize| json!({"items": {"$ref": format!("#/$defs/{}", n + 1)}, "type": "array"});
        let chain = (0..count).map(|n| (n.to_string(), list(n)));
        chain
            .chain([(count.to_string(), json!({"type": "null"}))])
            .collect()
    };
    let links = |count: usize| -> serde_json::Map<String, Value> {
        let chain = (0..count).map(|n| (n.to_string(), json!({"$ref": format!("#/$defs/{}", n + 1)})));
        chain
            .chain([(count.to_string(), json!({"type": "null"}))])
            .collect()
    };
    vec![
        (
            "product of choices",
            schema(json!({"allOf": (0..10).map(|n| choice(&format!("k{n}"))).collect::<Vec<_>>()})),
        ),
        (
            "long array",
            schema(
                json!({"type": "array", "items": {"type": "integer"}, "minItems": 1_000_000, "maxItems": 1_000_000}),
            ),
        ),
        (
            "long string",
            schema(json!({"type": "string", "minLength": 10_000_000, "maxLength": 20_000_000})),
        ),
        (
            "counted regex",
            Format::Regex("((a{1000}){1000}){1000}".to_owned()),
        ),
        (
            "counted pattern",
            schema(json!({"type": "string", "pattern": "^(([a-z]{1,999}b){1,999}c){1,999}$"})),
        ),
        (
            "backward-looking regex",
            Format::Regex("(?s:.*)a(?s:.{200})b(?s:.*)a(?s:.{300})".to_owned()),
        ),
        ("deep schema", schema(nested(120))),
        (
            "chain of definitions",
            schema(json!({"$ref": "#/$defs/0", "$defs": lists(12_000)})),
        ),
        (
            "chain of references",
            schema(json!({"$ref": "#/$defs/0", "$defs": links(30_000)})),
        ),
        (
            "deep regex",
            Format::Regex(format!("{}a{}", "(".repeat(50_000), ")".repeat(50_000))),
        ),
        (
            "deep alternation",
            Format::Regex(format!("{}a{}", "(b|".repeat(90), ")".repeat(90))),
        ),
        (
            "deep grammar",
            lark(&format!(
                "start: {}\"a\"{}",
                "(".repeat(50_000),
                ")".repeat(50_000)
            )),
        ),
        (
            "long grammar",
            lark(&format!("start: {}\"a\"", "\"ab\" | ".repeat(100_000))),
        ),
        (
            "chain of rules",
            lark(&format!(
                "start: r0\n{}r20000: \"a\"\n",
                (0..20_000)
                    .map(|n| format!("r{n}: r{}\n", n + 1))
                    .collect::<String>()
            )),
        ),
        (
            "chain of terminals",
            lark(&format!(
                "start: T0\n{}T20000: \"a\"\n",
                (0..20_000)
                    .map(|n| format!("T{n}: \"b\" T{}\n", n + 1))
                    .collect::<String>()
            )),
        ),
        (
            "doubling rules",
            lark(&format!(
                "start: r0\n{}r40: \"a\"\n",
                (0..40)
                    .map(|n| format!("r{n}: r{} r{}\n", n + 1, n + 1))
                    .collect::<String>()
            )),
        ),
        (
            "doubling terminals",
            lark(&format!(
                "start: T0\n{}T40: \"a\"\n",
                (0..40)
                    .map(|n| format!("T{n}: T{} T{}\n", n + 1, n + 1))
                    .collect::<String>()
            )),
        ),
        ("endless rule", lark("start: start start | start")),
        (
            "loop of references",
            schema(
                json!({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}),
            ),
        ),
        ("itself", schema(json!({"$ref": "#"}))),
        ("megabytes", lark(&"// x\n".repeat(1_000_000))),
        (
            "huge enum",
            schema(json!({"enum": (0..50_000).map(|n| format!("value number {n}")).collect::<Vec<_>>()})),
        ),
        (
            "many properties",
            schema(
                json!({"type": "object", "properties": (0..5_000).map(|n| (format!("p{n}"), json!({"type": "string"}))).collect::<serde_json::Map<_, _>>()}),
            ),
        ),
    ]
}

#[test]
fn exploding_formats_compile_or_are_refused_in_bounded_time() {
    for (name, format) in exploding() {
        let start = Instant::now();
        let built = Constraint::new(factory(), &format, Start::AtOnce).and_then(|mut built| {
            built.mask()?;
            built.masks_along(&ids("{\"a\": [[[aaa")).map(|rows| rows.legal)
        });
        let took = start.elapsed();
        eprintln!("{name}: {took:?} {built:?}");
        if let Err(error) = &built {
            assert!(error.is_bad_format(), "{name}: {error}");
            assert!(error.to_string().len() < 2000, "{name}: {error}");
        }
        assert!(took < Duration::from_secs(10), "{name} took {took:?}");
    }
}
