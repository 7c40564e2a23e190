"""Kills workers at every effect while 100,000 records flow: `make chaos`, or `python -m tests.chaos --events 100000`.

What lives here: starting and killing workers on one real Kafka, and what must hold afterwards. What must not: the
contents of a history (tests.helpers.reference), how a difference is traced (tests.helpers.truth).

Each worker is armed with one of the seven numbered effects, and is killed at it while records flow. The next worker
starts warm on the same RocksDB, with that RocksDB deleted, or as another worker with its own folder. After every kill,
the group's committed offsets are at most those of the partition records, and the latter never fall. Now and then, and
at the end, every router holds exactly what the reference holds: one that has run since the start, one that starts late,
and one inside the worker.
"""

from __future__ import annotations

import argparse
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from confluent_kafka import Consumer, TopicPartition

from streams.errors import KvStreamsError
from streams.kafka.clients import Record, ensure_topics
from streams.kafka.log_offsets import log_end
from streams.lab.kafka.broker import LocalKafka, LocalKafkaConfig
from streams.lab.processes import Children
from streams.lab.stack import RouterProcess, Stack
from streams.process.faults import FAULT_ENV
from streams.process.waiting import wait_for
from streams.settings import Settings
from streams.tables.changelog import read_to_end
from streams.tables.records import PARTITION_KEY, decode_partition
from streams.topics import topics
from tests.helpers.support import dead_letters
from tests.helpers.truth import Engines, assert_equal

EFFECTS = range(1, 8)

#: Kills in a whole run: each effect before each way to start again, three times.
KILLS = 63

#: Kills between two comparisons of every router with the reference.
COMPARE_EVERY = 9

#: How long a worker on a busy machine may take to start, apply the waiting records and reach its effect.
KILL_TIMEOUT_S = 300.0
EQUAL_TIMEOUT_S = 300.0

#: Records published again after a kill, as by an engine that did not see them acknowledged.
AGAIN = 20

#: Limits of records per transaction, for workers in turn: many small ones, and the usual ones.
BATCHES = (5, 50, 500)

#: Transactions of a worker that is killed at one of the last three effects. Each partition writes one when it opens.
TRANSACTIONS = (4, 24)

#: Folders that workers use in turn: a worker that returns to one finds an old RocksDB.
FOLDERS = 3

_READ_TIMEOUT_S = 20.0


class Broken(AssertionError):
    """A condition that must hold does not."""


@dataclass(frozen=True)
class Way:
    """How a worker starts after another one was killed."""

    name: str
    bare: bool = False  # its RocksDB is deleted
    elsewhere: bool = False  # it is another worker


WAYS = (Way("warm"), Way("bare", bare=True), Way("elsewhere", elsewhere=True))


