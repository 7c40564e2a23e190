"""Kafka's jars: pinned in kafka-jars.txt, kept in the user's Maven cache, fetched there through jgo when missing.

What lives here: the pins, the cache's place, fetching and verifying, and the lock between processes. What must not: an
address of a registry (jgo knows its own), or anything about running the broker. The cache belongs to the user and is
shared with Maven: nothing but verified jars is put at its paths.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from streams.errors import LocalKafkaError

#: Called after each fetched jar with (done, total, name), from the caller's own thread; never when nothing is missing.
Progress = Callable[[int, int, str], None]

#: Eight at a time fetch the 46 jars (44 MB) in 6 to 12 s; most are small, and wait for round trips only.
FETCH_THREADS = 8

#: A second try mends a cut connection; a jar that is wrong twice is wrong where it comes from.
FETCH_ATTEMPTS = 2

#: How long one process waits for another's fetch: 44 MB at 75 kB/s, slower than that nobody waits for.
FETCH_WAIT_S = 600.0

#: flock has no timeout of its own, so it is asked for this often.
LOCK_POLL_S = 0.05

# requests' own exceptions are OSErrors as well; these numbers say that the disk is at fault and not the network.
_DISK_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS})

_PINS = Path(__file__).with_name("kafka-jars.txt")
_LOCK_NAME = ".kvstreams.lock"
_STAGING_NAME = ".kvstreams-staging"


@dataclass(frozen=True, slots=True)
class Jar:
    """One pinned jar: its Maven coordinate, size and digest."""

    group: str
    artifact: str
    version: str
    size_bytes: int
    sha256: str

    @property
    def coordinate(self) -> str:
        return f"{self.group}:{self.artifact}:{self.version}"

    def path_in(self, repository: Path) -> Path:
        """Return where the Maven layout keeps this jar under `repository`."""
        folder = repository.joinpath(*self.group.split("."), self.artifact, self.version)
        return folder / f"{self.artifact}-{self.version}.jar"


@functools.cache
def pinned_jars() -> tuple[Jar, ...]:
    """Read kafka-jars.txt: one `group:artifact:version size sha256` a line, `#` begins a comment."""
    jars = []
    for line in _PINS.read_text(encoding="ascii").splitlines():
        if line and not line.startswith("#"):
            coordinate, size_bytes, sha256 = line.split()
            group, artifact, version = coordinate.split(":")
            jars.append(Jar(group, artifact, version, int(size_bytes), sha256))
    return tuple(jars)


#: The version of the broker that the pins make up.
KAFKA_VERSION = next(jar.version for jar in pinned_jars() if jar.artifact == "kafka_2.13")


def maven_cache() -> Path:
    """Return the user's Maven cache: M2_REPO, else ~/.m2/repository, as Maven and jgo have it."""
    if configured := os.environ.get("M2_REPO"):
        return Path(configured).expanduser().absolute()
    return Path.home() / ".m2" / "repository"


def ensure_jars(progress: Progress | None = None) -> list[Path]:
    """Return the paths of all pinned jars, fetching what is missing or of the wrong size.

    A jar that is there is judged by its size alone, which finds every cut download in well under a millisecond; what
    is fetched is verified by sha256 before it gets its place. Needs jgo and the network only where something is
    missing. Raises LocalKafkaError, which names the jar.
    """
    repository = maven_cache()
    if _missing(repository):
        try:
            _fetch_missing(repository, progress)
        except OSError as exc:
            raise LocalKafkaError(
                f"The Maven cache {repository} cannot be written: {exc.strerror or exc}",
                remedy="Make room or give write permission there, or set M2_REPO to another directory",
            ) from exc
    return [jar.path_in(repository) for jar in pinned_jars()]


@contextmanager
def file_lock(path: Path, wait_s: float, held: str) -> Iterator[None]:
    """Hold an exclusive lock on the file `path` among processes and threads; `held` says in an error who else may.

    The kernel drops it together with the process, so that no stale lock is left by a kill.
    Raises LocalKafkaError after `wait_s`.
    """
    deadline = time.monotonic() + wait_s
    with path.open("ab") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise LocalKafkaError(
                        f"{held}: {path} was not released within {wait_s:.0f} s",
                        remedy="Wait for it to finish or end it, then run this again",
                    ) from None
                time.sleep(LOCK_POLL_S)
        yield


