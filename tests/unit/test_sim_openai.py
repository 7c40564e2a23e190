"""The OpenAI API and the events of a simulated engine, without sockets: requests, answers, and wire forms."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import orjson
import pytest
from prometheus_client.parser import text_string_to_metric_families

from streams.core.cxl_memory import CxlMemoryState
from streams.core.ids import EngineHash
from streams.errors import InvalidRequest, UnknownModel
from streams.lab.engines import openai
from streams.lab.engines.engine_config import EngineConfig
from streams.lab.engines.engine_messages import EngineStats, KvStored, ModelRequest
from streams.lab.engines.event_publisher import EventDialect, WireForm
from streams.lab.engines.openai import ServedModels, parse_body, parse_completion
from streams.lab.engines.pool import CxlChanged
from streams.lab.engines.prometheus_page import SimulatedMetrics
from streams.lab.engines.synthetic_tokens import unpack_tokens

SERVED = ServedModels("m", ("tuned",), n_tokens_max=64)


def test_defaults_of_a_completion_are_those_of_openai() -> None:
    """A request with only a prompt gets 16 tokens of the model, now, as one answer."""
    call = parse_completion({"prompt": [1, 2]}, SERVED)
    assert unpack_tokens(call.tokens) == [1, 2]
    assert (call.n_output_tokens, call.lora_name, call.arrival_ms) == (16, None, None)
    assert not (call.stream or call.with_usage or call.with_token_ids)


def test_a_seed_replaces_the_prompt_as_the_source_of_an_answer() -> None:
    """Equal prompts have equal answers, and equal seeds have them whatever the prompt is."""
    first, again, other = (parse_completion({"prompt": prompt}, SERVED) for prompt in ("a", "a", "b"))
    assert first.output_seed == again.output_seed != other.output_seed
    assert [parse_completion({"prompt": prompt, "seed": -1}, SERVED).output_seed for prompt in "ab"] == [2**64 - 1] * 2


def test_a_request_chooses_which_of_its_blocks_are_reported() -> None:
    """Additional arguments of vLLM that the simulated engine does not know are ignored, as vLLM ignores them."""
    for arguments, mode in (({"kv_cache_report_mode": "full"}, "full"), ({"other": 1}, None), (None, None)):
        call = openai.parse_completion({"prompt": "hello", "vllm_xargs": arguments}, SERVED)
        assert call.report_mode == mode


def test_an_engine_with_another_chat_style_makes_other_tokens_of_chats_alone() -> None:
    """A request's own style counts more than the engine's, as with vLLM's default arguments of the template."""
    chat = {"messages": [{"role": "user", "content": "hello"}]}
    plain, terse = SERVED, replace(SERVED, chat_style="terse")

    def tokens(body: dict[str, Any], served: ServedModels) -> list[int]:
        page: list[int] = openai.tokenize(body, served)["tokens"]
        return page

    assert tokens(chat, plain) != tokens(chat, terse)
    assert tokens({"prompt": "hello"}, plain) == tokens({"prompt": "hello"}, terse)
    styled = {**chat, "chat_template_kwargs": {"style": "long"}}
    assert tokens(styled, plain) == tokens(styled, terse)
    served = replace(terse, n_tokens_max=1024)
    assert unpack_tokens(openai.parse_chat(chat, served).tokens) == tokens(chat, terse)


def test_an_adapter_is_addressed_as_a_model() -> None:
    """The adapter's name selects it; any other name is an unknown model."""
    assert parse_completion({"prompt": "a", "model": "tuned"}, SERVED).lora_name == "tuned"
    with pytest.raises(UnknownModel, match="other"):
        parse_completion({"prompt": "a", "model": "other"}, SERVED)


@pytest.mark.parametrize(("n_prompt", "n_output", "fits"), [(60, 4, True), (60, 5, False)])
def test_prompt_and_answer_must_fit_the_context(n_prompt: int, n_output: int, fits: bool) -> None:
    """The limit includes the whole answer, as in vLLM."""
    body = {"prompt": [1] * n_prompt, "max_tokens": n_output}
    if fits:
        assert parse_completion(body, SERVED).n_output_tokens == n_output
        return
    with pytest.raises(InvalidRequest, match="maximum context length is 64"):
        parse_completion(body, SERVED)


