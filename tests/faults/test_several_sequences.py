"""One request that is several: all prompts of a list and all answers are booked, and tokens are those of the usage."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import orjson
import pytest

from streams.core.hashing import local_hashes
from streams.core.routing.selection import RouterMode
from streams.settings import Settings
from tests.helpers.front_stage import Backend, Stage, on_stage
from tests.helpers.local_router import SureRouter, hold, local_router, rank, register
from tests.helpers.scripted_engine import Script, ScriptedEngine, scripted_engines

BLOCK = 16


@pytest.fixture(scope="module")
def backend() -> Iterator[Backend]:
    with (
        local_router(Settings(router_mode=RouterMode.KV), n_workers=0, make=SureRouter) as router,
        scripted_engines(1, ScriptedEngine) as engines,
    ):
        register(router.router, 1, url=engines[0].url)
        hold(router.router, rank(1), local_hashes(list(range(2000)), BLOCK)[:50])
        yield router, engines


def ids(n: int, first: int) -> list[int]:
    return list(range(first, first + n))


async def booked(stage: Stage, **body: Any) -> tuple[int, int]:
    """Return prefill tokens and decode blocks while the engine has the request."""
    stage.script(Script(stalls_at=0))
    request = asyncio.create_task(stage.post({"model": "m", "stream": True, **body}, "/v1/completions"))
    await stage.until(lambda: stage.engines[0].n_open == 1, "the request")
    (row,) = (await asyncio.to_thread(stage.router.api.get, "/loads"))["loads"]
    request.cancel()
    await asyncio.gather(request, return_exceptions=True)
    return row["active_prefill_tokens"], row["active_decode_blocks"]


@pytest.mark.parametrize(
    ("body", "tokens", "blocks"),
    [
        pytest.param({"prompt": ids(2000, 5000)}, 2000, 125, id="one"),
        pytest.param({"prompt": [ids(2000, 5000)]}, 2000, 125, id="a list of one"),
        pytest.param({"prompt": [ids(2000, 5000 * n) for n in range(1, 65)]}, 128_000, 8000 + 64, id="64 prompts"),
        pytest.param({"prompt": [ids(9, 5000), ids(2000, 8000)]}, 2009, 125 + 2, id="a short one first"),
        pytest.param({"prompt": ids(2000, 5000), "n": 16}, 2000, 125 + 16, id="16 answers"),
        pytest.param({"prompt": ids(2000, 5000), "best_of": 4}, 2000, 125 + 4, id="the best of 4"),
        pytest.param({"prompt": [ids(160, 5000), ids(160, 6000)], "n": 3}, 320, 20 + 6, id="both"),
        pytest.param(
            {"prompt": ids(2000, 0), "n": 16}, 1200, 125 + 16, id="16 answers to a prompt that is partly held"
        ),
        pytest.param({"prompt": ids(160, 5000), "n": 0}, 160, 10, id="a wrong number"),
        pytest.param({"prompt": ids(160, 5000), "n": "16"}, 160, 10 + 16, id="a text that is a number"),
        pytest.param({"prompt": ids(160, 5000), "n": "many"}, 160, 10, id="not a number"),
    ],
)
async def test_all_prompts_and_all_answers_are_booked(backend: Backend, body: Any, tokens: int, blocks: int) -> None:
    """Answers to one prompt share its blocks, and each has one more for what it generates."""
    async with on_stage(backend) as stage:
        assert await booked(stage, **body) == (tokens, blocks)


async def test_several_texts_are_booked_by_their_length(backend: Backend) -> None:
    """No tokenizer knows them, so four bytes count as a token."""
    async with on_stage(backend) as stage:
        tokens, _ = await booked(stage, prompt=["word " * 800, "other " * 800])
        assert 2100 <= tokens <= 2300


async def test_an_overlap_of_several_prompts_is_not_exact(backend: Backend) -> None:
    """Only the first one is compared, and the engine reports what it found of all."""
    async with on_stage(backend) as stage:
        for prompt, mode in (([ids(800, 0), ids(800, 0)], "approximate"), ([ids(800, 0)], "exact")):
            body = {"model": "m", "prompt": prompt, "stream": True}
            _, headers, _ = await stage.post(body, "/v1/completions", **{"X-Kvstreams-Details": "1"})
            assert headers["X-Kvstreams-Mode"] == mode
            assert headers["X-Kvstreams-Overlap-Blocks"].startswith("50/")


# -- tokens ------------------------------------------------------------------------------------------------------------


def events(n: int, usage: bool, continuous: bool = False, choices: int = 1) -> bytes:
    """Return a stream of n events with 5 tokens each."""
    pages: list[Any] = []
    for at in range(n):
        rows = [
            {"index": c, "text": "abcde", "finish_reason": "length" if at == n - 1 else None} for c in range(choices)
        ]
        pages.append({"choices": rows, **({"usage": {"completion_tokens": 5 * (at + 1)}} if continuous else {})})
    if usage:
        pages.append({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 5 * n * choices}})
    return b"".join(b"data: " + orjson.dumps(page) + b"\n\n" for page in pages) + b"data: [DONE]\n\n"


@pytest.mark.parametrize("piece", [7, 100, 100_000])
@pytest.mark.parametrize("migration", [False, True])
@pytest.mark.parametrize(("usage", "continuous"), [(True, False), (True, True), (False, True)])
async def test_tokens_of_a_stream_are_those_of_its_usage(
    backend: Backend, usage: bool, continuous: bool, migration: bool, piece: int
) -> None:
    """An engine puts several tokens into one event."""
    async with on_stage(backend, front_migration=migration) as stage:
        stage.script(Script(answer=events(30, usage, continuous), piece=piece))
        await stage.post({"model": "m", "prompt": ids(40, 0), "stream": True}, "/v1/completions")
        await stage.until_free()
        assert stage.front.counts.output_tokens == 150


async def test_a_text_that_looks_like_usage_is_not_usage(backend: Backend) -> None:
    """A model may generate JSON."""
    page = {"choices": [{"index": 0, "text": '{"completion_tokens": 999}', "finish_reason": "stop"}]}
    async with on_stage(backend) as stage:
        stage.script(Script(answer=b"data: " + orjson.dumps(page) + b"\n\ndata: [DONE]\n\n"))
        await stage.post({"model": "m", "prompt": ids(40, 0), "stream": True}, "/v1/completions")
        await stage.until_free()
        assert stage.front.counts.output_tokens < 5


@pytest.mark.parametrize("body", [{"n": 2}, {"prompt": [ids(40, 0), ids(40, 100)]}])
async def test_the_error_of_a_stream_of_several_answers_counts_what_was_passed_on(backend: Backend, body: Any) -> None:
    """The message of a stalled stream has the tokens of all answers, also if one of them is complete."""
    whole = events(30, usage=False, choices=2)
    cut = whole[: whole.index(b"length") - 200]
    done = b'data: {"choices": [{"index": 1, "text": "e", "finish_reason": "stop"}]}\n\n'
    async with on_stage(backend, front_migration=True, front_stall_timeout_s=0.3) as stage:
        stage.script(Script(answer=done + cut + b"\n" * 10, stalls_at=len(done + cut), piece=100_000))
        _, _, page = await stage.post({"model": "m", "prompt": ids(40, 0), "stream": True, **body}, "/v1/completions")
        n_events = (done + cut).count(b'"text"')
        message = orjson.loads(page[page.index(b'{"error"') :].split(b"\n")[0])["error"]["message"]
        n_tokens = int(message.split(" after ")[1].split(" tokens")[0])
        assert 0 < n_tokens <= n_events and n_tokens >= n_events - 3
