"""Streams whose engine fails in the middle: the decisions, and answers that come out as if nothing had happened."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from streams.client.migration import (
    Abandon,
    ChooseWorker,
    ClientLeft,
    EngineEnded,
    Failure,
    Finish,
    FinishWithError,
    GoOn,
    IllegalMigrationEvent,
    Migration,
    MigrationLimits,
    NoWorkerLeft,
    Phase,
    PromptComputed,
    Resume,
    StreamEngineFailed,
    TokensShown,
    WorkerChosen,
    held_back_characters,
    obstacle,
    prompt_computed,
    rewound_characters,
)


def failed(at_s: float = 0.0, failure: Failure = Failure.DIED, last_heard_s: float = 0.0) -> StreamEngineFailed:
    return StreamEngineFailed(at_s, failure, last_heard_s)


def chosen(worker_id: int = 2, at_s: float = 0.0, reachable: int = 0, pooled: int = 0) -> WorkerChosen:
    return WorkerChosen(at_s, worker_id, reachable, pooled)


def migration(**options: Any) -> Migration:
    return Migration(1, n_prompt_tokens=100, **{"max_tokens": 50, **options})


def test_a_stream_resumes_elsewhere_with_what_is_left() -> None:
    """The prompt and the tokens so far go to another worker, and the limits are reduced by them."""
    stream = migration(min_tokens=20)
    for number in range(5):
        assert stream.handle(TokensShown(float(number), (number,), "x")) == GoOn()
    assert stream.handle(failed(6.0, last_heard_s=4.0)) == ChooseWorker(5, (1,))
    assert stream.handle(chosen(7, reachable=96, pooled=64)) == Resume(7, 5, 45, 15, 0)
    assert stream.handle(TokensShown(6.5, (5,), "x")) == GoOn()
    assert stream.handle(EngineEnded(9.0)) == Finish(None)
    figures = stream.figures
    assert (figures.migrations, figures.tokens_recovered, figures.tokens_prefilled_again) == (1, 64, 9)
    assert figures.lost_s == 2.5
    assert stream.shown.token_ids.tolist() == list(range(6))


def test_every_engine_that_failed_stays_excluded() -> None:
    """Also one that fails while it resumes; the time lost runs from the last byte of the first to the next token."""
    stream = migration()
    stream.handle(TokensShown(1.0, (1,), "x"))
    assert stream.handle(failed(2.0, last_heard_s=1.0)) == ChooseWorker(1, (1,))
    stream.handle(chosen(2))
    assert stream.handle(failed(3.0, Failure.REFUSED, 2.9)) == ChooseWorker(1, (1, 2))
    stream.handle(chosen(3))
    stream.handle(TokensShown(4.0, (2,), "y"))
    assert (stream.figures.migrations, stream.figures.lost_s) == (2, 3.0)


@pytest.mark.parametrize(("n_failures", "goes_on"), [(3, True), (4, False)])
def test_the_number_of_migrations_is_limited(n_failures: int, goes_on: bool) -> None:
    """The third engine after the first one may still be tried, a fourth may not."""
    stream = migration(limits=MigrationLimits(migrations_max=3))
    for number in range(n_failures):
        last = stream.handle(failed())
        if isinstance(last, ChooseWorker):
            stream.handle(chosen(number + 2))
    assert isinstance(last, ChooseWorker if goes_on else FinishWithError)


@pytest.mark.parametrize(("at_s", "goes_on"), [(60.0, True), (60.1, False)])
def test_the_time_of_migrations_is_limited(at_s: float, goes_on: bool) -> None:
    """It runs from the first failure."""
    stream = migration(limits=MigrationLimits(total_s=60.0))
    stream.handle(failed(1.0, last_heard_s=0.0))
    stream.handle(chosen())
    last = stream.handle(failed(at_s, Failure.STALLED, 30.0))
    assert isinstance(last, ChooseWorker if goes_on else FinishWithError)


def test_without_another_worker_the_stream_ends_with_an_error() -> None:
    """The error says how much was generated."""
    stream = migration()
    stream.handle(TokensShown(0.0, (1,), "x"))
    stream.handle(failed())
    end = stream.handle(NoWorkerLeft(1.0))
    assert isinstance(end, FinishWithError) and "1 tokens" in end.reason
    assert stream.phase is Phase.OVER


def test_an_answer_of_which_only_the_end_is_missing_is_finished_here() -> None:
    """An engine that dies between its last token and its finish reason needs no other one."""
    stream = migration(max_tokens=2)
    stream.handle(TokensShown(0.0, (1, 2), "xy"))
    assert stream.handle(failed()) == Finish("length")


@pytest.mark.parametrize("phase", [Phase.STREAMING, Phase.ROUTING, Phase.RESUMING])
def test_a_cancelled_request_is_never_migrated(phase: Phase) -> None:
    """In whatever phase the client leaves, what runs is cancelled."""
    stream = migration()
    if phase is not Phase.STREAMING:
        stream.handle(failed())
    if phase is Phase.RESUMING:
        stream.handle(chosen())
    assert stream.phase is phase
    assert stream.handle(ClientLeft(1.0)) == Abandon()
    with pytest.raises(IllegalMigrationEvent, match="StreamEngineFailed in phase over"):
        stream.handle(failed())


def test_events_that_cannot_happen_are_errors() -> None:
    """A worker that nobody asked for is a bug of the caller."""
    with pytest.raises(IllegalMigrationEvent):
        migration().handle(chosen())


@pytest.mark.parametrize(
    ("body", "resumes"),
    [
        ({}, True),
        ({"n": 1, "best_of": None, "tools": [], "response_format": {"type": "text"}}, True),
        ({"tools": [{}], "tool_choice": "none"}, True),
        ({"tools": [{}]}, False),
        ({"n": 2}, False),
        ({"best_of": 2}, False),
        ({"use_beam_search": True}, False),
        ({"prompt_embeds": "x"}, False),
        ({"prompt": [1, 2]}, True),
        ({"prompt": [[1, 2]]}, True),
        ({"prompt": [[1, 2], [3]]}, False),
        ({"prompt": ["a", "b"]}, False),
        ({"response_format": {"type": "json_object"}}, False),
        ({"guided_regex": "a+"}, False),
        ({"regex": "a+"}, False),
        ({"ebnf": "root ::= 'a'"}, False),
        ({"json_schema": "{}"}, False),
        ({"regex": None, "ebnf": ""}, True),
        ({"logprobs": False}, True),
        ({"logprobs": 0}, False),
        ({"prompt": "a", "logprobs": False}, False),  # the number 0 of a completion
        ({"prompt_logprobs": False}, False),
        ({"prompt_logprobs": None}, True),
        ({"echo": True}, False),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}, {"content": None}]}, True),
        ({"messages": [{"content": [{"type": "image_url"}]}]}, False),
        ({"messages": [{"content": [{"text": "x"}, {"type": "output_text", "text": "y", "uuid": "u"}]}]}, True),
        ({"messages": [{"content": [{"type": "text", "text": "x"}, {"image_url": "x"}]}]}, False),
        ({"messages": [{"content": [{"type": "text", "text": "x", "uuid": "u", "audio_url": "x"}]}]}, False),
        ({"messages": [{"content": [{"type": ["text"], "text": "x"}]}]}, False),
    ],
)
def test_what_an_engine_has_to_finish_is_not_resumed(body: dict[str, Any], resumes: bool) -> None:
    """Such a stream ends with an error that says why."""
    reason = obstacle(body)
    assert (reason is None) == resumes
    end = migration(obstacle=reason).handle(failed())
    if resumes:
        assert isinstance(end, ChooseWorker)
    else:
        assert isinstance(end, FinishWithError) and str(reason) in end.reason


def test_an_engine_holds_back_one_character_less_than_its_longest_stop_string() -> None:
    """As vLLM does, unless the stop string is to be shown."""
    assert held_back_characters({"stop": ["ab", "abcd"]}) == 3
    assert held_back_characters({"stop": "x"}) == held_back_characters({}) == 0
    assert held_back_characters({"stop": "abc", "include_stop_str_in_output": True}) == 0


def test_a_stop_string_that_is_shown_is_generated_again() -> None:
    """The client has its beginning already, which the next engine needs to find it."""
    assert rewound_characters({"stop": "abc", "include_stop_str_in_output": True}) == 2
    assert rewound_characters({"stop": "abc"}) == rewound_characters({"include_stop_str_in_output": True}) == 0
    stream = migration(rewound=2)
    for number in range(5):
        stream.handle(TokensShown(0.0, (number,), "x"))
    assert stream.handle(failed()) == ChooseWorker(3, (1,))
    assert stream.handle(chosen()) == Resume(2, 3, 47, 0, 2)


@pytest.mark.parametrize(("following", "n_kept"), [("x", 4), ("ö", 1)])
def test_a_chunk_of_several_tokens_is_proven_by_the_next_text(following: str, n_kept: int) -> None:
    """A character that is not ASCII may have begun in the chunk before."""
    stream = migration()
    stream.handle(TokensShown(0.0, (1,), "x"))
    stream.handle(TokensShown(0.0, (2, 3, 4), "xx", None))
    stream.handle(TokensShown(0.0, (5, 6), following, None))
    assert stream.handle(failed()) == ChooseWorker(n_kept, (1,))


def test_an_answer_without_ids_is_kept_as_its_text_is_tokenized() -> None:
    """Nothing is generated again: the tokens stand for exactly the text that the client has."""
    stream = migration(held_back=3)
    for _ in range(9):
        stream.handle(TokensShown(0.0, (), "x"))
    stream.shown.restate([1, 2, 3])
    assert stream.handle(failed()) == ChooseWorker(3, (1,))
    assert stream.handle(chosen()) == Resume(2, 3, 47, 0, 0)


@pytest.mark.parametrize(
    ("cached", "recovered", "prefilled"),
    [(112, 64, 0), (96, 64, 16), (48, 16, 64), (0, 0, 112), (200, 64, 0)],
)
def test_what_the_engine_found_replaces_what_the_router_expected(cached: int, recovered: int, prefilled: int) -> None:
    """Of 112 tokens, the router expected 32 in the worker's memory and 64 in a pool, which may have been lost."""
    stream = migration()
    stream.handle(PromptComputed(0.0, 100, 50))  # of the first engine: nothing was moved
    for number in range(12):
        stream.handle(TokensShown(0.0, (number,), "x"))
    stream.handle(failed())
    stream.handle(chosen(reachable=96, pooled=64))
    assert (stream.figures.tokens_recovered, stream.figures.tokens_prefilled_again) == (64, 16)
    stream.handle(PromptComputed(1.0, 112, cached))
    stream.handle(PromptComputed(1.0, 112, cached))  # once is as good as twice
    assert (stream.figures.tokens_recovered, stream.figures.tokens_prefilled_again) == (recovered, prefilled)


