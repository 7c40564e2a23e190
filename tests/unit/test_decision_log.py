"""The decision log without Kafka: what is noted, its records, its words, and what is rebuilt from it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streams.core.hashing import sequence_hashes
from streams.core.ids import DpRank, Float64Array, RankId, WorkerId
from streams.core.loads.bookings import BookingPhase
from streams.core.routing.cost import TermColumns
from streams.core.routing.policies.interface import Policy, Prices, Situation
from streams.core.routing.selection import RouterMode
from streams.core.routing.trust import AnswerMode, DegradedReason
from streams.decision_log import words
from streams.decision_log.families import FAMILIES_MAX, FAMILY_BITS, family_keys, family_positions, salted
from streams.decision_log.noted import COST_TERMS, listed_candidates
from streams.decision_log.records import FleetSize, LoggedBatch, LoggedDecision, OutcomeReport, decode_batch
from streams.errors import BadRecord, InvalidRequest, SettingsError
from streams.kafka.avro_frames import codec
from streams.lab.commands.replay import print_recording
from streams.lab.simulation.decisions import OUTPUT_TOKENS_DEFAULT, recording_of
from streams.lab.simulation.experiment import load_workload, run_policy
from streams.lab.simulation.fleet import FleetConfig
from streams.lab.simulation.lab_engine_config import default_engine
from streams.lab.simulation.recorded import replay
from streams.lab.trace import dump, parse_trace
from streams.process.waiting import wait_for
from streams.router_api.deciding import decision_recorder
from streams.router_api.deciding.decision_recorder import DecisionRecorder
from streams.router_api.deciding.router import Router
from streams.router_api.messages.answer_json import answer_json
from streams.router_api.messages.requests import RouteRequest, parse_route, parse_route_query
from tests.helpers.api import PATIENCE_S, packed
from tests.helpers.recording_producer import RecordingProducer
from tests.helpers.routers import router_of

KEYS = family_keys("salt")
PROMPT = list(range(5000, 5000 + 1100))
FOREVER = 1 << 60
FOREVER_S = 3600.0


@pytest.fixture
def producer(monkeypatch: pytest.MonkeyPatch) -> RecordingProducer:
    """Give the producer of every router of this test."""
    recording = RecordingProducer()
    monkeypatch.setattr("streams.router_api.deciding.compose.producer", lambda *_, **__: recording)
    return recording


def recorder_of(router: Router) -> DecisionRecorder:
    assert router.recorder is not None
    return router.recorder


def written(router: Router, producer: RecordingProducer) -> list[LoggedBatch]:
    """Everything that was recorded so far."""
    recorder_of(router).send()
    return [decode_batch(value) for value in producer.values("router-decisions")]


def ask(router: Router, name: str, tokens: list[int], **fields: Any) -> dict[str, Any]:
    query = {"request_id": name, "explain": "true", **{key: str(value) for key, value in fields.items()}}
    return answer_json(router.route(parse_route_query(query), packed(tokens)))


# -- what is noted -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "knobs",
    [
        {},
        {"router_mode": RouterMode.EXPECTED_TIME},
        {"router_mode": RouterMode.POLICY, "router_policy": "dynamo-default"},
        {"router_mode": RouterMode.ROUND_ROBIN},
        {"kv_events": False},
    ],
    ids=["kv", "expected-time", "policy", "round-robin", "predicted"],
)
def test_a_record_has_what_the_answers_say(knobs: dict[str, Any], producer: RecordingProducer) -> None:
    """Ids, lengths, trust, the chosen rank and the terms of the recorded candidates are those of the answers."""
    router = router_of(6, decision_log=True, decision_log_candidates=2, **knobs)
    lengths = [1, 15, 16, 100, 1100, 511, 513]
    answers = [ask(router, f"r{n}", PROMPT[:n], expected_output_tokens=n) for n in lengths]
    (batch,) = written(router, producer)
    decisions = list(batch.decisions())
    assert [each.request_id for each in decisions] == [f"r{n}" for n in lengths]
    for n, answer, found in zip(lengths, answers, decisions, strict=True):
        assert (found.n_tokens, found.request_blocks, found.expected_output_tokens) == (n, answer["request_blocks"], n)
        assert found.chosen == RankId(WorkerId(answer["worker_id"]), DpRank(answer["dp_rank"]))
        assert (found.overlap_blocks, found.n_eligible, found.booked) == (answer["overlap_blocks"], 6, True)
        assert (found.kind.mode, found.kind.chosen_mode) == (answer["mode"], answer["chosen_mode"])
        assert found.kind.router_mode == router.settings.router_mode
        assert found.kind.policy == router.settings.router_policy
        terms = {each["worker_id"]: each for each in answer["candidates"]}
        costs = sorted(each["cost"] for each in terms.values())
        assert found.n_lowest == costs.count(costs[0])
        assert len({each.rank for each in found.candidates}) == len(found.candidates) in (2, 3)
        others = [each.cost for each in found.candidates if each.rank != found.chosen]
        assert others == costs[: len(others)] or [found.candidates[0].cost, *others] == costs[: len(others) + 1]
        for each in found.candidates:
            own = terms[each.rank.worker_id]
            assert (each.cost, each.blocks) == (own["cost"], own["scores"])
            expected = own.get("policy_terms") or {name: own[name] for name in COST_TERMS}
            assert dict(zip(found.term_names, each.terms, strict=True)) == pytest.approx(expected, rel=1e-6)
    assert list(batch.decisions(terms=False)) == [replace(each, candidates=()) for each in decisions]
    assert batch.fleets == (FleetSize("m", 16, 6, 600),)


def test_decisions_with_different_candidates_share_a_record(producer: RecordingProducer) -> None:
    """Requests that filter ranks, or override the mode, keep their own candidates and terms."""
    router = router_of(4, decision_log=True)
    ask(router, "all", PROMPT)
    ask(router, "one", PROMPT, worker_id=3)
    ask(router, "some", PROMPT, allowed_worker_ids="2,4")
    body = {
        "request_id": "time",
        "token_ids": PROMPT,
        "update_states": False,
        "router_config_override": {"router_mode": "expected-time"},
    }
    router.route(parse_route(orjson.dumps(body)))
    ask(router, "again", PROMPT)
    (batch,) = written(router, producer)
    found = {each.request_id: each for each in batch.decisions()}
    assert [{each.rank.worker_id for each in found[name].candidates} for name in ("all", "one", "some", "time")] == [
        {1, 2, 3, 4},
        {3},
        {2, 4},
        {1, 2, 3, 4},
    ]
    assert (found["time"].kind.router_mode, found["time"].booked) == ("expected-time", False)
    assert found["time"].term_names != found["again"].term_names == COST_TERMS


def test_nothing_is_noted_by_default(producer: RecordingProducer) -> None:
    """Without decision_log=on there is no recorder, and no record."""
    router = router_of()
    ask(router, "r", PROMPT)
    assert router.recorder is None
    router.stop(0.0)
    assert producer.values("router-decisions") == []


def test_a_repeated_id_and_a_refusal_are_no_decisions(producer: RecordingProducer) -> None:
    """A request id that is booked gets its rank again, and a request that nothing can serve gets none."""
    router = router_of(1, decision_log=True)
    ask(router, "r", PROMPT)
    ask(router, "r", PROMPT)
    with pytest.raises(Exception, match="filters"):
        ask(router, "s", PROMPT, worker_id=9)
    assert [len(batch) for batch in written(router, producer)] == [1]


def test_no_token_reaches_the_log(producer: RecordingProducer) -> None:
    """Neither tokens nor unsalted hashes of the prompt are in a record."""
    router = router_of(decision_log=True)
    tokens = [0x11223344 + n for n in range(1100)]
    prepared = router.prepare(parse_route_query({"request_id": "r"}), packed(tokens))
    router.try_book(prepared)
    written(router, producer)
    (value,) = producer.values("router-decisions")
    assert packed(tokens[:1]) not in value
    assert not any(
        each.tobytes() in value for hashes in (prepared.blocks.chain, prepared.blocks.local) for each in hashes
    )


# -- reports -----------------------------------------------------------------------------------------------------------


def test_reports_of_a_request_are_recorded_with_its_end(producer: RecordingProducer) -> None:
    """First token, output and end are one report; without an end they are recorded when the router stops."""
    router = router_of(decision_log=True)
    for name in ("r", "s", "t"):
        ask(router, name, PROMPT)
    router.report_phase("r", BookingPhase.PREFILL)
    router.report_output("r", 20)
    router.report_output("r", 33)
    router.report_phase("r", BookingPhase.FREE)
    router.report_output("s", 5)
    router.report_phase("s", BookingPhase.PREFILL)
    router.report_phase("t", BookingPhase.FREE)
    (batch,) = written(router, producer)
    first, second = batch.reports
    assert (first.request_id, first.output_tokens, second.request_id) == ("r", 33, "t")
    assert 0 < first.prefilled_at_ms <= first.ended_at_ms
    assert (second.prefilled_at_ms, second.output_tokens) == (0, 0)
    router.stop(0.0)
    *_, last = written(router, producer)
    (report,) = last.reports
    assert (report.request_id, report.ended_at_ms, report.output_tokens) == ("s", 0, 5)
    assert report.prefilled_at_ms > 0


def test_what_is_reported_without_an_end_is_bounded(
    producer: RecordingProducer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond PENDING_MAX requests the oldest is recorded without an end, and nothing is lost."""
    monkeypatch.setattr(decision_recorder, "PENDING_MAX", 3)
    recorder = recorder_of(router_of(decision_log=True))
    for number in range(5):
        recorder.output(f"r{number}", number + 1)
    assert [report.request_id for report in recorder._reports] == ["r0", "r1"]
    assert list(recorder._pending) == ["r2", "r3", "r4"]
    assert producer.records == []


