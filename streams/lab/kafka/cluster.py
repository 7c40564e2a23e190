"""A Kafka of several brokers on one machine: started, found again and stopped as a whole.

What lives here: the ports that all brokers have to know, and the order of their starts and stops. What must not: a
broker's process and properties (broker). All state is in the directory:

    cluster.json       cluster id, and the ports of all brokers
    lock               held by `up` and `down`
    broker-1/ ...      the directory of each broker, as of one that is alone (broker)
    secure/            certificates and passwords of a secure Kafka, which all brokers share (secure_files)

Each broker is a controller as well. Topics have three replicas and `min.insync.replicas` 2, so that one broker may be
lost.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from streams.errors import LocalKafkaError
from streams.lab.kafka.broker import (
    DEFAULT_STOP_TIMEOUT_S,
    LOCK_MARGIN_S,
    REPLICAS_MAX,
    SECURE_FOLDER,
    KafkaState,
    Launched,
    LocalKafka,
    LocalKafkaConfig,
    Member,
    becomes_free,
    disk_errors,
    new_cluster_id,
)
from streams.lab.kafka.jars import Progress, ensure_jars, file_lock
from streams.lab.kafka.java import find_java
from streams.lab.kafka.ports import free_ports
from streams.lab.kafka.secure_files import SecureFiles, write_private

#: How long brokers get for handing over their partitions. The last ones find no controller any more, and would wait for
#: minutes: then they are killed, which loses nothing, since their logs are read again.
HANDOVER_S = 5.0


@dataclass(frozen=True, slots=True)
class _Layout:
    """cluster.json. Ports are those of broker 1, 2 and so on."""

    cluster_id: str
    broker_ports: tuple[int, ...]
    controller_ports: tuple[int, ...]

    @property
    def bootstrap(self) -> str:
        return ",".join(f"127.0.0.1:{port}" for port in self.broker_ports)


class LocalCluster:
    """The brokers of one directory. Any number of objects and processes may use the same directory."""

    def __init__(
        self, config: LocalKafkaConfig, n_brokers: int, make: Callable[[LocalKafkaConfig], LocalKafka] = LocalKafka
    ) -> None:
        """config: of each broker, with the directory of the whole. make: a test makes brokers that it can break."""
        self.config = config
        self.n_brokers = n_brokers
        self.directory = config.directory.expanduser().resolve()
        self._make = make

    def up(self, progress: Progress | None = None) -> KafkaState:
        """Start the brokers that do not run, and return once all of them answer.

        Raises LocalKafkaError, after ending every broker that this call started.
        """
        if (self.directory / "state.json").exists():
            raise LocalKafkaError(
                f"{self.directory} contains the data of a Kafka of one broker", remedy="Choose another directory"
            )
        self._make(self.config).check()
        java, jars = find_java(), ensure_jars(progress)
        notes: list[str] = []
        launched: list[tuple[LocalKafka, Launched]] = []
        with disk_errors(self.directory), self._locked():
            layout = self._usable_layout(notes)
            if self.config.secure:
                files = SecureFiles(self.directory / SECURE_FOLDER)
                files.make()
                files.write_settings(layout.bootstrap)
            brokers = self._brokers(layout)
            try:
                for broker in brokers:
                    broker.directory.mkdir(exist_ok=True)
                    if broker.status() is None:
                        launched.append((broker, broker.launch(java, jars)))
                for broker, process in launched:
                    broker.await_launched(process)
            except BaseException:
                for broker, process in launched:
                    broker.abandon(process)
                raise
            states = [broker.up() for broker in brokers]
        return self._state(layout, states, reused=not launched, notes=notes)

    def down(self, timeout_s: float = DEFAULT_STOP_TIMEOUT_S) -> bool:
        """Stop all brokers; return whether any was running. Data and ports are kept for the next `up`."""
        layout = _load(self.directory)
        if layout is None:
            return False
        with disk_errors(self.directory), self._locked():
            brokers = self._brokers(layout)
            with ThreadPoolExecutor(len(brokers)) as threads:
                return any(list(threads.map(lambda broker: broker.down(min(timeout_s, HANDOVER_S)), brokers)))

    def status(self) -> KafkaState | None:
        """Return the Kafka if the process of any broker is running, even if it does not answer."""
        layout = _load(self.directory)
        if layout is None:
            return None
        states = [state for broker in self._brokers(layout) if (state := broker.status()) is not None]
        return self._state(layout, states, reused=True) if states else None

    def answers(self) -> bool:
        """Return whether every broker is running and answers a client."""
        layout = _load(self.directory)
        return layout is not None and all(broker.answers() for broker in self._brokers(layout))

    def brokers(self) -> list[LocalKafka]:
        """The single brokers, the first one first. Raises LocalKafkaError before the first `up`."""
        layout = _load(self.directory)
        if layout is None:
            raise LocalKafkaError(f"No Kafka of several brokers was started in {self.directory}")
        return self._brokers(layout)

    def _locked(self) -> AbstractContextManager[None]:
        self.directory.mkdir(parents=True, exist_ok=True)
        wait_s = self.config.start_timeout_s + LOCK_MARGIN_S
        return file_lock(
            self.directory / "lock", wait_s, f"Another process is starting or stopping the brokers of {self.directory}"
        )

    def _brokers(self, layout: _Layout) -> list[LocalKafka]:
        return [
            self._make(
                dataclasses.replace(
                    self.config,
                    directory=self.directory / f"broker-{node}",
                    member=Member(node, layout.cluster_id, layout.broker_ports, layout.controller_ports),
                )
            )
            for node in range(1, len(layout.broker_ports) + 1)
        ]

    def _usable_layout(self, notes: list[str]) -> _Layout:
        """The saved layout, or a new one. If no broker runs, ports that other processes have taken are replaced."""
        saved = layout = _load(self.directory)
        if layout is None:
            ports = free_ports(2 * self.n_brokers)
            layout = _Layout(new_cluster_id(), tuple(ports[: self.n_brokers]), tuple(ports[self.n_brokers :]))
        elif self.status() is None:
            broker_ports, controller_ports = map(_freed, (layout.broker_ports, layout.controller_ports))
            if broker_ports != layout.broker_ports:
                notes.append("Other processes use its ports, so it moved: clients need the new bootstrap addresses.")
            layout = dataclasses.replace(layout, broker_ports=broker_ports, controller_ports=controller_ports)
        if len(layout.broker_ports) != self.n_brokers:
            raise LocalKafkaError(
                f"The Kafka of {self.directory} has {len(layout.broker_ports)} brokers, not {self.n_brokers}",
                remedy="Leave out --brokers, or choose another directory",
            )
        if layout != saved:
            write_private(self.directory / "cluster.json", (json.dumps(dataclasses.asdict(layout)) + "\n").encode())
        return layout

    def _state(
        self, layout: _Layout, states: list[KafkaState], *, reused: bool, notes: Sequence[str] = ()
    ) -> KafkaState:
        return dataclasses.replace(
            states[0],
            bootstrap=layout.bootstrap,
            pids=tuple(pid for state in states for pid in state.pids),
            directory=self.directory,
            reused=reused,
            replication=min(REPLICAS_MAX, len(layout.broker_ports)),
            notes=(*notes, *dict.fromkeys(note for state in states for note in state.notes)),
        )


def local_kafka(config: LocalKafkaConfig, n_brokers: int | None = None) -> LocalKafka | LocalCluster:
    """The Kafka of a directory, with as many brokers as it has or, if it is new, as given."""
    layout = _load(config.directory.expanduser())
    n_brokers = n_brokers or (len(layout.broker_ports) if layout else 1)
    return LocalKafka(config) if n_brokers == 1 and layout is None else LocalCluster(config, n_brokers)


def _load(directory: Path) -> _Layout | None:
    """Read cluster.json; None if there is none. Raises LocalKafkaError if the file is not one of ours."""
    path = directory / "cluster.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        return _Layout(raw["cluster_id"], tuple(raw["broker_ports"]), tuple(raw["controller_ports"]))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, TypeError, KeyError) as exc:
        raise LocalKafkaError(
            f"{path} cannot be read: {exc}", remedy="Stop its brokers, then delete the directory to start empty"
        ) from exc


def _freed(ports: tuple[int, ...]) -> tuple[int, ...]:
    """The same ports, or others in place of those that other processes use."""
    return tuple(port if becomes_free(port) else free_ports(1)[0] for port in ports)
