#!/usr/bin/env python3
"""How far do fast kernels move the model's distribution? `make quality` prints, on a fixed text,

  - galley's fused kernels against its stock rung in fp32, on the same file,
  - llama.cpp on that file against llama.cpp on the file converted to F32 (llama-perplexity's own figures),

as the mean KL divergence a token with its standard error and its median, the share of positions with the same most
likely token, and the perplexities. The mean has a heavy tail: where a model sits on an edge, a last bit can tip it, and a
handful of such positions moves the mean by a fifth. So means are compared within their standard errors.
Both see the same tokens in the same windows: each of CONTEXT tokens, scored on its second half, as llama-perplexity
does. The tokens come from llama.cpp's file of base logits, so that no tokenizer can make a difference.

    bench/quality.py [--check] [--json] [--kv-quant 8 4]

--check: exit 1 if galley is worse than llama.cpp. --kv-quant: a line for each setting of that flag, which shows what
quantized KV costs, against the same kernels on bf16 KV.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pathlib
import re
import struct
import subprocess
import sys
import tempfile

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parent.parent
TEXT = ROOT / "bench" / "quality_text.txt"
CONTEXT = 512


def run(command: list[object]) -> str:
    result = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=3600, check=False)
    if result.returncode != 0:
        sys.exit(f"error: {' '.join(map(str, command))} failed:\n{(result.stdout + result.stderr)[-2000:]}")
    return result.stdout + result.stderr


# llama.cpp ---------------------------------------------------------------------------------------------------------


def llama_base(peer: pathlib.Path, model: pathlib.Path, cache: pathlib.Path, threads: int) -> pathlib.Path:
    """Logits of the same file converted to F32, made once."""
    cache.mkdir(parents=True, exist_ok=True)
    wide, base = cache / f"{model.stem}.F32.gguf", cache / f"{model.stem}.base"
    inputs = max(TEXT.stat().st_mtime, model.stat().st_mtime)
    if not wide.exists():
        run([peer / "llama-quantize", "--allow-requantize", model, wide, "F32", threads])
    if not base.exists() or base.stat().st_mtime < inputs:
        run([peer / "llama-perplexity", "-m", wide, "-f", TEXT, "-c", CONTEXT, "-b", CONTEXT, "-t", threads,
             "--kl-divergence-base", base])
    return base


def base_windows(base: pathlib.Path) -> np.ndarray:
    """The token windows [windows, CONTEXT] in a file of base logits."""
    with open(base, "rb") as file:
        magic, context, _vocabulary, windows = struct.unpack("<8sIii", file.read(20))
        if magic != b"_logits_" or context != CONTEXT:
            sys.exit(f"error: {base} is no file of base logits for windows of {CONTEXT} tokens; remove it")
        return np.frombuffer(file.read(4 * windows * context), dtype="<i4").reshape(windows, context)


def llama_figures(peer: pathlib.Path, model: pathlib.Path, base: pathlib.Path, threads: int) -> dict[str, float]:
    output = run([peer / "llama-perplexity", "-m", model, "-c", CONTEXT, "-b", CONTEXT, "-t", threads,
                  "--kl-divergence-base", base, "--kl-divergence"])
    patterns = {"kl": r"Mean\s+KLD:\s*(-?[\d.]+)", "kl_error": r"Mean\s+KLD:.*±\s*([\d.]+)",
                "kl_median": r"Median\s+KLD:\s*(-?[\d.]+)",
                "top1": r"Same top p:\s*([\d.]+)",
                "perplexity": r"Mean PPL\(Q\)\s*:\s*([\d.]+)", "base_perplexity": r"Mean PPL\(base\)\s*:\s*([\d.]+)"}
    found = {name: re.search(pattern, output) for name, pattern in patterns.items()}
    if missing := [name for name, match in found.items() if match is None]:
        sys.exit(f"error: no {missing} in llama-perplexity's output:\n{output[-2000:]}")
    return {name: float(match[1]) / (100 if name == "top1" else 1) for name, match in found.items() if match}


# galley ------------------------------------------------------------------------------------------------------------


# --dense: the same numbers, much faster than MLX's quantized CPU kernel.
STOCK = ["--kernels", "stock", "--dense", "--kv-quant", "off"]
FUSED = ["--kernels", "fused", "--kv-quant", "off"]


def galley_logits(binary: pathlib.Path, model: pathlib.Path, window: np.ndarray, flags: list[str]) -> np.ndarray:
    """Logits [CONTEXT, vocabulary] of one window, float32."""
    with tempfile.TemporaryDirectory() as folder:
        tokens, out = pathlib.Path(folder, "tokens.txt"), pathlib.Path(folder, "logits.f32")
        tokens.write_text(" ".join(map(str, window)) + "\n")
        run([binary, "logits", "--model", model, "--tokens", tokens, "--out", out, *flags])
        return np.fromfile(out, dtype="<f4").reshape(len(window), -1)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def galley_figures(binary: pathlib.Path, model: pathlib.Path, windows: np.ndarray, right: list[str],
                   fast: list[str]) -> dict[str, float]:
    """How far a run with the flags `fast` is from one with the flags `right`."""
    divergence, same, loss, base_loss = [], [], [], []
    for window in windows:
        scored = slice(CONTEXT // 2, CONTEXT - 1)
        following = window[CONTEXT // 2 + 1:]
        base, fused = (log_softmax(galley_logits(binary, model, window, flags)[scored]) for flags in (right, fast))
        divergence += list((np.exp(base) * (base - fused)).sum(axis=-1))
        same += list(base.argmax(axis=-1) == fused.argmax(axis=-1))
        rows = np.arange(len(following))
        loss += list(-fused[rows, following])
        base_loss += list(-base[rows, following])
    return {"kl": float(np.mean(divergence)), "kl_error": float(np.std(divergence) / np.sqrt(len(divergence))),
            "kl_median": float(np.median(divergence)), "top1": float(np.mean(same)),
            "perplexity": float(np.exp(np.mean(loss))), "base_perplexity": float(np.exp(np.mean(base_loss))),
            "positions": len(loss)}


def main() -> None:
    parser = argparse.ArgumentParser(description="KL divergence, top-1 agreement and perplexity of fast kernels.")
    parser.add_argument("--model", type=pathlib.Path, default=ROOT / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf")
    parser.add_argument("--galley", type=pathlib.Path, default=ROOT / "build" / "galley")
    parser.add_argument("--peer", type=pathlib.Path, default=ROOT / ".cache" / "peer" / "llama" / "bin")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--check", action="store_true", help="exit 1 if galley is worse than llama.cpp")
    parser.add_argument("--kv-quant", nargs="+", default=[], choices=["8", "4", "config"], help="measure these too")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    arguments = parser.parse_args()

    base = llama_base(arguments.peer, arguments.model, ROOT / ".cache" / "quality", arguments.threads)
    windows = base_windows(base)
    figures = {"galley": galley_figures(arguments.galley, arguments.model, windows, STOCK, FUSED),
               "llama.cpp": llama_figures(arguments.peer, arguments.model, base, arguments.threads)}
    for setting in arguments.kv_quant:
        figures[f"KV {setting}"] = galley_figures(arguments.galley, arguments.model, windows, [*FUSED, "--kv-dtype", "bf16"],
                                                  ["--kernels", "fused", "--kv-dtype", "bf16", "--kv-quant", setting])

    print(f"{'':12}{'KL a token':>12}{'+-':>9}{'median':>10}{'same top-1':>12}{'perplexity':>12}{'its fp32':>10}")
    for name, row in figures.items():
        print(f"{name:12}{row['kl']:12.5f}{row['kl_error']:9.5f}{row['kl_median']:10.5f}{row['top1']:11.1%} "
              f"{row['perplexity']:12.2f}{row['base_perplexity']:10.2f}")
    print(f"{arguments.model.name}, {figures['galley']['positions']} positions")
    if arguments.json:
        print(json.dumps(figures))
    ours, theirs = figures["galley"], figures["llama.cpp"]
    # Twice the standard error of the difference: what chance alone explains.
    if arguments.check and ours["kl"] > theirs["kl"] + 2 * math.hypot(ours["kl_error"], theirs["kl_error"]):
        sys.exit("error: galley's fused kernels diverge more than llama.cpp's")


if __name__ == "__main__":
    main()