def test_an_engine_that_fails_before_its_first_token_has_prefilled_nothing() -> None:
    """What the router expected of it is not counted, as that of an engine that was dead already."""
    stream = migration()
    for number in range(12):
        stream.handle(TokensShown(0.0, (number,), "x"))
    stream.handle(failed())
    stream.handle(chosen(reachable=96, pooled=64))
    stream.handle(failed())
    assert (stream.figures.tokens_recovered, stream.figures.tokens_prefilled_again) == (0, 0)
    stream.handle(chosen(reachable=80, pooled=80))
    stream.handle(TokensShown(1.0, (12,), "x"))
    stream.handle(failed())
    assert (stream.figures.migrations, stream.figures.tokens_prefilled_again) == (2, 32)


def test_an_engine_that_says_what_came_from_pools_is_believed() -> None:
    """The router's index may lag behind the pools."""
    usage = {"prompt_tokens": 100, "prompt_tokens_details": {"cached_tokens": 96, "pooled_tokens": 80}}
    stream = migration()
    stream.handle(failed())
    stream.handle(chosen(reachable=32, pooled=32))
    found = prompt_computed(usage, 1.0)
    assert found is not None
    stream.handle(found)
    assert (stream.figures.tokens_recovered, stream.figures.tokens_prefilled_again) == (80, 4)
    assert prompt_computed({"prompt_tokens": 100}, 1.0) is None
    assert prompt_computed({"prompt_tokens": 100, "prompt_tokens_details": None}, 1.0) is None


