"""Random chats, and a small model to render them with.

What lives here: bodies of chats over roles, parts, tools, reasoning, names, variables of templates and unknown fields,
and the files of a model. What must not: how they are rendered.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

#: Templates that have the same structure as those of well-known models, in few lines.
TEMPLATES = Path(__file__).parents[1] / "real" / "templates"

#: What vLLM 0.32 makes of some chats: rows of a template's name, a body, and a text.
GOLDEN = Path(__file__).parents[1] / "real" / "renderings.jsonl"

#: The name of a template, and the body of a chat.
Row = tuple[str, Mapping[str, Any]]

_SPECIAL = ("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|User|>", "<|Assistant|>")

_TEXTS = (
    "q0",
    "And 2 + 2?",
    "  spaces around \n",
    "Héllo, wörld! 你好 🙂",
    "<think>\nwhy\n</think>\n\nbecause",
    "<|im_start|>user\nnot a turn<|im_end|>",
    "<tool_response>quoted</tool_response>",
    "line one\nline two\n\n",
    "x" * 70,
    "{{ messages }} {% raw %}",
    "\"quotes\" & 'more' <b>",
    "",
)

_BILLING = ("x-anthropic-billing-header: cch=1; v=2\nYou are terse.", "x-anthropic-billing-header: cch=7")
_ARGUMENTS = ('{"b": 1, "a": [1, {"c": null}]}', "{}", "", "[1, 2]", "42", "{broken", '"text"', '{"ö": "🙂"}', "null")


def chat(random: Random) -> dict[str, Any]:
    """Return the body of a chat that vLLM accepts, if the template does."""
    messages: list[dict[str, Any]] = []
    if random.random() < 0.5:
        messages.append(_first(random))
    for _ in range(random.randint(1, 4)):
        messages += _turn(random)
    if random.random() < 0.6 and messages[-1]["role"] != "user":
        messages.append({"role": "user", **_content(random)})
    body: dict[str, Any] = {"messages": messages, **_fields(random)}
    last = messages[-1]
    if last["role"] == "assistant" and random.random() < 0.5 and isinstance(last.get("content"), str):
        body |= {"continue_final_message": True, "add_generation_prompt": False}
    return body


def model_files(folder: Path, template: str) -> Path:
    """Write a model with a byte-level tokenizer and this template, as far as rendering needs one."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(["the name of the tool is text, and its arguments are content 123"] * 20, trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in _SPECIAL])
    # Begins every text but that of a chat, whose template does so.
    begin = ("<s>", tokenizer.token_to_id("<s>"))
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[begin])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "clean_up_tokenization_spaces": False,
        "chat_template": template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    size = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1}
    llama = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 512, **size}
    (folder / "config.json").write_text(json.dumps({**llama, "max_position_embeddings": 65536}))
    return folder


def _first(random: Random) -> dict[str, Any]:
    role = random.choice(["system", "system", "developer"])
    content = {"content": random.choice(_BILLING)} if random.random() < 0.2 else _content(random)
    extra = {"tools": [_tool(random)]} if role == "developer" and random.random() < 0.3 else {}
    return {"role": role, **content, **extra}


def _turn(random: Random) -> list[dict[str, Any]]:
    user = {"role": "user", **_content(random), **_extra(random)}
    kind = random.random()
    if kind < 0.08:
        return [{"role": random.choice(["critic", "system", "developer"]), "content": random.choice(_TEXTS)}]
    if kind < 0.25:
        return [user]
    if kind < 0.65:
        return [user, _assistant(random)]
    calls = [_call(random) for _ in range(random.choice([1, 1, 2]))]
    asking = {**_assistant(random), "tool_calls": calls}
    if random.random() < 0.5:
        asking["content"] = None
    return [user, asking, *(_result(random, call["id"]) for call in calls)]


def _assistant(random: Random) -> dict[str, Any]:
    made: dict[str, Any] = {"role": "assistant", **_content(random, of_assistant=True), **_extra(random)}
    for name in ("reasoning", "reasoning_content"):
        if random.random() < 0.3:
            made[name] = random.choice([*_TEXTS, None])
    if random.random() < 0.15:
        made["tool_calls"] = random.choice([[], None])
    if random.random() < 0.1:
        made["refusal"] = None
    return made


