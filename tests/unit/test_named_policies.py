"""Policies that are found by name: Dynamo's cost, those of other projects, and those of installed packages."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import numpy as np
import pytest

from streams.core.ids import DpRank, RankId, WorkerId
from streams.core.loads.bookings import ActiveLoads, Booking, BookingId
from streams.core.routing.policies.interface import NO_CLASSES, Policy, Situation
from streams.errors import SettingsError
from streams.lab.simulation.peers import POLICIES, find_policy, policy_names
from tests.helpers.pages import block_of

ROOT = Path(__file__).parents[2]
RANKS = tuple(RankId(WorkerId(number), DpRank(0)) for number in (1, 2, 3))
BLOCK = 64


def chain(*names: int) -> bytes:
    return np.array(names, dtype=np.uint64).tobytes()


def situation(cached: tuple[int, ...] = (0, 4, 8), host: tuple[int, ...] = (0, 0, 0)) -> Situation:
    """A request of 10 blocks. Rank 1 has a request of 640 tokens to compute, rank 3 one that shares 2 blocks."""
    loads = ActiveLoads(60_000)
    loads.add(BookingId("a", "r", 0), Booking(RANKS[0], "m", 640, chain(*range(100, 110)), 0, 10), 0)
    loads.add(BookingId("b", "r", 1), Booking(RANKS[2], "m", 128, chain(0, 1, 50, 51), 2, 4), 0)
    device, below = np.array(cached, dtype=np.float64), np.array(host, dtype=np.float64)
    return Situation(
        ranks=RANKS,
        rows=loads.rows_of(RANKS),
        loads=loads,
        scores=(device + below).astype(np.int64),
        held=lambda tiers, _pool, _classes=NO_CLASSES: tiers[0] * device + tiers[1] * below,
        sequence=chain(*range(10)),
        shared=loads.shared_blocks(chain(*range(10))),
        request_blocks=10,
        n_tokens=10 * BLOCK,
        block_size=BLOCK,
        now_ms=0.0,
    )


def costs(policy: Policy, given: Situation) -> list[float]:
    prices = policy.price(given)
    assert prices.terms.shape == (len(prices.names), len(RANKS))
    values: list[float] = prices.costs.tolist()
    return values


def test_the_cost_of_dynamo_by_default() -> None:
    """Prefill blocks there and here less the overlap, plus the blocks in use with the request."""
    # Rank 1: 10 + 10 - 0 blocks to compute, 10 + 10 in use. Rank 2: 10 - 4, 10. Rank 3: 2 + 10 - 8, 4 + 10 - 2.
    assert costs(find_policy("dynamo-default"), situation()) == [40.0, 16.0, 16.0]


def test_the_presets_of_dynamo() -> None:
    """Credit, scale and request weight of its preset for agents; adjusted prefill is never below 0."""
    # Rank 1: 4 * 20 + 20 + 64. Rank 2: 4 * (10 - 8) + 10. Rank 3: 4 * max(0, 12 - 16) + 12 + 64.
    assert costs(find_policy("dynamo-agentic"), situation()) == [164.0, 18.0, 76.0]
    tuned = find_policy("dynamo-default", {"credit": 2.55, "scale": 23.9, "request_weight": 278.0})
    assert costs(tuned, situation()) == costs(find_policy("dynamo-tuned"), situation())


def test_the_credit_of_dynamo_decays_with_excess_prefill() -> None:
    """Excess prefill of as many blocks as the request has halves the credit."""
    given = situation(cached=(8, 0, 0))
    assert costs(find_policy("dynamo-default"), given)[0] == 20.0 - 8.0 + 20.0
    assert costs(find_policy("dynamo-default", {"credit_decay": 1.0}), given)[0] == 20.0 - 4.0 + 20.0


def test_slower_tiers_have_weights_of_their_own() -> None:
    """Host blocks take off three quarters, and are charged for the rest in the booking."""
    prices = find_policy("dynamo-default").price(situation(cached=(0, 0, 0), host=(0, 4, 0)))
    assert prices.costs.tolist()[1] == 10.0 - 3.0 + 10.0
    assert prices.cached_blocks.tolist()[1] == 3.0


def test_the_product_of_lmetric() -> None:
    """Tokens to compute, times requests including this one."""
    assert costs(find_policy("lmetric"), situation()) == [1280.0 * 2, 384.0, (128.0 + 128.0) * 2]


def test_the_affinity_filter_of_llm_d() -> None:
    """A rank with enough of the prompt wins although it is busier, unless it is much busier."""
    given = situation(cached=(8, 0, 0))
    assert int(np.argmin(costs(find_policy("llm-d-affinity"), given))) == 0
    assert int(np.argmin(costs(find_policy("llm-d-affinity", {"penalty_tokens": 100.0}), given))) == 1
    assert int(np.argmin(costs(find_policy("llm-d-affinity", {"threshold": 0.9}), given))) == 1


@pytest.mark.parametrize("name", ["dynamo-default", "dynamo-tuned", "lmetric", "llm-d-affinity"])
@pytest.mark.parametrize("parameters", [{"no_such": 1.0}, {"credit": float("nan")}, {"threshold": -1.0}])
def test_wrong_parameters_are_refused(name: str, parameters: dict[str, float]) -> None:
    """The error names the parameter."""
    with pytest.raises(SettingsError, match=next(iter(parameters))):
        find_policy(name, parameters)


def test_an_unknown_name_is_refused_with_those_that_exist() -> None:
    """The error lists the policies."""
    with pytest.raises(SettingsError, match="dynamo-agentic"):
        find_policy("no-such-policy")
    assert {"lmetric", "llm-d-affinity", "dynamo-default"} <= set(policy_names())


def test_policies_of_the_laboratory_are_entry_points_of_the_distribution() -> None:
    """A live router finds them as it finds those of other packages, by the names that the laboratory has for them."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["kvstreams.policies"]
    assert {name: EntryPoint(name, target, "").load() for name, target in declared.items()} == dict(POLICIES)


def test_the_example_package_is_found_by_its_entry_point(tmp_path: Path) -> None:
    """Installed next to kvstreams, its policy runs by name, with a parameter."""
    package = ROOT / "examples" / "routing_policy"
    # What an installer writes for it: the module, and the entry points of its metadata.
    metadata = tmp_path / "kvstreams_longest_prefix-0.1.0.dist-info"
    metadata.mkdir()
    (tmp_path / "longest_prefix.py").write_text((package / "longest_prefix.py").read_text())
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: kvstreams-longest-prefix\nVersion: 0.1.0\n")
    (metadata / "entry_points.txt").write_text("[kvstreams.policies]\nlongest-prefix = longest_prefix:make\n")
    assert 'longest-prefix = "longest_prefix:make"' in (package / "pyproject.toml").read_text()
    install, simulate = map(shlex.split, block_of("docs/quality.md", "pip install ./examples").splitlines())
    assert (ROOT / install[-1]).samefile(package)
    file = tmp_path / "rows.json"
    arguments = [*simulate[2:], "--workers", "2", "--concurrency", "4"]
    arguments[0] += ":requests=60:prefixes=6"
    subprocess.run(
        [sys.executable, "-m", "streams.cli", "simulate", *arguments, "--json", str(file)],
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"},
        check=True,
        capture_output=True,
        timeout=120,
    )
    rows = {row["policy"]: row for row in json.loads(file.read_text())["rows"]}
    assert set(rows) == {"kv", "longest-prefix", "longest-prefix:blocks_per_request=10"}
    assert rows["longest-prefix"]["reuse"] > 0.2
