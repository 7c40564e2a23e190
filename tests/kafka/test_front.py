"""OpenAI's own client through the front: two simulated engines, a bridge, and a router on a real Kafka."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam

from streams.client import KvRouterClient
from streams.client.matches import WorkerRank
from streams.lab.engines.chat_template import render, tokenizer_files
from streams.lab.processes import Children
from streams.lab.stack import Engine, RouterProcess, Stack, get_bytes, get_json, wait_workers
from streams.process.waiting import wait_for
from tests.helpers.bridges import SMALL
from tests.helpers.scopes import ScopeFactory
from tests.helpers.support import VISIBLE_TIMEOUT_S

MODEL = "m"
PATIENCE_S = 60.0

#: Model seconds per second of the engines: 100 tokens of an answer take a fifth of a second.
TIME_SCALE = 10.0

TOOL: ChatCompletionToolParam = {
    "type": "function",
    "function": {"name": "look_up", "description": "Look it up", "parameters": {"type": "object"}},
}
MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Tell me of streams."}]


@dataclass(frozen=True, slots=True)
class Fleet:
    """front: its URL."""

    front: str
    router: RouterProcess
    engines: list[Engine]

    def client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.front}/v1", api_key="unused", max_retries=0, timeout=PATIENCE_S)

    def active(self) -> int:
        return sum(row["active_requests"] for row in get_json(f"{self.router.url}/loads")["loads"])

    async def until_matched(self, rank: str, token_ids: list[int]) -> None:
        """Wait until the router knows every full block of a prompt at a rank. rank: as in the front's header."""
        worker_id, dp_rank = map(int, rank.split("/"))
        async with asyncio.timeout(VISIBLE_TIMEOUT_S), KvRouterClient(self.router.url) as router:
            while True:
                found = await router.find_matches_for_request(token_ids, model=MODEL)
                if found.by_rank.scores.get(WorkerRank(worker_id, dp_rank)) == len(token_ids) // SMALL.block_size:
                    return
                await asyncio.sleep(0.05)

    def until_free(self) -> None:
        """Wait until no booking is left, and no engine computes."""
        wait_for(lambda: self.active() == 0, VISIBLE_TIMEOUT_S, "the end of every booking")
        for engine in self.engines:
            wait_for(lambda e=engine: running(e) == 0, VISIBLE_TIMEOUT_S, "the end of the engines' requests")  # type: ignore[misc]


def running(engine: Engine) -> float:
    return metric(engine.url, "vllm:num_requests_running")


def metric(url: str, name: str) -> float:
    lines = get_bytes(f"{url}/metrics").decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((f"{name}{{", f"{name} ")))


@pytest.fixture(scope="module")
def fleet(new_scope: ScopeFactory, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Give a front with its tokenizer, a worker with a router, and two engines behind a bridge."""
    folder = tmp_path_factory.mktemp("front")
    model = folder / "model"
    model.mkdir()
    for name, text in tokenizer_files().items():
        (model / name).write_text(text)
    with Children() as children:
        stack = Stack(new_scope(folder), folder, children)
        worker = stack.worker()
        engines = stack.engines(2, SMALL, MODEL, TIME_SCALE)
        stack.bridge(engines)
        wait_workers(worker.url, 2)
        front = stack.front("front", [worker], ["--tokenizer", f"{MODEL}={model}"])
        yield Fleet(front.url, worker, engines)


def run(fleet: Fleet, scenario: Callable[[openai.AsyncOpenAI], Awaitable[None]]) -> None:
    """Run a scenario with OpenAI's client; afterwards no booking may be left."""

    async def main() -> None:
        async with asyncio.timeout(PATIENCE_S), fleet.client() as client:
            await scenario(client)

    asyncio.run(main())
    fleet.until_free()


@pytest.mark.first_ring("front")
def test_completions_and_chats_of_openais_client(fleet: Fleet) -> None:
    """Whole and streamed answers are the same, with finish reasons and usage; models are listed."""

    async def scenario(client: openai.AsyncOpenAI) -> None:
        assert [model.id async for model in client.models.list()] == [MODEL]
        assert (await client.models.retrieve(MODEL)).id == MODEL
        whole = await client.completions.create(model=MODEL, prompt="Hello", max_tokens=20)
        assert (len(whole.choices[0].text), whole.choices[0].finish_reason) == (20, "length")
        assert whole.usage is not None and whole.usage.prompt_tokens == 5
        stream = await client.completions.create(
            model=MODEL, prompt="Hello", max_tokens=20, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole.choices[0].text
        assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 20
        by_ids = await client.completions.create(model=MODEL, prompt=list(b"Hello"), max_tokens=20)
        assert by_ids.choices[0].text == whole.choices[0].text

        answer = await client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=20)
        deltas = await client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=20, stream=True)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in deltas])
        assert text == answer.choices[0].message.content
        stop = text[5:8]
        short = await client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=20, stop=stop)
        assert (short.choices[0].message.content, short.choices[0].finish_reason) == (text[: text.index(stop)], "stop")

    run(fleet, scenario)


