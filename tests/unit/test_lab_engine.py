"""A laboratory engine does what its rules say, whether it computes steps one by one or in stretches."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streams.errors import SettingsError
from streams.lab.simulation.lab_engine import LabEngine, LabRequest
from streams.lab.simulation.lab_engine_config import LabEngineConfig, default_engine, engine_from_toml
from tests.helpers.naive_lab_engine import NaiveEngine, NaiveRequest

#: A small engine, so that blocks run out, requests wait and answers are preempted.
SMALL = replace(default_engine(), block_size=4, n_blocks=24, max_sequences=4, max_batched_tokens=24)


def keys_of(family: int, n_shared: int, number: int, n_blocks: int) -> list[int]:
    """Keys of a request's blocks: the first n_shared are those of its family."""
    shared = [family * 1_000 + at for at in range(min(n_shared, n_blocks))]
    return shared + [100_000 + number * 1_000 + at for at in range(n_blocks - len(shared))]


@st.composite
def workloads(draw: st.DrawFn) -> list[tuple[float, int, int, list[int]]]:
    """Requests as (time, prompt, answer, keys of all blocks), some of which begin alike."""
    n, at_ms, requests = draw(st.integers(1, 14)), 0.0, []
    for number in range(n):
        at_ms += draw(st.sampled_from([0.0, 0.0, 3.0, 25.0, 111.0, 900.0]))
        n_in = draw(st.integers(1, 60))
        n_out = draw(st.integers(1, 30))
        n_blocks = -(-(n_in + n_out) // SMALL.block_size)
        n_shared = min(draw(st.integers(0, 12)), n_in // SMALL.block_size)
        keys = keys_of(draw(st.integers(0, 2)), n_shared, number, n_blocks)
        requests.append((at_ms, n_in, n_out, keys))
    return requests


Out = dict[str, dict[int, float]]


def run(config: LabEngineConfig, requests: list[tuple[float, int, int, list[int]]]) -> tuple[LabEngine, Out]:
    """Serve requests as the fleet does, and check the index events against the pool."""
    found: set[int] = set()
    engine = LabEngine(
        0,
        config,
        lambda _, request, first, last: found.update(request.chain[first:last]),
        lambda _, keys: found.difference_update(keys),
    )
    out: Out = {"first": {}, "last": {}, "reused": {}}
    now_ms, at = 0.0, 0
    while at < len(requests) or engine.is_busy or engine.has_work:
        arrives_ms = requests[at][0] if at < len(requests) else float("inf")
        if engine.is_busy and engine.end_ms <= arrives_ms:
            now_ms = engine.end_ms
            first, ended = engine.finish()
            out["first"].update({each.number: now_ms for each in first})
            out["last"].update({each.number: now_ms for each in ended})
            out["reused"].update({each.number: each.reused_tokens for each in first})
        else:
            now_ms = arrives_ms
        while at < len(requests) and requests[at][0] <= now_ms:
            _, n_in, n_out, keys = requests[at]
            n_full = n_in // config.block_size
            # The keys of the answer's blocks follow each other, as in a workload.
            own = keys[n_full] if n_full < len(keys) else 0
            engine.submit(LabRequest(at, n_in, n_out, keys[:n_full], own), now_ms)
            at += 1
        if not engine.is_busy and engine.has_work:
            engine.start(now_ms)
        engine.pool.check()
        assert all(engine.pool.n_cached([key]) for key in found)
    return engine, out


@settings(max_examples=150, deadline=None)
@given(workloads())
def test_stretches_give_the_same_times_as_single_steps(requests: list[tuple[float, int, int, list[int]]]) -> None:
    """First tokens, ends, reuse and preemptions are those of the reference, which computes token by token."""
    naive = NaiveEngine(SMALL)
    naive.run([(each[0], NaiveRequest(number, *each[1:])) for number, each in enumerate(requests)])
    engine, out = run(SMALL, requests)
    assert out["first"] == pytest.approx(naive.first_ms)
    assert out["last"] == pytest.approx(naive.last_ms)
    assert out["reused"] == naive.reused
    assert engine.n_preempted == naive.n_preempted


def test_a_full_cache_preempts_the_request_that_was_admitted_last() -> None:
    """Two answers that outgrow the cache: the second one is preempted, and both end."""
    requests = [(0.0, 40, 30, keys_of(0, 0, 0, 18)), (0.0, 40, 30, keys_of(1, 0, 1, 18))]
    engine, out = run(SMALL, requests)
    assert engine.n_preempted >= 1
    assert out["last"][0] < out["last"][1]


def test_a_step_of_decodes_takes_what_the_formula_says() -> None:
    """One answer of 3 tokens takes a prefill and two decode steps at the utilisation of its own blocks."""
    config = default_engine()
    _, out = run(config, [(0.0, 640, 3, keys_of(0, 0, 0, 11))])
    prefill_ms = config.prefill_step_ms(640)
    assert out["first"][0] == pytest.approx(prefill_ms)
    assert out["last"][0] == pytest.approx(prefill_ms + 2 * config.decode_step_ms(11 / config.n_blocks))
    assert config.prefill_step_ms(8192) == pytest.approx(4.209989e-07 * 8192**2 + 1.518344e-02 * 8192 + 16.50142)


def test_a_lost_engine_returns_its_requests() -> None:
    """All waiting and running requests are lost, and the engine is empty afterwards."""
    engine = LabEngine(0, SMALL, lambda *_: None, lambda *_: None)
    for number in range(6):
        engine.submit(LabRequest(number, 20, 5, list(range(number * 5, number * 5 + 5)), 1_000 + number * 10), 0.0)
    engine.start(0.0)
    assert sorted(request.number for request in engine.fail()) == list(range(6))
    assert not engine.has_work and engine.pool.n_in_use == 0


@pytest.mark.parametrize(
    "text", ["block_size = 64", "block_size = ", "x = 1"], ids=["missing fields", "not TOML", "unknown field"]
)
def test_a_wrong_engine_file_is_refused(text: str) -> None:
    """The error names what is wrong."""
    with pytest.raises(SettingsError, match="engine's parameters"):
        engine_from_toml(text)
