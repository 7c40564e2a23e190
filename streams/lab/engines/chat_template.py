"""How a simulated engine makes a prompt of a chat: its template in Python, and the same as files of a tokenizer (pure).

What lives here: rendering messages and tools, and the contents of `tokenizer.json` and `tokenizer_config.json` with
which anything else tokenizes as the engine does. What must not: reading or writing files.
"""

from __future__ import annotations

import json
from typing import Any

from streams.errors import InvalidRequest

#: The template in jinja, equal to `render`. Its markers are plain text to the engine, whose tokens are bytes.
CHAT_TEMPLATE = (
    "{%- if tools %}<|tools|>{{ tools | tojson }}<|end|>\n{% endif %}"
    "{%- for message in messages %}<|{{ message['role'] }}|>"
    "{%- if message['content'] is string %}{{ message['content'] }}{% endif %}"
    "{%- if message['tool_calls'] %}{{ message['tool_calls'] | tojson }}{% endif %}<|end|>\n{% endfor %}"
    "{%- if style %}<|style|>{{ style }}<|end|>\n{% endif %}"
    "{%- if add_generation_prompt %}<|assistant|>{% endif %}"
)


def render(body: dict[str, Any], default_style: str = "") -> str:
    """Return the prompt of a chat. Parts of a message that are text are joined by line breaks; there are no others.

    default_style: of requests that name none, as an engine with default arguments of its template has it. Raises
    InvalidRequest.
    """
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise InvalidRequest("messages must be a list of messages, and not empty")
    arguments = body.get("chat_template_kwargs") or {}
    parts = [f"<|tools|>{_json(_tools(body['tools']))}<|end|>\n"] if body.get("tools") else []
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise InvalidRequest("a message is an object with a role")
        calls = message.get("tool_calls")
        text = _content(message.get("content")) + (_json([_call(call) for call in calls]) if calls else "")
        parts.append(f"<|{message['role']}|>{text}<|end|>\n")
    style = (arguments.get("style") if isinstance(arguments, dict) else None) or default_style
    if style:
        parts.append(f"<|style|>{style}<|end|>\n")
    if body.get("add_generation_prompt", True):
        parts.append("<|assistant|>")
    return "".join(parts)


def _content(content: object) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    try:
        assert isinstance(content, list)
        return "\n".join([part["text"] if part["type"] == "text" else part["no other type"] for part in content])
    except (AssertionError, KeyError, TypeError) as exc:
        raise InvalidRequest("the content of a message is a text or a list of parts of type text") from exc


def _tools(tools: object) -> list[Any]:
    """Return tools as vLLM gives them to templates: what a client left out is null."""
    try:
        assert isinstance(tools, list)
        fields = {"name": None, "description": None, "parameters": None}
        return [{"type": "function", "function": {**fields, **tool["function"]}} for tool in tools]
    except (AssertionError, KeyError, TypeError) as exc:
        raise InvalidRequest("tools is not a list of functions") from exc


def _call(call: Any) -> dict[str, Any]:
    """Return a tool call as vLLM gives it to templates: with its arguments as values instead of their JSON."""
    try:
        function = call["function"]
        return {**call, "function": {**function, "arguments": json.loads(function.get("arguments") or "{}")}}
    except (KeyError, TypeError, ValueError) as exc:
        raise InvalidRequest("a tool call has no function, or arguments that are not JSON") from exc


def _json(value: object) -> str:
    """Return a value as the filter `tojson` of chat templates writes it."""
    return json.dumps(value, ensure_ascii=False)


def tokenizer_files() -> dict[str, str]:
    """Return the files of a tokenizer with one token per byte of UTF-8, by name."""
    characters = _byte_characters()
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {character: byte for byte, character in enumerate(characters)},
            "merges": [],
        },
    }
    return {
        "tokenizer.json": json.dumps(tokenizer, ensure_ascii=False),
        "tokenizer_config.json": json.dumps({"chat_template": CHAT_TEMPLATE}),
    }


def _byte_characters() -> list[str]:
    """Return the character that stands for each byte in byte-level tokenizers. Source: GPT-2's bytes_to_unicode."""
    shown = {*range(ord("!"), ord("~") + 1), *range(ord("\xa1"), ord("\xac") + 1), *range(ord("\xae"), ord("\xff") + 1)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in shown else chr(next(others)) for byte in range(256)]
