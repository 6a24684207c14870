"""Rows that join, wait and leave, as /stats shows them."""

import pathlib
import threading
from typing import Any

import pytest
from harness import RawStream, Server, at_once, chat_arguments, long_chat, running, stream_text

CHAT = "/v1/chat/completions"
ROWS = 16


def active(count: int) -> Any:
    return lambda stats: stats["batch"]["active_rows"] == count


def test_stats_have_the_agreed_shape(server: Server) -> None:
    stats = server.stats()
    assert set(stats["batch"]) >= {"configured", "active_rows", "prefilling_rows", "pending_rows", "peak_rows"}
    assert stats["batch"]["configured"] == ROWS
    assert set(stats["kv"]) >= {"budget_bytes", "used_bytes", "blocks_total", "blocks_free"}
    assert stats["kv"]["budget_bytes"] >= stats["kv"]["used_bytes"] >= 0
    assert stats["kv"]["blocks_total"] >= stats["kv"]["blocks_free"] > 0
    assert set(stats["lanes"]) >= {"serial", "batched"}
    assert isinstance(stats["throughput"], dict)
    assert set(stats["server"]) >= {"model", "started_at", "version"}
    assert stats["server"]["model"] == server.model_id()


def test_a_finished_row_gives_its_blocks_back(server: Server) -> None:
    before = server.stats()["kv"]["blocks_free"]
    stream = RawStream(server, CHAT, long_chat())
    stream.read_until(b"data: ", 3)
    during = server.stats()["kv"]
    assert during["blocks_free"] < before
    assert during["used_bytes"] > 0
    stream.leave()
    server.wait_idle()
    assert server.stats()["kv"]["blocks_free"] == before


def test_never_more_rows_than_the_batch_and_the_next_one_waits(server: Server) -> None:
    streams = [RawStream(server, CHAT, long_chat()) for _ in range(ROWS)]
    server.wait_stats(active(ROWS), "all rows run")
    late: list[Any] = []
    waiting = threading.Thread(target=lambda: late.append(stream_text(
        server.client(), **chat_arguments("Say hello.", max_tokens=4))))
    waiting.start()
    stats = server.wait_stats(lambda s: s["batch"]["pending_rows"] == 1, "the seventeenth waits")
    assert stats["batch"]["active_rows"] == ROWS
    streams[0].leave()  # one place is free: the late request runs though fifteen others still do
    waiting.join(timeout=60)
    assert late
    assert server.stats()["batch"]["active_rows"] == ROWS - 1
    for stream in streams[1:]:
        stream.leave()
    stats = server.wait_idle()
    assert stats["batch"]["peak_rows"] == ROWS


def test_a_late_request_does_not_wait_for_a_running_one(server: Server) -> None:
    running_stream = RawStream(server, CHAT, long_chat())
    running_stream.read_until(b"data: ", 2)
    text, _ = stream_text(server.client(), **chat_arguments("Say hello."))
    assert text
    assert server.stats()["batch"]["active_rows"] == 1, "the long request should still be running"
    running_stream.leave()


@pytest.mark.parametrize("others", [0, 3])
def test_leaving_a_stream_frees_its_row(server: Server, others: int) -> None:
    rest = [RawStream(server, CHAT, long_chat()) for _ in range(others)]
    stream = RawStream(server, CHAT, long_chat())
    stream.read_until(b"data: ", 3)
    server.wait_stats(active(others + 1), "all rows run")
    stream.leave()
    server.wait_stats(active(others), "the row is free")
    for other in rest:
        other.read_until(b"data: ", other.received.count(b"data: ") + 3)  # the rest goes on
        other.leave()


def test_leaving_with_the_sdk(server: Server) -> None:
    stream = server.client().chat.completions.create(
        stream=True, **chat_arguments("Tell me a long story.", max_tokens=4000, extra_body={"ignore_eos": True}))
    for _, _chunk in zip(range(5), stream):
        pass
    assert server.stats()["batch"]["active_rows"] == 1
    stream.close()
    server.wait_stats(active(0), "the row is free")


def test_leaving_without_streaming_frees_the_row(server: Server) -> None:
    request = RawStream(server, CHAT, long_chat(stream=False))
    server.wait_stats(active(1), "the row runs")
    request.leave()
    server.wait_stats(active(0), "the row is free")


