"""Converts an engine's Prometheus page to the gauges of `worker-metrics` (docs/bridges.md). Pure.

What lives here: what each engine's metric names mean. What must not: fetching the page (scraping). The Prometheus
client's own parser reads the samples; it gets only the few relevant lines of a page that may have a thousand.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from streams.core.engine_metrics import WorkerMetrics
from streams.core.ids import DpRank
from streams.errors import BadRecord

#: The greatest value of a gauge: more requests, blocks or tokens than a rank can have, and the greatest Avro int.
COUNT_MAX = (1 << 31) - 1

#: Labels that name the data-parallel rank of a sample: vLLM's and SGLang's.
_RANK_LABELS = ("engine", "dp_rank")

_USAGE, _WAITING, _RUNNING, _SLOTS, _USED, _TOTAL, _TOTAL_TOKENS = range(7)


class _Reading(NamedTuple):
    """The gauge that a sample reports.

    only: a label, and the value that it must have. label: the label that contains the number, None for the sample's
    own value.
    """

    gauge: int
    only: tuple[str, str] | None = None
    label: str | None = None


#: If a page has several names with one meaning, the first one here is used. Sources: each engine's own metrics, and the
#: protocol of the Gateway API's inference extension, which lists them for all engines.
_NAMES: Mapping[str, tuple[_Reading, ...]] = {
    # vLLM. It renamed the usage in 0.11, and does not report the number of slots.
    "vllm:kv_cache_usage_perc": (_Reading(_USAGE),),
    "vllm:gpu_cache_usage_perc": (_Reading(_USAGE),),
    "vllm:num_requests_waiting": (_Reading(_WAITING),),
    "vllm:num_requests_running": (_Reading(_RUNNING),),
    "vllm:cache_config_info": (_Reading(_TOTAL, label="num_gpu_blocks"),),
    # SGLang. It reported the number of pages as a label until 0.5.10, and reports it as a gauge since then.
    "sglang:token_usage": (_Reading(_USAGE),),
    "sglang:num_queue_reqs": (_Reading(_WAITING),),
    "sglang:num_running_reqs": (_Reading(_RUNNING),),
    "sglang:num_pages": (_Reading(_TOTAL),),
    "sglang:cache_config_info": (_Reading(_TOTAL, label="num_pages"),),
    "sglang:max_total_num_tokens": (_Reading(_TOTAL_TOKENS),),
    # TensorRT-LLM: first trtllm-serve, then the Triton backend.
    "trtllm_kv_cache_utilization": (_Reading(_USAGE),),
    "trtllm_num_requests_waiting": (_Reading(_WAITING),),
    "trtllm_num_requests_running": (_Reading(_RUNNING),),
    "trtllm_max_num_active_requests": (_Reading(_SLOTS),),
    "trtllm_kv_cache_used_blocks": (_Reading(_USED),),
    "trtllm_kv_cache_max_blocks": (_Reading(_TOTAL),),
    "nv_trt_llm_request_metrics": (
        _Reading(_WAITING, ("request_type", "waiting")),
        _Reading(_RUNNING, ("request_type", "active")),
        _Reading(_SLOTS, ("request_type", "max")),
    ),
    "nv_trt_llm_kv_cache_block_metrics": (
        _Reading(_USAGE, ("kv_cache_block_type", "fraction")),
        _Reading(_USED, ("kv_cache_block_type", "used")),
        _Reading(_TOTAL, ("kv_cache_block_type", "max")),
    ),
}
#: The label in which an engine reports the size of its blocks, by the name of the sample.
_BLOCK_SIZE_LABELS = {"vllm:cache_config_info": "block_size", "sglang:cache_config_info": "page_size"}
_BLOCK_SIZE_PREFIXES = tuple(name.encode() for name in _BLOCK_SIZE_LABELS)

#: vLLM's gauge of whether an engine sleeps: its sample with sleep_state="awake" is 0 while it does.
_SLEEP_STATE = "vllm:engine_sleep_state"

_PREFERENCE = {name: position for position, name in enumerate(_NAMES)}
_PREFIXES = tuple(_NAMES)
_RANK_PREFIXES = tuple(name.encode() for name in _NAMES)


def parse_metrics(page: bytes, *, dp_size: int, block_size: int, dp_start: int = 0) -> dict[DpRank, WorkerMetrics]:
    """Return the gauges of each of an engine's ranks that the page reports. dp_start: the first of its ranks.

    A sample without a rank label belongs to the first rank, and so does every sample of an engine with one rank only. A
    gauge that is not reported is 0. If one rank has several samples (of tensor-parallel ranks, of models), the greatest
    is used. Raises BadRecord: not_text, bad_page, bad_number, no_metrics.
    """
    try:
        page.decode()
    except UnicodeDecodeError as exc:
        raise BadRecord("not_text", f"the page is not UTF-8: {exc}") from exc
    # Rank and gauge, to the negated position of the name in _NAMES and the number.
    samples: dict[tuple[DpRank, int], tuple[int, float]] = {}
    for rank, sample in _samples_of_ranks(page, _PREFIXES, dp_size, dp_start):
        for reading in _NAMES[sample.name]:
            value = _value(reading, sample.name, sample.labels, sample.value)
            if value is not None:
                reported = (-_PREFERENCE[sample.name], value)
                key = (rank, reading.gauge)
                samples[key] = max(samples.get(key, reported), reported)
    if not samples:
        raise BadRecord("no_metrics", "the page has none of the names that vLLM, SGLang or TensorRT-LLM use")
    ranks = sorted({rank for rank, _ in samples})
    return {
        rank: _gauges({gauge: value for (of, gauge), (_, value) in samples.items() if of == rank}, block_size)
        for rank in ranks
    }


#: Counters of tokens that the engines have processed. They grow while requests run.
_TOKEN_COUNTERS = tuple(
    f"{engine}:{kind}_tokens_total" for engine in ("vllm", "sglang") for kind in ("prompt", "generation")
)


def tokens_processed(page: bytes, *, dp_size: int, dp_start: int = 0) -> dict[DpRank, float]:
    """Return how many tokens each rank has processed since its engine started; empty if the page does not report it.

    Raises BadRecord: bad_page.
    """
    tokens: dict[DpRank, float] = {}
    for rank, sample in _samples_of_ranks(page, _TOKEN_COUNTERS, dp_size, dp_start):
        tokens[rank] = tokens.get(rank, 0.0) + sample.value
    return tokens


def parse_block_size(page: bytes) -> int | None:
    """Return the number of tokens per block that a page reports; None if it reports none that can be used."""
    relevant = b"\n".join(line for line in page.split(b"\n") if line.startswith(_BLOCK_SIZE_PREFIXES))
    try:
        for family in text_string_to_metric_families(relevant.decode(errors="replace") + "\n"):
            for sample in family.samples:
                reported = sample.labels.get(_BLOCK_SIZE_LABELS.get(sample.name, ""), "")
                if reported.isascii() and reported.isdigit() and 0 < len(reported) <= 9 and int(reported) > 0:
                    return int(reported)
    except ValueError:
        pass  # `parse_metrics` reports a page that is not Prometheus text
    return None


def parse_sleep(page: bytes, *, dp_size: int, dp_start: int = 0) -> dict[DpRank, bool]:
    """Return of each rank whether it sleeps, as far as the page reports it. Raises BadRecord: bad_page."""
    sleeps: dict[DpRank, bool] = {}
    for rank, sample in _samples_of_ranks(page, (_SLEEP_STATE,), dp_size, dp_start):
        if sample.labels.get("sleep_state") == "awake":
            sleeps[rank] = sleeps.get(rank, False) or sample.value == 0.0
    return sleeps


def _samples_of_ranks(
    page: bytes, names: tuple[str, ...], dp_size: int, dp_start: int
) -> Iterator[tuple[DpRank, Sample]]:
    """Give the samples with one of these names that belong to a rank. Other lines are not parsed.

    Raises BadRecord: bad_page.
    """
    relevant = "\n".join(line for line in page.decode(errors="replace").split("\n") if line.startswith(names))
    try:
        for family in text_string_to_metric_families(relevant + "\n"):
            for sample in family.samples:
                rank = _rank_of(sample.labels, dp_size, dp_start)
                if rank is not None and sample.name in names:
                    yield rank, sample
    except ValueError as exc:
        raise BadRecord("bad_page", f"a line is not a Prometheus sample: {exc}") from exc


def ranks_on_page(page: bytes) -> frozenset[int]:
    """Return the ranks that a page names; empty if it names none, or is no Prometheus text."""
    relevant = b"\n".join(line for line in page.split(b"\n") if line.startswith(_RANK_PREFIXES))
    named: set[str] = set()
    try:
        for family in text_string_to_metric_families(relevant.decode(errors="replace") + "\n"):
            for sample in family.samples:
                named.update(sample.labels[label] for label in _RANK_LABELS if sample.labels.get(label))
    except ValueError:
        pass  # `parse_metrics` reports a page that is not Prometheus text
    return frozenset(int(text) for text in named if text.isascii() and text.isdigit() and len(text) <= 9)


def _rank_of(labels: Mapping[str, str], dp_size: int, dp_start: int) -> DpRank | None:
    """Return the rank of a sample; None for a rank that the engine does not have."""
    if dp_size == 1:
        return DpRank(dp_start)
    named = next((labels[label] for label in _RANK_LABELS if labels.get(label)), str(dp_start))
    if not named.isascii() or not named.isdigit() or len(named) > 9 or not 0 <= int(named) - dp_start < dp_size:
        return None
    return DpRank(int(named))


def _value(reading: _Reading, name: str, labels: Mapping[str, str], value: float) -> float | None:
    """Return the number of a sample; None if it has none, which happens while an engine starts."""
    if reading.only is not None and labels.get(reading.only[0]) != reading.only[1]:
        return None
    if reading.label is not None:
        reported = labels.get(reading.label, "")
        if not reported.isascii() or not reported.isdigit() or len(reported) > 18:
            return None
        value = float(reported)
    if math.isnan(value):
        return None
    if not 0.0 <= value <= COUNT_MAX:
        raise BadRecord("bad_number", f"{name} is {value}")
    return value


def _gauges(reported: Mapping[int, float], block_size: int) -> WorkerMetrics:
    total = int(reported.get(_TOTAL, reported.get(_TOTAL_TOKENS, 0.0) // block_size))
    usage = reported.get(_USAGE)
    used = reported.get(_USED)
    if used is None:
        used = (usage or 0.0) * total
    if usage is None:
        usage = used / total if total else 0.0
    return WorkerMetrics(
        gpu_cache_usage_perc=min(usage, 1.0),  # engines that round to pages may report slightly more than 1
        num_requests_waiting=int(reported.get(_WAITING, 0.0)),
        request_active_slots=int(reported.get(_RUNNING, 0.0)),
        request_total_slots=int(reported.get(_SLOTS, 0.0)),
        kv_active_blocks=round(used),
        kv_total_blocks=total,
    )
