//! Encoding and decoding over the `tokenizers` crate.
use std::collections::HashSet;
use std::sync::Arc;

use serde::Deserialize;
use tokenizers::decoders::DecoderWrapper;
use tokenizers::tokenizer::{
    AddedVocabulary, Model, NormalizedString, Normalizer, OffsetType, PreTokenizer, Tokenizer as HfTokenizer,
};

use crate::neutralize::MARK;
use crate::stream::Stream;

pub struct Tokenizer {
    core: Arc<Core>,
}

/// Shared by a tokenizer and its streams; immutable.
pub(crate) struct Core {
    pub(crate) tokenizer: HfTokenizer,
    /// Whether a token is a run of bytes, spelled in GPT-2's printable alphabet.
    pub(crate) byte_level: bool,
    /// The added vocabulary with special tokens switched off.
    plain_vocabulary: AddedVocabulary,
    special_ids: HashSet<u32>,
    byte_of: ByteAlphabet,
    vocab_size: i32,
    longest_token: usize,
    /// What the normalizer makes of MARK; None: nothing is left of it.
    normalized_mark: Option<String>,
}

impl Tokenizer {
    pub fn from_json(json: &str) -> Result<Self, String> {
        Self::new(HfTokenizer::from_bytes(json.as_bytes()).map_err(|e| e.to_string())?)
    }

    pub fn new(mut tokenizer: HfTokenizer) -> Result<Self, String> {
        tokenizers::utils::parallelism::set_parallelism(false);
        // Length limits are the server's affair, never a silent cut.
        tokenizer.with_truncation(None).map_err(|e| e.to_string())?;
        tokenizer.with_padding(None);
        let mut plain_vocabulary = tokenizer.get_added_vocabulary().clone();
        plain_vocabulary.set_encode_special_tokens(true);
        let special_ids = tokenizer
            .get_added_tokens_decoder()
            .iter()
            .filter(|(_, t)| t.special)
            .map(|(id, _)| *id)
            .collect();
        let byte_level = matches!(tokenizer.get_decoder(), Some(DecoderWrapper::ByteLevel(_)));
        let normalized_mark = normalized_mark(&tokenizer)?;
        let byte_of = ByteAlphabet::new();
        let (mut vocab_size, mut longest_token) = (0, 0);
        for (token, id) in tokenizer.get_vocab(true) {
            vocab_size = vocab_size.max(id as i32 + 1);
            // In GPT-2's alphabet a character stands for a byte.
            let bytes = if byte_level {
                token.chars().count()
            } else {
                token.len()
            };
            longest_token = longest_token.max(bytes);
        }
        Ok(Self {
            core: Arc::new(Core {
                tokenizer,
                byte_level,
                plain_vocabulary,
                special_ids,
                byte_of,
                vocab_size,
                longest_token,
                normalized_mark,
            }),
        })
    }

    /// Ids of a text, without any the post-processor would add. With `parse_special`, special tokens in the text are
    /// recognized and then every MARK is dropped (see neutralize.rs).
    pub fn encode(&self, text: &str, parse_special: bool) -> Result<Vec<i32>, String> {
        let core = &*self.core;
        let tokenizer = &core.tokenizer;
        let vocabulary = if parse_special {
            tokenizer.get_added_vocabulary()
        } else {
            &core.plain_vocabulary
        };
        let mut pieces = vocabulary.extract_and_normalize(tokenizer.get_normalizer(), text);
        if let (true, Some(mark)) = (parse_special && text.contains(MARK), &core.normalized_mark) {
            pieces
                .normalize(|piece| piece.replace(mark.as_str(), ""))
                .map_err(|e| e.to_string())?;
        }
        if let Some(pre_tokenizer) = tokenizer.get_pre_tokenizer() {
            pre_tokenizer
                .pre_tokenize(&mut pieces)
                .map_err(|e| e.to_string())?;
        }
        tokenizer
            .get_model()
            .tokenize_in_pretokenized(&mut pieces, None)
            .map_err(|e| e.to_string())?;
        let encoding = pieces
            .into_encoding(None, 0, OffsetType::None)
            .map_err(|e| e.to_string())?;
        Ok(encoding.get_ids().iter().map(|&id| id as i32).collect())
    }

    /// The text of ids without special tokens; ids outside the vocabulary count as nothing.
    pub fn decode(&self, ids: &[i32]) -> Result<String, String> {
        let ids: Vec<u32> = ids.iter().filter_map(|&id| u32::try_from(id).ok()).collect();
        self.core.tokenizer.decode(&ids, true).map_err(|e| e.to_string())
    }

