"""What docs/publisher.md promises about its example, run as a process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from streams.lab.kafka.ports import free_port
from tests.helpers.commands import PATIENCE_S, environment
from tests.helpers.pages import ROOT, blocks


def test_the_publisher_of_the_page_fails_within_ten_seconds_if_no_kafka_answers(tmp_path: Path) -> None:
    """The error names the address and the setting, and comes long before Kafka's own timeout of 30 s."""
    (code,) = [code for _, code in blocks("docs/publisher.md", "python")]
    kafka = f"127.0.0.1:{free_port()}"
    # Importing can take seconds on a busy machine; the promise is about the time after it.
    script = "import time, streams.engines.publisher\nbegun = time.monotonic()\ntry:\n"
    script += "".join(f"    {line}\n" for line in code.splitlines())
    script += "finally:\n    print(time.monotonic() - begun)\n"
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=environment({"KVSTREAMS_KAFKA": kafka, "PYTHONPATH": str(ROOT)}),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 1
    assert f"no Kafka answers at {kafka}: " in done.stderr
    assert "KVSTREAMS_KAFKA" in done.stderr
    assert float(done.stdout) < 10.0
