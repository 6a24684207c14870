"""GGUF vocabularies, id by id, against the answers that llama.cpp ships beside its vocabulary files."""

import pathlib
import subprocess
import unicodedata

import pytest
from harness import BINARY, ROOT

TOKENS = BINARY.parent / "tests" / "support" / "galley-gguf-tokens"
SOURCES = ROOT / ".cache" / "peer" / "llama" / "src"
SEPARATOR = "__ggml_vocab_test__"
SUPPORTED = ["command-r", "deepseek-coder", "deepseek-llm", "falcon", "gemma-4", "gpt-2", "llama-bpe", "llama-spm",
             "mpt", "phi-3", "qwen2", "qwen35", "refact", "starcoder"]
# Their tokenizer.json composes characters first (NFC). So do we; llama.cpp does not.
COMPOSED = {"qwen2", "qwen35"}


@pytest.fixture(scope="module")
def vocabularies() -> pathlib.Path:
    subprocess.run([ROOT / "scripts" / "llama-sources.sh"], check=True)
    return SOURCES / "models"


def tokenize(file: pathlib.Path, texts: bytes) -> tuple[list[list[int]], str]:
    done = subprocess.run([TOKENS, file, SEPARATOR], input=texts, capture_output=True, timeout=120)
    return [[int(i) for i in line.split()] for line in done.stdout.decode().splitlines()], done.stderr.decode()


@pytest.mark.parametrize("name", SUPPORTED)
def test_ids_are_llama_cpps(name: str, vocabularies: pathlib.Path) -> None:
    file = vocabularies / f"ggml-vocab-{name}.gguf"
    texts = file.with_suffix(".gguf.inp").read_bytes()
    expected = [[int(i) for i in line.split()] for line in file.with_suffix(".gguf.out").read_text().splitlines()]
    found, errors = tokenize(file, texts)
    assert errors == ""
    pieces = texts.decode().split(f"\n{SEPARATOR}\n")
    assert len(found) == len(pieces)
    if len(pieces) == len(expected) + 1:  # a separator ends the file
        pieces.pop()
    assert len(pieces) == len(expected) >= 40
    if name in COMPOSED:
        composed = [unicodedata.normalize("NFC", piece) for piece in pieces]
        again, _ = tokenize(file, f"\n{SEPARATOR}\n".join(composed).encode())
        assert found[:len(pieces)] == again
        expected = [b if text != whole else a for text, whole, a, b in zip(pieces, composed, expected, again)]
    wrong = [(text, a, b) for text, a, b in zip(pieces, expected, found) if a != b]
    assert wrong == []


@pytest.mark.parametrize("name, reason", [("bert-bge", "bert"), ("nomic-bert-moe", "t5")])
def test_other_kinds_of_tokenizer_are_refused_by_name(name: str, reason: str, vocabularies: pathlib.Path) -> None:
    found, errors = tokenize(vocabularies / f"ggml-vocab-{name}.gguf", b"text")
    assert found == []
    assert f'"{reason}"' in errors and "supported are" in errors
