"""The pure parts of the client: requests as they are sent, events as they are split, and reports as they are merged."""

from __future__ import annotations

import asyncio
import dataclasses
import re
import subprocess
import sys
from typing import Any
from urllib.parse import urlencode

import msgspec
import numpy as np
import orjson
import pytest
from hypothesis import given, strategies

from streams.client import base, engine, http, push, reassignment, reports
from streams.client.engine import EventSplitter
from streams.client.matches import WorkerRank, overlap_scores
from streams.client.payloads import (
    QUERY_CHARS_MAX,
    SAMPLING_OPTIONS,
    STOP_CONDITIONS,
    completion_fields,
    pack_tokens,
    query_of,
    unpack_tokens,
    with_prompt,
)
from streams.client.reports import BookingKey, OutstandingReport, Reports
from streams.errors import InvalidRequest, RouterUnavailable
from streams.router_api.messages.requests import RouteRequest, parse_route_query, worker_filter
from tests.helpers.pages import ROOT

#: A request with a value of every kind of field.
FIELDS: dict[str, Any] = {
    "request_id": "a b&c=d/{é}",
    "model": "m",
    "priority": 3,
    "update_states": False,
    "allowed_worker_ids": [1, 2**64 - 1],
    "excluded_worker_ids": [],
    "required_taints": ["x", "y"],
    "router_config_override": {
        "router_mode": "random",
        "overlap_score_weight": 2.0,
        "track_active_blocks": True,
        "tier_weights": (1.0, 0.5, 0.25, 0.0),
        "moe_query": {"layer_id": 2, "expert_ids": [7]},
    },
}


def test_importing_the_client_imports_neither_kafka_nor_numba_nor_the_router() -> None:
    """A gateway that routes over HTTP needs aiohttp and orjson, and no part of a router."""
    program = "import sys, streams.client, streams.client.http\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60.0)
    loaded = set(done.stdout.split())
    assert "streams.client.http" in loaded
    ours = {name for name in loaded if name.startswith("streams.")}
    others = {"streams.errors", "streams.version"}  # without dependencies
    assert ours <= others | {name for name in ours if name.startswith("streams.client")}
    assert "streams.client.push" not in ours
    assert not loaded & {"numpy", "numba", "confluent_kafka", "aiokafka", "faust", "rocksdict", "zmq", "msgspec"}


class Refusing(http.KvRouterClient):
    """A client whose first two calls are refused. loses_answers: they may have booked."""

    def __init__(self, *, loses_answers: bool) -> None:
        super().__init__("http://127.0.0.1:1")
        self.asked: list[str] = []
        self._loses_answers = loses_answers

    async def _call(
        self, call: base.Call, fields: dict[str, Any], packed: bytes, attempt: base.Attempt
    ) -> dict[str, Any]:
        assert call == "/route" and packed
        self.asked.append(fields["request_id"])
        attempt.may_be_booked |= self._loses_answers
        if len(self.asked) < 3:
            raise base.CallRefused(RouterUnavailable("busy"), 0.0)
        return {}


@pytest.mark.parametrize(
    ("given_id", "loses_answers", "n_ids"), [(None, False, 3), (None, True, 1), ("mine", False, 1), ("mine", True, 1)]
)
def test_a_refused_request_is_repeated_under_another_id_unless_it_may_be_booked(
    given_id: str | None, loses_answers: bool, n_ids: int
) -> None:
    """A router would take the end of a repetition that is cancelled for the end of the refused request."""

    async def main() -> None:
        async with Refusing(loses_answers=loses_answers) as client:
            _, request = await client._route(pack_tokens([1]), {}, None, given_id)
            assert len(client.asked) == 3
            assert len(set(client.asked)) == n_ids
            assert request["request_id"] == client.asked[-1]

    asyncio.run(main())


def test_query_parameters_say_what_the_json_body_says() -> None:
    """A router reads the same request from either form."""
    query = query_of(FIELDS)
    assert query is not None
    packed, plain = parse_route_query(query), msgspec.convert(FIELDS, RouteRequest)
    assert worker_filter(packed) == worker_filter(plain)
    without_ids = {"allowed_worker_ids": None}  # these are numbers in one form and text in the other
    assert msgspec.structs.replace(packed, **without_ids) == msgspec.structs.replace(plain, **without_ids)


@given(strategies.dictionaries(strategies.from_regex(r"[a-z_]{1,5}", fullmatch=True), strategies.text(max_size=5)))
def test_query_parameters_are_encoded_as_in_any_address(query: dict[str, str]) -> None:
    """Those without special characters take a short way, with the same result."""
    assert http._encoded(query) == urlencode(query)


