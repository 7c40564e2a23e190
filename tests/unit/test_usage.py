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
from streams.frontend.usage import (
    EVENT_BYTES_MAX,
    EventUsageWatch,
    UsageWatch,
    usage_fields,
    usage_options,
    with_fields,
)

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


def named(type_: str, end: str = "\n\n", **page: Any) -> bytes:
    """An event of /v1/responses or /v1/messages."""
    line_end = end[: len(end) // 2]
    return f"event: {type_}{line_end}data: ".encode() + orjson.dumps({"type": type_, **page}) + end.encode()


#: Streams whose events have names, with a text that looks like the event with the usage.
NAMED: dict[str, tuple[str, dict[str, Any]]] = {
    "response.completed": ("response.output_text.delta", {"response": {"output": ["x" * 99], "usage": USAGE}}),
    "response.incomplete": ("response.output_text.delta", {"response": {"usage": USAGE, "output": []}}),
    "message_delta": ("content_block_delta", {"delta": {"stop_reason": "end_turn"}, "usage": USAGE}),
}


@pytest.mark.parametrize("end", ["\n\n", "\r\n\r\n"])
@pytest.mark.parametrize("last", NAMED)
def test_the_usage_is_found_by_the_name_of_its_event(last: str, end: str) -> None:
    """Wherever the stream is cut. The usage that comes last counts, and each byte passes at once."""
    delta, page = NAMED[last]
    text = f"event: {last}\ndata: {{}}\n\n"
    begin = named(delta, end, delta=text) + named("message_start", end, message={"usage": {"input_tokens": 9}})
    whole = begin + named(last, end, usage={"input_tokens": 1}) + named(last, end, **page) + named("message_stop", end)
    for step in (*range(1, 60), len(whole)):
        watch = EventUsageWatch()
        for cut in range(0, len(whole), step):
            part = whole[cut : cut + step]
            assert watch.feed(part) == part
        assert (watch.usage, watch.rest()) == (USAGE, b"")


@pytest.mark.parametrize("page", [b"[]", b'{"usage": 7}', b'{"response": null}', b"not JSON", b"", b'{"response": {}}'])
def test_an_event_without_a_usage_changes_nothing(page: bytes) -> None:
    """Also one that ends in the middle, and one that is too long."""
    watch = EventUsageWatch()
    for data in (b"event: message_delta\ndata: " + page + b"\n\n", named("response.completed", response={"usage": {}})):
        assert watch.feed(data) == data
    assert watch.usage in (None, {})
    watch.feed(b"event: response.completed\ndata: " + b"x" * (EVENT_BYTES_MAX + 1))
    watch.feed(named("message_delta", usage=USAGE))
    assert watch.usage == USAGE


@pytest.mark.parametrize(
    ("body", "options"),
    [
        ({}, {"include_usage": True}),
        ({"stream_options": None}, {"include_usage": True}),
        ({"stream_options": {}}, {"include_usage": True}),
        ({"stream_options": {"include_usage": False, "other": 1}}, {"include_usage": True, "other": 1}),
        ({"stream_options": {"include_usage": True}}, None),
        ({"stream_options": {"include_usage": 1}}, None),
        ({"stream_options": {"include_usage": "true"}}, None),
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
        (
            {"input_tokens": 5, "input_tokens_details": {"cached_tokens": 4, "input_tokens_per_turn": []}},
            PromptUsage(5, 4),
        ),
        (
            {"input_tokens": 5, "input_tokens_details": {"cached_tokens": 4, "input_tokens_per_turn": [5]}},
            PromptUsage(5, 4),
        ),
        ({"input_tokens": 9, "input_tokens_details": {"cached_tokens": 4, "input_tokens_per_turn": [4, 5]}}, None),
        ({"input_tokens": 65, "output_tokens": 2}, PromptUsage(65)),
        ({"input_tokens": 1, "cache_read_input_tokens": 64}, PromptUsage(65, 64)),
        (
            {"input_tokens": 0, "cache_read_input_tokens": 64, "cache_creation_input_tokens": 33},
            PromptUsage(97, 64),
        ),
        ({"input_tokens": 3, "cache_read_input_tokens": None, "cache_creation_input_tokens": 2}, PromptUsage(5)),
        ({"input_tokens": 1, "cache_read_input_tokens": "64"}, None),
        ({"input_tokens": None, "cache_read_input_tokens": 64}, None),
        ({"input_tokens": 2**31 - 1, "cache_read_input_tokens": 1}, None),
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
