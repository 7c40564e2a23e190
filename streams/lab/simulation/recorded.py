"""Replaying recorded decisions: what other policies would have chosen in the same situations.

What lives here: a laboratory router that sends each request where it went in reality, and asks other policies what they
would have chosen. What must not: reading the log, and output.

In a run with a policy of its own, every choice changes the situation of the next one, and ranks with the same content
have no identity: comparing such choices with the recorded ones says little. So the share of changed decisions is taken
from a run that follows the record, in which caches and loads are those that the recorded choices cause. Reuse and times
to the first token are taken from runs in which each policy decides for itself.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from streams.core.ids import RankId
from streams.core.routing.decision import Decision
from streams.core.routing.policies.interface import Policy
from streams.core.routing.request import RoutePolicy
from streams.core.routing.selection import Rng, RouterMode
from streams.lab.simulation.experiment import MODES, WITH_QUEUE, Row, check_policy, split_name
from streams.lab.simulation.fleet import FleetConfig, run
from streams.lab.simulation.peers import find_policy, policy_names
from streams.lab.simulation.router import LabRouter, RoutedRequest
from streams.lab.simulation.workload import Workload

#: The name of the run that follows the record.
RECORDED = "as recorded"

#: Modes that do not choose by cost: a decision changes if they take another rank.
_WITHOUT_COSTS = (RouterMode.ROUND_ROBIN, RouterMode.RANDOM, RouterMode.LEAST_LOADED, RouterMode.POWER_OF_TWO)


@dataclass(frozen=True, slots=True)
class Replay:
    """The run that follows the record, and the share of decisions that each policy would have changed."""

    row: Row
    changed: dict[str, float]


class RecordedRouter(LabRouter):
    """Sends request number i to `chosen[i]`, and counts which policies would have chosen another rank there."""

    def __init__(self, config: FleetConfig, chosen: Sequence[int], policies: Sequence[str], by: str, rng: Rng) -> None:
        """chosen: number of the engine of each request. policies: names. by: the policy that made the decisions.

        That policy books the requests as it did, with its forecasts. Other modes book as mode kv does.
        """
        super().__init__(
            config.n_workers,
            config.engine.block_size,
            config.engine.n_blocks,
            RoutePolicy(mode=RouterMode.POLICY, name=by) if by in policy_names() else RoutePolicy(),
            rng,
            _policy_of,
        )
        self._recorded = chosen
        self._single: list[tuple[RankId, ...]] = [(rank,) for rank in self.ranks]
        self._others = {name: _route_policy(name) for name in policies}
        self.n_decisions = 0
        self.n_changed = dict.fromkeys(policies, 0)

    def _choose(self, request: RoutedRequest, now_ms: float) -> Decision:
        number = self._recorded[request.number]
        routing = self._routing_request(request, self._policy, now_ms)
        of_all = routing.matches._replace(ranks=self.ranks)
        self.n_decisions += 1
        for name, policy in self._others.items():
            decision = self._chooser.choose(routing._replace(policy=policy, matches=of_all), self.loads)
            if policy.mode in _WITHOUT_COSTS:
                changed = decision.index != number
            else:  # of equally cheap ranks, any could have been drawn
                changed = bool(decision.columns.cost[number] > decision.columns.cost.min())
            self.n_changed[name] += changed
        of_one = routing.matches._replace(ranks=self._single[number])
        return self._chooser.choose(routing._replace(matches=of_one), self.loads)


def _policy_of(name: str) -> Policy:
    return find_policy(*split_name(name))


def _route_policy(text: str) -> RoutePolicy:
    """The policy of a name that `run_policy` takes, without its queue."""
    name = text.removesuffix(WITH_QUEUE)
    check_policy(name)
    if split_name(name)[0] in {str(mode) for mode in MODES}:
        return RoutePolicy(mode=RouterMode(name))
    return RoutePolicy(mode=RouterMode.POLICY, name=name)


def replay(
    workload: Workload,
    config: FleetConfig,
    chosen: Sequence[int],
    policies: Sequence[str],
    *,
    by: str = "",
    seed: int = 1,
    on_progress: Callable[[int], None] | None = None,
) -> Replay:
    """Follow recorded decisions. chosen: number of the engine of each request of the workload, in its order.

    policies, by: as for RecordedRouter. Raises SettingsError.
    """
    router = RecordedRouter(config, chosen, policies, by, random.Random(seed))
    started = time.perf_counter()
    result = run(workload, config, router, on_progress)
    row = Row(RECORDED, config.concurrency, config.speedup, result.figures(), result, time.perf_counter() - started)
    return Replay(row, {name: n / max(1, router.n_decisions) for name, n in router.n_changed.items()})
