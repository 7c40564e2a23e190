"""The demo's checks before it starts anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from streams.errors import SettingsError
from streams.local.demo import DemoConfig, run_demo


def test_a_missing_trace_is_reported_before_anything_starts(tmp_path: Path) -> None:
    """The error names the file, and no Kafka was started."""
    with pytest.raises(SettingsError, match=r"nowhere\.jsonl cannot be read"):
        run_demo(DemoConfig(trace=tmp_path / "nowhere.jsonl"), lambda _: pytest.fail("Kafka was started"))