@pytest.mark.parametrize("stream", [True, False])
def test_leaving_the_queue_frees_the_place(server: Server, stream: bool) -> None:
    rows = [RawStream(server, CHAT, long_chat()) for _ in range(ROWS)]
    server.wait_stats(active(ROWS), "all rows run")
    queued = RawStream(server, CHAT, long_chat(stream=stream))
    server.wait_stats(lambda s: s["batch"]["pending_rows"] == 1, "it waits")
    queued.leave()
    stats = server.wait_stats(lambda s: s["batch"]["pending_rows"] == 0, "the place is free")
    assert stats["batch"]["active_rows"] == ROWS
    for row in rows:
        row.leave()


def test_leaving_in_the_middle_of_a_long_prefill(server: Server) -> None:
    body = long_chat()
    body["messages"][0]["content"] = "word " * 7000
    request = RawStream(server, CHAT, {**body, "max_tokens": 8})
    server.wait_stats(lambda s: s["batch"]["prefilling_rows"] == 1, "the prompt is being read")
    request.leave()
    server.wait_idle()


def test_a_long_prompt_does_not_stall_a_running_stream() -> None:
    with running("--prefill-step", "256") as server:
        stream = RawStream(server, CHAT, long_chat())
        stream.read_until(b"data: ", 3)
        prefilling = threading.Thread(target=lambda: server.client().completions.create(
            model="any", prompt=" a" * 2000, max_tokens=1, temperature=0))
        prefilling.start()
        server.wait_stats(lambda s: s["batch"]["prefilling_rows"] == 1, "the prompt is being read")
        before = stream.received.count(b"data: ")
        # 2000 tokens in chunks of at most 256: a token of the running row between any two chunks, of which ten are plenty.
        stream.read_until(b"data: ", before + 10)
        assert server.stats()["batch"]["prefilling_rows"] == 1, "ten tokens came while the prompt was being read"
        prefilling.join()
        stream.leave()


def test_a_crowd_three_times_the_batch_is_served_in_full(server: Server) -> None:
    arguments = [chat_arguments(f"What is {n} plus {n}?", max_tokens=12) for n in range(3 * ROWS)]
    client = server.client()
    texts = at_once([lambda a=a: stream_text(client, **a)[0] for a in arguments])
    assert all(texts)
    assert texts[5] == stream_text(client, **arguments[5])[0]


def test_the_queue_has_a_limit() -> None:
    with running("--max-queue", "2", batch=2) as server:
        rows = [RawStream(server, CHAT, long_chat()) for _ in range(2)]
        server.wait_stats(active(2), "both rows run")
        queued = [RawStream(server, CHAT, long_chat()) for _ in range(2)]
        server.wait_stats(lambda s: s["batch"]["pending_rows"] == 2, "two wait")
        refused = server.post(CHAT, long_chat(tokens=1))
        assert refused.status_code == 429
        assert refused.headers["retry-after"]
        assert refused.json()["error"]["message"]
        for stream in rows + queued:
            stream.leave()
        server.wait_idle()
        assert server.post(CHAT, long_chat(tokens=1, stream=False)).status_code == 200


def test_stock_kernels_send_seeded_rows_to_the_serial_lane() -> None:
    with running("--kernels", "stock", batch=2) as server:
        arguments = chat_arguments("Say hello.", max_tokens=3, temperature=1, seed=5)
        first, second = at_once([lambda: stream_text(server.client(), **arguments)] * 2)
        assert first == second
        serial = server.stats()["lanes"]["serial"]
        assert serial["requests"] == 2
        assert [count for reason, count in serial["reasons"].items() if "seed" in reason] == [2]


def test_a_common_beginning_is_computed_once(server: Server) -> None:
    client = server.client()
    rules = "You are the assistant of a library. " + " ".join(f"Rule {n}: answer in {n} words." for n in range(40))

    def ask(question: str, **changes: Any) -> Any:
        return client.chat.completions.create(
            model="any", temperature=0, max_tokens=16,
            messages=[{"role": "system", "content": rules}, {"role": "user", "content": question}], **changes)

    first = ask("Where are the maps?")
    length = first.usage.prompt_tokens
    # Other tests' prompts may have begun with the template's first words, too.
    assert length > 300 and first.usage.prompt_tokens_details.cached_tokens < 32
    again = ask("Where are the maps?")
    # Whole blocks at least; the rest of the last one if what followed it has filled it.
    assert (length - 1) // 32 * 32 <= again.usage.prompt_tokens_details.cached_tokens < length
    assert again.choices[0].message.content == first.choices[0].message.content
    other = ask("Where are the atlases?")
    assert 300 < other.usage.prompt_tokens_details.cached_tokens < other.usage.prompt_tokens
    assert server.stats()["kv"]["cached_bytes"] > 0


