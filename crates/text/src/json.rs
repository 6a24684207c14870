//! JSON written as Python's json.dumps does, which is what chat templates were written against.
use serde_json::Value;

use crate::neutralize::MARK;

pub struct Style {
    pub indent: Option<String>,
    pub item_separator: String,
    pub key_separator: String,
    pub ensure_ascii: bool,
    pub sort_keys: bool,
}

impl Default for Style {
    fn default() -> Self {
        Self {
            indent: None,
            item_separator: ", ".into(),
            key_separator: ": ".into(),
            ensure_ascii: false,
            sort_keys: false,
        }
    }
}

pub fn dumps(value: &Value, style: &Style) -> String {
    let mut out = String::new();
    write(&mut out, value, style, 0);
    out
}

fn write(out: &mut String, value: &Value, style: &Style, depth: usize) {
    match value {
        Value::String(s) => write_string(out, s, style.ensure_ascii),
        Value::Number(n) => out.push_str(&number(n)),
        Value::Array(items) => {
            let items: Vec<_> = items.iter().map(|v| (None, v)).collect();
            write_items(out, '[', ']', &items, style, depth);
        }
        Value::Object(map) => {
            let mut items: Vec<_> = map.iter().map(|(k, v)| (Some(k), v)).collect();
            if style.sort_keys {
                items.sort_by_key(|(k, _)| *k);
            }
            write_items(out, '{', '}', &items, style, depth);
        }
        other => out.push_str(&other.to_string()),
    }
}

fn write_items(
    out: &mut String,
    open: char,
    close: char,
    items: &[(Option<&String>, &Value)],
    style: &Style,
    depth: usize,
) {
    out.push(open);
    for (i, (key, value)) in items.iter().enumerate() {
        if i > 0 {
            out.push_str(&style.item_separator);
        }
        new_line(out, style, depth + 1);
        if let Some(key) = key {
            write_string(out, key, style.ensure_ascii);
            out.push_str(&style.key_separator);
        }
        write(out, value, style, depth + 1);
    }
    if !items.is_empty() {
        new_line(out, style, depth);
    }
    out.push(close);
}

fn new_line(out: &mut String, style: &Style, depth: usize) {
    if let Some(indent) = &style.indent {
        out.push('\n');
        out.push_str(&indent.repeat(depth));
    }
}

fn write_string(out: &mut String, s: &str, ensure_ascii: bool) {
    let quoted = Value::String(s.to_owned()).to_string();
    if !ensure_ascii {
        out.push_str(&quoted);
        return;
    }
    for c in quoted.chars() {
        if c.is_ascii() || c == MARK {
            // The mark must survive to the tokenizer, which removes it.
            out.push(c);
        } else {
            for unit in c.encode_utf16(&mut [0; 2]) {
                out.push_str(&format!("\\u{unit:04x}"));
            }
        }
    }
}

fn number(n: &serde_json::Number) -> String {
    match n.as_f64().filter(|_| n.is_f64()) {
        Some(value) => float(value),
        None => n.to_string(),
    }
}

/// Python writes an exponent with a sign and two digits at least, and switches to it at 1e16 and below 1e-4.
pub fn float(value: f64) -> String {
    let magnitude = value.abs();
    if magnitude != 0.0 && !(1e-4..1e16).contains(&magnitude) {
        let text = format!("{value:e}");
        if let Some((mantissa, exponent)) = text.split_once('e') {
            let (sign, digits) = match exponent.strip_prefix('-') {
                Some(digits) => ('-', digits),
                None => ('+', exponent),
            };
            return format!("{mantissa}e{sign}{digits:0>2}");
        }
    }
    format!("{value:?}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn like_python() {
        let value: Value =
            serde_json::from_str(r#"{"b": [1, 2.0, 1e20, 1e-7, 0.0001], "a": "<é>\n", "e": [], "n": null}"#)
                .unwrap();
        assert_eq!(
            dumps(&value, &Style::default()),
            r#"{"b": [1, 2.0, 1e+20, 1e-07, 0.0001], "a": "<é>\n", "e": [], "n": null}"#
        );
        let style = Style {
            indent: Some("  ".into()),
            item_separator: ",".into(),
            sort_keys: true,
            ..Style::default()
        };
        assert_eq!(
            dumps(&serde_json::json!({"b": [1], "a": {}}), &style),
            "{\n  \"a\": {},\n  \"b\": [\n    1\n  ]\n}"
        );
        let ascii = Style {
            ensure_ascii: true,
            ..Style::default()
        };
        assert_eq!(
            dumps(&serde_json::json!("é😀"), &ascii),
            "\"\\u00e9\\ud83d\\ude00\""
        );
    }
}