class Chaos:
    """One run: engines, workers that are killed, and routers that must agree with the reference."""

    def __init__(self, stack: Stack, seed: int, n_events: int, say: Callable[[str], None] = print) -> None:
        """n_events: records of the history, not counting those that are published again."""
        self._stack = stack
        self._settings = stack.settings
        self._say = say
        self._rng = random.Random(seed)
        self._n_events = n_events
        self._engines = Engines(stack.settings, seed, n_events)
        self._folder = 0
        self._along: RouterProcess | None = None
        self._read_to = dict.fromkeys(range(self._settings.partitions), 0)
        self.applied = dict.fromkeys(range(self._settings.partitions), -1)
        self.transactions = 0
        self.kills: Counter[int] = Counter()

    def run(self, kills: int = KILLS, compare_every: int = COMPARE_EVERY) -> None:
        """Run everything. Raises Broken, AssertionError or KvStreamsError with the difference."""
        ensure_topics(self._settings, topics(self._settings).all())
        self._along = self._stack.router("along")
        order: list[tuple[int, Way]] = []
        while len(order) < kills:  # every effect before every way to start
            ways = [WAYS[(effect + len(order) // len(EFFECTS)) % len(WAYS)] for effect in EFFECTS]
            order += self._rng.sample(list(zip(EFFECTS, ways, strict=True)), len(EFFECTS))
        left = self._n_events
        for number, (effect, way) in enumerate(order[:kills], 1):
            n = left // (kills - number + 1)
            left -= n
            self._run_and_kill(number, effect, way, n)
            if number % compare_every == 0 and number < kills:
                self._compare()
        self._compare()
        if dead_letters(self._settings):
            raise Broken(f"{len(dead_letters(self._settings))} records became dead letters")

    @property
    def n_published(self) -> int:
        """Number of published records, including those that were published again."""
        return self._engines.n_published

    def _run_and_kill(self, number: int, effect: int, way: Way, n: int) -> None:
        began = time.monotonic()
        # One part is published before the worker starts, the other while it opens and works.
        self._engines.publish(n // 2)
        waiting = self.n_published - sum(self.applied.values())
        # The first four effects happen once per record, the others once per transaction.
        times = self._rng.randint(1, max(1, waiting // 2)) if effect < 5 else self._rng.randint(*TRANSACTIONS)
        batch = BATCHES[number % len(BATCHES)]
        armed = {FAULT_ENV: f"{effect}:{times}", "KVSTREAMS_BATCH_RECORDS_MAX": str(batch)}
        worker = self._start(way, router=False, env=armed)
        for part in range(10):
            self._engines.publish((n - n // 2) * (part + 1) // 10 - (n - n // 2) * part // 10)
        wait_for(lambda: not worker.child.running, KILL_TIMEOUT_S, f"the fault {effect}:{times}")
        if worker.child.exit_code != -signal.SIGKILL:
            raise Broken(f"{worker.child.name} ended by itself and not at {effect}:{times}; its log has the reason")
        self._engines.publish_again(AGAIN)
        self.kills[effect] += 1
        self._check_offsets()
        self._say(
            f"kill {number}: effect {effect}, occurrence {times}, started {way.name} as {worker.child.name}, "
            f"{batch} per batch; {self.n_published} published, "
            f"{sum(self.applied.values()) + len(self.applied)} applied, {time.monotonic() - began:.1f} s"
        )

    def _start(self, way: Way, *, router: bool, env: dict[str, str] | None = None) -> RouterProcess:
        if way.elsewhere:
            self._folder = (self._folder + 1) % FOLDERS
        name = f"worker-{self._folder}"
        if way.bare:
            shutil.rmtree(self._data_dir(name), ignore_errors=True)
        return self._stack.worker(name, router=router, env=env)

    def _compare(self) -> None:
        """Compare every router with the reference, then kill the worker."""
        began = time.monotonic()
        worker = self._start(self._rng.choice(WAYS), router=True)
        late = self._stack.router("late")
        assert self._along is not None
        stopped = [self._data_dir(f"worker-{n}") for n in range(FOLDERS) if f"worker-{n}" != worker.child.name]
        try:
            for router in (self._along, worker, late):
                assert_equal(router.url, self._engines.reference, None, (), EQUAL_TIMEOUT_S)
        except AssertionError:
            worker.child.kill()
            stopped.append(self._data_dir(worker.child.name))
            for router in (self._along, late):
                assert_equal(router.url, self._engines.reference, self._settings, stopped, 1.0)
            raise
        late.child.stop()
        wait_for(self._all_applied, EQUAL_TIMEOUT_S, "the partition records to show that everything is applied")
        worker.child.kill()
        self._check_offsets()
        n_facts = len(self._engines.reference.members())
        self._say(f"equal: {n_facts} blocks in 3 routers, {self.n_published} records, {time.monotonic() - began:.1f} s")

    def _all_applied(self) -> bool:
        self._read_partition_records()
        source = topics(self._settings).kv_events.name
        ends = {partition: log_end(self._settings, source, partition) for partition in self.applied}
        return all(applied + 1 == ends[partition] for partition, applied in self.applied.items())

    def _check_offsets(self) -> None:
        """Check that committed offsets were applied before; read in this order, since the worker may be running."""
        committed = self._committed()
        self._read_partition_records()
        for partition, offset in committed.items():
            if offset > self.applied[partition] + 1:
                raise Broken(f"partition {partition}: committed {offset}, applied only up to {self.applied[partition]}")

    def _committed(self) -> dict[int, int]:
        consumer = Consumer({"bootstrap.servers": self._settings.kafka, "group.id": self._settings.app_id})
        try:
            source = topics(self._settings).kv_events.name
            found = consumer.committed([TopicPartition(source, n) for n in self.applied], timeout=_READ_TIMEOUT_S)
            return {each.partition: each.offset for each in found}
        finally:
            consumer.close()

    def _read_partition_records(self) -> None:
        def take(records: list[Record]) -> None:
            for record in records:
                if not record.key.startswith(PARTITION_KEY.prefix) or record.value is None:
                    continue
                self.transactions += 1
                applied = decode_partition(record.key, record.value).sources[0].applied_offset
                if applied < self.applied[record.partition]:
                    before = self.applied[record.partition]
                    raise Broken(
                        f"partition {record.partition}: applied up to {before}, then {applied} at {record.offset}"
                    )
                self.applied[record.partition] = applied

        changelog = topics(self._settings).index_changelog.name
        for partition, start in self._read_to.items():
            self._read_to[partition] = read_to_end(self._settings, changelog, partition, start, take)

    def _data_dir(self, name: str) -> Path:
        return self._stack.directory / "state" / name


def settings_of(kafka: str) -> Settings:
    """Return settings of a run: short sessions, and no expiry of workers, which would depend on the run's duration."""
    return Settings(
        kafka=kafka, topic_prefix="chaos-", partitions=4, session_timeout_s=3.0, worker_grace_s=30 * 86_400.0
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run once; if anything differs, print the difference, keep the files and return 1."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--events", type=int, default=100_000)
    parser.add_argument("--kills", type=int, default=KILLS)
    parser.add_argument("--seed", type=int)
    options = parser.parse_args(arguments)
    if options.kills < 1 or options.events < 10 * options.kills:
        parser.error("at least one kill is needed, and ten events per kill")
    seed = random.SystemRandom().randrange(1 << 32) if options.seed is None else options.seed
    directory = Path(tempfile.mkdtemp(prefix="kvstreams-chaos-"))
    print(f"seed {seed}, {options.events} events, {options.kills} kills, in {directory}", flush=True)
    broker = LocalKafka(LocalKafkaConfig(directory / "kafka", {"group.min.session.timeout.ms": "1000"}))
    began = time.monotonic()
    try:
        settings = settings_of(broker.up().bootstrap)
        with Children() as children:
            chaos = Chaos(
                Stack(settings, directory, children), seed, options.events, lambda line: print(line, flush=True)
            )
            chaos.run(options.kills)
    except (AssertionError, KvStreamsError) as exc:
        print(f"{exc}\nrepeat it: python -m tests.chaos --events {options.events} --seed {seed}")
        print(f"logs and data are kept in {directory}")
        return 1
    finally:
        broker.down()
    shutil.rmtree(directory)
    effects = ", ".join(f"{effect}: {chaos.kills[effect]}" for effect in EFFECTS)
    print(
        f"no difference: {chaos.n_published} records, {chaos.transactions} transactions, kills by effect {effects}; "
        f"{time.monotonic() - began:.0f} s, seed {seed}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
