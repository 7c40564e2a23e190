"""The fields of OpenAI's calls as vLLM, SGLang and TensorRT-LLM read them, by what they do to prompts (pure).

What lives here: the table of fields, the rules that read it, how many sequences and tokens a request is, and the digest
by which a repeated request is recognised. What must not: HTTP, tokens (tokenizing), and headers (requests).

The router compares a prompt with what engines hold, so the front has to know all fields that make an engine compute
another prompt, or read another cache. A field that is not in the table may be one of them: the prompt is compared, and
the answer is at most `approximate`.
"""

from __future__ import annotations

import enum
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import orjson

from streams.client.failed_engines import DIGEST_BYTES

#: Bytes of text per token of which no tokenizer is known. English has 4 to 5.
BYTES_PER_TOKEN = 4

#: Sequences that one request may count as. Engines have lower limits.
SEQUENCES_MAX = 65_536


#: Numbers of requests have at most 64 bits; JSON with larger ones could not be written again.
NUMBER_MAX = 2**63 - 1


class Effect(enum.Enum):
    """What a field does, if it has a value."""

    READ = "the front reads it"
    NONE = "nothing: it is about the answer, or about who asks"
    SKIPS_CACHE = "the engine computes the whole prompt"
    OTHER_PROMPT = "the engine computes another prompt"
    OTHER_CACHE = "the engine reads blocks that its events do not tell apart"
    OTHER_RANK = "the engine may compute it on another rank"


class PromptPart(enum.StrEnum):
    """How much of a request's prompt the router is given, and may compare with what engines hold."""

    WHOLE = "whole"
    BEGINNING = "beginning"
    NONE = "none"


def _named(effect: Effect, names: str) -> dict[str, Effect]:
    return dict.fromkeys(names.split(), effect)


#: Every field of `/v1/completions` and `/v1/chat/completions` that is known. docs/front.md explains those that have an
#: effect; a test compares the two.
FIELDS: Mapping[str, Effect] = (
    _named(
        Effect.READ,
        "model prompt messages tools tool_choice documents chat_template_kwargs add_generation_prompt "
        "continue_final_message add_special_tokens reasoning_effort cache_salt stream stream_options max_tokens "
        "max_completion_tokens n best_of echo logprobs top_logprobs",
    )
    | _named(
        Effect.NONE,
        # OpenAI
        "audio frequency_penalty logit_bias metadata modalities parallel_tool_calls prediction presence_penalty "
        "prompt_cache_key prompt_cache_retention response_format safety_identifier seed service_tier stop store "
        "temperature top_p user verbosity web_search_options "
        # vLLM
        "allowed_token_ids bad_words ec_transfer_params ignore_eos include_reasoning include_stop_str_in_output "
        "kv_transfer_params length_penalty logits_processors logprob_token_ids media_io_kwargs min_p min_tokens "
        "mm_processor_kwargs priority repetition_detection repetition_penalty request_id return_mm_kwargs "
        "return_prompt_text return_token_ids return_token_offsets return_tokens_as_token_ids "
        "routed_experts_prompt_start session_id skip_special_tokens spaces_between_special_tokens stop_token_ids "
        "stream_interval structured_outputs thinking_token_budget top_k "
        "truncation_side use_beam_search vllm_xargs watermarking guided_json guided_regex guided_choice guided_grammar "
        "guided_decoding_backend guided_whitespace_pattern "
        # SGLang
        "bootstrap_host bootstrap_port bootstrap_room custom_labels custom_logit_processor custom_params "
        "disagg_prefill_dp_rank ebnf json_schema max_dynamic_patch min_dynamic_patch ngram_corpus_id no_stop_trim "
        "regex return_cached_tokens_details return_meta_info return_prompt_token_ids rid separate_reasoning stop_regex "
        "stream_reasoning use_audio_in_video "
        # TensorRT-LLM
        "conversation_params detokenize early_stopping prompt_ignore_length top_p_min "
        # ours
        "kvstreams_arrival_ms",
    )
    | _named(Effect.SKIPS_CACHE, "prompt_logprobs prompt_logprob_token_ids return_context_logits")
    | _named(
        Effect.OTHER_PROMPT,
        "chat_template disaggregated_params images_config input_embeds input_ids mm_payload prompt_embeds "
        "prompt_token_ids prompt_token_ids_b64 reasoning session_params suffix task thinking truncate_prompt_tokens",
    )
    | _named(Effect.OTHER_CACHE, "extra_key lora_path lora_request")
    | _named(Effect.OTHER_RANK, "data_parallel_rank routed_dp_rank")
)

