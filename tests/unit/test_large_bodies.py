"""Large bodies give the same errors as small ones (router_api.http.body_parsing)."""

from __future__ import annotations

import pytest

from streams.errors import InvalidRequest
from streams.router_api.http.body_parsing import LargeBody
from streams.router_api.messages.requests import RouteRequest


@pytest.mark.parametrize("start", [b'{"token_ids": ', b'{"allowed_worker_ids": ', b'{"router_config_override": '])
@pytest.mark.parametrize("opening", [b"[", b'{"a":'])
def test_a_large_body_that_is_nested_too_deeply_is_refused(start: bytes, opening: bytes) -> None:
    """The parser reaches the limit of its recursion, which is a fault of the body and not of the router."""
    with pytest.raises(InvalidRequest):
        LargeBody(RouteRequest).parse(start + opening * 300_000, 1000)
