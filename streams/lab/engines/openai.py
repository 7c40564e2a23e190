"""OpenAI's completions as a simulated engine serves them: requests in, pages and chunks out (pure).

What lives here: reading and checking a request, the shape of answers, chunks, model lists and errors. What must not:
HTTP, time, the engine itself (server), and how messages become a prompt (chat_template). Text is tokenised by bytes:
one token for each byte of its UTF-8, ids 0 to 255. Answers are printable ASCII, so an answer's text has one character
per token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import orjson
import xxhash

from streams.core.hashing import pack_tokens
from streams.core.ids import U64_MASK
from streams.errors import InvalidRequest, UnknownModel
from streams.lab.engines.chat_template import render
from streams.lab.engines.engine_messages import Finished, FirstToken, ModelRequest
from streams.lab.engines.kv_transfer import NO_TRANSFER, TransferRequest, parse_transfer
from streams.lab.engines.synthetic_tokens import BYTES_PER_TOKEN, answer_tokens, greedy_tokens, unpack_tokens

#: OpenAI's default for completions.
MAX_TOKENS_DEFAULT = 16
#: Stop strings of a request, as in OpenAI's API, and stop token ids.
STOPS_MAX = 4
STOP_TOKEN_IDS_MAX = 128
#: What surrounds the answer's text in the arguments of a tool that it calls.
_ARGUMENTS_START, _ARGUMENTS_END = '{"answer": "', '"}'
#: The last event of every stream.
STREAM_END = b"data: [DONE]\n\n"
#: vLLM's error types by HTTP status.
_ERROR_TYPES = {400: "BadRequestError", 404: "NotFoundError", 409: "ConflictError", 503: "ServiceUnavailableError"}


@dataclass(frozen=True, slots=True)
class ServedModels:
    """What an engine can be asked for.

    lora_names: adapters, each addressed as a model, as in vLLM. chat_style: default argument of the chat template.
    """

    name: str
    lora_names: tuple[str, ...]
    n_tokens_max: int
    chat_style: str = ""


@dataclass(frozen=True, slots=True)
class CompletionCall:
    """A checked request for a completion or a chat completion.

    tokens: u32 LE. answer: u32 LE [n_output_tokens]. n_text: characters of the answer's text, which ends before a stop
    string. with_continuous_usage: whether each chunk has the usage so far. finish_reason, stop_reason: as in vLLM.
    tool: the function that the answer calls, None for text. lora_name: None for the model itself. arrival_ms: on the
    client's time axis, None for now. report_mode: which of its blocks are reported, None for the engine's default.
    held_back: characters of a stream's text that follow later, since they may begin a stop string: as in vLLM, one
    fewer than the longest of them has. transfer: of its prompt's KV cache, to or from another engine.
    """

    tokens: bytes
    n_output_tokens: int
    output_seed: int
    answer: bytes
    lora_name: str | None
    arrival_ms: float | None
    stream: bool
    with_usage: bool
    with_token_ids: bool
    report_mode: str | None = None
    is_chat: bool = False
    tool: str | None = None
    held_back: int = 0
    n_text: int = 0
    finish_reason: Literal["length", "stop", "tool_calls"] = "length"
    stop_reason: str | int | None = None
    transfer: TransferRequest = NO_TRANSFER
    with_continuous_usage: bool = False

    @property
    def id_prefix(self) -> str:
        """What the ids of these answers begin with."""
        return "chatcmpl-" if self.is_chat else "cmpl-"


def parse_body(raw: bytes) -> dict[str, Any]:
    """Read a JSON object. Raises InvalidRequest."""
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as exc:
        raise InvalidRequest(f"the body is not JSON: {exc}") from exc
    if not isinstance(body, dict):
        raise InvalidRequest("the body is not a JSON object")
    return body


def parse_completion(body: dict[str, Any], served: ServedModels) -> CompletionCall:
    """Check a request for a completion. Raises InvalidRequest, UnknownModel."""
    lora_name = _adapter(body, served)
    return _parse(body, served, lora_name, _prompt_tokens(body.get("prompt")), "max_tokens")


def parse_chat(body: dict[str, Any], served: ServedModels) -> CompletionCall:
    """Check a request for a chat completion. Raises InvalidRequest, UnknownModel."""
    lora_name = _adapter(body, served)
    name = "max_tokens" if body.get("max_completion_tokens") is None else "max_completion_tokens"
    return _parse(
        body,
        served,
        lora_name,
        _text_tokens(render(body, served.chat_style)),
        name,
        is_chat=True,
        tool=_called_tool(body),
    )


def tokenize(body: dict[str, Any], served: ServedModels) -> dict[str, Any]:
    """Return the page of `POST /tokenize`, as in vLLM. Raises InvalidRequest, UnknownModel."""
    _adapter(body, served)
    if "messages" in body:
        tokens = _text_tokens(render(body, served.chat_style))
    elif isinstance(body.get("prompt"), str):
        tokens = _text_tokens(body["prompt"])
    else:
        raise InvalidRequest("prompt must be a text, or messages a list")
    token_ids = unpack_tokens(tokens)
    return {"count": len(token_ids), "max_model_len": served.n_tokens_max, "tokens": token_ids, "token_strs": None}


def _adapter(body: dict[str, Any], served: ServedModels) -> str | None:
    """Return the adapter that a request names, None for the model itself. Raises UnknownModel."""
    model = body.get("model", served.name)
    if model != served.name and model not in served.lora_names:
        raise UnknownModel(f"The model `{model}` does not exist.")
    return None if model == served.name else str(model)


def _parse(
    body: dict[str, Any],
    served: ServedModels,
    lora_name: str | None,
    tokens: bytes,
    max_tokens_field: str,
    *,
    is_chat: bool = False,
    tool: str | None = None,
) -> CompletionCall:
    """Check what completions and chat completions have in common."""
    n_output = _whole_number(body, max_tokens_field, MAX_TOKENS_DEFAULT, least=1)
    n_prompt = len(tokens) // BYTES_PER_TOKEN
    limit = served.n_tokens_max
    if n_prompt + n_output > limit:
        raise InvalidRequest(
            f"This model's maximum context length is {limit} tokens. However, you requested {n_prompt + n_output} "
            f"tokens ({n_prompt} in the prompt, {n_output} in the completion)."
        )
    min_tokens = _whole_number(body, "min_tokens", 0, least=0)
    if min_tokens > n_output:
        raise InvalidRequest(f"min_tokens must be less than or equal to max_tokens={n_output}, got {min_tokens}.")
    # Only a stop condition ends an answer early, as if ignore_eos were set, so it only has to be valid.
    if not isinstance(body.get("ignore_eos", False), bool | None):
        raise InvalidRequest(f"ignore_eos is {body['ignore_eos']!r}, not a boolean")
    for name, only in (("n", 1), ("echo", False)):
        if body.get(name, only) not in (only, None):
            raise InvalidRequest(f"the simulated engine supports only {name} = {only}")
    # As with greedy decoding, equal prompts get equal answers, and a generation that resumes on another engine with the
    # output that it has so far continues unchanged: without a seed (greedy_tokens) and with one (answer_tokens).
    seed = _whole_number(body, "seed", None, least=None)
    answer = greedy_tokens(tokens, n_output) if seed is None else answer_tokens(seed & U64_MASK, n_prompt, n_output)
    n_tokens, n_text, stop_reason = _stopped(body, answer, min_tokens)
    arrival_ms = body.get("kvstreams_arrival_ms")
    if arrival_ms is not None and (
        isinstance(arrival_ms, bool) or not isinstance(arrival_ms, int | float) or not 0 <= arrival_ms < float("inf")
    ):
        raise InvalidRequest(f"kvstreams_arrival_ms is {arrival_ms!r}, not model milliseconds")
    options = body.get("stream_options") or {}
    arguments = body.get("vllm_xargs")
    return CompletionCall(
        tokens=tokens,
        n_output_tokens=n_tokens,
        output_seed=xxhash.xxh3_64_intdigest(tokens) if seed is None else seed & U64_MASK,
        answer=answer[: n_tokens * BYTES_PER_TOKEN],
        lora_name=lora_name,
        arrival_ms=arrival_ms,
        stream=bool(body.get("stream")),
        with_usage=isinstance(options, dict) and bool(options.get("include_usage")),
        with_token_ids=bool(body.get("return_token_ids")),
        report_mode=arguments.get("kv_cache_report_mode") if isinstance(arguments, dict) else None,
        is_chat=is_chat,
        tool=tool,
        held_back=_held_back(body),
        n_text=n_text,
        finish_reason="tool_calls" if tool else "length" if stop_reason is None else "stop",
        stop_reason=stop_reason,
        transfer=parse_transfer(body),
        with_continuous_usage=isinstance(options, dict) and bool(options.get("continuous_usage_stats")),
    )


def _stopped(body: dict[str, Any], answer: bytes, min_tokens: int) -> tuple[int, int, str | int | None]:
    """Return where the answer's stop conditions end it: its tokens, the characters of its text, and the condition.

    As in vLLM, a stop string counts once min_tokens tokens are out, is itself generated, and is not part of the text.
    """
    stop = body.get("stop")
    stops = [stop] if isinstance(stop, str) else stop or []
    if not isinstance(stops, list) or len(stops) > STOPS_MAX or not all(isinstance(stop, str) for stop in stops):
        raise InvalidRequest(f"stop is {stop!r}, not a text or a list of at most {STOPS_MAX} texts")
    ids = body.get("stop_token_ids") or []
    if not isinstance(ids, list) or len(ids) > STOP_TOKEN_IDS_MAX:
        raise InvalidRequest(f"stop_token_ids is not a list of at most {STOP_TOKEN_IDS_MAX} token ids")
    tokens = unpack_tokens(answer) if stops or ids else []
    text = "".join(map(chr, tokens))
    n_all = len(answer) // BYTES_PER_TOKEN
    ending: tuple[int, int, str | int | None] = (n_all, n_all, None)
    for stop in filter(None, stops):
        index = text.find(stop, max(0, min_tokens - len(stop)))
        if index >= 0 and index + len(stop) < ending[0]:
            ending = (index + len(stop), index, stop)
    for index, token in enumerate(tokens[: ending[0]]):
        if token in ids and index >= min_tokens:
            return index + 1, index + 1, token
    return ending


def _held_back(body: dict[str, Any]) -> int:
    stop = body.get("stop")
    stops = [stop] if isinstance(stop, str) else stop or []
    return max((len(text) - 1 for text in stops if text), default=0)


def _called_tool(body: dict[str, Any]) -> str | None:
    """Return the function that a request forces the model to call. With `auto`, this model answers with text."""
    tools, choice = body.get("tools") or [], body.get("tool_choice")
    if not isinstance(tools, list):
        raise InvalidRequest("tools is not a list")
    try:
        names = [str(tool["function"]["name"]) for tool in tools]
        if choice == "required":
            return names[0]
        if isinstance(choice, dict):
            named = str(choice["function"]["name"])
            return names[names.index(named)]
    except (KeyError, TypeError, IndexError, ValueError) as exc:
        raise InvalidRequest("tools and tool_choice do not name a function") from exc
    return None


def frame(request: ModelRequest, call: CompletionCall, model: str, created_s: int) -> dict[str, Any]:
    """Return the fields that an answer and all chunks of its stream share."""
    kind = "text_completion"
    if call.is_chat:
        kind = "chat.completion.chunk" if call.stream else "chat.completion"
    return {"id": request.request_id, "object": kind, "created": created_s, "model": model}


def choice(
    request: ModelRequest,
    start: int,
    end: int,
    finish_reason: str | None,
    *,
    with_token_ids: bool,
    n_text: int | None = None,
) -> dict[str, Any]:
    """Return the answer's tokens start..end as a choice of a completion. n_text: characters of the whole text."""
    token_ids = unpack_tokens(request.answered(start, end))
    page: dict[str, Any] = {
        "index": 0,
        "text": _text(token_ids, start, n_text),
        "logprobs": None,
        "finish_reason": finish_reason,
        "stop_reason": None,
    }
    if with_token_ids:
        page["token_ids"] = token_ids
    return page


