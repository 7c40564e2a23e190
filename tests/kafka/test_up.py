"""`kvstreams kafka` and `kvstreams up`, as a user runs them, on a Kafka that they start themselves."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from tests.helpers.api import Api
from tests.helpers.commands import PATIENCE_S, Run, Start


@pytest.mark.first_ring("kafka", "up")
@pytest.mark.long_running
def test_everything_runs_on_a_kafka_that_was_started_before_and_leaves_it_running(
    run: Run, start: Start, tmp_path: Path
) -> None:
    """The router that `up` names chooses its engine. Ctrl-C ends all of it; Kafka ends with `kafka down`."""
    folder = ("--directory", str(tmp_path / "kafka"))
    done = run("kafka", "up", *folder)
    assert done.returncode == 0, done.stderr
    try:
        process = start(
            "up", "--workers", "1", "--directory", str(tmp_path / "up"), "--kafka-directory", str(tmp_path / "kafka")
        )
        assert process.stdout is not None
        shown: list[str] = []
        while not shown or "Ctrl-C" not in shown[-1]:
            line = process.stdout.readline()
            assert line, f"it ended: {''.join(shown)}{process.communicate()[1]}"
            shown.append(line)
        (url,) = re.findall(r"^curl -s (http://\S+)/loads$", "".join(shown), re.MULTILINE)
        api = Api(url)
        assert api.route(request_id="r1", token_ids=list(range(32)))["worker_id"] == 1
        assert api.loads([1])[1, 0][2] == 1
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0, out + err
        assert run("kafka", "status", *folder).returncode == 0
    finally:
        down = run("kafka", "down", *folder)
    assert down.returncode == 0
    assert run("kafka", "status", *folder).returncode == 1
