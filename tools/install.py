"""Install this checkout into a virtual environment with pip, and say every few seconds what pip does.

What lives here: what `make` runs before anything else, with the standard library alone. What must not: which packages
and versions there are (pyproject.toml, constraints.txt). pip itself says nothing for half a minute while it installs.

    python3 tools/install.py .venv '.[dev]'
"""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from collections import deque
from pathlib import Path

#: A line this often, while anything goes on.
LINE_EVERY_S = 5.0

#: What pip said last, shown when it fails.
TAIL_LINES = 30

_COLLECTING = re.compile(r"Collecting (?P<name>[A-Za-z0-9._-]+)")
_DOWNLOADING = re.compile(r"\s+Downloading (?P<file>\S+?)(?:\.metadata)? (?P<size>\(.*\))")
_INSTALLING = re.compile(r"Installing collected packages: (?P<names>.*)")


class State:
    """What is being done: written by the main thread, printed by the other one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.text = "creating the virtual environment"
        self.to_install = 0  # packages; 0 until pip knows
        self._collected: set[str] = set()
        self._before = 0

    def read(self, line: str) -> None:
        """Take over what a line of pip says."""
        if match := _COLLECTING.match(line):
            self._collected.add(match["name"])
            self.text = f"choosing versions: {len(self._collected)} packages so far ({match['name']})"
        elif match := _DOWNLOADING.match(line):
            self.text = f"downloading {match['file'].rpartition('/')[2]} {match['size']}"
        elif match := _INSTALLING.match(line):
            self._before = self._n_installed()
            self.to_install = len(match["names"].split(","))

    def line(self) -> str:
        """What is being done, in one line."""
        if not self.to_install:
            return self.text
        return f"installing: {self._n_installed() - self._before} of {self.to_install} packages"

    def _n_installed(self) -> int:
        """Packages in the environment. pip itself does not say how far it is."""
        return sum(1 for _ in self.folder.glob("lib/python*/site-packages/*.dist-info"))


def main(folder: Path, what: str) -> int:
    """Create the environment where it is missing and install `what` into it; returns pip's exit status."""
    began = time.monotonic()
    state = State(folder)
    over = threading.Event()

    def say(text: str) -> None:
        print(f"{time.monotonic() - began:4.0f} s  {text}", flush=True)

    def repeat() -> None:
        while not over.wait(LINE_EVERY_S):
            say(state.line())

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        # The command and not the module: where ensurepip is missing, only the command says what to install.
        if made := subprocess.run([sys.executable, "-m", "venv", folder], check=False).returncode:
            return made
        said: deque[str] = deque(maxlen=TAIL_LINES)
        command = [folder / "bin" / "python", "-m", "pip", "install", "--progress-bar", "off", "--editable", what]
        # Errors go to the reader at once, everything else only where pip fails.
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, errors="replace") as pip:
            assert pip.stdout is not None
            for line in pip.stdout:
                said.append(line)
                state.read(line)
    finally:
        over.set()
        thread.join()
    if pip.returncode != 0:
        sys.stdout.write("".join(said))
        say("pip failed; its last lines are above")
    else:
        say("installed")
    return pip.returncode


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1]), sys.argv[2]))
