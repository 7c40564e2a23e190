"""Comparing modes on a live fleet: who is routed by which mode, and what follows from the measurements."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

from streams.errors import SettingsError
from streams.lab.compare.estimates import ComparedRequest, complete_rounds, evaluate
from streams.lab.compare.plan import make_plan
from streams.lab.compare.report import NotPlanned, in_words, left_out_in_words, report, warnings
from streams.lab.compare.traffic import Measured, TrafficConfig
from streams.lab.compare.variants import Variant, parse_variants

TWO = [Variant("first"), Variant("second")]


def samples(
    times: dict[tuple[int, int], list[float]], cached: tuple[int, int] = (50, 50), workers: tuple[int, ...] = (1, 2)
) -> list[ComparedRequest]:
    """Samples by round and mode; prompts of 100 tokens, of which each mode finds so many."""
    return [
        ComparedRequest(round_, variant, workers[number % len(workers)], ttft_ms, 100, cached[variant], 10)
        for (round_, variant), block in times.items()
        for number, ttft_ms in enumerate(block)
    ]


def test_every_round_has_each_mode_once_and_orders_differ() -> None:
    """Each block has one mode, each round all of them, and no mode is always first."""
    plan = make_plan(3 * 10 * 20, 3, block_requests=10, washout_requests=4, rng=random.Random(5))
    assert len(plan.orders) == 20
    assert plan.n_requests == 600
    turns = [plan.turn(number) for number in range(plan.n_requests)]
    assert Counter((each.round, each.variant) for each in turns) == {
        (round_, variant): 10 for round_ in range(20) for variant in range(3)
    }
    assert [each.counts for each in turns[10:20]] == [False] * 4 + [True] * 6
    assert len({order[0] for order in plan.orders}) == 3
    for first in range(0, 600, 10):
        assert len({each.variant for each in turns[first : first + 10]}) == 1


@pytest.mark.parametrize(("n", "block", "washout"), [(39, 10, 2), (40, 10, 10), (40, 10, -1)])
def test_a_plan_that_cannot_be_evaluated_is_refused(n: int, block: int, washout: int) -> None:
    """Fewer than two rounds, or blocks of which nothing counts, are an error; two rounds are not."""
    make_plan(40, 2, 10, 2, random.Random(1))
    with pytest.raises(SettingsError):
        make_plan(n, 2, block, washout, random.Random(1))


def test_modes_are_read_from_their_names() -> None:
    """A mode may have a name, fields of the override, a queue, and a router of its own."""
    plain, named = parse_variants(["expected-time", "dynamo=policy:router_temperature=0.5+queue@http://r2:8000"])
    assert (plain.name, plain.override, plain.options, plain.url) == (
        "expected-time",
        {"router_mode": "expected-time"},
        {},
        None,
    )
    assert (named.name, named.url, named.options) == ("dynamo", "http://r2:8000", {"queue": "on"})
    assert named.override == {"router_mode": "policy", "router_temperature": 0.5}
    fields = parse_variants(["kv:track_active_blocks=false", "kv:overlap_score_weight=2"])
    assert [each.name for each in fields] == ["kv:track_active_blocks=false", "kv:overlap_score_weight=2"]
    assert fields[0].override["track_active_blocks"] is False


@pytest.mark.parametrize(
    "texts", [["kv"], ["kv", "kv"], ["kv", "=kv"], ["kv", "kv@"], ["kv", "kv:"], ["kv", "kv:x"], ["kv"] * 9]
)
def test_modes_that_cannot_be_compared_are_refused(texts: list[str]) -> None:
    """A single mode, two of one name, and what is not in the syntax are errors."""
    with pytest.raises(SettingsError):
        parse_variants(texts)


def test_figures_are_those_of_the_samples() -> None:
    """Means, percentiles, hit shares and balance of each mode, and how they compare with the first mode's."""
    found = samples(
        {(0, 0): [100.0, 200.0], (0, 1): [50.0, 150.0], (1, 0): [300.0, 400.0], (1, 1): [150.0, 250.0]}, (20, 70)
    )
    outcome = evaluate(found, 2, [1, 2, 3, 4], np.random.default_rng(1))
    first, second = outcome.values
    assert first["ttft_ms_mean"].value == 250.0
    assert (first["ttft_ms_p50"].value, first["ttft_ms_p95"].value) == (200.0, 400.0)
    assert (first["hit_share"].value, second["hit_share"].value) == (0.2, 0.7)
    assert first["balance"].value == 2.0  # two of four workers have all the work, in equal parts
    [against] = outcome.against
    assert against["ttft_ms_mean"].value == 0.6
    assert against["hit_share"].value == pytest.approx(0.5)
    assert first["ttft_ms_mean"].low == 150.0
    assert first["ttft_ms_mean"].high == 350.0


