//! GGUF's tokenizer metadata → a tokenizer.
//!
//! Small parts are written as tokenizer.json has them; vocabulary and merges are handed over as they are, because a quarter
//! of a million of them take seconds and hundreds of megabytes on the way through JSON.
use std::collections::{HashMap, HashSet};

use ahash::AHashMap;
use serde::de::DeserializeOwned;
use serde_json::{json, Value};
use tokenizers::models::bpe::{Merges, BPE};
use tokenizers::{AddedToken, DecoderWrapper, NormalizerWrapper, PreTokenizerWrapper, Tokenizer};

use crate::neutralize::MARK;

/// tokenizer.ggml.token_type
const UNKNOWN: i32 = 2;
const CONTROL: i32 = 3;
const USER_DEFINED: i32 = 4;

pub struct Vocabulary<'a> {
    pub model: &'a str,
    pub pre: &'a str,
    pub tokens: &'a [String],
    pub types: &'a [i32],
    pub scores: &'a [f32],
    pub merges: &'a [String],
    pub add_space_prefix: bool,
}

impl Vocabulary<'_> {
    pub fn tokenizer(&self) -> Result<Tokenizer, String> {
        if self.tokens.is_empty() {
            return Err("tokenizer.ggml.tokens is missing or empty".into());
        }
        if !self.types.is_empty() && self.types.len() != self.tokens.len() {
            return Err(format!(
                "tokenizer.ggml.token_type has {} entries, tokenizer.ggml.tokens {}",
                self.types.len(),
                self.tokens.len()
            ));
        }
        match self.model {
            "gpt2" => self.byte_level(),
            "llama" => self.sentence_piece(self.merges_from_scores()?),
            "gemma4" => self.sentence_piece(self.explicit_merges()?),
            other => Err(format!(
                "tokenizer.ggml.model \"{other}\" is not supported (supported: \"gpt2\", \"llama\", \"gemma4\")"
            )),
        }
    }

    fn kind(&self, id: usize) -> i32 {
        self.types.get(id).copied().unwrap_or(1)
    }

    fn vocab(&self) -> AHashMap<String, u32> {
        self.tokens.iter().cloned().zip(0..).collect()
    }

    /// Control tokens are special; user-defined ones are matched whole too but are ordinary text.
    fn added_tokens(&self) -> Vec<AddedToken> {
        let kinds = [UNKNOWN, CONTROL, USER_DEFINED];
        (0..self.tokens.len())
            .filter(|&id| kinds.contains(&self.kind(id)) && !self.tokens[id].is_empty())
            .map(|id| {
                AddedToken::from(self.tokens[id].clone(), self.kind(id) != USER_DEFINED).normalized(false)
            })
            .collect()
    }

    /// `normalizer`, `pre_tokenizer` and `decoder` as in tokenizer.json.
    fn assemble(
        &self,
        model: BPE,
        normalizer: Value,
        pre_tokenizer: Value,
        decoder: Value,
    ) -> Result<Tokenizer, String> {
        let mut tokenizer = Tokenizer::new(model);
        tokenizer
            .with_normalizer(part::<NormalizerWrapper>(normalizer)?)
            .map_err(|e| e.to_string())?;
        tokenizer.with_pre_tokenizer(part::<PreTokenizerWrapper>(pre_tokenizer)?);
        tokenizer.with_decoder(part::<DecoderWrapper>(decoder)?);
        tokenizer
            .add_tokens(self.added_tokens())
            .map_err(|e| e.to_string())?;
        Ok(tokenizer)
    }

    /// Byte-level BPE with explicit merges.
    fn byte_level(&self) -> Result<Tokenizer, String> {
        let scheme = pre_tokenizer(self.pre)?;
        let model = BPE::builder()
            .vocab_and_merges(self.vocab(), self.explicit_merges()?)
            .ignore_merges(scheme.ignore_merges)
            .build()
            .map_err(|e| e.to_string())?;
        let mut steps: Vec<Value> = scheme
            .patterns
            .iter()
            .map(|p| json!({"type": "Split", "pattern": {"Regex": p}, "behavior": "Isolated", "invert": false}))
            .collect();
        steps.push(byte_level_step());
        let normalizer = if scheme.nfc {
            json!({"type": "NFC"})
        } else {
            Value::Null
        };
        self.assemble(
            model,
            normalizer,
            json!({"type": "Sequence", "pretokenizers": steps}),
            byte_level_step(),
        )
    }

    fn explicit_merges(&self) -> Result<Merges, String> {
        if self.merges.is_empty() {
            return Err("tokenizer.ggml.merges is missing or empty".into());
        }
        let known: HashSet<&str> = self.tokens.iter().map(String::as_str).collect();
        self.merges
            .iter()
            .enumerate()
            .map(|(n, merge)| {
                // A piece may itself begin with a space.
                let first = merge.chars().next().map_or(0, char::len_utf8);
                let Some(at) = merge[first..].find(' ').map(|at| at + first) else {
                    return Err(format!("tokenizer.ggml.merges[{n}]: \"{merge}\" is not a pair"));
                };
                let (left, right) = (&merge[..at], &merge[at + 1..]);
                for piece in [left, right, &format!("{left}{right}")] {
                    if !known.contains(piece) {
                        return Err(format!(
                            "tokenizer.ggml.merges[{n}]: \"{merge}\" needs \"{piece}\", which is not in tokenizer.ggml.tokens"
                        ));
                    }
                }
                Ok((left.to_owned(), right.to_owned()))
            })
            .collect()
    }

    /// SentencePiece BPE over the whole text, with spaces made visible. The merges follow from the scores ("llama") or
    /// are spelled out ("gemma4").
    fn sentence_piece(&self, merges: Merges) -> Result<Tokenizer, String> {
        let space = json!({"type": "Replace", "pattern": {"String": " "}, "content": "\u{2581}"});
        let normalizer = match self.add_space_prefix {
            true => {
                json!({"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "\u{2581}"}, space]})
            }
            false => space,
        };
        let mut decoders = vec![
            json!({"type": "Replace", "pattern": {"String": "\u{2581}"}, "content": " "}),
            json!({"type": "ByteFallback"}),
            json!({"type": "Fuse"}),
        ];
        if self.add_space_prefix {
            decoders.push(json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
        }
        let mut model = BPE::builder()
            .vocab_and_merges(self.vocab(), merges)
            .fuse_unk(true)
            .byte_fallback(true);
        if let Some(unknown) = (0..self.tokens.len()).find(|&id| self.kind(id) == UNKNOWN) {
            model = model.unk_token(self.tokens[unknown].clone());
        }
        let model = model.build().map_err(|e| e.to_string())?;
        self.assemble(
            model,
            normalizer,
            Value::Null,
            json!({"type": "Sequence", "decoders": decoders}),
        )
    }

    /// Every way to put a piece together from two others, best score first.
    fn merges_from_scores(&self) -> Result<Merges, String> {
        if self.scores.len() != self.tokens.len() {
            return Err(format!(
                "tokenizer.ggml.scores has {} entries, tokenizer.ggml.tokens {}",
                self.scores.len(),
                self.tokens.len()
            ));
        }
        let ids: HashMap<&str, usize> = self
            .tokens
            .iter()
            .enumerate()
            .filter(|(id, _)| self.kind(*id) == 1)
            .map(|(id, t)| (t.as_str(), id))
            .collect();
        let mut merges: Vec<(f32, usize, usize, usize)> = Vec::new();
        for (&token, &id) in &ids {
            for (at, _) in token.char_indices().skip(1) {
                if let (Some(&left), Some(&right)) = (ids.get(&token[..at]), ids.get(&token[at..])) {
                    merges.push((self.scores[id], id, left, right));
                }
            }
        }
        merges.sort_by(|a, b| b.0.total_cmp(&a.0).then((a.1, a.2, a.3).cmp(&(b.1, b.2, b.3))));
        Ok(merges
            .into_iter()
            .map(|(_, _, left, right)| (self.tokens[left].clone(), self.tokens[right].clone()))
            .collect())
    }
}

/// A part of a tokenizer; null: none.
fn part<T: DeserializeOwned>(json: Value) -> Result<Option<T>, String> {
    serde_json::from_value(json).map_err(|e| e.to_string())
}

fn byte_level_step() -> Value {
    json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false})
}