def test_tools_pass_through_both_ways(fleet: Fleet) -> None:
    """The model calls the tool with arguments that are JSON, and its answer to the result is another one."""

    async def scenario(client: openai.AsyncOpenAI) -> None:
        first = await client.chat.completions.create(
            model=MODEL, messages=MESSAGES, tools=[TOOL], tool_choice="required", max_tokens=9
        )
        (choice,) = first.choices
        assert choice.finish_reason == "tool_calls" and choice.message.tool_calls is not None
        (call,) = choice.message.tool_calls
        assert call.type == "function" and call.function.name == "look_up"
        assert len(json.loads(call.function.arguments)["answer"]) == 9
        stream = await client.chat.completions.create(
            model=MODEL, messages=MESSAGES, tools=[TOOL], tool_choice="required", max_tokens=9, stream=True
        )
        deltas = [chunk.choices[0].delta async for chunk in stream]
        calls = [each for delta in deltas for each in delta.tool_calls or ()]
        assert "".join((each.function and each.function.arguments) or "" for each in calls) == call.function.arguments
        result: list[ChatCompletionMessageParam] = [
            *MESSAGES,
            {"role": "assistant", "tool_calls": [call.model_dump()]},  # type: ignore[list-item]
            {"role": "tool", "tool_call_id": call.id, "content": "42"},
        ]
        second = await client.chat.completions.create(model=MODEL, messages=result, tools=[TOOL], max_tokens=9)
        assert second.usage is not None and first.usage is not None
        assert second.usage.prompt_tokens > first.usage.prompt_tokens

    run(fleet, scenario)


def test_the_next_turn_of_a_chat_goes_where_its_prefix_is(fleet: Fleet) -> None:
    """The front tokenizes as the engine does, so the router finds the blocks, and the engine has them in its cache."""
    system = "You are a very careful assistant. " * 8

    async def scenario(client: openai.AsyncOpenAI) -> None:
        messages: list[ChatCompletionMessageParam] = [
            {"role": "system", "content": system},
            {"role": "user", "content": "One"},
        ]
        first = await client.chat.completions.with_raw_response.create(
            model=MODEL, messages=messages, max_tokens=8, extra_headers={"X-Kvstreams-Details": "1"}
        )
        worker = first.headers["X-Kvstreams-Worker"]
        # A second turn before the router knows the blocks could go to the other engine, and make it a holder too.
        await fleet.until_matched(worker, list(render({"messages": messages}).encode()))
        said = first.parse().choices[0].message.content
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "Two"}]
        second = await client.chat.completions.with_raw_response.create(
            model=MODEL, messages=messages, max_tokens=8, extra_headers={"X-Kvstreams-Details": "1"}
        )
        overlap, of = map(int, second.headers["X-Kvstreams-Overlap-Blocks"].split("/"))
        assert second.headers["X-Kvstreams-Worker"] == worker
        assert overlap >= len(system) // SMALL.block_size
        assert overlap <= of
        usage = second.parse().usage
        assert usage is not None and usage.prompt_tokens_details is not None
        assert (usage.prompt_tokens_details.cached_tokens or 0) >= overlap * SMALL.block_size - SMALL.block_size

    run(fleet, scenario)


