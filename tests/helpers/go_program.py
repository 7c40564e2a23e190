"""Programs for tests that are built once from their Go modules, and kept in the user's cache.

What lives here: building one. What must not: what it is used for (helm, promql).

The module's checksum is in this project, and the module's own go.sum has those of all that it is built from. Building
takes minutes, so no test of the first ring needs such a program.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from tools.user_cache import kept

#: Building takes three to six minutes of processor time.
BUILD_TIMEOUT_S = 1500


class NoGoProgram(Exception):
    """The program cannot be had here. The message says what to do."""


@dataclass(frozen=True)
class GoProgram:
    """One program of a Go module.

    module: with its version, as `go mod download` takes it. checksum: of the module. package: the program's folder.
    """

    name: str
    module: str
    checksum: str
    package: str

    @property
    def variable(self) -> str:
        """The environment variable with the path of another program that is used instead."""
        return f"KVSTREAMS_TEST_{self.name.upper()}"

    def installed(self) -> Path:
        """The program's path; builds it if it is missing. Raises NoGoProgram."""
        if named := os.environ.get(self.variable):
            return Path(named)
        return kept(self.module.replace("/", "-"), self._build) / self.name

    def skip_without(self) -> None:
        """Skip the running test where the program cannot be had."""
        try:
            self.installed()
        except NoGoProgram as exc:
            pytest.skip(str(exc))

    def _build(self, scratch: Path, folder: Path) -> None:
        module = json.loads(self._go(scratch, "mod", "download", "-json", self.module))
        if module["Sum"] != self.checksum:
            raise NoGoProgram(f"{self.module} has another checksum than expected: {module['Sum']}")
        options = ["-trimpath", "-buildvcs=false", "-o", str(folder / self.name)]
        self._go(Path(module["Dir"]), "build", *options, self.package)

    def _go(self, folder: Path, *arguments: str) -> str:
        go = shutil.which("go")
        if go is None:
            raise NoGoProgram(
                f"this test needs Go, to build {self.module}, or {self.variable} as the path of {self.name}"
            )
        # A workspace of the module names folders that the downloaded module does not have.
        environment = {**os.environ, "GOWORK": "off"}
        done = subprocess.run(
            [go, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S
        )
        if done.returncode:
            output = (done.stderr or done.stdout).strip()[-500:]
            raise NoGoProgram(f"go {arguments[0]} of {self.module} failed: {output}")
        return done.stdout
