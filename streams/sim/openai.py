"""OpenAI's completions as a simulated engine serves them: requests in, pages and chunks out (pure).

What lives here: reading and checking a request, the shape of answers, chunks, model lists and errors. What must not:
HTTP, time, and the engine itself (server). Text is tokenised by bytes: one token for each byte of its UTF-8, ids 0 to
255. Answers are printable ASCII, so an answer's text has one character per token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
import xxhash

from streams.core.hashing import pack_tokens
from streams.core.ids import U64_MASK
from streams.errors import InvalidRequest, UnknownModel
from streams.sim.engine_messages import Finished, ModelRequest
from streams.sim.synthetic_tokens import BYTES_PER_TOKEN, answer_tokens, unpack_tokens

#: OpenAI's default for completions.
MAX_TOKENS_DEFAULT = 16
#: The last event of every stream.
STREAM_END = b"data: [DONE]\n\n"
#: vLLM's error types by HTTP status.
_ERROR_TYPES = {400: "BadRequestError", 404: "NotFoundError", 409: "ConflictError", 503: "ServiceUnavailableError"}


@dataclass(frozen=True, slots=True)
class ServedModels:
    """What an engine can be asked for. lora_names: adapters, each addressed as a model, as in vLLM."""

    name: str
    lora_names: tuple[str, ...]
    n_tokens_max: int


@dataclass(frozen=True, slots=True)
class CompletionCall:
    """A checked completion request.

    tokens: u32 LE. lora_name: None for the model itself. arrival_ms: on the client's time axis, None for now.
    report_mode: which of its blocks are reported, None for the engine's default.
    """

    tokens: bytes
    n_output_tokens: int
    output_seed: int
    lora_name: str | None
    arrival_ms: float | None
    stream: bool
    with_usage: bool
    with_token_ids: bool
    report_mode: str | None = None


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
    """Check a completion request. Raises InvalidRequest, UnknownModel."""
    model = body.get("model", served.name)
    if model != served.name and model not in served.lora_names:
        raise UnknownModel(f"The model `{model}` does not exist.")
    tokens = _prompt_tokens(body.get("prompt"))
    n_output = _whole_number(body, "max_tokens", MAX_TOKENS_DEFAULT, least=1)
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
    # An answer never ends early, as if ignore_eos were set, so it only has to be valid.
    if not isinstance(body.get("ignore_eos", False), bool | None):
        raise InvalidRequest(f"ignore_eos is {body['ignore_eos']!r}, not a boolean")
    for name, only in (("n", 1), ("echo", False)):
        if body.get(name, only) not in (only, None):
            raise InvalidRequest(f"the simulated engine supports only {name} = {only}")
    # As with greedy decoding, equal prompts get equal answers. A client that passes a seed gets the same answer
    # continued when it resumes on another engine with the output that it has so far (see answer_tokens).
    seed = _whole_number(body, "seed", None, least=None)
    arrival_ms = body.get("kvstreams_arrival_ms")
    if arrival_ms is not None and (
        isinstance(arrival_ms, bool) or not isinstance(arrival_ms, int | float) or not 0 <= arrival_ms < float("inf")
    ):
        raise InvalidRequest(f"kvstreams_arrival_ms is {arrival_ms!r}, not model milliseconds")
    options = body.get("stream_options") or {}
    arguments = body.get("vllm_xargs")
    return CompletionCall(
        tokens=tokens,
        n_output_tokens=n_output,
        output_seed=xxhash.xxh3_64_intdigest(tokens) if seed is None else seed & U64_MASK,
        lora_name=None if model == served.name else str(model),
        arrival_ms=arrival_ms,
        stream=bool(body.get("stream")),
        with_usage=isinstance(options, dict) and bool(options.get("include_usage")),
        with_token_ids=bool(body.get("return_token_ids")),
        report_mode=arguments.get("kv_cache_report_mode") if isinstance(arguments, dict) else None,
    )


def frame(request: ModelRequest, model: str, created_s: int) -> dict[str, Any]:
    """Return the fields that an answer and all chunks of its stream share."""
    return {"id": request.request_id, "object": "text_completion", "created": created_s, "model": model}


def choice(
    request: ModelRequest, start: int, end: int, finish_reason: str | None, *, with_token_ids: bool
) -> dict[str, Any]:
    """Return the answer's tokens start..end as a choice."""
    n_prompt = len(request.tokens) // BYTES_PER_TOKEN
    token_ids = unpack_tokens(answer_tokens(request.output_seed, n_prompt + start, end - start))
    page: dict[str, Any] = {
        "index": 0,
        "text": "".join(map(chr, token_ids)),
        "logprobs": None,
        "finish_reason": finish_reason,
        "stop_reason": None,
    }
    if with_token_ids:
        page["token_ids"] = token_ids
    return page


def usage(finished: Finished) -> dict[str, Any]:
    """Return the token counts of a request."""
    return {
        "prompt_tokens": finished.prompt_tokens,
        "total_tokens": finished.prompt_tokens + finished.n_output_tokens,
        "completion_tokens": finished.n_output_tokens,
        "prompt_tokens_details": {"cached_tokens": finished.cached_tokens},
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
        return np.frombuffer(prompt.encode(), dtype=np.uint8).astype("<u4").tobytes()
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], list | str):
        return pack_tokens(prompt)
    raise InvalidRequest("prompt must be one text or one list of token ids, and not empty")


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
