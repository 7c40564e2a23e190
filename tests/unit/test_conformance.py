"""The conformance cases pass, and the runner reports failures in its output and its exit status."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from streams.core.ids import HashArray
from streams.core.index.interface import PrefixScores
from tests.conformance import KINDS, OWN_CASES, Case, Differs, Pipeline, load, main, run

#: Expectations from public tests. They are stored outside of the checkout, and only where the project is developed.
SHARED_CASES = Path(__file__).parents[3] / "shared" / "conformance" / "cases.jsonl"


def cases(path: Path) -> list[Any]:
    if not path.is_file():
        return [pytest.param(None, marks=pytest.mark.skip(f"{path} is not part of the project"))]
    return [pytest.param(case, id=case.name) for case in load(path) if case.kind in KINDS]


@pytest.mark.parametrize("case", cases(OWN_CASES))
def test_our_own_cases_pass(case: Case) -> None:
    """Our own cases pass in an index, and through the whole pipeline of records."""
    run(case)


@pytest.mark.parametrize("case", cases(SHARED_CASES))
def test_cases_from_public_tests_pass(case: Case) -> None:
    """Cases made from the public tests of other projects have the results that those tests expect."""
    run(case)


def stored(*blocks: int, **fields: Any) -> dict[str, Any]:
    """An op that stores blocks under the hashes of their tokens. fields: further fields of the event."""
    pairs = [{"block_hash": block, "tokens_hash": block} for block in blocks]
    return {"op": "event", "event": {"worker_id": 1, **fields, "event": {"data": {"stored": {"blocks": pairs}}}}}


def asked(*local: int, expect: list[list[int]]) -> dict[str, Any]:
    return {"op": "query", "local_hashes": local, "expect_scores": expect}


def indexer(name: str, *ops: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"name": name, "kind": "indexer", "ops": ops, **more}


def hashed(query: Any, expect: Any) -> dict[str, Any]:
    return {"name": "h", "kind": "hash", "block_size": 4, "query": query, "expect": expect}


def priced(expect: dict[str, Any], **query: Any) -> dict[str, Any]:
    workers = {"1": {"prefill_blocks": 4, "overlap": 1}, "2": {"prefill_blocks": 4, "overlap": 3}}
    return {"name": "c", "kind": "cost", "query": {"workers": workers, **query}, "expect": expect}


def labelled(query: dict[str, Any], expect: dict[str, Any]) -> dict[str, Any]:
    block = {"block_hash": 42, "tokens_hash": 11, "moe_metadata": {"layer_id": 2, "expert_id": 7}}
    asked = {"worker_id": 1, "stored": block, "queries": [query]}
    return {"name": "m", "kind": "moe", "ops": [], "query": asked, "expect": [expect]}


def queued(query: Any, expect: Any) -> dict[str, Any]:
    return {"name": "q", "kind": "queue", "query": query, "expect": expect}


WAITING = {"isl": 16, "best_cached_tokens": 12}
TWELVE = list(range(1, 13))
COSTS = {"1": 3, "2": 1}


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (indexer("i", stored(1), asked(1, expect=[])), "scores: found [[1, 0, 1]], expected []"),
        (indexer("i", stored(1), asked(1, expect=[[1, 0, 2]])), "index, op 1: scores"),
        (indexer("i", stored(1), query=[1], expect=[[1, 0, 2]]), "at the end: scores"),
        (indexer("i", stored(1), {"op": "expect_dump_len", "n": 2}), "facts in a dump: found 1, expected 2"),
        (
            indexer("i", stored(1), {**asked(1, expect=[[1, 0, 1]]), "expect_by_tier": [[1, 0, [0, 1, 0, 0]]]}),
            "by tier",
        ),
        (indexer("i", {"op": "prune"}), "no op 'prune'"),
        (indexer("i", {"worker_id": 1}), "KeyError: 'op'"),
        (indexer("i", stored(1, storage_tier="tape")), "no tier 'tape'"),
        (indexer("i", {"op": "event", "event": {"worker_id": 1, "event": {"data": "moved"}}}), "no event 'moved'"),
        (indexer("i", query=[5], expect=[], tokens=TWELVE, block_size=4), "local hashes of the tokens"),
        (hashed({"tokens": TWELVE}, {"local": [1, 2, 3]}), "local of 12 tokens"),
        (hashed({"tokens": TWELVE}, {"colour": 1}), "colour of 12 tokens: found unknown to this runner"),
        (hashed([{"num_tokens": 12}], [2]), "n_blocks of 12 tokens: found 3, expected 2"),
        (hashed([{"num_tokens": 12}], [3, 3]), "number of expectations"),
        (hashed({"bytes_utf8": "test"}, 1), "hash of the bytes"),
        (hashed({"num_tokens": 12, "block_size": 0}, 1), "BlockSizeMismatch"),
        (priced({"costs": {"1": 3, "2": 2}}), "costs: found"),
        (priced({"costs": {"1": 3}}), "costs: found"),
        (priced({"selected": 1}), "selected: found ['2'], expected ['1']"),
        (priced({"selected": [1, 2]}), "selected"),
        (priced({"selected": 1}, temperature=1), "selected most often: found 2"),
        (priced({"probabilities": {"1": 0.5}}, temperature=1), "probability of 1"),
        (priced({"winner": 1}), "no expectation 'winner'"),
        (labelled({"layer_id": 2}, {"scores": []}), "scores: found [[1, 0, 1]], expected []"),
        (labelled({"layer_id": 2}, {"moe_scores": []}), "query 0: moe_scores: found [[1, 0, 1]], expected []"),
        (labelled({"layer_id": 3}, {"moe_scores": [[1, 1]]}), "moe_scores: found [], expected [[1, 0, 1]]"),
        (labelled({"layer_id": 2, "fallback_to_unlabeled": False}, {"stays": [[1, 0], [1, 1]]}), "ranks that stay"),
        (labelled({"layer_id": 2}, {"stays": [[1, 0]]}), "ranks that stay"),
        (labelled({"layer_id": 2}, {"winner": 1}), "no expectation 'winner'"),
        (labelled({"layer": 2}, {"scores": [[1, 1]]}), "ValidationError"),
        (queued([WAITING], [0.5]), "key of request 0: found 0.25, expected 0.5"),
        (queued([WAITING], []), "number of expectations"),
        (queued({"policy": "wspt", "waiting": [WAITING, WAITING]}, {"order": [1, 0]}), "order of the queue: found [0"),
        (queued({"policy": "wspt", "waiting": []}, {"first": 0}), "no expectation 'first'"),
        (queued({"policy": "lifo", "waiting": []}, {"order": []}), "ValueError"),
        ({**labelled({}, {}), "expect": []}, "number of expectations: found 0, expected 1"),
    ],
)
def test_a_failure_describes_the_difference(case: dict[str, Any], message: str) -> None:
    """The message of a failed case names the subject, the op, what was found and what was expected."""
    with pytest.raises(Differs) as caught:
        run(Case(case["name"], case["kind"], "here", case))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "case",
    [
        indexer("i", stored(1), asked(1, 2, expect=[[1, 0, 1], [2, 0, 0]])),
        indexer("i", stored(1), {**asked(expect=[]), "tokens": [1, 2], "block_size": 4}),
        indexer("i"),
        indexer("i", stored(1), {"op": "remove_worker", "worker_id": 7}, {"op": "expect_dump_len", "n": 1}),
        hashed({"tokens": TWELVE}, {"local": [14643705804678351452, 16777012769546811212, 483935686894639516]}),
        hashed({"tokens": TWELVE}, 3),
        priced({"costs": COSTS, "selected": 2}),
        priced({"selected": 2}, temperature=1),
        labelled({}, {}),
        labelled({"layer_id": 2, "fallback_to_unlabeled": False}, {"moe_scores": [[1, 1]], "stays": [[1, 0]]}),
    ],
)
def test_fields_may_be_left_out(case: dict[str, Any]) -> None:
    """A case passes without tiers, ranks, parents and event numbers, which have defaults, and without expectations."""
    run(Case(case["name"], case["kind"], "here", case))


def test_every_subject_must_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """A case fails if only the pipeline differs, and the message names the pipeline."""

    def find_nothing(pipeline: Pipeline, local: HashArray) -> PrefixScores:
        return pipeline.view.index.find_matches(local[:0])

    monkeypatch.setattr(Pipeline, "find_matches", find_nothing)
    case = indexer("i", stored(1), asked(1, expect=[[1, 0, 1]]))
    with pytest.raises(Differs, match=r"^pipeline, op 1"):
        run(Case("i", "indexer", "here", case))


def written(path: Path, *lines: Any) -> str:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return str(path)


def test_the_runner_prints_failures_skipped_kinds_and_totals(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The runner prints one line for each failure, for each skipped kind and for the totals; a failure exits with 1."""
    wrong = indexer("wrong", stored(1), asked(1, expect=[]))
    right = indexer("right", stored(1), asked(1, expect=[[1, 0, 1]]))
    timed = {"name": "t", "kind": "timing"}
    one = written(tmp_path / "one.jsonl", right, "", wrong, timed, {"name": "m", "kind": "memory"}, timed)
    two = written(tmp_path / "two.jsonl", priced({"costs": COSTS}), {"name": "n", "kind": "new"})
    assert main([one, two]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"FAILED wrong ({one}:3): index, op 1: scores: found")
    assert [line.split(":")[0] for line in lines[1:]] == [
        "SKIPPED 1 of kind memory",
        "SKIPPED 1 of kind new",
        "SKIPPED 2 of kind timing",
        "2 passed, 1 failed, 4 skipped",
    ]
    assert main([two]) == 0


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ("[1]", "a case is an object, not a list"),
        ('{"kind": "hash"}', "the case has no name"),
        ('{"name": "a", "kind": 5}', "the case has no kind"),
    ],
)
def test_an_invalid_line_ends_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, message: str
) -> None:
    """An invalid line ends the run with status 2 before any case is run, and the message names its file and number."""
    path = written(tmp_path / "cases.jsonl", priced({"winner": 1}), line)
    assert main([path]) == 2
    out, err = capsys.readouterr()
    assert (out, err.startswith(f"{path}:2: "), message in err) == ("", True, True)


