"""The modes that a comparison alternates between (pure).

What lives here: the syntax of `--mode`, and the fields of a route request that follow from it. What must not: which
modes a router has, which its answers say.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from streams.errors import SettingsError

#: The end of a mode's name with which requests wait in the router's queue, as in `kvstreams simulate`.
WITH_QUEUE = "+queue"

#: Every mode has its turn in each round. With more than these, rounds are too long to compare neighbours in time.
VARIANTS_MAX = 8


@dataclass(frozen=True, slots=True)
class Variant:
    """One mode. name: as in the report. url: of its own router, None for the common ones. queue: whether requests wait.

    override: fields of `router_config_override`.
    """

    name: str
    override: dict[str, Any] = field(default_factory=dict)
    queue: bool = False
    url: str | None = None

    @property
    def options(self) -> dict[str, Any]:
        """Fields of the route request in addition to the override."""
        return {"queue": "on"} if self.queue else {}


def parse_variants(texts: Sequence[str]) -> list[Variant]:
    """Read `[NAME=]MODE[:FIELD=VALUE...][+queue][@URL]`, at least two of them. Raises SettingsError."""
    variants = [_parse(text) for text in texts]
    names = [variant.name for variant in variants]
    if not 2 <= len(variants) <= VARIANTS_MAX:
        raise SettingsError(
            f"there are {len(variants)} modes to compare; there must be 2 to {VARIANTS_MAX}",
            remedy="Repeat --mode, for example --mode kv --mode expected-time",
        )
    if len(set(names)) < len(names):
        raise SettingsError(
            f"two modes have the same name: {', '.join(names)}", remedy="Name them: --mode first=kv --mode second=kv"
        )
    return variants


def _parse(text: str) -> Variant:
    rest, at, url = text.partition("@")
    head, colon, _ = rest.partition(":")
    name, equals, _ = head.partition("=")
    if equals:
        rest = rest[len(name) + 1 :]
    queue = rest.endswith(WITH_QUEUE)
    mode, *fields = rest.removesuffix(WITH_QUEUE).split(":")
    if not mode or (at and not url) or (equals and not name) or (colon and not all(fields)):
        raise SettingsError(f"--mode {text!r} is not [NAME=]MODE[:FIELD=VALUE][+queue][@URL]")
    override: dict[str, Any] = {"router_mode": mode}
    for assignment in fields:
        key, equals, value = assignment.partition("=")
        if not equals:
            raise SettingsError(f"{assignment!r} in --mode {text!r} is not FIELD=VALUE, as in overlap_score_weight=2")
        override[key] = _value(value)
    return Variant(name if head != name else text, override, queue, url or None)


def _value(text: str) -> float | bool | str:
    if text in ("true", "false"):
        return text == "true"
    try:
        return float(text)
    except ValueError:
        return text
