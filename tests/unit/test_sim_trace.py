"""Traces: parsing, tokens, generation, and the bound on reuse, against brute force and the published trace."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streams.errors import InvalidRequest
from streams.lab.engines.engine_config import EngineConfig
from streams.lab.engines.engine_messages import ModelRequest
from streams.lab.engines.model import EngineModel
from streams.lab.trace import (
    TOKEN_VALUES_DISTINCT,
    TraceRequest,
    dump,
    generate,
    infinite_cache_hit_share,
    parse_trace,
    tokens_for,
)
from tests.helpers.traces import REAL_TRACE

GOOD = {"timestamp": 5, "input_length": 600, "output_length": 7, "hash_ids": [3, 9]}


def line(**changes: object) -> str:
    return json.dumps({**GOOD, **changes})


def test_a_line_is_parsed_to_a_request() -> None:
    """Blank lines are skipped, and the limit counts requests."""
    assert parse_trace([line(), "", line(timestamp=6), line(timestamp=7)], limit=2) == [
        TraceRequest(5, 600, 7, (3, 9)),
        TraceRequest(6, 600, 7, (3, 9)),
    ]


@pytest.mark.parametrize(
    ("bad", "word"),
    [
        ("{", "JSON"),
        ("[]", "object"),
        (line(timestamp=-1), "timestamp"),
        (line(timestamp=None), "timestamp"),
        (line(input_length=0), "input_length"),
        (line(output_length=1.5), "output_length"),
        (line(hash_ids=[1, -2]), "hash_ids"),
        (line(hash_ids=[1]), "expected 2"),
        (line(hash_ids=[1, 2, 3]), "expected 2"),
    ],
)
def test_the_error_for_a_bad_line_has_its_number(bad: str, word: str) -> None:
    """Lines are counted from 1, including blank ones."""
    with pytest.raises(InvalidRequest, match=f"line 3.*{word}"):
        parse_trace([line(), "", bad])


def test_a_dumped_trace_is_read_back() -> None:
    """Parsing the lines of a generated trace gives the same requests."""
    requests = generate(50, np.random.default_rng(1))
    assert parse_trace(dump(requests)) == requests


def test_tokens_are_equal_exactly_if_block_ids_are() -> None:
    """Equal ids give equal blocks at any position, and a partial block is the beginning of the whole one."""
    whole = np.frombuffer(tokens_for(TraceRequest(0, 1536, 1, (7, 8, 9))), dtype="<u4").reshape(3, 512)
    other = np.frombuffer(tokens_for(TraceRequest(0, 600, 1, (8, 9))), dtype="<u4")
    assert other[:512].tolist() == whole[1].tolist()
    assert other[512:].tolist() == whole[2][:88].tolist()
    assert (whole[0] == whole[1]).mean() < 0.02
    assert whole.max() < TOKEN_VALUES_DISTINCT


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.lists(st.integers(0, 1), max_size=3), st.integers(1, 8)), min_size=1, max_size=12),
    st.sampled_from([1, 2, 3, 4, 8, 16]),
)
def test_the_bound_is_what_an_engine_without_evictions_reuses(
    shapes: list[tuple[list[int], int]], block_size: int
) -> None:
    """For prompts of ids with 8 tokens each, the bound equals the hits of a large engine at any block size."""
    requests = []
    for path, n_last in shapes:
        steps = [*path, 0]
        # An id names its whole prefix: the path to it, read as a number with a leading one.
        ids = tuple(int("1" + "".join(map(str, steps[: at + 1])), 2) for at in range(len(steps)))
        requests.append(TraceRequest(0, len(path) * 8 + n_last, 1, ids))
    model = EngineModel(EngineConfig(block_size=block_size, n_blocks=4096))
    for at, request in enumerate(requests):
        model.submit(float(at), ModelRequest(str(at), tokens_for(request, 8), 1))
    model.advance(1e12)
    stats = model.stats()
    assert infinite_cache_hit_share(requests, block_size, 8) == stats.hit_tokens / stats.queried_tokens


def test_a_trace_without_requests_reuses_nothing() -> None:
    """The share is 0.0 and not a division by zero."""
    assert infinite_cache_hit_share([], 16) == 0.0


@pytest.mark.parametrize("seed", range(4))
def test_a_generated_trace_is_a_chat_workload(seed: int) -> None:
    """It has 400 requests by time, 3,000 to 6,000 tokens on average, 40 to 60 % reusable, and one prefix per id."""
    requests = generate(400, np.random.default_rng(seed))
    assert len(requests) == 400
    assert 3000 <= np.mean([request.input_length for request in requests]) <= 6000
    assert 0.40 <= infinite_cache_hit_share(requests, 16) <= 0.60
    times = [request.timestamp_ms for request in requests]
    assert times[0] == 0
    assert times == sorted(times)
    assert all(len(request.hash_ids) == -(-request.input_length // 512) for request in requests)
    positions: dict[int, tuple[int, ...]] = {}
    for request in requests:
        for at, hash_id in enumerate(request.hash_ids):
            # An id can be reused because every prompt that contains it has the same blocks before it.
            assert positions.setdefault(hash_id, request.hash_ids[:at]) == request.hash_ids[:at]


def test_a_seed_determines_the_trace() -> None:
    """Equal seeds give equal traces, and different seeds give different ones."""
    one, same, other = (generate(30, np.random.default_rng(seed)) for seed in (1, 1, 2))
    assert one == same != other


@pytest.mark.skipif(not REAL_TRACE.exists(), reason="the published trace is not part of a checkout")
def test_the_published_trace_is_parsed_completely() -> None:
    """It has 12,031 requests, 182,790 distinct ids and 36.64 % repeated blocks; the token bound is within a point."""
    with REAL_TRACE.open() as lines:
        requests = parse_trace(lines)
    n_blocks = sum(len(request.hash_ids) for request in requests)
    n_distinct = len({hash_id for request in requests for hash_id in request.hash_ids})
    assert (len(requests), n_distinct) == (12_031, 182_790)
    assert round(1 - n_distinct / n_blocks, 4) == 0.3664
    assert infinite_cache_hit_share(requests, 512) == pytest.approx(0.3664, abs=0.01)
