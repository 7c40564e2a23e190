"""Requests of /v1/responses and /v1/messages as the chats that vLLM makes of them (pure).

What lives here: the conversions, as vLLM 0.32 does them. What must not: how a chat is rendered (templates,
conversation). What these conversions do not know raises InvalidRequest: the request is then routed by load, and the
engine says whether it is valid.

A response's items become turns of a chat: those of the assistant that follow each other become one turn as far as each
of its parts is there once. A message's blocks become the parts of its content, except for thinking, tool calls and
results of tools, which are turns of their own before the message.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from streams.errors import InvalidRequest

_Json = dict[str, Any]

#: The line that Claude Code puts first, which differs from request to request. vLLM leaves out the text with it.
_BILLING_LINE = "x-anthropic-billing-header"

#: The only parameter of a function in whose form a model gets a tool without parameters.
_CUSTOM_INPUT = "input"

_CUSTOM_PARAMETERS = {
    "type": "object",
    "properties": {_CUSTOM_INPUT: {"type": "string", "description": "The freeform text payload for this tool."}},
    "required": [_CUSTOM_INPUT],
    "additionalProperties": False,
}

#: Fields of a response whose prompt begins with what the engine or the client has kept.
_OF_EARLIER_PROMPTS = ("previous_response_id", "previous_input_messages", "prompt")

#: States of the last item with which the engine goes on in the middle of it.
_CONTINUED = ("in_progress", "incomplete")


def chat_of_response(body: Mapping[str, Any]) -> _Json:
    """Return the chat of a request of /v1/responses."""
    if any(body.get(name) is not None for name in _OF_EARLIER_PROMPTS):
        raise InvalidRequest("the prompt begins with one of an earlier response")
    given = body.get("input")
    messages: list[_Json] = []
    for item in [{"role": "user", "content": given}] if isinstance(given, str) else _objects(given, "input"):
        _take_item(item, messages)
    if body.get("instructions"):
        messages.insert(0, {"role": "system", "content": body["instructions"]})
    continues = isinstance(given, list) and _is_continued(given[-1])
    reasoning = body.get("reasoning")
    return {
        "messages": messages,
        "tools": _tools_of_response(body.get("tools")),
        "chat_template_kwargs": body.get("chat_template_kwargs"),
        "reasoning_effort": reasoning.get("effort") if isinstance(reasoning, dict) else None,
        "add_generation_prompt": not continues,
        "continue_final_message": continues,
        "add_special_tokens": True,  # in a chat, the template adds them
    }


def _is_continued(last: Mapping[str, Any]) -> bool:
    return last.get("type", "message") in ("message", "reasoning") and last.get("status") in _CONTINUED


def _take_item(item: Mapping[str, Any], messages: list[_Json]) -> None:
    """Add an item to the turns of a chat: as one of its own, or to the last one."""
    type_ = item.get("type")
    if type_ in ("function_call", "custom_tool_call"):
        calls = _assistant(messages, "tool_calls", None).setdefault("tool_calls", [])
        calls.append(_call_of_item(item))
    elif type_ == "reasoning":
        _assistant(messages, "reasoning", _reasoning(item))
    elif type_ in ("function_call_output", "custom_tool_call_output"):
        messages.append({"role": "tool", "content": item.get("output"), "tool_call_id": item.get("call_id")})
    elif item.get("role") == "assistant" and (text := _first_text(item.get("content"))) is not None:
        _assistant(messages, "content", text)
    elif "role" in item:
        messages.append(dict(item))
    else:
        raise InvalidRequest("an item of input has an unknown type")


def _assistant(messages: list[_Json], part: str, value: Any) -> _Json:
    """Return the assistant's turn that has a part; a new one if the last has it already. value: None to set nothing."""
    last = messages[-1] if messages else None
    is_new = last is None or last["role"] != "assistant" or (value is not None and last.get(part) is not None)
    if last is None or is_new:
        last = {"role": "assistant"}
        messages.append(last)
    if value is not None:
        last[part] = value
    return last


def _call_of_item(item: Mapping[str, Any]) -> _Json:
    name, call_id = item.get("name"), item.get("call_id")
    if not isinstance(name, str) or not isinstance(call_id, str):
        raise InvalidRequest("a tool call has no name or no id")
    if item["type"] == "custom_tool_call":
        arguments: Any = {_CUSTOM_INPUT: item.get("input") or ""}
    else:
        arguments = item.get("arguments")
        if not isinstance(arguments, str):
            raise InvalidRequest("the arguments of a tool call are not text")
        if item.get("namespace"):
            name = f"{item['namespace']}__{name}"
    return {"id": call_id, "function": {"name": name, "arguments": arguments}, "type": "function"}


def _reasoning(item: Mapping[str, Any]) -> str:
    if item.get("encrypted_content"):
        raise InvalidRequest("reasoning is encrypted")
    for name in ("content", "summary"):
        texts = item.get(name)
        if texts:
            text = _objects(texts, name)[0].get("text")
            if not isinstance(text, str):
                raise InvalidRequest("reasoning has no text")
            return text
    return ""


def _first_text(content: Any) -> str | None:
    """Return the text that counts of an answer of the assistant, which is the first one."""
    if isinstance(content, str):
        return content
    text = content[0].get("text") if isinstance(content, list) and content and isinstance(content[0], dict) else None
    return text if isinstance(text, str) else None


