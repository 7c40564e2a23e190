"""The Prometheus page of a simulated engine, under vLLM's names.

What lives here: names, help texts and labels. What must not: counting; every value comes from the engine model, and is
read when the page is scraped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from streams.lab.engines.engine_config import EngineConfig
from streams.lab.engines.engine_messages import EngineStats

CONTENT_TYPE = CONTENT_TYPE_LATEST


class SimulatedMetrics(Collector):
    """One engine's metrics in a registry of their own. A metric that vLLM renamed appears under both names."""

    def __init__(
        self, config: EngineConfig, model: str, dp_rank: int, started_at_s: float, read: Callable[[], EngineStats]
    ) -> None:
        self._config = config
        self._labels = {"model_name": model, "engine": str(dp_rank)}
        self._started_at_s = started_at_s
        self._read = read
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def page(self) -> bytes:
        """Return the page of `GET /metrics`."""
        return generate_latest(self._registry)

    def collect(self) -> Iterable[Metric]:
        """Return all families with their present values."""
        stats, labels = self._read(), self._labels
        usage = stats.n_blocks_used / stats.n_blocks_total
        for name, text, value in (
            ("vllm:num_requests_running", "Requests prefilling or decoding.", stats.n_running),
            ("vllm:num_requests_waiting", "Requests waiting to be processed.", stats.n_waiting),
            ("vllm:kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", usage),
            ("vllm:gpu_cache_usage_perc", "KV-cache usage, its name before vLLM 0.11.", usage),
        ):
            yield _one(GaugeMetricFamily(name, text, labels=list(labels)), labels, value)
        for name, text, value in (
            ("vllm:prefix_cache_queries", "Prefix cache queries, in tokens.", stats.queried_tokens),
            ("vllm:prefix_cache_hits", "Prefix cache hits, in tokens.", stats.hit_tokens),
            ("vllm:external_prefix_cache_queries", "Shared pool queries, in tokens.", stats.pool_queried_tokens),
            ("vllm:external_prefix_cache_hits", "Shared pool hits, in tokens.", stats.loaded_tokens),
            ("vllm:prompt_tokens", "Prefill tokens processed.", stats.queried_tokens),
            ("vllm:generation_tokens", "Generation tokens processed.", stats.generated_tokens),
            ("vllm:request_success", "Successfully processed requests.", stats.n_finished),
        ):
            yield _one(CounterMetricFamily(name, text, labels=list(labels)), labels, value)
        cache = {**labels, "block_size": str(self._config.block_size), "num_gpu_blocks": str(self._config.n_blocks)}
        cache["enable_prefix_caching"] = "True"
        info = GaugeMetricFamily("vllm:cache_config_info", "LLMEngine's CacheConfig.", labels=list(cache))
        yield _one(info, cache, 1)
        # Without labels, as the Prometheus client's own process collector writes it.
        start = GaugeMetricFamily("process_start_time_seconds", "Start time of the process since unix epoch.")
        yield _one(start, {}, self._started_at_s)


def _one(family: Any, labels: dict[str, str], value: float) -> Metric:
    """Return a family with its one sample."""
    family.add_metric(list(labels.values()), value)
    assert isinstance(family, Metric)
    return family
