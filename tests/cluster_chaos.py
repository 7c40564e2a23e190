"""Breaks every process of a fleet on a Kafka of three brokers: `make chaos`, or `python -m tests.cluster_chaos`.

What lives here: the fleet, the faults that a seed draws, and what must hold whenever the fleet is quiet. What must
not: kills of workers at each of their effects (chaos), and misconfigured processes (trust_soak).

The fleet has two workers with routers, two routers, two bridges, a front and three engines whose small caches evict.
Clients book at any router, or ask the front, and free at any router. Each kind of process has its own faults, one after
another, so that processes of several kinds are broken at the same time. A process that was killed is started again, as
its supervisor would. So is one that ends with an error for its operator, as a router does that starts while no
controller answers; one that ends in another way fails the run. A broker may also be slow, and a third worker joins and
leaves, so that partitions move. Messages of one engine arrive twice, in another order, or damaged; another engine is
cut off from its bridge and from the front for a while.

The faults of a round end, the clients stop, an engine whose messages were unreadable clears its cache, and everything
has to agree: the caches of the engines, a fold of the records of `kv-events` by the reference, and the index of every
router, rank by rank, all of them exact. No booking may be left at any router, and new ones are counted the same
everywhere. Every answer whose `chosen_mode` is exact is compared with the journal of the engine.

The same seed gives the same faults; how far each of them reaches depends on the machine.
"""

from __future__ import annotations

import argparse
import math
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from http.client import HTTPException
from pathlib import Path
from typing import NamedTuple
from urllib.error import HTTPError

import numpy as np

from streams.core.routing.selection import RouterMode
from streams.errors import KvStreamsError
from streams.kafka.clients import Record, ensure_topics
from streams.kafka.records import decode_batch
from streams.lab.engines.engine_config import EngineConfig
from streams.lab.engines.journal import CacheHistory
from streams.lab.kafka import LocalCluster
from streams.lab.processes import Child, Children
from streams.lab.stack import (
    Engine,
    RouterProcess,
    Stack,
    get_json,
    held_blocks,
    is_ready,
    known_blocks,
    wait_workers,
)
from streams.process.waiting import wait_for
from streams.settings import Settings
from streams.tables.changelog import read_to_end
from streams.topics import topics
from tests.helpers.api import Api
from tests.helpers.background import repeated
from tests.helpers.broken_cluster import (
    FAILOVER_S,
    SMALL_DISK_NODE,
    breakable_cluster,
    controller,
    filled,
    in_sync,
    killed,
    leader_of,
    paused,
    slowed,
)
from tests.helpers.cluster_clients import Clients, post, prompt_of
from tests.helpers.event_proxy import EventProxy
from tests.helpers.exact_answers import Asked, wrong_answers
from tests.helpers.reference import ReferenceFleet
from tests.helpers.slow_link import slow_link
from tests.helpers.truth import assert_equal

#: Small, so that blocks are evicted all the time.
CACHE = EngineConfig(block_size=16, n_blocks=256)
TIME_SCALE = 100.0
N_ENGINES = 3

#: A round of faults, after which everything has to agree.
ROUND_S = 100.0

#: Pause before a fault of one kind of process, and how long the fault lasts. Partitions move after 6 s of silence, and
#: the controller ends a broker's session after 9 s.
PAUSE_S = (6.0, 25.0)
FAULT_S = (0.5, 14.0)

#: A booking that a router accepted and lost in its death, or whose client could not free it, ends after this time.
BOOKING_TTL_S = 60.0

#: How long a busy machine may take until everything agrees.
QUIET_S = 120.0

#: Bookings that are made and counted at each quiet point.
COUNTED = 20

#: How often a client tries to free a booking at some router.
FREE_TRIES = 5

#: How soon a supervisor notices that a process has ended.
SUPERVISED_EVERY_S = 0.5

#: An engine that was killed may get requests for so long (docs/trust.md), and answers name what it held.
DEATH_NOTICED_S = 2.0

N_CLIENTS = 3
CLIENT_PAUSE_S = 0.05

#: Of so many requests, one goes through the front.
FRONT_EVERY = 5


