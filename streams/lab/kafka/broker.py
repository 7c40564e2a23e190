"""One Kafka broker for one machine: started, found again and stopped.

What lives here: the broker's settings, its process, and the directory of both. What must not: topics and records,
printing, which the command line does, and how several brokers form one Kafka (cluster). All state is in the directory
and none in a `LocalKafka` object, so that one process can stop the broker that another one started:

    state.json         ports, cluster id, Kafka's version and the process; replaced in one step, see `_Saved`
    lock               held by `up` and `down`
    server.properties, log4j2.properties   rewritten at each start
    server.log         the broker's own log, bounded by LOG_FILE_MB; console.log: output of the JVM itself
    data/              the topics
    secure/            certificates and passwords of a secure broker (secure_files)

The broker listens on the loopback interface only: without authentication, or secure, over SASL_SSL with an authorizer.
Linux and macOS.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import json
import os
import re
import signal
import socket
import string
import subprocess
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from confluent_kafka import KafkaException
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AdminClient,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialUpsertion,
)

from streams.errors import LocalKafkaError
from streams.lab.kafka.jars import KAFKA_VERSION, Progress, ensure_jars, file_lock
from streams.lab.kafka.java import Java, find_java
from streams.lab.kafka.ports import free_ports, is_free
from streams.lab.kafka.secure_files import USER, SecureFiles, write_private
from streams.security.kafka import librdkafka_config
from streams.settings import Settings

#: The directory of the broker of `kvstreams kafka`, relative to the current one.
DEFAULT_DIRECTORY = Path(".kvstreams/kafka")

#: 512 MB suffice for everything here. The log cleaner's buffer alone takes 128 MB, so that 256 MB are the minimum.
DEFAULT_HEAP_MB = 512

#: A start takes 1 to 4 s on two cores. A busy machine gets fifteen times as long before the start counts as failed.
DEFAULT_START_TIMEOUT_S = 60.0

#: A clean stop takes 0.4 s. A slow disk gets many times as long.
DEFAULT_STOP_TIMEOUT_S = 30.0

#: A process that is still there this long after SIGKILL hangs in the kernel, on a failed disk or mount.
KILL_WAIT_S = 10.0

#: A healthy broker answers a metadata request in milliseconds; a paused one does not answer.
ANSWER_TIMEOUT_S = 2.0

#: Interval at which a starting broker is polled; on average, half of it is added to every start.
START_POLL_S = 0.03

#: Interval at which a stopping broker is checked; a stop takes ten times as long.
STOP_POLL_S = 0.02

#: The storage tool takes 0.7 s.
FORMAT_TIMEOUT_S = 60.0

#: In addition to the start itself: another process's `up` may hold the lock while it formats, or kills a failed broker.
LOCK_MARGIN_S = FORMAT_TIMEOUT_S + KILL_WAIT_S

#: A port that is not released within this time is used by another process.
PORT_RELEASE_S = 3.0

#: server.log is rolled at this size, with LOG_FILES old ones kept.
LOG_FILE_MB = 10
LOG_FILES = 2

#: How much of the logs an error quotes: their end.
QUOTED_BYTES = 64 * 1024
QUOTED_LINES = 8
QUOTED_LINE_CHARS = 300

#: psutil rounds the start time of a process, which therefore varies a little. A pid is reused seconds later at least.
CREATE_TIME_SLACK_S = 0.5

#: How long the controller keeps a silent broker registered, and the interval of its heartbeats. A killed broker can
#: register again only after this time. Shorter sessions, such as 3 s, also expire when a busy machine stalls, and then
#: no partition has a leader until the next heartbeat.
BROKER_SESSION_MS = 9_000
BROKER_HEARTBEAT_MS = 500

#: Replicas of a Kafka with several brokers, as far as it has so many.
REPLICAS_MAX = 3

#: Where a secure broker's certificates and passwords are, in the broker's directory.
SECURE_FOLDER = "secure"

#: Kafka's own minimum.
_SCRAM_ITERATIONS = 4096

#: Partitions of Kafka's two internal topics; with the default of 50 each, every developer would get 100 directories.
INTERNAL_TOPIC_PARTITIONS = 8

# `up` depends on these: with other values it would wait for the wrong address.
_RESERVED_PROPERTIES = frozenset(
    {
        "advertised.listeners",
        "inter.broker.listener.name",
        "controller.listener.names",
        "controller.quorum.bootstrap.servers",
        "controller.quorum.voters",
        "listener.security.protocol.map",
        "listeners",
        "node.id",
        "process.roles",
    }
)

# The first pattern that matches one of the last lines of the log gives the remedy; specific patterns come first.
_REMEDIES: tuple[tuple[str, str], ...] = (
    (r"Address already in use", "Another process took the port in the meantime: run this again to use another port"),
    (
        r"No space left on device|Disk quota exceeded",
        "Free some space on the disk of {directory}, then run this again",
    ),
    (
        r"Failed to acquire lock on file",
        "Another broker uses this data: stop it (`ps` shows it as kafka.Kafka), or choose another directory",
    ),
    (
        r"OutOfMemoryError|Could not reserve enough space|insufficient memory|Too small (initial|maximum) heap"
        r"|Initial heap size",
        "Set heap_mb, now {heap_mb}, to a value that suffices for the broker and that the machine has",
    ),
    (
        r"Inconsistent cluster ?id|InconsistentClusterId|Invalid cluster\.id|has a different (cluster|node)",
        "{directory} contains the data of another cluster: choose another directory, or delete this one to start empty",
    ),
    (
        r"UnsupportedVersion",
        "{directory} contains the data of another Kafka: choose another directory, or delete this one to start empty",
    ),
    (
        r"ConfigException|Invalid value|Missing required configuration",
        "Correct the broker property that the message names",
    ),
    (
        r"Permission denied|AccessDenied|Read-only file system|ot a directory|FileAlreadyExists|NoSuchFile"
        r"|I/O error trying to read|No available log directories",
        "Give this user write permission for the directory that the message names",
    ),
    (
        r"ZipException|NoClassDefFoundError|Could not find or load main class|ClassFormatError",
        "A jar of Kafka is damaged: delete the org/apache/kafka directory of the Maven cache and run this again",
    ),
    (
        r"ClassNotFoundException|KafkaException: Class .* cannot be found",
        "Correct the broker property that contains this class name",
    ),
)

# Indented, then `at` with a method and its source line, or three dots and the number of further frames.
_STACK_FRAME = re.compile(r"\s+(at |\.\.\. \d)")

# Java 24 and newer print a warning of four lines without this flag.
_JAVA_24_FLAGS = ("--sun-misc-unsafe-memory-access=allow",)

_LOG4J2 = f"""\
# Written by kvstreams at each start of the broker.
status = error
appender.file.type = RollingFile
appender.file.name = file
appender.file.fileName = ${{sys:kvstreams.log}}
appender.file.filePattern = ${{sys:kvstreams.log}}.%i
appender.file.layout.type = PatternLayout
appender.file.layout.charset = UTF-8
appender.file.layout.pattern = %d{{yyyy-MM-dd HH:mm:ss.SSS}} %-5p %c{{1}}: %m%n
appender.file.policies.type = Policies
appender.file.policies.size.type = SizeBasedTriggeringPolicy
appender.file.policies.size.size = {LOG_FILE_MB}MB
appender.file.strategy.type = DefaultRolloverStrategy
appender.file.strategy.max = {LOG_FILES}
rootLogger.level = info
rootLogger.appenderRef.file.ref = file
# At INFO these two log the start of every thread and, several times, all settings.
logger.clients.name = org.apache.kafka
logger.clients.level = warn
logger.broker.name = kafka
logger.broker.level = warn
# A few lines that show when the broker started, answered and stopped.
logger.lifecycle.name = kafka.server.BrokerLifecycleManager
logger.lifecycle.level = info
# The same, as Kafka 4.4 names it.
logger.lifecycle44.name = org.apache.kafka.server.BrokerLifecycleManager
logger.lifecycle44.level = info
# At INFO it logs what a secure broker refuses to a user.
logger.authorizer.name = kafka.authorizer.logger
logger.authorizer.level = ${{sys:kvstreams.authorizer.level}}
"""


@dataclass(frozen=True, slots=True)
class LocalKafkaConfig:
    """The configuration of one broker. overrides: broker properties that replace ours from the next start on.

    optimized: whether the JVM compiles with its optimizing compiler as well. It takes up to a core in the broker's
    first minutes, which the demo spends next to routers and engines on the same cores, and pays off after that.

    secure: whether clients need TLS, SASL and ACLs. authorizer_log_level: `debug` also logs what is allowed.

    member: the broker's place in a Kafka of several brokers (streams.lab.kafka.cluster), or None if it is alone.
    """

    directory: Path
    overrides: Mapping[str, str] = field(default_factory=dict)
    heap_mb: int = DEFAULT_HEAP_MB
    start_timeout_s: float = DEFAULT_START_TIMEOUT_S
    optimized: bool = False
    secure: bool = False
    authorizer_log_level: str = "info"
    member: Member | None = None


@dataclass(frozen=True, slots=True)
class Member:
    """One of several brokers. broker_ports, controller_ports: of all of them, the first one's first; node: from 1."""

    node: int
    cluster_id: str
    broker_ports: tuple[int, ...]
    controller_ports: tuple[int, ...]

    @property
    def replication(self) -> int:
        """Replicas of a topic whose creator does not say how many."""
        return min(REPLICAS_MAX, len(self.broker_ports))

    @property
    def properties(self) -> dict[str, str]:
        """What the properties of this broker have in addition to, or other than, those of one that is alone."""
        voters = (f"{node}@127.0.0.1:{port}" for node, port in enumerate(self.controller_ports, 1))
        replication, in_sync = str(self.replication), str(max(1, self.replication - 1))
        return {
            "node.id": str(self.node),
            # Each broker is in a rack of its own, so that a client can name the one that it wants to read from.
            "broker.rack": f"rack-{self.node}",
            "replica.selector.class": "org.apache.kafka.common.replica.RackAwareReplicaSelector",
            "controller.quorum.voters": ",".join(voters),
            "default.replication.factor": replication,
            "min.insync.replicas": in_sync,
            "offsets.topic.replication.factor": replication,
            "transaction.state.log.replication.factor": replication,
            "transaction.state.log.min.isr": in_sync,
            "share.coordinator.state.topic.replication.factor": replication,
            "share.coordinator.state.topic.min.isr": in_sync,
        }


