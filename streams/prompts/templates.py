"""Chat templates: from the messages of a request to the text of its prompt (pure).

What lives here: rendering as Hugging Face's transformers does, in jinja2's sandbox, and what vLLM reads of a template's
source. What must not: files, tokens (tokenizer), and what the messages become first (conversation). A template comes
with the model and never from a request: it could run for as long as it liked.
"""

from __future__ import annotations

import datetime
import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from streams.errors import InvalidRequest
from streams.prompts.conversation import CUT, NEWEST, Rule, conversation, flag, has_cut, variables

#: Is appended to a message that is to be continued, and the prompt ends where it appears. As that of transformers, it
#: ends with a space: if the template strips the message, its prompt is stripped as well.
_CONTINUED = "KVSTREAMS_CONTINUES_HERE "

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
        parsed = environment.parse(source)
        # Before the functions below are known: a request may have variables of their names.
        self._accepted = frozenset(find_undeclared_variables(parsed))
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: today().strftime(form)
        self._template = environment.from_string(source)
        self._source = source
        self._special = dict(special)
        self._takes_parts = _takes_parts(parsed)
        self._names_developer = '"developer"' in source or "'developer'" in source
        self._is_bounded = _is_bounded(parsed)

    @cached_property
    def refuses_later_system(self) -> bool:
        """Whether it refuses a system message that is not the first, as far as vLLM's test for this can tell."""
        # Without the functions and variables above, as in vLLM: a template that calls one of them fails.
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        messages = [{"role": role, "content": "t"} for role in ("system", "user") * 2]
        try:
            environment.from_string(self._source).render(messages=messages, add_generation_prompt=False)
        except Exception:  # a template may raise anything
            return True
        return False

    @property
    def is_bounded(self) -> bool:
        """Whether rendering takes no longer than what a request contains demands."""
        return self._is_bounded

    def render(self, body: Mapping[str, Any], rules: Rule = NEWEST, *, orders_calls: bool = True) -> tuple[str, bool]:
        """Return a chat's prompt, and whether it is whole; otherwise it ends before the first part that is not text.

        rules: that the engine follows. orders_calls: as in `conversation`. Raises InvalidRequest, jinja2.TemplateError.
        """
        messages = conversation(
            _list_of_objects(body, "messages"),
            rules,
            takes_parts=self._takes_parts,
            names_developer=self._names_developer,
            orders_calls=orders_calls,
        )
        continued = _mark_end(messages[-1]) if flag(body, "continue_final_message", default=False) else None
        values = {**self._special, **variables(body, self._accepted, rules), "messages": messages}
        text = self._template.render(values)
        head, cut, _ = text.partition(CUT)
        if cut or has_cut(messages):
            return head, False
        return (text if continued is None else _up_to_mark(text, continued)), True


def _mark_end(message: dict[str, Any]) -> str:
    """Mark where the text of a message ends, and return the text. Raises InvalidRequest if it has none."""
    content = message["content"]
    if isinstance(content, str):
        message["content"] = content + _CONTINUED
        return content
    for part in reversed(content):
        if "text" in part:
            text = str(part["text"])
            part["text"] = text + _CONTINUED
            return text
    raise InvalidRequest("the message that is to be continued has no text")


def _up_to_mark(prompt: str, continued: str) -> str:
    """Return a prompt up to the end of the message that is continued. Raises InvalidRequest if it is not in there."""
    end = prompt.rfind(_CONTINUED.strip())
    if end < 0 or continued.strip() not in prompt:
        raise InvalidRequest("the chat template changes the message that is to be continued")
    return prompt[:end] if prompt.startswith(_CONTINUED, end) else prompt[:end].rstrip()


def _list_of_objects(body: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    values = body.get(name)
    if not isinstance(values, list) or not values or not all(isinstance(value, dict) for value in values):
        raise InvalidRequest(f"{name} must be a list of objects, and not empty")
    return values


def _takes_parts(template: nodes.Template) -> bool:
    """Whether a template loops over the content of messages, and so gets their parts, by the signs that vLLM reads.

    These are loops over the content of what a loop over the messages names; over a parameter of a macro that gets it;
    and outside of macros, over anything with the name `content`. Assignments of the messages to other names are
    followed, those of a content are not. 0.30 and later follow macros.
    """
    try:
        messages = set(_loop_names(template, _names_of(template, "messages")))
        return any(_loops_over_content(template, messages))
    except _Unnamed:
        return False


class _Unnamed(Exception):
    """A loop or an assignment has several targets, or an attribute as its target."""


def _loops_over_content(template: nodes.Template, messages: set[str]) -> Iterator[bool]:
    in_macros: dict[int, set[str]] = {}
    for macro in template.find_all(nodes.Macro):
        parameters = _content_parameters(template, macro, messages)
        in_macros.update({id(loop): parameters for loop in macro.find_all(nodes.For)})
    for loop in template.find_all(nodes.For):
        name = loop.iter.name if isinstance(loop.iter, nodes.Name) else None
        parameters = in_macros.get(id(loop), {"content"})
        if _reads(loop.iter, messages, "content") or name in parameters:
            _named(loop.target)
            yield True


def _content_parameters(template: nodes.Template, macro: nodes.Macro, messages: set[str]) -> set[str]:
    """Return the parameters of a macro that get the content of a message in some call."""
    names = [parameter.name for parameter in macro.args]
    found: set[str] = set()
    for call in template.find_all(nodes.Call):
        if isinstance(call.node, nodes.Name) and call.node.name == macro.name:
            given = [*zip(names, call.args, strict=False), *((word.key, word.value) for word in call.kwargs)]
            found |= {name for name, value in given if name in names and _reads(value, messages, "content")}
    return found


def _names_of(template: nodes.Template, name: str) -> set[str]:
    """Return a variable's name, and those of variables to which it is assigned, also in part."""
    names, followed = {name}, deque([name])
    while followed:
        current = followed.popleft()
        for assigned in template.find_all(nodes.Assign):
            if _reads(assigned.node, {current}) and (target := _named(assigned.target)) not in names:
                names.add(target)
                followed.append(target)
    return names


def _loop_names(template: nodes.Template, names: set[str]) -> Iterable[str]:
    return [_named(loop.target) for loop in template.find_all(nodes.For) if _reads(loop.iter, names)]


def _named(target: nodes.Node) -> str:
    if not isinstance(target, nodes.Name):
        raise _Unnamed
    return target.name


def _reads(node: nodes.Node | None, names: set[str], attribute: str | None = None) -> bool:
    """Whether an expression is a variable, or an attribute of it, perhaps with filters or a slice of it."""
    while isinstance(node, nodes.Filter | nodes.Test) or (
        isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
    ):
        node = node.node
    if attribute is None:
        return isinstance(node, nodes.Name) and node.ctx == "load" and node.name in names
    if isinstance(node, nodes.Getattr):
        return node.attr == attribute and _reads(node.node, names) and isinstance(node.node, nodes.Name)
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const):
        return node.arg.value == attribute and _reads(node.node, names) and isinstance(node.node, nodes.Name)
    return False


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


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **others: Any) -> str:
    """The filter `tojson` of chat templates: unlike jinja's own, it escapes nothing for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **others)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)
