"""Speed as clients see it: waves of concurrent streams through a server, over bare asyncio sockets."""

from __future__ import annotations

import asyncio
import json
import pathlib
import random
import signal
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median

from machine import resident_bytes

LEVELS = (1, 4, 16)
PROMPT_TOKENS = 130
GENERATE = 64
# Each of these is one token with the space before it, in the vocabulary of the default model.
WORDS = ("time people water house world school family night story music paper river light money table garden winter "
         "summer morning country mother father brother sister doctor teacher letter number question answer window "
         "street market forest mountain village island ocean animal flower bread coffee kitchen picture".split())


def prompts(count: int, seed: int) -> list[str]:
    """Prompts of about PROMPT_TOKENS tokens that share no beginning, so that no server can reuse another's work."""
    source = random.Random(seed)
    return [" " + " ".join(source.choices(WORDS, k=PROMPT_TOKENS)) for _ in range(count)]


@dataclass
class Stream:
    """What one client saw; times in seconds."""

    started: float
    arrivals: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    tokens: int = 0

    @property
    def first(self) -> float:
        return self.arrivals[0] - self.started

    @property
    def gaps(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.arrivals, self.arrivals[1:])]


async def _stream(port: int, prompt: str) -> Stream:
    body = json.dumps({"model": "any", "prompt": prompt, "max_tokens": GENERATE, "temperature": 0, "stream": True,
                       "ignore_eos": True, "stream_options": {"include_usage": True}}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    seen = Stream(time.perf_counter())
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                 b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    status = await reader.readline()
    if b" 200 " not in status:
        raise RuntimeError(f"the server answered {status!r} {await reader.read()!r}")
    while line := await reader.readline():
        if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
            continue
        event = json.loads(line[6:])
        if event.get("usage"):
            seen.prompt_tokens = event["usage"]["prompt_tokens"]
            seen.tokens = event["usage"]["completion_tokens"]
        if any(choice.get("text") for choice in event.get("choices", [])):
            seen.arrivals.append(time.perf_counter())
    writer.close()
    if seen.tokens != GENERATE or not seen.arrivals:
        raise RuntimeError(f"expected {GENERATE} tokens, the server counted {seen.tokens}")
    return seen


async def _wave(port: int, texts: list[str]) -> list[Stream]:
    return list(await asyncio.gather(*(_stream(port, text) for text in texts)))


@dataclass
class Level:
    """All waves with the same number of concurrent streams."""

    speeds: list[float] = field(default_factory=list)  # tokens a second, all streams together, one entry a wave
    first: list[float] = field(default_factory=list)   # time to first token
    gaps: list[float] = field(default_factory=list)    # between two tokens of a stream
    prompt_tokens: list[int] = field(default_factory=list)

    def add(self, wave: list[Stream]) -> None:
        span = max(s.arrivals[-1] for s in wave) - min(s.started for s in wave)
        self.speeds.append(sum(s.tokens for s in wave) / span)
        self.first += [s.first for s in wave]
        self.gaps += [gap for s in wave for gap in s.gaps]
        self.prompt_tokens += [s.prompt_tokens for s in wave]

    def summary(self) -> dict:
        return {"tok_s": median(self.speeds), "ttft_p50_ms": quantile(self.first, 0.5) * 1e3,
                "ttft_p95_ms": quantile(self.first, 0.95) * 1e3, "itl_p50_ms": quantile(self.gaps, 0.5) * 1e3,
                "itl_p95_ms": quantile(self.gaps, 0.95) * 1e3, "prompt_tokens": median(self.prompt_tokens)}


def quantile(values: list[float], share: float) -> float:
    """Nearest rank."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def measure(port: int, levels: dict[int, Level], waves: dict[int, int], seed: int) -> None:
    """Runs the waves of every level, after one wave to warm up, and adds what was seen."""
    asyncio.run(_wave(port, prompts(2, seed)))
    for concurrency, level in levels.items():
        for wave in range(waves[concurrency]):
            level.add(asyncio.run(_wave(port, prompts(concurrency, seed + 1000 * concurrency + wave + 1))))


@dataclass
class RunningServer:
    port: int
    process: subprocess.Popen
    ready_seconds: float

    def resident(self) -> dict[str, int]:
        return resident_bytes(self.process.pid)

    def get(self, path: str) -> dict:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=30) as response:
            return json.load(response)


@contextmanager
def serving(command: list[str]) -> Iterator[RunningServer]:
    """Starts a server (`command` lacks only the port), waits for /health, and stops it at the end."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryFile("w+") as log:
        start = time.perf_counter()
        process = subprocess.Popen([*command, "--port", str(port)], stdout=log, stderr=subprocess.STDOUT)
        try:
            while True:
                try:
                    with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as response:
                        if response.status == 200:
                            break
                except OSError:
                    pass
                if process.poll() is not None or time.perf_counter() - start > 120:
                    log.seek(0)
                    raise RuntimeError(f"{command} did not become ready:\n{log.read()[-2000:]}")
                time.sleep(0.005)
            yield RunningServer(port, process, time.perf_counter() - start)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def galley_command(binary: pathlib.Path, model: pathlib.Path, threads: int) -> list[str]:
    return [str(binary), "serve", str(model), "--batch", str(max(LEVELS)), "--threads", str(threads), "--log-level",
            "warn"]


def llama_command(folder: pathlib.Path, model: pathlib.Path, threads: int, flash: str) -> list[str]:
    slots = max(LEVELS)
    return [str(folder / "llama-server"), "-m", str(model), "-np", str(slots), "-c", str(slots * 256), "-t",
            str(threads), "-tb", str(threads), "-fa", flash, "--cache-ram", "0", "--no-ui", "--offline"]
