"""Rebuilding what a router knew at a moment, with the router's own readers and folds.

What lives here: making a router that reads the topics up to a cut, and the progress of that. What must not: where a
replay ends (cuts), and what is printed about the result (summary).

State: one router, which is never started: it reads what it is asked to read, publishes nothing and books nothing.
"""

from __future__ import annotations

import time
from dataclasses import replace

from streams.errors import OffsetLost
from streams.kafka.clients import describe_topics
from streams.kafka.log_offsets import Place
from streams.kafka.topic_watch import TopicReading
from streams.process.progress import Step
from streams.replay.cuts import Cut, offsets_at, places_of
from streams.router_api.deciding.router import Router
from streams.router_api.knowledge.record_clock import RecordClock
from streams.settings import RouterServerSettings
from streams.topics import topics


class Replay:
    """A router's knowledge, rebuilt up to a cut. `advance` moves it on to a later one.

    settings: as given. router: with the knowledge. cut: what it includes. seconds: how long the reading took, so far.
    """

    def __init__(self, settings: RouterServerSettings) -> None:
        """Raises SettingsError."""
        self.settings = settings
        self._clock = RecordClock(0)
        # What is only looked at must not appear in the log of decisions. All models are kept, since records that are
        # skipped would have to be read again for a worker that changes to one of the router's models.
        self.router = Router(replace(settings, decision_log=False, models=""), self._clock)
        self.cut = Cut(0, {}, {})
        self.seconds = 0.0

    @property
    def places(self) -> list[Place]:
        """Every partition that is read."""
        return places_of(self.router.feeds.topics)

    @property
    def n_records(self) -> int:
        """Records folded so far."""
        return self.router.feeds.n_records

    def advance(self, cut: Cut, step: Step | None = None) -> None:
        """Read on to a cut. If its moment is not known, it is that of the newest record. step: shows the progress.

        Raises KvStreamsError if a topic is missing, was truncated or recreated, or cannot be read.
        """
        began_s, feeds = time.monotonic(), self.router.feeds
        begin = {place: max(cut.begins.get(place, 0), feeds.read_to(*place)) for place in cut.ends}
        n_left = sum(max(0, end - begin[place]) for place, end in cut.ends.items())
        n_before = self.n_records

        def show() -> None:
            if step is None:
                return
            n_done = sum(max(0, min(feeds.read_to(*place), end) - begin[place]) for place, end in cut.ends.items())
            step.update(n_done, _speed(n_done, n_left, self.n_records - n_before, time.monotonic() - began_s), n_left)

        self._clock.moment_ms = cut.moment_ms
        feeds.read_until(cut.ends, show)
        show()
        if not cut.moment_ms:
            cut = replace(cut, moment_ms=self._clock.latest_ms)
            self._clock.moment_ms = cut.moment_ms
        self.cut = cut
        self._note_ends()
        self.router.view.fleet.expire_avoidances()
        self.seconds += time.monotonic() - began_s

    def _note_ends(self) -> None:
        """Let answers be trusted as much as a router trusted them at this moment.

        A router asks where the sources end, and trusts what it has folded if that includes everything that was appended
        `behind_after_ms` ago.
        """
        settings, known, cut = self.settings, topics(self.settings), self.cut
        if not settings.reads_index:
            return
        states = describe_topics(settings, known.all())
        ids = {name: state.topic_id for name, state in states.items() if state is not None}
        asked_ms = cut.moment_ms - settings.behind_after_ms
        ends = offsets_at(settings, dict.fromkeys(places_of((known.kv_events, known.cxl_events)), asked_ms))
        pooled = places_of((known.cxl_changelog,))
        ends |= {place: cut.ends[place] for place in pooled if place in cut.ends}
        missing = tuple(name for name, state in states.items() if state is None)
        self.router.readiness.note_reading(TopicReading(asked_ms, ids, missing, ends))
        if self.router.feeds.begins_again:
            raise OffsetLost("a topic was recreated during the replay", remedy="Start again")


def _speed(n_done: int, n_left: int, n_records: int, seconds: float) -> str:
    """The rate of reading, and the time that is left if it stays the same."""
    if not n_done or seconds <= 0.0:
        return ""
    left_s = seconds * (n_left - n_done) / n_done
    return f"{n_records / seconds:,.0f} records/s, {left_s:,.0f} s left"
