"""Whether engines make the same tokens as a front: the comparison, the record, the view, and the probes.

What must not be here: Kafka (tests/kafka/test_render_parity.py).
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest

from streams.client.plain_http import PlainHttp
from streams.core.ids import DpRank, Epoch, Incarnation, RankId, WorkerId
from streams.core.reducer.ordering import Progress
from streams.core.workers import (
    NOT_PROBED,
    RenderOutcome,
    RenderParity,
    RenderPart,
    RenderReason,
    RenderResult,
    Worker,
)
from streams.errors import BadRecord, InvalidRequest, NotReady, WorkerChanged
from streams.kafka.avro_frames import codec
from streams.kafka.records import RENDER_PARITIES
from streams.lab.engines import openai
from streams.lab.engines.chat_template import tokenizer_files
from streams.lab.engines.openai import ServedModels
from streams.prompts import parity_probes
from streams.prompts.calls import Kind
from streams.prompts.conversation import NEWEST, Rule
from streams.prompts.engine_tokens import LACKS_S, EngineTokens, TokensAnswer
from streams.prompts.parity import PROMPTS, RenderedPair, judge
from streams.prompts.parity_probes import ParityProbes
from streams.prompts.tokenizing import Tokenizing
from streams.router_api.knowledge import fleet_view
from streams.router_api.knowledge.view import View
from streams.router_api.messages.answer_json import render_json
from streams.router_api.messages.requests import parse_render
from streams.settings import Settings
from streams.tables.records import PROGRESS_KEY, encode_progress
from tests.helpers.http_double import HttpDouble
from tests.helpers.local_router import local_router
from tests.helpers.pages import block_of, shape
from tests.helpers.rendering_engine import byte_model
from tests.helpers.views import BLOCK_SIZE, Clock, register, view_of

EQUAL = RenderResult(RenderOutcome.EQUAL)
DIFFERS = RenderResult(RenderOutcome.DIFFERS, part=RenderPart.CHAT, from_token=3)
NO_FILES = RenderResult(RenderOutcome.UNKNOWN, RenderReason.NO_TOKENIZER)
ONE = WorkerId(1)


# -- the comparison ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chat", "tools", "result"),
    [
        (RenderedPair([1, 2], [1, 2]), RenderedPair([3], [3]), EQUAL),
        (RenderedPair([1, 2], [1, 2]), RenderedPair(None, None), EQUAL),
        (RenderedPair([1, 2, 3, 4], [1, 2, 3, 5]), RenderedPair([3], [4]), DIFFERS),
        (RenderedPair([1, 2, 3, 4], [1, 2, 3]), RenderedPair([3], [3]), DIFFERS),
        (
            RenderedPair([1], None),
            RenderedPair([3], [4]),
            RenderResult(RenderOutcome.DIFFERS, part=RenderPart.CHAT_WITH_TOOLS, from_token=0),
        ),
        (
            RenderedPair([1], None),
            RenderedPair(None, [4]),
            RenderResult(RenderOutcome.UNKNOWN, RenderReason.ENGINE_REFUSED, RenderPart.CHAT),
        ),
        (
            RenderedPair([1], [1]),
            RenderedPair(None, [4]),
            RenderResult(RenderOutcome.UNKNOWN, RenderReason.FRONT_REFUSED, RenderPart.CHAT_WITH_TOOLS),
        ),
        (
            RenderedPair(None, None),
            RenderedPair(None, None),
            RenderResult(RenderOutcome.UNKNOWN, RenderReason.ENGINE_REFUSED),
        ),
    ],
)
def test_the_first_prompt_that_differs_is_named(chat: RenderedPair, tools: RenderedPair, result: RenderResult) -> None:
    """A difference counts more than a refusal by one side, and what both sides refuse does not count."""
    assert judge({RenderPart.CHAT: chat, RenderPart.CHAT_WITH_TOOLS: tools}) == result


@pytest.mark.parametrize(
    "fields",
    [
        {"outcome": "equal", "reason": "no_tokenizer"},
        {"outcome": "equal", "part": "chat"},
        {"outcome": "equal", "from_token": 1},
        {"outcome": "differs", "from_token": 1},
        {"outcome": "differs", "part": "chat"},
        {"outcome": "differs", "part": "chat", "from_token": -1},
        {"outcome": "differs", "part": "chat", "from_token": 1, "reason": "engine_failed"},
        {"outcome": "unknown"},
        {"outcome": "unknown", "reason": "not_probed"},
        {"outcome": "unknown", "reason": "other"},
        {"outcome": "other"},
        {"outcome": "differs", "part": "other", "from_token": 1},
        {"outcome": "equal", "incarnation": -1},
        {"outcome": "equal", "incarnation": 1 << 64},
        {"outcome": "equal", "incarnation": "x"},
        {"outcome": "equal", "probed_by": ""},
        {"outcome": "equal", "probed_by": "a\nb"},
        {"outcome": "equal", "probed_by": "a" * 513},
        {"outcome": "equal", "model": None},
        {"outcome": "equal", "url": "u" * 4097},
        {"outcome": "equal", "tokens": [1]},
    ],
)
def test_a_report_that_contradicts_itself_is_refused(fields: dict[str, Any]) -> None:
    """Each outcome has its own fields, within limits, and there is no field for tokens or text."""
    body = {"url": "http://w", "model": "m", **fields}
    with pytest.raises(InvalidRequest):
        parse_render(ONE, json.dumps(body).encode(), 5)


def test_a_report_is_read_with_its_u64_as_a_number_or_a_string() -> None:
    """The incarnation of a worker exceeds what numbers in JavaScript hold."""
    for given in ((1 << 64) - 1, str((1 << 64) - 1)):
        body = {"url": "http://w", "model": "m", "outcome": "differs", "part": "chat", "from_token": 3}
        parity = parse_render(ONE, orjson.dumps({**body, "incarnation": given, "probed_by": "front"}), 5)
        assert parity == RenderParity(ONE, Incarnation((1 << 64) - 1), "http://w", "m", DIFFERS, 5, "front")


# -- the view ----------------------------------------------------------------------------------------------------------


def parity_of(result: RenderResult = DIFFERS, incarnation: int | None = None, worker_id: int = 1) -> RenderParity:
    given = None if incarnation is None else Incarnation(incarnation)
    return RenderParity(WorkerId(worker_id), given, "http://w", "m", result, 5, "front")


def fold(view: View, parity: RenderParity) -> None:
    view.fold_worker(RENDER_PARITIES.keys.pack(parity.worker_id), RENDER_PARITIES.encode(parity))


def note_incarnation(view: View, incarnation: int, dp_rank: int = 0, worker_id: int = 1) -> None:
    rank = RankId(WorkerId(worker_id), DpRank(dp_rank))
    progress = Progress(rank, Epoch(Incarnation(incarnation), 0), 1, model="m", block_size=BLOCK_SIZE)
    view.fold_index(PROGRESS_KEY.pack(rank), encode_progress(progress))


def shown(view: View, worker_id: int = 1) -> RenderResult:
    parity = view.fleet.render_of(view.fleet.workers[WorkerId(worker_id)])
    return NOT_PROBED if parity is None else parity.result


def test_a_result_counts_in_whatever_order_the_records_come() -> None:
    """Its record may be read before the worker's; it changes no choice, so requests need not wait for it."""
    view = view_of(Clock())
    fold(view, parity_of())
    assert view.fleet.render_outcomes() == Counter()
    register(view, 1)
    changes = view.changes
    register(view, 2)
    assert (shown(view), shown(view, 2)) == (DIFFERS, NOT_PROBED)
    assert view.fleet.render_outcomes() == Counter({RenderOutcome.DIFFERS: 1, RenderOutcome.UNKNOWN: 1})
    changes = view.changes
    fold(view, parity_of(EQUAL))
    assert (shown(view), view.changes) == (EQUAL, changes)


