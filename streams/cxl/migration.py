"""What becomes of a stream whose engine fails in the middle of an answer (pure).

What lives here: what was generated and shown so far (`Shown`), what cannot be resumed and why (`obstacle`), and the
decisions (`Migration`): events go in, and an instruction comes out that the caller performs. What must not: HTTP,
clocks, and the choice of a worker, which is the router's. Time is an argument, in seconds of any one clock.

A stream resumes at an endpoint that takes token ids, with the prompt and the tokens so far. Only tokens whose text the
client has got are kept. Two kinds of text lag behind their tokens: a character whose bytes are incomplete, and the last
characters of a request with stop strings, which an engine holds back because they may begin one. Tokens without their
text are dropped and generated again, so that no tokenizer is needed here, no half character is lost, and a stop string
that begins before the seam is found by the next engine.

    streaming --failed--> routing --routed--> resuming --tokens--> streaming
        any of these --ended, error, client gone--> over
"""

from __future__ import annotations

import enum
from array import array
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, assert_never

from streams.errors import KvStreamsError

#: Fields of a request whose output an engine's parser or grammar has to finish. Its state is lost with the engine.
_GUIDED = ("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")


class IllegalMigrationEvent(KvStreamsError, AssertionError):
    """An event came in a phase in which it cannot happen. This is a bug of the caller."""

    code = "illegal_migration_event"


class Failure(enum.StrEnum):
    """How an engine failed in the middle of a stream."""

    DIED = "died"  # its connection broke
    STALLED = "stalled"  # nothing came until the deadline
    REFUSED = "refused"  # an error event, or a refusal to resume


class Phase(enum.StrEnum):
    """Where a stream is."""

    STREAMING = "streaming"
    ROUTING = "routing"
    RESUMING = "resuming"
    OVER = "over"


@dataclass(frozen=True, slots=True)
class MigrationLimits:
    """migrations_max: engines after the first one. total_s: from the first failure to the last token's engine."""

    migrations_max: int = 3
    total_s: float = 60.0


# -- events ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TokensShown:
    """A chunk was passed on to the client: its token ids (u32), and what the client had not got yet of its text.

    whole: whether its text ends with its last token. It may not if a chunk has several tokens, of which the last one is
    a part of a character.
    """

    at_s: float
    token_ids: tuple[int, ...]
    text: str
    whole: bool = True


@dataclass(frozen=True, slots=True)
class EngineEnded:
    """The engine finished its answer."""

    at_s: float


@dataclass(frozen=True, slots=True)
class EngineFailed:
    """The engine failed. last_heard_s: when its last byte came, from which on time was lost."""

    at_s: float
    failure: Failure
    last_heard_s: float


@dataclass(frozen=True, slots=True)
class WorkerChosen:
    """The router has moved the booking. reachable_tokens: of the resumed prompt, in its own cache or in a pool."""

    at_s: float
    worker_id: int
    reachable_tokens: int
    pooled_tokens: int


@dataclass(frozen=True, slots=True)
class NoWorkerLeft:
    """The router has no other worker."""

    at_s: float


@dataclass(frozen=True, slots=True)
class ClientGone:
    """The client left. A cancelled request is never migrated."""

    at_s: float


Event = TokensShown | EngineEnded | EngineFailed | WorkerChosen | NoWorkerLeft | ClientGone


# -- instructions ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GoOn:
    """Nothing changes."""


@dataclass(frozen=True, slots=True)
class ChooseWorker:
    """Route the prompt and the first n_kept tokens of the answer again, without these workers."""

    n_kept: int
    excluded_worker_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Resume:
    """Send the prompt and the first n_kept tokens of the answer to this worker.

    max_tokens, min_tokens: what is left of the request's; max_tokens is None if it had none. skip_characters: of the
    text that comes, which the client has already.
    """

    worker_id: int
    n_kept: int
    max_tokens: int | None
    min_tokens: int
    skip_characters: int


