"""A stream of which parts come from several engines: their events in, one client's events out (pure).

What lives here: the removal of token ids and usage that the client has not asked for; the request that resumes an
answer; and the form in which the rest of it reaches the client. What must not: HTTP, clocks, and the decision to move,
which is the migration's (streams.client.migration).

The first engine's events keep their form. An answer resumes at `/v1/completions`, so for a chat its events become
chunks of a chat again, with the id of the first ones and without another role.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import orjson

from streams.client.migration import (
    KnownPart,
    Migration,
    MigrationFigures,
    MigrationLimits,
    Resume,
    TokensShown,
    held_back_characters,
    prompt_computed,
    rewound_characters,
)
from streams.frontend.answers import DONE, error_status, may_be_served_elsewhere, usage_tokens
from streams.prompts.calls import Kind
from streams.prompts.request_fields import is_true, prompts_of, whole_number

#: Bytes of one event of an engine. The first one repeats the prompt's ids, about 8 bytes for each.
EVENT_BYTES_MAX = 64 << 20

#: OpenAI's default for completions. Chats have none: they end with the model's context.
COMPLETION_TOKENS_DEFAULT = 16

#: Characters of an engine's message that become part of the error that ends a stream.
MESSAGE_CHARS_MAX = 500

#: What makes an engine report what it found of a resumed prompt with its first tokens, before it may fail as well.
REPORTING_USAGE = {"include_usage": True, "continuous_usage_stats": True}

#: What a usage says of the prompt: `cached_tokens`, and other fields of single engines.
_PROMPT_DETAILS = "prompt_tokens_details"

#: Fields that all chunks of an answer share; resumed ones repeat those of the first engine.
_FRAME = ("id", "object", "created", "model", "system_fingerprint", "service_tier")

#: Fields of a chat's delta that an engine's parser fills from the model's text.
_PARSED = frozenset({"reasoning_content", "reasoning", "tool_calls", "function_call", "audio"})

#: Fields of a request that do not belong in the completion that resumes it: those of chats, those that `obstacle`
#: refuses, and those that are set anew. All others are kept, known or not.
_NOT_RESUMED = frozenset(
    {
        "add_generation_prompt",
        "add_special_tokens",
        "audio",
        "best_of",
        "chat_template",
        "chat_template_kwargs",
        "continue_final_message",
        "documents",
        "echo",
        "include_reasoning",
        "kv_transfer_params",
        "kvstreams_arrival_ms",
        "logprobs",
        "max_completion_tokens",
        "max_tokens",
        "messages",
        "metadata",
        "min_tokens",
        "mm_processor_kwargs",
        "modalities",
        "n",
        "parallel_tool_calls",
        "prediction",
        "prompt",
        "reasoning_effort",
        "response_format",
        "return_token_ids",
        "store",
        "stream",
        "stream_options",
        "suffix",
        "tool_choice",
        "tools",
        "top_logprobs",
        "truncate_prompt_tokens",
        "verbosity",
    }
)


class _Fields(msgspec.Struct):
    """The fields of a body that matter while an answer is passed on. Everything else is skipped and not parsed."""

    max_tokens: Any = msgspec.UNSET
    max_completion_tokens: Any = None
    min_tokens: Any = None
    stop: Any = None
    include_stop_str_in_output: Any = None
    return_token_ids: Any = None
    stream_options: Any = None
    temperature: Any = None
    n: Any = None
    best_of: Any = None
    prompt: msgspec.Raw = msgspec.Raw()


_DECODER = msgspec.json.Decoder(_Fields)


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """What a request says about its answer.

    wants_usage_so_far: with every event. is_greedy: tokens that are dropped are generated again just the same.
    is_several: there are several answers. tokens_max: None without a limit, and for several answers. stops: the fields
    of the request that name stop strings.
    """

    is_chat: bool
    wants_ids: bool
    wants_usage: bool
    wants_usage_so_far: bool
    is_greedy: bool
    is_several: bool
    tokens_max: int | None
    tokens_min: int
    stops: Mapping[str, Any]


def answer_options(kind: Kind, body: bytes) -> AnswerOptions:
    """Parse a request. body: a JSON object."""
    fields = _DECODER.decode(body)
    usage = fields.stream_options if isinstance(fields.stream_options, dict) else {}
    wants_usage = is_true(usage.get("include_usage"))
    is_several = (
        any((number or 1) != 1 for number in (fields.n, fields.best_of)) or prompts_of(bytes(fields.prompt)).n > 1
    )
    limit = fields.max_tokens
    if kind is Kind.CHAT and fields.max_completion_tokens is not None:  # engines do not read it in completions
        limit = fields.max_completion_tokens
    if limit is msgspec.UNSET and kind is not Kind.CHAT:  # null means that there is no limit
        limit = COMPLETION_TOKENS_DEFAULT
    return AnswerOptions(
        is_chat=kind is Kind.CHAT,
        wants_ids=is_true(fields.return_token_ids),
        wants_usage=wants_usage,
        wants_usage_so_far=wants_usage and is_true(usage.get("continuous_usage_stats")),
        is_greedy=fields.temperature == 0,
        is_several=is_several,
        tokens_max=None if is_several else whole_number(limit),
        tokens_min=whole_number(fields.min_tokens) or 0,
        stops={"stop": fields.stop, "include_stop_str_in_output": fields.include_stop_str_in_output},
    )


def resumed_request(body: Mapping[str, Any], token_ids: Sequence[int], resume: Resume, *, asks_for_ids: bool) -> bytes:
    """Return the completion that goes on with a request's answer. token_ids: the prompt and the tokens that are kept.

    max_tokens is null for a chat without a limit: the default of completions would end it after 16 tokens.
    """
    fields = {name: value for name, value in body.items() if name not in _NOT_RESUMED}
    fields |= {"prompt": token_ids, "max_tokens": resume.max_tokens, "stream": True}
    if asks_for_ids:
        fields["return_token_ids"] = True
    if body.get("min_tokens"):
        fields["min_tokens"] = resume.min_tokens
    fields["stream_options"] = REPORTING_USAGE
    return orjson.dumps(fields)


class StreamRelay:
    """Turns the events of one engine after the other into the events of one stream, and feeds the stream's Migration.

    finished: the finish reason was passed on. done: the engine's mark of the end came. refusal: the message of an error
    event, which is withheld, since another engine may go on. by_text: an engine reported text without token ids.
    prompt_ids: the prompt as the first engine had it, None if it did not report it. usage: of the last engine for its
    own request, None if it did not report it. n_tokens: passed on so far; without ids, events are counted.
    """

    def __init__(self, kind: Kind, body: bytes, worker_id: int, limits: MigrationLimits) -> None:
        """body: the client's request, a JSON object. worker_id: of the engine that answers first."""
        self.options = options = answer_options(kind, body)
        self.migration = Migration(
            worker_id,
            0,
            max_tokens=options.tokens_max,
            min_tokens=options.tokens_min,
            held_back=held_back_characters(options.stops),
            rewound=rewound_characters(options.stops),
            limits=limits,
        )
        self.finished = False
        self.done = False
        self.refusal: str | None = None
        self.by_text = False
        self.prompt_ids: array[int] | None = None
        self.usage: dict[str, Any] | None = None
        self._n_events = 0
        self._n_ids = 0  # that the client has, or would have if it wanted them
        self._rest = b""
        self._frame: dict[str, Any] = {}
        self._usage_sent = False
        self._prompt_details: dict[str, Any] = {}  # what the first engine's usage says of the prompt, if it came
        self._resume: Resume | None = None  # None as long as the first engine answers
        self._is_computed = False  # what the engine that resumed found of the prompt is known
        self._known = KnownPart()

    @property
    def n_tokens(self) -> int:
        """Tokens of the answer so far."""
        return self._n_events if self.by_text else self._n_ids

    @property
    def diverged(self) -> bool:
        """Whether the engine that resumed generated other text than the client has."""
        return self._known.diverged

    # -- events --------------------------------------------------------------------------------------------------------

    def feed(self, data: bytes, at_s: float) -> bytes:
        """Take the next bytes of an engine's stream; return what the client gets. An incomplete event is kept back.

        Raises ValueError for an event of more than EVENT_BYTES_MAX.
        """
        received = self._rest + data if self._rest else data
        out: list[bytes] = []
        start = 0
        while (end := received.find(b"\n", start)) >= 0:
            line = received[start:end].rstrip(b"\r")
            start = end + 1
            if line.startswith(b"data:"):
                self._take(line[5:].strip(), at_s, out)
            elif line:  # comments, and names of events
                out.append(line + b"\n")
        self._rest = received[start:]
        if len(self._rest) > EVENT_BYTES_MAX:
            raise ValueError(f"an event has more than {EVENT_BYTES_MAX} bytes")
        return b"".join(out)

    def _take(self, data: bytes, at_s: float, out: list[bytes]) -> None:
        if self.done or self.refusal is not None or self.diverged:
            return
        if data == DONE:
            self.done = True
            return
        try:
            page = orjson.loads(data)
            if page.get("error"):
                self._error(page["error"], data, out)
            elif self._resume is not None:
                self._resumed(page, at_s, out)
            else:
                self._first(page, at_s, out)
        except (orjson.JSONDecodeError, AttributeError, KeyError, TypeError, ValueError, OverflowError):
            # Not a chunk as the front knows it. From the first engine, it is the client's.
            if self._resume is None:
                self.migration.note_obstacle("the engine sent an event that the front does not understand")
                out.append(b"data: " + data + b"\n\n")

    def _error(self, error: Any, data: bytes, out: list[bytes]) -> None:
        if not may_be_served_elsewhere(error_status(error)):
            self.finished = True  # another engine would say the same
            out.append(b"data: " + data + b"\n\n")
            return
        message = error.get("message") if isinstance(error, dict) else error
        self.refusal = str(message)[:MESSAGE_CHARS_MAX]

    def _first(self, page: dict[str, Any], at_s: float, out: list[bytes]) -> None:
        """Pass on an event of the first engine, without the ids that the client has not asked for."""
        if not self._frame:
            self._frame = {name: page[name] for name in _FRAME if name in page}
        self._n_events += bool(page["choices"])
        prompt_ids = self._without(page, "prompt_token_ids")
        for choice in page["choices"]:
            prompt_ids = self._without(choice, "prompt_token_ids") or prompt_ids
            token_ids = self._without(choice, "token_ids")
            delta = choice.get("delta") or {}
            text = (delta.get("content") if self.options.is_chat else choice.get("text")) or ""
            if not _PARSED.isdisjoint(delta) and any(delta.get(name) for name in _PARSED):
                self.migration.note_obstacle("reasoning and tool calls are finished by the engine's parser")
            if self.options.is_several:
                if text or token_ids:
                    self._n_ids += len(token_ids or (text,))
                    self.migration.n_of_several = self._n_ids
                continue
            if text or token_ids:
                self._show(token_ids, text, at_s)
            if choice.get("finish_reason") is not None:
                self.finished = True
        if prompt_ids is not None:
            self.prompt_ids = array("I", prompt_ids)
            self.migration.note_prompt(len(prompt_ids))
        usage = page.get("usage")
        if usage:
            self._n_events = max(self._n_events, usage_tokens(usage))
            details = usage.get(_PROMPT_DETAILS)
            if details:
                self._prompt_details = {_PROMPT_DETAILS: details}
            if not page["choices"]:
                self.usage = usage
                if not self.options.wants_usage:
                    return
                self._usage_sent = True
        out.append(_event(page))

    def _without(self, fields: dict[str, Any], name: str) -> Any:
        """Return a field that the client sees only if it has asked for ids."""
        return fields.get(name) if self.options.wants_ids else fields.pop(name, None)

    def _resumed(self, page: dict[str, Any], at_s: float, out: list[bytes]) -> None:
        """Pass on an event of a completion that goes on with the answer, in the form of the first engine's events."""
        usage = page.get("usage")
        if usage and not self._is_computed:
            self._computed(usage, at_s)
        if usage and not page["choices"]:
            self.usage = usage
            if self.options.wants_usage:
                out.append(_event({**self._frame, "choices": [], "usage": self._usage_of_all(usage)}))
                self._usage_sent = True
            return
        for choice in page["choices"]:
            self._n_events += 1
            token_ids, finish_reason = choice.get("token_ids"), choice.get("finish_reason")
            text = choice.get("text") or ""
            new_ids, text = self._known.skip(token_ids or (), text, ends=finish_reason is not None)
            if self.diverged:
                return
            if token_ids or text:
                self._show(token_ids, text, at_s)
            shown = {"index": 0, **({"delta": {"content": text}} if self.options.is_chat else {"text": text})}
            shown |= {"logprobs": None, "finish_reason": finish_reason}
            if "stop_reason" in choice and (finish_reason is not None or not self.options.is_chat):
                shown["stop_reason"] = choice["stop_reason"]
            if self.options.wants_ids:
                shown["token_ids"] = new_ids
            if finish_reason is not None:
                self.finished = True
            if text or finish_reason is not None or (self.options.wants_ids and new_ids):
                more = {"usage": self._usage_of_all(usage)} if usage and self.options.wants_usage_so_far else {}
                out.append(_event({**self._frame, "choices": [shown], **more}))

    def _show(self, token_ids: list[int] | None, text: str, at_s: float) -> None:
        if token_ids is None:
            self.by_text = self.by_text or bool(text)
            token_ids = []
        # Several tokens may end within a character. Without greedy decoding, tokens that are dropped for this reason
        # would not come again, so it is left to the next engine to complete the character, which vLLM does.
        whole = None if len(token_ids) > 1 and self.options.is_greedy else True
        self.migration.handle(TokensShown(at_s, token_ids, text, whole))
        self._n_ids = max(self._n_ids, len(self.migration.shown.token_ids))

    def _computed(self, usage: dict[str, Any], at_s: float) -> None:
        self._is_computed = True
        computed = prompt_computed(usage, at_s)
        if computed is not None:
            self.migration.handle(computed)

    def _usage_of_all(self, usage: dict[str, Any]) -> dict[str, Any]:
        """Return the usage of the whole answer, from that of its last part.

        What the last engine found in its caches is not part of it: there it began with the answer so far, which other
        engines had computed.
        """
        n_kept = 0 if self._resume is None else self._resume.n_kept
        return self._whole_usage(max(0, usage["prompt_tokens"] - n_kept), usage["completion_tokens"] + n_kept)

    def _whole_usage(self, n_prompt: int, n_completion: int) -> dict[str, Any]:
        return {
            "prompt_tokens": n_prompt,
            "completion_tokens": n_completion,
            "total_tokens": n_prompt + n_completion,
            **self._prompt_details,
        }

    # -- moving --------------------------------------------------------------------------------------------------------

    def resume(self, resume: Resume) -> None:
        """Expect the events of the next engine."""
        self._resume = resume
        self._rest = b""
        self.usage = None
        self.done, self.refusal, self._is_computed = False, None, False
        self._known = KnownPart(self.migration.shown, resume.skip_characters, ids_matter=self.options.wants_ids)

    def ending(self, n_prompt: int, finish_reason: str | None, figures: Mapping[str, Any] | None) -> bytes:
        """Return what is missing at the end of a complete answer: finish reason, usage, figures, and the mark."""
        out = b""
        if finish_reason is not None and not self.finished:
            chosen: dict[str, Any] = {
                "index": 0,
                **({"delta": {"content": ""}} if self.options.is_chat else {"text": ""}),
            }
            chosen |= {"logprobs": None, "finish_reason": finish_reason}
            out += _event({**self._frame, "choices": [chosen]})
        if self.options.wants_usage and not self._usage_sent and (self._resume is not None or not self.done):
            out += _event({**self._frame, "choices": [], "usage": self._whole_usage(n_prompt, self.n_tokens)})
        return out + self.figures_event(figures) + b"data: " + DONE + b"\n\n"

    def figures_event(self, figures: Mapping[str, Any] | None) -> bytes:
        """Return the event with the figures of the migrations; none without figures."""
        if figures is None:
            return b""
        return _event({**self._frame, "choices": [], "kvstreams_migration": figures})


def figures_of(figures: MigrationFigures, *, by_text: bool) -> dict[str, Any]:
    """Return the figures of a stream as clients who ask get them."""
    return {
        "migrations": figures.migrations,
        "tokens_recovered": figures.tokens_recovered,
        "tokens_prefilled_again": figures.tokens_prefilled_again,
        "lost_ms": round(figures.lost_s * 1000.0, 3),
        "resumed_by": None if not figures.migrations else "text" if by_text else "ids",
    }


def _event(page: Mapping[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(page) + b"\n\n"
