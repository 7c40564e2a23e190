"""The live engine as a router sees it: real sockets, vLLM's events, OpenAI's API. No test depends on wall time."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import aiohttp
import msgpack
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from streams.errors import SettingsError
from streams.lab.engines import openai
from streams.lab.engines.engine_config import EngineConfig
from streams.lab.engines.event_publisher import BlockEvent, EventPublisher
from streams.lab.engines.server import SimServerConfig, serve
from tests.helpers.sim_client import ENGINE, FAST, PATIENCE_S, PROMPT, Client, prompt_hashes, started


def events_of(batches: list[tuple[int, bytes]]) -> list[Any]:
    return [event for _, payload in batches for event in msgpack.unpackb(payload)[1]]


# -- completions -----------------------------------------------------------------------------------------------------


async def test_an_answer_has_openais_shape_and_figures_in_model_time() -> None:
    """14 tokens take 15 + 1.4 ms to the first token and 20 ms for each of the 4 others, on any machine."""
    async with started() as client:
        page = await client.complete(max_tokens=5, kvstreams_arrival_ms=100)
        assert page["object"] == "text_completion"
        (choice,) = page["choices"]
        assert (choice["index"], len(choice["text"]), choice["finish_reason"]) == (0, 5, "length")
        assert page["usage"] == {
            "prompt_tokens": 14,
            "completion_tokens": 5,
            "total_tokens": 19,
            "prompt_tokens_details": {"cached_tokens": 0},
        }
        assert page["kvstreams"] == {
            "model_ttft_ms": 16.4,
            "model_latency_ms": 96.4,
            "model_finish_ms": 196.4,
            "cached_tokens": 0,
            "pooled_tokens": 0,
            "prompt_tokens": 14,
        }
        again = await client.complete(max_tokens=5, kvstreams_arrival_ms=1100)
        assert again["kvstreams"]["cached_tokens"] == again["usage"]["prompt_tokens_details"]["cached_tokens"] == 12
        assert again["kvstreams"]["model_finish_ms"] == 1100 + 15.2 + 80
        assert again["choices"] == page["choices"]


async def test_a_stream_has_the_same_content_as_a_whole_answer() -> None:
    """The chunks join to the same text and tokens; finish reason and figures come last, then usage and DONE."""

    # 20 model ms per wall ms: an answer of 1.2 model seconds is sent in several chunks.
    async with started(SimServerConfig(engine=ENGINE, time_scale=20.0)) as client:
        whole = await client.complete(max_tokens=60, return_token_ids=True)
        body = {
            "model": "sim-model",
            "prompt": PROMPT,
            "max_tokens": 60,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        async with client.http.post(client.server.http_url + "/v1/completions", json=body) as response:
            assert response.status == 200
            assert response.content_type == "text/event-stream"
            lines = [line.removeprefix(b"data: ").strip() async for line in response.content if line.strip()]
        assert lines[-1] == b"[DONE]"
        *chunks, last, usage = [json.loads(line) for line in lines[:-1]]
        assert {chunk["id"] for chunk in (*chunks, last, usage)} == {last["id"]}
        assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * len(chunks)
        assert last["choices"][0]["finish_reason"] == "length"
        assert usage["choices"] == []
        assert usage["usage"]["completion_tokens"] == 60
        assert last["kvstreams"] == usage["kvstreams"]
        assert last["kvstreams"]["cached_tokens"] == 12
        choices = [chunk["choices"][0] for chunk in (*chunks, last)]
        assert "".join(choice["text"] for choice in choices) == whole["choices"][0]["text"]
        assert [token for choice in choices for token in choice["token_ids"]] == whole["choices"][0]["token_ids"]
        assert [choice.get("prompt_token_ids") for choice in choices] == [PROMPT] + [None] * (len(choices) - 1)


async def test_the_first_token_of_a_stream_is_sent_before_the_events_of_its_prompt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No stream waits until the events of a long prompt are encoded. Their order does not change."""
    done: list[str] = []
    stream_event, publish = openai.stream_event, EventPublisher.publish

    def noting_event(chunk: dict[str, Any]) -> bytes:
        done.append("chunk")
        return stream_event(chunk)

    def noting_publish(self: EventPublisher, events: Sequence[BlockEvent]) -> None:
        done.extend(type(event).__name__ for event in events)
        publish(self, events)

    monkeypatch.setattr(openai, "stream_event", noting_event)
    monkeypatch.setattr(EventPublisher, "publish", noting_publish)
    async with started(SimServerConfig(engine=ENGINE, time_scale=20.0)) as client:
        await client.complete(max_tokens=1)
        done.clear()
        body = {"model": "sim-model", "prompt": PROMPT[::-1], "max_tokens": 60, "stream": True}
        async with client.http.post(client.server.http_url + "/v1/completions", json=body) as response:
            assert (await response.read()).endswith(b"data: [DONE]\n\n")
        await client.get("/sim/cache")  # what has happened until then is published
        assert done[:2] == ["chunk", "KvStored"]
        known = [len(event[1]) for event in events_of(await client.replay(0)) if event[0] == "BlockStored"]
        assert known == [3, 3, *[1] * 15]


