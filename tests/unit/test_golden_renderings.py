"""Chats are rendered as vLLM rendered them when its results were stored (tests/real/test_rendering.py)."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from streams.prompts.calls import Kind
from streams.prompts.tokenizer import ModelTokenizer
from tests.helpers.message_lists import GOLDEN, TEMPLATES, model_files


def test_stored_chats_have_the_text_that_vllm_makes_of_them(tmp_path: Path) -> None:
    """A few dozen random chats, over every template, and requests of the calls that vLLM makes chats of."""
    head, *stored = map(json.loads, GOLDEN.read_text().splitlines())
    assert head["vllm"].startswith("0.32")
    tokenizers = {
        path.stem: ModelTokenizer(model_files(tmp_path / path.stem, path.read_text()), 1 << 20)
        for path in TEMPLATES.glob("*.jinja")
    }
    for row in stored:
        rendered = tokenizers[row["template"]].render(Kind(row["call"]), row["body"])
        assert "".join(rendered.pieces) == row["text"], json.dumps(row["body"])
        assert rendered.whole
    calls = Counter(row["call"] for row in stored)
    assert min(calls[Kind.RESPONSES], calls[Kind.MESSAGES]) >= 20
    chats = [row["template"] for row in stored if row["call"] == Kind.CHAT]
    assert min(Counter(chats).values()) >= 5
    assert len(set(chats)) == len(tokenizers)
