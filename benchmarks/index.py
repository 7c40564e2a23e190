"""`python -m benchmarks.index`: the way of the product from events to answers, beside the fastest public indexes.

An agent's store of runs makes records of the events, and a router folds these into its tree and answers from it
(`ours`). The peers are libraries that apply the same events directly, in one process. All are measured in one
interleaved run.

What lives here: the cases, what each compares, and the bars. What must not: the product's API (ours), the peers' (their
modules), the layout of a report (report). Each repetition measures ours and then each peer, so that a slow minute of
the machine affects both. Exits with 1 if two engines found different sums of depths, since then they did not do the
same work.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from benchmarks import ours, rust_peer, wheel_peer
from benchmarks.report import (
    OURS,
    Bar,
    Report,
    Row,
    Samples,
    installed,
    ratio_bar,
    select,
    value_bar,
    wide_console,
)
from benchmarks.workload import QUICK_RECIPES, RECIPES, Recipe, Workload, ensure, load
from streams.core.events import EngineBatch
from streams.core.index.interface import Candidates
from streams.core.index.run_columns import RunColumns
from streams.core.index.tree_fold import TreeRunFold
from streams.tables.run_decoding import decode_runs

CHECKOUT = Path(__file__).parent.parent
RUST_PEERS = ("chain", "crtc", "radix")
PEERS = (*RUST_PEERS, "wheel")

REPEATS = 15  # pairs; they resolve 5 % on a machine whose speed varies by 20 to 50 % between runs
QUICK_REPEATS = 3
WHEEL_REPEATS_MAX = 3  # a repetition takes seconds, most of them to encode JSON
MEMORY_REPEATS_MAX = 3  # results differ by less than a page
LATENCIES = 10_000  # lookups per repetition, in as many passes over the queries as needed
TOKEN_PASSES = 5
TRANSACTION = 128  # events per transaction of the agent, unless a case says otherwise
WRITER_RECORDS = 500  # records per call of the concurrent writer, as a router consumes them
WRITER_QUERIES = 1200
PACED_S = 0.0005  # between queries at 2,000 per second; most of their time is a processor waking up

#: Suffix of the metrics for each number of events per transaction.
TRANSACTIONS = {128: "", 16: "_batch_16", 1: "_batch_1"}

#: The parts of the way from events to the tree, and their sum.
PARTS = ("path", "reduce", "records", "decode", "fold")


@dataclass(slots=True)
class Run:
    """The options of one run of the benchmark, and its results so far."""

    repeats: int
    peers: tuple[str, ...]
    binaries: rust_peer.Binaries | None
    wheel: Any | None
    versions: dict[str, str]
    samples: Samples = field(default_factory=Samples)
    wrong: list[str] = field(default_factory=list)

    def rust(self) -> tuple[str, ...]:
        """The requested Rust engines, if they are built."""
        return tuple(peer for peer in RUST_PEERS if peer in self.peers) if self.binaries else ()

    def label(self, peer: str) -> str:
        """Name of a peer with its version."""
        if peer == "wheel":
            return f"{wheel_peer.PACKAGE} {self.versions.get(wheel_peer.PACKAGE, '')} RadixTree"
        crate = "kv-index" if peer == "chain" else "dynamo-kv-router"
        engine = {"chain": "ChainIndex", "crtc": "ConcurrentRadixTreeCompressed", "radix": "RadixTree"}[peer]
        return f"{crate} {self.versions[crate]} {engine}"


@dataclass(slots=True)
class File:
    """One workload, loaded in this process and in the peers' process."""

    run: Run
    workload: Workload
    path: Path
    child: rust_peer.RustPeer | None
    batches: list[EngineBatch]  # the workload's events, which serve every repetition

    def repetitions(self, most: int | None = None) -> Iterator[Callable[[str, str, str, float], None]]:
        """Yield, for each repetition, the function that records its figures.

        Figures of the first repetition are dropped, since it compiles or loads kernels, faults pages in and wakes the
        processor.
        """
        yield lambda *_: None
        for _ in range(min(self.run.repeats, most or self.run.repeats)):
            yield lambda metric, unit, series, value: self.run.samples.add(
                self.workload.name, metric, unit, series, value
            )

    def filled(self) -> ours.Path:
        """A path that has applied all events."""
        return ours.filled(self.workload, self.batches, TRANSACTION)

    def ask(self, command: str) -> dict[str, Any]:
        """Run one repetition in the peers' process."""
        assert self.child is not None  # callers iterate over run.rust(), which is empty if there is no child
        return self.child.ask(command)

    def expect(self, what: str, found: int, expected: int) -> None:
        """Record an error if a figure differs from the expected one."""
        if found != expected:
            line = f"{self.workload.name}: {what} is {found}, expected {expected}"
            if line not in self.run.wrong:
                self.run.wrong.append(line)


