"""Requests of /v1/responses and /v1/messages, one for each part that an engine makes something of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
_FUNCTION = {"type": "function", "name": "weather", "description": "of a city", "parameters": _PARAMETERS}
_USER = {"role": "user", "content": "What is the weather?"}
_CALL = {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": '{"city": "Rome"}'}
_OUTPUT = {"type": "function_call_output", "call_id": "call_1", "output": "sunny"}
_THOUGHT = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "I look it up."}]}
_ANSWER = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "It is sunny."}]}

RESPONSES: Mapping[str, dict[str, Any]] = {
    "text": {"input": "Hello there"},
    "instructions": {"input": "Hello there", "instructions": "Be brief."},
    "messages": {"input": [{"role": "developer", "content": "Be brief."}, _USER, {**_ANSWER}, _USER]},
    "parts": {"input": [{"role": "user", "content": [{"type": "input_text", "text": text} for text in ("a", "b")]}]},
    "plain answer": {"input": [_USER, {"role": "assistant", "content": "It is sunny."}, _USER]},
    "tools": {"input": [_USER], "tools": [_FUNCTION | {"strict": True}]},
    "turn with a tool": {"input": [_USER, _THOUGHT, _CALL, _OUTPUT, _ANSWER, _USER], "tools": [_FUNCTION]},
    "two calls": {"input": [_USER, _CALL, _CALL | {"call_id": "call_2"}, _OUTPUT], "tools": [_FUNCTION]},
    "answer and call": {"input": [_USER, _ANSWER, _CALL, _OUTPUT, _ANSWER, _ANSWER, _USER], "tools": [_FUNCTION]},
    "summary": {"input": [_USER, {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]}, _ANSWER]},
    "custom tool": {
        "input": [
            _USER,
            {"type": "custom_tool_call", "call_id": "call_3", "name": "shell", "input": "ls"},
            {"type": "custom_tool_call_output", "call_id": "call_3", "output": "a b"},
        ],
        "tools": [{"type": "custom", "name": "shell", "description": "runs"}, {"type": "web_search"}],
    },
    "continued": {"input": [_USER, {**_ANSWER, "status": "incomplete"}]},
    "effort": {"input": "Hello there", "reasoning": {"effort": "low"}},
    "no effort": {"input": "Hello there", "reasoning": {"effort": "none"}},
    "kwargs": {"input": "Hello there", "chat_template_kwargs": {"enable_thinking": False}},
}

_TOOL = {"name": "weather", "description": "of a city", "input_schema": {"properties": {"city": {"type": "string"}}}}
_USE = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Rome"}}
_RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "sunny"}
_THINKS = {"type": "thinking", "thinking": "I look it up.", "signature": "x"}


def _text(*texts: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text} for text in texts]


_LOOKED_UP = {"role": "assistant", "content": [_THINKS, *_text("Let me see."), _USE]}

MESSAGES: Mapping[str, dict[str, Any]] = {
    "text": {"messages": [_USER]},
    "system": {"messages": [_USER], "system": "Be brief."},
    "system of parts": {"messages": [_USER], "system": _text("x-anthropic-billing-header: 1", "Be ", "brief.")},
    "parts": {"messages": [{"role": "user", "content": _text("a", "b")}]},
    "one part": {"messages": [{"role": "user", "content": _text("a")}]},
    "later system": {
        "messages": [_USER, {"role": "assistant", "content": "x"}, {"role": "system", "content": "y"}, _USER]
    },
    "tools": {"messages": [_USER], "tools": [_TOOL]},
    "turn with a tool": {"messages": [_USER, _LOOKED_UP, {"role": "user", "content": [_RESULT]}], "tools": [_TOOL]},
    "result and text": {
        "messages": [
            _USER,
            _LOOKED_UP,
            {"role": "user", "content": [_RESULT | {"content": _text("a", "b")}, *_text("So?")]},
        ]
    },
    "call alone": {
        "messages": [_USER, {"role": "assistant", "content": [_USE]}, {"role": "user", "content": [_RESULT]}]
    },
    "effort": {"messages": [_USER], "output_config": {"effort": "low"}},
    "thinks": {"messages": [_USER], "thinking": {"type": "enabled", "budget_tokens": 1024}},
    "thinks not": {"messages": [_USER], "thinking": {"type": "disabled"}},
    "kwargs": {"messages": [_USER], "chat_template_kwargs": {"enable_thinking": False}},
}
