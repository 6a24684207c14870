#!/usr/bin/env python3
"""Measures galley against llama.cpp on this machine: `make bench`.

Both run the same model file, one after the other, in interleaved rounds; what counts is the median. llama.cpp runs
with whichever of its settings a first pass found fastest. Figures mean nothing on a busy machine, so the run refuses
to start on one; with --allow-loaded it goes on and stamps its results.

    bench/run.py [--rounds N] [--parts engine,sliding,server,neighbour,loading] [--allow-loaded] [--no-docs]

Writes bench/out/<time>.json and, unless --no-docs, docs/bench.json, docs/bench.md and docs/bench.svg.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import tempfile
from datetime import datetime
from statistics import median
from typing import Any

import loading
import machine
import report as reporting
from engines import Galley, LlamaCpp, Samples
from streams import LEVELS, Level, galley_command, llama_command, measure, serving

ROOT = pathlib.Path(__file__).resolve().parent.parent
WAVES = {1: 6, 4: 3, 16: 3}  # waves of each number of streams, in every round
SLIDING_BATCHES = (1, 8)
# An engine that waits at barriers needs minutes beside a neighbour where a quiet machine needs seconds: one row will do.
NEIGHBOUR_BATCHES = {"galley": (1, 16), "llama.cpp": (1,)}


class Bench(machine.QuietRun):
    def __init__(self, arguments: argparse.Namespace) -> None:
        super().__init__(arguments.allow_loaded)
        self.rounds: int = arguments.rounds
        self.model: pathlib.Path = arguments.model
        self.sliding_model: pathlib.Path = arguments.sliding_model
        self.binary: pathlib.Path = arguments.galley
        self.peer: pathlib.Path = arguments.peer
        self.threads: int = arguments.threads
        self.galley = Galley(self.binary, self.model, self.threads)
        self.llama = LlamaCpp(self.peer, self.model, self.threads)
        self.started = datetime.now()
        self.report: dict[str, Any] = {}

    def given_up(self) -> None:
        self.save()

    def engine(self) -> None:
        watch = self.step("llama.cpp: looking for its best settings")
        tuning = self.llama.tune()
        self.done(watch)
        samples = {engine.name: Samples() for engine in (self.galley, self.llama)}
        for number in range(1, self.rounds + 1):
            for engine in (self.galley, self.llama):
                watch = self.step(f"engine, round {number} of {self.rounds}: {engine.name}")
                engine.run(samples[engine.name])
                self.done(watch)
        self.report["engine"] = {name: _string_keys(s.medians()) for name, s in samples.items()}
        self.report["engine_samples"] = {name: {"prefill": s.prefill, "decode": {str(b): v for b, v in s.decode.items()}}
                                         for name, s in samples.items()}
        self.report["llama_settings"] = {"tuning": {str(b): speeds for b, speeds in tuning.items()},
                                         "best": {str(b): name for b, name in self.llama.best.items()}}

    def sliding(self) -> None:
        """Both engines on a model with sliding-window layers, if its file is there."""
        if not self.sliding_model.exists():
            print(f"{self.sliding_model.name} is not there: no figures for sliding windows")
            return
        engines = (Galley(self.binary, self.sliding_model, self.threads),
                   LlamaCpp(self.peer, self.sliding_model, self.threads))
        watch = self.step(f"{self.sliding_model.name}: looking for llama.cpp's best settings")
        engines[1].tune(SLIDING_BATCHES)
        self.done(watch)
        samples = {engine.name: Samples() for engine in engines}
        for number in range(1, self.rounds + 1):
            for engine in engines:
                watch = self.step(f"{self.sliding_model.name}, round {number} of {self.rounds}: {engine.name}")
                engine.run(samples[engine.name], SLIDING_BATCHES)
                self.done(watch)
        self.report["sliding"] = {"model": self.sliding_model.name} | {
            name: _string_keys(s.medians()) for name, s in samples.items()}

    def neighbour(self) -> None:
        quiet = {engine.name: Samples() for engine in (self.galley, self.llama)}
        noisy = {engine.name: Samples() for engine in (self.galley, self.llama)}
        for number in range(1, min(self.rounds, 2) + 1):
            for engine in (self.galley, self.llama):
                watch = self.step(f"busy neighbour, round {number}: {engine.name}")
                engine.run(quiet[engine.name], NEIGHBOUR_BATCHES[engine.name])
                self.done(watch)
                with machine.BusyNeighbour():
                    engine.run(noisy[engine.name], NEIGHBOUR_BATCHES[engine.name])
        self.report["neighbour"] = {}
        for name in quiet:
            before, beside = quiet[name].medians(), noisy[name].medians()
            entries = {"prefill": (before["prefill"], beside["prefill"])}
            entries |= {f"decode, B = {b}": (before["decode"][b], beside["decode"][b]) for b in before["decode"]}
            self.report["neighbour"][name] = {what: {"tok_s": there, "quiet_tok_s": here, "of_quiet": there / here}
                                              for what, (here, there) in entries.items()}

    def server(self) -> None:
        flash = self._best_flash()
        levels = {name: {level: Level() for level in LEVELS} for name in ("galley", "llama.cpp")}
        ready: list[float] = []
        footprint: dict[str, Any] = {"file_bytes": self.model.stat().st_size}
        for number in range(1, self.rounds + 1):
            watch = self.step(f"servers, round {number} of {self.rounds}: galley")
            with serving(galley_command(self.binary, self.model, self.threads)) as server:
                ready.append(server.ready_seconds)
                footprint["resident_ready"] = server.resident()
                measure(server.port, levels["galley"], WAVES, seed=number)
                footprint["resident_after"] = server.resident()
                kv = server.get("/stats")["kv"]
                footprint["kv_budget_bytes"] = kv["budget_bytes"]
                footprint["kv_peak_bytes"] = kv["used_bytes"] + kv["cached_bytes"]
            self.done(watch)
            watch = self.step(f"servers, round {number} of {self.rounds}: llama.cpp")
            with serving(llama_command(self.peer, self.model, self.threads, flash)) as server:
                measure(server.port, levels["llama.cpp"], WAVES, seed=number)
            self.done(watch)
        footprint["ready_seconds"] = median(ready)
        self.report["server"] = {name: {str(level): seen.summary() for level, seen in by_level.items()}
                                 for name, by_level in levels.items()}
        self.report["footprint"] = footprint
        self.report.setdefault("llama_settings", {})["server"] = {"flash_attention": flash}

    def loading(self) -> None:
        """How a larger model is loaded; made here, as no package brings one."""
        vocabulary = self.peer.parent / "src" / "models" / "ggml-vocab-qwen2.gguf"
        with tempfile.TemporaryDirectory(prefix="galley-loading-") as folder:
            path = pathlib.Path(folder) / "qwen2.5-0.5b-shape.gguf"
            loading.build(path, vocabulary)
            watch = self.step("loading a GGUF of half a billion parameters")
            seen = [loading.measure(self.binary, path, self.threads) for _ in range(self.rounds)]
            self.done(watch)
        self.report["loading"] = {key: median(entry[key] for entry in seen) for key in seen[0]}

    def _best_flash(self) -> str:
        """Whether llama-server is faster with flash attention, seen with the most streams."""
        speeds = {}
        for flash in ("on", "off"):
            watch = self.step(f"llama-server: trying -fa {flash}")
            most = max(LEVELS)
            level = {most: Level()}
            with serving(llama_command(self.peer, self.model, self.threads, flash)) as server:
                measure(server.port, level, {most: 2}, seed=0)
            speeds[flash] = median(level[most].speeds)
            self.done(watch)
        return max(speeds, key=lambda flash: speeds[flash])

    def save(self) -> pathlib.Path:
        """Writes what has been measured so far."""
        out = ROOT / "bench" / "out"
        out.mkdir(parents=True, exist_ok=True)
        path = out / f"{self.started:%Y%m%d-%H%M%S}.json"
        path.write_text(json.dumps(self.finish(), indent=2, ensure_ascii=False) + "\n")
        return path

    def finish(self) -> dict[str, Any]:
        self.report |= self.stamp() | {"model": self.model.name, "rounds": self.rounds,
                                       "about": {"galley": self.galley.about, "llama.cpp": self.llama.about}}
        return self.report


def _string_keys(medians: dict[str, Any]) -> dict[str, Any]:
    """JSON has string keys only; making them so at once keeps a fresh report and one read back alike."""
    return {"prefill": medians["prefill"], "decode": {str(batch): speed for batch, speed in medians["decode"].items()}}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measures galley against llama.cpp.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--parts", default="engine,sliding,server,neighbour,loading", help="comma-separated")
    parser.add_argument("--model", type=pathlib.Path, default=ROOT / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf")
    parser.add_argument("--sliding-model", type=pathlib.Path, default=ROOT / "models" / "gemma-3-270m-q4_k_m.gguf",
                        help="a model with sliding-window layers; optional")
    parser.add_argument("--galley", type=pathlib.Path, default=ROOT / "build" / "galley")
    parser.add_argument("--peer", type=pathlib.Path, default=ROOT / ".cache" / "peer" / "llama" / "bin")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--allow-loaded", action="store_true", help="run on a busy machine and stamp the result")
    parser.add_argument("--no-docs", action="store_true", help="leave docs/ alone")
    arguments = parser.parse_args()
    for path, command in ((arguments.galley, "make build"), (arguments.model, "make model"),
                          (arguments.peer / "llama-server", "make peer")):
        if not path.exists():
            parser.error(f"{path} is missing; make it with: {command}")
    return arguments


def main() -> None:
    arguments = parse()
    bench = Bench(arguments)
    parts = arguments.parts.split(",")
    for part in parts:
        {"engine": bench.engine, "sliding": bench.sliding, "server": bench.server, "neighbour": bench.neighbour,
         "loading": bench.loading}[part]()
        bench.save()
    result = bench.finish()
    print()
    print(reporting.as_text(result))
    if not arguments.no_docs and set(parts) >= {"engine", "server"}:
        docs = ROOT / "docs"
        docs.mkdir(exist_ok=True)
        (docs / "bench.json").write_text(bench.save().read_text())
        (docs / "bench.md").write_text(reporting.as_markdown(result))
        (docs / "bench.svg").write_text(reporting.as_svg(result))
        print("\nwrote docs/bench.json, docs/bench.md and docs/bench.svg")


if __name__ == "__main__":
    main()
