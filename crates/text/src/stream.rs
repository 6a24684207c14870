//! Incremental decoding: ids in, whole characters out.
use std::sync::Arc;

use tokenizers::tokenizer::step_decode_stream;

use crate::tokenizer::Core;

/// Ids held back at most before their text is shown as it is (only a model that emits garbage gets here).
const HELD_IDS: usize = 16;

pub struct Stream {
    core: Arc<Core>,
    state: State,
}

enum State {
    /// Byte-level vocabularies: a token is a run of bytes.
    Bytes(Vec<u8>),
    /// Every other decoder looks at neighbouring tokens: the window of ids that can still change.
    Window {
        ids: Vec<u32>,
        prefix: String,
        prefix_index: usize,
    },
}

impl Stream {
    pub(crate) fn new(core: Arc<Core>) -> Self {
        let state = State::fresh(&core);
        Self { core, state }
    }

    pub fn push(&mut self, id: i32) -> Result<String, String> {
        match &mut self.state {
            State::Bytes(held) => {
                held.extend_from_slice(&self.core.token_bytes(id));
                Ok(take_characters(held))
            }
            State::Window {
                ids,
                prefix,
                prefix_index,
            } => {
                let Ok(id) = u32::try_from(id) else {
                    return Ok(String::new());
                };
                let piece =
                    step_decode_stream(&self.core.tokenizer, vec![id], true, ids, prefix, prefix_index)
                        .map_err(|e| e.to_string())?;
                match piece {
                    Some(piece) => Ok(piece),
                    None if ids.len() > *prefix_index + HELD_IDS => self.flush(),
                    None => Ok(String::new()),
                }
            }
        }
    }

    /// What is held back, incomplete bytes as U+FFFD; the stream starts afresh.
    pub fn flush(&mut self) -> Result<String, String> {
        let rest = match &self.state {
            State::Bytes(held) => String::from_utf8_lossy(held).into_owned(),
            State::Window { ids, prefix, .. } => {
                let text = self.core.tokenizer.decode(ids, true).map_err(|e| e.to_string())?;
                text.strip_prefix(prefix.as_str()).unwrap_or("").to_owned()
            }
        };
        self.state = State::fresh(&self.core);
        Ok(rest)
    }
}

impl State {
    fn fresh(core: &Core) -> Self {
        if core.byte_level {
            State::Bytes(Vec::new())
        } else {
            State::Window {
                ids: Vec::new(),
                prefix: String::new(),
                prefix_index: 0,
            }
        }
    }
}

/// Takes all complete characters off the front, invalid bytes as U+FFFD (as String::from_utf8_lossy has it), and
/// leaves what may be the beginning of a character.
fn take_characters(held: &mut Vec<u8>) -> String {
    let mut out = String::new();
    let mut at = 0;
    loop {
        match std::str::from_utf8(&held[at..]) {
            Ok(text) => {
                out.push_str(text);
                at = held.len();
                break;
            }
            Err(error) => {
                let valid = error.valid_up_to();
                out.push_str(&String::from_utf8_lossy(&held[at..at + valid]));
                at += valid;
                match error.error_len() {
                    Some(bad) => {
                        out.push('\u{FFFD}');
                        at += bad;
                    }
                    None => break,
                }
            }
        }
    }
    held.drain(..at);
    out
}

#[cfg(test)]
mod tests {
    use super::take_characters;

    #[test]
    fn any_cut_gives_the_whole_text() {
        let bytes = [
            b"a\xF0\x9F\x98\x80".as_slice(),
            b"\xFF\xE2\x82",
            b"b\xE2\x82\xAC\xF0\x9F",
        ]
        .concat();
        for cut in 0..=bytes.len() {
            let mut held = bytes[..cut].to_vec();
            let mut out = take_characters(&mut held);
            held.extend_from_slice(&bytes[cut..]);
            out += &take_characters(&mut held);
            assert_eq!(held, b"\xF0\x9F");
            assert_eq!(
                out + &String::from_utf8_lossy(&held),
                String::from_utf8_lossy(&bytes),
                "cut at {cut}"
            );
        }
    }
}