def whole_answer(request: ModelRequest, call: CompletionCall) -> dict[str, Any]:
    """Return the fields of an answer that is not streamed: its choices, and the prompt's token ids if asked for."""
    n_tokens = call.n_output_tokens
    if not call.is_chat:
        page = choice(request, 0, n_tokens, None, with_token_ids=call.with_token_ids, n_text=call.n_text)
        page |= {"finish_reason": call.finish_reason, "stop_reason": call.stop_reason}
        if call.with_token_ids:
            page["prompt_token_ids"] = unpack_tokens(call.tokens)
        return {"choices": [page]}
    token_ids = unpack_tokens(request.answered(0, n_tokens))
    text = _text(token_ids, 0, call.n_text)
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if call.tool is not None:
        arguments = _ARGUMENTS_START + _quoted(text) + _ARGUMENTS_END
        function = {"name": call.tool, "arguments": arguments}
        calls = [{"id": f"call-{request.request_id}", "type": "function", "function": function}]
        message |= {"content": None, "tool_calls": calls}
    page = {
        "index": 0,
        "message": message,
        "logprobs": None,
        "finish_reason": call.finish_reason,
        "stop_reason": call.stop_reason,
    }
    if not call.with_token_ids:
        return {"choices": [page]}
    page["token_ids"] = token_ids
    return {"choices": [page], "prompt_token_ids": unpack_tokens(call.tokens)}


