"""The parameters of a laboratory engine, and how long its steps take (pure).

What lives here: the values of engine_8b.toml with their limits, and the two timing formulas. What must not: scheduling
(lab_engine).
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, fields, replace
from importlib import resources
from typing import Any

from streams.errors import SettingsError

#: The engine that comparisons use unless they name another one.
DEFAULT_ENGINE = "engine_8b.toml"

_N_TERMS = 3


@dataclass(frozen=True, slots=True)
class LabEngineConfig:
    """One engine. The fields are explained in engine_8b.toml, which has the values of the reference engine."""

    block_size: int
    n_blocks: int
    max_sequences: int
    max_batched_tokens: int
    bytes_per_token: int
    prefill_ms: tuple[float, float, float]
    decode_ms: tuple[float, float, float]
    decode_ms_min: float

    def __post_init__(self) -> None:
        for name in ("block_size", "n_blocks", "max_sequences", "max_batched_tokens", "bytes_per_token"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise SettingsError(f"{name} of the engine is {value!r}; it must be a whole number of at least 1")
        for name in ("prefill_ms", "decode_ms"):
            terms = getattr(self, name)
            if len(terms) != _N_TERMS or not all(isinstance(term, int | float) for term in terms):
                raise SettingsError(f"{name} of the engine is {terms!r}; it must be three numbers")
        if self.max_batched_tokens <= self.max_sequences:
            raise SettingsError(
                "max_batched_tokens must be greater than max_sequences, or prompts might never be computed"
            )

    def slowed(self, factor: float) -> LabEngineConfig:
        """Return an engine whose steps take this many times as long."""
        (a, b, c), (d, e, f) = self.prefill_ms, self.decode_ms
        return replace(
            self,
            prefill_ms=(a * factor, b * factor, c * factor),
            decode_ms=(d * factor, e * factor, f * factor),
            decode_ms_min=self.decode_ms_min * factor,
        )

    def prefill_step_ms(self, n_tokens: int) -> float:
        """Return what computing this many prompt tokens adds to a step; 0 tokens add nothing."""
        if not n_tokens:
            return 0.0
        quadratic, linear, constant = self.prefill_ms
        return (quadratic * n_tokens + linear) * n_tokens + constant

    def decode_step_ms(self, utilisation: float) -> float:
        """Return what continuing answers adds to a step. utilisation: the share of blocks in use, 0 to 1."""
        quadratic, linear, constant = self.decode_ms
        return max(self.decode_ms_min, (quadratic * utilisation + linear) * utilisation + constant)


def engine_from_toml(text: str) -> LabEngineConfig:
    """Read an engine's parameters. Raises SettingsError."""
    try:
        values: dict[str, Any] = tomllib.loads(text)
    except tomllib.TOMLDecodeError as exc:
        raise SettingsError(f"the engine's parameters are not TOML: {exc}") from exc
    names = {field.name for field in fields(LabEngineConfig)}
    if values.keys() != names:
        wrong = ", ".join(sorted(values.keys() ^ names))
        raise SettingsError(f"the engine's parameters lack or do not have these names: {wrong}")
    for name in ("prefill_ms", "decode_ms"):
        if not isinstance(values[name], list):
            raise SettingsError(f"{name} of the engine is {values[name]!r}; it must be three numbers")
        values[name] = tuple(values[name])
    return LabEngineConfig(**values)


def default_engine() -> LabEngineConfig:
    """Return the reference engine."""
    return engine_from_toml((resources.files("streams.lab.simulation") / DEFAULT_ENGINE).read_text(encoding="utf-8"))
