"""`kvstreams` as a process: its environment, and what tests check of every command."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil

from streams.settings import ENV_PREFIX

#: Long enough for a command on a busy machine; only one that hangs takes longer.
PATIENCE_S = 60.0

Start = Callable[..., "subprocess.Popen[str]"]
Run = Callable[..., "subprocess.CompletedProcess[str]"]


def environment(extra: Mapping[str, str]) -> dict[str, str]:
    """Return this process's environment without its settings, and with `extra`."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(ENV_PREFIX)}
    return {**inherited, **extra}


def start_command(folder: Path, arguments: tuple[str, ...], env: Mapping[str, str]) -> subprocess.Popen[str]:
    """Start `kvstreams` in a folder. The caller kills it."""
    return subprocess.Popen(
        [sys.executable, "-m", "streams.cli", *arguments],
        env=environment(env),
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def kill_with_children(process: subprocess.Popen[str]) -> None:
    """Kill a process, and those that it and its children have started. It may have ended before."""
    if process.poll() is None:
        parent = psutil.Process(process.pid)
        for each in [parent, *parent.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()


def assert_one_line(done: subprocess.CompletedProcess[str]) -> str:
    """Assert exit status 1, nothing on stdout and one line on stderr, and return the line."""
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("kvstreams: ")
    assert done.stderr.count("\n") == 1
    return done.stderr.strip()