struct Scheme {
    /// Each splits what the ones before it left.
    patterns: &'static [&'static str],
    ignore_merges: bool,
    nfc: bool,
}

const DIGIT: &str = r"\p{N}";
const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN35: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const GPT4O: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const DEEPSEEK3: &str = r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"##;
const GPT2_SHORT: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)";
const MINICPM5: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}+| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const BAILING: &str =
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+";
const EXAONE_MOE: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+";
const TURKISH: &str = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// Letters with case, as deepseek-llm's tokenizer.json lists them.
const LATIN_GREEK_CYRILLIC: &str = concat!(
    r"\s?[",
    "A-Za-z\u{00B5}\u{00C0}-\u{00D6}\u{00D8}-\u{00F6}\u{00F8}-\u{01BA}\u{01BC}-\u{01BF}\u{01C4}-\u{0293}",
    "\u{0295}-\u{02AF}\u{0370}-\u{0373}\u{0376}\u{0377}\u{037B}-\u{037D}\u{037F}\u{0386}\u{0388}-\u{038A}",
    "\u{038C}\u{038E}-\u{03A1}\u{03A3}-\u{03F5}\u{03F7}-\u{0481}\u{048A}-\u{052F}\u{0531}-\u{0556}",
    "\u{10A0}-\u{10C5}\u{13A0}-\u{13F5}\u{13F8}-\u{13FD}\u{1C90}-\u{1CBA}\u{1CBD}-\u{1CBF}\u{1D00}-",
    "\u{1D2B}\u{1D6B}-\u{1D77}\u{1D79}-\u{1D9A}\u{1E00}-\u{1F15}\u{1F18}-\u{1F1D}\u{1F20}-\u{1F45}",
    "\u{1F48}-\u{1F4D}\u{1F50}-\u{1F57}\u{1F59}\u{1F5B}\u{1F5D}\u{1F5F}-\u{1F7D}\u{1F80}-\u{1FB4}\u{1FB6}",
    "-\u{1FBC}\u{1FBE}\u{1FC2}-\u{1FC4}\u{1FC6}-\u{1FCC}\u{1FD0}-\u{1FD3}\u{1FD6}-\u{1FDB}\u{1FE0}-",
    "\u{1FEC}\u{1FF2}-\u{1FF4}\u{1FF6}-\u{1FFC}\u{2102}\u{2107}\u{210A}-\u{2113}\u{2115}\u{2119}-\u{211D}",
    "\u{2124}\u{2126}\u{2128}\u{212A}-\u{212D}\u{212F}-\u{2134}\u{2139}\u{213C}-\u{213F}\u{2145}-\u{2149}",
    "\u{214E}\u{2183}\u{2184}\u{2C00}-\u{2C7B}\u{2C7E}-\u{2CE4}\u{2CEB}-\u{2CEE}\u{2CF2}\u{2CF3}\u{A640}-",
    "\u{A66D}\u{A680}-\u{A69B}\u{A722}-\u{A76F}\u{A771}-\u{A787}\u{A78B}-\u{A78E}\u{AB70}-\u{ABBF}",
    "\u{FB00}-\u{FB06}\u{FB13}-\u{FB17}\u{FF21}-\u{FF3A}\u{FF41}-\u{FF5A}\u{10400}-\u{1044F}\u{104B0}-",
    "\u{104D3}\u{104D8}-\u{104FB}\u{10C80}-\u{10CB2}\u{10CC0}-\u{10CF2}\u{118A0}-\u{118DF}\u{1E900}-",
    "\u{1E943}",
    "]+"
);
const SEED_CODER: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+";

