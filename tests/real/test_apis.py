"""The official clients of OpenAI and Anthropic get from the front what they get from an engine alone."""

from __future__ import annotations

import signal
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import pytest

from streams.process.waiting import wait_for
from tests.real.engine import ANSWER_TIMEOUT_S, BLOCK_SIZE
from tests.real.environment import FULL
from tests.real.fleet import NOTICE_S, Fleet

openai = pytest.importorskip("openai", reason="the client of OpenAI is not installed")
anthropic = pytest.importorskip("anthropic", reason="the client of Anthropic is not installed")

DETAILS = {"X-Kvstreams-Details": "1"}
SYSTEM = "You answer in a few words, and never say more than you have to. " * 8
QUESTION = "Which of the rivers that reach the sea in the north is the longest one?"
TURNS = [
    {"role": "user", "content": QUESTION},
    {"role": "assistant", "content": "The second one."},
    {"role": "user", "content": "And in the south?"},
]
TOOL = {"name": "length", "description": "of a river", "parameters": {"type": "object", "properties": {}}}


@dataclass(frozen=True, slots=True)
class Clients:
    """The clients of one server. They send each request once."""

    openai: Any
    anthropic: Any


def clients_of(url: str) -> Clients:
    """Return clients for an engine or a front."""
    options = {"api_key": "none", "max_retries": 0, "timeout": ANSWER_TIMEOUT_S}
    return Clients(
        openai.OpenAI(base_url=f"{url}/v1", **options),
        anthropic.Anthropic(base_url=url, **options),
    )


@pytest.fixture(scope="module")
def alone(fleet: Fleet) -> Clients:
    """Give clients of an engine."""
    return clients_of(fleet.engines[1].url)


@pytest.fixture(scope="module")
def front(fleet: Fleet) -> Clients:
    """Give clients of the front."""
    return clients_of(fleet.front.url)


def chat(clients: Clients, **more: Any) -> Any:
    messages = [{"role": "system", "content": SYSTEM}, *TURNS]
    return clients.openai.chat.completions.create(
        **{"model": FULL, "messages": messages, "max_tokens": 12, "temperature": 0.0, **more}
    )


def completion(clients: Clients, **more: Any) -> Any:
    return clients.openai.completions.create(
        **{"model": FULL, "prompt": SYSTEM + QUESTION, "max_tokens": 12, "temperature": 0.0, **more}
    )


def response(clients: Clients, **more: Any) -> Any:
    fields = {"model": FULL, "instructions": SYSTEM, "input": TURNS, "max_output_tokens": 12, "temperature": 0.0}
    return clients.openai.responses.create(**{**fields, **more})


def message(clients: Clients, **more: Any) -> Any:
    # The newest client has no parameter for the temperature, and sends what is in `extra_body`.
    body = {"temperature": more.pop("temperature", 0.0)}
    fields = {"model": FULL, "system": SYSTEM, "messages": TURNS, "max_tokens": 12, "extra_body": body}
    return clients.anthropic.messages.create(**{**fields, **more})


#: What an answer says: its text, and the tokens of the prompt and of the answer.
Said = tuple[str, int, int]


def said(answer: Any) -> Said:
    """Read an answer that was not streamed."""
    page = answer.model_dump()
    if "choices" in page:
        (choice,) = page["choices"]
        text = choice["text"] if "text" in choice else choice["message"]["content"]
    elif "output" in page:
        text = answer.output_text
    else:
        text = "".join(block["text"] for block in page["content"])
    return text, *tokens(page["usage"])


def tokens(usage: dict[str, Any]) -> tuple[int, int]:
    """Return the numbers of tokens. Messages count those of the cache apart."""
    if "prompt_tokens" in usage:
        return usage["prompt_tokens"], usage["completion_tokens"]
    apart = sum(usage.get(name) or 0 for name in ("cache_read_input_tokens", "cache_creation_input_tokens"))
    return usage["input_tokens"] + apart, usage["output_tokens"]


#: Events with a piece of a text.
DELTAS = ("response.output_text.delta", "content_block_delta")

#: Each call, with what its stream needs to report its usage.
CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "chat": (chat, {"stream_options": {"include_usage": True}}),
    "completion": (completion, {"stream_options": {"include_usage": True}}),
    "response": (response, {}),
    "message": (message, {}),
}