def first_chunks(request: ModelRequest, call: CompletionCall) -> list[dict[str, Any]]:
    """Return the fields of the chunks that precede a chat's first token: as in vLLM, one with the role."""
    if not call.is_chat:
        return []
    delta: dict[str, Any] = {"role": "assistant", "content": ""}
    if call.tool is not None:
        function = {"name": call.tool, "arguments": _ARGUMENTS_START}
        started = {"index": 0, "id": f"call-{request.request_id}", "type": "function", "function": function}
        delta = {"role": "assistant", "tool_calls": [started]}
    page: dict[str, Any] = {"choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}]}
    return [page | ({"prompt_token_ids": unpack_tokens(call.tokens)} if call.with_token_ids else {})]


def chunk(request: ModelRequest, call: CompletionCall, start: int, end: int) -> dict[str, Any]:
    """Return the fields of the chunk with the answer's tokens start..end; the last one has the finish reason.

    As in vLLM, the first chunk of a completion repeats the prompt's token ids, so that it may be megabytes long.
    """
    is_last = end == call.n_output_tokens
    ended = {"finish_reason": call.finish_reason, "stop_reason": call.stop_reason} if is_last else {}
    if not call.is_chat:
        page = choice(request, start, end, None, with_token_ids=call.with_token_ids) | ended
        page["text"] = _shown(request, call, start, end)
        if call.with_token_ids and start == 0:
            page["prompt_token_ids"] = unpack_tokens(call.tokens)
        return {"choices": [page]}
    token_ids = unpack_tokens(request.answered(start, end))
    text = _shown(request, call, start, end)
    delta: dict[str, Any] = {"content": text}
    if call.tool is not None:
        arguments = _quoted(text) + (_ARGUMENTS_END if is_last else "")
        delta = {"tool_calls": [{"index": 0, "function": {"arguments": arguments}}]}
    page = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None} | ended
    if call.with_token_ids:
        page["token_ids"] = token_ids
    return {"choices": [page]}