class Broken(AssertionError):
    """A condition that must hold does not."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault of the schedule.

    kind: of the process, or what a broker does. number: which one of its kind. way: what is done to it. at_s: since
    the round began.
    """

    at_s: float
    kind: str
    number: int
    way: str
    lasts_s: float

    def __str__(self) -> str:
        return f"{self.at_s:6.1f} s: {self.way} {self.kind} {self.number} for {self.lasts_s:.1f} s"


class Kind(NamedTuple):
    """What is broken: how many there are of it, and what is done to them."""

    n: int
    ways: tuple[str, ...] = ("kill", "pause")


#: The engine whose messages pass through a proxy that damages them, and the one that can be cut off.
DAMAGED, CUT = 0, 1

#: What only one of the brokers can suffer, and its name.
FILL, SMALL_DISK = "fill the disk of", "broker"

#: What is broken. All faults of a kind follow each other.
KINDS = {
    "broker": Kind(0, ("kill", "pause", "slow down", FILL)),
    "worker": Kind(2),
    "third worker": Kind(1, ("kill", "stop")),
    "router": Kind(2),
    "bridge": Kind(2),
    "front": Kind(1),
    "engine": Kind(N_ENGINES, ("kill",)),
    "messages": Kind(1, ("damage",)),
    "link": Kind(1, ("cut",)),
}

#: What a broker does that is broken: a broker of a number would mostly be neither.
DUTIES = ("controller", "leader", "coordinator")


def schedule(rng: random.Random, seconds: float) -> list[list[Fault]]:
    """Draw the faults of one round: for each kind of process, those that follow each other."""
    lanes = []
    for name, (n, ways) in KINDS.items():
        lane: list[Fault] = []
        at_s = rng.uniform(0.0, PAUSE_S[1])
        while at_s < seconds:
            way = rng.choice(ways)
            if way == FILL:
                kind, number = SMALL_DISK, SMALL_DISK_NODE
            else:
                kind, number = name if n else rng.choice(DUTIES), rng.randrange(n or 4)
            lane.append(Fault(at_s, kind, number, way, rng.uniform(*FAULT_S)))
            at_s += lane[-1].lasts_s + rng.uniform(*PAUSE_S)
        lanes.append(lane)
    return lanes


class ChaosClients(Clients):
    """Clients that go on when a process dies: they free what they may have booked, and note every answer."""

    def __init__(self, routers: Sequence[str], front: str, engines: dict[int, str], seed: int) -> None:
        super().__init__(routers, engines, seed)
        self._front = front
        self._lock = threading.Lock()
        self.asked: list[Asked] = []
        self.prompts: list[list[int]] = []

    def request(self, rng: random.Random, name: str, prompt: list[int], *, keep: bool) -> None:
        """Send one request, a part of them through the front. All bookings are freed."""
        del keep
        if rng.randrange(FRONT_EVERY) == 0:
            self._through_the_front(prompt)
            return
        booked = rng.randrange(len(self.routers))
        try:
            sent_ns = time.time_ns()
            answer = Api(self.routers[booked]).route(model="m", token_ids=prompt, request_id=name)
            self._note(prompt, sent_ns, booked, answer["worker_id"], answer["chosen_mode"], answer["overlap_blocks"])
            post(f"{self.engines[answer['worker_id']]}/v1/completions", {"prompt": prompt})
        finally:
            self._free(rng, name)

    def _through_the_front(self, prompt: list[int]) -> None:
        sent_ns = time.time_ns()
        headers = post(f"{self._front}/v1/completions", {"prompt": prompt}, {"X-Kvstreams-Details": "1"})
        worker_id = int(headers["X-Kvstreams-Worker"].partition("/")[0])
        overlap = int(headers["X-Kvstreams-Overlap-Blocks"].partition("/")[0])
        self._note(prompt, sent_ns, -1, worker_id, headers["X-Kvstreams-Mode"], overlap)

    def _free(self, rng: random.Random, name: str) -> None:
        for _ in range(FREE_TRIES):
            try:
                if Api(rng.choice(self.routers)).call("DELETE", f"/loads/{name}").status in (200, 202):
                    return
            except (OSError, HTTPException):
                time.sleep(0.2)

    def _note(self, prompt: list[int], sent_ns: int, router: int, worker_id: int, mode: str, overlap: int) -> None:
        with self._lock:
            received_ns = time.time_ns()
            self.asked.append(Asked(len(self.prompts), sent_ns, received_ns, router, worker_id, mode, "", overlap, ""))
            self.prompts.append(prompt)

    def tokens_of(self, number: int) -> bytes:
        """The prompt of a request, u32 LE."""
        return np.array(self.prompts[number], dtype="<u4").tobytes()