def test_another_incarnation_url_or_model_makes_it_unknown() -> None:
    """The newest rank decides about the incarnation; a record about that one counts again."""
    view = view_of(Clock())
    register(view, 1, dp_size=2)
    fold(view, parity_of())
    for incarnation, dp_rank in ((7, 0), (8, 1)):
        note_incarnation(view, incarnation, dp_rank)
        assert view.fleet.incarnation_of(view.fleet.workers[ONE]) == incarnation
        assert shown(view) == NOT_PROBED
        fold(view, parity_of(incarnation=incarnation))
        assert shown(view) == DIFFERS
    register(view, 1, dp_size=2, url="http://other")
    assert shown(view) == NOT_PROBED
    register(view, 1, dp_size=2, model="other")
    assert shown(view) == NOT_PROBED
    register(view, 1, dp_size=2)
    assert shown(view) == DIFFERS


def test_a_tombstone_ends_it_and_results_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the limit, records of further workers are ignored, and those of known ones count."""
    monkeypatch.setattr(fleet_view, "RENDER_PARITIES_MAX", 2)
    view = view_of(Clock())
    for worker_id in (1, 2, 3):
        register(view, worker_id)
        fold(view, parity_of(worker_id=worker_id))
    assert [shown(view, each) for each in (1, 2, 3)] == [DIFFERS, DIFFERS, NOT_PROBED]
    fold(view, parity_of(EQUAL, worker_id=2))
    assert shown(view, 2) == EQUAL
    view.fold_worker(RENDER_PARITIES.keys.pack(ONE), None)
    assert shown(view) == NOT_PROBED and not view.fleet.has_render(ONE)
    fold(view, parity_of(worker_id=3))
    assert shown(view, 3) == DIFFERS


@pytest.mark.parametrize("key", [b"render/", b"render/x", b"render/01", b"render/-1", b"render/2"])
def test_a_bad_key_is_refused(key: bytes) -> None:
    """The key ends with the worker's id in decimal, as the worker's own key has it."""
    view = view_of(Clock())
    with pytest.raises(BadRecord):
        view.fold_worker(key, RENDER_PARITIES.encode(parity_of()))
    assert not view.fleet.has_render(ONE)


@pytest.mark.parametrize("wrong", [{"outcome": "other"}, {"part": "other"}, {"reason": "x"}, {"from_token": -1}])
def test_a_record_with_unknown_words_is_refused(wrong: dict[str, Any]) -> None:
    """A record of another application, or of a later version, is skipped."""
    datum = {
        "worker_id": 1,
        "incarnation": None,
        "url": "http://w",
        "model": "m",
        "outcome": "differs",
        "reason": None,
        "part": "chat",
        "from_token": 3,
        "probed_at_ms": 5,
        "probed_by": "front",
    }
    with pytest.raises(BadRecord):
        view_of(Clock()).fold_worker(b"render/1", codec("render-parities").encode({**datum, **wrong}))


# -- the registry ------------------------------------------------------------------------------------------------------


def test_a_report_about_another_engine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A front may know a newer incarnation than the router, but never an older one. A report waits for nothing."""
    with local_router(Settings(), n_workers=1) as served:
        registry, view = served.router.registry, served.router.view
        written: list[bytes] = []
        monkeypatch.setattr(registry, "_send", lambda key, _: written.append(key))
        worker = view.fleet.workers[ONE]

        def parity(incarnation: int | None, **changes: Any) -> RenderParity:
            return replace(parity_of(incarnation=incarnation), url=worker.url, **changes)

        registry.put_render(parity(None))
        assert shown(view) == DIFFERS
        registry.put_render(parity(None, result=EQUAL))
        assert shown(view) == EQUAL
        registry.put_render(parity(None, result=NO_FILES))  # a front without a tokenizer knows less
        assert shown(view) == EQUAL
        note_incarnation(view, 7)
        for stale in (parity(None), parity(6), replace(parity(7), url="http://o"), replace(parity(7), model="o")):
            with pytest.raises(WorkerChanged):
                registry.put_render(stale)
        assert shown(view) == NOT_PROBED
        registry.put_render(parity(7, result=NO_FILES))
        assert shown(view) == NO_FILES
        registry.put_render(parity(7))
        assert shown(view) == DIFFERS
        registry.put_render(parity(8))  # this router has not read of the restart yet
        assert shown(view) == NOT_PROBED
        note_incarnation(view, 8)
        assert shown(view) == DIFFERS
        assert written == [b"render/1"] * 5


