"""The engine model: its cache against a brute-force oracle, its times against arithmetic, and its invariants."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streams.core.hashing import local_hashes, sequence_hashes
from streams.errors import InvalidRequest, SettingsError
from streams.lab.engines.engine_config import EngineConfig
from streams.lab.engines.engine_messages import (
    Finished,
    FirstToken,
    KvCleared,
    KvRemoved,
    KvReused,
    KvStored,
    ModelRequest,
    Output,
    Rejected,
    hash_prompt,
)
from streams.lab.engines.model import EngineModel
from streams.lab.engines.synthetic_tokens import answer_tokens
from tests.helpers.sim_requests import (
    BLOCK,
    CONFIG,
    CROWDED,
    FOREVER,
    Asked,
    ask,
    only,
    pack,
    requests_,
    submit_all,
)


@pytest.fixture
def engine() -> Iterator[EngineModel]:
    model = EngineModel(CONFIG)
    yield model
    model.check()


def findable(model: EngineModel) -> set[int]:
    return set(model.cached_blocks().sequence.tolist())


# -- one request -----------------------------------------------------------------------------------------------------


def test_a_prefill_takes_its_base_and_its_tokens_and_each_other_token_takes_one_step(engine: EngineModel) -> None:
    """A prompt of 6 tokens that arrives at 100 has its first token at 116 and its fifth at 120."""
    engine.submit(100.0, ask("a", range(6), 5))
    out = engine.advance(FOREVER)
    assert only(out, FirstToken) == [FirstToken("a", 116.0, 16.0, 0, 6)]
    assert only(out, Finished) == [Finished("a", 120.0, 5, 16.0, 20.0, 0, 6)]


def test_full_blocks_of_the_prompt_are_stored_in_one_event_when_the_prefill_ends(engine: EngineModel) -> None:
    """Nine tokens give one event for two full blocks, with the root as parent, their tokens and Dynamo's hashes."""
    tokens = list(range(1, 10))
    engine.submit(0.0, ask("a", tokens))
    assert engine.advance(18.9) == []
    (stored,) = only(engine.advance(19.0), KvStored)
    assert (stored.at_ms, stored.parent, stored.start, stored.tokens) == (19.0, None, 0, pack(tokens[:8]))
    assert stored.local.tolist() == local_hashes(tokens, BLOCK).tolist()
    assert stored.sequence.tolist() == sequence_hashes(stored.local).tolist()
    assert not set(stored.engine.tolist()) & set(stored.sequence.tolist())


def test_a_block_that_decoding_fills_is_stored_alone_and_follows_the_previous_block(engine: EngineModel) -> None:
    """Six prompt tokens and the first two of the answer fill block 1, which is stored when the third token is out."""
    engine.submit(0.0, ask("a", range(6), 8, output_seed=3))
    first, *decoded = only(engine.advance(FOREVER), KvStored)
    assert [event.at_ms for event in decoded] == [18.0, 22.0]
    assert [event.start for event in decoded] == [1, 2]
    assert decoded[0].parent == first.engine[-1]
    assert decoded[1].parent == decoded[0].engine[-1]
    whole = pack(range(6)) + answer_tokens(3, 6, 8)
    assert b"".join(event.tokens for event in (first, *decoded)) == whole[: 12 * 4]
    assert decoded[1].sequence[0] == sequence_hashes(local_hashes(whole[: 12 * 4], BLOCK))[2]


@pytest.mark.parametrize(("n_output", "n_blocks"), [(4, 1), (5, 2), (8, 2), (9, 3)])
def test_the_last_token_of_an_answer_is_not_cached(engine: EngineModel, n_output: int, n_blocks: int) -> None:
    """A prompt of one block and an answer of n tokens leave the full blocks of 4 + n - 1 tokens."""
    engine.submit(0.0, ask("a", range(4), n_output))
    engine.advance(FOREVER)
    assert len(findable(engine)) == n_blocks


@pytest.mark.parametrize(("n_tokens", "cached"), [(8, 4), (9, 8), (11, 8), (12, 8), (13, 12)])
def test_a_repeated_prompt_is_reused_except_for_at_least_one_token(
    engine: EngineModel, n_tokens: int, cached: int
) -> None:
    """Only whole blocks are reused, and never the whole prompt."""
    for request_id in "ab":
        engine.submit(0.0, ask(request_id, range(n_tokens)))
    first, second = only(engine.advance(FOREVER), Finished)
    assert (first.cached_tokens, second.cached_tokens) == (0, cached)
    assert second.at_ms == first.at_ms + 10.0 + (n_tokens - cached)


