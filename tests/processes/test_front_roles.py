"""The front with prefill and decode workers on real sockets: transfers, conditions, fallbacks; scripted engines."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import orjson
import pytest

from streams.core.ids import WorkerId
from streams.core.routing.selection import RouterMode
from streams.core.workers import Role
from streams.cxl.events import CxlPool
from streams.cxl.records import encode_pool, pool_key
from streams.settings import KvTransfer, Settings
from tests.helpers.byte_engine import CHAT_PROMPT, ByteEngine, Plan
from tests.helpers.front_stage import Answer, Backend, Stage, on_stage, share
from tests.helpers.local_router import LocalRouter, local_router, register
from tests.helpers.scripted_engine import Script, ScriptedEngine, answer_bytes, scripted_engines

ROLES = (Role.PREFILL, Role.DECODE, Role.DECODE)
PROMPT = list(range(40))
USAGE = {"stream_options": {"include_usage": True}}
BODY = {"model": "m", "prompt": PROMPT, "stream": True, "max_tokens": 9, "min_tokens": 2, **USAGE}
PARAMS = {"do_remote_prefill": True, "remote_engine_id": "1", "remote_block_ids": [0, 1], "remote_host": "h"}
DETAILS = {"X-Kvstreams-Details": "1"}

TEXT = "An answer that outlives its engine."

#: Every prompt of two tokens or more is worth a prefill elsewhere.
ALWAYS: dict[str, Any] = {"front_remote_prefill_tokens_min": 0}


def whole(page: Any) -> Script:
    """An answer that is not a stream, in one piece."""
    answer = orjson.dumps(page)
    return Script(answer=answer, piece=len(answer))


PREFILLED = whole({"choices": [{"text": "x"}], "kv_transfer_params": PARAMS})


def with_roles(router: LocalRouter, engines: Sequence[ScriptedEngine]) -> None:
    for number, (engine, role) in enumerate(zip(engines, ROLES, strict=True), start=1):
        register(router.router, number, url=engine.url, role=role)


@pytest.fixture(scope="module")
def backend() -> Iterator[Backend]:
    """Give a router, a prefill worker and two decode workers."""
    # Without router_avoid_s=0, a test would avoid the engine that failed in the test before. In `kv`, a prompt is load
    # until its client reports that it is computed. In the default mode the router's forecast also ends that, after
    # 85 ms, which may be sooner than a test looks.
    settings = Settings(router_avoid_s=0.0, router_mode=RouterMode.KV)
    with (
        local_router(settings, n_workers=0) as router,
        scripted_engines(3, ScriptedEngine) as engines,
    ):
        with_roles(router, engines)
        yield router, engines


def bodies(stage: Stage, *numbers: int) -> list[dict[str, Any]]:
    return [orjson.loads(body) for number in numbers for body in stage.engines[number - 1].bodies]


def splits(stage: Stage) -> dict[str, int]:
    return {split.value: n for split, n in stage.front.counts.splits.items() if n}


async def test_kv_transfer_params_pass_from_the_prefill_to_the_decode_worker(backend: Backend) -> None:
    """The prefill worker computes the prompt, and the decode worker learns where it is; the client sees one stream."""
    async with on_stage(backend, **ALWAYS) as stage:
        stage.script(PREFILLED, Script(), Script())
        code, headers, body = await stage.post(BODY, "/v1/completions", **DETAILS)
        assert (code, body) == (200, answer_bytes())
        assert headers["X-Kvstreams-Prefill-Worker"] == "1/0"
        assert headers["X-Kvstreams-Worker"] in ("2/0", "3/0")
        (prefill,) = bodies(stage, 1)
        assert (prefill["prompt"], prefill["max_tokens"], prefill["stream"]) == (PROMPT, 1, False)
        assert prefill["kv_transfer_params"]["do_remote_decode"] is True and "min_tokens" not in prefill
        assert bodies(stage, 2, 3) == [{**BODY, "kv_transfer_params": PARAMS}]
        one, other = (stage.engines[0].received[0], *stage.engines[1].received, *stage.engines[2].received)
        assert one["X-Request-Id"] == other["X-Request-Id"]
        assert splits(stage) == {"remote": 1}


async def test_both_bookings_of_a_request_live_side_by_side(backend: Backend) -> None:
    """While the prefill runs, the prompt is the prefill worker's load, and not that of the decode worker."""
    async with on_stage(backend, **ALWAYS) as stage:
        stage.script(Script(stalls_at=0), Script(), Script())

        def seen() -> bool:
            rows = {row["worker_id"]: row for row in stage.router.api.get("/loads")["loads"]}
            prefills = [rows[number]["active_prefill_tokens"] for number in (1, 2, 3)]
            requests = [rows[number]["active_requests"] for number in (1, 2, 3)]
            return prefills == [40, 0, 0] and (requests[0], sum(requests)) == (1, 2)

        posting = asyncio.ensure_future(stage.post(BODY, "/v1/completions"))
        async with asyncio.timeout(20):
            while not await asyncio.to_thread(seen):
                await asyncio.sleep(0.01)
        posting.cancel()  # the client leaves: the prefill is cancelled, and both bookings end
        await stage.until(lambda: stage.engines[0].counts["cancelled"] == 1, "the end of the prefill")


