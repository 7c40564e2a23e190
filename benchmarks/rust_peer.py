"""The Rust engines of benchmarks/peers as child processes, one process per workload.

What lives here: building the processes and sending them commands. What must not: the meaning of commands and answers.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import tomllib
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

PROJECT = Path(__file__).parent / "peers"


@dataclass(frozen=True, slots=True)
class Binaries:
    """Paths of the built peers. counting: the binary whose allocator counts bytes, which must not be timed."""

    timed: Path
    counting: Path


def versions() -> dict[str, str]:
    """Exact versions of the peers' crates, as pinned in their manifest."""
    pinned = tomllib.loads((PROJECT / "Cargo.toml").read_text())["dependencies"]
    return {crate: pinned[crate].removeprefix("=") for crate in ("kv-index", "dynamo-kv-router")}


def find_or_build(target: Path, build: bool | None) -> Binaries | str:
    """Find or build the peers; returns their paths, or the reason why there are none.

    target: cargo's target directory. build: True always builds, None builds if they are missing, False never builds.
    """
    found = Binaries(target / "release" / "peer", target / "release" / "peer_counting")
    if build is not True and found.timed.exists() and found.counting.exists():
        return found
    if build is False:
        return "the Rust peers are not built and --no-build was given"
    cargo = shutil.which("cargo")
    if cargo is None:
        return "the Rust peers are not built and cargo is not installed"
    command = [cargo, "build", "--release", "--manifest-path", str(PROJECT / "Cargo.toml"), "--target-dir", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return f"building the Rust peers failed: {done.stderr.strip().splitlines()[-1:]}"
    return found


class RustPeer:
    """One child process with one workload loaded; leaving the context ends it."""

    def __init__(self, binary: Path, workload: Path) -> None:
        self._child = subprocess.Popen(
            [str(binary), str(workload)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        self._read("load")

    def ask(self, command: str) -> dict[str, Any]:
        """Run one repetition and return its figures. Raises RuntimeError if the child process exited."""
        assert self._child.stdin is not None
        self._child.stdin.write(command + "\n")
        self._child.stdin.flush()
        return self._read(command)

    def __enter__(self) -> RustPeer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._child.kill()
        self._child.communicate()

    def _read(self, command: str) -> dict[str, Any]:
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        if not line:
            raise RuntimeError(f"the Rust peer exited during {command!r} with code {self._child.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer
