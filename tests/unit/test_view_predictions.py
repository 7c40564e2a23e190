"""Answers of a view that go beyond its folds: predictions, engine metrics and eligible ranks, without Kafka."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from streams.core.bridge_pulses import BridgePulse
from streams.core.engine_metrics import MetricsReport, WorkerMetrics
from streams.core.ids import Epoch, Incarnation, WorkerId
from streams.core.reducer.ordering import Health, Progress
from streams.core.routing.eligibility import WorkerFilter
from streams.core.routing.trust import AnswerMode, DegradedReason
from streams.core.workers import BridgeLease, Worker
from streams.errors import BadRecord
from streams.kafka.clients import partition_of
from streams.kafka.records import PULSES, encode_metrics
from streams.lab.engines.held_chains import FIRST_EPOCH
from streams.router_api.knowledge import engine_reports, rank_trust
from streams.tables.records import PARTITION_KEY, PROGRESS_KEY, PartitionRecord, encode_partition, encode_progress
from tests.helpers.views import (
    BLOCK_SIZE,
    LOCAL,
    TTL_MS,
    Clock,
    hold,
    rank,
    register,
    report,
    view_of,
)


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_without_events_overlap_is_predicted_from_own_decisions(clock: Clock) -> None:
    """With kv_events off, a prediction is used for 120 s, the mode is `approximate`, and the index is not read."""
    view = view_of(clock, kv_events=False)
    hold(view, rank(2), LOCAL)
    view.predictions.predict(rank(1), LOCAL[:3])
    scores, predicted = view.overlap(LOCAL)
    assert dict(scores.scores) == {rank(1): 3}
    assert predicted == {rank(1)}
    assert view.assess([rank(1)], predicted).mode is AnswerMode.APPROXIMATE
    clock.now_ms += 119_999
    assert view.overlap(LOCAL)[0].scores == {rank(1): 3}
    clock.now_ms += 1
    assert view.overlap(LOCAL)[0].scores == {}


@pytest.mark.parametrize("kv_events", [True, False])
def test_without_weight_nothing_is_read_or_predicted(kv_events: bool, clock: Clock) -> None:
    """With an overlap weight of 0, nothing is predicted, no rank has a score, and the mode is `fallback`."""
    view = view_of(clock, kv_overlap_score_weight=0.0, kv_events=kv_events, router_predicted_ttl_s=5.0)
    hold(view, rank(2), LOCAL)
    view.predictions.predict(rank(1), LOCAL)
    assert view.overlap(LOCAL)[0].scores == {}
    assert view.assess([rank(1), rank(2)]).mode is AnswerMode.FALLBACK


def test_a_prediction_is_used_until_its_events_arrive(clock: Clock) -> None:
    """A prediction that is longer than the held prefix makes the answer approximate; with a TTL of 0 none is made."""
    view, off = view_of(clock, router_predicted_ttl_s=2.0), view_of(clock)
    for each in (view, off):
        hold(each, rank(1), LOCAL[:2])
        hold(each, rank(2), LOCAL[:2])
        each.predictions.predict(rank(1), LOCAL)
    scores, predicted = view.overlap(LOCAL)
    assert dict(scores.scores) == {rank(1): 4, rank(2): 2}
    assert predicted == {rank(1)}
    assert view.assess([rank(1), rank(2)], predicted).mode is AnswerMode.APPROXIMATE
    assert view.assess([rank(2)], predicted).mode is AnswerMode.EXACT
    assert dict(off.overlap(LOCAL)[0].scores) == {rank(1): 2, rank(2): 2}
    hold(view, rank(1), LOCAL)
    scores, predicted = view.overlap(LOCAL)
    assert (dict(scores.scores), predicted) == ({rank(1): 4, rank(2): 2}, frozenset())
    assert view.assess([rank(1), rank(2)], predicted).mode is AnswerMode.EXACT
    clock.now_ms += 2_000
    assert dict(view.overlap(np.concatenate([LOCAL, LOCAL]))[0].scores) == {rank(1): 4, rank(2): 2}


def test_a_request_without_a_full_block_predicts_nothing(clock: Clock) -> None:
    """A request without a full block leads to no prediction."""
    view = view_of(clock, kv_events=False)
    view.predictions.predict(rank(1), LOCAL[:0])
    assert view.overlap(LOCAL)[0].scores == {}


def test_a_removed_worker_leaves_no_predictions_or_metrics(clock: Clock) -> None:
    """A removed worker's predictions and metrics are dropped, since a later worker with its id has another cache."""
    view = view_of(clock, kv_events=False)
    for worker_id in (1, 2):
        register(view, worker_id, dp_size=2)
        view.predictions.predict(rank(worker_id, 1), LOCAL)
        report(view, rank(worker_id, 1), num_requests_waiting=worker_id)
    view.fold_worker(b"1", None)
    assert dict(view.overlap(LOCAL)[0].scores) == {rank(2, 1): 4}
    assert view.fleet.engines.fleet().metrics == {rank(2, 1): WorkerMetrics(num_requests_waiting=2)}