def read(stream: Any) -> tuple[list[str], Said]:
    """Read a stream: the types of its events, each once in a row, and what they say together."""
    types, texts, usage = list[str](), list[str](), dict[str, Any]()
    for event in stream:
        page = event.model_dump()
        types.append(page.get("type") or page["object"])
        texts += [
            choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in page.get("choices", ())
        ]
        if types[-1] in DELTAS:
            texts.append(page["delta"] if isinstance(page["delta"], str) else page["delta"]["text"])
        usage = (page.get("response") or page).get("usage") or usage
    return [type_ for type_, _ in groupby(types)], ("".join(texts), *tokens(usage))


@pytest.mark.parametrize("name", CALLS)
def test_an_answer_is_that_of_an_engine(alone: Clients, front: Clients, name: str) -> None:
    """Text, and the numbers of tokens."""
    call, _ = CALLS[name]
    text, n_prompt, n_answer = expected = said(call(alone))
    assert text and n_prompt > 100 and n_answer == 12
    assert said(call(front)) == expected


@pytest.mark.parametrize("name", CALLS)
def test_a_stream_is_that_of_an_engine(fleet: Fleet, alone: Clients, front: Clients, name: str) -> None:
    """The same events in the same order, which say together what the answer says that is not streamed."""
    call, more = CALLS[name]
    types, expected = read(call(alone, stream=True, **more))
    assert expected == said(call(alone))
    assert read(call(front, stream=True, **more)) == (types, expected)
    wait_for(lambda: fleet.n_active() == 0, NOTICE_S, "the booking to end", 0.1)


def holds(fleet: Fleet, worker_id: int, sent: list[int], n_blocks: int) -> bool:
    """Whether the router knows that an engine holds so many blocks of a prompt."""
    return fleet.matches(sent, FULL).get(worker_id, 0) >= n_blocks


@pytest.mark.parametrize("name", ["response", "message"])
def test_the_overlap_of_an_agents_prompt_is_what_the_engine_found(fleet: Fleet, front: Clients, name: str) -> None:
    """The prompt is compared with the index as that of a chat is, over the turns of a conversation."""
    turns: list[dict[str, str]] = []
    promised_blocks = 0
    for number in range(4):
        turns.append({"role": "user", "content": f"{name} {number}: {QUESTION}"})
        resource = front.openai.responses if name == "response" else front.anthropic.messages
        fields: dict[str, Any] = {"model": FULL, "extra_body": {"temperature": 0.0}, "extra_headers": DETAILS}
        fields |= (
            {"input": turns, "max_output_tokens": 8} if name == "response" else {"messages": turns, "max_tokens": 8}
        )
        raw = resource.with_raw_response.create(**fields)
        answer = raw.parse()
        text, n_prompt, _ = said(answer)
        assert raw.headers["X-Kvstreams-Mode"] == "exact"
        promised_blocks = int(raw.headers["X-Kvstreams-Overlap-Blocks"].split("/")[0])
        cached = (
            answer.usage.input_tokens_details.cached_tokens
            if name == "response"
            else answer.usage.cache_read_input_tokens or 0
        )
        assert cached == min(promised_blocks, (n_prompt - 1) // BLOCK_SIZE) * BLOCK_SIZE
        sent = fleet.engines[1].tokens_of(messages=turns)
        assert len(sent) == n_prompt
        worker_id = int(raw.headers["X-Kvstreams-Worker"].split("/")[0])
        n_blocks = n_prompt // BLOCK_SIZE
        wait_for(partial(holds, fleet, worker_id, sent, n_blocks), NOTICE_S, "the events of the prompt", 0.05)
        fleet.settle()  # a block may begin in the prompt and end in the answer
        turns.append({"role": "assistant", "content": text})
    assert promised_blocks > 2


def test_other_calls_answer_as_an_engine_does(alone: Clients, front: Clients) -> None:
    """Counting the tokens of a message, and the list of models."""
    counted = [
        clients.anthropic.messages.count_tokens(model=FULL, system=SYSTEM, messages=TURNS).input_tokens
        for clients in (alone, front)
    ]
    assert counted[0] == counted[1] == said(message(front))[1]
    assert [row.id for row in front.openai.models.list()] == [row.id for row in alone.openai.models.list()]


def embedding(clients: Clients, **more: Any) -> Any:
    return clients.openai.embeddings.create(**{"model": FULL, "input": "a text", **more})


def count(clients: Clients, **more: Any) -> Any:
    return clients.anthropic.messages.count_tokens(**{"model": FULL, "messages": TURNS, **more})


LONG = "word " * 9000

#: Requests that an engine refuses.
REFUSED: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    **{f"{call.__name__} of an unknown model": (call, {"model": "other"}) for call, _ in CALLS.values()},
    **{f"{call.__name__} too hot": (call, {"temperature": 99.0}) for call, _ in CALLS.values()},
    "chat too long": (chat, {"messages": [{"role": "user", "content": LONG}]}),
    "completion too long": (completion, {"prompt": LONG}),
    "response too long": (response, {"input": LONG}),
    "message too long": (message, {"messages": [{"role": "user", "content": LONG}]}),
    "chat without messages": (chat, {"messages": []}),
    "response after one that is not kept": (response, {"previous_response_id": "resp_1"}),
    "response in the background": (response, {"background": True}),
    "response with an item that is not kept": (response, {"input": [{"type": "item_reference", "id": "msg_1"}]}),
    "message with an unknown role": (message, {"messages": [{"role": "tool", "content": "a"}]}),
    "message with an unknown block": (message, {"messages": [{"role": "user", "content": [{"type": "other"}]}]}),
    "message with tools, which this engine does not parse": (
        message,
        {"tools": [{"name": "length", "input_schema": {"type": "object"}}]},
    ),
    "chat with tools, which this engine does not parse": (chat, {"tools": [{"type": "function", "function": TOOL}]}),
    "count of an unknown model": (count, {"model": "other"}),
    "count without messages": (count, {"messages": []}),
    "embedding by a model that makes none": (embedding, {}),
    "embedding of an unknown model": (embedding, {"model": "other"}),
}