def percentile_us(took_ns: Sequence[int], share: float) -> float:
    """Percentile of latencies, in microseconds."""
    ordered = sorted(took_ns)
    return ordered[int((len(ordered) - 1) * share)] / 1000


def apply_case(file: File) -> None:
    """Nanoseconds per block from events to an empty tree: each part of the way and their sum.

    The peers have no transactions, so the same figure of theirs is compared with each of our sums.
    """
    run, n_blocks = file.run, file.workload.n_blocks
    for take in file.repetitions():
        for transaction, suffix in TRANSACTIONS.items():
            path = ours.Path(file.workload)
            took = path.apply(file.batches, transaction)
            for part in PARTS:
                take(f"{part}_ns_per_block{suffix}", "ns", OURS, getattr(took, part) / n_blocks)
            file.expect("entries held by ours", len(path.tree), file.workload.facts.live_entries)
            del path
        for peer in run.rust():
            answer = file.ask(f"apply {peer} 128")
            file.expect(f"errors of {peer}", answer["errors"], 0)
            for suffix in TRANSACTIONS.values() if peer == "chain" else ("",):
                take(f"path_ns_per_block{suffix}", "ns", run.label(peer), answer["ns_per_block"])
    if run.wheel is not None:
        for take in file.repetitions(WHEEL_REPEATS_MAX):
            took_ns = wheel_peer.WheelPeer(run.wheel, file.workload).apply()
            take("path_ns_per_block", "ns", run.label("wheel"), took_ns)


def match_case(file: File) -> None:
    """Microseconds per lookup: as columns over the candidates of a decision, and as a mapping of ranks."""
    run = file.run
    queries = file.workload.queries()
    passes = max(1, LATENCIES // len(queries))
    path = file.filled()
    expected = ours.match_sum(path, queries)

    def take_both(
        take: Callable[[str, str, str, float], None], metric: str, series: str, answer: dict[str, Any]
    ) -> None:
        take(f"{metric}_us_p50", "µs", series, answer["p50_us"])
        take(f"{metric}_us_p99", "µs", series, answer["p99_us"])
        file.expect(f"sum of depths of {series}", answer["qsum"], expected)

    for take in file.repetitions():
        took = ours.time_matches(path, queries, passes)
        take("match_us_p50", "µs", OURS, percentile_us(took, 0.5))
        take("match_us_p99", "µs", OURS, percentile_us(took, 0.99))
        if "chain" in run.rust():
            take_both(take, "match", run.label("chain") + ", bare", file.ask(f"match chain {passes}"))
        took, total = ours.time_scores(path, queries, passes)
        file.expect("sum of depths of our scores", total, expected)
        take("scores_us_p50", "µs", OURS, percentile_us(took, 0.5))
        take("scores_us_p99", "µs", OURS, percentile_us(took, 0.99))
        for peer in run.rust():
            answer = file.ask(f"map {peer} {passes}")
            label = run.label(peer) + (", map" if peer == "chain" else "")
            for metric in ("match", "scores"):
                take_both(take, metric, label, answer)
    if run.wheel is not None:
        wheel = wheel_peer.WheelPeer(run.wheel, file.workload)
        wheel.apply()
        for take in file.repetitions(WHEEL_REPEATS_MAX):
            took, total = wheel.match(queries)
            answer = {"p50_us": percentile_us(took, 0.5), "p99_us": percentile_us(took, 0.99), "qsum": total}
            take_both(take, "scores", run.label("wheel"), answer)


def memory_case(file: File) -> None:
    """Bytes per entry: the memory that a router's tree reports, the peers' live bytes, and the growth of the process.

    Each figure is measured in a process of its own, since a used one has free pages to reuse.
    """
    run = file.run
    for take in file.repetitions(MEMORY_REPEATS_MAX):
        command = [sys.executable, "-m", "benchmarks.memory", str(file.path)]
        done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=False)
        if done.returncode:
            reason = done.stderr.strip().splitlines()[-1:]
            run.wrong.append(f"{file.workload.name}: measuring memory ended with {done.returncode}: {reason}")
            return
        answer = json.loads(done.stdout)
        entries = answer["entries"]
        take("memory_bytes_per_entry", "B", OURS, answer["memory_bytes"] / entries)
        take("memory_rss_bytes_per_entry", "B", OURS, answer["rss_bytes"] / entries)
        for peer in run.rust():
            assert run.binaries is not None
            with rust_peer.RustPeer(run.binaries.counting, file.path) as child:
                live = child.ask(f"memory {peer}")["live_bytes"]
            with rust_peer.RustPeer(run.binaries.timed, file.path) as child:
                rss = child.ask(f"memory {peer}")["rss_bytes"]
            take("memory_bytes_per_entry", "B", run.label(peer), live / entries)
            take("memory_rss_bytes_per_entry", "B", run.label(peer), rss / entries)


