"""Case 58: a template like Qwen3's, which is not prefix-stable between turns and has a switch for thinking.

One worker is source and target here: what is tested is that a chat request and a lift of it render to the same ids, that the
switch reaches both, and that reuse ends where the ids part. The router's tests show that both tiers get the same body.
"""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.worker.conftest import THINKING_TEMPLATE, Fleet
from tests.worker.smollm2 import smollm2

QUESTION = {"role": "user", "content": "What is the capital of France?"}
THOUGHT = {"role": "assistant", "content": "<think>\nThe question is easy.\n</think>\n\nParis."}
GO_ON = {"role": "system", "content": "Go on."}
NEXT = {"role": "user", "content": "And of Spain?"}
SWITCHES: list[dict[str, Any]] = [{}, {"enable_thinking": True}, {"enable_thinking": False}]


@pytest.fixture(scope="module")
def rendered():
    """rendered(messages, switch): the ids, by transformers."""
    tokenizer = AutoTokenizer.from_pretrained(smollm2())
    template = THINKING_TEMPLATE.read_text()

    def ids(messages: list[dict[str, str]], switch: dict[str, Any]) -> list[int]:
        text = tokenizer.apply_chat_template(
            messages, chat_template=template, add_generation_prompt=True, tokenize=False, **switch
        )
        return tokenizer.encode(text)

    return ids


def chat(fleet: Fleet, messages: list[dict[str, str]], switch: dict[str, Any], **more: Any) -> dict[str, Any]:
    body = {"model": "smol-served", "messages": messages, "chat_template_kwargs": switch, "temperature": 0, **more}
    return fleet.smol.call("/v1/chat/completions", **{"max_tokens": 1, **body})


def lift(fleet: Fleet, messages: list[dict[str, str]], switch: dict[str, Any]) -> dict[str, Any]:
    """Under another salt, so that the native copy in the same worker stays out of reach."""
    request = {"model": "smol-served", "messages": messages, "chat_template_kwargs": switch, "max_tokens": 8}
    source = {"url": fleet.smol.url}
    body = {
        "request": request,
        "source": source,
        "pack": "identity",
        "rho": 0.0,
        "cache_salt": "other",
        "when": "always",
    }
    return fleet.smol.call("/kv/lift", **body, timeout_s=60)


def common(left: list[int], right: list[int]) -> int:
    """Length of the common prefix."""
    return next((n for n, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


@pytest.mark.parametrize("messages", [[QUESTION], [QUESTION, THOUGHT, NEXT]], ids=["one turn", "two turns"])
@pytest.mark.parametrize("switch", SWITCHES, ids=["unset", "on", "off"])
def test_case_58_a_lift_renders_what_the_chat_rendered(fleet: Fleet, rendered, messages, switch):
    native = chat(fleet, messages, switch, max_tokens=8)
    length = len(rendered(messages, switch))
    assert native["usage"]["prompt_tokens"] == length
    lifted = lift(fleet, messages, switch)
    assert lifted["tokens"] == {"prompt": length, "prefix": 0, "lifted": length - 1, "recomputed": 0}
    again = chat(fleet, messages, switch, max_tokens=8, extra_key=lifted["namespace"])
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == length - 1
    assert again["choices"][0]["message"]["content"] == native["choices"][0]["message"]["content"]


def test_case_58_the_switch_changes_the_prompt(rendered):
    unset, on, off = (rendered([QUESTION], switch) for switch in SWITCHES)
    assert unset == on and common(on, off) == len(on) < len(off)


def test_case_58_reuse_ends_where_the_switch_changes_the_prompt(fleet: Fleet, rendered):
    on, off = (rendered([QUESTION], switch) for switch in SWITCHES[1:])
    chat(fleet, [QUESTION], SWITCHES[1])
    lifted = lift(fleet, [QUESTION], SWITCHES[2])
    assert lifted["tokens"]["prompt"] == len(off) and lifted["tokens"]["lifted"] == common(on, off)


def test_case_58_reuse_ends_where_the_template_changes_an_earlier_turn(fleet: Fleet, rendered):
    """What was thought is in the prompt while the answer goes on, and is left out of the next turn's."""
    turn = [QUESTION, THOUGHT, GO_ON]
    first, second = rendered(turn, {}), rendered([*turn, NEXT], {})
    shared = common(first, second)
    assert 0 < shared < len(rendered([QUESTION], {})) + 3
    assert chat(fleet, turn, {})["usage"]["prompt_tokens"] == len(first)
    lifted = lift(fleet, [*turn, NEXT], {})
    assert lifted["tokens"]["prompt"] == len(second) and lifted["tokens"]["lifted"] == shared


def test_case_59_another_template_is_another_digest(fleet: Fleet):
    """SmolLM2 was started with a template of our own: the router compares these before it asks for a lift."""
    from sglang_ext.identity import ModelIdentity

    said = fleet.smol.client.get("/kv/capabilities").json()
    own = ModelIdentity.from_folder(smollm2())
    assert said["tokenizer_digest"] == own.tokenizer and said["model_digest"] == own.model
    assert said["template_digest"] != own.template
