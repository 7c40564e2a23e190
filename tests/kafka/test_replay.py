"""`kvstreams replay` on a real Kafka, compared with a running router and with the reference."""

from __future__ import annotations

import json
import random
import shlex
import time
from dataclasses import replace
from pathlib import Path

import pytest

from streams.core.cxl_memory import CxlMemoryMetadata
from streams.core.ids import RankId
from streams.errors import KvStreamsError, OutsideWindow
from streams.kafka.clients import describe_topics, ensure_topics, producer, require_topics
from streams.lab.stack import Stack, get_json
from streams.process.waiting import wait_for
from streams.replay.cuts import cut_at, cut_now, time_text
from streams.replay.rebuilding import Replay
from streams.replay.summary import as_text, summary
from streams.replay.window import moment_in_window, set_window, window_of
from streams.settings import Settings, as_environ
from streams.tables.records import PARTITION_KEY
from streams.topics import topics
from tests.helpers.api import Api, metrics
from tests.helpers.commands import Run, assert_one_line
from tests.helpers.cxl_histories import expected_blocks, reference_of
from tests.helpers.pages import block_of
from tests.helpers.replayed_scope import (
    MODEL,
    WORKERS,
    Applied,
    Owners,
    Writer,
    fill_registry,
    n_booking_records,
    now_ms,
)
from tests.helpers.state_file import StateFile
from tests.helpers.support import VISIBLE_TIMEOUT_S

#: Of a history at whose end a rank holds blocks with labels, which few of them do.
SEED_WITH_LABELS = 51452


def seed() -> int:
    return random.randrange(1 << 16)


def pooled_of(replay: Replay) -> dict[tuple[RankId, int], CxlMemoryMetadata]:
    blocks = replay.router.view.facts.pooled_blocks(frozenset())
    return {(block.owner, int(block.sequence)): block.metadata for block, _ in blocks}


def assert_is_reference(replay: Replay, writer: Writer, owners: Owners, moment_ms: int) -> Applied:
    """Check that a replay has what the last transactions before a moment had applied; return what that is."""
    applied = owners.applied_at(moment_ms)
    expected = writer.reference(applied)
    index = replay.router.view.index
    assert index.members() == expected.members()
    assert {state.rank: state.epoch for state in index.rank_states()} == expected.epochs()
    rows = expected_blocks(reference_of(writer.included(applied)))
    assert pooled_of(replay) == {at: metadata for at, (metadata, _, _) in rows.items()}
    return applied


@pytest.mark.first_ring("replay")
def test_a_replay_has_what_a_running_router_has(stack: Stack, run: Run) -> None:
    """Ranks, blocks, labels, pooled blocks, the registry, bookings, reports and trust are those of a router."""
    stack.settings = replace(stack.settings, router_avoid_s=60.0)
    worker = stack.worker()
    api, writer = Api(worker.url), Writer(stack.settings, SEED_WITH_LABELS, 150)
    fill_registry(stack.settings, api)
    writer.write(150)
    writer.wait_known(worker.url)
    wait_for(lambda: bool(api.workers()[WORKERS[2]]["metrics"]), VISIBLE_TIMEOUT_S, "the engine's report")

    done = run("replay", "--json", env=as_environ(stack.settings))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    state, pooled = get_json(f"{worker.url}/state"), get_json(f"{worker.url}/state/cxl")["blocks"]
    assert found["blocks"] == state["blocks"] > 0
    assert found["ranks"]["indexed"] == len(state["ranks"])
    assert found["pooled_blocks"] == len(pooled) > 0
    assert found["labelled_records"] == metrics(api)["kvstreams_labelled_records"] > 0
    assert found["bookings"] == 4
    assert (found["workers"], found["cordons"], found["avoidances"], found["pools"]) == (3, 1, 1, 1)
    assert found["engine_metrics"] == 1
    assert found["bad_records"] == 0
    assert set(found["offsets"][topics(stack.settings).index_changelog.name]) == {"0", "1", "2", "3"}
    assert found["records"] > 150

    replay = Replay(stack.settings)
    for _ in range(2):  # the second time, it reads on
        replay.advance(cut_now(stack.settings, replay.router.feeds.topics))
        assert_is_reference(replay, writer, Owners(stack.settings), now_ms())
        assert replay.router.rank_loads() == get_json(f"{worker.url}/loads")
        # The owners run, and have applied what was written. Nothing was ever reported of the three workers.
        assert {str(reason) for reason in replay.router.view.rank_counts().degraded} == {"no_events_yet"}
    assert ["bookings", "4"] in [line.split() for line in as_text(summary(replay)).splitlines()]