def test_a_recomputed_last_block_is_a_second_copy_with_events_of_its_own(engine: EngineModel) -> None:
    """A hash that is stored twice is removed twice, and can be found until the second removal."""
    for request_id in "ab":
        engine.submit(0.0, ask(request_id, range(8)))
    stored = [hash_ for event in only(engine.advance(FOREVER), KvStored) for hash_ in event.engine.tolist()]
    assert len(stored) == 3
    assert len(set(stored)) == 2
    assert len(engine.cached_blocks().sequence) == 3
    engine.check()
    twin = stored[2]
    removed: list[int] = []
    for at in range(64):
        engine.submit(1000.0, ask(f"filler {at}", [at + 1000] * 5))
        for event in only(engine.advance(FOREVER), KvRemoved):
            removed += event.engine.tolist()
        engine.check()
        assert (twin in engine.cached_blocks().engine.tolist()) == (removed.count(twin) < 2)
    assert removed.count(twin) == 2


@pytest.mark.parametrize("reports_reuse", [False, True])
def test_reused_blocks_are_reported_for_requests_that_ask_for_it(engine: EngineModel, reports_reuse: bool) -> None:
    """The report comes when the request starts, before the stores of its own blocks; it names the reused prefix."""
    first = list(range(10))
    engine.submit(0.0, ask("first", first))
    (stored,) = only(engine.advance(100.0), KvStored)
    engine.submit(200.0, ask("second", [*first, *range(10)], reports_reuse=reports_reuse))
    out = [event for event in engine.advance(FOREVER) if isinstance(event, KvReused | KvStored)]
    assert [type(event) for event in out] == [KvReused, KvStored][not reports_reuse :]
    if reports_reuse:
        assert isinstance(out[0], KvReused)
        assert (out[0].engine.tolist(), out[0].tokens) == (stored.engine.tolist(), pack(first[:8]))


def test_adapters_do_not_share_blocks(engine: EngineModel) -> None:
    """Equal tokens under another adapter give different blocks with different engine hashes."""
    engine.submit(0.0, ask("a", range(9)))
    engine.submit(0.0, ask("b", range(9), lora_name="tuned"))
    out = engine.advance(FOREVER)
    assert [finished.cached_tokens for finished in only(out, Finished)] == [0, 0]
    plain, tuned = only(out, KvStored)
    assert not set(plain.engine.tolist()) & set(tuned.engine.tolist())
    assert (plain.lora_name, tuned.lora_name) == (None, "tuned")


def test_an_answer_resumed_on_another_engine_continues_with_the_same_tokens() -> None:
    """A token depends on the seed and its position, not on where the prompt ends."""
    assert answer_tokens(7, 10, 8) == answer_tokens(7, 10, 3) + answer_tokens(7, 13, 5)
    assert answer_tokens(7, 10, 8) != answer_tokens(8, 10, 8)


# -- the cache's space -------------------------------------------------------------------------------------------------


def test_the_least_recently_used_prompt_is_evicted_first_and_from_its_tail() -> None:
    """If prompt a is used again after b, b's last block is evicted first, then b's first, then a's last."""
    model = EngineModel(replace(CONFIG, n_blocks=5))
    a, b = list(range(9)), list(range(100, 109))
    for at, (request_id, tokens) in enumerate([("a", a), ("b", b), ("a again", a)]):
        model.submit(1000.0 * at, ask(request_id, tokens))
    model.advance(FOREVER)
    of_a, of_b = (hash_prompt(pack(tokens), BLOCK).sequence.tolist() for tokens in (a, b))
    assert findable(model) == {*of_a, *of_b}
    for at, left in enumerate(([*of_a, of_b[0]], [*of_a], [of_a[0]])):
        model.submit(5000.0 + at, ask(f"new {at}", [200 + at] * 5))
        model.advance(FOREVER)
        model.check()
        assert findable(model) & {*of_a, *of_b} == set(left)


def test_the_first_in_line_waits_for_blocks_and_is_not_overtaken() -> None:
    """While 3 of 4 blocks are in use, a request for 2 blocks waits, and a smaller one waits behind it."""
    model = EngineModel(replace(CONFIG, n_blocks=4))
    model.submit(0.0, ask("holder", range(8), 5))  # 8 tokens and 4 more: 3 blocks, until 18 + 4 = 22
    model.submit(1.0, ask("big", range(100, 108)))
    model.submit(2.0, ask("small", range(200, 203)))
    model.advance(20.0)
    model.check()
    assert model.stats().n_waiting == 2
    out = model.advance(FOREVER)
    assert [(token.request_id, token.at_ms) for token in only(out, FirstToken)] == [("big", 40.0), ("small", 53.0)]
    model.check()