# -- limits ------------------------------------------------------------------------------------------------------------


def test_a_full_buffer_drops_and_counts(producer: RecordingProducer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests are answered as before; what does not fit is counted, and later decisions are recorded again."""
    monkeypatch.setattr(decision_recorder, "WAITING_DECISIONS_MAX", 8)
    router = router_of(decision_log=True)
    for number in range(10):
        ask(router, f"r{number}", PROMPT[:100])
    recorder = recorder_of(router)
    kept = 10 - recorder.dropped
    assert kept == 8
    assert sum(map(len, written(router, producer))) == kept
    ask(router, "later", PROMPT[:100])
    assert sum(map(len, written(router, producer))) == kept + 1


def test_reports_that_wait_are_limited(producer: RecordingProducer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond WAITING_REPORTS_MAX, further reports are left out, and later ones are recorded again."""
    monkeypatch.setattr(decision_recorder, "WAITING_REPORTS_MAX", 3)
    router = router_of(decision_log=True)
    for number in range(5):
        router.report_phase(f"r{number}", BookingPhase.FREE)
    (batch,) = written(router, producer)
    assert [report.request_id for report in batch.reports] == ["r0", "r1", "r2"]
    router.report_phase("later", BookingPhase.FREE)
    assert [report.request_id for report in written(router, producer)[-1].reports] == ["later"]


def test_while_kafka_does_not_answer_records_are_limited(
    producer: RecordingProducer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With BATCHES_IN_FLIGHT_MAX records unacknowledged, further ones are dropped; an acknowledgement makes room."""
    monkeypatch.setattr(decision_recorder, "BATCHES_IN_FLIGHT_MAX", 2)
    router = router_of(decision_log=True)
    recorder = recorder_of(router)
    for number in range(4):
        ask(router, f"r{number}", PROMPT)
        recorder.send()
    assert (len(producer.values("router-decisions")), recorder.dropped, recorder.recorded) == (2, 2, 0)
    producer.records[0][1]["on_delivery"](None, None)
    ask(router, "r4", PROMPT)
    recorder.send()
    assert (len(producer.values("router-decisions")), recorder.dropped, recorder.recorded) == (3, 2, 1)


def test_many_decisions_become_several_records(producer: RecordingProducer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A record has at most BATCH_DECISIONS_MAX decisions and BATCH_REPORTS_MAX reports; all are there, in order."""
    monkeypatch.setattr(decision_recorder, "BATCH_DECISIONS_MAX", 3)
    monkeypatch.setattr(decision_recorder, "BATCH_REPORTS_MAX", 2)
    router = router_of(decision_log=True)
    names = [f"r{number}" for number in range(7)]
    for name in names:
        ask(router, name, PROMPT[:40])
    for name in names:
        router.report_phase(name, BookingPhase.FREE)
    batches = written(router, producer)
    assert [len(batch) for batch in batches] == [3, 3, 1, 0]
    assert [each.request_id for batch in batches for each in batch.decisions()] == names
    assert [each.request_id for batch in batches for each in batch.reports] == names
    assert all(len(batch.reports) <= 2 for batch in batches)


def test_a_full_batch_is_sent_by_the_thread_at_once(
    producer: RecordingProducer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request that fills a batch encodes nothing; the thread does, without waiting for its interval."""
    monkeypatch.setattr(decision_recorder, "BATCH_DECISIONS_MAX", 3)
    monkeypatch.setattr(decision_recorder, "INTERVAL_S", FOREVER_S)
    router = router_of(decision_log=True)
    for number in range(3):
        ask(router, f"r{number}", PROMPT[:40])
    assert producer.values("router-decisions") == []
    recorder = recorder_of(router)
    recorder.start()
    try:
        wait_for(lambda: bool(producer.values("router-decisions")), PATIENCE_S, "the full batch to be sent")
    finally:
        recorder.stop()
    (value,) = producer.values("router-decisions")
    assert [each.request_id for each in decode_batch(value).decisions()] == ["r0", "r1", "r2"]


def test_a_share_of_the_requests_is_recorded_with_what_is_reported(producer: RecordingProducer) -> None:
    """All routers choose the same requests by their ids, and record both decisions and reports of these."""
    names = [f"r{number}" for number in range(400)]
    found = []
    for _ in range(2):
        router = router_of(decision_log=True, decision_log_share=0.25)
        for name in names:
            ask(router, name, PROMPT[:20])
            router.report_phase(name, BookingPhase.FREE)
        batches = written(router, producer)
        producer.records.clear()
        assert {batch.share for batch in batches} == {0.25}
        decided = [each.request_id for batch in batches for each in batch.decisions()]
        assert sorted(decided) == sorted(report.request_id for batch in batches for report in batch.reports)
        found.append(decided)
    assert found[0] == found[1]
    assert 60 < len(found[0]) < 140


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_the_chosen_and_the_cheapest_candidates_are_noted(data: st.DataObject) -> None:
    """They are the chosen one, and then others in order of cost, also with equal costs and fewer than are asked."""
    n = data.draw(st.integers(1, 70))
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 30)))
    costs = rng.integers(0, data.draw(st.sampled_from([1, 3, 1000])) + 1, n).astype(np.float64)
    terms, cached, blocks = np.vstack([rng.random((4, n)), costs]), rng.random(n), rng.integers(0, 1 << 20, n)
    cxl, moe = (rng.integers(0, 9, n) if data.draw(st.booleans()) else None for _ in range(2))
    ranks = tuple(RankId(WorkerId(number), DpRank(0)) for number in range(n))
    columns = TermColumns(ranks, blocks, cached, terms, cxl_accessible_scores=cxl, moe_scores=moe)
    chosen, n_best = data.draw(st.integers(0, n - 1)), data.draw(st.integers(0, 64))
    found = listed_candidates(columns, chosen, n_best)
    cheapest = sorted(range(n), key=lambda index: (costs[index], index))[:n_best]
    listed = [chosen, *(index for index in cheapest if index != chosen)]
    assert (found.n_eligible, found.n_lowest) == (n, int((costs == costs.min()).sum()))
    assert found.ranks == [ranks[index] for index in listed]
    assert (found.costs, found.blocks) == (costs[listed].tolist(), blocks[listed].tolist())
    rows = [*terms[:4], cached, *(column for column in (cxl, moe) if column is not None)]
    assert len(found.term_names) == len(rows)
    expected = [np.float32(row[index]) for index in listed for row in rows]
    assert np.frombuffer(found.terms, dtype="<f4").tolist() == expected


class ForeignPolicy:
    """A policy that returns other arrays than the one that it wraps."""

    def __init__(self, wrapped: Policy, change: Callable[[Prices], Prices]) -> None:
        self._wrapped = wrapped
        self._change = change

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wrapped, name)

    def price(self, situation: Situation) -> Prices:
        return self._change(self._wrapped.price(situation))


def _read_only(array: Float64Array) -> Float64Array:
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    ("change", "is_recorded"),
    [
        (lambda prices: prices._replace(terms=np.asfortranarray(prices.terms)), True),
        (lambda prices: prices._replace(terms=prices.terms.astype(np.float32)), True),
        (lambda prices: prices._replace(terms=_read_only(prices.terms.copy())), True),
        (lambda prices: prices._replace(terms=prices.terms.tolist()), True),
        (lambda prices: prices._replace(terms=prices.terms[:-1].copy()), False),
        (lambda prices: prices._replace(names=prices.names[:-1]), False),
        (lambda prices: prices._replace(terms=prices.terms.astype(str).tolist()[:0]), False),
    ],
    ids=["other order", "float32", "read-only", "lists", "a term less", "a name less", "no terms"],
)
def test_arrays_of_a_foreign_policy_are_converted_or_refused(
    change: Callable[[Prices], Prices], is_recorded: bool, producer: RecordingProducer
) -> None:
    """A decision whose terms are numbers is recorded; one whose terms are not what it names is dropped and counted."""
    router = router_of(4, decision_log=True, router_mode=RouterMode.POLICY, router_policy="dynamo-default")
    chooser = router._chooser
    chooser._policies["dynamo-default"] = ForeignPolicy(chooser.policy("dynamo-default"), change)
    router.route(parse_route_query({"request_id": "r"}), packed(PROMPT))
    found = [each for batch in written(router, producer) for each in batch.decisions()]
    assert (len(found), recorder_of(router).dropped) == ((1, 0) if is_recorded else (0, 1))
    del chooser._policies["dynamo-default"]
    ask(router, "later", PROMPT)
    *_, later = (each for batch in written(router, producer) for each in batch.decisions())
    assert later.request_id == "later" and all(len(each.terms) == len(later.term_names) for each in later.candidates)


def test_listed_candidates_different_kinds_are_found_again(producer: RecordingProducer) -> None:
    """Each decision of a record has its own terms, whatever ranks and terms those before it have."""
    router = router_of(5, decision_log=True, decision_log_candidates=1)
    answers = {}
    for number in range(40):
        body: dict[str, Any] = {"request_id": f"r{number}", "token_ids": PROMPT[: 16 * number + 1], "explain": True}
        if number % 3 == 0:
            body["router_config_override"] = {"router_mode": "expected-time"}
        if number % 4:
            body["allowed_worker_ids"] = [1 + number % 5, 1 + (number + 2) % 5]
        answers[f"r{number}"] = answer_json(router.route(parse_route(orjson.dumps(body))))
    (batch,) = written(router, producer)
    for found in batch.decisions():
        terms = {each["worker_id"]: each for each in answers[found.request_id]["candidates"]}
        assert found.n_eligible == len(terms)
        assert found.candidates[0].rank == found.chosen
        for each in found.candidates:
            own = terms[each.rank.worker_id]
            assert (each.cost, each.blocks) == (own["cost"], own["scores"])
            expected = own.get("policy_terms") or {name: own[name] for name in COST_TERMS}
            assert dict(zip(found.term_names, each.terms, strict=True)) == pytest.approx(expected, rel=1e-6)


# -- families ----------------------------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 20_000), st.sampled_from([1, 16, 48, 64, 512, 1024, 4096]))
def test_families_are_those_of_every_512th_token(n_tokens: int, block_size: int) -> None:
    """There is one for each 512 tokens of full blocks; its block has that token, or is the last one."""
    n_blocks = n_tokens // block_size
    positions = family_positions(n_blocks, block_size).tolist()
    assert len(positions) == min(-(-n_blocks * block_size // 512), FAMILIES_MAX)
    for number, position in enumerate(positions):
        last_token = 512 * (number + 1) - 1
        assert position == min(last_token // block_size, n_blocks - 1)


def test_families_are_equal_where_prompts_are_and_only_there() -> None:
    """Prompts that are equal for 1,500 tokens share two families of three."""
    rng = np.random.default_rng(1)
    local = rng.integers(0, 1 << 63, 128, dtype=np.uint64)
    other = local.copy()
    other[1500 // 16] += np.uint64(1)
    positions = family_positions(128, 16)
    first, second = (salted(sequence_hashes(each)[positions], KEYS) for each in (local, other))
    assert (first == second).tolist() == [True, True, False, False]
    assert int(first.max()) < 1 << FAMILY_BITS


def test_another_salt_gives_other_families() -> None:
    """Without the salt, nobody can compare a guess of a prompt with the log, or join the logs of two scopes."""
    hashes = np.arange(1, 1000, dtype=np.uint64)
    families = [salted(hashes, family_keys(salt)) for salt in ("a", "b", "")]
    assert len(set(np.concatenate(families).tolist())) == 3 * len(hashes)
    assert (salted(hashes, family_keys("a")) == families[0]).all()


# -- records -----------------------------------------------------------------------------------------------------------


def test_a_record_has_the_bytes_that_fastavro_writes(producer: RecordingProducer) -> None:
    """With decisions of several kinds, reports, or neither, and ids that are long or not ASCII."""
    router = router_of(decision_log=True)
    names = ["r", "ü" * 40, "x" * 63, "y" * 64, "z" * 200]
    written(router, producer)
    for number, name in enumerate(names):
        mode = ("expected-time", "kv")[number % 2]
        ask(router, name, PROMPT[: 1 + 300 * number], router_mode=mode, phase=("prefill", "both")[number % 2])
        router.report_output(name, number)
        router.report_phase(name, BookingPhase.FREE)
        if number % 3:
            written(router, producer)
    router.report_phase("unknown", BookingPhase.FREE)
    batches = written(router, producer)
    values = producer.values("router-decisions")
    assert [len(each) for each in batches] == [2, 1, 2, 0] and batches[-1].reports
    for value in values:
        assert codec("router-decisions").encode(codec("router-decisions").decode(value)) == value


def test_an_id_that_is_no_text_is_not_recorded(producer: RecordingProducer) -> None:
    """A record cannot contain half of a surrogate pair: its decisions count as dropped, and later ones are recorded."""
    router = router_of(decision_log=True)
    for name in ("\ud800", "r"):
        router.route(RouteRequest(request_id=name), packed(PROMPT))
        recorder_of(router).send()
    assert recorder_of(router).dropped == 1
    assert [each.request_id for batch in written(router, producer) for each in batch.decisions()] == ["r"]


def test_a_record_whose_columns_do_not_fit_together_is_refused(producer: RecordingProducer) -> None:
    """Bytes that are cut off, and numbers beyond a column's end, raise BadRecord and nothing else."""
    router = router_of(decision_log=True)
    ask(router, "r", PROMPT)
    router.report_phase("r", BookingPhase.FREE)
    written(router, producer)
    (raw,) = producer.values("router-decisions")
    datum = codec("router-decisions").decode(raw)
    for name in ("decisions", "candidates", "ranks", "terms", "reports"):
        for damaged in (datum[name][:-1], b"", b"\xff" * len(datum[name])):
            if name in ("ranks", "terms", "reports") and len(damaged) == len(datum[name]):
                continue  # any bits are numbers
            value = codec("router-decisions").encode({**datum, name: damaged})
            if name == "terms" and not damaged:
                continue  # a candidate without terms
            with pytest.raises(BadRecord):
                list(decode_batch(value).decisions())


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=80), st.booleans())
def test_random_bytes_raise_at_most_bad_record(raw: bytes, framed: bool) -> None:
    """This holds with a valid header and without one."""
    header = codec("router-decisions").header if framed else b""
    try:
        list(decode_batch(header + raw).decisions())
    except BadRecord:
        pass


# -- words -------------------------------------------------------------------------------------------------------------


def decision_of(router: Router, producer: RecordingProducer, name: str = "r") -> LoggedDecision:
    return next(each for batch in written(router, producer) for each in batch.decisions() if each.request_id == name)


def text_of(decision: LoggedDecision, *reports: OutcomeReport) -> str:
    return "\n".join(words.explanation(decision, reports))


def test_an_explanation_says_what_decided(producer: RecordingProducer) -> None:
    """It has the time, the mode, the trust, the reason for the choice, and what happened afterwards."""
    router = router_of(2, decision_log=True, kv_events=False)
    first = ask(router, "first", PROMPT)
    router.report_phase("first", BookingPhase.FREE)
    assert ask(router, "r", PROMPT, expected_output_tokens=7)["worker_id"] == first["worker_id"]
    found = replace(decision_of(router, producer), queued_ms=0)
    text = text_of(found, OutcomeReport("r", found.decided_at_ms + 900, found.decided_at_ms + 120, 55))
    assert (
        f"Request r for model m was routed to {first['worker_id']}/0 at {words.time_text(found.decided_at_ms)}" in text
    )
    assert "in mode kv" in text and "1,100 tokens, 69 blocks of 16" in text and "at most 7 tokens" in text
    assert "predicted" in text
    assert "2 ranks were eligible. The chosen one held 68 blocks of the prompt (99%)." in text
    assert "Its cost, 69.20, was the lowest, 67.80 below the next." in text
    assert "68 fewer blocks of this prompt to compute" in text
    assert "the first token 120 ms after the request's arrival, the end after 900 ms and 55 tokens of output" in text


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"n_eligible": 1}, "the only candidate"),
        ({"preferred": False}, "nothing to choose by"),
        ({"booked": False}, "update_states=false"),
        ({"queued_ms": 1500}, "waited 1,500 ms"),
        ({"expected_output_tokens": None}, "has reported nothing"),
    ],
)
def test_an_explanation_mentions_what_is_unusual(
    change: dict[str, Any], says: str, producer: RecordingProducer
) -> None:
    """A single candidate, a mode without a preference, a request that booked nothing, and a wait are in the text."""
    router = router_of(2, decision_log=True)
    ask(router, "r", PROMPT)
    assert says in text_of(replace(decision_of(router, producer), **change))


