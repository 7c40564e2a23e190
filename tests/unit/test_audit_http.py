"""Reports of what engines found, from clients to the router's counts, its metrics, its live page and `top`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from streams.cli.top import shown
from streams.client.http import KvRouterClient
from streams.core.hashing import local_hashes
from streams.core.routing.audit import OVER_MIN, AuditOutcome
from streams.kafka.clients import partition_of
from streams.process.waiting import wait_for
from streams.settings import Settings
from streams.tables.records import PARTITION_KEY, PartitionRecord, encode_partition
from tests.helpers.api import PATIENCE_S, metrics
from tests.helpers.local_router import LocalRouter, local_router, rank
from tests.helpers.views import caught_up, hold

#: Its owners are silent for longer than any test takes.
SETTINGS = Settings(stale_after_ms=600_000, behind_after_ms=500_000)
TOKENS = list(range(65))


@pytest.fixture
def served() -> Iterator[LocalRouter]:
    """A router with one exact worker that holds the whole blocks of the prompt."""
    with local_router(SETTINGS, n_workers=1) as router:
        hold(router.router.view, rank(1), local_hashes(TOKENS, 16))
        yield router


def counts(served: LocalRouter) -> dict[str, int]:
    read = metrics(served.api)
    return {
        outcome.value: int(read[f"kvstreams_overlap_audited_total/{outcome.value}"])
        for outcome in AuditOutcome
        if read[f"kvstreams_overlap_audited_total/{outcome.value}"]
    }


def route(served: LocalRouter, request_id: str) -> dict[str, Any]:
    view = served.router.view
    partition = partition_of(1, SETTINGS.partitions)
    view.fold_index(PARTITION_KEY.pack(partition), encode_partition(PartitionRecord(partition, 0, "test", ())))
    caught_up(view, partition)
    answer = served.api.call("POST", "/route", {"token_ids": TOKENS, "request_id": request_id})
    assert answer.status == 200
    found: dict[str, Any] = answer.json
    return found


@pytest.mark.parametrize("way", ["prefill-complete", "free", "both"])
def test_what_an_engine_found_comes_with_the_reports_on_a_booking(served: LocalRouter, way: str) -> None:
    """With the end of the prefill or of the request; the first report counts."""
    assert route(served, "r")["overlap_blocks"] == 4
    query = "?prompt_tokens=65&cached_tokens=64"
    if way != "free":
        assert served.api.call("POST", f"/loads/r/prefill-complete{query}").status == 200
    last = "" if way == "prefill-complete" else query
    assert served.api.call("DELETE", f"/loads/r{last}").status == 200
    wait_for(lambda: counts(served) == {"agreed": 1}, PATIENCE_S, "the audit")
    assert metrics(served.api)["kvstreams_overlap_agreed_share"] == 1.0


@pytest.mark.parametrize(
    ("query", "status"),
    [
        ("", 200),
        ("?prompt_tokens=65", 200),
        ("?cached_tokens=64", 200),
        ("?prompt_tokens=-1&cached_tokens=0", 400),
        ("?prompt_tokens=x", 400),
        ("?prompt_tokens=1.5", 400),
        ("?cached_tokens=99999999999", 400),
        ("?prompt_tokens=1&prompt_tokens=1", 400),
        ("?output_tokens=1", 400),
    ],
)
def test_reports_without_both_numbers_are_not_audited(served: LocalRouter, query: str, status: int) -> None:
    """They do what they did before; what is no number is refused, and changes nothing."""
    route(served, "r")
    assert served.api.call("DELETE", f"/loads/r{query}").status == status
    assert served.api.call("POST", f"/loads/r/prefill-complete{query}").status == status
    served.api.call("DELETE", "/loads/r")
    wait_for(lambda: counts(served) == {"not_reported": 1}, PATIENCE_S, "the audit")


def test_a_rank_whose_engine_contradicts_is_approximate(served: LocalRouter) -> None:
    """Answers, the live page and `top` say why, and the metrics count it."""
    for number in range(OVER_MIN):
        assert route(served, f"r{number}")["chosen_mode"] == "exact"
        served.api.call("DELETE", f"/loads/r{number}?prompt_tokens=65&cached_tokens=0")
    wait_for(lambda: counts(served) == {"over": OVER_MIN}, PATIENCE_S, "the audit")
    answer = route(served, "later")
    assert (answer["mode"], answer["degraded_because"]) == ("approximate", "audit_disagrees")
    assert (answer["chosen_mode"], answer["chosen_degraded_because"]) == ("approximate", "audit_disagrees")
    live = served.api.get("/live")
    assert (live["workers"][0]["state"], live["workers"][0]["reason"]) == ("approximate", "audit_disagrees")
    assert (live["router"]["agreed_share"], live["router"]["audited"]["over"]) == (0.0, OVER_MIN)
    from rich.console import Console

    console = Console(width=250, markup=False)
    with console.capture() as captured:
        console.print(shown("http://r", live))
    assert "engines agreed 0.0 % (5 over)" in captured.get()
    assert "approximate: audit_disagrees" in captured.get()


def test_the_clients_bookings_report_the_usage(served: LocalRouter) -> None:
    """`note_usage` takes the usage as engines have it; cached tokens of another engine are not reported."""

    async def run() -> None:
        async with KvRouterClient([served.api.url]) as client:
            usage = {"prompt_tokens": 65, "prompt_tokens_details": {"cached_tokens": 64}}
            for number, is_cached_here in enumerate([True, True, False]):
                booking = await client.book(TOKENS, model="m")
                if number:
                    booking.prefill_complete()
                booking.note_usage(usage, is_cached_here=is_cached_here)
                booking.note_usage({"prompt_tokens": 65})  # of an event that does not say what was cached
                booking.end()

    asyncio.run(run())
    wait_for(lambda: counts(served) == {"agreed": 2, "not_reported": 1}, PATIENCE_S, "the audit")
