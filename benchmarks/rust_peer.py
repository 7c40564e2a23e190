"""The Rust engines of benchmarks/peers as child processes, each alive for one workload.

What lives here: building them, asking them. What must not: what is asked, and what the answers mean.
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
    """Where the built peers are. counting: the one whose allocator counts, which must not be timed."""

    timed: Path
    counting: Path


def versions() -> dict[str, str]:
    """Give the exact versions of the peers' crates, as their manifest pins them."""
    wanted = tomllib.loads((PROJECT / "Cargo.toml").read_text())["dependencies"]
    return {crate: wanted[crate].removeprefix("=") for crate in ("kv-index", "dynamo-kv-router")}


def find_or_build(target: Path, build: bool | None) -> Binaries | str:
    """Give the built peers, or the reason why there are none.

    target: cargo's target directory. build: True builds anew, None builds where nothing is built, False never builds.
    """
    found = Binaries(target / "release" / "peer", target / "release" / "peer_counting")
    if build is not True and found.timed.exists() and found.counting.exists():
        return found
    if build is False:
        return "the Rust peers are not built and --no-build was given"
    cargo = shutil.which("cargo")
    if cargo is None:
        return "the Rust peers are not built and there is no cargo"
    command = [cargo, "build", "--release", "--manifest-path", str(PROJECT / "Cargo.toml"), "--target-dir", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return f"the Rust peers do not build: {done.stderr.strip().splitlines()[-1:]}"
    return found


class RustPeer:
    """One child with one workload loaded; a context manager that ends it."""

    def __init__(self, binary: Path, workload: Path) -> None:
        self._child = subprocess.Popen(
            [str(binary), str(workload)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        self._read("load")

    def ask(self, command: str) -> dict[str, Any]:
        """Do one repetition and give its figures. Raises RuntimeError where the child ended instead."""
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
            raise RuntimeError(f"the Rust peer ended at {command!r} with code {self._child.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer
