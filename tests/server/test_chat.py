"""Chat completions through the official SDK: streamed and not, alone and in a crowd."""

import openai
import pytest
from harness import Server, at_once, chat_arguments, running, stream_text

TOPICS = ["cats", "the sea", "bread", "mountains", "music", "winter", "numbers", "horses", "the moon", "rivers",
          "painting", "trains", "gold", "rain", "gardens", "chess"]
PROMPTS = [f"Write a sentence about {topic}." for topic in TOPICS]


def test_models_list_and_retrieve(client: openai.OpenAI) -> None:
    models = list(client.models.list())
    assert len(models) == 1
    assert models[0].object == "model"
    assert client.models.retrieve(models[0].id).id == models[0].id
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("no-such-model")


def test_answer_has_the_shape_clients_rely_on(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**chat_arguments(PROMPTS[0]))
    assert answer.object == "chat.completion"
    assert answer.model == "any"
    assert answer.id and answer.created > 0
    choice, = answer.choices
    assert (choice.index, choice.message.role) == (0, "assistant")
    assert choice.message.content
    usage = answer.usage
    assert usage.prompt_tokens > 0 and usage.completion_tokens > 0
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


@pytest.mark.parametrize("prompt", PROMPTS[:4])
def test_streamed_text_equals_the_text_in_one_piece(client: openai.OpenAI, prompt: str) -> None:
    whole = client.chat.completions.create(**chat_arguments(prompt, max_tokens=48)).choices[0]
    assert stream_text(client, **chat_arguments(prompt, max_tokens=48)) == (whole.message.content,
                                                                            whole.finish_reason)


def test_every_chunk_has_the_same_id_and_the_first_names_the_role(client: openai.OpenAI) -> None:
    chunks = list(client.chat.completions.create(stream=True, **chat_arguments(PROMPTS[0])))
    assert len({(chunk.id, chunk.created, chunk.model, chunk.object) for chunk in chunks}) == 1
    assert chunks[0].object == "chat.completion.chunk"
    assert chunks[0].choices[0].delta.role == "assistant"
    finishes = [choice.finish_reason for chunk in chunks for choice in chunk.choices]
    assert finishes[-1] in ("stop", "length")
    assert set(finishes[:-1]) == {None}
    assert all(chunk.usage is None for chunk in chunks)


def test_usage_chunk_only_when_asked_for(client: openai.OpenAI) -> None:
    arguments = chat_arguments(PROMPTS[1], stream_options={"include_usage": True})
    chunks = list(client.chat.completions.create(stream=True, **arguments))
    assert chunks[-1].choices == []
    assert all(chunk.usage is None for chunk in chunks[:-1])
    whole = client.chat.completions.create(**chat_arguments(PROMPTS[1]))
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_sixteen_streams_at_once_each_equal_to_its_answer_alone(server: Server) -> None:
    client = server.client()
    arguments = [chat_arguments(prompt, max_tokens=48) for prompt in PROMPTS]
    alone = [stream_text(client, **a) for a in arguments]
    together = at_once([lambda a=a: stream_text(client, **a) for a in arguments])
    assert together == alone
    assert len({text for text, _ in together}) == len(PROMPTS)


def test_batched_answers_equal_those_of_the_serial_lane(client: openai.OpenAI) -> None:
    arguments = [chat_arguments(prompt) for prompt in PROMPTS[:4]]
    batched = at_once([lambda a=a: stream_text(client, **a) for a in arguments])
    with running(batch=1) as serial:
        assert at_once([lambda a=a: stream_text(serial.client(), **a) for a in arguments]) == batched
        lanes = serial.stats()["lanes"]
    assert (lanes["serial"]["requests"], lanes["batched"]["requests"]) == (4, 0)


def test_a_seed_gives_the_same_answer_alone_and_in_a_crowd(client: openai.OpenAI) -> None:
    seeded = chat_arguments("Invent a name for a boat.", temperature=1, seed=20260101, max_tokens=40)
    crowd = [chat_arguments(prompt, temperature=1, max_tokens=40) for prompt in PROMPTS[:15]]
    alone = stream_text(client, **seeded)
    assert stream_text(client, **seeded) == alone
    assert at_once([lambda a=a: stream_text(client, **a) for a in [*crowd, seeded]])[-1] == alone
    assert stream_text(client, **{**seeded, "seed": 20260102}) != alone


