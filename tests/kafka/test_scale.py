"""GET /scale on a real Kafka: routers that share bookings have the same pools, whatever happens to workers."""

from __future__ import annotations

from typing import Any

import pytest

from streams.core.routing import saturation
from streams.process.waiting import wait_for
from streams.router_api.http import scaling
from streams.settings import Settings
from tests.helpers.api import PATIENCE_S, TOKENS, Api, served


def pools(api: Api) -> dict[tuple[str, str], dict[str, Any]]:
    """The pools of a router by model and role."""
    return {(pool["model"], pool["role"]): pool for pool in api.get("/scale")["pools"]}


def wait_for_replicas(expected: dict[tuple[str, str], int], *routers: Api) -> None:
    """Wait until each router has these pools."""

    def have_them() -> bool:
        return all({key: pool["replicas"] for key, pool in pools(each).items()} == expected for each in routers)

    wait_for(have_them, PATIENCE_S, f"the pools {expected}")


def wait_for_booked(expected: set[tuple[str, str]], *routers: Api) -> None:
    """Wait until these pools, and no others, have bookings in each router."""

    def have_them() -> bool:
        return all({key for key, pool in pools(each).items() if pool["slots"] > 0.0} == expected for each in routers)

    wait_for(have_them, PATIENCE_S, f"bookings in the pools {expected}")


def test_routers_have_the_same_pools(scope: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each model and role is a pool of its own. What one router books fills it in all, also in one that starts late."""
    monkeypatch.setattr(scaling, "READ_EVERY_S", 0.05)
    monkeypatch.setattr(saturation, "_SPAN_MS_MIN", 200.0)
    with served(scope) as api, served(scope) as peer:
        assert pools(api) == {}  # a scope without workers
        for worker, model, role in ((1, "m", "prefill"), (2, "m", "prefill"), (3, "m", "decode"), (4, "n", "both")):
            body = {"url": f"http://e{worker}", "model": model, "block_size": 16, "role": role, "max_requests": 8}
            api.call("PUT", f"/workers/{worker}", body).given()
        every = {("m", "prefill"): 2, ("m", "decode"): 1, ("n", "both"): 1}
        wait_for_replicas(every, api, peer)
        for number in range(4):
            api.route(token_ids=TOKENS, request_id=f"p{number}", model="m", phase="prefill")
        api.route(token_ids=TOKENS, request_id="d", model="m", phase="decode")
        with served(scope) as late:
            wait_for_booked({("m", "prefill"), ("m", "decode")}, api, peer, late)
            api.call("PUT", "/workers/1/cordon").given()
            api.call("DELETE", "/workers/4").given()
            wait_for_replicas({("m", "prefill"): 1, ("m", "decode"): 1}, api, peer, late)
            api.call("PUT", "/workers/2/cordon").given()
            wait_for_replicas({("m", "decode"): 1}, api, peer, late)
            api.call("DELETE", "/workers/1/cordon").given()
            wait_for_replicas({("m", "prefill"): 1, ("m", "decode"): 1}, api, peer, late)
            for each in (api, peer, late):
                for pool in pools(each).values():
                    assert pool["replicas_wanted"] >= 1.0
                    assert pool["saturation"] == max(pool["compute"], pool["slots"])
                    assert pool["blocks"] is None  # no engine reports its cache, and none is registered with one
