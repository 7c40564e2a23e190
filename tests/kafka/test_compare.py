"""`kvstreams compare` against a live fleet: engines, a bridge, and a router on a real Kafka."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from streams.lab.engines.engine_config import EngineConfig
from streams.lab.processes import Children
from streams.lab.stack import RouterProcess, Stack, get_bytes, get_json, wait_workers
from streams.process.waiting import wait_for
from tests.helpers.commands import Run
from tests.helpers.pages import block_of
from tests.helpers.scopes import ScopeFactory
from tests.helpers.support import VISIBLE_TIMEOUT_S

N_ENGINES = 3

#: Conversations of three turns, ten at a time: each prompt is the one before it and one more block of 512 tokens. One
#: block of the comparison has ten conversations, and their first turns, which no cache holds, are its wash-out.
CHATS, AT_A_TIME, TURNS = 80, 10, 3
N_REQUESTS, BLOCK = CHATS * TURNS, AT_A_TIME * TURNS

#: Model seconds per second.
TIME_SCALE = 4.0


@pytest.fixture(scope="module")
def router(new_scope: ScopeFactory, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RouterProcess]:
    """Give a worker with a router, and engines behind a bridge."""
    folder = tmp_path_factory.mktemp("compare")
    with Children() as children:
        # On a busy machine, events of a turn may come after the next turn; what was routed counts until they do. For
        # the same reason requests come one at a time: ends that a router hears of late would count as load.
        scope = replace(new_scope(folder), router_predicted_ttl_s=10.0)
        stack = Stack(scope, folder, children)
        worker = stack.worker()
        engines = stack.engines(N_ENGINES, EngineConfig(n_blocks=8192), "m", TIME_SCALE)
        stack.bridge(engines)
        wait_workers(worker.url, N_ENGINES)
        yield worker


def decisions(router: RouterProcess) -> dict[str, float]:
    """How many requests the router has routed in each mode."""
    found: dict[str, float] = {}
    for line in get_bytes(f"{router.url}/metrics").decode().splitlines():
        if line.startswith("kvstreams_decisions_total{"):
            labels, _, value = line.rpartition(" ")
            mode = labels.partition('router_mode="')[2].partition('"')[0]
            found[mode] = found.get(mode, 0.0) + float(value)
    return found


@pytest.mark.first_ring("compare")
def test_modes_take_turns_on_a_live_fleet(router: RouterProcess, tmp_path: Path, run: Run) -> None:
    """Each request is routed in the mode of its block, and the figures show what kv routing finds in caches."""
    trace, figures = tmp_path / "trace.jsonl", tmp_path / "figures.json"
    turns = [
        (chat, turn)
        for first in range(0, CHATS, AT_A_TIME)
        for turn in range(TURNS)
        for chat in range(first, first + AT_A_TIME)
    ]
    lines = [
        {
            "timestamp": 20 * number,
            "input_length": 512 * (turn + 1) + 64,
            "output_length": 4,
            "hash_ids": [1000 * chat + block for block in range(turn + 2)],
        }
        for number, (chat, turn) in enumerate(turns)
    ]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    before = decisions(router)
    options = shlex.split(block_of("docs/compare.md", "kvstreams compare").replace("\\\n", ""))[2:]
    changes = {
        "http://router1:8000": router.url,
        "kv": "round-robin",
        "expected-time": "reuse=kv",
        "conversation_trace.jsonl": str(trace),
        "4000": str(N_REQUESTS),
        "32": "1",
        "40": str(AT_A_TIME),
        "figures.json": str(figures),
    }
    options = [changes.get(option, option) for option in options]
    done = run("compare", *options, "--block", str(BLOCK), "--seed", "3")
    assert done.returncode == 0, done.stderr
    found = json.loads(figures.read_text())
    assert found["rounds"] == N_REQUESTS // (2 * BLOCK)
    assert (found["requests_sent"], found["failures"], found["hit_share_from"]) == (N_REQUESTS, [], "engine")
    first, second = found["rows"]
    assert [(row["mode"], row["requests"], row["failed"]) for row in found["rows"]] == [
        ("round-robin", 80, 0),
        ("reuse", 80, 0),
    ]
    assert [row["left_out"] for row in found["rows"]] == [{"washout": 40, "failed": 0, "incomplete_round": 0}] * 2
    assert {reason: n for reason, n in found["left_out"].items() if n} == {"washout": 80}
    assert "Left out of the figures are requests: 80 in wash-outs." in done.stdout
    after = decisions(router)
    assert {mode: after[mode] - before.get(mode, 0.0) for mode in ("round-robin", "kv")} == {
        "round-robin": 120,
        "kv": 120,
    }
    assert second["hit_share"]["value"] > first["hit_share"]["value"] + 0.1, found["rows"]
    # By turns over three engines, none of ten conversations meets its own engine again.
    assert second["against_first"]["hit_share"]["low"] > 0.0, found["blocks"]
    for row in found["rows"]:
        for name in ("ttft_ms_mean", "ttft_ms_p50", "ttft_ms_p95", "hit_share", "balance"):
            assert row[name]["low"] <= row[name]["value"] <= row[name]["high"]
        assert row["balance"]["value"] >= 1.0
    assert "reuse against round-robin: hit share +" in done.stdout
    assert "only 4 rounds" in done.stderr
    header, *_ = block_of("docs/compare.md", "mode  ").splitlines()
    assert header.split() in [line.split() for line in done.stdout.splitlines()]
    # Nothing is left behind in the fleet.
    wait_for(
        lambda: all(row["active_requests"] == 0 for row in get_json(f"{router.url}/loads")["loads"]),
        VISIBLE_TIMEOUT_S,
        "the end of every booking",
    )


def test_a_mode_that_the_router_lacks_ends_the_comparison(router: RouterProcess, run: Run) -> None:
    """An unknown mode is refused by the router, and the command says so instead of sending everything else."""
    done = run(
        *("compare", "--router", router.url, "--mode", "kv", "--mode", "no-such-mode", "--concurrency", "2"),
        *("--requests", "120", "--output-max", "4", "--block", "30", "--washout", "10"),
    )
    assert done.returncode == 1
    assert "router_mode" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_fleet_without_workers_of_the_model_is_an_error(router: RouterProcess, run: Run) -> None:
    """A model that no worker serves is named, and nothing is sent."""
    before = decisions(router)
    done = run("compare", "--router", router.url, "--model", "other")
    assert (done.returncode, done.stdout) == (1, "")
    assert "no worker of model other" in done.stderr
    assert decisions(router) == before
