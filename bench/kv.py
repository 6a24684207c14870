#!/usr/bin/env python3
"""Measures what galley does with KV memory on this machine: part of `make bench`.

  shared  32 rows under one system prompt of 1,000 tokens: how much is computed, how much is stored
  waste   KV that is held and not written to, on a long-tailed mix of lengths; beside it what contiguous caches reserve
  rows    rows of 4,096 tokens in one budget, and decode speed at that context, for each type of KV
  gap     gaps between the tokens of running streams while a prompt of 8,000 tokens is prefilled, and how far the
          process's memory grew by then beside what /stats says
  index   what finding a prompt's known beginning costs, by the number of blocks that are known

    bench/kv.py [--parts shared,waste,rows,gap,index] [--allow-loaded] [--no-docs]

Writes docs/kv.json, docs/kv.md and docs/kv.svg unless --no-docs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import pathlib
import random
import subprocess
import time
from html import escape
from math import exp
from statistics import NormalDist
from typing import Any

import machine
from report import markdown_table, text_table
from streams import WORDS, RunningServer, quantile, serving

ROOT = pathlib.Path(__file__).resolve().parent.parent
SYSTEM_TOKENS, SHARED_ROWS = 1000, 32
MIX_ROWS = 120
CONTEXT = 4096
BUDGET_GB = 1.0
PARTS = ("shared", "waste", "rows", "gap", "index")
GAP_ROWS, GAP_PROMPT, GAP_QUIET_S = 4, 8000, 4.0
# Flags of each type of KV, the plainest first: the others are compared with it.
KV_TYPES = {"bf16": ["--kv-dtype", "bf16"], "f16": ["--kv-dtype", "f16"], "8-bit": ["--kv-quant", "8"],
            "4-bit": ["--kv-quant", "4"]}


def words(count: int, seed: int) -> str:
    """Text of so many tokens in the default model's vocabulary."""
    return " " + " ".join(random.Random(seed).choices(WORDS, k=count))


