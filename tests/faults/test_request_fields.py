"""Fields with which an engine computes another prompt, or reads another cache, than the index has: never `exact`."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from streams.core.hashing import local_hashes
from streams.core.routing.selection import RouterMode
from streams.core.workers import RenderPart
from streams.prompts.request_fields import FIELDS, Effect
from streams.settings import Settings
from tests.helpers.front_stage import Backend, Stage, on_stage
from tests.helpers.local_router import SureRouter, hold, local_router, rank, register
from tests.helpers.pages import ROOT
from tests.helpers.rendering_engine import byte_model, probe
from tests.helpers.scripted_engine import Script, ScriptedEngine, scripted_engines

PROMPT = list(range(1000, 1160))
BODY = {"model": "m", "prompt": PROMPT, "max_tokens": 4, "stream": True}

#: A value of each field that has an effect, or may have one.
NOT_READ = [
    {"prompt_logprobs": 1},
    {"prompt_logprobs": 0},
    {"prompt_logprobs": -1},
    {"prompt_logprobs": False},  # engines read it as the number 0
    {"prompt_logprob_token_ids": [1]},
    {"echo": True, "logprobs": 1},
    {"echo": True, "logprobs": 0},
    {"return_context_logits": True},
]
OTHER = [
    {"extra_key": "t2"},
    {"extra_key": ["t2"]},
    {"truncate_prompt_tokens": 16},
    {"truncate_prompt_tokens": -1},
    {"truncate_prompt_tokens": False},
    {"cache_salt": "s" * 513},
    {"cache_salt": ["a"]},
    {"cache_salt": {"a": 1}},
    {"lora_path": "adapter"},
    {"lora_request": {"lora_name": "a"}},
    {"suffix": "after"},
    {"suffix": ""},
    {"prompt_embeds": "AAAA"},
    {"session_params": {"id": "1"}},
]
PERHAPS = [
    {"data_parallel_rank": 1},
    {"routed_dp_rank": 0},
    {"routed_dp_rank": False},
    {"a_field_of_next_year": 1},
    {"a_field_of_next_year": False},  # its default may be true
    {"a_field_of_next_year": ""},
    {"a_field_of_next_year": []},
    {"a_field_of_next_year": {}},
    {"return_hidden_states": True},
]
WITHOUT_EFFECT = [
    {"echo": True},
    {"logprobs": 3},
    {"prompt_logprobs": None},
    {"extra_key": ""},
    {"extra_key": None},
    {"cache_salt": ""},
    {"truncate_prompt_tokens": None},
    {"a_field_of_next_year": None},
    {"return_context_logits": False},
    {"routed_experts_prompt_start": 3, "return_mm_kwargs": False},
    {"stop": ["a"], "user": "u", "seed": 3, "temperature": 0.5, "min_p": 0.1, "rid": "r", "priority": 3},
]


@contextmanager
def fleet() -> Iterator[Backend]:
    """Give a router with two engines, of which the first holds all blocks of PROMPT."""
    with (
        local_router(Settings(router_mode=RouterMode.KV), n_workers=0, make=SureRouter) as router,
        scripted_engines(2, ScriptedEngine) as engines,
    ):
        for number, engine in enumerate(engines, start=1):
            register(router.router, number, url=engine.url)
            hold(router.router, rank(number), local_hashes(PROMPT if number == 1 else [1] * 16, 16))
        yield router, engines


@pytest.fixture(scope="module")
def backend() -> Iterator[Backend]:
    with fleet() as given:
        yield given


async def answer(stage: Stage, path: str = "/v1/completions", body: Any = None, **fields: Any) -> tuple[str, str]:
    """Return the overlap that the front says, and the mode of the answer."""
    given = {**(BODY if body is None else body), **fields}
    _, headers, _ = await stage.post(given, path, **{"X-Kvstreams-Details": "1"})
    return headers["X-Kvstreams-Overlap-Blocks"], headers["X-Kvstreams-Mode"]


@pytest.mark.parametrize("fields", [*NOT_READ, *OTHER], ids=str)
async def test_a_prompt_that_is_not_the_one_in_the_index_is_not_compared(backend: Backend, fields: Any) -> None:
    """The overlap is 0 and nothing is said about the index."""
    async with on_stage(backend) as stage:
        assert await answer(stage, **fields) == ("0/10", "fallback")


@pytest.mark.parametrize("fields", PERHAPS, ids=str)
async def test_a_field_that_may_change_the_prompt_makes_an_answer_approximate(backend: Backend, fields: Any) -> None:
    """The prompt is compared as it is, since most fields are about the answer."""
    async with on_stage(backend) as stage:
        assert await answer(stage, **fields) == ("10/10", "approximate")


@pytest.mark.parametrize("fields", WITHOUT_EFFECT, ids=str)
async def test_a_field_about_the_answer_changes_nothing(backend: Backend, fields: Any) -> None:
    """So does a field without a value."""
    async with on_stage(backend) as stage:
        assert await answer(stage, **fields) == ("10/10", "exact")


@pytest.mark.parametrize("fields", [{"prompt_logprobs": 1}, {"echo": True}, {"echo": True, "top_logprobs": 2}], ids=str)
async def test_chats_that_want_log_probabilities_of_their_prompt_skip_the_cache(backend: Backend, fields: Any) -> None:
    """In a chat, `echo` asks for them without `logprobs`."""
    chat = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "stream": True}
    async with on_stage(backend) as stage:
        assert (await answer(stage, "/v1/chat/completions", chat, **fields))[1] == "fallback"


async def test_load_is_booked_for_the_whole_prompt_wherever_the_engine_computes_it(backend: Backend) -> None:
    """A prompt that skips the cache goes to the idle engine, with all its tokens."""
    async with on_stage(backend) as stage:
        stage.script(*[Script(stalls_at=0)] * 2)
        tasks = [asyncio.create_task(stage.post(BODY, "/v1/completions"))]
        await stage.until(lambda: stage.engines[0].n_open == 1, "the engine that holds the prompt")
        before = await loads(stage)
        assert before[1]["active_prefill_tokens"] <= 1 and before[2]["active_requests"] == 0
        for n in range(4):
            tasks.append(asyncio.create_task(stage.post({**BODY, "prompt_logprobs": 1}, "/v1/completions")))
            await stage.until(lambda n=n: len(stage.front.proxy) == n + 2, "the request")  # type: ignore[misc]
            await stage.until(lambda n=n: sum(e.n_open for e in stage.engines) == n + 2, "its engine")  # type: ignore[misc]
        after = await loads(stage)
        assert after[2]["active_requests"] >= 1
        booked = sum(row["active_prefill_tokens"] for row in after.values()) - before[1]["active_prefill_tokens"]
        assert booked == 4 * len(PROMPT)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def loads(stage: Stage) -> dict[int, Any]:
    page = await asyncio.to_thread(stage.router.api.get, "/loads")
    return {row["worker_id"]: row for row in page["loads"]}


async def test_a_prompt_of_which_no_tokens_are_known_is_not_exact(backend: Backend) -> None:
    """It is booked with about as many tokens as its text has, images left out."""
    text = "some words of a prompt " * 100
    chat = [{"role": "user", "content": [{"type": "text", "text": text}, {"image_url": {"url": "data:" + "A" * 9999}}]}]
    async with on_stage(backend) as stage:
        overlap, mode = await answer(stage, body={**BODY, "prompt": text})
        assert mode == "fallback" and overlap.startswith("0/") and 30 <= int(overlap[2:]) <= 45
        overlap, mode = await answer(stage, "/v1/chat/completions", {"model": "m", "messages": chat, "stream": True})
        assert mode == "fallback" and 30 <= int(overlap[2:]) <= 45


WITH_TOOLS = (
    "{% for tool in tools or [] %}[{{tool.function.name}}]{% endfor %}"
    "{% for m in messages if m.role not in ('system', 'developer') %}{{m.content}}{% endfor %}"
)
CHAT = {"messages": [{"role": "user", "content": "2 + 2?"}]}
TOOLS = [{"type": "function", "function": {"name": "sum", "parameters": {}}}]


@pytest.mark.parametrize("leaves_out", [False, True], ids=["shown", "left-out"])
def test_tools_that_may_not_be_called_are_rendered_as_the_engine_does(tmp_path: Path, leaves_out: bool) -> None:
    """A flag of vLLM leaves them out (`--exclude-tools-when-tool-choice-none`). The probe finds it out."""

    def renders(body: Mapping[str, Any]) -> str:
        is_none = leaves_out and body.get("tool_choice") == "none"
        names = [] if is_none else [tool["function"]["name"] for tool in body.get("tools") or ()]
        shown = [message for message in body["messages"] if message["role"] not in ("system", "developer")]
        contents = [message.get("content") or "" for message in shown]
        texts = [
            content if isinstance(content, str) else "\n".join(part["text"] for part in content if part["text"])
            for content in contents
        ]
        return "".join([*(f"[{name}]" for name in names), *texts])

    chats = [{**CHAT, "tools": TOOLS, "tool_choice": choice} for choice in ("none", "auto")]
    probed = probe(byte_model(tmp_path, WITH_TOOLS), renders, chats, renders)
    source = "engine" if leaves_out else "files"
    assert probed.prompts == [(renders(chat), source) for chat in chats]
    assert probed.outcome == (("differs", RenderPart.TOOL_CHOICE.value) if leaves_out else ("equal", None))


def test_the_documentation_has_every_field_with_an_effect() -> None:
    """And no other one."""
    section = (ROOT / "docs" / "front.md").read_text().split("### Fields of a request")[1].split("\n##")[0]
    rows = re.findall(r"^\| (`[^|]*) \|", section, re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    effects = {name for name, effect in FIELDS.items() if effect not in (Effect.READ, Effect.NONE)}
    assert effects | {"cache_salt", "echo", "logprobs", "top_logprobs"} == named
