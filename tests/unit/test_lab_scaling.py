"""Fleets of the laboratory that follow their own signals, and plans with other numbers of engines."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from streams.cli import cli
from streams.core.ids import DpRank, RankId, WorkerId
from streams.core.routing.saturation import PoolSignals
from streams.errors import SettingsError
from streams.lab.simulation.experiment import load_workload
from streams.lab.simulation.fleet import FleetConfig
from streams.lab.simulation.lab_engine_config import default_engine
from streams.lab.simulation.scaling import Autoscaler, MeteredRun, Reading, ScaledFleet, follow, with_engines
from streams.lab.simulation.workload import Workload
from streams.settings import Settings
from tests.helpers.pages import blocks_of

#: An eighth of the reference engine: a run needs few requests to keep some of them busy.
ENGINE = default_engine().slowed(8.0)

#: Minutes in which requests come so many times as often: the load doubles within eight minutes, and halves again.
RAMP = [1.0 + step / 8.0 for step in range(1, 8)]
LOADS = [1.0] * 5 + RAMP + [2.0] * 5 + RAMP[::-1] + [1.0] * 10
MINUTE_MS = 60_000.0

RULES = Autoscaler(Settings().scale_saturation_target)


def wave(per_s: float, kind: str = "cold:prompt=3000:output=100") -> Workload:
    """Requests that come as often as LOADS says, times `per_s`."""
    workload = load_workload(f"{kind}:requests={int(per_s * 60 * sum(LOADS))}:rate={per_s}", ENGINE, 1)
    due_ms = np.concatenate([[0.0], np.cumsum(LOADS)]) * MINUTE_MS
    return replace(workload, at_ms=np.interp(workload.at_ms, due_ms, np.arange(len(due_ms)) * MINUTE_MS))


def ttft_of_minutes(run: MeteredRun) -> list[float]:
    """The mean time to the first token of each minute's requests, in ms."""
    result = run.result
    minute = (result.arrived_ms // MINUTE_MS).astype(int)
    return [float(result.ttft_ms[minute == number].mean()) for number in range(len(LOADS))]


def check_followed(policy: str, per_s: float, n_first: int, limit_ms: float) -> None:
    """A fleet that follows what is wanted keeps the limit, without flapping; one that does not grow misses it."""
    workload, config = wave(per_s), FleetConfig(ENGINE, 10 * n_first)
    followed = follow(workload, config, policy, RULES, n_first)
    minutes = ttft_of_minutes(followed)
    assert max(minutes[3:]) < limit_ms, minutes  # before that, it learns how fast the engines are
    replicas = [reading.replicas for reading in followed.readings]
    of_minute = [replicas[30 * number] for number in range(len(LOADS))]
    peak = max(replicas)
    assert 1.5 * of_minute[5] <= peak <= 2.5 * of_minute[5]
    assert of_minute[-1] <= 0.7 * peak
    grows = [after > before for before, after in itertools.pairwise(of_minute[5:]) if after != before]
    assert grows == sorted(grows, reverse=True), of_minute  # it grows, and then it shrinks
    fixed = with_engines(workload, config, policy, n_first)
    assert fixed.figures.mean_ttft_ms > limit_ms


@pytest.mark.first_ring
def test_a_fleet_that_follows_its_signals_keeps_its_time_to_the_first_token() -> None:
    """While the load doubles and halves. The same fleet without an autoscaler has a backlog of many seconds."""
    check_followed("expected-time", 2.2, 2, 2000.0)


def reading(at_ms: float, replicas: int, saturation: float) -> Reading:
    """A reading of a pool that has this share of compute alone."""
    return Reading(at_ms, replicas, PoolSignals(saturation, None, None, 0.0))


def test_the_autoscaler_has_the_rules_of_kubernetes() -> None:
    """It ignores less than a tenth, adds what starts later, and removes what was not wanted for five minutes."""
    ranks = [RankId(WorkerId(number), DpRank(0)) for number in range(1, 21)]
    fleet = ScaledFleet(Autoscaler(0.5, start_ms=60_000.0), ranks, 4)
    assert len(fleet.follow(Reading(0.0, 4, None))) == 4
    assert len(fleet.follow(reading(0.0, 4, 0.54))) == 4  # 8 % more than the target
    assert len(fleet.follow(reading(15_000.0, 4, 0.7))) == 4  # 5.6 are wanted, so two engines start
    assert len(fleet.follow(reading(60_000.0, 4, 0.7))) == 4
    assert len(fleet.follow(reading(75_000.0, 4, 0.5))) == 6
    assert len(fleet.follow(reading(330_000.0, 6, 0.25))) == 6  # 3 are wanted now, but 6 were within five minutes
    assert len(fleet.follow(reading(390_000.0, 6, 0.25))) == 3
    assert len(fleet.follow(reading(700_000.0, 3, 0.25))) == 2


def test_a_fleet_without_engines_left_is_refused() -> None:
    """A run with too few of them would say nothing about the signals."""
    fleet = ScaledFleet(Autoscaler(0.5), [RankId(WorkerId(1), DpRank(0))], 1)
    with pytest.raises(SettingsError, match="no engine left"):
        fleet.follow(reading(0.0, 1, 1.0))


def test_a_plan_prices_each_number_of_engines(tmp_path: Path) -> None:
    """More engines answer sooner and cost more; the last sentence names the fewest that keep the limit."""
    figures = tmp_path / "figures.json"
    trace = ("uniform:requests=300:rate=12", "--engines", "2,1,2", "--price", "3")
    arguments = ["plan", *trace, "--ttft-limit-ms", "100000", "--json", str(figures)]
    done = CliRunner().invoke(cli, arguments, catch_exceptions=False)
    assert done.exit_code == 0
    assert "1 engine is the fewest of these" in done.output
    found = json.loads(figures.read_text())
    one, two = found["rows"]
    assert (one["engines"], two["engines"], found["policy"]) == (1, 2, "expected-time")
    assert one["mean_ttft_ms"] > two["mean_ttft_ms"]
    assert one["saturation"] > 1.5 * two["saturation"] > 0.0
    assert two["cost"] == pytest.approx(2 * one["cost"], abs=2e-4) and one["cost"] > 0.0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["uniform"], "does not say how many engines"),
        (["uniform", "--engines", "two"], "is not a list of numbers"),
        (["uniform", "--engines", "0,1"], "a number that is not from 1 to 10,000"),
        (["uniform", "--engines", "1,99999999999999999999"], "a number that is not from 1 to 10,000"),
        (["uniform", "--engines", "1", "--price", "nan"], "--price nan is not a number from 0 on"),
        (["uniform", "--engines", "1", "--ttft-limit-ms", "-1"], "--ttft-limit-ms -1 is not"),
        (["uniform", "--engines", "1", "--policy", "other"], "there is no policy"),
        (["no-trace", "--engines", "1"], "neither a file nor one of the generators"),
    ],
)
def test_a_plan_that_cannot_be_made_is_refused(arguments: list[str], said: str) -> None:
    """Before anything runs."""
    done = CliRunner().invoke(cli, ["plan", *arguments])
    assert done.exit_code == 1
    assert said in str(done.exception)


def test_the_page_shows_what_its_commands_print() -> None:
    """The example of docs/scaling.md that needs no Kafka is run, and its output is what the page has below it."""
    found = blocks_of("docs/scaling.md")
    (at,) = (number for number, (_, _, code) in enumerate(found) if code.startswith("kvstreams plan uniform"))
    done = CliRunner().invoke(cli, found[at][2].split()[1:], catch_exceptions=False)
    # Slow machines also get lines about the progress, in stderr.
    assert [line.split() for line in done.stdout.splitlines()] == [
        line.split() for line in found[at + 1][2].splitlines()
    ]
