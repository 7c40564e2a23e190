"""The demo's checks before it starts anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from streams.errors import SettingsError
from streams.lab.demo.figures import mean_figures
from streams.lab.demo.run import DemoConfig, run_demo


def test_a_missing_trace_is_reported_before_anything_starts(tmp_path: Path) -> None:
    """The error names the file, and no Kafka was started."""
    with pytest.raises(SettingsError, match=r"nowhere\.jsonl cannot be read"):
        run_demo(DemoConfig(trace=tmp_path / "nowhere.jsonl"), lambda _: pytest.fail("Kafka was started"))


def test_figures_of_several_runs_are_means_with_the_spread_of_the_hit_share() -> None:
    """One run has no spread."""
    runs = [{"hit_share": share, "ttft_ms_mean": 100.0 * share} for share in (0.2, 0.4)]
    assert mean_figures(runs) == pytest.approx(
        {"hit_share": 0.3, "ttft_ms_mean": 30.0, "hit_share_sd": 0.02**0.5, "runs": 2}
    )
    assert mean_figures(runs[:1])["hit_share_sd"] == 0.0
