"""Kind: an engine makes other messages of past turns than the request has, and the front takes them as they came."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from streams.core.workers import RenderPart
from tests.helpers.rendering_engine import byte_model, probe

pytestmark = pytest.mark.first_ring()

TEMPLATE = (
    "{%- for m in messages %}<|{{m.role}}|>{%- if m.role=='assistant' and m.reasoning_content is string %}"
    "<think>{{m.reasoning_content}}</think>{%- endif %}{{m.content}}{%- endfor %}"
    "{%- if add_generation_prompt %}<|assistant|>{%- endif %}"
)
R = "r" * 400
BILLING = "x-anthropic-billing-header"


def turns(answer: Mapping[str, Any], *, first: Mapping[str, Any] | None = None) -> dict[str, Any]:
    user = {"role": "user", "content": "q0"}
    assistant = {"role": "assistant", "content": "a", **answer}
    return {"messages": [*([first] if first else []), user, assistant, {"role": "user", "content": "and now?"}]}


def text(body: Mapping[str, Any], reasoning_of: Any) -> str:
    """Return what an engine makes of a chat of this template. reasoning_of: what it makes of a turn's reasoning."""
    messages = []
    for message in body["messages"]:
        content = message.get("content") or ""
        if isinstance(content, list):
            content = "\n".join(part["text"] for part in content if part["text"])
        reasoning = reasoning_of(message) if message["role"] == "assistant" else None
        if message["role"] == "system" and content.startswith(BILLING):
            content = content.partition("\n")[2]
        thought = "" if reasoning is None else f"<think>{reasoning}</think>"
        messages.append([message["role"], thought + content])
    if any(role == "developer" for role, _ in messages):
        system = [content for role, content in messages if role in ("system", "developer")]
        others = [turn for turn in messages if turn[0] not in ("system", "developer")]
        messages = [["system", "\n\n".join(system)], *others]
    shown = "".join(f"<|{role}|>{content}" for role, content in messages)
    return shown + ("<|assistant|>" if body.get("add_generation_prompt", True) else "")


def newest(message: Mapping[str, Any]) -> Any:
    reasoning = message.get("reasoning")
    return message.get("reasoning_content") if reasoning is None else reasoning


def alone(message: Mapping[str, Any]) -> Any:
    return message.get("reasoning")


CHATS = [
    turns({"reasoning": R}),
    turns({"reasoning_content": R}),
    turns({"reasoning": "R", "reasoning_content": "S"}),
    turns({"reasoning": "", "reasoning_content": "S"}),
    turns({"reasoning": None, "reasoning_content": "S"}),
    turns({"content": None, "reasoning": R}),
    turns({"tool_calls": []}),
    turns({}, first={"role": "developer", "content": "d"}),
    turns({}, first={"role": "system", "content": f"{BILLING}: cch=1\nS"}),
]


#: With it, a template is not rendered on the front's event loop, but in a process.
LONG = "{% for number in range(0) %}{% endfor %}"


@pytest.mark.parametrize("prefix", ["", LONG], ids=["loop", "process"])
@pytest.mark.parametrize("reasoning_of", [newest, alone])
def test_an_engine_gets_the_prompts_of_its_own_rules(tmp_path: Path, reasoning_of: Any, prefix: str) -> None:
    """Versions differ in whether they read `reasoning_content`. The probe finds it out, and the files suffice."""
    probed = probe(byte_model(tmp_path, prefix + TEMPLATE), lambda body: text(body, reasoning_of), CHATS)
    assert probed.prompts == [(text(chat, reasoning_of), "files") for chat in CHATS]
    assert probed.outcome == ("equal", None)


@pytest.mark.parametrize(
    ("reasoning_of", "part"),
    [
        (lambda _: None, RenderPart.REASONING),
        (lambda message: message.get("reasoning_content"), RenderPart.REASONING),
        (lambda message: message.get("reasoning_content") or message.get("reasoning"), RenderPart.TWO_REASONINGS),
        (lambda message: str(newest(message) or "").upper() or None, RenderPart.REASONING),
    ],
    ids=["none", "content-alone", "content-first", "capitals"],
)
def test_an_engine_of_unknown_rules_is_asked(tmp_path: Path, reasoning_of: Any, part: RenderPart) -> None:
    """The probe with such a turn differs, and from then on the prompts are the engine's own."""
    probed = probe(byte_model(tmp_path, TEMPLATE), lambda body: text(body, reasoning_of), CHATS)
    assert probed.outcome == ("differs", part.value)
    assert probed.prompts == [(text(chat, reasoning_of), "engine") for chat in CHATS]


def test_the_render_call_counts_more_than_tokenize(tmp_path: Path) -> None:
    """vLLM's /tokenize does not read `reasoning_content`, while its chats do: the rules are those of the chats."""
    model = byte_model(tmp_path, TEMPLATE)
    probed = probe(model, lambda body: text(body, alone), CHATS, lambda body: text(body, newest))
    assert probed.outcome == ("equal", None)
    assert probed.prompts == [(text(chat, newest), "files") for chat in CHATS]