def _missing(repository: Path) -> list[Jar]:
    return [jar for jar in pinned_jars() if _size_bytes(jar.path_in(repository)) != jar.size_bytes]


def _size_bytes(path: Path) -> int:
    """Return the file's size, or -1 where there is none."""
    try:
        return path.stat().st_size
    except (FileNotFoundError, NotADirectoryError):
        return -1


def _fetch_missing(repository: Path, progress: Progress | None) -> None:
    repository.mkdir(parents=True, exist_ok=True)
    with file_lock(repository / _LOCK_NAME, FETCH_WAIT_S, "Another process is fetching Kafka's jars"):
        missing = _missing(repository)  # again: another process may have fetched them while this one waited
        staging = repository / _STAGING_NAME
        shutil.rmtree(staging, ignore_errors=True)  # of a fetch that was killed; the lock says that none is under way
        executor = ThreadPoolExecutor(FETCH_THREADS, thread_name_prefix="fetch-jar")
        try:
            fetching = {executor.submit(_fetch_verified, jar, repository, staging): jar for jar in missing}
            for done, future in enumerate(as_completed(fetching), start=1):
                future.result()
                if progress is not None:
                    progress(done, len(missing), fetching[future].artifact)
        finally:
            # After an error or Ctrl-C those not begun are dropped; those under way end within jgo's own timeout.
            executor.shutdown(wait=True, cancel_futures=True)
            shutil.rmtree(staging, ignore_errors=True)


def _fetch_verified(jar: Jar, repository: Path, staging: Path) -> None:
    """Put one jar at its place in the cache, or raise LocalKafkaError; a wrong file there is replaced.

    jgo writes straight to the path that it later takes for cached, so that a killed download would leave a cut jar
    behind. So it downloads into `staging`, and only what has the pinned digest is moved, in one step.
    """
    problem = ""
    cause: Exception | None = None
    for attempt in range(FETCH_ATTEMPTS):
        into = staging / str(attempt)  # a directory of its own: jgo returns what it finds, and asserts on overwriting
        try:
            path = _fetch(jar, into)
        except LocalKafkaError:
            raise
        except Exception as exc:  # requests' errors, jgo's RuntimeError for a status other than 200
            if isinstance(exc, OSError) and exc.errno in _DISK_ERRNOS:
                raise
            problem, cause = f"{type(exc).__name__}: {exc}", exc
            continue
        sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
        if sha256 == jar.sha256:
            target = jar.path_in(repository)
            target.parent.mkdir(parents=True, exist_ok=True)
            path.replace(target)
            return
        problem, cause = f"its sha256 is {sha256} instead of {jar.sha256} ({path.stat().st_size} bytes)", None
        path.unlink()
    if cause is not None:
        raise LocalKafkaError(
            f"{jar.coordinate} could not be fetched: {problem}",
            remedy=f"Check the network and the proxy settings (HTTPS_PROXY) and run this again: what has been fetched"
            f" stays in {repository}. Or use a Kafka of your own",
            jar=jar.coordinate,
        ) from cause
    raise LocalKafkaError(
        f"{jar.coordinate} was fetched {FETCH_ATTEMPTS} times and is not what was pinned: {problem}",
        remedy="Something on the way changes the file (a proxy, a mirror): fetch from another network, or use a Kafka"
        " of your own",
        jar=jar.coordinate,
    )


def _fetch(jar: Jar, into: Path) -> Path:
    """Download one jar with jgo into the Maven layout under `into` and return its path."""
    try:
        # Imported only here: with all jars in the cache the package is not needed.
        from jgo.maven import MavenContext, PythonResolver
    except ImportError as exc:
        raise LocalKafkaError(
            f"{jar.coordinate} is not in the Maven cache, and the jgo package that fetches it is not installed",
            remedy="Run `pip install 'kvstreams[local]'`",
            jar=jar.coordinate,
        ) from exc
    context = MavenContext(resolver=PythonResolver(), repo_cache=into)
    return Path(context.project(jar.group, jar.artifact).at_version(jar.version).artifact().resolve())
