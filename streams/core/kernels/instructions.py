"""Instructions of kernels, made of functions that emit LLVM.

What lives here: `instruction`. What must not: any instruction.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter, Signature, signature
from typing import Any

from numba import types
from numba.extending import intrinsic


def instruction(result: Any = types.int64, *arguments: Any) -> Callable[[Callable[..., Any]], Any]:
    """Make an intrinsic of a function, which kernels call like any other.

    The function gets a builder and one LLVM value per argument, and returns the value of the instruction. result,
    arguments: numba's types; types.void is the result of an instruction without a value. Without `arguments`, all of
    them are int64.
    """

    def made(emit: Callable[..., Any]) -> Any:
        parameters = list(signature(emit).parameters.values())[1:]
        kind = result(*(arguments or (types.int64,) * len(parameters)))

        def emitted(compiler: Any, builder: Any, _: Any, values: Any) -> Any:
            value = emit(builder, *values)
            return compiler.get_dummy_value() if result is types.void else value

        def typed(*_: Any) -> Any:
            return kind, emitted

        context = Parameter("typingctx", Parameter.POSITIONAL_OR_KEYWORD)
        typed.__signature__ = Signature([context, *parameters])  # type: ignore[attr-defined]
        typed.__name__, typed.__qualname__, typed.__doc__ = emit.__name__, emit.__qualname__, emit.__doc__
        typed.__module__ = emit.__module__
        return intrinsic(typed)

    return made
