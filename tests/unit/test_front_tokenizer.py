"""The front's tokenizer: the same tokens as the engine's, with and without its cache."""

from __future__ import annotations

import json
import sys
from array import array
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from streams.errors import InvalidRequest, SettingsError
from streams.lab.engines import openai
from streams.lab.engines.chat_template import tokenizer_files
from streams.lab.engines.openai import ServedModels
from streams.prompts.calls import Kind
from streams.prompts.loop_tokenizer import (
    AVERAGED,
    BODY_BYTES_MAX,
    ENCODED_CHARACTERS_MAX,
    OBJECTS_MAX,
    SLOW_PAUSE_S,
    SLOW_S,
    LoopTokenizer,
)
from streams.prompts.tokenizer import ENTRY_BYTES, ModelTokenizer, TokenCache

CACHE_BYTES = 1 << 20
SERVED = ServedModels("m", (), n_tokens_max=1 << 20)
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {"ö": {}}}}}


@pytest.fixture(scope="module")
def of_the_engine(tmp_path_factory: pytest.TempPathFactory) -> ModelTokenizer:
    """Give the tokenizer of simulated engines, from its files."""
    folder = tmp_path_factory.mktemp("sim")
    for name, text in tokenizer_files().items():
        (folder / name).write_text(text)
    return ModelTokenizer(folder, CACHE_BYTES)


