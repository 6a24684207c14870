"""Chat templates, prompt by prompt, against transformers' own renderer.

The templates are their makers', from models/templates in llama.cpp's sources: those of the families that galley runs.
"""

import json
import pathlib
import subprocess

import pytest
from harness import BINARY, ROOT
from jinja2.exceptions import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

FAMILIES = ["openbmb-MiniCPM5-1B", "HuggingFaceTB-SmolLM3-3B", "meta-llama-Llama-3.1-8B-Instruct",
            "Qwen-Qwen2.5-7B-Instruct", "Qwen-Qwen3-0.6B", "Qwen3-Coder", "google-gemma-4-31B-it"]
PROMPT = BINARY.parent / "tests" / "support" / "galley-chat-prompt"
TEMPLATES = ROOT / ".cache" / "peer" / "llama" / "src" / "models" / "templates"

USER = {"role": "user", "content": "How warm is it in Nîmes & <Paris>?"}
SYSTEM = {"role": "system", "content": "Be brief.\nBe \"kind\"."}
ANSWER = {"role": "assistant", "content": "Warm.\n\nVery."}
THOUGHT = {"role": "assistant", "content": "<think>\nTwo towns.\n</think>\n\nWarm."}
REASONED = {"role": "assistant", "content": "Warm.", "reasoning_content": "\nTwo towns.\n"}
WEATHER = {"type": "function", "function": {
    "name": "weather", "description": "Weather of a town, in °C", "parameters": {
        "type": "object", "required": ["town"], "properties": {
            "town": {"type": "string", "description": "its name, e.g. \"Nîmes\""},
            "days": {"type": "integer", "minimum": 1, "default": 1},
            "detail": {"type": "array", "items": {"type": "string", "enum": ["wind", "rain"]}},
        }}}}
CLOCK = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}}


def calls(*named: tuple[str, dict], content: str | None = None, **more: str) -> dict:
    return {"role": "assistant", "content": content, **more, "tool_calls": [
        {"id": f"call_{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for i, (name, arguments) in enumerate(named)]}


def result(text: object, call: int = 0) -> dict:
    return {"role": "tool", "tool_call_id": f"call_{call}", "content": text}


ONE = calls(("weather", {"town": "Nîmes"}))
MANY = calls(("weather", {"town": "a < b & c\nd", "days": 2}), ("clock", {}), content="Let me see.")
TYPED = calls(("weather", {"days": 3, "share": 0.5, "tiny": 1e-7, "whole": 2.0, "deep": {"a": [1, "x", None, True]},
                           "yes": True, "no": False, "none": None, "list": ["it's", "a \"b\"", "c\\d"], "empty": ""}))

CONVERSATIONS = {
    "one question": [USER],
    "a system prompt": [SYSTEM, USER],
    "an answer and a question": [SYSTEM, USER, ANSWER, USER],
    "an answer last": [USER, ANSWER],
    "a later system message": [USER, ANSWER, SYSTEM, USER],
    "a thought in the past": [USER, THOUGHT, USER],
    "a thought last": [USER, THOUGHT],
    "reasoning in a field of its own": [USER, REASONED, USER, REASONED],
    "a tool call": [USER, ONE],
    "a tool's result": [USER, ONE, result("21 °C & <dry>")],
    "an answer after a result": [SYSTEM, USER, ONE, result("21"), ANSWER],
    "a question after a result": [USER, ONE, result("21"), ANSWER, USER],
    "two calls and two results": [SYSTEM, USER, MANY, result("21"), result("noon", 1), ANSWER],
    "arguments of every type": [USER, TYPED, result("21")],
    "a call after a thought": [USER, calls(("clock", {}), content="<think>\nHm.\n</think>\n\nWell."), result("noon"), ANSWER],
    "a call with reasoning": [USER, calls(("clock", {}), content="", reasoning_content="Hm."), result("noon")],
    "calls between words": [USER, calls(("clock", {}), ("weather", {"town": "x"}), content="a<tool_sep>b<tool_sep>c<tool_sep>d"),
                            result("noon"), result("21", 1)],
    "fewer places than calls": [USER, calls(("clock", {}), ("weather", {"town": "x"}), content="a<tool_sep>b")],
    "a place for the tools": [{"role": "system", "content": "Before.<tool_def_sep>After."}, USER],
    "words that look like a result": [USER, ONE, {"role": "user", "content": "<tool_response>\n21\n</tool_response>"}, ANSWER],
}


def render(template: pathlib.Path, cases: list[dict]) -> list[object]:
    done = subprocess.run([PROMPT, template], input=json.dumps(cases), capture_output=True, text=True, timeout=120)
    assert done.stderr == ""
    return json.loads(done.stdout)


def expected(template: pathlib.Path, case: dict) -> str | None:
    """None: the template refuses, or fails."""
    try:
        (prompt,), _ = render_jinja_template(
            [case["messages"]], tools=case["tools"], chat_template=template.read_text(),
            add_generation_prompt=case["generate"], bos_token="<s>", eos_token="</s>", **(case["extra"] or {}))
    except (TemplateError, TypeError):
        return None
    return prompt


@pytest.fixture(scope="module", autouse=True)
def templates() -> None:
    subprocess.run([ROOT / "scripts" / "llama-sources.sh"], check=True)


def cases_of(messages: list[dict]) -> list[dict]:
    # "" for None: templates differ in what they make of null, so galley gives them none (text/chat_template.h).
    messages = [message | {"content": message["content"] or ""} for message in messages]
    return [dict(messages=messages, tools=tools, extra=extra, generate=generate)
            for tools in (None, [WEATHER], [CLOCK, WEATHER])
            for extra, generate in ((None, False), (None, True), ({"enable_thinking": True}, True),
                                    ({"enable_thinking": False}, True), ({"enable_thinking": False}, False))]


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("name", FAMILIES)
def test_prompts_are_transformers(name: str, conversation: str) -> None:
    template = TEMPLATES / f"{name}.jinja"
    cases = cases_of(CONVERSATIONS[conversation])
    prompts = render(template, cases)
    assert len(prompts) == len(cases) == 15
    for case, prompt in zip(cases, prompts):
        answer = expected(template, case)
        if answer is None:
            assert isinstance(prompt, dict), case
        else:
            assert prompt == answer, case


def test_minicpm5_thinks_on_request() -> None:
    """What the comparison would not show if both sides ignored the switch."""
    prompts = render(TEMPLATES / "openbmb-MiniCPM5-1B.jinja", cases_of([USER])[:5])
    opening = "<s><|im_start|>user\n" + USER["content"] + "<|im_end|>\n"
    answer = opening + "<|im_start|>assistant\n"
    assert prompts == [opening, answer, answer + "<think>\n", answer + "<think>\n\n</think>\n\n", opening]