def evict_case(file: File) -> None:
    """Nanoseconds to evict one block from the middle of a run of 2,048, one per transaction and many."""
    run = file.run
    begin = file.workload.first_removal
    n_removals = file.workload.n_events - begin
    for take in file.repetitions():
        for transaction, metric in ((1, "evict_ns_single"), (128, "evict_ns_batch_128")):
            path = ours.filled(file.workload, file.batches[:begin], TRANSACTION)
            take(metric, "ns", OURS, path.apply(file.batches[begin:], transaction).path / n_removals)
            file.expect("entries held by ours", len(path.tree), file.workload.facts.live_entries)
            del path
            if "chain" in run.rust():
                take(metric, "ns", run.label("chain"), file.ask(f"evict chain {transaction}")["ns_per_event"])


def pause_case(file: File) -> None:
    """Microseconds of the longest fold while one rank grows, with one event of 16 blocks per transaction."""
    run = file.run
    for take in file.repetitions():
        path = ours.Path(file.workload)
        took = [path.apply([batch], 1).fold for batch in file.batches]
        take("pause_us_max", "µs", OURS, percentile_us(took, 1.0))
        take("pause_us_p9999", "µs", OURS, percentile_us(took, 0.9999))
        if "chain" in run.rust():
            answer = file.ask("pause chain")
            take("pause_us_max", "µs", run.label("chain"), answer["max_us"])
            take("pause_us_p9999", "µs", run.label("chain"), answer["p9999_us"])


def tokens_case(file: File) -> None:
    """Microseconds from a buffer of tokens to the best rank."""
    run, workload = file.run, file.workload
    prompts = list(workload.tokens)
    path = file.filled()
    expected = ours.match_sum(path, workload.queries()[: len(prompts)])
    for take in file.repetitions():
        took = ours.time_tokens(path, prompts, workload.block_size, TOKEN_PASSES)
        take("tokens_us_p50", "µs", OURS, percentile_us(took, 0.5))
        take("tokens_us_p99", "µs", OURS, percentile_us(took, 0.99))
        for peer in run.rust():
            if peer == "crtc":
                continue
            answer = file.ask(f"tokens {peer} {TOKEN_PASSES}")
            # Each engine hashes with its own function, so equal sums show that the hashes agree as well.
            file.expect(f"sum of depths of {run.label(peer)} by tokens", answer["qsum"], expected)
            take("tokens_us_p50", "µs", run.label(peer), answer["p50_us"])
            take("tokens_us_p99", "µs", run.label(peer), answer["p99_us"])


