"""The messages and variables that an engine gives to a chat template, from those of a request (pure).

What lives here: the rules by which vLLM makes them, and in which versions each holds. What must not: the template
itself (templates), and asking engines which rules they follow (parity_probes).

vLLM does not pass a request's messages on. It makes new ones with the fields below, and a template sees nothing else:

| field | of messages |
|---|---|
| `role`, `content` | all; without content, `content` is empty |
| `tool_calls` | of `assistant`: arguments are objects instead of their JSON, and an empty list is left out |
| `reasoning`, `reasoning_content` | of `assistant`: the same text under both names |
| `tool_call_id` | of `tool` |
| `name`, `task` | all, if they are text |
| `tools` | of `developer` |

A template that loops over the content of messages gets parts, and every other one gets texts joined by line breaks,
without the empty ones. The rules of `Rule` came with later versions; `prompts.parity` has a prompt that shows each.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Iterable, Mapping
from typing import Any

from streams.client.payloads import text_field
from streams.errors import InvalidRequest
from streams.prompts.request_fields import is_true

#: Stands for an image or another part that is not text. The prompt is cut there: what an engine makes of such a part
#: is not known here, so blocks match up to it. Nothing that writes text for JSON, Python or HTML changes it.
CUT = "KVSTREAMS_CUTS_HERE"


class Rule(enum.IntFlag):
    """What versions of vLLM do otherwise. Read in 0.20, 0.24, 0.28 and 0.30, and compared with 0.32 as it runs.

    TOOL_TEXT: the result of a tool is text for every template. In all of these; earlier versions gave it in parts to
    templates that take parts.

    REASONING_CONTENT: a turn's `reasoning_content` counts where it has no `reasoning`; before, it is not read.
    DEVELOPER: messages of `developer` become those of `system`, and all of these one, at the beginning, if the template
    does not name the role. EFFORT: `reasoning_effort` switches `enable_thinking` on or off. TOOL_FIELDS: of a tool,
    unknown fields are left out. All: 0.24, not 0.20.

    PART_FIELDS: parts of text keep fields that vLLM does not know, such as `cache_control`. 0.28, not 0.24.
    ARGUMENTS: arguments of a tool call that are no object become an empty one; before, they stay, and what is not JSON
    is refused. 0.30, not 0.28. BILLING_LINE: the line of Claude Code that differs from request to request is removed.
    0.32, not 0.30.
    """

    REASONING_CONTENT = 1
    TOOL_TEXT = 2
    DEVELOPER = 4
    EFFORT = 8
    TOOL_FIELDS = 16
    PART_FIELDS = 32
    ARGUMENTS = 64
    BILLING_LINE = 128


#: The rules of the newest version.
NEWEST = ~Rule(0)

#: Fields of parts that vLLM knows, and does not pass on with a text. Those of the OpenAI client are among them.
_PART_FIELDS = frozenset(
    {
        *("type", "text", "refusal", "thinking", "closed", "name", "uuid", "data", "file", "prompt_cache_breakpoint"),
        *("image_embeds", "image_pil", "image_url", "audio_embeds", "audio_url", "input_audio"),
        *("video_embeds", "video_url"),
    }
)

#: How Claude Code's line begins.
_BILLING_LINE = "x-anthropic-billing-header"

#: In place of these values, a variable has its default.
_UNSET = (None, "auto")

#: Arguments of transformers' `apply_chat_template` that do not reach the template, or not as they are.
_CONSUMED = frozenset(
    {
        *("add_generation_prompt", "continue_final_message", "chat_template", "tokenize", "tokenizer_kwargs"),
        *("padding", "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask"),
    }
)


def conversation(
    messages: Iterable[Mapping[str, Any]],
    rules: Rule,
    *,
    takes_parts: bool,
    names_developer: bool,
    orders_calls: bool = True,
) -> list[dict[str, Any]]:
    """Return the messages that a template gets.

    takes_parts: whether it loops over the content of messages. names_developer: whether it names this role.
    orders_calls: whether the fields of tool calls come in the order of vLLM's classes. Raises InvalidRequest for what
    no engine accepts.
    """
    made = [_message(message, rules, takes_parts=takes_parts, orders_calls=orders_calls) for message in messages]
    if not names_developer and rules & Rule.DEVELOPER and any(message["role"] == "developer" for message in made):
        return _with_one_system_message(made)
    return made


def has_cut(messages: Iterable[Mapping[str, Any]]) -> bool:
    """Whether messages of `conversation` have a part that is not text."""
    contents = (message["content"] for message in messages)
    return any(CUT in (content if isinstance(content, str) else map(_text, content)) for content in contents)


def tools(given: Any, rules: Rule) -> list[Any] | None:
    """Return the tools that a template gets: with null for what was left out, in the order of vLLM's fields."""
    if not isinstance(given, list) or not given:
        return None
    return [_tool(tool, rules) for tool in given]