@pytest.mark.parametrize(
    ("prefill", "outcome"),
    [
        (Script(status=500), "failed"),
        (Script(status=400), "failed"),
        (Script(breaks_at=10), "failed"),
        (Script(stalls_at=10), "failed"),
        (whole({"choices": []}), "not_transferred"),
        (Script(answer=b"not JSON"), "not_transferred"),
    ],
)
async def test_a_failed_prefill_falls_back_to_the_decode_worker(
    backend: Backend, prefill: Script, outcome: str
) -> None:
    """It gets the request as it came, byte for byte, and computes the prompt itself."""
    async with on_stage(backend, **ALWAYS, front_silence_timeout_s=0.5) as stage:
        stage.script(prefill, Script(), Script())
        code, headers, body = await stage.post(BODY, "/v1/completions", **DETAILS)
        assert (code, body) == (200, answer_bytes())
        assert "X-Kvstreams-Prefill-Worker" not in headers
        assert stage.engines[1].bodies + stage.engines[2].bodies == [orjson.dumps(BODY)]
        assert splits(stage) == {outcome: 1}


async def test_short_and_unsuitable_requests_are_not_split(backend: Backend) -> None:
    """They go to a decode worker as they came, and the prefill worker sees nothing."""
    async with on_stage(backend) as stage:
        for body in (BODY, {**BODY, "prompt": list(range(2000)), "n": 2}, {**BODY, "prompt": "text"}):
            assert (await stage.post(body, "/v1/completions"))[0] == 200
        assert not stage.engines[0].bodies
        assert splits(stage) == {"short": 1, "unsuitable": 2}


async def test_busy_prefill_workers_get_no_prompt(backend: Backend) -> None:
    """A backlog above front_prefill_backlog_tokens_max keeps prompts on their decode workers."""
    async with on_stage(backend, **ALWAYS, front_prefill_backlog_tokens_max=300) as stage:
        stage.script(PREFILLED, Script(), Script())
        booking = {"worker_id": 1, "phase": "prefill", "token_ids": list(range(400))}
        await asyncio.to_thread(lambda: stage.router.api.call("POST", "/loads/other", booking).given())
        try:
            assert (await stage.post(BODY, "/v1/completions"))[0] == 200
            assert not stage.engines[0].bodies
            assert splits(stage) == {"busy": 1}
        finally:
            await asyncio.to_thread(lambda: stage.router.api.call("DELETE", "/loads/other").given())
        assert (await stage.post(BODY, "/v1/completions"))[0] == 200
        assert splits(stage) == {"busy": 1, "remote": 1}


async def test_without_disaggregation_roles_are_ignored(backend: Backend) -> None:
    """Every worker gets whole requests, as if it had both roles."""
    async with on_stage(backend, **ALWAYS, front_disaggregation=False) as stage:
        async with asyncio.timeout(60):  # an engine that was slow in another test gets fewer requests
            while not all(engine.bodies for engine in stage.engines):
                assert (await stage.post(BODY, "/v1/completions"))[0] == 200
        assert splits(stage) == {}


async def test_a_decode_worker_that_fails_is_replaced_by_one_that_computes_the_prompt(backend: Backend) -> None:
    """The KV cache was meant for the first one. The second gets the request as it came."""
    async with on_stage(backend, **ALWAYS) as stage:
        for failing in (2, 3):
            decoding = [Script(breaks_at=0) if number == failing else Script() for number in (2, 3)]
            stage.script(PREFILLED, *decoding)
            for _ in range(6):  # the choice between equal decode workers is random
                assert (await stage.post(BODY, "/v1/completions"))[2] == answer_bytes()
        received = [orjson.loads(body) for engine in stage.engines[1:] for body in engine.bodies]
        n_retried = stage.front.counts.retries
        assert n_retried > 0
        assert sum("kv_transfer_params" not in body for body in received) == n_retried
        assert len(received) == 12 + n_retried