class Fold:
    """The records of `kv-events`, applied to the reference in the order of each partition."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._next = dict.fromkeys(range(settings.partitions), 0)
        self.reference = ReferenceFleet()

    def read(self) -> None:
        """Apply the records that were written since the last call."""
        for partition, start in self._next.items():
            source = topics(self._settings).kv_events.name
            self._next[partition] = read_to_end(self._settings, source, partition, start, self._apply)

    def _apply(self, records: list[Record]) -> None:
        for record in records:
            self.reference.apply(decode_batch(record.value))


class Fleet:
    """Every process of the run, and what must hold when it is quiet."""

    def __init__(
        self, stack: Stack, cluster: LocalCluster, seed: int, say: Callable[[str], None], proxies: ExitStack
    ) -> None:
        """proxies: gets those between engines and bridges, which outlive the engines."""
        self.stack = stack
        self.cluster = cluster
        self.settings = stack.settings
        self.counts: Counter[str] = Counter()
        self.deaths_ns: dict[int, list[int]] = {number: [] for number in range(1, N_ENGINES + 1)}
        self._say = say
        self._fold = Fold(stack.settings)
        ensure_topics(self.settings, topics(self.settings).all())
        with ThreadPoolExecutor(4) as threads:
            workers = [threads.submit(stack.worker, f"worker-{n}") for n in range(2)]
            routers = [threads.submit(stack.router, f"router-{n}") for n in range(2)]
        self.workers: list[RouterProcess] = [each.result() for each in workers]
        self.routers: list[RouterProcess] = [each.result() for each in routers]
        self.engines: list[Engine] = stack.engines(
            N_ENGINES, CACHE, "m", TIME_SCALE, own_options={n: self._journaled(n) for n in self.deaths_ns}
        )
        self._messages = proxies.enter_context(closing(EventProxy(self.engines[DAMAGED].events, seed)))
        self._n_cleared = 0  # unreadable messages that a clear has made up for
        self._cut = threading.Event()
        listed = list(self.engines)
        listed[DAMAGED] = replace(listed[DAMAGED], events=self._messages.address)

        def link(address: str) -> str:
            return proxies.enter_context(slow_link(address, math.inf, self._cut))

        cut = listed[CUT]
        listed[CUT] = replace(cut, url=link(cut.url), events=link(cut.events), replay=link(cut.replay))
        self.bridges = [stack.bridge(listed[n::2], f"bridge-{n}") for n in range(2)]
        self._third: RouterProcess | None = None
        self._lock = threading.Lock()
        self._down: set[Child] = set()
        self.front = stack.front("front", [*self.workers, *self.routers])
        urls = [process.url for process in self.serving]
        self.clients = ChaosClients(urls, self.front.url, {each.worker_id: each.url for each in self.engines}, seed)
        for url in urls:
            wait_workers(url, N_ENGINES)

    @property
    def serving(self) -> list[RouterProcess]:
        """Every process that serves a router's API."""
        return [*self.workers, *self.routers]

    @property
    def damaged(self) -> Counter[str]:
        """How many messages of an engine were damaged, by how."""
        return self._messages.counts

    def _journal(self, worker_id: int) -> Path:
        return self.stack.directory / "engines" / f"journal-{worker_id}"

    def _journaled(self, worker_id: int) -> tuple[str, ...]:
        return "--journal", str(self._journal(worker_id))

    # -- faults --------------------------------------------------------------------------------------------------------

    def run_round(self, lanes: Sequence[Sequence[Fault]]) -> None:
        """Break processes of all kinds while clients send requests, then check everything."""
        began_s = time.monotonic()
        with repeated(self._supervise, SUPERVISED_EVERY_S):
            with self.clients.running(N_CLIENTS, CLIENT_PAUSE_S), ThreadPoolExecutor(len(lanes)) as threads:
                for done in [threads.submit(self._run_lane, lane, began_s) for lane in lanes]:
                    done.result()
            self.check()

    def _run_lane(self, lane: Sequence[Fault], began_s: float) -> None:
        for fault in lane:
            time.sleep(max(0.0, began_s + fault.at_s - time.monotonic()))
            with self._broken(fault):
                time.sleep(fault.lasts_s)
            self.counts[f"{fault.way} {fault.kind}"] += 1

    def _broken(self, fault: Fault) -> AbstractContextManager[None]:
        if fault.kind in (*DUTIES, SMALL_DISK):
            return self._broken_broker(fault)
        match fault.kind:
            case "engine":
                return self._restarted_engine(fault.number)
            case "third worker":
                return self._third_worker(fault.way)
            case "messages":
                return self._messages.damaging()
            case "link":
                return self._cut_off()
        children: dict[str, list[Child]] = {
            "worker": [each.child for each in self.workers],
            "router": [each.child for each in self.routers],
            "bridge": self.bridges,
            "front": [self.front.child],
        }
        return (self._killed if fault.way == "kill" else _paused)(children[fault.kind][fault.number])

    @contextmanager
    def _killed(self, child: Child) -> Iterator[None]:
        with self._lock:
            self._down.add(child)
            child.kill()
        yield
        with self._lock:
            child.start()
            self._down.discard(child)

    def _supervise(self) -> None:
        """Start processes again that ended with an error for their operator."""
        with self._lock:
            for child in self._supervisable():
                if child not in self._down and has_error_for_operator(child):
                    self._say(f"{child.name} ended: {child.tail().splitlines()[-1]}")
                    self.counts["ended by itself"] += 1
                    child.start()

    def _supervisable(self) -> list[Child]:
        return [*(process.child for process in self.serving), *self.bridges, self.front.child]

    @contextmanager
    def _broken_broker(self, fault: Fault) -> Iterator[None]:
        # Never two at once: then nothing could be written, and what is acknowledged has to be on two of three.
        wait_for(lambda: in_sync(self.settings), FAILOVER_S, "all replicas to be in sync")
        if fault.way == FILL:
            with filled(self.cluster):
                yield
            return
        names = topics(self.settings)
        node = -1
        while node == -1:
            match fault.kind:
                case "controller":
                    node = controller(self.cluster)
                case "leader":
                    node = leader_of(self.settings, names.kv_events.name, fault.number)
                case _:
                    node = leader_of(self.settings, "__consumer_offsets", fault.number)
        with {"kill": killed, "pause": paused, "slow down": slowed}[fault.way](self.cluster, node):
            yield

    @contextmanager
    def _third_worker(self, way: str) -> Iterator[None]:
        if self._third is None:
            self._third = self.stack.worker("worker-2", router=False)
        else:
            self.stack.restart_worker(self._third)
        yield
        (self._third.child.kill if way == "kill" else self._third.child.stop)()

    @contextmanager
    def _cut_off(self) -> Iterator[None]:
        self._cut.set()
        try:
            yield
        finally:
            self._cut.clear()

    @contextmanager
    def _restarted_engine(self, number: int) -> Iterator[None]:
        engine = self.engines[number]
        engine.child.kill()
        self.deaths_ns[engine.worker_id].append(time.time_ns())
        yield
        self.engines[number] = self.stack.restart_engine(
            engine, CACHE, "m", TIME_SCALE, options=self._journaled(engine.worker_id)
        )

    # -- what must hold ------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Wait until everything agrees. Raises AssertionError or KvStreamsError if it never does."""
        began_s = time.monotonic()
        self._check_running()
        wait_for(lambda: in_sync(self.settings), FAILOVER_S, "all replicas to be in sync")
        for process in self.serving:
            wait_for(lambda url=process.url: is_ready(url), QUIET_S, f"{process.child.name} to be ready")  # type: ignore[misc]
        wait_for(self._clear_if_poisoned, QUIET_S, "an engine to clear its cache")
        for process in self.serving:
            self.check_index(process.url)
        self._check_bookings()
        self._check_running()
        self._check_answers()
        self._say(
            f"all agree after {time.monotonic() - began_s:.1f} s: {len(held_blocks(self.engines))} blocks, "
            f"{self.clients.n_answered} requests answered, {len(self.clients.failures)} failed"
        )

    def _clear_if_poisoned(self) -> bool:
        """Clear the cache of the engine whose events were unreadable, if some were; returns whether that is done.

        What these said is lost for good. Until the engine clears its cache or restarts, its rank is degraded.
        """
        if self.damaged["poisoned"] > self._n_cleared:
            try:
                post(f"{self.engines[DAMAGED].url}/reset_prefix_cache", {})
            except HTTPError:  # a request still uses blocks
                return False
            self._n_cleared = self.damaged["poisoned"]
        return True

    def _check_running(self) -> None:
        ended = [child for child in self._all() if not (child.running or has_error_for_operator(child))]
        if ended:
            raise Broken("\n".join(f"{each.name} ended by itself ({each.exit_code})\n{each.tail()}" for each in ended))

    def _all(self) -> list[Child]:
        return [*self._supervisable(), *(engine.child for engine in self.engines)]

    def check_index(self, url: str) -> None:
        """Wait until a router has the caches of the engines, each rank exact, and the fold of the reference."""

        def settled() -> bool:
            ranks = get_json(f"{url}/state")["ranks"]
            exact = len(ranks) == N_ENGINES and all(rank["health"] == "exact" for rank in ranks)
            return exact and known_blocks(url) == held_blocks(self.engines)

        try:
            wait_for(settled, QUIET_S, f"{url} to have the caches of the engines", 0.5)
        except KvStreamsError as exc:
            known, held = known_blocks(url), held_blocks(self.engines)
            raise Broken(
                f"{exc}: {len(known - held)} blocks too many, {len(held - known)} missing; "
                f"ranks {get_json(f'{url}/state')['ranks']}"
            ) from exc
        self._fold.read()
        assert_equal(url, self._fold.reference, self.settings, (), QUIET_S)

    def _check_bookings(self) -> None:
        self._wait_bookings(0, BOOKING_TTL_S + QUIET_S)
        apis = [Api(process.url) for process in self.serving]
        rng = random.Random(self.clients.seed)
        names = [f"counted-{time.monotonic_ns()}-{n}" for n in range(COUNTED)]
        for name in names:
            rng.choice(apis).route(model="m", token_ids=prompt_of(rng), request_id=name)
        self._wait_bookings(COUNTED, QUIET_S)
        for name in names:
            rng.choice(apis).call("DELETE", f"/loads/{name}").given()
        self._wait_bookings(0, QUIET_S)

    def _wait_bookings(self, n: int, timeout_s: float) -> None:
        ids = [engine.worker_id for engine in self.engines]

        def counted() -> bool:
            loads = [Api(process.url).loads(ids) for process in self.serving]
            return all(each == loads[0] for each in loads) and sum(load[2] for load in loads[0].values()) == n

        try:
            wait_for(counted, timeout_s, f"{n} bookings at every router", 0.25)
        except KvStreamsError as exc:
            raise Broken(f"{exc}: {[Api(process.url).loads(ids) for process in self.serving]}") from exc

    def _had_just_died(self, answer: Asked) -> bool:
        """Whether the engine of an answer had ended so recently that its bridge may not have noticed."""
        ages_s = ((answer.sent_ns - death_ns) / 1e9 for death_ns in self.deaths_ns[answer.worker_id])
        return any(0.0 <= age_s < DEATH_NOTICED_S for age_s in ages_s)

    def _check_answers(self) -> None:
        histories = {
            worker_id: CacheHistory.read(self._journal(worker_id), deaths)
            for worker_id, deaths in self.deaths_ns.items()
        }
        asked = [answer for answer in self.clients.asked if not self._had_just_died(answer)]
        wrong = wrong_answers(asked, self.clients.tokens_of, CACHE.block_size, histories, late_ns(self.settings))
        if wrong:
            lines = (f"{each.asked}: {each.age}; it held {sorted(each.held)}" for each in wrong[:20])
            raise Broken("\n".join([f"{len(wrong)} answers were exact and wrong", *lines]))