#: Every field of `/v1/responses` that is known.
RESPONSE_FIELDS: Mapping[str, Effect] = (
    _named(
        Effect.READ,
        "model input instructions tools tool_choice reasoning chat_template_kwargs cache_salt stream max_output_tokens",
    )
    | _named(
        Effect.NONE,
        "background context_management frequency_penalty ignore_eos include include_reasoning "
        "include_stop_str_in_output logit_bias max_tool_calls metadata min_p moderation parallel_tool_calls "
        "presence_penalty prompt_cache_key prompt_cache_options prompt_cache_retention repetition_penalty "
        "request_id safety_identifier seed service_tier session_id skip_special_tokens stop stop_token_ids store "
        "stream_options structured_outputs temperature text top_k top_logprobs top_p user watermarking "
        "enable_response_messages kv_transfer_params ec_transfer_params media_io_kwargs mm_processor_kwargs "
        "priority vllm_xargs mm_payload return_mm_kwargs",
    )
    | _named(Effect.OTHER_PROMPT, "previous_response_id previous_input_messages prompt truncation conversation")
)

#: Every field of `/v1/messages` that is known.
MESSAGE_FIELDS: Mapping[str, Effect] = _named(
    Effect.READ,
    "model messages system tools tool_choice thinking output_config chat_template_kwargs cache_salt stream max_tokens",
) | _named(
    Effect.NONE,
    "cache_control container context_management diagnostics ec_transfer_params inference_geo kv_transfer_params "
    "metadata mm_payload return_mm_kwargs service_tier speed stop_sequences temperature top_k top_p vllm_xargs "
    "watermarking",
)

#: Effects with which the prompt is not compared.
_NOT_COMPARED = frozenset({Effect.SKIPS_CACHE, Effect.OTHER_PROMPT, Effect.OTHER_CACHE})

#: Effects that do not matter to the router.
_WITHOUT_EFFECT = frozenset({Effect.READ, Effect.NONE})

#: The default of a field of /v1/responses, with its value.
_NOT_TRUNCATED = ("truncation", b'"disabled"')

#: The JSON of the value with which no field has an effect.
_NULL = b"null"

#: The JSON of values with which fields that are known have no effect. A number 0 has one: `prompt_logprobs`.
_EMPTY = frozenset({b"false", b'""', b"[]", b"{}"})

#: Known fields that have an effect unless they are null. The numbers among them are 0 if they are false, since engines
#: read them so; an empty suffix makes vLLM render a prompt with a hole.
_SET_IF_EMPTY = frozenset(
    {"data_parallel_rank", "prompt_logprobs", "routed_dp_rank", "suffix", "truncate_prompt_tokens"}
)

#: Fields without which a request is the same one, if a client sends it again.
_NOT_IDENTIFYING = frozenset(
    {
        "custom_labels",
        "kvstreams_arrival_ms",
        "metadata",
        "priority",
        "prompt_cache_key",
        "request_id",
        "return_token_ids",
        "rid",
        "safety_identifier",
        "seed",
        "service_tier",
        "session_id",
        "store",
        "stream",
        "stream_options",
        "user",
    }
)

#: A whole number that is given as a text.
_WHOLE_NUMBER = re.compile(r"\s*[+-]?[0-9]{1,19}(\.0+)?\s*")

#: How a list of texts or of lists begins, after whatever white space.
_LIST = re.compile(rb'\s*\[\s*(["\[])')

#: What a text contains of images, audio and video.
_MEDIA = re.compile(rb'"data:[^"]*"')

Fields = Mapping[str, msgspec.Raw]

_DECODER = msgspec.json.Decoder(dict[str, msgspec.Raw])
_TEXTS = msgspec.json.Decoder(list[str])


def read_fields(body: bytes) -> Fields:
    """Return the fields of a JSON object, each as bytes, so that megabytes are skipped and not parsed.

    Raises msgspec.ValidationError for other JSON, DecodeError, UnicodeDecodeError and RecursionError.
    """
    return _DECODER.decode(body)


def value(fields: Fields, name: str) -> Any:
    """Return the value of a field, None without one."""
    raw = fields.get(name)
    if raw is None:
        return None
    try:
        return orjson.loads(bytes(raw))
    except orjson.JSONDecodeError:  # such as a number that is too large
        return None


