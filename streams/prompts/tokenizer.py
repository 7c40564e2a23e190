"""One model's tokenizer: from the text of a prompt to its token ids, with a cache of the parts that prompts share.

What lives here: reading a model's files, encoding, and the cache. What must not: processes (tokenizing). It runs in
worker processes and on the front's event loop (loop_tokenizer), each with caches of its own.

Prompts of one application share a beginning: a system prompt, tools, earlier turns. A tokenizer first splits a text at
its special tokens, such as `<|im_end|>`, and encodes what is between them independently. So the pieces between special
tokens are encoded and cached one by one, and of a chat's next turn only the new message is encoded. Whether a tokenizer
is of this kind is tried out when it is loaded; the texts of others are cached as a whole.

State: tokens of shared prefixes.
"""

from __future__ import annotations

import datetime
import json
import re
import sys
from array import array
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
import orjson
from tokenizers import Tokenizer

from streams.errors import InvalidRequest, SettingsError
from streams.prompts.api_chats import chat_of_message, chat_of_response
from streams.prompts.calls import Kind
from streams.prompts.conversation import NEWEST, Rule, flag
from streams.prompts.templates import ChatTemplate

#: Memory that a cached piece takes in addition to its text and its tokens: its objects and its place in the table.
ENTRY_BYTES = 250

#: Bytes of a file of a model. The largest tokenizers have 40 MB.
FILE_BYTES_MAX = 256 << 20

#: Texts with which it is tried out whether pieces may be encoded one by one; SPECIAL stands for a special token.
_PROBES = (
    "SPECIALHello, world. SPECIAL 12 34SPECIAL\n\n  indented\n\tand moreSPECIAL",
    "plain SPECIAL plain",
    "SPECIAL SPECIALSPECIAL\n SPECIAL'll don't 3.14 ÄÖ 你好 🙂SPECIAL🙂",
    "a\nSPECIAL\nb SPECIALc",
)

#: Special tokens of `tokenizer_config.json` that templates use.
_SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")

#: The efforts that a request of /v1/messages may ask for.
_EFFORTS = ("low", "medium", "high", "xhigh", "max")


@dataclass(frozen=True, slots=True)
class Encoded:
    """A prompt's tokens as u32 LE. whole: otherwise the prompt goes on after them, with an image for example.

    n_characters, n_cached: of the prompt's text, and how many of these were found in the cache.
    """

    tokens: bytes
    whole: bool
    n_characters: int
    n_cached: int


@dataclass(frozen=True, slots=True)
class Rendered:
    """The text of a prompt. pieces: its parts in order, each of which is encoded independently of the others.

    whole: as in Encoded. has_special: whether the tokens that a tokenizer puts around every text are added.
    """

    pieces: list[str]
    whole: bool
    has_special: bool
    n_characters: int


