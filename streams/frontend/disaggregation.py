"""Whether a prompt is computed on a prefill worker, and how its KV cache gets to the decode worker (pure).

What lives here: the conditions, the requests for both workers, and what their answers mean. What must not: HTTP and
bookings (prefilling), and the choice of a worker, which is the router's.

A request is bound to its decode worker first. Its prompt stays there if the worker lacks only a few of its tokens, if
the prefill workers are busy, or if the request cannot be split. Whatever goes wrong later, the decode worker gets the
request as it came and computes the prompt itself. So a request never fails because it was split.
"""

from __future__ import annotations

import enum
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar
from urllib.parse import urlsplit

import orjson

from streams.settings import KvTransfer

#: Modes of routers that choose by the workers' load at the moment of the request. There the prefill is synchronous: the
#: decode request is sent once the prefill has ended, and bootstrap fields are not used.
_SYNCHRONOUS_MODES = ("device-aware-weighted", "power-of-two")

#: What vLLM wants of a prefill whose blocks another engine will read.
_REMOTE_DECODE = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}

#: The field of a request, and of its answer, that is about its KV cache.
PARAMS_FIELD = "kv_transfer_params"
_BOOTSTRAP = ("bootstrap_host", "bootstrap_port", "bootstrap_room")

#: Rooms are signed 64-bit integers in SGLang.
BOOTSTRAP_ROOMS = 1 << 63

#: Pauses between two questions whether a prompt is in the pool, in seconds.
POOL_PAUSE_S_MIN = 0.01
POOL_PAUSE_S_MAX = 0.16


_R = TypeVar("_R", bound=Hashable)


class Split(enum.StrEnum):
    """What became of a request of a model that has prefill workers."""

    REMOTE = "remote"  # its prompt was computed on a prefill worker
    SHORT = "short"  # its decode worker lacks too few tokens
    UNSUITABLE = "unsuitable"  # it cannot be split
    BUSY = "busy"  # no prefill worker is idle enough
    FAILED = "failed"  # the prefill worker failed or refused
    NO_POOL = "no_pool"  # KV caches go through pools, and none has a prefill worker
    NOT_TRANSFERRED = "not_transferred"  # its KV cache did not become available to the decode worker


@dataclass(frozen=True, slots=True)
class ModelRoles:
    """Which roles the engines of a model have that can get requests. prefill_ids: of workers that only prefill."""

    block_size: int
    prefill_ids: tuple[int, ...] = ()
    has_decode: bool = False

    def including(self, worker_id: int, role: str) -> ModelRoles:
        """Return the roles with another engine's. An engine of both roles decodes, and is no prefill worker."""
        if role == "prefill":
            return replace(self, prefill_ids=(*self.prefill_ids, worker_id))
        return replace(self, has_decode=True)

    @property
    def splits(self) -> bool:
        """Whether requests are bound to a decode worker, since others are there for prefill."""
        return bool(self.prefill_ids) and self.has_decode


@dataclass(frozen=True, slots=True)
class SplitLimits:
    """remote_tokens_min, backlog_tokens_max: see the settings front_remote_prefill_tokens_min and
    front_prefill_backlog_tokens_max."""

    remote_tokens_min: int
    backlog_tokens_max: int


def transfer_for(configured: KvTransfer, router_mode: str) -> KvTransfer:
    """Return how the KV cache is transferred while routers are in a mode."""
    if configured is KvTransfer.BOOTSTRAP and router_mode in _SYNCHRONOUS_MODES:
        return KvTransfer.PARAMS
    return configured


def uncached_tokens(answer: Mapping[str, Any], n_tokens: int, block_size: int) -> int:
    """Return how many tokens of a prompt the chosen worker neither has nor reads in a pool. answer: of POST /route."""
    n_blocks: int = answer["overlap_blocks"] + answer.get("pooled_blocks", 0)
    return max(0, n_tokens - n_blocks * block_size)


def stays(answer: Mapping[str, Any], n_tokens: int, block_size: int, limits: SplitLimits) -> bool:
    """Whether the decode worker lacks too few tokens for a prefill elsewhere to be worthwhile."""
    # A worker always computes the last token of a prompt, so a prompt that it has whole is never worth it.
    return uncached_tokens(answer, n_tokens, block_size) < max(2, limits.remote_tokens_min)