def test_an_explanation_of_a_tie_and_of_a_draw(producer: RecordingProducer) -> None:
    """With equal costs one of the cheapest was drawn; with a temperature, a dearer rank may have been drawn."""
    router = router_of(3, decision_log=True, router_temperature=1.0)
    ask(router, "r", PROMPT)
    found = decision_of(router, producer)
    assert "3 ranks had this cost, and one of them was drawn" in text_of(found)
    dearer = replace(found.candidates[0], cost=found.candidates[0].cost + 5.0)
    text = text_of(replace(found, candidates=(dearer, *found.candidates[1:]), n_lowest=2))
    assert "It was not the cheapest" in text and "with temperature 1" in text


def test_every_mode_reason_and_term_has_words(producer: RecordingProducer) -> None:
    """No enumeration has a member that an explanation would show as a bare name."""
    assert set(words.TRUST) == set(AnswerMode)
    assert set(words.REASONS) == set(DegradedReason)
    for mode in RouterMode:
        if mode is RouterMode.POLICY:
            continue
        router = router_of(2, decision_log=True, router_mode=mode)
        ask(router, "r", PROMPT, **({"worker_id": 1} if mode is RouterMode.DIRECT else {}))
        found = decision_of(router, producer)
        producer.records.clear()
        assert set(found.term_names) <= set(words.TERMS)
        assert all(line == "" or line[-1] == "." for line in text_of(found).splitlines())


