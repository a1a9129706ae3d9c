//! Chat templates: what the publishers use, and what a broken one says.

use super::super::test_support::{fixture_dir, tiny};
use super::super::tokenizer::Bos;
use super::*;

const STRIPPED: &str = include_str!("../../tests/templates/thinking_stripped.jinja");
const KEPT: &str = include_str!("../../tests/templates/thinking_kept.jinja");
const CONVERSATIONS: &str = include_str!("../../tests/templates/conversations.json");
/// Rendered by Jinja2 itself, set up as transformers does.
const EXPECTED: &str = include_str!("../../tests/templates/expected.json");

fn template(source: &str) -> ChatTemplate {
    let template = ChatTemplate::from_source(source, &tiny());
    assert_eq!(template.error(), None);
    template
}

fn render(source: &str, messages: &Value) -> Result<String, TemplateError> {
    template(source).render(messages.as_array().unwrap(), &RenderOptions::default())
}

fn user(content: &str) -> Value {
    json!([{"role": "user", "content": content}])
}

#[test]
fn publisher_like_templates_render_as_jinja2_renders_them() {
    let expected: Value = serde_json::from_str(EXPECTED).unwrap();
    let conversations: Vec<Value> = serde_json::from_str(CONVERSATIONS).unwrap();
    for (name, source) in [("thinking_stripped", STRIPPED), ("thinking_kept", KEPT)] {
        let template = template(source);
        for conversation in &conversations {
            let options = RenderOptions {
                tools: conversation["tools"].as_array().map(Vec::as_slice),
                think: conversation["think"].as_bool(),
                add_generation_prompt: conversation["add_generation_prompt"].as_bool().unwrap_or(true),
            };
            let case = conversation["name"].as_str().unwrap();
            let rendered = template
                .render(conversation["messages"].as_array().unwrap(), &options)
                .unwrap();
            assert_eq!(rendered, expected[name][case].as_str().unwrap(), "{name} {case}");
        }
    }
}

#[test]
fn image_data_is_not_needed_and_tool_arguments_may_be_text() {
    let image = json!([{"role": "user", "content": [{"type": "image", "data": "AAAA"}, {"type": "text", "text": "?"}]}]);
    let rendered = render(STRIPPED, &image).unwrap();
    assert!(
        rendered.contains("user\n<|vision_start|><|image_pad|><|vision_end|>?<|im_end|>"),
        "{rendered}"
    );
    let call = json!([{"role": "user", "content": "x"},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": "{\"a\": 1}"}}]}]);
    assert!(render(STRIPPED, &call)
        .unwrap()
        .contains("<parameter=a>\n1\n</parameter>"));
}

#[test]
fn the_templates_own_refusals_come_with_message_and_line() {
    let refused =
        json!([{"role": "system", "content": [{"type": "image"}]}, {"role": "user", "content": "x"}]);
    let Err(TemplateError::Raised { line, message }) = render(STRIPPED, &refused) else {
        panic!("not raised")
    };
    assert_eq!(message, "A system turn holds no images.");
    assert!(line > 0);
    for messages in [
        json!([]),
        json!([{"role": "assistant", "content": "x"}]),
        json!([{"role": "poet", "content": "x"}]),
    ] {
        assert!(
            matches!(render(STRIPPED, &messages), Err(TemplateError::Raised { .. })),
            "{messages}"
        );
    }
}

#[test]
fn failing_operations_and_syntax_errors_come_with_reason_and_line() {
    let error = render("a\nb\n{{ messages[0].content.nothing.more }}", &user("x")).unwrap_err();
    assert!(matches!(&error, TemplateError::Render { line: 3, .. }), "{error}");
    let error = render("\n{{ 'a' | no_such_filter }}", &user("x")).unwrap_err();
    assert!(
        matches!(&error, TemplateError::Render { line: 2, reason } if reason.contains("no_such_filter")),
        "{error}"
    );
    let broken = ChatTemplate::from_source("a\n{% if %}", &tiny());
    assert!(
        matches!(broken.error(), Some(TemplateError::Syntax { line: 2, .. })),
        "{broken:?}"
    );
    assert_eq!(
        broken.render(&[], &RenderOptions::default()).unwrap_err(),
        *broken.error().unwrap()
    );
}

#[test]
fn a_model_without_a_template_says_so_on_every_render() {
    let dir = tempfile::tempdir().unwrap();
    super::super::test_support::write_tokenizer(dir.path(), |_| {}, None);
    let tokenizer = Tokenizer::load(dir.path()).unwrap();
    let template = ChatTemplate::load(dir.path(), &tokenizer);
    assert_eq!(
        template.render(&[], &RenderOptions::default()),
        Err(TemplateError::NoTemplate)
    );
}

