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


#: Types of parts that are text, and the field with it.
_TEXT_FIELDS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}

#: How the line of a coding agent begins that vLLM removes from system messages.
_BILLING_LINE = "x-anthropic-billing-header"


def render(body: dict[str, Any], default_style: str = "") -> str:
    """Return the prompt of a chat, whose messages become what vLLM 0.32 makes of them. There are no parts but text.

    default_style: of requests that name none, as an engine with default arguments of its template has it. Raises
    InvalidRequest.
    """
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise InvalidRequest("messages must be a list of messages, and not empty")
    arguments = body.get("chat_template_kwargs") or {}
    parts = [f"<|tools|>{_json(_tools(body['tools']))}<|end|>\n"] if body.get("tools") else []
    turns = _with_one_system_message([_turn(message) for message in messages])
    parts += [f"<|{role}|>{text}{calls}<|end|>\n" for role, text, calls in turns]
    if body.get("continue_final_message"):
        role, text, _ = turns[-1]
        return "".join([*parts[:-1], f"<|{role}|>{text}"])
    style = arguments.get("style") if isinstance(arguments, dict) else None
    style = default_style if style in (None, "auto") else style
    if style:
        parts.append(f"<|style|>{style}<|end|>\n")
    if body.get("add_generation_prompt", True):
        parts.append("<|assistant|>")
    return "".join(parts)


def _turn(message: Any) -> tuple[str, str, str]:
    """Return the role of a message, its text, and its tool calls as JSON."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise InvalidRequest("a message is an object with a role")
    role, calls = message["role"], message.get("tool_calls")
    texts = _texts(message.get("content"))
    if role == "system":
        texts = [text.partition("\n")[2] if text.startswith(_BILLING_LINE) else text for text in texts]
    shown = _json([_call(call) for call in calls]) if calls and role == "assistant" else ""
    return role, "\n".join(filter(None, texts)), shown


def _texts(content: object) -> list[str]:
    if content is None or isinstance(content, str):
        return [content or ""]
    try:
        assert isinstance(content, list)
        return [part[_TEXT_FIELDS[part["type"]]] for part in content]
    except (AssertionError, KeyError, TypeError) as exc:
        raise InvalidRequest("the content of a message is a text or a list of parts of type text") from exc


def _with_one_system_message(turns: list[tuple[str, str, str]]) -> list[tuple[str, str, str]]:
    """Return turns with those of the developer in the system message, which is the first, if there are any."""
    roles = [role for role, *_ in turns]
    if "developer" not in roles:
        return turns
    texts = [text for role, text, _ in turns if role in ("system", "developer") and text]
    return [("system", "\n\n".join(texts), ""), *(turn for turn in turns if turn[0] not in ("system", "developer"))]


def _tools(tools: object) -> list[Any]:
    """Return tools as vLLM gives them to templates: what a client left out is null, and unknown fields are left out."""
    try:
        assert isinstance(tools, list)
        functions = [tool["function"] for tool in tools]
        shown = [{name: function.get(name) for name in ("name", "description", "parameters")} for function in functions]
        strict = [{} if function.get("strict") is None else {"strict": function["strict"]} for function in functions]
        return [{"type": "function", "function": {**one, **other}} for one, other in zip(shown, strict, strict=True)]
    except (AssertionError, AttributeError, KeyError, TypeError) as exc:
        raise InvalidRequest("tools is not a list of functions") from exc


def _call(call: Any) -> dict[str, Any]:
    """Return a tool call as vLLM gives it to templates: in the order of its fields, and with arguments as an object."""
    try:
        function = {"arguments": None, "name": call["function"]["name"], **call["function"]}
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError:
        arguments = {}
    except (KeyError, TypeError) as exc:
        raise InvalidRequest("a tool call has no function") from exc
    function["arguments"] = arguments if isinstance(arguments, dict) else {}
    first = {name: call[name] for name in ("id", "function", "type") if name in call}
    return {**first, **call, "function": function}


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