@pytest.mark.first_ring
def test_a_file_of_lines_has_everything_that_a_router_has(stack: Stack, run: Run, tmp_path: Path) -> None:
    """A reader that knows the page alone folds it back into the same index, pools, registry and bookings."""
    stack.settings = replace(stack.settings, router_avoid_s=60.0, history_window_s=3600.0)
    worker = stack.worker()
    api, writer = Api(worker.url), Writer(stack.settings, SEED_WITH_LABELS, 150)
    fill_registry(stack.settings, api)
    writer.write(150)
    writer.wait_known(worker.url)
    wait_for(lambda: n_booking_records(stack.settings) >= 7, VISIBLE_TIMEOUT_S, "the ends of bookings in the log")
    file = tmp_path / "state.jsonl"
    done = run("replay", "--out", str(file), env=as_environ(stack.settings))
    assert done.returncode == 0, done.stderr
    read = StateFile(file)

    replay = Replay(stack.settings)
    replay.advance(cut_now(stack.settings, replay.router.feeds.topics))
    index, view = replay.router.view.index, replay.router.view
    members = index.members()
    assert read.held() == {(rank.worker_id, rank.dp_rank, tier.name.lower(), block) for rank, tier, block in members}
    epochs = {(state.rank.worker_id, state.rank.dp_rank): tuple(state.epoch) for state in index.rank_states()}
    ranks = {(line["worker_id"], line["dp_rank"]): line for line in read.lines["rank"]}
    assert {rank: (line["incarnation"], line["generation"]) for rank, line in ranks.items()} == epochs
    held = {(rank, block) for rank, _, block in members}
    labels = {
        (rank.worker_id, rank.dp_rank, int(block)): (moe.layer_id, moe.expert_id, moe.expert_group)
        for rank, block, moe in view.facts.labels()
        if (rank, block) in held
    }
    assert read.labels() == labels
    assert len(labels) > 0
    rows, _ = view.facts.rows()
    pooled = {
        (rank.worker_id, rank.dp_rank, int(block), pool_id, row.placement.state) for block, rank, pool_id, row in rows
    }
    names = ("worker_id", "dp_rank", "sequence_hash", "pool_id", "state")
    assert {tuple(line[name] for name in names) for line in read.lines["pooled"]} == pooled
    assert len(pooled) > 0
    for kind, key, expected in (
        ("worker", "worker_id", set(WORKERS)),
        ("cordon", "worker_id", {WORKERS[0]}),
        ("pool", "pool_id", {"rack1"}),
        ("booking", "request_id", {"r0", "r2", "r3", "r4"}),
    ):
        assert {line[key] for line in read.lines[kind]} == expected
    assert {line["prefilled"] for line in read.lines["booking"] if line["request_id"] == "r0"} == {True}
    file.write_text(json.dumps(read.scope))
    assert run("replay", "--until", f"@{file}", env=as_environ(stack.settings)).returncode == 0


@pytest.mark.first_ring
def test_a_moment_is_found_by_the_times_of_rows_and_not_by_those_of_commits(scope: Settings) -> None:
    """The end of a transaction in the log may have a later time than the rows of the next one."""
    names = topics(scope)
    ensure_topics(scope, names.all())
    tables = (names.index_changelog, names.cxl_changelog)
    kafka = producer(scope, **{"transactional.id": f"{scope.app_id}-moments"})
    kafka.init_transactions()
    at_ms = now_ms() - 60_000
    for number in range(3):
        kafka.begin_transaction()
        for spec, key in zip(tables, (PARTITION_KEY.pack(0), b"row"), strict=True):
            kafka.produce(spec.name, key=key, value=b"", partition=0, timestamp=at_ms + 1000 * number)
        kafka.commit_transaction()
    for n_before in range(4):
        ends = cut_at(scope, tables, at_ms + 1000 * n_before).ends
        # A transaction has a row and its end.
        assert {ends[spec.name, 0] for spec in tables} == {max(0, 2 * n_before - 1)}


