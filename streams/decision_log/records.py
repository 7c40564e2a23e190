"""Decisions as the log keeps them: values, and the bytes of a record of `router-decisions` (pure).

What lives here: `encode_batch`, which a router uses, and `decode_batch` for readers. What must not: Kafka, clocks, and
what a decision means (words, trace).

A record has many decisions as packed rows, and everything that many of them share once.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from streams.core.ids import U32_MAX, DpRank, HashArray, RankId, WorkerId
from streams.decision_log.families import FAMILY_TOKENS, FamilyKeys, family_hashes, salted
from streams.decision_log.noted import BOOKED, PREFERRED, DecisionKind, ListedCandidates, NotedDecision
from streams.errors import BadRecord, KvStreamsError
from streams.kafka.avro_frames import codec

SCHEMA = "router-decisions"

#: The packed rows; the schema names their fields.
_DECISION = struct.Struct("<qIIIIIIHHBB")
_RANK = struct.Struct("<QI")
_CANDIDATE = struct.Struct("<dII")
_REPORT = struct.Struct("<qqI")


class OutcomeReport(NamedTuple):
    """What clients reported about a request. Times are 0, and output_tokens is 0, if they were not reported."""

    request_id: str
    ended_at_ms: int = 0
    prefilled_at_ms: int = 0
    output_tokens: int = 0


class FleetSize(NamedTuple):
    """The registered ranks of one model. kv_blocks: of all their caches; 0 if they are not known."""

    model: str
    block_size: int
    n_ranks: int
    kv_blocks: int


@dataclass(frozen=True, slots=True)
class LoggedCandidate:
    """A rank with its terms. blocks: leading blocks of the prompt that it held."""

    rank: RankId
    cost: float
    blocks: int
    terms: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class LoggedDecision:
    """One decision as it was recorded.

    n_eligible: how many ranks the choice was made of. n_lowest: how many of them had the lowest cost. candidates: the
    chosen one, and then others, the cheapest first; empty if terms were not asked for. families: uint64[n], as in the
    module `families`.
    """

    request_id: str
    router_id: str
    decided_at_ms: int
    queued_ms: int
    kind: DecisionKind
    term_names: tuple[str, ...]
    n_tokens: int
    request_blocks: int
    expected_output_tokens: int | None
    n_eligible: int
    n_lowest: int
    booked: bool
    preferred: bool
    chosen: RankId
    overlap_blocks: int
    families: HashArray = field(compare=False)
    candidates: tuple[LoggedCandidate, ...] = field(repr=False)

    @property
    def arrived_at_ms(self) -> int:
        """When the request came to the router."""
        return self.decided_at_ms - self.queued_ms


class LogOrigin(NamedTuple):
    """What all records of one router have in common. keys: of the families. share: of requests that is recorded."""

    router_id: str
    keys: FamilyKeys
    share: float


def encode_batch(
    origin: LogOrigin,
    written_at_ms: int,
    decisions: Sequence[tuple[NotedDecision, ListedCandidates]],
    reports: Sequence[OutcomeReport],
    fleets: Sequence[FleetSize],
) -> bytes:
    """Encode one record; raises KvStreamsError for what does not fit the schema."""
    kinds: dict[tuple[DecisionKind, tuple[str, ...]], int] = {}
    numbers: dict[RankId, int] = {}
    rows, listed = bytearray(), bytearray()
    families = [np.empty(0, dtype=np.uint64)]
    try:
        for decision, candidates in decisions:
            families.append(family_hashes(decision.chain, decision.kind.block_size))
            rows += _DECISION.pack(
                decision.decided_at_ms,
                decision.queued_ms,
                decision.n_tokens,
                decision.request_blocks,
                min(decision.expected_output_tokens, U32_MAX),
                candidates.n_eligible,
                candidates.n_lowest,
                kinds.setdefault((decision.kind, candidates.term_names), len(kinds)),
                len(families[-1]),
                len(candidates.ranks),
                decision.flags,
            )
            for rank, cost, blocks in zip(candidates.ranks, candidates.costs, candidates.blocks, strict=True):
                listed += _CANDIDATE.pack(cost, numbers.setdefault(rank, len(numbers)), blocks)
        datum = {
            "router_id": origin.router_id,
            "written_at_ms": written_at_ms,
            "share": origin.share,
            "family_tokens": FAMILY_TOKENS,
            "kinds": [{**kind._asdict(), "term_names": names} for kind, names in kinds],
            "request_ids": [decision.request_id for decision, _ in decisions],
            "decisions": bytes(rows),
            "ranks": b"".join(_RANK.pack(*rank) for rank in numbers),
            "candidates": bytes(listed),
            "terms": b"".join(candidates.terms for _, candidates in decisions),
            "families": salted(np.concatenate(families), origin.keys).astype("<u8", copy=False).tobytes(),
            "reported_ids": [report.request_id for report in reports],
            "reports": b"".join(_REPORT.pack(*report[1:]) for report in reports),
            "fleets": [fleet._asdict() for fleet in fleets],
        }
    except struct.error as exc:
        raise KvStreamsError(f"cannot encode a {SCHEMA} record: {exc}") from exc
    return codec(SCHEMA).encode(datum)


@dataclass(frozen=True, slots=True)
class LoggedBatch:
    """One record: decisions of one router, and reports."""

    router_id: str
    written_at_ms: int
    share: float
    family_tokens: int
    fleets: tuple[FleetSize, ...]
    reports: tuple[OutcomeReport, ...]
    _datum: Mapping[str, Any] = field(repr=False)

    def __len__(self) -> int:
        return len(self._datum["request_ids"])

    def decisions(self, *, terms: bool = True) -> Iterator[LoggedDecision]:
        """The decisions, in the order in which they were made; without `terms`, they have no candidates.

        Raises BadRecord if the columns do not fit together.
        """
        try:
            yield from self._decisions(terms)
        except (ValueError, IndexError, TypeError, struct.error) as exc:
            raise BadRecord("bad_decisions", f"the columns of a batch of decisions do not fit together: {exc}") from exc

    def _decisions(self, with_terms: bool) -> Iterator[LoggedDecision]:
        datum = self._datum
        kinds = [
            (DecisionKind(*(kind[name] for name in DecisionKind._fields)), tuple(kind["term_names"]))
            for kind in datum["kinds"]
        ]
        ranks = [RankId(WorkerId(worker_id), DpRank(dp)) for worker_id, dp in _RANK.iter_unpack(datum["ranks"])]
        candidates = list(_CANDIDATE.iter_unpack(datum["candidates"]))
        terms = np.frombuffer(datum["terms"], dtype="<f4").tolist()
        families = np.frombuffer(datum["families"], dtype="<u8")
        rows = list(_DECISION.iter_unpack(datum["decisions"]))
        candidate_at = term_at = family_at = 0
        for request_id, row in zip(datum["request_ids"], rows, strict=True):
            decided_at_ms, queued_ms, n_tokens, blocks, expected, n_eligible, n_lowest, kind, n_families, n, flags = row
            of_kind, names = kinds[kind]
            own = []
            _, chosen, overlap = candidates[candidate_at]
            for cost, rank, held in candidates[candidate_at : candidate_at + n] if with_terms else ():
                own.append(LoggedCandidate(ranks[rank], cost, held, tuple(terms[term_at : term_at + len(names)])))
                term_at += len(names)
            candidate_at += n
            yield LoggedDecision(
                request_id=request_id,
                router_id=self.router_id,
                decided_at_ms=decided_at_ms,
                queued_ms=queued_ms,
                kind=of_kind,
                term_names=names,
                n_tokens=n_tokens,
                request_blocks=blocks,
                expected_output_tokens=expected or None,
                n_eligible=n_eligible,
                n_lowest=n_lowest,
                booked=bool(flags & BOOKED),
                preferred=bool(flags & PREFERRED),
                chosen=ranks[chosen],
                overlap_blocks=overlap,
                families=families[family_at : family_at + n_families],
                candidates=tuple(own),
            )
            family_at += n_families


def decode_batch(raw: bytes | None, schema_ids: Mapping[str, int] | None = None) -> LoggedBatch:
    """Decode one record; raises BadRecord."""
    datum = codec(SCHEMA).decode(raw, schema_ids)
    try:
        rows = list(_REPORT.iter_unpack(datum["reports"]))
        reports = tuple(OutcomeReport(name, *row) for name, row in zip(datum["reported_ids"], rows, strict=True))
    except (ValueError, struct.error) as exc:
        raise BadRecord("bad_decisions", f"the reports of a batch of decisions do not fit together: {exc}") from exc
    fleets = tuple(FleetSize(*(fleet[name] for name in FleetSize._fields)) for fleet in datum["fleets"])
    return LoggedBatch(
        datum["router_id"], datum["written_at_ms"], datum["share"], datum["family_tokens"], fleets, reports, datum
    )