# -- traces ------------------------------------------------------------------------------------------------------------


def test_a_recorded_time_is_a_trace(producer: RecordingProducer) -> None:
    """Times, lengths and shared beginnings are those of the requests; a trace that is written is read back."""
    router = router_of(decision_log=True)
    other = [*PROMPT[:600], *range(9000, 9500)]
    prompts = {"a": PROMPT, "b": other, "c": PROMPT[:520], "d": PROMPT[:10]}
    for name, tokens in prompts.items():
        ask(router, name, tokens)
    for name, output in (("a", 40), ("c", 60)):
        router.report_output(name, output)
        router.report_phase(name, BookingPhase.FREE)
    ask(router, "not booked", PROMPT, update_states=False)
    ask(router, "decode", PROMPT, phase="decode")
    recording = recording_of(written(router, producer), 0, FOREVER)
    trace = recording.trace()
    assert [each.input_length for each in trace] == [1100, 1100, 520, 10]
    assert [each.output_length for each in trace] == [40, 50, 60, 50]  # the mean where it is not known
    assert trace[0].timestamp_ms == 0 and recording.n_without_output == 2
    a, b, c, d = (each.hash_ids for each in trace)
    assert [len(each) for each in (a, b, c, d)] == [3, 3, 2, 1]
    assert a[0] == b[0] == c[0] and a[1] != b[1]
    assert len({*a, *b, *c, *d}) == 7
    assert parse_trace(dump(trace)) == trace
    assert recording.fleet == FleetSize("m", 16, 3, 300) and recording.n_ranks == 3