def _tools_of_response(given: Any) -> list[_Json] | None:
    """Return the tools that are functions, or take the form of one. An engine shows no others to the model."""
    if not given:
        return None
    made: list[_Json] = []
    for tool in _objects(given, "tools"):
        type_ = tool.get("type")
        if type_ == "function":
            made.append({"type": "function", "function": dict(tool)})
        elif type_ == "custom":
            function = {"description": tool.get("description"), "parameters": _CUSTOM_PARAMETERS}
            made.append({"type": "function", "function": {"name": tool.get("name"), **function}})
        elif type_ == "namespace":
            for inner in _objects(tool.get("tools"), "tools"):
                if inner.get("type") == "function":
                    name = f"{tool.get('name')}__{inner.get('name')}"
                    made.append({"type": "function", "function": {**inner, "name": name}})
    if not made:
        raise InvalidRequest("no tool is a function")
    return made


def chat_of_message(
    body: Mapping[str, Any], *, merges_system: Callable[[], bool], disabled_effort: Callable[[], str]
) -> _Json:
    """Return the chat of a request of /v1/messages.

    merges_system: whether the template refuses messages of `system` but the first. disabled_effort: the effort with
    which its engine switches thinking off.
    """
    given = _objects(body.get("messages"), "messages")
    system, messages = _system_texts(body.get("system")), list[_Json]()
    has_inline = any(message.get("role") == "system" for message in given)
    merges = has_inline and merges_system()
    for message in given:
        if message.get("role") != "system":
            _take_message(message, messages)
        elif text := _inline_system(message.get("content")):
            if merges:
                system.append(text)
            else:
                messages.append({"role": "system", "content": text})
    if system:
        messages.insert(0, {"role": "system", "content": "".join(system)})
    config, thinking = body.get("output_config"), body.get("thinking")
    effort = config.get("effort") if isinstance(config, dict) else None
    if isinstance(thinking, dict) and thinking.get("type") == "disabled":
        effort = disabled_effort()
    return {
        "messages": messages,
        "tools": _tools_of_message(body.get("tools")),
        "chat_template_kwargs": body.get("chat_template_kwargs"),
        "reasoning_effort": effort,
    }


def _system_texts(content: Any) -> list[str]:
    if isinstance(content, str):
        return [content] if content else []
    texts = (
        [block.get("text") for block in _objects(content, "system") if block.get("type") == "text"] if content else []
    )
    return [text for text in texts if isinstance(text, str) and text and not text.startswith(_BILLING_LINE)]


def _inline_system(content: Any) -> str | None:
    if isinstance(content, str):
        return None if content.startswith(_BILLING_LINE) else content
    return "".join(_system_texts(content))


def _take_message(message: Mapping[str, Any], messages: list[_Json]) -> None:
    """Add a message to the turns of a chat, after the results of tools in it."""
    role, content = message.get("role"), message.get("content")
    turn: _Json = {"role": role}
    if isinstance(content, str):
        turn["content"] = content
    else:
        parts: list[_Json] = []
        thoughts: list[str] = []
        calls: list[_Json] = []
        for block in _objects(content, "content") if content else []:
            type_ = block.get("type")
            if type_ == "text":
                parts += [{"type": "text", "text": block["text"]}] if block.get("text") else []
            elif type_ == "image":
                parts.append({"type": "image_url"})
            elif type_ == "thinking":
                thoughts.append(str(block.get("thinking") or ""))
            elif type_ == "tool_use":
                calls.append(_call_of_block(block))
            elif type_ == "tool_result" and role == "user":
                messages += _result(block)
            elif type_ not in ("redacted_thinking", "tool_reference"):
                raise InvalidRequest("a block of a message has an unknown type")
        if thoughts:
            turn["reasoning"] = "".join(thoughts)
        if calls:
            turn["tool_calls"] = calls
        if parts:
            is_text = len(parts) == 1 and parts[0]["type"] == "text"
            turn["content"] = parts[0]["text"] if is_text else parts
    if role != "user" or "content" in turn:
        messages.append(turn)


def _call_of_block(block: Mapping[str, Any]) -> _Json:
    if not block.get("id"):
        raise InvalidRequest("a tool call has no id, for which the engine makes one")
    function = {"name": block.get("name") or "", "arguments": block.get("input") or {}}
    return {"id": block["id"], "type": "function", "function": function}


def _result(block: Mapping[str, Any]) -> list[_Json]:
    """Return the turns that the result of a tool becomes."""
    content = block.get("content")
    head = {"role": "tool", "tool_call_id": block.get("tool_use_id") or ""}
    if isinstance(content, str) or not content:
        return [{**head, "content": content or ""}]
    items = [item for item in content if isinstance(item, dict)]
    text = "\n".join(str(item.get("text", "")) for item in items if item.get("type") == "text")
    turns: list[_Json] = [{**head, "content": text}]
    if images := [{"type": "image_url"} for item in items if item.get("type") == "image"]:
        turns.append({"role": "user", "content": images})
    names = [item.get("tool_name") or item.get("name") for item in items if item.get("type") == "tool_reference"]
    if references := [{"type": "tool_reference", "name": name} for name in names if name]:
        turns.append({**head, "content": references})
    return turns


def _tools_of_message(given: Any) -> list[_Json] | None:
    if not given:
        return None
    return [{"type": "function", "function": _function(tool)} for tool in _objects(given, "tools")]


def _function(tool: Mapping[str, Any]) -> _Json:
    schema = tool.get("input_schema")
    if not isinstance(schema, dict):
        raise InvalidRequest("a tool has no schema")
    function = {name: tool.get(name) for name in ("name", "description", "strict", "defer_loading")}
    return {**function, "parameters": schema if "type" in schema else {**schema, "type": "object"}}


def _objects(values: Any, name: str) -> list[_Json]:
    if not isinstance(values, list) or not values or not all(isinstance(value, dict) for value in values):
        raise InvalidRequest(f"{name} is not a list of objects, or it is empty")
    return values