def whole_number(value: Any) -> int | None:
    """Return a field that is a whole number, as engines read it: also from 8.0, a text or a truth value.

    None for every other value, and for numbers of more than 64 bits.
    """
    if isinstance(value, str) and _WHOLE_NUMBER.fullmatch(value):
        number = int(value.partition(".")[0])
    elif isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        number = int(value)
    else:
        return None
    return number if abs(number) <= NUMBER_MAX else None


def is_true(value: Any) -> bool:
    """Return a field that is true or false, as engines read it: also from a number or a word."""
    if isinstance(value, str):
        return value.lower() in ("1", "on", "t", "true", "y", "yes")
    return bool(value)


def prompt_part(fields: Fields, known: Mapping[str, Effect] = FIELDS, *, is_chat: bool) -> PromptPart:
    """Return how much of a prompt may be compared, given all fields but the prompt and the salt.

    known: the fields of the call.
    """
    part = PromptPart.WHOLE
    for name, raw in fields.items():
        effect = known.get(name)
        if effect in _WITHOUT_EFFECT or _has_no_value(name, bytes(raw), effect):
            continue
        if effect in _NOT_COMPARED:
            return PromptPart.NONE
        part = PromptPart.BEGINNING
    if "echo" in fields and _echo_skips_cache(fields, is_chat=is_chat):
        return PromptPart.NONE
    return part


def _has_no_value(name: str, raw: bytes, effect: Effect | None) -> bool:
    """Whether an engine does with a field what it does without it. Of an unknown field, the default may be true."""
    if raw == _NULL or (name, raw) == _NOT_TRUNCATED:
        return True
    return effect is not None and raw in _EMPTY and name not in _SET_IF_EMPTY


def _echo_skips_cache(fields: Fields, *, is_chat: bool) -> bool:
    """Whether a request wants log probabilities of its prompt, by vLLM's rules: in a chat, `echo` alone does."""
    if not value(fields, "echo"):
        return False
    given = fields.get("top_logprobs" if is_chat else "logprobs", b"0" if is_chat else b"null")
    return bytes(given) != _NULL


@dataclass(frozen=True, slots=True)
class Prompts:
    """The prompts of one completion. n: how many. n_ids: of all of them, 0 for texts.

    texts_per_first: how many times longer all texts are than the first one, which is tokenized.
    """

    n: int = 1
    n_ids: int = 0
    texts_per_first: float = 1.0

    def more_tokens(self, n_first: int) -> int:
        """Return how many tokens the other prompts have, given those of the first one."""
        if self.n_ids:
            return max(0, self.n_ids - n_first)
        return round(n_first * (self.texts_per_first - 1.0))


#: One prompt.
ONE_PROMPT = Prompts()


def prompts_of(raw: bytes) -> Prompts:
    """Read the field `prompt`: a text, a list of ids, or a list of either. Ids are counted and not parsed."""
    begin = _LIST.match(raw)
    if begin is None:
        return ONE_PROMPT
    if begin[1] == b"[":
        return Prompts(raw.count(b"[") - 1, raw.count(b",") + 1)
    try:
        texts = _TEXTS.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ONE_PROMPT
    return Prompts(len(texts), 0, sum(map(len, texts)) / max(1, len(texts[0])))


def sequences_of(fields: Fields, n_prompts: int) -> int:
    """Return how many answers an engine generates at the same time."""
    n = 1
    for name in ("n", "best_of"):
        if name in fields:
            n = max(n, whole_number(value(fields, name)) or 1)
    return min(n * n_prompts, SEQUENCES_MAX)


def estimated_tokens(body: bytes) -> int:
    """Return about how many tokens a request has of which none are known."""
    return max(1, len(_MEDIA.sub(b"", body)) // BYTES_PER_TOKEN)


def request_digest(path: str, body: bytes) -> bytes:
    """Return a digest of a request, which is the same if a client repeats it. The request itself cannot be restored.

    Fields may be in another order, and those that only say who asks, or how the answer is sent, may differ.
    """
    digest = hashlib.blake2b(path.encode(), digest_size=DIGEST_BYTES)
    try:
        fields = orjson.loads(body)
        kept = {name: part for name, part in fields.items() if name not in _NOT_IDENTIFYING and part is not None}
        digest.update(orjson.dumps(kept, option=orjson.OPT_SORT_KEYS))
    except (orjson.JSONDecodeError, TypeError, AttributeError):
        digest.update(body)
    return digest.digest()
