"""The usage of an engine's answer: asked for, found, hidden from clients that did not ask, and compared."""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import orjson
import pytest

from streams.client.payloads import PromptUsage, pack_tokens, prompt_usage
from streams.client.reports import OutstandingReport
from streams.frontend import render_audit
from streams.frontend.render_audit import RenderAudit, Rendering, compare
from streams.frontend.usage import UsageWatch, usage_fields, usage_options, with_fields

USAGE = {"prompt_tokens": 65, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 64}}


def event(page: Any, end: str = "\n\n") -> bytes:
    return b"data: " + orjson.dumps(page) + end.encode()


def stream(end: str = "\n\n", usage: Mapping[str, Any] = USAGE) -> tuple[bytes, bytes]:
    """A stream with its usage, and the same without."""
    text = 'a "choices":[] b'
    begin = event({"choices": [{"delta": {"content": text}}]}, end) + event(
        {"choices": [{"finish_reason": "stop"}]}, end
    )
    done = f"data: [DONE]{end}".encode()
    return begin + event({"id": "x", "choices": [], "usage": usage}, end) + done, begin + done


@pytest.mark.parametrize("end", ["\n\n", "\r\n\r\n"])
@pytest.mark.parametrize("hides", [True, False])
def test_the_usage_is_found_wherever_the_stream_is_cut(end: str, hides: bool) -> None:
    """Only its event is hidden, and only from a client that did not ask; each other byte arrives once and in order."""
    whole, without = stream(end)
    for first in range(len(whole) + 1):
        for step in (1, 7, len(whole)):
            watch = UsageWatch(hides=hides)
            cuts = [0, first, *range(first + step, len(whole), step), len(whole)]
            parts = [whole[begin:stop] for begin, stop in pairwise(cuts)]
            got = b"".join(watch.feed(part) for part in parts) + watch.rest()
            assert got == (without if hides else whole)
            assert watch.usage == USAGE
        if first > 80:
            break


@pytest.mark.parametrize(
    "page",
    [
        {"choices": [], "usage": None},
        {"choices": []},
        {"choices": [], "kvstreams_migration": {}},
        {"choices": [{"delta": {"tool": {"choices": []}}}], "usage": {"prompt_tokens": 1}},
        {"error": {"message": "no"}, "choices": []},
    ],
)
def test_other_events_without_choices_are_the_clients(page: dict[str, Any]) -> None:
    """An event is hidden if it has the usage and nothing else."""
    data = event(page) + b': a comment\n\nevent: x\ndata: not JSON "choices":[]\n\ndata: [DONE]\n\n'
    watch = UsageWatch(hides=True)
    assert watch.feed(data) + watch.rest() == data
    assert watch.usage is None


def test_a_stream_that_breaks_off_is_passed_on_to_its_last_byte() -> None:
    """What was held back of an event comes at the end. Before the finish reason, nothing is held back."""
    watch = UsageWatch(hides=True)
    assert watch.feed(b'data: {"choices": [') == b'data: {"choices": ['
    assert watch.rest() == b""
    assert watch.feed(b'{"finish_reason": "sto') == b""
    assert watch.feed(b'p"}]}\n\n') == b'{"finish_reason": "stop"}]}\n\n'
    assert watch.feed(b'data: {"choices"') == b""
    assert watch.rest() == b'data: {"choices"'
    assert watch.rest() == b""


