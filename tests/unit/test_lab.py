"""The laboratory: traces and generated traffic through a simulated fleet, and its calibration."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from benchmarks import calibrate
from streams.cli import cli
from streams.errors import InvalidRequest, SettingsError
from streams.lab.simulation.experiment import Row, known_policies, load_workload, run_policy, split_name
from streams.lab.simulation.fleet import FleetConfig, LabFailure
from streams.lab.simulation.generators import PARAMETERS
from streams.lab.simulation.lab_engine_config import default_engine
from streams.lab.simulation.lab_pool import LabPool, LabPoolConfig
from streams.lab.simulation.trace_files import read_workload, sessions_workload
from streams.lab.simulation.tuning import Objective, loss_of
from streams.lab.simulation.workload import NO_REQUEST, RawRequest, Workload, build
from streams.settings import load
from tests.helpers.traces import REAL_TRACE

ENGINE = default_engine()


@pytest.fixture(scope="module")
def chat() -> Workload:
    return load_workload("uniform:requests=300:prefixes=60:seed=3", ENGINE, 4)


def simulate(workload: Workload, policy: str, **fleet: object) -> Row:
    config = FleetConfig(ENGINE, n_workers=4)
    return run_policy(workload, replace(config, **{"concurrency": 32, **fleet}), policy)  # type: ignore[arg-type]


# -- calibration -------------------------------------------------------------------------------------------------------


def test_the_laboratory_agrees_with_the_replay_of_dynamo(tmp_path: Path) -> None:
    """Mean TTFT, ITL, throughput and reuse differ by less than the limits; benchmarks/calibrate.py has the command."""
    stored = json.loads(calibrate.STORED_SMALL.read_text())["rows"]
    runs = [(row["policy"], row["concurrency"]) for row in stored]
    ours = calibrate.laboratory(calibrate.small_trace(tmp_path), calibrate.SMALL_WORKERS, runs)
    for theirs, mine in zip(stored, ours, strict=True):
        for name, differs in calibrate.differences(theirs, mine).items():
            assert abs(differs) < calibrate.LIMITS[theirs["policy"]], (theirs["policy"], name, differs)


@pytest.mark.skipif(not REAL_TRACE.exists(), reason="the published trace is not part of a checkout")
def test_the_laboratory_agrees_with_the_replay_of_the_published_trace() -> None:
    """Round robin at 128 requests at once; `make calibrate` compares every policy and load."""
    stored = json.loads(calibrate.STORED.read_text())["rows"]
    theirs = next(row for row in stored if (row["policy"], row["concurrency"]) == ("round-robin", 128))
    (mine,) = calibrate.laboratory(REAL_TRACE, 8, [("round-robin", 128)])
    assert max(map(abs, calibrate.differences(theirs, mine).values())) < calibrate.LIMITS["round-robin"]


# -- workloads ---------------------------------------------------------------------------------------------------------


def test_equal_ids_after_different_prefixes_are_different_blocks() -> None:
    """Blocks are shared only as far as two prompts are equal from their beginning."""
    workload = build(
        "two",
        [RawRequest(0.0, 256, 1, [1, 2]), RawRequest(1.0, 256, 1, [3, 2]), RawRequest(2.0, 200, 1, [1, 2])],
        128,
        64,
    )
    first, second, third = (workload.keys_of(number).tolist() for number in range(3))
    assert len(first) == 4 and not set(first) & set(second)
    assert third == first[:3]
    assert len(set(workload.names.tolist())) == workload.n_keys


def test_requests_are_sorted_by_time_and_keep_their_sessions() -> None:
    """A request that follows another one names its place after sorting."""
    raw = [RawRequest(5.0, 64, 1, [1]), RawRequest(9.0, 128, 1, [1, 2], 0), RawRequest(0.0, 64, 1, [7])]
    workload = build("sessions", raw, 64, 64)
    assert workload.at_ms.tolist() == [0.0, 5.0, 9.0]
    assert workload.previous.tolist() == [NO_REQUEST, NO_REQUEST, 1]


def test_sessions_of_agents_are_read(tmp_path: Path) -> None:
    """Seconds become milliseconds, ids are local to a session except those of equal tools, and long pauses are cut."""

    def session(*requests: tuple[float, int]) -> dict[str, object]:
        rows = [{"t": t, "in": n, "out": 5, "hash_ids": list(range(1, n // 64 + 1))} for t, n in requests]
        return {"block_size": 64, "hash_id_scope": "local", "tool_tokens": 128, "system_tokens": 0, "requests": rows}

    (tmp_path / "a.json").write_text(json.dumps(session((0, 256), (1000, 320))))
    (tmp_path / "b.json").write_text(json.dumps(session((0, 192))))
    workload = read_workload(tmp_path, 64)
    assert workload.at_ms.tolist() == [0.0, 15_000.0, 60_000.0]
    first, other, second = (workload.keys_of(number).tolist() for number in range(3))
    assert second[:4] == first and other[:2] == first[:2] and not set(other[2:]) & set(second)
    assert workload.previous.tolist() == [NO_REQUEST, NO_REQUEST, 0]


def test_a_file_of_lines_with_sessions_is_read_like_a_folder(tmp_path: Path) -> None:
    """One JSON object per line, each with requests."""
    rows = [{"requests": [{"t": 0, "in": 100, "out": 2, "hash_ids": [1, 2]}], "start": start} for start in (3, 1)]
    (tmp_path / "sessions.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert read_workload(tmp_path / "sessions.jsonl", 64).at_ms.tolist() == [1000.0, 3000.0]


def test_traces_of_lmcache_have_text(tmp_path: Path) -> None:
    """Prompts share the blocks of equal text, and a turn comes so long after the answer before it."""

    def turn(session: str, pre_gap: float, *texts: str) -> dict[str, object]:
        messages = [{"role": "user", "content": text} for text in texts]
        return {"session_id": session, "model": "m", "input": messages, "output_length": 7, "pre_gap": pre_gap}

    system = "s" * 1_024
    rows = [turn("a", 0.0, system), turn("a", 2.5, system, "t" * 512), turn("b", 0.0, system, "u" * 512)]
    file = tmp_path / "agents.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    workload = read_workload(file, 64)
    assert workload.n_in.tolist() == [257, 387, 387] and workload.n_out.tolist() == [7, 7, 7]
    first, other, second = (workload.keys_of(number).tolist() for number in range(3))
    assert workload.previous.tolist() == [NO_REQUEST, NO_REQUEST, 0]
    assert len({tuple(keys[:4]) for keys in (first, second, other)}) == 1 and second[4:] != other[4:]
    assert workload.pause_ms.tolist() == [0.0, 0.0, 2500.0]
    file.write_text(json.dumps({"input": [{"text": "x"}], "session_id": "a"}))
    with pytest.raises(InvalidRequest, match=r"object 1 of agents\.jsonl"):
        read_workload(file, 64)


@pytest.mark.parametrize("sessions", [[{}], [{"requests": []}], [{"requests": [{"t": 0}]}], [], [1], ["a"]])
def test_what_is_no_session_is_refused(sessions: list[Any]) -> None:
    """The error says what is expected."""
    with pytest.raises(InvalidRequest):
        sessions_workload("bad", sessions, 64)


@pytest.mark.parametrize("name", PARAMETERS)
def test_generators_repeat_their_traffic(name: str) -> None:
    """The same parameters give the same requests, another seed gives others."""
    once, again, other = (load_workload(f"{name}:requests=60:seed={seed}", ENGINE, 1) for seed in (1, 1, 2))
    assert np.array_equal(once.keys, again.keys) and np.array_equal(once.at_ms, again.at_ms)
    assert not np.array_equal(once.n_in, other.n_in)
    assert (np.diff(once.at_ms) >= 0.0).all()


def test_generated_traffic_shares_what_its_name_says() -> None:
    """Nothing in `cold`, nearly everything in `agentic`."""
    cold = load_workload("cold:requests=100", ENGINE, 2)
    agentic = load_workload("agentic:requests=300:turns=20", ENGINE, 2)
    assert cold.reusable_share() == 0.0
    assert agentic.reusable_share() > 0.8


# -- runs --------------------------------------------------------------------------------------------------------------


def test_every_request_is_served_once(chat: Workload) -> None:
    """Each has a first token after its arrival, a last one not before it, and an engine."""
    result = simulate(chat, "dynamo-default").result
    assert (result.ttft_ms > 0.0).all() and (result.last_ms >= result.first_ms).all()
    assert set(result.worker.tolist()) == set(range(4))
    assert (result.reused_tokens <= result.n_in).all()


def test_runs_repeat(chat: Workload) -> None:
    """The same seed gives the same times."""
    once, again = (simulate(chat, "dynamo-agentic") for _ in range(2))
    assert once.figures == again.figures


def test_a_run_by_time_keeps_the_times_of_the_trace(chat: Workload) -> None:
    """Requests arrive at their times, divided by the speedup."""
    result = simulate(chat, "round-robin", concurrency=0, speedup=2.0).result
    assert result.arrived_ms == pytest.approx(chat.at_ms / 2.0)


def test_turns_of_a_session_follow_each_other() -> None:
    """A turn arrives only after the answer before it has ended."""
    workload = load_workload("agentic:requests=200:turns=10", ENGINE, 1)
    for how in ({"concurrency": 16}, {"concurrency": 0, "speedup": 50.0}):
        result = simulate(workload, "round-robin", **how).result
        for number, previous in enumerate(workload.previous.tolist()):
            assert previous == NO_REQUEST or result.arrived_ms[number] >= result.last_ms[previous]


def test_routing_by_cache_reuses_more_than_round_robin(chat: Workload) -> None:
    """Prefixes of 3,000 tokens are found more often, and the first token comes earlier."""
    rows = {policy: simulate(chat, policy).figures for policy in ("round-robin", "kv", "dynamo-tuned")}
    for policy in ("kv", "dynamo-tuned"):
        assert rows[policy].reuse > 1.2 * rows["round-robin"].reuse
        assert rows[policy].mean_ttft_ms < rows["round-robin"].mean_ttft_ms


def test_late_events_change_what_a_router_knows(chat: Workload) -> None:
    """With a lag, some overlap is not known yet; a lag of no time is none."""
    prompt, late = simulate(chat, "dynamo-tuned"), simulate(chat, "dynamo-tuned", event_lag_ms=20_000.0)
    assert late.figures.reuse < prompt.figures.reuse
    assert simulate(chat, "dynamo-tuned", event_lag_ms=0.0).figures == prompt.figures


def test_requests_of_a_failed_engine_are_served_by_others(chat: Workload) -> None:
    """All requests end, and while the engine is away the others serve them."""
    failure = LabFailure(worker=1, at_ms=2_000.0, for_ms=6_000.0)
    result = simulate(chat, "dynamo-default", failures=(failure,)).result
    assert (result.last_ms > 0.0).all()
    away = (result.first_ms > 2_000.0) & (result.first_ms < 8_000.0)
    assert away.any() and 1 not in result.worker[away]
    assert result.figures().mean_ttft_ms > simulate(chat, "dynamo-default").figures.mean_ttft_ms


def test_requests_wait_while_no_engine_is_alive() -> None:
    """With one engine that fails, requests wait until it is back."""
    workload = load_workload("cold:requests=20", ENGINE, 1)
    failure = LabFailure(worker=0, at_ms=100.0, for_ms=5_000.0)
    result = simulate(workload, "kv", n_workers=1, concurrency=4, failures=(failure,)).result
    assert (result.last_ms > 0.0).all() and result.first_ms.max() > 5_100.0


def test_slow_engines_take_longer(chat: Workload) -> None:
    """Round robin gives an engine of half the speed as many requests, which take longer there."""
    result = simulate(chat, "round-robin", speeds=(1.0, 1.0, 1.0, 2.0)).result
    slow = result.worker == 3
    assert result.ttft_ms[slow].mean() > 1.5 * result.ttft_ms[~slow].mean()


@pytest.mark.parametrize("change", [{"n_workers": 0}, {"speedup": 0.0}, {"event_lag_ms": -1.0}, {"speeds": (0.0,)}])
def test_an_impossible_fleet_is_refused(change: dict[str, object]) -> None:
    """The error names what is wrong."""
    with pytest.raises(SettingsError):
        FleetConfig(ENGINE, **change)  # type: ignore[arg-type]


def test_a_queue_shortens_bursts(chat: Workload) -> None:
    """Requests that wait for a rank go shortest first, so that the mean time to the first token is lower."""
    direct = simulate(chat, "expected-time", concurrency=200)
    queued = simulate(chat, "expected-time+queue", concurrency=200)
    assert (queued.result.last_ms > 0.0).all()
    assert queued.figures.mean_ttft_ms < direct.figures.mean_ttft_ms


@pytest.mark.parametrize(("apart_ms", "short_is_first"), [(0.0, True), (100.0, False)])
def test_requests_of_one_moment_are_ordered(apart_ms: float, short_is_first: bool) -> None:
    """Of a long and a short prompt that come together, the short one is sent first; a later one does not overtake."""
    raw = [RawRequest(0.0, 20_000, 2, range(1000, 1313)), RawRequest(apart_ms, 500, 2, range(8))]
    row = run_policy(build("two", raw, 64, 64), FleetConfig(ENGINE, 1), "expected-time+queue")
    assert (row.result.first_ms[1] < row.result.first_ms[0]) == short_is_first


def test_modes_have_queues_too(chat: Workload) -> None:
    """A queue by tokens, as with queue=on in mode kv."""
    result = simulate(chat, "kv+queue", concurrency=200).result
    assert (result.last_ms > 0.0).all()


#: An engine whose cache holds a few prompts, so that a pool matters.
TINY = replace(ENGINE, n_blocks=1024)


@pytest.fixture(scope="module")
def returning() -> Workload:
    return load_workload("agentic:requests=200:turns=8:prefix=2000:working_set=2", TINY, 2)


def pooled(workload: Workload, pool: LabPoolConfig | None) -> Row:
    config = FleetConfig(TINY, 2, concurrency=8, pool=pool)
    return run_policy(workload, config, "expected-time")


def test_a_pool_returns_what_the_engines_have_evicted(returning: Workload) -> None:
    """Blocks are loaded instead of computed, and the first token comes earlier; a shared link is slower."""
    without = pooled(returning, None).figures
    own = pooled(returning, LabPoolConfig(4 * 2 * TINY.n_blocks)).figures
    shared = pooled(returning, LabPoolConfig(4 * 2 * TINY.n_blocks, gb_per_s=20.0, is_shared=True)).figures
    assert without.loaded == 0.0 and own.loaded > 0.05
    assert own.reuse > without.reuse and own.mean_ttft_ms < shared.mean_ttft_ms < without.mean_ttft_ms


def test_the_memory_of_a_host_serves_its_own_engine(returning: Workload) -> None:
    """Blocks that were evicted from the device are loaded from the host, which the router knows by its tier."""
    config = FleetConfig(TINY, 2, concurrency=8)
    host = LabPoolConfig(4 * TINY.n_blocks, gb_per_s=25.0)
    for policy in ("expected-time", "kv"):
        without = run_policy(returning, config, policy).figures
        figures = run_policy(returning, replace(config, host=host), policy).figures
        assert figures.loaded > 0.03 and figures.reuse > without.reuse
        assert figures.mean_ttft_ms < without.mean_ttft_ms


def test_a_pool_without_room_holds_the_last_blocks(returning: Workload) -> None:
    """A small pool gives less than a large one, and more than none."""
    small = pooled(returning, LabPoolConfig(TINY.n_blocks)).figures
    large = pooled(returning, LabPoolConfig(8 * TINY.n_blocks)).figures
    assert 0.0 < small.loaded < large.loaded


def test_a_pool_evicts_the_ends_of_prompts_first() -> None:
    """What was used last stays, and of a prompt its beginning."""
    pool = LabPool(LabPoolConfig(4), 1)
    assert pool.store([1, 2, 3], 0) == ([3, 2, 1], [])
    assert pool.store([1, 9, 8], 1) == ([8, 9], [3])
    assert pool.n_continuing([1, 2, 3], 0) == 2 and pool.n_continuing([7], 0) == 0


def test_loads_share_a_link() -> None:
    """With one link for all, the second load waits for the first one."""
    own, shared = (LabPool(LabPoolConfig(9, gb_per_s=1.0, is_shared=each), 1_000_000) for each in (False, True))
    for pool in (own, shared):
        pool.store([1, 2], 0)
        assert pool.load(0.0, [1, 2], 0, 2) == pytest.approx(2.0)
    assert own.load(1.0, [1, 2], 0, 1) == pytest.approx(1.0)
    assert shared.load(1.0, [1, 2], 0, 1) == pytest.approx(2.0)


def test_chunks_are_stored_and_loaded_as_a_whole() -> None:
    """A chunk is found once it is complete and only after those before it; a load of a part takes all of its bytes."""
    pool = LabPool(LabPoolConfig(7, gb_per_s=1.0, chunk_blocks=3), 1_000_000)
    assert pool.store([1, 2, 3, 4, 5], 0) == ([3], [])
    assert pool.store([1, 2, 3, 4, 5, 6], 5) == ([6], [])
    chain = [1, 2, 3, 4, 5, 6, 7]
    assert [pool.n_continuing(chain, first) for first in (0, 2, 4, 6)] == [6, 4, 2, 0]
    assert pool.n_continuing([1, 2, 9, 4, 5, 6], 3) == 0
    assert pool.load(0.0, chain, 2, 4) == pytest.approx(6.0)
    assert pool.load(0.0, chain, 4, 1) == pytest.approx(3.0)
    assert pool.store([11, 12, 13], 0) == ([13], [6])


def test_a_pool_of_chunks_gives_almost_what_one_of_blocks_gives(returning: Workload) -> None:
    """What the router expects ends where a chunk ends, and the engine loads as much."""
    blocks, chunks = (pooled(returning, LabPoolConfig(8 * TINY.n_blocks, chunk_blocks=each)).figures for each in (1, 4))
    assert 0.8 * blocks.loaded < chunks.loaded < blocks.loaded
    assert blocks.reuse > chunks.reuse


# -- names and the command ---------------------------------------------------------------------------------------------


def test_names_have_parameters() -> None:
    """Numbers after colons; anything else is refused with the name in the error."""
    assert split_name("dynamo-default:credit=2:scale=4") == ("dynamo-default", {"credit": 2.0, "scale": 4.0})
    with pytest.raises(SettingsError, match="credit"):
        split_name("dynamo-default:credit")


@pytest.mark.parametrize("name", ["no-such-policy", "dynamo-default:speed=1", "dynamo-default:credit=-1", "kv:x=1"])
def test_unknown_policies_and_parameters_are_refused(chat: Workload, name: str) -> None:
    """Before anything runs."""
    with pytest.raises(SettingsError):
        simulate(chat, name)


def test_dynamos_policies_are_found_by_name() -> None:
    """Its default, its preset, and better weights."""
    assert {"dynamo-default", "dynamo-agentic", "dynamo-tuned", "kv", "round-robin"} <= set(known_policies())


def test_the_command_prints_a_table_and_writes_rows_and_plots(tmp_path: Path) -> None:
    """One row per policy and load, with the figures that scripts read, and three plots per load."""
    file, plots = tmp_path / "rows.json", tmp_path / "plots"
    arguments = ["simulate", "uniform:requests=80", "--policy", "round-robin,dynamo-agentic", "--workers", "2"]
    arguments += ["--concurrency", "8,0", "--speedup", "2", "--json", str(file), "--plots", str(plots)]
    done = CliRunner().invoke(cli, arguments, catch_exceptions=False)
    assert done.exit_code == 0 and "mean TTFT" in done.output
    record = json.loads(file.read_text())
    assert [(row["policy"], row["concurrency"]) for row in record["rows"]] == [
        ("round-robin", 8),
        ("dynamo-agentic", 8),
        ("round-robin", 0),
        ("dynamo-agentic", 0),
    ]
    names = {"policy", "concurrency", "mean_ttft_ms", "p99_ttft_ms", "itl_ms", "requests_per_s", "reuse"}
    assert all(names <= row.keys() for row in record["rows"])
    assert len(list(plots.glob("*.png"))) == 6


def test_tuning_prints_settings_that_a_router_accepts(tmp_path: Path) -> None:
    """The best trial is not worse than the policy's own weights, and its lines are a settings file."""
    arguments = ["tune", "uniform:requests=120:prefixes=30", "--policy", "dynamo-default", "--trials", "6"]
    arguments += ["--workers", "2", "--concurrency", "16"]
    done = CliRunner().invoke(cli, arguments, catch_exceptions=False)
    assert done.exit_code == 0
    *_, aim, mode, credit, scale, weight = done.output.strip().splitlines()
    own, best = map(float, re.findall(r"[\d.]+", aim))
    assert best <= own
    file = tmp_path / "kvstreams.toml"
    file.write_text("\n".join([mode, credit, scale, weight]))
    settings = load({}, config_file=file).settings
    assert settings.router_mode == "kv" and f"{settings.kv_overlap_score_credit:g}" in credit


@pytest.mark.parametrize(
    ("objective", "is_better"), [("mean-ttft", "mean_ttft_ms"), ("p99-ttft", "p99_ttft_ms"), ("goodput", "")]
)
def test_objectives_order_runs(chat: Workload, objective: str, is_better: str) -> None:
    """A lower time has a lower loss, and so has a higher goodput."""
    slow, fast = simulate(chat, "round-robin", speeds=(3.0, 3.0, 3.0, 3.0)), simulate(chat, "dynamo-tuned")
    aim = Objective(objective)
    assert loss_of(fast, aim, 200.0) < loss_of(slow, aim, 200.0)
    if is_better:
        assert loss_of(fast, aim, 200.0) == getattr(fast.figures, is_better)


@pytest.mark.parametrize("sweep", ["credit", "credit=1", "credit=2..1", "credit=0..1"])
def test_a_wrong_range_is_refused(sweep: str) -> None:
    """Before anything runs."""
    arguments = ["tune", "uniform:requests=20", "--policy", "dynamo-default", "--sweep", sweep, "--trials", "2"]
    with pytest.raises(SettingsError):
        CliRunner().invoke(cli, arguments, catch_exceptions=False)
