"""The report of a comparison: JSON, and what a reader must know about its figures (pure).

What lives here: the shape of `--json`, and warnings. What must not: a terminal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from streams.lab.compare.estimates import METRICS, ComparedModes, Estimate, complete_rounds
from streams.lab.compare.plan import ROUNDS_SOUND, Plan
from streams.lab.compare.traffic import Measured, TrafficConfig
from streams.lab.compare.variants import Variant

#: More failures than this share of a mode's requests may change its figures: those that failed are missing from them.
_FAILED_SHARE = 0.01


@dataclass(frozen=True, slots=True)
class NotPlanned:
    """Requests of the trace that the plan does not have.

    prompt_too_long: longer than --prompt-max. no_whole_round: at the end, too few for one more round.
    """

    prompt_too_long: int = 0
    no_whole_round: int = 0


#: Why a request is not part of the figures, in words. The first three are known by mode.
LEFT_OUT = {
    "washout": "in wash-outs",
    "failed": "that failed",
    "incomplete_round": "in rounds that not every mode completed",
    "ended_early": "that were not answered before the comparison was ended early",
    "no_whole_round": "at the end of the trace, too few for one more round",
    "prompt_too_long": "with prompts longer than --prompt-max",
}


def report(
    variants: Sequence[Variant],
    plan: Plan,
    config: TrafficConfig,
    measured: Measured,
    outcome: ComparedModes,
    not_planned: NotPlanned,
) -> dict[str, Any]:
    """The report as JSON. `against_first` is a ratio to the first mode, or a difference for `hit_share`.

    Each request of the trace is either one of a row's `requests`, or it is in `left_out` with one reason.
    """
    rounds = set(complete_rounds(measured.samples, len(variants)))
    n_counted = Counter(sample.variant for sample in measured.samples if sample.round in rounds)
    incomplete = Counter(sample.variant for sample in measured.samples if sample.round not in rounds)
    failed: Counter[int] = Counter()
    for (number, _), n in measured.failures.items():
        failed[number] += n
    rows = []
    for number, variant in enumerate(variants):
        row: dict[str, Any] = {"mode": variant.name, "requests": n_counted[number], "failed": failed[number]}
        row["left_out"] = {
            "washout": measured.washout[number],
            "failed": failed[number],
            "incomplete_round": incomplete[number],
        }
        row |= {name: estimate.as_json() for name, estimate in outcome.values[number].items()}
        if number:
            row["against_first"] = {name: estimate.as_json() for name, estimate in outcome.against[number - 1].items()}
        rows.append(row)
    return {
        "rows": rows,
        "left_out": {
            "washout": measured.washout.total(),
            "failed": failed.total(),
            "incomplete_round": incomplete.total(),
            "ended_early": plan.n_requests - len(measured.samples) - measured.washout.total() - failed.total(),
            "no_whole_round": not_planned.no_whole_round,
            "prompt_too_long": not_planned.prompt_too_long,
        },
        "rounds": len(rounds),
        "block_requests": plan.block_requests,
        "washout_requests": plan.washout_requests,
        "concurrency": config.concurrency,
        "speedup": config.speedup,
        "requests_sent": measured.n_ended,
        "in_flight_max": measured.in_flight_max,
        "hit_share_from": "router" if measured.n_unreported else "engine",
        "failures": [
            {"mode": variants[number].name, "message": message, "requests": n}
            for (number, message), n in measured.failures.most_common(10)
        ],
        "warnings": warnings(variants, plan, measured, len(rounds)),
        "blocks": _blocks(variants, measured),
    }


def warnings(variants: Sequence[Variant], plan: Plan, measured: Measured, n_rounds: int) -> list[str]:
    """What limits the figures, as sentences."""
    sentences = []
    if n_rounds < ROUNDS_SOUND:
        sentences.append(
            f"There are only {n_rounds} rounds, so the intervals are too narrow. Send at least "
            f"{ROUNDS_SOUND * len(variants) * plan.block_requests:,} requests, or make blocks shorter."
        )
    if measured.in_flight_max > plan.washout_requests:
        sentences.append(
            f"Up to {measured.in_flight_max} requests ran at the same time, but only {plan.washout_requests} of each "
            "block do not count, so a mode is measured while requests of another one still run. Use a longer wash-out."
        )
    n_failed = sum(measured.failures.values())
    if n_failed > _FAILED_SHARE * max(1, measured.n_ended):
        [(_, message), _] = measured.failures.most_common(1)[0]
        sentences.append(f"{n_failed} of {measured.n_ended} requests failed, most often because of: {message}")
    if measured.n_unreported:
        sentences.append(
            "The engines do not report how many tokens they had cached, so the hit share is what the router expected. "
            "vLLM reports them with --enable-prompt-tokens-details."
        )
    if measured.n_held_back:
        sentences.append(
            f"{measured.n_held_back} requests waited for others in this process: the fleet is slower than the trace."
        )
    return sentences


def left_out_in_words(left_out: Mapping[str, int]) -> str | None:
    """Why requests are not part of the figures, as a sentence; None if all of them are."""
    reasons = [f"{n:,} {LEFT_OUT[reason]}" for reason, n in left_out.items() if n]
    return f"Left out of the figures are requests: {', '.join(reasons)}." if reasons else None


def in_words(variants: Sequence[Variant], outcome: ComparedModes) -> list[str]:
    """Each mode against the first one, as a sentence per figure that differs, and one for the others."""
    sentences = []
    for variant, against in zip(variants[1:], outcome.against, strict=True):
        same = []
        for metric in METRICS:
            estimate, none = against[metric.name], 0.0 if metric.is_share else 1.0
            title = metric.name.replace("_", " ")
            if estimate.low <= none <= estimate.high:
                same.append(title)
                continue
            sentences.append(f"{variant.name} against {variants[0].name}: {title} {_amount(estimate, metric.is_share)}")
        if same:
            sentences.append(f"{variant.name} against {variants[0].name}: no difference is shown in {', '.join(same)}")
    return sentences


def _amount(estimate: Estimate, is_share: bool) -> str:
    if is_share:
        return f"{estimate.value * 100:+.1f} points ({estimate.low * 100:+.1f} to {estimate.high * 100:+.1f})"
    return f"{estimate.value:.3f} times as high ({estimate.low:.3f} to {estimate.high:.3f})"


def _blocks(variants: Sequence[Variant], measured: Measured) -> list[dict[str, Any]]:
    """The figures of each block, for plots over time."""
    blocks = []
    for round_, variant in sorted({(sample.round, sample.variant) for sample in measured.samples}):
        these = [sample for sample in measured.samples if (sample.round, sample.variant) == (round_, variant)]
        prompts = sum(sample.prompt_tokens for sample in these)
        blocks.append(
            {
                "round": round_,
                "mode": variants[variant].name,
                "requests": len(these),
                "ttft_ms_mean": round(float(np.mean([sample.ttft_ms for sample in these])), 3),
                "hit_share": round(sum(sample.cached_tokens for sample in these) / prompts, 5),
            }
        )
    return blocks
