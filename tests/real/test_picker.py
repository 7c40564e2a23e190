"""The overlap that an endpoint picker promises a gateway is the one that the engine finds."""

from __future__ import annotations

import json
import random
import urllib.request
from collections import Counter
from typing import Any

from streams.lab.stack import PickerProcess
from streams.picker.messages import BodyMode, Part
from tests.helpers.ext_proc import FULL_DUPLEX
from tests.helpers.picker_client import Gateway, gateway
from tests.real.engine import ANSWER_TIMEOUT_S
from tests.real.environment import FULL
from tests.real.fleet import Answer, Conversations, Fleet, tokenizer_options

#: Chats whose answers say `exact`, and how many may be sent for them: on busy cores some rightly do not.
EXACT = 200
CHATS_MAX = 600

PATH = "/v1/chat/completions"


def chat(picker: Gateway, messages: list[dict[str, Any]]) -> Answer:
    """Ask a picker, send the chat to the engine that it picked, and say to the picker what Envoy would."""
    body = {"model": FULL, "messages": messages, "max_tokens": 8, "temperature": 0.0}
    stream = picker.open(ANSWER_TIMEOUT_S)
    stream.send(Part.REQUEST_HEADERS, (FULL_DUPLEX, BodyMode.NONE), headers={":method": "POST", ":path": PATH})
    stream.send(Part.REQUEST_BODY, body=json.dumps(body).encode(), end_of_stream=True)
    found = stream.until_picked()
    request = urllib.request.Request(
        f"http://{found.destination}{PATH}", found.body, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=ANSWER_TIMEOUT_S) as response:
        answer = json.loads(response.read())
    stream.send(Part.RESPONSE_HEADERS, headers={":status": "200"}, end_of_stream=True)
    assert stream.rest().status is not None
    details = found.details
    promised, n_blocks = int(details["overlap_blocks"]), int(details["request_blocks"])
    return Answer(200, int(details["worker_id"]), promised, n_blocks, details["chosen_mode"], answer)


def test_chats_through_two_pickers_find_what_was_promised(fleet: Fleet) -> None:
    """One picker sees the end of each request, the other one ends its streams with its picks; both know all chats."""
    rng, conversations, modes = random.Random(5), Conversations(5), Counter[str]()
    active = [conversations.begin() for _ in range(12)]
    pickers: list[PickerProcess] = [
        fleet.stack.picker(f"picker-{ends}", tokenizer_options([FULL]), picker_ends_stream=ends, picker_details=True)
        for ends in (True, False)
    ]
    promised = cached = 0
    with gateway(pickers[0].picks) as first, gateway(pickers[1].picks) as second:
        while modes["exact"] < EXACT and modes.total() < CHATS_MAX:
            chosen = rng.randrange(len(active))
            answer = chat(rng.choice((first, second)), active[chosen])
            modes[answer.mode] += 1
            if answer.mode == "exact":
                answer.assert_agrees()
                promised, cached = promised + answer.promised_tokens, cached + answer.cached_tokens
            active[chosen] = conversations.go_on(active[chosen], answer.text)
            if answer.prompt_tokens > 1500:
                active[chosen] = conversations.begin()
            fleet.settle()
    print(f"{modes.total()} chats: {dict(modes)}; {promised} tokens promised, {cached} found")
    assert modes["exact"] == EXACT and promised > 0
