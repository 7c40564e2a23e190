"""Install this checkout into a virtual environment with pip, and print every few seconds what pip is doing.

What lives here: what `make` runs before anything else, with the standard library alone. What must not: which packages
and versions there are (pyproject.toml, constraints.txt). pip alone prints nothing for half a minute.

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

#: A line is printed this often, whatever happens.
LINE_EVERY_S = 5.0

#: How much of pip's output is printed when it fails.
TAIL_LINES = 30

_COLLECTING = re.compile(r"Collecting (?P<name>[A-Za-z0-9._-]+)")
_DOWNLOADING = re.compile(r"\s+Downloading (?P<file>\S+?)(?:\.metadata)? (?P<size>\(.*\))")
_INSTALLING = re.compile(r"Installing collected packages: (?P<names>.*)")


class Installer:
    """One installation. The main thread runs pip and reads its output; another thread prints where it is."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._began = time.monotonic()
        self._doing = "creating the virtual environment"
        self._collected: set[str] = set()
        self._n_to_install = 0  # 0 until pip has chosen all packages
        self._n_before = 0

    def run(self, what: str) -> int:
        """Create the environment where it is missing and install `what` into it; returns the exit status."""
        over = threading.Event()

        def repeat() -> None:
            while not over.wait(LINE_EVERY_S):
                self._print(self.doing())

        thread = threading.Thread(target=repeat, daemon=True)
        thread.start()
        try:
            status = self._create() or self._install(what) or self._compile()
        finally:
            over.set()
            thread.join()
        self._print("installation failed" if status else "installed")
        return status

    def doing(self) -> str:
        """What is being done, for one line."""
        if self._n_to_install:
            return f"installing: {self._n_installed() - self._n_before} of {self._n_to_install} packages"
        return self._doing

    def read(self, line: str) -> None:
        """Note what a line of pip's output means."""
        if match := _COLLECTING.match(line):
            self._collected.add(match["name"])
            self._doing = f"choosing versions: {len(self._collected)} packages so far ({match['name']})"
        elif match := _DOWNLOADING.match(line):
            self._doing = f"downloading {match['file'].rpartition('/')[2]} {match['size']}"
        elif match := _INSTALLING.match(line):
            self._n_before = self._n_installed()
            self._n_to_install = len(match["names"].split(","))

    def _create(self) -> int:
        # The command and not the module: where ensurepip is missing, only the command explains what to install.
        return subprocess.run([sys.executable, "-m", "venv", self._folder], check=False).returncode

    def _install(self, what: str) -> int:
        """Run pip. Its errors are printed at once, the rest of its output only when it fails."""
        options = ["--progress-bar", "off", "--no-compile", "--editable", what]
        tail: deque[str] = deque(maxlen=TAIL_LINES)
        with subprocess.Popen(
            [self._folder / "bin" / "python", "-m", "pip", "install", *options],
            stdout=subprocess.PIPE,
            text=True,
            errors="replace",
        ) as pip:
            assert pip.stdout is not None
            for line in pip.stdout:
                tail.append(line)
                self.read(line)
        if pip.returncode != 0:
            sys.stdout.writelines(tail)
        return pip.returncode

    def _compile(self) -> int:
        """Compile all modules to bytecode: pip would do it in one process, one module after the other."""
        self._n_to_install = 0
        self._doing = "compiling Python modules"
        command = [f"{self._folder}/bin/python", "-m", "compileall", "-qq", "-j", "0", f"{self._folder}/lib"]
        subprocess.run(command, check=False)  # some packages contain files for other versions of Python
        return 0

    def _n_installed(self) -> int:
        return sum(1 for _ in self._folder.glob("lib/python*/site-packages/*.dist-info"))

    def _print(self, text: str) -> None:
        print(f"{time.monotonic() - self._began:4.0f} s  {text}", flush=True)


if __name__ == "__main__":
    raise SystemExit(Installer(Path(sys.argv[1])).run(sys.argv[2]))
