"""Chats are rendered as vLLM renders them: hundreds of random ones, with vLLM's own code from its wheel.

`python -m tests.real.test_rendering` stores some of the results for the tests that run without vLLM.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

from streams.errors import InvalidRequest
from streams.prompts.calls import Kind
from streams.prompts.conversation import NEWEST
from streams.prompts.parity import PROMPTS
from streams.prompts.tokenizer import ModelTokenizer
from tests.helpers.api_requests import MESSAGES, RESPONSES, random_message, random_response
from tests.helpers.message_lists import GOLDEN, TEMPLATES, Row, model_files, rows
from tests.real.environment import environment

#: Chats that are compared, and the share of them that must be equal.
N_CHATS = 700
EQUAL_MIN = 0.99

#: Random requests of each of the calls that become chats, for every template.
N_DRAWN = 60

#: Chats whose results are stored, and templates for which those of other calls are.
N_GOLDEN = 84
STORED_FOR = ("qwen_like", "whole_message")


def _loop(parts: str, *, messages: str = "messages", before: str = "", inside: str = "") -> str:
    """Return a template that loops over parts of messages, and says first which it got."""
    loops = "{% for m in MESSAGES %}INSIDE{% for part in PARTS %}{{ part.text }}{% endfor %}{% endfor %}"
    filled = loops.replace("MESSAGES", messages).replace("INSIDE", inside).replace("PARTS", parts)
    return "{{ messages[0].content is string }} " + before + filled


def _macro(parameters: str, call: str) -> str:
    """Return a template whose macro loops over its parameter x."""
    macro = "{% macro shown(PARAMETERS) %}{% for part in x %}{{ part.text }}{% endfor %}{% endmacro %}"
    called = "{{ messages[0].content is string }} {% for m in messages %}{{ CALL }}{% endfor %}"
    return macro.replace("PARAMETERS", parameters) + called.replace("CALL", call)


#: Ways of reading the content of messages. By the source of a template, vLLM decides whether it gets parts or text.
READERS = {
    "attribute": _loop("m.content"),
    "item": _loop("m['content']"),
    "filter": _loop("m.content | reverse"),
    "slice": _loop("m.content[0:1]", messages="messages[0:]"),
    "get": _loop("m.get('content')"),
    "index": _loop("messages[0].content"),
    "content": _loop("content", inside="{% set content = m.content %}"),
    "other-name": _loop("text", inside="{% set text = m.content %}"),
    "renamed": _loop("m.content", messages="turns", before="{% set turns = messages %}"),
    "renamed-twice": _loop("m.content", messages="b", before="{% set a = messages[0:] %}{% set b = a | list %}"),
    "namespace": _loop("m.content", messages="ns.m", before="{% set ns = namespace(m=messages) %}"),
    "into-namespace": _loop("m.content", before="{% set ns = namespace(m=0) %}{% set ns.m = messages %}"),
    "conditional": _loop("(m.content if m.content is not string else [])"),
    "filtered": _loop("m.content", messages="messages | selectattr('role', 'equalto', 'user')"),
    "two-targets": _loop("m.content", before="{% for a, b in messages | groupby('role') %}{{ a }}{% endfor %}"),
    "macro": _macro("x", "shown(m.content)"),
    "macro-by-name": _macro("a, x=0", "shown(1, x=m.content)"),
    "macro-of-other": _macro("a, x=[]", "shown(m.content)"),
    "macro-not-called": _macro("x", "m.content"),
    "no-loop": "{{ messages[0].content is string }} {{ messages[0].content }}",
}

#: Importing vLLM takes up to a minute, and more on a busy machine.
TIMEOUT_S = 600.0


def sources() -> dict[str, str]:
    """Return the templates by name."""
    return {path.stem: path.read_text() for path in TEMPLATES.glob("*.jinja")} | READERS


def render_with_vllm(given: Sequence[Row], folder: Path) -> tuple[str, list[dict[str, Any]]]:
    """Return vLLM's version, and what it makes of each chat. The models are written to the folder."""
    for name, source in sources().items():
        model_files(folder / name, source)
    python = environment() / "bin" / "python"
    asked = json.dumps([(str(folder / name), body) for name, body in given])
    script = Path(__file__).with_name("vllm_rendering.py")
    ended = subprocess.run(
        [python, script], input=asked, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    answer = json.loads(ended.stdout)
    return answer["version"], answer["results"]


def differences(
    given: Sequence[Row], theirs: Sequence[dict[str, Any]], folder: Path, kind: Kind = Kind.CHAT
) -> tuple[int, list[str]]:
    """Return how many requests the engine renders, and those of which the front makes another prompt."""
    tokenizers = {name: ModelTokenizer(folder / name, 1 << 20) for name in sources()}
    n_rendered, different = 0, []
    for (name, body), engine in zip(given, theirs, strict=True):
        if "error" in engine:
            continue  # it answers a client with this error
        n_rendered += 1
        try:
            rendered = tokenizers[name].render(kind, body, NEWEST)
            ours = "".join(rendered.pieces), array("I", tokenizers[name].join(rendered).tokens).tolist()
        except InvalidRequest as exc:
            ours = str(exc), []
        if ours != (engine["text"], engine["ids"]):
            different.append(f"{name}: {json.dumps(body)}\n  front: {ours[0]!r}\n  vLLM:  {engine['text']!r}")
    return n_rendered, different


def test_the_front_renders_what_vllm_renders(tmp_path: Path) -> None:
    """Nearly all texts and token ids are equal, over every template, and those of the probes without exception."""
    probes = [json.loads(json.dumps(body)) for kind, body in PROMPTS.values() if kind is Kind.CHAT]
    given: list[Row] = [(path.stem, body) for path in sorted(TEMPLATES.glob("*.jinja")) for body in probes]
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    given += [
        (name, {"messages": [{"role": "user", "content": content}]}) for name in READERS for content in ("a", parts)
    ]
    n_probes = len(given)
    given += rows(N_CHATS, seed=38)
    version, theirs = render_with_vllm(given, tmp_path)
    n_equal, different = differences(given[:n_probes], theirs[:n_probes], tmp_path)
    assert n_equal > n_probes // 2 and not different, "\n".join(different[:5])
    n_rendered, different = differences(given[n_probes:], theirs[n_probes:], tmp_path)
    print(f"vLLM {version}: {n_rendered - len(different)} of {n_rendered} chats are equal", *different, sep="\n")
    assert n_rendered >= 500
    assert n_rendered - len(different) >= EQUAL_MIN * n_rendered, "\n".join(different[:5])


def test_responses_and_messages_become_the_chats_that_vllm_makes_of_them(tmp_path: Path) -> None:
    """All that the engine renders have the same text and token ids, over templates like those of well-known models."""
    names = [path.stem for path in sorted(TEMPLATES.glob("*.jinja"))]
    random = Random(38)
    drawn = [{str(number): made(random) for number in range(N_DRAWN)} for made in (random_response, random_message)]
    responses = api_rows(names, {**RESPONSES, **drawn[0]})
    messages = api_rows(names, {**MESSAGES, **drawn[1]}, max_tokens=2048)
    _, theirs = render_with_vllm([*responses, *messages], tmp_path)
    n = len(responses)
    for kind, given, answers in (
        (Kind.RESPONSES, responses, theirs[:n]),
        (Kind.MESSAGES, messages, theirs[n:]),
    ):
        n_rendered, different = differences(given, answers, tmp_path, kind)
        print(f"{kind}: {n_rendered - len(different)} of {n_rendered} are equal")
        assert n_rendered > 0.7 * len(answers), [answer for answer in answers if "error" in answer][:9]
        assert not different, f"{len(different)}\n" + "\n".join(different[:12])


def api_rows(names: Sequence[str], bodies: Mapping[str, Mapping[str, Any]], **more: Any) -> list[Row]:
    """Return each of the bodies for each of the templates."""
    return [(name, {"model": "m", **more, **body}) for name in names for body in bodies.values()]


def store() -> None:
    """Store what vLLM makes of some chats, and of requests of the calls that it makes chats of."""
    given: dict[Kind, list[Row]] = {
        Kind.CHAT: rows(2 * N_GOLDEN, seed=1),
        Kind.RESPONSES: api_rows(STORED_FOR, RESPONSES),
        Kind.MESSAGES: api_rows(STORED_FOR, MESSAGES, max_tokens=2048),
    }
    with tempfile.TemporaryDirectory() as folder:
        version, theirs = render_with_vllm([row for asked in given.values() for row in asked], Path(folder))
    lines = [json.dumps({"vllm": version})]
    for kind, asked in given.items():
        answers, theirs = theirs[: len(asked)], theirs[len(asked) :]
        lines += [
            json.dumps({"call": kind, "template": name, "body": body, "text": engine["text"]}, ensure_ascii=False)
            for (name, body), engine in zip(asked, answers, strict=True)
            if "error" not in engine
        ][:N_GOLDEN]
    GOLDEN.write_text("\n".join([*lines, ""]))


if __name__ == "__main__":
    store()