def test_fleet_returns_the_current_state(clock: Clock) -> None:
    """`fleet` returns the valid metrics and device classes of now; values that it returned before do not change."""
    view = view_of(clock)
    register(view, 1, device_class="cpu")
    register(view, 2)
    before = view.fleet.engines.fleet()
    assert (before.metrics, before.cpu_workers) == ({}, {1})
    report(view, rank(1), kv_active_blocks=7)
    assert view.fleet.engines.fleet().metrics == {rank(1): WorkerMetrics(kv_active_blocks=7)}
    clock.now_ms += TTL_MS
    register(view, 1)
    assert (view.fleet.engines.fleet().metrics, view.fleet.engines.fleet().cpu_workers, before.metrics) == (
        {},
        frozenset(),
        {},
    )


@pytest.mark.parametrize(("later_ms", "known"), [(TTL_MS - 1, True), (TTL_MS, False), (TTL_MS + 1, False)])
def test_an_engines_report_expires(later_ms: int, known: bool, clock: Clock) -> None:
    """A report is valid for its TTL, counted from its own receipt and not from that of other reports."""
    view = view_of(clock)
    worker = Worker(WorkerId(1), "http://w", "m", BLOCK_SIZE)
    report(view, rank(1), num_requests_waiting=1)
    clock.now_ms += 1_000
    report(view, rank(2), num_requests_waiting=2)
    clock.now_ms += later_ms - 1_000
    assert (rank(1) in view.fleet.engines.fleet().metrics) is known
    assert [each.n_scrapes_failed for each in view.fleet.engines.reports_of(worker)] == ([3] if known else [])
    assert rank(2) in view.fleet.engines.fleet().metrics
    clock.now_ms += TTL_MS
    assert (view.fleet.engines.reports(), view.fleet.engines.fleet().metrics) == ([], {})


def test_totals_that_an_engine_does_not_report_are_those_of_its_registration(clock: Clock) -> None:
    """Totals come from the registration if the engine reports none, whether the report or the registration is first."""
    view = view_of(clock)
    for worker_id in (1, 2):
        report(view, rank(worker_id), gpu_cache_usage_perc=0.25, request_active_slots=3)
        register(view, worker_id, kv_total_blocks=200, max_requests=12)
        report(view, rank(worker_id, 1), kv_active_blocks=5, kv_total_blocks=10, request_total_slots=4)
    for worker_id in (1, 2):
        filled, reported = (view.fleet.engines.fleet().metrics[rank(worker_id, dp_rank)] for dp_rank in (0, 1))
        assert (filled.kv_active_blocks, filled.kv_total_blocks, filled.request_total_slots) == (50, 200, 12)
        assert (reported.kv_active_blocks, reported.kv_total_blocks, reported.request_total_slots) == (5, 10, 4)


