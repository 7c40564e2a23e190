"""What a router counts about its decisions: by mode and reason, and by worker how much of the prompts was cached there.

What lives here: the counts, and the share of cached blocks over the last minutes. What must not: metrics' names
(metrics), clocks (times are arguments), and how a decision is made (router).

`note` runs for every decision. Everything else runs when someone looks.

State: the counts of one router.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Mapping

from streams.core.ids import WorkerId
from streams.core.routing.selection import RouterMode
from streams.core.routing.trust import AnswerMode, DegradedReason, Trust
from streams.process.metrics import OTHER, VALUES_MAX, Distribution

#: Steps of the window over which `hit_rates` is computed, and their length: 5 minutes, as exact as a scrape needs it.
WINDOW_STEPS = 10
WINDOW_STEP_S = 30.0

#: Parts into which the share of cached blocks is divided, as upper bounds.
_HIT_RATIO_PARTS = 10


class WorkerCounts:
    """What was decided for one worker since the router started. blocks, hit_blocks: see `DecisionCounts.note`."""

    __slots__ = ("blocks", "decisions", "hit_blocks")

    def __init__(self) -> None:
        self.decisions = 0
        self.blocks = 0
        self.hit_blocks = 0


class DecisionCounts:
    """Owner of these counts. Used on the thread that decides.

    answers, chosen_modes: decisions by the least trust in all eligible ranks, and by that in the chosen one. by_reason:
    decisions by router mode, answer mode, and the reason if the answer is degraded. hit_ratio: shares of
    the prompts' blocks that the chosen rank had. by_worker: at most VALUES_MAX workers; decisions for further ones are
    counted together under OTHER.
    """

    def __init__(self) -> None:
        self.answers: Counter[AnswerMode] = Counter()
        self.chosen_modes: Counter[AnswerMode] = Counter()
        self.by_reason: Counter[tuple[RouterMode, AnswerMode, DegradedReason | None]] = Counter()
        self.hit_ratio = Distribution(*(part / _HIT_RATIO_PARTS for part in range(_HIT_RATIO_PARTS + 1)))
        self.by_worker: dict[WorkerId | str, WorkerCounts] = {}
        self.blocks = 0
        self.hit_blocks = 0
        # Blocks and hits of each worker at the beginnings of the window's steps, the oldest first.
        self._steps: deque[dict[WorkerId | str, tuple[int, int]]] = deque(maxlen=WINDOW_STEPS)
        self._step_ends_s = 0.0

    def note(
        self,
        mode: RouterMode,
        worker_id: WorkerId,
        hit_blocks: int,
        blocks: int,
        trust: Trust,
        chosen_trust: Trust,
        *,
        reads_index: bool,
    ) -> None:
        """Count a decision. trust: in all eligible ranks. chosen_trust: in the chosen one.

        blocks: the prompt's length in blocks. hit_blocks: its leading blocks that the chosen rank had. Both are left
        out if the index was not read, because then nothing is known about them.
        """
        self.answers[trust.mode] += 1
        self.chosen_modes[chosen_trust.mode] += 1
        self.by_reason[mode, trust.mode, trust.reason] += 1
        counts = self.by_worker.get(worker_id)
        if counts is None:
            counts = self._new(worker_id)
        counts.decisions += 1
        if reads_index and blocks:
            counts.blocks += blocks
            counts.hit_blocks += hit_blocks
            self.blocks += blocks
            self.hit_blocks += hit_blocks
            self.hit_ratio.counts[-(-_HIT_RATIO_PARTS * hit_blocks // blocks)] += 1  # the bucket, in whole numbers
            self.hit_ratio.total += hit_blocks / blocks

    def _new(self, worker_id: WorkerId) -> WorkerCounts:
        known = len(self.by_worker) - (OTHER in self.by_worker)
        return self.by_worker.setdefault(worker_id if known < VALUES_MAX else OTHER, WorkerCounts())

    def roll(self, now_s: float, registered: Collection[WorkerId]) -> None:
        """Begin a new step of the window if the last one is over, and forget workers that are not registered any more.

        now_s: monotonic. Call it every few seconds; more often changes nothing.
        """
        if now_s < self._step_ends_s:
            return
        self._step_ends_s = now_s + WINDOW_STEP_S
        for worker_id in [known_id for known_id in self.by_worker if known_id != OTHER and known_id not in registered]:
            del self.by_worker[worker_id]
        self._steps.append(
            {worker_id: (counts.blocks, counts.hit_blocks) for worker_id, counts in self.by_worker.items()}
        )

    def hit_rates(self) -> Mapping[WorkerId | str, float]:
        """The share of the prompts' blocks that each worker had, over the window; only of workers that got prompts."""
        before = self._steps[0] if self._steps else {}
        rates = {}
        for worker_id, counts in self.by_worker.items():
            blocks, hits = before.get(worker_id, (0, 0))
            if counts.blocks > blocks:
                rates[worker_id] = (counts.hit_blocks - hits) / (counts.blocks - blocks)
        return rates
