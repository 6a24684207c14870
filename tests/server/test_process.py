"""The program as an operator meets it: start, bad starts, SIGTERM."""

import json
import pathlib
import signal
import socket
import subprocess
import time

import httpx
import pytest
from harness import BINARY, MODEL, RawStream, Server, long_chat, running

CHAT = "/v1/chat/completions"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(BINARY), *arguments], capture_output=True, text=True, timeout=120,
                          stdin=subprocess.DEVNULL, check=False)


def assert_one_clear_line(result: subprocess.CompletedProcess[str], *words: str) -> None:
    assert result.returncode != 0
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, result.stderr
    for word in words:
        assert word in lines[0]


def test_a_taken_port() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert_one_clear_line(run("serve", str(MODEL), "--port", port), port)


def test_a_model_that_is_not_there() -> None:
    assert_one_clear_line(run("serve", "no/such/model.gguf"), "no/such/model.gguf")


@pytest.mark.parametrize("content", [b"", b"GGUF", b"not a model at all" * 100])
def test_a_file_that_is_no_model(tmp_path: pathlib.Path, content: bytes) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(content)
    assert_one_clear_line(run("serve", str(path)), "broken.gguf")


@pytest.mark.parametrize("size", [1 << 12, 1 << 20, 50_000_000, -1])
def test_a_truncated_model(tmp_path: pathlib.Path, size: int) -> None:
    path = tmp_path / "truncated.gguf"
    path.write_bytes(MODEL.read_bytes()[:size])
    assert_one_clear_line(run("serve", str(path)), "truncated.gguf")


def test_an_unknown_command_is_named() -> None:
    assert_one_clear_line(run("frobnicate"), "frobnicate", "serve")


@pytest.mark.parametrize("flags, words", [
    (["--no-such-flag"], ["no-such-flag"]), (["--batch", "0"], ["batch"]), (["--batch", "many"], ["batch"]),
    (["--port", "99999"], ["port"]), (["--allowed-origin", "example.com"], ["allowed-origin", "https://"]), (["--kernels", "magic"], ["kernels"]), (["--kv-budget", "-1"], ["kv-budget", "above 0"]),
])
def test_bad_flags(flags: list[str], words: list[str]) -> None:
    assert_one_clear_line(run("serve", str(MODEL), *flags), *words)


def test_help_and_version() -> None:
    for arguments in (["--help"], ["serve", "--help"], ["--version"]):
        result = run(*arguments)
        assert result.returncode == 0
        assert result.stdout
    assert "--batch" in run("serve", "--help").stdout


def test_generate_answers_on_standard_output() -> None:
    result = run("generate", str(MODEL), "--raw", "-p", "The capital of France is", "--max-tokens", "4",
                 "--temperature", "0")
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(" Paris")
    assert run("generate", str(MODEL), "-p", "Name a colour.", "--max-tokens", "8").stdout.strip()


def test_doctor_describes_the_machine() -> None:
    result = run("doctor")
    assert result.returncode == 0, result.stderr
    assert "MLX" in result.stdout and "0.32.4" in result.stdout


def test_bench_ends_in_one_json_object() -> None:
    result = run("bench", "--model", str(MODEL), "--batch", "1,4", "--prompt", "32", "--generate", "8", "--json")
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout.strip().splitlines()[-1])
    assert set(report) >= {"model", "isa", "threads", "kernels", "prefill", "decode"}
    assert set(report["prefill"]) >= {"tokens", "tok_s"}
    assert [set(entry) >= {"batch", "tok_s", "step_ms"} for entry in report["decode"]] == [True, True]
    assert [entry["batch"] for entry in report["decode"]] == [1, 4]
    assert all(entry["tok_s"] > 0 for entry in report["decode"])


def test_the_ready_card_tells_what_a_newcomer_needs() -> None:
    with running(batch=16) as server:
        card = server.wait_log("stop with Ctrl-C")
        assert server.url in card
        assert "curl" in card
        assert "16" in card and "fused" in card
        assert MODEL.stem.split(".")[0] in card


def test_health() -> None:
    with running(batch=2) as server:
        assert httpx.get(f"{server.url}/health").status_code == 200


def test_sigterm_ends_a_server_that_is_still_loading() -> None:
    server = Server(batch=4)
    while True:  # it answers before it has loaded its model
        try:
            assert httpx.get(f"{server.url}/health", timeout=5).status_code in (200, 503)
            break
        except httpx.TransportError:
            assert server.process.poll() is None, server.log()
    assert server.terminate() == 0


@pytest.mark.parametrize("batch", [1, 4])
def test_sigterm_lets_running_requests_finish(batch: int) -> None:
    server = Server(batch=batch)
    try:
        server.wait_ready()
        stream = RawStream(server, CHAT, long_chat(tokens=150))
        stream.read_until(b"data: ", 3)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.1)
        with pytest.raises((httpx.TransportError, AssertionError)):  # no new work: refused or 503
            assert httpx.post(f"{server.url}{CHAT}", json=long_chat(tokens=1, stream=False),
                              timeout=30).status_code == 200
        stream.read_until(b"data: [DONE]")
        assert b'"finish_reason":"length"' in stream.received.replace(b" ", b"")
        assert server.terminate() == 0
    finally:
        server.process.kill()


def test_the_drain_ends_when_its_time_is_over() -> None:
    server = Server("--drain-timeout", "1", batch=4)
    try:
        server.wait_ready()
        stream = RawStream(server, CHAT, long_chat(tokens=7000))
        stream.read_until(b"data: ", 3)
        start = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        stream.read_until(b'"error"')  # its client is told
        server.process.wait(timeout=20)
        assert time.monotonic() - start < 15
        assert "client left" not in server.log()
    finally:
        server.process.kill()


def test_a_second_signal_ends_the_drain() -> None:
    server = Server(batch=4)  # would drain for half a minute
    try:
        server.wait_ready()
        stream = RawStream(server, CHAT, long_chat(tokens=7000))
        stream.read_until(b"data: ", 3)
        start = time.monotonic()
        server.process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        server.process.send_signal(signal.SIGINT)
        stream.read_until(b'"error"')
        assert server.process.wait(timeout=20) == 0
        assert time.monotonic() - start < 15
    finally:
        server.process.kill()


def test_sigint_ends_an_idle_server_at_once() -> None:
    server = Server(batch=2)
    try:
        server.wait_ready()
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(timeout=10) == 0
    finally:
        server.process.kill()