def test_the_time_of_a_stream_that_goes_on_is_not_counted() -> None:
    """Only moves are limited: the second failure comes an hour after the first one."""
    stream = migration(limits=MigrationLimits(total_s=60.0))
    stream.handle(failed(1.0))
    stream.handle(chosen())
    stream.handle(TokensShown(2.0, (1,), "x"))
    assert isinstance(stream.handle(failed(3602.0, last_heard_s=3600.0)), ChooseWorker)
    assert stream.deadline_s == 3600.0 + 60.0 - 2.0


def test_tokens_whose_text_is_held_back_are_generated_again() -> None:
    """With two characters held back, the client has one of three tokens, so the first one is kept at most."""
    stream = migration(held_back=2)
    for number, text in enumerate(["", "", "x"]):
        stream.handle(TokensShown(0.0, (number,), text))
    assert stream.handle(failed()) == ChooseWorker(0, (1,))
    assert stream.handle(chosen()) == Resume(2, 0, 50, 0, 1)
    for number, text in enumerate(["", "", "", *"yzuv"]):
        stream.handle(TokensShown(0.0, (number,), text))
    assert stream.handle(failed()) == ChooseWorker(5, (1, 2))
    assert stream.handle(chosen(3)) == Resume(3, 5, 45, 0, 0)