class TokenCache:
    """Tokens by text, at most bytes_max of both; the least recently used are dropped first."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0
        self._entries: OrderedDict[str, array[int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, text: str) -> bool:
        return text in self._entries

    def get(self, text: str) -> array[int] | None:
        """Return the tokens of a text, if they are cached."""
        tokens = self._entries.get(text)
        if tokens is not None:
            self._entries.move_to_end(text)
        return tokens

    def put(self, text: str, tokens: array[int]) -> None:
        """Keep the tokens of a text that is not cached; one that would take a quarter of the cache is not kept."""
        size = _size(text, tokens)
        if size > self._bytes_max // 4:
            return
        self._entries[text] = tokens
        self._bytes += size
        while self._bytes > self._bytes_max:
            dropped, its_tokens = self._entries.popitem(last=False)
            self._bytes -= _size(dropped, its_tokens)


def _size(text: str, tokens: array[int]) -> int:
    return sys.getsizeof(text) + 4 * len(tokens) + ENTRY_BYTES


class ModelTokenizer:
    """The tokenizer and the chat template of one model. Used by one thread."""

    def __init__(self, path: Path, cache_bytes: int) -> None:
        """path: a folder with tokenizer.json, as on Hugging Face's hub, or such a file. Raises SettingsError."""
        folder = path if path.is_dir() else path.parent
        file = path / "tokenizer.json" if path.is_dir() else path
        try:
            self._tokenizer: Any = Tokenizer.from_str(_read(file))
        except SettingsError:
            raise
        except Exception as exc:  # the library raises no other class
            raise SettingsError(f"--tokenizer: {file} is not a tokenizer: {exc}") from exc
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        config = _config(folder / "tokenizer_config.json")
        self._template, self._tools_template = _templates(folder, config)
        self._before, self._after = self._added()
        self._cache = TokenCache(cache_bytes)
        self._pieces = self._pattern()

    @property
    def is_bounded(self) -> bool:
        """Whether the template takes no longer than what a request contains demands; so does a model without one."""
        templates = (self._template, self._tools_template)
        return all(template is None or template.is_bounded for template in templates)

    def encode(self, kind: Kind, raw: bytes, rules: Rule = NEWEST) -> Encoded:
        """Return the tokens of a request's prompt, as an engine that follows these rules will have them.

        Raises InvalidRequest.
        """
        return self.join(self.render(kind, orjson.loads(raw), rules))

    def render(self, kind: Kind, body: Mapping[str, Any], rules: Rule = NEWEST) -> Rendered:
        """Return the text of the prompt of a request's body. rules: of its messages. Raises InvalidRequest."""
        if kind is not Kind.COMPLETION:
            body = self._chat(kind, body)
            template = self._tools_template if body.get("tools") else self._template
            if template is None:
                raise InvalidRequest("the model has no chat template")
            try:
                # In a response's calls, vLLM keeps the order of fields in which it has made them.
                text, whole = template.render(body, rules, orders_calls=kind is not Kind.RESPONSES)
            except jinja2.TemplateError as exc:
                raise InvalidRequest(f"the messages do not fit the model's chat template: {exc}") from exc
        else:
            text, whole = _first_prompt(body), True
        pieces = [text] if self._pieces is None else self._pieces.split(text)
        has_special = flag(body, "add_special_tokens", default=kind is Kind.COMPLETION)
        return Rendered([piece for piece in pieces if piece], whole, has_special, len(text))

    def _chat(self, kind: Kind, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the chat that a request is."""
        if kind is Kind.RESPONSES:
            return chat_of_response(body)
        if kind is Kind.MESSAGES:
            return chat_of_message(
                body, merges_system=self._merges_system, disabled_effort=lambda: self._disabled_effort
            )
        return body

    def _merges_system(self) -> bool:
        templates = (self._template, self._tools_template)
        return any(template is None or template.refuses_later_system for template in templates)

    @cached_property
    def _disabled_effort(self) -> str:
        """The effort with which thinking is switched off: `low` where the template refuses or ignores `none`."""
        without = self._probed("none")
        if without is None or any(self._probed(effort) == without for effort in _EFFORTS):
            return "low"
        return "none"

    def _probed(self, effort: str) -> list[str] | None:
        body = {"messages": [{"role": "user", "content": "Hi"}], "reasoning_effort": effort}
        try:
            return self.render(Kind.CHAT, body).pieces
        except Exception:  # a template may raise anything
            return None

    def missing(self, rendered: Rendered) -> list[str]:
        """Return the pieces that are not cached, each once."""
        return [piece for piece in dict.fromkeys(rendered.pieces) if piece not in self._cache]

    def join(self, rendered: Rendered, known: Mapping[str, array[int]] | None = None) -> Encoded:
        """Return the tokens of a prompt's pieces. known: those of pieces that were encoded elsewhere."""
        tokens, n_cached = array("I"), 0
        for piece in rendered.pieces:
            piece_tokens = self._cache.get(piece)
            if piece_tokens is None:
                piece_tokens = self._take(piece, None if known is None else known.get(piece))
            else:
                n_cached += len(piece)
            tokens += piece_tokens
        if rendered.has_special:
            tokens = self._before + tokens + (self._after if rendered.whole else array("I"))
        return Encoded(_packed(tokens), rendered.whole, rendered.n_characters, n_cached)

    def pieces(self, texts: list[str]) -> tuple[list[array[int]], int]:
        """Return the tokens of each of these pieces, and how many of their characters were found in the cache."""
        tokens, n_cached = [], 0
        for text in texts:
            cached = self._cache.get(text)
            n_cached += 0 if cached is None else len(text)
            tokens.append(self._take(text) if cached is None else cached)
        return tokens, n_cached

    def _take(self, text: str, tokens: array[int] | None = None) -> array[int]:
        """Return the tokens of a piece that is not cached, and cache them. tokens: None if they are not known."""
        if tokens is None:
            tokens = self._direct(text)
        self._cache.put(text, tokens)
        return tokens

    def _direct(self, text: str) -> array[int]:
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        return array("I", encoding.ids)

    def _added(self) -> tuple[array[int], array[int]]:
        """Return what is added before and after a completion's prompt, such as the token that begins every text."""
        plain = self._direct("a")
        (encoding,) = self._tokenizer.encode_batch_fast(["a"], add_special_tokens=True)
        around = array("I", encoding.ids)
        for position in range(len(around) - len(plain) + 1):
            if around[position : position + len(plain)] == plain:
                return around[:position], around[position + len(plain) :]
        return array("I"), array("I")

    def _pattern(self) -> re.Pattern[str] | None:
        """Return the pattern that splits a text at special tokens, or None if pieces depend on each other."""
        added = self._tokenizer.get_added_tokens_decoder().values()
        special = [
            token.content
            for token in added
            if token.content and not (token.lstrip or token.rstrip or token.normalized or token.single_word)
        ]
        if not special:
            return None
        special.sort(key=len, reverse=True)  # the longest is matched first, as the tokenizer does
        pattern = re.compile(f"({'|'.join(map(re.escape, special))})")
        for probe in _PROBES:
            for token in (special[0], special[-1]):
                text = probe.replace("SPECIAL", token)
                tokens = array("I")
                for piece in pattern.split(text):
                    tokens += self._direct(piece) if piece else array("I")
                if tokens != self._direct(text):
                    return None
        return pattern


def _packed(tokens: array[int]) -> bytes:
    if sys.byteorder == "big":
        tokens = array("I", tokens)
        tokens.byteswap()
    return tokens.tobytes()


def _first_prompt(body: Mapping[str, Any]) -> str:
    """Return the prompt of a completion; of several, the first, which is the one that the worker is chosen for."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and prompt:
        prompt = prompt[0]
    if not isinstance(prompt, str):
        raise InvalidRequest("prompt is not a text")
    return prompt


def _read(file: Path) -> str:
    try:
        if file.stat().st_size > FILE_BYTES_MAX:
            raise SettingsError(f"--tokenizer: {file} has more than {FILE_BYTES_MAX} bytes")
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        reason = getattr(exc, "strerror", None) or "it is not UTF-8 text"
        raise SettingsError(f"--tokenizer: {file} cannot be read: {reason}") from exc


def _config(file: Path) -> dict[str, Any]:
    if not file.exists():
        return {}
    try:
        config = json.loads(_read(file))
    except ValueError as exc:
        raise SettingsError(f"--tokenizer: {file} is not JSON: {exc}") from exc
    return config if isinstance(config, dict) else {}


def _templates(folder: Path, config: Mapping[str, Any]) -> tuple[ChatTemplate | None, ChatTemplate | None]:
    """Return the template of `chat_template.jinja` or of `tokenizer_config.json`, and that for requests with tools."""
    source = config.get("chat_template")
    named: dict[Any, Any] = {"default": source}
    if isinstance(source, list):
        named = {template.get("name"): template.get("template") for template in source if isinstance(template, dict)}
    for name, file in (
        ("default", folder / "chat_template.jinja"),
        ("tool_use", folder / "additional_chat_templates" / "tool_use.jinja"),
    ):
        if file.exists():
            named[name] = _read(file)
    special = {name: _content(config[name]) for name in _SPECIAL if config.get(name)}

    def template(name: str) -> ChatTemplate | None:
        source = named.get(name)
        return ChatTemplate(source, special, datetime.datetime.now) if isinstance(source, str) else None

    try:
        default = template("default")
        return default, template("tool_use") or default
    except jinja2.TemplateError as exc:
        raise SettingsError(f"--tokenizer: the chat template in {folder} cannot be used: {exc}") from exc


def _content(token: Any) -> str:
    return str(token.get("content", "")) if isinstance(token, dict) else str(token)
