"""vLLM's `kv_transfer_params` as a simulated engine serves them (pure).

What lives here: what a request asks for, and what its answer says. What must not: what a transfer costs (engine_config)
and when it happens (model). No bytes move, and the engine that is named is not asked: what the parameters name counts
as transferred.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from streams.errors import InvalidRequest

FIELD = "kv_transfer_params"

#: What a request names that has its prompt's blocks on another engine.
_REMOTE = ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")


class TransferRequest(NamedTuple):
    """What a request asks for.

    is_read_later: another engine will read its blocks, so the answer names them. n_blocks: leading blocks of its prompt
    that another engine has computed; 0 for none.
    """

    is_read_later: bool = False
    n_blocks: int = 0


NO_TRANSFER = TransferRequest()


def parse_transfer(body: Mapping[str, Any]) -> TransferRequest:
    """Read the transfer of a request. Raises InvalidRequest."""
    params = body.get(FIELD)
    if params is None:
        return NO_TRANSFER
    if not isinstance(params, dict):
        raise InvalidRequest(f"{FIELD} is not an object")
    if params.get("do_remote_prefill"):
        missing = [name for name in _REMOTE if not params.get(name)]
        blocks = params.get("remote_block_ids")
        if missing or not isinstance(blocks, list):
            raise InvalidRequest(f"{FIELD} with do_remote_prefill lacks {', '.join(missing) or 'remote_block_ids'}")
        return TransferRequest(n_blocks=len(blocks))
    return TransferRequest(is_read_later=bool(params.get("do_remote_decode")))


def answered_transfer(engine_id: str, url: str, n_blocks: int) -> dict[str, Any]:
    """Return what another engine needs to read the first n_blocks of a prompt from the engine at `url`."""
    address = urlsplit(url)
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": engine_id,
        "remote_block_ids": list(range(n_blocks)),
        "remote_host": address.hostname,
        "remote_port": address.port,
    }
