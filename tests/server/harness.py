"""Starts the real program for a test and talks to it. Knows nothing of pytest."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import httpx
import openai

ROOT = pathlib.Path(__file__).resolve().parents[2]
BINARY = pathlib.Path(os.environ.get("GALLEY_BIN", ROOT / "build" / "galley"))
MODEL = pathlib.Path(os.environ.get("GALLEY_MODEL", ROOT / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"))
START_SECONDS = 120
STOP_SECONDS = 20  # less than the default drain timeout: an idle server must not wait for it
# How long a cancelled row may take to vanish from /stats. A step takes milliseconds; the rest is for a loaded machine.
SETTLE_SECONDS = 10
T = TypeVar("T")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def settled(read: Callable[[], T], condition: Callable[[T], bool], complaint: Callable[[T], str],
            seconds: float = SETTLE_SECONDS) -> T:
    """Reads until the condition holds of what was read, and returns that."""
    deadline = time.monotonic() + seconds
    while not condition(value := read()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds} s: {complaint(value)}")
        time.sleep(0.01)
    return value


class Server:
    """One running `galley serve`."""

    def __init__(self, *flags: str, model: pathlib.Path = MODEL, batch: int = 16) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.flags = [str(BINARY), "serve", str(model), "--port", str(self.port), "--batch", str(batch), *flags]
        self._log = tempfile.TemporaryFile()
        self.process = subprocess.Popen(self.flags, stdout=self._log, stderr=subprocess.STDOUT,
                                        stdin=subprocess.DEVNULL)

    def log(self) -> str:
        file = self._log.fileno()  # pread: the process writes at the position that a seek would move
        return os.pread(file, os.fstat(file).st_size, 0).decode(errors="replace")

    def wait_log(self, words: str) -> str:
        """What the server has printed once `words` are in it: a line may follow what it tells of by a moment."""
        return settled(self.log, lambda log: words in log, lambda log: f"{words}; printed is\n{log}")

    def wait_ready(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise RuntimeError(f"{self.flags} exited with {self.process.returncode}:\n{self.log()}")
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{self.url}/health", timeout=5).status_code == 200:
                    return
            time.sleep(0.05)
        raise RuntimeError(f"{self.flags} was not ready within {START_SECONDS} s:\n{self.log()}")

    def terminate(self) -> int:
        """SIGTERM, then the exit status; kills a process that does not go."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(timeout=STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise RuntimeError(f"SIGTERM did not end {self.flags} within {STOP_SECONDS} s:\n{self.log()}") from None

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=300)

    def stats(self) -> dict[str, Any]:
        return httpx.get(f"{self.url}/stats", timeout=30).raise_for_status().json()

    def model_id(self) -> str:
        return httpx.get(f"{self.url}/v1/models", timeout=30).raise_for_status().json()["data"][0]["id"]

    def post(self, path: str, body: Any, timeout: float = 120) -> httpx.Response:
        """Posts JSON, or bytes as they are."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return httpx.post(f"{self.url}{path}", content=content, headers={"Content-Type": "application/json"},
                          timeout=timeout)

    def wait_stats(self, condition: Callable[[dict[str, Any]], bool], what: str,
                   seconds: float = SETTLE_SECONDS) -> dict[str, Any]:
        """Polls /stats until the condition holds."""
        return settled(self.stats, condition, lambda stats: f"{what}; batch is {stats['batch']}", seconds)

    def wait_idle(self) -> dict[str, Any]:
        return self.wait_stats(lambda s: not any(s["batch"][k] for k in
                                                 ("active_rows", "prefilling_rows", "pending_rows")), "no rows left")


@contextlib.contextmanager
def running(*flags: str, **options: Any) -> Iterator[Server]:
    """A ready server for the time of a `with`; it must end well on SIGTERM."""
    server = Server(*flags, **options)
    try:
        server.wait_ready()
        yield server
    except BaseException:
        server.process.kill()
        server.process.wait()
        raise
    status = server.terminate()
    assert status == 0, f"exit status {status} after SIGTERM:\n{server.log()}"


class RawStream:
    """A streaming request over a bare socket, so that a test decides when bytes are read and when the client leaves."""

    def __init__(self, server: Server, path: str, body: dict[str, Any]) -> None:
        content = json.dumps(body).encode()
        self.socket = socket.create_connection(("127.0.0.1", server.port), timeout=120)
        self.socket.sendall(f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                            f"Content-Length: {len(content)}\r\n\r\n".encode() + content)
        self.received = b""

    def read_until(self, mark: bytes, times: int = 1) -> None:
        while self.received.count(mark) < times:
            data = self.socket.recv(65536)
            if not data:
                raise AssertionError(f"the server closed the connection after {self.received!r}")
            self.received += data

    def leave(self) -> None:
        self.socket.close()


def long_chat(tokens: int = 4000, stream: bool = True) -> dict[str, Any]:
    """A request that runs for a long time unless it is cancelled."""
    return {"model": "any", "messages": [{"role": "user", "content": "Tell me a long story."}], "max_tokens": tokens,
            "ignore_eos": True, "temperature": 0, "stream": stream}


def chat_arguments(prompt: str, **changes: Any) -> dict[str, Any]:
    """Arguments of a short greedy chat request for the SDK; ignore_eos is a field of ours."""
    arguments: dict[str, Any] = {"model": "any", "messages": [{"role": "user", "content": prompt}],
                                 "temperature": 0, "max_tokens": 24}
    arguments.update(changes)
    return arguments


def at_once(tasks: Sequence[Callable[[], Any]]) -> list[Any]:
    """Runs every task on a thread of its own, all released together; results in order. The first error is raised."""
    results: list[Any] = [None] * len(tasks)
    errors: list[BaseException] = []
    gate = threading.Barrier(len(tasks))

    def work(index: int) -> None:
        try:
            gate.wait()
            results[index] = tasks[index]()
        except BaseException as error:  # noqa: BLE001: handed to the caller below
            errors.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(tasks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


def stream_text(client: openai.OpenAI, **arguments: Any) -> tuple[str, str | None]:
    """Streams a chat completion to its end; the joined deltas and the finish reason."""
    text, finish = "", None
    for chunk in client.chat.completions.create(stream=True, **arguments):
        for choice in chunk.choices:
            text += choice.delta.content or ""
            finish = choice.finish_reason or finish
    return text, finish
