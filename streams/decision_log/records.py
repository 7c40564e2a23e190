"""Decisions as the log keeps them: values, and the bytes of a record of `router-decisions` (pure).

What lives here: `DecisionEncoder`, which a router uses, and `decode_batch` for readers. What must not: Kafka, clocks,
and what a decision means (words, trace).

A record has many decisions as packed rows, and everything that many of them share once. All numbers of a batch are
converted by a few NumPy calls. One Avro record for each decision would cost a router three times as much.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from streams.codec import codec
from streams.core.ids import DpRank, HashArray, Int64Array, RankId, WorkerId
from streams.core.routing.by_policy import PolicyColumns
from streams.core.routing.cost import TermColumns
from streams.core.routing.eligibility import base_of
from streams.core.routing.identity_cache import IdentityCache
from streams.decision_log.families import FAMILY_TOKENS, FamilyKeys, family_positions, salted
from streams.errors import BadRecord

SCHEMA = "router-decisions"

#: Flags of a decision.
BOOKED, PREFERRED = 1, 2

#: Terms of the modes without a policy by name.
COST_TERMS = ("own_prefill_blocks", "active_prefill_blocks", "decode_blocks", "effective_cached_blocks")

#: Further terms, of decisions that have them.
CXL_TERM, MOE_TERM = "cxl_accessible_blocks", "moe_matching_blocks"

_U32_MAX = (1 << 32) - 1
_HASH_BYTES = 8

_DECISION = np.dtype(
    [
        ("decided_at_ms", "<i8"),
        ("queued_ms", "<u4"),
        ("n_tokens", "<u4"),
        ("request_blocks", "<u4"),
        ("expected_output_tokens", "<u4"),
        ("n_eligible", "<u4"),
        ("n_lowest", "<u4"),
        ("kind", "<u2"),
        ("n_families", "<u2"),
        ("n_candidates", "u1"),
        ("flags", "u1"),
    ]
)
_RANK = np.dtype([("worker_id", "<u8"), ("dp_rank", "<u4")])
_CANDIDATE = np.dtype([("cost", "<f8"), ("rank", "<u4"), ("blocks", "<u4")])
_REPORT = np.dtype([("ended_at_ms", "<i8"), ("prefilled_at_ms", "<i8"), ("output_tokens", "<u4")])


#: Packing a row by struct takes a fifth of the time of a row of NumPy's from a tuple.
_PACK_DECISION = struct.Struct("<qIIIIIIHHBB").pack
_PACK_REPORT = struct.Struct("<qqI").pack


class DecisionKind(NamedTuple):
    """What many decisions have in common; the schema explains the fields."""

    model: str
    block_size: int
    router_mode: str
    policy: str
    temperature: float
    mode: str
    degraded_because: str | None
    chosen_mode: str
    chosen_degraded_because: str | None
    phase: str | None = None


class NotedDecision(NamedTuple):
    """A decision as a router notes it, before anything is computed for the log.

    sequence: the prompt's sequence hashes, packed. columns: as in Decision. chosen: its index.
    """

    request_id: str
    decided_at_ms: int
    queued_ms: int
    kind: DecisionKind
    n_tokens: int
    request_blocks: int
    expected_output_tokens: int | None
    sequence: bytes
    columns: TermColumns | PolicyColumns
    chosen: int
    flags: int


class Report(NamedTuple):
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


class DecisionEncoder:
    """Encodes batches for one router. Not thread-safe."""

    def __init__(self, keys: FamilyKeys, n_best: int, share: float) -> None:
        """keys: of the families. n_best: cheapest candidates that are kept in addition to the chosen one."""
        self._keys = keys
        self._n_best = n_best
        self._share = share
        self._rank_rows: IdentityCache[npt.NDArray[Any]] = IdentityCache()

    def encode(
        self,
        decisions: Sequence[NotedDecision],
        reports: Sequence[Report],
        fleets: Sequence[FleetSize],
        router_id: str,
        written_at_ms: int,
    ) -> bytes:
        """Encode one record; raises KvStreamsError for what does not fit the schema."""
        kinds: dict[tuple[DecisionKind, tuple[str, ...]], int] = {}
        groups: dict[tuple[Any, ...], list[int]] = {}
        rows: list[bytes] = []
        at_families: list[Int64Array] = []
        # Columns and kinds of most decisions are alike, and the same objects. Comparing these takes less time.
        last_kind: DecisionKind | None = None
        last_names: tuple[str, ...] | None = None
        number = 0
        for position, noted in enumerate(decisions):
            kind, columns = noted.kind, noted.columns
            names, ranks = _term_names(columns), columns.ranks
            if kind is not last_kind or names is not last_names:
                last_kind, last_names = kind, names
                number = kinds.setdefault((kind, names), len(kinds))
            group: tuple[Any, ...] = (names, id(ranks))
            if type(ranks) is not tuple:
                group = (names, *map(id, base_of(ranks)))
            same = groups.get(group)
            if same is None:
                groups[group] = [position]
            else:
                same.append(position)
            families = family_positions(len(noted.sequence) // _HASH_BYTES, kind.block_size)
            at_families.append(families)
            expected = noted.expected_output_tokens
            rows.append(
                _PACK_DECISION(
                    noted.decided_at_ms,
                    noted.queued_ms,
                    noted.n_tokens,
                    noted.request_blocks,
                    0 if expected is None else min(expected, _U32_MAX),
                    len(ranks),
                    0,
                    number,
                    len(families),
                    0,
                    noted.flags,
                )
            )
        packed = np.frombuffer(bytearray().join(rows), dtype=_DECISION)
        rank_rows, candidates, terms = self._candidates(decisions, groups, packed)
        return codec(SCHEMA).encode(
            {
                "router_id": router_id,
                "written_at_ms": written_at_ms,
                "share": self._share,
                "family_tokens": FAMILY_TOKENS,
                "kinds": [{**kind._asdict(), "term_names": names} for kind, names in kinds],
                "request_ids": [noted.request_id for noted in decisions],
                "decisions": packed.tobytes(),
                "ranks": rank_rows,
                "candidates": candidates,
                "terms": terms,
                "families": salted(_at(decisions, at_families), self._keys).astype("<u8", copy=False).tobytes(),
                "reported_ids": [each.request_id for each in reports],
                "reports": b"".join([_PACK_REPORT(*each[1:]) for each in reports]),
                "fleets": [each._asdict() for each in fleets],
            }
        )

    def _candidates(
        self, decisions: Sequence[NotedDecision], groups: Mapping[tuple[Any, ...], list[int]], packed: npt.NDArray[Any]
    ) -> tuple[bytes, bytes, bytes]:
        """Select and pack the candidates; return ranks, candidates and terms. Sets two columns of `packed`.

        groups: decisions with the same terms of the same ranks.
        """
        tables: list[npt.NDArray[Any]] = []
        parts: list[tuple[list[int], Int64Array, npt.NDArray[Any], npt.NDArray[Any]]] = []
        offset = 0
        for positions in groups.values():
            columns = [decisions[position].columns for position in positions]
            chosen = np.array([decisions[position].chosen for position in positions])
            base, at = base_of(columns[0].ranks)
            costs = _side_by_side([each.cost for each in columns])
            listed, kept = _listed(costs, chosen, self._n_best)
            counts = kept.sum(axis=1)
            packed["n_candidates"][positions] = counts
            packed["n_lowest"][positions] = (costs == costs.min(axis=1, keepdims=True)).sum(axis=1)
            found = np.empty(int(counts.sum()), dtype=_CANDIDATE)
            found["cost"] = np.take_along_axis(costs, listed, axis=1)[kept]
            blocks = _side_by_side([_scores(each) for each in columns])
            found["blocks"] = np.take_along_axis(blocks, listed, axis=1)[kept]
            found["rank"] = (listed if at is None else at[listed])[kept] + offset
            terms = np.take_along_axis(_terms(columns), listed[:, None, :], axis=2).transpose(0, 2, 1)[kept]
            parts.append((positions, counts, found, terms.astype("<f4")))
            tables.append(self._rows_of(base))
            offset += len(base)
        if not parts:
            return b"", b"", b""
        used, numbers = np.unique(np.concatenate([each[2]["rank"] for each in parts]), return_inverse=True)
        ranks = np.concatenate(tables)[used].tobytes()
        start = 0
        for _, _, found, _ in parts:
            found["rank"] = numbers[start : start + len(found)]
            start += len(found)
        if len(parts) == 1:
            return ranks, parts[0][2].tobytes(), parts[0][3].tobytes()
        pieces = [(b"", b"")] * len(decisions)
        for positions, counts, found, terms in parts:
            at_row = 0
            for position, n in zip(positions, counts.tolist(), strict=True):
                pieces[position] = found[at_row : at_row + n].tobytes(), terms[at_row : at_row + n].tobytes()
                at_row += n
        return ranks, b"".join(each[0] for each in pieces), b"".join(each[1] for each in pieces)

    def _rows_of(self, base: Sequence[RankId]) -> npt.NDArray[Any]:
        """Ranks as rows; those of a tuple are cached."""
        rows = self._rank_rows.get(base) if isinstance(base, tuple) else None
        if rows is None:
            rows = np.array([(rank.worker_id, rank.dp_rank) for rank in base], dtype=_RANK)
            if isinstance(base, tuple):
                self._rank_rows.put(base, rows)
        return rows


def _listed(
    costs: npt.NDArray[np.float64], chosen: Int64Array, n_best: int
) -> tuple[Int64Array, npt.NDArray[np.bool_]]:
    """Select the chosen candidate and the cheapest ones: positions int64[n, k], and which of them count.

    costs: float64[n, n_candidates]. A chosen candidate that is among the cheapest counts once.
    """
    n = min(n_best, costs.shape[1])
    if not n:
        return chosen[:, None], np.ones((len(chosen), 1), dtype=np.bool_)
    if n < costs.shape[1]:
        best = np.argpartition(costs, n - 1, axis=1)[:, :n]
    else:
        best = np.broadcast_to(np.arange(n), costs.shape)
    order = np.argsort(np.take_along_axis(costs, best, axis=1), axis=1, kind="stable")
    best = np.take_along_axis(best, order, axis=1)
    listed = np.concatenate([chosen[:, None], best], axis=1)
    kept = np.ones(listed.shape, dtype=np.bool_)
    kept[:, 1:] = best != chosen[:, None]
    return listed, kept


def _at(decisions: Sequence[NotedDecision], positions: Sequence[Int64Array]) -> HashArray:
    """The sequence hashes of all decisions at their own positions."""
    if not decisions:
        return np.empty(0, dtype=np.uint64)
    hashes = np.frombuffer(b"".join([noted.sequence for noted in decisions]), dtype="<u8")
    ends = np.cumsum([len(noted.sequence) // _HASH_BYTES for noted in decisions])
    starts = np.repeat(np.concatenate([[0], ends[:-1]]), [len(each) for each in positions])
    found: HashArray = hashes[np.concatenate(positions) + starts]
    return found


def _side_by_side(arrays: Sequence[Any]) -> npt.NDArray[Any]:
    """What np.stack returns for arrays of the same shape, in a tenth of its time for small ones."""
    return np.concatenate(arrays).reshape(len(arrays), *arrays[0].shape)


def _scores(columns: TermColumns | PolicyColumns) -> Int64Array:
    return columns.held.scores if isinstance(columns, PolicyColumns) else columns.scores


def _more(columns: TermColumns | PolicyColumns) -> tuple[Int64Array | None, Int64Array | None]:
    """Columns that few decisions have: CXL-accessible and MoE-matching blocks."""
    held = columns.held if isinstance(columns, PolicyColumns) else columns
    return held.cxl_accessible_scores, held.moe_scores


def _term_names(columns: TermColumns | PolicyColumns) -> tuple[str, ...]:
    """The same object for most decisions of one mode."""
    names = columns.prices.names if isinstance(columns, PolicyColumns) else COST_TERMS
    cxl, moe = _more(columns)
    if cxl is None and moe is None:
        return names
    return (*names, *([] if cxl is None else [CXL_TERM]), *([] if moe is None else [MOE_TERM]))


def _terms(group: Sequence[TermColumns | PolicyColumns]) -> npt.NDArray[np.float64]:
    """The terms of decisions that have the same ones: float64[n, n_terms, n_candidates], in the order of the names."""
    first = group[0]
    if isinstance(first, PolicyColumns):
        parts = [_side_by_side([each.prices.terms for each in group])]  # type: ignore[union-attr]
    else:
        parts = [
            _side_by_side([each.terms for each in group])[:, :3],  # type: ignore[union-attr]
            _side_by_side([each.effective_cached_blocks for each in group])[:, None],  # type: ignore[union-attr]
        ]
    for number, column in enumerate(_more(first)):
        if column is not None:
            parts.append(_side_by_side([_more(each)[number] for each in group])[:, None])
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)


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
        rows = np.frombuffer(datum["decisions"], dtype=_DECISION).tolist()
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