async def test_an_answers_text_appended_to_the_next_prompt_is_found_in_the_cache() -> None:
    """Text has one token per byte and answers are printable, so the second turn of a chat reuses prompt and answer."""
    async with started() as client:
        first = await client.complete(prompt="Tell me of Kafka.", max_tokens=20)
        text = "Tell me of Kafka." + first["choices"][0]["text"] + " And then?"
        second = await client.complete(prompt=text, max_tokens=1)
        assert second["usage"]["prompt_tokens"] == len(text.encode())
        assert second["kvstreams"]["cached_tokens"] == (17 + 20 - 1) // 4 * 4


async def test_an_answer_that_is_resumed_with_its_seed_continues_unchanged() -> None:
    """Another engine that gets the prompt and the first half of an answer returns the second half."""
    async with started() as client:
        whole = await client.complete(max_tokens=12, seed=5, return_token_ids=True)
        tokens = whole["choices"][0]["token_ids"]
        async with started(FAST) as other:
            rest = await other.complete(prompt=PROMPT + tokens[:7], max_tokens=5, seed=5, return_token_ids=True)
        assert rest["choices"][0]["token_ids"] == tokens[7:]


async def test_an_answer_that_is_resumed_without_a_seed_continues_unchanged() -> None:
    """Each token follows from all tokens before it, so that a missing one changes all that come after it."""
    async with started() as client:
        whole = await client.complete(max_tokens=12, return_token_ids=True)
        tokens = whole["choices"][0]["token_ids"]
        for sent, same in ((tokens[:7], True), (tokens[:5] + tokens[6:7], False)):
            rest = await client.complete(prompt=PROMPT + sent, max_tokens=5, return_token_ids=True)
            assert (rest["choices"][0]["token_ids"] == tokens[7:]) == same


