"""Report the blocks of a KV connector of vLLM: hooks of its connector interface call the publisher.

vLLM calls these hooks of a connector on its scheduler's side: `request_finished` when a request has ended, and
`shutdown` at the end. The connector below keeps the blocks of finished requests in a store of its own (here only their
hashes, in host memory), and reports what it stores and evicts. The engine itself must publish no events then (no
`--kv-events-config`), because one rank has one writer.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "KvStreamsConnector", "kv_role": "kv_both",
      "kv_connector_module_path": "examples.vllm_connector", "kv_connector_extra_config": {"worker_id": 7}}'

What is left out is how a block's bytes are saved and loaded (`save_kv_layer`, `start_load_kv`); vLLM's own connectors
show that. This file needs no vLLM to be imported; without it, the hooks can be called by hand, as the test does.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

from streams.core.ids import Tier
from streams.cxl import CxlMemoryMetadata
from streams.engines.publisher import KvEventPublisher
from streams.engines.stored_blocks import StoredBlock
from streams.settings import load

try:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1 as _Base
except ImportError:  # no vLLM: the hooks are called by hand
    _Base = object

#: Blocks that the store keeps; the least recently used one is evicted first.
STORED_BLOCKS_MAX = 100_000


class ReportedStore:
    """A store of blocks, by hash, that reports each change."""

    def __init__(self, publisher: KvEventPublisher, block_size: int, blocks_max: int = STORED_BLOCKS_MAX) -> None:
        self._publisher = publisher
        self._block_size = block_size
        self._blocks_max = blocks_max
        self._hashes: OrderedDict[int, None] = OrderedDict()

    def store(self, block_hashes: list[int], token_ids: list[int], pool_id: int | None = None) -> None:
        """Store the full blocks of a finished request. pool_id: the CXL pool that they lie in, if in any."""
        size, n_known = self._block_size, 0
        for block_hash in block_hashes:
            if block_hash not in self._hashes:
                break
            self._hashes.move_to_end(block_hash)
            n_known += 1
        new = [
            StoredBlock(block_hash, token_ids[at * size : (at + 1) * size], tier=Tier.HOST)
            for at, block_hash in enumerate(block_hashes)
            if at >= n_known
        ]
        if pool_id is not None:
            for stored_block in new:
                stored_block.cxl_metadata = CxlMemoryMetadata("cxl_pooled", pool_id)
        if new:
            self._publisher.stored_blocks(new, block_hashes[n_known - 1] if n_known else None)
            self._hashes.update((block.block_hash, None) for block in new)
        evicted = [self._hashes.popitem(last=False)[0] for _ in range(len(self._hashes) - self._blocks_max)]
        if evicted:
            self._publisher.removed(evicted, tier=Tier.HOST)


class KvStreamsConnector(_Base):  # type: ignore[misc]  # the base class depends on what is installed
    """The hooks that vLLM's scheduler calls."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        if _Base is not object:
            super().__init__(vllm_config, role, kv_cache_config)
        settings = load().settings
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        model = vllm_config.model_config.served_model_name or vllm_config.model_config.model
        self.publisher = KvEventPublisher(settings, extra["worker_id"], model, lease_s=settings.bridge_lease_s)
        self._store = ReportedStore(self.publisher, settings.block_size, extra.get("blocks_max", STORED_BLOCKS_MAX))
        self._pool_id = extra.get("pool_id")

    def request_finished(self, request: Any, _block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Store the blocks of a request that has ended; vLLM may free its own copies at once."""
        hashes = [_as_int(value) for value in request.block_hashes]
        self._store.store(hashes, list(request.all_token_ids), self._pool_id)
        return False, None

    def take_events(self) -> Iterable[Any]:
        """Return no events for vLLM to publish, because this connector publishes its own."""
        return ()

    def shutdown(self) -> None:
        """End the lease: the rank gets no more requests."""
        self.publisher.close()


def _as_int(block_hash: int | bytes) -> int:
    """Return a block's hash as 64 bits, as a bridge does: of bytes the last 8."""
    return int.from_bytes(block_hash[-8:], "big") if isinstance(block_hash, bytes) else block_hash