def test_the_call_answers_with_what_is_shown() -> None:
    """Its body is validated, and unknown workers are 404; GET /workers has every field."""
    with local_router(Settings(), n_workers=1) as served:
        api, row = served.api, served.api.workers()[1]
        assert row["render"] == render_json(None)
        assert row["incarnation"] is None
        body = {"url": row["url"], "model": row["model"], "outcome": "equal"}
        answer = api.call("PUT", "/workers/1/render", {**body, "probed_by": "front a:1"}).given()
        assert answer["render"] == {**row["render"], **answer["render"]} != row["render"]
        assert api.workers()[1]["render"] == answer["render"]
        assert (answer["render"]["outcome"], answer["render"]["probed_by"]) == ("equal", "front a:1")
        api.call("PUT", "/workers/9/render", body).refused(404, "unknown_id")
        api.call("PUT", "/workers/1/render", {**body, "url": "http://other"}).refused(409, "worker_changed")
        api.call("PUT", "/workers/1/render", {**body, "part": "chat"}).refused(400, "invalid_request")
        api.call("PUT", "/workers/1/render", {**body, "token_ids": [1]}).refused(400, "invalid_request")


# -- the probes of a front ---------------------------------------------------------------------------------------------


class Router:
    """Takes reports, and can refuse them."""

    def __init__(self) -> None:
        self.reports: list[tuple[int, dict[str, Any]]] = []
        self.refuses = False

    async def report_render(self, worker_id: int, body: dict[str, Any]) -> dict[str, Any]:
        self.reports.append((worker_id, orjson.loads(orjson.dumps(body))))
        if self.refuses:
            raise NotReady("Kafka is away")
        return {}

    def outcomes(self) -> list[tuple[int, str, Any]]:
        return [(worker_id, body["outcome"], body["part"] or body["reason"]) for worker_id, body in self.reports]