async def test_an_explicit_arrival_in_the_past_is_served_as_of_its_time() -> None:
    """A request that arrived 10 ms after another, but is sent when that one is done, waits only for its prefill."""
    async with started() as client:
        await client.complete(max_tokens=1, kvstreams_arrival_ms=1000)
        late = await client.complete(prompt=list(range(50, 60)), max_tokens=1, kvstreams_arrival_ms=1010)
        assert late["kvstreams"]["model_ttft_ms"] == pytest.approx(6.4 + 15.0 + 1.0)
        assert late["kvstreams"]["model_finish_ms"] == pytest.approx(1016.4 + 16.0)


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({"model": "other", "prompt": [1]}, 404, "other"),
        ({"prompt": []}, 400, "prompt"),
        ({}, 400, "prompt"),
        ({"prompt": ["a", "b"]}, 400, "prompt"),
        ({"prompt": [1, -2]}, 400, "token 1"),
        ({"prompt": [1], "max_tokens": 0}, 400, "max_tokens"),
        (
            {"prompt": [1], "max_tokens": 2, "min_tokens": 3},
            400,
            "min_tokens must be less than or equal to max_tokens=2",
        ),
        ({"prompt": [1], "min_tokens": -1}, 400, "min_tokens"),
        ({"prompt": [1], "ignore_eos": "yes"}, 400, "ignore_eos"),
        ({"prompt": [1], "n": 2}, 400, "n = 1"),
        ({"prompt": [1], "kvstreams_arrival_ms": -1}, 400, "kvstreams_arrival_ms"),
        ({"prompt": [1] * 1000, "max_tokens": 100}, 400, "maximum context length is 1024"),
        ([], 400, "object"),
    ],
)
async def test_a_request_that_cannot_be_served_is_refused_in_openais_shape(body: Any, status: int, words: str) -> None:
    """The error has a status, a message, a type and a code, and nothing is queued."""
    async with started() as client:
        answered, page = await client.post("/v1/completions", body)
        assert answered == page["error"]["code"] == status
        assert words in page["error"]["message"]
        assert page["error"]["type"] == ("NotFoundError" if status == 404 else "BadRequestError")
        assert client.server.model.stats().n_waiting == 0


# -- events ------------------------------------------------------------------------------------------------------------


async def test_events_have_the_prompts_tokens_and_a_replay_has_every_batch() -> None:
    """Events are arrays as in vLLM, their tokens hash to the prompt's blocks, and replayed batches equal live ones."""
    async with started() as client:
        await client.complete(prompt=[99] * 5, max_tokens=1)
        await client.complete(max_tokens=8)
        batches = await client.replay(0)
        assert [sequence for sequence, _ in batches] == list(range(len(batches)))
        assert await client.replay(1) == batches[1:]
        assert await client.replay(len(batches)) == []
        timestamp, events, rank = msgpack.unpackb(batches[0][1])
        assert isinstance(timestamp, float)
        assert rank == 0
        ((tag, hashes, parent, tokens, block_size, lora_id, medium, lora_name),) = events
        assert (tag, len(hashes), parent, tokens) == ("BlockStored", 1, None, [99] * 4)
        assert (block_size, lora_id, medium, lora_name) == (4, None, "GPU", None)
        stored = [event for event in events_of(batches)[1:] if event[0] == "BlockStored"]
        known = [token for event in stored for token in event[3]]
        assert prompt_hashes(known)[:3] == prompt_hashes(PROMPT)
        assert len(known) == (14 + 8 - 1) // 4 * 4
        assert [event[2] for event in stored[1:]] == [event[1][-1] for event in stored[:-1]]
        # As with any PUB socket, the subscriber may have missed the first batches. Those that it got equal the replay.
        await client.complete(prompt=[98] * 5, max_tokens=1)
        topic, sequence, payload = await client.events.recv_multipart()
        assert topic == b""
        assert dict(await client.replay(0))[int.from_bytes(sequence, "big")] == payload


async def test_the_cache_page_equals_the_sum_of_the_events() -> None:
    """With evictions, the stores minus the removals of all batches are the blocks that `/sim/cache` returns."""
    async with started(SimServerConfig(engine=EngineConfig(block_size=4, n_blocks=64), time_scale=1000.0)) as client:
        for at in range(12):
            await client.complete(prompt=[at % 5] * 7 + [at] * 60, max_tokens=9)
        page = await client.get("/sim/cache")
        batches = await client.replay(0)
        assert page["next_sequence"] == len(batches)
        copies: dict[int, int] = {}
        for event in events_of(batches):
            for hash_ in event[1]:
                copies[hash_] = copies.get(hash_, 0) + (1 if event[0] == "BlockStored" else -1)
        assert any(event[0] == "BlockRemoved" and event[2] == "GPU" for event in events_of(batches))
        assert sorted(hash_ for hash_, n in copies.items() if n) == sorted(map(int, page["engine_hashes"]))
        assert set(prompt_hashes([11 % 5] * 7 + [11] * 60)) <= set(map(int, page["sequence_hashes"]))


