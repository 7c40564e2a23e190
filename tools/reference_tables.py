"""Tables of the documentation that are made from the code.

What lives here: one function for each table, which returns Markdown. What must not: which page has which table, and
writing pages (tools/reference.py); diagrams (tools/drawn_rules.py).
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_type_hints

import click

from streams import errors, settings
from streams.cli import cli
from streams.cli.metrics import declared_metrics
from streams.core.ids import U32_MAX, U64_MASK
from streams.core.routing.reasons import EXPLANATIONS
from streams.errors import API_ERRORS, HTTP_CODES, HTTP_ERROR, KvStreamsError
from streams.process.metrics import label_text
from streams.router_api.http.openapi import document
from streams.topics import TopicSpec, topics

ROOT = Path(__file__).parents[1]

#: The units of settings, by the ends of their names. `gb_per_s` comes before `s`.
UNITS = {
    "bytes_per_token": "bytes per token",
    "us_per_token": "us per token",
    "gb_per_s": "GB/s",
    "bytes_max": "bytes",
    "bytes_high": "bytes",
    "bytes": "bytes",
    "tokens_max": "tokens",
    "tokens": "tokens",
    "us": "us",
    "ms": "ms",
    "s": "s",
}


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    lines += ["| " + " | ".join(map(_cell, row)) + " |" for row in rows]
    return "\n".join(lines)


def _cell(text: str) -> str:
    """Text as one cell: on one line, without characters that would end the cell or begin a tag outside of code."""
    parts = re.sub(r"\s+", " ", text).strip().replace("``", "`").split("`")
    return "`".join(part if i % 2 else part.replace("<", "&lt;") for i, part in enumerate(parts)).replace("|", "\\|")


def _code(text: str) -> str:
    return f"`{text}`"


# -- settings ----------------------------------------------------------------------------------------------------------


def setting_tables() -> str:
    """Every setting, in groups: name, kind, default, range and meaning."""
    hints = get_type_hints(settings.Settings)
    seen: set[str] = set()
    parts = []
    for group in reversed(settings.Settings.__mro__):
        own = [each for each in dataclasses.fields(group) if each.name not in seen] if group is not object else []
        if not own:
            continue
        seen |= {each.name for each in own}
        rows = (
            (_code(each.name), _kind(hints[each.name]), _default(each), _range(each), each.metadata["help"])
            for each in own
        )
        title = (group.__doc__ or "").partition(".")[0]
        parts.append(f"### {title}\n\n{table(('setting', 'kind', 'default', 'range', 'meaning'), rows)}")
    return "\n\n".join(parts)


def _kind(hint: Any) -> str:
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return "one of " + ", ".join(_code(str(member)) for member in hint)
    names = {bool: "on or off", int: "whole number", float: "number", str: "text"}
    named = {"dict": "texts by name" if hint == dict[str, str] else "numbers by name", "tuple": "numbers"}
    return names.get(hint) or named[hint.__origin__.__name__]


def _default(setting: dataclasses.Field[Any]) -> str:
    value = setting.default_factory() if callable(setting.default_factory) else setting.default
    if isinstance(value, str | bool | int | float) or value:
        text = settings._to_text(value)
        return _code(text) + (f" {unit}" if (unit := unit_of(setting.name)) else "") if text else "empty"
    return "empty"


def unit_of(name: str) -> str:
    """The unit that a setting's name ends with; empty if it has none."""
    return next((unit for end, unit in UNITS.items() if name.endswith("_" + end)), "")


def _range(setting: dataclasses.Field[Any]) -> str:
    low, high = setting.metadata.get("low"), setting.metadata.get("high")
    if low is None:
        return ""
    return f"{low:g} or more" if high is None else f"{low:,} to {high:,}"


# -- HTTP --------------------------------------------------------------------------------------------------------------


#: Integers that are shown by their width.
_WIDTHS = {U64_MASK: "u64", U32_MAX: "u32"}

#: The pattern of a u64 as text.
_DIGITS = "^[0-9]{1,20}$"


