"""Kafka's jars: pinned for each version, kept in the user's Maven cache, downloaded there through jgo when missing.

What lives here: the pins, the location of the cache, downloading and verifying, and the lock between processes. What
must not: an address of a registry (jgo knows its own), or anything about running the broker. The cache belongs to the
user and is shared with Maven: only verified jars are put at its paths.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import hashlib
import os
import shutil
import ssl
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from streams.errors import LocalKafkaError

#: Called in the caller's own thread: once with (0, total, "") before the first download, and with (done, total, name)
#: after each jar. Never called when no jar is missing.
Progress = Callable[[int, int, str], None]

#: Eight threads download the 46 jars (44 MB) in 6 to 12 s. Most jars are small, so that round trips dominate.
FETCH_THREADS = 8

#: A second attempt helps after a cut connection. A jar that is wrong twice is wrong at its source.
FETCH_ATTEMPTS = 2

#: How long one process waits for the download of another: enough for 44 MB at 75 kB/s.
FETCH_WAIT_S = 600.0

#: flock has no timeout of its own, so the lock is polled at this interval.
LOCK_POLL_S = 0.05

# requests' own exceptions are OSErrors as well. These numbers mean that the disk is at fault and not the network.
_DISK_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS})

#: The newest Kafka whose jars are pinned.
NEWEST = "4.4.0"

#: For tests and demos on an older one, whose jars are pinned as well.
VERSION_ENV = "KVSTREAMS_TEST_KAFKA_VERSION"

_PINS = Path(__file__).with_name(f"kafka-jars-{os.environ.get(VERSION_ENV, NEWEST)}.txt")
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
        """Return this jar's path under `repository`, in the Maven layout."""
        folder = repository.joinpath(*self.group.split("."), self.artifact, self.version)
        return folder / f"{self.artifact}-{self.version}.jar"


@functools.cache
def pinned_jars() -> tuple[Jar, ...]:
    """Read the file of pins: one `group:artifact:version size sha256` per line; `#` begins a comment."""
    jars = []
    for line in _PINS.read_text(encoding="ascii").splitlines():
        if line and not line.startswith("#"):
            coordinate, size_bytes, sha256 = line.split()
            group, artifact, version = coordinate.split(":")
            jars.append(Jar(group, artifact, version, int(size_bytes), sha256))
    return tuple(jars)


#: The version of the broker that is started.
KAFKA_VERSION = next(jar.version for jar in pinned_jars() if jar.artifact == "kafka_2.13")


def maven_cache() -> Path:
    """Return the user's Maven cache, where Maven and jgo look for it: M2_REPO, or ~/.m2/repository if that is unset."""
    if configured := os.environ.get("M2_REPO"):
        return Path(configured).expanduser().absolute()
    return Path.home() / ".m2" / "repository"


def ensure_jars(progress: Progress | None = None) -> list[Path]:
    """Return the paths of all pinned jars, after downloading those that are missing or have the wrong size.

    A jar in the cache is checked by its size alone, which detects every cut download in well under a millisecond. A
    downloaded jar is verified by sha256 before it is moved to its path. jgo, truststore and the network are needed
    only when a jar is missing. Raises LocalKafkaError, which names the jar.
    """
    repository = maven_cache()
    if _missing(repository):
        try:
            _fetch_missing(repository, progress)
        except OSError as exc:
            raise LocalKafkaError(
                f"The Maven cache {repository} cannot be written: {exc.strerror or exc}",
                remedy="Free some space or grant write permission there, or set M2_REPO to another directory",
            ) from exc
    return [jar.path_in(repository) for jar in pinned_jars()]


@contextmanager
def file_lock(path: Path, wait_s: float, held: str) -> Iterator[None]:
    """Hold an exclusive lock on the file `path` among processes and threads.

    held: for the error message, who else may hold the lock. The kernel releases the lock when the process ends, so
    that a killed process leaves no stale lock. Raises LocalKafkaError after `wait_s`.
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
    """Return the file's size, or -1 when it does not exist."""
    try:
        return path.stat().st_size
    except (FileNotFoundError, NotADirectoryError):
        return -1


