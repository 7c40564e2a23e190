"""From which other engine an engine is to pull blocks of a prompt, and what clients see of sources (pure).

What lives here: the condition, the request that says so, and the sources of an answer as a header. What must not: which
sources there are, which is the router's, and prefill workers (disaggregation).

Whatever goes wrong with a pull, the engine computes the prompt itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import quote

import orjson

from streams.frontend.disaggregation import PARAMS_FIELD, fields_to_split


def source_to_pull(answer: Mapping[str, Any], block_size: int, tokens_min: int) -> Mapping[str, Any] | None:
    """Return the first source from which the chosen worker's engine is to pull blocks of the prompt; None for none.

    answer: of POST /route with `kv_sources`. tokens_min: the setting front_kv_pull_tokens_min; 0 disables this.
    """
    if not tokens_min:
        return None
    n_blocks = answer["overlap_blocks"] + answer.get("pooled_blocks", 0)
    for source in answer.get("kv_sources", ()):
        if PARAMS_FIELD in source and (source["blocks"] - n_blocks) * block_size >= tokens_min:
            found: Mapping[str, Any] = source
            return found
    return None


def pulling_body(body: bytes, source: Mapping[str, Any]) -> bytes | None:
    """Return a request that makes its engine pull blocks from a source; None for one that has to stay as it came.

    Those are the requests that cannot be split either: an engine computes several answers, or an answer that says
    something about the prompt, in other ways.
    """
    fields = fields_to_split(body)
    return None if fields is None else orjson.dumps({**fields, PARAMS_FIELD: source[PARAMS_FIELD]})


def rank_name(source: Mapping[str, Any]) -> str:
    """Return the rank of a source as headers name it."""
    return f"{source['worker_id']}/{source['dp_rank']}"


def sources_header(sources: Iterable[Mapping[str, Any]]) -> str:
    """Return the sources of an answer as the value of a header. The ids of pools are encoded as in a URL."""
    return ", ".join(f"{_name_of(source)};blocks={source['blocks']};tier={source['tier']}" for source in sources)


def _name_of(source: Mapping[str, Any]) -> str:
    return f"pool={quote(source['pool_id'])}" if "pool_id" in source else f"rank={rank_name(source)}"
