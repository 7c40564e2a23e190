"""`kvstreams top` against a real router: once, as JSON, live in a terminal, and when the router cannot be read."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from streams.cli.top import COLUMNS, DECISIONS_SHOWN, SAMPLES_SHOWN, WORKERS_SHOWN_MAX, shown
from streams.lab.kafka.ports import free_port
from streams.process.waiting import wait_for
from streams.router_api.http import live
from streams.settings import Settings
from tests.helpers.commands import PATIENCE_S, Run, assert_one_line, environment
from tests.helpers.local_router import LocalRouter, local_router

TOKEN = "a-token-of-twenty-characters"


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LocalRouter, Path]]:
    """Give a router with two workers and some requests, and the file with its token."""
    folder = tmp_path_factory.mktemp("top")
    (folder / "tokens.toml").write_text(f'[top]\ntoken = "{TOKEN}"\nrights = ["read", "route"]\n')
    (folder / "token").write_text(TOKEN)
    patch = pytest.MonkeyPatch()
    patch.setattr(live, "SAMPLE_EVERY_S", 0.1)
    with local_router(Settings(tokens_file=str(folder / "tokens.toml")), n_workers=2) as served:
        headers = {"Authorization": f"Bearer {TOKEN}"}
        for number in range(6):
            body = {"request_id": f"r{number}", "model": "m", "token_ids": list(range(64))}
            served.api.call("POST", "/route", body, headers=headers).given()
        yield served, folder / "token"
    patch.undo()


@pytest.mark.first_ring("top")
def test_once_and_json_are_for_scripts(router: tuple[LocalRouter, Path], run: Run) -> None:
    """--once prints the header and a row per worker; --json is the router's own answer."""
    served, token = router
    options = (served.api.url, "--token-file", str(token))
    done = run("top", *options, "--once")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0].split()[:4] == ["router", served.api.url, "mode", "expected-time"]
    assert "requests 6" in done.stdout
    assert any(line.startswith("lag ") for line in lines)
    assert "no_events_yet: No event of a rank has arrived yet" in done.stdout
    rows = [line.split() for line in lines if re.match(r"[12] +m ", line)]
    assert sorted(row[0] for row in rows) == ["1", "2"]
    assert sum(int(row[5]) for row in rows) == 6  # `degraded: no_events_yet` is two words
    assert run("top", *options).stdout.splitlines()[0] == lines[0]  # without a terminal, it prints once
    done = run("top", *options, "--json")
    assert done.returncode == 0
    answer = json.loads(done.stdout)
    assert {row["worker_id"] for row in answer["workers"]} == {"1", "2"}
    assert sum(row["requests"] for row in answer["workers"]) == 6


def test_live_it_follows_the_router_until_it_is_interrupted(router: tuple[LocalRouter, Path], tmp_path: Path) -> None:
    """In a terminal, the figures change with the router, and Ctrl-C ends the command with status 0."""
    served, token = router
    leader, follower = pty.openpty()
    arguments = ["top", served.api.url, "--token-file", str(token), "--every", "0.2"]
    process = subprocess.Popen(
        [sys.executable, "-m", "streams.cli", *arguments],
        env=environment({"TERM": "xterm", "COLUMNS": "160", "LINES": "40"}),
        cwd=tmp_path,
        stdin=follower,
        stdout=follower,
        stderr=subprocess.PIPE,
    )
    os.close(follower)
    os.set_blocking(leader, False)
    screen = bytearray()

    def saw(text: bytes) -> bool:
        try:
            screen.extend(os.read(leader, 65536))
        except BlockingIOError:
            pass
        return text in screen

    try:
        wait_for(lambda: saw(b"requests 6"), PATIENCE_S, "the figures")
        served.api.call("DELETE", "/loads/r0", headers={"Authorization": f"Bearer {TOKEN}"}).given()
        wait_for(lambda: saw(b"requests 5"), PATIENCE_S, "newer figures")
        process.send_signal(signal.SIGINT)
        deadline_s = time.monotonic() + PATIENCE_S
        while process.poll() is None and time.monotonic() < deadline_s:
            saw(b"")  # a full terminal would block the process
            time.sleep(0.02)
        assert process.returncode == 0
        assert process.stderr is not None and process.stderr.read() == b""
    finally:
        with process:
            process.kill()
        os.close(leader)


def test_a_router_that_cannot_be_read_is_one_line(router: tuple[LocalRouter, Path], run: Run) -> None:
    """Without a router, and without its token, the command says what is wrong."""
    assert "no router answers at" in assert_one_line(run("top", f"http://127.0.0.1:{free_port()}", "--once"))
    line = assert_one_line(run("top", router[0].api.url, "--once"))
    assert "with 401" in line and "--token-file" in line


