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

State: what was generated and shown so far.
"""

from __future__ import annotations

import enum
import io
from array import array
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, assert_never

from streams.client.payloads import MEDIA_FIELDS, text_field
from streams.errors import KvStreamsError

#: Fields of a request whose output an engine's parser or grammar has to finish. Its state is lost with the engine.
#: The last three are SGLang's.
_GUIDED = (
    *("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    *("json_schema", "regex", "ebnf"),
)


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
    """migrations_max: engines after the first one. total_s: time that all migrations of a stream may take."""

    migrations_max: int = 3
    total_s: float = 60.0


# -- events ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TokensShown:
    """A chunk was passed on to the client: its token ids (u32), and what the client had not got yet of its text.

    whole: whether its text ends with its last token. It may not if a chunk has several tokens, of which the last one is
    a part of a character. None: that is not known. It turns out with the next text: an ASCII character completes none.
    """

    at_s: float
    token_ids: Sequence[int]
    text: str
    whole: bool | None = True


@dataclass(frozen=True, slots=True)
class PromptComputed:
    """The engine to which the stream migrated last reports what it found of the resumed prompt in its caches.

    cached_tokens: found in its own memory or in a pool. pooled_tokens: those that were in a pool, None if the engine
    does not say. They replace what the router had expected.
    """

    at_s: float
    prompt_tokens: int
    cached_tokens: int
    pooled_tokens: int | None = None


def prompt_computed(usage: Mapping[str, Any], at_s: float) -> PromptComputed | None:
    """Read an engine's usage: None if it does not say what was cached. Only some engines have `pooled_tokens`."""
    details = usage.get("prompt_tokens_details")
    if not isinstance(details, Mapping) or not isinstance(details.get("cached_tokens"), int):
        return None
    pooled = details.get("pooled_tokens")
    return PromptComputed(
        at_s, usage["prompt_tokens"], details["cached_tokens"], pooled if isinstance(pooled, int) else None
    )


@dataclass(frozen=True, slots=True)
class EngineEnded:
    """The engine finished its answer."""

    at_s: float


@dataclass(frozen=True, slots=True)
class StreamEngineFailed:
    """The engine failed. last_heard_s: when its last byte came, from which on time was lost."""

    at_s: float
    failure: Failure
    last_heard_s: float


@dataclass(frozen=True, slots=True)
class WorkerChosen:
    """The router has reassigned the booking. reachable_tokens: of the resumed prompt, in its own cache or in a pool.

    pooled_tokens: those of them that are in a pool only.
    """

    at_s: float
    worker_id: int
    reachable_tokens: int
    pooled_tokens: int


@dataclass(frozen=True, slots=True)
class NoWorkerLeft:
    """The router has no other worker."""

    at_s: float


@dataclass(frozen=True, slots=True)
class ClientLeft:
    """The client left. A cancelled request is never migrated."""

    at_s: float


Event = TokensShown | PromptComputed | EngineEnded | StreamEngineFailed | WorkerChosen | NoWorkerLeft | ClientLeft


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
    """What clients who ask get at the end. lost_s: from the last byte of one engine to the first token of another.

    tokens_recovered: of the resumed prompts, found in pools; tokens_prefilled_again: found in no cache and no pool.
    Both are what the router expected, or what the engine reported if it did, and leave out engines that failed before
    their first token.
    """

    migrations: int = 0
    tokens_recovered: int = 0
    tokens_prefilled_again: int = 0
    lost_s: float = 0.0


# -- what the client has -----------------------------------------------------------------------------------------------


