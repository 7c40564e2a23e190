"""Kind: an engine gives the content of a message to its template in another shape than the request has."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from streams.core.workers import RenderPart
from tests.helpers.message_lists import TEMPLATES
from tests.helpers.rendering_engine import byte_model, probe

pytestmark = pytest.mark.first_ring()

TEMPLATE = (TEMPLATES / "message_loop.jinja").read_text()
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": part} for part in texts]


def with_result(content: Any) -> dict[str, Any]:
    user, asking = {"role": "user", "content": "q"}, {"role": "assistant", "content": None, "tool_calls": [CALL]}
    return {"messages": [user, asking, {"role": "tool", "tool_call_id": "1", "content": content}]}


def text(body: Mapping[str, Any], *, joins: bool = True) -> str:
    """Return what an engine makes of a chat. joins: whether the result of a tool is text for its template."""
    shown, system = [], []
    for message in body["messages"]:
        content = message.get("content")
        given = parts(content) if isinstance(content, str) else content or []
        texts = [part["text"] for part in given]
        if message["role"] == "tool":
            result = "\n".join(texts) if joins else str(parts(*texts))
            shown.append(f"<|tool|><tool>{result}</tool>")
            continue
        role, line = message["role"], "".join(texts)
        if role == "system" and line.startswith("x-anthropic-billing-header"):
            line = line.partition("\n")[2]
        if role in ("system", "developer"):
            system.append(line)
        else:
            shown.append(f"<|{role}|>{line}")
    if system:
        shown.insert(0, f"<|system|>{chr(10).join([system[0], *(f'{chr(10)}{line}' for line in system[1:])])}")
    end = "<|assistant|>" if body.get("add_generation_prompt", True) else ""
    return "".join(shown) + end


RESULTS = [
    ("42", "<tool>42</tool>"),
    (parts("4", "2"), "<tool>4\n2</tool>"),
    ([], "<tool></tool>"),
    (parts("42"), "<tool>42</tool>"),
    (parts("4", "", "2"), "<tool>4\n\n2</tool>"),
    ([{**parts("42")[0], "cache_control": {"type": "ephemeral"}}], "<tool>42</tool>"),
    (parts(*"0123456789"), "<tool>" + "\n".join("0123456789") + "</tool>"),
    ("", "<tool></tool>"),
]


@pytest.mark.parametrize("joins", [True, False])
def test_results_of_tools_are_text_where_the_engine_makes_them_text(tmp_path: Path, joins: bool) -> None:
    """Earlier versions gave their parts to templates that loop over content; the probe finds which one it is."""
    # Versions that give parts of results to templates know no other fields of parts.
    chats = [with_result(content) for content, _ in RESULTS if joins or "cache_control" not in str(content)]
    probed = probe(byte_model(tmp_path, TEMPLATE), lambda body: text(body, joins=joins), chats)
    assert probed.outcome == ("equal", None)
    assert probed.prompts == [(text(chat, joins=joins), "files") for chat in chats]
    if joins:
        assert [shown for _, shown in RESULTS] == [prompt[prompt.index("<tool>") : -13] for prompt, _ in probed.prompts]


def test_an_engine_that_joins_otherwise_is_asked(tmp_path: Path) -> None:
    """It puts no line breaks between the parts of a result."""

    def joined(body: Mapping[str, Any]) -> str:
        head, tool, rest = text(body).partition("<tool>")
        return head + tool + rest.replace("\n", "")

    chats = [with_result(content) for content, _ in RESULTS]
    probed = probe(byte_model(tmp_path, TEMPLATE), joined, chats)
    assert probed.outcome == ("differs", RenderPart.TOOL_RESULT_PARTS.value)
    assert probed.prompts == [(joined(chat), "engine") for chat in chats]
