"""Expectations that other projects published, as cases: `python -m tests.conformance FILE...` prints which ones hold.

What lives here: reading files of cases, running each kind of case on the part of kvstreams that it concerns, and
reporting what differs. What must not: cases (conformance_cases.jsonl has our own).

A case is a line of JSON: `name`, `kind`, and depending on the kind `ops`, or `query` and `expect`. A case of kind
`indexer` must have the same result in an index and through the whole pipeline of records. The command exits with 1
if a case failed, and with 2 if a file cannot be read.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
import xxhash

from streams.core.events import AllBlocksCleared, BlocksRemoved, BlocksStored, KvEvent, MoeLabels, WorkerRemoved
from streams.core.hashing import BASE_SEED, hash_seed, local_hashes, request_hashes, sequence_hashes, with_pad_values
from streams.core.ids import U64_MASK, DpRank, EngineHash, HashArray, Incarnation, RankId, Tier, WorkerId
from streams.core.index.interface import Candidates, PrefixScores
from streams.core.routing.cost import TIER_WEIGHTS, TermColumns
from streams.core.routing.eligibility import WorkerFilter
from streams.core.routing.queue import QueueLimits, QueuePolicy, RequestQueue, Waiting, wspt_key
from streams.core.routing.selection import select_by_cost
from streams.core.workers import Worker
from streams.kafka.records import encode_worker
from streams.router_api.knowledge.view import View
from streams.router_api.messages.requests import MoeQuery
from streams.settings import Settings
from tests.helpers.folded_index import FoldedIndex, UnknownParent, apply_event
from tests.helpers.holdings import batch
from tests.helpers.invariants import check
from tests.helpers.plain_prices import price_terms
from tests.helpers.plain_run_store import plain_holdings
from tests.helpers.table_logs import Record, commit, compacted, folded, recovered

#: Our own cases, next to this file.
OWN_CASES = Path(__file__).parent / "conformance_cases.jsonl"

#: Names that engines and routers use for the tiers.
TIERS = {
    "device": Tier.DEVICE,
    "gpu": Tier.DEVICE,
    "hbm": Tier.DEVICE,
    "host": Tier.HOST,
    "host_pinned": Tier.HOST,
    "hostpinned": Tier.HOST,
    "cpu": Tier.HOST,
    "cpu_pinned": Tier.HOST,
    "cpu_tier1": Tier.HOST,
    "disk": Tier.DISK,
    "nvme": Tier.DISK,
    "ssd": Tier.DISK,
    "cpu_tier2": Tier.DISK,
    "external": Tier.EXTERNAL,
    "remote": Tier.EXTERNAL,
    "object": Tier.EXTERNAL,
}

#: The model of the workers with labelled blocks.
MODEL, DP_SIZE = "m", 4

#: Points of the unit interval at which a random choice is sampled; with 1,000, probabilities are exact to 0.1 %.
N_DRAWS = 1000


class Unreadable(Exception):
    """A file, or a line of it, is not a valid case; the message names both."""


class Differs(Exception):
    """A case did not have the expected result; the message describes the difference."""


@dataclass(frozen=True, slots=True)
class Case:
    """One case and its position."""

    name: str
    kind: str
    where: str
    data: dict[str, Any]


def load(path: Path) -> list[Case]:
    """Read a file of cases and skip blank lines. Raises Unreadable."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as exc:
        raise Unreadable(f"{path} cannot be read: {exc}") from exc
    return [_parse(f"{path}:{number}", line) for number, line in enumerate(lines, 1) if line.strip()]


def _parse(where: str, line: str) -> Case:
    try:
        data = json.loads(line)
    except ValueError as exc:
        raise Unreadable(f"{where}: not JSON: {exc}") from exc
    if not isinstance(data, dict):
        raise Unreadable(f"{where}: a case is an object, not a {type(data).__name__}")
    for name in ("name", "kind"):
        if not isinstance(data.get(name), str) or not data[name]:
            raise Unreadable(f"{where}: the case has no {name}")
    return Case(data["name"], data["kind"], where, data)


def run(case: Case) -> None:
    """Run a case of a kind in KINDS. Raises Differs."""
    try:
        KINDS[case.kind](case.data)
    except Differs:
        raise
    except Exception as exc:  # of any kind: the other cases must still run
        raise Differs(f"{type(exc).__name__}: {exc}") from exc