def test_what_changes_between_rounds_does_not_widen_the_comparison() -> None:
    """A ratio that is the same in every round has an interval without width, whatever the rounds' own times are."""
    times = {(round_, v): [100.0 * (1 + round_) * (1.0, 0.8)[v]] * 5 for round_ in range(10) for v in range(2)}
    outcome = evaluate(samples(times), 2, [1, 2], np.random.default_rng(1))
    ratio, own = outcome.against[0]["ttft_ms_mean"], outcome.values[0]["ttft_ms_mean"]
    assert (ratio.low, ratio.value, ratio.high) == pytest.approx((0.8, 0.8, 0.8))
    assert own.high > 1.2 * own.low


def test_a_round_that_lacks_a_mode_is_not_used() -> None:
    """A comparison that ended early, in the middle of a round, uses the complete rounds."""
    found = samples({(0, 0): [100.0], (0, 1): [50.0], (1, 0): [100_000.0]})
    assert complete_rounds(found, 2) == [0]
    assert evaluate(found, 2, [1], np.random.default_rng(1)).values[0]["ttft_ms_mean"].value == 100.0


def test_intervals_contain_the_truth_about_as_often_as_they_say() -> None:
    """With blocks that differ much from each other, 95 % intervals of the ratio contain 1 in most repetitions.

    Intervals from single requests would contain it in fewer than a third of them.
    """
    rng = np.random.default_rng(7)
    n_found = n_naive = 0
    repetitions = 200
    for _ in range(repetitions):
        times = {
            (round_, variant): (100.0 * rng.lognormal(0.0, 0.3) * rng.lognormal(0.0, 0.2, 40)).tolist()
            for round_ in range(12)
            for variant in range(2)
        }
        ratio = evaluate(samples(times), 2, [1, 2], rng, draws=200).against[0]["ttft_ms_mean"]
        n_found += ratio.low <= 1.0 <= ratio.high
        first, second = (
            np.array([t for (_, v), block in times.items() if v == mode for t in block]) for mode in (0, 1)
        )
        error = 1.96 * np.sqrt(
            first.var() / first.size / first.mean() ** 2 + second.var() / second.size / second.mean() ** 2
        )
        n_naive += abs(np.log(second.mean() / first.mean())) <= error
    assert 0.84 * repetitions <= n_found
    assert n_naive <= 0.5 * repetitions


def test_the_report_says_what_limits_it() -> None:
    """Few rounds, a short wash-out, failures, silent engines and a fleet that is too slow are named."""
    plan = make_plan(400, 2, 50, 10, random.Random(1))
    assert warnings(TWO, plan, Measured(n_ended=400, in_flight_max=10), n_rounds=8) == []
    measured = Measured(n_ended=400, n_unreported=1, n_held_back=3, in_flight_max=11)
    measured.failures[1, "broken"] = 5
    found = warnings(TWO, plan, measured, n_rounds=4)
    assert len(found) == 5
    for part, text in zip(("4 rounds", "11 requests", "broken", "cached", "3 requests"), found, strict=True):
        assert part in text


def test_differences_are_put_in_words() -> None:
    """A figure whose interval excludes equality is named with its interval, the others as not shown to differ."""
    times = {(round_, v): [100.0 * (1.0, 0.8)[v]] * 5 for round_ in range(10) for v in range(2)}
    outcome = evaluate(samples(times, (20, 70)), 2, [1, 2], np.random.default_rng(1))
    text = "\n".join(in_words(TWO, outcome))
    assert "second against first: ttft ms mean 0.800 times as high (0.800 to 0.800)" in text
    assert "hit share +50.0 points (+50.0 to +50.0)" in text
    # The first mode computes 80 tokens and an answer of 10 for each request, on two of two workers.
    assert "no difference is shown in balance" in text


def test_each_request_that_is_not_in_the_figures_has_one_reason() -> None:
    """Requests of the figures and those that are left out are together those of the trace, by mode and in all."""
    plan = make_plan(60, 2, 10, 2, random.Random(1))
    times = {(round_, v): [100.0] * 8 for round_ in range(2) for v in range(2)}
    del times[1, 1]  # Ctrl-C came in the last block
    measured = Measured(samples(times), n_ended=35)
    measured.washout.update({0: 4, 1: 4})
    measured.failures.update({(1, "broken"): 2, (1, "refused"): 1})
    outcome = evaluate(measured.samples, 2, [1, 2], np.random.default_rng(1))
    found = report(TWO, plan, TrafficConfig([]), measured, outcome, NotPlanned(prompt_too_long=5, no_whole_round=7))
    assert [(row["requests"], row["left_out"]) for row in found["rows"]] == [
        (8, {"washout": 4, "failed": 0, "incomplete_round": 8}),
        (8, {"washout": 4, "failed": 3, "incomplete_round": 0}),
    ]
    assert found["left_out"] == {
        "washout": 8,
        "failed": 3,
        "incomplete_round": 8,
        "ended_early": 60 - 35,
        "no_whole_round": 7,
        "prompt_too_long": 5,
    }
    assert sum(row["requests"] for row in found["rows"]) + sum(found["left_out"].values()) == 60 + 7 + 5
    sentence = left_out_in_words(found["left_out"])
    assert sentence is not None and "8 in wash-outs, 3 that failed" in sentence and "5 with prompts" in sentence
    assert left_out_in_words(dict.fromkeys(found["left_out"], 0)) is None
