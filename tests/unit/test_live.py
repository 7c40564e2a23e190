"""The data of the live page: samples, what they become, and what a router serves."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from streams.core.ids import EngineHash, SequenceHash, WorkerId
from streams.core.routing.trust import AnswerMode
from streams.cxl.events import CxlPool
from streams.cxl.records import BlockKey, BlockRow, block_key, encode_block, encode_pool, pool_key
from streams.process.connections import Connections
from streams.router_api.deciding.admission import Admission
from streams.router_api.deciding.decision_counts import WINDOW_STEP_S
from streams.router_api.http import live
from streams.router_api.http.bodies import Bodies
from streams.router_api.http.fleet_load import Load
from streams.router_api.http.live import SAMPLES_MAX, Live, Sample, quantile, samples_json
from streams.router_api.http.metrics import LATENCY_BOUNDS, RouterMetrics
from streams.settings import Settings
from tests.helpers.local_router import LocalRouter, hold, local_router, random_blocks, rank, register
from tests.helpers.routers import PLACED

N_BUCKETS = len(LATENCY_BOUNDS) + 1


@pytest.fixture(scope="module")
def served() -> Iterator[LocalRouter]:
    with local_router(Settings(), n_workers=3) as router:
        yield router


def sample(at_s: float, decisions: int = 0, **more: Any) -> Sample:
    modes = tuple(decisions if mode is AnswerMode.EXACT else 0 for mode in AnswerMode)
    plain = Sample(at_s, modes, 0, 0, (0,) * N_BUCKETS, None, 0, 0, Load(0, 0, 0), 0.0, 0, 0)
    return plain._replace(**more)


def test_samples_become_rates_and_shares_between_neighbours() -> None:
    """Totals of the router's whole life become what happened between one sample and the next."""
    latency = [0] * N_BUCKETS
    latency[4] = 4  # above 1 ms, up to 2.5 ms
    totals = {"blocks": 90, "hit_blocks": 40, "gaps": 4, "latency": tuple(latency), "agreed": 3, "judged": 4}
    shown = samples_json(
        [
            sample(10.0, 100, blocks=50, hit_blocks=10, gaps=3),
            sample(12.0, 104, **totals, lag_s=0.25, queue=7),
            sample(14.0, 104, **totals, load=Load(1, 2, 3), imbalance=0.5),
        ],
        now_s=15.0,
    )
    assert shown.pop("modes") == {"exact": [2.0, 0.0], "approximate": [0, 0], "degraded": [0, 0], "fallback": [0, 0]}
    assert shown == {
        "age_s": [3.0, 1.0],
        "decisions_per_s": [2.0, 0.0],
        "hit_rate": [0.75, None],
        "latency_ms_p50": [1.75, None],
        "latency_ms_p99": [2.485, None],
        "lag_s": [0.25, None],
        "requests": [0, 3],
        "prefill_tokens": [0, 1],
        "decode_blocks": [0, 2],
        "imbalance": [0.0, 0.5],
        "gaps": [1, 0],
        "queue": [7, 0],
        "agreed_share": [0.75, None],
    }


@pytest.mark.parametrize("samples", [[], [sample(1.0, 5)]])
def test_fewer_than_two_samples_show_nothing(samples: list[Sample]) -> None:
    """A router that has just started has empty columns, and no rate since the beginning of time."""
    shown = samples_json(samples, 2.0)
    assert set(map(len, (*shown.pop("modes").values(), *shown.values()))) == {0}


@pytest.mark.parametrize(
    ("counts", "share", "expected"),
    [
        ([0, 0, 0], 0.5, None),
        ([4, 0, 0], 0.5, 0.5),
        ([2, 2, 0], 0.5, 1.0),
        ([2, 2, 0], 0.75, 1.5),
        ([0, 0, 9], 0.5, 2.0),  # above the last bound
        ([1, 0, 1], 1.0, 2.0),
    ],
)
def test_a_quantile_is_linear_within_its_bucket(counts: list[int], share: float, expected: float | None) -> None:
    """As Prometheus computes it, so that the page and a dashboard agree."""
    assert quantile((1.0, 2.0), counts, share) == expected


def test_the_last_minutes_are_kept_and_nothing_older(served: LocalRouter) -> None:
    """Samples beyond the limit push out the oldest; the window of the hit rate moves with the samples."""
    clock = [0.0]
    kept = Live(served.router, metrics_of(served), now_s=lambda: clock[0])
    for number in range(SAMPLES_MAX + 10):
        clock[0] = 2.0 * number
        kept.sample()
    ages = kept.answer()["samples"]["age_s"]
    assert len(ages) == SAMPLES_MAX - 1
    assert (ages[0], ages[-1]) == (2.0 * (SAMPLES_MAX - 2), 0.0)
    assert clock[0] > WINDOW_STEP_S


def metrics_of(served: LocalRouter) -> RouterMetrics:
    return RouterMetrics(served.router, Connections(1, 10.0), Bodies(served.router.settings), Admission(served.router))