class Subject(Protocol):
    """Runs the ops of indexer cases."""

    def event(self, rank: RankId, event: KvEvent) -> None:
        """Take one engine event; a store after an unknown parent changes nothing."""

    def remove_worker(self, worker_id: int) -> None:
        """Drop all ranks of a worker."""

    def remove_rank(self, rank: RankId) -> None:
        """Drop one rank."""

    def start_again(self) -> None:
        """Continue with a copy made from the records."""

    def find_matches(self, local: HashArray) -> PrefixScores:
        """Score a request."""

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken."""

    def __len__(self) -> int:
        """Number of facts held."""


class IndexSubject:
    """An index that gets the events without batches: a store of runs and a fold of its records."""

    def __init__(self) -> None:
        self._ranks: set[RankId] = set()
        self.index = FoldedIndex()

    def event(self, rank: RankId, event: KvEvent) -> None:
        self._ranks.add(rank)
        try:
            apply_event(self.index, rank, event)
        except UnknownParent:
            pass

    def remove_worker(self, worker_id: int) -> None:
        for rank in {rank for rank in self._ranks if rank.worker_id == worker_id}:
            self.remove_rank(rank)

    def remove_rank(self, rank: RankId) -> None:
        self._ranks.discard(rank)
        self.index.remove_rank(rank)

    def start_again(self) -> None:
        self.index = self.index.rebuilt()

    def find_matches(self, local: HashArray) -> PrefixScores:
        return self.index.find_matches(local)

    def check(self) -> None:
        self.index.check()

    def __len__(self) -> int:
        return len(self.index)


class Pipeline:
    """The steps from an engine's batch to an answer, without Kafka: holdings, the log's bytes, a router's view.

    restarts: agent and router restart from the compacted log after each event.
    """

    def __init__(self, restarts: bool) -> None:
        self._restarts = restarts
        self._log: list[Record] = []
        self._incarnations: Counter[int] = Counter()
        self.holdings = plain_holdings()
        self.view = self._new_view()

    def event(self, rank: RankId, event: KvEvent) -> None:
        known = self.holdings.progress.get(rank)
        new = known is None or known.epoch.incarnation < self._incarnations[rank.worker_id]
        number = 0 if known is None or new else known.sequence + 1
        self._commit(rank, number, event)

    def remove_worker(self, worker_id: int) -> None:
        self._commit(RankId(WorkerId(worker_id), DpRank(0)), 0, None)
        self._incarnations[worker_id] += 1

    def remove_rank(self, rank: RankId) -> None:
        self.event(rank, AllBlocksCleared())

    def start_again(self) -> None:
        table = compacted(self._log)
        self.holdings, self.view = recovered(table), folded(table.items(), self._new_view())

    def find_matches(self, local: HashArray) -> PrefixScores:
        return self.view.index.find_matches(local)

    def check(self) -> None:
        check(self.view.index.runs)

    def __len__(self) -> int:
        return len(self.view.index.members())

    def _new_view(self) -> View:
        return View(Settings(), lambda: 0)

    def _commit(self, rank: RankId, number: int, event: KvEvent | None) -> None:
        """Commit an event; None removes the worker."""
        incarnation = Incarnation(self._incarnations[rank.worker_id])
        one = batch(number, *([] if event is None else [event]), rank=rank, incarnation=incarnation)
        records = commit(self.holdings, [one if event else replace(one, body=WorkerRemoved("asked for"))])
        folded(records, self.view)
        self._log += records
        if self._restarts:
            self.start_again()


def subjects() -> list[tuple[str, Subject]]:
    """Create everything that must give the answers of an indexer case, each with its name."""
    pipelines = ("pipeline", Pipeline(restarts=False)), ("restarting pipeline", Pipeline(restarts=True))
    return [("index", IndexSubject()), *pipelines]


def run_indexer(data: Mapping[str, Any]) -> None:
    """Run the ops in order, on every subject. Raises Differs."""
    for name, subject in subjects():
        for number, op in enumerate(data.get("ops", [])):
            _step(f"{name}, op {number}", subject, op, data)
            subject.check()
        # If there are queries among the ops, the case's own query only repeats the last of them.
        if "expect" in data and "query" in data and all(op.get("op") != "query" for op in data.get("ops", [])):
            _compare_scores(f"{name}, at the end", subject.find_matches(_u64(data["query"])), data["expect"])
    if "tokens" in data and "query" in data:
        local = local_hashes(data["tokens"], data["block_size"], _seed(data))
        _compare("local hashes of the tokens", local.tolist(), data["query"])


def _step(where: str, subject: Subject, op: Mapping[str, Any], data: Mapping[str, Any]) -> None:
    match op["op"]:
        case "event":
            report = op["event"]
            event = report["event"]
            dp_rank = event.get("dp_rank", report.get("dp_rank", 0))
            rank = RankId(WorkerId(report["worker_id"]), DpRank(dp_rank or 0))
            subject.event(rank, event_of(event["data"], tier_of(report.get("storage_tier", event.get("storage_tier")))))
        case "remove_worker":
            subject.remove_worker(op["worker_id"])
        case "remove_worker_dp_rank":
            subject.remove_rank(RankId(WorkerId(op["worker_id"]), DpRank(op["dp_rank"])))
        case "dump_and_replay_into_fresh_index":
            subject.start_again()
        case "expect_dump_len":
            _compare(f"{where}: facts in a dump", len(subject), op["n"])
        case "query":
            if "tokens" in op:
                local = local_hashes(op["tokens"], op.get("block_size", data.get("block_size")), _seed(op))
            else:
                local = _u64(op["local_hashes"])
            answer = subject.find_matches(local)
            if "expect_scores" in op:
                _compare_scores(where, answer, op["expect_scores"])
            if "expect_by_tier" in op:
                by_tier = {rank: list(tiers) for rank, tiers in answer.by_tier.items()}
                expected = {_rank(*ids): list(tiers) for *ids, tiers in op["expect_by_tier"]}
                _compare(f"{where}: blocks by tier", by_tier, expected)
        case unknown:
            raise Differs(f"{where}: this runner knows no op {unknown!r}")


def event_of(data: Any, tier: Tier) -> KvEvent:
    """Convert an event from the form that cases use; signed hashes are bit-cast."""
    if data == "cleared" or (isinstance(data, dict) and "cleared" in data):
        return AllBlocksCleared()
    if "stored" in data:
        stored = data["stored"]
        parent, blocks = stored.get("parent_hash"), stored["blocks"]
        return BlocksStored(
            None if parent is None else EngineHash(parent & U64_MASK),
            _u64(block["block_hash"] for block in blocks),
            _u64(block["tokens_hash"] for block in blocks),
            tier,
            moe=_labels_of(blocks[0].get("moe_metadata")) if blocks else None,
        )
    if "removed" in data:
        return BlocksRemoved(_u64(data["removed"]["block_hashes"]), tier)
    raise Differs(f"this runner knows no event {data!r}")


def _labels_of(moe: Mapping[str, int] | None) -> MoeLabels | None:
    return None if moe is None else MoeLabels(moe.get("layer_id"), moe.get("expert_id"), moe.get("expert_group"))


def tier_of(name: str | int | None) -> Tier:
    """The tier with a name or a number; the device tier for None."""
    if name is None:
        return Tier.DEVICE
    if isinstance(name, int):
        return Tier(name)
    tier = TIERS.get(name.lower().replace("-", "_"))
    if tier is None:
        raise Differs(f"this runner knows no tier {name!r}")
    return tier


def _compare_scores(where: str, answer: PrefixScores, expected: Iterable[Sequence[int]]) -> None:
    """Compare an answer's scores. expected: rows of worker, rank and blocks; ranks without blocks may be left out."""
    scores = {_rank(*ids): blocks for *ids, blocks in expected if blocks}
    _compare(f"{where}: scores", dict(answer.scores), scores)
    _compare(f"{where}: best score", answer.max_score, max(scores.values(), default=0))