def http_calls() -> str:
    """Every call: its right, what it does, and the types of its body and its answer."""
    rows = []
    for path, methods in document()["paths"].items():
        if path.endswith((".css", ".js")):
            continue
        for method, call in methods.items():
            rights = [str(right) for each in call.get("security", ()) for right in each.get("bearer", ())]
            body = call.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
            answer = call["responses"]["200"]["content"]
            shown = _type(answer["application/json"]["schema"]) if "application/json" in answer else next(iter(answer))
            query = "" if body else _query(call)
            rows.append(
                (
                    _code(f"{method.upper()} {path}"),
                    ", ".join(map(_code, rights)) or "none",
                    call["summary"],
                    _type(body) if body else query,
                    shown,
                )
            )
    return table(("call", "right", "what it does", "body or parameters", "answer"), rows)


def _query(call: Mapping[str, Any]) -> str:
    return ", ".join(_code("?" + each["name"]) for each in call.get("parameters", ()) if each["in"] == "query")


def http_types() -> str:
    """Every type of the bodies and answers: its fields, their kinds, defaults and meanings."""
    parts = []
    for name, schema in document()["components"]["schemas"].items():
        text = _first_paragraph(schema.get("description", ""))
        if "enum" in schema:
            parts.append(f"### {name}\n\n{text}\n\nOne of {', '.join(_code(str(each)) for each in schema['enum'])}.")
            continue
        required = set(schema.get("required", ()))
        rows = [
            (_code(field), _type(kind), "" if field in required else _json_default(kind), kind.get("description", ""))
            for field, kind in schema.get("properties", {}).items()
        ]
        parts.append(f"### {name}\n\n{text}\n\n{table(('field', 'kind', 'default', 'meaning'), rows)}")
    return "\n\n".join(parts)


def _json_default(kind: Mapping[str, Any]) -> str:
    return _code(json.dumps(kind["default"])) if "default" in kind else "left out"


