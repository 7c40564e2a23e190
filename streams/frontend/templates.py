"""Chat templates: from the messages of a request to the text of its prompt (pure).

What lives here: rendering as vLLM and Hugging Face's transformers do, in jinja2's sandbox. What must not: files, and
tokens (tokenizer). A template comes with the model and never from a request: it could run for as long as it liked.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Mapping
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from streams.errors import InvalidRequest

#: Stands for an image or another part that is not text. The prompt is cut there: what an engine makes of such a part
#: is not known here, so blocks match up to it.
_CUT = "\x00kvstreams-cut\x00"


#: Functions of jinja with which a template can repeat something without a list of the request.
_COUNTING = frozenset({"range", "lipsum", "cycler"})


class _Generation(Extension):
    """`{% generation %}`, which marks the parts of a template that a model generates; it renders what is inside."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as it is

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return the statements inside."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """One model's template. special: its special tokens by name, such as `bos_token`."""

    def __init__(self, source: str, special: Mapping[str, str], today: Callable[[], datetime.datetime]) -> None:
        """today: the time for templates that show the date. Raises jinja2.TemplateError."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: today().strftime(form)
        self._template = environment.from_string(source)
        self._special = dict(special)
        parsed = environment.parse(source)
        self._takes_parts = _iterates_over_contents(parsed)
        self._is_bounded = _is_bounded(parsed)

    @property
    def is_bounded(self) -> bool:
        """Whether rendering takes no longer than what a request contains demands."""
        return self._is_bounded

    def render(self, body: Mapping[str, Any]) -> tuple[str, bool]:
        """Return a chat's prompt, and whether it is whole; otherwise it ends before the first part that is not text.

        Raises InvalidRequest, jinja2.TemplateError.
        """
        messages = [self._message(message) for message in _list_of_objects(body, "messages")]
        arguments = body.get("chat_template_kwargs")
        arguments = arguments if isinstance(arguments, dict) else {}
        continues = bool(body.get("continue_final_message"))
        values = {
            **self._special,
            "messages": messages,
            "tools": _tools(body),
            "documents": body.get("documents"),
            "add_generation_prompt": body.get("add_generation_prompt", not continues),
            **({"reasoning_effort": body["reasoning_effort"]} if body.get("reasoning_effort") else {}),
            **arguments,
        }
        text = self._template.render(values)
        head, cut, _ = text.partition(_CUT)
        if cut:
            return head, False
        if continues and isinstance(messages[-1]["content"], str):
            last = messages[-1]["content"].strip()
            text = text[: text.rindex(last) + len(last)] if last in text else text
        return text, True

    def _message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return a message as vLLM gives it to templates."""
        shown = dict(message)
        content = message.get("content")
        parts = content if isinstance(content, list) else [] if content is None else [{"type": "text", "text": content}]
        texts = [_text_of(part) for part in parts]
        if self._takes_parts:
            shown["content"] = [{"type": "text", "text": text} for text in texts]
        else:
            shown["content"] = "\n".join(texts)
        calls = message.get("tool_calls")
        if isinstance(calls, list):
            shown["tool_calls"] = [_call(call) for call in calls]
        return shown


def _call(call: Any) -> Any:
    """Return a tool call whose arguments are values instead of their JSON, as vLLM gives it to templates."""
    try:
        function = call["function"]
        arguments = function.get("arguments")
        parsed = json.loads(arguments) if isinstance(arguments, str) and arguments else arguments or {}
        return {**call, "function": {**function, "arguments": parsed}}
    except (AttributeError, KeyError, TypeError, ValueError):
        return call  # the engine refuses it


def _tools(body: Mapping[str, Any]) -> list[Any] | None:
    """Return the tools as vLLM gives them to templates: with its order of fields, and null for those left out."""
    tools = body.get("tools")
    if not isinstance(tools, list) or not tools:
        return None
    return [_tool(tool) for tool in tools]


def _tool(tool: Any) -> Any:
    if not isinstance(tool, dict) or not isinstance(tool.get("function"), dict):
        return tool
    function = {"name": None, "description": None, "parameters": None, **tool["function"]}
    return {
        "type": "function",
        "function": function,
        **{key: value for key, value in tool.items() if key != "function"},
    }


def _text_of(part: Any) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise InvalidRequest("a part of a message is neither text nor an object")
    text = part.get("text")
    return text if part.get("type") in ("text", "input_text", None) and isinstance(text, str) else _CUT


def _list_of_objects(body: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    values = body.get(name)
    if not isinstance(values, list) or not values or not all(isinstance(value, dict) for value in values):
        raise InvalidRequest(f"{name} must be a list of objects, and not empty")
    return values


def _iterates_over_contents(template: nodes.Template) -> bool:
    """Whether a template loops over the content of a message, and so expects its parts instead of text."""
    named = {"content"}
    for assigned in template.find_all(nodes.Assign):
        if _is_content(assigned.node, set()) and isinstance(assigned.target, nodes.Name):
            named.add(assigned.target.name)
    return any(_is_content(loop.iter, named) for loop in template.find_all(nodes.For))


def _is_bounded(template: nodes.Template) -> bool:
    """Whether a template repeats nothing but what is in a request: no counting, multiplying or recursion."""
    if any(name.name in _COUNTING for name in template.find_all(nodes.Name)):
        return False
    if any(template.find_all((nodes.Mul, nodes.Pow))) or any(loop.recursive for loop in template.find_all(nodes.For)):
        return False
    macros = list(template.find_all(nodes.Macro))
    names = {macro.name for macro in macros}
    calls = (call.node for macro in macros for call in macro.find_all(nodes.Call))
    return not any(isinstance(called, nodes.Name) and called.name in names for called in calls)


def _is_content(node: nodes.Node, named: set[str]) -> bool:
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    return isinstance(node, nodes.Name) and node.name in named


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **others: Any) -> str:
    """The filter `tojson` of chat templates: unlike jinja's own, it escapes nothing for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **others)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)