def variables(body: Mapping[str, Any], accepted: frozenset[str], rules: Rule) -> dict[str, Any]:
    """Return the other variables of a template. accepted: the names that it reads.

    The fields of a request count more than its `chat_template_kwargs`, except for `tools`. Raises InvalidRequest.
    """
    arguments = body.get("chat_template_kwargs")
    arguments = arguments if isinstance(arguments, dict) else {}
    if "messages" in arguments and "messages" in accepted:
        raise InvalidRequest("chat_template_kwargs must not contain messages")
    effort = body.get("reasoning_effort")
    fields = {"documents": body.get("documents"), "reasoning_effort": effort}
    if effort is not None and rules & Rule.EFFORT and "enable_thinking" not in arguments:
        fields["enable_thinking"] = effort != "none"
    given = {**arguments, **_set(fields)}
    defaults = {"tools": tools(body.get("tools"), rules), "documents": None}
    passed = {
        name: value
        for name, value in _set(given).items()
        if (name in accepted or name in defaults) and name not in _CONSUMED
    }
    continues = flag(body, "continue_final_message", default=False)
    return {
        **defaults,
        **passed,
        "add_generation_prompt": flag(body, "add_generation_prompt", default=not continues),
    }


def flag(body: Mapping[str, Any], name: str, *, default: bool) -> bool:
    """Return a field that is true or false, as vLLM reads it: also from a number or a word."""
    return is_true(body.get(name, default))


def _set(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value not in _UNSET}


def _message(message: Mapping[str, Any], rules: Rule, *, takes_parts: bool, orders_calls: bool) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str):
        raise InvalidRequest("a message has no role")
    parts = _parts(message.get("content"))
    if role == "system" and rules & Rule.BILLING_LINE:
        parts = [part for part in map(_without_billing_line, parts) if part is not None]
    content = _content(parts, rules, takes_parts=takes_parts)
    made: dict[str, Any] = {"role": role, "content": content}
    if role == "assistant":
        made.update(_of_assistant(message, rules, orders_calls=orders_calls))
    elif role == "tool":
        if "tool_call_id" in message:
            made["tool_call_id"] = message["tool_call_id"]
        if isinstance(content, list) and rules & Rule.TOOL_TEXT:
            made["content"] = _tool_text(content)
    for name in ("name", "task"):
        if isinstance(message.get(name), str):
            made[name] = message[name]
    if role == "developer":
        given = message.get("tools")
        made["tools"] = [_tool_of_developer(tool) for tool in given] if isinstance(given, list) else given
    return made


def _parts(content: Any) -> list[Any]:
    if content is None:
        return []
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise InvalidRequest("the content of a message is neither text nor a list of parts")
    return content


def _content(parts: list[Any], rules: Rule, *, takes_parts: bool) -> list[dict[str, Any]] | str:
    if takes_parts:
        made = (_part(part, rules) for part in parts)
        return [part for part in made if part is not None]
    texts = [_text(part) for part in parts]
    # Without its own place in the text, what stands for an image comes before all of it.
    return CUT if CUT in texts else "\n".join(text for text in texts if text)


def _part(part: Any, rules: Rule) -> dict[str, Any] | None:
    """Return a part for templates that take parts; None if it is left out."""
    if isinstance(part, dict) and part.get("type") == "tool_reference":
        return {"type": "tool_reference", "name": part.get("name")}
    text = _text(part)
    if text is None:
        return None
    kept = isinstance(part, dict) and text is not CUT and rules & Rule.PART_FIELDS
    others = {name: value for name, value in part.items() if name not in _PART_FIELDS} if kept else {}
    return {"type": "text", "text": text, **others}


