"""A small file system that a test can fill, mounted in memory."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

#: The size of the file system. RocksDB reserves some of it for itself at once.
DISK_MB = 48


@contextlib.contextmanager
def mounted(path: Path, megabytes: int) -> Iterator[Path]:
    """Make a folder that is a file system of this size. Raises OSError if this user may not mount one."""
    path.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "kvstreams-test", str(path)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except subprocess.CalledProcessError as exc:
        raise OSError(exc.stderr.decode().strip()) from exc
    try:
        yield path
    finally:
        # Lazily, since a worker that is about to end may still have files open: the mount ends when the last is closed.
        subprocess.run(["umount", "--lazy", str(path)], check=True)


@contextlib.contextmanager
def small_disk_at(path: Path) -> Iterator[Path]:
    """Mount a file system of DISK_MB; skips the test if this user may not mount one."""
    with contextlib.ExitStack() as mounts:
        try:
            mounts.enter_context(mounted(path, DISK_MB))
        except OSError as exc:
            pytest.skip(f"no file system can be mounted here: {exc}")
        yield path


def fill(ballast: Path) -> None:
    """Write to a file until the file system has no space left."""
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(4096)):
            pass