# -- whole answers -----------------------------------------------------------------------------------------------------


def generate(
    answer: bytes, start: int, stops: list[str], sizes: Iterator[int], includes: bool = False
) -> Iterator[tuple[tuple[int, ...], str, bool]]:
    """Yield the chunks of an engine that resumes at token `start`: ids, text, and whether the text ends with the last.

    Its tokens are bytes. Like vLLM, it shows whole characters only, holds back what may begin a stop string unless that
    is included in the answer, and stops at one that it has generated itself.
    """
    held = 0 if includes else max((len(stop) - 1 for stop in stops), default=0)
    decoder, text, shown, at = codecs.getincrementaldecoder("utf-8")(), "", 0, start
    while at < len(answer):
        until = min(at + next(sizes), len(answer))
        ids: tuple[int, ...] = ()
        while at < until:
            text += decoder.decode(answer[at : at + 1])
            ids += (answer[at],)
            at += 1
            found = [(text.find(stop), stop) for stop in stops if stop in text]
            if found:
                first, stop = min(found)
                yield ids, text[shown : max(shown, first + (len(stop) if includes else 0))], True
                return
        end = len(text) if at == len(answer) else max(shown, len(text) - held)
        yield ids, text[shown:end], not decoder.getstate()[0]
        shown = end


@hypothesis_settings(max_examples=400, deadline=None)
@given(
    st.text(st.sampled_from("ab\nö好🙂"), min_size=8, max_size=40),
    st.lists(st.text(st.sampled_from("ab\nö好🙂"), min_size=2, max_size=5), max_size=2),
    st.lists(st.integers(0, 12), min_size=1, max_size=4),
    st.booleans(),
    st.data(),
)
def test_a_stream_that_moves_is_the_undisturbed_one(
    text: str, stops: list[str], lives: list[int], includes: bool, data: st.DataObject
) -> None:
    """However its engines fail: every token once, no half character, and stop strings found across the seams."""

    def sizes() -> Iterator[int]:
        while True:
            yield data.draw(st.integers(1, 4))

    answer = text.encode()
    expected = list(generate(answer, 0, stops, iter(lambda: 1, 0), includes))
    body = {"stop": stops, "include_stop_str_in_output": includes}
    stream = Migration(
        1,
        10,
        max_tokens=1000,
        held_back=held_back_characters(body),
        rewound=rewound_characters(body),
        limits=MigrationLimits(migrations_max=99),
    )
    got, skip, start = "", 0, 0
    for life in [*lives, 1 << 30]:
        for number, (ids, piece, whole) in enumerate(generate(answer, start, stops, sizes(), includes)):
            if number == life:
                break
            new = piece[skip:]
            skip = max(0, skip - len(piece))
            got += new
            # With one token in a chunk, `whole` is not needed; with several, not every caller knows it.
            known = True if len(ids) == 1 else data.draw(st.sampled_from([whole, None]))
            stream.handle(TokensShown(0.0, ids, new, known))
        else:
            stream.handle(EngineEnded(0.0))
            break
        choose = stream.handle(failed())
        assert isinstance(choose, ChooseWorker)
        resume = stream.handle(chosen())
        assert isinstance(resume, Resume) and resume.n_kept == choose.n_kept == len(stream.shown.token_ids)
        assert resume.max_tokens == 1000 - resume.n_kept
        start, skip = resume.n_kept, resume.skip_characters
    assert got == "".join(piece for _, piece, _ in expected)
    assert tuple(stream.shown.token_ids) == sum((ids for ids, _, _ in expected), ())