def row_of(url: str, worker_id: int = 1, **changes: Any) -> dict[str, Any]:
    return {
        "worker_id": worker_id,
        "url": url,
        "model": "m",
        "incarnation": 7,
        "dp_size": 1,
        "silent_dp_ranks": [],
        "render": render_json(None),
        **changes,
    }


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    for name, text in tokenizer_files().items():
        (folder / name).write_text(text)
    return folder


class FrontClock:
    """Seconds that the test sets."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def engine_page(style: str = "") -> Callable[[Any], Any]:
    """Answer /tokenize as a simulated engine does."""
    return lambda body: openai.tokenize(body, ServedModels("m", (), 1 << 20, style))


def probing(
    paths: Mapping[str, Path],
    scenario: Callable[[ParityProbes, Router], Awaitable[None]],
    clock: Callable[[], float] = time.monotonic,
) -> tuple[Router, Counter[RenderOutcome]]:
    """Run a scenario with probes whose tokenizer process runs."""
    router = Router()
    outcomes: Counter[RenderOutcome] = Counter()

    async def main() -> None:
        tokenizing = Tokenizing(paths, 1, 1 << 20)
        await tokenizing.start()
        probes = ParityProbes(router.report_render, tokenizing, lambda _: None, clock=clock)
        try:
            async with asyncio.timeout(30):
                await scenario(probes, router)
        finally:
            await probes.close()
            await tokenizing.close()
        assert len(probes) == 0
        outcomes.update(probes.outcomes)

    asyncio.run(main())
    return router, outcomes


async def until_idle(probes: ParityProbes) -> None:
    while len(probes):
        await asyncio.sleep(0.005)


def test_engines_are_probed_once_and_the_difference_is_logged_once(
    files: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Two of three engines have another template; the log says what to do, and has neither text nor tokens."""
    caplog.set_level(logging.WARNING)
    with (
        HttpDouble({"/tokenize": engine_page()}) as same,
        HttpDouble({"/tokenize": engine_page("terse")}) as other,
    ):

        async def scenario(probes: ParityProbes, router: Router) -> None:
            rows = [row_of(same.url), row_of(other.url, 2), row_of(f"{other.url}/", 3)]
            for _ in range(3):
                probes.note(rows)
                await until_idle(probes)

        router, outcomes = probing({"m": files}, scenario)
    assert sorted(router.outcomes()) == [(1, "equal", None), (2, "differs", "chat"), (3, "differs", "chat")]
    (report,) = [body for worker_id, body in router.reports if worker_id == 2]
    assert report["from_token"] > 0 and report["incarnation"] == 7 and report["probed_by"].startswith("front ")
    assert outcomes == Counter({RenderOutcome.EQUAL: 1, RenderOutcome.DIFFERS: 2})
    (logged,) = [record.getMessage() for record in caplog.records if "other tokens" in record.getMessage()]
    assert "--chat-template" in logged and "'chat'" in logged
    shown = " ".join(block_of("docs/front.md", "the engine of worker 2").split()).removesuffix(" …")
    shown = shown.replace("http://gpu2:8000", "URL").replace("my-model", "m")
    assert shape(re.sub(r"http://\S+", "URL", logged)).startswith(shape(shown))
    for _, prompt in PROMPTS.values():
        for message in prompt.get("messages", ()):
            content = message["content"] or ""
            texts = [content] if isinstance(content, str) else [part["text"] for part in content]
            assert not any(text in logged for text in texts if len(text) > 2)