def test_reports_that_cannot_be_used_are_refused(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports with a wrong key, without a value, or beyond the limit of ranks are refused; expired ones free space."""
    view = view_of(clock)
    raw = encode_metrics(MetricsReport(rank(1), WorkerMetrics(), TTL_MS, 0))
    for key, value, reason in ((b"2", raw, "wrong_key"), (b"1", b"junk", "not_avro"), (b"1", None, "not_avro")):
        with pytest.raises(BadRecord) as caught:
            view.fold_report(key, value)
        assert caught.value.reason == reason
    assert view.fleet.engines.fleet().metrics == {}
    monkeypatch.setattr(engine_reports, "REPORTS_MAX", 2)
    for worker_id in (1, 2, 1):
        report(view, rank(worker_id))
    with pytest.raises(BadRecord) as caught:
        report(view, rank(3))
    assert caught.value.reason == "over_capacity"
    clock.now_ms += TTL_MS
    report(view, rank(3))
    assert view.fleet.engines.fleet().metrics.keys() == {rank(3)}


def test_eligible_ranks_follow_every_change(clock: Clock) -> None:
    """Eligible ranks are cached, and are listed again when a worker is changed or a rank becomes silent or returns."""
    view = view_of(clock)
    worker_filter = WorkerFilter("m")
    register(view, 1)
    found = view.fleet.eligible(worker_filter)
    assert found == (rank(1),)
    assert view.fleet.eligible(WorkerFilter("m")) is found
    register(view, 2, dp_size=2)
    assert view.fleet.eligible(worker_filter) == (rank(1), rank(2), rank(2, 1))
    silent = Progress(rank(2), Epoch(Incarnation(1), 0), 0, health=Health.EXACT, model="m", block_size=16, silent=True)
    view.fold_index(PROGRESS_KEY.pack(rank(2)), encode_progress(silent))
    assert view.fleet.eligible(worker_filter) == (rank(1), rank(2, 1))
    view.fold_index(PROGRESS_KEY.pack(rank(2)), encode_progress(replace(silent, silent=False, sequence=1)))
    assert view.fleet.eligible(worker_filter) == (rank(1), rank(2), rank(2, 1))
    view.fold_worker(b"2", None)
    assert view.fleet.eligible(worker_filter) == (rank(1),)
    for number in range(1000):  # more filters than are cached
        assert view.fleet.eligible(WorkerFilter("m", excluded=frozenset({WorkerId(number)}))) == (
            () if number == 1 else (rank(1),)
        )
    view.reset()
    assert view.fleet.eligible(worker_filter) == ()


def test_the_renewal_of_a_lease_changes_no_list_of_ranks(clock: Clock) -> None:
    """A renewed lease leaves the cached ranks alone; another holder of the lease and any other change count at once."""
    view = view_of(clock)
    lease = BridgeLease("a", 1, 6000, 1)
    register(view, 1, lease=lease)
    hold(view, rank(1), LOCAL)
    leased = Progress(rank(1), Epoch(Incarnation(1), 0), 1, health=Health.EXACT, model="m", lease_ms=6000)
    view.fold_index(PROGRESS_KEY.pack(rank(1)), encode_progress(leased))
    view.fold_report(PULSES.keys.pack("a"), PULSES.encode(BridgePulse("a", 1)))
    found = view.fleet.eligible(WorkerFilter("m"))
    assert (found, view.assess(found).mode) == ((rank(1),), AnswerMode.EXACT)
    register(view, 1, lease=replace(lease, renewal=2), registered_at_ms=7)
    assert view.fleet.eligible(WorkerFilter("m")) is found
    assert view.fleet.workers[WorkerId(1)].registered_at_ms == 7
    register(view, 1, lease=replace(lease, bridge="b", term=2))
    assert view.fleet.eligible(WorkerFilter("m")) is found
    assert view.assess(found).reason is DegradedReason.BRIDGE_SILENT
    view.fold_report(PULSES.keys.pack("b"), PULSES.encode(BridgePulse("b", 1)))
    assert view.assess(found).mode is AnswerMode.EXACT
    register(view, 1, lease=lease, taints=("a",))
    assert view.fleet.eligible(WorkerFilter("m")) is not found
    register(view, 1, lease=lease, dp_size=2)
    assert view.fleet.eligible(WorkerFilter("m")) == (rank(1), rank(1, 1))
    view.fold_worker(b"1", None)
    assert view.fleet.eligible(WorkerFilter("m")) == ()


def test_adapters_that_the_same_workers_serve_share_one_list_of_ranks(clock: Clock) -> None:
    """Columns belong to a list of ranks, so a fleet with a thousand adapters must not have a thousand of them."""
    view = view_of(clock)
    register(view, 1)
    register(view, 2)
    base = view.fleet.eligible(WorkerFilter("m"))
    assert view.fleet.eligible(WorkerFilter("m", lora_name="a")) is base  # nobody lists adapters
    register(view, 2, lora_names=("b", "c"))
    only_first = view.fleet.eligible(WorkerFilter("m", lora_name="a"))
    assert only_first == (rank(1),)
    assert view.fleet.eligible(WorkerFilter("m", lora_name="x")) is only_first
    only_second = view.fleet.eligible(WorkerFilter("m", lora_name="b"))
    assert only_second == (rank(2),) and view.fleet.eligible(WorkerFilter("m", lora_name="c")) is only_second


def test_the_blocks_that_busy_thresholds_compare_with_follow_reports_and_the_registry(clock: Clock) -> None:
    """The registry's number of blocks counts first; a report counts as long as it is valid."""
    view = view_of(clock)
    register(view, 1)
    register(view, 2, kv_total_blocks=50)

    def blocks() -> list[tuple[int, int]]:
        known = view.fleet.engines.blocks_in_use(view.fleet.eligible(WorkerFilter("m")))
        return list(zip(known.total.tolist(), known.active.tolist(), strict=True))

    assert blocks() == [(0, 0), (50, 0)]
    report(view, rank(1), kv_total_blocks=20, kv_active_blocks=3)
    report(view, rank(2), kv_total_blocks=30, kv_active_blocks=4)
    assert blocks() == [(20, 3), (50, 4)]
    register(view, 1, kv_total_blocks=10)
    register(view, 2)
    assert blocks() == [(10, 3), (30, 4)]
    clock.now_ms += TTL_MS
    assert blocks() == [(10, 0), (0, 0)]
    report(view, rank(2), kv_total_blocks=31, kv_active_blocks=5)
    assert blocks() == [(10, 0), (31, 5)]


def test_an_overlap_that_was_read_while_a_bridge_was_silent_is_not_exact(clock: Clock) -> None:
    """Its bridge is heard again by the time of the answer, which has the reason of before."""
    view = view_of(clock)
    hold(view, rank(1), LOCAL)
    leased = Progress(rank(1), FIRST_EPOCH, 1, health=Health.EXACT, model="m", lease_ms=6000)
    view.fold_index(PROGRESS_KEY.pack(rank(1)), encode_progress(leased))
    basis = view.snapshot()
    assert view.assess([rank(1)], before=basis).mode is AnswerMode.EXACT
    before = basis._replace(bridge_silent=frozenset({WorkerId(1)}))
    assert view.assess([rank(1)], before=before).reason is DegradedReason.BRIDGE_SILENT


def test_the_cache_of_partitions_has_a_limit(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """With more workers than the cache holds, each rank is still judged by its own partition's owner."""
    monkeypatch.setattr(rank_trust, "_WORKERS_CACHED_MAX", 2)
    view = view_of(clock)
    for worker_id in range(1, 6):
        hold(view, rank(worker_id), LOCAL)
    ranks = [rank(worker_id) for worker_id in range(1, 6)]
    for _ in range(2):
        assert view.assess(ranks).mode is AnswerMode.EXACT
    assert len(view.trust._ranks._partition_of) <= 2
    silent = next(n for n in range(6, 100) if partition_of(n, 8) not in {partition_of(n, 8) for n in range(1, 6)})
    progress = Progress(rank(silent), Epoch(Incarnation(1), 0), 0)
    view.fold_index(PROGRESS_KEY.pack(rank(silent)), encode_progress(progress))
    number = partition_of(silent, 8)
    record = encode_partition(PartitionRecord(number, 0, "test", ()))
    view.fold_index(PARTITION_KEY.pack(number), record, live=False)
    assert view.assess([*ranks, rank(silent)]).reason is DegradedReason.OWNER_SILENT