def test_errors_are_those_of_openais_client(fleet: Fleet) -> None:
    """Those of the front and the router, and those of the engine, become the client's exceptions."""

    async def scenario(client: openai.AsyncOpenAI) -> None:
        with pytest.raises(openai.NotFoundError, match="no worker serves model"):
            await client.completions.create(model="other", prompt="x")
        with pytest.raises(openai.BadRequestError, match="maximum context length"):
            await client.completions.create(model=MODEL, prompt="x", max_tokens=1 << 20)
        with pytest.raises(openai.BadRequestError, match="messages"):
            await client.chat.completions.create(model=MODEL, messages=[])
        with pytest.raises(openai.NotFoundError):
            await client.embeddings.create(model=MODEL, input="x")

    run(fleet, scenario)


def test_leaving_a_stream_cancels_it_in_the_engine(fleet: Fleet) -> None:
    """The booking ends, and the engine's request without being finished."""

    async def scenario(client: openai.AsyncOpenAI) -> None:
        stream = await client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=900, stream=True)
        async for _ in stream:
            assert await asyncio.to_thread(fleet.active) == 1
            break
        await stream.close()

    def finished() -> float:
        return sum(metric(engine.url, "vllm:request_success_total") for engine in fleet.engines)

    before = finished()
    run(fleet, scenario)
    assert finished() == before


def test_answers_are_those_of_a_direct_connection(fleet: Fleet) -> None:
    """Bytes are equal except for the id and the time of the answer, and the cut into chunks."""

    async def scenario(_: openai.AsyncOpenAI) -> None:
        body = {"model": MODEL, "messages": MESSAGES, "max_tokens": 1, "seed": 5, "return_token_ids": True}
        answers = []
        async with aiohttp.ClientSession() as session:
            for base in (fleet.front, fleet.engines[0].url, fleet.engines[1].url):
                async with session.post(f"{base}/v1/chat/completions", json=body) as response:
                    page = await response.json()
                    for name in ("id", "created", "kvstreams", "usage"):
                        del page[name]
                    answers.append((response.status, response.headers["Content-Type"], page))
        assert answers[0] == answers[1] == answers[2]

    run(fleet, scenario)


def test_curl_shows_tokens_as_they_arrive(fleet: Fleet) -> None:
    """`curl -N` prints the first token while the engine still generates."""
    body = json.dumps({"model": MODEL, "prompt": "curl", "max_tokens": 600, "stream": True})
    command = ["curl", "-sN", f"{fleet.front}/v1/completions", "-H", "Content-Type: application/json", "-d", body]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as curl:
        assert curl.stdout is not None
        assert curl.stdout.readline().startswith(b"data: {")
        assert fleet.active() == 1
        rest: Any = curl.stdout.read()
        assert rest.endswith(b"data: [DONE]\n\n")
        assert curl.wait(PATIENCE_S) == 0
    fleet.until_free()


def test_an_engine_that_is_killed_is_replaced_or_ends_the_answer_cleanly(fleet: Fleet) -> None:
    """Streams of the killed engine end with an error that OpenAI's client raises; new requests go to the other one."""

    begun: set[int] = set()

    async def scenario(client: openai.AsyncOpenAI) -> None:
        async def long(number: int) -> str:
            try:
                stream = await client.completions.create(
                    model=MODEL, prompt=f"{number} prompt", max_tokens=400, stream=True
                )
                n = 0
                async for chunk in stream:
                    begun.add(number)
                    n += len(chunk.choices[0].text)
            except openai.APIError:  # an error event, or a connection that broke within an event
                return "ended"
            assert n == 400
            return "whole"

        streams = [asyncio.create_task(long(number)) for number in range(8)]
        while len(begun) < 8:  # on a busy machine, the first may end before the last begins
            await asyncio.sleep(0.01)
        await asyncio.to_thread(fleet.engines[1].child.kill)
        ends = await asyncio.gather(*streams)
        assert set(ends) <= {"whole", "ended"} and "whole" in ends
        for number in range(4):
            answer = await client.completions.create(model=MODEL, prompt=f"{number} after", max_tokens=4)
            assert len(answer.choices[0].text) == 4

    async def main() -> None:
        async with asyncio.timeout(PATIENCE_S), fleet.client() as client:
            await scenario(client)

    asyncio.run(main())
    wait_for(lambda: fleet.active() == 0, VISIBLE_TIMEOUT_S, "the end of every booking")