def _text(token_ids: list[int], start: int, n_text: int | None) -> str:
    text = "".join(map(chr, token_ids))
    return text if n_text is None else text[: max(0, n_text - start)]


def _shown(request: ModelRequest, call: CompletionCall, start: int, end: int) -> str:
    """Return the text that becomes visible with the tokens start..end of a stream."""
    first = max(0, start - call.held_back)
    last = end if end == call.n_output_tokens else max(first, end - call.held_back)
    return _text(unpack_tokens(request.answered(first, last)), first, call.n_text)


def _quoted(text: str) -> str:
    """Return text as the inside of a JSON string."""
    return orjson.dumps(text)[1:-1].decode()


def usage(prefilled: FirstToken | Finished, n_output_tokens: int, has_pool: bool) -> dict[str, Any]:
    """Return the token counts of a request, after n_output_tokens of its answer.

    has_pool: whether to say how many of the cached tokens came from a shared pool, which vLLM does not say.
    """
    details = {"cached_tokens": prefilled.cached_tokens}
    if has_pool:
        details["pooled_tokens"] = prefilled.pooled_tokens
    return {
        "prompt_tokens": prefilled.prompt_tokens,
        "total_tokens": prefilled.prompt_tokens + n_output_tokens,
        "completion_tokens": n_output_tokens,
        "prompt_tokens_details": details,
    }


def model_list(served: ServedModels, created_s: int) -> dict[str, Any]:
    """Return the page of `GET /v1/models`: the model, then its adapters."""
    rows = [
        {
            "id": name,
            "object": "model",
            "created": created_s,
            "owned_by": "vllm",
            "root": name,
            "parent": None if name == served.name else served.name,
            "max_model_len": served.n_tokens_max,
        }
        for name in (served.name, *served.lora_names)
    ]
    return {"object": "list", "data": rows}


def error(status: int, message: str) -> dict[str, Any]:
    """Return an error in OpenAI's shape, with vLLM's type for this HTTP status."""
    kind = _ERROR_TYPES.get(status, "BadRequestError" if status < 500 else "InternalServerError")
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}


def stream_event(chunk: dict[str, Any]) -> bytes:
    """Return a chunk as a server-sent event."""
    return b"data: " + orjson.dumps(chunk) + b"\n\n"


def _prompt_tokens(prompt: object) -> bytes:
    """Return a prompt, text or a list of token ids, as u32 LE tokens. Raises InvalidRequest."""
    if isinstance(prompt, str) and prompt:
        return _text_tokens(prompt)
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], list | str):
        return pack_tokens(prompt)
    raise InvalidRequest("prompt must be one text or one list of token ids, and not empty")


def _text_tokens(text: str) -> bytes:
    """Return a text as u32 LE tokens, one for each byte."""
    return np.frombuffer(text.encode(), dtype=np.uint8).astype("<u4").tobytes()


def _whole_number(body: dict[str, Any], name: str, default: int | None, least: int | None) -> Any:
    """Read an optional whole number. Raises InvalidRequest."""
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or (least is not None and value < least):
        raise InvalidRequest(
            f"{name} is {value!r}, not a whole number" + (f" of at least {least}" if least is not None else "")
        )
    return value
