"""Streams that migrate: engines die, stall or refuse in the middle of an answer, and the client does not notice."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from streams.core.ids import Epoch, Incarnation
from streams.core.reducer.ordering import Health, Progress
from streams.frontend.tracing import TracedSpans
from streams.lab.engines.chat_template import tokenizer_files
from streams.lab.engines.engine_config import EngineConfig
from streams.lab.processes import Children
from streams.lab.stack import Engine, Stack
from streams.settings import Settings
from streams.tables.records import PROGRESS_KEY, encode_progress
from tests.helpers.byte_engine import CHAT_PROMPT, ByteEngine, Plan
from tests.helpers.front_stage import Answer, Stage, on_stage, share
from tests.helpers.local_router import LocalRouter, local_router, rank, register
from tests.helpers.scripted_engine import scripted_engines

TEXT = "Grüße, 世界! 🙂 An answer with characters of one to four bytes: ä ö ü €."

CHAT = {"model": "m", "messages": [{"role": "user", "content": "x"}], "stream": True, "max_tokens": 500}
COMPLETION = {"model": "m", "prompt": CHAT_PROMPT, "stream": True, "max_tokens": 500}
BODIES = {"/v1/chat/completions": CHAT, "/v1/completions": COMPLETION}

DETAILS = {"X-Kvstreams-Details": "1"}

WITHOUT_IDS = Plan(TEXT, has_ids=False, dies_at=13)
STRICT = replace(WITHOUT_IDS, is_strict=True)

Ask = Callable[..., Awaitable["Answer"]]
Backend = tuple[LocalRouter, list[ByteEngine]]


@pytest.fixture(scope="module")
def backend() -> Iterator[Backend]:
    """Give a router and three engines that it knows."""
    with local_router(Settings(), n_workers=0) as router, scripted_engines(3, ByteEngine) as engines:
        for number, engine in enumerate(engines, start=1):
            register(router.router, number, url=engine.url)
        yield router, engines


def asked_of(stage: Stage) -> list[dict[str, Any]]:
    """Return the bodies of all requests that engines got."""
    return [body for engine in stage.engines if isinstance(engine, ByteEngine) for body in engine.asked]


@asynccontextmanager
async def run(backend: Backend, *plans: Plan, **settings: Any) -> AsyncIterator[tuple[Stage, Ask]]:
    """Give a front that moves streams, and a call of it. plans: of the engine that is asked first, second, and so on.

    Afterwards every booking must have ended, and no engine may have a request.
    """
    router, engines = backend
    async with on_stage((router, engines), front_migration=True, **settings) as stage:  # type: ignore[arg-type]
        for engine in engines:
            engine.plan, engine.asked = Plan(TEXT), []

        async def ask(body: Any = CHAT, path: str = "/v1/chat/completions", **headers: str) -> Answer:
            async with (
                aiohttp.ClientSession() as session,
                session.post(stage.url + path, json=body, headers=headers) as response,
            ):
                assert response.status == 200
                return Answer(await response.read())

        # Any engine may be asked first, so they share their plans: each request takes the next one.
        share(engines, *plans)
        yield stage, ask


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("chunk", [1, 3])
async def test_a_stream_moves_twice_and_the_client_does_not_notice(backend: Backend, path: str, chunk: int) -> None:
    """Every token comes once, in one stream with one id and one role, and with the usage of the whole answer."""
    n = len(TEXT.encode())
    options: dict[str, Any] = {"chunk": chunk, "cached": 4}
    in_a_character, later = Plan(TEXT, dies_at=10, **options), Plan(TEXT, dies_at=40, **options)
    async with run(backend, in_a_character, later, Plan(TEXT, **options)) as (stage, ask):
        body = {**BODIES[path], "stream_options": {"include_usage": True}, "temperature": 0, "seed": 5}
        answer = await ask(body, path, **DETAILS)
        assert (answer.text, answer.finish_reasons, answer.ended, answer.error) == (TEXT, ["stop"], True, None)
        assert answer.roles == (path == "/v1/chat/completions")
        assert len(answer.frames) == 1 and not answer.has_ids and not answer.comments
        assert answer.usage["completion_tokens"] == n and answer.usage["prompt_tokens"] == len(CHAT_PROMPT)
        assert answer.usage["total_tokens"] == n + len(CHAT_PROMPT)
        assert answer.figures["migrations"] == 2 and answer.figures["resumed_by"] == "ids"
        asked = asked_of(stage)
        resumed = sorted(
            (each for each in asked if "stream_options" in each and "messages" not in each),
            key=lambda each: len(each["prompt"]),
        )[-2:]
        for each in resumed:
            kept = len(each["prompt"]) - len(CHAT_PROMPT)
            assert each["max_tokens"] == 500 - kept and each["seed"] == 5 and each["temperature"] == 0
        assert answer.figures["tokens_prefilled_again"] == sum(len(each["prompt"]) - 4 for each in resumed)
        assert stage.front.counts.migrations == 2 and stage.front.counts.moved.streams == 1
        assert stage.front.counts.outcomes["completed"] == 1


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("so_far", [True, False])
async def test_cached_tokens_of_a_stream_that_migrated_are_those_of_its_first_engine(
    backend: Backend, path: str, so_far: bool
) -> None:
    """What later engines find of prompt and answer is not counted. If the first one died too early, nothing is said."""
    plans = Plan(TEXT, dies_at=10, cached=4), Plan(TEXT, dies_at=40, cached=6), Plan(TEXT, cached=5)
    options = {"include_usage": True, **({"continuous_usage_stats": True} if so_far else {})}
    async with run(backend, *plans) as (_stage, ask):
        answer = await ask({**BODIES[path], "stream_options": options}, path)
        usages = answer.usages
        n = len(TEXT.encode())
        assert answer.text == TEXT
        assert len(usages) > 40 if so_far else len(usages) == 1
        expected = {"cached_tokens": 4} if so_far else None
        assert [usage.get("prompt_tokens_details") for usage in usages] == [expected] * len(usages)
        assert {usage["prompt_tokens"] for usage in usages} == {len(CHAT_PROMPT)}
        assert usages[-1]["completion_tokens"] == n and usages[-1]["total_tokens"] == n + len(CHAT_PROMPT)


async def test_the_router_gets_what_the_last_engine_found_of_its_own_request(backend: Backend) -> None:
    """The audit compares it with the overlap of the last decision, which was for the prompt and the answer so far."""
    router, _ = backend
    reports: list[tuple[int | None, int | None]] = []
    report = router.router.report_phase

    def note(request_id: str, what: Any, phase: Any = None, prompt: Any = None, cached: Any = None) -> Any:
        reports.append((prompt, cached))
        return report(request_id, what, phase, prompt, cached)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(router.router, "report_phase", note)
        async with run(backend, Plan(TEXT, dies_at=10, cached=4), Plan(TEXT, cached=6)) as (stage, ask):
            assert (await ask()).text == TEXT
            await stage.until_free()
            resumed = next(body for body in asked_of(stage) if "messages" not in body and "prompt" in body)
    assert [found for found in reports if found != (None, None)] == [(len(resumed["prompt"]), 6)]


async def test_a_stream_returns_to_an_engine_that_was_restarted() -> None:
    """A failed engine gets the stream again once its incarnation is another one; until then it does not."""

    def restart(stage: Stage, worker_id: int, incarnation: int) -> None:
        epoch = Epoch(Incarnation(incarnation), 0)
        progress = Progress(rank(worker_id), epoch, 1, health=Health.EXACT, model="m", block_size=16)
        stage.router.router.view.fold_index(PROGRESS_KEY.pack(rank(worker_id)), encode_progress(progress))

    with local_router(Settings(), n_workers=0) as router, scripted_engines(2, ByteEngine) as engines:
        for number, engine in enumerate(engines, start=1):
            register(router.router, number, url=engine.url)
        async with run((router, engines), Plan(TEXT, dies_at=10), Plan(TEXT, dies_at=40)) as (stage, ask):
            for worker_id in (1, 2):
                restart(stage, worker_id, 10)
            await stage.front.fleet.poll()
            answer = await ask(**DETAILS)
            assert answer.error is not None and answer.error["code"] == "engine_failed"
            assert len(asked_of(stage)) == 2

            share(stage.engines, Plan(TEXT, dies_at=10), Plan(TEXT, dies_at=40, waits_at=35), Plan(TEXT))
            asking = asyncio.ensure_future(ask({**CHAT, "top_k": 1}, **DETAILS))  # another request
            await stage.until(lambda: any(engine.waiting for engine in engines), "the second engine")
            waiting = 0 if engines[0].waiting else 1
            restart(stage, 2 - waiting, 11)
            await stage.front.fleet.poll()
            engines[waiting].go_on = True
            answer = await asking
            assert (answer.text, answer.ended, answer.error) == (TEXT, True, None)
            assert answer.figures["migrations"] == 2


async def test_no_half_character_is_lost_wherever_the_engine_dies(backend: Backend) -> None:
    """The tokens of an incomplete character are generated again."""
    async with run(backend) as (stage, ask):
        for dies_at in range(1, 24):
            share(stage.engines, Plan(TEXT, dies_at=dies_at, chunk=1 + dies_at % 3), Plan(TEXT, chunk=2))
            answer = await ask({**CHAT, "temperature": 0})
            assert (answer.text, answer.ended) == (TEXT, True)
        assert stage.front.counts.migrations >= 20


@pytest.mark.parametrize("includes", [False, True])
async def test_a_stop_string_over_the_seam_ends_the_answer(backend: Backend, includes: bool) -> None:
    """It is found although its beginning was generated by the engine that died."""
    stop = " answer with"
    at = TEXT.encode().index(stop.encode())
    expected = TEXT[: TEXT.index(stop) + (len(stop) if includes else 0)]
    body = {**COMPLETION, "stop": [stop, "zz"], "temperature": 0, "include_stop_str_in_output": includes}
    async with run(backend) as (stage, ask):
        for cut in range(at - 2, at + len(stop), 3):
            share(stage.engines, Plan(TEXT, dies_at=cut))
            answer = await ask(body, "/v1/completions")
            assert (answer.text, answer.finish_reasons, answer.error) == (expected, ["stop"], None)


@pytest.mark.parametrize(
    ("first", "second", "failures"),
    [
        (Plan(TEXT, errors_at=12), Plan(TEXT), {"refused": 1}),
        (Plan(TEXT, stalls_at=12), Plan(TEXT), {"stalled": 1}),
        (Plan(TEXT, dies_at=12), Plan(TEXT, refuses=503), {"died": 1, "refused": 1}),
        (Plan(TEXT, dies_at=12), Plan(TEXT, dies_at=40), {"died": 2}),
        (Plan(TEXT, dies_at=12), Plan(TEXT, stalls_at=40), {"died": 1, "stalled": 1}),
    ],
)
async def test_however_engines_fail_the_stream_goes_on(
    backend: Backend, first: Plan, second: Plan, failures: dict[str, int]
) -> None:
    """An error event, silence, a refusal to resume, and an engine that dies after it has resumed."""
    async with run(backend, first, second, Plan(TEXT), front_stall_timeout_s=0.3) as (stage, ask):
        answer = await ask()
        assert (answer.text, answer.ended, answer.error) == (TEXT, True, None)
        assert stage.front.counts.engine_failures == failures


@pytest.mark.parametrize(
    ("settings", "reason"),
    [({}, "no other engine is left"), ({"front_migrations_max": 1}, "2 engines failed")],
)
async def test_without_another_engine_a_clean_error_follows_what_was_generated(
    backend: Backend, settings: dict[str, Any], reason: str
) -> None:
    """The client gets the text, the reason, and the mark of the end."""
    async with run(backend, *[Plan(TEXT, dies_at=at) for at in (15, 35, 55, 75)], **settings) as (stage, ask):
        answer = await ask(CHAT, **DETAILS)
        assert answer.ended and TEXT.startswith(answer.text) and answer.text
        assert answer.error["code"] == "engine_failed" and reason in answer.error["message"]
        assert answer.figures["migrations"] >= 1
        assert stage.front.counts.outcomes["broken"] == 1


@pytest.mark.parametrize(
    ("fields", "plan", "reason"),
    [
        ({"n": 2}, Plan(TEXT, dies_at=12), "several answers"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, Plan(TEXT, dies_at=12), "tool calls"),
        ({"response_format": {"type": "json_object"}}, Plan(TEXT, dies_at=12), "response_format"),
        ({"logprobs": True}, Plan(TEXT, dies_at=12), "log probabilities"),
        ({}, Plan(TEXT, dies_at=12, reasons=True), "reasoning"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            Plan(TEXT, dies_at=12),
            "images",
        ),
    ],
)
async def test_what_cannot_be_moved_ends_with_an_error_that_says_why(
    backend: Backend, fields: dict[str, Any], plan: Plan, reason: str
) -> None:
    """No other engine is asked."""
    async with run(backend, plan) as (stage, ask):
        answer = await ask({**CHAT, **fields})
        assert answer.ended and reason in answer.error["message"]
        assert len(asked_of(stage)) == 1


@pytest.mark.parametrize(
    "plans",
    [
        (WITHOUT_IDS, replace(WITHOUT_IDS, dies_at=None)),
        (STRICT, STRICT, replace(STRICT, dies_at=None), replace(STRICT, dies_at=None)),
    ],
)
async def test_without_token_ids_the_text_is_resumed_and_the_answer_says_so(
    backend: Backend, plans: tuple[Plan, ...]
) -> None:
    """An engine that does not know return_token_ids, and one that refuses it, are served as well."""
    async with run(backend, *plans) as (_, ask):
        answer = await ask(CHAT, **DETAILS)
        assert (answer.text, answer.ended, answer.error) == (TEXT, True, None)
        assert answer.figures["resumed_by"] == "text" and len(answer.comments) == 1
        assert answer.roles == 1 and len(answer.frames) == 1


@pytest.mark.parametrize("has_ids", [False, True])
@pytest.mark.parametrize(
    "part",
    [
        {"refusal": "I cannot help with that."},
        {"text": "Yes."},
        {"thinking": "Hm."},
    ],
)
async def test_a_stream_whose_prompt_is_known_in_part_moves_only_with_the_engines_ids(
    backend: Backend, tmp_path: Path, part: dict[str, str], has_ids: bool
) -> None:
    """The front's tokens end before a part that it cannot render, so they only choose the worker."""
    for name, text in tokenizer_files().items():
        (tmp_path / name).write_text(text)
    messages = [
        {"role": "user", "content": "How do I do it?"},
        {"role": "assistant", "content": [part]},
        {"role": "user", "content": "Why not?"},
    ]

    options = {"tokenizers": {"": tmp_path}}
    async with run(backend, Plan(TEXT, has_ids=has_ids, dies_at=13), Plan(TEXT, has_ids=has_ids), options=options) as (
        stage,
        ask,
    ):
        answer = await ask({**CHAT, "messages": messages})
        assert stage.front.tokenizing.sources == {"files": 1}
        if has_ids:
            assert (answer.text, answer.ended, answer.error) == (TEXT, True, None)
        else:
            assert answer.ended and "whole prompt" in answer.error["message"]
            assert len(asked_of(stage)) == 1


