"""Progress of long steps: lines in a file, a bar in a terminal."""

from __future__ import annotations

import io
import time

import pytest
from rich.console import Console

from streams.process import progress
from streams.process.progress import shown


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.02)
    monkeypatch.setattr(progress, "BAR_EVERY_S", 0.02)


def wait_for_text(out: io.StringIO, text: str) -> None:
    deadline = time.monotonic() + 30.0
    while text not in out.getvalue():
        assert time.monotonic() < deadline, out.getvalue()
        time.sleep(0.005)


def test_a_file_gets_lines_while_the_step_runs() -> None:
    """Each line has the step, how far it is, since when, and what is being done."""
    out = io.StringIO()
    with shown(Console(file=out), "compiling", total=3) as step:
        step.advance("match")
        wait_for_text(out, "compiling: 1 of 3, 0 s (match)\n")
    assert "\x1b" not in out.getvalue()


def test_a_step_without_parts_shows_its_time() -> None:
    """A wait is not silent either."""
    out = io.StringIO()
    with shown(Console(file=out), "starting Kafka"):
        wait_for_text(out, "starting Kafka: 0 s\n")


def test_short_steps_in_a_row_are_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line is due as long after the last one as within a step, though every step ends sooner."""
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.2)
    out = io.StringIO()
    began = time.monotonic()
    while not out.getvalue():
        assert time.monotonic() < began + 30.0
        with shown(Console(file=out), "short"):
            time.sleep(0.02)


def test_a_short_step_prints_nothing_unless_it_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kept one ends with a line that says how long it took."""
    monkeypatch.setattr(progress, "LINE_EVERY_S", 60.0)
    monkeypatch.setattr(progress, "_last_line_s", time.monotonic())
    out = io.StringIO()
    with shown(Console(file=out), "short"):
        pass
    assert out.getvalue() == ""
    with shown(Console(file=out), "short", total=1, keep=True) as step:
        step.advance("part")
    assert out.getvalue() == "short: 1 of 1, 0 s\n"


def test_colours_that_are_forced_do_not_make_a_file_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """FORCE_COLOR, which CI services set, must not turn lines into a bar that only a terminal can draw."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    out = io.StringIO()
    with shown(Console(file=out), "step", total=2):
        wait_for_text(out, "step: 0 of 2")


def test_a_terminal_gets_a_bar_that_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """It shows count, clock and what is being done, and changes while one part takes long."""
    monkeypatch.setenv("TERM", "xterm")
    out = Terminal()
    with shown(Console(file=out, force_terminal=True, width=100), "compiling", total=3) as step:
        step.update(2, "match")
        wait_for_text(out, "2/3")
        wait_for_text(out, "match")
    assert "compiling: " not in out.getvalue()


def test_a_step_that_fails_stops_showing() -> None:
    """The error passes, and no thread prints behind it."""
    out = io.StringIO()
    with pytest.raises(ValueError, match="no"), shown(Console(file=out), "failing"):
        raise ValueError("no")
    before = out.getvalue()
    time.sleep(0.1)
    assert out.getvalue() == before