async def test_bootstrap_fields_reach_both_workers_at_the_same_time(backend: Backend) -> None:
    """The decode worker has its request while the prefill still runs, in the same room."""
    async with on_stage(backend, **ALWAYS, front_kv_transfer=KvTransfer.BOOTSTRAP, front_bootstrap_port=9001) as stage:
        # The prefill's answer comes after the decode worker's, so a front that waited for it would never end.
        slow = Script(pause_s=0.15)  # the decode worker's does not end before the prefill worker has its request
        stage.script(Script(stalls_at=0), slow, slow)
        code, headers, body = await stage.post(BODY, "/v1/completions", **DETAILS)
        assert (code, body) == (200, answer_bytes())
        assert headers["X-Kvstreams-Prefill-Worker"] == "1/0"
        (prefill,), (decode,) = bodies(stage, 1), bodies(stage, 2, 3)
        names = ("bootstrap_host", "bootstrap_port", "bootstrap_room")
        assert [prefill[name] for name in names] == [decode[name] for name in names]
        assert (decode["bootstrap_host"], decode["bootstrap_port"]) == ("127.0.0.1", 9001)
        assert prefill["max_tokens"] == 1 and "kv_transfer_params" not in prefill
        assert {**decode, **dict.fromkeys(names)} == {**BODY, **dict.fromkeys(names)}


async def test_a_decode_worker_that_waits_for_a_failed_prefill_gets_the_request_again(backend: Backend) -> None:
    """The request with bootstrap fields is cancelled before its first token, and the client sees one answer."""
    async with on_stage(backend, **ALWAYS, front_kv_transfer=KvTransfer.BOOTSTRAP) as stage:
        slow = Script(answer=answer_bytes(2), piece=60, pause_s=0.15)  # the prefill fails before the first token
        stage.script(Script(status=500), slow, slow)
        code, headers, body = await stage.post(BODY, "/v1/completions", **DETAILS)
        assert (code, body) == (200, answer_bytes(2))
        assert "X-Kvstreams-Prefill-Worker" not in headers
        first, second = bodies(stage, 2, 3)
        assert "bootstrap_room" in first and second == BODY
        assert sum(engine.counts["cancelled"] for engine in stage.engines[1:]) == 1
        assert splits(stage) == {"failed": 1}


@pytest.mark.parametrize("mode", [RouterMode.POWER_OF_TWO, RouterMode.DEVICE_AWARE_WEIGHTED])
async def test_in_modes_by_the_load_of_the_moment_the_prefill_is_synchronous(mode: RouterMode) -> None:
    """No bootstrap field is sent; the decode request waits for the prefill's answer and passes on what it says."""
    with (
        local_router(Settings(router_mode=mode), n_workers=0) as router,
        scripted_engines(3, ScriptedEngine) as engines,
    ):
        with_roles(router, engines)
        async with on_stage((router, engines), **ALWAYS, front_kv_transfer=KvTransfer.BOOTSTRAP) as stage:
            stage.script(PREFILLED, Script(), Script())
            assert (await stage.post(BODY, "/v1/completions"))[2] == answer_bytes()
            (prefill,), (decode,) = bodies(stage, 1), bodies(stage, 2, 3)
            assert not any(name.startswith("bootstrap") for name in (*prefill, *decode))
            assert decode["kv_transfer_params"] == PARAMS
            stage.script(Script(status=500), Script(), Script())
            assert (await stage.post(BODY, "/v1/completions"))[2] == answer_bytes()
            assert splits(stage) == {"remote": 1, "failed": 1}


@contextmanager
def pool_registered(backend: Backend, **fields: Any) -> Iterator[None]:
    """Register a pool of the prefill worker and one decode worker at the router."""
    pool = CxlPool("rack1", "default", None, (WorkerId(1), WorkerId(2)), epoch=1, **fields)
    view = backend[0].router.view
    view.fold_worker(pool_key("rack1"), encode_pool(pool))
    yield
    view.fold_worker(pool_key("rack1"), None)