@pytest.mark.parametrize("dialect", ["map", "map_batch"])
async def test_the_map_dialects_name_their_fields(dialect: Any) -> None:
    """Events are maps, in a batch that is an array or a map, and 32-byte hashes end in the u64 of the int dialect."""

    config = SimServerConfig(engine=ENGINE, time_scale=1000.0, dp_rank=3, event_dialect=dialect, hash_dialect="bytes32")
    async with started(config) as client:
        await client.complete()
        batch = msgpack.unpackb((await client.replay(0))[0][1])
        if dialect == "map_batch":
            assert batch["data_parallel_rank"] == 3
            events = batch["events"]
        else:
            _, events, rank = batch
            assert rank == 3
        assert events[0]["type"] == "BlockStored"
        assert events[0]["token_ids"] == PROMPT[:12]
        page = await client.get("/sim/cache")
        assert all(len(hash_) == 32 for hash_ in events[0]["block_hashes"])
        assert {str(int.from_bytes(hash_[-8:], "big")) for hash_ in events[0]["block_hashes"]} <= set(
            page["engine_hashes"]
        )


async def test_an_adapter_is_served_as_a_model_of_its_own() -> None:
    """An adapter is listed, addressed by its name, shares no blocks with the model, and is named in its events."""
    async with started(SimServerConfig(engine=ENGINE, time_scale=1000.0, lora_names=("tuned",))) as client:
        assert [row["id"] for row in (await client.get("/v1/models"))["data"]] == ["sim-model", "tuned"]
        await client.complete()
        page = await client.complete(model="tuned")
        assert (page["model"], page["kvstreams"]["cached_tokens"]) == ("tuned", 0)
        names = [event[7] for event in events_of(await client.replay(0))]
        assert names[0] is None
        assert names[-1] == "tuned"


async def test_the_replay_buffer_drops_the_oldest_batches() -> None:
    """A buffer of 3 batches replays the last 3 of 5."""
    async with started(SimServerConfig(engine=ENGINE, time_scale=1000.0, replay_buffer_batches=3)) as client:
        for at in range(5):
            await client.complete(prompt=[at] * 5, max_tokens=1)
        assert [sequence for sequence, _ in await client.replay(0)] == [2, 3, 4]


# -- the other pages ---------------------------------------------------------------------------------------------------


async def test_a_reset_is_refused_while_a_request_runs_and_otherwise_published() -> None:
    """A refused reset changes nothing; a successful one empties the cache and publishes AllBlocksCleared."""
    async with started(SimServerConfig(engine=ENGINE, time_scale=1.0)) as client:
        body = {"prompt": PROMPT, "max_tokens": 500, "stream": True}
        async with client.http.post(client.server.http_url + "/v1/completions", json=body) as response:
            await response.content.readline()  # the first token is out; all 500 take 10 wall seconds
            status, page = await client.post("/reset_prefix_cache")
            assert (status, page["error"]["code"]) == (409, 409)
            assert len((await client.get("/sim/cache"))["engine_hashes"]) >= 3
    async with started() as client:
        await client.complete()
        assert await client.post("/reset_prefix_cache") == (200, None)
        assert events_of(await client.replay(0))[-1] == ["AllBlocksCleared"]
        assert (await client.get("/sim/cache"))["engine_hashes"] == []
        assert (await client.complete())["kvstreams"]["cached_tokens"] == 0


async def test_the_metrics_page_has_vllms_names() -> None:
    """A Prometheus parser finds hits and queries in tokens, the gauges, the cache's size and the start time."""
    async with started() as client:
        await client.complete()
        await client.complete()
        async with client.http.get(client.server.http_url + "/metrics") as response:
            text = await response.text()
        samples = {s.name: s for family in text_string_to_metric_families(text) for s in family.samples}
        values = {name: sample.value for name, sample in samples.items()}
        assert values["vllm:prefix_cache_queries_total"] == 28
        assert values["vllm:prefix_cache_hits_total"] == 12
        assert values["vllm:num_requests_running"] == values["vllm:num_requests_waiting"] == 0
        assert values["vllm:kv_cache_usage_perc"] == values["vllm:gpu_cache_usage_perc"] == 0
        assert samples["vllm:kv_cache_usage_perc"].labels["model_name"] == "sim-model"
        assert samples["vllm:cache_config_info"].labels["num_gpu_blocks"] == "256"
        assert values["process_start_time_seconds"] > 1e9