@pytest.mark.parametrize(
    ("n_ids", "fits"), [(100, True), (QUERY_CHARS_MAX // 11, True), (QUERY_CHARS_MAX // 10, False)]
)
def test_a_request_that_is_too_long_for_a_query_becomes_a_body(n_ids: int, fits: bool) -> None:
    """Servers accept only short lines; a worker id here has nine digits and a comma."""
    query = query_of({"excluded_worker_ids": [100_000_000 + n for n in range(n_ids)]})
    assert (query is not None) == fits


@pytest.mark.parametrize("tokens", [[], [0, 1, 2**32 - 1], np.array([3, 4], dtype=np.int64), range(3)])
def test_tokens_are_packed_as_little_endian_words(tokens: Any) -> None:
    """Lists, ranges and arrays of numpy are accepted."""
    packed = pack_tokens(tokens)
    assert np.frombuffer(packed, dtype="<u4").tolist() == unpack_tokens(packed) == [int(token) for token in tokens]


@pytest.mark.parametrize("tokens", [[-1], [2**32], [1.5], ["1"], "123", b"1234", 5, None, [None]])
def test_other_values_are_not_tokens(tokens: Any) -> None:
    """Text and bytes are refused, although both are sequences."""
    with pytest.raises(InvalidRequest, match="token_ids is"):
        pack_tokens(tokens)


def test_a_completion_has_the_options_under_the_engines_names() -> None:
    """Options without a value are left out, and the stream returns token ids."""
    body = orjson.loads(
        with_prompt(
            completion_fields(
                "m", {"max_tokens": 20, "ignore_eos": True}, {"temperature": 0.7, "top_p": None}, {"user": "u"}
            ),
            [1, 2],
        )
    )
    assert body == {
        "prompt": [1, 2],
        "model": "m",
        "stream": True,
        "return_token_ids": True,
        "stream_options": {"include_usage": True},
        "user": "u",
        "max_tokens": 20,
        "ignore_eos": True,
        "temperature": 0.7,
    }


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"stop_conditions": {"max_token": 1}}, "stop_conditions has no field 'max_token'"),
        ({"sampling_options": {"n": 2}}, "sampling_options has no field 'n'"),
        ({"extra_args": {"prompt": "x"}}, "extra_args contains 'prompt'"),
        ({"extra_args": {"x": object()}}, "not JSON"),
    ],
)
def test_unknown_options_are_refused(options: dict[str, Any], words: str) -> None:
    """A typo would otherwise have no effect."""
    empty = {"stop_conditions": None, "sampling_options": None, "extra_args": None}
    with pytest.raises(InvalidRequest, match=words):
        with_prompt(completion_fields(None, **{**empty, **options}), [1])