@dataclass(frozen=True, slots=True)
class Finish:
    """End the client's stream. finish_reason: to be sent, None if the engine has sent it."""

    finish_reason: str | None


@dataclass(frozen=True, slots=True)
class FinishWithError:
    """End the client's stream with an error event after what was generated."""

    reason: str


@dataclass(frozen=True, slots=True)
class Abandon:
    """Cancel what runs, and send nothing."""


Instruction = GoOn | ChooseWorker | Resume | Finish | FinishWithError | Abandon


@dataclass(slots=True)
class MigrationFigures:
    """What clients who ask get at the end. lost_s: from the last byte of one engine to the first token of another."""

    migrations: int = 0
    tokens_recovered: int = 0
    tokens_prefilled_again: int = 0
    lost_s: float = 0.0


# -- what the client has -----------------------------------------------------------------------------------------------


class Shown:
    """The tokens of an answer and the text that a client has got, and how far a resumed answer may rely on them.

    held_back: characters that the engine holds back, one fewer than the longest stop string has.
    token_ids: of the answer so far. n_characters: of the text so far.
    """

    def __init__(self, held_back: int = 0) -> None:
        self.held_back = held_back
        self.token_ids = array("I")
        self.n_characters = 0
        # (tokens, characters of their text) after chunks that ended with a whole character; the first one may be used.
        self._points: deque[tuple[int, int]] = deque([(0, 0)])

    def add(self, token_ids: tuple[int, ...], text: str, whole: bool = True) -> None:
        """Note a chunk. A chunk without text ends within a character, or has tokens that are not shown at all."""
        self.token_ids.extend(token_ids)
        self.n_characters += len(text)
        if text and whole:
            self._points.append((len(self.token_ids), self.n_characters + self.held_back))
            while len(self._points) > 1 and self._points[1][1] <= self.n_characters:
                self._points.popleft()

    def resume_point(self) -> tuple[int, int]:
        """Return how many tokens are kept, and how many characters of the next ones' text the client has already."""
        n_kept, n_characters = self._points[0]
        return n_kept, self.n_characters - n_characters

    def cut(self, n_kept: int) -> None:
        """Forget the tokens that are generated again. The client keeps their text, if it has any."""
        del self.token_ids[n_kept:]
        self._points = deque([self._points[0]])


def held_back_characters(body: Mapping[str, Any]) -> int:
    """Return how many characters an engine holds back for a request's stop strings, as vLLM does."""
    stop = body.get("stop")
    stops = [stop] if isinstance(stop, str) else stop or []
    if body.get("include_stop_str_in_output"):
        return 0
    return max((len(each) - 1 for each in stops if isinstance(each, str) and each), default=0)


def obstacle(body: Mapping[str, Any]) -> str | None:
    """Return why the answer to a request cannot be resumed, or None if it can."""
    if any((body.get(name) or 1) != 1 for name in ("n", "best_of")):
        return "requests for several answers cannot be resumed"
    if body.get("use_beam_search"):
        return "beam search cannot be resumed"
    if body.get("prompt_embeds"):
        return "prompt embeddings cannot be resumed"
    if body.get("tools") and body.get("tool_choice", "auto") != "none":
        return "tool calls are finished by the engine's parser, whose state is lost"
    for name in _GUIDED:
        value = body.get(name)
        if value and not (isinstance(value, Mapping) and value.get("type") == "text"):
            return f"{name} constrains the whole answer, and its state is lost"
    return None


# -- decisions ---------------------------------------------------------------------------------------------------------