def test_the_answer_has_the_fleet_and_what_was_decided(served: LocalRouter, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers come with their loads, states and hit shares, those with the most requests first."""
    blocks = random_blocks(np.random.default_rng(1), 4)
    hold(served.router, rank(2), blocks)
    kept = Live(served.router, metrics_of(served))
    kept.sample()
    for number in range(3):
        served.api.route(request_id=f"r{number}", block_hashes=list(map(str, blocks.tolist())), worker_id=2)
    answer = served.api.get("/live")
    assert [worker["worker_id"] for worker in answer["workers"]] == ["2", "1", "3"]
    busiest, idle = answer["workers"][:2]
    assert busiest == {
        "worker_id": "2",
        "model": "m",
        "ranks": 1,
        "state": "degraded",
        "reason": "no_events_yet",
        "cache_usage": None,
        "prefill_tokens": 0,
        "decode_blocks": 4,
        "requests": 3,
        "hit_rate": 1.0,
    }
    assert (idle["requests"], idle["hit_rate"], idle["reason"]) == (0, None, "no_events_yet")
    assert answer["router"]["not_ready_because"] is None
    assert len(answer["partitions"]) == Settings().partitions
    monkeypatch.setattr(live, "WORKERS_SHOWN_MAX", 2)
    assert answer["explanations"].keys() == {"no_events_yet"}
    assert answer["explanations"]["no_events_yet"]["remedy"].startswith("Check events=")
    limited = kept.answer()
    assert [worker["worker_id"] for worker in limited["workers"]] == ["2", "1"]
    assert limited["workers_left_out"] == 1


def test_pools_are_named_with_their_blocks_their_medium_and_its_speed() -> None:
    """`GET /pools` and the live page have the same numbers, and `GET /workers` the pools of each worker.

    A row that stands for several blocks counts for all of them, and rows of an ended epoch for none.
    """
    with local_router(Settings(), n_workers=3) as served:
        view, memory, storage = served.router.view, "lmcache/node-a/dram", "lmcache-shared/s3"
        for pool_id, latency_class, members, epoch in ((memory, "dram", (1,), 2), (storage, "s3", (1, 2), 0)):
            pool = CxlPool(pool_id, latency_class, 100 if epoch else None, tuple(map(WorkerId, members)), epoch)
            view.fold_worker(pool_key(pool_id), encode_pool(pool))
        view.fold_worker(pool_key("gone"), encode_pool(CxlPool("gone", members=(WorkerId(1),), lost=True)))
        rows = [(1, memory, 1, 16), (2, memory, 2, 16), (3, memory, 2, 16), (4, storage, 0, 16), (5, "gone", 0, 1)]
        for number, pool_id, epoch, span in rows:
            placement = replace(PLACED, pool_id=pool_id, pool_epoch=epoch, span=span)
            key = block_key(BlockKey(SequenceHash(number), rank(99), pool_id))
            view.fold_pooled(key, encode_block(BlockRow(placement, None, 0, EngineHash(9))))
        listed = {
            pool["pool_id"]: (pool["blocks"], pool["load_gb_per_s"]) for pool in served.api.get("/pools")["pools"]
        }
        assert listed == {memory: (32, 25.0), storage: (16, 25.0), "gone": (0, 25.0)}
        workers = {worker["worker_id"]: worker["pools"] for worker in served.api.get("/workers")["workers"]}
        assert workers == {1: [storage, memory], 2: [storage], 3: []}
        first, second = served.api.get("/live")["memory_pools"]
        assert first == {
            "pool_id": memory,
            "latency_class": "dram",
            "gb_per_s": 25.0,
            "blocks": 32,
            "capacity_blocks": 100,
            "members": 1,
        }
        assert (second["pool_id"], second["blocks"], second["members"]) == (storage, 16, 2)
        view.fold_pooled(block_key(BlockKey(SequenceHash(2), rank(99), memory)), None)
        assert served.api.get("/live")["memory_pools"][0]["blocks"] == 16


def test_states_that_keep_requests_away_come_first(served: LocalRouter) -> None:
    """A worker whose blocks have another size shows that, whatever else is true of it."""
    register(served.router, 9, model="other")
    served.router.view.fleet.workers[9] = replace(served.router.view.fleet.workers[9], block_size=32)  # type: ignore[index]
    live = served.api.get("/live")
    assert {worker["worker_id"]: worker["state"] for worker in live["workers"]}["9"] == "wrong_block_size"
    assert "another size" in live["explanations"]["wrong_block_size"]["meaning"]


@pytest.mark.parametrize(
    ("path", "content_type"), [("/", "text/html"), ("/live.css", "text/css"), ("/live.js", "text/javascript")]
)
def test_the_page_loads_nothing_from_elsewhere(served: LocalRouter, path: str, content_type: str) -> None:
    """The page's files name no other host, and the policy allows none."""
    answer = served.api.call("GET", path)
    assert answer.status == 200
    assert answer.headers["content-type"] == f"{content_type}; charset=utf-8"
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    text = answer.body.decode().replace("http://www.w3.org/2000/svg", "")
    assert not re.findall(r"(?:https?:)?//[\w.-]+\.\w+", text)
    assert "url(" not in text and "@import" not in text