class Shown:
    """The tokens of an answer and the text that a client has got, and how far a resumed answer may rely on them.

    held_back: characters that the engine holds back, one fewer than the longest stop string has. rewound: last
    characters that are generated again though the client has them, since a stop string may have begun in them.
    token_ids: of the answer so far. n_characters: of the text so far. known_ids: those that the client has after
    token_ids, since they were dropped and have not come again.
    """

    def __init__(self, held_back: int = 0, rewound: int = 0) -> None:
        self.held_back = held_back
        self.rewound = rewound
        self.token_ids = array("I")
        self.known_ids = array("I")
        self.n_characters = 0
        self._text = io.StringIO()
        # (tokens, characters of their text) after chunks that ended with a whole character; the first one may be used.
        self._points: deque[tuple[int, int]] = deque([(0, 0)])
        # The same after a chunk of which it is not known whether it did.
        self._unproven: tuple[int, int] | None = None

    def add(self, token_ids: Sequence[int], text: str, whole: bool | None = True) -> None:
        """Note a chunk. A chunk without text ends within a character, or has tokens that are not shown at all."""
        if text and self._unproven is not None:
            if text[0] < "\x80":
                self._points.append(self._unproven)
            self._unproven = None
        self.token_ids.extend(token_ids)
        if self.known_ids:
            del self.known_ids[: len(token_ids)]
        if text:
            self._text.write(text)
            self.n_characters += len(text)
            point = (len(self.token_ids), self.n_characters + self.held_back)
            if whole:
                self._points.append(point)
            elif whole is None and not self.held_back:  # with it, the next text belongs to earlier tokens
                self._unproven = point
            usable = self.n_characters - self.rewound
            while len(self._points) > 1 and self._points[1][1] <= usable:
                self._points.popleft()

    @property
    def text(self) -> str:
        """The text that the client has."""
        return self._text.getvalue()

    def resume_point(self) -> tuple[int, int]:
        """Return how many tokens are kept, and how many characters of the next ones' text the client has already."""
        n_kept, n_characters = self._points[0]
        return n_kept, self.n_characters - n_characters

    def cut(self, n_kept: int) -> None:
        """Forget the tokens that are generated again. The client keeps them, and their text if it has any."""
        self.known_ids = self.token_ids[n_kept:] + self.known_ids
        del self.token_ids[n_kept:]
        self._points = deque([self._points[0]])
        self._unproven = None

    def restate(self, token_ids: Sequence[int]) -> None:
        """Take these as the tokens of exactly the text that the client has, where the engine reported no ids."""
        self.token_ids = array("I", token_ids)
        self.known_ids = array("I")
        self._points = deque([(len(self.token_ids), self.n_characters)])
        self._unproven = None


class KnownPart:
    """What a client has already of an answer that is resumed. It is generated again, and must be the same.

    diverged: it was not.
    """

    def __init__(self, shown: Shown | None = None, skip_characters: int = 0, *, ids_matter: bool = True) -> None:
        """shown: what the client has, after the tokens that are generated again were dropped.

        ids_matter: whether the client gets token ids; otherwise only text must be the same.
        """
        self._token_ids = shown.known_ids[:] if shown is not None and ids_matter else array("I")
        self._text = ""
        if shown is not None and skip_characters:
            self._text = shown.text[-skip_characters:]
        self.diverged = False

    def skip(self, token_ids: Sequence[int], text: str, *, ends: bool) -> tuple[Sequence[int], str]:
        """Return what is new of a chunk. ends: the answer ends with it, so that all must have come by now."""
        if self._token_ids:
            n = min(len(token_ids), len(self._token_ids))
            self.diverged = self.diverged or list(token_ids[:n]) != self._token_ids[:n].tolist()
            self._token_ids, token_ids = self._token_ids[n:], token_ids[n:]
        if self._text:
            n = min(len(text), len(self._text))
            self.diverged = self.diverged or text[:n] != self._text[:n]
            self._text, text = self._text[n:], text[n:]
        self.diverged = self.diverged or (ends and bool(self._text))
        return token_ids, text


def held_back_characters(body: Mapping[str, Any]) -> int:
    """Return how many characters an engine holds back for a request's stop strings, as vLLM does."""
    return 0 if body.get("include_stop_str_in_output") else _stop_characters(body)


def rewound_characters(body: Mapping[str, Any]) -> int:
    """Return how many characters are generated again because a stop string that is shown may begin in them."""
    return _stop_characters(body) if body.get("include_stop_str_in_output") else 0


def _stop_characters(body: Mapping[str, Any]) -> int:
    """Return how many characters of a stop string may be out before the one that completes it."""
    stop = body.get("stop")
    stops = [stop] if isinstance(stop, str) else stop if isinstance(stop, list) else []
    return max((len(text) - 1 for text in stops if isinstance(text, str) and text), default=0)