    pub fn token_bytes(&self, id: i32) -> Vec<u8> {
        self.core.token_bytes(id)
    }

    pub fn token_id(&self, token: &str) -> i32 {
        self.core.tokenizer.token_to_id(token).map_or(-1, |id| id as i32)
    }

    /// The vocabulary's own spelling of a token; empty outside the vocabulary.
    pub fn token_name(&self, id: i32) -> String {
        u32::try_from(id)
            .ok()
            .and_then(|id| self.core.tokenizer.id_to_token(id))
            .unwrap_or_default()
    }

    /// One more than the highest id in use, so that every id is below it even where the vocabulary has holes.
    pub fn vocab_size(&self) -> i32 {
        self.core.vocab_size
    }

    /// Bytes of the longest token's text (an upper bound where tokens spell a space as a longer character).
    pub fn longest_token(&self) -> usize {
        self.core.longest_token
    }

    pub fn special_tokens(&self) -> Vec<String> {
        self.core
            .special_ids
            .iter()
            .filter_map(|&id| self.core.tokenizer.id_to_token(id))
            .collect()
    }

    pub fn stream(&self) -> Stream {
        Stream::new(Arc::clone(&self.core))
    }
}

impl Core {
    /// A token's raw bytes; empty for special tokens and ids outside the vocabulary.
    pub(crate) fn token_bytes(&self, id: i32) -> Vec<u8> {
        let Ok(id) = u32::try_from(id) else {
            return Vec::new();
        };
        if self.special_ids.contains(&id) {
            return Vec::new();
        }
        let added = self.tokenizer.get_added_vocabulary().simple_id_to_token(id);
        let is_added = added.is_some();
        let Some(token) = added.or_else(|| self.tokenizer.get_model().id_to_token(id)) else {
            return Vec::new();
        };
        if self.byte_level {
            return self.byte_of.bytes(&token);
        }
        if is_added {
            return token.into_bytes();
        }
        match byte_fallback(&token) {
            Some(byte) => vec![byte],
            None => token.replace('\u{2581}', " ").into_bytes(),
        }
    }
}

/// "<0x0A>" to its byte.
fn byte_fallback(token: &str) -> Option<u8> {
    let digits = token.strip_prefix("<0x")?.strip_suffix('>')?;
    (digits.len() == 2)
        .then(|| u8::from_str_radix(digits, 16).ok())
        .flatten()
}

fn normalized_mark(tokenizer: &HfTokenizer) -> Result<Option<String>, String> {
    let Some(normalizer) = tokenizer.get_normalizer() else {
        return Ok(Some(MARK.to_string()));
    };
    let mut probe = NormalizedString::from(format!("a{MARK}b"));
    normalizer.normalize(&mut probe).map_err(|e| e.to_string())?;
    let text = probe.get();
    Ok(match (text.find('a'), text.rfind('b')) {
        (Some(a), Some(b)) if a + 1 < b => Some(text[a + 1..b].to_owned()),
        _ => None,
    })
}

/// GPT-2's alphabet: printable bytes stand for themselves, the others for the characters from U+0100 on.
struct ByteAlphabet([Option<u8>; 0x180]);

impl ByteAlphabet {
    fn new() -> Self {
        let mut table = [None; 0x180];
        let mut next = 0x100;
        for byte in 0..=255u8 {
            if matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF) {
                table[byte as usize] = Some(byte);
            } else {
                table[next] = Some(byte);
                next += 1;
            }
        }
        Self(table)
    }

    /// A token with any character outside the alphabet stands for its own UTF-8 bytes.
    fn bytes(&self, token: &str) -> Vec<u8> {
        token
            .chars()
            .map(|c| self.0.get(c as usize).copied().flatten())
            .collect::<Option<Vec<u8>>>()
            .unwrap_or_else(|| token.as_bytes().to_vec())
    }
}

#[derive(Deserialize)]
struct AddedTokensOnly {
    #[serde(default)]
    added_tokens: Vec<AddedTokenEntry>,
}

#[derive(Deserialize)]
struct AddedTokenEntry {
    content: String,
    #[serde(default)]
    special: bool,
}

pub fn special_tokens_of_json(json: &str) -> Result<Vec<String>, String> {
    let file: AddedTokensOnly = serde_json::from_str(json).map_err(|e| e.to_string())?;
    Ok(file
        .added_tokens
        .into_iter()
        .filter(|t| t.special)
        .map(|t| t.content)
        .collect())
}