def test_the_prompt_cache_can_be_off() -> None:
    with running("--prompt-cache", "0", batch=2) as server:
        arguments = chat_arguments("What is a library? " * 20, max_tokens=2)
        for _ in range(2):
            answer = server.client().chat.completions.create(**arguments)
            assert answer.usage.prompt_tokens_details.cached_tokens == 0
        assert server.stats()["kv"]["cached_bytes"] == 0


@pytest.mark.parametrize("batch", [1, 2])
def test_stock_kernels_reuse_what_was_said_too(batch: int) -> None:
    with running("--kernels", "stock", batch=batch) as server:
        arguments = chat_arguments("Say hello.", max_tokens=3)
        ask = server.client().chat.completions.create
        first, again = ask(**arguments), ask(**arguments)
        assert first.usage.prompt_tokens_details.cached_tokens == 0
        assert again.usage.prompt_tokens_details.cached_tokens == first.usage.prompt_tokens - 1
        assert again.choices[0].message.content == first.choices[0].message.content
        server.wait_idle()
        kv = server.stats()["kv"]
        assert 0 < kv["cached_bytes"] <= kv["budget_bytes"] and kv["used_bytes"] == 0


def test_prompts_outlive_the_process(tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "cache"
    rules = "You are the assistant of a library. " + " ".join(f"Rule {n}: answer in {n} words." for n in range(40))

    def ask(server: Server) -> Any:
        return server.client().chat.completions.create(
            model="any", temperature=0, max_tokens=16, logprobs=True,
            messages=[{"role": "system", "content": rules}, {"role": "user", "content": "Where are the maps?"}])

    def probabilities(answer: Any) -> list[tuple[str, float]]:
        return [(token.token, token.logprob) for token in answer.choices[0].logprobs.content]

    with running("--prompt-cache-dir", str(folder), batch=4) as server:
        cold = ask(server)
        assert cold.usage.prompt_tokens_details.cached_tokens == 0
        assert server.terminate() == 0
    length = cold.usage.prompt_tokens
    with running("--prompt-cache-dir", str(folder), batch=4) as server:
        warm = ask(server)
        assert warm.usage.prompt_tokens_details.cached_tokens == (length - 1) // 32 * 32
        assert probabilities(warm) == probabilities(cold)
    # Another type of KV has other blocks; its server leaves the first one's alone.
    with running("--prompt-cache-dir", str(folder), "--kv-dtype", "f32", batch=4) as server:
        assert ask(server).usage.prompt_tokens_details.cached_tokens == 0
    assert len(list(folder.glob("*.kv"))) == 2

    for file in folder.glob("*.kv"):
        file.write_bytes(b"no database at all" * 1000)
    with running("--prompt-cache-dir", str(folder), batch=4) as server:
        again = ask(server)
        assert again.usage.prompt_tokens_details.cached_tokens == 0
        assert probabilities(again) == probabilities(cold)
        server.wait_log("it is not used")
    assert all(file.read_bytes().startswith(b"no database") for file in folder.glob("*.kv"))


def test_rows_that_must_make_room_go_on_later() -> None:
    prompts = [f"Tell me the story of number {n}." for n in range(8)]
    with running(batch=8) as server:
        roomy = at_once([lambda p=p: stream_text(server.client(), **chat_arguments(
            p, max_tokens=200, extra_body={"ignore_eos": True})) for p in prompts])
        assert server.stats()["requests"]["preempted"] == 0
    # About a third of what the eight need in the end; a block of 32 tokens is 0.7 MB.
    with running("--kv-budget", "0.016", batch=8) as server:
        tight = at_once([lambda p=p: stream_text(server.client(), **chat_arguments(
            p, max_tokens=200, extra_body={"ignore_eos": True})) for p in prompts])
        assert server.stats()["requests"]["preempted"] > 0
        assert server.stats()["kv"]["used_bytes"] == 0
    assert tight == roomy
