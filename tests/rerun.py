"""The tests that failed last, once more and one at a time: `python -m tests.rerun`.

What lives here: running again what failed next to three other tests, and the list of what passed only then. What must
not: a third attempt.

Tests that start processes share two cores with three others. On a busy machine one of 6,000 can miss its time limit,
which says nothing of the change under test. A test that fails alone as well is a failure, and so is a run in which more
than FAILED_MAX tests failed. A test that passes only alone depends on load or on its neighbours and has to be fixed. It
is added to the list FLAKY, which is committed. This excuse counts once: a test in the list is not run again. As long as
the list exists, `python -m tests.rerun --listed` and with it `make nightly` fail.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

#: More failures than this are not chance.
FAILED_MAX = 5

LAST_FAILED = Path(".pytest_cache/v/cache/lastfailed")

#: Tests that passed only alone, one per line. A fix removes its line, and the last one the file.
FLAKY = Path("tests/flaky.txt")


def main(arguments: Sequence[str] = ()) -> int:
    """Return pytest's exit status of the second run, or 1 without one. With --listed, 1 if any test is in the list."""
    listed = FLAKY.read_text().splitlines() if FLAKY.exists() else []
    if list(arguments) == ["--listed"]:
        if listed:
            print(f"rerun: {FLAKY} lists tests that passed only alone: {', '.join(listed)}", file=sys.stderr)
        return bool(listed)
    try:
        failed = sorted(json.loads(LAST_FAILED.read_text()))
    except (OSError, ValueError):
        print("rerun: pytest left no list of failed tests, so something else went wrong", file=sys.stderr)
        return 1
    if not 0 < len(failed) <= FAILED_MAX:
        print(f"rerun: {len(failed)} tests failed; at most {FAILED_MAX} are run again", file=sys.stderr)
        return 1
    again = [test for test in failed if test in listed]
    if again:
        print(f"rerun: not run again, because {FLAKY} lists them already: {', '.join(again)}", file=sys.stderr)
        return 1
    print(f"rerun: once more, one at a time: {', '.join(failed)}", flush=True)
    status = _run_alone(failed)
    if status == 0:
        FLAKY.write_text("".join(f"{test}\n" for test in sorted({*listed, *failed})))
        print(f"rerun: PASSED ONLY ALONE, so each of these has to be fixed. {FLAKY} lists them; commit it:")
        for test in failed:
            print(f"  {test}")
    return status


def _run_alone(tests: Sequence[str]) -> int:
    return subprocess.run([sys.executable, "-m", "pytest", "--numprocesses", "0", *tests], check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