def _text(part: Any) -> str | None:
    """Return a part's text; None if it has none; CUT for a part of another type."""
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise InvalidRequest("a part of a message is neither text nor an object")
    type_ = part.get("type")
    if type_ == "tool_reference":
        name = part.get("name")
        return name if isinstance(name, str) else None
    field = text_field(part)
    if field is None:
        return CUT
    text = part.get(field)
    if text is not None and not isinstance(text, str):
        raise InvalidRequest("the text of a part is not text")
    return text


def _without_billing_line(part: Any) -> Any:
    """Return a part without Claude Code's line; None if nothing else is in it."""
    text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else part
    if not isinstance(text, str) or not text.startswith(_BILLING_LINE):
        return part
    rest = text.partition("\n")[2]
    if not rest:
        return None
    return rest if isinstance(part, str) else {**part, "text": rest}


def _tool_text(parts: list[dict[str, Any]]) -> list[dict[str, Any]] | str:
    """Return the parts of a tool's result as text, if all of them are text."""
    texts = [part["text"] for part in parts if part["type"] == "text"]
    if CUT in texts:
        return CUT
    return "\n".join(texts) if len(texts) == len(parts) else parts


def _of_assistant(message: Mapping[str, Any], rules: Rule, *, orders_calls: bool) -> dict[str, Any]:
    """Return the fields that only turns of the assistant have."""
    made: dict[str, Any] = {}
    calls = message.get("tool_calls")
    if isinstance(calls, list) and calls:
        made["tool_calls"] = [_call(call, rules, is_ordered=orders_calls) for call in calls]
    reasoning = message.get("reasoning")
    if reasoning is None and rules & Rule.REASONING_CONTENT:
        reasoning = message.get("reasoning_content")
    if reasoning is not None:
        made["reasoning"] = made["reasoning_content"] = reasoning
    return made


def _call(call: Any, rules: Rule, *, is_ordered: bool) -> dict[str, Any]:
    """Return a tool call whose arguments are what their JSON says. is_ordered: in the order of vLLM's fields."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise InvalidRequest("a tool call is not that of a function")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments else {}
        except ValueError:
            arguments = {}
    function = _ordered(function, "arguments", "name") if is_ordered else dict(function)
    is_kept = isinstance(arguments, dict) or not (arguments is None or rules & Rule.ARGUMENTS)
    function["arguments"] = arguments if is_kept else {}
    return {**_ordered(call, "id", "function", "type"), "function": function}


def _ordered(fields: Mapping[str, Any], *first: str) -> dict[str, Any]:
    return {**{name: fields[name] for name in first if name in fields}, **fields}


def _tool(tool: Any, rules: Rule) -> Any:
    if not isinstance(tool, dict) or not isinstance(tool.get("function"), dict):
        return tool
    given = tool["function"]
    deferred = tool.get("defer_loading")
    function = {name: given.get(name) for name in ("name", "description", "parameters")}
    others = {"strict": given.get("strict"), "defer_loading": given.get("defer_loading", deferred)}
    made = {"type": "function", "function": function | {n: value for n, value in others.items() if value is not None}}
    if rules & Rule.TOOL_FIELDS:
        return made if deferred is None else {**made, "defer_loading": deferred}
    return {**made, "function": {**function, **given}, **{n: value for n, value in tool.items() if n not in made}}


def _tool_of_developer(tool: Any) -> Any:
    """Return a tool in a message of `developer`, which keeps its fields, in the order of the OpenAI client's."""
    if not isinstance(tool, dict) or not isinstance(tool.get("function"), dict):
        return tool
    function = _ordered(tool["function"], "name", "description", "parameters", "strict")
    return {**_ordered(tool, "function", "type"), "function": function}


def _with_one_system_message(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages in which those of `developer` are of `system`, and these are one, at the beginning."""
    renamed = [
        {name: value for name, value in {**message, "role": "system"}.items() if name != "tools"}
        if message["role"] == "developer"
        else message
        for message in messages
    ]
    system = [message for message in renamed if message["role"] == "system"]
    if len(system) == 1 and renamed[0] is system[0]:
        return renamed
    contents = [_joined(message["content"]) for message in system]
    one = {"role": "system", "content": "\n\n".join(content for content in contents if content)}
    return [one, *(message for message in renamed if message["role"] != "system")]


def _joined(content: list[dict[str, Any]] | str) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content if "text" in part)