@dataclass(frozen=True, slots=True)
class KafkaState:
    """A running Kafka: its address, version, process and directory."""

    bootstrap: str  # for bootstrap.servers: "127.0.0.1:PORT", of several brokers separated by commas
    pids: tuple[int, ...]  # one for each broker
    version: str  # Kafka's
    java: str  # version, source and path
    directory: Path
    reused: bool  # it was already running before this call
    notes: tuple[str, ...] = ()  # whole sentences for the operator, for example that the port has changed
    secure: bool = False
    replication: int = 1  # replicas that topics may have

    @property
    def pid(self) -> int:
        """The process of the first broker."""
        return self.pids[0]

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of a client, by name."""
        replication = {"replication": self.replication} if self.replication > 1 else {}
        if not self.secure:
            return {"kafka": self.bootstrap, **replication}
        return {**SecureFiles(self.directory / SECURE_FOLDER).client_settings(self.bootstrap), **replication}


@dataclass(frozen=True, slots=True)
class _Process:
    """The broker's process as it was started; the creation time distinguishes it from a later one with the same pid."""

    pid: int
    created_s: float  # since the epoch, as psutil has it
    java: str
    started_at: str  # ISO 8601 in UTC, for a person who reads the file


@dataclass(frozen=True, slots=True)
class _Saved:
    """state.json. Ports and cluster id are chosen once; `process` is None after a clean stop."""

    kafka_version: str  # the one that last started on this data
    cluster_id: str
    broker_port: int
    controller_port: int
    process: _Process | None = None
    secure: bool = False