def test_what_a_recording_lacks_is_said(producer: RecordingProducer, capsys: pytest.CaptureFixture[str]) -> None:
    """Figures of a sample, or of a fleet with prefill workers, are not those of the fleet."""
    router = router_of(decision_log=True)
    ask(router, "a", PROMPT)
    recording = recording_of(written(router, producer), 0, FOREVER)
    print_recording(recording, default_engine(), is_known=True)
    said = capsys.readouterr().out
    assert "Prefill workers" not in said and "--speedup" not in said
    ask(router, "b", PROMPT, phase="prefill")
    recording = replace(recording_of(written(router, producer), 0, FOREVER), share=0.125)
    print_recording(recording, default_engine(), is_known=True)
    said = capsys.readouterr().out
    assert "Prefill workers computed the prompts of 1 requests" in said
    assert "Only 12% of the requests" in said and "--speedup 8," in said


def test_a_request_that_moved_is_one_request_and_an_id_that_is_used_again_is_two(
    producer: RecordingProducer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A retry elsewhere replaces the choice and keeps the arrival; after its end an id may be used again."""
    clock = iter(range(1_000, 1_000_000, 10))
    for module in ("router", "decision_recorder"):
        monkeypatch.setattr(f"streams.router_api.deciding.{module}.wall_ms", lambda: next(clock))
    router = router_of(2, decision_log=True)
    first = ask(router, "r", PROMPT)
    second = ask(router, "r", PROMPT, excluded_worker_ids=first["worker_id"])
    router.report_phase("r", BookingPhase.PREFILL)
    router.report_phase("r", BookingPhase.FREE)
    ask(router, "r", PROMPT[:100])
    requests = recording_of(written(router, producer), 0, FOREVER).requests
    assert requests[0].decision.chosen.worker_id == second["worker_id"]
    assert [each.decision.n_tokens for each in requests] == [1100, 100]
    assert requests[0].arrived_at_ms == 1_000
    assert requests[0].prefilled_at_ms > requests[0].arrived_at_ms and requests[0].ended_at_ms
    assert not requests[1].prefilled_at_ms and not requests[1].ended_at_ms


def test_a_time_without_decisions_and_several_models_are_refused(producer: RecordingProducer) -> None:
    """The error says that nothing is there, or which models there are."""
    router = router_of(2, decision_log=True)
    with pytest.raises(InvalidRequest, match="no booked decision"):
        recording_of(written(router, producer), 0, FOREVER)
    ask(router, "r", PROMPT)
    batches = written(router, producer)
    with pytest.raises(InvalidRequest, match="model 'other'"):
        recording_of(batches, 0, FOREVER, "other")
    at_ms = next(batches[0].decisions()).arrived_at_ms
    with pytest.raises(InvalidRequest, match="in this time"):
        recording_of(batches, at_ms + 1, FOREVER)
    with pytest.raises(InvalidRequest, match="in this time"):
        recording_of(batches, 0, at_ms)
    recording = recording_of(batches, at_ms, at_ms + 1)
    assert recording.mean_output_tokens() == OUTPUT_TOKENS_DEFAULT and recording.measured_ttft_ms() is None


# -- replays -----------------------------------------------------------------------------------------------------------

ENGINE = default_engine()


@pytest.mark.parametrize("policy", ["kv", "dynamo-tuned", "round-robin", "expected-time"])
def test_following_the_choices_of_a_policy_changes_nothing_for_that_policy(policy: str) -> None:
    """A run's own choices, recorded and followed, give the same times, and the same policy would change none of them.

    Another policy would change many.
    """
    workload = load_workload("uniform:requests=200:prefixes=30:seed=5", ENGINE, 4)
    config = FleetConfig(ENGINE, n_workers=4, concurrency=16)
    own = run_policy(workload, config, policy)
    other = "random" if policy == "round-robin" else "round-robin"
    followed = replay(workload, config, own.result.worker.tolist(), [policy, other], by=policy)
    assert followed.changed[policy] == 0.0
    assert 0.4 < followed.changed[other] < 1.0
    assert followed.row.figures == own.figures


def test_a_policy_that_does_not_exist_cannot_be_replayed() -> None:
    """The error lists the policies."""
    workload = load_workload("uniform:requests=2", ENGINE, 1)
    with pytest.raises(SettingsError, match="there is no policy 'nope'"):
        replay(workload, FleetConfig(ENGINE, n_workers=1), [0, 0], ["nope"])


def test_recorded_choices_that_are_random_are_changed_by_a_policy_with_preferences() -> None:
    """Of random choices among four ranks, a policy by cost changes most."""
    workload = load_workload("uniform:requests=200:prefixes=30:seed=5", ENGINE, 4)
    rng = random.Random(1)
    chosen = [rng.randrange(4) for _ in range(len(workload))]
    followed = replay(workload, FleetConfig(ENGINE, n_workers=4, concurrency=16), chosen, ["kv"])
    assert followed.row.result.worker.tolist() == chosen
    assert followed.changed["kv"] > 0.5
