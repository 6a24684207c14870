"""What is refused, and how: the status, the field's name, a message a person can act on."""

from typing import Any

import httpx
import openai
import pytest
from harness import Server, chat_arguments, running

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


def chat_body(**changes: Any) -> dict[str, Any]:
    return {"model": "any", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1, **changes}


def assert_error(response: httpx.Response, status: int, param: str | None = None) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    if param is not None:
        assert error["param"] == param, error
        assert param.split("[")[0].split(".")[0] in error["message"]
    return error


def test_unknown_field_is_named(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**chat_arguments("Hi", extra_body={"frobnicate": 1}))
    assert caught.value.param == "frobnicate"
    assert "frobnicate" in caught.value.message


def test_empty_message_list(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**chat_arguments("", messages=[]))
    assert caught.value.param == "messages"


@pytest.mark.parametrize("body", [b"", b"{", b'{"model": "any", ', b"[1, 2", b"nonsense", b"\xff\xfe", b"{'a': 1}"])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_malformed_json(server: Server, path: str, body: bytes) -> None:
    assert assert_error(server.post(path, body), 400)["type"] == "invalid_request_error"


@pytest.mark.parametrize("body", [b"null", b"[]", b'"text"', b"7", b"true"])
def test_json_that_is_no_object(server: Server, body: bytes) -> None:
    assert_error(server.post(CHAT, body), 400)


@pytest.mark.parametrize("field, value", [
    ("messages", "Hi"), ("messages", [1]), ("messages", {}), ("max_tokens", 0), ("max_tokens", -1),
    ("max_tokens", "7"), ("max_tokens", 1.5), ("max_completion_tokens", 0), ("temperature", -0.1),
    ("temperature", "hot"), ("top_p", 1.5), ("top_p", -1), ("seed", "abc"), ("stop", 5), ("stop", [""]),
    ("stream", "yes"), ("ignore_eos", 1), ("logprobs", 3), ("top_logprobs", -1), ("stream_options", []), ("n", 2),
    ("tools", [{"type": "function", "function": {"name": "f"}}]), ("response_format", {"type": "json_object"}),
    ("logit_bias", {"5": 10}),
])
def test_bad_values_are_refused_by_name(server: Server, field: str, value: Any) -> None:
    error = assert_error(server.post(CHAT, chat_body(**{field: value})), 400)
    assert error["param"].startswith(field), error
    assert field in error["message"]


@pytest.mark.parametrize("message", [
    {"content": "no role"}, {"role": "wizard", "content": "Hi"}, {"role": "user", "content": 5},
    {"role": "user", "content": [{"type": "text"}]},
    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]},
])
def test_bad_messages_are_refused_by_place(server: Server, message: dict[str, Any]) -> None:
    messages = [{"role": "user", "content": "Hi"}, message]
    error = assert_error(server.post(CHAT, chat_body(messages=messages)), 400)
    assert error["param"].startswith("messages[1]"), error


def test_missing_fields(server: Server) -> None:
    assert_error(server.post(CHAT, {"model": "any"}), 400, "messages")
    assert_error(server.post(COMPLETIONS, {"model": "any"}), 400, "prompt")


def test_paths_and_methods(server: Server) -> None:
    assert_error(httpx.get(f"{server.url}/v1/no/such/path"), 404)
    response = httpx.get(f"{server.url}{CHAT}")
    assert_error(response, 405)
    assert "POST" in response.headers["allow"]
    assert_error(server.post("/v1/models", {}), 405)


def test_over_long_prompts_name_both_counts() -> None:
    with running("--context", "512", batch=4) as server:
        client = server.client()
        word = " a"  # one token each, as the next line makes sure
        fits = client.completions.create(model="any", prompt=word * 500, max_tokens=1, temperature=0)
        assert fits.usage.prompt_tokens == 500
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(model="any", prompt=word * 700, max_tokens=1)
        assert caught.value.code == "context_length_exceeded"
        assert "700" in caught.value.message and "512" in caught.value.message
        # A prompt that fits with an answer that cannot: refused too, nothing is silently cut.
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(model="any", prompt=word * 500, max_tokens=100)
        assert "500" in caught.value.message and "512" in caught.value.message
        # Without a limit of its own the answer takes what room there is.
        rest = client.completions.create(model="any", prompt=word * 500, temperature=0,
                                         extra_body={"ignore_eos": True})
        assert rest.usage.completion_tokens == 12
        assert rest.choices[0].finish_reason == "length"


def test_any_model_name_is_echoed_unless_strict(client: openai.OpenAI, server: Server) -> None:
    assert client.chat.completions.create(**chat_arguments("Hi", model="gpt-x", max_tokens=1)).model == "gpt-x"
    with running("--strict-model", batch=2) as strict:
        with pytest.raises(openai.NotFoundError) as caught:
            strict.client().chat.completions.create(**chat_arguments("Hi", model="gpt-x"))
        assert "gpt-x" in caught.value.message
        known = strict.model_id()
        assert strict.client().chat.completions.create(
            **chat_arguments("Hi", model=known, max_tokens=1)).model == known