def test_a_request_starts_only_when_its_whole_answer_fits() -> None:
    """Two prompts of one block, whose answers need three, use a cache of four blocks one after the other."""
    model = EngineModel(replace(CONFIG, n_blocks=4))
    for at, request_id in enumerate("ab"):
        model.submit(0.0, ask(request_id, range(at * 100, at * 100 + 4), 9))
    model.advance(20.0)
    model.check()
    assert (model.stats().n_running, model.stats().n_waiting) == (1, 1)
    first, second = only(model.advance(FOREVER), Finished)
    assert (first.at_ms, second.at_ms) == (22.0, 22.0 + 14.0 + 8.0)
    model.check()


@pytest.mark.parametrize(("n_prompt", "n_output", "fits"), [(252, 5, True), (256, 1, True), (253, 5, False)])
def test_a_request_that_can_never_fit_is_rejected_and_leaves_no_trace(
    engine: EngineModel, n_prompt: int, n_output: int, fits: bool
) -> None:
    """A cache of 256 tokens must fit the prompt and the answer without its last token."""
    engine.submit(0.0, ask("a", range(n_prompt), n_output))
    out = engine.advance(FOREVER)
    assert bool(only(out, Finished)) == fits
    assert bool(only(out, Rejected)) == (not fits)
    assert engine.stats().n_waiting == engine.stats().n_running == 0
    engine.submit(0.0, ask("a", range(9)))  # the id is free again
    assert only(engine.advance(FOREVER), Finished)


def test_a_reset_is_refused_while_blocks_are_in_use_and_otherwise_drops_everything(engine: EngineModel) -> None:
    """As in vLLM, a reset either changes nothing or empties the whole cache."""
    engine.submit(0.0, ask("a", range(9), 100))
    engine.advance(50.0)
    before = findable(engine)
    assert engine.clear(50.0) == []
    assert findable(engine) == before != set()
    engine.advance(FOREVER)
    assert engine.clear(500.0) == [KvCleared(500.0)]
    assert findable(engine) == set()
    engine.submit(500.0, ask("b", range(9)))
    assert only(engine.advance(FOREVER), Finished)[0].cached_tokens == 0


# -- time --------------------------------------------------------------------------------------------------------------


def test_a_late_arrival_on_an_idle_engine_starts_when_it_arrived(engine: EngineModel) -> None:
    """A request that arrived at 100 and is submitted at 5,000 has its first token at 100 + 14."""
    engine.submit(0.0, ask("a", range(4)))
    engine.advance(5000.0)
    engine.submit(100.0, ask("b", range(50, 54)))
    assert only(engine.advance(5000.0), FirstToken) == [FirstToken("b", 114.0, 14.0, 0, 4)]


def test_a_late_arrival_waits_for_the_gpu_as_it_would_have(engine: EngineModel) -> None:
    """A request that arrives at 100, during a prefill from 95 to 110, starts at 110 whenever it is submitted."""
    engine.submit(95.0, ask("a", range(5)))
    engine.advance(5000.0)
    engine.submit(100.0, ask("b", range(50, 54)))
    assert only(engine.advance(5000.0), FirstToken)[0].at_ms == 124.0


def test_a_late_arrival_does_not_wait_for_answers_that_were_being_decoded(engine: EngineModel) -> None:
    """A request that arrives at 20, while an answer is decoded, starts at 20 even if it is submitted at 5,000."""
    engine.submit(0.0, ask("a", range(4), 50))
    engine.advance(5000.0)
    engine.submit(20.0, ask("b", range(100, 104)))
    assert only(engine.advance(5000.0), FirstToken)[0].at_ms == 34.0


def test_the_next_event_is_never_later_than_what_happens_next(engine: EngineModel) -> None:
    """Advancing from one next event to the next misses nothing; an idle engine has no next event."""
    assert engine.next_event_ms() is None
    engine.submit(3.0, ask("a", range(9), 3))
    seen: list[Output] = []
    while (due := engine.next_event_ms()) is not None:
        assert engine.advance(np.nextafter(due, -np.inf)) == []
        out = engine.advance(due)
        assert all(output.at_ms == due for output in out)
        seen += out
    twin = EngineModel(CONFIG)
    twin.submit(3.0, ask("a", range(9), 3))
    assert as_text(seen) == as_text(twin.advance(FOREVER))


