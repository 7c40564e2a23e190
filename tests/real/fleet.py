"""Real engines with the whole stack in front of them, and requests whose overlap the engine itself confirms.

What lives here: which processes run, and comparing what a router promised with what the engine found. What must not:
single cases (test_*.py) and long runs (agreement, failures).
"""

from __future__ import annotations

import json
import random
import re
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from streams.lab.kafka.broker import LocalKafka
from streams.lab.processes import Child, Children
from streams.lab.stack import FrontProcess, RouterProcess, Stack, get_json, wait_workers
from streams.process.waiting import wait_for
from streams.settings import Settings
from tests.helpers.broker import broker_config
from tests.real.engine import ANSWER_TIMEOUT_S, BLOCK_SIZE, RealEngine
from tests.real.environment import model_folder

#: Events of one answer reach a router within milliseconds, if the cores are idle; engines that answer keep both busy.
SETTLE_S = 0.3

#: How long a router may need to call an engine that works `exact`, and a busy machine to notice that one has died.
NOTICE_S = 60.0


@dataclass(frozen=True, slots=True)
class Answer:
    """What the front answered. promised: the blocks that the router said the engine holds, of n_blocks."""

    status: int
    worker_id: int
    promised: int
    n_blocks: int
    mode: str
    body: dict[str, Any]

    @property
    def cached_tokens(self) -> int:
        """How many tokens of the prompt the engine found in its cache."""
        return int((self.body["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0)

    @property
    def prompt_tokens(self) -> int:
        return int(self.body["usage"]["prompt_tokens"])

    @property
    def promised_tokens(self) -> int:
        """The tokens that vLLM reads from its cache if it holds what was promised: never the prompt's last one."""
        return min(self.promised, (self.prompt_tokens - 1) // BLOCK_SIZE) * BLOCK_SIZE

    @property
    def text(self) -> str:
        """The text of the first choice of a chat or a completion."""
        choice = self.body["choices"][0]
        return str(choice["message"]["content"] if "message" in choice else choice["text"])

    def assert_agrees(self) -> None:
        """Check that an answer that claims to be exact has exactly the overlap that the engine found."""
        assert self.status == 200, self.body
        assert self.mode == "exact", self
        assert self.cached_tokens == self.promised_tokens, self


@dataclass
class Streamed:
    """What has arrived of a stream. migration: what the front says at its end about migrations."""

    worker_id: int
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    migration: dict[str, Any] = field(default_factory=dict)
    error: dict[str, Any] | None = None

    @property
    def n_tokens(self) -> int:
        return len(self.tokens)


class Fleet:
    """Engines and the processes of the product."""

    def __init__(
        self, stack: Stack, engines: Sequence[RealEngine], worker: RouterProcess, front: FrontProcess, bridge: Child
    ) -> None:
        self.stack = stack
        self.engines = {engine.worker_id: engine for engine in engines}
        self.worker = worker
        self.front = front
        self.bridge = bridge

    def ask(self, path: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> Answer:
        """Send one request to the front, and wait for the whole answer."""
        request = urllib.request.Request(
            f"{self.front.url}{path}",
            json.dumps(body).encode(),
            {"Content-Type": "application/json", "X-Kvstreams-Details": "1", **(headers or {})},
        )
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_TIMEOUT_S) as response:
                promised, n_blocks = response.headers["X-Kvstreams-Overlap-Blocks"].split("/")
                worker_id = int(response.headers["X-Kvstreams-Worker"].split("/")[0])
                mode = response.headers["X-Kvstreams-Mode"]
                found = json.loads(response.read())
                return Answer(response.status, worker_id, int(promised), int(n_blocks), mode, found)
        except urllib.error.HTTPError as exc:
            return Answer(exc.code, 0, 0, 0, "", json.loads(exc.read()))

    def chat(self, model: str, messages: list[dict[str, Any]], **more: Any) -> Answer:
        """One chat, with few tokens of output unless `max_tokens` says otherwise."""
        body = {"model": model, "messages": messages, "max_tokens": 8, "temperature": 0.0, **more}
        return self.ask("/v1/chat/completions", body)

    def complete(self, model: str, prompt: str | list[int], **more: Any) -> Answer:
        """One completion."""
        return self.ask(
            "/v1/completions", {"model": model, "prompt": prompt, "max_tokens": 4, "temperature": 0.0, **more}
        )

    def stream(self, path: str, body: dict[str, Any], seen: Callable[[Streamed], None] = lambda _: None) -> Streamed:
        """Read a stream to its end. seen: called after each event. The request should ask for `return_token_ids`."""
        headers = {"Content-Type": "application/json", "X-Kvstreams-Details": "1"}
        data = json.dumps({**body, "stream": True}).encode()
        with urllib.request.urlopen(
            urllib.request.Request(f"{self.front.url}{path}", data, headers), timeout=ANSWER_TIMEOUT_S
        ) as response:
            streamed = Streamed(int(response.headers["X-Kvstreams-Worker"].split("/")[0]))
            for line in response:
                if line.startswith(b"data: {"):
                    self._take(streamed, json.loads(line[6:]))
                    seen(streamed)
        return streamed

    @staticmethod
    def _take(streamed: Streamed, event: dict[str, Any]) -> None:
        streamed.error = event.get("error", streamed.error)
        streamed.migration = event.get("kvstreams_migration", streamed.migration)
        for choice in event.get("choices", ()):
            streamed.text += choice.get("text") or choice.get("delta", {}).get("content") or ""
            streamed.tokens += choice.get("token_ids") or ()

    def workers(self) -> dict[int, dict[str, Any]]:
        """The router's registry by worker id."""
        return {row["worker_id"]: row for row in get_json(f"{self.worker.url}/workers")["workers"]}

    def route(self, tokens: list[int], model: str, **asked: Any) -> dict[str, Any]:
        """Ask the router without booking. Raises HTTPError."""
        return self._post("/route", {"model": model, "token_ids": tokens, "update_states": False, **asked})

    def matches(self, tokens: list[int], model: str, **asked: Any) -> dict[int, int]:
        """How many of a prompt's leading blocks the router knows of, by worker. Raises HTTPError."""
        found = self._post("/matches", {"model": model, "token_ids": tokens, **asked})
        return {row["worker_id"]: row["scores"] for row in found["workers"]}

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.worker.url}{path}", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=ANSWER_TIMEOUT_S) as response:
            answer: dict[str, Any] = json.loads(response.read())
        return answer

    def n_active(self) -> int:
        """How many bookings the router counts."""
        return sum(row["active_requests"] for row in get_json(f"{self.worker.url}/loads")["loads"])

    def audited(self) -> Counter[str]:
        """The router's own comparison of its overlaps with what engines reported: decisions by outcome."""
        with urllib.request.urlopen(f"{self.worker.url}/metrics", timeout=ANSWER_TIMEOUT_S) as page:
            found = re.findall(r'^kvstreams_overlap_audited_total{outcome="(\w+)"} (\d+)', page.read().decode(), re.M)
        return Counter({outcome: int(n) for outcome, n in found})

    def settle(self) -> None:
        """Let the events of the last answer arrive."""
        time.sleep(SETTLE_S)

    def wait_exact(self, model: str) -> None:
        """Wait until the router calls every rank of a model exact, in a mode that reads the index."""

        def exact() -> bool:
            try:
                answer = self.route([1] * BLOCK_SIZE, model, router_config_override={"router_mode": "kv"})
            except urllib.error.HTTPError:
                return False
            return bool(answer["mode"] == "exact")

        wait_for(exact, NOTICE_S, f"{model} to be exact", 0.2)


def tokenizer_options(models: Sequence[str]) -> list[str]:
    """The options of `kvstreams front` and `kvstreams picker` for these models."""
    return [option for name in models for option in ("--tokenizer", f"{name}={model_folder(name)}")]


@contextmanager
def running(
    engines: Sequence[RealEngine], directory: Path, front_options: Sequence[str] = (), **settings: Any
) -> Iterator[Fleet]:
    """Start engines and the stack in a folder, and stop all of them. settings: those of the scope."""
    for engine in engines:
        engine.start()
    broker = LocalKafka(broker_config(directory / "kafka"))
    try:
        scope = Settings(
            kafka=broker.up().bootstrap, block_size=BLOCK_SIZE, partitions=4, topic_prefix="real-", **settings
        )
        with Children() as children:
            stack = Stack(scope, directory, children)
            for engine in engines:
                engine.wait_ready()
            worker = stack.worker()
            bridge = stack.bridge(engines)
            wait_workers(worker.url, len(engines))
            models = sorted({engine.model for engine in engines})
            front = stack.front("front", [worker], [*tokenizer_options(models), *front_options])
            fleet = Fleet(stack, engines, worker, front, bridge)
            for name in models:
                fleet.wait_exact(name)
            yield fleet
    finally:
        for engine in engines:
            engine.kill()
        broker.down()


class Conversations:
    """Prompts of the kinds that real traffic has, from a seed: conversations that grow, and shared system prompts."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._systems = [self.words(self._rng.randrange(20, 120)) for _ in range(3)]

    def words(self, n: int) -> str:
        """Text of n made-up words."""
        letters = "abcdefghijklmnopqrstuvwxyz"
        return " ".join("".join(self._rng.choices(letters, k=self._rng.randint(2, 9))) for _ in range(n))

    def begin(self) -> list[dict[str, Any]]:
        """The first messages of a conversation."""
        system = {"role": "system", "content": self._rng.choice(self._systems)}
        return [system, {"role": "user", "content": self.words(self._rng.randrange(3, 60))}]

    def go_on(self, messages: list[dict[str, Any]], answer: str) -> list[dict[str, Any]]:
        """The messages of the next turn."""
        question = {"role": "user", "content": self.words(self._rng.randrange(3, 40))}
        return [*messages, {"role": "assistant", "content": answer}, question]
