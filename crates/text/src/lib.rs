//! The text crate: tokenizers and chat templates behind one small cxx bridge.
//!
//! Every entry runs inside `guard`, so a panic in a dependency becomes an error instead of ending the process.
mod chat_template;
mod gguf_vocab;
mod jinja_source;
mod json;
mod neutralize;
mod stream;
mod tokenizer;

use chat_template::ChatTemplate;
use cxx::{CxxString, CxxVector};
use std::panic::{catch_unwind, AssertUnwindSafe};
use stream::Stream;
use tokenizer::Tokenizer;

#[cxx::bridge(namespace = "galley::text::bridge")]
mod ffi {
    extern "Rust" {
        type Tokenizer;
        type Stream;
        type ChatTemplate;

        /// A vocabulary out of GGUF metadata.
        fn tokenizer_from_gguf(
            model: &str,
            pre: &str,
            tokens: &CxxVector<CxxString>,
            types: &[i32],
            scores: &[f32],
            merges: &CxxVector<CxxString>,
            add_space_prefix: bool,
        ) -> Result<Box<Tokenizer>>;
        fn tokenizer_from_json(json: &str) -> Result<Box<Tokenizer>>;
        fn tokenizer_encode(tokenizer: &Tokenizer, text: &str, parse_special: bool) -> Result<Vec<i32>>;
        fn tokenizer_decode(tokenizer: &Tokenizer, ids: &[i32]) -> Result<String>;
        fn tokenizer_token_bytes(tokenizer: &Tokenizer, id: i32) -> Vec<u8>;
        /// How the vocabulary writes a token; for special tokens their name.
        fn tokenizer_token_name(tokenizer: &Tokenizer, id: i32) -> String;
        fn tokenizer_token_id(tokenizer: &Tokenizer, token: &str) -> i32;
        fn tokenizer_vocab_size(tokenizer: &Tokenizer) -> i32;
        /// Bytes of the longest token's text.
        fn tokenizer_longest_token(tokenizer: &Tokenizer) -> usize;
        /// The texts of all special tokens.
        fn tokenizer_special_tokens(tokenizer: &Tokenizer) -> Vec<String>;

        fn stream_new(tokenizer: &Tokenizer) -> Box<Stream>;
        fn stream_push(stream: &mut Stream, id: i32) -> Result<String>;
        fn stream_flush(stream: &mut Stream) -> Result<String>;

        /// The texts of the special tokens that a tokenizer.json names, without building the tokenizer.
        fn special_tokens_of_json(json: &str) -> Result<Vec<String>>;
        fn template_new(
            source: &str,
            bos_token: &str,
            eos_token: &str,
            special_tokens: &CxxVector<CxxString>,
        ) -> Result<Box<ChatTemplate>>;
        fn template_render(
            chat: &ChatTemplate,
            messages_json: &str,
            tools_json: &str,
            extra_json: &str,
            add_generation_prompt: bool,
        ) -> Result<String>;
    }
}

/// Runs an entry; a panic becomes an error.
fn guard<T>(entry: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(entry)).unwrap_or_else(|panic| {
        let what = panic
            .downcast_ref::<String>()
            .map(String::as_str)
            .or_else(|| panic.downcast_ref::<&str>().copied())
            .unwrap_or("no message");
        Err(format!("internal error in the text library: {what}"))
    })
}

fn strings(values: &CxxVector<CxxString>, what: &str) -> Result<Vec<String>, String> {
    values
        .iter()
        .enumerate()
        .map(|(i, s)| {
            s.to_str()
                .map(str::to_owned)
                .map_err(|_| format!("{what}[{i}] is not valid UTF-8"))
        })
        .collect()
}

#[allow(clippy::too_many_arguments)]
fn tokenizer_from_gguf(
    model: &str,
    pre: &str,
    tokens: &CxxVector<CxxString>,
    types: &[i32],
    scores: &[f32],
    merges: &CxxVector<CxxString>,
    add_space_prefix: bool,
) -> Result<Box<Tokenizer>, String> {
    guard(|| {
        let tokens = strings(tokens, "tokenizer.ggml.tokens")?;
        let merges = strings(merges, "tokenizer.ggml.merges")?;
        let vocabulary = gguf_vocab::Vocabulary {
            model,
            pre,
            tokens: &tokens,
            types,
            scores,
            merges: &merges,
            add_space_prefix,
        };
        Tokenizer::new(vocabulary.tokenizer()?).map(Box::new)
    })
}

fn tokenizer_from_json(json: &str) -> Result<Box<Tokenizer>, String> {
    guard(|| Tokenizer::from_json(json).map(Box::new))
}

fn tokenizer_encode(tokenizer: &Tokenizer, text: &str, parse_special: bool) -> Result<Vec<i32>, String> {
    guard(|| tokenizer.encode(text, parse_special))
}

fn tokenizer_decode(tokenizer: &Tokenizer, ids: &[i32]) -> Result<String, String> {
    guard(|| tokenizer.decode(ids))
}

fn tokenizer_token_bytes(tokenizer: &Tokenizer, id: i32) -> Vec<u8> {
    guard(|| Ok(tokenizer.token_bytes(id))).unwrap_or_default()
}

fn tokenizer_token_name(tokenizer: &Tokenizer, id: i32) -> String {
    guard(|| Ok(tokenizer.token_name(id))).unwrap_or_default()
}

fn tokenizer_token_id(tokenizer: &Tokenizer, token: &str) -> i32 {
    guard(|| Ok(tokenizer.token_id(token))).unwrap_or(-1)
}

fn tokenizer_vocab_size(tokenizer: &Tokenizer) -> i32 {
    tokenizer.vocab_size()
}

fn tokenizer_longest_token(tokenizer: &Tokenizer) -> usize {
    tokenizer.longest_token()
}

fn tokenizer_special_tokens(tokenizer: &Tokenizer) -> Vec<String> {
    tokenizer.special_tokens()
}

fn stream_new(tokenizer: &Tokenizer) -> Box<Stream> {
    Box::new(tokenizer.stream())
}

fn stream_push(stream: &mut Stream, id: i32) -> Result<String, String> {
    guard(|| stream.push(id))
}

fn stream_flush(stream: &mut Stream) -> Result<String, String> {
    guard(|| stream.flush())
}

fn special_tokens_of_json(json: &str) -> Result<Vec<String>, String> {
    guard(|| tokenizer::special_tokens_of_json(json))
}

fn template_new(
    source: &str,
    bos_token: &str,
    eos_token: &str,
    special_tokens: &CxxVector<CxxString>,
) -> Result<Box<ChatTemplate>, String> {
    guard(|| {
        let special = strings(special_tokens, "special token")?;
        ChatTemplate::new(source, bos_token, eos_token, special).map(Box::new)
    })
}

fn template_render(
    chat: &ChatTemplate,
    messages_json: &str,
    tools_json: &str,
    extra_json: &str,
    add_generation_prompt: bool,
) -> Result<String, String> {
    guard(|| chat.render(messages_json, tools_json, extra_json, add_generation_prompt))
}
