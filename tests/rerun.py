"""The tests that failed last, once more and one at a time: `python -m tests.rerun`.

What lives here: running again what failed next to three other tests, and naming it. What must not: a third attempt.

Tests that start processes share two cores with three others. On a busy machine one of 6,000 can miss its time limit,
which says nothing of the change under test. A test that fails alone as well is a failure, and so is a run in which more
than FAILED_MAX tests failed. What passed only alone is named at the end, since it depends on load or on its neighbours
and has to be fixed.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

#: More failures than this are not chance.
FAILED_MAX = 5

LAST_FAILED = Path(".pytest_cache/v/cache/lastfailed")


def main() -> int:
    """Return pytest's exit status of the second run, or 1 without one."""
    try:
        failed = sorted(json.loads(LAST_FAILED.read_text()))
    except (OSError, ValueError):
        print("rerun: pytest left no list of failed tests, so something else went wrong", file=sys.stderr)
        return 1
    if not 0 < len(failed) <= FAILED_MAX:
        print(f"rerun: {len(failed)} tests failed; at most {FAILED_MAX} are run again", file=sys.stderr)
        return 1
    print(f"rerun: once more, one at a time: {', '.join(failed)}", flush=True)
    status = subprocess.run([sys.executable, "-m", "pytest", "--numprocesses", "0", *failed], check=False).returncode
    if status == 0:
        print("rerun: PASSED ONLY ALONE, so each of these depends on load or on other tests and has to be fixed:")
        for test in failed:
            print(f"  {test}")
    return status


if __name__ == "__main__":
    sys.exit(main())
