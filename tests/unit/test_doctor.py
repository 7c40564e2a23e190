"""The doctor's checks as functions: what they find in observations, and how findings are shown."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from streams.cli import cli
from streams.core.ids import WorkerId
from streams.core.loads.bookings import BOOKINGS_BYTES_MAX
from streams.core.workers import BridgeLease, Worker
from streams.doctor.checks import engines, index, kafka, lmcache, processes, registry, routers
from streams.doctor.findings import DoctorReport, Finding, Group, as_json, as_text, listed
from streams.doctor.observations import (
    ClockReading,
    EngineSeen,
    FeedSeen,
    KafkaSeen,
    LogsSeen,
    Observations,
    OwnerRecord,
    PageSeen,
    ProbeSeen,
    RankDigest,
    Registration,
    RouterSeen,
    SocketSeen,
    TopicsSeen,
)
from streams.doctor.run import CHECKS, Order
from streams.lmcache.feeds import KnownCursor, KnownFeed
from streams.prompts.parity import compare
from streams.settings import Settings
from streams.tables.records import BEHIND_UNKNOWN_MS, PartitionRecord, SourceProgress
from streams.topics import topics
from tests.helpers.pages import ROOT, block_of

SETTINGS = Settings(partitions=2)
WORKER = Worker(WorkerId(1), "http://e:1", "m", 16, events_endpoint="tcp://e:2", replay_endpoint="tcp://e:3")
LEASE = BridgeLease("b", 1, 6000, 1)


def logs(**changes: object) -> LogsSeen:
    """Logs that were watched for 7 s, in which nothing was seen but what is given."""
    seen = LogsSeen(7.0, {}, {WORKER.worker_id: Registration(replace(WORKER, lease=LEASE), 1.0)}, {}, {"b": 4})
    return replace(seen, **changes)  # type: ignore[arg-type]


def observed(**changes: object) -> Observations:
    """Observations of these logs."""
    specs = topics(SETTINGS).all()
    kafka_seen = KafkaSeen(None, TopicsSeen(specs, dict.fromkeys(spec.name for spec in specs)), (), logs(**changes))
    return Observations(SETTINGS, kafka_seen)


def owned(owner: str, at_ms: int, behind_ms: int = 0) -> OwnerRecord:
    source = SourceProgress("kv-events", "", 1, 0, 2, behind_ms)
    return OwnerRecord(PartitionRecord(0, at_ms, owner, (source,)), at_ms, live=True)


@pytest.mark.parametrize(
    ("owners", "expected"),
    [
        ("", ""),
        ("aaa", ""),
        ("ab", ""),  # a partition was given to another worker
        ("aabbb", ""),
        ("aba", "ab"),
        ("abab", "ab"),
        ("abca", "abc"),
    ],
)
def test_owners_that_come_back_write_in_turn(owners: str, expected: str) -> None:
    """One change of the owner is a rebalance; an owner that returns after another one is not."""
    assert index.taking_turns([owned(each, 1000 * at) for at, each in enumerate(owners)]) == list(expected)


def test_turns_of_long_ago_do_not_count() -> None:
    """A worker that was restarted twice an hour ago is no fault."""
    records = [owned("a", 0), owned("b", 1000), owned("a", 2000 + index.TURNS_MS)]
    assert index.taking_turns(records) == []


@pytest.mark.parametrize(
    ("behind_ms", "text"), [(0, None), (750, None), (751, "0.8 s"), (BEHIND_UNKNOWN_MS, "an unknown time")]
)
def test_a_lag_is_found_from_the_first_millisecond_that_is_too_much(behind_ms: int, text: str | None) -> None:
    """behind_after_ms itself is tolerated. An owner that has not reached the end lags by an unknown time."""
    found = list(index.check_lag(observed(owners={0: (owned("a", 0, behind_ms),)})))
    assert [each.code for each in found] == ["owner_behind"] * (text is not None)
    assert text is None or text in found[0].problem


@pytest.mark.parametrize(
    ("over", "agreed", "is_found"), [(4, 0, False), (5, 0, True), (5, 245, True), (5, 246, False), (0, 9, False)]
)
def test_engines_that_find_less_than_was_promised_are_a_finding(over: int, agreed: int, is_found: bool) -> None:
    """A few may be races; requests without a report say nothing."""
    counts = {"agreed": agreed, "over": over, "under": 0, "excused": 0, "not_reported": 1000}
    samples = tuple(("kvstreams_overlap_audited_total", {"outcome": name}, float(n)) for name, n in counts.items())
    router = RouterSeen("http://r", page=PageSeen("http://r/metrics", None, samples))
    found = list(routers.check_routers(replace(observed(), routers=(router,))))
    assert [each.code for each in found] == ["overlaps_disagree"] * is_found


@pytest.mark.parametrize(
    ("name", "labels", "number", "code"),
    [
        ("kvstreams_picker_calls_total", {"status": "unavailable"}, 3.0, "picker_asked_early"),
        ("kvstreams_picker_calls_total", {"status": "unavailable"}, 0.0, None),
        ("kvstreams_picker_calls_total", {"status": "ok"}, 3.0, None),
        ("kvstreams_picker_broken_streams_total", {}, 2.0, "gateway_breaks_ext_proc"),
        ("kvstreams_picker_broken_streams_total", {}, 0.0, None),
    ],
)
def test_a_picker_says_how_gateways_ask_it(name: str, labels: dict[str, str], number: float, code: str | None) -> None:
    """Streams that came too early, or that ext_proc does not allow, are findings with their number."""
    page = PageSeen("http://r/metrics", None, ((name, labels, number),))
    found = list(routers.check_routers(replace(observed(), routers=(RouterSeen("http://r", page=page),))))
    assert [each.code for each in found] == [code] * (code is not None)
    assert all(f"{number:.0f}" in each.problem for each in found)


def test_a_rank_that_contradicts_is_approximate_and_not_degraded() -> None:
    """The finding names the worker, and what to do about it."""
    seen = frozenset({("audit_disagrees", 7)})
    (found,) = routers.check_routers(replace(observed(), routers=(RouterSeen("http://r", degraded=(seen, seen)),)))
    assert found.code == "approximate_audit_disagrees"
    assert found.problem == "its answers for workers 7 are approximate: audit_disagrees"


@pytest.mark.parametrize(
    ("after_s", "watched_s", "code"),
    [
        (2.0, 2.1, None),
        (4.0, 4.1, None),
        (4.1, 4.2, "lease_about_to_expire"),
        (None, 3.0, None),  # a short --watch
        (None, 5.0, "lease_about_to_expire"),
        (None, 6.0, "lease_expired"),
    ],
)
def test_a_lease_is_judged_by_its_length(after_s: float | None, watched_s: float, code: str | None) -> None:
    """A bridge renews after a third. Two thirds are late, and a whole lease without a renewal is its end."""
    worker = replace(WORKER, lease=LEASE)
    found = registry.check_leases(
        observed(workers={WORKER.worker_id: Registration(worker, after_s)}, watched_s=watched_s)
    )
    assert [each.code for each in found] == ([code] if code else [])


def test_the_page_shows_a_finding_as_it_is_printed() -> None:
    """The example of docs/doctor.md is what the doctor prints of an engine without a socket for events."""
    worker = replace(WORKER, worker_id=WorkerId(3))
    socket = SocketSeen("tcp://gpu3:5557", "nothing listens there")
    replay = SocketSeen("tcp://gpu3:5558", None)
    seen = EngineSeen(worker, events=(socket,), replays=(replay,))
    found = engines.check_engines(replace(observed(), engines=(seen,)))
    assert as_text(list(found)).split() == block_of("docs/doctor.md", "worker 3:").split()


@pytest.mark.parametrize("after_s", [None, 0.5])
def test_a_lease_that_was_given_up_is_not_called_late(after_s: float | None) -> None:
    """A bridge that was stopped says so with a lease of no length. The finding names the bridge, and what to do."""
    worker = replace(WORKER, lease=replace(LEASE, lease_ms=0, renewal=2))
    (found,) = registry.check_leases(observed(workers={WORKER.worker_id: Registration(worker, after_s)}, watched_s=4.0))
    assert (found.code, found.subject) == ("lease_released", "worker 1")
    assert "its bridge b gave up its lease" in found.problem
    assert found.remedy.startswith("Start the bridge again")


def test_a_bridge_that_renews_but_does_not_pulse_is_behind() -> None:
    """Pulses are withheld while messages of engines wait."""
    (found,) = registry.check_leases(observed(pulses={}))
    assert (found.code, found.subject) == ("bridge_behind", "bridge b")


FEED = KnownFeed("lmcache/node-a", "events", (5,), (KnownCursor("node-a", 7, 3),), {}, 1000, ("m",), LEASE)


def lmcache_codes(*feeds: FeedSeen, names: str | None = "node-a", **changes: object) -> list[str]:
    """The codes of feeds, where one engine of model m names a server."""
    worker = replace(WORKER, lmcache=names, aliases=("short",))
    seen = observed(
        workers={WORKER.worker_id: Registration(worker, 1.0)}, feeds={each.feed.key: each for each in feeds}, **changes
    )
    return [each.code for each in lmcache.check_feeds(seen)]


def test_a_server_of_lmcache_that_an_engine_names_and_a_bridge_passes_on_is_well() -> None:
    """So is a shared backend, which no engine names, and a scope without LMCache."""
    shared = replace(FEED, key="lmcache-shared/s3")
    assert lmcache_codes(FeedSeen(FEED, 1.0), FeedSeen(shared, 1.0)) == []
    assert lmcache_codes(names=None) == []


@pytest.mark.parametrize(
    ("feed", "codes"),
    [
        (FeedSeen(FEED, None), ["lmcache_silent"]),
        (FeedSeen(replace(FEED, lease=None), 1.0), ["lmcache_silent"]),
        (FeedSeen(replace(FEED, lease=replace(LEASE, lease_ms=0)), 1.0), ["lmcache_silent"]),
        (FeedSeen(replace(FEED, cursors=(KnownCursor("node-a", 7, 3, gap_s=9),)), 1.0), ["lmcache_incomplete"]),
        (FeedSeen(replace(FEED, counts={"no_tokens": 49}, stored=50), 1.0), []),
        (FeedSeen(replace(FEED, counts={"no_tokens": 50}, stored=1001), 1.0), []),
        (FeedSeen(replace(FEED, counts={"no_tokens": 50, "chunk_size": 90}), 1.0), ["lmcache_left_out"] * 2),
        (FeedSeen(replace(FEED, counts={"of_a_later_version": 900}), 1.0), []),
        (FeedSeen(replace(FEED, models=("m", "/models/m")), 1.0), ["lmcache_other_model"]),
        (FeedSeen(replace(FEED, models=()), 1.0), []),
    ],
)
def test_what_is_wrong_with_a_feed_of_lmcache_is_named(feed: FeedSeen, codes: list[str]) -> None:
    """One finding for each fault; a few objects that are left out are none."""
    assert lmcache_codes(feed) == codes


def test_a_name_that_engines_and_servers_do_not_share_is_found_on_both_sides() -> None:
    """The finding about the server suggests the name that is nearly its own."""
    worker = replace(WORKER, lmcache="node_a")
    seen = observed(workers={WORKER.worker_id: Registration(worker, 1.0)}, feeds={FEED.key: FeedSeen(FEED, 1.0)})
    unknown, unused = lmcache.check_feeds(seen)
    assert (unknown.code, unused.code) == ("lmcache_unknown_server", "lmcache_unused")
    assert "known: node-a" in unknown.problem
    assert "instead of lmcache=node_a" in unused.remedy


@pytest.mark.parametrize("name", ["/models/m", "/models/m/", "short", "else"])
def test_a_model_that_lmcache_names_otherwise_is_named_with_the_setting(name: str) -> None:
    """The setting is complete if the name ends like ours, or is an alias of ours."""
    seen = observed(
        workers={
            WORKER.worker_id: Registration(replace(WORKER, lmcache="node-a", aliases=("short",)), 1.0),
            WorkerId(2): Registration(replace(WORKER, worker_id=WorkerId(2), model="a"), 1.0),
        },
        feeds={FEED.key: FeedSeen(replace(FEED, models=(name,)), 1.0)},
    )
    (found,) = lmcache.check_feeds(seen)
    assert f"lmcache_models of the bridge to {name}={'a' if name == 'else' else 'm'}" in found.remedy


def test_engines_that_could_use_the_events_of_lmcache_are_named() -> None:
    """Their own metrics show it, or the blocks of connectors that their bridge leaves out."""
    name = "kvstreams_bridge_not_indexed_total"
    page = PageSeen("http://b/metrics", None, ((name, {"reason": "connector"}, 3.0), (name, {"reason": "tail"}, 9.0)))
    named = EngineSeen(replace(WORKER, lmcache="node-a"), has_lmcache=True)
    seen = replace(observed(), engines=(EngineSeen(WORKER, has_lmcache=True), named), pages=(page,))
    found = list(lmcache.check_connectors(seen))
    assert [(each.code, each.subject) for each in found] == [
        ("lmcache_not_named", "worker 1"),
        ("connector_chunks", "http://b/metrics"),
    ]
    assert list(lmcache.check_connectors(replace(observed(), engines=(named,)))) == []


@pytest.mark.parametrize(
    ("least_s", "most_s", "text"),
    [
        (-0.5, 0.6, None),
        (-3.9, -2.9, None),
        (-3.9, -3.1, "3 s behind"),
        (2.9, 3.9, None),
        (3600.0, 3601.0, "3600 s ahead of"),
    ],
)
def test_a_clock_is_off_if_every_possible_reading_is(least_s: float, most_s: float, text: str | None) -> None:
    """A Date header is exact to a second only, so its nearest end counts."""
    found = list(processes.check_clocks(observed(clocks={"worker a": ClockReading(least_s, most_s)})))
    assert [text in each.problem for each in found if text] == [True] * (text is not None)
    assert bool(found) == (text is not None)


def test_ranks_disagree_only_if_they_do_in_every_round_after_the_same_batch() -> None:
    """A record that is on its way makes routers differ for a moment."""
    a, b, later = RankDigest((1, 0, 5), "aa"), RankDigest((1, 0, 5), "bb"), RankDigest((1, 0, 6), "cc")
    same, differs, ahead = {(1, 0): a}, {(1, 0): b}, {(1, 0): later}

    def disagree(*rounds: tuple[dict[tuple[int, int], RankDigest], dict[tuple[int, int], RankDigest]]) -> object:
        one, other = (RouterSeen("u", digests=tuple(each)) for each in zip(*rounds, strict=True))
        return routers.disagreements(one, other)

    assert disagree((same, differs), (same, differs)) == [(1, 0)]
    assert disagree((same, differs), (same, same)) == []
    assert disagree((same, ahead), (same, ahead)) == []


def test_engines_that_make_other_tokens_are_named_once_for_all_routers() -> None:
    """Each router shows the same record; engines with the same difference are one finding."""
    same, other = ("chat", 27), ("completion", 0)
    seen = Observations(
        SETTINGS,
        None,
        (),
        (RouterSeen("a", differing={1: same, 2: same}), RouterSeen("b", differing={2: same, 3: other})),
    )
    found = list(routers.check_routers(seen))
    assert [(each.code, each.subject) for each in found] == [
        ("renders_differ", "workers 1, 2"),
        ("renders_differ", "worker 3"),
    ]
    compared = EngineSeen(replace(WORKER, worker_id=WorkerId(3)), tokens={})
    assert len(list(routers.check_routers(replace(seen, engines=(compared,))))) == 1
    assert "of a chat, from token 27 on" in found[0].problem


def test_a_model_of_tokenizer_that_no_engine_serves_is_named() -> None:
    """Otherwise a misspelt name would look as if all were well. Without any engine there is a finding about that."""
    seen = replace(observed(), engines=(EngineSeen(WORKER),), tokenizer_models=("m", "mm"))
    (found,) = engines.check_tokenizers(seen)
    assert (found.code, found.subject) == ("model_not_served", "model mm")
    assert list(engines.check_tokenizers(replace(seen, engines=()))) == []


@pytest.mark.parametrize(
    "arguments",
    [
        ["doctor", "--router", "localhost:8000"],
        ["doctor", "--metrics", "http://"],
        ["doctor", "--metrics", "http://h:99999"],
        ["top", "localhost:8000"],
        ["doctor", "--kafka", "127.0.0.1:9", "--tokenizer", "m=/nowhere"],
    ],
)
def test_a_wrong_option_ends_the_run_before_anything_is_read(arguments: list[str]) -> None:
    """The status is 2, as for every command line that is wrong, and the message says which value it is."""
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 2
    assert arguments[-1].removeprefix("m=") in result.output


def test_a_broken_engine_of_several_ranks_is_named_with_each_address() -> None:
    """Rank n listens n ports above, and each socket that fails is a finding."""
    ok, bad = SocketSeen("tcp://e:2", None, 1), SocketSeen("tcp://e:3", "nothing listens there")
    seen = replace(observed(), engines=(EngineSeen(WORKER, events=(ok, bad), replays=(ok, ok)),))
    (found,) = engines.check_engines(seen)
    assert found.code == "events_unreachable"
    assert "tcp://e:3: nothing listens there" in found.problem


@pytest.mark.parametrize("size", [16, 8, 1])
def test_pages_that_divide_the_scopes_block_are_no_fault(size: int) -> None:
    """SGLang's pages and a context-parallel device's share are smaller than a block."""
    socket = (SocketSeen("a", None),)
    seen = replace(observed(), engines=(EngineSeen(WORKER, block_size=size, events=socket, replays=socket),))
    assert list(engines.check_engines(seen)) == []


def test_a_probe_that_the_engine_hashes_otherwise_does_not_blame_the_routers() -> None:
    """They cannot find blocks whose events have other hashes."""
    probe = ProbeSeen(None, n_blocks=2, n_stored=1, n_events=1, matched={"http://r": 0})
    (found,) = engines.check_probe(replace(observed(), engines=(EngineSeen(WORKER, probe=probe),)))
    assert (found.code, found.subject) == ("hash_disagreement", "worker 1")
    (found,) = engines.check_probe(replace(observed(), engines=(EngineSeen(WORKER, probe=replace(probe, n_stored=2)),)))
    assert (found.code, found.subject) == ("hash_disagreement", "router http://r")


def test_partitions_without_a_leader_or_with_replicas_out_of_sync_are_named() -> None:
    """Both come from the description of the topics, and name the partitions."""
    seen = TopicsSeen((), {}, without_leader=("kv-events [3]",), out_of_sync=("workers [0]",))
    found = list(kafka.check_kafka(Observations(SETTINGS, KafkaSeen(topics=seen))))
    assert [(each.code, each.subject) for each in found] == [
        ("no_leader", "kv-events [3]"),
        ("replicas_out_of_sync", "workers [0]"),
    ]


def test_engines_of_a_model_with_different_versions_are_found() -> None:
    """Different models may have different engines."""
    other = replace(WORKER, worker_id=WorkerId(2))
    seen = [EngineSeen(WORKER, version="1"), EngineSeen(other, version="2")]
    (found,) = processes.check_versions(replace(observed(), engines=tuple(seen)))
    assert (found.code, found.subject) == ("engine_versions_differ", "model m")
    seen[1] = EngineSeen(replace(other, model="n"), version="2")
    assert list(processes.check_versions(replace(observed(), engines=tuple(seen)))) == []


def test_a_metrics_page_that_cannot_be_read_is_named() -> None:
    """The doctor says so, since it cannot see the memory of that process."""
    (found,) = processes.check_memory(replace(observed(), pages=(PageSeen("http://b:9100/metrics", "refused"),)))
    assert found.code == "metrics_unreachable"


@pytest.mark.parametrize(("share", "found"), [(0.9, []), (0.91, ["bookings_near_limit"])])
def test_bookings_near_their_limit_are_found_before_any_is_dropped(share: float, found: list[str]) -> None:
    """A router drops its oldest bookings at the limit, so the doctor warns before."""
    page = PageSeen("u", None, (("kvstreams_bookings_bytes", {}, share * BOOKINGS_BYTES_MAX),))
    assert [each.code for each in processes.check_memory(replace(observed(), pages=(page,)))] == found


@pytest.mark.parametrize(
    ("ours", "theirs", "at"),
    [([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1, 2], [1], 1), ([1], [1, 2], 1), ([], [], None), ([1], [0, 1], 0)],
)
def test_tokens_differ_from_the_first_one_on_that_does(ours: list[int], theirs: list[int], at: int | None) -> None:
    """A prompt that ends earlier differs at its end."""
    found = compare(ours, theirs)
    assert (None if found is None else found.position) == at
    assert found is None or str(found).startswith(f"{len(theirs)} tokens instead of {len(ours)}")


def test_findings_are_text_for_people_and_json_for_scripts() -> None:
    """Nothing is printed without findings; JSON has every field, and the versions."""
    finding = Finding(Group.TOPICS, "topic_missing", "topic a", "it is missing", "Create it")
    assert as_text([]) == ""
    assert as_text([finding]) == "topic a: it is missing\n    Create it\n"
    assert as_json(DoctorReport((finding,), (Group.TOPICS,), {"doctor": "1"})) == {
        "findings": [
            {
                "group": "topics",
                "code": "topic_missing",
                "subject": "topic a",
                "problem": "it is missing",
                "remedy": "Create it",
            }
        ],
        "groups": ["topics"],
        "versions": {"doctor": "1"},
    }
    assert listed(range(3)) == "0, 1, 2"
    assert listed(range(9)) == "0, 1, 2, 3, 4, 5, 6, 7 and 1 more"


def test_every_group_has_a_check_and_a_row_in_the_docs_and_most_can_be_skipped() -> None:
    """docs/doctor.md has every group and every code of the checks; the probe is left out unless it is asked for."""
    page = (ROOT / "docs/doctor.md").read_text()
    rows = dict(re.findall(r"^\| `([\w-]+)` \| .* \| (`.*`.*) \|$", page, re.MULTILINE))
    assert {group for group, _ in CHECKS} == set(Group)
    assert set(Group) <= rows.keys()
    shown = set(re.findall(r"`(\w+)`", " ".join(rows.values())))
    folder = Path(kafka.__file__).parent
    made = set(re.findall(r"Group\.\w+,\s+\"(\w+)\"", "".join(file.read_text() for file in folder.glob("*.py"))))
    assert len(made) > 30
    assert made <= shown, made - shown
    assert set(Group) - set(Order().groups) == {Group.PROBE, Group.TOKENIZERS}
    assert set(Order(probe=True, tokenizers={"": "path"}).groups) == set(Group)
    (skip,) = (param for param in cli.commands["doctor"].params if param.name == "skip")
    assert isinstance(skip.type, click.Choice)
    assert set(skip.type.choices) == set(Group) - {Group.PROBE, Group.TOKENIZERS}


def test_a_wrong_option_and_a_wrong_setting_are_the_status_of_a_doctor_that_could_not_run() -> None:
    """Scripts can tell a broken fleet, which is 1, from a broken command, which is 2."""
    assert CliRunner().invoke(cli, ["doctor", "--skip", "nothing"]).exit_code == 2
    assert CliRunner().invoke(cli, ["doctor", "--partitions", "many"]).exit_code == 2