@pytest.mark.parametrize("limits", [{"ignore_eos": True}, {"ignore_eos": None}, {"min_tokens": 16}, {"min_tokens": 0}])
def test_stop_conditions_of_vllm_leave_the_length_as_it_is(limits: dict[str, Any]) -> None:
    """An answer always has max_tokens tokens, so it is never shorter than min_tokens."""
    assert parse_completion({"prompt": [1], "max_tokens": 16, **limits}, SERVED).n_output_tokens == 16


def text_of(call: openai.CompletionCall) -> str:
    return "".join(map(chr, unpack_tokens(call.answer)))[: call.n_text]


def test_an_answer_ends_before_its_stop_string() -> None:
    """The stop string's tokens are generated and not shown, and none counts before min_tokens are out."""
    whole = parse_completion({"prompt": "a", "max_tokens": 40}, SERVED)
    text = text_of(whole)
    assert (len(text), whole.finish_reason, whole.stop_reason) == (40, "length", None)
    stop = text[10:13]
    call = parse_completion({"prompt": "a", "max_tokens": 40, "stop": ["no such text", stop]}, SERVED)
    at = text.find(stop)
    assert (text_of(call), call.n_output_tokens) == (text[:at], at + 3)
    assert (call.finish_reason, call.stop_reason) == ("stop", stop)
    late = parse_completion({"prompt": "a", "max_tokens": 40, "stop": stop, "min_tokens": 14}, SERVED)
    assert (late.n_output_tokens, late.finish_reason) == (40, "length")
    by_id = parse_completion({"prompt": "a", "max_tokens": 40, "stop_token_ids": [ord(text[5])]}, SERVED)
    assert by_id.n_output_tokens == text.find(text[5]) + 1
    with pytest.raises(InvalidRequest, match="stop"):
        parse_completion({"prompt": "a", "stop": ["x"] * 5}, SERVED)


def test_parts_of_a_stream_end_with_the_text_before_the_stop_string() -> None:
    """No chunk shows a part of the stop string, wherever the chunks are cut."""
    text = text_of(parse_completion({"prompt": "a", "max_tokens": 40}, SERVED))
    call = parse_completion({"prompt": "a", "max_tokens": 40, "stop": text[10:15]}, SERVED)
    request = ModelRequest("r", call.tokens, call.n_output_tokens, answer=call.answer)
    cuts = [0, 4, 11, 13, call.n_output_tokens]
    chunks = [openai.chunk(request, call, *cut)["choices"][0] for cut in itertools.pairwise(cuts)]
    assert "".join(chunk["text"] for chunk in chunks) == text_of(call)
    assert [chunk["finish_reason"] for chunk in chunks] == [None, None, None, "stop"]


CHAT = [
    {"role": "system", "content": "Say »yes«."},
    {"role": "user", "content": [{"type": "text", "text": "One"}, {"type": "text", "text": "two"}]},
    {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]},
]
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}


def test_a_forced_tool_gets_the_answer_as_its_argument() -> None:
    """The arguments are valid JSON whatever characters the answer has, whole and as a stream."""
    body = {"messages": CHAT, "tools": [TOOL], "tool_choice": "required", "max_tokens": 200}
    served = replace(SERVED, n_tokens_max=4096)
    call = openai.parse_chat(body, served)
    request = ModelRequest("r", call.tokens, 200, answer=call.answer)
    (choice,) = openai.whole_answer(request, call)["choices"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
    (tool_call,) = choice["message"]["tool_calls"]
    assert tool_call["function"]["name"] == "look_up"
    assert orjson.loads(tool_call["function"]["arguments"]) == {"answer": text_of(call)}
    pages = [
        *openai.first_chunks(request, call),
        *(openai.chunk(request, call, at, at + 20) for at in range(0, 200, 20)),
    ]
    calls = [page["choices"][0]["delta"]["tool_calls"][0] for page in pages]
    assert "".join(each["function"]["arguments"] for each in calls) == tool_call["function"]["arguments"]
    for wrong in (
        {"tools": [], "tool_choice": "required"},
        {"tools": [TOOL], "tool_choice": {"function": {"name": "x"}}},
    ):
        with pytest.raises(InvalidRequest, match="tool_choice"):
            openai.parse_chat({"messages": CHAT, **wrong}, served)


@pytest.mark.parametrize(
    "body", [{}, {"messages": []}, {"messages": [{"role": 1}]}, {"messages": [{"role": "u", "content": 1}]}]
)
def test_messages_that_cannot_be_rendered_are_refused(body: dict[str, Any]) -> None:
    """Wrong messages are an error of the request, for chats and for /tokenize."""
    for parse in (openai.parse_chat, openai.tokenize):
        with pytest.raises(InvalidRequest, match=r"message|prompt"):
            parse(body, SERVED)


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"7"])
def test_a_body_that_is_not_an_object_is_refused(raw: bytes) -> None:
    """Invalid JSON and other JSON values are refused."""
    with pytest.raises(InvalidRequest, match="the body is not"):
        parse_body(raw)


