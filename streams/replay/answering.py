"""What a router would have answered at the moment that is replayed, and what no topic keeps of that.

What lives here: one answer with the terms of every candidate. What must not: choosing (router_api.deciding).
"""

from __future__ import annotations

from typing import Any

import msgspec

from streams.replay.cuts import time_text
from streams.replay.rebuilding import Replay
from streams.router_api.messages.answer_json import answer_json
from streams.router_api.messages.requests import RouteRequest

#: What a router knew that is in no topic, and what the replay has in its place. Each may lead to another choice.
NOT_KEPT = {
    "predictions": "blocks that a router assumed from its own decisions, before or without events: none",
    "queue": "the requests that waited in a router, and its turns among routers: none",
    "fitted times": "what policies had learnt from requests that ended: their defaults",
    "random draws": "choices among equal ranks, by temperature, in turns or at random: draws of this replay",
    "sessions": "the ranks to which sessions were bound: none",
    "own bookings": "bookings that ended before a router had written them, or that it wrote later: none",
    "audit": "ranks that a router did not trust because engines had contradicted it: none",
}


def answer_at(replay: Replay, request: RouteRequest) -> dict[str, Any]:
    """Answer a request of POST /route by what is replayed, without booking. Raises what `Router.route` raises."""
    answer = replay.router.route(msgspec.structs.replace(request, update_states=False, explain=True))
    return {"moment": time_text(replay.cut.moment_ms), "answer": answer_json(answer), "not_kept": NOT_KEPT}
