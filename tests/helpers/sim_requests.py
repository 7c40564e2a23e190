"""Requests to a simulated engine's model, and its configurations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from streams.lab.engines.engine_config import EngineConfig
from streams.lab.engines.engine_messages import (
    ModelRequest,
    Output,
)
from streams.lab.engines.model import EngineModel

BLOCK = 4
FOREVER = 1e15

#: 10 ms per prefill, 1 ms per computed token and 1 ms per decode step: times that a reader can add up.
CONFIG = EngineConfig(
    block_size=BLOCK, n_blocks=64, prefill_ms_base=10.0, prefill_us_per_token=1000.0, decode_ms_per_token=1.0
)


#: Answers outlast several prefills, so that requests overlap and compete for the last blocks.
CROWDED = replace(CONFIG, prefill_ms_base=2.0, decode_ms_per_token=7.0)

#: Prompts from a tree of few tokens, so that prefixes are shared, blocks end anywhere and duplicates are common.
prompts = st.lists(st.integers(0, 1), min_size=1, max_size=20)

requests_ = st.lists(
    st.tuples(st.integers(0, 60), prompts, st.integers(1, 12), st.integers(0, 1)), min_size=1, max_size=14
)
Asked = list[tuple[int, list[int], int, int]]


def pack(tokens: Sequence[int]) -> bytes:
    return np.asarray(tokens, dtype="<u4").tobytes()


def ask(request_id: str, tokens: Sequence[int], n_output: int = 1, **more: Any) -> ModelRequest:
    return ModelRequest(request_id, pack(tokens), n_output, **more)


def only(outputs: Sequence[Output], kind: type[Any]) -> list[Any]:
    return [output for output in outputs if isinstance(output, kind)]


def submit_all(model: EngineModel, asked: Asked) -> None:
    for at, (arrival, tokens, n_output, seed) in enumerate(asked):
        model.submit(float(arrival), ask(str(at), tokens, n_output, output_seed=seed))