TEMPLATE = (
    "{{ bos_token }}{%- if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def trained(folder: Path, *, template: str | None = TEMPLATE, normalized: bool = False) -> Path:
    """Write a small BPE tokenizer of the kind that most models have.

    normalized: its special tokens are matched after normalization.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    texts = ["the cat sat on the mat, and the dog did not", "streams of tokens in a stream of tokens 123 456"] * 20
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=normalized) for text in ("<|bos|>", "<|im_start|>", "<|im_end|>")]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", special_tokens=[("<|bos|>", tokenizer.token_to_id("<|bos|>"))]
    )
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": {"content": "<|bos|>"}, **({} if template is None else {"chat_template": template})}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelTokenizer, Any]:
    """Give a BPE tokenizer as the front uses it, and the same as the library loads it."""
    folder = trained(tmp_path_factory.mktemp("bpe"))
    return ModelTokenizer(folder, CACHE_BYTES), Tokenizer.from_file(str(folder / "tokenizer.json"))


def ids(tokens: bytes) -> list[int]:
    return array("I", tokens).tolist()


CHATS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "Hello, »you«"}]},
    {"messages": [{"role": "user", "content": "a"}], "tools": [TOOL], "tool_choice": "auto"},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]},
    {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": '{"a": 1}'}}],
            },
            {"role": "tool", "tool_call_id": "1", "content": "42"},
        ],
        "add_generation_prompt": False,
    },
    {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"style": "formal"}},
]


@pytest.mark.parametrize("body", CHATS)
def test_a_chat_has_the_tokens_that_the_engine_computes(of_the_engine: ModelTokenizer, body: dict[str, Any]) -> None:
    """Messages, tools, tool calls, parts and arguments of the template are rendered as the engine does."""
    encoded = of_the_engine.encode(Kind.CHAT, orjson.dumps(body))
    assert ids(encoded.tokens) == openai.tokenize(body, SERVED)["tokens"]
    assert encoded.whole


@pytest.mark.parametrize("prompt", ["Hello", "»ö« 你好 🙂\n\n x", " "])
def test_a_completion_has_the_tokens_that_the_engine_computes(of_the_engine: ModelTokenizer, prompt: str) -> None:
    """Of several prompts, the first decides."""
    expected = openai.tokenize({"prompt": prompt}, SERVED)["tokens"]
    for given_prompt in (prompt, [prompt, "another"]):
        encoded = of_the_engine.encode(Kind.COMPLETION, orjson.dumps({"prompt": given_prompt}))
        assert ids(encoded.tokens) == expected


@pytest.mark.parametrize(
    "image",
    [
        {"type": "image_url", "image_url": {"url": "data:..."}},
        {"image_url": "data:..."},
        {"type": "text", "text": "x", "uuid": "u", "image_url": "data:..."},
    ],
)
def test_a_prompt_with_an_image_ends_before_it(
    of_the_engine: ModelTokenizer, tmp_path: Path, image: dict[str, Any]
) -> None:
    """What an engine makes of it is not known. It comes before the text of a message, unless templates take parts.

    vLLM takes a part without a type for what its fields are, and so one with a `uuid`.
    """
    parts = [{"type": "text", "text": "Look:"}, image, {"type": "text", "text": "What is it?"}]
    body = {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": parts}]}
    encoded = of_the_engine.encode(Kind.CHAT, orjson.dumps(body))
    assert bytes(ids(encoded.tokens)).decode() == "<|system|>s<|end|>\n<|user|>"
    assert not encoded.whole
    loop = "{% for m in messages %}<{{ m.role }}>{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"
    rendered = ModelTokenizer(trained(tmp_path, template=loop), CACHE_BYTES).render(Kind.CHAT, body)
    assert ("".join(rendered.pieces), rendered.whole) == ("<system>s<user>Look:", False)


texts = st.lists(
    st.sampled_from(
        ["<|im_start|>", "<|im_end|>", "<|bos|>", "the cat", " sat", "\n", " ", "123", "ö", "🙂", "'s", "<|im"]
    ),
    max_size=12,
).map("".join)


@given(st.lists(texts, min_size=1, max_size=4))
def test_pieces_from_the_cache_join_to_the_tokens_of_the_whole(
    bpe: tuple[ModelTokenizer, Any], prompts: list[str]
) -> None:
    """Whatever was cached by earlier prompts, the tokens are those of the library for the whole text."""
    model, library = bpe
    assert model._pieces is not None
    for text in prompts:
        encoded = model.encode(Kind.COMPLETION, orjson.dumps({"prompt": text}))
        assert ids(encoded.tokens) == library.encode(text).ids


def test_only_the_new_message_of_a_conversation_is_encoded(tmp_path: Path) -> None:
    """The system prompt and earlier turns are found in the cache."""
    model = ModelTokenizer(trained(tmp_path), CACHE_BYTES)
    messages = [{"role": "system", "content": "the cat sat " * 500}, {"role": "user", "content": "on the mat"}]
    first = model.encode(Kind.CHAT, orjson.dumps({"messages": messages}))
    turn = [{"role": "assistant", "content": "and the dog"}, {"role": "user", "content": "did not"}]
    second = model.encode(Kind.CHAT, orjson.dumps({"messages": [*messages, *turn]}))
    assert first.n_cached < 100
    assert second.n_characters - second.n_cached < 60
    assert second.tokens.startswith(first.tokens)


def test_a_tokenizer_whose_pieces_depend_on_each_other_encodes_whole_texts(tmp_path: Path) -> None:
    """Special tokens that are matched after normalization are not a place where a text may be cut."""
    model = ModelTokenizer(trained(tmp_path, normalized=True), CACHE_BYTES)
    assert model._pieces is None
    text = "<|im_start|>the cat<|im_end|>"
    body = orjson.dumps({"prompt": text})
    library = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    first, again = model.encode(Kind.COMPLETION, body), model.encode(Kind.COMPLETION, body)
    assert ids(first.tokens) == ids(again.tokens) == library.encode(text).ids
    assert (first.n_cached, again.n_cached) == (0, len(text))


def test_special_tokens_around_a_prompt_follow_the_request(bpe: tuple[ModelTokenizer, Any]) -> None:
    """As in vLLM, completions get them unless a request says otherwise, and chats have those of the template."""
    model, library = bpe
    bos = library.token_to_id("<|bos|>")
    plain = library.encode("the cat", add_special_tokens=False).ids

    def encoded(**body: Any) -> list[int]:
        return ids(model.encode(Kind.COMPLETION, orjson.dumps({"prompt": "the cat", **body})).tokens)

    assert encoded() == [bos, *plain]
    assert encoded(add_special_tokens=False) == plain
    chat = ids(model.encode(Kind.CHAT, orjson.dumps({"messages": [{"role": "user", "content": "x"}]})).tokens)
    assert chat.count(bos) == 1


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        (None, "no chat template"),
    ],
)
def test_a_template_refuses_messages_and_reaches_nothing_else(tmp_path: Path, template: str | None, words: str) -> None:
    """Templates run in a sandbox; what they raise is an error of the request."""
    model = ModelTokenizer(trained(tmp_path, template=template), CACHE_BYTES)
    with pytest.raises(InvalidRequest, match=words):
        model.encode(Kind.CHAT, orjson.dumps({"messages": [{"role": "user", "content": "x"}]}))


def test_requests_with_tools_have_a_template_of_their_own(tmp_path: Path) -> None:
    """It is called tool_use, in the configuration or in its folder; without it, there is one for all."""
    folder = trained(tmp_path, template=None)
    config = json.loads((folder / "tokenizer_config.json").read_text())

    def rendered(**body: Any) -> str:
        chat = {"messages": [{"role": "user", "content": "x"}], **body}
        return "".join(ModelTokenizer(folder, CACHE_BYTES).render(Kind.CHAT, chat).pieces)

    templates = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "with {{ tools | length }}"},
    ]
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": templates}))
    assert (rendered(), rendered(tools=[TOOL, TOOL])) == ("plain", "with 2")
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": templates[:1]}))
    assert (rendered(), rendered(tools=[TOOL])) == ("plain", "plain")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("of a file")
    assert (rendered(), rendered(tools=[TOOL])) == ("plain", "of a file")


def test_templates_that_take_parts_get_parts(tmp_path: Path) -> None:
    """Those that loop over a message's content get a list, all others text."""
    template = "{% for m in messages %}{% for part in m['content'] %}[{{ part['text'] }}]{% endfor %}{% endfor %}"
    model = ModelTokenizer(trained(tmp_path, template=template), CACHE_BYTES)
    library = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    encoded = model.encode(Kind.CHAT, orjson.dumps({"messages": [{"role": "user", "content": "the cat"}]}))
    assert ids(encoded.tokens) == library.encode("[the cat]", add_special_tokens=False).ids


@pytest.mark.parametrize("messages", [None, [], "text", [1], [{"role": "user", "content": [7]}]])
def test_messages_that_cannot_be_rendered_are_an_error_of_the_request(
    of_the_engine: ModelTokenizer, messages: Any
) -> None:
    """The front then asks an engine, whose error the client gets."""
    with pytest.raises(InvalidRequest):
        of_the_engine.encode(Kind.CHAT, orjson.dumps({"messages": messages}))


@pytest.mark.parametrize(
    ("name", "text"), [("tokenizer.json", "{}"), ("tokenizer_config.json", "{"), ("chat_template.jinja", "{% if %}")]
)
def test_files_that_cannot_be_used_are_named(tmp_path: Path, name: str, text: str) -> None:
    """The message has the option and the file or its folder."""
    trained(tmp_path)
    (tmp_path / name).write_text(text)
    with pytest.raises(SettingsError, match="--tokenizer") as refused:
        ModelTokenizer(tmp_path, CACHE_BYTES)
    assert str(tmp_path) in str(refused.value)
    with pytest.raises(SettingsError, match="cannot be read"):
        ModelTokenizer(tmp_path / "nothing", CACHE_BYTES)


def test_the_cache_keeps_its_limit_and_what_was_used_last() -> None:
    """At exactly its limit it drops nothing; beyond it, it drops what was used longest ago."""
    tokens = array("I", [1])
    texts = [chr(ord("a") + number) * 50 for number in range(10)]
    size = sys.getsizeof(texts[0]) + 4 + ENTRY_BYTES
    cache = TokenCache(8 * size)
    for text in texts[:8]:
        cache.put(text, tokens)
    assert len(cache) == 8
    assert cache.get(texts[0]) is not None
    for text in texts[8:]:
        cache.put(text, tokens)
    assert [cache.get(text) is not None for text in texts[:4]] == [True, False, False, True]
    cache.put("x" * 2 * size, tokens)  # more than a quarter of the cache
    assert len(cache) == 8


class Clock:
    """A clock that advances by a fixed time with each reading."""

    def __init__(self, step_s: float) -> None:
        self.step_s = step_s
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s += self.step_s
        return self.now_s


def chat(text: str, **fields: Any) -> bytes:
    """Return the body of a chat with one message."""
    return orjson.dumps({"messages": [{"role": "user", "content": text}], **fields})


@given(st.lists(texts, min_size=1, max_size=4), st.booleans())
def test_the_loop_makes_the_tokens_of_a_process(
    bpe: tuple[ModelTokenizer, Any], prompts: list[str], given_by_process: bool
) -> None:
    """Whether pieces were cached, encoded by the loop or by a process, the tokens are the same."""
    model, _ = bpe
    loop = LoopTokenizer(model)
    for text in prompts:
        rendered = loop.render(Kind.CHAT, chat(text))
        assert rendered is not None
        missing = model.missing(rendered) if given_by_process else []
        known = dict(zip(missing, model.pieces(missing)[0], strict=True))
        assert loop.join(rendered, known).tokens == model.encode(Kind.CHAT, chat(text)).tokens


def test_only_short_new_texts_are_encoded_on_the_loop(tmp_path: Path) -> None:
    """A process encodes what is missing beyond the limit; once that is cached, nothing is missing."""
    loop = LoopTokenizer(ModelTokenizer(trained(tmp_path), CACHE_BYTES))
    template = len("<|bos|><|im_start|><|im_end|>") + len("user\nassistant\n\n")
    for text, is_short in (("a" * (ENCODED_CHARACTERS_MAX - template), True), ("b" * ENCODED_CHARACTERS_MAX, False)):
        rendered = loop.render(Kind.CHAT, chat(text))
        assert rendered is not None
        missing = loop.missing(rendered)
        assert (missing == []) == is_short
        loop.join(rendered, {})
        assert loop.missing(rendered) == []


@pytest.mark.parametrize(
    ("body", "is_short"),
    [
        (chat("x", chat_template_kwargs={"thinks": False, "style": "brief", "other": None}), True),
        (chat("x", chat_template_kwargs={"n": 10**9}), False),
        (chat("x", chat_template_kwargs={"list": [[]]}), False),
        (chat("x").replace(b"}]", b'}], "chat_template\\u005fkwargs": {"n": 1}'), False),
        (chat("{" * (OBJECTS_MAX - 2)), True),
        (chat("{" * (OBJECTS_MAX - 1)), False),
        (chat("x" * (BODY_BYTES_MAX - len(chat("")))), True),
        (chat("x" * (BODY_BYTES_MAX - len(chat("")) + 1)), False),
    ],
)
def test_bodies_that_may_take_long_are_rendered_in_a_process(
    bpe: tuple[ModelTokenizer, Any], body: bytes, is_short: bool
) -> None:
    """These are long ones, those with many objects, and those with numbers that a template may count up to."""
    assert (LoopTokenizer(bpe[0]).render(Kind.CHAT, body) is not None) == is_short


@pytest.mark.parametrize(
    ("template", "is_bounded"),
    [
        (TEMPLATE, True),
        ("{% macro show(m) %}{{ m.content }}{% endmacro %}{% for m in messages %}{{ show(m) }}{% endfor %}", True),
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", False),
        ("{% set r = range %}{% for i in r(9) %}{% endfor %}", False),
        ("{{ 'a' * 1000000000 }}", False),
        ("{{ 10 ** 10 ** 10 }}", False),
        ("{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}", False),
        ("{% macro a() %}{{ b() }}{% endmacro %}{% macro b() %}{{ a() }}{% endmacro %}{{ a() }}", False),
    ],
)
def test_templates_that_may_take_long_run_in_processes(tmp_path: Path, template: str, is_bounded: bool) -> None:
    """On the loop, a template may only repeat what is in the request. Completions need no template."""
    model = ModelTokenizer(trained(tmp_path, template=template), CACHE_BYTES)
    assert model.is_bounded == is_bounded
    loop = LoopTokenizer(model)
    assert (loop.render(Kind.CHAT, chat("x")) is not None) == is_bounded
    assert loop.render(Kind.COMPLETION, orjson.dumps({"prompt": "x"})) is not None


@pytest.mark.parametrize(("step_s", "is_slow"), [(0.4 * SLOW_S, False), (0.6 * SLOW_S, True)])
def test_a_slow_tokenizer_leaves_the_loop_for_a_while(
    bpe: tuple[ModelTokenizer, Any], step_s: float, is_slow: bool
) -> None:
    """Rendering and joining count together. After SLOW_PAUSE_S the loop tries again."""
    processor, clock = Clock(step_s), Clock(0.0)  # each step reads the processor's time at its beginning and its end
    loop = LoopTokenizer(bpe[0], processor, clock)
    n_prompts = 0
    while n_prompts < 3 * AVERAGED and (rendered := loop.render(Kind.CHAT, chat("x"))) is not None:
        loop.join(rendered, {})
        n_prompts += 1
    assert (n_prompts < AVERAGED) if is_slow else (n_prompts == 3 * AVERAGED)
    clock.now_s += SLOW_PAUSE_S
    assert loop.render(Kind.CHAT, chat("x")) is not None


def test_a_very_slow_tokenizer_leaves_the_loop_at_once(bpe: tuple[ModelTokenizer, Any]) -> None:
    """All other requests wait for each prompt, so the time of AVERAGED prompts is not waited for."""
    loop = LoopTokenizer(bpe[0], Clock(SLOW_S * AVERAGED + 1.0), Clock(0.0))
    assert loop.render(Kind.CHAT, chat("x")) is not None
    assert loop.render(Kind.CHAT, chat("x")) is None


def test_what_a_template_raises_is_an_error_of_the_request(tmp_path: Path) -> None:
    """Whatever its class is, the request is routed by load."""
    loop = LoopTokenizer(ModelTokenizer(trained(tmp_path, template="{{ messages[0].content + 1 }}"), CACHE_BYTES))
    with pytest.raises(InvalidRequest, match="TypeError"):
        loop.render(Kind.CHAT, chat("x"))