def _type(schema: Mapping[str, Any]) -> str:
    """A JSON schema in words, with its limits."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_type(each) for each in schema["anyOf"]))
    if "enum" in schema:
        return ", ".join(_code(json.dumps(each)) for each in schema["enum"])
    kind = str(schema.get("type", "any"))
    if kind == "array":
        most = f" (at most {schema['maxItems']:,})" if "maxItems" in schema else ""
        if items := schema.get("prefixItems"):
            return f"list of {', '.join(map(_type, items))}"
        return f"list{most} of {_type(schema.get('items', {}))}"
    if kind == "object" and isinstance(schema.get("additionalProperties"), Mapping):
        return f"object with values of {_type(schema['additionalProperties'])}"
    if kind == "integer" and schema.get("maximum") in _WIDTHS:
        return _WIDTHS[schema["maximum"]]
    if schema.get("pattern") == _DIGITS:
        return "its digits"
    limits = [f"at least {schema['minimum']:,}"] if schema.get("minimum") else []
    limits += [f"at most {schema['maximum']:,}"] if "maximum" in schema else []
    limits += [f"at most {schema['maxLength']:,} characters"] if "maxLength" in schema else []
    limits += [f"matches {_code(schema['pattern'])}"] if "pattern" in schema else []
    return kind + (f" ({', '.join(limits)})" if limits else "")


# -- metrics -----------------------------------------------------------------------------------------------------------


def metric_tables() -> str:
    """Every metric, by the process that serves it."""
    header = ("metric", "kind", "labels", "meaning")
    return "\n\n".join(
        f"### {title}\n\n"
        + table(header, ((_code(m.name), m.kind, "; ".join(map(label_text, m.labels)), m.help) for m in declared))
        for title, declared in declared_metrics().items()
    )


# -- topics ------------------------------------------------------------------------------------------------------------


def topic_table() -> str:
    """Every topic of a scope with the default settings."""
    rows = (
        (_code(each.name), each.key, _schema_link(each), _config(each)) for each in topics(settings.Settings()).all()
    )
    return table(("topic", "key", "record", "configuration"), rows)


def _schema_link(topic: TopicSpec) -> str:
    return f"[{topic.schema}](#{topic.schema})" if topic.schema else "bytes as received"


def _config(topic: TopicSpec) -> str:
    return ", ".join(_code(f"{name}={value}") for name, value in topic.config.items())


def schema_tables() -> str:
    """Every record: the fields of its schema."""
    parts = []
    for path in sorted((ROOT / "schemas").glob("*.avsc")):
        schema = json.loads(path.read_text())
        records = [("###", path.stem, schema), *(("####", each["name"], each) for each in _inner(schema["fields"]))]
        for level, name, record in records:
            rows = (
                (_code(each["name"]), _avro(each["type"]), _avro_default(each), each.get("doc", ""))
                for each in record["fields"]
            )
            shown = table(("field", "type", "default", "meaning"), rows)
            parts.append("\n\n".join(filter(None, (f"{level} {name}", record.get("doc", ""), shown))))
    return "\n\n".join(parts)


def _inner(kind: Any) -> Iterator[Mapping[str, Any]]:
    """The records that are defined inside a type, in order."""
    if isinstance(kind, list):
        for each in kind:
            yield from _inner(each)
    elif isinstance(kind, dict):
        if kind.get("type") == "record":
            yield kind
            yield from _inner(kind["fields"])
        else:
            yield from _inner(kind.get("type"))
            yield from _inner(kind.get("items"))
            yield from _inner(kind.get("values"))


def _avro(kind: Any) -> str:
    if isinstance(kind, list):
        return " or ".join(map(_avro, kind))
    if not isinstance(kind, dict):
        return str(kind).rpartition(".")[2]
    match kind["type"]:
        case "array":
            return f"list of {_avro(kind['items'])}"
        case "map":
            return f"map of {_avro(kind['values'])}"
        case "enum":
            return "one of " + ", ".join(map(_code, kind["symbols"]))
        case "fixed":
            return f"{kind['size']} bytes"
        case "record":
            return str(kind["name"])
        case other:
            return _avro(other)


def _avro_default(field: Mapping[str, Any]) -> str:
    return _code(json.dumps(field["default"])) if "default" in field else ""


# -- errors ------------------------------------------------------------------------------------------------------------


def api_errors() -> str:
    """Every code that the HTTP API returns."""
    about = {KvStreamsError: "A fault of the router; its log has the trace."}
    rows = [
        (str(each.http_status), _code(each.code), about.get(each) or _first_paragraph(each.__doc__))
        for each in API_ERRORS
    ]
    refused = "There is no such path, or it has no such method."
    rows += [(str(status), _code(code), refused) for status, code in HTTP_CODES.items()]
    rows.append(("4xx", _code(HTTP_ERROR), "The HTTP server refused the request for another reason."))
    return table(("status", "code", "meaning"), sorted(rows))


def remedies() -> str:
    """Every error that has a remedy, by its class, as the code raises it."""
    by_class: dict[type[KvStreamsError], dict[tuple[str, str], None]] = {}
    for call, names in _calls():
        kind = getattr(errors, _name(call.func), None)
        if not (isinstance(kind, type) and issubclass(kind, KvStreamsError)):
            continue
        remedy = next((_text(each.value, names) for each in call.keywords if each.arg == "remedy"), "")
        texts = [text for text in (_text(arg, names) for arg in call.args) if text]
        if remedy and texts:
            by_class.setdefault(kind, {})[texts[-1], remedy] = None
    parts = []
    for kind in sorted(by_class, key=lambda each: each.__name__):
        rows = sorted(by_class[kind])
        about = f"{_first_paragraph(kind.__doc__)} Its code is `{kind.code}`."
        parts.append(f"### {kind.__name__}\n\n{about}\n\n{table(('message', 'what to do'), rows)}")
    return "\n\n".join(parts)


def degraded_reasons() -> str:
    """Why an answer or a worker is not exact, and what to do about it."""
    rows = ((_code(reason), each.meaning, each.remedy) for reason, each in EXPLANATIONS.items())
    return table(("reason", "meaning", "what to do"), rows)


def findings() -> str:
    """Everything that the doctor finds."""
    rows: dict[tuple[str, str, str], None] = {}
    for call, names in _calls("streams/doctor"):
        if _name(call.func) == "Finding" and len(call.args) == 5:
            code, _, problem, remedy = (_text(arg, names) for arg in call.args[1:])
            if code:
                rows[_code(code), problem, remedy] = None
    return table(("code", "what is wrong", "what to do"), sorted(rows))


def _calls(folder: str = "streams") -> Iterator[tuple[ast.Call, Mapping[str, ast.expr]]]:
    """Yield every call of a folder's code, with the values of its module's names."""
    for path in sorted((ROOT / folder).rglob("*.py")):
        tree = ast.parse(path.read_text())
        names = {
            target.id: node.value
            for node in tree.body
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                yield node, names


def _name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _text(node: ast.expr, names: Mapping[str, ast.expr]) -> str:
    """The text of an expression, with … for every value; empty if it is no text."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(_text(part, names) if isinstance(part, ast.Constant) else "…" for part in parts)
        case ast.BinOp(left=left, right=right):
            return _text(left, names) + _text(right, names)
        case ast.IfExp(body=body, orelse=orelse):
            return " / ".join(filter(None, (_text(body, names), _text(orelse, names))))
        case ast.Name(id=name) if name in names:
            return _text(names[name], {})
    return ""