@pytest.mark.parametrize(("at_ms", "n_out"), [(13.9, 0), (14.0, 1), (14.9, 1), (16.0, 3), (17.9, 4), (40.0, 5)])
def test_decoded_tokens_are_counted_by_time_without_an_event_each(
    engine: EngineModel, at_ms: float, n_out: int
) -> None:
    """The first token is out at the prefill's end, then one per step, and never more than requested."""
    engine.submit(0.0, ask("a", range(4), 5))
    engine.advance(min(at_ms, 17.9))
    assert engine.n_decoded("a", at_ms) == n_out
    assert engine.n_decoded("nobody", at_ms) == 0


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "request_",
    [
        ModelRequest("a", b"", 1),
        ModelRequest("a", b"123", 1),
        ask("a", range(4), 0),
        ask("a", range(9), hashes=hash_prompt(pack(range(4)), BLOCK)),
    ],
)
def test_a_malformed_request_is_refused(engine: EngineModel, request_: ModelRequest) -> None:
    """A request without a prompt, with half a token, without an answer or with another prompt's hashes is refused."""
    with pytest.raises(InvalidRequest):
        engine.submit(0.0, request_)


def test_a_second_request_with_an_active_id_is_refused(engine: EngineModel) -> None:
    """The outputs of two active requests with one id could not be distinguished."""
    engine.submit(0.0, ask("a", range(4)))
    with pytest.raises(InvalidRequest, match="already active"):
        engine.submit(0.0, ask("a", range(4)))


@pytest.mark.parametrize(
    "wrong",
    [{"block_size": 0}, {"n_blocks": 0}, {"prefill_ms_base": -1.0}, {"decode_ms_per_token": float("nan")}],
)
def test_an_invalid_configuration_is_refused(wrong: dict[str, Any]) -> None:
    """The error names the field."""
    with pytest.raises(SettingsError, match=next(iter(wrong))):
        EngineConfig(**wrong)


# -- properties --------------------------------------------------------------------------------------------------------


def as_text(outputs: Sequence[Output]) -> list[str]:
    """Give outputs as text with all digits, because outputs contain arrays, which do not compare to one bool."""
    return [repr(output) for output in outputs]


@settings(max_examples=120, deadline=None)
@given(requests_, st.lists(st.floats(0.0, 400.0), max_size=30), st.integers(9, 20))
def test_outputs_do_not_depend_on_when_the_model_was_advanced(asked: Asked, steps: list[float], n_blocks: int) -> None:
    """One big step gives the same outputs as many small ones, and the invariants hold after each step."""
    config = replace(CROWDED, n_blocks=n_blocks)
    once, often = EngineModel(config), EngineModel(config)
    submit_all(once, asked)
    submit_all(often, asked)
    small: list[Output] = []
    for to_ms in sorted(steps):
        small += often.advance(to_ms)
        often.check()
    small += often.advance(FOREVER)
    big = once.advance(FOREVER)
    once.check()
    assert as_text(small) == as_text(big)
    assert [output.at_ms for output in big] == sorted(output.at_ms for output in big)
    assert {finished.request_id for finished in only(big, Finished)} == {str(at) for at in range(len(asked))}


@settings(max_examples=80, deadline=None)
@given(requests_, st.integers(9, 20))
def test_submitting_on_arrival_equals_submitting_ahead(asked: Asked, n_blocks: int) -> None:
    """Submitting each request at its arrival gives the same outputs as queueing the whole trace in advance."""
    asked = sorted(asked, key=lambda one: one[0])
    config = replace(CROWDED, n_blocks=n_blocks)
    ahead, live = EngineModel(config), EngineModel(config)
    submit_all(ahead, asked)
    out: list[Output] = []
    for at, (arrival, tokens, n_output, seed) in enumerate(asked):
        out += live.advance(float(arrival))
        live.submit(float(arrival), ask(str(at), tokens, n_output, output_seed=seed))
    assert as_text(out + live.advance(FOREVER)) == as_text(ahead.advance(FOREVER))


