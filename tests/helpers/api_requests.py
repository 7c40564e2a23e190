"""Requests of /v1/responses and /v1/messages: one for each part that an engine makes something of, and random ones."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
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

_TEXTS = ("a", "Hello there", "  spaced \n", "x\n\ny", "", "Héllo 你好", "x-anthropic-billing-header: c\nrest")
_HOSTED = {"type": "web_search"}
_CUSTOM = {"type": "custom", "name": "shell"}
_NAMESPACE = {"type": "namespace", "name": "home", "description": "of it", "tools": [_FUNCTION]}


def _often(random: Random, **fields: Any) -> dict[str, Any]:
    """Return some of these fields."""
    return {name: value for name, value in fields.items() if random.random() < 0.4}


def _texts(random: Random, type_: str, at_least: int = 1) -> list[dict[str, Any]]:
    return [{"type": type_, "text": random.choice(_TEXTS)} for _ in range(random.randint(at_least, 3))]


def _item(random: Random) -> dict[str, Any]:
    text, role = random.choice(_TEXTS), random.choice(["user", "system", "developer"])
    arguments = random.choice(["{}", "", '{"b": 1, "a": [2]}', "[1]", "not JSON"])
    summary = _texts(random, "summary_text", 0)
    return random.choice(
        [
            {"role": random.choice([role, "assistant"]), "content": text},
            {"type": "message", "role": role, "content": _texts(random, "input_text")},
            _ANSWER | {"content": _texts(random, "output_text")} | _often(random, id="msg_1", status="incomplete"),
            _CALL | {"arguments": arguments} | _often(random, id="fc_1", status="completed", namespace="home"),
            _OUTPUT | {"output": random.choice([text, _texts(random, "input_text")])},
            {"type": "reasoning", "summary": summary}
            | _often(random, content=_texts(random, "reasoning_text"), status="in_progress", id="rs_1"),
            {"type": "custom_tool_call", "call_id": "call_3", "name": "shell", "input": text},
            {"type": "custom_tool_call_output", "call_id": "call_3", "output": text},
        ]
    )


def random_response(random: Random) -> dict[str, Any]:
    """Return a request of /v1/responses that an engine may refuse."""
    function = _FUNCTION | _often(random, strict=True, description=None, parameters={})
    tools = [function, *random.sample([_HOSTED, _CUSTOM, _NAMESPACE], random.randint(0, 3))]
    items = [_item(random) for _ in range(random.randint(1, 6))]
    return {"input": random.choice([random.choice(_TEXTS), items, items])} | _often(
        random,
        instructions=random.choice(_TEXTS),
        tools=tools,
        tool_choice=random.choice(["none", "auto"]),
        reasoning={"effort": random.choice(["low", "none", "high", None])},
        chat_template_kwargs={"enable_thinking": random.random() < 0.5, "style": "s"},
    )


def _block(random: Random, role: str) -> dict[str, Any]:
    texts = _texts(random, "text", 0)
    text = {"type": "text", "text": random.choice(_TEXTS)} | _often(random, cache_control={"type": "ephemeral"})
    reference = {"type": "tool_reference", "tool_name": "weather"}
    if role == "user":
        content = random.choice([random.choice(_TEXTS), None, texts, [reference]])
        return random.choice([text, _RESULT | {"content": content}])
    if role == "system":
        return text
    return random.choice(
        [
            text,
            _USE | {"input": random.choice([{}, None, {"b": 1, "a": [2]}])},
            _THINKS | {"thinking": random.choice(_TEXTS)},
            {"type": "redacted_thinking", "data": "x"},
            reference,
        ]
    )


def random_message(random: Random) -> dict[str, Any]:
    """Return a request of /v1/messages that an engine may refuse."""
    messages = []
    for _ in range(random.randint(1, 5)):
        role = random.choice(["user", "assistant", "user", "assistant", "system"])
        blocks = [_block(random, role) for _ in range(random.randint(0, 3))]
        messages.append({"role": role, "content": random.choice([random.choice(_TEXTS), blocks])})
    tool = _TOOL | _often(random, strict=True, defer_loading=True, description=None, input_schema={}, type="custom")
    thinking = random.choice([{"type": "disabled"}, {"type": "enabled", "budget_tokens": 1024}, {"type": "adaptive"}])
    return {"messages": messages} | _often(
        random,
        system=random.choice([random.choice(_TEXTS), _texts(random, "text")]),
        tools=[tool],
        tool_choice={"type": random.choice(["auto", "none"])},
        thinking=thinking,
        output_config={"effort": random.choice(["low", "max"])},
    )