def _rank(worker_id: int, dp_rank: int = 0) -> RankId:
    return RankId(WorkerId(worker_id), DpRank(dp_rank))


class LabelledPipeline(Pipeline):
    """A pipeline with registered workers and labelled blocks."""

    def __init__(self, restarts: bool, worker_ids: Iterable[int]) -> None:
        self._worker_ids = sorted(worker_ids)
        super().__init__(restarts)

    def _new_view(self) -> View:
        view = super()._new_view()
        for worker_id in self._worker_ids:
            worker = Worker(WorkerId(worker_id), "http://w", MODEL, 16, dp_size=DP_SIZE)
            view.fold_worker(str(worker_id).encode(), encode_worker(worker))
        return view


def run_moe(data: Mapping[str, Any]) -> None:
    """Run the ops in order, then queries of labels, on every pipeline to a router's view. Raises Differs.

    query: `queries`, and optionally a block that `worker_id` has `stored` before them. Each query may give
    `local_hashes`; by default they are those of that block. expect: for each query any of `scores`, `moe_scores` and
    `stays`, the ranks that remain candidates if `fallback_to_unlabeled` is false.
    """
    query = data["query"]
    ops = list(data["ops"])
    if "stored" in query:
        stored = {"parent_hash": None, "blocks": [query["stored"]]}
        ops.append({"op": "event", "event": {"worker_id": query["worker_id"], "event": {"data": {"stored": stored}}}})
    worker_ids = {op["event"]["worker_id"] for op in ops if op["op"] == "event"}
    for restarts in (False, True):
        name = f"{'restarting ' * restarts}pipeline"
        subject = LabelledPipeline(restarts, worker_ids)
        for number, op in enumerate(ops):
            for step in _by_labels(op):
                _step(f"{name}, op {number}", subject, step, data)
            subject.check()
        _compare("number of expectations", len(data["expect"]), len(query["queries"]))
        for number, (asked, expected) in enumerate(zip(query["queries"], data["expect"], strict=True)):
            local = asked.get("local_hashes", [query.get("stored", {}).get("tokens_hash", 0)])
            _ask_labels(f"{name}, query {number}", subject.view, _u64(local), asked, expected)