def test_another_engine_behind_an_id_is_probed_again(files: Path) -> None:
    """A new incarnation, model or URL is; what a router that lags behind shows is not."""
    with HttpDouble({"/tokenize": engine_page()}) as engine:
        first = row_of(engine.url)
        rows = [
            (first, 1),
            ({**first, "incarnation": 8}, 2),
            (first, 2),
            ({**first, "incarnation": None}, 2),
            ({**first, "incarnation": 8, "model": "other"}, 3),
            ({**first, "incarnation": 8, "model": "other", "url": f"{engine.url}/"}, 4),
        ]

        async def scenario(probes: ParityProbes, router: Router) -> None:
            for row, n_reports in rows:
                probes.note([row])
                await until_idle(probes)
                assert len(router.reports) == n_reports
            probes.note([])
            probes.note([first])  # it was removed, and registered again
            await until_idle(probes)
            assert len(router.reports) == 5

        probing({"": files}, scenario)


def test_what_cannot_be_compared_is_reported_with_its_reason(files: Path) -> None:
    """No files, no /tokenize, and an engine that fails, which alone is asked again, at growing intervals."""
    clock = FrontClock()
    with (
        HttpDouble({}) as without,
        HttpDouble({"/tokenize": b"no JSON"}) as broken,
        HttpDouble({"/tokenize": {"error": "too busy"}}, status=503) as busy,
        HttpDouble({"/tokenize": {"error": "what is a chat?"}}, status=400) as refusing,
    ):
        rows = [
            row_of(without.url, 1, model="unknown"),
            row_of(without.url, 2),
            row_of(broken.url, 3),
            row_of(busy.url, 4),
            row_of("http://127.0.0.1:1", 5),
            row_of(refusing.url, 6),
            row_of("", 7),
            row_of(without.url, 8, silent_dp_ranks=[0]),
            {key: value for key, value in row_of(without.url, 9).items() if key != "render"},
        ]
        expected = [
            (1, "unknown", "no_tokenizer"),
            (2, "unknown", "no_tokenize"),
            (3, "unknown", "engine_failed"),
            (4, "unknown", "engine_failed"),
            (5, "unknown", "engine_failed"),
            (6, "unknown", "completion"),
        ]

        async def scenario(probes: ParityProbes, router: Router) -> None:
            for pause_s, is_due in ((0, True), (9.9, False), (0.2, True), (19, False), (1.1, True)):
                clock.now_s += pause_s
                router.reports.clear()
                reported = [{**row, "render": {**render_json(None), "reason": "engine_failed"}} for row in rows[:-1]]
                probes.note([*reported, rows[-1]])
                await until_idle(probes)
                wanted = expected if not pause_s else [each for each in expected if each[2] == "engine_failed"]
                assert sorted(router.outcomes()) == (wanted if is_due else [])

        probing({"m": files}, scenario, clock)