def obstacle(body: Mapping[str, Any]) -> str | None:
    """Return why the answer to a request cannot be resumed, or None if it can."""
    if any((body.get(name) or 1) != 1 for name in ("n", "best_of")) or _has_several_prompts(body.get("prompt")):
        return "requests for several answers cannot be resumed"
    if body.get("use_beam_search"):
        return "beam search cannot be resumed"
    if body.get("prompt_embeds"):
        return "prompt embeddings cannot be resumed"
    if body.get("echo") or body.get("suffix"):
        return "an answer that contains its prompt, or has a suffix, cannot be resumed"
    if _wants_log_probabilities(body):
        return "log probabilities cannot be resumed"
    if _has_media(body.get("messages")):
        return "prompts with images, audio or video cannot be resumed from token ids"
    if body.get("tools") and body.get("tool_choice", "auto") != "none":
        return "tool calls are finished by the engine's parser, whose state is lost"
    for name in _GUIDED:
        value = body.get(name)
        if value and not (isinstance(value, Mapping) and value.get("type") == "text"):
            return f"{name} constrains the whole answer, and its state is lost"
    return None


def _wants_log_probabilities(body: Mapping[str, Any]) -> bool:
    """Whether an answer has log probabilities. Engines read a false number as 0, which asks for those of each token."""
    logprobs = body.get("logprobs")
    if logprobs is False and "prompt" not in body:  # a truth value, in a chat
        logprobs = None
    return logprobs is not None or body.get("prompt_logprobs") is not None


def _has_several_prompts(prompt: Any) -> bool:
    """Whether a completion has a list of prompts, each of which gets an answer, and not one list of token ids."""
    return isinstance(prompt, list) and len(prompt) > 1 and isinstance(prompt[0], str | list)


def _has_media(messages: Any) -> bool:
    """Whether messages have a part that is not text. Without a type, its fields decide."""
    contents = [message.get("content") for message in messages or () if isinstance(message, Mapping)]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return any(isinstance(part, Mapping) and _is_media(part) for part in parts)


