"""The files of a release, from the commit that is checked out: wheel, sdist, SBOM, notices and checksums.

What lives here: `make release`. What must not: what is in the wheel (pyproject.toml), and uploading.

Everything is made from an export of the commit, so changes that are not committed have no effect, and every time stamp
is that of the commit. The wheel and the sdist are built twice, in different folders, and must be equal bit by bit.

    .venv/bin/python -m tools.release dist
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import venv
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]

#: What users install next to the base. `docs` and `dev` are for those who change kvstreams.
EXTRAS = ("front", "local", "otel", "picker")

CHECKSUMS = "SHA256SUMS"


class ReleaseError(Exception):
    """A step of the release failed, or its result is not what it has to be."""


def run(command: Sequence[str | Path], *, env: Mapping[str, str] | None = None, folder: Path = ROOT) -> str:
    """Run a command and return its output. Raises ReleaseError with the end of its output."""
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, **(env or {})}, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise ReleaseError(f"{' '.join(map(str, command))}\n{(done.stdout + done.stderr)[-3000:]}")
    return done.stdout


def commit_environment() -> dict[str, str]:
    """The variables that make a build repeatable: the time of the commit, and the tested versions of build tools."""
    return {
        "SOURCE_DATE_EPOCH": run(["git", "log", "-1", "--format=%ct"]).strip(),
        "PIP_CONSTRAINT": str(ROOT / "constraints.txt"),
    }


def build(target: Path) -> list[Path]:
    """Build the wheel and the sdist of the commit into a folder, twice. Raises ReleaseError if they differ."""
    results: list[dict[str, bytes]] = []
    for _ in range(2):
        with tempfile.TemporaryDirectory(prefix="kvstreams-release-") as folder:
            source, built = Path(folder, "source"), Path(folder, "built")
            archive = Path(folder, "source.tar")
            run(["git", "archive", "--output", archive, "HEAD"])
            source.mkdir()
            run(["tar", "-xf", archive, "-C", source])
            run([sys.executable, "-m", "build", "--outdir", built, source], env=commit_environment(), folder=source)
            results.append({path.name: path.read_bytes() for path in sorted(built.iterdir())})
    first, second = results
    if first != second:
        raise ReleaseError("two builds of the same commit differ")
    target.mkdir(parents=True, exist_ok=True)
    for name, content in first.items():
        (target / name).write_bytes(content)
    paths = [target / name for name in first]
    run([sys.executable, "-m", "twine", "check", "--strict", *paths])
    return paths


def install(wheel: Path, folder: Path) -> Path:
    """Install the wheel with all extras and the tested versions into a new environment; returns its Python."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    run([python, "-m", "pip", "install", "--quiet", f"{wheel}[{','.join(EXTRAS)}]"], env=commit_environment())
    return python


def describe(wheel: Path, python: Path, target: Path) -> list[Path]:
    """Write what the wheel needs, as an environment has it: the SBOM in CycloneDX, and the notices of every package."""
    name = "-".join(wheel.name.split("-")[:2])
    sbom, notices = target / f"{name}.cdx.json", target / f"{name}-NOTICES.txt"
    # pip is in the environment, but not a part of kvstreams.
    run([python, "-m", "pip", "uninstall", "--quiet", "--yes", "pip"])
    project = ["--pyproject", str(ROOT / "pyproject.toml"), "--mc-type", "application"]
    run(
        [sys.executable, "-m", "cyclonedx_py", "environment", *project, "--output-reproducible", "-o", sbom, python],
        env=commit_environment(),
    )
    texts = ["--with-license-file", "--with-notice-file", "--no-license-path", "--with-urls", "--from=mixed"]
    listed = ["--python", str(python), "--ignore-packages", "kvstreams", "--format=plain-vertical"]
    run([sys.executable, "-m", "piplicenses", *texts, *listed, "--output-file", notices])
    return [sbom, notices]


def audit(python: Path) -> str:
    """Look for known vulnerabilities; returns what to print. Raises ReleaseError if there is one.

    The database is on a server, so that a machine may not reach it. That is no failure, but it is printed.
    """
    site = next((python.parents[1] / "lib").glob("python*/site-packages"))
    command = [sys.executable, "-m", "pip_audit", "--path", str(site), "--format", "json", "--progress-spinner", "off"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        found = json.loads(done.stdout)["dependencies"]
    except ValueError:
        found = []
    vulnerable = [f"{each['name']} {each['version']}" for each in found if each.get("vulns")]
    if vulnerable:
        raise ReleaseError(f"known vulnerabilities: {', '.join(vulnerable)}\n{done.stderr[-3000:]}")
    skipped = [each["name"] for each in found if "skip_reason" in each and each["name"] != "kvstreams"]
    known = sum("vulns" in each for each in found)
    if not known:
        return "pip-audit: nothing was checked, because the database of vulnerabilities cannot be reached from here"
    text = f"pip-audit: no known vulnerability in {known} packages"
    return text + (f"; the database did not answer for {len(skipped)}" if skipped else "")


def main(target: Path) -> None:
    """Make all files of the release."""
    files = build(target)
    wheel = next(path for path in files if path.suffix == ".whl")
    with tempfile.TemporaryDirectory(prefix="kvstreams-release-") as folder:
        python = install(wheel, Path(folder))
        print(audit(python))
        files += describe(wheel, python, target)
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in sorted(files)]
    (target / CHECKSUMS).write_text("".join(lines))
    print("".join(lines), end="")


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]).resolve())
    except ReleaseError as exc:
        raise SystemExit(f"release: {exc}") from exc
