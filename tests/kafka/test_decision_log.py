"""The decision log of a real router on a real Kafka, and what people make of it on the command line."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from streams.cli import cli
from streams.decision_log.reading import read_log
from streams.kafka.clients import ensure_topics, producer
from streams.lab.processes import Children
from streams.lab.stack import Stack, wait_workers
from streams.process.waiting import wait_for
from streams.settings import Settings, as_environ
from streams.topics import topics
from tests.helpers.api import OCTETS, Api, metrics, packed
from tests.helpers.commands import PATIENCE_S, Run, assert_one_line
from tests.helpers.pages import block_of, shape

PROMPT = list(range(5000, 5000 + 1100))

#: Decisions of the recorded fleet, one of which is asked in JSON and the others as octets.
N_REQUESTS = 24


class Recorded:
    """A scope whose router has recorded some requests and still runs."""

    def __init__(self, settings: Settings, api: Api, answers: dict[str, dict[str, Any]]) -> None:
        self.settings = settings
        self.api = api
        self.answers = answers
        self.env = as_environ(settings)


@pytest.fixture(scope="module")
def recorded(new_scope: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Give a scope in which a router process with decision_log=on has served requests of three families."""
    folder = tmp_path_factory.mktemp("decisions")
    settings = new_scope(folder / "state")
    with Children() as children:
        router = Stack(settings, folder, children).router(
            "router", decision_log=True, decision_log_candidates=2, kv_events=False
        )
        api = Api(router.url)
        for worker_id in (1, 2, 3, 4):
            body = {"url": f"http://engine-{worker_id}:8000", "model": "m", "block_size": 16, "kv_total_blocks": 4096}
            api.call("PUT", f"/workers/{worker_id}", body).given()
        wait_workers(router.url, 4)
        answers = {}
        for number in range(N_REQUESTS):
            name, tokens = f"r{number}", [*PROMPT[:600], *range(number % 3 * 1000, number % 3 * 1000 + 500)]
            if number:
                # On a connection of its own, whose first request the fast lane answers as well.
                path = f"/route?request_id={name}&expected_output_tokens=9"
                answers[name] = api.call("POST", path, packed(tokens), OCTETS).given()
            else:
                answers[name] = api.route(request_id=name, token_ids=tokens, expected_output_tokens=9, explain=True)
            api.call("POST", f"/loads/{name}/prefill-complete").given()
            api.call("POST", f"/loads/{name}/output", {"output_tokens": 5 + number}).given()
            api.call("DELETE", f"/loads/{name}").given()
        wait_for(
            lambda: metrics(api)["kvstreams_decisions_recorded_total"] == N_REQUESTS, PATIENCE_S, "recorded decisions"
        )
        yield Recorded(settings, api, answers)


def test_every_decision_is_recorded_without_tokens(recorded: Recorded) -> None:
    """All decisions of both ways to ask are there, with what was reported, and nothing was dropped."""
    log = read_log(recorded.settings, 0)
    decisions = {each.request_id: each for batch in log.batches for each in batch.decisions()}
    assert {name: each.chosen.worker_id for name, each in decisions.items()} == {
        name: answer["worker_id"] for name, answer in recorded.answers.items()
    }
    assert log.n_bad == metrics(recorded.api)["kvstreams_decisions_unrecorded_total"] == 0
    reports = {report.request_id: report for batch in log.batches for report in batch.reports}
    assert {name: report.output_tokens for name, report in reports.items()} == {
        f"r{number}": 5 + number for number in range(N_REQUESTS)
    }
    raw: list[bytes] = []

    def keep(value: bytes) -> bool:
        raw.append(value)
        return False

    read_log(recorded.settings, 0, keep)
    assert raw and not any(packed(PROMPT[:1] + PROMPT[1:2]) in value for value in raw)


@pytest.mark.first_ring("explain", "router")
def test_a_decision_is_explained_in_words(recorded: Recorded, run: Run) -> None:
    """`kvstreams explain` has the rank, the terms of the candidates and the outcome; the status is 0."""
    done = run("explain", "r0", env=recorded.env)
    assert done.returncode == 0, done.stderr
    answer = recorded.answers["r0"]
    text = " ".join(done.stdout.split())
    assert f"Request r0 for model m was routed to {answer['worker_id']}/0 at " in text
    assert "1,100 tokens, 69 blocks of 16" in text and "4 ranks were eligible" in text
    assert "4 ranks had this cost, and one of them was drawn" in text
    assert "5 tokens of output" in text
    row = re.search(rf"^{answer['worker_id']}/0 \(chosen\) +(\S+) +0 +69 ", done.stdout, re.MULTILINE)
    assert row is not None and float(row[1].replace(",", "")) == answer["cost"]
    assert "more candidates were not recorded" in done.stdout
    later = run("explain", "r3", env=recorded.env)
    assert "68 blocks of the prompt (99%)" in " ".join(later.stdout.split())
    on_page = block_of("docs/decisions.md", "Request chat-700").replace("chat-700", "r3")
    shown, printed = ([without_ids(line) for line in text.splitlines()] for text in (on_page, later.stdout))
    # What a rank had more or less than the next one differs, and so does whether the client limited its answer.
    compared = [line for line in shown if line.startswith("Compared with")]
    prompt = [line for line in shown if line.startswith("Its prompt has")]
    assert set(shown) - set(printed) == {*compared, *prompt}
    assert any(line.startswith(prompt[0].removesuffix(".")) for line in printed)
    assert any(line.startswith(compared[0].partition(", it had")[0]) for line in printed)


