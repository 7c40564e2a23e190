"""Decisions as the log keeps them: values, and the bytes of a record of `router-decisions` (pure).

What lives here: `DecisionEncoder`, which a router uses, and `decode_batch` for readers. What must not: Kafka, clocks,
and what a decision means (words, trace).

A record has many decisions as packed rows, and everything that many of them share once. Most of a batch has that form
already (batches), and the rest is written without fastavro (datum). One Avro record for each decision would cost a
router three times as much.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from streams.avro_frames import codec
from streams.core.ids import DpRank, HashArray, RankId, WorkerId
from streams.core.routing.identity_cache import IdentityCache
from streams.decision_log.batches import BOOKED, DECISION, PREFERRED, DecisionBatch, DecisionKind
from streams.decision_log.datum import Column, datum_of
from streams.decision_log.families import FAMILY_TOKENS, FamilyKeys, salted
from streams.errors import BadRecord, KvStreamsError

SCHEMA = "router-decisions"

_RANK = np.dtype([("worker_id", "<u8"), ("dp_rank", "<u4")])
_CANDIDATE = np.dtype([("cost", "<f8"), ("rank", "<u4"), ("blocks", "<u4")])
_REPORT = np.dtype([("ended_at_ms", "<i8"), ("prefilled_at_ms", "<i8"), ("output_tokens", "<u4")])

_PACK_REPORT = struct.Struct("<qqI").pack


class Report(NamedTuple):
    """What clients reported about a request. Times are 0, and output_tokens is 0, if they were not reported."""

    request_id: str
    ended_at_ms: int = 0
    prefilled_at_ms: int = 0
    output_tokens: int = 0


#: A Report as a plain tuple, which is made in a quarter of the time, for requests of which only the end was reported.
EndReport = tuple[str, int, int, int]


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


class DecisionEncoder:
    """Encodes batches for one router. Not thread-safe."""

    def __init__(self, keys: FamilyKeys, share: float) -> None:
        """keys: of the families."""
        self._keys = keys
        self._share = share
        self._rank_rows: IdentityCache[npt.NDArray[Any]] = IdentityCache()

    def encode(
        self,
        batch: DecisionBatch | None,
        reports: Sequence[Report | EndReport],
        fleets: Sequence[FleetSize],
        router_id: str,
        written_at_ms: int,
    ) -> bytes:
        """Encode one record; raises KvStreamsError for what does not fit the schema."""
        batch = _NO_DECISIONS if batch is None else batch
        ranks, candidates = self._candidates(batch)
        try:
            return datum_of(
                router_id,
                written_at_ms,
                self._share,
                FAMILY_TOKENS,
                [{**kind._asdict(), "term_names": names} for kind, names in batch.kinds],
                batch.request_ids,
                (
                    batch.rows(),
                    ranks,
                    candidates,
                    batch.terms().astype("<f4", copy=False),
                    salted(batch.families(), self._keys).astype("<u8", copy=False),
                ),
                [request_id for request_id, _, _, _ in reports],
                b"".join([_PACK_REPORT(ended, first, tokens) for _, ended, first, tokens in reports]),
                [each._asdict() for each in fleets],
                header=codec(SCHEMA).header,
            )
        except (ValueError, struct.error) as exc:
            raise KvStreamsError(f"cannot encode a {SCHEMA} record: {exc}") from exc

    def _candidates(self, batch: DecisionBatch) -> tuple[Column, Column]:
        """The ranks that occur, and the candidates."""
        if not batch.n:
            return np.empty(0, dtype=_RANK), np.empty(0, dtype=_CANDIDATE)
        costs, ranks, blocks = batch.listed()
        tables = [self._rows_of(table) for table in batch.tables]
        table = tables[0] if len(tables) == 1 else np.concatenate(tables)
        occurs = np.zeros(len(table), dtype=np.bool_)
        occurs[ranks] = True
        found = np.empty(len(costs), dtype=_CANDIDATE)
        found["cost"], found["blocks"] = costs, blocks
        found["rank"] = (occurs.cumsum() - 1)[ranks]
        return table[occurs], found

    def _rows_of(self, base: Sequence[RankId]) -> npt.NDArray[Any]:
        """Ranks as rows; those of a tuple are cached."""
        rows = self._rank_rows.get(base) if isinstance(base, tuple) else None
        if rows is None:
            rows = np.array([(rank.worker_id, rank.dp_rank) for rank in base], dtype=_RANK)
            if isinstance(base, tuple):
                self._rank_rows.put(base, rows)
        return rows


_NO_DECISIONS = DecisionBatch(0, 0)


@dataclass(frozen=True, slots=True)
class LoggedBatch:
    """One record: decisions of one router, and reports."""

    router_id: str
    written_at_ms: int
    share: float
    family_tokens: int
    fleets: tuple[FleetSize, ...]
    reports: tuple[Report, ...]
    _datum: Mapping[str, Any] = field(repr=False)

    def __len__(self) -> int:
        return len(self._datum["request_ids"])

    def decisions(self, *, terms: bool = True) -> Iterator[LoggedDecision]:
        """The decisions, in the order in which they were made; without `terms`, they have no candidates.

        Raises BadRecord if the columns do not fit together.
        """
        try:
            yield from self._decisions(terms)
        except (ValueError, IndexError, TypeError) as exc:
            raise BadRecord("bad_decisions", f"the columns of a batch of decisions do not fit together: {exc}") from exc

    def _decisions(self, with_terms: bool) -> Iterator[LoggedDecision]:
        datum = self._datum
        kinds = [
            (DecisionKind(*(kind[name] for name in DecisionKind._fields)), tuple(kind["term_names"]))
            for kind in datum["kinds"]
        ]
        ranks = [RankId(WorkerId(w), DpRank(d)) for w, d in np.frombuffer(datum["ranks"], dtype=_RANK).tolist()]
        candidates = np.frombuffer(datum["candidates"], dtype=_CANDIDATE).tolist()
        terms = np.frombuffer(datum["terms"], dtype="<f4").tolist()
        families = np.frombuffer(datum["families"], dtype="<u8")
        rows = np.frombuffer(datum["decisions"], dtype=DECISION).tolist()
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
        rows = np.frombuffer(datum["reports"], dtype=_REPORT).tolist()
        reports = tuple(Report(name, *row) for name, row in zip(datum["reported_ids"], rows, strict=True))
    except ValueError as exc:
        raise BadRecord("bad_decisions", f"the reports of a batch of decisions do not fit together: {exc}") from exc
    fleets = tuple(FleetSize(*(each[name] for name in FleetSize._fields)) for each in datum["fleets"])
    return LoggedBatch(
        datum["router_id"], datum["written_at_ms"], datum["share"], datum["family_tokens"], fleets, reports, datum
    )
