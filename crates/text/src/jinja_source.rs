//! Rewrites of a template's source that minijinja needs to behave as transformers' Jinja does.

/// Makes `{% generation %}` (a marker for training) an empty block and lets `for` refuse None, as Python does.
pub fn prepare(source: &str) -> String {
    let mut out = String::with_capacity(source.len() + 64);
    let mut rest = source;
    while let Some(at) = rest.find('{') {
        out.push_str(&rest[..at]);
        rest = &rest[at..];
        let length = match rest.as_bytes().get(1) {
            Some(b'#') => rest.find("#}").map(|end| end + 2),
            Some(b'{') => tag_end(rest, "}}"),
            Some(b'%') => tag_end(rest, "%}"),
            _ => Some(1),
        };
        let Some(length) = length else { break };
        let tag = &rest[..length];
        rest = &rest[length..];
        if !tag.starts_with("{%") {
            out.push_str(tag);
            continue;
        }
        out.push_str(&rewrite_tag(tag));
        if tag_words(tag).starts_with("raw") {
            let end = raw_end(rest).unwrap_or(rest.len());
            out.push_str(&rest[..end]);
            rest = &rest[end..];
        }
    }
    out.push_str(rest);
    out
}

/// Where the tag at the start of `text` ends; strings inside it may hold the closing mark.
fn tag_end(text: &str, close: &str) -> Option<usize> {
    let bytes = text.as_bytes();
    let mut quote = None;
    let mut i = 2;
    while i < bytes.len() {
        match (quote, bytes[i]) {
            (Some(_), b'\\') => i += 1,
            (Some(q), b) if b == q => quote = None,
            (None, b'\'' | b'"') => quote = Some(bytes[i]),
            (None, _) if bytes[i..].starts_with(close.as_bytes()) => return Some(i + close.len()),
            _ => {}
        }
        i += 1;
    }
    None
}

/// The position of the `endraw` tag, if any.
fn raw_end(text: &str) -> Option<usize> {
    text.match_indices("{%")
        .map(|(at, _)| at)
        .find(|&at| tag_words(&text[at..]).starts_with("endraw"))
}

/// A tag's words without braces and whitespace control.
fn tag_words(tag: &str) -> &str {
    tag[2..]
        .trim_start_matches(['-', '+'])
        .trim_start()
        .trim_end_matches("%}")
        .trim_end_matches(['-', '+'])
        .trim_end()
}

fn rewrite_tag(tag: &str) -> String {
    let words = tag_words(tag);
    match words {
        "generation" => return tag.replacen("generation", "if true", 1),
        "endgeneration" => return tag.replacen("endgeneration", "endif", 1),
        _ => {}
    }
    let Some(after_for) = words
        .strip_prefix("for")
        .filter(|w| w.starts_with(char::is_whitespace))
    else {
        return tag.to_owned();
    };
    let Some(target_end) = word_at_top(after_for, &["in"]) else {
        return tag.to_owned();
    };
    let expression_start = target_end + "in".len();
    let expression = &after_for[expression_start..];
    let expression_end = word_at_top(expression, &["if", "recursive"]).unwrap_or(expression.len());
    let (expression, tail) = expression.split_at(expression_end);
    let start = tag.len() - tag[2..].trim_start_matches(['-', '+']).trim_start().len();
    let end = start + words.len();
    format!(
        "{}for{}({})|__iterable {}{}",
        &tag[..start],
        &after_for[..expression_start].to_owned().add_space(),
        expression.trim(),
        tail,
        &tag[end..]
    )
}

trait AddSpace {
    fn add_space(self) -> String;
}

impl AddSpace for String {
    fn add_space(mut self) -> String {
        self.push(' ');
        self
    }
}

/// The position of the first of `words` that stands outside strings and brackets.
fn word_at_top(text: &str, words: &[&str]) -> Option<usize> {
    let bytes = text.as_bytes();
    let is_word = |b: u8| b.is_ascii_alphanumeric() || b == b'_' || b >= 0x80;
    let (mut quote, mut depth, mut i) = (None, 0i32, 0);
    while i < bytes.len() {
        match (quote, bytes[i]) {
            (Some(_), b'\\') => i += 1,
            (Some(q), b) if b == q => quote = None,
            (Some(_), _) => {}
            (None, b'\'' | b'"') => quote = Some(bytes[i]),
            (None, b'(' | b'[' | b'{') => depth += 1,
            (None, b')' | b']' | b'}') => depth -= 1,
            (None, b) if is_word(b) => {
                let end = bytes[i..]
                    .iter()
                    .position(|&b| !is_word(b))
                    .map_or(bytes.len(), |n| i + n);
                if depth == 0 && words.iter().any(|w| w.as_bytes() == &bytes[i..end]) {
                    return Some(i);
                }
                i = end;
                continue;
            }
            _ => {}
        }
        i += 1;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loops_check_what_they_iterate() {
        assert_eq!(
            prepare("{%- for m in messages -%}x"),
            "{%- for m in (messages)|__iterable  -%}x"
        );
        assert_eq!(
            prepare("{% for k, v in d|items if v in [1] %}"),
            "{% for k, v in (d|items)|__iterable if v in [1] %}"
        );
        assert_eq!(
            prepare("{% for x in (a if b else c) %}"),
            "{% for x in ((a if b else c))|__iterable  %}"
        );
        assert_eq!(
            prepare("{% for x in f('%} if ') %}"),
            "{% for x in (f('%} if '))|__iterable  %}"
        );
        assert_eq!(
            prepare("{% set x = 'for a in b' %}{{ '{% for a in b %}' }}"),
            "{% set x = 'for a in b' %}{{ '{% for a in b %}' }}"
        );
        assert_eq!(prepare("{# {% for a in b %} #}{ x"), "{# {% for a in b %} #}{ x");
        assert_eq!(
            prepare("{% raw %}{% for a in b %}{% endraw %}"),
            "{% raw %}{% for a in b %}{% endraw %}"
        );
    }

    #[test]
    fn generation_markers_become_blocks() {
        assert_eq!(
            prepare("{%- generation -%}a{% endgeneration %}"),
            "{%- if true -%}a{% endif %}"
        );
    }
}
