"""A router without Kafka and HTTP: requests, pooled blocks and labels of its ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from streams.core.cxl_memory import CxlMemoryState
from streams.core.events import MoeLabels
from streams.core.hashing import local_hashes, sequence_hashes
from streams.core.ids import EngineHash, Incarnation, SequenceHash, WorkerId
from streams.core.routing.selection import RouterMode
from streams.cxl.events import CxlPool
from streams.cxl.records import BlockKey, BlockRow, Placement, block_key, encode_block, encode_pool, pool_key
from streams.router_api.deciding.router import Router
from streams.router_api.messages.answer_json import answer_json
from streams.router_api.messages.requests import parse_route_query
from streams.settings import Settings
from streams.tables.records import RUN_KEY, encode_run
from tests.helpers.api import TOKENS, packed
from tests.helpers.runs import run_of
from tests.helpers.views import BLOCK_SIZE, rank, register

LOCAL = local_hashes(TOKENS, BLOCK_SIZE)
CHAIN = [SequenceHash(block) for block in sequence_hashes(LOCAL).tolist()]
PLACED = Placement(CxlMemoryState.CXL_POOLED, "p", 0, (), "m", Incarnation(1), 0)
QUERY = {"layer_id": 2, "expert_ids": [7], "expert_group": 3}
LABELS = MoeLabels(2, 7, 3)

#: The owner of the pooled blocks, which is not registered.
DEAD = 9


def router_of(n_workers: int = 3, **knobs: Any) -> Router:
    """A router of mode kv, whose costs can be computed by hand, unless `knobs` name another one."""
    router = Router(Settings(**{"router_replica_sync": False, "router_mode": RouterMode.KV, **knobs}))
    router.feeds.pending = dict  # type: ignore[method-assign]  # as if all were read
    for worker_id in range(1, n_workers + 1):
        register(router.view, worker_id, kv_total_blocks=100)
    return router


def ask(router: Router, name: str = "r", tokens: Sequence[int] = tuple(TOKENS), **fields: Any) -> dict[str, Any]:
    query = {"request_id": name, **{key: str(value) for key, value in fields.items()}}
    return answer_json(router.route(parse_route_query(query), packed(tokens)))


def put(router: Router, *positions: int, placement: Placement = PLACED, owner: int = DEAD) -> None:
    """Blocks of the request are pooled; by default their owner is a removed worker."""
    for at in positions:
        row = BlockRow(placement, CHAIN[at - 1] if at else None, at, EngineHash(at))
        router.view.fold_pooled(block_key(BlockKey(CHAIN[at], rank(owner), "p")), encode_block(row))


def hosts(router: Router, *workers: int) -> None:
    pool = CxlPool("p", members=tuple(map(WorkerId, workers)))
    router.view.fold_worker(pool_key("p"), encode_pool(pool))


def label(router: Router, worker_id: int, first: int, last: int, labels: MoeLabels = LABELS) -> None:
    run = run_of(LOCAL, rank(worker_id), first, last, moe=dict.fromkeys(range(last - first), labels))
    router.view.fold_index(RUN_KEY.pack(run.key), encode_run(run))