def test_requests_without_a_seed_differ(client: openai.OpenAI) -> None:
    unseeded = chat_arguments("Invent a name for a boat.", temperature=1, max_tokens=40)
    assert len(set(at_once([lambda: stream_text(client, **unseeded)] * 4))) > 1


def test_greedy_by_truncation_equals_temperature_zero(client: openai.OpenAI) -> None:
    greedy = stream_text(client, **chat_arguments(PROMPTS[2]))
    top_one = chat_arguments(PROMPTS[2], temperature=1, extra_body={"top_k": 1})
    assert stream_text(client, **top_one) == greedy
    assert stream_text(client, **chat_arguments(PROMPTS[2], temperature=1, top_p=1e-6)) == greedy


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_both_names_of_the_token_limit_work(client: openai.OpenAI, field: str) -> None:
    arguments = chat_arguments(PROMPTS[3], extra_body={"ignore_eos": True})
    del arguments["max_tokens"]
    answer = client.chat.completions.create(**arguments, **{field: 7})
    assert answer.usage.completion_tokens == 7
    assert answer.choices[0].finish_reason == "length"


def test_ignore_eos_goes_on_where_the_model_would_stop(client: openai.OpenAI) -> None:
    prompt = "What is the capital of France? Answer in one word."
    stopped = client.chat.completions.create(**chat_arguments(prompt, max_tokens=200))
    assert stopped.choices[0].finish_reason == "stop"
    longer = stopped.usage.completion_tokens + 10
    going = client.chat.completions.create(
        **chat_arguments(prompt, max_tokens=longer, extra_body={"ignore_eos": True}))
    assert going.choices[0].finish_reason == "length"
    assert going.usage.completion_tokens == longer
    assert going.choices[0].message.content.startswith(stopped.choices[0].message.content)


def test_content_parts_system_and_developer_roles(client: openai.OpenAI) -> None:
    plain = [{"role": "system", "content": "You are terse."}, {"role": "user", "content": "Name a colour."}]
    parts = [{"role": "developer", "content": [{"type": "text", "text": "You are terse."}]},
             {"role": "user", "content": [{"type": "text", "text": "Name a "}, {"type": "text", "text": "colour."}]}]
    first, second = (client.chat.completions.create(**chat_arguments("", messages=m)) for m in (plain, parts))
    assert first.choices[0].message.content == second.choices[0].message.content
    assert first.usage == second.usage


def test_fields_that_only_advise_pass(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**chat_arguments(
        PROMPTS[0], user="someone", metadata={"a": "b"}, store=False, service_tier="auto", n=1, presence_penalty=0,
        frequency_penalty=0, logit_bias={}, prompt_cache_key="k", safety_identifier="s",
        response_format={"type": "text"}))
    assert answer.choices[0].message.content == client.chat.completions.create(
        **chat_arguments(PROMPTS[0])).choices[0].message.content


def test_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**chat_arguments(PROMPTS[4], logprobs=True, top_logprobs=3)).choices[0]
    entries = answer.logprobs.content
    assert b"".join(bytes(entry.bytes) for entry in entries).decode() == answer.message.content
    for entry in entries:
        values = [top.logprob for top in entry.top_logprobs]
        assert len(values) == 3
        assert values == sorted(values, reverse=True)
        assert (entry.token, entry.logprob) == (entry.top_logprobs[0].token, values[0])  # greedy takes the first
        assert values[0] <= 0
    assert stream_text(client, **chat_arguments(PROMPTS[4]))[0] == answer.message.content

    streamed = []
    for chunk in client.chat.completions.create(
            stream=True, **chat_arguments(PROMPTS[4], logprobs=True, top_logprobs=3)):
        for choice in chunk.choices:
            streamed += choice.logprobs.content or [] if choice.logprobs else []
    assert streamed == entries


def test_logprobs_are_the_same_in_a_crowd(client: openai.OpenAI) -> None:
    arguments = chat_arguments(PROMPTS[5], logprobs=True, top_logprobs=5)

    def entries() -> object:
        return client.chat.completions.create(**arguments).choices[0].logprobs.content

    alone = entries()
    crowd = [lambda p=p: stream_text(client, **chat_arguments(p, max_tokens=48)) for p in PROMPTS[:7]]
    assert at_once([*crowd, entries])[-1] == alone
