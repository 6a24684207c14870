"""Where tokens and text disagree about borders: characters and stop strings split across tokens."""

import openai
import pytest
from harness import chat_arguments, stream_text

EMOJI_PROMPT = "😀 😃 😄 😁 😆 😅 😂 🤣 😊 😇 🙂 🙃 😉 😀 😃 😄 😁 😆 😅 😂 🤣 😊 😇 🙂 🙃 😉 😀 😃 😄"


def is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def test_an_emoji_split_across_tokens_arrives_whole(client: openai.OpenAI) -> None:
    arguments = {"model": "any", "prompt": EMOJI_PROMPT, "temperature": 0, "max_tokens": 40}
    whole = client.completions.create(**arguments).choices[0].text
    deltas = [chunk.choices[0].text for chunk in client.completions.create(stream=True, **arguments)]
    assert "".join(deltas) == whole
    emoji = [character for character in whole if ord(character) > 0xFFFF]
    assert emoji, f"the model wrote no emoji: {whole!r}"
    assert not any("\ufffd" in delta for delta in deltas[:-1])

    # The same text through chat with log-probabilities shows the raw bytes: some token is only a part of a character.
    answer = client.chat.completions.create(**chat_arguments(
        "Repeat exactly this line: " + EMOJI_PROMPT, max_tokens=40, logprobs=True)).choices[0]
    pieces = [bytes(entry.bytes) for entry in answer.logprobs.content]
    assert any(not is_text(piece) for piece in pieces)
    assert stream_text(client, **chat_arguments("Repeat exactly this line: " + EMOJI_PROMPT,
                                                max_tokens=40))[0] == answer.message.content


def reference(client: openai.OpenAI) -> tuple[dict, str, list[str]]:
    """A request, its text without any stop string, and the text's tokens."""
    arguments = chat_arguments("Explain in three sentences how bread is made.", max_tokens=60)
    answer = client.chat.completions.create(logprobs=True, **arguments).choices[0]
    return arguments, answer.message.content, [bytes(entry.bytes).decode() for entry in answer.logprobs.content]


def straddling(text: str, tokens: list[str], skip: int) -> tuple[str, int]:
    """A string that lies across a token border, late in the text, at its first occurrence; and where it starts."""
    position = 0
    for index, (left, right) in enumerate(zip(tokens, tokens[1:])):
        position += len(left)
        if index < skip or len(left) < 2 or len(right) < 2:
            continue
        start = position - 2
        candidate = text[start:position + 2]
        if text.find(candidate) == start:
            return candidate, start
    raise AssertionError(f"no unique string across a token border in {tokens}")


@pytest.mark.parametrize("skip", [0, 8, 20])
def test_a_stop_string_split_across_tokens(client: openai.OpenAI, skip: int) -> None:
    arguments, text, tokens = reference(client)
    stop, start = straddling(text, tokens, skip)
    answer = client.chat.completions.create(stop=stop, **arguments)
    assert answer.choices[0].message.content == text[:start]
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens < len(tokens)
    assert stream_text(client, stop=[stop], **arguments) == (text[:start], "stop")


def test_the_earliest_of_several_stop_strings_wins(client: openai.OpenAI) -> None:
    arguments, text, tokens = reference(client)
    late, late_start = straddling(text, tokens, 20)
    early, early_start = straddling(text, tokens, 4)
    assert early_start < late_start
    assert stream_text(client, stop=[late, "never written ☃", early], **arguments) == (text[:early_start], "stop")


def test_text_held_back_for_a_stop_string_that_never_comes_is_not_lost(client: openai.OpenAI) -> None:
    arguments, text, tokens = reference(client)
    begun, _ = straddling(text, tokens, 6)
    plain = stream_text(client, **arguments)
    assert stream_text(client, stop=[begun + "☃", text[-3:] + "☃"], **arguments) == plain


def test_completions_echo_usage_and_list_prompts(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="any", prompt="One, two, three,", temperature=0, max_tokens=8)
    assert answer.object == "text_completion"
    assert answer.usage.completion_tokens == 8
    assert "four" in answer.choices[0].text


def test_completions_logprobs(client: openai.OpenAI) -> None:
    choice = client.completions.create(model="any", prompt="One, two, three,", temperature=0, max_tokens=8,
                                       logprobs=2).choices[0]
    assert "".join(choice.logprobs.tokens) == choice.text
    assert len(choice.logprobs.token_logprobs) == len(choice.logprobs.tokens) == len(choice.logprobs.top_logprobs)
    for token, value, top in zip(choice.logprobs.tokens, choice.logprobs.token_logprobs, choice.logprobs.top_logprobs):
        assert top[token] == value == max(top.values())