def late_ns(settings: Settings) -> int:
    """How old the knowledge of an exact answer may be: a record may need so long to Kafka, and again to a router.

    On a machine that is not overloaded it needs milliseconds. Here thirty processes share two cores.
    """
    return 2 * settings.behind_after_ms * 1_000_000


def has_error_for_operator(child: Child) -> bool:
    """Whether a process ended by itself with one of the messages that tell an operator what to do."""
    return child.exit_code == 1 and any(line.startswith("kvstreams: ") for line in child.tail().splitlines()[-1:])


@contextmanager
def _paused(child: Child) -> Iterator[None]:
    child.signal(signal.SIGSTOP)
    try:
        yield
    finally:
        child.signal(signal.SIGCONT)


def run(stack: Stack, cluster: LocalCluster, seed: int, minutes: float, say: Callable[[str], None]) -> str:
    """Break a fleet for so long; return what was done. Raises AssertionError or KvStreamsError with the difference."""
    rng = random.Random(seed)
    n_rounds = max(1, round(minutes * 60.0 / ROUND_S))
    rounds = [schedule(rng, minutes * 60.0 / n_rounds) for _ in range(n_rounds)]
    with ExitStack() as proxies:
        fleet = Fleet(stack, cluster, seed, say, proxies)
        for number, lanes in enumerate(rounds, 1):
            say(f"round {number} of {n_rounds}")
            for fault in sorted((fault for lane in lanes for fault in lane), key=lambda fault: fault.at_s):
                say(f"  {fault}")
            fleet.run_round(lanes)
        fleet.check_index(stack.router("late").url)
    modes = dict(Counter(answer.chosen_mode for answer in fleet.clients.asked))
    if not modes.get("exact"):
        raise Broken(f"no answer was exact: {modes}")
    faults = ", ".join(f"{name}: {n}" for name, n in sorted(fleet.counts.items()))
    damaged = ", ".join(f"{name}: {n}" for name, n in fleet.damaged.items())
    return f"no difference: {fleet.clients.n_answered} requests, answers by mode {modes}; {faults}; messages {damaged}"