@dataclass(frozen=True, slots=True)
class Launched:
    """A process that was started and may not answer yet. log_start: size of its log before. notes: for the operator."""

    saved: _Saved
    pid: int
    log_start: int
    notes: tuple[str, ...]


class LocalKafka:
    """The broker of one directory. Any number of objects and processes may use the same directory."""

    def __init__(self, config: LocalKafkaConfig) -> None:
        self.config = config
        self.directory = config.directory.expanduser().resolve()
        shared = self.directory if config.member is None else self.directory.parent
        self._secure_files = SecureFiles(shared / SECURE_FOLDER)

    def up(self, progress: Progress | None = None) -> KafkaState:
        """Start a broker unless one is running, and return once it answers a client.

        A new broker keeps the data and the ports of the previous one, and its process outlives the calling one.
        progress: called while jars are downloaded. Raises LocalKafkaError, after ending everything that this call
        started.
        """
        self.check()
        if (saved := self._load()) is not None and self._live(saved) and self._answers(saved):
            self._check_same_security(saved)
            return self._state(saved, reused=True, notes=self._notes_on_reuse(saved))
        # Before the lock is taken: downloading may take minutes, and does not need the directory.
        java = find_java()
        jars = ensure_jars(progress)
        with disk_errors(self.directory):
            self.directory.mkdir(parents=True, exist_ok=True)
            with self._locked():
                saved = self._load()
                if saved is not None and self._live(saved):
                    self._check_same_security(saved)
                    self._await_running(saved)
                    return self._state(saved, reused=True, notes=self._notes_on_reuse(saved))
                return self._start(java, jars)

    def down(self, timeout_s: float = DEFAULT_STOP_TIMEOUT_S) -> bool:
        """Stop the broker, with SIGKILL after `timeout_s`; return whether one was running.

        Data and ports are kept for the next `up`. Raises LocalKafkaError if the process survives even SIGKILL.
        """
        if not self.directory.is_dir():
            return False
        with disk_errors(self.directory), self._locked():
            saved = self._load()
            if saved is None or saved.process is None:
                return False
            process = self._live(saved)
            if process is not None:
                _stop(process, timeout_s)
            self._save(dataclasses.replace(saved, process=None))
            return process is not None

    def status(self) -> KafkaState | None:
        """Return the broker whose process is running, even if it is starting or paused (see `answers`), or None."""
        saved = self._load()
        if saved is None or self._live(saved) is None:
            return None
        return self._state(saved, reused=True)

    def answers(self) -> bool:
        """Return whether the broker is running and answers a client within ANSWER_TIMEOUT_S."""
        saved = self._load()
        return saved is not None and self._live(saved) is not None and self._answers(saved)

    # -- start -------------------------------------------------------------------------------------------------------

    def _start(self, java: Java, jars: list[Path]) -> KafkaState:
        """Start a broker in this directory. The caller holds the lock, and no broker is running."""
        launched = self.launch(java, jars)
        try:
            self.await_launched(launched)
        except BaseException:  # also Ctrl-C: a caller that does not get a broker must not leave one running
            self.abandon(launched)
            raise
        return self._state(launched.saved, reused=False, notes=launched.notes)

    def launch(self, java: Java, jars: list[Path]) -> Launched:
        """Start the process, which does not answer yet. The caller holds the lock, and no broker is running.

        1 ports and version; 2 files; 3 format, the first time; 4 process, saved at once.
        """
        # 1
        notes: list[str] = []
        saved = self._load()
        if self.config.member is not None:
            saved = self._as_member(saved, self.config.member)
        elif saved is None:
            ports = free_ports(2)
            cluster_id = _cluster_id_of(self._file("data")) or new_cluster_id()
            saved = _Saved(KAFKA_VERSION, cluster_id, broker_port=ports[0], controller_port=ports[1])
        else:
            self._check_version(saved)
            saved = self._with_free_ports(saved, notes)
        saved = dataclasses.replace(saved, secure=self.config.secure)
        self._save(dataclasses.replace(saved, process=None))
        # 2
        if saved.secure and self.config.member is None:
            self._secure_files.make()
            self._secure_files.write_settings(_bootstrap(saved))
        properties = self._properties(saved)
        self._replace("server.properties", _as_properties(properties))
        self._replace("log4j2.properties", _LOG4J2)
        # 3
        command = self._java_command(java, jars)
        self._format(command, saved, properties)
        # 4
        log_start = _file_size(self.directory / "server.log")
        command += ["kafka.Kafka", str(self._file("server.properties"))]
        pid = self._spawn(command)
        launched = Launched(saved, pid, log_start, tuple(notes))
        try:
            process = _psutil().Process(pid)
            started_at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            saved = dataclasses.replace(
                saved,
                kafka_version=KAFKA_VERSION,
                process=_Process(pid, process.create_time(), str(java), started_at),
            )
            self._save(saved)
        except BaseException:
            self.abandon(launched)
            raise
        return dataclasses.replace(launched, saved=saved)

    def await_launched(self, launched: Launched) -> None:
        """Wait until a launched broker answers, and store the passwords of a secure one. Raises LocalKafkaError."""
        self._await_started(launched.saved, launched.pid, launched.log_start)
        if launched.saved.secure:
            self._set_passwords(launched.saved)

    def abandon(self, launched: Launched) -> None:
        """End a launched broker at once."""
        _kill_child(launched.pid)
        with contextlib.suppress(OSError):  # a full disk: the pid of an ended process in the file does no harm
            self._save(dataclasses.replace(launched.saved, process=None))

    def check(self) -> None:
        """Refuse overrides and directories that the broker would misinterpret, and a machine without psutil."""
        _psutil()  # before anything is started, since it could not be watched without psutil
        reserved = sorted(_RESERVED_PROPERTIES & self.config.overrides.keys())
        if reserved:
            raise LocalKafkaError(
                f"The local Kafka sets {', '.join(reserved)} itself", remedy="Remove that from the overrides"
            )
        if "," in str(self.directory):
            # log.dirs is a list: Kafka would put its data in two other directories, the second a relative path.
            raise LocalKafkaError(
                f"The directory {self.directory} has a comma in its name, which separates directories for Kafka",
                remedy="Choose another directory",
            )

    def _check_same_security(self, saved: _Saved) -> None:
        """Refuse a running broker that requires authentication if the caller has none, or the other way round."""
        if saved.secure != self.config.secure:
            kinds = ("without authentication", "with --secure")
            raise LocalKafkaError(
                f"The broker of {self.directory} was started {kinds[saved.secure]}",
                remedy="Stop it with `kvstreams kafka down`, or choose another directory",
            )

    def _set_passwords(self, saved: _Saved) -> None:
        """Store the password of SCRAM users, which Kafka keeps in its metadata.

        Formatting could do so as well, but only with the password among the arguments of a process.
        """
        client = AdminClient({**self._admin_config(saved), "log_level": 0})
        info = ScramCredentialInfo(ScramMechanism.SCRAM_SHA_512, _SCRAM_ITERATIONS)
        password = self._secure_files.password(USER).encode()
        for future in client.alter_user_scram_credentials(
            [UserScramCredentialUpsertion(USER, info, password)], request_timeout=self.config.start_timeout_s
        ).values():
            try:
                future.result(self.config.start_timeout_s)
            except KafkaException as exc:
                raise LocalKafkaError(f"The password of {USER} cannot be stored: {exc.args[0].str()}") from exc

    def _admin_config(self, saved: _Saved) -> dict[str, Any]:
        """The configuration of a client that may do everything."""
        bootstrap = _bootstrap(saved)
        if not saved.secure:
            return {"bootstrap.servers": bootstrap}
        settings = Settings(**self._secure_files.admin_settings(bootstrap))
        return {"bootstrap.servers": bootstrap, **librdkafka_config(settings)}

    def _answers(self, saved: _Saved) -> bool:
        """Return whether a real client gets the metadata of exactly this cluster within ANSWER_TIMEOUT_S."""
        try:
            # First a bare connection, which takes 0.1 ms: a client would log errors about a closed port.
            socket.create_connection(("127.0.0.1", saved.broker_port), ANSWER_TIMEOUT_S).close()
        except OSError:
            return False
        client = AdminClient({**self._admin_config(saved), "log_level": 0})
        try:
            metadata = client.list_topics(timeout=ANSWER_TIMEOUT_S)
        except KafkaException:
            return False
        # Another cluster may listen on a port that was ours before.
        return bool(metadata.brokers) and metadata.cluster_id == saved.cluster_id

    def _check_version(self, saved: _Saved) -> None:
        """Refuse data of a newer Kafka or of another major version, which this one may not be able to read."""
        theirs, ours = _version_numbers(saved.kafka_version), _version_numbers(KAFKA_VERSION)
        if theirs > ours or theirs[0] != ours[0]:
            raise LocalKafkaError(
                f"{self.directory} contains data of Kafka {saved.kafka_version}, and this is Kafka {KAFKA_VERSION}",
                remedy="Choose another directory, or delete this one to start empty",
            )

    def _as_member(self, saved: _Saved | None, member: Member) -> _Saved:
        """Take the ports that all brokers know, of which none can be replaced while others run."""
        if saved is not None:
            self._check_version(saved)
        ports = member.broker_ports[member.node - 1], member.controller_ports[member.node - 1]
        return _Saved(KAFKA_VERSION, member.cluster_id, *ports)

    def _with_free_ports(self, saved: _Saved, notes: list[str]) -> _Saved:
        """Keep the ports that clients know. A port that another process has taken is replaced, with a note."""
        if not becomes_free(saved.broker_port):
            (port,) = free_ports(1)
            notes.append(
                f"Port {saved.broker_port} is used by another process, so the broker moved to {port}:"
                f" clients need the new bootstrap address 127.0.0.1:{port}."
            )
            saved = dataclasses.replace(saved, broker_port=port)
        if not is_free(saved.controller_port):
            saved = dataclasses.replace(saved, controller_port=free_ports(1)[0])
        return saved

    def _properties(self, saved: _Saved) -> dict[str, str]:
        """Return the broker's properties: one node that is both broker and controller, then the overrides."""
        protocol = "SASL_SSL" if saved.secure else "PLAINTEXT"
        return {
            "process.roles": "broker,controller",
            "node.id": "1",
            "controller.quorum.voters": f"1@127.0.0.1:{saved.controller_port}",
            "controller.listener.names": "CONTROLLER",
            "listeners": f"{protocol}://{_bootstrap(saved)},CONTROLLER://127.0.0.1:{saved.controller_port}",
            "advertised.listeners": f"{protocol}://{_bootstrap(saved)}",
            "inter.broker.listener.name": protocol,
            "listener.security.protocol.map": f"{protocol}:{protocol},CONTROLLER:{protocol}",
            **(self._secure_files.properties() if saved.secure else {}),
            "log.dirs": str(self.directory / "data"),
            # One node cannot store three replicas, which is the default of the internal topics.
            "offsets.topic.replication.factor": "1",
            "transaction.state.log.replication.factor": "1",
            "transaction.state.log.min.isr": "1",
            "share.coordinator.state.topic.replication.factor": "1",
            "share.coordinator.state.topic.min.isr": "1",
            "offsets.topic.num.partitions": str(INTERNAL_TOPIC_PARTITIONS),
            "transaction.state.log.num.partitions": str(INTERNAL_TOPIC_PARTITIONS),
            # After a crash the controller, which is the same process, takes the new broker for a second one with the
            # same id until the old session has expired: with the default of 9 s, `up` took 11 s after `kill`.
            "broker.session.timeout.ms": str(BROKER_SESSION_MS),
            "broker.heartbeat.interval.ms": str(BROKER_HEARTBEAT_MS),
            # By default, a broker that finds no controller ends after a minute, even where its start may take longer.
            "initial.broker.registration.timeout.ms": str(round(self.config.start_timeout_s * 1000)),
            # By default, the first consumer of a group waits 3 s for others to join.
            "group.initial.rebalance.delay.ms": "0",
            # A topic that is created because of a typo, or by a consumer, has one partition and the wrong settings. All
            # topics are created explicitly, as well as Faust's own, which it creates through the admin interface.
            "auto.create.topics.enable": "false",
            **(self.config.member.properties if self.config.member else {}),
            **self.config.overrides,
        }

    def _java_command(self, java: Java, jars: list[Path]) -> list[str]:
        """Return the JVM and its flags, without the class to run."""
        return [
            str(java.executable),
            f"-Xmx{self.config.heap_mb}m",
            # Starts 0.2 s faster than G1 (medians of 3: 1.5 and 1.7 s), and its threads do not compete for two cores.
            "-XX:+UseSerialGC",
            *(() if self.config.optimized else ("-XX:TieredStopAtLevel=1",)),
            # A broker that is out of memory answers some requests and not others. If it exits, `status` shows that.
            "-XX:+ExitOnOutOfMemoryError",
            f"-XX:ErrorFile={self._file('hs_err_pid%p.log')}",
            *(_JAVA_24_FLAGS if java.major >= 24 else ()),
            "-Djava.awt.headless=true",
            f"-Dkvstreams.log={self._file('server.log')}",
            f"-Dkvstreams.authorizer.level={self.config.authorizer_log_level}",
            f"-Dlog4j2.configurationFile={self._file('log4j2.properties').as_uri()}",
            "-cp",
            os.pathsep.join(map(str, jars)),
        ]

    def _format(self, command: list[str], saved: _Saved, properties: Mapping[str, str]) -> None:
        """Write the cluster id into the data directories, the first time; Kafka does not start without it."""
        folders = properties["log.dirs"].split(",") + properties.get("metadata.log.dir", "").split()
        if all(_cluster_id_of(Path(folder.strip())) for folder in folders):
            return
        arguments = ["format", "--ignore-formatted", "--cluster-id", saved.cluster_id, "--config"]
        try:
            done = subprocess.run(
                [*command, "kafka.tools.StorageTool", *arguments, str(self._file("server.properties"))],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=FORMAT_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired as exc:
            raise self._failure(f"Formatting {self.directory} took over {FORMAT_TIMEOUT_S:.0f} s", []) from exc
        if done.returncode != 0:
            lines = _quotable(done.stdout.decode("utf-8", "replace"))
            raise self._failure(f"Kafka's data directory could not be formatted (exit code {done.returncode})", lines)

    def _spawn(self, command: list[str]) -> int:
        """Start a process that outlives this one and its terminal, and return its pid.

        This does not use subprocess: a Popen object warns if it is deleted before its process has ended, as intended
        here.
        """
        console = os.open(self._file("console.log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            return os.posix_spawn(
                command[0],
                command,
                os.environ,
                file_actions=[
                    (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                    (os.POSIX_SPAWN_DUP2, console, 1),
                    (os.POSIX_SPAWN_DUP2, console, 2),
                ],
                setsid=True,
                # A JVM installs no handler for an ignored signal, as under nohup, and `down` would have to kill it.
                setsigdef=[signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE],
                setsigmask=[],
            )
        finally:
            os.close(console)

    def _await_started(self, saved: _Saved, pid: int, log_start: int) -> None:
        """Return when our child answers; raise, with the end of its logs, if it exits or takes too long."""
        deadline = time.monotonic() + self.config.start_timeout_s
        while not self._answers(saved):
            if how := _end_of_child(pid):
                raise self._failure(f"Kafka exited with {how} while starting", self._last_lines(log_start))
            if time.monotonic() >= deadline:
                raise self._failure(
                    f"Kafka did not answer within {self.config.start_timeout_s:g} s and was killed",
                    self._last_lines(log_start),
                )
            time.sleep(START_POLL_S)

    def _await_running(self, saved: _Saved) -> None:
        """Return when a broker that another process started answers; this never stops it."""
        deadline = time.monotonic() + self.config.start_timeout_s
        while not self._answers(saved):
            process = self._live(saved)
            paused = process is not None and process.status() == _psutil().STATUS_STOPPED
            if process is None or paused or time.monotonic() >= deadline:
                how = "has just exited" if process is None else "is paused" if paused else "does not answer"
                raise LocalKafkaError(
                    f"The broker of {self.directory} (pid {saved.process.pid if saved.process else 0}) {how}",
                    remedy="Stop it with `kvstreams kafka down`, then start it again",
                )
            time.sleep(START_POLL_S)

    # -- error messages ----------------------------------------------------------------------------------------------

    def _failure(self, message: str, lines: list[str]) -> LocalKafkaError:
        """Return the error of a failed start: the last lines of the log, and the remedy for the reason in them."""
        text = "\n".join(lines)
        remedies = (remedy for pattern, remedy in _REMEDIES if re.search(pattern, text))
        remedy = next(remedies, "Read {log}")
        quoted = "".join(f"\n    {line}" for line in lines)
        return LocalKafkaError(
            f"{message}:{quoted}" if lines else message,
            remedy=remedy.format(directory=self.directory, heap_mb=self.config.heap_mb, log=self._file("server.log")),
            lines=tuple(lines),
            log=str(self._file("server.log")),
        )

    def _last_lines(self, log_start: int) -> list[str]:
        """Return the last lines that this start wrote: first the JVM's, then the broker's."""
        return _quotable(_tail(self._file("console.log"), 0)) + _quotable(_tail(self._file("server.log"), log_start))

    # -- the directory -----------------------------------------------------------------------------------------------

    def _file(self, name: str) -> Path:
        return self.directory / name

    def _locked(self) -> contextlib.AbstractContextManager[None]:
        wait_s = self.config.start_timeout_s + LOCK_MARGIN_S
        return file_lock(
            self._file("lock"), wait_s, f"Another process is starting or stopping the broker of {self.directory}"
        )

    def _replace(self, name: str, text: str) -> None:
        """Write a file in one step, so that no reader finds half of it, not even after a crash."""
        temporary = self._file(f"{name}.{os.getpid()}.tmp")
        try:
            write_private(temporary, text.encode())  # a secure broker's properties contain a password
            temporary.replace(self._file(name))
        finally:
            temporary.unlink(missing_ok=True)

    def _save(self, saved: _Saved) -> None:
        self._replace("state.json", json.dumps(dataclasses.asdict(saved), indent=2) + "\n")

    def _load(self) -> _Saved | None:
        """Read state.json; None if there never was a broker. Raises LocalKafkaError if the file is not one of ours."""
        path = self._file("state.json")
        try:
            raw: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            process = None if raw["process"] is None else _Process(**raw["process"])
            saved = _Saved(**{**raw, "process": process})
            _version_numbers(saved.kafka_version)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError, TypeError, KeyError) as exc:
            raise LocalKafkaError(
                f"{path} cannot be read: {exc}",
                remedy="Stop this directory's broker if one is running, then delete the file: data stays, ports change",
            ) from exc
        return saved

    def _notes_on_reuse(self, saved: _Saved) -> tuple[str, ...]:
        """Return a note if the running broker was started with other properties than those requested now."""
        try:
            running = self._file("server.properties").read_text(encoding="utf-8")
        except OSError:
            return ()
        if running == _as_properties(self._properties(saved)):
            return ()
        return ("The running broker has other properties: run `kvstreams kafka down` first to change them.",)

    def _state(self, saved: _Saved, *, reused: bool, notes: tuple[str, ...] = ()) -> KafkaState:
        assert saved.process is not None
        return KafkaState(
            bootstrap=_bootstrap(saved),
            pids=(saved.process.pid,),
            version=saved.kafka_version,
            java=saved.process.java,
            directory=self.directory,
            reused=reused,
            notes=notes,
            secure=saved.secure,
        )

    # -- the process -------------------------------------------------------------------------------------------------

    def _live(self, saved: _Saved) -> Any | None:
        """Return the psutil.Process of the saved broker if it is still running, otherwise None.

        The process is recognised by its creation time. If the machine's clock was set in the meantime, which moves all
        creation times, it is recognised by its command line, which contains the path of our server.properties.
        """
        if saved.process is None:
            return None
        psutil = _psutil()
        try:
            process = psutil.Process(saved.process.pid)
            if _has_ended(process):
                return None
            same_time = abs(process.create_time() - saved.process.created_s) <= CREATE_TIME_SLACK_S
            return process if same_time or str(self._file("server.properties")) in process.cmdline() else None
        except psutil.Error:  # no such process, or a process of another user, which cannot be ours
            return None


@contextlib.contextmanager
def disk_errors(directory: Path) -> Iterator[None]:
    """Turn an OSError of our own files into an error that names the directory."""
    try:
        yield
    except OSError as exc:
        raise LocalKafkaError(
            f"The directory {directory} cannot be used: {exc.strerror or exc} ({exc.filename})",
            remedy="Free some space or grant write permission there, or choose another directory",
        ) from exc


def _psutil() -> Any:
    """Import psutil, which the `local` extra installs; the machines of a fleet do not have it."""
    try:
        import psutil
    except ImportError as exc:
        raise LocalKafkaError(
            "The psutil package is not installed", remedy="Run `pip install 'kvstreams[local]'`"
        ) from exc
    return psutil


def _stop(process: Any, timeout_s: float) -> None:
    """End a process with SIGTERM, or with SIGKILL after `timeout_s`."""
    with contextlib.suppress(_psutil().NoSuchProcess):
        process.terminate()
        process.resume()  # a paused process receives SIGTERM only when it continues
    if not _ends_within(process, timeout_s):
        _kill(process)


def _kill(process: Any) -> None:
    """End a process with SIGKILL and wait until it has ended. Raises LocalKafkaError if it does not."""
    with contextlib.suppress(_psutil().NoSuchProcess):
        process.kill()
    if not _ends_within(process, KILL_WAIT_S):
        raise LocalKafkaError(
            f"The broker (pid {process.pid}) is still running {KILL_WAIT_S:.0f} s after SIGKILL",
            remedy="It hangs in the kernel: check the disk or mount of its data",
        )


def _ends_within(process: Any, timeout_s: float) -> bool:
    """Wait for the end of a process, whether it is a child or not.

    psutil's own `wait` waits until the pid no longer exists. In a container whose first process does not reap orphans,
    that never happens.
    """
    deadline = time.monotonic() + timeout_s
    while not _has_ended(process):
        if time.monotonic() >= deadline:
            return False
        time.sleep(STOP_POLL_S)
    return True


def _has_ended(process: Any) -> bool:
    """Return whether a process has ended, and reap it if it was our child."""
    psutil = _psutil()
    try:
        if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            return False
    except psutil.NoSuchProcess:
        return True
    with contextlib.suppress(ChildProcessError):  # it was started by another process, which has to reap it
        os.waitpid(process.pid, os.WNOHANG)
    return True


def _end_of_child(pid: int) -> str:
    """Return how our child ended, or "" while it is running."""
    try:
        ended, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return "an unknown status"  # another thread called `status`, which reaped it
    code = os.waitstatus_to_exitcode(status) if ended else 0
    return "" if not ended else f"signal {-code}" if code < 0 else f"exit code {code}"


def _kill_child(pid: int) -> None:
    """Kill and reap a child of this process, unless it has been reaped already: then the pid is no longer ours."""
    with contextlib.suppress(ChildProcessError):
        ended, _ = os.waitpid(pid, os.WNOHANG)
        if not ended:
            _kill(_psutil().Process(pid))


def _bootstrap(saved: _Saved) -> str:
    """The address for bootstrap.servers."""
    return f"127.0.0.1:{saved.broker_port}"


def becomes_free(port: int) -> bool:
    """Return whether a server can listen on the port within PORT_RELEASE_S.

    A killed JVM becomes a zombie as soon as its first thread has ended; on a busy machine its other threads keep the
    port a little longer.
    """
    deadline = time.monotonic() + PORT_RELEASE_S
    while not is_free(port):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def new_cluster_id() -> str:
    """Return 16 random bytes in URL-safe base64 without padding, as Kafka's own ids are.

    It never begins with "-", because the storage tool would take it for an option.
    """
    while True:
        text = base64.urlsafe_b64encode(uuid.uuid4().bytes).rstrip(b"=").decode("ascii")
        if not text.startswith("-"):
            return text


def _cluster_id_of(data: Path) -> str | None:
    """Return the cluster id that a data directory was formatted with, or None if it is not formatted."""
    try:
        lines = (data / "meta.properties").read_text(encoding="latin-1").splitlines()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return next((line.removeprefix("cluster.id=") for line in lines if line.startswith("cluster.id=")), None)


def _as_properties(properties: Mapping[str, str]) -> str:
    """Return the text of a Java properties file. Its encoding is ISO 8859-1, so all but ASCII is escaped."""
    lines = ["# Written by kvstreams at each start of the broker. Changes here are lost: use the overrides."]
    lines += [f"{_escaped(key, '')}={_escaped(value, ' :=')}" for key, value in properties.items()]
    return "\n".join(lines) + "\n"


def _escaped(text: str, also_plain: str) -> str:
    """Escape for a properties file. Characters beyond 16 bits become two escapes, as in Java's strings."""
    units = text.encode("utf-16-be", "surrogatepass")
    codes = (int.from_bytes(units[i : i + 2], "big") for i in range(0, len(units), 2))
    plain = string.ascii_letters + string.digits + "._-/,@;+*(){}[]<>|&$%~'\"?" + also_plain
    return "".join(chr(code) if chr(code) in plain else f"\\u{code:04x}" for code in codes)


def _version_numbers(version: str) -> tuple[int, ...]:
    """Return (4, 4, 0) for "4.4.0", to compare versions. Raises ValueError."""
    return tuple(int(number) for number in version.split("."))


def _file_size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _tail(path: Path, start: int) -> str:
    """Return what was written to a log after byte `start`: at most its last QUOTED_BYTES."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            # A log that is shorter than before has been rolled.
            begin = start if start <= size else 0
            file.seek(max(begin, size - QUOTED_BYTES))
            return file.read().decode("utf-8", "replace")
    except FileNotFoundError:
        return ""


def _quotable(text: str) -> list[str]:
    """Return the last QUOTED_LINES lines that matter: no stack frames, and no line twice.

    Lines below ERROR are left out if there are any errors: they are consequences, and would hide the reason.
    """
    written = [line for line in text.splitlines() if line.strip() and not _STACK_FRAME.match(line)]
    errors = [line for line in written if " INFO " not in line and " WARN " not in line]
    lines = dict.fromkeys(line.strip()[:QUOTED_LINE_CHARS].rstrip(".") for line in errors or written)
    return list(lines)[-QUOTED_LINES:]