def test_a_result_that_the_registry_lost_is_reported_again(files: Path) -> None:
    """So is one that no router took; one that the registry has is not."""
    clock = FrontClock()
    with HttpDouble({"/tokenize": engine_page()}) as engine:
        row = row_of(engine.url)

        async def scenario(probes: ParityProbes, router: Router) -> None:
            async def noted(shown: dict[str, Any], after_s: float) -> int:
                clock.now_s += after_s
                router.reports.clear()
                probes.note([{**row, "render": shown}])
                await until_idle(probes)
                return len(router.reports)

            router.refuses = True
            assert await noted(render_json(None), 0) == 1
            assert await noted(render_json(None), 9) == 0
            router.refuses = False
            assert await noted(render_json(None), 2) == 1
            kept = {**render_json(None), "outcome": "equal", "reason": None}
            assert await noted(kept, parity_probes.LOST_AFTER_S + 1) == 0
            assert await noted(render_json(None), 0) == 1
            assert await noted(render_json(None), parity_probes.LOST_AFTER_S - 1) == 0
            assert await noted(render_json(None), 2) == 1

        probing({"m": files}, scenario, clock)


def test_probes_are_limited_and_end_with_their_workers(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So many run at a time, so many wait, and the others are offered again; a hanging engine ends by its deadline."""
    monkeypatch.setattr(parity_probes, "PENDING_MAX", 6)
    monkeypatch.setattr(parity_probes, "PROBE_TIMEOUT_S", 1.0)
    asked = 0

    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        asked += 1
        await reader.read()
        writer.close()

    async def scenario(probes: ParityProbes, router: Router) -> None:
        server = await asyncio.start_server(hang, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        rows = [row_of(url, worker_id) for worker_id in range(20)]
        probes.note(rows)
        probes.note(rows)
        assert len(probes) == 6
        while asked < parity_probes.PROBES_AT_ONCE:
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.05)
        assert asked == parity_probes.PROBES_AT_ONCE
        probes.note(rows[1:])  # worker 0 left
        while len(probes) == 6:
            await asyncio.sleep(0)
        probes.note(rows[1:])
        assert len(probes) == 6  # worker 6 took its place
        await until_idle(probes)
        assert [worker_id for worker_id, *_ in router.outcomes()] == [1, 2, 3, 4, 5, 6]
        assert {reason for *_, reason in router.outcomes()} == {"engine_failed"}
        probes.note(rows[1:])
        assert len(probes) == 6
        await probes.close()
        server.close()
        await server.wait_closed()

    probing({"m": files}, scenario)


def test_an_answer_without_end_is_cut_off(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The front reads a limited number of bytes."""
    monkeypatch.setattr(parity_probes, "ANSWER_BYTES_MAX", 1000)
    with HttpDouble({"/tokenize": {"tokens": [1] * 1000}}) as engine:

        async def scenario(probes: ParityProbes, router: Router) -> None:
            probes.note([row_of(engine.url)])
            await until_idle(probes)
            assert router.outcomes() == [(1, "unknown", "engine_failed")]

        probing({"m": files}, scenario)


def test_a_worker_may_have_no_rank_with_progress() -> None:
    """A worker without a bridge has no incarnation, and its result counts by URL and model."""
    assert parity_of().is_about(Worker(ONE, "http://w", "m", BLOCK_SIZE), None)
    assert not parity_of().is_about(Worker(ONE, "http://w", "m", BLOCK_SIZE), Incarnation(1))


# -- rules in which versions differ ------------------------------------------------------------------------------------


def reading(content_too: bool, tail: str = "") -> Callable[[Any], Any]:
    """Answer /tokenize as an engine with the template REASONING. content_too: whether `reasoning_content` counts."""

    def page(body: Any) -> Any:
        if "prompt" in body:
            return {"tokens": list(body["prompt"].encode())}
        turns = [message for message in body["messages"] if message["role"] == "assistant"]
        thoughts = [turn.get("reasoning") or (turn.get("reasoning_content") if content_too else None) for turn in turns]
        last = body["messages"][-1]["content"]
        shown = last if isinstance(last, str) else "\n".join(part["text"] for part in last if part["text"])
        return {"tokens": list("".join([*filter(None, thoughts), shown, tail]).encode())}

    return page


REASONING = (
    "{# It has messages of a 'developer'. #}"
    "{% for m in messages %}{{ m.reasoning | default('') }}{{ m.content if loop.last }}{% endfor %}"
)


@pytest.fixture(scope="module")
def reasoning_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_model(tmp_path_factory.mktemp("reasoning"), REASONING)


def test_a_model_is_rendered_for_the_version_that_its_engines_have(reasoning_files: Path) -> None:
    """While both versions run, the first one counts; once it has left, the other one does, and nothing differs."""
    older = NEWEST ^ Rule.REASONING_CONTENT
    with (
        HttpDouble({"/tokenize": reading(content_too=False)}) as old,
        HttpDouble({"/tokenize": reading(content_too=True)}) as new,
    ):

        async def scenario(probes: ParityProbes, router: Router) -> None:
            tokenizing = probes._tokenizing
            for rows, outcomes, rules in (
                ([row_of(old.url)], [(1, "equal", None)], older),
                ([row_of(old.url), row_of(new.url, 2)], [(2, "differs", "reasoning_content_of_a_past_turn")], older),
                ([row_of(new.url, 2)], [], NEWEST),
                ([row_of(new.url, 2)], [(2, "equal", None)], NEWEST),
                ([row_of(new.url, 2), row_of(new.url, 3)], [(3, "equal", None)], NEWEST),
            ):
                router.reports.clear()
                probes.note(rows)
                await until_idle(probes)
                assert (router.outcomes(), tokenizing.rules("m")) == (outcomes, rules)

        probing({"m": reasoning_files}, scenario)


def test_engines_are_asked_while_none_of_them_renders_as_the_front_does(reasoning_files: Path) -> None:
    """One engine of the model that does is enough for the files; when it leaves, the others are asked again."""
    with (
        HttpDouble({"/tokenize": reading(content_too=True)}) as known,
        HttpDouble({"/tokenize": reading(content_too=True, tail="!")}) as unknown,
    ):

        async def scenario(probes: ParityProbes, router: Router) -> None:
            for rows, rules in (
                ([row_of(unknown.url)], None),
                ([row_of(unknown.url), row_of(known.url, 2)], NEWEST),
                ([row_of(unknown.url)], None),
            ):
                probes.note(rows)
                await until_idle(probes)
                assert probes._tokenizing.rules("m") == rules
            assert router.outcomes() == [(1, "differs", "chat"), (2, "equal", None)]

        probing({"m": reasoning_files}, scenario)


def test_a_model_whose_prompts_were_others_is_rendered_by_its_engines_until_a_later_probe(
    reasoning_files: Path,
) -> None:
    """It is, until a later probe: what contradicted this one was nothing that it shows, so it is not made at once."""
    clock = FrontClock()
    with HttpDouble({"/tokenize": reading(content_too=True)}) as engine:

        async def scenario(probes: ParityProbes, router: Router) -> None:
            rows = [{**row_of(engine.url), "render": {**render_json(None), "outcome": "equal", "reason": None}}]
            for after_s, rules in ((0.0, NEWEST), (1.0, None), (parity_probes.RETRY_S_MAX, NEWEST)):
                if after_s == 1.0:
                    probes.check_again("m")
                clock.now_s += after_s
                probes.note(rows)
                await until_idle(probes)
                assert probes._tokenizing.rules("m") == rules
            assert router.outcomes() == [(1, "equal", None)] * 2

        probing({"m": reasoning_files}, scenario, clock)


def test_an_engine_without_the_render_call_is_asked_by_the_other_one() -> None:
    """The front remembers it for a while, and tries again: another version may run there."""
    clock = FrontClock()
    body = orjson.dumps({"messages": []})
    with HttpDouble({"/tokenize": {"tokens": [1]}}) as engine:

        async def scenario() -> None:
            http = PlainHttp(keepalive_s=5.0, connect_timeout_s=5.0)
            asking = EngineTokens(5.0, 1 << 20, clock)
            for after_s, has_render, tokens in ((0, False, [1]), (1, True, [1]), (LACKS_S, True, [2])):
                clock.now_s += after_s
                if has_render:
                    engine.pages["/v1/chat/completions/render"] = lambda sent: {"token_ids": [len(sent)]}
                answer = await asking.ask(http, engine.url, Kind.CHAT, body, None)
                assert (answer.status, answer.tokens) == (200, tokens)
            assert (await asking.ask(http, engine.url, Kind.COMPLETION, body, None)).tokens == [1]
            http.close()

        asyncio.run(scenario())


@pytest.mark.parametrize("kind", [Kind.RESPONSES, Kind.MESSAGES])
def test_calls_of_agents_have_render_calls_of_their_own(kind: Kind) -> None:
    """An engine may lack one of them, which is remembered. No other call makes their tokens."""
    clock = FrontClock()
    body = b'{"model": "m"}'
    calls: list[str] = []

    def page(name: str, tokens: str) -> Any:
        def answer(_: Any) -> dict[str, Any]:
            calls.append(name)
            return {tokens: [1]}

        return answer

    with HttpDouble(
        {"/tokenize": page("tokenize", "tokens"), f"{Kind.CHAT}/render": page("chat", "token_ids")}
    ) as engine:

        async def scenario() -> None:
            http = PlainHttp(keepalive_s=5.0, connect_timeout_s=5.0)
            asking = EngineTokens(5.0, 1 << 20, clock)
            assert (await asking.ask(http, engine.url, Kind.CHAT, body, None)).tokens == [1]
            assert (await asking.ask(http, engine.url, kind, body, None)).status == 404
            engine.pages[f"{kind}/render"] = page("own", "token_ids")
            for after_s, status, tokens in ((1, 404, None), (LACKS_S, 200, [1])):
                clock.now_s += after_s
                answer = await asking.ask(http, engine.url, kind, body, None)
                assert (answer.status, answer.tokens, answer.call) == (status, tokens, f"{kind}/render")
            http.close()

        asyncio.run(scenario())
    assert calls == ["chat", "own"]


@pytest.mark.parametrize(
    ("version", "reasoning"), [({"version": "0.32.0"}, "R"), ({"version": "0.20.2rc1"}, None), ({}, None), (None, None)]
)
def test_what_tokenize_does_not_read_is_sent_in_other_places(version: Any, reasoning: str | None) -> None:
    """Chats of vLLM from 0.24 on read more than its /tokenize; before, they read the same."""
    asked: list[Any] = []
    turn = {"role": "assistant", "content": "a", "reasoning_content": "R"}
    body = {"messages": [turn], "reasoning_effort": "none", "documents": [{"text": "d"}]}

    def tokenize(sent: Any) -> Any:
        asked.append(sent)
        return {"tokens": [1]}

    pages = {"/tokenize": tokenize, "/version": version}

    async def scenario(url: str) -> TokensAnswer:
        http = PlainHttp(keepalive_s=5.0, connect_timeout_s=5.0)
        answer = await EngineTokens(5.0, 1 << 20).ask(http, url, Kind.CHAT, orjson.dumps(body), None)
        http.close()
        return answer

    with HttpDouble(pages) as engine:
        answer = asyncio.run(scenario(engine.url))
    assert (answer.tokens, answer.is_whole) == ([1], reasoning is not None)
    assert asked[0]["messages"][0].get("reasoning") == reasoning
    moved = {"enable_thinking": False, "reasoning_effort": "none", "documents": [{"text": "d"}]}
    assert asked[0].get("chat_template_kwargs") == (moved if reasoning else None)