def writer_case(file: File) -> None:
    """Microseconds per lookup, alone and while another thread folds removals and stores without pausing."""
    path = file.filled()
    queries = file.workload.queries()
    expected = ours.match_sum(path, queries)
    log = [record for records in ours.cycle(path, file.workload, file.batches, TRANSACTION) for record in records]
    calls = [decode_runs(log[first : first + WRITER_RECORDS])[0] for first in range(0, len(log), WRITER_RECORDS)]
    for take in file.repetitions():
        # Even without a pause, each query is preceded by a sleep of 0, which lets the writer run. Otherwise the queries
        # would keep the GIL, and the writer would only wait.
        for name, pause_s in (("", 0.0), ("paced_", PACED_S)):
            took = _paced(path, queries, pause_s)
            take(f"{name}no_writer_us_p50", "µs", OURS, percentile_us(took, 0.5))
            take(f"{name}no_writer_us_p99", "µs", OURS, percentile_us(took, 0.99))
            stop = threading.Event()
            folded: list[int] = []
            writer = threading.Thread(target=_write, args=(path.tree, calls, stop, folded))
            start = time.perf_counter()
            writer.start()
            took = _paced(path, queries, pause_s)
            seconds = time.perf_counter() - start
            stop.set()
            writer.join()
            take(f"{name}concurrent_writer_us_p50", "µs", OURS, percentile_us(took, 0.5))
            take(f"{name}concurrent_writer_us_p99", "µs", OURS, percentile_us(took, 0.99))
            take(f"{name}concurrent_writer_us_max", "µs", OURS, percentile_us(took, 1.0))
            take(f"{name}concurrent_writer_mblocks_per_s", "M/s", OURS, sum(folded) / seconds / 1e6)
    file.expect("entries held after the writer", len(path.tree), file.workload.facts.live_entries)
    file.expect("sum of depths after the writer", ours.match_sum(path, queries), expected)


def _paced(path: ours.Path, queries: Sequence[Any], pause_s: float) -> list[int]:
    find, candidates, clock = path.tree.find_matches, Candidates(path.ranks), ours.clock
    took = []
    for number in range(WRITER_QUERIES):
        query = queries[number % len(queries)]
        time.sleep(pause_s)
        start = clock()
        find(query).columns(candidates, ours.WEIGHTS)
        took.append(clock() - start)
    return took


def _write(tree: TreeRunFold, calls: Sequence[RunColumns], stop: threading.Event, folded: list[int]) -> None:
    """Repeat the cycle until `stop` is set, and complete it, so that the tree ends in its initial state."""
    while not stop.is_set():
        for records in calls:
            tree.fold_records(records)
            if not stop.is_set():
                folded.append(int(records.offset[-1]))


CASES: dict[str, Callable[[File], None]] = {
    "apply": apply_case,
    "match": match_case,
    "memory": memory_case,
    "tokens": tokens_case,
    "writer": writer_case,
    "evict": evict_case,
    "pause": pause_case,
}


def bars(every: Sequence[Row]) -> list[Bar]:
    """Requirements on the index, and whether these rows meet them; they apply to fleets of 64 ranks."""
    rows = [row for row in every if "_w64" in row.case or "_w1_" in row.case]
    found: list[Bar] = []
    for share in ("p50", "p99"):
        metric = f"match_us_{share}"
        found += [
            ratio_bar(f"match {share} compared with ChainIndex as a map", select(rows, metric, "map"), 1.0),
            ratio_bar(f"match {share} compared with Dynamo's compressed tree", select(rows, metric, "Compressed"), 1.0),
        ]
    found += [
        ratio_bar("memory compared with ChainIndex", select(rows, "memory_bytes_per_entry", "ChainIndex"), 0.9),
        ratio_bar(
            "resident memory compared with ChainIndex", select(rows, "memory_rss_bytes_per_entry", "ChainIndex"), 0.9
        ),
        value_bar("longest pause of the writer", select(rows, "pause_us_max"), 2000, "µs"),
    ]
    answer = select(rows, "tokens_us_p50")
    found += [
        value_bar("tokens_us_p50, 2,048 tokens", [row for row in answer if "_d128" in row.case], 8, "µs"),
        value_bar("tokens_us_p50, 32,768 tokens", [row for row in answer if "_d2048" in row.case], 25, "µs"),
    ]
    found.append(value_bar("match p99 with a concurrent writer", select(rows, "concurrent_writer_us_p99"), 10, "µs"))
    return found