async def test_the_addresses_and_the_health_are_served() -> None:
    """/sim/info returns the bound addresses, /health an empty 200, and an unknown path a 404 as JSON."""
    async with started() as client:
        info = await client.get("/sim/info")
        assert {name: info[name] for name in ("http", "events", "replay")} == client.server.info()
        assert info["events"].startswith("tcp://127.0.0.1:")
        async with client.http.get(info["http"] + "/health") as response:
            assert (response.status, await response.read()) == (200, b"")
        async with client.http.get(info["http"] + "/nowhere") as response:
            assert (await response.json())["error"]["code"] == response.status == 404


# -- failures on command -----------------------------------------------------------------------------------------------


async def streamed(url: str, http: aiohttp.ClientSession, **body: Any) -> AsyncIterator[dict[str, Any]]:
    """Give the chunks of a stream of 60 tokens."""
    asked = {"prompt": PROMPT, "max_tokens": 60, "stream": True, "return_token_ids": True, **body}
    async with http.post(f"{url}/v1/completions", json=asked) as response:
        async for line in response.content:
            if line.startswith(b"data: {"):
                yield json.loads(line[len(b"data: ") :])


async def chunks_of(client: Client, **body: Any) -> list[dict[str, Any]]:
    return [chunk async for chunk in streamed(client.server.http_url, client.http, **body)]


async def until_broken(url: str, http: aiohttp.ClientSession) -> list[dict[str, Any]]:
    """Return the chunks of a stream that ends with a broken connection."""
    got: list[dict[str, Any]] = []
    try:
        async for chunk in streamed(url, http):
            got.append(chunk)  # noqa: PERF401 - those before the failure are kept
    except aiohttp.ClientError:
        return got
    raise AssertionError("the stream came to its end")


def ids(chunks: list[dict[str, Any]]) -> list[int]:
    return [token for chunk in chunks for choice in chunk.get("choices", ()) for token in choice["token_ids"]]


@pytest.mark.parametrize("time_scale", [20.0, 1000.0])
@pytest.mark.parametrize("n_tokens", [0, 1, 37, 59])
async def test_an_engine_dies_after_exactly_so_many_tokens_of_a_stream(n_tokens: int, time_scale: float) -> None:
    """Whether tokens come one by one or all at once, these and no others have reached the client."""
    async with started(SimServerConfig(engine=ENGINE, time_scale=time_scale)) as client:
        whole = (await client.complete(max_tokens=60, return_token_ids=True))["choices"][0]["token_ids"]
        died: list[bool] = []

        def die() -> None:
            died.append(True)
            runner = client.server._runner
            assert runner is not None and runner.server is not None
            for connection in runner.server.connections:
                assert connection.transport is not None
                connection.transport.abort()

        client.server.die = die
        status, page = await client.post("/sim/fault", {"kind": "die", "after_tokens": n_tokens})
        assert (status, page) == (200, {"armed": True, "stalled": False})
        got = await until_broken(client.server.http_url, client.http)
        assert died
        assert ids(got) == whole[:n_tokens]
        assert all(chunk["choices"][0]["finish_reason"] is None for chunk in got)