def _by_labels(op: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Divide a store of blocks with several labels into one store for each label, since an engine's event has one."""
    report = op.get("event", {})
    data = report.get("event", {}).get("data")
    if not isinstance(data, dict) or "stored" not in data:
        return [op]
    ops: list[Mapping[str, Any]] = []
    parent = data["stored"].get("parent_hash")
    for _, group in itertools.groupby(data["stored"]["blocks"], lambda block: block.get("moe_metadata")):
        blocks = list(group)
        stored = {"parent_hash": parent, "blocks": blocks}
        ops.append({**op, "event": {**report, "event": {**report["event"], "data": {"stored": stored}}}})
        parent = blocks[-1]["block_hash"]
    return ops


def _ask_labels(
    where: str, view: View, local: HashArray, asked: Mapping[str, Any], expected: Mapping[str, Any]
) -> None:
    known = {name: value for name, value in asked.items() if name != "local_hashes"}
    query = msgspec.convert(known, MoeQuery)
    ranks = view.fleet.eligible(WorkerFilter(MODEL))
    scores = view.index.find_matches(local)
    supplementary = view.supplementary(sequence_hashes(local), MODEL, query.selector(), pooled=False)
    candidates = Candidates(ranks)
    columns = scores.columns(candidates, TIER_WEIGHTS)
    weighed = None if supplementary is None else supplementary.weigh(candidates, *columns, 0.0, 0.0)
    blocks = None if weighed is None else weighed.moe_scores
    labelled = {} if blocks is None else {rank: n for rank, n in zip(ranks, blocks.tolist(), strict=True) if n}
    for name, value in expected.items():
        match name:
            case "scores":
                _compare_scores(where, scores, value)
            case "moe_scores":
                _compare(f"{where}: moe_scores", labelled, {_rank(*ids): blocks for *ids, blocks in value if blocks})
            case "stays":
                matching = set[RankId]() if supplementary is None else supplementary.matching(ranks, scores)
                stays = ranks if query.fallback_to_unlabeled or not matching else matching
                _compare(f"{where}: ranks that stay", sorted(stays), sorted(_rank(*ids) for ids in value))
            case _:
                raise Differs(f"this runner knows no expectation {name!r}")


def run_hash(data: Mapping[str, Any]) -> None:
    """Run one or several hash queries: of tokens, of bytes, or of numbers of tokens. Raises Differs."""
    query, expect = data["query"], data["expect"]
    if isinstance(query, dict):
        _run_hash(query, expect, data)
        return
    _compare("number of expectations", len(expect), len(query))
    for one, expected in zip(query, expect, strict=True):
        _run_hash(one, expected, data)


def _run_hash(query: Mapping[str, Any], expect: Any, data: Mapping[str, Any]) -> None:
    seed = _seed(query)
    if "bytes_utf8" in query:
        raw = query["bytes_utf8"].encode()
        _compare("hash of the bytes", xxhash.xxh3_64_intdigest(raw, seed), expect)
        if raw and len(raw) % 4 == 0:  # as whole tokens, in one block
            _compare("hash of the bytes as tokens", local_hashes(raw, len(raw) // 4, seed).tolist(), [expect])
        return
    block_size, eagle = query.get("block_size", data.get("block_size")), query.get("eagle", False)
    n_tokens = query.get("num_tokens")
    tokens = query["tokens"] if n_tokens is None else np.arange(n_tokens, dtype=np.uint32) + query.get("first_token", 0)
    if placeholders := query.get("mm", query.get("placeholders")):
        tokens = with_pad_values(tokens, [_placeholder(each) for each in placeholders])
    local, sequence = request_hashes(tokens, block_size, seed, eagle=eagle)
    found: dict[str, Any] = {
        "local": local.tolist(),
        "sequence": sequence.tolist(),
        "n_blocks": len(local),
        "seed": seed,
        "digest": sequence_digest(sequence),
    }
    _compare("chain of the local hashes", sequence_hashes(local).tolist(), found["sequence"])
    if isinstance(expect, int):
        expect = {"n_blocks": expect}
    elif isinstance(expect, list):
        expect = {"local": expect}
    for name, value in expect.items():
        _compare(f"{name} of {len(tokens)} tokens", found.get(name, f"unknown to this runner: {name}"), value)


def sequence_digest(sequence: HashArray) -> int:
    """Return one number for many hashes: the xxh3_64 of their u64 little-endian bytes."""
    return xxhash.xxh3_64_intdigest(sequence.astype("<u8").tobytes())


def _placeholder(item: Mapping[str, int] | Sequence[int]) -> tuple[int, int, int]:
    if isinstance(item, Mapping):
        return item["offset"], item["length"], item["mm_hash"]
    offset, length, mm_hash = item
    return offset, length, mm_hash


def _seed(query: Mapping[str, Any]) -> int:
    lora, namespace = query.get("lora_name", query.get("lora")), query.get("namespace")
    seed: int = query.get("seed", BASE_SEED)
    return (seed + hash_seed(lora, namespace) - BASE_SEED) & U64_MASK


class _Draw:
    """A generator that returns one number."""

    def __init__(self, point: float) -> None:
        self._point = point

    def random(self) -> float:
        return self._point


def run_cost(data: Mapping[str, Any]) -> None:
    """Price the workers and choose. Raises Differs.

    workers: for each id `prefill_blocks`, the request's own; `overlap`, cached blocks, as one number or one per tier;
    `decode_blocks`; `active_prefill_blocks` of other requests. prefill_load_scale: multiplies prefill blocks.
    overlap_credit: multiplies overlap.
    """
    query, expect = data["query"], data["expect"]
    ids = list(query["workers"])
    costs = [_cost(query, worker) for worker in query["workers"].values()]
    temperature = query.get("temperature", 0)
    draws = Counter(ids[select_by_cost(costs, temperature, _Draw((draw + 0.5) / N_DRAWS))] for draw in range(N_DRAWS))
    for name, value in expect.items():
        match name:
            case "costs":
                found = dict(zip(ids, costs, strict=True))
                same = found.keys() == value.keys() and all(math.isclose(found[each], value[each]) for each in value)
                if not same:
                    raise Differs(f"costs: found {found}, expected {value}")
            case "selected" if isinstance(value, list):  # all candidates that can be chosen
                _compare("selected", sorted(draws), sorted(map(str, value)))
            case "selected" if temperature:
                _compare("selected most often", draws.most_common(1)[0][0], str(value))
            case "selected":
                _compare("selected", sorted(draws), [str(value)])
            case "probabilities":
                for each, share in value.items():
                    if abs(draws[each] / N_DRAWS - share) > 1.5 / N_DRAWS:
                        raise Differs(f"probability of {each}: found {draws[each] / N_DRAWS}, expected {share}")
            case _:
                raise Differs(f"this runner knows no expectation {name!r}")


def _cost(query: Mapping[str, Any], worker: Mapping[str, Any]) -> float:
    overlap = worker.get("overlap", 0)
    if isinstance(overlap, dict):
        overlap = sum(TIER_WEIGHTS[tier_of(tier)] * blocks for tier, blocks in overlap.items())
    block_size = query.get("block_size", 1)
    effective = np.array([overlap * float(query.get("overlap_credit", 1))])
    terms = price_terms(
        worker["prefill_blocks"],
        effective,
        active_prefill_tokens=np.array([worker.get("active_prefill_blocks", 0) * block_size]),
        decode_blocks=np.array([worker.get("decode_blocks", 0)]),
        block_size=block_size,
        overlap_score_weight=query.get("prefill_load_scale", 1),
    )
    return TermColumns([_rank(0)], np.array([int(overlap)]), effective, terms).row(0).cost


def run_queue(data: Mapping[str, Any]) -> None:
    """Order waiting requests. Raises Differs.

    query: a list of requests, whose wspt keys are `expect`; or `waiting`, a list of requests, with `policy` and
    `prefill_us_per_token`, and `expect` is their `order`, as positions in the list. A request has `isl` and
    `best_cached_tokens`, and optionally `arrival_ms`, `priority`, `priority_jump` and `tenant`.
    """
    query, expect = data["query"], data["expect"]
    if isinstance(query, list):
        _compare("number of expectations", len(expect), len(query))
        keys = [wspt_key(each["isl"], each["best_cached_tokens"], each.get("priority_jump", 0.0)) for each in query]
        for number, (key, expected) in enumerate(zip(keys, expect, strict=True)):
            if not math.isclose(key, expected):
                raise Differs(f"key of request {number}: found {key}, expected {expected}")
        order = sorted(range(len(keys)), key=lambda number: (-keys[number], number))
        _compare("order of the queue", _order_of(query, QueuePolicy.WSPT), order)
        return
    found = _order_of(query["waiting"], QueuePolicy(query["policy"]), query.get("prefill_us_per_token", 0.0))
    for name, value in expect.items():
        if name != "order":
            raise Differs(f"this runner knows no expectation {name!r}")
        _compare("order of the queue", found, value)


def _order_of(
    waiting: Sequence[Mapping[str, Any]], policy: QueuePolicy, prefill_us_per_token: float = 0.0
) -> list[int]:
    """Let requests wait; return their positions in the order of the queue."""
    n = len(waiting)
    queue = RequestQueue(policy, QueueLimits(n, n, n), prefill_us_per_token)
    for number, each in enumerate(waiting):
        uncached = each["isl"] - each["best_cached_tokens"]
        by_name = {name: each[name] for name in ("priority", "priority_jump", "tenant") if name in each}
        queue.add(Waiting(number, each.get("arrival_ms", 0.0), math.inf, uncached, 1, **by_name))
        check(queue)
    return list(queue.in_order())


KINDS: dict[str, Callable[[Mapping[str, Any]], None]] = {
    "indexer": run_indexer,
    "hash": run_hash,
    "cost": run_cost,
    "moe": run_moe,
    "queue": run_queue,
}


def _compare(what: str, found: Any, expected: Any) -> None:
    if found != expected:
        raise Differs(f"{what}: found {_short(found)}, expected {_short(expected)}")


def _short(value: Any) -> str:
    if isinstance(value, dict):
        value = sorted(
            ([*map(int, key), item] if isinstance(key, RankId) else [key, item]) for key, item in value.items()
        )
    text = str(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def _u64(hashes: Iterable[int]) -> HashArray:
    return np.array([one & U64_MASK for one in hashes], dtype=np.uint64)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run files of cases; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    try:
        cases = [case for path in options.files for case in load(path)]
    except Unreadable as exc:
        print(exc, file=sys.stderr)
        return 2
    n_passed, n_failed = 0, 0
    skipped: Counter[str] = Counter()
    for case in cases:
        if case.kind not in KINDS:
            skipped[case.kind] += 1
            continue
        try:
            run(case)
        except Differs as exc:
            n_failed += 1
            print(f"FAILED {case.name} ({case.where}): {exc}")
        else:
            n_passed += 1
    for kind, n in sorted(skipped.items()):
        print(f"SKIPPED {n} of kind {kind}: this runner does not know it")
    print(f"{n_passed} passed, {n_failed} failed, {skipped.total()} skipped")
    if not n_passed + n_failed:
        print("nothing ran: no case is of a kind that this runner knows", file=sys.stderr)
        return 2
    return 1 if n_failed else 0


if __name__ == "__main__":
    sys.exit(main())