def without_ids(line: str) -> str:
    return shape(re.sub(r"\b[0-9a-f]{32}\b", "router", line))


def test_what_is_not_in_the_log_is_said(recorded: Recorded, run: Run, scope: Settings) -> None:
    """An unknown id, a log that is off, and a scope without the topic each have their own sentence, and status 1."""

    def said(env: dict[str, str], *arguments: str) -> str:
        done = CliRunner().invoke(cli, arguments, env=env)
        assert done.exit_code == 1
        return done.output or str(done.exception)

    assert "no decision for request 'other' is recorded since 1h" in assert_one_line(
        run("explain", "other", "--since", "1h", env=recorded.env)
    )
    ensure_topics(scope, [topics(scope).router_decisions])
    assert "decision_log=on" in said(as_environ(scope), "explain", "r0")
    assert "decision_log=on" in said(as_environ(scope), "replay-decisions")
    assert "decision_log=on" in said(as_environ(scope), "plan")
    missing = as_environ(scope) | {"KVSTREAMS_TOPIC_PREFIX": f"{scope.topic_prefix}other-"}
    assert "there is no topic" in said(missing, "explain", "r0")
    assert "neither a duration" in said(recorded.env, "explain", "r0", "--since", "soon")


@pytest.mark.first_ring("plan")
def test_recorded_decisions_are_planned_with_other_numbers_of_engines(
    recorded: Recorded, run: Run, tmp_path: Path
) -> None:
    """`plan` takes the requests, the mode and the fleet from the log, and prices one engine less to two more."""
    figures = tmp_path / "figures.json"
    done = run("plan", "--price", "2", "--ttft-limit-ms", "60000", "--json", str(figures), env=recorded.env)
    assert done.returncode == 0, done.stderr
    assert "on 4 ranks" in done.stdout and f"{N_REQUESTS} requests within" in done.stdout
    assert "3 engines are the fewest of these" in " ".join(done.stdout.split())
    found = json.loads(figures.read_text())
    assert (found["policy"], found["requests"], found["price"]) == ("kv", N_REQUESTS, 2.0)
    assert [row["engines"] for row in found["rows"]] == [3, 4, 5, 6]
    for row in found["rows"]:
        assert row["cost"] == pytest.approx(2.0 * row["engine_hours"], abs=1e-3)
        assert 0.0 < row["reuse"] < 1.0 and row["mean_ttft_ms"] > 0.0


@pytest.mark.first_ring("replay-decisions", "simulate")
def test_recorded_decisions_are_replayed_and_become_a_trace(recorded: Recorded, run: Run, tmp_path: Path) -> None:
    """`replay-decisions` reports what other policies would have changed; `simulate` takes the trace that it writes."""
    trace, figures = tmp_path / "hour.jsonl", tmp_path / "figures.json"
    command = ("replay-decisions", "--policy", "kv,round-robin", "--trace", str(trace), "--json", str(figures))
    done = run(*command, env=recorded.env)
    assert done.returncode == 0, done.stderr
    assert f"{N_REQUESTS} requests for model m" in done.stdout and "on 4 ranks" in done.stdout
    assert "Each simulated engine has 1,024 blocks of 64 tokens" in done.stdout
    found = json.loads(figures.read_text())
    rows = {row["policy"]: row for row in found["rows"]}
    assert list(rows) == ["as recorded", "kv", "round-robin"]
    assert rows["as recorded"]["changed"] is None and 0.0 <= rows["kv"]["changed"] <= 1.0
    assert rows["round-robin"]["changed"] > 0.4
    assert found["measured"]["mean_ttft_ms"] > 0.0 and 0.0 < found["measured"]["reuse"] < 1.0
    lines = [json.loads(line) for line in trace.read_text().splitlines()]
    assert [line["output_length"] for line in lines] == [5 + number for number in range(N_REQUESTS)]
    assert len({line["hash_ids"][0] for line in lines}) == 1
    assert len({line["hash_ids"][1] for line in lines}) == 3
    simulated = run("simulate", str(trace), "--policy", "kv", "--workers", "4", "--concurrency", "0")
    assert simulated.returncode == 0, simulated.stderr


def test_records_that_cannot_be_read_are_left_out(recorded: Recorded, run: Run) -> None:
    """A record that another program wrote is counted, and the others are explained."""
    kafka = producer(recorded.settings)
    kafka.produce(topics(recorded.settings).router_decisions.name, value=b"r0 of another program")
    assert kafka.flush(PATIENCE_S) == 0
    kafka.close()
    done = run("explain", "r0", env=recorded.env)
    assert done.returncode == 0
    assert done.stderr == "kvstreams: 1 records of the decision log cannot be read and are left out\n"