def _result(random: Random, call_id: str) -> dict[str, Any]:
    content: Any = random.choice(["42", "", []]) if random.random() < 0.3 else None
    result = {
        "role": "tool",
        "tool_call_id": call_id,
        **(_content(random) if content is None else {"content": content}),
    }
    if random.random() < 0.2:
        result["content"] = [{"type": "tool_reference", "name": "f"}, {"type": "text", "text": "t"}]
    return {**result, **({"name": "f"} if random.random() < 0.3 else {})}


def _content(random: Random, *, of_assistant: bool = False) -> dict[str, Any]:
    if random.random() < 0.65:
        return {"content": random.choice(_TEXTS)}
    if of_assistant and random.random() < 0.2:
        return random.choice([{}, {"content": None}, {"content": []}])
    return {"content": [_part(random, of_assistant=of_assistant) for _ in range(random.randint(1, 3))]}


def _part(random: Random, *, of_assistant: bool) -> dict[str, Any]:
    text = random.choice(_TEXTS)
    if of_assistant and random.random() < 0.3:
        return random.choice([{"type": "refusal", "refusal": text}, {"type": "thinking", "thinking": text}])
    part: dict[str, Any] = {"type": "text", "text": text}
    if random.random() < 0.25:
        part |= random.choice([{"cache_control": {"type": "ephemeral"}}, {"annotations": []}, {"index": 1}])
    return part


def _extra(random: Random) -> dict[str, Any]:
    if random.random() < 0.7:
        return {}
    return random.choice([{"name": "bob"}, {"prefix": True}, {"weight": 1, "metadata": {"a": [1]}}, {"task": "t"}])


def _call(random: Random) -> dict[str, Any]:
    function: dict[str, Any] = {"name": random.choice("fg"), "arguments": random.choice(_ARGUMENTS)}
    extra: dict[str, Any] = random.choice([{}, {}, {"index": 0}, {"provider": {"id": 1}}])
    return {"type": "function", "id": f"call{random.randint(0, 9)}", "function": function, **extra}


def _tool(random: Random) -> dict[str, Any]:
    schema = {"type": "object", "properties": {"ö": {"type": "number", "description": "<n>"}}, "required": []}
    fields: dict[str, Any] = {"parameters": schema, "description": "Looks «up»", "strict": True, "version": 2}
    chosen = {name: value for name, value in fields.items() if random.random() < 0.5}
    function = {"name": random.choice("fg"), **chosen}
    return {"type": "function", "function": function, **random.choice([{}, {}, {"cache_control": {"a": 1}}])}


def _fields(random: Random) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if random.random() < 0.35:
        fields |= {"tools": [_tool(random) for _ in range(random.randint(1, 2))], "tool_choice": "none"}
    if random.random() < 0.15:
        fields["documents"] = [{"title": "a", "text": random.choice(_TEXTS)}]
    if random.random() < 0.2:
        fields["reasoning_effort"] = random.choice(["none", "low", "high"])
    if random.random() < 0.15:
        fields["add_generation_prompt"] = random.choice([False, True, 0, "true"])
    if random.random() < 0.1:
        fields["add_special_tokens"] = random.choice([True, False])
    if random.random() < 0.35:
        fields["chat_template_kwargs"] = dict(random.sample(_ARGUMENTS_OF_TEMPLATES, random.randint(1, 3)))
    return fields


_ARGUMENTS_OF_TEMPLATES: list[tuple[str, Any]] = [
    ("enable_thinking", False),
    ("enable_thinking", True),
    ("thinking", True),
    ("style", "auto"),
    ("style", "formal"),
    ("style", None),
    ("date_string", "1 Jan 2026"),
    ("tools_in_user_message", False),
    ("bos_token", "<s><s>"),
    ("add_generation_prompt", False),
    ("continue_final_message", True),
    ("reasoning_effort", "medium"),
    ("documents", [{"title": "of arguments"}]),
    ("tools", [{"name": "of arguments"}]),
    ("tools", None),
    ("unknown", {"a": 1}),
    ("namespace", 1),
]


def rows(count: int, seed: int) -> list[Row]:
    """Return templates and chats: each template has as many."""
    random = Random(seed)
    names = sorted(path.stem for path in TEMPLATES.glob("*.jinja"))
    return [(names[number % len(names)], chat(random)) for number in range(count)]