#[test]
fn a_template_that_never_ends_its_recursion_is_an_error_not_a_crash() {
    let error = render("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", &user("x")).unwrap_err();
    assert!(matches!(error, TemplateError::Render { .. }), "{error}");
}

#[test]
fn deeply_nested_messages_are_rendered() {
    let deep = format!("{}{}", "[".repeat(100), "]".repeat(100));
    let messages: Value =
        serde_json::from_str(&format!("[{{\"role\": \"user\", \"content\": {deep}}}]")).unwrap();
    assert_eq!(
        render("{{ messages[0].content | tojson }}", &messages).unwrap(),
        deep
    );
}

#[test]
fn the_tool_use_variant_serves_requests_with_tools() {
    let dir = tempfile::tempdir().unwrap();
    let named = json!({"chat_template": [
        {"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools | length }} tools"}]});
    super::super::test_support::write_tokenizer(dir.path(), |_| {}, Some(named));
    let template = ChatTemplate::load(dir.path(), &Tokenizer::load(dir.path()).unwrap());
    let tools = [json!({"name": "f"})];
    let with = RenderOptions {
        tools: Some(&tools),
        ..RenderOptions::default()
    };
    assert_eq!(template.render(&[], &with).unwrap(), "1 tools");
    assert_eq!(template.render(&[], &RenderOptions::default()).unwrap(), "plain");
}

#[test]
fn tojson_takes_the_arguments_of_json_dumps() {
    let source = "{{ messages | tojson(separators=(',', ':'), sort_keys=true, ensure_ascii=true) }}";
    let messages = json!([{"role": "é", "content": "<b>"}]);
    assert_eq!(
        render(source, &messages).unwrap(),
        r#"[{"content":"<b>","role":"\u00e9"}]"#
    );
    assert!(render("{{ nothing | tojson }}", &messages).is_err());
}

#[test]
fn the_tokenizers_special_tokens_are_variables() {
    let template = ChatTemplate::from_source("{{ eos_token }}{{ bos_token is defined }}", &tiny());
    assert_eq!(
        template.render(&[], &RenderOptions::default()).unwrap(),
        "<|im_end|>False"
    );
}

#[test]
fn strftime_now_gives_the_date() {
    let year = render("{{ strftime_now('%Y') }}", &user("x")).unwrap();
    assert!(year.len() == 4 && year.starts_with("20"), "{year}");
}

#[test]
fn the_fixture_renders_prompts_that_start_thinking_unless_told_not_to() {
    let tokenizer = tiny();
    let template = ChatTemplate::load(&fixture_dir(), &tokenizer);
    let messages = [json!({"role": "user", "content": "Count from 12 to 30."})];
    let rendered = |think| {
        template
            .render(
                &messages,
                &RenderOptions {
                    think,
                    ..RenderOptions::default()
                },
            )
            .unwrap()
    };
    let header = "<|im_start|>user\nCount from 12 to 30.<|im_end|>\n<|im_start|>assistant\n";
    assert_eq!(rendered(None), format!("{header}<think>\n"));
    assert_eq!(rendered(Some(true)), rendered(None));
    assert_eq!(rendered(Some(false)), format!("{header}<think>\n\n</think>\n\n"));
    let ids = tokenizer.encode(&rendered(None), Bos::Never).unwrap();
    assert_eq!(ids[0], 4084, "no begin-of-text token before the first turn");
}

#[test]
fn only_an_open_block_in_the_last_turn_counts_as_thinking() {
    let template = ChatTemplate::load(&fixture_dir(), &tiny());
    let render = |content: &str, think| {
        let messages = [json!({"role": "user", "content": content})];
        template
            .render(
                &messages,
                &RenderOptions {
                    think,
                    ..RenderOptions::default()
                },
            )
            .unwrap()
    };
    assert!(template.think_open(&render("x", None)));
    assert!(!template.think_open(&render("x", Some(false))));
    assert!(!template.think_open("<|im_start|>user\nwhat is <think>?<|im_end|>\n<|im_start|>assistant\n"));
    assert!(template.think_open("<|im_start|>assistant\n<think>\nSo far"));
    assert!(
        template.think_open("no turns <think>")
            && !template.think_open("plain")
            && !template.think_open("<think></think>")
    );
}
