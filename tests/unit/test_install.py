"""What `make` prints while pip installs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.install import Installer

LINES = """\
Collecting numba==0.68.1 (from -c constraints.txt (line 58))
  Downloading numba-0.68.1-cp311-cp311-manylinux_2_28_x86_64.whl.metadata (2.9 kB)
Collecting numpy==2.4.6 (from -c constraints.txt (line 59))
Downloading numba-0.68.1-cp311-cp311-manylinux_2_28_x86_64.whl (3.9 MB)
Installing collected packages: numpy, llvmlite, numba
"""


def test_each_phase_of_pip_is_named(tmp_path: Path) -> None:
    """Choosing versions with their number, downloads with their size, and installing with the packages in place."""
    installer = Installer(tmp_path)
    said = [installer.doing()]
    for line in LINES.splitlines(keepends=True):
        installer.read(line)
        said.append(installer.doing())
    assert said == [
        "creating the virtual environment",
        "choosing versions: 1 packages so far (numba)",
        "downloading numba-0.68.1-cp311-cp311-manylinux_2_28_x86_64.whl (2.9 kB)",
        "choosing versions: 2 packages so far (numpy)",
        "downloading numba-0.68.1-cp311-cp311-manylinux_2_28_x86_64.whl (3.9 MB)",
        "installing: 0 of 3 packages",
    ]
    packages = tmp_path / "lib/python3.11/site-packages"
    (packages / "llvmlite-0.50.0.dist-info").mkdir(parents=True)  # still being copied
    (packages / "numpy-2.4.6.dist-info").mkdir()
    (packages / "numpy-2.4.6.dist-info" / "INSTALLER").write_text("pip")
    assert installer.doing() == "installing: 1 of 3 packages"


def test_a_failed_step_ends_the_installation_with_its_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`make` then stops, and the last line says that the installation failed."""
    installer = Installer(tmp_path)
    monkeypatch.setattr(installer, "_create", lambda: 3)
    assert installer.run(".") == 3
    assert capsys.readouterr().out == "   0 s  installation failed\n"