class Bench(machine.QuietRun):
    def __init__(self, arguments: argparse.Namespace) -> None:
        super().__init__(arguments.allow_loaded)
        self.binary, self.model, self.threads = arguments.galley, arguments.model, arguments.threads
        self.report: dict[str, Any] = {}

    def command(self, *flags: str) -> list[str]:
        return [str(self.binary), "serve", str(self.model), "--threads", str(self.threads), "--log-level", "warn", *flags]

    def shared(self) -> None:
        watch = self.step(f"{SHARED_ROWS} rows under one system prompt")
        system = words(SYSTEM_TOKENS, 1)
        prompts = [system + words(20 + i, 100 + i) for i in range(SHARED_ROWS)]
        with serving(self.command("--batch", str(SHARED_ROWS), "--prompt-concurrency", str(SHARED_ROWS))) as server:
            seen = asyncio.run(_watched(server, [(prompt, 32) for prompt in prompts]))
            computed = server.get("/stats")["throughput"]["prompt_tokens"]
        own = sum(stream.prompt_tokens - SYSTEM_TOKENS for stream in seen.streams)
        most = max(seen.kv, key=lambda kv: kv["used_bytes"])
        per_token = most["budget_bytes"] / (most["blocks_total"] * most["block_tokens"])
        needed = (SYSTEM_TOKENS + own + 32 * SHARED_ROWS) * per_token
        self.report["shared"] = {
            "rows": SHARED_ROWS, "system_tokens": SYSTEM_TOKENS, "own_tokens": own, "computed_tokens": computed,
            "work": (computed - own) / SYSTEM_TOKENS, "peak_bytes": most["used_bytes"], "needed_bytes": needed,
            "bytes": most["used_bytes"] / needed}
        self.done(watch)

    def waste(self) -> None:
        watch = self.step("a long-tailed mix of lengths")
        # Log-normal, as chats are: half below 245 tokens, some above 2,000; a third of each is generated. Evenly spaced
        # quantiles in random order, so that a short run has the whole mix.
        mix = NormalDist(5.5, 1.0)
        lengths = [min(3000, max(24, round(exp(mix.inv_cdf((i + 0.5) / MIX_ROWS))))) for i in range(MIX_ROWS)]
        random.Random(7).shuffle(lengths)
        requests = [(words(max(8, n * 2 // 3), 1000 + i), max(8, n // 3)) for i, n in enumerate(lengths)]
        with serving(self.command("--batch", "16", "--prompt-cache", "0")) as server:
            seen = asyncio.run(_watched(server, requests))
        held = sum(kv["used_bytes"] for kv in seen.kv)
        unused = sum(kv["unused_bytes"] for kv in seen.kv)
        # What contiguous caches would hold at the same moments: of each running row, the room of the longest.
        tokens = reserved = 0
        for moment in seen.rows:
            tokens += sum(now for now, _ in moment)
            reserved += len(moment) * max((most for _, most in moment), default=0)
        self.report["waste"] = {"requests": MIX_ROWS, "tokens_median": quantile(lengths, 0.5), "tokens_most": max(lengths),
                                "paged": unused / held, "contiguous": 1 - tokens / reserved, "samples": len(seen.kv)}
        self.done(watch)

    def rows(self) -> None:
        self.report["rows"] = {}
        for name, flags in KV_TYPES.items():
            watch = self.step(f"{name} KV at {CONTEXT} tokens")
            with serving(self.command("--batch", "2", "--kv-budget", str(BUDGET_GB), *flags)) as server:
                kv = server.get("/stats")["kv"]
            blocks = -(-CONTEXT // kv["block_tokens"])
            output = subprocess.run([self.binary, "bench", "--model", self.model, "--threads", str(self.threads), "--batch",
                                     "1,4", "--prompt", str(CONTEXT - 64), "--generate", "48", "--repeat", "1", "--json", *flags],
                                    capture_output=True, text=True, check=True, timeout=1800).stdout
            decode = json.loads(output.strip().splitlines()[-1])["decode"]
            self.report["rows"][name] = {"rows": kv["blocks_total"] // blocks,
                                         "bytes_a_token": kv["budget_bytes"] / kv["blocks_total"] / kv["block_tokens"],
                                         "decode_tok_s": {str(entry["batch"]): entry["tok_s"] for entry in decode}}
            self.done(watch)

    def gap(self) -> None:
        watch = self.step(f"{GAP_ROWS} running streams beside a prompt of {GAP_PROMPT} tokens")
        with serving(self.command("--batch", "8")) as server:
            before = server.resident()["own"]
            self.report["gap"] = asyncio.run(_gaps(server))
            after, kv = server.resident()["own"], server.get("/stats")["kv"]
        self.report["memory"] = {"process_bytes": after - before, "kv_bytes": kv["used_bytes"] + kv["cached_bytes"]}
        self.done(watch)

    def index(self) -> None:
        watch = self.step("the prefix index")
        output = subprocess.run([self.binary.parent / "bench" / "micro" / "bench_prefix_index", "--benchmark_format=json"],
                                capture_output=True, text=True, check=True, timeout=300).stdout
        self.report["index"] = {run["name"].removeprefix("hit/"): run["real_time"]
                                for run in json.loads(output)["benchmarks"]}
        self.done(watch)

    def finish(self) -> dict[str, Any]:
        return self.report | self.stamp() | {"model": self.model.name}


# Clients -----------------------------------------------------------------------------------------------------------


class Stream:
    """One streamed completion; `arrivals` holds the time of each token."""

    def __init__(self, prompt: str, most: int) -> None:
        self.prompt, self.most = prompt, most
        self.arrivals: list[float] = []
        self.prompt_tokens = 0
        self.running = False

    async def run(self, port: int) -> None:
        body = json.dumps({"model": "any", "prompt": self.prompt, "max_tokens": self.most, "temperature": 0,
                           "stream": True, "ignore_eos": True, "stream_options": {"include_usage": True}}).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                         b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            if b" 200 " not in (status := await reader.readline()):
                raise RuntimeError(f"the server answered {status!r} {await reader.read()!r}")
            while line := await reader.readline():
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                if event.get("usage"):
                    self.prompt_tokens = event["usage"]["prompt_tokens"]
                if any(choice.get("text") for choice in event.get("choices", [])):
                    self.arrivals.append(time.perf_counter())
                    self.running = True
        finally:
            self.running = False
            writer.close()


class Watched:
    def __init__(self) -> None:
        self.streams: list[Stream] = []
        self.kv: list[dict[str, Any]] = []                 # /stats, again and again
        self.rows: list[list[tuple[int, int]]] = []        # at the same times: tokens now and at most, of running rows


async def _watched(server: RunningServer, requests: list[tuple[str, int]]) -> Watched:
    """All requests at once, and the server's KV figures every few milliseconds until the last is answered."""
    seen = Watched()
    seen.streams = [Stream(prompt, most) for prompt, most in requests]
    work = asyncio.gather(*(stream.run(server.port) for stream in seen.streams))
    while not work.done():
        kv = (await asyncio.to_thread(server.get, "/stats"))["kv"]
        if kv["used_bytes"] > 0:
            seen.kv.append(kv)
            prompt = [len(stream.prompt.split()) for stream in seen.streams]
            seen.rows.append([(n + len(stream.arrivals), n + stream.most)
                              for n, stream in zip(prompt, seen.streams) if stream.running])
        await asyncio.sleep(0.02)
    await work
    seen.rows = [moment for moment in seen.rows if moment]
    return seen


async def _gaps(server: RunningServer) -> dict[str, float]:
    async def running() -> list[Stream]:
        streams = [Stream(words(20, seed), 8000) for seed in range(GAP_ROWS)]
        for stream in streams:
            stream.task = asyncio.create_task(stream.run(server.port))
        while not all(len(stream.arrivals) > 400 for stream in streams):
            await asyncio.sleep(0.05)
        return streams

    streams = await running()
    begin = time.perf_counter()
    long = Stream(words(GAP_PROMPT, 99), 1)
    await long.run(server.port)
    end = long.arrivals[0]
    await asyncio.sleep(GAP_QUIET_S + 0.5)  # the rows are longer now than before, and slower for that alone
    for stream in streams:
        stream.task.cancel()
    await asyncio.gather(*(stream.task for stream in streams), return_exceptions=True)

    def gaps(after: float, until: float) -> dict[str, float]:
        seen = [(b - a) * 1e3 for stream in streams for a, b in zip(stream.arrivals, stream.arrivals[1:])
                if after < a and b <= until]
        return {"p50_ms": quantile(seen, 0.5), "p99_ms": quantile(seen, 0.99)}

    first = min(stream.arrivals[0] for stream in streams)
    return {"rows": GAP_ROWS, "prompt_tokens": long.prompt_tokens, "prefill_s": end - begin,
            "row_tokens": [sum(arrival < moment for arrival in streams[0].arrivals) for moment in (begin, end)],
            "before": gaps(max(first, begin - GAP_QUIET_S), begin), "during": gaps(begin, end),
            "after": gaps(end, end + GAP_QUIET_S)}


# Results -----------------------------------------------------------------------------------------------------------


def tables(report: dict[str, Any]) -> list[tuple[str, list[str], list[list[str]]]]:
    parts = []
    if seen := report.get("shared"):
        parts.append((f"{seen['rows']} rows under one system prompt of {seen['system_tokens']} tokens", ["", "measured"], [
            ["prompt tokens in all", str(seen["rows"] * seen["system_tokens"] + seen["own_tokens"])],
            ["prompt tokens computed", str(seen["computed_tokens"])],
            ["system prompt computed, times", f"{seen['work']:.2f}"],
            ["KV held at the peak", f"{seen['peak_bytes'] / 1e6:.1f} MB"],
            ["of one system prompt and the rows' own tokens", f"{seen['bytes']:.2f}×"]]))
    if seen := report.get("waste"):
        parts.append((f"Waste, {seen['requests']} requests, half of them below {seen['tokens_median']} tokens, the longest "
                      f"{seen['tokens_most']}", ["", "of the KV held, not in use"], [
                          ["paged", f"{seen['paged'] * 100:.1f} %"],
                          ["contiguous caches, as long as the longest row", f"{seen['contiguous'] * 100:.1f} %"]]))
    if seen := report.get("rows"):
        first = next(iter(seen.values()))
        parts.append((f"Types of KV: rows of {CONTEXT} tokens in {BUDGET_GB:g} GB, decode at that context",
                      ["", "rows", "of " + next(iter(seen)), "bytes a token", "B=1, tok/s", "B=4, tok/s"], [
                          [name, str(e["rows"]), f"{first['bytes_a_token'] / e['bytes_a_token']:.2f}×",
                           f"{e['bytes_a_token']:.0f}", *(f"{e['decode_tok_s'][b]:.1f}" for b in ("1", "4"))]
                          for name, e in seen.items()]))
    if seen := report.get("gap"):
        worst = seen["during"]["p99_ms"]
        begin, end = seen["row_tokens"]
        parts.append((f"{seen['rows']} running streams beside a prompt of {seen['prompt_tokens']} tokens",
                      ["gap between tokens", "p50, ms", "p99, ms", "p99 while prefilling, of this p50"], [
                          [label, *(f"{seen[when][p]:.1f}" for p in ("p50_ms", "p99_ms")),
                           f"{worst / seen[when]['p50_ms']:.2f}×"]
                          for when, label in (("before", f"before (answers of {begin} tokens so far)"),
                                              ("during", f"while it is prefilled ({seen['prefill_s']:.1f} s)"),
                                              ("after", f"after (answers of {end} tokens)"))]))
    if seen := report.get("memory"):
        parts.append(("What /stats says and what the process holds", ["", "measured"], [
            ["KV in use and cached, by /stats", f"{seen['kv_bytes'] / 1e6:.1f} MB"],
            ["growth of the process's own memory since it was ready", f"{seen['process_bytes'] / 1e6:.1f} MB"],
            ["ratio", f"{seen['process_bytes'] / seen['kv_bytes']:.2f}"]]))
    if seen := report.get("index"):
        parts.append(("Prefix index: finding the 20 known blocks of a prompt", ["blocks known", "microseconds"],
                      [[blocks, f"{time:.1f}"] for blocks, time in seen.items()]))
    return parts


def caption(report: dict[str, Any]) -> str:
    about = report["machine"]
    stamp = "" if report["quiet"] else " The machine was loaded while this ran: don't quote these figures."
    return (f"{report['model']}; {about['cpu']}, {about['cores']} cores ({', '.join(about['features'])}); {report['date']}; "
            f"others used at most {report['others_percent_max']:.1f} % of the machine.{stamp}")


def as_markdown(report: dict[str, Any]) -> str:
    parts = [f"## {title}\n\n{markdown_table(heading, rows)}" for title, heading, rows in tables(report)]
    return "\n\n".join(["# KV memory\n\nMade by `make bench`; the same figures are in `kv.json`.", caption(report),
                        "![chart](kv.svg)", *parts]) + "\n"


def as_svg(report: dict[str, Any]) -> str:
    """One bar chart a part: what galley needs beside what it would without."""
    panels: list[tuple[str, list[tuple[str, float, str]]]] = []
    if seen := report.get("shared"):
        panels.append(("Prompt tokens computed", [
            ("each alone", seen["rows"] * seen["system_tokens"] + seen["own_tokens"], ""),
            ("shared", seen["computed_tokens"], "")]))
    if seen := report.get("waste"):
        panels.append(("KV held and not used, %", [("contiguous", seen["contiguous"] * 100, " %"),
                                                   ("paged", seen["paged"] * 100, " %")]))
    if seen := report.get("rows"):
        panels.append((f"Rows of {CONTEXT} tokens in {BUDGET_GB:g} GB", [(name, e["rows"], "") for name, e in seen.items()]))
    if seen := report.get("gap"):
        panels.append(("Gap between tokens, p99, ms", [("before", seen["before"]["p99_ms"], " ms"),
                                                       ("8k prompt", seen["during"]["p99_ms"], " ms"),
                                                       ("after", seen["after"]["p99_ms"], " ms")]))
    width, height, top, bar_height = 260, 250, 60, 150
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {len(panels) * width + 20} {height}" '
           f'width="{len(panels) * width + 20}" height="{height}" font-family="system-ui, sans-serif" fill="#222222">',
           f'<rect width="{len(panels) * width + 20}" height="{height}" fill="white"/>']
    for index, (title, bars) in enumerate(panels):
        left = 20 + index * width
        out.append(f'<text x="{left}" y="34" font-size="14" font-weight="600">{escape(title)}</text>')
        most = max(value for _, value, _ in bars) or 1
        step = (width - 30) / len(bars)
        for place, (label, value, unit) in enumerate(bars):
            x, tall = left + place * step, bar_height * value / most
            colour = "#b8b8b8" if place == 0 else "#0b7a75"
            out.append(f'<rect x="{x:.0f}" y="{top + bar_height - tall:.1f}" width="{step * 0.7:.0f}" height="{tall:.1f}" '
                       f'fill="{colour}"/>')
            text = f"{value:.0f}" if value >= 100 or value == int(value) else f"{value:.1f}"
            out.append(f'<text x="{x + step * 0.35:.0f}" y="{top + bar_height - tall - 6:.1f}" font-size="12" '
                       f'text-anchor="middle">{text}{unit}</text>')
            out.append(f'<text x="{x + step * 0.35:.0f}" y="{top + bar_height + 18}" font-size="12" text-anchor="middle">'
                       f'{escape(label)}</text>')
    note = escape(caption(report))
    out.append(f'<text x="20" y="{height - 8}" font-size="10">{note}</text>')
    return "\n".join([*out, "</svg>"]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="What galley does with KV memory.")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--model", type=pathlib.Path, default=ROOT / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf")
    parser.add_argument("--galley", type=pathlib.Path, default=ROOT / "build" / "galley")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--allow-loaded", action="store_true", help="run on a busy machine and stamp the result")
    parser.add_argument("--no-docs", action="store_true", help="print only")
    arguments = parser.parse_args()

    bench = Bench(arguments)
    for part in arguments.parts.split(","):
        if part not in PARTS:
            parser.error(f"no part is called {part}; there are {', '.join(PARTS)}")
        getattr(bench, part)()
    report = bench.finish()
    print("\n" + caption(report))
    for title, heading, rows in tables(report):
        print(f"\n{title}\n{text_table(heading, rows)}")
    if not arguments.no_docs:
        docs = ROOT / "docs"
        (docs / "kv.json").write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n")
        (docs / "kv.md").write_text(as_markdown(report))
        (docs / "kv.svg").write_text(as_svg(report))


if __name__ == "__main__":
    main()