def settings_of(cluster: LocalCluster) -> Settings:
    """Start the brokers, and return settings of a run. Workers do not expire, which the reference does not follow."""
    return Settings(
        **cluster.up().settings,
        topic_prefix="chaos-",
        partitions=4,
        router_mode=RouterMode.KV,
        booking_ttl_s=BOOKING_TTL_S,
        worker_grace_s=30 * 86_400.0,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run once; if anything differs, print the difference, keep the files and return 1."""
    parser = argparse.ArgumentParser(prog="python -m tests.cluster_chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int)
    options = parser.parse_args(arguments)
    seed = random.SystemRandom().randrange(1 << 32) if options.seed is None else options.seed
    directory = Path(tempfile.mkdtemp(prefix="kvstreams-cluster-chaos-"))
    print(f"seed {seed}, {options.minutes:g} minutes, in {directory}", flush=True)
    began_s = time.monotonic()

    def say(line: str) -> None:
        print(f"{time.monotonic() - began_s:5.0f} s  {line}", flush=True)

    try:
        with breakable_cluster(directory / "kafka") as cluster, Children() as children:
            say(run(Stack(settings_of(cluster), directory, children), cluster, seed, options.minutes, say))
    except (AssertionError, KvStreamsError) as exc:
        print(f"{exc}\nrepeat it: python -m tests.cluster_chaos --minutes {options.minutes:g} --seed {seed}")
        print(f"logs and data are kept in {directory}")
        return 1
    shutil.rmtree(directory)
    return 0


if __name__ == "__main__":
    sys.exit(main())
