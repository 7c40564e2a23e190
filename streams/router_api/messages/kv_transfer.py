"""What an engine is told so that it pulls blocks of a prompt from another engine.

What lives here: the `kv_transfer_params` of a source (docs/http.md), in the one format of an engine that finds blocks
by their hashes: vLLM's OffloadingConnector with a tier of the type `p2p`. What must not: which engine is a source
(core.routing.sources).

The NixlConnector has no such format: it reads blocks by the numbers of their places in the other engine's memory, of a
request that this engine has kept for it. Only the engine's own answer has them (frontend.disaggregation).
"""

from __future__ import annotations

import uuid
from typing import Any
from urllib.parse import urlsplit

from streams.core.ids import DpRank


def pull_params(worker_url: str, dp_rank: DpRank, p2p_port: int) -> dict[str, Any]:
    """Return what makes a vLLM engine look the prompt's blocks up in another one's host memory, and pull those it has.

    worker_url: where the other engine takes requests. dp_rank: by the engine's own number. p2p_port: the setting
    router_kv_p2p_port; each rank listens at this port plus its number.
    """
    return {
        "remote_kv_source": {
            "kv_request_id": uuid.uuid4().hex,  # names one pull; a request that is sent again is another one
            "remote_host": urlsplit(worker_url).hostname,
            "remote_port": p2p_port + dp_rank,
        }
    }
