"""A private or undocumented part of another package that this project uses, as data.

What lives here: what is known of such a part, and whether the installed version of its package has it. What must not:
the lists of parts (aiohttp_internals; tests have that of Faust).
"""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Internal:
    """A part of another package.

    name: within the module, with dots. parameters: of a function, without self; None for what is not called or
    overridden. An attribute that a class does not have itself is one that its constructor sets.
    """

    module: str
    name: str
    why: str
    parameters: tuple[str, ...] | None = None

    def __str__(self) -> str:
        return f"{self.module}:{self.name}"

    def problem(self) -> str | None:
        """Return what is wrong with the part in the installed version, or None."""
        try:
            owner: Any = importlib.import_module(self.module)
        except ImportError as exc:
            return f"{self} has moved: {exc}. It is used because: {self.why}"
        for name in self.name.split("."):
            part = getattr(owner, name, None)
            is_set_later = inspect.isclass(owner) and _is_set_by_constructor(owner, name)
            if not hasattr(owner, name) and not is_set_later:
                return f"{self} has moved: {name} does not exist. It is used because: {self.why}"
            owner = part
        if self.parameters is not None:
            parameters = tuple(name for name in inspect.signature(owner).parameters if name != "self")
            if parameters != self.parameters:
                return f"{self} has other parameters: {parameters}. It is used because: {self.why}"
        return None


def _is_set_by_constructor(owner: type, name: str) -> bool:
    constructors = (vars(base).get("__init__") for base in owner.__mro__)
    return any(name in made.__code__.co_names for made in constructors if inspect.isfunction(made))