def outcome(call: Callable[..., Any], clients: Clients, fields: dict[str, Any]) -> tuple[str, int]:
    """Return the class and the status of the client's error; "" and 200 if there is none."""
    try:
        call(clients, **fields)
    except (openai.APIStatusError, anthropic.APIStatusError) as exc:
        # Both clients find the message only where their API has it.
        has_message = isinstance(exc.body, dict) and bool(exc.message)
        return type(exc).__name__ if has_message else "", exc.status_code
    return "", 200


@pytest.mark.parametrize("name", REFUSED)
def test_an_error_is_that_of_an_engine(alone: Clients, front: Clients, name: str) -> None:
    """The same status, and so the same class of the client's error; also where the front refuses the request itself."""
    call, fields = REFUSED[name]
    error, status = expected = outcome(call, alone, fields)
    assert error and 400 <= status < 500
    assert outcome(call, front, fields) == expected


def test_every_prompt_had_the_length_that_the_front_computed(fleet: Fleet) -> None:
    """Of all requests above, the audit found none that the engine rendered otherwise."""
    with urllib.request.urlopen(f"{fleet.front.url}/metrics") as page:
        lines = [line for line in page.read().decode().splitlines() if "prompts_audited_total{" in line]
    found = {line.split('"')[1]: float(line.split()[-1]) for line in lines}
    assert found["same_length"] >= 10
    assert not found.get("other_length") and not found.get("other_tokens")


def first_delta(stream: Iterator[Any]) -> None:
    for event in stream:
        if event.type in DELTAS:
            return
    raise AssertionError("the stream has no text")


def test_a_stream_whose_engine_is_killed_ends_as_its_client_expects(fleet: Fleet, front: Clients) -> None:
    """An error of Anthropic's client, and an event of OpenAI's. This ends both engines, so it is the last test."""
    killed: list[int] = []

    def kill(raw: Any) -> Any:
        stream = raw.parse()
        events = iter(stream)
        first_delta(events)
        worker_id = int(raw.headers["X-Kvstreams-Worker"].split("/")[0])
        killed.append(worker_id)
        fleet.engines[worker_id].signal(signal.SIGKILL)
        return events

    def begun(clients: Clients, resource: Any, **fields: Any) -> Any:
        return resource.with_raw_response.create(
            model=FULL, extra_body={"temperature": 0.0}, stream=True, extra_headers=DETAILS, **fields
        )

    raw = begun(front, front.anthropic.messages, messages=TURNS, max_tokens=2000)
    with pytest.raises(anthropic.APIStatusError, match=r"the engine failed after \d+ tokens"):
        list(kill(raw))
    raw = begun(front, front.openai.responses, input=TURNS, max_output_tokens=2000)
    last = list(kill(raw))[-1]
    assert (last.type, last.code) == ("error", "engine_failed")
    assert "the engine failed after" in last.message
    assert sorted(killed) == [1, 2]
    wait_for(lambda: fleet.n_active() == 0, NOTICE_S, "the bookings to end", 0.1)
