"""Loading: a GGUF of half a billion parameters, in the shape and the types of Qwen2.5-0.5B Q4_K_M, with Qwen's vocabulary
and random weights. How long until a server is ready, and how much memory it has used by then at most."""

from __future__ import annotations

import pathlib
import re
from typing import Any

import gguf
import numpy as np

from streams import galley_command, serving

LAYERS, HIDDEN, FEED_FORWARD, HEADS, KV_HEADS, HEAD = 24, 896, 4864, 14, 2, 64
# Bytes of a block before (or behind, of Q6_K) which nothing but a scale in f16 stands, and the values in it.
BLOCKS = {"Q8_0": (34, 32), "Q5_0": (22, 32), "Q4_K": (144, 256), "Q6_K": (210, 256)}
SCALES = {"Q8_0": [0], "Q5_0": [0], "Q4_K": [0, 2], "Q6_K": [208]}


def _random(kind: str, rows: int, columns: int, source: np.random.Generator) -> np.ndarray:
    size, values = BLOCKS[kind]
    blocks = source.integers(0, 256, (rows * columns // values, size), np.uint8)
    for at in SCALES[kind]:
        blocks[:, at:at + 2] = np.frombuffer(np.float16(0.0005).tobytes(), np.uint8)
    return blocks.reshape(rows, -1)


def build(path: pathlib.Path, vocabulary: pathlib.Path) -> None:
    """Writes the file; `vocabulary`: a GGUF with Qwen's tokenizer and nothing else."""
    writer = gguf.GGUFWriter(path, "qwen2")
    fields = gguf.GGUFReader(vocabulary).fields
    for name, field in fields.items():
        if name.startswith("tokenizer."):
            kind = field.types[0]
            writer.add_key_value(name, field.contents(), kind, field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None)
    tokens = len(fields["tokenizer.ggml.tokens"].data)
    writer.add_context_length(32768)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(1e6)
    writer.add_layer_norm_rms_eps(1e-6)
    source = np.random.default_rng(0)

    def matrix(name: str, kind: str, rows: int, columns: int) -> None:
        writer.add_tensor(f"{name}.weight", _random(kind, rows, columns, source),
                          raw_dtype=gguf.GGMLQuantizationType[kind])

    def vector(name: str, value: float, size: int) -> None:
        writer.add_tensor(name, np.full(size, value, np.float32))

    matrix("token_embd", "Q8_0", tokens, HIDDEN)
    vector("output_norm.weight", 1, HIDDEN)
    for layer in range(LAYERS):
        block = f"blk.{layer}"
        vector(f"{block}.attn_norm.weight", 1, HIDDEN)
        vector(f"{block}.ffn_norm.weight", 1, HIDDEN)
        # Rows of 896 values hold no whole K-blocks; llama.cpp takes its older types for them.
        for name, kind, heads in (("q", "Q5_0", HEADS), ("k", "Q5_0", KV_HEADS), ("v", "Q8_0", KV_HEADS)):
            matrix(f"{block}.attn_{name}", kind, heads * HEAD, HIDDEN)
            vector(f"{block}.attn_{name}.bias", 0, heads * HEAD)
        matrix(f"{block}.attn_output", "Q5_0", HIDDEN, HIDDEN)
        matrix(f"{block}.ffn_gate", "Q5_0", FEED_FORWARD, HIDDEN)
        matrix(f"{block}.ffn_up", "Q5_0", FEED_FORWARD, HIDDEN)
        matrix(f"{block}.ffn_down", "Q6_K" if layer % 2 == 0 else "Q4_K", HIDDEN, FEED_FORWARD)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def measure(binary: pathlib.Path, path: pathlib.Path, threads: int) -> dict[str, Any]:
    """The file was just written, so it is in the page cache, as after any first use."""
    command = [*galley_command(binary, path, threads), "--kv-budget", "1"]
    with serving(command) as server:
        status = pathlib.Path(f"/proc/{server.process.pid}/status").read_text()
        peak = int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) * 1024
        return {"file_bytes": path.stat().st_size, "ready_seconds": server.ready_seconds, "peak_bytes": peak}