def is_busy(answer: Mapping[str, Any], block_size: int, limits: SplitLimits) -> bool:
    """Whether the chosen prefill worker has too much to compute. answer: of POST /route with `explain`."""
    if not limits.backlog_tokens_max:
        return False
    chosen = answer["worker_id"], answer["dp_rank"]
    for row in answer.get("candidates", ()):
        if (row["worker_id"], row["dp_rank"]) == chosen:
            backlog: float = row["active_prefill_blocks"] * block_size
            return backlog > limits.backlog_tokens_max
    return False


def fields_to_split(body: bytes) -> dict[str, Any] | None:
    """Return the fields of a body if its request can be split, otherwise None."""
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(fields, dict) or any((fields.get(name) or 1) != 1 for name in ("n", "best_of")):
        return None  # several answers share one prefill, which only their engine can do
    if any(fields.get(name) for name in ("echo", "prompt_logprobs", "prompt_embeds", "use_beam_search")):
        return None  # the answer says something about the prompt, which the decode worker does not compute
    prompt = fields.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        return None  # several prompts
    if fields.get(PARAMS_FIELD) or any(fields.get(name) is not None for name in _BOOTSTRAP):
        return None  # the client does it
    return fields


def bootstrap_fields(worker_url: str, port: int, room: int) -> dict[str, Any]:
    """Return the fields with which SGLang's prefill and decode workers find each other."""
    return {"bootstrap_host": urlsplit(worker_url).hostname, "bootstrap_port": port, "bootstrap_room": room}


def prefill_body(
    fields: Mapping[str, Any],
    transfer: KvTransfer,
    bootstrap: Mapping[str, Any] | None,
    pulls: Mapping[str, Any] | None = None,
) -> bytes:
    """Return the request for the prefill worker: the prompt, and one token that nobody reads.

    pulls: what makes its engine pull blocks of the prompt from another one.
    """
    sent = {name: value for name, value in fields.items() if name not in ("stream_options", "min_tokens")}
    sent |= {"stream": False, "max_tokens": 1}
    if "max_completion_tokens" in sent:
        sent["max_completion_tokens"] = 1
    if transfer is KvTransfer.PARAMS:
        sent[PARAMS_FIELD] = {**_REMOTE_DECODE, **(pulls or {})}
    elif pulls:
        sent[PARAMS_FIELD] = pulls
    return orjson.dumps(sent | dict(bootstrap or {}))


def transferred_fields(answer: bytes) -> dict[str, Any] | None:
    """Return the fields of a prefill's answer that the decode request needs, or None if it has none."""
    try:
        page = orjson.loads(answer)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(page, dict):
        return None
    if isinstance(page.get(PARAMS_FIELD), dict) and page[PARAMS_FIELD]:
        return {PARAMS_FIELD: page[PARAMS_FIELD]}
    fields = {name: page[name] for name in _BOOTSTRAP if page.get(name) is not None}
    return fields if len(fields) == len(_BOOTSTRAP) else None


def decode_body(body: bytes, more: Mapping[str, Any]) -> bytes:
    """Return a request with the fields that tell its worker where the KV cache of its prompt is."""
    return body if not more else orjson.dumps({**orjson.loads(body), **more})


def usable_blocks(n_tokens: int, block_size: int) -> int:
    """Return how many leading blocks of a prompt a worker can use. It computes at least the last token itself."""
    return (n_tokens - 1) // block_size


def ranks_that_reach(own: Mapping[_R, int], pooled: Mapping[_R, int], n_blocks: int) -> list[_R]:
    """Return the ranks that hold or reach this many leading blocks of a prompt.

    own, pooled: the blocks that each rank holds itself, and that it reaches in pools after them; ranks without any are
    left out.
    """
    return [rank for rank in {**own, **pooled} if own.get(rank, 0) + pooled.get(rank, 0) >= n_blocks]


def pauses_s(timeout_s: float) -> Iterator[float]:
    """Yield the pauses between questions until the deadline: short ones first, because most prompts come soon."""
    pause_s, left_s = POOL_PAUSE_S_MIN, timeout_s
    while left_s > 0.0:
        yield min(pause_s, left_s)
        left_s -= pause_s
        pause_s = min(2.0 * pause_s, POOL_PAUSE_S_MAX)
