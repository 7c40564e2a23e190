"""One recorded decision in words (pure).

What lives here: the sentences and the table of `kvstreams explain`. What must not: reading the log.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from types import MappingProxyType

from streams.core.ids import RankId
from streams.core.routing.selection import RouterMode
from streams.core.routing.trust import AnswerMode, DegradedReason
from streams.decision_log.records import LoggedCandidate, LoggedDecision, OutcomeReport

#: What each answer mode says about what the router knew.
TRUST: Mapping[str, str] = MappingProxyType(
    {
        AnswerMode.EXACT: "The router knew exactly which blocks every eligible rank held.",
        AnswerMode.DEGRADED: "What the router knew about the eligible ranks' blocks may have been incomplete",
        AnswerMode.APPROXIMATE: "The blocks of at least one eligible rank were predicted, or known only in part.",
        AnswerMode.FALLBACK: "The index was not used, so the choice follows from load alone or from the mode.",
    }
)

#: Why an answer is degraded, as the end of a sentence.
REASONS: Mapping[str, str] = MappingProxyType(
    {
        DegradedReason.NO_EVENTS_YET: "no event of a rank had arrived yet",
        DegradedReason.BRIDGE_SILENT: "a rank's bridge was silent",
        DegradedReason.FEED_BEHIND: "a bridge was behind its engine",
        DegradedReason.EVENTS_LOST: "events of a rank were lost",
        DegradedReason.REMOVED: "a rank had been removed",
        DegradedReason.OVER_CAPACITY: "the router's index was over capacity",
        DegradedReason.OWNER_SILENT: "the agent that owns a rank's partition was silent",
        DegradedReason.OWNER_BEHIND: "the index was behind the events of a rank",
        DegradedReason.LABELS_OVER_CAPACITY: "labels of blocks had been dropped",
        DegradedReason.POOLED_OVER_CAPACITY: "rows of pooled blocks had been dropped",
        DegradedReason.POOLED_OWNER_SILENT: "the agent that owns pooled blocks was silent",
        DegradedReason.POOLED_OWNER_BEHIND: "the table of pooled blocks was behind its events",
        DegradedReason.POOLED_RANK_UNKNOWN: "evictions of a rank with blocks in a pool may have been missing",
        DegradedReason.AUDIT_DISAGREES: "a rank's engine had found fewer cached blocks than the index had",
        DegradedReason.BOOKINGS_NOT_IN_SYNC: "Kafka did not answer, so routers lacked each other's bookings",
    }
)

#: What a term means, after a number.
TERMS: Mapping[str, str] = MappingProxyType(
    {
        "own_prefill_blocks": "blocks of this prompt to compute",
        "active_prefill_blocks": "blocks of earlier prompts to compute first",
        "decode_blocks": "blocks in use",
        "recent_prefill_blocks": "blocks for recent prefills",
        "effective_cached_blocks": "cached blocks by value",
        "cxl_accessible_blocks": "blocks in reach in a CXL pool",
        "moe_matching_blocks": "blocks with matching labels",
        "cached_blocks": "cached blocks",
        "uncached_tokens": "tokens to compute",
        "backlog_ms": "ms of work before it",
        "kv_room_ms": "ms of waiting for free blocks",
        "prefill_ms": "ms to compute the prompt",
        "load_ms": "ms to load cached blocks",
        "uncached_ms": "ms for blocks it evicts",
        "recent_prefill_ms": "ms for recent prefills",
        "popular_ms": "ms that no other request shares",
        "slowed_decodes_ms": "ms that others lose",
        "own_decode_ms": "ms to decode",
    }
)

#: Why a mode without costs chose what it chose.
_WITHOUT_COSTS: Mapping[str, str] = MappingProxyType(
    {
        RouterMode.ROUND_ROBIN: "Mode round-robin takes the ranks in turn; costs are shown, but have no effect.",
        RouterMode.RANDOM: "Mode random takes any rank; costs are shown, but have no effect.",
        RouterMode.DIRECT: "In mode direct the request names its worker; of its ranks, the one with the fewest "
        "requests wins.",
        RouterMode.LEAST_LOADED: "Mode least-loaded takes the rank with the fewest requests; costs are shown, but have "
        "no effect.",
        RouterMode.POWER_OF_TWO: "Mode power-of-two takes two ranks at random, and of these the one with fewer "
        "requests; costs are shown, but have no effect.",
        RouterMode.DEVICE_AWARE_WEIGHTED: "Mode device-aware-weighted shares requests between CPUs and other devices "
        "by their throughput; costs are shown, but have no effect.",
    }
)

#: A difference below this is not worth a word.
_SAME = 1e-6

#: Differences that are listed.
_DIFFERENCES_MAX = 4


def explanation(decision: LoggedDecision, reports: Sequence[OutcomeReport]) -> Iterator[str]:
    """Everything that is known of a decision except its candidates, line by line."""
    yield from _what(decision)
    yield ""
    yield from _known(decision)
    yield ""
    yield from _why(decision)
    yield ""
    yield from _afterwards(decision, reports)


def candidate_rows(decision: LoggedDecision) -> tuple[list[str], list[list[str]]]:
    """The candidates as a table: the names of its columns, and its rows."""
    header = ["rank", "cost", "blocks held", *decision.term_names]
    rows = []
    for position, candidate in enumerate(decision.candidates):
        name = f"{rank_text(candidate.rank)}{' (chosen)' if position == 0 else ''}"
        rows.append([name, _number(candidate.cost), str(candidate.blocks), *map(_number, candidate.terms)])
    return header, rows


def rank_text(rank: RankId) -> str:
    """A rank as people write it."""
    return f"{rank.worker_id}/{rank.dp_rank}"


def time_text(at_ms: int) -> str:
    """A time with milliseconds, in UTC."""
    return datetime.fromtimestamp(at_ms / 1000.0, UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3] + " UTC"


def _what(decision: LoggedDecision) -> Iterator[str]:
    kind = decision.kind
    mode = f"{kind.router_mode} ({kind.policy})" if kind.policy else kind.router_mode
    model = f" for model {kind.model}" if kind.model else ""
    yield (
        f"Request {decision.request_id}{model} was routed to {rank_text(decision.chosen)} at "
        f"{time_text(decision.decided_at_ms)}, in mode {mode}, by router {decision.router_id}."
    )
    prompt = f"Its prompt has {decision.n_tokens:,} tokens, {_blocks(decision.request_blocks)} of {kind.block_size}"
    if decision.expected_output_tokens is not None:
        prompt += f"; the client expected an answer of at most {decision.expected_output_tokens:,} tokens"
    yield prompt + "."
    if kind.phase is not None:
        yield f"The decision was for the phase {kind.phase} only."
    if decision.queued_ms:
        yield f"The request waited {decision.queued_ms:,} ms in the router before that."
    if not decision.booked:
        yield "Nothing was booked (update_states=false), so the request may have gone elsewhere."


def _known(decision: LoggedDecision) -> Iterator[str]:
    kind = decision.kind
    yield _trust("", kind.mode, kind.degraded_because)
    if (kind.chosen_mode, kind.chosen_degraded_because) != (kind.mode, kind.degraded_because):
        reason = kind.chosen_degraded_because
        because = f": {REASONS.get(reason, reason)}" if reason is not None else ""
        yield f"For the chosen rank alone, the answer is {kind.chosen_mode}{because}."
    eligible = "1 rank was" if decision.n_eligible == 1 else f"{decision.n_eligible:,} ranks were"
    share = _share(decision.overlap_blocks, decision.request_blocks)
    yield f"{eligible} eligible. The chosen one held {_blocks(decision.overlap_blocks)} of the prompt ({share})."


def _trust(prefix: str, mode: str, reason: str | None) -> str:
    text = TRUST.get(mode, f"The answer was {mode}.")
    if reason is not None:
        text = f"{text.rstrip('.')}: {REASONS.get(reason, reason)}."
    return f"{prefix}{text}"


def _why(decision: LoggedDecision) -> Iterator[str]:
    kind, chosen = decision.kind, decision.candidates[0]
    if decision.n_eligible == 1:
        yield "It was the only candidate: by filters of the request, by its session, or because all others were busy."
        return
    if not decision.preferred:
        yield "The mode had nothing to choose by, such as reports of engines, and took a rank by load or at random."
        return
    without = _WITHOUT_COSTS.get(kind.router_mode)
    if without is not None:
        yield without
        return
    others = decision.candidates[1:]
    if not others:
        yield f"Its cost was {_number(chosen.cost)}. Other candidates were not recorded (decision_log_candidates=0)."
        return
    lowest = min(others, key=lambda candidate: candidate.cost)
    if chosen.cost > lowest.cost:
        drawn = (
            f"with temperature {kind.temperature:g}, ranks are drawn at random, cheaper ones more often"
            if kind.temperature
            else "labels, a session or the queue decided"
        )
        yield (
            f"It was not the cheapest: {rank_text(lowest.rank)} would have cost {_number(lowest.cost)} instead of "
            f"{_number(chosen.cost)}; {drawn}."
        )
        yield from _differences(decision, lowest)
        return
    if decision.n_lowest > 1:
        yield (
            f"Its cost, {_number(chosen.cost)}, was the lowest. {decision.n_lowest} ranks had this cost, and one of "
            "them was drawn."
        )
        lowest = next((candidate for candidate in others if candidate.cost > chosen.cost), lowest)
        if lowest.cost == chosen.cost:
            return
    else:
        yield f"Its cost, {_number(chosen.cost)}, was the lowest, {_number(lowest.cost - chosen.cost)} below the next."
    yield from _differences(decision, lowest)


def _differences(decision: LoggedDecision, other: LoggedCandidate) -> Iterator[str]:
    """Compare the terms of the chosen rank with those of another one, the greatest differences first."""
    chosen = decision.candidates[0]
    differing = [
        (mine - theirs, name)
        for name, mine, theirs in zip(decision.term_names, chosen.terms, other.terms, strict=True)
        if abs(mine - theirs) > _SAME
    ]
    differing.sort(key=lambda difference: -abs(difference[0]))
    if differing:
        texts = [
            f"{_number(abs(by))} {'more' if by > 0 else 'fewer'} {TERMS.get(name, name)}"
            for by, name in differing[:_DIFFERENCES_MAX]
        ]
        yield f"Compared with {rank_text(other.rank)}, it had {', '.join(texts)}."


def _afterwards(decision: LoggedDecision, reports: Sequence[OutcomeReport]) -> Iterator[str]:
    prefilled_ms = min((report.prefilled_at_ms for report in reports if report.prefilled_at_ms), default=0)
    ended_ms = max((report.ended_at_ms for report in reports), default=0)
    output_tokens = max((report.output_tokens for report in reports), default=0)
    parts = []
    if prefilled_ms:
        parts.append(f"the first token {prefilled_ms - decision.arrived_at_ms:,} ms after the request's arrival")
    if ended_ms:
        parts.append(f"the end after {ended_ms - decision.arrived_at_ms:,} ms")
    if output_tokens:
        parts.append(f"{output_tokens:,} tokens of output")
    if parts:
        yield f"Afterwards the client reported {_and(parts)}."
    else:
        yield "The client has reported nothing about the request since then."


def _and(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def _blocks(n: int) -> str:
    return f"{n:,} block{'' if n == 1 else 's'}"


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole else "no blocks"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value == round(value) else f"{value:,.2f}"