async def test_a_stalled_engine_sends_nothing_until_it_is_asked_to_go_on() -> None:
    """Its connection stays open, requests that come meanwhile wait, and all tokens come in the end, once each."""
    async with started(SimServerConfig(engine=ENGINE, time_scale=20.0)) as client:
        whole = (await client.complete(max_tokens=60, return_token_ids=True))["choices"][0]["token_ids"]
        await client.post("/sim/fault", {"kind": "stall", "after_tokens": 10})
        chunks = aiter(streamed(client.server.http_url, client.http))
        got: list[dict[str, Any]] = []
        while len(ids(got)) < 10:
            got.append(await anext(chunks))
        following = asyncio.ensure_future(anext(chunks))
        late = asyncio.ensure_future(client.complete(max_tokens=1))
        while client.server.model.stats().n_running:
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.1)
        assert not following.done() and not late.done()
        assert ids(got) == whole[:10]
        assert (await client.get("/sim/info"))["worker"] == "sim-0"
        assert await client.post("/sim/fault", {"kind": "none"}) == (200, {"armed": False, "stalled": False})
        got.append(await following)
        got += [chunk async for chunk in chunks]
        assert ids(got) == whole
        await late


async def test_a_refusal_ends_one_stream_with_an_error_event() -> None:
    """It comes after the number of tokens; the next stream is whole, and no block stays in use."""
    async with started() as client:
        await client.post("/sim/fault", {"kind": "refuse", "after_tokens": 8})
        got = await chunks_of(client)
        assert len(ids(got)) == 8
        assert got[-1]["error"]["code"] == 500
        assert len(ids(await chunks_of(client))) == 60
        assert client.server.model.stats().n_blocks_used == 0


async def test_an_impossible_fault_gets_400() -> None:
    """The message names what is wrong."""
    async with started() as client:
        status, page = await client.post("/sim/fault", {"kind": "sleep"})
        assert (status, "kind" in page["error"]["message"]) == (400, True)


def test_an_engine_that_dies_is_killed_as_by_sigkill() -> None:
    """With the options of the command, the process ends with the signal, after exactly so many tokens."""
    command = [sys.executable, "-m", "streams.cli", "sim", "--port", "0", "--events-port", "0", "--replay-port", "0"]
    command += ["--time-scale", "20", "--fault", "die", "--fault-after-tokens", "9", "--decode-ms-per-token", "40"]

    async def scenario(url: str) -> list[dict[str, Any]]:
        async with aiohttp.ClientSession() as http:
            return await until_broken(url, http)

    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        try:
            url = json.loads(process.stdout.readline())["http"]
            assert len(ids(asyncio.run(scenario(url)))) == 9
            assert process.wait(PATIENCE_S) == -signal.SIGKILL
        finally:
            process.kill()


async def test_each_chunk_has_the_usage_so_far_if_a_client_asks_for_it() -> None:
    """As with vLLM's `continuous_usage_stats`; the cached tokens are known from the first chunk on."""
    async with started(SimServerConfig(engine=ENGINE, time_scale=20.0)) as client:
        await client.complete()
        options = {"include_usage": True, "continuous_usage_stats": True}
        got = await chunks_of(client, stream_options=options)
        counts = [len(ids(got[: at + 1])) for at in range(len(got))]
        assert [chunk["usage"]["completion_tokens"] for chunk in got] == counts
        assert {chunk["usage"]["prompt_tokens_details"]["cached_tokens"] for chunk in got} == {12}


# -- start and stop ----------------------------------------------------------------------------------------------------


async def test_a_stop_ends_open_requests_and_frees_the_ports() -> None:
    """A waiting request gets a 503, and a second server can bind the same ports at once."""
    server = await serve(SimServerConfig(engine=ENGINE, time_scale=0.001))
    async with asyncio.timeout(PATIENCE_S), aiohttp.ClientSession() as http:
        waiting = asyncio.create_task(http.post(server.http_url + "/v1/completions", json={"prompt": PROMPT}))
        while not server.model.stats().n_running:
            await asyncio.sleep(0.005)
        await server.stop()
        response = await waiting
        assert response.status == 503
        response.close()
    ports = [int(url.rsplit(":", 1)[1]) for url in server.info().values()]
    again = await serve(SimServerConfig(port=ports[0], events_port=ports[1], replay_port=ports[2]))
    try:
        assert again.info() == server.info()
        with pytest.raises(SettingsError, match="bind"):
            await serve(SimServerConfig(events_port=ports[1]))
        with pytest.raises(SettingsError, match="listen"):
            await serve(SimServerConfig(port=ports[0]))
    finally:
        await again.stop()