@pytest.mark.parametrize("fields", [{"chat_template": "{{ messages }}"}, {"truncate_prompt_tokens": 3}])
async def test_a_stream_with_a_field_that_changes_the_prompt_moves_only_with_the_engines_ids(
    backend: Backend, fields: dict[str, Any]
) -> None:
    """The front's own tokens are those of another prompt."""
    async with run(backend, Plan(TEXT, has_ids=False, dies_at=13)) as (stage, ask):
        answer = await ask({**CHAT, **fields})
        assert answer.ended and "whole prompt" in answer.error["message"]
        assert len(asked_of(stage)) == 1
        share(stage.engines, Plan(TEXT, dies_at=13), Plan(TEXT))
        assert (await ask({**CHAT, **fields, "top_k": 1})).text == TEXT  # another request


async def test_a_client_that_asks_for_token_ids_gets_each_once(backend: Backend) -> None:
    """Tokens that are generated again are not repeated."""
    async with run(backend, Plan(TEXT, dies_at=30), Plan(TEXT, dies_at=31), Plan(TEXT)) as (_, ask):
        answer = await ask({**CHAT, "return_token_ids": True, "temperature": 0, "stop": "no such text"})
        assert bytes(answer.token_ids) == TEXT.encode() and answer.text == TEXT