def answer(n_workers: int, **changes: Any) -> dict[str, Any]:
    """An answer of GET /live."""
    columns = ("decisions_per_s", "hit_rate", "latency_ms_p50", "latency_ms_p99", "requests", "queue", "imbalance")
    worker = {"model": "m", "ranks": 1, "state": "degraded", "reason": "owner_silent", "requests": 1}
    worker |= {"prefill_tokens": 2, "decode_blocks": 3, "hit_rate": None, "cache_usage": 0.25}
    best = {"worker_id": "3", "dp_rank": 1, "overlap_blocks": 5, "cost": 720.25}
    decision = {"age_s": 3.2, "router_mode": "expected-time", "worker_id": "4", "dp_rank": 0, "overlap_blocks": 64}
    decision |= {"request_blocks": 1327, "cost": 577.25, "next_best": best, "mode": "exact"}
    decision["terms"] = {"prefill_ms": 232.4, "load_ms": 0.0, "of_a_plugin": -1.5}
    return {
        "router": {
            "router_mode": "kv",
            "not_ready_because": None,
            "bookings_in_sync": True,
            "index_blocks": 7,
            "dead_letters": 0,
        },
        "samples": {**{name: [None, 0.5, None] for name in columns}, "modes": {"exact": [3.0], "degraded": [1.0]}},
        "partitions": [
            {"partition": 0, "lag_s": 0.25, "lag_records": 3},
            {"partition": 1, "lag_s": None, "lag_records": None},
        ],
        "workers": [{"worker_id": str(number), **worker} for number in range(n_workers)],
        "workers_left_out": 5,
        "pools": [
            {
                "model": "m",
                "role": "prefill",
                "saturation": 0.42,
                "backlog_ms": 12.5,
                "replicas": 6,
                "replicas_wanted": 3.15,
            }
        ],
        "explanations": {"owner_silent": {"meaning": "The owner is silent.", "remedy": "Check the Faust workers."}},
        "decisions": [decision] * n_workers,
        "term_meanings": {"prefill_ms": "ms to compute the prompt"},
        **changes,
    }


def text_of(live_answer: dict[str, Any], problem: str = "", width: int = 200) -> str:
    from rich.console import Console

    console = Console(width=width, markup=False)
    with console.capture() as captured:
        console.print(shown("http://r", live_answer, problem))
    return captured.get()


def test_the_header_has_the_newest_known_figures_and_the_lag() -> None:
    """Samples without a value are skipped; a lag that is not known is said to be so."""
    text = text_of(answer(1))
    assert "hit share 50 %" in text
    assert "modes exact 75 %  degraded 25 %" in text
    assert "lag at most 0.25 s (partition 0), 3 records in all; unknown for 1 of 2 partitions" in text
    assert "degraded: owner_silent" in text and "25 %" in text
    assert "pool m (prefill): saturation 42 %, backlog 12 ms, 6 replicas, 3.1 wanted" in text
    old = [9.0] + [None] * SAMPLES_SHOWN
    assert "p99 -" in text_of(answer(1, samples={**answer(1)["samples"], "latency_ms_p99": old}))


def test_workers_that_do_not_fit_are_counted() -> None:
    """The router leaves some out, and the screen has room for some of the others."""
    text = text_of(answer(WORKERS_SHOWN_MAX + 2))
    assert "and 7 more" in text
    assert f"\n{WORKERS_SHOWN_MAX - 1} " in text and f"\n{WORKERS_SHOWN_MAX} " not in text


@pytest.mark.parametrize(
    ("width", "left_out"), [(80, {"ranks", "cache", "model"}), (120, set()), (200, set()), (60, None)]
)
def test_nothing_is_cut_off_in_a_narrow_terminal(width: int, left_out: set[str] | None) -> None:
    """At 80 columns some columns of the table are left out, and the others are whole; at 120 all of them are there."""
    live_answer = answer(8)
    for row in live_answer["workers"]:
        row |= {"model": "llama-3.1-8b", "prefill_tokens": 123456, "decode_blocks": 16384, "hit_rate": 0.5}
    text = text_of(live_answer, width=width)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width
    (header,) = (line for line in text.splitlines() if line.startswith("worker "))
    if left_out is not None:
        assert {name for name in COLUMNS if name not in header} == left_out
        assert text.count("degraded: owner_silent") == 8
        assert text.count("123,456") == 8
    assert "decisions/s 0.5" in text and "engines agreed -" in text


def test_decisions_and_explanations_are_below_the_workers() -> None:
    """The newest decisions have their terms in words, and each reason of a worker its remedy."""
    text = text_of(answer(8))
    assert "3 s ago  4/0  held 64 of 1,327  cost 577 ms  next best 3/1 +143 ms  exact" in text
    assert "  232 ms to compute the prompt, -1.5 of_a_plugin" in text
    assert text.count("s ago") == DECISIONS_SHOWN
    assert "owner_silent: The owner is silent. Check the Faust workers." in text
    only = answer(1)
    only["decisions"][0] |= {"next_best": None, "terms": {}}
    assert "cost 577 ms  exact" in text_of(only) and "all terms are 0" in text_of(only)


def test_trouble_is_in_the_first_lines() -> None:
    """A router that is not ready, or stopped answering, shows so above its last figures."""
    router = {**answer(1)["router"], "not_ready_because": "topics are missing", "bookings_in_sync": False}
    text = text_of(answer(1, router=router), "no router answers")
    assert text.startswith("no router answers\n")
    assert "not ready: topics are missing  bookings not in sync" in text
