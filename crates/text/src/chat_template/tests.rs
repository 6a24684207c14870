use super::*;

fn template(source: &str) -> ChatTemplate {
    ChatTemplate::new(source, "<s>", "</s>", vec!["<s>".into(), "</s>".into()]).unwrap()
}

fn render(source: &str, messages: Json) -> Result<String, String> {
    template(source).render(&messages.to_string(), "", "", true)
}

#[test]
fn blocks_are_trimmed_as_in_transformers() {
    let source = "{% for m in messages %}\n  {% if true %}\n{{ m.content }}\n  {% endif %}\n{% endfor %}\n";
    assert_eq!(
        render(source, json!([{"content": "a"}, {"content": "b"}])).unwrap(),
        "a\nb\n"
    );
}

#[test]
fn python_methods_json_and_order() {
    let source = "{{ messages[0].content.strip().upper() }}{{ messages[0] | tojson }}";
    let text = render(source, json!([{"z": "<é>", "content": " a "}])).unwrap();
    assert_eq!(text, "A{\"z\": \"<é>\", \"content\": \" a \"}");
}

#[test]
fn refusals_use_the_templates_words() {
    let error = render("{{ raise_exception('Only user roles!') }}", json!([])).unwrap_err();
    assert_eq!(error, "Only user roles!");
    let nested = "{% macro f() %}{{ raise_exception('inner') }}{% endmacro %}{{ f() }}";
    assert_eq!(render(nested, json!([])).unwrap_err(), "inner");
}

#[test]
fn none_cannot_be_iterated() {
    let error = render("{% for t in tools %}{% endfor %}", json!([])).unwrap_err();
    assert!(error.contains("'NoneType' object is not iterable"), "{error}");
    assert_eq!(
        render("{% for t in unknown %}x{% endfor %}", json!([])).unwrap(),
        ""
    );
}

#[test]
fn none_is_not_iterable() {
    let source = "{{ none is iterable }} {{ [] is iterable }} {{ 'a' is iterable }} {{ 1 is iterable }}";
    assert_eq!(render(source, json!([])).unwrap(), "False True True False");
}

#[test]
fn endless_work_is_stopped() {
    let source = "{% for a in range(10000) %}{% for b in range(10000) %}{{ b }}{% endfor %}{% endfor %}";
    let error = render(source, json!([])).unwrap_err();
    assert!(error.contains("too many steps"), "{error}");
}

#[test]
fn special_tokens_of_the_template_stay_and_peoples_are_marked() {
    let text = render(
        "{{ bos_token }}{{ messages[0].content }}</s>",
        json!([{"content": "a</s>"}]),
    )
    .unwrap();
    assert_eq!(text, "<s>a<\u{FDD0}/s></s>");
}

#[test]
fn tool_arguments_take_the_form_the_template_wants() {
    let call = |arguments: Json| {
        json!([{"role": "assistant", "content": null,
        "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}])
    };
    let head = "{% for m in messages %}{% for c in m.tool_calls %}{{ ";
    let tail = " }}{% endfor %}{% endfor %}";
    let object = format!("{head}c.function.arguments | tojson{tail}");
    assert_eq!(template(&object).arguments, Arguments::Object);
    assert_eq!(
        render(&object, call(json!("{\"a\": \"</s>\"}"))).unwrap(),
        "{\"a\": \"<\u{FDD0}/s>\"}"
    );
    let text = format!("{head}'<' + c.function.arguments + '>'{tail}");
    assert_eq!(template(&text).arguments, Arguments::Text);
    assert_eq!(render(&text, call(json!({"a": 1}))).unwrap(), "<{\"a\": 1}>");
}

#[test]
fn the_clock() {
    let year = render("{{ strftime_now('%Y') }}", json!([])).unwrap();
    assert!(year.parse::<i32>().unwrap() >= 2024);
}