class Migration:
    """One stream. `handle` is the only way in; the caller performs what it returns before the next event.

    phase: see the module. shown: what the client has. figures: for those who ask.
    """

    def __init__(
        self,
        worker_id: int,
        n_prompt_tokens: int,
        *,
        max_tokens: int | None,
        min_tokens: int = 0,
        held_back: int = 0,
        obstacle: str | None = None,
        limits: MigrationLimits | None = None,
    ) -> None:
        """worker_id: of the first engine. obstacle: why the answer cannot be resumed."""
        self.phase = Phase.STREAMING
        self.shown = Shown(held_back)
        self.figures = MigrationFigures()
        self._worker_id = worker_id
        self._n_prompt_tokens = n_prompt_tokens
        self._max_tokens = max_tokens
        self._min_tokens = min_tokens
        self._obstacle = obstacle
        self._limits = limits or MigrationLimits()
        self._failed: list[int] = []
        self._first_failure_s: float | None = None
        self._silent_since_s = 0.0

    def handle(self, event: Event) -> Instruction:
        """Take an event and return what to do. Raises IllegalMigrationEvent."""
        if isinstance(event, ClientGone) and self.phase is not Phase.OVER:
            return self._over(Abandon())
        if type(event) not in _LEGAL[self.phase]:
            raise IllegalMigrationEvent(f"{type(event).__name__} in phase {self.phase}")
        match event:
            case TokensShown():
                return self._tokens(event)
            case EngineEnded():
                return self._over(Finish(None))
            case EngineFailed():
                return self._failure(event)
            case WorkerChosen():
                return self._chosen(event)
            case NoWorkerLeft():
                return self._over(FinishWithError(f"no other engine is left after {self._so_far()}"))
            case ClientGone():
                raise AssertionError("handled above")
            case _:
                assert_never(event)

    def _tokens(self, event: TokensShown) -> Instruction:
        if self.phase is Phase.RESUMING:
            self.figures.lost_s += event.at_s - self._silent_since_s
            self.phase = Phase.STREAMING
        self.shown.add(event.token_ids, event.text, event.whole)
        return GoOn()

    def _failure(self, event: EngineFailed) -> Instruction:
        if self.phase is Phase.STREAMING:
            self._silent_since_s = event.last_heard_s
        if self._first_failure_s is None:
            self._first_failure_s = event.last_heard_s
        self._failed.append(self._worker_id)
        n_kept, _ = self.shown.resume_point()
        if self._max_tokens is not None and n_kept >= self._max_tokens:
            return self._over(Finish("length"))  # only the end of the stream is missing
        if self._obstacle is not None:
            return self._over(FinishWithError(f"the engine {event.failure} after {self._so_far()}: {self._obstacle}"))
        if len(self._failed) > self._limits.migrations_max:
            return self._over(FinishWithError(f"{len(self._failed)} engines failed, after {self._so_far()}"))
        if event.at_s - self._first_failure_s > self._limits.total_s:
            return self._over(FinishWithError(f"moving took more than {self._limits.total_s:g} s, {self._so_far()}"))
        self.phase = Phase.ROUTING
        return ChooseWorker(n_kept, tuple(dict.fromkeys(self._failed)))

    def _chosen(self, event: WorkerChosen) -> Instruction:
        n_kept, skip = self.shown.resume_point()
        self.shown.cut(n_kept)
        n_resumed = self._n_prompt_tokens + n_kept
        self.figures.migrations += 1
        self.figures.tokens_recovered += min(event.pooled_tokens, n_resumed)
        self.figures.tokens_prefilled_again += max(0, n_resumed - event.reachable_tokens)
        self._worker_id = event.worker_id
        self.phase = Phase.RESUMING
        left = None if self._max_tokens is None else self._max_tokens - n_kept
        return Resume(event.worker_id, n_kept, left, max(0, self._min_tokens - n_kept), skip)

    def _over(self, instruction: Instruction) -> Instruction:
        self.phase = Phase.OVER
        return instruction

    def _so_far(self) -> str:
        return f"{len(self.shown.token_ids)} tokens"


#: The events that may happen in each phase, in addition to ClientGone. A missing one is a bug of the caller.
_LEGAL: dict[Phase, frozenset[type]] = {
    Phase.STREAMING: frozenset({TokensShown, EngineEnded, EngineFailed}),
    Phase.ROUTING: frozenset({WorkerChosen, NoWorkerLeft}),
    Phase.RESUMING: frozenset({TokensShown, EngineEnded, EngineFailed}),
    Phase.OVER: frozenset(),
}