@pytest.mark.parametrize(
    ("body", "options"),
    [
        ({}, {"include_usage": True}),
        ({"stream_options": None}, {"include_usage": True}),
        ({"stream_options": {}}, {"include_usage": True}),
        ({"stream_options": {"include_usage": False, "other": 1}}, {"include_usage": True, "other": 1}),
        ({"stream_options": {"include_usage": True}}, None),
        ({"stream_options": "wrong"}, None),
    ],
)
def test_the_usage_is_asked_for_where_it_was_not(body: dict[str, Any], options: dict[str, Any] | None) -> None:
    """The client's other options stay, and what the engine will refuse is left alone."""
    raw = json.dumps({"stream": True, **body}).encode()
    assert usage_options(raw) == options
    sent = with_fields(raw, usage_fields(options))
    assert sent.startswith(raw[:-1])
    assert orjson.loads(sent) == {"stream": True, **body, **({} if options is None else {"stream_options": options})}
    assert orjson.loads(with_fields(b" { } ", {"a": 1, "b": [2]})) == {"a": 1, "b": [2]}


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        (USAGE, PromptUsage(65, 64)),
        ({"prompt_tokens": 65}, PromptUsage(65)),
        ({"prompt_tokens": 65, "prompt_tokens_details": None}, PromptUsage(65)),
        ({"prompt_tokens": 65, "prompt_tokens_details": {"cached_tokens": None}}, PromptUsage(65)),
        ({"prompt_tokens": 65, "prompt_tokens_details": {"cached_tokens": 66}}, PromptUsage(65)),
        ({"prompt_tokens": 65, "prompt_tokens_details": {"cached_tokens": True}}, PromptUsage(65)),
        ({"input_tokens": 5, "input_tokens_details": {"cached_tokens": 4}}, PromptUsage(5, 4)),
        ({"input_tokens": 1, "cache_read_input_tokens": 64}, None),
        ({"prompt_tokens": -1}, None),
        ({"prompt_tokens": "65"}, None),
        ({"prompt_tokens": 2**31}, None),
        ({}, None),
        ([], None),
        (None, None),
    ],
)
def test_what_a_usage_says_of_the_prompt(usage: Any, expected: PromptUsage | None) -> None:
    """Numbers that cannot be are not reported: a router would refuse the report, and the booking would not end."""
    assert prompt_usage(usage) == expected


def test_a_report_keeps_the_usage_until_it_is_sent() -> None:
    """The end of a request that waits for a router includes what was reported with the end of its prefill."""
    waiting = OutstandingReport(prefill_complete=True, usage=PromptUsage(65, 64))
    waiting.merge(OutstandingReport(output_tokens=5))
    waiting.merge(OutstandingReport(free=True))
    assert waiting.usage == PromptUsage(65, 64)
    waiting.merge(OutstandingReport(free=True, usage=PromptUsage(70, 0)))
    assert waiting.usage == PromptUsage(70, 0)


@pytest.mark.parametrize(
    ("prompt_tokens", "prompt_ids", "expected"),
    [
        (3, None, Rendering.SAME_LENGTH),
        (4, None, Rendering.OTHER_LENGTH),
        (3, [1, 2, 2**32 - 1], Rendering.EQUAL),
        (3, [1, 2, 3], Rendering.OTHER_TOKENS),
        (4, [1, 2, 3, 4], Rendering.OTHER_LENGTH),
        (0, None, Rendering.OTHER_LENGTH),
    ],
)
def test_the_same_length_is_no_proof(prompt_tokens: int, prompt_ids: list[int] | None, expected: Rendering) -> None:
    """Where the engine reports the tokens, they are compared."""
    ids = None if prompt_ids is None else array("I", prompt_ids)
    assert compare(pack_tokens([1, 2, 2**32 - 1]), prompt_tokens, ids) is expected


def test_three_of_the_last_twenty_prompts_are_too_many() -> None:
    """The twenty are those of one model, and begin anew afterwards."""
    audit = RenderAudit()
    other, same = Rendering.OTHER_LENGTH, Rendering.SAME_LENGTH
    for rendering in [other, other, *[same] * 18]:
        assert not audit.note("m", rendering)
    assert not audit.note("n", other)
    assert not audit.note("m", other)  # the first one of the 21
    assert not audit.note("m", same)
    assert not audit.note("m", Rendering.OTHER_TOKENS)
    assert audit.note("m", other)
    assert not audit.note("m", other)
    assert not audit.note("m", other)
    assert audit.note("m", other)


def test_what_is_kept_of_models_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of models and versions of engines come from outside."""
    monkeypatch.setattr(render_audit, "MODELS_MAX", 2)
    audit = RenderAudit()
    for number in range(5):
        audit.note(f"m{number}", Rendering.OTHER_LENGTH)
        audit.note_different("m", f"0.{number}")
        audit.note_different("m", "0.0")
    assert audit.different == {("m", "0.0"): 6, ("m", "0.1"): 1}
    assert len(audit._last) == 2