@pytest.mark.parametrize("n_moments", [pytest.param(8, marks=pytest.mark.first_ring), 100])
def test_replays_of_random_moments_equal_the_reference(stack: Stack, n_moments: int) -> None:
    """At each moment, the index and the pooled blocks are the reference's after the same records of the sources."""
    stack.settings = replace(stack.settings, batch_records_max=10)  # for enough transactions
    ensure_topics(stack.settings, topics(stack.settings).all())
    set_window(stack.settings, 3600.0)
    begun_ms = now_ms()
    worker = stack.worker()
    rng = random.Random(seed())
    writer = Writer(stack.settings, rng.randrange(1 << 16), 400)
    moments: list[int] = []
    while not writer.is_over:
        writer.write(rng.randint(1, 20))
        moments.append(now_ms())
        time.sleep(rng.random() * 0.05)
    writer.wait_known(worker.url)
    owners = Owners(stack.settings)
    ended_ms = now_ms()
    moments = rng.sample(moments, min(len(moments), n_moments // 2))
    moments += [rng.randint(begun_ms, ended_ms) for _ in range(n_moments - len(moments))]
    seen = set[str]()
    for moment_ms in moments:
        replay = Replay(stack.settings)
        replay.advance(moment_in_window(stack.settings, replay.router.feeds.topics, moment_ms, now_ms()))
        seen.add(str(assert_is_reference(replay, writer, owners, moment_ms)))
    assert len(seen) > n_moments // 5


def test_a_replay_of_a_moment_has_the_fleet_and_the_bookings_of_that_moment(
    stack: Stack, run: Run, tmp_path: Path
) -> None:
    """Registry, bookings and avoidances are as they were. The offsets that it prints give the same again."""
    stack.settings = replace(stack.settings, router_avoid_s=20.0, history_window_s=3600.0)
    worker = stack.worker()
    api = Api(worker.url)
    fill_registry(stack.settings, api)
    wait_for(lambda: bool(api.workers()[WORKERS[2]]["metrics"]), VISIBLE_TIMEOUT_S, "the engine's report")
    time.sleep(0.5)  # until the bookings are in the log
    at_ms = now_ms()
    time.sleep(0.2)
    api.call("DELETE", f"/workers/{WORKERS[1]}").given()
    api.call("DELETE", f"/workers/{WORKERS[0]}/cordon").given()
    for number in (0, 2, 3):
        api.call("DELETE", f"/loads/r{number}").given()
    api.route(request_id="later", model=MODEL, token_ids=list(range(64)))
    wait_for(lambda: api.loads([WORKERS[1]]) == {}, VISIBLE_TIMEOUT_S, "the worker to be removed")

    done = run("replay", "--json", "--until", time_text(at_ms), env=as_environ(stack.settings))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["workers"], found["cordons"], found["avoidances"], found["bookings"]) == (3, 1, 1, 4)
    file = tmp_path / "then.json"
    file.write_text(done.stdout)
    done = run("replay", "--json", "--until", f"@{file}", env=as_environ(stack.settings))
    assert done.returncode == 0, done.stderr
    again = json.loads(done.stdout)
    assert {**again, "seconds": 0} == {**found, "seconds": 0}
    now = json.loads(run("replay", "--json", env=as_environ(stack.settings)).stdout)
    assert (now["workers"], now["cordons"], now["bookings"]) == (2, 0, 2)


def test_the_window_is_set_on_existing_topics_and_what_is_outside_is_refused(
    scope: Settings, run: Run, tmp_path: Path
) -> None:
    """The refusal names the earliest moment: the window's beginning, or when it was set. Other processes go on."""
    ensure_topics(scope, topics(scope).all())
    now = assert_one_line(run("replay", "--until", "30s", env=as_environ(scope)))
    assert "keep no history of that: the earliest moment is " in now
    assert "kvstreams topics window" in now

    begun_ms = now_ms()
    done = run("topics", "window", "1h", env=as_environ(scope))
    assert done.returncode == 0, done.stderr
    assert "85.0 GB" in done.stdout
    require_topics(scope, topics(scope).all())  # raises if a process with the former settings could not start
    names = topics(scope)
    states = describe_topics(scope, names.with_history())
    lags = {name: state.config.get("min.compaction.lag.ms") for name, state in states.items() if state is not None}
    assert lags.pop(names.worker_metrics.name) is None
    assert set(lags.values()) == {"3600000"}
    window = window_of(scope)
    assert window.window_ms == 3_600_000
    assert begun_ms <= window.earliest_ms(now_ms()) <= now_ms()
    with pytest.raises(OutsideWindow) as refused:
        moment_in_window(scope, names.with_history(), begun_ms - 1, now_ms())
    assert refused.value.detail["earliest"] == time_text(window.earliest_ms(now_ms()))
    assert moment_in_window(scope, names.with_history(), now_ms(), now_ms()).ends
    with pytest.raises(OutsideWindow, match="is in the future"):
        moment_in_window(scope, names.with_history(), now_ms() + 60_000, now_ms())

    # Settings that ask for more than the topics have are refused, with the remedy.
    with pytest.raises(KvStreamsError, match="kvstreams topics window"):
        require_topics(scope, topics(replace(scope, history_window_s=7200.0)).all())
    file = tmp_path / "offsets.json"
    file.write_text(json.dumps({"offsets": {names.workers.name: {"0": 1}}}))
    assert "before offset 1" in assert_one_line(run("replay", "--until", f"@{file}", env=as_environ(scope)))


def test_a_replayed_decision_is_the_one_of_that_moment(stack: Stack, run: Run, tmp_path: Path) -> None:
    """The answer, with every candidate's terms and its trust, is what a router gave then; what is not kept is named."""
    stack.settings = replace(stack.settings, history_window_s=3600.0, router_seed=1)
    worker = stack.worker()
    api, writer = Api(worker.url), Writer(stack.settings, seed(), 150)
    writer.write(150)
    writer.wait_known(worker.url)
    ranks = {rank for rank, _, _ in writer.reference().members()}
    held = {rank.worker_id for rank in ranks}
    body = {"url": "http://e", "model": MODEL, "block_size": 16, "dp_size": 1 + max(rank.dp_rank for rank in ranks)}
    for worker_id in held:
        api.call("PUT", f"/workers/{worker_id}", body).given()
    fill_registry(stack.settings, api)
    asked = {"model": MODEL, "block_hashes": writer.held_prompt(), "request_id": "asked"}
    # The rank that has the prompt need not be the cheapest one.
    wait_for(lambda: any(each["scores"] for each in api.ask(**asked)["candidates"]), VISIBLE_TIMEOUT_S, "an overlap")
    time.sleep(1.0)  # until every owner has written that it applied everything
    then = api.ask(**asked)
    at_ms = now_ms()
    time.sleep(0.2)
    for number in (0, 2, 3):
        api.call("DELETE", f"/loads/r{number}").given()
    for worker_id in held:
        api.call("DELETE", f"/workers/{worker_id}").given()

    file = tmp_path / "request.json"
    file.write_text(json.dumps(asked))
    done = run("replay", "--until", time_text(at_ms), "--route", str(file), env=as_environ(stack.settings))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["moment"] == time_text(at_ms)
    assert {*found["not_kept"]} >= {"predictions", "queue", "fitted times", "random draws"}
    # The sums of what ranks computed lately are halved every five minutes, and rounded then by up to a token.
    for ours, theirs in zip(found["answer"]["candidates"], then["candidates"], strict=True):
        rounded = {name: pytest.approx(theirs[name], rel=0.1) for name in ("recent_prefill_blocks", "cost")}
        assert ours == theirs | rounded
    # Which of several equal ranks is chosen is a random draw.
    same = ("overlap_blocks", "request_blocks", "mode", "router_mode")
    assert {name: found["answer"][name] for name in same} == {name: then[name] for name in same}


def test_the_commands_of_the_page_run_one_after_the_other(stack: Stack, run: Run, tmp_path: Path) -> None:
    """Each block of docs/replay.md, with the address of a router and a time of this scope in place of the reader's."""
    stack.settings = replace(stack.settings, history_window_s=2 * 86400.0)
    worker = stack.worker()
    fill_registry(stack.settings, Api(worker.url))
    wait_for(lambda: get_json(f"{worker.url}/ready")["ready"], VISIBLE_TIMEOUT_S, "the router")
    time.sleep(0.5)  # until the bookings are in the log
    ours = {"http://router:8000": worker.url, "14:03": time_text(now_ms())}
    (tmp_path / "request.json").write_text(json.dumps({"model": MODEL, "token_ids": [1] * 64, "request_id": "asked"}))
    beginnings = (
        "replay\n",
        "replay --until 15m",
        "replay --verify",
        "replay --until 14:03",
        "replay --out",
        "topics window",
    )
    for beginning in beginnings:
        for line in block_of("docs/replay.md", f"kvstreams {beginning}").splitlines():
            command, _, file = line.partition(" > ")
            words = [ours.get(word, word) for word in shlex.split(command, comments=True)]
            done = run(*words[1:], env=as_environ(stack.settings))
            assert done.returncode == 0, f"{line}: {done.stderr}"
            assert done.stdout
            if file:
                (tmp_path / file).write_text(done.stdout)