def _fetch_missing(repository: Path, progress: Progress | None) -> None:
    repository.mkdir(parents=True, exist_ok=True)
    with file_lock(repository / _LOCK_NAME, FETCH_WAIT_S, "Another process is downloading Kafka's jars"):
        missing = _missing(repository)  # again: another process may have downloaded them while this one waited
        if not missing:
            return
        if progress is not None:
            progress(0, len(missing), "")
        staging = repository / _STAGING_NAME
        shutil.rmtree(staging, ignore_errors=True)  # left by a process that was killed; the lock excludes a live one
        executor = ThreadPoolExecutor(FETCH_THREADS, thread_name_prefix="fetch-jar")
        with _system_trust():
            try:
                fetching = {executor.submit(_fetch_verified, jar, repository, staging): jar for jar in missing}
                for done, future in enumerate(as_completed(fetching), start=1):
                    future.result()
                    if progress is not None:
                        progress(done, len(missing), fetching[future].artifact)
            finally:
                # After an error or Ctrl-C, waiting downloads are dropped; running ones end within jgo's own timeout.
                executor.shutdown(wait=True, cancel_futures=True)
                shutil.rmtree(staging, ignore_errors=True)


@contextmanager
def _system_trust() -> Iterator[None]:
    """Have jgo accept the certificates that the system trusts, in addition to those that requests accepts.

    requests knows only the authorities that certifi ships, or those in REQUESTS_CA_BUNDLE. A company's own authority
    is in the system's trust store (or in SSL_CERT_FILE), where pip finds it. jgo has no option for this, so Python's
    `ssl.SSLContext` is replaced while the downloads run. Raises LocalKafkaError.
    """
    try:
        import truststore
    except ImportError as exc:
        raise _not_installed("truststore", exc) from exc
    if ssl.SSLContext is truststore.SSLContext:  # other code did so already, and expects it to stay
        yield
        return
    truststore.inject_into_ssl()
    try:
        yield
    finally:
        truststore.extract_from_ssl()


def _fetch_verified(jar: Jar, repository: Path, staging: Path) -> None:
    """Put one jar at its path in the cache, replacing a wrong file there. Raises LocalKafkaError.

    jgo writes directly to the path that it later treats as cached, so that a killed download would leave a cut jar
    behind. Therefore it downloads into `staging`, and only a file with the pinned digest is moved, in one step.
    """
    problem = ""
    cause: Exception | None = None
    for attempt in range(FETCH_ATTEMPTS):
        into = staging / str(attempt)  # its own directory: jgo returns a file that exists and never overwrites one
        try:
            path = _fetch(jar, into)
        except LocalKafkaError:
            raise
        except Exception as exc:  # requests' errors, and jgo's RuntimeError for a status other than 200
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
            f"{jar.coordinate} could not be downloaded: {problem}",
            remedy=_remedy_for(cause, repository),
            jar=jar.coordinate,
        ) from cause
    raise LocalKafkaError(
        f"{jar.coordinate} was downloaded {FETCH_ATTEMPTS} times and differs from the pinned jar: {problem}",
        remedy="A proxy or a mirror changes the file: download from another network, or use a Kafka of your own",
        jar=jar.coordinate,
    )


def _remedy_for(cause: BaseException, repository: Path) -> str:
    """Return what the operator should do about a download that raised `cause`."""
    if _is_about_certificates(cause):
        return (
            "No certificate authority that this machine trusts has signed the server's certificate, as is usual behind"
            " a company's proxy. Add the company's authority to the system's trust store, or set SSL_CERT_FILE or"
            " REQUESTS_CA_BUNDLE to a PEM file that contains it, and run this again. Or use a Kafka of your own"
        )
    return (
        "Check the network and the proxy settings (HTTPS_PROXY) and run this again: downloaded jars stay in"
        f" {repository}. Or use a Kafka of your own"
    )


def _is_about_certificates(exc: BaseException | None) -> bool:
    """Whether an error, or one that caused it, means that a certificate was not accepted.

    requests and urllib3 wrap Python's error in errors of their own; one of them stands for any fault of TLS.
    """
    while exc is not None:
        if isinstance(exc, ssl.SSLCertVerificationError):
            return True
        exc = exc.__cause__ or exc.__context__
    return False


def _fetch(jar: Jar, into: Path) -> Path:
    """Download one jar with jgo into the Maven layout under `into` and return its path."""
    try:
        # Imported only here: with all jars in the cache these packages are not needed.
        from jgo.maven import MavenContext, PythonResolver
    except ImportError as exc:
        raise _not_installed("jgo", exc) from exc
    context = MavenContext(resolver=PythonResolver(), repo_cache=into)
    return Path(context.project(jar.group, jar.artifact).at_version(jar.version).artifact().resolve())


def _not_installed(package: str, exc: ImportError) -> LocalKafkaError:
    return LocalKafkaError(
        f"Jars of Kafka are missing in the Maven cache, and the {package} package that downloads them is not"
        f" installed: {exc}",
        remedy="Run `pip install 'kvstreams[local]'`",
    )
