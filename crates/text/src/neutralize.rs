//! Keeps special tokens inside people's own words from becoming control tokens.
//!
//! Before a template runs, every occurrence of a special token inside the messages gets MARK after its first character.
//! The rendered prompt therefore holds the template's own special tokens whole and people's broken, and the tokenizer
//! drops the marks once it has cut out the special tokens: the model reads exactly the words that were written.
use serde_json::Value;

/// A Unicode noncharacter, reserved for a program's internal use and never valid in interchanged text.
pub const MARK: char = '\u{FDD0}';

pub struct Neutralizer {
    special_tokens: Vec<String>,
    first_bytes: [bool; 256],
}

impl Neutralizer {
    pub fn new(special_tokens: Vec<String>) -> Self {
        // A token of one character can't be broken by a mark inside it; no chat template has one.
        let special_tokens: Vec<String> = special_tokens
            .into_iter()
            .filter(|t| t.chars().count() > 1)
            .collect();
        let mut first_bytes = [false; 256];
        for token in &special_tokens {
            first_bytes[token.as_bytes()[0] as usize] = true;
        }
        Self {
            special_tokens,
            first_bytes,
        }
    }

    /// Marks every special token, overlapping ones included. A MARK in the text itself becomes U+FFFD.
    pub fn text(&self, text: &str) -> String {
        let mut out = String::with_capacity(text.len() + 8);
        for (at, c) in text.char_indices() {
            out.push(if c == MARK { '\u{FFFD}' } else { c });
            if self.first_bytes[text.as_bytes()[at] as usize]
                && self
                    .special_tokens
                    .iter()
                    .any(|token| text[at..].starts_with(token.as_str()))
            {
                out.push(MARK);
            }
        }
        out
    }

    /// Marks every string of a JSON value, object keys included.
    pub fn value(&self, value: Value) -> Value {
        match value {
            Value::String(s) => Value::String(self.text(&s)),
            Value::Array(items) => Value::Array(items.into_iter().map(|v| self.value(v)).collect()),
            Value::Object(map) => Value::Object(
                map.into_iter()
                    .map(|(k, v)| (self.text(&k), self.value(v)))
                    .collect(),
            ),
            other => other,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_every_occurrence() {
        let n = Neutralizer::new(vec!["<s>".into(), "aa".into()]);
        assert_eq!(n.text("x<s>y<s>"), "x<\u{FDD0}s>y<\u{FDD0}s>");
        assert_eq!(n.text("aaa"), "a\u{FDD0}a\u{FDD0}a");
        assert_eq!(n.text("<\u{FDD0}s>"), "<\u{FFFD}s>");
        assert_eq!(n.text("<S> é"), "<S> é");
    }
}