def _is_media(part: Mapping[str, Any]) -> bool:
    if part.get("type") is None:
        return not MEDIA_FIELDS.isdisjoint(part)
    return text_field(part) is None


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
        rewound: int = 0,
        obstacle: str | None = None,
        limits: MigrationLimits | None = None,
    ) -> None:
        """worker_id: of the first engine. n_prompt_tokens, obstacle: see note_prompt, note_obstacle."""
        self.phase = Phase.STREAMING
        self.shown = Shown(held_back, rewound)
        self.figures = MigrationFigures()
        self._worker_id = worker_id
        self._n_prompt_tokens = n_prompt_tokens
        self._max_tokens = max_tokens
        self._min_tokens = min_tokens
        self._obstacle = obstacle
        self._limits = limits or MigrationLimits()
        self._failed: list[int] = []
        #: Tokens of several answers that were passed on; they are not kept.
        self.n_of_several = 0
        self._silent_since_s = 0.0
        # Of the last migration: what the router expected to be recovered and prefilled, and what was in the worker's
        # memory.
        self._expected = (0, 0, 0)

    @property
    def has_obstacle(self) -> bool:
        """Whether it is known that the answer cannot be resumed."""
        return self._obstacle is not None

    @property
    def deadline_s(self) -> float:
        """Until when a stream that has failed must go on."""
        return self._silent_since_s + self._limits.total_s - self.figures.lost_s

    def note_prompt(self, n_prompt_tokens: int) -> None:
        """Note the length of the prompt, which the engine knows better. It must be known when a stream migrates."""
        self._n_prompt_tokens = n_prompt_tokens

    def note_obstacle(self, reason: str) -> None:
        """Note why the answer cannot be resumed. The first reason stays."""
        self._obstacle = self._obstacle or reason

    def handle(self, event: Event) -> Instruction:
        """Take an event and return what to do. Raises IllegalMigrationEvent."""
        if isinstance(event, ClientLeft) and self.phase is not Phase.OVER:
            return self._over(Abandon())
        if type(event) not in _LEGAL[self.phase]:
            raise IllegalMigrationEvent(f"{type(event).__name__} in phase {self.phase}")
        match event:
            case TokensShown():
                return self._tokens(event)
            case PromptComputed():
                return self._computed(event)
            case EngineEnded():
                return self._over(Finish(None))
            case StreamEngineFailed():
                return self._failure(event)
            case WorkerChosen():
                return self._chosen(event)
            case NoWorkerLeft():
                return self._over(FinishWithError(f"no other engine is left after {self._so_far()}"))
            case ClientLeft():
                raise AssertionError("handled above")
            case _:
                assert_never(event)

    def _tokens(self, event: TokensShown) -> Instruction:
        if self.phase is Phase.RESUMING:
            self.figures.lost_s += event.at_s - self._silent_since_s
            self.phase = Phase.STREAMING
        self.shown.add(event.token_ids, event.text, event.whole)
        return GoOn()

    def _failure(self, event: StreamEngineFailed) -> Instruction:
        if self.phase is Phase.STREAMING:
            self._silent_since_s = event.last_heard_s
        else:
            # No token came of this engine, so its prefill was for nothing, if there was one: it is not counted.
            recovered, prefilled, _ = self._expected
            self.figures.tokens_recovered -= recovered
            self.figures.tokens_prefilled_again -= prefilled
        self._failed.append(self._worker_id)
        n_kept, _ = self.shown.resume_point()
        if self._max_tokens is not None and n_kept >= self._max_tokens:
            return self._over(Finish("length"))  # only the end of the stream is missing
        if self._obstacle is not None:
            return self._over(FinishWithError(f"the engine {event.failure} after {self._so_far()}: {self._obstacle}"))
        if len(self._failed) > self._limits.migrations_max:
            return self._over(FinishWithError(f"{len(self._failed)} engines failed, after {self._so_far()}"))
        if event.at_s > self.deadline_s:
            return self._over(FinishWithError(f"migrating took more than {self._limits.total_s:g} s, {self._so_far()}"))
        self.phase = Phase.ROUTING
        return ChooseWorker(n_kept, tuple(dict.fromkeys(self._failed)))

    def _chosen(self, event: WorkerChosen) -> Instruction:
        n_kept, skip = self.shown.resume_point()
        self.shown.cut(n_kept)
        n_resumed = self._n_prompt_tokens + n_kept
        recovered = min(event.pooled_tokens, n_resumed)
        prefilled = max(0, n_resumed - event.reachable_tokens)
        self.figures.migrations += 1
        self.figures.tokens_recovered += recovered
        self.figures.tokens_prefilled_again += prefilled
        self._expected = recovered, prefilled, max(0, event.reachable_tokens - event.pooled_tokens)
        self._worker_id = event.worker_id
        self.phase = Phase.RESUMING
        left = None if self._max_tokens is None else self._max_tokens - n_kept
        return Resume(event.worker_id, n_kept, left, max(0, self._min_tokens - n_kept), skip)

    def _computed(self, event: PromptComputed) -> Instruction:
        """Replace what the router expected.

        An engine that does not say what came from pools found there what it found beyond the worker's own memory.
        """
        if self.figures.migrations:
            recovered, prefilled, own = self._expected
            cached = min(event.cached_tokens, event.prompt_tokens)
            pooled = min(recovered, max(0, cached - own)) if event.pooled_tokens is None else event.pooled_tokens
            actual = min(pooled, cached), event.prompt_tokens - cached
            self.figures.tokens_recovered += actual[0] - recovered
            self.figures.tokens_prefilled_again += actual[1] - prefilled
            self._expected = *actual, own
        return GoOn()

    def _over(self, instruction: Instruction) -> Instruction:
        self.phase = Phase.OVER
        return instruction

    def _so_far(self) -> str:
        return f"{self.n_of_several or len(self.shown.token_ids)} tokens"


#: The events that may happen in each phase, in addition to ClientLeft. A missing one is a bug of the caller.
_LEGAL: dict[Phase, frozenset[type]] = {
    Phase.STREAMING: frozenset({TokensShown, PromptComputed, EngineEnded, StreamEngineFailed}),
    Phase.ROUTING: frozenset({WorkerChosen, NoWorkerLeft}),
    Phase.RESUMING: frozenset({TokensShown, PromptComputed, EngineEnded, StreamEngineFailed}),
    Phase.OVER: frozenset(),
}