def test_a_file_that_cannot_be_read_ends_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A path that does not exist, is a folder, or is not a text file ends the run with status 2."""
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\xff")
    for path in (tmp_path / "none.jsonl", tmp_path, binary):
        assert main([str(path)]) == 2
        assert f"{path} cannot be read" in capsys.readouterr().err


@pytest.mark.thorough  # starts a process, which loads every kernel
def test_the_runner_is_a_command(tmp_path: Path) -> None:
    """The process exits with the runner's status, and with 2 if no file is given."""
    path = written(tmp_path / "cases.jsonl", priced({"costs": COSTS}), priced({"selected": 1}))
    for arguments, status in (([path], 1), ([], 2)):
        done = subprocess.run(
            [sys.executable, "-m", "tests.conformance", *arguments], capture_output=True, text=True, check=False
        )
        assert done.returncode == status
        assert ("1 passed, 1 failed, 0 skipped" in done.stdout) == bool(arguments)


@pytest.mark.parametrize("lines", [(), ({"kind": "weather", "name": "a"},)], ids=["empty", "unknown"])
def test_a_run_without_cases_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], lines: tuple[dict[str, Any], ...]
) -> None:
    """A file that is empty, or has only cases of unknown kinds, ends the run with status 2."""
    assert main([written(tmp_path / "cases.jsonl", *lines)]) == 2
    assert "nothing ran" in capsys.readouterr().err
