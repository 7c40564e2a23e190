"""Probing, in the background, whether engines make the same tokens of prompts as this process.

What lives here: which workers are due for a probe, the calls of a probe, its limits, the report to a router, the
warning in the log, and by which rules a model's prompts are rendered from then on. What must not: the prompts and their
comparison (parity), and anything that a request waits for.

A worker is probed when the registry shows it for the first time, and again as another engine: with another URL, model
or incarnation. A front that has no files of the model's tokenizer has nothing to compare, and reports that.

State: the workers that were probed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import orjson

from streams.client.plain_http import PlainHttp
from streams.core.workers import RenderOutcome, RenderPart, RenderReason, RenderResult
from streams.errors import InvalidRequest, KvStreamsError
from streams.prompts.conversation import NEWEST, Rule
from streams.prompts.engine_keys import KeyOf
from streams.prompts.engine_tokens import LACKING, EngineTokens, TokensAnswer
from streams.prompts.parity import NOT_OF_TOKENIZE, PROMPTS, Comparison, TokensByPart, compare_by_rules
from streams.prompts.tokenizing import Tokenizing, TokenizingFailed

log = logging.getLogger(__name__)

#: Probes that run at a time. Each makes some thirty short calls of its engine, one after the other.
PROBES_AT_ONCE = 4

#: Probes that run or wait. The registry is read again every few seconds, and offers the other workers then.
PENDING_MAX = 256

#: Time for one probe. An engine that loads its model may hold connections for longer, and is asked again.
PROBE_TIMEOUT_S = 10.0

#: Connections are kept for the calls of one probe.
KEEPALIVE_S = 5.0

#: Pause after a probe without a result, doubled each time up to the second value.
RETRY_S_MIN, RETRY_S_MAX = 10.0, 600.0

#: A result that the registry does not have after this time is reported again, after another probe: it was lost.
LOST_AFTER_S = 30.0

#: Workers whose results are kept. Those beyond it are not probed.
WORKERS_MAX = 65_536

#: Bytes of an engine's answer to a probe prompt, which has some hundred tokens.
ANSWER_BYTES_MAX = 1 << 20

#: Differences that are logged, each once. A fleet with more of them has been told often enough by then.
WARNINGS_MAX = 64

#: Results after which the worker is probed again, since they may pass.
_MAY_PASS = (RenderReason.ENGINE_FAILED, RenderReason.FRONT_FAILED)


@dataclass(frozen=True, slots=True)
class _Target:
    """The engine that a worker is. incarnation: None if the routers know no events of it."""

    url: str
    model: str
    incarnation: int | None


@dataclass(slots=True)
class _Worker:
    """What this front knows of one worker. due_s: when it is to be probed; None if that is done. done_s: since when.

    outcome: of its last comparison. rules: by which its engine renders; None if that is not known, or by no known ones.
    """

    target: _Target
    outcome: RenderOutcome | None = None
    rules: Rule | None = None
    due_s: float | None = float("-inf")
    done_s: float = 0.0
    n_failed: int = 0
    task: asyncio.Task[None] | None = field(default=None, compare=False)


def _body(model: str, part: RenderPart) -> bytes:
    return orjson.dumps({"model": model, **PROMPTS[part][1]})


def _target(row: Mapping[str, Any]) -> _Target:
    return _Target(row["url"], row["model"], row["incarnation"])


class _NoTokenize(Exception):
    """The engine has no /tokenize."""


class _EngineFailed(Exception):
    """The engine answered with an error that is not about the prompt."""


#: Reports the result of a probe to a router: the worker, and the body of `PUT /workers/{id}/render`.
Report = Callable[[int, dict[str, Any]], Awaitable[object]]


class ParityProbes:
    """The probes of one process. Used on one loop. outcomes: probes by their result."""

    def __init__(
        self,
        report: Report,
        tokenizing: Tokenizing,
        key_of: KeyOf,
        process: str = "front",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """key_of: the API key of a model's engines. process: what the registry calls this process."""
        self._report_to_router = report
        self.outcomes: Counter[RenderOutcome] = Counter()
        self._tokenizing = tokenizing
        self._key_of = key_of
        # Apart from the connections of requests.
        self._http = PlainHttp(keepalive_s=KEEPALIVE_S, connect_timeout_s=PROBE_TIMEOUT_S)
        self._engine_tokens = EngineTokens(PROBE_TIMEOUT_S, ANSWER_BYTES_MAX, clock)
        self._clock = clock
        self._name = f"{process} {os.uname().nodename}:{os.getpid()}"  # for people who look at the registry
        self._workers: dict[int, _Worker] = {}
        self._turns = asyncio.Semaphore(PROBES_AT_ONCE)
        self._tasks: set[asyncio.Task[None]] = set()
        self._warned: set[tuple[str, RenderPart | None]] = set()

    def __len__(self) -> int:
        """Probes that run or wait."""
        return len(self._tasks)

    def note(self, rows: Iterable[dict[str, Any]]) -> None:
        """Take the workers of the registry, as `GET /workers` returns them, and probe those that are due."""
        now_s = self._clock()
        workers: dict[int, _Worker] = {}
        for row in rows:
            # Routers of an earlier version show no parity, and have no call to report it.
            if "render" not in row or not row["url"] or len(workers) >= WORKERS_MAX:
                continue
            worker = workers[row["worker_id"]] = self._known(row)
            is_lost = row["render"]["reason"] == RenderReason.NOT_PROBED and now_s - worker.done_s > LOST_AFTER_S
            if worker.due_s is None and is_lost:
                worker = workers[row["worker_id"]] = _Worker(_target(row))
            is_due = worker.due_s is not None and worker.due_s <= now_s
            is_silent = len(row["silent_dp_ranks"]) >= row["dp_size"]
            if is_due and worker.task is None and not is_silent and len(self._tasks) < PENDING_MAX:
                self._begin(row["worker_id"], worker)
        for worker_id, worker in self._workers.items():
            if workers.get(worker_id) is not worker and worker.task is not None:
                worker.task.cancel()  # it was removed, or is another engine now
        models = (
            {worker.target.model for worker in self._workers.values()} if workers.keys() != self._workers.keys() else ()
        )
        self._workers = workers
        for model in models:
            self._settle(model, (worker for worker in workers.values() if worker.target.model == model))

    def _known(self, row: dict[str, Any]) -> _Worker:
        """Return what is known of a worker, and begin anew if it is another engine now."""
        target = _target(row)
        known = self._workers.get(row["worker_id"])
        if known is None:
            return _Worker(target)
        before = known.target
        if (target.url, target.model) == (before.url, before.model) and (
            (target.incarnation or 0) <= (before.incarnation or 0)
        ):
            return known  # the same, as a router shows it that lags behind the one that was asked before
        return _Worker(target)

    def _begin(self, worker_id: int, worker: _Worker) -> None:
        worker.task = task = asyncio.create_task(self._run(worker_id, worker), name=f"kvstreams-parity-{worker_id}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, worker_id: int, worker: _Worker) -> None:
        may_pass = True
        try:
            async with self._turns:
                result = await self._probe(worker)
                may_pass = result.reason in _MAY_PASS
                self.outcomes[result.outcome] += 1
                self._warn(worker_id, worker.target, result)
                await self._report(worker_id, worker.target, result)
        except KvStreamsError as exc:
            may_pass = True
            log.debug("the render parity of worker %d was not reported to a router: %s", worker_id, exc)
        finally:
            worker.task, worker.done_s, worker.due_s = None, self._clock(), None
            if may_pass:
                worker.due_s = worker.done_s + min(RETRY_S_MAX, RETRY_S_MIN * 2.0**worker.n_failed)
                worker.n_failed = min(worker.n_failed + 1, 16)

    async def _report(self, worker_id: int, target: _Target, result: RenderResult) -> None:
        body = {
            "url": target.url,
            "model": target.model,
            "incarnation": target.incarnation,
            "outcome": result.outcome,
            "reason": result.reason,
            "part": result.part,
            "from_token": result.from_token,
            "probed_by": self._name,
        }
        await self._report_to_router(worker_id, body)

    async def _probe(self, worker: _Worker) -> RenderResult:
        target = worker.target
        if not self._tokenizing.has_files(target.model):
            return RenderResult(RenderOutcome.UNKNOWN, RenderReason.NO_TOKENIZER)
        reason = RenderReason.ENGINE_FAILED
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                comparison = await self._compared(target)
                if comparison.rules is None:
                    # Some templates write the date, so that both sides may have rendered on different days.
                    comparison = await self._compared(target)
                return self._adopt(worker, comparison)
        except TokenizingFailed:
            reason = RenderReason.FRONT_FAILED
        except _NoTokenize:
            reason = RenderReason.NO_TOKENIZE
        except (_EngineFailed, TimeoutError, OSError, ValueError) as exc:
            log.debug("the engine at %s could not be probed: %s", target.url, type(exc).__name__)
        return RenderResult(RenderOutcome.UNKNOWN, reason)

    async def _compared(self, target: _Target) -> Comparison:
        theirs: dict[RenderPart, list[int] | None] = {}
        for part in PROMPTS:
            answer = await self._answer(target, part)
            if answer.is_whole or part not in NOT_OF_TOKENIZE:
                theirs[part] = answer.tokens
        rules = self._tokenizing.rules(target.model)
        by_rules = partial(self._tokens_of_files, target.model)
        return await compare_by_rules(theirs, by_rules, NEWEST if rules is None else rules)

    def _adopt(self, worker: _Worker, comparison: Comparison) -> RenderResult:
        """Note by which rules an engine renders, and return the result for the rules by which its model is rendered."""
        model, rules = worker.target.model, comparison.rules
        worker.outcome, worker.rules = comparison.found.outcome, rules
        self._settle(model, (other for other in [*self._workers.values(), worker] if other.target.model == model))
        is_followed = rules is not None and self._tokenizing.rules(model) == rules
        return comparison.found if is_followed else comparison.result

    def _settle(self, model: str, workers: Iterable[_Worker]) -> None:
        """Render a model's prompts by rules that one of its engines follows; without any, the engines render them."""
        probed = [worker for worker in workers if worker.outcome is not None]
        followed = [worker.rules for worker in probed if worker.rules is not None]
        if not probed or self._tokenizing.rules(model) in followed:
            return
        rules = followed[-1] if followed else None
        self._tokenizing.set_rules(model, rules)
        for worker in probed:
            if rules is not None and worker.rules == rules and worker.due_s is None:
                worker.due_s = self._clock()  # it was reported to differ from the others

    def check_again(self, model: str) -> None:
        """Let engines render the prompts of a model, since theirs were others, until a later probe is equal."""
        if not self._tokenizing.has_files(model):
            return
        self._tokenizing.set_rules(model, None)
        for worker in self._workers.values():
            if worker.target.model == model:
                worker.outcome = worker.rules = None
                worker.due_s = self._clock() + RETRY_S_MAX

    async def _tokens_of_files(self, model: str, rules: Rule) -> TokensByPart:
        """Return the front's own tokens of the prompts; None for those that it refuses."""
        ours: dict[RenderPart, list[int] | None] = {}
        for part, (kind, _) in PROMPTS.items():
            try:
                ours[part] = await self._tokenizing.tokens_of_files(model, kind, _body(model, part), rules)
            except InvalidRequest:  # no chat template, or one that refuses a system message or tools
                ours[part] = None
        return ours

    async def _answer(self, target: _Target, part: RenderPart) -> TokensAnswer:
        """Ask the engine for the tokens of a prompt; it has none if it refuses the prompt."""
        kind, key = PROMPTS[part][0], self._key_of(target.model)
        answer = await self._engine_tokens.ask(self._http, target.url, kind, _body(target.model, part), key)
        if answer.status in LACKING:
            raise _NoTokenize
        if answer.tokens is None and answer.status not in (400, 422):
            raise _EngineFailed
        return answer

    def _warn(self, worker_id: int, target: _Target, result: RenderResult) -> None:
        """Log a difference once for each model and prompt: it is usually the same for all engines of a model."""
        known = (target.model, result.part)
        if result.outcome is not RenderOutcome.DIFFERS or known in self._warned or len(self._warned) >= WARNINGS_MAX:
            return
        self._warned.add(known)
        assert result.part is not None
        asks = self._tokenizing.rules(target.model) is None
        log.warning(
            "the engine of worker %d at %s makes other tokens than the --tokenizer of model %s: those of the probe "
            "prompt %r differ from token %d on. %s. %s. GET /workers of a router lists all workers that differ; this "
            "is logged once",
            worker_id,
            target.url,
            target.model,
            result.part.words,
            result.from_token,
            _CONSEQUENCE[asks],
            _ADVICE.get(result.part, _ADVICE_ABOUT_RULES),
        )

    async def close(self) -> None:
        """Cancel the probes, and close the connections."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._http.close()


#: What follows from a difference, by whether the engines are asked.
_CONSEQUENCE = {
    True: "The engines of this model are asked for the tokens of each prompt, until one of them makes the same",
    False: "Blocks that it has cached are not found from there on, so its prompts are computed again",
}

_ADVICE_ABOUT_TEMPLATES = (
    "Only chats differ, so its chat template is another one: start the engine with the template of the front's files "
    "(--chat-template), or give the front the engine's template as chat_template.jinja"
)

#: What to do about a difference in these prompts, and in all others.
_ADVICE = {
    RenderPart.COMPLETION: "Its tokenizer is another one: give the front the files that the engine loads "
    "(--tokenizer MODEL=PATH)",
    RenderPart.CHAT: _ADVICE_ABOUT_TEMPLATES,
    RenderPart.CHAT_WITH_SYSTEM: _ADVICE_ABOUT_TEMPLATES,
    RenderPart.CHAT_WITH_TOOLS: _ADVICE_ABOUT_TEMPLATES,
}
_ADVICE_ABOUT_RULES = (
    "It gives other messages to its chat template than the versions that this front knows (docs/front-prompts.md)"
)