/// The pre-tokenizer behind a name in tokenizer.ggml.pre. A guess would give plausible but wrong ids, hence the error.
fn pre_tokenizer(name: &str) -> Result<Scheme, String> {
    let plain = |patterns: &'static [&'static str]| Scheme {
        patterns,
        ignore_merges: false,
        nfc: false,
    };
    Ok(match name {
        "gpt-2" | "gpt2" | "phi-2" | "mpt" | "olmo" | "jais" | "trillion" | "granite-docling" | "exaone4"
        | "gigachat" | "a.x-4.0" | "mellum" | "modern-bert" => plain(&[GPT2]),
        "smollm" | "starcoder" | "refact" | "command-r" | "codeshell" | "exaone" | "minerva-7b"
        | "mellum2" => plain(&[DIGIT, GPT2]),
        "llama3" | "llama-v3" | "llama-bpe" | "falcon3" | "falcon-h1" | "pixtral" | "midm-2.0" | "lfm2" => {
            Scheme {
                ignore_merges: true,
                ..plain(&[LLAMA3])
            }
        }
        "dbrx" | "smaug-bpe" | "glm4" | "chatglm-bpe" => plain(&[LLAMA3]),
        "glm5" => Scheme {
            ignore_merges: true,
            ..plain(&[LLAMA3])
        },
        "minicpm5" => Scheme {
            ignore_merges: true,
            ..plain(&[r"\p{N}{1,3}", MINICPM5])
        },
        // What the converter writes when it does not know better.
        "default" => plain(&[r"[\p{P}\$\+<=>\^~\|]+", GPT2_SHORT, r"\p{N}+", "[0-9][0-9][0-9]"]),
        "falcon" => plain(&[r"[\p{P}\$\+<=>\^~\|`]+", GPT2_SHORT, "[0-9][0-9][0-9]"]),
        "deepseek-coder" => plain(&[
            r"[\r\n]",
            r"\s?\p{L}+",
            r"\s?\p{P}+",
            "[\u{4E00}-\u{9FA5}\u{0800}-\u{4E00}\u{AC00}-\u{D7FF}]+",
            DIGIT,
        ]),
        "deepseek-llm" => plain(&[
            r"[\r\n]",
            LATIN_GREEK_CYRILLIC,
            "\\s?[!-/:-~\u{FF01}-\u{FF0F}\u{FF1A}-\u{FF5E}\u{2018}-\u{201F}\u{3000}-\u{3002}]+",
            r"\s+$",
            "[\u{4E00}-\u{9FA5}\u{0800}-\u{4E00}\u{AC00}-\u{D7FF}]+",
            r"\p{N}+",
        ]),
        "bailingmoe" | "bailingmoe2" | "llada-moe" => plain(&[BAILING]),
        "exaone-moe" => plain(&[EXAONE_MOE]),
        "ufakzeka" => plain(&[TURKISH]),
        "laguna" => plain(&[r"[^\n]+|[\n]+", QWEN2]),
        "megrez" => plain(&[QWEN2]),
        "qwen2" | "deepseek-r1-qwen" | "kormo" => Scheme {
            nfc: true,
            ..plain(&[QWEN2])
        },
        "qwen35" => Scheme {
            nfc: true,
            ..plain(&[QWEN35])
        },
        "stablelm2" | "hunyuan" | "grok-2" | "solar-open" => plain(&[QWEN2]),
        "tekken" => Scheme {
            ignore_merges: true,
            ..plain(&[TEKKEN])
        },
        "gpt-4o" | "llama4" | "minimax-m2" | "kanana2" | "talkie" => plain(&[GPT4O]),
        "deepseek-v3" | "hunyuan-dense" | "joyai-llm" | "hy_v4" => plain(&[
            r"\p{N}{1,3}",
            "[\u{4E00}-\u{9FA5}\u{3040}-\u{309F}\u{30A0}-\u{30FF}]+",
            DEEPSEEK3,
        ]),
        "seed-coder" => plain(&[SEED_CODER]),
        "" => return Err("tokenizer.ggml.pre is missing: the file does not say how text is split".into()),
        other => {
            return Err(format!(
                "tokenizer.ggml.pre \"{}\" is not supported",
                other.replace(MARK, "?")
            ))
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tokenizer::Tokenizer;

    fn strings(items: &[&str]) -> Vec<String> {
        items.iter().map(|s| s.to_string()).collect()
    }

    #[test]
    fn every_scheme_compiles_and_splits() {
        let tokens = strings(&["<x>", "a", "b", "ab"]);
        let merges = strings(&["a b"]);
        for pre in [
            "gpt-2",
            "smollm",
            "llama-bpe",
            "dbrx",
            "qwen2",
            "qwen35",
            "stablelm2",
            "tekken",
            "gpt-4o",
            "deepseek-v3",
            "seed-coder",
            "glm5",
            "minicpm5",
            "default",
            "falcon",
            "deepseek-coder",
            "deepseek-llm",
            "bailingmoe",
            "exaone-moe",
            "ufakzeka",
            "laguna",
        ] {
            let vocabulary = Vocabulary {
                model: "gpt2",
                pre,
                tokens: &tokens,
                types: &[3, 1, 1, 1],
                scores: &[],
                merges: &merges,
                add_space_prefix: false,
            };
            let tokenizer = Tokenizer::new(vocabulary.tokenizer().expect(pre)).unwrap();
            assert_eq!(tokenizer.encode("ab<x>a", true).unwrap(), [3, 0, 1], "{pre}");
            assert_eq!(tokenizer.vocab_size(), 4);
        }
    }

    #[test]
    fn what_it_does_not_know_it_refuses() {
        let tokens = strings(&["a"]);
        let vocabulary = |model, pre| Vocabulary {
            model,
            pre,
            tokens: &tokens,
            types: &[],
            scores: &[],
            merges: &[],
            add_space_prefix: false,
        };
        assert!(vocabulary("gpt2", "never-heard")
            .tokenizer()
            .unwrap_err()
            .contains("never-heard"));
        assert!(vocabulary("gpt2", "")
            .tokenizer()
            .unwrap_err()
            .contains("missing"));
        assert!(vocabulary("bert", "gpt-2")
            .tokenizer()
            .unwrap_err()
            .contains("bert"));
        assert!(vocabulary("llama", "")
            .tokenizer()
            .unwrap_err()
            .contains("scores"));
        assert!(vocabulary("gpt2", "gpt-2")
            .tokenizer()
            .unwrap_err()
            .contains("merges"));
    }

    #[test]
    fn sentence_piece_merges_by_score_and_falls_back_to_bytes() {
        let tokens = strings(&[
            "<unk>",
            "<s>",
            "\u{2581}",
            "a",
            "b",
            "\u{2581}a",
            "ab",
            "<0xC3>",
            "<0xA9>",
        ]);
        let types = [2, 3, 1, 1, 1, 1, 1, 6, 6];
        let scores = [0.0, 0.0, -3.0, -4.0, -5.0, -2.0, -1.0, 0.0, 0.0];
        let vocabulary = Vocabulary {
            model: "llama",
            pre: "",
            tokens: &tokens,
            types: &types,
            scores: &scores,
            merges: &[],
            add_space_prefix: true,
        };
        let tokenizer = Tokenizer::new(vocabulary.tokenizer().unwrap()).unwrap();
        assert_eq!(tokenizer.encode("ab a", false).unwrap(), [2, 6, 5]);
        assert_eq!(tokenizer.encode("<s>é", true).unwrap(), [1, 2, 7, 8]);
        assert_eq!(tokenizer.decode(&[2, 6, 5]).unwrap(), "ab a");
        assert_eq!(tokenizer.token_bytes(7), [0xC3]);
        let mut stream = tokenizer.stream();
        let pieces: Vec<String> = [5, 7, 8, 5, 7]
            .iter()
            .map(|&id| stream.push(id).unwrap())
            .collect();
        assert_eq!(pieces, ["a", "", "é", " a", ""]);
        assert_eq!(stream.flush().unwrap(), "\u{FFFD}");
    }

    #[test]
    fn gemma_4_spells_its_merges_out() {
        let tokens = strings(&[
            "<unk>",
            "<bos>",
            "\u{2581}",
            "a",
            "b",
            "\n",
            "\n\n",
            "\u{2581}a",
            "ab",
            "<0xC3>",
            "<0xA9>",
        ]);
        let types = [2, 3, 1, 1, 1, 1, 1, 1, 1, 6, 6];
        let merges = strings(&["\u{2581} a", "a b", "\n \n"]);
        let vocabulary = |merges| Vocabulary {
            model: "gemma4",
            pre: "gemma4",
            tokens: &tokens,
            types: &types,
            scores: &[],
            merges,
            add_space_prefix: false,
        };
        let tokenizer = Tokenizer::new(vocabulary(&merges).tokenizer().unwrap()).unwrap();
        // "\u{2581} a" comes before "a b".
        assert_eq!(tokenizer.encode("ab a\n\nab", false).unwrap(), [8, 7, 6, 8]);
        assert_eq!(tokenizer.encode(" ab", false).unwrap(), [7, 4]);
        assert_eq!(tokenizer.encode("<bos>\u{e9}", true).unwrap(), [1, 9, 10]);
        assert_eq!(tokenizer.decode(&[7, 8, 6]).unwrap(), " aab\n\n");
        assert!(vocabulary(&[]).tokenizer().unwrap_err().contains("merges"));
    }
}