# -- command line ------------------------------------------------------------------------------------------------------


def commands() -> str:
    """Every command with its own arguments and options."""
    return "\n\n".join(_command(["kvstreams"], cli, click.Context(cli, info_name="kvstreams")))


def _command(words: list[str], command: click.Command, context: click.Context) -> Iterator[str]:
    params = [each for each in command.params if not getattr(each, "hidden", False)]
    own = [each for each in params if not (each.name or "").startswith("setting_")]
    usage = " ".join(
        word for param in own if isinstance(param, click.Argument) for word in [param.make_metavar(context)]
    )
    takes = len(own) < len(params)
    text = [f"### {' '.join(words)}", _prose(command.help)] if len(words) > 1 else [_prose(command.help)]
    if not isinstance(command, click.Group):
        text.append(f"`{' '.join([*words, *(['[OPTIONS]'] if params else []), *([usage] if usage else [])])}`")
    if takes:
        text.append("It takes every [setting](settings.md) as an option.")
    rows = [
        (_options(each), _option_default(each), _option_help(each)) for each in own if isinstance(each, click.Option)
    ]
    if rows:
        text.append(table(("option", "default", "meaning"), rows))
    yield "\n\n".join(filter(None, text))
    if isinstance(command, click.Group):
        for name, each in sorted(command.commands.items()):
            yield from _command([*words, name], each, click.Context(each, info_name=name, parent=context))


def _prose(text: str | None) -> str:
    """The help of a command as paragraphs."""
    paragraphs = (re.sub(r"\s+", " ", part).strip() for part in (text or "").replace("\b", "").split("\n\n"))
    return "\n\n".join(part.replace("<", "&lt;") for part in paragraphs if part)


def _options(option: click.Option) -> str:
    names = ", ".join(map(_code, [*option.opts, *option.secondary_opts]))
    return names + (" (repeatable)" if option.multiple else "") + (" (required)" if option.required else "")


def _option_help(option: click.Option) -> str:
    """The help of an option, with the values that it may have if they are few."""
    values = [_code(str(each)) for each in option.type.choices] if isinstance(option.type, click.Choice) else []
    return "; ".join(filter(None, (option.help, f"one of {', '.join(values)}" if values else "")))


def _option_default(option: click.Option) -> str:
    value = option.default
    if option.is_flag and not option.secondary_opts:
        return "off"
    if value in (None, (), "") or callable(value) or "UNSET" in repr(value).upper():
        return ""
    return _code(("on" if value else "off") if isinstance(value, bool) else str(value))


# -- modules -----------------------------------------------------------------------------------------------------------


def module_map() -> str:
    """Every module with the first paragraph of its header, and the state that it owns, by package."""
    parts = []
    for folder in sorted({path.parent for path in (ROOT / "streams").rglob("*.py")}):
        package = folder / "__init__.py"
        heading = f"### {folder.relative_to(ROOT)}"
        rows = []
        for path in sorted(folder.glob("*.py")):
            if path != package:
                header = header_of(path)
                rows.append((_code(path.name), _first_paragraph(header), owned_state(header)))
        about = _first_paragraph(header_of(package)) if package.exists() else ""
        tables = table(("module", "contents", "state that it owns"), rows) if rows else ""
        parts.append("\n\n".join(filter(None, (heading, about, tables))))
    return "\n\n".join(parts)


def header_of(path: Path) -> str:
    """The docstring of a module."""
    return ast.get_docstring(ast.parse(path.read_text())) or ""


def owned_state(header: str) -> str:
    """What a module's header says after "State:"; empty if it owns none."""
    found = re.search(r"^State: (.+?)(?:\n\n|\Z)", header, re.MULTILINE | re.DOTALL)
    return found[1].removesuffix(".") if found else ""


def _first_paragraph(text: str | None) -> str:
    return re.sub(r"\s+", " ", (text or "").strip().partition("\n\n")[0])
