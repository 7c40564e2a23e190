"""Engines' Prometheus pages to gauges: the names of each engine, the rank of a sample, and pages that are refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Gauge, Histogram, generate_latest

from streams.core.engine_metrics import WorkerMetrics
from streams.core.ids import DpRank
from streams.engines.metrics import COUNT_MAX, parse_metrics, tokens_processed
from streams.errors import BadRecord

VLLM = """
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 77.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="400"} 1.0
vllm:e2e_request_latency_seconds_bucket{engine="0",le="0.3",model_name="m"} 9.0
"""
SGLANG = """
sglang:num_running_reqs{engine_type="unified",model_name="m",tp_rank="0",dp_rank="0"} 8.0
sglang:num_queue_reqs{engine_type="unified",model_name="m",tp_rank="0",dp_rank="0"} 4.0
sglang:token_usage{engine_type="unified",model_name="m",tp_rank="0",dp_rank="0"} 0.5
sglang:num_used_tokens{engine_type="unified",model_name="m",tp_rank="0",dp_rank="0"} 3200.0
sglang:max_total_num_tokens{engine_type="unified",model_name="m",tp_rank="0",dp_rank="0"} 6400.0
"""
TRTLLM = """
trtllm_num_requests_running{engine_type="trtllm",model_name="m"} 5
trtllm_num_requests_waiting{engine_type="trtllm",model_name="m"} 1
trtllm_max_num_active_requests{engine_type="trtllm",model_name="m"} 64
trtllm_kv_cache_utilization{engine_type="trtllm",model_name="m"} 0.62
trtllm_kv_cache_used_blocks{engine_type="trtllm",model_name="m"} 620
trtllm_kv_cache_max_blocks{engine_type="trtllm",model_name="m"} 1000
"""
TRITON = """
nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="waiting",version="1"} 1
nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="context",version="1"} 9
nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="scheduled",version="1"} 4
nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="max",version="1"} 512
nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="active",version="1"} 6
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="fraction",model="tensorrt_llm",version="1"} 0.1
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="tokens_per",model="tensorrt_llm",version="1"} 64
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="used",model="tensorrt_llm",version="1"} 624
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="max",model="tensorrt_llm",version="1"} 6239
"""
NEWER_SGLANG = SGLANG + 'sglang:num_pages{tp_rank="0"} 100\nsglang:page_size{tp_rank="0"} 64\n'
OLDER_SGLANG = SGLANG + 'sglang:cache_config_info{num_pages="200",page_size="32"} 1.0\n'


def parsed(page: str, dp_size: int = 1, block_size: int = 16) -> dict[DpRank, WorkerMetrics]:
    return parse_metrics(page.encode(), dp_size=dp_size, block_size=block_size)


def only(page: str) -> WorkerMetrics:
    (metrics,) = parsed(page).values()
    return metrics


@pytest.mark.parametrize(
    ("page", "expected"),
    [
        (VLLM, WorkerMetrics(0.25, 2, 3, 0, 100, 400)),
        (VLLM.replace("kv_cache_usage", "gpu_cache_usage"), WorkerMetrics(0.25, 2, 3, 0, 100, 400)),
        (VLLM.replace('"400"', '"None"'), WorkerMetrics(0.25, 2, 3, 0, 0, 0)),
        (SGLANG, WorkerMetrics(0.5, 4, 8, 0, 200, 400)),
        (NEWER_SGLANG, WorkerMetrics(0.5, 4, 8, 0, 50, 100)),
        (OLDER_SGLANG, WorkerMetrics(0.5, 4, 8, 0, 100, 200)),
        (TRTLLM, WorkerMetrics(0.62, 1, 5, 64, 620, 1000)),
        (TRITON, WorkerMetrics(0.1, 1, 6, 512, 624, 6239)),
    ],
    ids=["vllm", "vllm before 0.11", "vllm starting", "sglang", "sglang newer", "sglang older", "trtllm", "triton"],
)
def test_each_engines_names_are_read_as_the_same_gauges(page: str, expected: WorkerMetrics) -> None:
    """The gauges are usage, waiting, running, slots, used blocks, all blocks; names with another ending are ignored."""
    assert only(page) == expected


def test_missing_gauges_are_derived_from_others_or_0() -> None:
    """Usage is derived from used and all blocks, and used blocks from usage; every other missing gauge is 0."""
    used = "trtllm_kv_cache_used_blocks 30\ntrtllm_kv_cache_max_blocks 40\n"
    assert only(used) == WorkerMetrics(0.75, 0, 0, 0, 30, 40)
    assert only("vllm:num_requests_waiting 4\n") == WorkerMetrics(num_requests_waiting=4)
    assert only("vllm:kv_cache_usage_perc 1.0000001\n") == WorkerMetrics(gpu_cache_usage_perc=1.0)
    assert only("vllm:kv_cache_usage_perc NaN\nvllm:num_requests_waiting 1\n") == WorkerMetrics(num_requests_waiting=1)


def test_a_label_names_the_rank_of_a_sample() -> None:
    """vLLM's and SGLang's labels are read. Without one it is rank 0; samples of ranks beyond dp_size are ignored."""
    ranks = "".join(f'vllm:num_requests_waiting{{engine="{rank}"}} {10 + rank}\n' for rank in (0, 1, 3))
    assert parsed(ranks, dp_size=3) == {
        DpRank(0): WorkerMetrics(num_requests_waiting=10),
        DpRank(1): WorkerMetrics(num_requests_waiting=11),
    }
    sglang = 'sglang:num_queue_reqs{dp_rank="1"} 7\nsglang:num_queue_reqs{dp_rank=""} 5\n'
    assert {rank: each.num_requests_waiting for rank, each in parsed(sglang, dp_size=2).items()} == {0: 5, 1: 7}
    assert only('vllm:num_requests_waiting{engine="5"} 7\n').num_requests_waiting == 7  # one rank, numbered by a fleet
    for label in ("x", "1.0", "²", "9" * 5000):
        with pytest.raises(BadRecord, match="none of the names"):
            parsed(f'vllm:num_requests_waiting{{engine="{label}"}} 1\n', dp_size=2)


def test_the_greatest_of_several_samples_of_a_rank_is_used() -> None:
    """Tensor-parallel ranks report the same number, some of them slightly later."""
    page = "".join(f'sglang:num_queue_reqs{{tp_rank="{rank}"}} {n}\n' for rank, n in enumerate((3, 5, 4)))
    assert only(page).num_requests_waiting == 5


@pytest.mark.parametrize(
    ("page", "reason"),
    [
        (b"", "no_metrics"),
        (b"<html>not found</html>", "no_metrics"),
        (b"up 1\nprocess_start_time_seconds 5\n", "no_metrics"),
        (b"vllm:num_requests_waiting_by_reason 3\n", "no_metrics"),
        (b"\xff\xfe", "not_text"),
        (b"vllm:num_requests_waiting many\n", "bad_page"),
        (b'vllm:num_requests_waiting{engine="0" 1\n', "bad_page"),
        (b"vllm:num_requests_waiting -1\n", "bad_number"),
        (b"vllm:num_requests_waiting +Inf\n", "bad_number"),
        (b"vllm:num_requests_waiting 2147483648\n", "bad_number"),
    ],
)
def test_a_page_that_cannot_be_used_is_refused_with_a_reason(page: bytes, reason: str) -> None:
    """Refused are pages without a known name, without text or valid samples, and with impossible numbers."""
    with pytest.raises(BadRecord) as caught:
        parse_metrics(page, dp_size=1, block_size=16)
    assert caught.value.reason == reason


@given(
    st.text(max_size=20),
    st.integers(0, COUNT_MAX),
    st.floats(0.0, 1.0),
)
def test_pages_of_the_prometheus_client_are_read(model: str, waiting: int, usage: float) -> None:
    """The client's pages are read whatever their labels contain and whatever other metrics they have."""
    registry = CollectorRegistry()
    for name, value in (("vllm:num_requests_waiting", waiting), ("vllm:kv_cache_usage_perc", usage)):
        Gauge(name, "A gauge.", ["model_name", "engine"], registry=registry).labels(model, "0").set(value)
    Histogram("vllm:request_prompt_tokens", "Others.", ["model_name"], registry=registry).labels(model).observe(3)
    ranks = parse_metrics(generate_latest(registry), dp_size=2, block_size=16)
    assert ranks == {DpRank(0): WorkerMetrics(gpu_cache_usage_perc=usage, num_requests_waiting=waiting)}


@given(st.binary(max_size=60), st.sampled_from([b"", b"vllm:num_requests_waiting", b"vllm:cache_config_info{"]))
def test_any_bytes_are_read_or_refused(tail: bytes, head: bytes) -> None:
    """No exception but BadRecord is raised, whatever the bytes."""
    try:
        parse_metrics(head + tail, dp_size=2, block_size=16)
    except BadRecord:
        pass


def test_processed_tokens_are_counted_by_rank() -> None:
    """Prompt and generated tokens of one rank are added up; a page without these counters reports nothing."""
    page = b"""
vllm:prompt_tokens_total{engine="0",model_name="m"} 100.0
vllm:generation_tokens_total{engine="0",model_name="m"} 20.0
vllm:prompt_tokens_total{engine="1",model_name="m"} 7.0
vllm:num_requests_running{engine="0"} 3.0
"""
    assert tokens_processed(page, dp_size=2) == {0: 120.0, 1: 7.0}
    assert tokens_processed(page, dp_size=1) == {0: 127.0}
    assert tokens_processed(b"up 1\n", dp_size=1) == {}