def measure(run: Run, recipe: Recipe, path: Path, cases: Sequence[str], console: Console) -> None:
    """Measure the cases of one workload."""
    workload = load(path)
    with ExitStack() as stack:
        child = None
        if run.binaries is not None and run.rust():
            child = stack.enter_context(rust_peer.RustPeer(run.binaries.timed, path))
        file = File(run, workload, path, child, ours.batches_of(workload))
        for case in cases:
            begun = time.perf_counter()
            CASES[case](file)
            console.print(f"{recipe.name} {case}: {time.perf_counter() - begun:.0f} s", style="dim", highlight=False)


@click.command()
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Also write the report to this file.")
@click.option("--file", "files", multiple=True, help="Only workloads whose name contains this; may be repeated.")
@click.option("--case", "only", multiple=True, type=click.Choice(list(CASES)), help="Only this case; may be repeated.")
@click.option("--peers", default=",".join(PEERS), show_default=True, help="Comma-separated; empty for none.")
@click.option("--repeats", type=click.IntRange(min=1), help=f"Default {REPEATS}, or {QUICK_REPEATS} with --quick.")
@click.option("--quick", is_flag=True, help="Small workloads: a smoke test whose figures are not compared with bars.")
@click.option(
    "--data",
    type=click.Path(path_type=Path),
    default=CHECKOUT / ".kvstreams" / "bench",
    help="Directory for generated files.",
)
@click.option(
    "--trace", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="A Mooncake trace (.jsonl)."
)
@click.option(
    "--build/--no-build", default=None, help="Rebuild the Rust peers, or never build them; default: build if missing."
)
def main(
    json_path: Path | None,
    files: tuple[str, ...],
    only: tuple[str, ...],
    peers: str,
    repeats: int | None,
    quick: bool,
    data: Path,
    trace: Path | None,
    build: bool | None,
) -> None:
    """Compare the way from events to answers with kv-index and Dynamo's indexes, interleaved in one run."""
    console = wide_console()
    asked = tuple(peer for peer in peers.split(",") if peer)
    unknown = set(asked) - set(PEERS)
    if unknown:
        raise click.BadParameter(
            f"unknown: {', '.join(sorted(unknown))}; choose from {', '.join(PEERS)}", param_hint="--peers"
        )
    missing: list[str] = []
    binaries = None
    if set(asked) & set(RUST_PEERS):
        console.print("looking for the Rust peers; building them takes a few minutes", style="dim")
        built = rust_peer.find_or_build(data / "peers", build)
        if isinstance(built, str):
            missing.append(built)
        else:
            binaries = built
    wheel = wheel_peer.radix_tree() if "wheel" in asked else None
    if "wheel" in asked and wheel is None:
        missing.append(f"{wheel_peer.PACKAGE} is not installed")
    versions = {
        **installed("kvstreams", "numpy", "numba", "xxhash", wheel_peer.PACKAGE),
        **(rust_peer.versions() if binaries else {}),
    }
    run = Run(repeats or (QUICK_REPEATS if quick else REPEATS), asked, binaries, wheel, versions)
    for recipe in QUICK_RECIPES if quick else RECIPES:
        cases = [case for case in recipe.cases if not only or case in only]
        if not cases or (files and not any(part in recipe.name for part in files)):
            continue
        if recipe.needs_trace and trace is None and not (data / f"{recipe.name}.kvwl").exists():
            missing.append(f"{recipe.name} needs a Mooncake trace; pass one with --trace")
            continue
        measure(run, recipe, ensure(recipe, data, trace), cases, console)
    rows = run.samples.rows()
    # Small workloads fit into caches and hardly outgrow an empty index, so their ratios cannot show whether bars are
    # met.
    report = Report("index", versions, rows, [] if quick else bars(rows), missing, run.wrong)
    report.print(console)
    if json_path is not None:
        report.write(json_path)
    sys.exit(1 if run.wrong else 0)


if __name__ == "__main__":
    main()