def test_parts_of_an_answer_join_to_the_whole() -> None:
    """Text has one character per token, and the choices of a stream join to the whole answer."""
    request = ModelRequest("r", b"\1\0\0\0" * 3, 8, output_seed=5)
    whole = openai.choice(request, 0, 8, "length", with_token_ids=True)
    parts = [openai.choice(request, start, start + 4, None, with_token_ids=True) for start in (0, 4)]
    assert "".join(part["text"] for part in parts) == whole["text"] == "".join(map(chr, whole["token_ids"]))
    assert len(whole["text"]) == 8
    event = openai.stream_event({"choices": parts})
    assert orjson.loads(event.removeprefix(b"data: ")) == {"choices": parts}


@pytest.mark.parametrize(("dialect", "is_map"), [("array", False), ("map", True), ("map_batch", True)])
def test_transitions_have_the_form_of_the_dialect(dialect: EventDialect, is_map: bool) -> None:
    """An array starts with the event's tag, and a map has it as `type`; both have the same fields in the same order."""
    changed = CxlChanged(np.array([5, 6], dtype=np.uint64), CxlMemoryState.CXL_POOLED, "p")
    (event,) = WireForm(4, event_dialect=dialect).events(changed, event_id=9)
    values = event if dialect == "array" else list(event.values())
    assert values == ["CxlStateTransition", 9, [5, 6], "cxl_pooled", "p"]
    assert isinstance(event, dict) == is_map


@pytest.mark.parametrize(("dialect", "is_map"), [("array", False), ("map", False), ("map_batch", True)])
def test_a_batch_is_a_map_only_in_one_dialect(dialect: EventDialect, is_map: bool) -> None:
    """In every form a batch has its time, its events and the data-parallel rank."""
    batch: Any = WireForm(4, dp_rank=2, event_dialect=dialect).batch(1.5, ["e"])
    assert isinstance(batch, dict) == is_map
    assert (list(batch.values()) if is_map else batch) == [1.5, ["e"], 2]


def test_hashes_of_32_bytes_end_in_the_u64() -> None:
    """Blocks and their parent have hashes of the same dialect."""
    hashes = np.array([7], dtype=np.uint64)
    stored = KvStored(0.0, EngineHash(3), hashes, hashes, hashes, b"\1\0\0\0" * 4, 1, None)
    form = WireForm(4, event_dialect="map")
    (short,), (long,) = form.events(stored), replace(form, hash_dialect="bytes32").events(stored)
    assert (short["block_hashes"], short["parent_block_hash"]) == ([7], 3)
    assert [len(each) for each in (*long["block_hashes"], long["parent_block_hash"])] == [32, 32]
    assert int.from_bytes(long["block_hashes"][0][-8:], "big") == 7
    assert int.from_bytes(long["parent_block_hash"][-8:], "big") == 3


def test_metrics_are_read_at_each_scrape() -> None:
    """The page has the values of the moment of the scrape, with the labels of the engine."""
    figures = [
        EngineStats(1, 2, 3, 4, 8, 32, 64, generated_tokens=100, n_finished=5),
        EngineStats(0, 0, 0, 7, 8, 32, 64, generated_tokens=1, n_finished=6),
    ]
    page = SimulatedMetrics(EngineConfig(), "m", 3, 1e9, lambda: figures.pop(0)).page
    for finished, usage in ((5, 3 / 8), (6, 0.0)):
        families = text_string_to_metric_families(page().decode())
        samples = {sample.name: sample for family in families for sample in family.samples}
        assert samples["vllm:request_success_total"].value == finished
        assert samples["vllm:kv_cache_usage_perc"].value == usage
        assert samples["vllm:kv_cache_usage_perc"].labels == {"model_name": "m", "engine": "3"}