async def test_an_engine_that_generates_other_text_for_what_was_held_back_ends_the_stream(backend: Backend) -> None:
    """Two halves that do not fit together are never joined silently."""
    stop = "none of this"

    first = "abcdefghijklmnopqrst" + "🙂" * 10
    async with run(backend, Plan(first, dies_at=36, chunk=3), Plan(first[:12] + "X" * 40)) as (_, ask):
        answer = await ask({**COMPLETION, "stop": stop}, "/v1/completions")
        assert answer.ended and "other text" in answer.error["message"]


async def test_a_client_that_leaves_during_a_migration_is_not_moved(backend: Backend) -> None:
    """Its request ends at the engine that resumes, and no other one is asked."""
    async with run(backend, Plan(TEXT, dies_at=12), Plan(TEXT, stalls_at=0)) as (stage, _):
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{stage.url}/v1/chat/completions", json=CHAT) as response,
        ):
            await response.content.readany()
            await stage.until(lambda: len(asked_of(stage)) == 2, "the migration")
            response.close()
        await stage.until_free()
        assert stage.front.counts.migrations == 1
        assert stage.front.counts.outcomes == {"client_gone": 1}
        assert len(asked_of(stage)) == 2


async def test_an_answer_of_which_only_the_end_is_missing_is_ended_by_the_front(backend: Backend) -> None:
    """All tokens and the finish reason were there: the usage is added, and no other engine is asked."""
    async with run(backend, Plan(TEXT, dies_at=len(TEXT.encode()))) as (stage, ask):
        answer = await ask({**CHAT, "stream_options": {"include_usage": True}})
        assert (answer.text, answer.ended, answer.finish_reasons) == (TEXT, True, ["stop"])
        assert answer.usage["completion_tokens"] == len(TEXT.encode())
        assert len(asked_of(stage)) == 1