@pytest.mark.parametrize("tokens_read", [0, 1])
async def test_the_request_of_a_client_that_hangs_up_is_cancelled(tokens_read: int) -> None:
    """As in vLLM, its blocks are released, before or after its first token, and other requests are served."""

    # A prefill of 20 ms of wall time, and 8 s for the whole answer, which the test does not wait for.
    async with started(SimServerConfig(engine=replace(ENGINE, prefill_ms_base=20.0), time_scale=1.0)) as client:
        body = {"prompt": PROMPT * 4, "max_tokens": 400, "stream": True}
        posting = asyncio.create_task(client.http.post(client.server.http_url + "/v1/completions", json=body))
        while not client.server.model.stats().n_running:
            await asyncio.sleep(0.001)
        if tokens_read:
            response = await posting
            await response.content.readline()
            response.close()
        else:
            posting.cancel()
        while client.server.model.stats().n_running:
            await asyncio.sleep(0.001)
        stats = client.server.model.stats()
        assert (stats.n_blocks_used, stats.n_waiting) == (0, 0)
        assert stats.n_blocks_cached >= len(PROMPT) * 4 // 4
        assert len((await client.complete(max_tokens=4))["choices"][0]["text"]) == 4


async def test_a_chat_is_answered_in_openais_shape() -> None:
    """The answer's prompt is what /tokenize returns for the same messages, and a stream joins to the same text."""
    async with started() as client:
        body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 9, "return_token_ids": True}
        status, whole = await client.post("/v1/chat/completions", body)
        assert (status, whole["object"], whole["id"][:9]) == (200, "chat.completion", "chatcmpl-")
        message = whole["choices"][0]["message"]
        assert (message["role"], len(message["content"])) == ("assistant", 9)
        _, tokenized = await client.post("/tokenize", body)
        assert tokenized["tokens"] == whole["prompt_token_ids"]
        assert tokenized["count"] == whole["usage"]["prompt_tokens"] == len(tokenized["tokens"])
        url = client.server.http_url + "/v1/chat/completions"
        async with client.http.post(url, json={**body, "stream": True}) as response:
            lines = [line.removeprefix(b"data: ").strip() async for line in response.content if line.strip()]
        first, *chunks = map(json.loads, lines[:-1])
        assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert first["prompt_token_ids"] == tokenized["tokens"]
        assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks) == message["content"]
        assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-1] == "length"


def test_run_serves_until_sigterm() -> None:
    """`run` calls back once with the server, blocks, and ends the process with status 0 on SIGTERM."""
    program = (
        "from streams.lab.engines.server import SimServerConfig, run\n"
        "run(SimServerConfig(), lambda server: print(server.http_url, flush=True))\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline().startswith("http://127.0.0.1:")
            os.kill(process.pid, signal.SIGTERM)
            assert process.wait(PATIENCE_S) == 0
        finally:
            process.kill()


@pytest.mark.parametrize(
    "wrong", [{"time_scale": 0.0}, {"replay_buffer_batches": 0}, {"hash_dialect": "hex"}, {"event_dialect": "xml"}]
)
def test_an_invalid_configuration_is_refused(wrong: dict[str, Any]) -> None:
    """The error names the field."""
    with pytest.raises(SettingsError, match=next(iter(wrong))):
        SimServerConfig(**wrong)


async def test_tokens_of_a_byte_prompt_are_its_utf8() -> None:
    """A text of three bytes has three tokens, even if it has only two characters."""
    async with started() as client:
        page = await client.complete(prompt="ö!", return_token_ids=True)
        assert page["choices"][0]["prompt_token_ids"] == np.frombuffer("ö!".encode(), dtype=np.uint8).tolist()