@given(data=strategies.data())
def test_events_are_the_same_however_the_stream_is_cut(data: strategies.DataObject) -> None:
    """Comments, empty lines and both line ends are accepted."""
    stream = b': hello\r\n\r\ndata: {"a": 1}\r\n\r\nevent: x\ndata:{}\n\ndata: [DONE]\n\n'
    cuts = sorted(data.draw(strategies.sets(strategies.integers(0, len(stream)))))
    splitter = EventSplitter()
    pieces = [stream[start:end] for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    assert [event for piece in pieces for event in splitter.feed(piece)] == [b'{"a": 1}', b"{}", b"[DONE]"]


def test_an_event_without_end_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that is no engine cannot fill the memory of its client."""
    monkeypatch.setattr(engine, "EVENT_BYTES_MAX", 100)
    splitter = EventSplitter()
    assert splitter.feed(b"data: " + b"x" * 94) == []
    with pytest.raises(ValueError, match="more than 100 bytes"):
        splitter.feed(b"x")


def test_scores_are_read_by_worker_and_by_rank() -> None:
    """A count of 0 is left out of its dictionary."""
    row = {"scores": 3, "cxl_accessible_scores": 0, "moe_scores": 1}
    found = overlap_scores(
        {
            "request_blocks": 4,
            "mode": "exact",
            "workers": [{"worker_id": 7, **row}],
            "ranks": [{"worker_id": 7, "dp_rank": 1, **row}],
        }
    )
    assert (found.scores, found.cxl_accessible_scores, found.moe_scores) == ({7: 3}, {}, {7: 1})
    assert found.by_rank.scores == {WorkerRank(7, 1): 3}
    assert found.by_rank.moe_scores == {(7, 1): 1}


def test_the_page_on_the_client_names_every_limit_and_option() -> None:
    """Each constant of its limits exists and has the value of its row, and each option of a completion is named."""
    page = (ROOT / "docs/client.md").read_text()
    for option in (*STOP_CONDITIONS, *SAMPLING_OPTIONS):
        assert f"`{option}`" in page, option
    shown = dict[str, float]()
    for _, values, names in re.findall(
        r"^\| ([^|]+) \| ([^|]+) \| ([^|]*`[A-Z].*) \|$", page.partition("## Limits")[2], re.M
    ):
        numbers = [
            float(n.replace(",", "")) * (1 << 20 if "MiB" in values else 1) for n in re.findall(r"\d[\d,.]*", values)
        ]
        found = re.findall(
            r"`(?:EngineOptions\.)?(\w+_s|\w+_max|[A-Z_]{6,})`", re.sub(r"arguments? `[^`]+`", "", names)
        )
        assert len(found) == len(numbers), (values, names)
        shown.update(zip(found, numbers, strict=True))
    modules = (base, engine, http, push, reassignment, reports)
    limits = {name: value for module in modules for name, value in vars(module).items() if name.isupper()}
    limits |= {field.name: field.default for field in dataclasses.fields(engine.EngineOptions)}
    assert {name: limits[name] for name in shown} == shown
    assert len(shown) > 15


# -- reports -----------------------------------------------------------------------------------------------------------


class Router:
    """Takes reports while it is open, and notes them."""

    def __init__(self) -> None:
        self.taken: list[tuple[str, OutstandingReport]] = []
        self.open = asyncio.Event()
        self.refuses = False

    async def take(self, key: BookingKey, report: OutstandingReport) -> None:
        await self.open.wait()
        if self.refuses:
            raise RouterUnavailable("gone")
        self.taken.append((key.request_id, report))


async def test_reports_that_wait_become_one_with_the_greatest_of_each() -> None:
    """While a router is away, a long answer has one entry and not thousands."""
    router = Router()
    sent = Reports(router.take)
    sent.add(BookingKey("r"), OutstandingReport(prefill_complete=True))
    await asyncio.sleep(0)  # this one is being sent
    for n in (64, 192, 128):
        sent.add(BookingKey("r"), OutstandingReport(output_tokens=n))
    assert len(sent) == 2
    router.open.set()
    await sent.close(10.0)
    assert router.taken == [
        ("r", OutstandingReport(prefill_complete=True)),
        ("r", OutstandingReport(output_tokens=192)),
    ]
    assert sent.lost == 0


async def test_reports_of_one_request_are_never_sent_at_the_same_time_and_those_of_many_are() -> None:
    """Otherwise an earlier report could overtake a later one."""
    running: dict[BookingKey, int] = {}
    most: list[int] = []

    async def send(key: BookingKey, report: OutstandingReport) -> None:
        running[key] = running.get(key, 0) + 1
        assert running[key] == 1
        most.append(sum(running.values()))
        await asyncio.sleep(0.001)
        running[key] -= 1

    sent = Reports(send)
    for n in range(200):
        sent.add(BookingKey(f"r{n % 50}"), OutstandingReport(output_tokens=n + 1))
        if n % 10 == 0:
            await asyncio.sleep(0)
    await sent.close(10.0)
    assert max(most) == reports.CONCURRENT_REPORTS_MAX


async def test_beyond_the_limit_the_oldest_report_is_dropped_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client whose routers are gone for good does not grow."""
    monkeypatch.setattr(reports, "PENDING_REPORTS_MAX", 3)
    router = Router()
    sent = Reports(router.take)
    for n in range(5):
        sent.add(BookingKey(f"r{n}"), OutstandingReport(free=True))
    assert (len(sent), sent.lost) == (3, 2)
    router.open.set()
    await sent.close(10.0)
    assert [request_id for request_id, _ in router.taken] == ["r2", "r3", "r4"]


async def test_what_no_router_takes_is_counted_as_lost() -> None:
    """A report that is given up, one that is left when the client closes, and one that comes later are lost."""
    router = Router()
    router.refuses = True
    router.open.set()
    sent = Reports(router.take)
    sent.add(BookingKey("given up"), OutstandingReport(free=True))
    while len(sent):
        await asyncio.sleep(0)
    router.open.clear()
    sent.add(BookingKey("left"), OutstandingReport(free=True))
    await sent.close(0.01)
    sent.add(BookingKey("late"), OutstandingReport(free=True))
    assert (len(sent), sent.lost, router.taken) == (0, 3, [])


async def test_settling_drops_what_waits_and_waits_for_what_is_being_sent() -> None:
    """After it, no report of the request's first engine can reach the booking of its second one."""
    router = Router()
    sent = Reports(router.take)
    sent.add(BookingKey("r"), OutstandingReport(prefill_complete=True))
    await asyncio.sleep(0)
    sent.add(BookingKey("r"), OutstandingReport(output_tokens=64))
    settling = asyncio.create_task(sent.settle(BookingKey("r")))
    await asyncio.sleep(0.01)
    assert not settling.done()
    router.open.set()
    await settling
    await sent.close(10.0)
    assert router.taken == [("r", OutstandingReport(prefill_complete=True))]