async def test_requests_that_are_not_streamed_are_sent_again_as_a_whole(backend: Backend) -> None:
    """Their engine's answer is held back until it is complete, so that another engine can answer instead."""
    plan = Plan(TEXT, dies_at=0)
    async with run(backend, plan, Plan(TEXT)) as (stage, ask):
        answer = await ask({**CHAT, "stream": False})  # these engines stream in any case
        assert answer.text == TEXT
        assert [body.get("return_token_ids") for body in asked_of(stage)] == [None, None]
        assert stage.front.counts.retries == 1 and stage.front.counts.migrations == 0


async def test_a_request_has_a_span_with_its_route_its_engine_and_its_migration(backend: Backend) -> None:
    """Engines and routers get the context of the span that calls them, in the trace of the client."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    async with run(backend, Plan(TEXT, dies_at=12), Plan(TEXT)) as (stage, ask):
        stage.front.proxy._spans = stage.front.proxy._migrator._spans = TracedSpans(provider)
        answer = await ask(CHAT, traceparent=f"00-{trace}-{parent}-01")
        assert answer.text == TEXT
        received = [engine.received for engine in stage.engines if engine.received]
        contexts = {headers["traceparent"] for each in received for headers in each}
        spans = {span.name: span for span in exporter.get_finished_spans()}
        assert spans.keys() == {"POST /v1/chat/completions", "route", "engine", "migration"}
        assert {format(span.context.trace_id, "032x") for span in spans.values()} == {trace}
        calling = {f"00-{trace}-{spans[name].context.span_id:016x}-01" for name in ("engine", "migration")}
        assert contexts == calling
        top = spans["POST /v1/chat/completions"]
        assert top.parent is not None and format(top.parent.span_id, "016x") == parent
        assert (top.attributes or {})["kvstreams.outcome"] == "completed"
        assert (spans["migration"].attributes or {})["kvstreams.failure"] == "died"


# -- processes ---------------------------------------------------------------------------------------------------------

#: Tokens of an answer, and model seconds per second: about 200 tokens per second.
N_TOKENS, TIME_SCALE = 600, 4.0


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LocalRouter, list[Engine], Stack]]:
    """Give a router and three simulated engines, each a process of its own."""
    folder = tmp_path_factory.mktemp("engines")
    with local_router(Settings(), n_workers=0) as router, Children() as children:
        stack = Stack(Settings(), folder, children)
        engines = stack.engines(3, EngineConfig(block_size=16, n_blocks=4096), "m", TIME_SCALE)
        for engine in engines:
            register(router.router, engine.worker_id, url=engine.url)
        yield router, engines, stack


async def test_processes_that_are_killed_and_stopped_in_the_middle_of_a_stream(
    fleet: tuple[LocalRouter, list[Engine], Stack],
) -> None:
    """One engine is killed and the next one hangs; the third ends the answer, which equals that of one engine."""
    router, engines, _ = fleet
    by_id = {engine.worker_id: engine for engine in engines}
    body = {"model": "m", "prompt": "What is a stream?", "stream": True, "max_tokens": N_TOKENS}
    try:
        async with on_stage((router, []), front_migration=True, front_stall_timeout_s=1.0) as stage:
            async with aiohttp.ClientSession() as session:
                async with session.post(f"{engines[0].url}/v1/completions", json=body) as response:
                    expected = Answer(await response.read()).text
                assert len(expected) == N_TOKENS
                url = f"{stage.url}/v1/completions"
                async with session.post(url, json=body, headers=DETAILS) as response:
                    worker = int(response.headers["X-Kvstreams-Worker"].partition("/")[0])
                    got = b""
                    for n_chunks, end in ((5, signal.SIGKILL), (25, signal.SIGSTOP)):
                        while got.count(b"\n\n") < n_chunks:
                            got += await response.content.readany()
                        os.kill(by_id[worker].child.pid, end)
                        n = stage.front.counts.migrations
                        while stage.front.counts.migrations == n:
                            got += await response.content.readany()
                        loads = await asyncio.to_thread(router.api.get, "/loads")
                        (worker,) = [row["worker_id"] for row in loads["loads"] if row["active_requests"]]
                    got += await response.read()
            answer = Answer(got)
            assert (answer.text, answer.ended, answer.error) == (expected, True, None)
            assert answer.figures["migrations"] == 2
            assert stage.front.counts.engine_failures == {"died": 1, "stalled": 1}
    finally:
        for engine in engines:
            if engine.child.running:
                os.kill(engine.child.pid, signal.SIGCONT)
