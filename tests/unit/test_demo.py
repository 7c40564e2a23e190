"""The demo's checks before it starts anything, its figures and its plot."""

from __future__ import annotations

from collections import Counter
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text

from streams.errors import SettingsError
from streams.lab.demo.drive import LiveOutcome
from streams.lab.demo.figures import SCHEMES, mean_figures, plot, summarise_live
from streams.lab.demo.run import DEMO_POLICIES, DemoConfig, run_demo
from streams.lab.simulation.results import RequestOutcome
from streams.lab.simulation.trace_runs import LiveTimes


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


def outcomes(n_policies: int, n_workers: int, hit_share: float) -> dict[str, list[LiveOutcome]]:
    """The outcomes of a run with random workers and times, whose policies differ by a few percent."""
    rng = np.random.default_rng(4)
    live = {}
    for number, name in enumerate(DEMO_POLICIES[:n_policies]):
        cached = int(5_000 * hit_share * (1.0 - 0.03 * number))
        live[name] = [
            LiveOutcome(
                RequestOutcome(each, 1 + each % n_workers, 5_000 + each, cached, 200, ttft, 5_000.0),
                LiveTimes(0.0, 0.0, 0.0),
                "exact",
                0,
                0,
                1.0,
            )
            for each, ttft in enumerate(rng.lognormal(5.0, 1.0, 40 * n_workers).tolist())
        ]
    return live


@pytest.mark.parametrize(
    ("n_policies", "n_workers", "hit_share", "bound", "scheme"),
    [
        (1, 1, 0.02, 0.03, "light"),
        (2, 3, 0.97, 0.98, "dark"),
        (5, 8, 0.46, 0.57, "light"),
        (5, 32, 0.46, 0.46, "dark"),
    ],
)
def test_no_label_of_the_plot_overlaps_another(
    n_policies: int, n_workers: int, hit_share: float, bound: float, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every label is readable: within the picture, and with no other one over it; each worker's load is a number."""
    live = outcomes(n_policies, n_workers, hit_share)
    figures = {name: summarise_live(each, n_workers) for name, each in live.items()}
    figure = plot(live, figures, bound, SCHEMES[scheme])
    drawn: dict[Any, None] = {}  # a figure also has texts that it does not draw, such as labels outside of an axis
    draw_text = Text.draw

    def noted(text: Text, renderer: Any) -> None:
        draw_text(text, renderer)
        if text.get_visible() and text.get_text().strip():
            drawn[text] = None

    monkeypatch.setattr(Text, "draw", noted)
    figure.set_dpi(110)
    FigureCanvasAgg(figure).draw()
    boxes = [(text.get_text(), text.get_window_extent().padded(-1.0)) for text in drawn]
    loads = Counter(text for text, _ in boxes)
    for name, each in live.items():
        computed: Counter[int] = Counter()
        for o in each:
            computed[o.outcome.worker_id] += o.outcome.prompt_tokens - o.outcome.cached_tokens + o.outcome.output_tokens
        for tokens in computed.values():
            assert loads[f"{tokens / 1000:,.0f}"] > 0, (name, tokens)
    overlaps = [(one, other) for (one, a), (other, b) in combinations(boxes, 2) if a.overlaps(b)]
    assert overlaps == []
    width, height = figure.canvas.get_width_height()
    for text, box in boxes:
        assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= width and box.y1 <= height, text