@settings(max_examples=80, deadline=None)
@given(requests_, st.lists(st.tuples(st.floats(0.0, 400.0), st.integers(0, 13)), max_size=14), st.integers(9, 20))
def test_a_cancelled_request_leaves_no_trace(asked: Asked, cancelled: list[tuple[float, int]], n_blocks: int) -> None:
    """Waiting, prefilling or decoding: its blocks are released, nothing more is put out, and all others finish."""
    model = EngineModel(replace(CROWDED, n_blocks=n_blocks))
    submit_all(model, asked)
    ended: set[str] = set()
    gone: set[str] = set()
    for at_ms, number in sorted(cancelled):
        ended |= {output.request_id for output in only(model.advance(at_ms), Finished)}
        if number < len(asked) and str(number) not in ended:
            gone.add(str(number))
            model.cancel(at_ms, str(number))
        model.check()
    ended |= {output.request_id for output in only(model.advance(FOREVER), Finished)}
    model.check()
    assert ended == {str(number) for number in range(len(asked))} - gone
    assert (model.stats().n_running, model.stats().n_waiting, model.stats().n_blocks_used) == (0, 0, 0)


@given(requests_, st.lists(st.integers(0, 300), min_size=14, max_size=14))
def test_first_tokens_do_not_depend_on_how_late_requests_are_submitted(asked: Asked, lateness: list[int]) -> None:
    """With answers of one token and enough space, times to first token follow from the arrivals alone."""
    asked = sorted(((arrival, tokens, 1, seed) for arrival, tokens, _, seed in asked), key=lambda one: one[0])
    punctual, late = EngineModel(replace(CONFIG, n_blocks=1000)), EngineModel(replace(CONFIG, n_blocks=1000))
    submit_all(punctual, asked)
    out: list[Output] = []
    for at, (arrival, tokens, n_output, seed) in enumerate(asked):
        late.submit(float(arrival), ask(str(at), tokens, n_output, output_seed=seed))
        out += late.advance(float(arrival + lateness[at]))
    assert only(out + late.advance(FOREVER), FirstToken) == only(punctual.advance(FOREVER), FirstToken)


@settings(max_examples=120, deadline=None)
@given(requests_)
def test_hits_are_those_of_a_brute_force_search_when_nothing_is_evicted(asked: Asked) -> None:
    """The oracle compares token lists with every sequence computed before, without hashes."""
    model = EngineModel(replace(CONFIG, n_blocks=1000))
    computed: list[list[int]] = []
    for at, (_, tokens, n_output, seed) in enumerate(asked):
        longest = max((n for known in computed for n in range(len(tokens) + 1) if known[:n] == tokens[:n]), default=0)
        expected = min(longest // BLOCK, (len(tokens) - 1) // BLOCK) * BLOCK
        model.submit(1000.0 * at, ask(str(at), tokens, n_output, output_seed=seed))
        (finished,) = only(model.advance(1000.0 * at + 999.0), Finished)
        assert finished.cached_tokens == expected
        # Only full blocks of computed tokens can be found again; the last token of an answer is never computed.
        answer = np.frombuffer(answer_tokens(seed, len(tokens), n_output - 1), dtype="<u4").tolist()
        sequence = tokens + answer
        computed.append(sequence[: len(sequence) // BLOCK * BLOCK])
        model.check()


@settings(max_examples=120, deadline=None)
@given(requests_, st.integers(9, 20))
def test_counting_the_events_gives_the_content_of_the_cache(asked: Asked, n_blocks: int) -> None:
    """Stores minus removals per engine hash are the copies that the cache holds, and every parent is held."""
    model = EngineModel(replace(CROWDED, n_blocks=n_blocks))
    submit_all(model, asked)
    copies: dict[int, int] = {}
    chain: dict[int, tuple[int | None, int]] = {}
    for to_ms in [*range(0, 400, 7), FOREVER]:
        for output in model.advance(float(to_ms)):
            if isinstance(output, KvStored):
                parent: int | None = output.parent
                assert parent is None or copies.get(parent, 0) > 0
                for at, hash_ in enumerate(output.engine.tolist()):
                    copies[hash_] = copies.get(hash_, 0) + 1
                    assert chain.setdefault(hash_, (parent, output.start + at)) == (parent, output.start + at)
                    parent = hash_
            elif isinstance(output, KvRemoved):
                for hash_ in output.engine.tolist():
                    copies[hash_] -= 1
                    assert copies[hash_] >= 0
        held = sorted(hash_ for hash_, n in copies.items() for _ in range(n))
        assert sorted(model.cached_blocks().engine.tolist()) == held