async def test_blocks_that_never_reach_a_pool_are_computed_again(backend: Backend) -> None:
    """After front_transfer_timeout_s the decode worker gets the request."""
    options = {**ALWAYS, "front_kv_transfer": KvTransfer.POOL, "front_transfer_timeout_s": 0.1}
    with pool_registered(backend, lost=False):
        async with on_stage(backend, **options) as stage:
            stage.script(whole({"choices": []}), Script(), Script())
            assert (await stage.post(BODY, "/v1/completions"))[2] == answer_bytes()
            assert bodies(stage, 2, 3) == [BODY]
            assert splits(stage) == {"not_transferred": 1}


@pytest.mark.parametrize("has_lost_pool", [False, True])
async def test_without_a_pool_prompts_stay_on_the_decode_worker(
    backend: Backend, has_lost_pool: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody waits for a transfer that cannot come, the prefill worker sees nothing, and the front says why once."""
    # With the wait, this test would take two minutes.
    options = {**ALWAYS, "front_kv_transfer": KvTransfer.POOL, "front_transfer_timeout_s": 60.0}
    with pool_registered(backend, lost=True) if has_lost_pool else nullcontext():
        async with on_stage(backend, **options) as stage:
            for _ in range(2):
                assert (await stage.post(BODY, "/v1/completions"))[2] == answer_bytes()
            assert bodies(stage, 1) == []
            assert splits(stage) == {"no_pool": 2}
    assert [record.levelname for record in caplog.records if "PUT /pools" in record.getMessage()] == ["WARNING"]


@pytest.mark.parametrize("transfer", [KvTransfer.PARAMS, KvTransfer.BOOTSTRAP])
async def test_after_a_failed_prefill_the_decode_worker_has_the_prompt_to_compute(
    backend: Backend, transfer: KvTransfer
) -> None:
    """Its booking counts as prefill until the first token, and the prefill worker has none."""
    async with on_stage(backend, **ALWAYS, front_kv_transfer=transfer) as stage:
        stage.script(Script(status=500), Script(stalls_at=0), Script(stalls_at=0))

        def seen() -> bool:
            rows = {row["worker_id"]: row for row in stage.router.api.get("/loads")["loads"]}
            found = [(rows[number]["active_prefill_tokens"], rows[number]["active_requests"]) for number in (1, 2, 3)]
            return found[0] == (0, 0) and sorted(found[1:]) == [(0, 0), (40, 1)]

        posting = asyncio.ensure_future(stage.post(BODY, "/v1/completions"))
        try:
            async with asyncio.timeout(20):
                # The loads are the same before the prefill worker is booked.
                while splits(stage) != {"failed": 1} or not await asyncio.to_thread(seen):
                    await asyncio.sleep(0.01)
        except TimeoutError:
            raise AssertionError(f"{splits(stage)}, {stage.router.api.get('/loads')}, {posting}") from None
        posting.cancel()
        await stage.until(lambda: len(stage.front.proxy) == 0, "the end of the request")


async def test_a_stream_moves_from_one_decode_worker_to_another() -> None:
    """The second one resumes from the tokens so far, without the KV cache that was meant for the first one."""
    with (
        local_router(Settings(router_avoid_s=0.0), n_workers=0) as router,
        scripted_engines(1, ScriptedEngine) as (prefill,),
        scripted_engines(2, ByteEngine) as decoding,
    ):
        engines = [prefill, *decoding]
        with_roles(router, engines)
        share(decoding, Plan(TEXT, dies_at=9), Plan(TEXT))
        async with on_stage((router, engines), **ALWAYS, front_migration=True) as stage:
            prefill.script = PREFILLED
            body = {"model": "m", "prompt": CHAT_PROMPT, "stream": True, "max_tokens": 500}
            code, headers, raw = await stage.post(body, "/v1/completions", **DETAILS)
            answer = Answer(raw)
            assert (code, answer.text, answer.ended, answer.error) == (200, TEXT, True, None)
            assert headers["X-Kvstreams-Prefill-Worker"] == "1/0"
            assert len(prefill.bodies) == 1
            first, second = (body for engine in decoding for body in engine.asked)
            if "kv_transfer_params" not in first:
                first, second = second, first
            assert first["kv_transfer_params"] == PARAMS and "kv_transfer_params" not in second
            assert second["prompt"] == [*CHAT_PROMPT, *TEXT[:9].encode()]
            assert [len(engine.asked) for engine in decoding] == [1, 1]
            assert stage.front.counts.migrations == 1
