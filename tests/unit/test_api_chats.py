"""Requests of /v1/responses and /v1/messages as chats: what is not known there is routed by load.

What becomes of the others is compared with vLLM (tests/real/test_rendering.py), and with what it made of them
(test_golden_renderings.py).
"""

from __future__ import annotations

from typing import Any

import pytest

from streams.errors import InvalidRequest
from streams.prompts.api_chats import chat_of_message, chat_of_response

_USER = {"role": "user", "content": "Hello"}

RESPONSES: dict[str, dict[str, Any]] = {
    "no input": {},
    "empty": {"input": []},
    "not objects": {"input": ["a"]},
    "number": {"input": 7},
    "earlier response": {"input": "a", "previous_response_id": "resp_1"},
    "earlier messages": {"input": "a", "previous_input_messages": [_USER]},
    "kept prompt": {"input": "a", "prompt": {"id": "pmpt_1"}},
    "kept item": {"input": [{"type": "item_reference", "id": "msg_1"}]},
    "call of a tool of OpenAI": {"input": [_USER, {"type": "web_search_call", "id": "ws_1", "status": "completed"}]},
    "call without a name": {"input": [_USER, {"type": "function_call", "call_id": "c", "arguments": "{}"}]},
    "call without arguments": {"input": [_USER, {"type": "function_call", "call_id": "c", "name": "f"}]},
    "encrypted": {"input": [_USER, {"type": "reasoning", "summary": [], "encrypted_content": "x"}]},
    "reasoning without text": {"input": [_USER, {"type": "reasoning", "summary": [{"type": "summary_text"}]}]},
    "only tools of OpenAI": {"input": "a", "tools": [{"type": "web_search"}]},
    "tools that are no list": {"input": "a", "tools": {"type": "function"}},
}

MESSAGES: dict[str, dict[str, Any]] = {
    "no messages": {},
    "empty": {"messages": []},
    "not objects": {"messages": ["a"]},
    "unknown block": {"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]},
    "change of tools": {"messages": [_USER, {"role": "user", "content": [{"type": "tool_addition", "tool": {}}]}]},
    "result from the assistant": {
        "messages": [_USER, {"role": "assistant", "content": [{"type": "tool_result", "content": "a"}]}]
    },
    "call without an id": {"messages": [_USER, {"role": "assistant", "content": [{"type": "tool_use", "name": "f"}]}]},
    "tool without a schema": {"messages": [_USER], "tools": [{"name": "f"}]},
    "tools that are no list": {"messages": [_USER], "tools": {"name": "f"}},
}


@pytest.mark.parametrize("name", RESPONSES)
def test_a_response_that_is_not_understood_is_not_guessed(name: str) -> None:
    """The engine decides what it is."""
    with pytest.raises(InvalidRequest):
        chat_of_response(RESPONSES[name])


@pytest.mark.parametrize("name", MESSAGES)
def test_a_message_that_is_not_understood_is_not_guessed(name: str) -> None:
    """The engine decides what it is."""
    with pytest.raises(InvalidRequest):
        chat_of_message(MESSAGES[name], merges_system=lambda: False, disabled_effort=lambda: "none")


@pytest.mark.parametrize("merges", [True, False])
def test_templates_are_tried_only_for_requests_that_depend_on_it(merges: bool) -> None:
    """A message without inline system turns, and with thinking, has the same chat for every template."""

    def never() -> Any:
        raise AssertionError

    body = {"messages": [_USER], "system": "Be brief.", "thinking": {"type": "enabled", "budget_tokens": 9}}
    chat = chat_of_message(body, merges_system=never, disabled_effort=never)
    assert chat["messages"] == [{"role": "system", "content": "Be brief."}, _USER]
    later = {"role": "system", "content": "And in French."}
    body = {"messages": [_USER, later], "thinking": {"type": "disabled"}}
    chat = chat_of_message(body, merges_system=lambda: merges, disabled_effort=lambda: "low")
    assert chat["messages"] == ([later, _USER] if merges else [_USER, later])
    assert chat["reasoning_effort"] == "low"
