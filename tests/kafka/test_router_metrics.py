"""What a router tells Prometheus of its scope: ranks by state, errors by code, dead letters by source and reason."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from streams.core.ids import Epoch, Incarnation
from streams.core.reducer.ordering import Health, Progress
from streams.errors import BadRecord
from streams.kafka import dead_letter_headers, partition_of, producer
from streams.router_api.dead_letters import ENGINE, OTHER, PAIRS_MAX, REASON_CHARS_MAX, DeadLetterCounts
from streams.settings import Settings
from streams.tables.records import encode_progress, progress_key
from streams.topics import topics
from streams.waiting import wait_for
from tests.helpers.api import BLOCK_SIZE, PATIENCE_S, TOKENS, Agents, Api, metrics, rank_of, served

DOCS = Path(__file__).parents[2] / "docs/http.md"


def of(api: Api, name: str) -> dict[str, float]:
    """Samples of one metric by their labels."""
    return {key.partition("/")[2]: value for key, value in metrics(api).items() if key.partition("/")[0] == name}


def await_ranks(api: Api, wanted: dict[str, int], reasons: dict[str, int]) -> None:
    def told() -> tuple[dict[str, float], dict[str, float]]:
        degraded_reasons = {reason: n for reason, n in of(api, "kvstreams_degraded_ranks").items() if n}
        return of(api, "kvstreams_ranks"), degraded_reasons

    try:
        wait_for(lambda: told() == (wanted, reasons), PATIENCE_S, "ranks by state")
    finally:
        assert told() == (wanted, reasons)


def test_ranks_are_counted_by_state_and_degraded_ones_by_reason(scope: Settings) -> None:
    """A rank may be in several states, and is one of the registered."""
    settings = replace(scope, block_size=BLOCK_SIZE, stale_after_ms=2000)
    fresh, stale = range(settings.partitions - 1), settings.partitions - 1
    agents = Agents(settings, fresh)
    with served(settings) as api, agents.keeping_fresh():
        ids = [*agents.worker_ids(4, fresh[0]), *agents.worker_ids(1, stale)]
        body = {"url": "http://e", "model": "m", "block_size": BLOCK_SIZE}
        none = dict.fromkeys(("registered", "cordoned", "silent", "degraded", "approximate"), 0)
        await_ranks(api, none, {})
        for worker_id in ids:
            api.call("PUT", f"/workers/{worker_id}", body).given()
        await_ranks(api, {**none, "registered": 5, "degraded": 5}, {"no_events_yet": 5})
        for worker_id, health in zip(
            ids, (Health.EXACT, Health.DEGRADED, Health.APPROXIMATE, Health.REMOVED, Health.EXACT), strict=True
        ):
            agents.progress(rank_of(worker_id), health)
        counts = {**none, "registered": 5, "degraded": 3, "approximate": 1}
        reasons = {"events_lost": 1, "removed": 1, "owner_silent": 1}
        await_ranks(api, counts, reasons)
        silent = Progress(rank_of(ids[1]), Epoch(Incarnation(1), 0), 1, health=Health.DEGRADED, silent=True)
        agents.write(rank_of(ids[1]), progress_key(rank_of(ids[1])), encode_progress(silent))
        api.call("PUT", f"/workers/{ids[1]}/cordon").given()
        api.call("PUT", f"/workers/{ids[0]}/cordon").given()
        await_ranks(api, {**counts, "silent": 1, "cordoned": 2}, reasons)
        agents.state_partition(stale, behind_ms=settings.behind_after_ms + 1)
        wait_for(
            lambda: of(api, "kvstreams_degraded_ranks")["owner_behind"] == 1, PATIENCE_S, "an owner that is behind"
        )


def test_errors_are_counted_by_code(scope: Settings) -> None:
    """The caller's, the fleet's and the server's own refusals; answers that are none are not."""
    with served(scope) as api:
        assert of(api, "kvstreams_errors_total") == {}
        api.call("GET", "/nowhere").refused(404, "not_found")
        api.call("POST", "/route", b"x").refused(400, "invalid_request")
        for _ in range(2):
            api.call("POST", "/route", {"token_ids": TOKENS}).refused(503, "no_eligible_worker")
        api.get("/loads")
        counted = {"not_found": 1, "invalid_request": 1, "no_eligible_worker": 2}
        assert of(api, "kvstreams_errors_total") == counted


def test_dead_letters_are_counted_whoever_wrote_them(scope: Settings) -> None:
    """By source and reason, from the router's start on; what a stranger wrote is another's."""
    names = topics(scope)
    kafka = producer(scope)

    def write(origin: str | None, reason: str) -> None:
        headers = [] if origin is None else dead_letter_headers(origin, BadRecord(reason, "why"), 1)
        kafka.produce(names.dead_letters.name, key=b"1", value=b"x", headers=headers)
        assert kafka.flush(PATIENCE_S) == 0

    with served(scope) as first:
        write(names.cxl_events.name, "not_in_transit")
        with served(scope) as late:
            write(names.cxl_events.name, "not_in_transit")
            write(names.kv_events.name, "wrong_key")
            write("tcp://127.0.0.1:5557", "bad_payload")
            write("strange", "x" * (REASON_CHARS_MAX + 1))
            write(None, "")
            wanted = {
                "not_in_transit/cxl-events": 1.0,
                "wrong_key/kv-events": 1.0,
                f"bad_payload/{ENGINE}": 1.0,
                f"{OTHER}/{OTHER}": 2.0,
            }
            for api, counts in ((late, wanted), (first, {**wanted, "not_in_transit/cxl-events": 2.0})):
                wait_for(
                    lambda api=api, counts=counts: of(api, "kvstreams_dead_letters_total") == counts,  # type: ignore[misc]
                    PATIENCE_S,
                    "dead letters to be counted",
                )


@pytest.mark.parametrize(("n", "others"), [(PAIRS_MAX, 0), (PAIRS_MAX + 1, 1), (PAIRS_MAX + 2, 2)])
def test_a_stranger_does_not_fill_memory_with_reasons(n: int, others: int) -> None:
    """Beyond the limit all are one, and none is lost."""
    counts = DeadLetterCounts(Settings())
    for number in range(n):
        counts._count("tcp://e", f"reason{number}")
    told = counts.counts()
    assert sum(told.values()) == n
    assert told.get((OTHER, OTHER), 0) == others


def test_the_docs_name_every_metric_and_no_other(scope: Settings) -> None:
    """The table of docs/http.md against what a router tells, each by its own name."""
    table = DOCS.read_text().partition("## Metrics")[2]
    named = re.findall(r"`(kvstreams_\w+)`", "".join(line.split("|")[1] for line in table.splitlines() if "|" in line))
    with served(scope) as api:
        api.call("GET", "/nowhere").refused(404, "not_found")
        kafka = producer(scope)
        kafka.produce(
            topics(scope).dead_letters.name, key=b"1", value=b"x", partition=partition_of(1, scope.partitions)
        )
        assert kafka.flush(PATIENCE_S) == 0
        wait_for(lambda: bool(of(api, "kvstreams_dead_letters_total")), PATIENCE_S, "a dead letter to be counted")
        page = api.call("GET", "/metrics").body.decode()
        told = re.findall(r"^# TYPE (\w+) (?:gauge|counter|histogram)$", page, re.MULTILINE)
    assert sorted(named) == sorted(name for name in told if not name.endswith("_created"))
